"""Calibration beyond ranges: bias correction and equalization, which a table carries so that quantizing needs no samples.

Bias correction: int8 layers whose results are shifted on average get the shift taken out of their bias.

Rounded weights and clipped ranges shift a channel's mean, and a shift, unlike noise, adds up through the layers above (Nagel et al. 2019,
"Data-Free Quantization Through Weight Equalization and Bias Correction"). Layers are corrected from input to output, each on what the
corrected layers before it compute. A channel's shift is measured where it counts: after the sum that the layer adds to, if any, and over
positions that saturate neither in the float model (ReLU, Clip) nor in the int8 one (its steps end); the mean before a ReLU that most values
do not pass says nothing of those that do. A correction is kept only where it lowers the channel's squared error after activation and steps.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines import graph, plain
from pipelines.batches import Batch, cut, joined, length
from pipelines.calibrate import MEMORY, CalibrationTable, calibrate, rounded_to_float32
from pipelines.entry import QuantRecipe
from pipelines.errors import RequestError
from pipelines.progress import progress
from pipelines.quantize import quantize
from pipelines.quantizers.biases import Bias
from pipelines.rewrite import rewrite
from pipelines.rewrites.equalize_channels import EqualizeChannels, channel_statistics, scale_channels

Array = NDArray[Any]
LAYERS = ("Conv", "Gemm", "MatMul")
CHUNK = 8  # samples computed at once
POSITIONS = 2**17  # of one channel, that its shift is measured on
GATE, GAIN = 32, 0.2  # samples that equalization is judged by; dB that it must win
WANTED = "its correction needs"


@dataclass(frozen=True)
class Correction:
    """One int8 layer: how many output channels were corrected and its SQNR in dB before and after, or why it was left alone."""

    name: str
    type: str
    channels: int = 0
    corrected: int = 0
    sqnr_before: float | None = None
    sqnr_after: float | None = None
    reason: str = ""
    shift: tuple[float, ...] = ()  # of each output channel


@dataclass(frozen=True)
class BiasReport:
    """Every int8 layer, in the graph's order, and on how many samples the shifts were measured."""

    layers: tuple[Correction, ...]
    samples: int

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        layers = [{key: value for key, value in asdict(each).items() if key != "shift"} for each in self.layers]
        return {"samples": self.samples, "layers": layers}


def calibrated(
    model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch], total: int | None = None, *, max_memory: str | int = MEMORY
) -> CalibrationTable:
    """All that `quantize` needs to make `model` int8 by `recipe`: ranges and, as the recipe says, what a search and bias correction find.

    samples: batches {graph input: array, first axis = samples}, gone through several times (no iterator). total: their number, for the
    progress bars. Raises RequestError as `calibrate` and `correct_bias` do.
    """
    clip, factors = search(model, recipe, samples)[0] if recipe.search else (False, {})
    equalized = model.clone()
    scale_channels(equalized, factors)
    options: dict[str, Any] = {"max_memory": max_memory, "symmetric": recipe.symmetric}
    table = calibrate(equalized, samples, recipe.observer, total, **options)
    table = replace(table, graph=graph.digest(model), clip=clip, equalization=factors)
    return corrected(model, recipe, table, samples) if recipe.correct else table


def corrected(model: ir.Model, recipe: QuantRecipe, table: CalibrationTable, samples: Iterable[Batch]) -> CalibrationTable:
    """`table` with the bias corrections that `recipe` needs; see `calibrated` for the arguments."""
    equalized = model.clone()
    scale_channels(equalized, table.equalization)
    found = correct_bias(equalized, quantize(model, recipe, replace(table, bias={}))[0], samples)[1]
    return replace(table, bias={each.name: each.shift for each in found.layers if each.shift}, recipe=recipe.to_json())


def correct_bias(float_model: ir.Model, int8_model: ir.Model, samples: Iterable[Batch]) -> tuple[ir.Model, BiasReport]:
    """`int8_model`, which is left as it is, with corrected biases (int32 in steps of s_x s_w as before), and what became of every layer.

    float_model: the model that was quantized; layers are found in it by name. samples: batches {graph input: array, first axis = samples}.
    These, and values that later layers read, lie on disk meanwhile: memory holds a few samples of one layer, however many there are.
    Raises RequestError for no samples, or such that do not fit the graph.
    """
    result = int8_model.clone()
    layers = [node for node in result.graph if _is_int8(node)]
    found = []
    with tempfile.TemporaryDirectory() as folder, progress("correcting biases", len(layers)) as advance:
        exact, rounded = (_Walk(model, [str(each.name) for each in layers], Path(folder)) for model in (float_model, result))
        count = 0
        for batch in _chunks(float_model, samples):
            exact.feed(batch)
            rounded.feed(batch)
            count += length(batch)
        if not count:
            raise RequestError("no samples to correct biases on; pass at least one")
        for layer in layers:
            found.append(_correct(layer, exact, rounded))
            advance(1)
    return result, BiasReport(tuple(found), count)


