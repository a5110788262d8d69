"""The verbs `tune` and `plan` (in `zoo.verbs` with the others): a zoo model, or any ONNX file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import zoo
from pipelines import build as road
from pipelines import files, graph, kernels, machine, native, page, report
from pipelines.batches import Batch, cut, joined, length
from pipelines.build import ModelFolder
from pipelines.calibrate import CalibrationTable
from pipelines.engine import Session, available, load
from pipelines.entry import QuantRecipe
from pipelines.errors import RequestError, ZooError
from pipelines.pipeline import PRECISIONS, choose_engine
from pipelines.plan import Candidate
from pipelines.plan import build as build_plan
from pipelines.quantize import QuantReport
from pipelines.rewrite import rewrite
from pipelines.rewrites import SHARED
from pipelines.tune import ArrayJudge, Judge, Maker, Samples, Settings, Verdict
from pipelines.tune import tune as search

Model = str | Path
LABEL = "label"  # the array of an evaluation .npz that is no input
FIFTH = 5  # without calibration data every fifth evaluation sample is kept for calibration
AS_IT_IS = "as it is"  # the precision of a file that a user brings

logger = logging.getLogger(__name__)


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
    report_path: Model | None = None,
) -> dict[str, Any]:
    """Search for the quickest recipe of a model that loses at most `max_drop` (a share: 0.005 = 0.5%); see `pipelines.tune.tune`.

    An ONNX file: evaluation_data and calibration_data are .npz of the graph's inputs, the former with `label` if there are any (see
    `pipelines.tune.ArrayJudge` for what is measured); without calibration_data every fifth evaluation sample calibrates instead.
    A zoo model: both are raw data; the metric is the model's own, calibration_data by default the samples that training kept.
    report_path: also write the report of the model found (.json or .html). Raises RequestError for unusable data.
    """
    if report_path is not None:
        page.require_format(report_path)
    target = Path(output)
    if target.suffix != ".onnx":
        raise RequestError(f"the result is an ONNX model, not {target.name}; give it a name that ends in .onnx")
    if is_file(model):
        float_model = graph.load(model)
        rewrite(float_model, [each() for each in SHARED])
        judge, samples, total = _arrays(float_model, evaluation_data, calibration_data, batch_size)
        recipe = QuantRecipe()
        spare(target, model, evaluation_data, calibration_data)
    else:
        folder = zoo.load(model)
        float_model = graph.load(folder.ensure("rewritten.onnx"))
        samples, total = _raw(folder, calibration_data)
        example = {name: array[:batch_size] for name, array in next(iter(samples())).items()}
        judge, recipe = FolderJudge(folder, evaluation_data, example), folder.recipe
        spare(target, *_files(folder), *listed(evaluation_data), *listed(calibration_data))
    options: Any = {"max_drop": max_drop, "seconds": seconds, "engine": engine, "threads": threads, "recipe": recipe, "total": total}
    found = search(float_model, samples, judge, target, **options)
    if report_path is not None:
        settings = found["best"]["settings"]
        maker = Maker(float_model, samples, recipe, total)
        best = Settings(**{**settings, "keep_float": tuple(settings["keep_float"])})
        int8, said, table = maker.make(best)
        made_from = maker.floating(best.equalize)
        assert made_from is not None
        page.save(report.explain(made_from, int8, said, table, samples(), trials=found["trials"]), report_path)
        found["report"] = str(report_path)
    return found | {"environment": machine.environment(threads=threads, batch_size=batch_size)}


class FolderJudge:
    """A zoo model's own metric, the first that its `evaluate` names, on raw labelled data."""

    def __init__(self, folder: ModelFolder, data: Any, example: Batch) -> None:
        self._folder, self._data, self._kind = folder, data, folder.entry.part("pipeline")
        self.metric, self.example = "", example
        digests = [files.sha256(each) if Path(str(each)).is_file() else str(each) for each in listed(data)]
        self.digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def __call__(self, fp32: Session, int8: Session) -> Verdict:
        """See `pipelines.tune.Judge`."""
        pipelines = {}
        for precision, session in (("fp32", fp32), ("int8", int8)):
            pipelines[precision] = self._kind(self._folder, "fp32", "auto", session.threads)
            pipelines[precision].use(session)
        metrics = self._folder.entry.part("evaluate")(pipelines, self._data, "raise")["metrics"]
        self.metric = next(iter(metrics["fp32"]))
        scores = {precision: float(each[self.metric]) for precision, each in metrics.items()}
        return Verdict(scores["fp32"] - scores["int8"], None, scores)


