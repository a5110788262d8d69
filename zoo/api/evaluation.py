"""Commands that measure models: evaluate, benchmark, plan."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import zoo
from pipelines.analysis.benchmark import BATCHES, Configuration, Stages, pinned
from pipelines.analysis.benchmark import benchmark as time_configurations
from pipelines.analysis.benchmark import instances as time_instances
from pipelines.analysis.power import Meter
from pipelines.core import machine
from pipelines.core.batches import Batch, length
from pipelines.core.derived import temporary_derived
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import catalog
from pipelines.engines.plan import Candidate
from pipelines.engines.plan import build as build_plan
from pipelines.engines.quickest import leave_out_float
from pipelines.engines.session import BF16
from pipelines.engines.stock import available, computes, require_installed, require_precision
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.models.family import Explainable, ScenarioBenchmark
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS, GraphPipeline, choose_engine, graph_file, model_file
from pipelines.models.stages import remove_intermediate_files
from zoo.api.paths import Model, as_list, files_of, is_file, labelled_sample, open_model, require_data, require_distinct
from zoo.api.samples import examples_of

AS_IT_IS = "as it is"  # precision of an .onnx file
logger = logging.getLogger(__name__)


def evaluate(
    model: Model,
    data: Any = None,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    engine: str = "auto",
    threads: int = 1,
    batch_size: int | None = None,
    columns: Sequence[str] = (),
    on_error: str = "raise",
    importance: int = 0,
) -> dict[str, Any]:
    """Measures the quality of fp32 and int8 on the same labelled samples.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        data: Labelled raw input: a path, or a list of paths; None for the sample that ships with the model.
        precisions: Precisions to compare with fp32, which is always measured.
        engine: Inference engine. "native" has no fp32; fp32 then runs in the engine that "auto" selects.
        threads: Number of intra-op threads.
        batch_size: Samples of one inference; None for the default of the family.
        columns: Columns of tables with texts and labels (see `zoo.texts.data.text_files.read_rows`); for recommenders
            the column of the users, by which rows are grouped for GAUC.
        on_error: "raise" to stop at an invalid sample, "skip" to leave it out and count it.
        importance: Repeats of the permutation importance of columns, for families that measure it; 0: not measured.

    Returns:
        Report with "metrics" by precision, "difference" (int8 - fp32) with 95% paired bootstrap intervals, the number
        of "samples", and the "environment". "difference" belongs to the first of `precisions`; differences of further
        precisions are listed under "others". With `importance`, "importance" has the columns of the data, the most
        important first, in the first of `precisions`.

    Raises:
        RequestError: Data or options are invalid, or `precisions` names fp32 alone.
    """
    compared = tuple(dict.fromkeys(("fp32", *precisions)))
    if len(compared) < 2:
        raise RequestError("found --precision fp32 alone, expected int8 or bf16 to compare with it")
    require_data(data)
    folder = zoo.load(model)
    if importance and not isinstance(folder.entry, Explainable):
        able = [name for name, entry in zoo.entries().items() if isinstance(entry, Explainable)]
        raise RequestError(f"{folder.entry.name} has no --importance of columns; these families do: {', '.join(able)}")
    if data is None:
        data = labelled_sample(folder)
    kind = folder.entry.pipeline()
    pipelines = {}
    for level in compared:
        chosen = "auto" if level == "fp32" and catalog.base_engine(engine) == "native" else engine
        with temporary_derived(folder.path) if level == "fp32" else contextlib.nullcontext():
            pipelines[level] = kind(folder, level, chosen, threads, batch_size)
        leave_out_float(getattr(pipelines[level], "session", None))
        if columns:
            pipelines[level].read_columns(columns)
    remove_intermediate_files(folder)
    quality = folder.entry.evaluate(pipelines, data, on_error)
    if importance and isinstance(folder.entry, Explainable):
        measured = pipelines[next(precision for precision in precisions if precision != "fp32")]
        quality["importance"] = folder.entry.importance(measured, data, repeats=importance, on_error=on_error)
    engines = {precision: pipeline.engine for precision, pipeline in pipelines.items()}
    where = machine.environment(threads=threads, batch_size=next(iter(pipelines.values())).batch_size, engines=engines)
    return {
        "model": folder.card.name,
        "data": [Path(part).name for place in as_list(data) for part in str(place).split(",")],
        **quality,
        "environment": where,
    }


def benchmark(
    model: Model,
    others: Sequence[Model] = (),
    *,
    data: Model | None = None,
    preprocess: Model | None = None,
    precisions: Sequence[str] = ("fp32", "int8"),
    engines: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    threads: int = 1,
    rounds: int = 15,
    instances: int = 1,
    scenario: str | None = None,
    count: int = 1000,
    min_top1: float | None = None,
    min_top5: float | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Measures throughput, latency and memory of every precision and engine.

    Configurations run in turn, once per round, for each batch size. An ONNX file and `others` of the same inputs are
    timed as they are, in the stock engines and, where supported, in the native kernels.

    Args:
        model: Name of a pretrained model, path of a model folder, or path of an .onnx file.
        others: Further .onnx files with the same inputs, e.g. the int8 version of `model`.
        data: Raw input of the batches; None for the model's sample. For an .onnx file: an .npz of its inputs, or images
            with `preprocess` (see `zoo.api.samples.samples_of`); None for random values.
        preprocess: JSON file with the image preprocessing of an .onnx file; None for that of `zoo run`.
        precisions: Precisions of a zoo model.
        engines: Inference engines; None for all that the machine and the model support. "native" runs int8 only, bf16
            runs in OpenVINO only.
        batch_sizes: None for the default of the family (`Pipeline.BATCH_SIZE`), or 1 for an .onnx file.
        threads: Number of intra-op threads of one instance.
        rounds: Number of rounds.
        instances: Number of concurrent processes, each pinned to `threads` cores. With 2 or more, only the model is
            timed, without pre- and postprocessing (see `pipelines.analysis.benchmark.instances`).
        scenario: "single-stream" or "offline" for image classifiers: measures from image files in `data` to classes,
            after the accuracy (see `zoo.vision.timed_evaluation.run_scenario`).
        count: Number of images that a scenario times.
        min_top1: Minimum top-1 accuracy, from 0 to 1, for a configuration to be timed.
        min_top5: Minimum top-5 accuracy, from 0 to 1, for a configuration to be timed.
        price_per_hour: Price of the machine; adds the cost of one million images.

    Returns:
        Report with "results", a list with "samples_per_second", "latency_ms" (p50, p95, p99), "split_ms" and
        "memory_mb" of each configuration, and "environment". For .onnx files, "results" also have "bytes" and
        "speedup": the throughput relative to `model` in the same engine, or in its fastest engine where the native
        kernels cannot compute `model`. "failed" lists the engines that cannot run a file, with the reason.

    Raises:
        RequestError: Data or options are invalid.
    """
    if scenario is None and {min_top1, min_top5, price_per_hour} != {None}:
        raise RequestError(
            "--min-top1, --min-top5 and --price-per-hour require --scenario single-stream or --scenario offline"
        )
    if is_file(model):
        if scenario is not None:
            raise RequestError(f"--scenario requires a zoo model; {model} is an ONNX file")
        sizes = batch_sizes or (1,)
        return _benchmark_files([model, *others], data, preprocess, engines, sizes, threads, rounds, instances)
    if others:
        raise RequestError(f"further files require an ONNX file as MODEL; {model} is a zoo model")
    folder = open_model(model, preprocess, data)
    if wrong := [precision for precision in precisions if precision not in PRECISIONS]:
        raise RequestError(f"unknown precision {', '.join(wrong)}; choose among {', '.join(PRECISIONS)}")
    if scenario is not None:
        if instances != 1 or batch_sizes is not None:
            raise RequestError(
                "a scenario selects its batch sizes and runs in one process; leave out --batch-size and --instances"
            )
        if price_per_hour is not None and not price_per_hour >= 0:
            raise RequestError(f"the price is {price_per_hour} an hour; expected 0 or more")
        min_accuracy = {"top1": min_top1, "top5": min_top5}
        more = {"scenario": scenario, "count": count, "min_accuracy": min_accuracy, "price_per_hour": price_per_hour}
        return _scenario(folder, precisions, engines or ("auto",), threads, data, more)
    kind = folder.entry.pipeline()
    batch_sizes = (kind.BATCH_SIZE,) if batch_sizes is None else batch_sizes
    _require_counts(batch_sizes, rounds, threads, instances)
    cores = pinned(instances, threads) if instances > 1 else []
    names = list(engines or kind.engines(folder))
    if {catalog.base_engine(name) for name in names} == {"native"}:
        precisions = [precision for precision in precisions if precision == "int8"] or [
            model_file(precisions[0], "native")
        ]
    results = []
    for size in batch_sizes:
        opened = kind(folder, precisions[0], "auto", threads, size)
        raw = opened.example(size, data)
        batch = opened.preprocess(raw)
        configurations = []
        for precision in precisions:
            chosen = [kind.quickest(folder, precision, batch, threads) if name == "auto" else name for name in names]
            usable = _usable(chosen, precision)
            usable = usable or (chosen if precision == BF16 else [])  # raises below
            configurations += [configuration(folder, precision, engine) for engine in usable]
        if cores:
            results += time_instances(
                configurations, opened.preprocess(opened.example(size * BATCHES, data)), size, cores, rounds
            )
            continue
        stages = Stages(lambda opened=opened, raw=raw: opened.preprocess(raw), opened.postprocess)  # type: ignore[misc]
        results += time_configurations(configurations, batch, threads, rounds, stages)
    return {
        "model": folder.card.name,
        "results": results,
        "environment": machine.environment(threads=threads, rounds=rounds, power=Meter().fault or "read"),
    }


