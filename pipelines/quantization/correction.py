"""Int8 layers corrected on samples: weights rounded together, and biases relieved of what shifts their results.

Layers are corrected from input to output, each on what the corrected layers before it compute. First its weights are
rounded so that their errors cancel (`pipelines.quantization.gptq`), then its bias.

Rounded weights and clipped ranges shift a channel's mean, and a shift, unlike noise, adds up through the layers above
(Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"). A channel's shift is
measured where it counts: after the sum that the layer adds to, if any, and over positions that do not saturate (ReLU,
Clip, the ends of int8 steps); the mean before a ReLU that most values do not pass says nothing of those that do. A
correction is kept only where it lowers the channel's squared error after activation and steps. The float model is cut
where the int8 model's ranges end: a range was chosen for what it costs, and biases that made up for the mean of what it
cuts would shift all that it does not cut (1 dB of MobileNet-V2's logits).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import edit, query
from pipelines.quantization.bias import Bias
from pipelines.quantization.calibrate import rounded_to_float32
from pipelines.quantization.gptq import rounded_together
from pipelines.quantization.layerwise import Walk, chunks
from pipelines.quantization.weight_rounding import Weights, encode_rounding

Array = NDArray[Any]
LAYERS = ("Conv", "Gemm", "MatMul")
POSITIONS = 2**17  # of one channel, that its shift is measured on


@dataclass(frozen=True)
class Correction:
    """One int8 layer: how many weights were rounded otherwise than to nearest, how many output channels' biases were
    corrected and the
    SQNR in dB before and after the latter, or why its bias was left alone."""

    name: str
    type: str
    weights: int = 0
    channels: int = 0
    corrected: int = 0
    sqnr_before: float | None = None
    sqnr_after: float | None = None
    reason: str = ""
    shift: tuple[float, ...] = ()  # of each output channel
    rounding: str = ""  # see `weight_rounding.encode_rounding`


@dataclass(frozen=True)
class CorrectionReport:
    """Every int8 layer, in the graph's order, and how many samples they were corrected on."""

    layers: tuple[Correction, ...]
    samples: int

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        layers = [
            {key: value for key, value in asdict(each).items() if key not in ("shift", "rounding")}
            for each in self.layers
        ]
        return {"samples": self.samples, "layers": layers}


def correct(
    float_model: ir.Model, int8_model: ir.Model, samples: Iterable[Batch], *, weights: bool = True
) -> tuple[ir.Model, CorrectionReport]:
    """`int8_model`, which is left as it is, with corrected weights and biases of the same steps, and what became of
    every layer.

    float_model: the model that was quantized; layers are found in it by name. samples: batches {graph input: array,
    first axis = samples}. These, and values that later layers read, lie on disk meanwhile: memory holds a few samples
    of one layer, however many there are, and the correlations of its inputs. weights: False leaves these rounded to
    nearest, which is quicker. Raises RequestError for no samples, or such that do not fit the graph.
    """
    result = int8_model.clone()
    layers = [node for node in result.graph if _is_int8(node)]
    names = [str(each.name) for each in layers]
    found = []
    with tempfile.TemporaryDirectory() as folder, progress("correcting layers", len(layers)) as advance:
        exact, rounded = (Walk(model, names, Path(folder)) for model in (_cut(float_model, result), result))
        count = 0
        for batch in chunks(float_model, samples):
            exact.feed(batch)
            rounded.feed(batch)
            count += length(batch)
        if not count:
            raise RequestError("no samples to correct the layers on; pass at least one")
        for layer in layers:
            twin = exact.nodes.get(str(layer.name))
            if twin is not None:
                exact.compute(twin)
            rounding, changed = _round(layer, twin, rounded) if weights and twin is not None else ("", 0)
            rounded.compute(layer)
            found.append(replace(_correct(layer, twin, exact, rounded), weights=changed, rounding=rounding))
            advance(1)
    return result, CorrectionReport(tuple(found), count)


