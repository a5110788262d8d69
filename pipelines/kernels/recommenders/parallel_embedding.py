"""Reads the `ParallelEmbedding` graphs that version 0.2 wrote as native.onnx.

Such a graph is one operator, the first layer folded into the embedding tables, and int8 linear layers in QDQ form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.recommenders.operators import COLUMNS, LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import Dense, LookupSum, Mixed, Numbers, Step, Total

PARALLEL_EMBEDDING = "ParallelEmbedding"
# inputs of the operator after ids and numbers
INPUTS = ("table", "columns", "offsets", "rows", "weight", "scale", "bias", "number_scale", "wide")


def program_of(node: ir.Node) -> ClickProgram:
    """Lowers a `ParallelEmbedding` node and the layers after it to a program with the same integers.

    Numbers beyond twice their calibrated range count as twice its end, where version 0.2 took its end.

    Args:
        node: The operator. Inputs: ids int [n, C], numbers float32 [n, M] or none, then the arrays of `INPUTS`
            (`wide` may be missing).

    Returns:
        The program, whose output is float32 [n, 1].

    Raises:
        RequestError: The node lacks an array, or the layers after it are not int8 layers down to one float.
    """
    name = node.name or "?"
    constants = dict(zip(INPUTS, map(query.constant, node.inputs[2:]), strict=False))
    arrays = {key: np.ascontiguousarray(array) for key, array in constants.items() if array is not None}
    if missing := [key for key in INPUTS if key not in arrays and key != "wide"]:
        raise RequestError(f"the operator {name} has no constant {missing[0]}; build the model again")
    chain = _dense_layers(node)
    if chain is None:
        raise RequestError(f"the layers after {name} are not int8 alone; build the model again")
    layers, sigmoid = chain
    columns, offsets, rows = arrays["columns"], arrays["offsets"], arrays["rows"]
    table, weight, width = arrays["table"], arrays["weight"], arrays["scale"].size
    padding = -width % COLUMNS
    numbers = len(weight)
    sizes = [width, *(layer.weight.shape[1] for layer in layers)]
    slots = [("u1", size) for size in sizes[:-1]] + [("f4", 1), ("f4", 1)]
    last, total = len(sizes) - 1, len(sizes)
    steps: list[Step] = []
    terms = [(last, 1.0)]
    if "wide" in arrays:
        slots.append(("f4", 1))
        terms.append((len(slots) - 1, 1.0))
        steps.append(LookupSum(len(slots) - 1, arrays["wide"], columns, offsets, rows))
    if numbers:
        slots.append(("i2", numbers))
        own = np.arange(numbers, dtype=np.int32)
        steps.append(Numbers(len(slots) - 1, 0, own, arrays["number_scale"]))
    steps.append(
        Mixed(
            x=len(slots) - 1 if numbers else -1,
            first=0,
            weight=np.pad(weight, ((0, 0), (0, padding))),
            scale=np.pad(arrays["scale"], (0, padding)),
            bias=np.pad(arrays["bias"], (0, padding)),
            outs=((0, width, True),),
            columns=columns,
            offsets=offsets,
            rows=rows,
            shift=node.attributes.get_int("shift", -1),
            table=table,
        )
    )
    steps += [Dense(place, place + 1, layer) for place, layer in enumerate(layers)]
    steps.append(Total(total, tuple(terms), 0.0, sigmoid))
    return ClickProgram(_rows(node, columns, rows), numbers, 0, tuple(slots), tuple(steps), (total,))


def _rows(node: ir.Node, columns: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int32]:
    """How many rows an id of each column chooses from, int32 [C]."""
    ids = node.inputs[0]
    width = ids.shape[1] if ids is not None and ids.shape is not None else None
    counts = np.zeros(width if isinstance(width, int) else int(columns.max()) + 1, np.int32)
    for column, count in zip(columns, rows, strict=True):
        counts[column] = min(counts[column] or count, count)
    return counts


def _dense_layers(first: ir.Node) -> tuple[Sequence[LinearLayer], bool] | None:
    """The int8 layers from a `ParallelEmbedding` node down to the graph's only output, and whether a sigmoid ends them.

    Follows DequantizeLinear -> Gemm or MatMul with int8 weights -> (Relu) -> QuantizeLinear, again and again; the last
    layer gives one float, to which the operator's wide sum, if it has one, is added. None for any other graph.
    """
    value = first.outputs[0]
    layers: list[LinearLayer] = []
    while (dequantize := _only(value, "DequantizeLinear")) is not None:
        if (dense := _dense_layer(dequantize)) is None:
            return None
        layer, value = dense
        layers.append(layer)
        if layer.zero_point is None:
            break
    if not layers or layers[-1].zero_point is not None or layers[-1].weight.shape[1] != 1:
        return None
    if len(first.outputs) > 1:
        add = _only(value, "Add")
        if add is None or _only(first.outputs[1], "Add") is not add:
            return None
        value = add.outputs[0]
    sigmoid = _only(value, "Sigmoid")
    if sigmoid is not None:
        value = sigmoid.outputs[0]
    main = first.graph
    return (layers, sigmoid is not None) if isinstance(main, ir.Graph) and list(main.outputs) == [value] else None


def _dense_layer(dequantize: ir.Node) -> tuple[LinearLayer, ir.Value] | None:
    """The int8 layer that reads a DequantizeLinear, and its result: quantized, or float of the last layer."""
    dense = _only(dequantize.outputs[0], "Gemm") or _only(dequantize.outputs[0], "MatMul")
    if dense is None or dense.inputs[0] is not dequantize.outputs[0] or (sums := _sums(dequantize, dense)) is None:
        return None
    weight, bias, scale = sums
    relu = _only(dense.outputs[0], "Relu")
    last = _only((dense if relu is None else relu).outputs[0], "QuantizeLinear")
    try:
        if last is None:
            return LinearLayer(weight, bias, scale.astype(np.float32)), dense.outputs[0]
        y_scale, y_zero = map(query.constant, last.inputs[1:3])
        if y_scale is None or y_zero is None or y_scale.size != 1 or y_zero.dtype != np.uint8:
            return None
        zero = int(y_zero.item())
        scaled = (scale / np.float64(y_scale.item())).astype(np.float32)
        return LinearLayer(weight, bias, scaled, zero, 0 if relu is None else zero), last.outputs[0]
    except RequestError:  # beyond 32 bits
        return None


def _sums(
    dequantize: ir.Node, dense: ir.Node
) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.float64]] | None:
    """Weights [K, N] and bias [N] of a layer's integer sums over uint8 inputs, and the scale of the sums [N]."""
    x_scale, x_zero = map(query.constant, dequantize.inputs[1:3])
    weight = _symmetric(dense.inputs[1])
    if weight is None or x_scale is None or x_zero is None or x_scale.size != 1:
        return None
    if any(dense.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta")):
        return None
    if dense.attributes.get_int("transA", 0) != 0:
        return None
    w, w_scale = weight
    if query.is_transposed(dense):
        w = w.T
    scale = np.float64(x_scale) * w_scale.astype(np.float64)
    bias = _symmetric(dense.inputs[2]) if len(dense.inputs) > 2 else (np.zeros(w.shape[1], np.int32), scale)
    if w.dtype != np.int8 or w_scale.size not in (1, w.shape[1]) or bias is None or bias[0].size != w.shape[1]:
        return None
    if not np.allclose(bias[1], scale, rtol=1e-5, atol=0):  # not the scale of the sums
        return None
    b = bias[0].ravel().astype(np.int64) - int(x_zero) * w.astype(np.int64).sum(axis=0)
    if np.abs(b).max() >= 2**31:
        return None
    return w, b.astype(np.int32), np.broadcast_to(scale, w.shape[1])


def _only(value: ir.Value, kind: str) -> ir.Node | None:
    """The one reader of `value`, where it is of this type."""
    user = query.sole_user(value)
    return user if user is not None and user.op_type == kind else None


def _symmetric(value: ir.Value | None) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """(integers, scale) of a constant behind a DequantizeLinear with zero point 0."""
    parts = query.dequantized(value)
    return None if parts is None or (parts[2] is not None and parts[2].any()) else parts[:2]