def _benchmark_files(
    paths: Sequence[Model],
    data: Model | None,
    preprocess: Model | None,
    engines: Sequence[str] | None,
    batch_sizes: Sequence[int],
    threads: int,
    rounds: int,
    instances: int,
) -> dict[str, Any]:
    """Times ONNX files in turn, in the stock engines and in the native kernels if they support a file."""
    _require_counts(batch_sizes, rounds, threads, instances)
    supported = [*available(), *(["native"] if extension.isas() else [])]
    if missing := [path for path in paths if not is_file(path)]:
        raise RequestError(f"no ONNX model at {missing[0]}; pass the path of an .onnx file")
    files = [Path(path) for path in paths]
    names = list(dict.fromkeys(engines or supported))
    require_installed(*names)
    if wrong := [name for name in names if name not in supported]:
        raise RequestError(f"unknown or missing engine {', '.join(wrong)}; an ONNX file runs in {', '.join(supported)}")
    machine.require_threads(threads)
    graphs = [io.load(file) for file in files]
    batches = examples_of(graphs[0], data, batch_sizes, preprocess, files[0])
    _require_same_inputs(paths, graphs)
    labels = [Path(path).name for path in paths]
    labels = labels if len(set(labels)) == len(labels) else [str(path) for path in paths]
    pairs = list(zip(labels, files, strict=True))
    asked = {label: catalog.native_candidates(path, AS_IT_IS, names) for label, path in pairs}
    failed = [f"{label}: {reason}" for label, (_, why) in asked.items() for reason in why]
    if set(names) == {"native"} and len(failed) == len(files):
        raise RequestError(failed[0])
    stock = [name for name in names if name != "native"]
    if engines is None:
        stock = _runnable(stock, paths, batches[0], threads)
    configurations = [Configuration(engine, label, path) for label, path in pairs for engine in stock]
    configurations += [Configuration("native", label, path) for label, path in pairs if asked[label][0]]
    sizes = {label: Path(path).stat().st_size for label, path in pairs}
    cores = pinned(instances, threads) if instances > 1 else []
    results = []
    for batch in batches:
        example = batch if data is not None else _random(batch)
        if cores:
            rows = time_instances(configurations, example, length(example), cores, rounds)
        else:
            rows = time_configurations(configurations, example, threads, rounds)
        results += _with_speedups(rows, labels[0], sizes)
    environment = machine.environment(threads=threads, rounds=rounds, power=Meter().fault or "read")
    return {
        "model": labels[0],
        "data": None if data is None else Path(data).name,
        "results": results,
        "failed": failed,
        "environment": environment,
    }


