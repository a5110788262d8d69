"""Weight-only quantization of what has no calibrated input: layers inside subgraphs, and recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import QdqInserter
from pipelines.quantization.scales import weight_qparams

RECURRENT = ("LSTM", "GRU", "RNN")
MIN_WEIGHTS = 1024  # of smaller matrices, scales and one more operator call cost what int8 saves
NOTE = "its weights are int8, one scale per channel; it computes in float32"


def subgraph_nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """(operator of the main graph, operator in its subgraphs), at any depth."""
    for node in graph:
        for attribute in node.attributes.values():
            bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
            bodies = list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else bodies
            for body in bodies:
                for inner in ir.traversal.RecursiveGraphIterator(body):
                    yield node, inner


def quantize_weights(inserter: QdqInserter) -> tuple[dict[str, str], dict[str, str]]:
    """Store constant weights as int8: of LSTM, GRU and RNN, and of all layers inside subgraphs.

    W = s float(W_q), s = max|W| / 127 per output channel (per row of gates over both directions): a quarter of the
    bytes. Casts and a Mul, for engines fold these when they open the file, where onnxruntime would compute a
    DequantizeLinear anew at every run (1.5 times the time of a small network); by way of int32, see
    `engine_quirks.QUIRKS`. What an operator computes stays float32,
    for ranges within the bodies of If and Loop are not observed, and a recurrent layer's state has no int8 operator
    that all engines have. A weight that several operators read is stored once, and what no operator reads any more
    goes. Returns ({operator: note} of those changed, {operator: why not} of others).
    """
    graph = inserter.graph
    inner = [node for _, node in subgraph_nodes(graph)]
    stored: dict[tuple[int, int | None], ir.Value] = {}
    notes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for node in [*(each for each in graph if query.is_op(each, *RECURRENT)), *inner]:
        places = _weights(node)
        if not places:
            continue
        name = query.label(node)
        if inserter.recipe.keeps_float(name):
            reasons[name] = "kept float by the recipe"
            continue
        found = [(index, axis) for index, axis in places if _is_weight(node.inputs[index])]
        for index, axis in found:
            _quantize(inserter, node, index, axis, stored)
        if found:
            notes[name] = NOTE
        else:
            reasons[name] = f"no constant float32 weights of {MIN_WEIGHTS} or more"
    _drop_unread(graph)
    return notes, reasons


def _weights(node: ir.Node) -> list[tuple[int, int | None]]:
    """(input, axis of its output channels, None for one scale a tensor) of an operator's weights."""
    if query.is_op(node, *RECURRENT):
        return [(1, 1), (2, 1)]  # [directions, gates x hidden, inputs or hidden]
    if query.is_op(node, "Conv"):
        return [(1, 0)]
    if query.is_op(node, "ConvTranspose"):
        return [(1, 1 if node.attributes.get_int("group", 1) == 1 else None)]
    if query.is_op(node, "Gemm"):
        return [(1, 0 if node.attributes.get_int("transB", 0) else 1)]
    if query.is_op(node, "MatMul"):
        array = query.constant(node.inputs[1])
        return [(1, None if array is None or array.ndim < 2 else array.ndim - 1)]
    return []


def _is_weight(value: ir.Value | None) -> bool:
    array = query.constant(value)
    return array is not None and array.dtype == np.float32 and array.size >= MIN_WEIGHTS


def _quantize(
    inserter: QdqInserter, node: ir.Node, index: int, axis: int | None, stored: dict[tuple[int, int | None], ir.Value]
) -> None:
    """Feed input `index` of `node` from int8 constants of the main graph, which its subgraphs see."""
    value, graph, taken = node.inputs[index], inserter.graph, inserter.taken
    array = query.constant(value)
    assert value is not None and array is not None
    if (id(value), axis) not in stored:
        scale, quantized = weight_qparams(array, axis, inserter.weight_bits, clip=inserter.clip_weights)
        scale = scale.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
        whole = edit.initializer(graph, f"{value.name}.quantized", quantized, taken)
        steps = edit.initializer(graph, f"{value.name}.scale", scale, taken)
        added, result = [], whole
        for kind, name in ((ir.DataType.INT32, "integers"), (ir.DataType.FLOAT, "float")):
            added.append(edit.node("Cast", [result], f"{value.name}.{name}", dtype=kind, taken=taken, to=int(kind)))
            result = added[-1].outputs[0]
        added.append(edit.node("Mul", [result, steps], f"{value.name}.weights", dtype=kind, taken=taken))
        for each in added:
            each.outputs[0].shape = ir.Shape(array.shape)
            inserter.helpers.add(str(each.name))
        graph.insert_before(graph[0], added)
        stored[id(value), axis] = added[-1].outputs[0]
    node.replace_input_with(index, stored[id(value), axis])


def _drop_unread(graph: ir.Graph) -> None:
    """Remove float weights that nothing reads any more, from the main graph and the bodies."""
    bodies = {id(node.graph): node.graph for _, node in subgraph_nodes(graph)}
    for each in (graph, *bodies.values()):
        for name, value in list(each.initializers.items()):  # type: ignore[union-attr]
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del each.initializers[name]  # type: ignore[union-attr]
        for node in list(each):  # type: ignore[arg-type]
            if query.is_op(node, "Constant") and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                each.remove(node, safe=True)  # type: ignore[union-attr]
