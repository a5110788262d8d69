"""Layers of an int8 model computed in float32, to tell what their quantization costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import onnx
import onnx_ir as ir

from pipelines.core.progress import progress
from pipelines.graph import edit, query, reference_session
from pipelines.quantization.algorithms.channel_groups import outputs_first
from pipelines.quantization.algorithms.weight_rounding import Weights
from pipelines.quantization.calibration.calibrate import Observation
from pipelines.quantization.calibration.compared_outputs import OutputSqnr
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import equalized
from pipelines.quantization.qdq import layers
from pipelines.quantization.qdq.scales import Array
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

FLOAT_SHARE = 0.25  # maximum share of the multiplications in float32
SENSITIVE = 0.05  # minimum gain of a layer in float32, in dB
GAIN = 10.0  # minimum gain in dB for all multiplications; that of a layer is its share


def restore_weights(int8: ir.Model, float_model: ir.Model) -> None:
    """Restores the float weights of all layers of an int8 model, in place; activations stay int8.

    Args:
        int8: Int8 model; it is changed.
        float_model: Float model that was quantized, equalized as it was.
    """
    originals = _float_weights(float_model)
    restored: dict[ir.Value, ir.Value] = {}  # layers share what they shared
    taken = query.used_names(int8.graph)
    for node in int8.graph:
        weights = Weights.of(node) if node.op_type in layers.LAYERS else None
        original = originals.get(str(node.name))
        exact = query.constant(original)
        if weights is None or original is None or exact is None or exact.shape != weights.integers.shape:
            continue
        if original not in restored:
            restored[original] = edit.initializer(int8.graph, f"{node.outputs[0].name}.exact", exact, taken)
        node.replace_input_with(1, restored[original])


class FloatLayers:
    """Sessions of an int8 model with some layers in float32: their weights, and their inputs where quantized for them.

    The model is serialized once, and a session needs a copy of the protobuf with other inputs of a few nodes.
    Quantizing anew with `keep_float` gives about the same model, and takes several times as long.

    Args:
        metric: SQNR that the sessions are opened for.
        int8: Int8 model.
        float_model: Float model that was quantized, equalized as it was.
        names: Names of the layers.
    """

    def __init__(self, metric: OutputSqnr, int8: ir.Model, float_model: ir.Model, names: Collection[str]) -> None:
        cut = metric.cut(int8)
        self._metric, self._serialized = metric, reference_session.Serialized.of(cut)
        originals = _float_weights(float_model)
        self._edits: dict[str, dict[int, str | Array]] = {}
        self._nodes = {node.name: at for at, node in enumerate(self._serialized.proto.graph.node)}
        for node in cut.graph:
            if node.name in names:
                self._edits[str(node.name)] = _float_inputs(node, originals)

    def sqnr(self, kept: Collection[str], batches: slice) -> float:
        """Computes the SQNR with layers in float32.

        Args:
            kept: Names of the layers.
            batches: Batches to use.

        Returns:
            SQNR in dB.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self._serialized.proto)
        for name in kept:
            node = proto.graph.node[self._nodes[name]]
            for at, x in self._edits[name].items():
                if not isinstance(x, str):
                    proto.graph.initializer.append(onnx.numpy_helper.from_array(x, x := f"{node.output[0]}.exact"))
                node.input[at] = x
        session = self._metric.session(reference_session.Serialized(proto, self._serialized.tables))
        return self._metric.of(session, batches)


def _float_weights(float_model: ir.Model) -> dict[str, ir.Value | None]:
    """Returns the weights of the layers of a float model, by layer."""
    return {
        str(node.name or node.outputs[0].name): node.inputs[1]
        for node in float_model.graph
        if node.op_type in layers.LAYERS
    }


def _float_inputs(node: ir.Node, originals: Mapping[str, ir.Value | None]) -> dict[int, str | Array]:
    """Returns the names of the float inputs of a layer of an int8 model, or its float weights, by position."""
    found: dict[int, str | Array] = {}
    for at, x in enumerate(node.inputs):
        dequantize = x.producer() if x is not None else None
        quantized = (
            dequantize.inputs[0] if dequantize is not None and query.is_op(dequantize, "DequantizeLinear") else None
        )
        quantize = quantized.producer() if quantized is not None else None
        if quantize is not None and query.is_op(quantize, "QuantizeLinear") and quantize.inputs[0] is not None:
            found[at] = str(quantize.inputs[0].name)
    weights, exact = Weights.of(node), query.constant(originals.get(str(node.name)))
    if weights is not None and exact is not None and exact.shape == weights.integers.shape:
        found[1] = exact
    return found


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


def leave_float(
    model: ir.Model,
    recipe: QuantRecipe,
    table: CalibrationTable,
    metric: OutputSqnr,
    observation: Observation,
    sqnr: float,
    goal: float,
    thorough: bool = True,
    measured: int = 1,
) -> CalibrationTable:
    """Keeps the layers of largest error per multiplication in float32 until an SQNR is reached.

    At most `FLOAT_SHARE` of the multiplications become float32, each layer for a gain of at least `SENSITIVE`, and of
    `GAIN` times its share of the multiplications. The gain of a layer on its own is measured on the first batches.

    Args:
        model: Float model.
        recipe: Quantization options.
        table: Calibration table of `model`.
        metric: SQNR of int8 models on held-out samples.
        observation: Observation of `model`, which counts multiplications.
        sqnr: SQNR of `table` by `metric`, in dB.
        goal: SQNR to reach, in dB.
        thorough: Evaluate every layer with the layers before it on all batches; otherwise only those that also gain on
            the batches after the first ones.
        measured: Number of the first batches.

    Returns:
        `table` with `keep_float`.
    """
    int8, report = quantize(model, recipe, table)
    scaled = equalized(model, table.equalization, table.smoothing, table.splitting)
    counted = multiplications(model, observation)
    names = [each.name for each in report.operators if each.precision == "int8" and each.name in counted]
    total = sum(counted[each] for each in names)
    trials = FloatLayers(metric, int8, scaled, names)
    first, others = slice(measured), slice(measured, measured + max(measured, 2))
    second = others if metric.batches > measured else first
    base, gains = trials.sqnr((), first), {}
    with progress("measuring layers in int8", len(names)) as advance:
        for name in names:
            gains[name] = trials.sqnr((name,), first) - base
            advance(1)
    kept: dict[str, str] = {}
    room, before = FLOAT_SHARE * total, trials.sqnr((), second)
    for name in sorted(names, key=lambda each: -gains[each] / counted[each]):
        least = max(SENSITIVE, GAIN * counted[name] / total)
        if gains[name] < least or counted[name] > room or sqnr >= goal:
            continue
        more = kept | {name: f"int8 costs {gains[name]:.1f} dB of SQNR here"}
        if not thorough and trials.sqnr(more, second) < before + least:
            continue
        found = metric(quantize(model, recipe, replace(table, keep_float=more))[0])
        if found > sqnr + least:
            kept, sqnr, room, before = more, found, room - counted[name], trials.sqnr(more, second)
    return replace(table, keep_float=kept)