def _files(folder: ModelFolder) -> list[Path]:
    """What lies in a model's folder and must not be replaced."""
    return [each for each in folder.path.iterdir() if each.suffix != ".plan"]


def listed(data: Any) -> Sequence[Any]:
    """`data` as a list: itself, or a list of it alone."""
    return data if isinstance(data, list | tuple) else [data]


def _arrays(model: ir.Model, evaluation: Any, calibration: Any, batch_size: int) -> tuple[Judge, Samples, int]:
    """Judge, calibration samples and their number for an ONNX file."""
    arrays = _npz(evaluation)
    labels = arrays.pop(LABEL, None)
    inputs = {str(each.name): each for each in model.graph.inputs}
    if set(arrays) != set(inputs):
        raise RequestError(f"{evaluation} holds {', '.join(arrays)}; wanted the graph's inputs, {', '.join(inputs)}, and {LABEL} if known")
    fixed = {each.shape[0] for each in inputs.values() if each.shape is not None and len(each.shape) and isinstance(each.shape[0], int)}
    size = fixed.pop() if len(fixed) == 1 else batch_size
    if calibration is None:
        logger.warning("no calibration data: every fifth evaluation sample is used for calibration, the others for the evaluation")
        chosen = np.arange(length(arrays)) % FIFTH == 0
        given = {name: array[chosen] for name, array in arrays.items()}
        arrays = {name: array[~chosen] for name, array in arrays.items()}
        labels = None if labels is None else labels[~chosen]
    else:
        given = _npz(calibration)
    given, arrays = _whole(given, size if fixed else 1), _whole(arrays, size)
    labels = None if labels is None else labels[: length(arrays)]

    return ArrayJudge(arrays, labels, size), lambda: cut(given, 64), length(given)


def _whole(arrays: Batch, size: int) -> dict[str, Any]:
    """As many samples as fill batches of `size`."""
    count = length(arrays)
    if count < size:
        raise RequestError(f"found {count} samples; the batch size {size} needs at least so many")
    return {name: array[: count - count % size] for name, array in arrays.items()}


def _npz(path: Any) -> dict[str, Any]:
    return joined(list(road.read_npz(path)[0]))


def _raw(folder: ModelFolder, data: Any) -> tuple[Samples, int]:
    """Calibration samples of a zoo model, and their number."""
    if data is None:
        if not (folder.path / road.SAMPLES).is_file():
            raise RequestError(f"{folder.card.name} has no samples of its training data; give yours with --calibration-data FILE")
        path = folder.ensure(road.SAMPLES)
        return lambda: road.read_npz(path)[0], road.read_npz(path)[1]
    opened: Any = folder.entry.part("pipeline")(folder, "fp32", "onnxruntime")
    batch = opened.calibration(data, 4096, "raise")
    return lambda: iter([batch]), length(batch)


def plan(
    model: Model,
    output: Model | None = None,
    *,
    precisions: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    threads: Sequence[int] = (1,),
    batch_sizes: Sequence[int] | None = None,
    data: Model | None = None,
) -> dict[str, Any]:
    """Time engines, precisions, threads and batch sizes on this machine and write a plan file (`pipelines.plan.build`, `open_plan`).

    precisions: of a zoo model (int8 unless named; "bf16" is fp32 computed in bfloat16, where the CPU has that); an ONNX file runs as it is,
    and in "bf16" if that is named. batch_sizes: a zoo model's own, 1 for a file unless named. data: raw input, or .npz of the graph's
    inputs for a file, whose inputs are zeros otherwise. output: by default MODEL.plan beside the file or in the model's folder.
    For a zoo model the choice among all engines is also kept for engine="auto". Returns what the file says, and "path".
    """
    if min((*threads, *(batch_sizes or ())), default=0) < 1:
        raise RequestError(f"threads {list(threads)} and batch sizes {list(batch_sizes or ())} must all be 1 or more")
    if unknown := [each for each in precisions or () if each not in (*PRECISIONS, "bf16", AS_IT_IS)]:
        raise RequestError(f"unknown precision {', '.join(unknown)}; choose among {', '.join(PRECISIONS)}, bf16")
    if "bf16" in (precisions or ()) and not {"avx512_bf16", "amx_bf16"} & set(machine.cpu()["flags"]):
        raise RequestError(f"{machine.cpu()['name']} does not compute in bf16; choose among {', '.join(PRECISIONS)}")
    names = list(engines or (*available(), "native"))
    if unknown := [each for each in names if each not in native.ENGINES]:
        raise RequestError(f"unknown engine {', '.join(unknown)}; choose among {', '.join(native.ENGINES)}")
    if is_file(model):
        path = Path(model)
        batches = _example(graph.load(path), data, batch_sizes or (1,))
        kinds = [AS_IT_IS, *(each for each in precisions or () if each == "bf16")]
        candidates = _candidates({kind: path for kind in kinds}, names)
        target = Path(output) if output is not None else path.with_suffix(".plan")
        spare(target, model, data)
        found = build_plan(candidates, batches, threads, target, load)
        return {"model": path.name, "path": str(target), **found}
    folder = zoo.load(model)
    opened: Any = folder.entry.part("pipeline")(folder, "fp32", "onnxruntime")
    batches = [opened.preprocess(opened.example(size, data)) for size in batch_sizes or (opened.BATCH_SIZE,)]
    kinds = list(precisions or ("int8",))
    candidates = _candidates({kind: folder.ensure(PRECISIONS.get(kind, PRECISIONS["fp32"])) for kind in kinds}, names)
    if "int8" in kinds and "native" in names and folder.entry.native and kernels.isas():
        try:
            candidates.append(Candidate("native", "int8", folder.ensure(road.NATIVE)))
        except ZooError as error:
            logger.info("%s", error)
    for kind in [each for each in kinds if each in PRECISIONS]:
        for count in threads:
            for batch in batches:
                choose_engine(folder, kind, batch, count, fresh=True)
    target = Path(output) if output is not None else folder.path / "model.plan"
    spare(target, *_files(folder), data)
    found = build_plan(candidates, batches, threads, target, native.load)
    return {"model": folder.card.name, "path": str(target), **found}


