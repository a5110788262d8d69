"""Layers of an int8 model computed in float32, to measure the error of their quantization."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import edit, query, reference_session
from pipelines.quantization.algorithms.channel_groups import outputs_first
from pipelines.quantization.algorithms.weight_rounding import Weights
from pipelines.quantization.calibration.calibrate import Observation, observe
from pipelines.quantization.calibration.compared_outputs import OutputSqnr
from pipelines.quantization.calibration.layerwise import HELD, subgraph
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import equalized
from pipelines.quantization.qdq import layers
from pipelines.quantization.qdq.scales import Array
from pipelines.quantization.quantizer import Quantizer

FLOAT_SHARE = 0.25  # maximum share of the multiplications in float32
SENSITIVE = 0.05  # minimum gain of a layer in float32, in dB
GAIN = 10.0  # minimum gain in dB for all multiplications; that of a layer is its share
NEARLY = 1.0  # dB of SQNR that fewer layers in float32 may be behind
LAYERS_OF_A_PART = 4  # layers of an int8 model that run in one session


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

    The model runs in parts of about `LAYERS_OF_A_PART` layers. Layers in float32 need new sessions of their parts
    alone, and runs begin at the first of these, from values that the int8 model computed before. A session needs a copy
    of the protobuf with other inputs of a few nodes. Quantizing anew with `keep_float` gives about the same model, and
    takes several times as long.

    Args:
        metric: SQNR that the sessions are opened for.
        int8: Int8 model.
        float_model: Float model that was quantized, equalized as it was.
        names: Names of the layers.
    """

    def __init__(self, metric: OutputSqnr, int8: ir.Model, float_model: ir.Model, names: Collection[str]) -> None:
        self._metric, self._model = metric, metric.cut(int8)
        originals = _float_weights(float_model)
        layers = {str(node.name): node for node in self._model.graph if node.name in names}
        self._parts = _parts(self._model, {name: _float_inputs(node, originals) for name, node in layers.items()})
        self._results = [str(output.name) for output in self._model.graph.outputs]
        self._known: dict[Hashable, list[Batch]] = {}  # inputs of the parts of the int8 model, by run
        self._room = HELD

    def sqnr(self, kept: Collection[str], batches: slice) -> float:
        """Computes the SQNR with layers in float32.

        Args:
            kept: Names of the layers.
            batches: Batches to use.

        Returns:
            SQNR in dB.
        """
        changed = {index: part.among(kept) for index, part in enumerate(self._parts)}
        return self._metric.of(_Chain(self._run, changed, (batches.start, batches.stop)), batches)

    def _run(self, chain: _Chain, run: Hashable, feed: Batch) -> list[Array]:
        """Computes the compared tensors of one run of a chain."""
        firsts = [first for first, kept in chain.kept.items() if kept]
        cached = self._known.get(run, [feed])
        begin = min([*firsts, len(cached) - 1])
        values = cached[begin]
        for i, part in enumerate(self._parts[begin:], begin):
            if i not in chain.sessions:
                chain.sessions[i] = part.session(self._metric, self._model, values, chain.kept[i])
            results = reference_session.run(chain.sessions[i], {str(x.name): values[str(x.name)] for x in part.inputs})
            computed = zip([str(x.name) for x in part.outputs], results, strict=True)
            values = {name: array for name, array in {**values, **dict(computed)}.items() if name in part.alive}
            size = sum(array.nbytes for array in values.values())
            if not firsts and i + 1 == len(cached) < len(self._parts) and size <= self._room:
                self._known[run] = cached = [*cached, values]
                self._room -= size
        return [values[name] for name in self._results]


@dataclass
class _Chain:
    """Sessions of the parts of a model, run as one session.

    Attributes:
        function: Runs them, see `FloatLayers`.
        kept: Names of the layers in float32, by part.
        batches: Identity of the batches that it runs in order.
        sessions: Sessions by part, opened when they are first run.
        runs: Number of runs.
    """

    function: Callable[[_Chain, Hashable, Batch], list[Array]]
    kept: Mapping[int, frozenset[str]]
    batches: Hashable
    sessions: dict[int, ort.InferenceSession] = field(default_factory=dict)
    runs: int = 0

    def run(self, _: None, feed: Batch) -> list[Array]:
        """See `onnxruntime.InferenceSession`."""
        self.runs += 1
        return self.function(self, (self.batches, self.runs), feed)


