"""One-line summary of a quantized model, and its costliest float operators.

24 of 25 layers int8, 97% of the MACs; SQNR 26.4 dB; 1.6x in openvino; 1.4x in onnxruntime; 1.3x as openvino opens the
file
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.analysis import report
from pipelines.core.batches import Batch, length, share_axis
from pipelines.core.errors import ZooError
from pipelines.engines import catalog
from pipelines.engines.agreement import ALIKE, WrongResultsError, fault_of_engine, largest_difference
from pipelines.engines.as_opened import open_file
from pipelines.engines.session import Runnable
from pipelines.engines.stock import available
from pipelines.engines.timing import REFERENCE, measure, watch_cpu
from pipelines.graph import io, query
from pipelines.quantization.calibration.layerwise import sample_chunks
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq import layers
from pipelines.quantization.quantizer import QuantReport, clean_up

LOW_SQNR = 20.0  # dB of SQNR below which labels begin to change
MIN_SPEEDUP = 0.95  # speedup below which int8 counts as slower; short timings vary by a few percent
MAX_SAMPLE_MS = 1.0  # milliseconds of a sample in float, above which many are not timed
BATCH_ROWS = 512  # rows of the second timing
SQNR_SAMPLES = 16  # samples to measure the SQNR on
NAMED_OPERATORS = 3  # operators in a warning
QUICK_REPEATS = 3  # repetitions of quick timings
RANKING_SAMPLES = 4  # samples to rank operators by their error on
Times = tuple[float, float]  # milliseconds in float and in int8
SHAPES = ("Shape", "ConstantOfShape", "Size", "Range", "Constant")  # shape arithmetic, which is not listed


def summarize(
    float_model: ir.Model,
    int8_model: ir.Model,
    quantized: QuantReport,
    table: CalibrationTable,
    samples: Iterable[Batch],
    native: Path | None = None,
    quick: bool = False,
    path: Path | None = None,
) -> dict[str, Any]:
    """Summarizes a quantized model: int8 layers and MACs, SQNR, speed.

    Warnings report no int8 layer, an SQNR below `LOW_SQNR`, a speed below `MIN_SPEEDUP` at all timed batch sizes (of
    the file as users open it, see `pipelines.engines.as_opened`), and an engine with wrong results. An engine whose
    results of the float model differ as much has a warning of its own. Graphs that read rows (inputs [samples,
    columns]), such as rankers, are timed in batches of `BATCH_ROWS` rows too, as they run.

    Args:
        float_model: Float model after the rewrites.
        int8_model: Result of `quantize`.
        quantized: Report of `quantize`.
        table: Calibration table.
        samples: Batches, of which the first `SQNR_SAMPLES` samples are used; without samples, figures that need them
            are None.
        native: native.onnx of a model folder, which runs in the engines of this project; the files are then not timed
            as users open them. None: the native kernels run the int8 model if they support it.
        quick: Time ONNX Runtime, the native kernels and the files as users open them alone, with fewer repetitions.
        path: File of `int8_model`; the native kernels pack and validate it here, not at its first use, and write their
            program beside it (`catalog.prepare`). None: a copy.

    Returns:
        {"line", "layers", "int8_layers", "macs_int8" (share), "sqnr_db", "speed": {engine: float / int8 milliseconds},
        "engine": the fastest with int8, "many": samples of a second timing or None, "speed_of_many": {engine: float /
        int8 milliseconds of it}, "wrong": {engine: difference of its results, for engines left out},
        "split": {activation: number of its channels that got a copy, see `split_channels`},
        "costliest": [{"name", "type", "cost" (multiplications of a layer per batch, result elements of another
        operator), "reason"}] of float operators, "as_opened": {"engine", "speed": float / int8 milliseconds of the
        files as users open them, "speed_of_many"} or None, "of_best": [float / int8 milliseconds of the fastest engines
        for one sample, for many or None], "busy": whether other processes kept a timing from the CPU, "refused": why
        that engine refuses the int8 file if it runs the float file, or "", "float_differs": {engine: difference of its
        results, for engines that differ on the float model too}, "prepared": path of the native engine's program or
        None, "warnings"}.
    """
    few = _few(float_model, samples, _fixed(float_model))
    costs = _costs(float_model, few[0]) if few else {}
    layered = [op for op in quantized.operators if op.type in layers.LAYERS]
    int8 = [op for op in layered if op.precision == "int8"]
    macs = sum(costs.get(op.name, 0) for op in layered)
    floats = [op for op in quantized.operators if op.precision == "float" and op.type not in SHAPES]
    floats.sort(key=lambda op: (op.type not in layers.LAYERS, -costs.get(op.name, 0)))
    summary: dict[str, Any] = {
        "layers": len(layered),
        "int8_layers": len(int8),
        "macs_int8": sum(costs.get(op.name, 0) for op in int8) / macs if macs else None,
        "sqnr_db": output_sqnr(float_model, int8_model, few, quick, at_once=1, optimized=True) if few else None,
        "split": {name: len(copies) for name, copies in table.splitting.items()},
        "speed": {},
        "engine": None,
        "speed_of_many": {},
        "many": None,
        "wrong": {},
        "float_differs": {},
        "as_opened": None,
        "of_best": [],
        "busy": False,
        "refused": "",
        "prepared": None,
        "costliest": [
            {"name": op.name, "type": op.type, "cost": costs.get(op.name), "reason": op.reason} for op in floats
        ],
    }
    if summary["sqnr_db"] is not None and not np.isfinite(summary["sqnr_db"]):
        summary["sqnr_db"] = None if summary["sqnr_db"] > 0 else float("-inf")
    if few and int8:
        many = _many(float_model, few)
        summary |= _speed(float_model, int8_model, few[0], many, native, quick, path)
        summary["many"] = length(many) if many else None
    summary["line"] = _line(summary)
    summary["warnings"] = _warnings(
        summary, lambda: _damaging(float_model, int8_model, quantized, table, few[:RANKING_SAMPLES])
    )
    return summary


def _few(model: ir.Model, samples: Iterable[Batch], fixed: int | None) -> list[Batch]:
    """Returns up to `SQNR_SAMPLES` samples one at a time, or in the fixed batch size of the graph."""
    return list(itertools.islice(sample_chunks(model, samples, 1), max(SQNR_SAMPLES // (fixed or 1), 1)))


def _many(model: ir.Model, few: list[Batch]) -> Batch | None:
    """Returns a batch of `BATCH_ROWS` rows for a graph with inputs [samples, columns], or None."""
    ranks = {len(query.dimensions(value) or [0] * 3) for value in model.graph.inputs}
    if _fixed(model) is not None or not ranks <= {1, 2} or not share_axis(few[0]):
        return None
    alike = {name: array.shape for name, array in few[0].items()}  # texts have lengths of their own
    few = [sample for sample in few if {name: array.shape for name, array in sample.items()} == alike]
    rows = np.resize(np.arange(len(few)), BATCH_ROWS)
    return {name: np.concatenate([few[i][name] for i in rows]) for name in few[0]}


def _fixed(model: ir.Model) -> int | None:
    """Returns the fixed batch size of all inputs, or None."""
    sizes = {(query.dimensions(value) or [None])[0] for value in model.graph.inputs}
    return sizes.pop() if len(sizes) == 1 else None


def _costs(model: ir.Model, batch: Batch) -> dict[str, int]:
    """Runs the model; returns {operator: multiplications of a layer, or elements of its results}, {} if it fails."""
    copy = model.clone()
    clean_up(copy)
    names = [str(out.name) for node in copy.graph for out in node.outputs if out.name]
    try:
        results = report.results(copy, names, batch)
    except ZooError:
        return {}
    sizes = {name: _elements(result) for name, result in zip(names, results, strict=True)}
    costs = {}
    for node in copy.graph:
        elements = sum(sizes.get(str(out.name), 0) for out in node.outputs)
        weight = query.constant(node.inputs[1]) if node.op_type in layers.LAYERS else None
        if weight is not None and weight.size and node.op_type != "ConvTranspose":
            transposed = node.op_type == "Gemm" and query.is_transposed(node)
            channels = weight.shape[0] if node.op_type == "Conv" or transposed else weight.shape[-1]
            batches = int(np.prod(weight.shape[:-2])) if node.op_type == "MatMul" else 1
            elements = elements * weight.size // (channels * batches)
        elif weight is not None and node.inputs[0] is not None:
            elements = sizes.get(str(node.inputs[0].name), 0) * int(np.prod(weight.shape[1:]))
        costs[str(node.name)] = elements
    return costs


def _elements(result: Any) -> int:
    """Returns the number of elements of a tensor, or of all tensors of a sequence."""
    return sum(map(_elements, result)) if isinstance(result, list) else int(np.size(result))


def _speed(
    float_model: ir.Model,
    int8_model: ir.Model,
    batch: Batch,
    many: Batch | None = None,
    native_path: Path | None = None,
    quick: bool = False,
    int8_path: Path | None = None,
) -> dict[str, Any]:
    """Returns the fields "speed", "engine", "wrong", "float_differs" and the other timings of `summarize`.

    The two models are timed in turn, in one thread. The native kernels have
    no float: their int8 is compared with the float model in its fastest engine.
    """
    from pipelines.analysis.tune import open_stock

    floats: dict[float, Runnable] = {}
    wrong: dict[str, str] = {}
    float_differs: dict[str, str] = {}
    references: list[Any] = []  # float and int8
    reference: Runnable | None = None
    prepared: Path | None = None
    timed = _Timer(quick)
    with tempfile.TemporaryDirectory() as folder:
        float_path = io.save(float_model.clone(), Path(folder) / "float.onnx")
        paths = [float_path, int8_path or io.save(int8_model.clone(), Path(folder) / "int8.onnx")]
        for engine in [REFERENCE] if quick else available():
            try:
                sessions = [open_stock(path, engine, 1) for path in paths]
                references = references or sessions
                reference = references[1]
                if why := fault_of_engine(engine, sessions[1], reference, batch):
                    differing = float_differs if _float_differs(engine, sessions, references, batch) else wrong
                    differing[engine] = why
                    continue
                times = timed(sessions, batch)
            except ZooError:
                continue  # the engine does not support the graph
            floats[times[0]] = sessions[0]
            timed.add(engine, times, sessions, many)
        with contextlib.suppress(ZooError):  # the kernels do not support the graph
            native = catalog.load(native_path or paths[1], "native")
            if reference is not None and (why := fault_of_engine("native", native, reference, batch)):
                wrong["native"] = why
            elif floats:
                sessions = [floats[min(floats)], native]
                timed.add("native", timed(sessions, batch), sessions, many)
                prepared = int8_path and catalog.prepare(int8_path, batch)
        usable = not {*wrong, *float_differs} & {"openvino"}
        try:
            compared = reference if quick else None
            as_opened = _as_opened(paths, batch, many, timed, compared) if usable and native_path is None else None
            refused = _refused(paths, batch) if usable and native_path is None and as_opened is None else ""
        except WrongResultsError:  # in the int8 file, or in the float file too
            return _speed(float_model, int8_model, batch, many, int8_path=int8_path)
    return {
        "speed": {engine: _ratio(times) for engine, times in timed.of_one.items()},
        "engine": min(timed.of_one, key=lambda engine: timed.of_one[engine][1], default=None),
        "wrong": wrong,
        "float_differs": float_differs,
        "speed_of_many": {engine: _ratio(times) for engine, times in timed.of_many.items()},
        "as_opened": as_opened,
        "refused": refused,
        "prepared": prepared and str(prepared),
        "of_best": [_of_best(timed.of_one.values()), _of_best(timed.of_many.values())],
        "busy": timed.busy,
    }


def _ratio(times: Times) -> float:
    """Returns how much faster int8 is than float."""
    exact, int8 = times
    return round(exact / int8, 3)


def _of_best(pairs: Collection[Times]) -> float | None:
    """Returns the ratio of the fastest float to the fastest int8, over all engines; None without timings."""
    if not pairs:
        return None
    floats, int8 = zip(*pairs, strict=True)
    return round(float(min(floats) / min(int8)), 3)


def _float_differs(engine: str, sessions: Sequence[Runnable], references: Sequence[Runnable], batch: Batch) -> bool:
    """Whether the float model differs between an engine and the reference, at least half as much as the int8 model.

    sessions, references: of the float and of the int8 model, in this engine and in the reference engine.
    """
    try:
        exact, int8 = (
            largest_difference(engine, session.run(batch), expected.run(batch))[0]
            for session, expected in zip(sessions, references, strict=True)
        )
    except ZooError:
        return False
    return exact > ALIKE / 2 and exact >= int8 / 2


def _as_opened(
    paths: Sequence[Path], batch: Batch, many: Batch | None, timed: _Timer, reference: Runnable | None = None
) -> dict[str, Any] | None:
    """Returns "as_opened" of `summarize` for the float and the int8 file; None if the engine refuses one of them.

    reference: session of the int8 model for quick timings, of an engine that has not been checked yet. Raises
    WrongResultsError if the results differ from its results.
    """
    try:
        engine, int8 = open_file(paths[1])
        if reference is not None and (why := fault_of_engine(engine, int8, reference, batch)):
            raise WrongResultsError(why)
        _, exact = open_file(paths[0])
        exact_ms, ms = timed([exact, int8], batch)
        opened: dict[str, Any] = {"engine": engine, "speed": _ratio((exact_ms, ms)), "speed_of_many": None}
        if many and exact_ms < MAX_SAMPLE_MS:
            opened["speed_of_many"] = _ratio(timed([exact, int8], many))
    except WrongResultsError:
        raise
    except ZooError:
        return None
    return opened


def _refused(paths: Sequence[Path], batch: Batch) -> str:
    """Returns why the engine of `open_file` refuses the int8 file, if it runs the float file, or ""."""
    with contextlib.suppress(ZooError):
        open_file(paths[0])[1].run(batch)
        try:
            open_file(paths[1])[1].run(batch)
        except ZooError as error:
            return str(error).replace(str(paths[1]), "the int8 file")
    return ""


class _Timer:
    """Times float and int8 in turn.

    Attributes:
        busy: Whether other processes had the CPU in one of the timings.
        of_one: {engine: milliseconds of one sample}.
        of_many: {engine: milliseconds of many rows}, for fast engines.
    """

    def __init__(self, quick: bool) -> None:
        self._repeats = {"repeats": QUICK_REPEATS} if quick else {}
        self.busy = False
        self.of_one: dict[str, Times] = {}
        self.of_many: dict[str, Times] = {}

    def __call__(self, sessions: Sequence[Runnable], batch: Batch) -> Times:
        """Times a batch."""
        was_busy = watch_cpu()
        exact, ms = measure(sessions, batch, **self._repeats)
        if exact < MIN_SPEEDUP * ms:  # another process may have disturbed the timing
            again = measure(sessions, batch, **self._repeats)
            exact, ms = max((exact, ms), tuple(again), key=lambda pair: pair[0] / pair[1])
        self.busy |= was_busy()
        return exact, ms

    def add(self, engine: str, times: Times, sessions: Sequence[Runnable], many: Batch | None) -> None:
        """Records the times of one sample in an engine, and times many rows there if they are short."""
        self.of_one[engine] = times
        if many and times[0] < MAX_SAMPLE_MS:
            self.of_many[engine] = self(sessions, many)


def _slower(summary: dict[str, Any]) -> str:
    """Names the batch sizes at which int8 is slower than float, as users open the files or in the fastest engines."""
    opened = summary["as_opened"]
    speeds = summary["of_best"] if opened is None else [opened["speed"], opened["speed_of_many"]]
    sizes = ("1 sample", f"{summary['many']} samples")
    slow = [
        f"{size} ({speed:.2f}x)" for size, speed in zip(sizes, speeds, strict=False) if speed and speed < MIN_SPEEDUP
    ]
    return f"{_slow_where(summary)} at {' and '.join(slow)}" if slow else ""


def _slow_where(summary: dict[str, Any]) -> str:
    """Says that int8 is slower than float, and in which engine if it is not slower in the fastest ones."""
    opened, best = summary["as_opened"], [speed for speed in summary["of_best"] if speed is not None]
    elsewhere = opened is not None and bool(best) and max(best) >= MIN_SPEEDUP
    return f"SLOWER THAN FLOAT IN {opened['engine']}" if elsewhere else "SLOWER THAN FLOAT"


def _line(summary: dict[str, Any]) -> str:
    macs = "" if summary["macs_int8"] is None else f", {summary['macs_int8']:.0%} of the MACs"
    slower = _slower(summary)
    parts = [*([slower] if slower else []), f"{summary['int8_layers']} of {summary['layers']} layers int8{macs}"]
    if summary["sqnr_db"] is not None:
        parts.append(f"SQNR {summary['sqnr_db']:.1f} dB")
    if summary["split"]:
        parts.append(f"{sum(summary['split'].values())} hidden channels split in {len(summary['split'])} layers")
    if summary["engine"] is not None:
        engines = dict.fromkeys((summary["engine"], REFERENCE))
        parts += [_times(summary, engine=engine) for engine in engines if engine in summary["speed"]]
    if summary["as_opened"] is not None:
        parts.append(_times_as_opened(summary))
    if summary["busy"]:
        parts.append("timed on a busy CPU")
    parts += [f"WRONG in {engine}" for engine in summary["wrong"]]
    return "; ".join(parts)


def _speeds(summary: dict[str, Any], engine: str | None = None) -> list[float]:
    """Returns the speedups in an engine (None: the fastest), at one sample and at many if they were timed."""
    engine = engine or summary["engine"]
    return [speeds[engine] for speeds in (summary["speed"], summary["speed_of_many"]) if engine in speeds]


def _judged_speeds(summary: dict[str, Any]) -> list[float]:
    """Returns the speedups of the files as users open them, or those in the fastest engine if there are none."""
    opened = summary["as_opened"]
    if opened is None:
        return _speeds(summary)
    return [speed for speed in (opened["speed"], opened["speed_of_many"]) if speed is not None]


def _times_as_opened(summary: dict[str, Any], digits: int = 1) -> str:
    one, *many = (f"{speed:.{digits}f}x" for speed in _judged_speeds(summary))
    return f"{one} as {summary['as_opened']['engine']} opens the file" + (
        f" (1 sample), {many[0]} ({summary['many']} samples)" if many else ""
    )


def _times(summary: dict[str, Any], digits: int = 1, engine: str | None = None) -> str:
    engine = engine or summary["engine"]
    one, *many = (f"{speed:.{digits}f}x" for speed in _speeds(summary, engine))
    return f"{one} in {engine}" + (f" (1 sample), {many[0]} ({summary['many']} samples)" if many else "")


def _warnings(summary: dict[str, Any], damaging: Any) -> list[str]:
    costs = ", ".join(f"{op['name']} ({op['type']}: {op['reason']})" for op in summary["costliest"][:NAMED_OPERATORS])
    costly = f"; the costliest float operators: {costs}" if costs else ""
    warnings = [f"WRONG IN {engine}: {why}; run the file in another engine" for engine, why in summary["wrong"].items()]
    warnings += [
        f"{engine} computes the float file differently, too: {why}; run both files in another engine"
        for engine, why in summary["float_differs"].items()
    ]
    if summary["refused"]:
        warnings.append(f"{summary['refused']}; the float file runs there: run the int8 file in onnxruntime")
    if not summary["int8_layers"]:
        warnings.append(f"NOTHING IS INT8: 0 of {summary['layers']} layers{costly}")
    if summary["sqnr_db"] is not None and summary["sqnr_db"] < LOW_SQNR:
        worst = damaging()
        named = f"; most of it comes from {', '.join(worst)}" if worst else ""
        warnings.append(
            f"LOW ACCURACY: SQNR {summary['sqnr_db']:.1f} dB is below {LOW_SQNR:.0f} dB{named}; try --search, "
            "--keep-float REGEX for these, or zoo tune"
        )
    if summary["engine"] is not None and max(_judged_speeds(summary)) < MIN_SPEEDUP:
        opened = f", {_times_as_opened(summary, 2)}" if summary["as_opened"] is not None else ""
        warnings.append(
            f"{_slow_where(summary)}: {_times(summary, 2)}{opened}{costly}; keep the "
            "operators around them in float, too (--keep-float REGEX), or stay with the float model"
        )
    return warnings


def _damaging(
    float_model: ir.Model, int8_model: ir.Model, quantized: QuantReport, table: CalibrationTable, few: list[Batch]
) -> list[str]:
    """Returns the int8 operators of lowest SQNR on their own."""
    try:
        noise = report.noise_of_layers(float_model, int8_model, quantized, table, few)
    except ZooError:
        return []
    return sorted(noise, key=noise.__getitem__)[:NAMED_OPERATORS]
