"""Reports on quantized models: operators and reasons, tensors, the most damaging layers, operators that engines ran.

SQNR = 10 log10(sum x^2 / sum (x - y)^2) in dB, x the float model's tensor, y the int8 model's. Every operator has two:
`sqnr_db` of its output in the int8 model, with all error from upstream, and `own_db` with the float model's inputs, so
that only its weights and the rounding of its inputs count. The most damaging layers have the least `own_db`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.engines import stock
from pipelines.engines.agreement import fault_of_engine
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.session import Runnable
from pipelines.graph import query, reference_session, sample_axis
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.algorithms.correction import decibel
from pipelines.quantization.algorithms.equalize_channels import scale_channels
from pipelines.quantization.algorithms.smooth_channels import smooth_channels
from pipelines.quantization.algorithms.split_channels import split_channels
from pipelines.quantization.calibration.compared_outputs import float_stem
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.quantizer import QuantReport
from pipelines.rewrites.driver import CleanUp

MEMORY = 256e6  # maximum bytes of intermediate results of all graphs
CUT = 256  # maximum samples per run
FLOATS = ("f32", "f16", "bf16", "f64")
# Prefixes of operators in int8, whatever type their first input has
INTEGER_KERNELS = ("DynamicQuantize", "MatMulInteger", "ConvInteger", "QLinear", "QGemm")
QDQ = ("QuantizeLinear", "DequantizeLinear")
MAX_RUN_SAMPLES = 16  # samples that engines run
FLOAT_SUFFIX = "@float"  # suffix of inputs that take the float value of a tensor


def explain(
    float_model: ir.Model,
    int8_model: ir.Model,
    report: QuantReport,
    table: CalibrationTable,
    samples: Iterable[Batch],
    *,
    trials: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Analyses a quantized model.

    Memory holds about `MEMORY` bytes of results, and those of one sample.

    Args:
        float_model: Model that was quantized; equalized channels are equalized here too before the comparison.
        int8_model: Result of `quantize`.
        report: Report of `quantize`.
        table: Calibration table.
        samples: Batches, array [samples, ...] for every graph input; read once.
        trials: Trials of `pipelines.analysis.tune`, for the plot.

    Returns:
        Plain JSON values: {"graph", "recipe", "samples", "counts", "outputs": {name: {"sqnr_db"}}, "operators":
        [{"name", "type", "precision", "reason", "sqnr_db", "own_db"}], "damaging": [operator names, the worst first],
        "tensors": {name: {"scale", "zero_point", "minimum", "maximum", "low", "high" (range of the codes), "saturated"
        (share of values outside it), "sqnr_db" (of its rounding alone), "method" (observer of the range), "edges" and
        "counts" (without exact zeros; missing for old tables)}}, "engines": {engine: {"outputs": {name: SQNR in dB on
        the first samples}, "ran": {"type precision": count}, "fallbacks": [{"name", "type", "precision"}], "wrong":
        difference from onnxruntime, if any} or {"error"}}, "trials"}. An SQNR is None for equal tensors and where no
        comparison is possible.

    Raises:
        RequestError: There are no samples, or they do not fit.
    """
    comparison = _compare(float_model, int8_model, table, samples)
    operators = []
    for operator in report.to_json()["operators"]:
        output = comparison.outputs.get(operator["name"], "")
        chain, own = comparison.chain.get(output), comparison.own.get(output)
        dbs = {"sqnr_db": chain.db() if chain else None, "own_db": own.db() if own else None}
        operators.append({**operator, **dbs})
    lossy = [operator for operator in operators if operator["precision"] == "int8" and operator["own_db"] is not None]
    floats = list(comparison.results)
    expected = (
        dict(zip(floats, _run(_session(comparison.float, floats), comparison.first), strict=True)) if floats else {}
    )
    return {
        "graph": report.graph,
        "recipe": report.recipe.to_json(),
        "samples": comparison.seen,
        "counts": report.counts(),
        "outputs": {name: {"sqnr_db": noise.db()} for name, noise in comparison.results.items()},
        "operators": operators,
        "damaging": [operator["name"] for operator in sorted(lossy, key=lambda operator: operator["own_db"])],
        "tensors": {name: tensor.to_json(table.tensors[name]) for name, tensor in comparison.tensors.items()},
        "engines": {name: _ran(name, int8_model, operators, comparison.first, expected) for name in stock.available()},
        "trials": list(trials),
    }


