"""Weight-only quantization of operators without calibrated inputs: layers inside subgraphs, and recurrent layers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.scales import weight_qparams

RECURRENT = ("LSTM", "GRU", "RNN")
BLOCK = 32  # weights of a recurrent layer that share a scale, at most
MIN_WEIGHTS = 1024  # of smaller matrices, scales and one more operator call cost what int8 saves
NOTE = "its weights are int8, with scales per channel; it computes in float32"


LARGE = 2**19  # weights that a single row waits for

BLOCKS = -1  # in place of an axis: the last one in blocks


def subgraph_nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yields the operators in subgraphs, at any depth.

    Args:
        graph: Main graph.

    Yields:
        (operator of the main graph, operator in its subgraphs).
    """
    for node in graph:
        for attribute in node.attributes.values():
            bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
            bodies = list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else bodies
            for body in bodies:
                for inner in ir.traversal.RecursiveGraphIterator(body):
                    yield node, inner


def quantize_weights(inserter: QdqInserter) -> tuple[dict[str, str], dict[str, str]]:
    """Stores constant weights as int8: of LSTM, GRU and RNN, and of all layers inside subgraphs.

    W = s float(W_q) with s = max|W| / 127 per output channel; for recurrent layers per `BLOCK` of a row, because their
    errors recur at every step. This takes a quarter of the bytes. The graph has Casts and a Mul, which engines fold
    when they open the file; onnxruntime would compute a DequantizeLinear at every run (1.5 times the time of a small
    network). The Cast to int32 is explained in `engine_quirks.QUIRKS`. The operators compute in float32, because ranges
    in the bodies of If and Loop are not observed, and no int8 operator for a recurrent state exists in all engines. A
    weight that several operators read is stored once; weights without readers are removed.

    Args:
        inserter: Inserter of the graph.

    Returns:
        Note by changed operator, and reason by operator that stays float32.
    """
    graph = inserter.graph
    inner = [node for _, node in subgraph_nodes(graph)]
    stored: dict[tuple[int, int | None], ir.Value] = {}
    notes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for node in [*(layer for layer in graph if query.is_op(layer, *RECURRENT)), *inner]:
        places = _weights(node)
        if not places:
            continue
        name = query.label(node)
        if inserter.recipe.keeps_float(name):
            reasons[name] = "kept float by the recipe"
            continue
        weights = [(index, axis) for index, axis in places if _is_weight(node.inputs[index])]
        for index, axis in weights:
            _quantize(inserter, node, index, axis, stored)
        if weights:
            notes[name] = NOTE
        else:
            reasons[name] = f"no constant float32 weights of {MIN_WEIGHTS} or more"
    _drop_unread(graph)
    return notes, reasons


def round_weights(inserter: QdqInserter, keep_float: Container[str]) -> list[str]:
    """Rounds large weights of layers of single rows that stay float32: W = s W_q, |W_q| <= 127, s per output channel.

    Such a layer (the head of a classifier) takes as long as its weights take to be read. They stay float32 in the file,
    for all engines; native kernels of images read them as int8. Scales have mantissas of 16 bits, so that products are
    exact. The SQNR for which the calibration keeps layers float is measured with rounded weights.

    Args:
        inserter: Inserter of the graph.
        keep_float: Names of layers whose inputs and results stay float32.

    Returns:
        Names of the changed layers.
    """
    changed = []
    for node in list(inserter.graph):
        for index, axis in _weights(node) if str(node.name) in keep_float and _of_one_row(node) else ():
            value = node.inputs[index]
            array = query.constant(value) if _is_weight(value) else None
            if value is None or array is None or array.size < LARGE:
                continue
            scale, _ = weight_qparams(array, axis)
            scale = ((scale.view(np.int32) + 0xFF) & ~0xFF).view(np.float32)
            scale = scale.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
            array = np.rint(array / scale) * scale
            rounded = edit.initializer(inserter.graph, f"{value.name}.rounded", array, inserter.taken)
            node.replace_input_with(index, rounded)
            changed.append(str(node.name))
    return changed