@dataclass
class _Part:
    """A part of an int8 model.

    Attributes:
        inputs: Values that it reads.
        outputs: Values that it computes for later parts, and results.
        alive: Names of all values that later parts read, and of results.
        edits: Float inputs of its layers by layer, see `_float_inputs`.
        serialized: Its protobuf, made before it first runs.
        opened: Its session with all layers in int8.
    """

    inputs: list[ir.Value]
    outputs: list[ir.Value]
    alive: frozenset[str]
    edits: Mapping[str, Mapping[int, str | Array]]
    serialized: reference_session.Serialized | None = None
    opened: ort.InferenceSession | None = None

    def among(self, names: Collection[str]) -> frozenset[str]:
        """Returns the names of the layers of this part among some names."""
        return frozenset(names) & self.edits.keys()

    def session(self, metric: OutputSqnr, model: ir.Model, values: Batch, kept: Set[str]) -> ort.InferenceSession:
        """Opens a session of this part of `model`; `values` holds those of `inputs`, `kept` the layers in float32."""
        if self.serialized is None:
            part = subgraph(model, self.inputs, self.outputs, [values[str(x.name)] for x in self.inputs])
            self.serialized = reference_session.Serialized.of(part)
        if not kept:
            self.opened = self.opened or metric.session(self.serialized)
            return self.opened
        proto = onnx.ModelProto()
        proto.CopyFrom(self.serialized.proto)
        for node in proto.graph.node:
            for index, x in self.edits[node.name].items() if node.name in kept else ():
                if not isinstance(x, str):
                    proto.graph.initializer.append(onnx.numpy_helper.from_array(x, x := f"{node.output[0]}.exact"))
                node.input[index] = x
        return metric.session(reference_session.Serialized(proto, self.serialized.tables))


def _parts(model: ir.Model, edits: Mapping[str, Mapping[int, str | Array]]) -> list[_Part]:
    """Divides a model between layers where few values are alive.

    edits: float inputs by layer, which count as read.
    """
    nodes = list(model.graph)
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    varying = {*inputs, *(value for node in query.downstream(model.graph, *inputs) for value in node.outputs)}
    names = {str(value.name): value for value in varying}
    alive = [set(model.graph.outputs)]  # before every node, and behind the last
    reads: list[set[ir.Value]] = []
    for node in reversed(nodes):
        floats = (names[x] for x in edits.get(str(node.name), {}).values() if isinstance(x, str))
        reads.insert(0, varying.intersection((*floats, *query.values_read(node))))
        alive.insert(0, alive[0].difference(node.outputs) | reads[0])
    layers = [index for index, node in enumerate(nodes) if str(node.name) in edits]
    half, bounds = LAYERS_OF_A_PART // 2, [0]
    for k in range(LAYERS_OF_A_PART, len(layers) - half, LAYERS_OF_A_PART):
        possible = [
            cut for cut in range(layers[k - half] + 1, layers[k + half] + 1) if all(map(query.is_array, alive[cut]))
        ]
        if possible:  # engines fuse a layer with the QuantizeLinear behind it; its float result may be read, too
            split = {cut: nodes[cut].op_type != "QuantizeLinear" for cut in possible}
            bounds.append(min(possible, key=lambda cut: (len(alive[cut]), split[cut], abs(cut - layers[k]))))
    parts = []
    for begin, end in zip(bounds, [*bounds[1:], len(nodes)], strict=True):
        part, read = nodes[begin:end], set[ir.Value]().union(*reads[begin:end])
        made = [value for node in part for value in node.outputs if value in alive[end]]
        made += [value for value in alive[end] if value.is_initializer() and end == len(nodes)]
        if made:
            parts.append(
                _Part(
                    [names[name] for name in sorted(str(value.name) for value in alive[begin] & read)],
                    made,
                    frozenset(str(value.name) for value in alive[end]),
                    {str(node.name): edits[str(node.name)] for node in part if str(node.name) in edits},
                )
            )
    return parts


def _float_weights(float_model: ir.Model) -> dict[str, ir.Value | None]:
    """Returns the weights of the layers of a float model, by layer."""
    return {
        str(node.name or node.outputs[0].name): node.inputs[1]
        for node in float_model.graph
        if node.op_type in layers.LAYERS
    }


