"""The verbs `tune` and `plan` (in `zoo.verbs` with the others): a zoo model, or any ONNX file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import zoo
from pipelines.analysis import report, report_html
from pipelines.analysis.tune import ArrayJudge, Judge, Verdict
from pipelines.analysis.tune import tune as search
from pipelines.core import files, machine
from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError, ZooError
from pipelines.data import images
from pipelines.data.preprocess import Preprocess
from pipelines.engines import catalog
from pipelines.engines.catalog import load
from pipelines.engines.plan import Candidate
from pipelines.engines.plan import build as build_plan
from pipelines.engines.session import BF16, Port, Session
from pipelines.engines.stock import available, computes, require_precision
from pipelines.graph import io, query, reference_session
from pipelines.kernels import extension
from pipelines.models import build as road
from pipelines.models.build import ModelFolder
from pipelines.models.hub import CARD
from pipelines.models.pipeline import PRECISIONS, choose_engine
from pipelines.quantization.calibrate import CalibrationTable
from pipelines.quantization.quantize import QuantReport
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import RewriteReport, rewrite
from pipelines.rewrites.shared import SHARED

Model = str | Path
BATCH = 64  # samples read at once
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
    preprocess: Model | None = None,
    report_path: Model | None = None,
) -> dict[str, Any]:
    """Search for the quickest recipe of a model that loses at most `max_drop` (a share: 0.005 = 0.5%); see `pipelines.analysis.tune.tune`.

    An ONNX file: evaluation_data and calibration_data are .npz of the graph's inputs, the former with `label` if there are any (see
    `pipelines.analysis.tune.ArrayJudge` for what is measured), or folders of images, the former with labels.csv or one subfolder a class if there
    are any, and `preprocess` (see `samples_of`); without calibration_data every fifth evaluation sample calibrates instead.
    A zoo model: both are raw data; the metric is the model's own, calibration_data by default the samples that training kept.
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
        judge, samples = _arrays(float_model, evaluation_data, calibration_data, batch_size, preprocess)
        recipe = QuantRecipe()
    else:
        folder = open_model(model, preprocess)
        spare(target, *used(folder), *listed(evaluation_data), *listed(calibration_data))
        float_model = io.load(folder.ensure("rewritten.onnx"))
        samples = raw_samples(folder, calibration_data, "--calibration-data")
        example = {name: array[:batch_size] for name, array in next(iter(samples)).items()}
        judge, recipe = FolderJudge(folder, evaluation_data, example), folder.recipe
    options: Any = {"max_drop": max_drop, "seconds": seconds, "engine": engine, "threads": threads, "recipe": recipe}
    found = search(float_model, samples.__iter__, judge, target, total=samples.total, report_path=report_path, **options)
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

    Its weights are float32, the shared passes are applied, and its inputs have the batch size that the graph fixes, if it does.
    """
    loaded = io.load(model)
    said = rewrite(loaded, [each() for each in SHARED])
    if fixed := reference_session.fix_batch(loaded):
        logger.warning("%s: %s", model, fixed)
    return loaded, said


def used(folder: ModelFolder) -> list[Path]:
    """The files that a model folder lives on, which no output may replace."""
    built = (*road.STAGES, road.SAMPLES, road.RECORD, road.QUANTIZATION, folder.weights, CARD)
    return [folder.path / name for name in (*built, *(each.name for each in folder.card.files))]


def open_model(model: Model, preprocess: Model | None) -> ModelFolder:
    """`zoo.load`. Raises RequestError where the user brings a spec of images, which a zoo model has itself."""
    if preprocess is not None:
        raise RequestError(f"--preprocess describes the images of an ONNX file; {model} knows what it takes, leave the option out")
    return zoo.load(model)


class Whole:
    """The pipeline of a model folder, to be timed like a session (see `Runnable`); its batches have the size that it is given."""

    def __init__(self, path: str | Path, engine: str, threads: int, precision: str) -> None:
        self._asked = path, precision, engine, threads
        self._opened: dict[int, Any] = {}

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Runnable`."""
        size = length(batch)
        if size not in self._opened:
            self._opened = {size: zoo.pipeline(*self._asked, size)}
        found: dict[str, NDArray[Any]] = self._opened[size].predict(batch)
        return found


def listed(data: Any) -> Sequence[Any]:
    """`data` as a list: itself, or a list of it alone."""
    return data if isinstance(data, list | tuple) else [data]


@dataclass(frozen=True)
class Samples:
    """Samples in batches {graph input: array}, read anew at every iteration. total: how many, or how many there may be."""

    start: Callable[[], Iterable[Batch]]
    total: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.start())