def noise_of_layers(
    float_model: ir.Model, int8_model: ir.Model, report: QuantReport, table: CalibrationTable, samples: Iterable[Batch]
) -> dict[str, float]:
    """Returns `own_db` of the int8 operators with any error; see `explain`.

    Args:
        float_model: Model that was quantized.
        int8_model: Result of `quantize`.
        report: Report of `quantize`.
        table: Calibration table.
        samples: Batches, array [samples, ...] for every graph input.

    Returns:
        SQNR in dB by operator name.
    """
    comparison = _compare(float_model, int8_model, table, samples)
    own = {}
    for operator in report.operators:
        error = comparison.own.get(comparison.outputs.get(operator.name, ""))
        if operator.precision == "int8" and error is not None and (db := error.db()) is not None:
            own[operator.name] = db
    return own


def sqnr(signals: Sequence[NDArray[Any]], quantized: Sequence[NDArray[Any]]) -> float | None:
    """Computes the SQNR of arrays taken together.

    Args:
        signals: Reference arrays, float or integer, of any shapes.
        quantized: Arrays of the same shapes.

    Returns:
        SQNR in dB, None for equal arrays or no signal.
    """
    total = _ErrorPower()
    for x, y in zip(signals, quantized, strict=True):
        total.add(x.astype(np.float64), x.astype(np.float64) - y)
    return total.db()


def _compare(
    float_model: ir.Model, int8_model: ir.Model, table: CalibrationTable, samples: Iterable[Batch]
) -> _Comparison:
    table.require(float_model)
    equalized = float_model.clone()  # its activations are those that int8 rounds
    scale_channels(equalized, table.equalization)
    split_channels(equalized, table.splitting)
    smooth_channels(equalized, table.smoothing)
    comparison = _Comparison(equalized, int8_model, table)
    shared = sample_axis.is_shared(float_model.graph)
    for feed in _cut(samples, comparison.fixed, comparison.probe, shared):
        comparison.measure(feed)
        few = (
            {name: array[: comparison.fixed or MAX_RUN_SAMPLES] for name, array in feed.items()}
            if shared
            else dict(feed)
        )
        comparison.first = comparison.first or few
        comparison.seen += length(feed)
    if not comparison.first:
        raise RequestError("no samples to explain the model on; pass at least one")
    return comparison


