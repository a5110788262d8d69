"""Commands from a float graph to int8: rewrite, calibrate, quantize, tune."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from pipelines.analysis import report, report_html
from pipelines.analysis.quality_metric import QualityMetric
from pipelines.analysis.summary import summarize
from pipelines.analysis.tune import tune as search_recipes
from pipelines.core import machine
from pipelines.core.batches import length
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.graph import io, reference_session
from pipelines.models import npz, stages
from pipelines.models.folder import ModelFolder
from pipelines.models.record import QUANTIZATION, SAMPLES, TRAINED
from pipelines.quantization.algorithms.correction import SECONDS
from pipelines.quantization.calibration.calibrate import MEMORY
from pipelines.quantization.calibration.effort import split_held_out
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq.fused_functions import fuse_functions
from pipelines.quantization.qdq.layers import integer_layers
from pipelines.quantization.quantizer import quantize as quantize_model
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.taken_branch import TakenBranch, taken_branch
from pipelines.rewrites import driver
from pipelines.rewrites.driver import RewriteReport
from pipelines.rewrites.shared import file_passes
from zoo.api.models import compare_probabilities, log_warnings, run_stage, summary_of
from zoo.api.paths import Model, as_list, files_of, is_file, open_model, output_path, require_distinct, require_report
from zoo.api.samples import (
    EFFORT,
    Calibration,
    Samples,
    TaskMetric,
    quality_metric_of,
    raw_samples,
    read_once,
    require_effort,
)
from zoo.api.training import import_ranker

logger = logging.getLogger(__name__)
OF_FILES = QuantRecipe(tie_tables=True, only_faster=True)  # the recipe of an .onnx file
ENGINES_OF_FILES = ("auto", "onnxruntime", "openvino")


def rewrite(model: Model, output: Model | None = None) -> dict[str, Any]:
    """Applies the graph rewrites.

    Args:
        model: Zoo model, with the passes of its family; or path of an .onnx file, with the shared passes.
        output: Path of the result; for an .onnx file only.

    Returns:
        Number of matches of each pass.

    Raises:
        RequestError: `output` is missing for an .onnx file, or given for a zoo model.
    """
    if not is_file(model):
        if output is not None:
            raise RequestError(f"-o requires an .onnx file; the rewritten.onnx of {model} is in its model folder")
        return run_stage(model, "rewritten.onnx")
    target = output_path(output)
    require_distinct(target, model)
    graph, passes = rewritten(model, require_float=False)
    io.save(graph, target)
    return passes.to_json()


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
    time_budget: float | None = None,
    preprocess: Model | None = None,
    columns: Sequence[str] = (),
    on_error: str = "raise",
    effort: str | None = None,
) -> dict[str, Any]:
    """Computes the activation ranges of a model on samples and writes them as a calibration table.

    An .onnx file is rewritten by the shared passes first, as in `quantize`.

    Args:
        model: Zoo model, or path of an .onnx file.
        data: Raw input of a zoo model; None for samples of its training data. For an .onnx file: an .npz of its inputs,
            or a folder of images (see `zoo.api.samples.samples_of`).
        output: Path of the table; None for calibration.json in the model's folder.
        observer: Range estimator: "auto", "minmax", "percentile", "mse" or "kl"; None for the one of the recipe.
        correct: Also round weights adaptively and correct biases (see `QuantRecipe`); None as in the recipe.
        search: Also search equalized channels, clipped weights and other ranges (see `QuantRecipe`); None as in the
            recipe.
        samples: Number of samples, at least 1; None for all of an .onnx file, or `Pipeline.CALIBRATION`.
        max_memory: Memory limit for the model and the observed activations, in bytes or e.g. "128MB".
        time_budget: Time limit of the corrections in seconds; None for no limit.
        preprocess: JSON file with the image preprocessing of an .onnx file; None for that of `zoo run`.
        columns: Columns of tables of texts (see `zoo.texts.data.text_files.read_rows`).
        on_error: "raise" to stop at an invalid sample, "skip" to leave it out.
        effort: For an .onnx file: "fast" (ranges chosen on a few samples, biases alone corrected), "default", or "best"
            (every choice evaluated on all samples).

    Returns:
        {"observer", "samples", "path"}, and "effort" for an .onnx file.

    Raises:
        RequestError: Data or options are invalid.
    """
    if samples is not None and samples < 1:
        raise RequestError(f"samples is {samples}; calibration needs at least 1")
    changes = {"observer": observer, "correct": correct, "search": search}
    require_effort(effort, model)
    own = Path(model) if is_file(model) else None
    effort = effort or EFFORT
    calibration = Calibration(data, samples, max_memory, preprocess, on_error, time_budget, columns, effort, own)
    if own is not None:
        if columns:
            raise RequestError("--column requires a text encoder; an ONNX file takes arrays or images")
        table, path = _calibrate_file(model, output, changes, calibration)
    else:
        table, path = _calibrate_folder(open_model(model, preprocess, data), output, changes, calibration)
    facts = {"observer": table.observer, "samples": table.samples, "path": str(path)}
    return facts if own is None else facts | {"effort": effort}


def _calibrate_file(
    model: Model, output: Model | None, changes: dict[str, Any], calibration: Calibration
) -> tuple[CalibrationTable, Path]:
    """Calibrates an ONNX file; returns the table and its path."""
    if calibration.data is None:
        raise RequestError(
            "calibration needs samples; give them with --data: an .npz of the graph's inputs, or a folder of images"
        )
    target = output_path(output)
    require_distinct(target, model, *as_list(calibration.data), calibration.preprocess)
    float_model, _ = rewritten(model)
    table = calibration.auto_calibrate(float_model, _changed(OF_FILES, changes), calibration.samples(float_model))
    return table, table.save(target)


def _calibrate_folder(
    folder: ModelFolder, output: Model | None, changes: dict[str, Any], calibration: Calibration
) -> tuple[CalibrationTable, Path]:
    """Calibrates a zoo model; returns the table and its path."""
    name, data = folder.card.name, calibration.data
    if isinstance(data, list):
        raise RequestError(f"found {len(data)} x --data, expected one file or folder for {name}")
    if output is None and folder.is_listed("calibration.json"):
        raise RequestError(
            f"{name} ships its calibration table, which is read-only; write another one with --data FILE -o FILE"
        )
    require_distinct(output, *files_of(folder), *as_list(data))
    if folder.trained is not None and data is None and output is None and changes["observer"] is None:
        raise RequestError(
            f"{name} has trained ranges ({TRAINED}); for other ranges give --data FILE or --observer NAME"
        )
    samples = raw_samples(folder, data, "--data", calibration.count, calibration.on_error, calibration.columns)
    recipe = _changed(folder.recipe, changes)
    table = calibration.table(folder.ensure("rewritten.onnx"), recipe, samples)
    table = folder.with_given_ranges(table)
    return table, table.save(output) if output is not None else stages.set_table(
        folder, table, own_data=data is not None
    )


def quantize(
    model: Model,
    output: Model | None = None,
    *,
    calibration_data: Any = None,
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
    time_budget: float | None = SECONDS,
    preprocess: Model | None = None,
    on_error: str = "raise",
    report_path: Model | None = None,
    schema: Model | None = None,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    effort: str | None = None,
    engine: str = "auto",
) -> dict[str, Any]:
    """Quantizes a zoo model by its recipe, or any ONNX file, to int8.

    An .onnx file is rewritten by the shared passes first; a table that `calibrate` made for the file fits. Options that
    are None are taken from the recipe (`QuantRecipe`).

    Args:
        model: Zoo model, or path of an .onnx file.
        output: Path of the int8 model; None for int8.onnx in the model's folder. With `schema`: folder of the new
            model.
        calibration_data: Samples for an .onnx file (see `zoo.api.samples.samples_of`). With `schema`: the log.
        table: Calibration table of this graph, in place of `calibration_data`.
        observer: Range estimator: "auto", "minmax", "percentile", "mse" or "kl".
        keep_float: Regular expressions of operator names that stay float32; added to those of a zoo model.
        reduced_range: 7-bit weights, for CPUs without VNNI.
        float_tables: Keep embedding tables in float32.
        dynamic: Regular expressions of Gemm and MatMul names with dynamic quantization; added to those of a zoo model.
        symmetric: Use zero point 128 for signed activations.
        correct: Round weights adaptively and correct biases.
        search: Search equalized channels, clipped weights and other ranges.
        max_memory: Memory limit of the calibration, in bytes or e.g. "128MB".
        time_budget: Time limit in seconds of the corrections of an .onnx file; a warning names layers left uncorrected.
            None for no limit.
        preprocess: JSON file with the image preprocessing of an .onnx file; None for that of `zoo run`.
        on_error: "raise" to stop at an invalid sample, "skip" to leave it out.
        report_path: Report of the error on the calibration samples, .json or .html (see
            `pipelines.analysis.report.explain`).
        schema: Schema of a log (see `zoo.schema`). `model` is then a third-party ranker in ONNX, and `output` becomes a
            model folder of the detected family.
        columns: With `schema`: columns of the inputs, see `zoo.freeze`.
        output_node: With `schema`: name of the probability output, see `zoo.freeze`.
        effort: For an .onnx file: "fast" (ranges chosen on a few samples, biases alone corrected), "default", or "best"
            (every choice evaluated on all samples).
        engine: Engine that an .onnx file is written for. "auto" and "onnxruntime": SiLU and LeakyRelu behind
            convolutions are int8 operators of ONNX Runtime. "openvino": OpenVINO computes convolutions with the
            activation functions behind them (see `pipelines.quantization.qdq.fused_functions`). Either file runs in
            both engines.

    Returns:
        Quantization report with "path" and "bytes"; "effort" for a calibrated .onnx file. For a file written to
        `output`, or with `schema`, also "summary" (see `pipelines.analysis.summary.summarize`). With `schema`, also
        "probability": {"rows", "largest", "mean" (differences of probabilities between float and int8 on the first rows
        of the log), "bound" (of the recipe)}.

    Raises:
        RequestError: Data or options are invalid, or the table belongs to another graph.
    """
    if table is not None and calibration_data is not None:
        raise RequestError("give --table or --calibration-data, not both")
    if effort is not None and (table is not None or schema is not None):
        raise RequestError("--effort requires the calibration of an .onnx file, without --table and --schema")
    require_effort(effort, model)
    file = is_file(model)
    if engine not in ENGINES_OF_FILES:
        raise RequestError(f"found the engine {engine!r}, expected one of {', '.join(ENGINES_OF_FILES)}")
    if engine != "auto" and (not file or schema is not None):
        raise RequestError(
            f"--engine {engine} requires an .onnx file without --schema; the int8.onnx of {model} runs in all engines"
        )
    if schema is not None and not file:
        raise RequestError(f"--schema requires an .onnx file of a third-party ranker; {model} has its own schema")
    if schema is not None and preprocess is not None:
        raise RequestError("--preprocess is for images; a ranker has its --schema, leave the option out")
    if schema is None and (columns or output_node):
        raise RequestError("--columns and --output-node require --schema schema.json")
    if observer and (table is not None or (output is not None and not file)):
        raise RequestError(
            "the table determines the observer; make another table with: zoo calibrate MODEL --observer NAME -o FILE"
        )
    changes = {
        "observer": observer,
        "keep_float": tuple(keep_float),
        "reduced_range": reduced_range,
        "quantize_tables": not float_tables,
        "dynamic": tuple(dynamic),
        "symmetric": symmetric,
        "correct": correct,
        "search": search,
    }
    if schema is not None:
        ranker = import_ranker(model, calibration_data, output, schema, None, columns, output_node, on_error)
        facts = {"family": ranker.entry.name, "structure": ranker.card.details["structure"]}
        result = _quantize_folder(ranker, None, changes, table, report_path)
        moved = compare_probabilities(ranker, calibration_data, on_error)
        return {**facts, **result, "probability": moved, "summary": summary_of(ranker)}
    if file:
        calibration = Calibration(
            calibration_data, None, max_memory, preprocess, on_error, time_budget, (), effort or EFFORT, Path(model)
        )
        return _quantize_file(model, output, changes, table, calibration, report_path, engine)
    folder = open_model(model, preprocess, calibration_data)
    if output is None and folder.is_listed("int8.onnx"):
        raise RequestError(
            f"{folder.card.name} ships its int8.onnx, which is read-only; write another one with -o FILE"
        )
    if calibration_data is not None:
        raise RequestError(
            "a zoo model is calibrated on raw data; run: zoo calibrate MODEL --data FILE, then zoo quantize MODEL "
            "--table FILE"
        )
    return _quantize_folder(folder, output, changes, table, report_path)


def _quantize_file(
    model: Model,
    output: Model | None,
    changes: dict[str, Any],
    table_path: Model | None,
    calibration: Calibration,
    report_path: Model | None,
    engine: str,
) -> dict[str, Any]:
    """Quantizes an ONNX file with a table or samples."""
    target = output_path(output)
    inputs = (model, *as_list(calibration.data), calibration.preprocess, table_path)
    require_distinct(target, *inputs)
    require_report(report_path, target, *inputs, samples=table_path is None)
    recipe = _changed(OF_FILES, changes)
    machine.return_large_arrays()
    float_model, _ = rewritten(model)
    if table_path is not None:
        return _write_int8(float_model, recipe, CalibrationTable.load(table_path), target, engine=engine)
    if calibration.data is None:
        raise RequestError(
            "int8 needs the ranges of the activations; give --calibration-data (.npz or a folder of images) or "
            "--table calibration.json"
        )
    samples = calibration.samples(float_model)
    if (branch := taken_branch(float_model, samples)) is not None:
        float_model = branch.model
    table = calibration.auto_calibrate(float_model, recipe, samples)
    facts = {"engine": engine, "effort": calibration.effort}
    return _write_int8(float_model, recipe, table, target, report_path, samples, branch, **facts)


def _quantize_folder(
    folder: ModelFolder,
    output: Model | None,
    changes: dict[str, Any],
    table_path: Model | None,
    report_path: Model | None,
) -> dict[str, Any]:
    """Quantizes a zoo model in its folder, or to another path."""
    kept = folder.path / SAMPLES
    require_report(
        report_path, output or folder.path / "int8.onnx", *files_of(folder), table_path, samples=kept.is_file()
    )
    own = folder.own_recipe
    more = {name: (*getattr(own, name), *changes[name]) for name in ("keep_float", "dynamic")}
    recipe = _changed(folder.recipe, {**changes, **more})
    if output is not None:
        require_distinct(output, *files_of(folder), table_path)
        float_model = io.load(folder.ensure("rewritten.onnx"))
        table = CalibrationTable.load(table_path or folder.ensure("calibration.json"))
        samples = read_once(kept) if report_path is not None else ()
        return _write_int8(float_model, recipe, table, Path(output), report_path, samples)
    if table_path is not None:
        raise RequestError("--table requires an output path; give it with -o FILE")
    stages.set_recipe(folder, recipe)
    path = folder.ensure("int8.onnx")
    if report_path is not None:
        float_model = io.load(folder.ensure("rewritten.onnx"))
        table = CalibrationTable.load(folder.ensure("calibration.json"))
        int8, quantized = quantize_model(float_model, recipe, table)
        explained = report.explain(float_model, int8, quantized, table, npz.read_npz(kept)[0])
        report_html.save(explained, report_path)
    return {**read_json(folder.path / QUANTIZATION), "path": str(path), "bytes": path.stat().st_size}


def _write_int8(
    float_model: ir.Model,
    recipe: QuantRecipe,
    table: CalibrationTable,
    path: Path,
    report_path: Model | None = None,
    samples: Samples | tuple[()] = (),
    branch: TakenBranch | None = None,
    engine: str = "auto",
    **facts: str,
) -> dict[str, Any]:
    """Quantizes with a table and writes the model, and a report of the error on `samples` with `facts` if requested.

    The summary is computed on held-out samples, which no correction was fitted to.
    """
    int8, quantized = quantize_model(float_model, recipe, table)
    if report_path is not None:
        report_html.save(report.explain(float_model, int8, quantized, table, samples) | facts, report_path)
    if engine == "openvino":
        fuse_functions(int8)
    io.save(int8 if branch is None else branch.restored(int8, recipe, table), path)
    held_out = split_held_out(float_model, samples, table.samples)[0] if samples else ()
    quick = facts.get("effort") == "fast"
    summary = log_warnings(summarize(float_model, int8, quantized, table, held_out, quick=quick, path=path))
    return {**quantized.to_json(), "path": str(path), "bytes": path.stat().st_size, "summary": summary, **facts}


def _changed(recipe: QuantRecipe, changes: dict[str, Any]) -> QuantRecipe:
    """Returns the recipe with all changes that are not None."""
    return dataclasses.replace(recipe, **{key: value for key, value in changes.items() if value is not None})


def tune(
    model: Model,
    evaluation_data: Any,
    output: Model,
    *,
    calibration_data: Any = None,
    max_drop: float = 0.005,
    seconds: float = 1200.0,
    engine: str = "auto",
    threads: int = 1,
    batch_size: int = 1,
    preprocess: Model | None = None,
    report_path: Model | None = None,
) -> dict[str, Any]:
    """Searches for the fastest quantization recipe with a bounded quality drop (see `pipelines.analysis.tune.tune`).

    For an ONNX file, both data are .npz files of the graph's inputs, or folders of images with `preprocess` (see
    `zoo.api.samples.samples_of`). Labels are an array `label`, labels.csv, or one subfolder per class (see
    `pipelines.analysis.quality_metric.OutputMetric`). For a zoo model, both are raw data, and the metric is the model's
    own (`TaskMetric`).

    Args:
        model: Zoo model, or path of an .onnx file.
        evaluation_data: Samples to evaluate on.
        output: Path of the int8 .onnx file.
        calibration_data: Samples to calibrate on; None for every fifth evaluation sample, or the samples kept by the
            training of a zoo model.
        max_drop: Maximum drop of the metric, as a share (0.005 is half a percentage point).
        seconds: Time limit.
        engine: Engine to evaluate and time in; "auto" for the fastest.
        threads: Number of intra-op threads.
        batch_size: Samples of one inference, also for the latency.
        preprocess: JSON file with the image preprocessing of an .onnx file; None for that of `zoo run`.
        report_path: Report of the selected model, .json or .html.

    Returns:
        "path", "trials", "best", "met" (whether the drop is within `max_drop`), latencies, and "environment".

    Raises:
        RequestError: The data or options are invalid.
    """
    target = Path(output)
    require_report(report_path, target, model, *as_list(evaluation_data), *as_list(calibration_data))
    if target.suffix != ".onnx":
        raise RequestError(f"found the output {target.name}, expected a name that ends in .onnx")
    if batch_size < 1:
        raise RequestError(f"batch size is {batch_size}; expected 1 or more")
    begin = time.monotonic()
    options: dict[str, Any] = {"max_drop": max_drop, "engine": engine, "threads": threads, "report_path": report_path}
    metric: QualityMetric
    if is_file(model):
        require_distinct(target, model, *as_list(evaluation_data), *as_list(calibration_data), preprocess)
        float_model, _ = rewritten(model)
        metric, samples = quality_metric_of(
            float_model, evaluation_data, calibration_data, batch_size, preprocess, Path(model)
        )
    else:
        folder = open_model(model, preprocess, evaluation_data, calibration_data)
        require_distinct(target, *files_of(folder), *as_list(evaluation_data), *as_list(calibration_data))
        float_model = io.load(folder.ensure("rewritten.onnx"))
        samples = raw_samples(folder, calibration_data, "--calibration-data")
        metric = own = TaskMetric(folder, evaluation_data, next(iter(samples)), batch_size)
        options |= {"recipe": folder.recipe, "opener": own.open, "engines": own.engines}
    remaining = max(seconds - (time.monotonic() - begin), 0) if 0 <= seconds < math.inf else seconds
    options["seconds"] = remaining  # without the time of reading samples
    result = search_recipes(float_model, samples, metric, target, total=samples.total, **options)
    if report_path is not None:
        result["report"] = str(report_path)
    return result | {"environment": machine.environment(threads=threads, batch_size=length(metric.example))}


def rewritten(model: Model, require_float: bool = True) -> tuple[ir.Model, RewriteReport]:
    """Opens an ONNX file for quantization: float32 weights, shared passes applied, batch size fixed where implied.

    Args:
        model: Path of the ONNX file.
        require_float: Whether to refuse a file whose layers are all quantized already.

    Returns:
        The graph, and the report of the passes.

    Raises:
        RequestError: The file is invalid, or quantized already.
    """
    graph = io.load(model)
    passes = driver.rewrite(graph, file_passes())
    if require_float and (integers := integer_layers(graph)):
        raise RequestError(
            f"{model} is quantized already ({integers}); expected a float model: give the file that it was made from"
        )
    if fixed := reference_session.fix_batch(graph):
        logger.warning("%s: %s", model, fixed)
    return graph, passes