def samples_of(model: ir.Model, data: Any, preprocess: Model | None = None, on_error: str = "raise", count: int | None = None) -> Samples:
    """The samples of an ONNX file's user: an .npz of the graph's inputs, or a folder of images.

    preprocess: a JSON file (`pipelines.data.preprocess.Preprocess`) that says how an image becomes the graph's one input. Images are read as they are
    needed, `BATCH` at a time or as many as the graph takes; a last batch that such a graph cannot take is left out. on_error: "skip" passes
    over images that cannot be read, and logs which. count: so many at most, evenly out of all. Raises RequestError for unusable data.
    """
    fixed = fixed_batch(model)
    if not is_folder(data):
        if preprocess is not None:
            raise RequestError(f"--preprocess describes a folder of images; {data} is none")
        if count is None:
            return _kept(data, fixed or BATCH)
        arrays = _npz(data)
        chosen = _evenly(length(arrays), count)
        return _held({name: array[chosen] for name, array in arrays.items()}, fixed)
    spec, ports, paths = _spec(data, preprocess), _ports(model), list(images.listed(data))
    paths = paths if count is None else [paths[i] for i in _evenly(len(paths), count)]
    told: set[str] = set()

    def start() -> Iterator[Batch]:
        skipped: list[str] | None = [] if on_error == "skip" else None
        for batch in images.batches(paths, spec, ports, fixed or BATCH, skipped):
            if fixed is None or length(batch) == fixed:
                yield batch
        for problem in skipped or []:
            if problem not in told:
                logger.warning("left out: %s", problem)
        told.update(skipped or [])

    return Samples(start, len(paths))