def _candidates(paths: dict[str, Path], names: Sequence[str]) -> list[Candidate]:
    """Every stock engine named with every precision; bfloat16 in OpenVINO alone."""
    pairs = [(name, kind) for kind in paths for name in names if name in available() and (kind != "bf16" or name == "openvino")]
    return [Candidate(name, kind, paths[kind]) for name, kind in pairs]


def _example(model: ir.Model, data: Model | None, sizes: Sequence[int]) -> list[Batch]:
    """A batch of every size for an ONNX file: of the data, repeated where it is short, or of zeros."""
    inputs = {str(each.name): each for each in model.graph.inputs if each.name not in model.graph.initializers}
    fixed = [each.shape[0] for each in inputs.values() if each.shape is not None and len(each.shape) and isinstance(each.shape[0], int)]
    sizes = fixed[:1] or sizes
    if data is not None:
        arrays = _npz(data)
        return [{name: np.resize(arrays[name], (size, *arrays[name].shape[1:])) for name in arrays} for size in sizes]
    ports = {}
    for name, each in inputs.items():
        known = graph.dimensions(each) or []
        if not known or None in known[1:] or each.dtype is None:
            raise RequestError(f"input {name} has the shape {each.shape}, which leaves sizes open; give an example with --data FILE.npz")
        ports[name] = [size or 0 for size in known[1:]], each.dtype.numpy()
    return [{name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in ports.items()} for size in sizes]


def write_report(
    path: Model, float_model: ir.Model, int8_model: ir.Model, said: QuantReport, table: CalibrationTable, samples: Model | None
) -> None:
    """Explain a quantized model on `samples` (.npz) and write the report (.json or .html)."""
    if samples is None or not Path(samples).is_file():
        raise RequestError("a report is measured on samples, and there are none; give them with --calibration-data FILE.npz")
    page.save(report.explain(float_model, int8_model, said, table, road.read_npz(samples)[0]), path)


def is_file(model: Model) -> bool:
    """Whether a verb is given an ONNX file, not a model of the zoo. Raises RequestError for an .onnx path where no file is."""
    path = Path(model)
    if path.suffix == ".onnx" and not path.is_file():
        raise RequestError(f"no ONNX model at {path}; pass the path of an .onnx file, a model folder, or one of: {', '.join(zoo.names())}")
    return path.is_file()


def spare(output: Model | None, *inputs: Any) -> None:
    """Raise RequestError where `output` is the same file as one of the inputs (those that are no path are passed over)."""
    if output is None or not os.path.exists(output):  # noqa: PTH110 (pathlib's raises for a name too long)
        return
    for each in inputs:
        if isinstance(each, str | os.PathLike) and os.path.exists(each) and os.path.samefile(each, output):  # noqa: PTH110, PTH121
            raise RequestError(f"the output {output} is the input {each}, which it would replace; choose another output path")
