"""Layer-wise correction of an int8 model on samples: GPTQ for the weights of each layer, then bias correction.

Layers are corrected from input to output, each on the outputs of the corrected layers before it.

Rounded weights and clipped ranges shift the mean of a channel, and unlike noise, a shift adds up through the layers
(Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"). The shift is measured
after the sum that the layer adds to, if any, and over positions that do not saturate (ReLU, Clip, the ends of the
quantized range), because the mean before a ReLU says little of the few values that pass it. A correction is kept only
if it lowers the channel's squared error after activation and quantization. The float model is clipped to the int8
model's ranges: biases that made up for the mean of the clipped part would shift all other values (1 dB of
MobileNet-V2's logits).
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import edit, query
from pipelines.quantization.algorithms import gptq
from pipelines.quantization.algorithms.bias import Bias
from pipelines.quantization.algorithms.weight_rounding import Weights, encode_rounding
from pipelines.quantization.calibration.layerwise import ROOM, LayerwiseRun, sample_chunks
from pipelines.quantization.calibration.table import rounded_to_float32

Array = NDArray[Any]
logger = logging.getLogger(__name__)

SECONDS = 300.0  # default time limit of the corrections
LAYERS = ("Conv", "Gemm", "MatMul")
SPENT = "the time budget was spent before it"
HARD = ("HardSwish", "HardSigmoid")  # constant below a bound; constant or the identity above
POSITIONS = 2**17  # positions per channel to measure its shift on
HELD = 2**13  # positions per channel that are held in memory; of more, the outputs are read twice


@dataclass(frozen=True)
class Correction:
    """Result of GPTQ and bias correction for one int8 layer.

    Attributes:
        name: Name of the layer.
        type: Operator type.
        weights: Number of weights that GPTQ rounded otherwise than to nearest.
        channels: Number of output channels.
        corrected: Number of channels with a corrected bias.
        sqnr_before: SQNR of the output in dB, before bias correction.
        sqnr_after: SQNR of the output in dB, after bias correction.
        reason: Why the bias was not corrected, "" if it was.
        shift: Value added to the bias of each output channel, in units of the output.
        rounding: See `weight_rounding.encode_rounding`.
    """

    name: str
    type: str
    weights: int = 0
    channels: int = 0
    corrected: int = 0
    sqnr_before: float | None = None
    sqnr_after: float | None = None
    reason: str = ""
    shift: tuple[float, ...] = ()
    rounding: str = ""


@dataclass(frozen=True)
class CorrectionReport:
    """Corrections of all int8 layers.

    Attributes:
        layers: The `Correction` of every int8 layer, in graph order.
        samples: Number of samples.
    """

    layers: tuple[Correction, ...]
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        layers = [asdict(layer) for layer in self.layers]
        for layer in layers:
            del layer["shift"], layer["rounding"]
        return {"samples": self.samples, "layers": layers}


def correct_layers(
    float_model: ir.Model,
    int8_model: ir.Model,
    samples: Iterable[Batch],
    *,
    weights: bool = True,
    seconds: float | None = None,
    room: int = ROOM,
    positions: int | None = None,
) -> tuple[ir.Model, CorrectionReport]:
    """Applies GPTQ and bias correction to an int8 model; scales do not change.

    Samples and values that later layers read are held in memory up to a limit (`layerwise.HELD`), beyond it on disk.
    Memory also holds a few samples of one layer and the Gram matrix of its inputs. Linear algebra runs in one thread,
    so that the result does not depend on their number.

    Args:
        float_model: Float model that was quantized; its layers are matched by name.
        int8_model: Int8 model; it is not changed.
        samples: Batches, array [samples, ...] for every graph input.
        weights: Whether to apply GPTQ; False is quicker.
        seconds: Time budget; layers that would exceed it stay as they are, and a warning is logged. None: no limit, so
            that the same inputs give the same model.
        room: Memory limit of one tensor in bytes, see `chunk_size`.
        positions: Maximum number of positions per channel, for GPTQ and bias correction; None: those of
            `gptq.POSITIONS` and `POSITIONS`.

    Returns:
        The corrected copy of `int8_model`, and a report on every layer.

    Raises:
        RequestError: There are no samples, or they do not fit the graph.
    """
    begin, longest = time.monotonic(), 0.0
    result = int8_model.clone()
    layers = [node for node in result.graph if _is_int8(node)]
    names = [str(layer.name) for layer in layers]
    corrections: list[Correction] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        machine.single_blas_thread(),
        progress("correcting layers", len(layers)) as advance,
    ):
        exact = LayerwiseRun(_clipped(float_model, result), names, Path(folder))
        rounded = LayerwiseRun(result, names, Path(folder))
        count = 0
        for batch in sample_chunks(float_model, samples, 0, room):
            exact.feed(batch)
            rounded.feed(batch)
            count += length(batch)
        if not count:
            raise RequestError("no samples to correct the layers on; pass at least one")
        sharing = _sharing(layers)
        for layer in layers:
            started = time.monotonic()
            if seconds is not None and started + longest > begin + seconds:
                logger.warning(
                    "the time budget of %g s sufficed to correct %d of %d layers; for the others give more "
                    "(--time-budget), or fewer samples",
                    seconds,
                    len(corrections),
                    len(layers),
                )
                left = layers[len(corrections) :]
                corrections += [Correction(str(other.name), other.op_type, reason=SPENT) for other in left]
                break
            float_layer = exact.nodes.get(str(layer.name))
            if float_layer is not None:
                exact.compute(float_layer)
            together = sharing.get(layer, [])  # [] if an earlier layer shares its weights
            rounding, changed = _gptq(together, float_layer, rounded, positions) if weights and together else ("", 0)
            rounded.compute(layer)
            correction = _correct_bias(layer, float_layer, exact, rounded, positions or POSITIONS)
            corrections.append(replace(correction, weights=changed, rounding=rounding))
            longest = max(0.5 * longest, time.monotonic() - started)  # recent layers predict the next ones
            advance(1)
    return result, CorrectionReport(tuple(corrections), count)


def _clipped(float_model: ir.Model, int8_model: ir.Model) -> ir.Model:
    """Returns the float model with its tensors clipped to the quantized ranges of the int8 model."""
    result = float_model.clone()
    main = result.graph
    values = {str(value.name): value for node in main for value in (*node.inputs, *node.outputs) if value is not None}
    taken = query.used_names(main)
    for node in int8_model.graph:
        if node.op_type != "QuantizeLinear" or node.inputs[0] is None:
            continue
        value = values.get(str(node.inputs[0].name))
        bounds = _quantized_range(node)
        if value is None or value.is_graph_output() or not np.isfinite(bounds).all():
            continue
        limits = [
            edit.initializer(main, f"{value.name}.{key}", np.asarray(bound, np.float32), taken)
            for key, bound in zip(("least", "most"), bounds, strict=True)
        ]
        clip = edit.node("Clip", [value, *limits], f"{value.name}.cut", dtype=ir.DataType.FLOAT, taken=taken)
        producer = value.producer()
        value.replace_all_uses_with(clip.outputs[0])
        clip.replace_input_with(0, value)
        if producer is None:
            main.insert_before(main[0], clip)
        else:
            main.insert_after(producer, clip)
    return result


def _is_int8(node: ir.Node) -> bool:
    """Whether `node` is a layer with constant int8 weights."""
    weight = query.dequantized(node.inputs[1]) if node.op_type in LAYERS else None
    return weight is not None and weight[0].dtype == np.int8


def _sharing(layers: Iterable[ir.Node]) -> dict[ir.Node, list[ir.Node]]:
    """Returns {first layer of shared weights: all layers that share them}."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    for layer in layers:
        if (weights := Weights.of(layer)) is not None:
            groups.setdefault(weights.initializer, []).append(layer)
    return {group[0]: group for group in groups.values()}