@dataclass
class _ErrorPower:
    """Power of a signal and of its error, as sums of squares; `db` is their SQNR."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, x: NDArray[Any], error: NDArray[Any]) -> None:
        self.signal += float(np.vdot(x, x))
        self.noise += float(np.vdot(error, error))

    def db(self) -> float | None:
        return decibel(self.signal, self.noise)


@dataclass
class _RoundedTensor:
    """Rounding error and saturation of one activation, with the scale and zero point of its QuantizeLinear."""

    scale: float
    zero: int
    least: int
    most: int
    noise: _ErrorPower = field(default_factory=_ErrorPower)
    count: int = 0
    saturated: int = 0

    def add(self, x: NDArray[np.float32]) -> None:
        codes = np.clip(np.rint(x / np.float32(self.scale)) + self.zero, self.least, self.most)
        error = x - (codes - self.zero).astype(np.float32) * np.float32(self.scale)
        self.noise.add(x, error)
        self.count += x.size
        self.saturated += int((np.abs(error) > 0.51 * self.scale).sum())

    def to_json(self, observed: TensorRange) -> dict[str, Any]:
        edges, counts = (
            observed.histogram.density(observed.minimum, observed.maximum)
            if observed.histogram is not None
            else (np.zeros(0), np.zeros(0, int))
        )
        low, high = ((code - self.zero) * self.scale for code in (self.least, self.most))
        return {
            "scale": self.scale,
            "zero_point": self.zero,
            "minimum": observed.minimum,
            "maximum": observed.maximum,
            "low": low,
            "high": high,
            "saturated": self.saturated / max(self.count, 1),
            "sqnr_db": self.noise.db(),
            "method": observed.method,
            "edges": edges.tolist(),
            "counts": counts.tolist(),
        }


def _end(node: ir.Node, names: Collection[str]) -> str:
    """Returns the float tensor that ends a dynamically quantized product; "" if there is none."""
    out = node.outputs[0]
    while str(out.name) not in names:
        if (user := query.sole_user(out)) is None:
            return ""
        out = user.outputs[0]
    return str(out.name)


class _Comparison:
    """The float and the int8 graph, and every operator of the int8 graph on the results of the float graph."""

    def __init__(self, float_model: ir.Model, int8_model: ir.Model, table: CalibrationTable) -> None:
        self.float, self.int8 = float_model.clone(), int8_model.clone()
        CleanUp()(self.float)  # as `quantize` does, which names tensors by it
        infer_shapes(self.int8)
        self.table = table
        floats = {str(out.name) for node in self.float.graph for out in node.outputs if query.is_float(out)}
        inputs = {str(port.name) for port in self.float.graph.inputs if query.is_float(port)}
        self.outputs: dict[str, str] = {}  # operator -> the value of the int8 graph that is compared
        self.cut: list[str] = []
        self._find_outputs(floats)
        self.tensors: dict[str, _RoundedTensor] = {}
        self._find_tensors(floats | inputs)
        self.inputs = inputs & set(self.tensors)  # the graph's inputs that are quantized
        first = [
            port.shape[0] if port.shape is not None and len(port.shape) else None for port in self.float.graph.inputs
        ]
        self.fixed = first[0] if len(set(first)) == 1 and isinstance(first[0], int) else 0
        self.chain = {name: _ErrorPower() for name in self.outputs.values()}
        self.own = {name: _ErrorPower() for name in self.outputs.values()}
        names = {
            str(a.name): str(b.name) for a, b in zip(self.float.graph.outputs, self.int8.graph.outputs, strict=True)
        }
        self.results = {a: _ErrorPower() for a, b in names.items() if a == b and a in floats}
        self._groups: list[_TensorGroup] = []
        self.seen, self.first = 0, dict[str, NDArray[Any]]()

    def _find_outputs(self, floats: Collection[str]) -> None:
        """Finds the values that operators of the int8 graph are compared by. floats: results of the float graph."""
        for node in self.int8.graph:
            if node.op_type in QDQ or not node.outputs or float_stem(str(node.outputs[0].name)) not in floats:
                continue
            out = node.outputs[0]
            if query.is_float(out):
                self.cut.append(str(out.name))
            else:  # an int8 tensor: compared behind the DequantizeLinear that reads it
                dequantized = [user.outputs[0] for user in out.consumers() if user.op_type == "DequantizeLinear"]
                if not dequantized:
                    continue
                out = dequantized[0]
            self.outputs[str(node.name)] = str(out.name)
        for node in self.int8.graph:
            if node.op_type == "MatMulInteger" and (end := _end(node, floats)):
                self.outputs[str(node.name)] = end

    def _find_tensors(self, names: Collection[str]) -> None:
        """Finds scale and limits of the tensors that are quantized with ranges of the table. names: float tensors."""
        for node in self.int8.graph:
            x = node.inputs[0] if node.op_type == "QuantizeLinear" else None
            name = float_stem(str(x.name)) if x is not None else ""
            if name not in names or name not in self.table.tensors:
                continue
            scale, zero = (query.constant(value) for value in (*node.inputs[1:3], None, None)[:2])
            if scale is not None and zero is not None and scale.size == 1:
                limits = np.iinfo(zero.dtype)
                tensor = _RoundedTensor(float(scale.item()), int(zero.item()), int(limits.min), int(limits.max))
                self.tensors.setdefault(name, tensor)

    def probe(self, feed: Batch) -> int:
        """Opens the sessions; returns the number of samples per run, by the size of the results of a few samples."""
        names = sorted(
            {float_stem(name) for name in self.outputs.values()} | (set(self.tensors) - self.inputs) | set(self.results)
        )
        order = {str(out.name): index for index, node in enumerate(self.float.graph) for out in node.outputs}
        names.sort(key=lambda name: order[name])
        sizes = {name: array.nbytes for name, array in zip(names, _run(_session(self.float, names), feed), strict=True)}
        groups: list[list[str]] = [[]]
        for name in names:
            if groups[-1] and 3 * sum(sizes[member] for member in groups[-1]) + 3 * sizes[name] > MEMORY:
                groups.append([])
            groups[-1].append(name)
        self._groups = [_TensorGroup(self, group) for group in groups if group]
        heaviest = max((3 * sum(sizes[name] for name in group) for group in groups), default=1)
        return self.fixed or int(np.clip(MEMORY * length(feed) / max(heaviest, 1), 1, CUT))

    def measure(self, feed: Batch) -> None:
        """Adds the measurements of samples."""
        for name in self.inputs:
            self.tensors[name].add(np.asarray(feed[name]))
        for group in self._groups:
            x, chain, own = group.run(feed)
            for name in group.names:
                if name in self.tensors:
                    self.tensors[name].add(x[name])
                if name in self.results and chain[name].shape == x[name].shape:
                    self.results[name].add(x[name], x[name] - chain[name])
            for name in group.compared:
                signal = x[float_stem(name)]
                for error, y in ((self.chain[name], chain[name]), (self.own[name], own[name])):
                    if y.shape == signal.shape and np.isfinite(signal).all():
                        error.add(signal, signal - y)


class _TensorGroup:
    """Sessions for a group of tensors that fits the memory: float graph, int8 graph, single int8 operators."""

    def __init__(self, comparison: _Comparison, names: Sequence[str]) -> None:
        self.names = names
        stems = set(names)
        self.compared = sorted(name for name in comparison.chain if float_stem(name) in stems)
        chain = sorted({*self.compared, *(stems & set(comparison.results))})
        own = comparison.int8.clone()
        own.graph.outputs.clear()
        values = {str(out.name): out for node in own.graph for out in node.outputs}
        cuts = {
            f"{name}{FLOAT_SUFFIX}": ir.Value(name=f"{name}{FLOAT_SUFFIX}", type=ir.TensorType(ir.DataType.FLOAT))
            for name in comparison.cut
        }
        for name in comparison.cut:
            values[name].replace_all_uses_with(cuts[f"{name}{FLOAT_SUFFIX}"])
        own.graph.outputs.extend(values[name] for name in self.compared)
        own.graph.inputs.extend(cuts.values())
        RemoveUnusedNodesPass()(own)
        for unused in [value for value in own.graph.inputs if not value.uses()]:
            own.graph.inputs.remove(unused)
        self._fed = [str(port.name) for port in own.graph.inputs]
        needed = {float_stem(name.removesuffix(FLOAT_SUFFIX)) for name in self._fed if name in cuts}
        self._x = sorted(stems | needed)
        self._chain = chain
        self._sessions = (
            _session(comparison.float, self._x),
            _session(comparison.int8, chain),
            _session(own, self.compared) if self.compared else None,
        )

    def run(self, feed: Batch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns the results of the float graph, of the int8 graph, and of its single operators, by name."""
        a, b, c = self._sessions
        x = dict(zip(self._x, _run(a, feed), strict=True))
        chain = dict(zip(self._chain, _run(b, feed), strict=True)) if self._chain else {}
        inputs = {
            name: feed[name] if name in feed else x[float_stem(name.removesuffix(FLOAT_SUFFIX))] for name in self._fed
        }
        own = dict(zip(self.compared, _run(c, inputs), strict=True)) if c is not None else {}
        return x, chain, own


