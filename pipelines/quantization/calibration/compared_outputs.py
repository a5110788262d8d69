"""Float tensors on which an int8 model is compared with its float model, and their error.

Logits count instead of the probabilities of a final Softmax or Sigmoid, most of which are near zero. An output that is
no float tensor (a sequence, a map, strings, class numbers) cannot be compared in decibels: the float tensors that it is
computed from are compared instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch, cut, length
from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session, sample_axis, token_mask
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.layerwise import chunk_size

Array = NDArray[Any]
MASKED = np.float32(-1e8)  # logits of excluded tokens and scores of padding are below
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
ROOM = 8_000_000  # maximum bytes of the largest tensor of a run
GARBAGE = 2**26  # bytes of weights of evaluated models above which memory is freed
MIN_WORST_SAMPLES, SHARE = 2, 64  # the worst samples: one of `SHARE`, at least `MIN_WORST_SAMPLES`
PERFECT = 120.0  # dB of SQNR of outputs without error


@dataclass(frozen=True)
class ComparedOutputs:
    """Tensors of a float model that its int8 models are compared on.

    Attributes:
        outputs: Positions of the compared outputs of the graph.
        inner: Names of further compared tensors: those that other outputs are computed from.
        varying: Positions, of `outputs` and `inner` together, of tensors whose first axis depends on the data. Batches
            where the int8 model chooses another number of rows are not compared.
    """

    outputs: tuple[int, ...]
    inner: tuple[str, ...]
    varying: frozenset[int]

    @classmethod
    def of(cls, model: ir.Model) -> ComparedOutputs:
        """Finds the compared tensors of a float model.

        Outputs whose size depends on the data (boxes selected by NonMaxSuppression) are replaced by the float tensors
        that they were selected from, because an int8 model may select fewer or more. If layers compute an output from
        selected rows (crops of a two-stage detector, routed tokens), it is compared too.

        Args:
            model: Float model; it is not changed.

        Returns:
            The compared tensors.
        """
        graph = model.graph
        if any(query.is_op(node, *query.CHOOSING) for node in graph) or not all(map(_is_float, graph.outputs)):
            copy = model.clone()
            infer_shapes(copy)
            graph = copy.graph
        selected = query.selected(graph)
        layers = [node for node in selected if query.is_op(node, *WEIGHTED)]
        behind = {value for node in [*layers, *query.downstream(graph, *_results(layers))] for value in node.outputs}
        computed = {value for node in selected for value in node.outputs}
        kept: list[int] = []
        varying: list[int] = []
        sources: dict[str, ir.Value] = {}
        for position, value in enumerate(graph.outputs):
            if value in computed:
                if value in behind and _is_float(value):
                    varying.append(position)
            elif _is_float(value):
                kept.append(position)
            elif not isinstance(value.type, ir.TensorType):
                sources.update(_sources([value]))
        if any(value in computed for value in graph.outputs):
            read = (value for node in selected for value in query.values_read(node) if value not in computed)
            sources.update({str(value.name): value for value in read if query.is_float(value) and value.producer()})
        if not kept and not varying and not sources:
            sources.update(_sources(graph.outputs))
            kept = [] if sources else list(range(len(graph.outputs)))
        positions = [*kept, *varying]
        compared = {tensor for index in positions for tensor in (graph.outputs[index], _logits(graph.outputs[index]))}
        inner = tuple(name for name in sorted(sources) if sources[name] not in compared)
        return cls(tuple(positions), inner, frozenset(range(len(kept), len(positions))))

    def cut(self, model: ir.Model) -> ir.Model:
        """Copies a model so that its outputs are the compared tensors.

        Args:
            model: The float model, or an int8 model of it.

        Returns:
            The copy.
        """
        copy = model.clone()
        graph = copy.graph
        outputs = [graph.outputs[position] for position in self.outputs]
        for index, value in enumerate(outputs):
            if (logits := _logits(value)) is not None:
                outputs[index] = logits
                logits.type, logits.shape = value.type, None
        if self.inner:
            infer_shapes(copy)
            values = {str(value.name): value for value in (*graph.inputs, *_results(graph))}
            outputs += [_float_form(graph, values, name) for name in self.inner]
        unique: list[ir.Value] = []
        for value in outputs:  # one tensor may be the logits of two outputs
            unique.append(_copied(graph, value) if value in unique else value)
        graph.outputs[:] = unique
        return copy

    def with_inner(self, model: ir.Model, names: Iterable[str]) -> ComparedOutputs:
        """Adds inner tensors that are compared too, unless they are outputs.

        Args:
            model: The float model.
            names: Names of float tensors.

        Returns:
            The compared tensors.
        """
        others = {*self.inner, *(str(output.name) for output in model.graph.outputs)}
        return replace(self, inner=(*self.inner, *(name for name in dict.fromkeys(names) if name not in others)))

    def errors(self, results: Iterable[tuple[Sequence[Array], Sequence[Array]]]) -> Errors:
        """Computes the errors of the compared tensors, without those of single samples.

        Args:
            results: For every batch the compared tensors x of the float model and y of the int8 model.

        Returns:
            The errors.
        """
        return squared_errors(results, self.varying)


@dataclass
class Errors:
    """Errors of an int8 model on samples.

    Attributes:
        noise: Sum of (x - y)^2, for x of the float model and y of the int8 model, by compared tensor.
        power: Sum of x^2, by compared tensor.
        single: SQNR of every sample in dB.
    """

    noise: dict[int, float] = field(default_factory=dict)
    power: dict[int, float] = field(default_factory=dict)
    single: list[float] = field(default_factory=list)

    def add(self, other: Errors) -> None:
        """Adds the errors on other samples.

        Args:
            other: Errors of the same int8 model.
        """
        for mine, more in ((self.noise, other.noise), (self.power, other.power)):
            for index, value in more.items():
                mine[index] = mine.get(index, 0.0) + value
        self.single += other.single

    @property
    def relative(self) -> float:
        """Mean relative squared error of the tensors."""
        shares = [self.noise[index] / self.power[index] for index in self.noise if self.power[index] > 0]
        return float(np.nan_to_num(np.mean(shares or [0.0]), nan=np.inf))

    @property
    def overall(self) -> float:
        """SQNR of all samples together, in dB; a few samples of much error outweigh the others."""
        return decibel(self.relative)

    @property
    def sqnr(self) -> float:
        """Mean of the SQNR of all samples together and of the mean SQNR of single samples, in dB."""
        return float(np.mean(self.single) + self.overall) / 2

    @property
    def worst(self) -> float:
        """Mean SQNR in dB of the samples of lowest SQNR: one of `SHARE`, at least `MIN_WORST_SAMPLES`."""
        return float(np.sort(self.single)[: max(len(self.single) // SHARE, MIN_WORST_SAMPLES)].mean())


class OutputSqnr:
    """SQNR of int8 models in dB: the mean of the SQNR of all samples together and of the mean SQNR of single samples.

    A sample near a decision boundary may have more error than all others. The first figure alone would let it choose
    the ranges; the second alone would ignore it. The tensors are those of `ComparedOutputs`; padded positions of texts
    do not count (`pipelines.graph.token_mask`).

    Behind a TopK, int8 models go on with the positions that the float model chose, and its scores are compared too: two
    queries of a detector in another order would have more error than all quantization.

    Args:
        model: Float model.
        samples: Batches, kept in memory, as the results of the float model are.
        optimized: Run the models with onnxruntime's optimizations, which is quicker.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Batch], optimized: bool = False) -> None:
        self._samples, self._optimized = samples, optimized
        rankings = _rankings(model)
        self._chosen = list(rankings)
        self._compared = ComparedOutputs.of(model).with_inner(model, rankings.values())
        self._float = self._compared.cut(model)
        positions = [_copied(self._float.graph, position) for position in _named(self._float.graph, self._chosen)]
        self._float.graph.outputs.extend(positions)
        self._weights, self._garbage = query.weight_bytes(model), 0
        self._mask = token_mask.mask_of(model.graph)
        self._at_once = chunk_size(model, samples[0], ROOM) if can_be_cut(model) else 0
        self._exact: list[list[Array]] = []  # of the first batches
        self._positions: list[Batch] = []  # that the float model chose, likewise

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._samples)

    def cut(self, model: ir.Model) -> ir.Model:
        """Copies an int8 model, see `ComparedOutputs.cut`; the positions that a TopK chooses become inputs."""
        copy = self._compared.cut(model)
        for position in _named(copy.graph, self._chosen):
            fed = ir.Value(name=position.name, type=ir.TensorType(ir.DataType.INT64))
            position.name = f"{position.name}.own"
            position.replace_all_uses_with(fed)
            copy.graph.inputs.append(fed)
        return copy

    def session(self, cut: ir.Model | reference_session.Serialized) -> ort.InferenceSession:
        """Opens a session of a model that `cut` made.

        Args:
            cut: The model, or its bytes.

        Returns:
            The session.
        """
        options = reference_session.options(self._optimized, lean=True, prepack=self._optimized)
        return reference_session.session(cut, "its evaluation needs", options)

    def __call__(self, int8: ir.Model, batches: int | None = None) -> float:
        """Computes the SQNR of an int8 model.

        Args:
            int8: Int8 model with the inputs of the float model.
            batches: Use only the first `batches` batches; None: all.

        Returns:
            SQNR in dB.
        """
        return self.of(self.open(int8), slice(batches))

    def open(self, int8: ir.Model) -> ort.InferenceSession:
        """Opens a session of the compared tensors of an int8 model, see `of`.

        Args:
            int8: Int8 model with the inputs of the float model.

        Returns:
            The session.
        """
        self._garbage += self._weights
        if self._garbage > GARBAGE:
            machine.trim()  # graphs are reference cycles that hold the weights
            self._garbage = 0
        return self.session(self.cut(int8))

    def of(self, session: ort.InferenceSession, batches: slice) -> float:
        """Computes the SQNR of an int8 model in a session.

        Args:
            session: Result of `session`.
            batches: Batches to use.

        Returns:
            SQNR in dB.
        """
        return self.errors(session, batches).sqnr

    def errors(self, session: ort.InferenceSession, batches: slice) -> Errors:
        """Computes the errors of an int8 model in a session.

        Args:
            session: Result of `session`.
            batches: Batches to use.

        Returns:
            The errors.
        """
        total = Errors()
        used = range(len(self._samples))[batches]
        missing = self._samples[len(self._exact) : max(used, default=-1) + 1]
        if missing:
            exact = self.session(self._float)
            for batch in missing:
                results = self._run(exact, batch)
                end = len(results) - len(self._chosen)
                self._exact.append(results[:end])
                self._positions.append(dict(zip(self._chosen, results[end:], strict=True)))
        for index in used:
            pair = self._exact[index], self._run(session, {**self._samples[index], **self._positions[index]})
            total.add(self._compared.errors([pair]))
            total.single += [
                decibel(self._compared.errors([sample]).relative) for sample in per_sample(self._samples[index], *pair)
            ]
        return total

    def _run(self, session: ort.InferenceSession, batch: Batch) -> list[Array]:
        """Returns the outputs for a batch, in parts that fit `ROOM`."""
        if not 0 < self._at_once < length(batch) or len({array.shape[:1] for array in batch.values()}) > 1:
            return self._results(session, batch)
        parts = list(cut(batch, self._at_once))
        results = [self._results(session, part) for part in parts]
        if any(x.shape[:1] != (length(part),) for part, outputs in zip(parts, results, strict=True) for x in outputs):
            return self._results(session, batch)  # an output without sample axis
        return [np.concatenate(pieces) for pieces in zip(*results, strict=True)]

    def _results(self, session: ort.InferenceSession, batch: Batch) -> list[Array]:
        return token_mask.without_padding(batch, reference_session.run(session, batch), self._mask)


