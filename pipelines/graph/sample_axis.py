"""Whether the first axis of a graph's inputs is the sample axis, along which a batch may be cut."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import query

RECURRENT = ("LSTM", "GRU", "RNN")
KEEPING = (  # the first axis, from their first input or from all
    *("Relu", "Sigmoid", "Tanh", "Gelu", "Erf", "LeakyRelu", "Elu", "HardSwish", "Softplus", "Clip", "Sqrt", "Pow"),
    *("Add", "Sub", "Mul", "Div", "MatMul", "LayerNormalization", "Cast", "Identity", "Dropout", "Neg", "Exp", "Log"),
)


def is_shared(graph: ir.Graph) -> bool:
    """Returns whether the first axis of all inputs may be the sample axis.

    The result is false if an input is a scalar, if the first axes have different fixed sizes or only some have a fixed
    size, if the first axis of one input is another axis of a second one (x [time, batch, 24] and h [batch, 32]), or if
    a recurrent layer or a Scan uses a first axis as time.

    Args:
        graph: Main graph.
    """
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    shapes = [query.symbolic_shape(value) for value in inputs]
    if [] in shapes or len({shape[0] if isinstance(shape[0], int) else None for shape in shapes if shape}) > 1:
        return False
    firsts = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}
    for shape in shapes:
        elsewhere = firsts.intersection(shape[1:]) if shape else set()
        if shape and elsewhere and shape[0] not in elsewhere:
            return False
    return not _takes_time_first(graph)


def _takes_time_first(graph: ir.Graph) -> bool:
    """Whether the first axis of an input of the graph is the time of a recurrent layer or a Scan."""
    waiting: list[ir.Value | None] = []
    for node in graph:
        if query.is_op(node, *RECURRENT) and not node.attributes.get_int("layout", 0):
            waiting.append(node.inputs[0])
        elif query.is_op(node, "Scan") and not any(node.attributes.get_ints("scan_input_axes", ())):
            scanned = node.attributes.get_int("num_scan_inputs", 0)
            waiting += node.inputs[len(node.inputs) - scanned :]
    seen: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is None:
            if value.is_graph_input() and not value.is_initializer():
                return True
        elif query.is_op(producer, "Gather") and query.constant(producer.inputs[0]) is not None:
            waiting.append(producer.inputs[1])  # an embedding of [time, batch]
        elif query.is_op(producer, *KEEPING):
            first = producer.op_type in ("MatMul", "LayerNormalization")
            read = producer.inputs[:1] if first else producer.inputs
            waiting += [source for source in read if query.constant(source) is None and _same_rank(source, value)]
    return False


def _same_rank(a: ir.Value | None, b: ir.Value) -> bool:
    """Whether two values have one rank, as far as it is known."""
    ranks = query.rank(a), query.rank(b)
    return a is not None and (None in ranks or ranks[0] == ranks[1])