def _evenly(total: int, count: int) -> list[int]:
    """Of `total` places `count`, or all, spread over them."""
    return [i * total // count for i in range(count)] if count < total else list(range(total))


def fixed_batch(model: ir.Model) -> int | None:
    """The number of samples that the inputs of a graph fix; None where it is dynamic, or not the same for all."""
    found = {(query.dimensions(each) or [None])[0] for each in model.graph.inputs if each.name not in model.graph.initializers}
    return found.pop() if len(found) == 1 else None


def is_folder(data: Any) -> bool:
    """Whether data are a folder of images."""
    return isinstance(data, str | os.PathLike) and Path(data).is_dir()


def _spec(data: Any, preprocess: Model | None) -> Preprocess:
    if preprocess is None:
        example = json.dumps(Preprocess(224, 256).to_json())
        raise RequestError(f"{data} is a folder of images; say what the network takes with --preprocess FILE.json, such as {example}")
    value = files.read_json(Path(preprocess))
    try:
        return Preprocess.from_json(value)
    except RequestError as error:
        raise RequestError(f"{preprocess}: {error}") from error


def _ports(model: ir.Model) -> dict[str, Port]:
    """dtype and shape of every input of a graph, as `Session.inputs` has them."""
    inputs = [each for each in model.graph.inputs if each.name not in model.graph.initializers]
    return {str(each.name): Port(ir.DataType(each.dtype or 1).numpy(), tuple(query.dimensions(each) or ())) for each in inputs}


def _require_fit(model: ir.Model, arrays: Batch, source: Any, more: str = "") -> None:
    """Raise RequestError unless `arrays`, read from `source`, are the graph's inputs, of its dtypes and shapes. more: what else may be."""
    ports = _ports(model)

    def fits(array: NDArray[Any], port: Port) -> bool:
        dtype = array.dtype == port.dtype or (array.dtype.kind in "US" and port.dtype == object)
        sizes = zip(array.shape[1:], port.shape[1:], strict=False)
        return dtype and array.ndim == (len(port.shape) or array.ndim) and all(wanted in (None, size) for size, wanted in sizes)

    if set(arrays) != set(ports) or not all(fits(arrays[name], port) for name, port in ports.items()):
        found = ", ".join(f"{name} {each.dtype} [{', '.join(map(str, each.shape))}]" for name, each in arrays.items())
        wanted = ", ".join(f"{name} {each.dtype} [{', '.join(str(size or 'n') for size in each.shape)}]" for name, each in ports.items())
        raise RequestError(f"{source} holds {found or 'nothing'}; wanted the graph's inputs, {wanted}{more}")


def _evaluation(model: ir.Model, data: Any, preprocess: Model | None) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Evaluation samples as arrays, and their labels, if there are any."""
    if not is_folder(data):
        arrays = _npz(data)
        return arrays, arrays.pop(LABEL, None)
    folder = Path(data)
    if not (folder / "labels.csv").is_file() and not any(each.is_dir() for each in folder.iterdir()):
        return joined(list(samples_of(model, data, preprocess))), None
    found = images.labelled(folder)
    return joined(list(images.batches(found.paths, _spec(data, preprocess), _ports(model)))), found.labels


def _arrays(model: ir.Model, evaluation: Any, calibration: Any, batch_size: int, preprocess: Model | None = None) -> tuple[Judge, Samples]:
    """Judge and calibration samples for an ONNX file."""
    arrays, labels = _evaluation(model, evaluation, preprocess)
    _require_fit(model, arrays, evaluation, f", and {LABEL} if known")
    fixed = fixed_batch(model)
    size = fixed or batch_size
    if calibration is None:
        logger.warning("no calibration data: every fifth evaluation sample is used for calibration, the others for the evaluation")
        chosen = np.arange(length(arrays)) % FIFTH == 0
        given = {name: array[chosen] for name, array in arrays.items()}
        arrays = {name: array[~chosen] for name, array in arrays.items()}
        labels = None if labels is None else labels[~chosen]
        samples = _held(given, fixed)
    elif is_folder(calibration):
        samples = samples_of(model, calibration, preprocess)
    else:
        samples = _held(_npz(calibration), fixed)
    arrays = _whole(arrays, size)
    return ArrayJudge(arrays, None if labels is None else labels[: length(arrays)], size), samples


def _held(arrays: Batch, fixed: int | None) -> Samples:
    """Samples in memory, as many as fill batches of `fixed`."""
    whole = _whole(arrays, fixed or 1)
    return Samples(lambda: cut(whole, fixed or BATCH), length(whole))


def _whole(arrays: Batch, size: int) -> dict[str, Any]:
    """As many samples as fill batches of `size`."""
    count = length(arrays)
    if count < size:
        raise RequestError(f"found {count} samples; the batch size {size} needs at least so many")
    return {name: array[: count - count % size] for name, array in arrays.items()}


def _npz(path: Any) -> dict[str, Any]:
    return joined(list(road.read_npz(path)[0]))


def _kept(path: Any, batch_size: int = 256) -> Samples:
    """All of an .npz, read once."""
    batches, total = road.read_npz(path, batch_size)
    held = list(batches)
    return Samples(lambda: held, total)


def raw_samples(folder: ModelFolder, data: Any, option: str, count: int | None = None, on_error: str = "raise") -> Samples:
    """Calibration samples of a zoo model: up to `count` of raw `data` (None: `Pipeline.CALIBRATION`), or all that its training kept.

    option: by which a user gives data. Raises RequestError for none.
    """
    if data is None:
        if not (folder.path / road.SAMPLES).is_file():
            raise RequestError(f"{folder.card.name} has no samples of its training data; calibrate on yours with {option} FILE")
        return _kept(folder.ensure(road.SAMPLES))
    opened: Any = folder.entry.part("pipeline")(folder, "fp32", "onnxruntime")
    batch = opened.calibration(data, count or opened.CALIBRATION, on_error)
    return Samples(lambda: [batch], length(batch))


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
    """Time engines, precisions, threads and batch sizes on this machine and write a plan file (`pipelines.engines.plan.build`, `open_plan`).

    precisions: of a zoo model (int8 unless named; "bf16" is fp32 computed in bfloat16, where the CPU has that); an ONNX file runs as it is,
    and in "bf16" if that is named. batch_sizes: a zoo model's own, 1 for a file unless named. data: raw input, or .npz of the graph's
    inputs for a file, whose inputs are zeros otherwise. output: by default MODEL.plan beside the file or in the model's folder.
    For a zoo model the choice among all engines is also kept for engine="auto". Returns what the file says, and "path".
    """
    if min((*threads, *(batch_sizes or ())), default=0) < 1:
        raise RequestError(f"threads {list(threads)} and batch sizes {list(batch_sizes or ())} must all be 1 or more")
    machine.require_threads(max(threads))
    if unknown := [each for each in precisions or () if each not in (*PRECISIONS, AS_IT_IS)]:
        raise RequestError(f"unknown precision {', '.join(unknown)}; choose among {', '.join(PRECISIONS)}")
    for each in precisions or ():
        require_precision(each)
    names = list(engines or (*available(), "native"))
    if unknown := [each for each in names if each not in catalog.ENGINES]:
        raise RequestError(f"unknown engine {', '.join(unknown)}; choose among {', '.join(catalog.ENGINES)}")
    if is_file(model):
        path = Path(model)
        target = Path(output) if output is not None else path.with_suffix(".plan")
        spare(target, model, data)
        batches = _example(io.load(path), data, batch_sizes or (1,))
        kinds = [AS_IT_IS, *(each for each in precisions or () if each == BF16)]
        candidates = _candidates({kind: path for kind in kinds}, names)
        found = build_plan(candidates, batches, threads, target, load)
        return {"model": path.name, "path": str(target), **found}
    folder = zoo.load(model)
    if not folder.entry.part("pipeline").ONE_CALL:
        raise RequestError(
            f"{folder.card.name} computes its graph many times for one result, of which a plan file has no form; "
            "time its engines with: zoo benchmark MODEL, and name one with --engine"
        )
    target = Path(output) if output is not None else folder.path / "model.plan"
    spare(target, *used(folder), data)
    opened: Any = folder.entry.part("pipeline")(folder, "fp32", "onnxruntime")
    batches = [opened.preprocess(opened.example(size, data)) for size in batch_sizes or (opened.BATCH_SIZE,)]
    kinds = list(precisions or ("int8",))
    candidates = _candidates({kind: folder.ensure(PRECISIONS[kind]) for kind in kinds}, names)
    if "int8" in kinds and "native" in names and folder.entry.native and extension.isas():
        try:
            candidates.append(Candidate("native", "int8", folder.ensure(road.NATIVE)))
        except ZooError as error:
            logger.info("%s", error)
    for kind in kinds:
        for count in threads:
            for batch in batches:
                choose_engine(folder, kind, batch, count, fresh=True)
    found = build_plan(candidates, batches, threads, target, catalog.load)
    return {"model": folder.card.name, "path": str(target), **found}


def _candidates(paths: dict[str, Path], names: Sequence[str]) -> list[Candidate]:
    """Every stock engine named with every precision that it has."""
    pairs = [(name, kind) for kind in paths for name in names if name in available() and computes(name, kind)]
    return [Candidate(name, kind, paths[kind]) for name, kind in pairs]


def _example(model: ir.Model, data: Model | None, sizes: Sequence[int]) -> list[Batch]:
    """A batch of every size for an ONNX file: of the data, repeated where it is short, or of zeros."""
    inputs = {str(each.name): each for each in model.graph.inputs if each.name not in model.graph.initializers}
    fixed = fixed_batch(model)
    sizes = [fixed] if fixed else sizes
    if data is not None:
        arrays = _npz(data)
        _require_fit(model, arrays, data)
        return [{name: np.resize(arrays[name], (size, *arrays[name].shape[1:])) for name in arrays} for size in sizes]
    ports = {}
    for name, each in inputs.items():
        known = query.dimensions(each) or []
        if not known or None in known[1:] or each.dtype is None:
            raise RequestError(f"input {name} has the shape {each.shape}, which leaves sizes open; give an example with --data FILE.npz")
        ports[name] = [size or 0 for size in known[1:]], each.dtype.numpy()
    return [{name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in ports.items()} for size in sizes]


def write_report(
    path: Model, float_model: ir.Model, int8_model: ir.Model, said: QuantReport, table: CalibrationTable, samples: Iterable[Batch]
) -> None:
    """Explain a quantized model on `samples` and write the report (.json or .html)."""
    report_html.save(report.explain(float_model, int8_model, said, table, samples), path)


def is_file(model: Model) -> bool:
    """Whether a verb is given an ONNX file, not a model of the zoo. Raises RequestError for an .onnx path where no file is."""
    path = Path(model)
    if path.suffix == ".onnx" and not path.is_file():
        raise RequestError(f"no ONNX model at {path}; pass the path of an .onnx file, a model folder, or one of: {', '.join(zoo.names())}")
    return path.is_file()


def spare(output: Model | None, *inputs: Any) -> None:
    """Raise RequestError where `output` cannot be written, or is the same file as one of the inputs.

    None and "-" (stdout) are no file; inputs that are no path are passed over.
    """
    if output is None or str(output) == "-":
        return
    for each in inputs:
        if isinstance(each, str | os.PathLike) and _same(each, output):
            raise RequestError(f"the output {output} is the input {each}, which it would replace; choose another output path")
    files.require_place(output)


def require_report(report_path: Model | None, output: Model, *inputs: Any, samples: bool = True) -> None:
    """Raise RequestError for a report that could not be measured, for want of samples, or not be written beside the model `output`."""
    if report_path is None:
        return
    report_html.require_format(report_path)
    if not samples:
        raise RequestError(
            "a report is measured on samples, and there are none; leave out --report, or give an .onnx file with --calibration-data"
        )
    if _same(report_path, output):
        raise RequestError(f"the model and its report are both {output}; choose another name for one of them")
    spare(report_path, *inputs)


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths are of one file, which need not be there yet."""
    if os.path.exists(one) and os.path.exists(other):  # noqa: PTH110 (pathlib's raises for a name too long)
        return os.path.samefile(one, other)  # noqa: PTH121
    return os.path.realpath(one) == os.path.realpath(other)
