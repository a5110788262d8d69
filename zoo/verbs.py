"""The verbs of the `zoo` command as Python functions. A model is a NAME of the zoo or a folder that a verb wrote."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.analysis.benchmark import BATCHES, Configuration, Stages, pinned
from pipelines.analysis.benchmark import benchmark as time_configurations
from pipelines.analysis.benchmark import instances as time_instances
from pipelines.core import machine, settings
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, require_place, write_json
from pipelines.engines.session import BF16
from pipelines.engines.stock import STOCK, available, computes
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.models import build as road
from pipelines.models.build import ModelFolder
from pipelines.models.hub import CARD, Card, Hub
from pipelines.models.pipeline import PRECISIONS, choose_engine, model_file
from pipelines.quantization.calibrate import MEMORY, CalibrationTable
from pipelines.quantization.ptq import calibrated
from pipelines.quantization.quantize import QuantReport
from pipelines.quantization.quantize import quantize as quantize_model
from pipelines.quantization.recipe import QuantRecipe
from zoo.toolkit import is_file as _is_file
from zoo.toolkit import listed as _listed
from zoo.toolkit import open_model, raw_samples, require_report, rewritten, samples_of, write_report
from zoo.toolkit import plan as plan
from zoo.toolkit import spare as _spare
from zoo.toolkit import tune as tune
from zoo.toolkit import used as _used
from zoo.training import is_first, require_free

Model = str | Path

logger = logging.getLogger(__name__)


def info(model: Model) -> dict[str, Any]:
    """What is known of a model: its card, the files of its folder, what the stages reported, how its operators run. Downloads nothing."""
    if Path(model).is_dir():
        folder = zoo.load(model)
        card, path = folder.card, folder.path
    else:
        shelf = Hub(zoo.SHIPPED)
        card = shelf.card(str(model))
        path = shelf.folder(card.name)
    found: dict[str, Any] = {**card.to_json(), "path": str(path)}
    if path.is_dir():
        found["on_disk"] = {
            each.name: each.stat().st_size for each in sorted(path.iterdir()) if each.is_file() and not each.name.startswith(".")
        }
        if built := road.read_record(path):
            found["built"] = built
        if (path / road.ROAD[1]).is_file() and (path / road.ROAD[2]).is_file():
            found["native"] = road.native_form(road.open_folder(path, zoo.entry))
        elif zoo.entry(card.entry).native:
            found["native"] = {"reason": f"not decided yet; run: zoo download {model}"}
        if (path / road.QUANTIZATION).is_file():
            try:
                found["quantization"] = read_json(path / road.QUANTIZATION)
            except RequestError as error:
                raise RequestError(f"{error}; make it anew with: zoo build {model} --force") from error
    return found


def download(model: str) -> Path:
    """Fetch and verify every file of a pretrained model and make those that are built from them; returns its folder."""
    folder = road.open_folder(Hub(zoo.SHIPPED).fetch(model), zoo.entry)
    road.build(folder)
    return folder.path


def run(
    model: Model,
    inputs: Any,
    output: Model = "-",
    *,
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
    batch_size: int | None = None,
    on_error: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Raw input of any size -> a file of results, in constant memory and input order; returns a summary.

    batch_size, on_error: the model's own (`Pipeline.BATCH_SIZE`, `Pipeline.ON_ERROR`) if None. more: what the model's `run` takes besides,
    e.g. beam, n_best and scores for translation.
    """
    opened: Any = zoo.pipeline(model, precision, engine, threads, batch_size)
    if unknown := more.keys() - inspect.signature(opened.run).parameters.keys():
        raise RequestError(f"{opened.folder.card.name} has no option {', '.join(sorted(unknown))}; that is for other models")
    _spare(output, *_used(opened.folder), *_listed(inputs))
    return {"model": opened.folder.card.name, **opened.run(inputs, output, on_error or opened.ON_ERROR, **more)}


def train(
    family: str, data: Any, output: Model, *, settings: Mapping[str, str] | None = None, resume: bool = False, on_error: str = "raise"
) -> dict[str, Any]:
    """Train a model family on own data; `output` becomes a model folder. settings: {name of a training setting: value as text}.

    Returns the metrics. Raises RequestError for unknown settings, unusable data, or an output folder that holds something else.
    """
    entry = zoo.entry(family)
    if not resume and is_first():
        require_free(Path(output))  # before the seconds that importing a framework takes
    config = _configured(entry.name, entry.part("settings"), settings or {})
    result: dict[str, Any] = entry.part("train")(data, Path(output), config=config, resume=resume, on_error=on_error)
    _write_trained_card(Path(output), entry.name, f"{entry.title}; trained by its user")
    return result