def _cut(float_model: ir.Model, int8_model: ir.Model) -> ir.Model:
    """The float model with every tensor that the int8 model rounds cut where its steps end."""
    result = float_model.clone()
    main = result.graph
    values = {str(value.name): value for node in main for value in (*node.inputs, *node.outputs) if value is not None}
    taken = query.names(main)
    for node in int8_model.graph:
        value = (
            values.get(str(node.inputs[0].name))
            if node.op_type == "QuantizeLinear" and node.inputs[0] is not None
            else None
        )
        ends = _steps_end(node) if value is not None else (-np.inf, np.inf)
        if value is None or value.is_graph_output() or not np.isfinite(ends).all():
            continue
        limits = [
            edit.initializer(main, f"{value.name}.{key}", np.asarray(end, np.float32), taken)
            for key, end in zip(("least", "most"), ends, strict=True)
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


def _round(layer: ir.Node, twin: ir.Node, rounded: Walk) -> tuple[str, int]:
    """Round a layer's weights together; returns the `Correction.rounding` and how many weights it changes."""
    mine, original, x = Weights.of(layer), query.constant(twin.inputs[1]), layer.inputs[0]
    if mine is None or original is None or x is None or original.shape != mine.integers.shape:
        return "", 0
    most = int(np.abs(mine.integers.astype(np.int16)).max())
    better = rounded_together(layer, original, mine.scale, most, rounded.values(x), rounded.chunks)
    if better is None:
        return "", 0
    changes = np.subtract(better, mine.integers, dtype=np.int16).clip(-127, 127).astype(np.int8)
    mine.replace(mine.integers + changes)
    return (encode_rounding(changes), int(np.count_nonzero(changes))) if changes.any() else ("", 0)


def _correct(layer: ir.Node, twin: ir.Node | None, exact: Walk, rounded: Walk) -> Correction:
    name, kind = str(layer.name), layer.op_type
    if twin is None:
        return Correction(name, kind, reason="the float model has no operator of this name")
    bias = Bias.of(layer)
    if bias is None:
        return Correction(name, kind, reason="it has no bias of its own")
    target = _Target.behind(layer)
    original = exact.nodes.get(str(target.node.name))
    if original is None or not (rounded.ready(target.node) and exact.ready(original)):
        return Correction(name, kind, reason="left to the other part of its sum, which is computed later")
    axis = 1 if kind == "Conv" else -1

    def pairs() -> Iterator[tuple[Array, Array]]:
        for both in zip(rounded.run(target.node), exact.run(original), strict=True):
            y, x = (_positions(each, axis, rounded.chunks) for each in both)
            yield y, x

    total, count = np.zeros(len(bias.scale)), np.zeros(len(bias.scale), np.int64)
    for y, x in pairs():
        if len(y) != len(total):
            return Correction(name, kind, reason="the sum that it is part of has other channels")
        if not np.isfinite(x).all():
            return Correction(name, kind, reason="the sum that it is part of holds NaN or infinity")
        x = np.clip(x, target.least, target.most)
        free = (x > target.least) & (x < target.most) & (y > target.least) & (y < target.most)
        total += np.where(free, x - y, 0).sum(axis=1, dtype=np.float64)
        count += free.sum(axis=1)
    steps = bias.quantized(total / np.maximum(count, 1))
    shift = (steps * bias.scale).astype(np.float32)[:, None]
    signal, before, after = (np.zeros(len(steps)) for _ in range(3))
    for y, x in pairs():
        x = np.clip(x, target.least, target.most)
        signal += _squares(x)
        before += _squares(np.clip(y, target.least, target.most) - x)
        after += _squares(np.clip(y + shift, target.least, target.most) - x)
    kept = (after < before) & (steps != 0)
    bias.add(np.where(kept, steps, 0))
    rounded.add(layer, np.where(kept, shift[:, 0], 0), axis)
    improved = np.where(kept, after, before)
    sqnr = decibel(signal.sum(), before.sum()), decibel(signal.sum(), improved.sum())
    shifts = rounded_to_float32(np.where(kept, shift[:, 0], 0)) if kept.any() else ()
    return Correction(name, kind, 0, len(steps), int(kept.sum()), *sqnr, shift=shifts)


def _positions(array: Array, axis: int, chunks: int) -> Array:
    """[channels, positions]: of so many chunks like this one together, not many more than `POSITIONS` a channel, evenly
    drawn.
    """
    stride = array.size // array.shape[axis] * chunks // POSITIONS | 1
    if axis == 1:
        flat = array.reshape(*array.shape[:2], -1)[:, :, ::stride].swapaxes(0, 1)
    else:
        flat = array.reshape(-1, array.shape[-1])[::stride].T
    positions: Array = flat.reshape(array.shape[axis], -1)
    return positions


def _squares(x: Array) -> Array:
    sums: Array = np.square(x).sum(axis=1, dtype=np.float64)
    return sums


def decibel(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), both sums of squares; None where there is no noise, or no signal."""
    return round(float(10 * np.log10(signal / noise)), 2) if signal > 0 and noise > 0 else None


@dataclass(frozen=True)
class _Target:
    """Where the error of a layer is measured: the result of `node`, the layer itself or the Add that sums it with
    another value.

    least, most: the ends of the int8 steps behind it, narrowed by a ReLU or Clip.
    """

    node: ir.Node
    least: float
    most: float

    @classmethod
    def behind(cls, layer: ir.Node) -> _Target:
        node, value = layer, layer.outputs[0]
        least, most, activated = -np.inf, np.inf, False
        while (user := query.sole_user(value)) is not None:
            if user.op_type == "Add" and node is layer and not activated:
                node, least, most = user, -np.inf, np.inf
            elif user.op_type in ("Relu", "Clip", "QuantizeLinear"):
                ends = (_steps_end if user.op_type == "QuantizeLinear" else _ends)(user)
                least, most = max(least, ends[0]), min(most, ends[1])
                activated |= user.op_type != "QuantizeLinear"
            elif user.op_type != "DequantizeLinear":
                break
            value = user.outputs[0]
        return cls(node, least, most)


def _ends(node: ir.Node) -> tuple[float, float]:
    """What a Relu or Clip cuts its input to; infinite where that is not constant."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    low, high = (query.constant(each) for each in (*node.inputs[1:], None, None)[:2])
    return -np.inf if low is None else float(low.item()), np.inf if high is None else float(high.item())


def _steps_end(node: ir.Node) -> tuple[float, float]:
    """The least and the greatest value that a QuantizeLinear can give."""
    scale, zero = (query.constant(each) for each in (*node.inputs[1:], None)[:2])
    if scale is None or scale.size != 1:
        return -np.inf, np.inf
    zero = np.zeros((), np.uint8) if zero is None else zero
    limits = np.iinfo(zero.dtype)
    return tuple(float(scale.item()) * (end - int(zero.item())) for end in (limits.min, limits.max))  # type: ignore[return-value]