def _of_one_row(node: ir.Node) -> bool:
    """Whether a layer has one row a sample: a Gemm, or a Conv over one window."""
    shape = node.outputs[0].shape
    one = shape is not None and len(shape) > 2 and all(size == 1 for size in shape[2:])
    return query.is_op(node, "Gemm") or (query.is_op(node, "Conv") and one)


def _weights(node: ir.Node) -> list[tuple[int, int | None]]:
    """(input, axis of its output channels, None for one scale a tensor) of an operator's weights."""
    if query.is_op(node, *RECURRENT):
        return [(1, BLOCKS), (2, BLOCKS)]  # [directions, gates x hidden, inputs or hidden]
    if query.is_op(node, "Conv"):
        return [(1, 0)]
    if query.is_op(node, "ConvTranspose"):
        return [(1, 1 if node.attributes.get_int("group", 1) == 1 else None)]
    if query.is_op(node, "Gemm"):
        return [(1, 0 if query.is_transposed(node) else 1)]
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
    """Feeds input `index` of `node` from int8 constants of the main graph, which subgraphs can read."""
    value = node.inputs[index]
    assert value is not None
    if (id(value), axis) not in stored:
        stored[id(value), axis] = _dequantized(inserter, value, axis)
    node.replace_input_with(index, stored[id(value), axis])


def _dequantized(inserter: QdqInserter, value: ir.Value, axis: int | None) -> ir.Value:
    """A weight's int8 form times its scales, at the head of the main graph."""
    graph, taken, array = inserter.graph, inserter.taken, query.constant(value)
    assert array is not None
    in_blocks = axis == BLOCKS
    rows = array.reshape(-1, _block(array.shape[-1])) if in_blocks else array
    scale, quantized = weight_qparams(rows, 0 if in_blocks else axis, inserter.weight_bits, clip=inserter.clip_weights)
    if in_blocks:
        quantized = quantized.reshape(*array.shape[:-1], -1, rows.shape[-1])
        scale = scale.reshape(*quantized.shape[:-1], 1)
    else:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    result = edit.initializer(graph, f"{value.name}.quantized", quantized, taken)
    added = []

    def add(
        op_type: str, name: str, dtype: ir.DataType, shape: Iterable[int], *others: ir.Value, **attributes: int
    ) -> None:
        nonlocal result
        inputs: list[ir.Value | None] = [result, *others]
        added.append(edit.node(op_type, inputs, f"{value.name}.{name}", dtype=dtype, taken=taken, **attributes))
        result = added[-1].outputs[0]
        result.shape = ir.Shape(shape)
        inserter.helpers.add(str(added[-1].name))

    for dtype, name in ((ir.DataType.INT32, "integers"), (ir.DataType.FLOAT, "float")):
        add("Cast", name, dtype, quantized.shape, to=int(dtype))
    add(
        "Mul",
        "weights",
        ir.DataType.FLOAT,
        quantized.shape,
        edit.initializer(graph, f"{value.name}.scale", scale, taken),
    )
    if in_blocks:
        shape = edit.initializer(graph, f"{value.name}.shape", np.array(array.shape, np.int64), taken)
        add("Reshape", "rows", ir.DataType.FLOAT, array.shape, shape)
    graph.insert_before(graph[0], added)
    return result


def _block(columns: int) -> int:
    """The largest divisor of `columns` up to `BLOCK`; all columns where that is too small to pay for its scale."""
    size = max(divisor for divisor in range(1, min(columns, BLOCK) + 1) if columns % divisor == 0)
    return size if size >= BLOCK // 4 else columns


def _drop_unread(graph: ir.Graph) -> None:
    """Removes float weights without readers from the main graph and the bodies."""
    bodies = {id(node.graph): node.graph for _, node in subgraph_nodes(graph)}
    for scope in (graph, *bodies.values()):
        for name, value in list(scope.initializers.items()):  # type: ignore[union-attr]
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del scope.initializers[name]  # type: ignore[union-attr]
        for node in list(scope):  # type: ignore[arg-type]
            if query.is_op(node, "Constant") and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                scope.remove(node, safe=True)  # type: ignore[union-attr]