def _gptq(
    layers: list[ir.Node], float_layer: ir.Node | None, rounded: LayerwiseRun, positions: int | None
) -> tuple[str, int]:
    """Rounds the weights of layers that share them by GPTQ, on the inputs of all these layers.

    float_layer: that of the first layer, which is computed next. The inputs of the other layers are computed with the
    weights and biases corrected so far. Returns the `Correction.rounding` and the number of changed weights.
    """
    original = query.constant(float_layer.inputs[1]) if float_layer is not None else None
    mine, inputs = Weights.of(layers[0]), [x for layer in layers if (x := layer.inputs[0]) is not None]
    if mine is None or original is None or original.shape != mine.integers.shape or len(inputs) < len(layers):
        return "", 0
    if len(mine.initializer.uses()) > len(layers):  # an operator that is no int8 layer reads them, too
        return "", 0
    most = int(np.abs(mine.integers.astype(np.int16)).max())
    arrays = ([x] for x in rounded.values(inputs[0])) if len(layers) == 1 else rounded.ahead(inputs)
    better = gptq.round_layer(layers, original, mine.scale, most, arrays, rounded.chunks, positions or gptq.POSITIONS)
    if better is None:
        return "", 0
    changes = np.subtract(better, mine.integers, dtype=np.int16).clip(-127, 127).astype(np.int8)
    mine.replace(mine.integers + changes)
    return (encode_rounding(changes), int(np.count_nonzero(changes))) if changes.any() else ("", 0)


