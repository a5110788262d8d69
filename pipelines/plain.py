"""onnxruntime as a plain calculator: every optimization off, so that each operator computes what the graph says; errors in one line."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines import graph
from pipelines.batches import Batch
from pipelines.errors import RequestError


def options() -> ort.SessionOptions:
    """Session options with every optimization off."""
    found = ort.SessionOptions()
    found.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found.log_severity_level = 3
    return found


def session(model: ir.Model, needed_by: str, chosen: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """Open `model`. needed_by: who wants it, as the RequestError says that comes where onnxruntime cannot run it ("calibration needs")."""
    try:
        return ort.InferenceSession(ir.to_proto(model).SerializeToString(), chosen or options(), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"onnxruntime cannot run the model, which {needed_by}: {graph.one_line(error)}") from error


def run(opened: ort.InferenceSession, batch: Batch, what: str = "samples") -> list[NDArray[Any]]:
    """All outputs, in order. Raises RequestError where the batch, one of `what`, does not fit."""
    try:
        found: list[NDArray[Any]] = opened.run(None, dict(batch))
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"the {what} do not fit the graph: {graph.one_line(error)}") from error
    return found