def finetune(
    model: Model, data: Any, output: Model, *, settings: Mapping[str, str] | None = None, resume: bool = False, on_error: str = "raise"
) -> dict[str, Any]:
    """Go on training from a model's weights on own data; `output` becomes a model folder. See `train`.

    The setting qat trains image classifiers with the rounding of int8 (`zoo.images.qat`); `build` then takes the ranges so trained.
    """
    folder = zoo.load(model)
    if "from" in folder.card.details.get("weights", {}):
        raise RequestError(f"{folder.card.name} came as a graph (zoo freeze --from-pb), which cannot be trained; start with: zoo train")
    if not resume and is_first():
        require_free(Path(output))
    folder.ensure("fp32.onnx")
    entry = folder.entry
    config = _configured(entry.name, entry.part("finetune_settings"), settings or {})
    result: dict[str, Any] = entry.part("train")(
        data, Path(output), config=config, resume=resume, start_from=folder.path, on_error=on_error
    )
    _write_trained_card(Path(output), entry.name, f"{folder.card.name} fine-tuned by its user")
    return result


def freeze(
    model: Model,
    *,
    from_pb: Model | None = None,
    data: Any = None,
    output: Model | None = None,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Checkpoint -> frozen inference graph, fp32.onnx; returns node counts and sizes.

    from_pb: a frozen TensorFlow graph from elsewhere (GraphDef, or a SavedModel's folder) of the family `model`; `output` becomes its model
    folder, built up to int8, calibrated on the first rows of `data`. columns: names of the columns of a row where they do not stand
    in their natural order. output_node: the node of the graph's result where there are several. Raises RequestError for a graph that the
    family does not read, with all that is in its way.
    """
    if from_pb is None:
        if any(each is not None for each in (data, output, columns, output_node)):
            raise RequestError("--data, -o, --columns and --output-node are for a graph from elsewhere; name it with --from-pb GRAPH.pb")
        return _stage(model, "fp32.onnx")
    if Path(model).is_dir():
        raise RequestError(f"{model} is a folder, but a graph is read as one of a family: {', '.join(_readers())}")
    entry = zoo.entry(str(model))
    if not entry.from_graph:
        raise RequestError(f"{entry.name} cannot be read from a graph; these can: {', '.join(_readers())}")
    if data is None or not _listed(data):
        raise RequestError("int8 needs rows to calibrate on; give some thousand rows of the log with --data FILE")
    require_place((target := _required(output, "a graph")) / CARD)
    options: dict[str, Any] = {"columns": columns, "output_node": output_node, "on_error": on_error}
    details = entry.part("from_graph")(from_pb, data, target, **options)
    _write_card(target, entry.name, f"{entry.title}; from the graph {Path(from_pb).name}", details)
    folder = zoo.load(target)
    stages = road.build(folder)
    return {"model": folder.card.name, "path": str(target), **folder.record["fp32.onnx"], "stages": stages, **details}


def rewrite(model: Model, output: Model | None = None) -> dict[str, Any]:
    """fp32.onnx -> rewritten.onnx with the model's passes; or any ONNX file -> `output` with the shared ones. Returns what fired."""
    if not _is_file(model):
        if output is not None:
            raise RequestError(f"-o is for an .onnx file; {model} keeps its rewritten.onnx in its own folder, leave the option out")
        return _stage(model, "rewritten.onnx")
    target = _required(output)
    _spare(target, model)
    loaded, report = rewritten(model)
    io.save(loaded, target)
    return report.to_json()


def calibrate(
    model: Model,
    data: Any = None,
    output: Model | None = None,
    *,
    observer: str | None = None,
    correct: bool | None = None,
    search: bool | None = None,
    samples: int | None = None,
    max_memory: str | int = MEMORY,
    preprocess: Model | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Choose the ranges of a model's tensors on `data`: raw input for a zoo model (its training samples if None).

    An ONNX file takes an .npz of its inputs, or a folder of images with `preprocess` (`zoo.toolkit.samples_of`). It is rewritten by the
    shared passes first, as `quantize` does. samples: how many of `data` to use, at least 1; None: all for an ONNX file, else
    `Pipeline.CALIBRATION`.
    max_memory: see `pipelines.quantization.calibrate.Observation`. correct, search: what else to find on the samples, see `QuantRecipe`; None: as the
    recipe has it.
    Writes calibration.json into the model's folder, or `output`; returns {"observer", "samples", "path"}.
    """
    if samples is not None and samples < 1:
        raise RequestError(f"samples is {samples}; calibration needs at least 1")
    if _is_file(model):
        if data is None:
            raise RequestError("an ONNX file is calibrated on samples; give them with --data: an .npz of its inputs, or a folder of images")
        target = _required(output)
        _spare(target, model, data)
        loaded, _ = rewritten(model)
        given = samples_of(loaded, data, preprocess, on_error, samples)
        recipe = _changed(QuantRecipe(), observer=observer, correct=correct, search=search)
        table = calibrated(loaded, recipe, given, given.total, max_memory=max_memory)
        return {"observer": table.observer, "samples": table.samples, "path": str(table.save(target))}
    folder = open_model(model, preprocess)
    if output is None and folder.given("calibration.json"):
        name = folder.card.name
        raise RequestError(f"{name} ships its calibration table, which stays as it is; make yours elsewhere with --data FILE -o FILE")
    _spare(output, *_used(folder), *_listed(data))
    if folder.trained is not None and data is None and output is None and observer is None:
        raise RequestError(
            f"{folder.card.name} has the ranges of its training ({road.TRAINED}); for others give --data FILE or --observer NAME"
        )
    given = raw_samples(folder, data, "--data", samples, on_error)
    recipe = _changed(folder.recipe, observer=observer, correct=correct, search=search)
    table = calibrated(io.load(folder.ensure("rewritten.onnx")), recipe, given, given.total, max_memory=max_memory)
    path = table.save(output) if output is not None else road.set_table(folder, table, own_data=data is not None)
    return {"observer": table.observer, "samples": table.samples, "path": str(path)}


def quantize(
    model: Model,
    output: Model | None = None,
    *,
    calibration_data: Model | None = None,
    table: Model | None = None,
    observer: str | None = None,
    keep_float: Sequence[str] = (),
    reduced_range: bool = False,
    float_tables: bool = False,
    dynamic: Sequence[str] = (),
    symmetric: bool = False,
    correct: bool | None = None,
    search: bool | None = None,
    max_memory: str | int = MEMORY,
    preprocess: Model | None = None,
    on_error: str = "raise",
    report_path: Model | None = None,
) -> dict[str, Any]:
    """Quantize a zoo model by its recipe, or any ONNX file on `calibration_data` or by a calibration table.

    calibration_data, preprocess, on_error: see `zoo.toolkit.samples_of`. max_memory: of their calibration, see
    `pipelines.quantization.calibrate.Observation`.

    An ONNX file is rewritten by the shared passes first; a table that `calibrate` made for the file fits. The other options are those of
    `QuantRecipe`; None: as the recipe has it; keep_float and dynamic add to what a zoo model has. Writes int8.onnx into the model's
    folder, or `output`; returns the quantization report.
    report_path: also measure the result on the calibration samples, and write what `pipelines.analysis.report.explain` finds (.json or .html).
    """
    if table is not None and calibration_data is not None:
        raise RequestError("give --table or --calibration-data, not both")
    if observer and (table is not None or (output is not None and not _is_file(model))):
        raise RequestError(
            "the observer was chosen when the table was made; make another with: zoo calibrate MODEL --observer NAME -o FILE"
        )
    changes: dict[str, Any] = {"keep_float": tuple(keep_float), "reduced_range": reduced_range, "quantize_tables": not float_tables}
    changes |= {"dynamic": tuple(dynamic), "symmetric": symmetric, "correct": correct, "search": search, "observer": observer}
    if _is_file(model):
        target = _required(output)
        _spare(target, model, calibration_data, table)
        require_report(report_path, target, model, calibration_data, table, samples=table is None)
        recipe = _changed(QuantRecipe(), **changes)
        loaded, _ = rewritten(model)
        if table is not None:
            ranges = CalibrationTable.load(table)
            result, report = quantize_model(loaded, recipe, ranges)
        elif calibration_data is not None:
            samples: Any = samples_of(loaded, calibration_data, preprocess, on_error)
            ranges = calibrated(loaded, recipe, samples, samples.total, max_memory=max_memory)
            result, report = quantize_model(loaded, recipe, ranges)
        else:
            raise RequestError(
                "int8 needs the ranges of the activations; give --calibration-data (.npz or a folder of images) or --table calibration.json"
            )
        io.save(result, target)
        if report_path is not None:
            write_report(report_path, loaded, result, report, ranges, samples)
        return _report(report, target)
    folder = open_model(model, preprocess)
    if output is None and folder.given("int8.onnx"):
        raise RequestError(f"{folder.card.name} ships its int8.onnx, which stays as it is; write yours elsewhere with -o FILE")
    if calibration_data is not None:
        raise RequestError(
            "a zoo model is calibrated on raw data; run: zoo calibrate MODEL --data FILE, then zoo quantize MODEL --table FILE"
        )
    require_report(report_path, output or folder.path / "int8.onnx", *_used(folder), table, samples=(folder.path / road.SAMPLES).is_file())
    own = folder.entry.recipe
    changes |= {"keep_float": (*own.keep_float, *keep_float), "dynamic": (*own.dynamic, *dynamic)}
    recipe = _changed(folder.recipe, **changes)
    if output is None:
        if table is not None:
            raise RequestError("a table given by --table is used once; say where to write the result with -o FILE")
        road.set_recipe(folder, recipe)
        path = folder.ensure("int8.onnx")
        if report_path is not None:
            loaded, ranges = io.load(folder.ensure("rewritten.onnx")), CalibrationTable.load(folder.ensure("calibration.json"))
            write_report(report_path, loaded, *quantize_model(loaded, recipe, ranges), ranges, _kept_samples(folder))
        return {**read_json(folder.path / road.QUANTIZATION), "path": str(path), "bytes": path.stat().st_size}
    _spare(output, *_used(folder), table)
    loaded = io.load(folder.ensure("rewritten.onnx"))
    ranges = CalibrationTable.load(table or folder.ensure("calibration.json"))
    result, report = quantize_model(loaded, recipe, ranges)
    io.save(result, output)
    if report_path is not None:
        write_report(report_path, loaded, result, report, ranges, _kept_samples(folder))
    return _report(report, Path(output))


def evaluate(
    model: Model,
    data: Any,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    engine: str = "auto",
    threads: int = 1,
    batch_size: int | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Quality of fp32 and int8 on the same labelled samples, int8 - fp32 with paired bootstrap intervals, and the machine.

    precisions: those compared with fp32, which is always measured. "difference" is of the first of them, what is said of each further one
    stands under "others". The engine native has no fp32, which then runs in what "auto" chooses.
    """
    folder = zoo.load(model)
    kind = folder.entry.part("pipeline")
    pipelines = {}
    for each in dict.fromkeys(("fp32", *precisions)):
        chosen = "auto" if each == "fp32" and engine == "native" else engine
        pipelines[each] = kind(folder, each, chosen, threads, batch_size)
    if len(pipelines) < 2:
        raise RequestError("fp32 alone compares nothing; add int8 or bf16")
    found: dict[str, Any] = folder.entry.part("evaluate")(pipelines, data, on_error)
    engines = {precision: each.engine for precision, each in pipelines.items()}
    where = machine.environment(threads=threads, batch_size=next(iter(pipelines.values())).batch_size, engines=engines)
    return {
        "model": folder.card.name,
        "data": [Path(part).name for each in _listed(data) for part in str(each).split(",")],
        **found,
        "environment": where,
    }


def benchmark(
    model: Model,
    *,
    data: Model | None = None,
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
    """Throughput, latency, split and memory of every precision and engine, in turn in one run per batch size.

    batch_sizes: the model's own (`Pipeline.BATCH_SIZE`) if None. engines: all that this machine and the model have if none is named; native
    counts for int8 only, OpenVINO alone for bf16. instances: with 2 or more, so many processes run at once, each pinned to `threads` cores
    of its own; results are of the model alone (`pipelines.analysis.benchmark.instances`).
    scenario: "single-stream" or "offline", for images: from the files in `data` to classes, in the engine "auto" if none is named, after
    the accuracy; `zoo.images.harness.harness` says what the four after it are, and what is returned.
    A pipeline that calls its graph many times for a result (translation) is timed whole; its samples are sentences.
    """
    folder = zoo.load(model)
    if wrong := [each for each in precisions if each not in PRECISIONS]:
        raise RequestError(f"unknown precision {', '.join(wrong)}; choose among {', '.join(PRECISIONS)}")
    if scenario is not None:
        if instances != 1 or batch_sizes is not None:
            raise RequestError("a scenario has batch sizes of its own, and one process; leave out --batch-size and --instances")
        if price_per_hour is not None and not price_per_hour >= 0:
            raise RequestError(f"the price is {price_per_hour} an hour; wanted 0 or more")
        least = {"top1": min_top1, "top5": min_top5}
        more = {"scenario": scenario, "count": count, "least": least, "price_per_hour": price_per_hour}
        return _scenario(folder, precisions, engines or ("auto",), threads, data, more)
    if {min_top1, min_top5, price_per_hour} != {None}:
        raise RequestError("a least accuracy or a price belongs to a scenario; add --scenario single-stream or --scenario offline")
    batch_sizes = (folder.entry.part("pipeline").BATCH_SIZE,) if batch_sizes is None else batch_sizes
    if min(batch_sizes, default=0) < 1 or min(rounds, threads, instances) < 1:
        wrong = [f"batch sizes {list(batch_sizes)}", f"rounds {rounds}", f"threads {threads}"]
        raise RequestError(f"{', '.join(wrong)} and instances {instances} must all be 1 or more")
    cores = pinned(instances, threads) if instances > 1 else []
    names = list(engines or _engines(folder))
    if set(names) == {"native"}:
        precisions = [each for each in precisions if each == "int8"] or [model_file(precisions[0], "native")]
    results = []
    for size in batch_sizes:
        opened: Any = folder.entry.part("pipeline")(folder, precisions[0], "auto", threads, size)
        raw = opened.example(size, data)
        batch = opened.preprocess(raw)
        configurations = []
        for precision in precisions:
            chosen = [_quickest(folder, precision, batch, threads) if each == "auto" else each for each in names]
            usable = [each for each in dict.fromkeys(chosen) if computes(each, precision) and (each != "native" or precision == "int8")]
            usable = usable or (chosen if precision == BF16 else [])  # which is refused
            configurations += [_configuration(folder, precision, each) for each in usable]
        if cores:
            results += time_instances(configurations, opened.preprocess(opened.example(size * BATCHES, data)), size, cores, rounds)
            continue
        stages = Stages(lambda opened=opened, raw=raw: opened.preprocess(raw), opened.postprocess)  # type: ignore[misc]
        results += time_configurations(configurations, batch, threads, rounds, stages)
    return {"model": folder.card.name, "results": results, "environment": machine.environment(threads=threads, rounds=rounds)}


def _quickest(folder: ModelFolder, precision: str, batch: Batch, threads: int) -> str:
    """The engine "auto" is."""
    kind = folder.entry.part("pipeline")
    return str(choose_engine(folder, precision, batch, threads).engine if kind.ONE_CALL else kind(folder, precision).engine)


def _configuration(folder: ModelFolder, precision: str, engine: str) -> Configuration:
    """A file of the folder, or the whole pipeline, opened as `zoo.toolkit.Whole`."""
    if not folder.entry.part("pipeline").ONE_CALL:
        return Configuration(engine, precision, folder.path, "zoo.toolkit:Whole")
    return Configuration(engine, precision, folder.ensure(model_file(precision, engine)))


def build(model: Model, *, force: bool = False) -> dict[str, Any]:
    """Make every file of a model that is missing or stale; returns {"path", "stages": {file: "given" | "kept" | "made"}}."""
    folder = zoo.load(model)
    return {"model": folder.card.name, "path": str(folder.path), "stages": road.build(folder, force=force)}


def doctor() -> dict[str, Any]:
    """CPU, instruction sets and what they mean, versions, settings, cache, and a quick check of int8 against float in every engine."""
    cache = settings.home()
    files = [each for each in cache.rglob("*") if each.is_file()] if cache.is_dir() else []
    return {
        "cpu": machine.cpu()["name"],
        "isa": machine.cpu()["flags"],
        "cores": machine.cores(),
        "vnni": machine.has_vnni(),
        "advice": machine.VNNI if machine.has_vnni() else machine.NO_VNNI,
        "versions": machine.versions(),
        "engines": {name: _check_engine(name) if name in available() else "not installed" for name in STOCK},
        "kernels": f"{reason}; until then onnxruntime and openvino compute all"
        if (reason := extension.missing())
        else f"ok: {', '.join(extension.isas())}",
        "settings": {"ZOO_HOME": str(cache), "ZOO_OFFLINE": settings.offline(), "ZOO_MIRROR": settings.mirror()},
        "cache": {"files": len(files), "megabytes": round(sum(each.stat().st_size for each in files) / 1e6, 1)},
        "models": zoo.names(),
    }


def _check_engine(name: str) -> str:
    """Run a small int8 layer made to saturate 16-bit pairs against its float form."""
    from pipelines.analysis.selfcheck import largest_error

    try:
        error = largest_error(name)
    except ZooError as problem:
        return f"failed: {problem}"
    return f"ok, int8 within {error:.4f} of float" if error < 0.02 else f"int8 differs from float by {error:.3f}: products saturate"


def _scenario(
    folder: ModelFolder, precisions: Sequence[str], engines: Sequence[str], threads: int, data: Any, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What the harness of an entry finds; see `benchmark`."""
    if not folder.entry.harness:
        raise RequestError(f"{folder.entry.name} has no scenarios; leave out --scenario")
    if data is None:
        raise RequestError("a scenario is run on images; give them with --data FOLDER")
    kind = folder.entry.part("pipeline")
    pipelines = [kind(folder, precision, engine, threads, 1) for precision in precisions for engine in engines]
    found = folder.entry.part("harness")(pipelines, data, **more)
    names = [Path(str(each)).name for each in _listed(data)]
    return {"model": folder.card.name, "data": names, **found, "environment": machine.environment(threads=threads)}


def _engines(folder: ModelFolder) -> list[str]:
    """The engines that this machine and the model have."""
    found = available()
    if not (kind := folder.entry.part("pipeline")).ONE_CALL:
        return [each for each in kind.ENGINES if each in found or (each == "native" and extension.isas())]
    if folder.entry.native and extension.isas():
        try:
            folder.ensure(road.NATIVE)
            found.append("native")
        except RequestError as error:
            logger.info("%s", error)
    return found


def _stage(model: Model, stage: str) -> dict[str, Any]:
    folder = zoo.load(model)
    folder.ensure(stage)
    return {"model": folder.card.name, "path": str(folder.path / stage), **folder.record.get(stage, {})}


def _kept_samples(folder: ModelFolder) -> Iterable[Batch]:
    """The samples that training kept for calibration."""
    return road.read_npz(folder.path / road.SAMPLES)[0]


def _changed(recipe: QuantRecipe, **changes: Any) -> QuantRecipe:
    """`recipe` with those changes that are not None."""
    return dataclasses.replace(recipe, **{key: value for key, value in changes.items() if value is not None})


def _readers() -> list[str]:
    return [name for name in zoo.ENTRIES if zoo.entry(name).from_graph]


def _required(output: Model | None, what: str = "an ONNX file") -> Path:
    if output is None:
        raise RequestError(f"{what} needs a place for the result; give it with -o")
    return Path(output)


def _report(report: QuantReport, path: Path) -> dict[str, Any]:
    return {**report.to_json(), "path": str(path), "bytes": path.stat().st_size}


def _configured(family: str, defaults: Any, settings: Mapping[str, str]) -> Any:
    """`defaults` of a family (a dataclass instance) with `settings`, given as text, converted to the types of the defaults."""
    known = {each.name: getattr(defaults, each.name) for each in dataclasses.fields(defaults)}
    if unknown := [name for name in settings if name not in known]:
        raise RequestError(f"{family} has no training setting {', '.join(unknown)}; choose among {', '.join(known)}")
    return dataclasses.replace(defaults, **{name: _convert(name, text, known[name]) for name, text in settings.items()})


def _convert(name: str, text: str, like: Any) -> Any:
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}[text.lower()]
        if isinstance(like, tuple):
            return tuple(type(like[0])(each) for each in text.split(",") if each)
        return type(like)(text)
    except (KeyError, ValueError):
        raise RequestError(f"setting {name} is {text!r}; wanted a value like {like!r}") from None


def _write_trained_card(folder: Path, entry: str, description: str) -> None:
    if not is_first():
        return
    trained = read_json(folder / "train.json")
    details = {
        "preprocessing": trained["features"],
        "training": {key: trained[key] for key in ("rows", "metrics", "config") if key in trained},
        **{key: trained[key] for key in ("classes",) if key in trained},
    }
    _write_card(folder, entry, description, details)


def _write_card(folder: Path, entry: str, description: str, details: Mapping[str, Any]) -> None:
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name).lstrip("._-") or entry
    write_json(folder / CARD, Card(name, entry, description, (), details).to_json())
