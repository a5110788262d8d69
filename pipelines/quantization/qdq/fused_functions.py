"""A form of activation functions behind int8 convolutions that OpenVINO computes as one operator with them.

ONNX Runtime has int8 convolutions with quantized results only, so a Q/DQ pair stands between a convolution and its
function. OpenVINO fuses what follows such a pair into the convolution if its zero point is 0 and one function reads it.
Here the zero point moves into the bias of the convolution, and behind the pair:

    s (Q(y) - z) = s Q'(y + s z) - s z,    Q of zero point z, Q' of zero point 0

The pair between the two operators of x sigmoid(x) is removed. ONNX Runtime computes the function in float32 then, which
takes it longer than its int8 form: YOLOv8n is 1.2 times as fast in OpenVINO, and takes 9% longer in ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.graph import edit, query
from pipelines.quantization.algorithms.bias import Bias
from pipelines.quantization.qdq.insertion import MAX_BIAS
from pipelines.quantization.qdq.scales import Array, qparams_of

FUNCTIONS = ("Sigmoid", "HardSwish", "Gelu", "Tanh", "Elu", "Mish", "LeakyRelu")


def fuse_functions(model: ir.Model) -> int:
    """Lets OpenVINO compute int8 convolutions with the activation functions behind them.

    Layers stay as they are if their result has other readers, or if int32 does not hold the bias.

    Args:
        model: Result of `quantize`; it is changed.

    Returns:
        Number of changed convolutions.
    """
    taken = query.used_names(model.graph)
    count = sum(_fuse(model.graph, node, taken) for node in list(model.graph) if node.op_type == "Conv")
    RemoveUnusedNodesPass()(model)
    return count


def _fuse(graph: ir.Graph, conv: ir.Node, taken: set[str]) -> bool:
    y = conv.outputs[0]
    quantize = query.sole_user(y)
    dequantize = query.sole_user(quantize.outputs[0]) if quantize is not None else None
    if quantize is None or dequantize is None or dequantize.op_type != "DequantizeLinear":
        return False
    qparams, x = qparams_of(quantize), dequantize.outputs[0]
    if qparams is None or qparams != qparams_of(dequantize) or qparams[1].dtype != np.uint8 or x.is_graph_output():
        return False
    readers = list(x.consumers())
    kinds = FUNCTIONS if len(readers) == 1 else ("Sigmoid",)
    function = next((node for node in readers if node.op_type in kinds), None)
    if function is None or not (len(readers) == 1 or _is_gated(x, function, readers)):
        return False
    shift = float(np.float32(qparams[0]) * np.float32(qparams[1]))
    if shift and not _raise_bias(conv, shift):
        return False
    if shift:
        _move_zero_point(graph, quantize, dequantize, shift, taken)
    if len(readers) > 1:
        _bypass_pair(function)
    return True


def _is_gated(x: ir.Value, function: ir.Node, readers: list[ir.Node]) -> bool:
    """Whether the readers of `x` are a gate and its product with `x`, with or without a pair between them."""
    product = next((node for node in readers if node is not function), None)
    if len(readers) != 2 or product is None or product.op_type != "Mul":
        return False
    user = query.sole_user(function.outputs[0])
    if user is not None and user.op_type == "QuantizeLinear":
        end = query.sole_user(user.outputs[0])
        user = query.sole_user(end.outputs[0]) if end is not None and end.op_type == "DequantizeLinear" else None
    return user is product and x in product.inputs


def _bypass_pair(function: ir.Node) -> None:
    """Removes the Q/DQ pair between a gate and its product."""
    quantize = query.sole_user(function.outputs[0])
    dequantize = query.sole_user(quantize.outputs[0]) if quantize is not None else None
    if quantize is not None and quantize.op_type == "QuantizeLinear" and dequantize is not None:
        dequantize.outputs[0].replace_all_uses_with(function.outputs[0])


def _move_zero_point(graph: ir.Graph, quantize: ir.Node, dequantize: ir.Node, shift: float, taken: set[str]) -> None:
    """Gives a pair the zero point 0, and subtracts `shift` behind it; the difference takes the name of its input."""
    y, x = quantize.inputs[0], dequantize.outputs[0]
    assert y is not None
    zero = edit.initializer(graph, f"{y.name}.no_zero_point", np.array(0, np.uint8), taken)
    constant = edit.initializer(graph, f"{y.name}.shift", np.array(-shift, np.float32), taken)
    for node in (quantize, dequantize):
        node.replace_input_with(2, zero)
    add = edit.node("Add", [x, constant], f"{y.name}.raised", dtype=ir.DataType.FLOAT, taken=taken)
    add.outputs[0].shape = x.shape
    x.replace_all_uses_with(add.outputs[0])
    add.replace_input_with(0, x)
    y.name, add.outputs[0].name = add.outputs[0].name, y.name
    graph.insert_after(dequantize, add)


def _raise_bias(conv: ir.Node, shift: float) -> bool:
    """Adds `shift` to the bias of all channels; returns False where int32 does not hold the sum.

    Channels without weights have scales of which their bias alone is a large multiple: they get larger ones.
    """
    bias = Bias.of(conv)
    if bias is None:
        return False
    present = np.zeros(len(bias.scale)) if bias.integers is None else bias.integers.astype(np.float64)
    if (large := np.abs(present + shift / bias.scale) > MAX_BIAS).any():
        factors = np.where(large, 2.0 ** np.ceil(np.log2(np.abs(present + shift / bias.scale) / MAX_BIAS)), 1.0)
        if bias.integers is None or not _enlarge_scales(conv, factors.astype(np.float32)):
            return False
        bias = Bias.of(conv)
        assert bias is not None
    bias.add(np.rint(np.full(len(bias.scale), shift) / bias.scale).astype(np.int64))
    return True


def _enlarge_scales(conv: ir.Node, factors: Array) -> bool:
    """Multiplies the scales of weights and bias by powers of 2; returns False where a channel has weights."""
    graph, (weight, bias) = conv.graph, (value.producer() for value in conv.inputs[1:3] if value is not None)
    assert isinstance(graph, ir.Graph) and weight is not None and bias is not None
    (integers, whole) = (query.constant(node.inputs[0]) for node in (weight, bias))
    assert integers is not None and whole is not None
    if integers[factors > 1].any() or query.sole_user(weight.outputs[0]) is not conv:
        return False
    for node in (weight, bias):
        scale = query.constant(node.inputs[1])
        assert scale is not None
        name = f"{conv.outputs[0].name}/{node.outputs[0].name}.larger_scale"
        node.replace_input_with(1, edit.initializer(graph, name, (scale * factors).astype(np.float32)))
    name = f"{conv.outputs[0].name}/bias.smaller"
    bias.replace_input_with(0, edit.initializer(graph, name, np.rint(whole / factors).astype(np.int32)))
    return True
