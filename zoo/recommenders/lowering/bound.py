"""Changes of results by native forms of a recommender, on rows of its log."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.graph import reference_session
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.program import ClickProgram
from zoo.recommenders.lowering.graph_reader import GraphReader
from zoo.recommenders.lowering.quantized_tables import largest_change

ROWS = 256  # whose results are compared


class OverBoundError(RequestError):
    """No form of a model is within the error bound."""


def changes_on(rows: Batch, model: ir.Model, reader: GraphReader) -> Callable[[ClickProgram], float]:
    """Computes the results of a float model on rows.

    Args:
        rows: Inputs of the model, of which the first `ROWS` rows are used.
        model: Float model.
        reader: Reader of the model.

    Returns:
        A function to the largest change of a result by a program.
    """
    few = {name: array[:ROWS] for name, array in rows.items()}
    opened = reference_session.session(model, "lowering needs")
    expected = reference_session.run(opened, {str(value.name): few[str(value.name)] for value in model.graph.inputs})
    inputs = (reader.ids, reader.numbers, reader.scales)
    ids, numbers, scales = (None if value is None else few.get(str(value.name)) for value in inputs)
    assert ids is not None

    def change(program: ClickProgram) -> float:
        means = np.zeros((len(ids), program.means), np.float32) if scales is None else scales
        return largest_change(expected, reference.run(program, ids, numbers, means))

    return change
