"""A quantized graph in parts: native programs, and ONNX models between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.images.native import PackedProgram
from pipelines.kernels.images.program import ImageProgram

P = TypeVar("P", ImageProgram, PackedProgram)


@dataclass(frozen=True, eq=False)
class Part(Generic[P]):
    """A part of a graph.

    Attributes:
        feeds: (input, name of the value that it is fed).
        program: The program of a native region; None for a part for ONNX Runtime.
        model: Serialized ONNX model of a part for ONNX Runtime, uint8; empty for a native region.
    """

    feeds: tuple[tuple[str, str], ...]
    program: P | None
    model: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Partition(Generic[P]):
    """A graph in parts.

    Attributes:
        inputs: (name, dtype, shape of a sample) of the graph's inputs.
        outputs: Names of the graph's outputs.
        batch: Number of samples that the graph fixes, else 0.
        parts: The parts, in the order in which they run.
        reason: Why the graph has no whole native form.
    """

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[str, ...]
    batch: int
    parts: tuple[Part[P], ...]
    reason: str