def _correct_bias(
    layer: ir.Node, float_layer: ir.Node | None, exact: LayerwiseRun, rounded: LayerwiseRun, positions: int
) -> Correction:
    """Corrects the bias of a computed layer: b_c += mean of (x_c - y_c), if it lowers the error of channel c.

    x, y: [channels, positions] of the float and of the int8 model, at the layer's `_Target`.
    """
    name, kind = str(layer.name), layer.op_type
    if float_layer is None:
        return Correction(name, kind, reason="the float model has no operator of this name")
    bias = Bias.of(layer)
    if bias is None:
        return Correction(name, kind, reason="it has no bias of its own")
    target = _Target.behind(layer)
    original = exact.nodes.get(str(target.node.name))
    if original is None or not (rounded.ready(target.node) and exact.ready(original)):
        return Correction(name, kind, reason="left to the other part of its sum, which is computed later")
    axis = 1 if kind == "Conv" else -1

    def outputs() -> Iterator[tuple[Array, Array]]:
        for y, x in zip(rounded.run(target.node), exact.run(original), strict=True):
            yield _positions(y, axis, rounded.chunks, positions), _positions(x, axis, rounded.chunks, positions)

    held = list(outputs()) if positions <= HELD else None
    total, count = np.zeros(len(bias.scale)), np.zeros(len(bias.scale))
    for y, x in held or outputs():
        if len(y) != len(total):
            return Correction(name, kind, reason="the sum that it is part of has other channels")
        if x.shape != y.shape:
            return Correction(name, kind, reason="the size of its result depends on the data")
        if not np.isfinite(x).all():
            return Correction(name, kind, reason="the sum that it is part of holds NaN or infinity")
        x = np.clip(x, target.low, target.high)
        unsaturated = (x > target.low) & (x < target.high) & (y > target.low) & (y < target.high)
        weight = np.where(unsaturated, target.slope(x) ** 2, 0)
        total += np.where(unsaturated, weight * (x - y), 0).sum(axis=1, dtype=np.float64)
        count += weight.sum(axis=1, dtype=np.float64)
    integers = bias.quantized(total / np.where(count > 0, count, 1))
    shift = (integers * bias.scale).astype(np.float32)[:, None]
    signal, before, after = (np.zeros(len(integers)) for _ in range(3))
    for y, x in held or outputs():
        x = target.activated(x)
        signal += _squares(x)
        before += _squares(target.activated(y) - x)
        after += _squares(target.activated(y + shift) - x)
    better = (after < before) & (integers != 0)
    bias.add(np.where(better, integers, 0))
    rounded.add(layer, np.where(better, shift[:, 0], 0), axis)
    improved = np.where(better, after, before)
    sqnr = decibel(signal.sum(), before.sum()), decibel(signal.sum(), improved.sum())
    shifts = rounded_to_float32(np.where(better, shift[:, 0], 0)) if better.any() else ()
    return Correction(name, kind, 0, len(integers), int(better.sum()), *sqnr, shift=shifts)


