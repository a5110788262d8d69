"""Commands that find, build and use a model: info, download, run, rank, build, doctor."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import machine, settings
from pipelines.core.errors import RequestError, ZooError, require_options
from pipelines.core.files import read_json
from pipelines.data.tables import writing
from pipelines.deltas.delta import SUFFIX, open_delta
from pipelines.engines.stock import STOCK, available
from pipelines.kernels import extension
from pipelines.models import stages
from pipelines.models.family import Lowerable
from pipelines.models.folder import ModelFolder, open_folder
from pipelines.models.pipeline import PRECISIONS, graph_file
from pipelines.models.protocols import RanksItems
from pipelines.models.record import BUILD_STAGES, NATIVE, QUANTIZATION, SAMPLES, read_record
from zoo.api.paths import Model, as_list, files_of, is_file, require_distinct, require_folder
from zoo.huggingface.repository import is_address
from zoo.registry import NETWORK_OPTIONS

logger = logging.getLogger(__name__)

COMPARED_ROWS = 20_000  # rows of a log on which float and int8 probabilities are compared
MAX_CHANGE = 0.004  # largest difference without a warning
RANKING = {"rank": np.int64, "item": str, "row": np.int64}  # columns of `rank`, before the probabilities


def info(model: Model) -> dict[str, Any]:
    """Describes a model without downloading anything but models of the Hugging Face Hub.

    Args:
        model: Name of a pretrained model, path of a model folder, hf://ORG/NAME[@REVISION], an .onnx file, a delta or a
            plan file.

    Returns:
        Of a model: its card, files, build record, quantization report, and how its operators run in the native kernels.
        Of an .onnx file: inputs, outputs, operators, and whether the native kernels support it. Of a plan file: its
        selection, and "stale", the reason why it does not hold on this machine, or "no". Of a delta: see
        `zoo.api.exporting.describe`, and the bytes of every changed file.

    Raises:
        RequestError: There is no such model, or a file of it is damaged.
    """
    if is_file(model) and Path(model).suffix == SUFFIX:
        return _of_delta(Path(model))
    if is_file(model) and (zipfile.is_zipfile(model) or Path(model).suffix == ".plan"):
        from pipelines.engines import plan

        details = plan.read_plan(model)
        return {"path": str(model), "stale": plan.stale(model, details) or "no", **details}
    if is_file(model):
        return _of_file(Path(model))
    model = zoo.located(model)
    if Path(model).is_dir():
        folder = zoo.load(model)
        card, path = folder.card, folder.path
    else:
        hub = zoo.hub()
        card = hub.card(str(model))
        path = hub.folder(card.name)
    details = {**card.to_json(), "path": str(path)}
    if path.is_dir():
        details["on_disk"] = {
            file.name: file.stat().st_size
            for file in sorted(path.iterdir())
            if file.is_file() and not file.name.startswith(".")
        }
        if built := read_record(path):
            details["built"] = built
        if (path / BUILD_STAGES[1]).is_file() and (path / BUILD_STAGES[2]).is_file():
            details |= {"native": form} if (form := _native_form(path)) else {}
        elif isinstance(zoo.entry(card.entry), Lowerable):
            details["native"] = {"reason": f"not built yet; run: zoo build {model}"}
        if (path / QUANTIZATION).is_file():
            try:
                details["quantization"] = read_json(path / QUANTIZATION)
            except RequestError as error:
                raise RequestError(f"{error}; rebuild it with: zoo build {model} --force") from error
    return details


def _of_delta(path: Path) -> dict[str, Any]:
    from zoo.api.exporting import describe  # imports onnx, unlike a run of a finished model

    model = path.with_name(f"{Path(path.stem).stem}.onnx")
    if model.is_file() and not zipfile.is_zipfile(path):  # see `pipelines.engines.native.prepared`
        raise RequestError(f"{path} is the native engine's program of {model}; run: zoo info {model}")
    with open_delta(path) as delta:
        changed = {name: sum(piece.data for piece in file.pieces) for name, file in delta.files.items() if file.pieces}
        return {"path": str(path), **describe(delta), "files": changed}


def _native_form(path: Path) -> dict[str, Any]:
    """How the operators of a calibrated model run in the native kernels, and the form that this machine chose."""
    folder = open_folder(path, zoo.entry)
    form = stages.native_form(folder)
    if not extension.isas():
        return form
    if form.get("forms") and (path / NATIVE).is_file():
        from pipelines.engines.native.forms import Forms

        with contextlib.suppress(ZooError):  # a damaged file is made anew at its first use
            form["chosen"] = Forms(path / NATIVE).chosen
    if folder.entry.task == "images" and (path / PRECISIONS["int8"]).is_file():
        from pipelines.engines.native import images

        return images.form(path / PRECISIONS["int8"])
    return form


def _of_file(path: Path) -> dict[str, Any]:
    from pipelines.engines.native import images
    from pipelines.graph import io

    graph = io.load(path).graph
    ports = {
        kind: {
            str(value.name): f"{value.dtype} {value.shape}" for value in values if value.name not in graph.initializers
        }
        for kind, values in (("inputs", graph.inputs), ("outputs", graph.outputs))
    }
    operators = dict(Counter(node.op_type for node in graph.all_nodes()).most_common())
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        **ports,
        "operators": operators,
        "native": images.form(path),
    }


def download(model: str) -> Path:
    """Downloads and verifies a pretrained model and builds its derived files.

    Args:
        model: Name of a pretrained model, or hf://ORG/NAME[@REVISION].

    Returns:
        Path of the model folder.

    Raises:
        RequestError: The name is unknown.
    """
    folder = zoo.load(model) if is_address(model) else open_folder(zoo.hub().fetch(model), zoo.entry)
    stages.build(folder)
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
    """Runs a model on raw input of any size and writes the results in input order, in constant memory.

    Args:
        model: Name of a pretrained model, path of a model folder, or path of an .onnx file of an image network.
        inputs: Raw input: a path, a list of paths, or "-" for stdin.
        output: Output file; "-" for stdout. Its suffix selects the format (.csv, .csv.gz, .jsonl, .parquet).
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine; "auto" for the fastest on this machine.
        threads: Number of intra-op threads.
        batch_size: Samples of one inference; None for `Pipeline.BATCH_SIZE`.
        on_error: "raise" to stop at invalid input, "skip" to leave it out and count it; None for `Pipeline.ON_ERROR`.
        **more: Options of the family (`Family.run_options`), e.g. `beam`, `n_best` and `scores` for translation; of an
            .onnx file also those of `zoo.pipeline`.

    Returns:
        Summary: "model", counts, seconds and engine.

    Raises:
        RequestError: The family has no such option, or input or output is unusable.
    """
    if is_file(model) and (arrays := [path for path in as_list(inputs) if str(path).endswith(".npz")]):
        raise RequestError(
            f"found arrays in {arrays[0]}, expected images for {model}; to time the graph on arrays run: "
            f"zoo benchmark {model} --data {arrays[0]}"
        )
    opening = {name: more.pop(name) for name in NETWORK_OPTIONS if name in more}
    opened: Any = zoo.pipeline(model, precision, engine, threads, batch_size, **opening)
    name = opened.folder.card.name
    require_options(name, more, (option.name for option in opened.folder.entry.run_options))
    require_distinct(output, model, *files_of(opened.folder), *as_list(inputs))
    return {"model": name, **opened.run(inputs, output, on_error or opened.ON_ERROR, **more)}


def rank(
    model: Model,
    user: Any,
    items: Any,
    output: Model = "-",
    *,
    top: int | None = 10,
    exclude: Iterable[str] = (),
    by: str | None = None,
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
) -> dict[str, Any]:
    """Ranks items for one user and writes the best of them; see docs/rank-candidates.md.

    The user's columns are read and computed once. Columns: rank, item (its id, if the model has a column of ids), row
    (0-based position among the items) and probability. A model of several labels has probability_LABEL of each and,
    with a weighted sum, score.

    Args:
        model: Name of a pretrained ranker, or path of its folder.
        user: {column: value}, or a file with one JSON object or one row.
        items: Log with the items' columns, one row an item.
        output: Output file, see `zoo.run`; "-" for stdout.
        top: Number of items to write; None for all.
        exclude: Ids of items to leave out.
        by: Label that orders the items, or a weighted sum such as "clicked + 2 bought"; None for the first label.
        precision: "int8" or "fp32".
        engine: Inference engine; "auto" for the fastest on this machine.
        threads: Number of intra-op threads.

    Returns:
        {"model", "items": number of items that were read, "ranked": number of rows written, "by": the order of a model
        of several labels, else absent, "seconds", "engine", "precision"}.

    Raises:
        RequestError: The model ranks no items, or a column is missing.
    """
    model = zoo.located(model)
    if not issubclass(zoo.entry_of(model).pipeline(), RanksItems):
        raise RequestError(f"{model} ranks no items; expected a recommender with columns of items")
    pipeline: Any = zoo.pipeline(model, precision, engine, threads)
    sources = [source for source in (user, items) if isinstance(source, str | Path)]
    require_distinct(output, *files_of(pipeline.folder), *sources)
    start = time.perf_counter()
    catalogue = pipeline.catalogue(_path_of(items), distinct=False, precompute=False)  # for one user
    columns = pipeline.rank_columns(_read_user(user), catalogue, top, exclude=tuple(exclude), by=by)
    count, labels = len(columns["row"]), list(pipeline.outputs.values())
    shares = [name for name in columns if name not in RANKING]
    ranking = RANKING | dict.fromkeys(shares, np.float32)
    with writing(output, ranking, brief=tuple(ranking)) as write:
        write({"rank": np.arange(1, count + 1), "item": [None] * count, **columns})
    return {
        "model": pipeline.folder.card.name,
        "items": len(catalogue),
        "ranked": count,
        **({"by": by or labels[0]} if len(labels) > 1 else {}),
        "seconds": round(time.perf_counter() - start, 3),
        "engine": pipeline.engine,
        "precision": pipeline.precision,
    }


def _path_of(source: Any) -> Any:
    """A name of a file as its path; other sources are themselves."""
    return Path(source) if isinstance(source, str) and source != "-" and "://" not in source else source


def _read_user(user: Any) -> Any:
    """The user's values: a file with one JSON object, over any number of lines, is that object."""
    place = _path_of(user)
    if isinstance(user, Mapping) or not isinstance(place, Path) or not place.is_file():
        return place
    try:
        value = json.loads(place.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return place
    return value if isinstance(value, dict) else place


def build(model: Model, *, force: bool = False) -> dict[str, Any]:
    """Builds every missing or stale file of a model.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        force: Rebuild every file.

    Returns:
        {"model", "path", "stages": {file: "given" | "kept" | "made"}}; of a model that was calibrated on samples of the
        package also "quality", see `ShipsSamples.judged`.

    Raises:
        RequestError: There is no such model.
    """
    require_folder(model)
    folder = zoo.load(model)
    states = stages.build(folder, force=force)
    quality = folder.record.get("calibration.json", {}).get("quality")
    judged = {} if quality is None else {"quality": quality}
    return {"model": folder.card.name, "path": str(folder.path), "stages": states, **judged}


def doctor(speed: bool = False) -> dict[str, Any]:
    """Checks this machine: CPU, instruction sets, versions, settings, cache, and int8 accuracy of every engine.

    Args:
        speed: Also measure the peak int8 throughput of one core for each instruction set.

    Returns:
        Report of the checks. With `speed`, "speed" is {"gmac_per_second": {isa: 10^9 multiply-accumulates per second}},
        measured in registers.
    """
    cache = settings.home()
    files = [file for file in cache.rglob("*") if file.is_file()] if cache.is_dir() else []
    report = {
        "cpu": machine.cpu()["name"],
        "isa": machine.cpu()["flags"],
        "cores": machine.cores(),
        "threads_auto": machine.processors().threads,
        "vnni": machine.has_vnni(),
        "advice": machine.advice(extension.isas(), extension.has_vnni()),
        "versions": machine.versions(),
        "engines": {
            name: _check_engine(name) if name in available() else "not installed (pip install 'int8-zoo[openvino]')"
            for name in STOCK
        },
        "kernels": f"{reason}; falls back to {' and '.join(available())}"
        if (reason := extension.missing())
        else f"ok: {', '.join(extension.isas())}",
        "instruction_sets": {isa.name: _usage_of(isa) for isa in extension.instruction_sets() if isa.listed},
        "settings": {
            "ZOO_HOME": str(cache),
            "ZOO_OFFLINE": settings.offline(),
            "ZOO_MIRROR": settings.mirror(),
            "ZOO_ISA": settings.isa() or None,
        },
        "cache": {"files": len(files), "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1)},
        "models": zoo.names(),
    }
    if speed:
        from pipelines.kernels.images.native import product_limit  # imports the steps of image networks

        report["speed"] = {"gmac_per_second": {isa: round(product_limit(isa), 1) for isa in extension.isas()}}
    return report


def _usage_of(isa: extension.InstructionSet) -> str:
    """Says whether the native kernels use an instruction set, and why."""
    if not isa.supported:
        return f"not on this CPU: needs {isa.needs}"
    allowed = extension.isas()
    if isa.name not in allowed:
        return f"excluded by ZOO_ISA={settings.isa()}: {isa.needs}"
    return f"{'used, the fastest' if isa.name == allowed[0] else 'used with --isa'}: {isa.needs}"


def _check_engine(name: str) -> str:
    """Compares a small int8 layer, in which 16-bit pair sums would saturate, with its float form."""
    from pipelines.analysis.selfcheck import largest_error

    try:
        error = largest_error(name)
    except ZooError as problem:
        return f"failed: {problem}"
    return (
        f"ok, int8 within {error:.4f} of float"
        if error < 0.02
        else f"int8 differs from float by {error:.3f}: products saturate"
    )


def run_stage(model: Model, stage: str) -> dict[str, Any]:
    """Builds a model folder up to a stage.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        stage: File that the stage writes, e.g. "rewritten.onnx".

    Returns:
        {"model", "path"} and the report of the stage.
    """
    require_folder(model)
    folder = zoo.load(model)
    folder.ensure(stage)
    return {"model": folder.card.name, "path": str(folder.path / stage), **folder.record.get(stage, {})}


def compare_probabilities(folder: ModelFolder, rows: Any, on_error: str) -> dict[str, Any]:
    """Compares the probabilities of int8 and float on rows of a log; warns if they differ by more than `MAX_CHANGE`.

    Args:
        folder: Ranker.
        rows: The log.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out.

    Returns:
        {"rows", "largest", "mean" (differences), "bound" (of the recipe, on the calibration rows)}.
    """
    kinds: list[Any] = [folder.entry.pipeline()(folder, precision, "onnxruntime") for precision in ("fp32", "int8")]
    batch = kinds[0].calibration(rows, COMPARED_ROWS, on_error)
    exact, int8 = (np.float64(kind.probabilities(batch)) for kind in kinds)
    moved = np.abs(exact - int8)
    change = {
        "rows": len(moved),
        "largest": float(moved.max()),
        "mean": float(moved.mean()),
        "bound": folder.entry.recipe.bound,
    }
    if not change["largest"] <= MAX_CHANGE:  # or NaN
        logger.warning(
            "int8 moves a probability by up to %.4f (mean %.4f) on %d rows, more than %.3f; keep layers in float "
            "(--keep-float REGEX, named by --all), or more rows in --calibration-data",
            *(change[key] for key in ("largest", "mean", "rows")),
            MAX_CHANGE,
        )
    return change


def summary_of(folder: ModelFolder) -> dict[str, Any]:
    """Summarizes the int8 model of a folder on its calibration samples, in all engines that run it; logs warnings.

    Args:
        folder: Model folder with its calibration samples.

    Returns:
        See `pipelines.analysis.summary.summarize`.
    """
    from pipelines.analysis.summary import summarize
    from pipelines.graph import io
    from pipelines.models import npz
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.quantization.quantizer import Operator, QuantReport

    exact, int8 = (io.load(folder.ensure(name)) for name in ("rewritten.onnx", "int8.onnx"))
    values, table = read_json(folder.path / QUANTIZATION), CalibrationTable.load(folder.path / "calibration.json")
    quantized = QuantReport(tuple(Operator(**row) for row in values["operators"]), folder.recipe, values["graph"])
    native = None
    if isinstance(folder.entry, Lowerable) and extension.isas():
        with contextlib.suppress(RequestError):  # the native kernels do not support the graph
            native = graph_file(folder, "int8", "native")
    samples = npz.read_npz(folder.path / SAMPLES, 1)[0]
    return log_warnings(summarize(exact, int8, quantized, table, samples, native))


def log_warnings(summary: dict[str, Any]) -> dict[str, Any]:
    """Logs the warnings of a summary, see `pipelines.analysis.summary.summarize`, and returns it."""
    for warning in summary["warnings"]:
        logger.warning("%s", warning)
    return summary
