"""Types and shapes of a graph's values, inferred by onnx."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from pipelines.graph import query

ZIP_MAP = "ZipMap"
SEQUENCES = ("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap", "SplitToSequence")


class _Failure(logging.Filter):
    """Keeps from the log what onnx_ir says of a failure there, and notes it: it raises nothing."""

    failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        self.failed = True
        return False


def infer_shapes(model: ir.Model) -> None:
    """Infers types and shapes of all values by onnx, in place; sequences of tensors keep their type.

    If shapes stated in the file contradict the inferred ones (edited inputs), all stated shapes within the graph are
    dropped. If inference fails for another reason, the model does not change.
    """
    if not _inferred(model):
        inner = [value for node in model.graph for value in node.outputs if not value.is_graph_output()]
        stated = [value.shape for value in inner]
        for value in inner:
            value.shape = None
        if not _inferred(model):
            for value, shape in zip(inner, stated, strict=True):
                value.shape = shape
    _keep_sequences(model.graph)


def _inferred(model: ir.Model) -> bool:
    """Whether onnx could infer all that it knows."""
    log, failure = logging.getLogger(ShapeInferencePass.__module__), _Failure()
    maps = [node for node in model.graph if node.op_type == ZIP_MAP]
    for node in maps:  # onnx would infer a map, which onnx_ir cannot read
        node.op_type = f"{ZIP_MAP} "
    log.addFilter(failure)
    try:
        ShapeInferencePass()(model)
    finally:
        log.removeFilter(failure)
        for node in maps:
            node.op_type = ZIP_MAP
    return not failure.failed


def _keep_sequences(graph: ir.Graph) -> None:
    """Give sequences their type: of one that had none onnx_ir merges the type of an element, which makes a tensor."""
    for node in graph:
        bodies = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
        for body in bodies:
            _keep_sequences(body)
        for at, value in enumerate(node.outputs):
            passed = [node.inputs[0]] if query.is_op(node, "Identity") else []
            passed += [body.outputs[at] for body in bodies] if query.is_op(node, "If") else []
            made = query.is_op(node, *SEQUENCES) or any(
                each is not None and isinstance(each.type, ir.SequenceType) for each in passed
            )
            if made and isinstance(value.type, ir.TensorType):
                value.type, value.shape = ir.SequenceType(value.type), None
