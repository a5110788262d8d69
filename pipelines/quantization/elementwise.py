"""What lies between layers: additions, products, pools, joins and activations of bytes.

Such an operator is int8 where what it reads is bytes anyway and what it gives is read, further down, by an int8
operator: then all of the way stays bytes. The last ones before an output therefore stay float.
"""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization import layers
from pipelines.quantization.qdq import Pairs
from pipelines.quantization.quantize_early import moves
from pipelines.quantization.scales import given

COMPUTES = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "ReduceMean", "Sigmoid", "LeakyRelu")
# computed in float between bytes by onnxruntime, and so between int8 operators worth bytes at either end
FRIENDS = ("Relu", "Clip", "HardSwish", "HardSigmoid", "Tanh", "Elu", "Gelu", "PRelu", "Mish", "Softplus", "Erf")


def activations(node: ir.Node) -> list[int]:
    """Which inputs are activations."""
    if node.op_type in layers.LAYERS:
        return layers.activations(node)
    if node.op_type in ("Add", "Mul", "Concat"):
        return [index for index, value in enumerate(node.inputs) if query.constant(value) is None]
    return [0]


def refuse(node: ir.Node) -> str:
    """Why an operator of `COMPUTES` cannot be int8, "" where it can: its form."""
    data = node.inputs if node.op_type in ("Add", "Mul", "Concat") else node.inputs[:1]
    if any(value is None or value.dtype != ir.DataType.FLOAT for value in data):
        return "it is no float arithmetic"
    if node.op_type == "ReduceMean" and not _over_image(node):
        return "its mean is not over height and width"
    if node.op_type in ("Add", "Mul") and len(activations(node)) == 1:
        source = data[activations(node)[0]].producer()  # type: ignore[union-attr]
        if source is not None and source.op_type in ("MatMul", "Gemm"):
            return "engines make it part of the product before it"
    return "" if activations(node) else "it is constant"


def choose(main: ir.Graph, chosen: set[ir.Node]) -> dict[ir.Node, str]:
    """Add to the int8 layers `chosen` every operator between them that can be int8 too; returns why others cannot, per
    node.

    chosen: int8 layers, and the candidates of `COMPUTES`: those that turn out not to lie between int8 operators are
    taken out.
    """
    reasons: dict[ir.Node, str] = {}
    while True:
        reasons_now = {
            node: why
            for node in main
            if node in chosen and node.op_type in COMPUTES and (why := _outside(node, chosen))
        }
        if not reasons_now:
            return reasons
        chosen.difference_update(reasons_now)
        reasons |= reasons_now


def _outside(node: ir.Node, chosen: set[ir.Node]) -> str:
    for index in activations(node):
        value = node.inputs[index]
        assert value is not None
        read = any(
            each in chosen and each.op_type in layers.LAYERS for each in value.consumers()
        )  # so it is quantized anyway
        if not read and _source(value) not in chosen and given(value) is None:
            return f"its input {value.name} is float"
    return "" if _reaches(node.outputs[0], chosen) else "nothing after it is int8"


def _source(value: ir.Value) -> ir.Node | None:
    """The operator whose values `value` holds, behind what only moves or bends them."""
    node = value.producer()
    while node is not None and (moves(node) or _friend(node)):
        data = node.inputs[activations(node)[0]]
        node = data.producer() if data is not None else None
    return node


def _reaches(value: ir.Value, chosen: set[ir.Node]) -> bool:
    """Whether an int8 operator reads `value`, maybe behind what only moves or bends it."""
    for node, index in ((use.node, use.idx) for use in value.uses()):
        if node in chosen and index in activations(node):
            return True
        if ((moves(node) and index == 0) or _friend(node)) and _reaches(node.outputs[0], chosen):
            return True
    return False


def _friend(node: ir.Node) -> bool:
    """Whether `node` is an activation function, or adds or multiplies by a constant."""
    return node.op_type in FRIENDS or (node.op_type in ("Add", "Mul") and len(activations(node)) == 1)


def _over_image(node: ir.Node) -> bool:
    """Whether a ReduceMean is a GlobalAveragePool of [n, c, h, w]."""
    axes = query.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    found = [int(each) for each in axes.ravel()] if axes is not None else list(node.attributes.get_ints("axes", []))
    return query.rank(node.inputs[0]) == 4 and sorted(each % 4 for each in found) == [2, 3]


def convert(pairs: Pairs, node: ir.Node) -> None:
    """Make an operator of `COMPUTES` int8: Q/DQ pairs at all of its inputs (its result gets one, too: `Pairs.result`).

    A Concat whose parts nobody else reads needs none: they are quantized by the step of its result (`QuantizeEarly`).
    """
    if node.op_type == "ReduceMean":
        node = _pooled(pairs, node)
    if node.op_type == "Concat" and all(value is not None and query.sole_user(value) is node for value in node.inputs):
        return
    for index in range(len(node.inputs) if node.op_type in ("Add", "Mul", "Concat") else 1):
        if query.constant(node.inputs[index]) is None:
            pairs.activation(node, index)
        else:
            pairs.constant(node, index)


def _pooled(pairs: Pairs, mean: ir.Node) -> ir.Node:
    """ReduceMean over height and width as GlobalAveragePool, which engines have in int8, and a Flatten where the two
    axes go.
    """
    x, y = mean.inputs[0], mean.outputs[0]
    pool = edit.node("GlobalAveragePool", [x], f"{y.name}.pooled", dtype=ir.DataType.FLOAT, taken=pairs.taken)
    made = [pool]
    if not mean.attributes.get_int("keepdims", 1):
        made.append(
            edit.node("Flatten", [pool.outputs[0]], f"{y.name}.flat", dtype=ir.DataType.FLOAT, taken=pairs.taken)
        )
    made[-1].outputs[0].shape = y.shape
    pool.name = mean.name
    assert x is not None
    if len(made) > 1 and y.name in pairs.ranges:
        pairs.ranges[str(pool.outputs[0].name)] = pairs.ranges[y.name]
    ir.convenience.replace_nodes_and_values(pairs.main, mean, [mean], made, [y], [made[-1].outputs[0]])
    return pool
