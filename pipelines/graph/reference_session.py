"""onnxruntime as a reference: every optimization off, so that each operator computes what the graph says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.graph import query

LARGEST = 64  # batch size that an exporter is expected to leave in a graph


def options(quick: bool = False) -> ort.SessionOptions:
    """Session options with every optimization off; quick: on, for float graphs of which only the results count."""
    settings = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    settings.graph_optimization_level = level.ORT_ENABLE_ALL if quick else level.ORT_DISABLE_ALL
    settings.log_severity_level = 4  # errors come as exceptions
    # on a busy machine threads would wait for each other
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return settings


def session(model: ir.Model, needed_by: str, chosen: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """A session of `model`. Raises RequestError where onnxruntime cannot run it.

    needed_by: who wants it, as the error says ("calibration needs").
    """
    try:
        return ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), chosen or options(), providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"onnxruntime cannot run the model, which {needed_by}: {one_line(error)}") from error


def run(opened: ort.InferenceSession, batch: Batch, what: str = "samples") -> list[NDArray[Any]]:
    """All outputs, in order. Raises RequestError where the batch, one of `what`, does not fit."""
    try:
        outputs: list[NDArray[Any]] = opened.run(None, dict(batch))
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"the {what} do not fit the graph: {one_line(error)}") from error
    return outputs


def fix_batch(model: ir.Model) -> str:
    """Give the inputs the batch size that constants in the graph fix, as an exporter's Reshape to [1, 1001], if any.

    Returns what was found, in one line; "" where the graph takes any number of samples, or that cannot be tried. Only
    graphs with such a Reshape are run, on zeros, and only for sizes up to `LARGEST`.
    """
    inputs = [each for each in model.graph.inputs if each.name not in model.graph.initializers]
    shapes = [query.dimensions(each) or [0] for each in inputs]  # [0]: no batch to try
    targets = (query.constant(node.inputs[1]) for node in model.graph if node.op_type == "Reshape")
    sizes = {int(each[0]) for each in targets if each is not None and each.size and 0 < each[0] <= LARGEST}
    if not sizes or any(shape[0] is not None or None in shape[1:] for shape in shapes):
        return ""
    samples = [
        (str(each.name), [size or 0 for size in shape[1:]], ir.DataType(each.dtype or 1).numpy())
        for each, shape in zip(inputs, shapes, strict=True)
    ]
    quiet = options()
    opened: list[ort.InferenceSession] = []

    def fault(size: int) -> str:
        try:
            opened[:] = opened or [session(model, "finding its batch size needs", quiet)]
            run(opened[0], {name: np.zeros([size, *shape], dtype) for name, shape, dtype in samples})
        except RequestError as error:
            return str(error)
        return ""

    other = next(each for each in range(2, LARGEST + 2) if each not in sizes)
    if not (problem := fault(other)) or (size := next((each for each in sorted(sizes) if not fault(each)), 0)) == 0:
        return ""
    for value in (*inputs, *model.graph.outputs):
        if (known := query.dimensions(value)) and known[0] is None and value.shape is not None:
            value.shape = ir.Shape([size, *value.shape[1:]])
    named = re.search(r"while running (\w+) node\. Name:'([^']*)'", problem)
    return f"the graph computes only batches of {size}" + (f" ({' '.join(named.groups()).strip()})" if named else "")