def _require_counts(batch_sizes: Sequence[int], rounds: int, threads: int, instances: int) -> None:
    if min(batch_sizes, default=0) < 1 or min(rounds, threads, instances) < 1:
        settings = f"batch sizes {list(batch_sizes)}, rounds {rounds}, threads {threads} and instances {instances}"
        raise RequestError(f"{settings} must all be 1 or more")


def _require_same_inputs(paths: Sequence[Model], graphs: Sequence[ir.Model]) -> None:
    ports = [{str(source.name): source.dtype for source in graph.graph.inputs} for graph in graphs]
    for path, port in zip(paths, ports, strict=True):
        if port != ports[0]:
            expected = ", ".join(f"{name} {dtype}" for name, dtype in ports[0].items())
            inputs = ", ".join(f"{name} {dtype}" for name, dtype in port.items())
            raise RequestError(f"{path} has the inputs {inputs}; expected those of {paths[0]}, {expected}")


def _with_speedups(rows: list[dict[str, Any]], model: str, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Adds "bytes" and "speedup", the throughput relative to `model`, to the rows of one batch size."""
    first = {row["engine"]: row["samples_per_second"] for row in rows if row["precision"] == model}
    for row in rows:
        row["bytes"] = sizes[row["precision"]]
        base = first.get(row["engine"], max(first.values(), default=None))
        row["speedup"] = None if base is None else round(row["samples_per_second"] / base, 2)
    return rows


def _runnable(engines: Sequence[str], paths: Sequence[Model], batch: Batch, threads: int) -> list[str]:
    """Returns the engines that run all files; logs the others. Raises ZooError if there are none."""
    runnable, problems = [], []
    for engine in engines:
        try:
            for path in paths:
                catalog.load(path, engine, threads).run(batch)
        except ZooError as error:
            problems.append(str(error))
            logger.warning("the engine %s is left out: %s", engine, error)
        else:
            runnable.append(engine)
    if not runnable:
        raise ZooError(f"no engine runs {', '.join(map(str, paths))}: {'; '.join(problems)}")
    return runnable


def _random(batch: Batch) -> Batch:
    """Replaces the zeros of float inputs by standard normal values and of byte inputs by random bytes.

    Other integers may be indices and stay 0.
    """
    rng = np.random.default_rng(0)

    def drawn(zeros: NDArray[Any]) -> NDArray[Any]:
        if zeros.dtype.kind == "f":
            return rng.standard_normal(zeros.shape).astype(zeros.dtype)
        return rng.integers(0, 256, zeros.shape, np.uint8) if zeros.dtype == np.uint8 else zeros

    return {name: drawn(array) for name, array in batch.items()}


def configuration(folder: ModelFolder, precision: str, engine: str) -> Configuration:
    """Returns the benchmark configuration of a model.

    Args:
        folder: Model folder.
        precision: Precision, e.g. "int8".
        engine: Name of the engine.

    Returns:
        A graph file of the folder, or the whole pipeline if it runs its graph many times for one result (translation).
    """
    if issubclass(folder.entry.pipeline(), GraphPipeline):
        return Configuration(engine, precision, graph_file(folder, precision, engine))
    return Configuration(engine, precision, folder.path, f"{__name__}:{WholePipeline.__name__}")


def _usable(engines: Sequence[str], precision: str) -> list[str]:
    """Returns the engines that support a precision; the native kernels support int8 only."""
    names = dict.fromkeys(engines)
    return [
        name
        for name in names
        if computes(name, precision) and (catalog.base_engine(name) != "native" or precision == "int8")
    ]


def _scenario(
    folder: ModelFolder,
    precisions: Sequence[str],
    engines: Sequence[str],
    threads: int,
    data: Any,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Measures a scenario, see `benchmark`."""
    if not isinstance(folder.entry, ScenarioBenchmark):
        raise RequestError(f"{folder.entry.name} has no scenarios; leave out --scenario")
    if data is None:
        raise RequestError("a scenario needs images; give them with --data FOLDER")
    kind = folder.entry.pipeline()
    usable = {precision: _usable(engines, precision) for precision in precisions}
    if not any(usable.values()):
        usable = {precision: list(engines) for precision in precisions}  # raises below
    pipelines = [kind(folder, precision, name, threads, 1) for precision in precisions for name in usable[precision]]
    measured = folder.entry.run_scenario(pipelines, data, **more)
    names = [Path(str(place)).name for place in as_list(data)]
    return {"model": folder.card.name, "data": names, **measured, "environment": machine.environment(threads=threads)}


class WholePipeline:
    """The pipeline of a model folder as a session for timing (see `Runnable`).

    Args:
        path: Model folder.
        engine: Name of the engine.
        threads: Number of intra-op threads.
        precision: Name of the precision.
    """

    def __init__(self, path: str | Path, engine: str, threads: int, precision: str) -> None:
        self._arguments = path, precision, engine, threads
        self._opened: dict[int, Any] = {}

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, with its size as batch size of the pipeline.

        Args:
            batch: Array [n, ...] for every graph input.

        Returns:
            Outputs of `Pipeline.predict`.
        """
        size = length(batch)
        if size not in self._opened:
            self._opened = {size: zoo.pipeline(*self._arguments, size)}
        outputs: dict[str, NDArray[Any]] = self._opened[size].predict(batch)
        return outputs


def plan(
    model: Model,
    output: Model | None = None,
    *,
    precisions: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    threads: Sequence[int] = (1,),
    batch_sizes: Sequence[int] | None = None,
    data: Model | None = None,
    preprocess: Model | None = None,
) -> dict[str, Any]:
    """Selects the fastest configuration on this machine and writes a plan file.

    For a zoo model, the selection among all engines is also stored for `engine="auto"`. Beside an .onnx file that runs
    in the native engine, its program is written (`catalog.prepare`). `zoo.open_plan` opens the file.

    Args:
        model: Name of a pretrained model, path of a model folder, or path of an .onnx file.
        output: Path of the plan file; None for MODEL.plan next to the .onnx file, or model.plan in the model folder.
        precisions: None for int8 and fp32. "bf16" is fp32 computed in bfloat16, if the CPU supports
            it. An .onnx file runs as it is, and also in "bf16" if named.
        engines: Inference engines; None for all that the machine and the model support.
        threads: Numbers of intra-op threads to try.
        batch_sizes: None for the default of the family, or 1 for an .onnx file.
        data: Raw input to time with; None for the model's sample. For an .onnx file: an .npz of its inputs, or images
            with `preprocess` (see `zoo.api.samples.samples_of`); None for zeros.
        preprocess: JSON file with the image preprocessing of an .onnx file; None for that of `zoo run`.

    Returns:
        Contents of the plan file and its "path".

    Raises:
        RequestError: Data or options are invalid.
    """
    if min((*threads, *(batch_sizes or ())), default=0) < 1:
        raise RequestError(f"threads {list(threads)} and batch sizes {list(batch_sizes or ())} must all be 1 or more")
    machine.require_threads(max(threads))
    if unknown := [precision for precision in precisions or () if precision not in (*PRECISIONS, AS_IT_IS)]:
        raise RequestError(f"unknown precision {', '.join(unknown)}; choose among {', '.join(PRECISIONS)}")
    for level in precisions or ():
        require_precision(level)
    names = list(engines or (*available(), "native"))
    if unknown := [name for name in names if catalog.base_engine(name) not in catalog.ENGINES]:
        raise RequestError(f"unknown engine {', '.join(unknown)}; choose among {', '.join(catalog.ENGINES)}")
    require_installed(*names)
    if is_file(model):
        path = Path(model)
        target = Path(output) if output is not None else path.with_suffix(".plan")
        require_distinct(target, model, data, preprocess)
        batches = examples_of(io.load(path), data, batch_sizes or (1,), preprocess, path)
        named = dict.fromkeys((AS_IT_IS, *(precisions or ())))
        if wrong := named.keys() - {AS_IT_IS, BF16}:
            raise RequestError(f"found --precision {min(wrong)}, expected {BF16} or none: an .onnx file runs as it is")
        candidates = _candidates(dict.fromkeys(named, path), names)
        native, failed = catalog.native_candidates(path, AS_IT_IS, names)
        written = build_plan([*candidates, *native], batches, threads, target, catalog.load)
        if native:
            catalog.prepare(path, batches[0])
        return {"model": path.name, "path": str(target), **written, "failed": [*written["failed"], *failed]}
    folder = open_model(model, preprocess, data)
    kind = folder.entry.pipeline()
    if not issubclass(kind, GraphPipeline):
        raise RequestError(
            f"{folder.card.name} runs its graph many times for one result, which plan files do not support; "
            "time its engines with: zoo benchmark MODEL, and select one with --engine"
        )
    target = Path(output) if output is not None else folder.path / "model.plan"
    require_distinct(target, *files_of(folder), data)
    opened = kind(folder, "fp32", "onnxruntime")
    batches = [opened.preprocess(opened.example(size, data)) for size in batch_sizes or (opened.BATCH_SIZE,)]
    precisions = precisions or ("int8", "fp32")
    candidates = _candidates({precision: folder.ensure(PRECISIONS[precision]) for precision in precisions}, names)
    of_int8 = names if "int8" in precisions else []
    native, failed = catalog.native_candidates(lambda: graph_file(folder, "int8", "native"), "int8", of_int8)
    candidates += native
    for level, count, batch in itertools.product(precisions, threads, batches):
        choose_engine(folder, level, batch, count, fresh=True)
    written = build_plan(candidates, batches, threads, target, catalog.load)
    return {"model": folder.card.name, "path": str(target), **written, "failed": [*written["failed"], *failed]}


def _candidates(paths: dict[str, Path], names: Sequence[str]) -> list[Candidate]:
    """Returns the candidates of the stock engines for all precisions that they support."""
    pairs = [(name, kind) for kind in paths for name in names if name in available() and computes(name, kind)]
    return [Candidate(name, kind, paths[kind]) for name, kind in pairs]
