"""Order of the units of hidden layers by how often they are nonzero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.quantization.calibration.table import CalibrationTable
from zoo.recommenders.lowering.expressions import Expression, Linear
from zoo.recommenders.lowering.graph_reader import GraphReader

SAMPLES = 64  # random ones, to learn which units of hidden layers are seldom active, and what tables change


class Samples(NamedTuple):
    """Inputs of a program: ids int32 [n, C], numbers float32 [n, M] or None, scales float32 [n, B]."""

    ids: NDArray[Any]
    numbers: NDArray[Any] | None
    scales: NDArray[Any]


def random_samples(
    program: ClickProgram, reader: GraphReader, table: CalibrationTable, count: int = SAMPLES
) -> Samples:
    """Draws samples: uniform row numbers, and numbers within their calibrated range.

    Args:
        program: The program.
        reader: Reader of the graph.
        table: Activation ranges.
        count: Number of samples.
    """
    generator = np.random.default_rng(0)
    ids = generator.integers(0, np.maximum(program.rows, 1), (count, program.rows.size), np.int32)
    numbers = None
    if reader.numbers is not None:
        seen = table.tensors.get(str(reader.numbers.name))
        low, high = (0.0, 1.0) if seen is None else (seen.low, seen.high)
        numbers = generator.uniform(low, high, (count, program.numbers)).astype(np.float32)
    return Samples(ids, numbers, generator.uniform(0, 1, (count, program.means)).astype(np.float32))


def samples_of(program: ClickProgram, reader: GraphReader, rows: Batch, count: int) -> Samples:
    """Returns the first rows as samples of a program.

    Args:
        program: The program.
        reader: Reader of the graph.
        rows: Inputs of the graph.
        count: Number of rows at most.
    """
    inputs = (reader.ids, reader.numbers, reader.scales)
    ids, numbers, scales = (None if value is None else rows[str(value.name)][:count] for value in inputs)
    assert ids is not None
    return Samples(ids, numbers, np.zeros((len(ids), program.means), np.float32) if scales is None else scales)


def by_activity(
    program: ClickProgram, hidden: Mapping[Linear, int], samples: Samples
) -> dict[Expression, NDArray[Any]]:
    """Sorts the units of hidden layers by how often they are nonzero, on random samples.

    Neighbouring zeros can then be skipped by the kernels, which test two or four units at once.

    Args:
        program: Program with the layers in their original order.
        hidden: Buffer slot of every hidden layer.
        samples: Random samples.

    Returns:
        Order of the units of every layer, int64 [width]; most active units first.
    """
    buffers = reference.buffers(program, *samples)
    return {x: np.argsort(-(buffers[slot] > 0).sum(axis=0), kind="stable") for x, slot in hidden.items()}
