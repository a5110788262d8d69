"""The verbs from a float graph to int8: rewrite, calibrate, quantize, tune."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

import zoo
from pipelines.analysis import report, report_html
from pipelines.analysis.tune import Verdict
from pipelines.analysis.tune import tune as search
from pipelines.core import files, machine
from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.engines.session import Session
from pipelines.graph import io, reference_session
from pipelines.models import build as road
from pipelines.models.build import ModelFolder
from pipelines.quantization.calibrate import MEMORY, CalibrationTable
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantize import QuantReport
from pipelines.quantization.quantize import quantize as quantize_model
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites import driver
from pipelines.rewrites.driver import RewriteReport
from pipelines.rewrites.shared import SHARED
from zoo.paths import Model, is_file, listed, require_report, required, spare, used
from zoo.samples import judge_of, raw_samples, samples_of
from zoo.verbs.models import run_stage

logger = logging.getLogger(__name__)


def rewrite(model: Model, output: Model | None = None) -> dict[str, Any]:
    """fp32.onnx -> rewritten.onnx with the model's passes; or any ONNX file -> `output` with the shared ones. Returns
    what fired.
    """
    if not is_file(model):
        if output is not None:
            raise RequestError(
                f"-o is for an .onnx file; {model} keeps its rewritten.onnx in its own folder, leave the option out"
            )
        return run_stage(model, "rewritten.onnx")
    target = required(output)
    spare(target, model)
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

    An ONNX file takes an .npz of its inputs, or a folder of images with `preprocess` (`zoo.samples.samples_of`). It is
    rewritten by the shared passes first, as `quantize` does. samples: how many of `data` to use, at least 1; None: all
    for an ONNX file, else `Pipeline.CALIBRATION`.
    max_memory: see `pipelines.quantization.calibrate.Observation`. correct, search: what else to find on the samples,
    see `QuantRecipe`; None: as the recipe has it. Writes calibration.json into the model's folder, or `output`; returns
    {"observer", "samples", "path"}.
    """
    if samples is not None and samples < 1:
        raise RequestError(f"samples is {samples}; calibration needs at least 1")
    if is_file(model):
        if data is None:
            raise RequestError(
                "an ONNX file is calibrated on samples; give them with --data: an .npz of its inputs, or a folder of "
                "images"
            )
        target = required(output)
        spare(target, model, data)
        loaded, _ = rewritten(model)
        given = samples_of(loaded, data, preprocess, on_error, samples)
        recipe = _changed(QuantRecipe(), observer=observer, correct=correct, search=search)
        table = make_table(loaded, recipe, given, given.total, max_memory=max_memory)
        return {"observer": table.observer, "samples": table.samples, "path": str(table.save(target))}
    folder = open_model(model, preprocess)
    if output is None and folder.given("calibration.json"):
        name = folder.card.name
        raise RequestError(
            f"{name} ships its calibration table, which stays as it is; make yours elsewhere with --data FILE -o FILE"
        )
    spare(output, *used(folder), *listed(data))
    if folder.trained is not None and data is None and output is None and observer is None:
        raise RequestError(
            f"{folder.card.name} has the ranges of its training ({road.TRAINED}); for others give --data FILE or "
            "--observer NAME"
        )
    given = raw_samples(folder, data, "--data", samples, on_error)
    recipe = _changed(folder.recipe, observer=observer, correct=correct, search=search)
    table = make_table(io.load(folder.ensure("rewritten.onnx")), recipe, given, given.total, max_memory=max_memory)
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

    calibration_data, preprocess, on_error: see `zoo.samples.samples_of`. max_memory: of their calibration, see
    `pipelines.quantization.calibrate.Observation`.

    An ONNX file is rewritten by the shared passes first; a table that `calibrate` made for the file fits. The other
    options are those of `QuantRecipe`; None: as the recipe has it; keep_float and dynamic add to what a zoo model has.
    Writes int8.onnx into the model's folder, or `output`; returns the quantization report.
    report_path: also measure the result on the calibration samples, and write what `pipelines.analysis.report.explain`
    finds (.json or .html).
    """
    if table is not None and calibration_data is not None:
        raise RequestError("give --table or --calibration-data, not both")
    if observer and (table is not None or (output is not None and not is_file(model))):
        raise RequestError(
            "the observer was chosen when the table was made; make another with: zoo calibrate MODEL --observer NAME "
            "-o FILE"
        )
    changes: dict[str, Any] = {
        "keep_float": tuple(keep_float),
        "reduced_range": reduced_range,
        "quantize_tables": not float_tables,
    }
    changes |= {
        "dynamic": tuple(dynamic),
        "symmetric": symmetric,
        "correct": correct,
        "search": search,
        "observer": observer,
    }
    if is_file(model):
        target = required(output)
        spare(target, model, calibration_data, table)
        require_report(report_path, target, model, calibration_data, table, samples=table is None)
        recipe = _changed(QuantRecipe(), **changes)
        loaded, _ = rewritten(model)
        if table is not None:
            ranges = CalibrationTable.load(table)
            result, report = quantize_model(loaded, recipe, ranges)
        elif calibration_data is not None:
            samples: Any = samples_of(loaded, calibration_data, preprocess, on_error)
            ranges = make_table(loaded, recipe, samples, samples.total, max_memory=max_memory)
            result, report = quantize_model(loaded, recipe, ranges)
        else:
            raise RequestError(
                "int8 needs the ranges of the activations; give --calibration-data (.npz or a folder of images) or "
                "--table calibration.json"
            )
        io.save(result, target)
        if report_path is not None:
            write_report(report_path, loaded, result, report, ranges, samples)
        return _report(report, target)
    folder = open_model(model, preprocess)
    if output is None and folder.given("int8.onnx"):
        raise RequestError(
            f"{folder.card.name} ships its int8.onnx, which stays as it is; write yours elsewhere with -o FILE"
        )
    if calibration_data is not None:
        raise RequestError(
            "a zoo model is calibrated on raw data; run: zoo calibrate MODEL --data FILE, then zoo quantize MODEL "
            "--table FILE"
        )
    require_report(
        report_path,
        output or folder.path / "int8.onnx",
        *used(folder),
        table,
        samples=(folder.path / road.SAMPLES).is_file(),
    )
    own = folder.entry.recipe
    changes |= {"keep_float": (*own.keep_float, *keep_float), "dynamic": (*own.dynamic, *dynamic)}
    recipe = _changed(folder.recipe, **changes)
    if output is None:
        if table is not None:
            raise RequestError("a table given by --table is used once; say where to write the result with -o FILE")
        road.set_recipe(folder, recipe)
        path = folder.ensure("int8.onnx")
        if report_path is not None:
            loaded, ranges = (
                io.load(folder.ensure("rewritten.onnx")),
                CalibrationTable.load(folder.ensure("calibration.json")),
            )
            write_report(report_path, loaded, *quantize_model(loaded, recipe, ranges), ranges, _kept_samples(folder))
        return {**read_json(folder.path / road.QUANTIZATION), "path": str(path), "bytes": path.stat().st_size}
    spare(output, *used(folder), table)
    loaded = io.load(folder.ensure("rewritten.onnx"))
    ranges = CalibrationTable.load(table or folder.ensure("calibration.json"))
    result, report = quantize_model(loaded, recipe, ranges)
    io.save(result, output)
    if report_path is not None:
        write_report(report_path, loaded, result, report, ranges, _kept_samples(folder))
    return _report(report, Path(output))


def _kept_samples(folder: ModelFolder) -> Iterable[Batch]:
    """The samples that training kept for calibration."""
    return road.read_npz(folder.path / road.SAMPLES)[0]


def _changed(recipe: QuantRecipe, **changes: Any) -> QuantRecipe:
    """`recipe` with those changes that are not None."""
    return dataclasses.replace(recipe, **{key: value for key, value in changes.items() if value is not None})


def _report(report: QuantReport, path: Path) -> dict[str, Any]:
    return {**report.to_json(), "path": str(path), "bytes": path.stat().st_size}


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
    """Search for the quickest recipe of a model that loses at most `max_drop` (a share: 0.005 = 0.5%); see
    `pipelines.analysis.tune.tune`.

    An ONNX file: evaluation_data and calibration_data are .npz of the graph's inputs, the former with `label` if there
    are any (see `pipelines.analysis.tune.ArrayJudge` for what is measured), or folders of images, the former with
    labels.csv or one subfolder a class if there are any, and `preprocess` (see `samples_of`); without calibration_data
    every fifth evaluation sample calibrates instead. A zoo model: both are raw data; the metric is the model's own,
    calibration_data by default the samples that training kept.
    report_path: also write the report of the model found (.json or .html). Raises RequestError for unusable data.
    """
    target = Path(output)
    require_report(report_path, target, model, *listed(evaluation_data), *listed(calibration_data))
    if target.suffix != ".onnx":
        raise RequestError(f"the result is an ONNX model, not {target.name}; give it a name that ends in .onnx")
    if batch_size < 1:
        raise RequestError(f"batch size is {batch_size}; wanted 1 or more")
    if is_file(model):
        spare(target, model, evaluation_data, calibration_data)
        float_model, _ = rewritten(model)
        judge, samples = judge_of(float_model, evaluation_data, calibration_data, batch_size, preprocess)
        recipe = QuantRecipe()
    else:
        folder = open_model(model, preprocess)
        spare(target, *used(folder), *listed(evaluation_data), *listed(calibration_data))
        float_model = io.load(folder.ensure("rewritten.onnx"))
        samples = raw_samples(folder, calibration_data, "--calibration-data")
        example = {name: array[:batch_size] for name, array in next(iter(samples)).items()}
        judge, recipe = FolderJudge(folder, evaluation_data, example), folder.recipe
    options: Any = {"max_drop": max_drop, "seconds": seconds, "engine": engine, "threads": threads, "recipe": recipe}
    found = search(
        float_model, samples.__iter__, judge, target, total=samples.total, report_path=report_path, **options
    )
    if report_path is not None:
        found["report"] = str(report_path)
    return found | {"environment": machine.environment(threads=threads, batch_size=length(judge.example))}


class FolderJudge:
    """A zoo model's own metric, the first that its `evaluate` names, on raw labelled data."""

    def __init__(self, folder: ModelFolder, data: Any, example: Batch) -> None:
        self._folder, self._data, self._kind = folder, data, folder.entry.part("pipeline")
        self.metric, self.example = "", example
        digests = [files.sha256(each) if Path(str(each)).is_file() else str(each) for each in listed(data)]
        self.digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def __call__(self, fp32: Session, int8: Session) -> Verdict:
        """See `pipelines.analysis.tune.Judge`."""
        pipelines = {}
        for precision, session in (("fp32", fp32), ("int8", int8)):
            pipelines[precision] = self._kind(self._folder, "fp32", "auto", session.threads)
            pipelines[precision].use(session)
        metrics = self._folder.entry.part("evaluate")(pipelines, self._data, "raise")["metrics"]
        self.metric = next(iter(metrics["fp32"]))
        scores = {precision: float(each[self.metric]) for precision, each in metrics.items()}
        return Verdict(scores["fp32"] - scores["int8"], None, scores)


def rewritten(model: Model) -> tuple[ir.Model, RewriteReport]:
    """An ONNX file as `rewrite`, `calibrate`, `quantize` and `tune` see it, and which passes fired.

    Its weights are float32, the shared passes are applied, and its inputs have the batch size that the graph fixes, if
    it does.
    """
    loaded = io.load(model)
    said = driver.rewrite(loaded, [each() for each in SHARED])
    if fixed := reference_session.fix_batch(loaded):
        logger.warning("%s: %s", model, fixed)
    return loaded, said


def open_model(model: Model, preprocess: Model | None) -> ModelFolder:
    """`zoo.load`. Raises RequestError where the user brings a spec of images, which a zoo model has itself."""
    if preprocess is not None:
        raise RequestError(
            f"--preprocess describes the images of an ONNX file; {model} knows what it takes, leave the option out"
        )
    return zoo.load(model)


def write_report(
    path: Model,
    float_model: ir.Model,
    int8_model: ir.Model,
    said: QuantReport,
    table: CalibrationTable,
    samples: Iterable[Batch],
) -> None:
    """Explain a quantized model on `samples` and write the report (.json or .html)."""
    report_html.save(report.explain(float_model, int8_model, said, table, samples), path)
