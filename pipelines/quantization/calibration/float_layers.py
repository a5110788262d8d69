"""Layers of an int8 model computed in float32, to tell what their quantization costs."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.algorithms.channel_groups import outputs_first
from pipelines.quantization.algorithms.weight_rounding import Weights
from pipelines.quantization.calibration.calibrate import Observation
from pipelines.quantization.qdq import layers


def restore_weights(int8: ir.Model, float_model: ir.Model, name: str | None = None) -> None:
    """Restores the float weights of layers of an int8 model, in place; activations stay int8.

    Args:
        int8: Int8 model; it is changed.
        float_model: Float model that was quantized, equalized as it was.
        name: Name of the layer; None for all layers.
    """
    originals = {
        str(node.name or node.outputs[0].name): node.inputs[1]
        for node in float_model.graph
        if node.op_type in layers.LAYERS
    }
    restored: dict[ir.Value, ir.Value] = {}  # layers share what they shared
    for node in int8.graph:
        if name is not None and node.name != name:
            continue
        weights = Weights.of(node) if node.op_type in layers.LAYERS else None
        original = originals.get(str(node.name))
        exact = query.constant(original)
        if weights is None or original is None or exact is None or exact.shape != weights.integers.shape:
            continue
        if original not in restored:
            restored[original] = edit.initializer(int8.graph, f"{node.outputs[0].name}.exact", exact)
        node.replace_input_with(1, restored[original])


def with_float_layer(int8: ir.Model, float_model: ir.Model, name: str) -> ir.Model:
    """Copies an int8 model with one layer in float32: its weights, and its inputs where they are quantized for it.

    Quantizing anew with `keep_float` gives about the same model, and takes several times as long.

    Args:
        int8: Int8 model.
        float_model: Float model that was quantized, equalized as it was.
        name: Name of the layer.

    Returns:
        The copy.
    """
    copy = int8.clone()
    restore_weights(copy, float_model, name)
    node = next(node for node in copy.graph if node.name == name)
    for at, x in enumerate(node.inputs):
        dequantize = x.producer() if x is not None else None
        quantized = (
            dequantize.inputs[0] if dequantize is not None and query.is_op(dequantize, "DequantizeLinear") else None
        )
        quantize = quantized.producer() if quantized is not None else None
        if quantize is not None and query.is_op(quantize, "QuantizeLinear"):
            node.replace_input_with(at, quantize.inputs[0])
    return copy


def multiplications(model: ir.Model, observation: Observation) -> dict[str, int]:
    """Counts the multiplications of layers with constant weights.

    Args:
        model: Float model.
        observation: Observation of `model`.

    Returns:
        {layer: multiplications on all samples of `observation`}.
    """
    counted = {}
    for node in model.graph:
        weight = query.constant(node.inputs[1]) if node.op_type in layers.LAYERS else None
        seen = observation.histograms.get(str(node.outputs[0].name))
        if weight is not None and weight.ndim > 1 and seen is not None:
            batched = node.op_type == "MatMul" and weight.ndim > 2
            channels = weight.shape[-1] if batched else outputs_first(node).shape[0]
            counted[str(node.name or node.outputs[0].name)] = seen.count * weight.size // channels
    return counted
