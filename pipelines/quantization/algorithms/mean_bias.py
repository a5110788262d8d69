"""Bias correction from mean inputs: makes up for the mean error of rounded weights without a run of the int8 model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.graph import edit, query, reference_session
from pipelines.quantization.algorithms.bias import Bias
from pipelines.quantization.algorithms.weight_rounding import Weights
from pipelines.quantization.calibration.table import rounded_to_float32
from pipelines.quantization.qdq.scales import Array

CORRECTED = ("Conv", "Gemm")


def mean_shifts(model: ir.Model, int8: ir.Model, samples: Iterable[Batch]) -> dict[str, tuple[float, ...]]:
    """Computes b_c += sum_k (W_ck - V_ck) E[x_k] for the float weights W and the int8 weights V of every layer.

    E[x_k] is the mean of input channel k in the float model; zeros that a convolution pads with do not count (the fast
    bias correction of NNCF; Finkelstein et al. 2019, "Fighting Quantization Bias With Bias").

    Args:
        model: Float model that was quantized, equalized as it was.
        int8: Int8 model of it, its weights rounded to nearest.
        samples: Batches, array [samples, ...] for every graph input; each runs as it is.

    Returns:
        Shift of each output channel by layer name, in units of the layer's output; see `bias.apply`.
    """
    layers = {str(node.name or node.outputs[0].name): node for node in model.graph if node.op_type in CORRECTED}
    errors: dict[str, Array] = {}
    scales: dict[str, Bias] = {}
    for node in int8.graph:
        layer = layers.get(str(node.name)) if node.op_type in CORRECTED else None
        if layer is None:
            continue
        weights, exact, bias = Weights.of(node), query.constant(layer.inputs[1]), Bias.of(node)
        if weights is None or exact is None or bias is None or exact.shape != weights.integers.shape:
            continue
        outputs_last = node.op_type == "Gemm" and not query.is_transposed(node)
        scale = weights.scale.reshape(-1, *[1] * (0 if outputs_last else exact.ndim - 1))
        difference = exact - weights.integers * scale
        errors[str(node.name)] = difference.T if outputs_last else difference.reshape(*exact.shape[:2], -1).sum(axis=2)
        scales[str(node.name)] = bias
    means = _mean_inputs(model, [layers[name] for name in errors], samples)
    shifts = {}
    for name, error in errors.items():
        x = means[str(layers[name].inputs[0].name)]  # type: ignore[union-attr]
        groups = len(x) // error.shape[1]
        products = error.reshape(groups, -1, error.shape[1]) * x.reshape(groups, 1, -1)
        shift = scales[name].quantized(products.sum(axis=2).ravel()) * scales[name].scale
        if len(shift) == len(error) and shift.any():
            shifts[name] = rounded_to_float32(shift)
    return shifts


def _mean_inputs(model: ir.Model, layers: list[ir.Node], samples: Iterable[Batch]) -> dict[str, Array]:
    """Returns the mean of the inputs of convolutions and Gemms by channel, float64 [channels], by value name."""
    names = {str(node.inputs[0].name): node.op_type for node in layers if node.inputs[0] is not None}
    if not names:
        return {}
    copy = model.clone()
    graph, taken = copy.graph, query.used_names(copy.graph)
    values = {str(value.name): value for node in graph for value in node.inputs if value is not None}
    del graph.outputs[:]
    for name, kind in names.items():
        value, op = values[name], "GlobalAveragePool" if kind == "Conv" else "Identity"
        graph.append(edit.node(op, [value], f"{name}.mean", dtype=ir.DataType.FLOAT, taken=taken))
        graph.outputs.append(graph[-1].outputs[0])
    session = reference_session.session(copy, "its correction needs", reference_session.options(quick=True, lean=True))
    totals, counts = dict.fromkeys(names, np.zeros(1)), dict.fromkeys(names, 0)
    for batch in samples:
        for name, array in zip(names, reference_session.run(session, batch), strict=True):
            rows = array.reshape(*array.shape[:2])
            totals[name] = totals[name] + rows.sum(axis=0, dtype=np.float64)
            counts[name] += len(rows)
    return {name: total / max(counts[name], 1) for name, total in totals.items()}
