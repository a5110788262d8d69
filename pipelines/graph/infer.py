"""Types and shapes of a graph's values, inferred by onnx, or by onnxruntime for operators that onnx does not know."""

from __future__ import annotations

import logging
import re

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from pipelines.core.errors import RequestError
from pipelines.graph import query, reference_session

ZIP_MAP = "ZipMap"
LARGE = 1 << 12  # bytes of weights whose values no shape depends on
SEQUENCES = ("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap", "SplitToSequence")


class _Failure(logging.Filter):
    """Notes a failure of shape inference, which onnx_ir logs instead of raising, and removes it from the log."""

    failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        self.failed = True
        return False


def infer_shapes(model: ir.Model) -> None:
    """Infers types and shapes of all values, in place; sequences of tensors keep their type.

    onnx infers them. Results of operators of other domains (com.microsoft), which onnx cannot infer, get their types
    from an onnxruntime session.

    If shapes stated in the file contradict the inferred ones (edited inputs), all stated shapes within the graph are
    dropped. If inference fails for another reason, the model does not change.

    Args:
        model: The model, changed in place.
    """
    if not _inferred(model):
        inner = [value for node in model.graph for value in node.outputs if not value.is_graph_output()]
        stated = [value.shape for value in inner]
        for value in inner:
            value.shape = None
        if not _inferred(model):
            for value, shape in zip(inner, stated, strict=True):
                value.shape = shape
    if _ask_engine(model):
        _inferred(model)  # values downstream of them
    _keep_sequences(model.graph)


def _inferred(model: ir.Model) -> bool:
    """Infers shapes by onnx; returns whether it finished without a failure."""
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


def _ask_engine(model: ir.Model) -> bool:
    """Gives values that onnx cannot infer (operators of other domains) the types and shapes that onnxruntime infers.

    Returns whether there were any. Large weights become inputs of the session, so that they are not copied.
    """
    unknown = {
        str(value.name): value
        for node in model.graph
        for value in node.outputs
        if value.name and value.type is None and node.op_type != ZIP_MAP
    }
    if not unknown:
        return False
    copy = model.clone()
    graph = copy.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= LARGE and not value.is_graph_output():
            del graph.initializers[name]
            value.type, value.const_value = ir.TensorType(tensor.dtype), None
            value.shape = ir.Shape(tensor.shape.numpy())
            if not value.is_graph_input():
                graph.inputs.append(value)
    graph.outputs[:] = [value for node in graph for value in node.outputs if value.name in unknown]
    try:
        ports = reference_session.session(copy, "inferring its shapes needs").get_outputs()
    except RequestError:  # reported where the model is run
        return False
    for port in ports:
        kind = re.fullmatch(r"(seq\()?tensor\((\w+)\)\)?", port.type)
        if kind is None or kind[2].upper() not in ir.DataType.__members__:
            continue
        value, dtype = unknown[port.name], ir.DataType[kind[2].upper()]
        value.type = ir.SequenceType(ir.TensorType(dtype)) if kind[1] else ir.TensorType(dtype)
        if value.shape is None and port.shape and not kind[1]:  # [] for a scalar and for an unknown rank
            value.shape = ir.Shape([None if str(size).startswith("unk__") else size for size in port.shape])
    return True


def _keep_sequences(graph: ir.Graph) -> None:
    """Restores the type of sequences that had none: onnx_ir merges the tensor type of an element into it."""
    for node in graph:
        bodies = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
        for body in bodies:
            _keep_sequences(body)
        for index, value in enumerate(node.outputs):
            passed = [node.inputs[0]] if query.is_op(node, "Identity") else []
            passed += [body.outputs[index] for body in bodies] if query.is_op(node, "If") else []
            made = query.is_op(node, *SEQUENCES) or any(
                source is not None and isinstance(source.type, ir.SequenceType) for source in passed
            )
            if made and isinstance(value.type, ir.TensorType):
                value.type, value.shape = ir.SequenceType(value.type), None