def _positions(array: Array, axis: int, chunks: int, most: int) -> Array:
    """Returns [channels, positions], evenly drawn: about `most` per channel for all `chunks` together."""
    stride = array.size // array.shape[axis] * chunks // most | 1
    if axis == 1:
        positions_of_one = int(np.prod(array.shape[2:]))  # not -1: there may be no samples
        flat = array.reshape(*array.shape[:2], positions_of_one)[:, :, ::stride].swapaxes(0, 1)
    else:
        flat = array.reshape(-1, array.shape[-1])[::stride].T
    positions: Array = flat.reshape(array.shape[axis], -1)
    return positions.copy() if stride > 1 and positions.base is not None else positions  # not the whole array


def _squares(x: Array) -> Array:
    """Returns the sum of squares of each channel of [channels, positions]."""
    sums: Array = np.square(x).sum(axis=1, dtype=np.float64)
    return sums


def decibel(signal: float, noise: float) -> float | None:
    """Computes 10 log10(signal / noise).

    Args:
        signal: Sum of squares of the signal.
        noise: Sum of squares of the noise.

    Returns:
        The ratio in dB, rounded to 2 digits, or None without noise or signal.
    """
    return round(float(10 * np.log10(signal / noise)), 2) if signal > 0 and noise > 0 else None


@dataclass(frozen=True)
class _Target:
    """Tensor on which the error of a layer is measured: the output of `node`, the layer or the Add after it.

    low, high: the range that quantization, ReLU or Clip downstream of it leave, or in which a HardSwish or HardSigmoid
    is not constant.
    """

    node: ir.Node
    low: float
    high: float
    hard_swish: bool = False

    def activated(self, x: Array) -> Array:
        """Returns values of `node` after the activation and quantization that follow it."""
        x = np.clip(x, self.low, self.high)
        return x * np.clip(x + 3, 0, 6) / 6 if self.hard_swish else x

    def slope(self, x: Array) -> Array:
        """Returns the derivative of `activated` inside the range; of a hard-swish -1/2 to 3/2, and 0 at -3/2."""
        if not self.hard_swish:
            return np.ones((), np.float32)
        inner: Array = np.where(x < 3, (2 * x + 3) / 6, np.float32(1))
        return inner

    @classmethod
    def behind(cls, layer: ir.Node) -> _Target:
        node, value = layer, layer.outputs[0]
        low, high, activated = -np.inf, np.inf, False
        while (user := query.sole_user(value)) is not None:
            if user.op_type == "Add" and node is layer and not activated:
                node, low, high = user, -np.inf, np.inf
            elif user.op_type in ("Relu", "Clip", "QuantizeLinear"):
                bounds = (_quantized_range if user.op_type == "QuantizeLinear" else _clip_range)(user)
                low, high = max(low, bounds[0]), min(high, bounds[1])
                activated |= user.op_type != "QuantizeLinear"
            elif user.op_type in HARD:
                bounds = _hard_range(user)
                return cls(node, max(low, bounds[0]), min(high, bounds[1]), user.op_type == "HardSwish")
            elif user.op_type != "DequantizeLinear":
                break
            value = user.outputs[0]
        return cls(node, low, high)


def _clip_range(node: ir.Node) -> tuple[float, float]:
    """Returns the range of a Relu or Clip; infinite if it is not constant."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    low, high = (query.constant(bound) for bound in (*node.inputs[1:], None, None)[:2])
    return -np.inf if low is None else float(low.item()), np.inf if high is None else float(high.item())


def _hard_range(node: ir.Node) -> tuple[float, float]:
    """Returns the range outside of which a HardSwish or HardSigmoid is constant or the identity."""
    if node.op_type == "HardSwish":
        return -3.0, np.inf
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else (-np.inf, np.inf)


def _quantized_range(node: ir.Node) -> tuple[float, float]:
    """Returns the smallest and largest value of a QuantizeLinear, s (q - z); infinite if per channel."""
    scale, zero = (query.constant(parameter) for parameter in (*node.inputs[1:], None)[:2])
    if scale is None or scale.size != 1:
        return -np.inf, np.inf
    zero = np.zeros((), np.uint8) if zero is None else zero
    limits = np.iinfo(zero.dtype)
    return tuple(float(scale.item()) * (end - int(zero.item())) for end in (limits.min, limits.max))  # type: ignore[return-value]