def _float_inputs(node: ir.Node, originals: Mapping[str, ir.Value | None]) -> dict[int, str | Array]:
    """Returns the names of the float inputs of a layer of an int8 model, or its float weights, by position."""
    inputs: dict[int, str | Array] = {}
    for index, x in enumerate(node.inputs):
        dequantize = query.producer(x, "DequantizeLinear")
        quantize = query.producer(dequantize.inputs[0] if dequantize is not None else None, "QuantizeLinear")
        if quantize is not None and quantize.inputs[0] is not None:
            inputs[index] = str(quantize.inputs[0].name)
    weights, exact = Weights.of(node), query.constant(originals.get(str(node.name)))
    if weights is not None and exact is not None and exact.shape == weights.integers.shape:
        inputs[1] = exact
    return inputs


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
    quantizer: Quantizer,
    table: CalibrationTable,
    metric: OutputSqnr,
    observation: Observation,
    sqnr: float,
    goal: float,
    thorough: bool = True,
    measured: int = 1,
    *,
    kinds: bool = False,
    share: float = FLOAT_SHARE,
    jointly: bool = False,
) -> CalibrationTable:
    """Keeps the layers of largest error per multiplication in float32 until an SQNR is reached.

    At most `share` of the multiplications become float32, each layer for a gain of at least `SENSITIVE`, and of
    `GAIN` times its share of the multiplications. The gain of a layer on its own is measured on the first batches.

    Args:
        quantizer: Quantizer of the float model.
        table: Calibration table of the model.
        metric: SQNR of int8 models on held-out samples.
        observation: Observation of the model, which counts multiplications.
        sqnr: SQNR of `table` by `metric`, in dB.
        goal: SQNR to reach, in dB.
        thorough: Evaluate every layer with the layers before it in a model that is quantized anew; otherwise only those
            that also gain in `FloatLayers` on the batches after the first ones.
        measured: Number of the first batches.
        kinds: Treat layers as one group if their names have the same end behind a number, such as encoder.0.feed.outer
            and decoder.5.feed.outer. Where all of them have large errors, the gain of a single layer is small.
        share: Maximum share of the multiplications in float32.
        jointly: If the SQNR is not reached, keep the layers with the fewest multiplications in float32 together. Where
            many layers have large errors, the gain of a single layer is small.

    Returns:
        `table` with `keep_float`.
    """
    int8, report = quantizer.quantize(table)
    scaled = equalized(quantizer.model, table.equalization, table.smoothing, table.splitting)
    counted = multiplications(quantizer.model, observation)
    names = [layer.name for layer in report.operators if layer.precision == "int8" and layer.name in counted]
    total = sum(counted[name] for name in names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_kind(name) if kinds else name, []).append(name)
    counted |= {group: sum(counted[name] for name in members) for group, members in groups.items()}
    trials = FloatLayers(metric, int8, scaled, names)
    first, others = slice(measured), slice(measured, measured + max(measured, 2))
    checked = others if metric.batches > measured else first
    base, gains = trials.sqnr((), first), {}
    with progress("measuring layers in int8", len(groups)) as advance:
        for group, members in groups.items():
            gains[group] = trials.sqnr(members, first) - base
            advance(1)
    kept: dict[str, str] = {}
    room = share * total
    before = trials.sqnr(kept, checked)
    for group in sorted(groups, key=lambda name: -gains[name] / counted[name]):
        least = max(SENSITIVE, GAIN * counted[group] / total)
        if gains[group] < least or counted[group] > room or sqnr >= goal:
            continue
        more = kept | dict.fromkeys(groups[group], f"int8 costs {gains[group]:.1f} dB of SQNR here")
        if not thorough and trials.sqnr(more, checked) < before + least:
            continue
        reached = metric(quantizer.quantize(replace(table, keep_float=more))[0])
        if reached > sqnr + least:
            kept, sqnr, room = more, reached, room - counted[group]
            before = trials.sqnr(kept, checked)
    if jointly and sqnr < goal:
        order, room = list[str](), share * total
        for group in sorted(groups, key=lambda name: counted[name]):
            if counted[group] <= room:
                order, room = [*order, group], room - counted[group]
        least = max(SENSITIVE, GAIN * (share - room / total))
        choices = [[name for group in order[:count] for name in groups[group]] for count in range(1, len(order) + 1)]

        def together(names: list[str]) -> CalibrationTable:
            reason = "int8 costs, together with other layers, much SQNR here"
            return replace(table, keep_float=dict.fromkeys(names, reason), bias={}, rounding={})  # were fitted to int8

        def sqnr_of(names: list[str]) -> float:
            return metric(quantizer.quantize(together(names))[0])

        if fewest := _fewest(choices, sqnr_of, sqnr + least, goal):
            return together(fewest)
    return replace(table, keep_float=kept)


def _fewest(
    choices: Sequence[list[str]], sqnr_of: Callable[[list[str]], float], least: float, goal: float
) -> list[str]:
    """Returns the fewest layers that reach a goal together, or `NEARLY` what most of them reach.

    choices: layers, each choice with those of the one before. least: SQNR that most of them must reach; [] if not.
    """
    most = sqnr_of(choices[-1]) if choices else -np.inf
    if most < least:
        return []
    wanted = min(goal, most - NEARLY)
    return choices[bisect.bisect_left(choices, True, hi=len(choices) - 1, key=lambda names: sqnr_of(names) >= wanted)]


def _kind(name: str) -> str:
    """Returns the part of a layer's name behind the last number."""
    return re.split(r"(?:^|\.)\d+\.", name)[-1]


def with_float_layers(
    quantizer: Quantizer,
    table: CalibrationTable,
    batches: Sequence[Batch],
    goal: float,
    *,
    kinds: Iterable[bool] = (False,),
    share: float = FLOAT_SHARE,
) -> Iterator[CalibrationTable]:
    """Keeps the layers of largest error in float32, chosen on a few batches; see `leave_float`.

    Args:
        quantizer: Quantizer of the float model.
        table: Calibration table of the model.
        batches: Samples; gains are measured on the first half, and checked on the others.
        goal: SQNR to reach, in dB.
        kinds: See `leave_float`, for each table.
        share: See `leave_float`.

    Yields:
        `table` with `keep_float`.
    """
    metric = OutputSqnr(quantizer.model, batches, True)
    observation = observe(quantizer.model, batches, binned=(), quick=True)
    sqnr = metric(quantizer.quantize(table)[0])
    measured = max(len(batches) // 2, 1)
    for merged in kinds:
        yield leave_float(quantizer, table, metric, observation, sqnr, goal, False, measured, kinds=merged, share=share)