def _session(model: ir.Model, names: Sequence[str]) -> Any:
    """Opens a reference session, without optimizations, that returns these values."""
    copy = model.clone()
    values = {str(out.name): out for node in copy.graph for out in node.outputs}
    copy.graph.outputs.clear()
    for name in names:
        values[name].shape = None  # an output's shape is checked against the run's, and inference may have guessed
        copy.graph.outputs.append(values[name])
    RemoveUnusedNodesPass()(copy)
    return reference_session.session(copy, "the report needs")


def results(model: ir.Model, names: Sequence[str], batch: Batch) -> list[Any]:
    """Computes values of the main graph for a batch without optimizations.

    Args:
        model: Model.
        names: Names of the values.
        batch: Array for every graph input.

    Returns:
        The values.

    Raises:
        RequestError: The model does not run.
    """
    return _run(_session(model, names), batch)


def _run(session: Any, feed: Batch) -> list[Any]:
    inputs = {port.name for port in session.get_inputs()}
    return reference_session.run(session, {name: array for name, array in feed.items() if name in inputs})


def _cut(samples: Iterable[Batch], fixed: int, probe: Any, shared: bool) -> Iterator[Batch]:
    """Yields the samples in pieces of the size that `probe` returns for the first few.

    A remainder of a fixed batch size is skipped.
    """
    size = 0
    with progress("explaining") as advance:
        for batch in samples:
            if not shared or len({array.shape[:1] for array in batch.values()}) > 1:  # one feed
                size = size or probe(batch)
                yield batch
                advance(1)
                continue
            size = size or probe({name: array[: fixed or 1] for name, array in batch.items()})
            total = length(batch)
            for start in range(0, total - (total % size if fixed else 0), size):
                yield {name: np.ascontiguousarray(array[start : start + size]) for name, array in batch.items()}
                advance(min(size, total - start))


