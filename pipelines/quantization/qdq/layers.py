"""Int8 Gemm, MatMul and Conv: why a layer stays float32, and static and dynamic quantization."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq import engine_quirks
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.scales import Array, weight_qparams

LAYERS = ("Conv", "Gemm", "MatMul")
INTEGER_LAYERS = (
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"),  # of onnx, then of onnxruntime
    *("QGemm", "QAttention", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits"),
)
SMALL = 32  # multiplications per value of a product of activations, below which int8 is no faster
INT8_ALREADY = "its weights are int8 already"


def refuse(node: ir.Node) -> str:
    """Returns why the form of a layer (not its ranges) keeps it float32, or "".

    Args:
        node: Conv, Gemm or MatMul.
    """
    if query.dequantized(node.inputs[1]) is not None:
        return INT8_ALREADY
    return {"Gemm": _refuse_gemm, "MatMul": _refuse_matmul, "Conv": _refuse_conv}[node.op_type](node)


def _refuse_gemm(node: ir.Node) -> str:
    if node.attributes.get_int("transA", 0):
        return "its input is transposed (transA)"
    if any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta")):
        return "alpha or beta is not 1"
    weight = query.constant(node.inputs[1])
    if weight is None:
        return "its weights are not constant"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = query.constant(node.inputs[2])
        columns = weight.shape[0 if query.is_transposed(node) else 1]
        if bias is None or bias.shape not in ((columns,), (1, columns)):
            return "its bias is not a constant row"
    return ""


def _refuse_matmul(node: ir.Node) -> str:
    weight = query.constant(node.inputs[1])
    if weight is not None and weight.ndim < 2:
        return "its weights are a vector"
    if query.constant(node.inputs[0]) is not None:
        return "its first factor is constant"
    return ""


def _refuse_conv(node: ir.Node) -> str:
    constant = query.constant(node.inputs[1]) is not None
    if not constant or (len(node.inputs) > 2 and node.inputs[2] is not None and query.constant(node.inputs[2]) is None):
        return "its weights or bias are not constant"
    return ""


def integer_layers(model: ir.Model) -> str:
    """Describes the layers of a model that is quantized already.

    Args:
        model: Model.

    Returns:
        Count and type of its integer layers, such as "3 QLinearConv, 1 QGemm"; "" if it has none, or layers with float
        weights besides.
    """
    counts: dict[str, int] = {}
    for node in model.graph:
        weight = node.inputs[1] if node.op_type in (*LAYERS, "ConvTranspose") and len(node.inputs) > 1 else None
        if query.constant(weight) is not None:
            return ""
        producer = query.producer(weight)
        stored = producer is not None and producer.op_type == "DequantizeLinear"
        if stored and producer is not None and producer.inputs[0] is not None and producer.inputs[0].dtype is not None:
            kind = f"{node.op_type} of {producer.inputs[0].dtype.name.lower()} weights"
        elif node.op_type in INTEGER_LAYERS:
            kind = node.op_type
        else:
            continue
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def activation_inputs(node: ir.Node) -> list[int]:
    """Returns the indices of a layer's inputs that are activations: 0, and 1 of a MatMul of two activations.

    Args:
        node: Conv, Gemm or MatMul.
    """
    return [0, 1] if node.op_type == "MatMul" and query.constant(node.inputs[1]) is None else [0]


def small_product(node: ir.Node, ranges: Mapping[str, TensorRange]) -> bool:
    """Returns whether a product of two activations is too small to be faster in int8.

    [m, k] x [k, n] takes m n k multiplications and moves m k + k n + m n values, which int8 quantizes besides. Timed on
    Zen 4 (with and without bfloat16), attention of fewer than `SMALL` multiplications per value, as of 128 positions
    and 32 channels, is as fast or faster in float in OpenVINO and ONNX Runtime; at 50, int8 is faster.

    Args:
        node: Operator.
        ranges: Calibrated ranges, with the numbers of observed values. With k and n unknown, no product is small.
    """
    if node.op_type != "MatMul" or len(activation_inputs(node)) < 2:
        return False
    x, w, y = (*node.inputs, node.outputs[0])
    counts = [ranges[str(value.name)].count if value is not None and value.name in ranges else 0 for value in (x, w, y)]
    if not all(counts):
        return False
    *_, inner = query.dimensions(x) or [None]
    *_, rows, columns = query.dimensions(w) or [None, None]
    if inner := inner or rows:
        multiplications = counts[2] * inner
    elif columns:
        multiplications = counts[0] * columns
    else:
        return False
    return multiplications < SMALL * sum(counts)


def quantize_layer(inserter: QdqInserter, node: ir.Node) -> None:
    """Makes a layer int8: Q/DQ pairs on activations, per-channel int8 weights, int32 bias.

    Scales run along the output channels; batched weights of a MatMul get one scale per tensor.

    Args:
        inserter: Inserter of the graph.
        node: Layer that `refuse` accepts.
    """
    engine_quirks.subsample_before_pointwise_conv(node, inserter.subsampled, inserter.ranges, inserter.taken)
    x_scale = inserter.quantize_input(node)
    if len(activation_inputs(node)) > 1:
        inserter.quantize_second_factor(node)
        return
    engine_quirks.gemm_of_matmul_before_add(node)
    weight = query.constant(node.inputs[1])
    assert weight is not None
    axis: int | None = 1
    if node.op_type == "Conv" or query.is_transposed(node):
        axis = 0
    elif weight.ndim != 2:
        axis = None
    inserter.quantize_weight(node, axis, x_scale)


def quantize_layer_dynamically(inserter: QdqInserter, node: ir.Node) -> str:
    """Makes a Gemm or MatMul with a constant matrix int8 with input qparams computed at run time.

    x_q, s_x, z_x = DynamicQuantizeLinear(x) over the whole batch, y = float(MatMulInteger(x_q, W_q, z_x)) s_x s_w + b,
    with per-channel int8 weights. onnxruntime runs this as one operator.

    Args:
        inserter: Inserter of the graph.
        node: Operator; it is replaced.

    Returns:
        Why the operator cannot be quantized dynamically, or "".
    """
    weight = query.constant(node.inputs[1]) if node.op_type in ("Gemm", "MatMul") else None
    if weight is None or weight.ndim != 2:
        return "only a product with a constant matrix is quantized at run time"
    if why := refuse(node):
        return why
    graph, taken, x, y = inserter.graph, inserter.taken, node.inputs[0], node.outputs[0]
    assert x is not None
    if node.op_type == "Gemm" and query.is_transposed(node):
        weight = np.ascontiguousarray(weight.T)
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value | None], stem: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
        """Append a node; its output."""
        nodes.append(edit.node(op, inputs, stem, dtype=dtype, taken=taken, **attributes))
        return nodes[-1].outputs[0]

    if x.name not in inserter.dynamic:
        quantize = ir.node("DynamicQuantizeLinear", [x], name=f"{x.name}.dynamic", num_outputs=3)
        kinds = (("bytes", ir.DataType.UINT8), ("scale", ir.DataType.FLOAT), ("zero", ir.DataType.UINT8))
        for value, (kind, dtype) in zip(quantize.outputs, kinds, strict=True):
            value.name, value.type = f"{quantize.name}.{kind}", ir.TensorType(dtype)
        inserter.dynamic[str(x.name)] = quantize
        nodes.append(quantize)
    x_q, x_scale, x_zero = inserter.dynamic[str(x.name)].outputs
    scale, quantized = weight_qparams(weight, 1, inserter.weight_bits, clip=inserter.clip_weights)
    stem, parts = str(y.name), dict[str, Array](quantized=quantized, scale=scale)
    w_q, w_scale = inserter.initializers(node, str(node.inputs[1].name), parts).values()  # type: ignore[union-attr]
    value = add("MatMulInteger", [x_q, w_q, x_zero], f"{stem}.integer", ir.DataType.INT32)
    nodes[-1].name = node.name
    value = add("Cast", [value], f"{stem}.float", ir.DataType.FLOAT, to=int(ir.DataType.FLOAT))
    y_scale = add("Mul", [x_scale, w_scale], f"{stem}.step", ir.DataType.FLOAT)
    value = add("Mul", [value, y_scale], f"{stem}.scaled", ir.DataType.FLOAT)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        value = add("Add", [value, node.inputs[2]], f"{stem}.biased", ir.DataType.FLOAT)
    value.shape = y.shape
    inserter.helpers |= {str(part.name) for part in nodes if part.op_type != "MatMulInteger"}
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [y], [value])
    return ""