def can_be_cut(model: ir.Model) -> bool:
    """Returns whether the graph takes batches of any size, the samples along the first axis of all inputs.

    Args:
        model: Model.
    """
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    return sample_axis.is_shared(model.graph) and all((query.dimensions(value) or [0])[0] is None for value in inputs)


def per_sample(batch: Batch, exact: list[Array], tested: list[Array]) -> list[tuple[list[Array], list[Array]]]:
    """Splits outputs of a batch by sample.

    Args:
        batch: The batch.
        exact: Outputs of the float model.
        tested: Outputs of the int8 model.

    Returns:
        (outputs of the float model, of the int8 model) of every sample; of all samples together if an output has no
        sample axis.
    """
    count = length(batch)
    if any(x.shape[:1] != (count,) for x in (*exact, *tested)):
        return [(exact, tested)]
    return [([x[index] for x in exact], [y[index] for y in tested]) for index in range(count)]


def decibel(error: float) -> float:
    """Returns the SQNR in dB of a relative squared error; `PERFECT` for 0.

    Args:
        error: Relative squared error.
    """
    return min(-10 * float(np.log10(error)), PERFECT) if error > 0 else PERFECT


def squared_errors(
    results: Iterable[tuple[Sequence[Array], Sequence[Array]]], varying: Set[int] = frozenset()
) -> Errors:
    """Computes sum (x - y)^2 and sum x^2 per float tensor.

    Masked values of x, infinite or at most `MASKED`, do not count. A y of another shape counts as zeros, or not
    at all if the tensor is `varying`.

    Args:
        results: For every batch the tensors x and the tensors y.
        varying: Positions of tensors whose first axis depends on the data.

    Returns:
        The errors, without those of single samples.
    """
    noise, power = dict[int, float](), dict[int, float]()
    for exact, tested in results:
        for index, (x, y) in enumerate(zip(exact, tested, strict=True)):
            if x.dtype.kind != "f" or (index in varying and x.shape != y.shape):
                continue
            counted = np.isfinite(x) & (x > MASKED)
            x, y = x[counted], y[counted] if y.shape == x.shape else np.zeros(counted.sum(), np.float32)
            noise[index] = noise.get(index, 0.0) + float(np.square(np.subtract(x, y, dtype=np.float64)).sum())
            power[index] = power.get(index, 0.0) + float(np.square(x, dtype=np.float64).sum())
    return Errors(noise, power)