def _ran(
    engine: str, model: ir.Model, operators: Sequence[Mapping[str, Any]], batch: Batch, expected: Batch
) -> dict[str, Any]:
    """Runs the model in an engine; returns the SQNR of its outputs and the operators of its profile.

    A fallback is an operator that is int8 in the file and ran in float.
    """
    try:
        session = stock.STOCK[engine](Path("int8.onnx"), 1, ir.to_proto(model).SerializeToString())
        executed, outputs = session.executed(batch), session.run(batch)
        wrong = fault_of_engine(engine, session, _reference(model), batch)
    except ZooError as error:
        return {"error": str(error)}
    int8 = {operator["name"] for operator in operators if operator["precision"] == "int8"}
    ran: dict[str, int] = {}
    fallbacks = []
    for kernel in executed:
        kind = f"{kernel.type} {kernel.precision}"
        ran[kind] = ran.get(kind, 0) + 1
        if kernel.precision in FLOATS and kernel.type not in QDQ and not kernel.type.startswith(INTEGER_KERNELS):
            operator = _operator(kernel.name, int8)
            if operator is not None:
                fallbacks.append({"name": operator, "type": kernel.type, "precision": kernel.precision})
    alike = [name for name, x in expected.items() if name in outputs and outputs[name].shape == x.shape]
    return {
        "outputs": {name: sqnr([expected[name]], [outputs[name]]) for name in alike},
        "ran": dict(sorted(ran.items(), key=lambda item: (-item[1], item[0]))),
        "fallbacks": fallbacks,
        **({"wrong": wrong} if wrong else {}),
    }


def _reference(model: ir.Model) -> Runnable:
    """Returns the onnxruntime session that engines are validated against."""
    return OnnxRuntimeSession(Path("int8.onnx"), 1, ir.to_proto(model).SerializeToString())


def _operator(kernel: str, names: set[str]) -> str | None:
    """Returns the operator that a kernel of an engine computes; engines append to its name (`_token_3`)."""
    fitting = [name for name in names if kernel == name or kernel.startswith((f"{name}_", f"{name}/"))]
    return max(fitting, key=len, default=None)