def search(
    model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch]
) -> tuple[tuple[bool, dict[str, tuple[float, ...]]], dict[str, float]]:
    """How `model` quantizes best: channels as they are, equalized before depthwise convolutions or between all; weights clipped or not.

    Returns (`clip` and `equalization` of a `CalibrationTable`) and {"none", "depthwise", "all", "clipped": SQNR in dB of the int8 outputs
    against those of `model`, biases corrected}, calibrated and measured on the first `GATE` samples; forms of equalization that the pass
    has no use for are left out. A form wins only by `GAIN`, since 5% of noise more or less is chance.
    """
    ranges = channel_statistics(model, _chunks(model, samples))
    few = list(itertools.islice(_chunks(model, samples), -(-GATE // CHUNK)))
    forms: dict[str, dict[str, tuple[float, ...]]] = {"none": {}}
    for form, depthwise in (("depthwise", True), ("all", False)):
        finder = EqualizeChannels(ranges, depthwise_only=depthwise)
        rewrite(model.clone(), [finder])
        forms[form] = {name: rounded_to_float32(each) for name, each in finder.factors.items()}
    found: dict[str, float] = {}

    def measure(form: str, factors: dict[str, tuple[float, ...]], clip: bool = False) -> None:
        candidate = model.clone()
        scale_channels(candidate, factors)
        table = replace(calibrate(candidate, few, recipe.observer, symmetric=recipe.symmetric), clip=clip)
        int8, _ = correct_bias(candidate, quantize(candidate, recipe, table)[0], few)
        found[form] = round(output_sqnr(model, int8, few), 2)

    for form, factors in forms.items():
        if factors or form == "none":
            measure(form, factors)
    best = max(found, key=found.__getitem__)
    best = best if found[best] >= found["none"] + GAIN else "none"
    measure("clipped", forms[best], clip=True)
    return (found["clipped"] >= found[best] + GAIN, forms[best]), found


def output_sqnr(float_model: ir.Model, int8_model: ir.Model, samples: Iterable[Batch]) -> float:
    """SQNR in dB of the int8 model's float outputs against the float model's, over all samples; infinite where they are equal.

    What a final Softmax saw counts, not its probabilities, most of which are zero. Raises RequestError for samples that do not fit.
    """
    signal = noise = 0.0
    exact, rounded = (plain.session(_before_softmax(model), WANTED) for model in (float_model, int8_model))
    for batch in _chunks(float_model, samples):
        for x, y in zip(plain.run(exact, batch), plain.run(rounded, batch), strict=True):
            if x.dtype == np.float32:
                signal += float(np.square(x, dtype=np.float64).sum())
                noise += float(np.square(np.subtract(x, y, dtype=np.float64)).sum())
    return float(10 * np.log10(signal / noise)) if noise > 0 and signal > 0 else np.inf


def _before_softmax(model: ir.Model) -> ir.Model:
    copy = model.clone()
    for at, value in enumerate(copy.graph.outputs):
        producer = value.producer()
        if producer is not None and producer.op_type in ("Softmax", "Sigmoid") and producer.inputs[0] is not None:
            copy.graph.outputs[at] = producer.inputs[0]
            producer.inputs[0].type, producer.inputs[0].shape = value.type, None
    return copy


def _chunks(model: ir.Model, samples: Iterable[Batch]) -> Iterator[Batch]:
    """The samples `CHUNK` at a time, or as many as the graph fixes; as they come where its inputs share no such number."""
    inputs = [each for each in model.graph.inputs if not each.is_initializer()]
    wanted = {str(each.name) for each in inputs}
    first = {(graph.dimensions(each) or [0])[0] for each in inputs}  # None: dynamic, 0: no axis
    size = (first.pop() or CHUNK) if len(first) == 1 and 0 not in first else 0
    rest: list[Batch] = []
    for batch in samples:
        if set(batch) != wanted:
            raise RequestError(f"the samples hold {', '.join(batch)}; the graph takes {', '.join(sorted(wanted))}")
        if not size or len({len(array) for array in batch.values()}) > 1:
            yield batch
            continue
        for each in cut(joined([*rest, batch]), size):
            if length(each) == size:
                rest = []
                yield each
            else:
                rest = [each]
    if rest and size == CHUNK:
        yield rest[0]


def _is_int8(node: ir.Node) -> bool:
    """Whether `node` is a layer with constant int8 weights."""
    weight = graph.dequantized(node.inputs[1]) if node.op_type in LAYERS else None
    return weight is not None and weight[0].dtype == np.int8


def _correct(layer: ir.Node, exact: _Walk, rounded: _Walk) -> Correction:
    name, kind = str(layer.name), layer.op_type
    twin = exact.nodes.get(name)
    rounded.compute(layer)
    if twin is None:
        return Correction(name, kind, reason="the float model has no operator of this name")
    exact.compute(twin)
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

    total, count = np.zeros(len(bias.step)), np.zeros(len(bias.step), np.int64)
    for y, x in pairs():
        if len(y) != len(total):
            return Correction(name, kind, reason="the sum that it is part of has other channels")
        free = (x > target.low) & (x < target.high) & (y > target.least) & (y < target.most)
        total += np.where(free, x - y, 0).sum(axis=1, dtype=np.float64)
        count += free.sum(axis=1)
    steps = bias.whole(total / np.maximum(count, 1))
    shift = (steps * bias.step).astype(np.float32)[:, None]
    signal, before, after = (np.zeros(len(steps)) for _ in range(3))
    for y, x in pairs():
        x = np.clip(x, target.low, target.high)
        signal += _squares(x)
        before += _squares(np.clip(y, target.least, target.most) - x)
        after += _squares(np.clip(y + shift, target.least, target.most) - x)
    kept = (after < before) & (steps != 0)
    bias.add(np.where(kept, steps, 0))
    rounded.add(layer, np.where(kept, shift[:, 0], 0), axis)
    improved = np.where(kept, after, before)
    sqnr = decibel(signal.sum(), before.sum()), decibel(signal.sum(), improved.sum())
    shifts = rounded_to_float32(np.where(kept, shift[:, 0], 0)) if kept.any() else ()
    return Correction(name, kind, len(steps), int(kept.sum()), *sqnr, shift=shifts)


def _positions(array: Array, axis: int, chunks: int) -> Array:
    """[channels, positions]: of so many chunks like this one together, not many more than `POSITIONS` a channel, evenly drawn."""
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
    """Where the error of a layer is measured: the result of `node`, the layer itself or the Add that sums it with another value.

    low, high: the bounds of a ReLU or Clip behind it. least, most: these, narrowed to the ends of the int8 steps.
    """

    node: ir.Node
    low: float
    high: float
    least: float
    most: float

    @classmethod
    def behind(cls, layer: ir.Node) -> _Target:
        node, value = layer, layer.outputs[0]
        low, high, least, most = -np.inf, np.inf, -np.inf, np.inf
        while (user := graph.sole_user(value)) is not None:
            if user.op_type == "Add" and node is layer and (low, high) == (-np.inf, np.inf):
                node, least, most = user, -np.inf, np.inf
            elif user.op_type in ("Relu", "Clip"):
                ends = _ends(user)
                low, high = max(low, ends[0]), min(high, ends[1])
            elif user.op_type == "QuantizeLinear":
                ends = _steps_end(user)
                least, most = max(least, ends[0]), min(most, ends[1])
            elif user.op_type != "DequantizeLinear":
                break
            value = user.outputs[0]
        return cls(node, low, high, max(least, low), min(most, high))


def _ends(node: ir.Node) -> tuple[float, float]:
    """What a Relu or Clip cuts its input to; infinite where that is not constant."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    low, high = (graph.constant(each) for each in (*node.inputs[1:], None, None)[:2])
    return -np.inf if low is None else float(low.item()), np.inf if high is None else float(high.item())


def _steps_end(node: ir.Node) -> tuple[float, float]:
    """The least and the greatest value that a QuantizeLinear can give."""
    scale, zero = (graph.constant(each) for each in (*node.inputs[1:], None)[:2])
    if scale is None or scale.size != 1:
        return -np.inf, np.inf
    zero = np.zeros((), np.uint8) if zero is None else zero
    limits = np.iinfo(zero.dtype)
    return tuple(float(scale.item()) * (end - int(zero.item())) for end in (limits.min, limits.max))  # type: ignore[return-value]


class _Walk:
    """A model computed piece by piece over all samples. What later pieces read lies on disk, one file a value and chunk of samples.

    layers: the operators that will be computed, one after the other; nothing behind one of them is ready before.
    """

    def __init__(self, model: ir.Model, layers: Iterable[str], folder: Path) -> None:
        self.model, self.folder, self.chunks, self.written = model, Path(tempfile.mkdtemp(dir=folder)), 0, 0
        self.nodes: dict[str, ir.Node] = {}
        for node in model.graph:  # as the quantizer names operators that have no name of their own
            self.nodes[str(node.name if node.name and node.name not in self.nodes else node.outputs[0].name)] = node
        self.order = {node: at for at, node in enumerate(model.graph)}
        self.waiting = {self.nodes[name]: None for name in layers if name in self.nodes}
        self.stored: dict[ir.Value, Path] = {}

    def feed(self, batch: Batch) -> None:
        """Store one chunk of the graph's inputs."""
        for value in self.model.graph.inputs:
            if not value.is_initializer():
                self._write(value, self.chunks, batch[str(value.name)])
        self.chunks += 1

    def ready(self, node: ir.Node) -> bool:
        """Whether all that `node` is computed from has been."""
        return not self._cone(node)[2]

    def compute(self, layer: ir.Node) -> None:
        """Compute and store the result of the next layer, forgetting what neither it nor later ones read."""
        ends = {each for value in self.model.graph.outputs if (each := value.producer()) is not None}
        needed = {value for node in {*self.waiting, *ends} for value in self._cone(node)[0]}
        for value in [each for each in self.stored if each not in needed]:
            for chunk in range(self.chunks):
                self._file(value, chunk).unlink()
            del self.stored[value]
        self.waiting.pop(layer, None)
        if layer.outputs[0] in self.stored:
            return
        inputs, inner, _ = self._cone(layer)
        varies = set(inputs)
        for node in inner:
            if varies.intersection(_reads(node)):
                varies.update(node.outputs)
        shared = [value for node in inner for value in node.outputs if value in varies and len(value.uses()) > 1]
        values = list(dict.fromkeys((*shared, layer.outputs[0])))
        for chunk, arrays in enumerate(self._run(inputs, values)):
            for value, array in zip(values, arrays, strict=True):
                self._write(value, chunk, array)

    def run(self, node: ir.Node) -> Iterator[Array]:
        """The result of a node that is ready, chunk by chunk."""
        value = node.outputs[0]
        if value in self.stored:
            return (self._read(value, chunk) for chunk in range(self.chunks))
        return (arrays[0] for arrays in self._run(self._cone(node)[0], [value]))

    def add(self, layer: ir.Node, shift: Array, axis: int) -> None:
        """Add `shift`, one number per output channel, to the stored result of `layer`."""
        value = layer.outputs[0]
        if shift.any():
            for chunk in range(self.chunks):
                array = self._read(value, chunk)
                self._write(value, chunk, array + shift.astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1 - axis % array.ndim)))

    def _cone(self, end: ir.Node) -> tuple[list[ir.Value], list[ir.Node], bool]:
        """(stored values that `end` is computed from, the operators between in order, whether a layer among them is still waiting)."""
        inputs: dict[ir.Value, None] = {}
        inner, todo, blocked = {end}, [end], False
        while todo:
            for value in _reads(todo.pop()):
                producer = value.producer()
                if value in self.stored:
                    inputs[value] = None
                elif producer in self.order and producer not in inner:
                    if producer in self.waiting:
                        blocked = True
                    else:
                        inner.add(producer)
                        todo.append(producer)
        return list(inputs), sorted(inner, key=self.order.__getitem__), blocked

    def _run(self, inputs: list[ir.Value], outputs: list[ir.Value]) -> Iterator[list[Array]]:
        piece = ir.convenience.extract(self.model.graph, [str(each.name) for each in inputs], [str(each.name) for each in outputs])
        for source, value in zip(inputs, piece.inputs, strict=True):
            value.type = ir.TensorType(ir.DataType.from_numpy(self._read(source, 0).dtype))
        for value in (*piece.inputs, *piece.outputs):
            value.shape = None  # inference may have guessed
        session = plain.session(ir.Model(piece, ir_version=self.model.ir_version), WANTED)
        for chunk in range(self.chunks):
            yield plain.run(session, {str(each.name): self._read(each, chunk) for each in inputs})

    def _file(self, value: ir.Value, chunk: int) -> Path:
        return self.stored[value].with_suffix(f".{chunk}.npy")

    def _read(self, value: ir.Value, chunk: int) -> Array:
        array: Array = np.load(self._file(value, chunk))
        return array

    def _write(self, value: ir.Value, chunk: int, array: Array) -> None:
        if value not in self.stored:
            self.written += 1
            self.stored[value] = self.folder / str(self.written)
        np.save(self._file(value, chunk), array)


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads, those that its subgraphs take from around them too."""
    nodes = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nodes += ir.traversal.RecursiveGraphIterator(attribute.as_graph())
    return (value for each in nodes for value in each.inputs if value is not None)