def float_stem(name: str) -> str:
    """Returns the name of the float tensor that a value of an int8 model represents.

    Args:
        name: Name of a value of a model that `quantize` made.
    """
    return re.sub(r"(\.(de)?quantized(_\d+)?)+$", "", name)


def _is_float(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOATS


def _results(nodes: Iterable[ir.Node]) -> Iterator[ir.Value]:
    return (value for node in nodes for value in node.outputs)


def _logits(value: ir.Value) -> ir.Value | None:
    """Returns the input of the Softmax or Sigmoid that computes an output, else None."""
    producer = value.producer()
    return producer.inputs[0] if producer is not None and producer.op_type in ("Softmax", "Sigmoid") else None


def _sources(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    """Returns the nearest float32 tensors upstream of some values, by name; the logits in place of probabilities."""
    sources: dict[str, ir.Value] = {}
    waiting = list(values)
    seen = set(waiting)
    while waiting:
        value = waiting.pop()
        producer = value.producer()
        if producer is None:  # an input of the graph or a constant
            continue
        if query.is_float(value) and (logits := _logits(value) or value).producer() is not None:
            sources[str(logits.name)] = logits
            continue
        new = [operand for operand in query.values_read(producer) if operand not in seen]
        seen.update(new)
        waiting += new
    return sources


def _rankings(model: ir.Model) -> dict[str, str]:
    """Returns {positions: scores} of the TopK operators that rank computed float scores, if the positions are read."""
    if not any(query.is_op(node, "TopK") for node in model.graph):
        return {}
    copy = model.clone()
    infer_shapes(copy)
    rankings = {}
    for node in copy.graph:
        scores = node.inputs[0] if query.is_op(node, "TopK") else None
        if scores is not None and scores.producer() and query.is_float(scores) and node.outputs[1].uses():
            rankings[str(node.outputs[1].name)] = str(scores.name)
    return rankings


def _named(graph: ir.Graph, names: Iterable[str]) -> list[ir.Value]:
    """Returns results of operators by name."""
    values = {str(value.name): value for value in _results(graph)}
    return [values[name] for name in names]


def _float_form(graph: ir.Graph, values: dict[str, ir.Value], name: str) -> ir.Value:
    """Returns the float form of a tensor of the float model in this graph, dequantized if only integers are left."""
    if name in values and query.is_float(values[name]):
        return values[name]
    forms = [value for other, value in values.items() if float_stem(other) == name]
    if (form := next((value for value in forms if query.is_float(value)), None)) is not None:
        return form
    for value in forms:
        source = value.producer()
        while source is not None and source.op_type != "QuantizeLinear":  # data movement
            source = source.inputs[0].producer() if source.inputs and source.inputs[0] is not None else None
        if source is not None:
            qparams = source.inputs[1:]
            taken = query.used_names(graph)
            node = edit.node("DequantizeLinear", [value, *qparams], name, dtype=ir.DataType.FLOAT, taken=taken)
            graph.append(node)
            return node.outputs[0]
    raise RequestError(f"the int8 model has no tensor {name}, which it is compared on; quantize the float model again")


def _copied(graph: ir.Graph, value: ir.Value) -> ir.Value:
    node = edit.node("Identity", [value], f"{value.name}.copy", dtype=value.dtype, taken=query.used_names(graph))
    graph.append(node)
    return node.outputs[0]
