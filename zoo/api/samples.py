"""Samples for calibration and evaluation: arrays or images for an .onnx file, or raw data for a zoo model."""

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

from pipelines.analysis.quality_metric import FeedMetric, MetricError, OutputMetric, QualityDrop, QualityMetric
from pipelines.core import files
from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError
from pipelines.data import images
from pipelines.data.preprocess import Preprocess
from pipelines.engines.session import Port
from pipelines.engines.stock import STOCK, available
from pipelines.graph import query
from pipelines.models import npz
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import Predictor
from pipelines.models.record import SAMPLES
from zoo.api.paths import Model, listed

BATCH = 64  # samples read at once
PERCENT = ("bleu", "chrf")  # metrics from 0 to 100
LABEL = "label"  # the array of an evaluation .npz that is no input
FIFTH = 5  # without calibration data every fifth evaluation sample is kept for calibration
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """Batches of samples, read again at every iteration.

    Attributes:
        start: Opens an iterator over batches {graph input: array}.
        total: Number of samples, or an upper bound.
    """

    start: Callable[[], Iterable[Batch]]
    total: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.start())


def samples_of(
    model: ir.Model, data: Any, preprocess: Model | None = None, on_error: str = "raise", count: int | None = None
) -> Samples:
    """Opens samples for an ONNX graph.

    An .npz holds samples along the first axis of its arrays. If the graph's inputs share no such axis (e.g. a state [2,
    batch, 128], a scalar), or samples differ in shape, an .npz holds one feed, or feeds stacked along an additional
    first axis (see `_feeds`). Images are read on demand, `BATCH` at a time or in the fixed batch size of the graph; an
    incomplete last batch is dropped if the batch size is fixed.

    Args:
        model: ONNX graph.
        data: An .npz file, several, a folder of .npz files, or a folder of images.
        preprocess: JSON file with the image preprocessing (`pipelines.data.preprocess.Preprocess`).
        on_error: "raise" to stop at an unreadable image, "skip" to log it and leave it out.
        count: Maximum number of samples, evenly spaced; None for all.

    Returns:
        The samples.

    Raises:
        RequestError: The data are unusable.
    """
    fixed = fixed_batch(model)
    if not is_image_folder(data):
        if preprocess is not None:
            raise RequestError(f"--preprocess describes a folder of images; {data} is none")
        feeds = _feeds(model, data)
        if _batched(model) and len(feeds) == 1:
            arrays = feeds[0]
            if count is None:
                return Samples(lambda: cut(arrays, fixed or BATCH), length(arrays))
            chosen = _evenly(length(arrays), count)
            return _in_memory({name: array[chosen] for name, array in arrays.items()}, fixed)
        if count is not None:
            feeds = [feeds[i] for i in _evenly(len(feeds), count)]
        return Samples(lambda: feeds, sum(length(each) for each in feeds))
    spec, ports, paths = _spec(data, preprocess), _ports(model), list(images.listed(data))
    paths = paths if count is None else [paths[i] for i in _evenly(len(paths), count)]
    warned: set[str] = set()

    def start() -> Iterator[Batch]:
        skipped: list[str] | None = [] if on_error == "skip" else None
        for batch in images.batches(paths, spec, ports, fixed or BATCH, skipped):
            if fixed is None or length(batch) == fixed:
                yield batch
        for problem in skipped or []:
            if problem not in warned:
                logger.warning("left out: %s", problem)
        warned.update(skipped or [])

    return Samples(start, len(paths))


def _evenly(total: int, count: int) -> list[int]:
    """Of `total` places `count`, or all, spread over them."""
    return [i * total // count for i in range(count)] if count < total else list(range(total))


def fixed_batch(model: ir.Model) -> int | None:
    """The number of samples that the inputs of a graph fix; None where it is dynamic, or not the same for all."""
    sizes = {
        (query.dimensions(each) or [None])[0]
        for each in model.graph.inputs
        if each.name not in model.graph.initializers
    }
    return sizes.pop() if len(sizes) == 1 else None


def _batched(model: ir.Model) -> bool:
    """Whether the first axis of all of a graph's inputs is that of its samples."""
    shapes = [query.dimensions(each) for each in _inputs(model)]
    return [] not in shapes and len({shape[0] for shape in shapes if shape}) < 2


def _inputs(model: ir.Model) -> list[ir.Value]:
    """A graph's inputs that are no weights."""
    return [each for each in model.graph.inputs if each.name not in model.graph.initializers]


def _feeds(model: ir.Model, data: Any, label: bool = False) -> list[Batch]:
    """What a user's .npz files hold, as the graph takes it: one batch where all samples fit into one, or a feed each.

    A file is read as the graph's inputs, if the ranks and sizes that it declares admit that; else as feeds stacked
    along a first axis more, where those have the graph's rank or lack its batch axis. Numbers of other dtypes are cast,
    with a line saying so, where nothing is lost. label: whether an array `LABEL` may be among them, which is kept.
    Raises RequestError for anything else.
    """
    paths = npz_files(data)
    dims = {str(each.name): query.dimensions(each) for each in _inputs(model)}
    ports, batched, feeds, cast = _ports(model), _batched(model), list[Batch](), dict[str, None]()
    for path in paths:
        arrays = npz.read_arrays(path)
        labels = {LABEL: arrays.pop(LABEL)} if label and LABEL in arrays and LABEL not in dims else {}
        if set(arrays) != set(dims):
            raise _misfit(ports, arrays, path, label)
        for name in dims:
            arrays[name] = _cast(name, arrays[name], ports[name].dtype, path, cast)
        if all(_admits(array.shape, dims[name], batched) for name, array in arrays.items()):
            if batched:
                npz.require_samples(path, {**arrays, **labels})
            feeds.append({**arrays, **labels})
            continue
        if labels:
            raise _misfit(ports, arrays, path, label)
        stacked = _unstacked(arrays, dims)
        if not stacked:
            raise _misfit(ports, arrays, path, label)
        feeds += stacked
    for line in cast:
        logger.warning("%s", line)
    alike = {tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(feed.items())) for feed in feeds}
    return [joined(feeds)] if batched and len(alike) == 1 else feeds


def npz_files(data: Any) -> list[Path]:
    """The .npz files that a user names: one, several, or a folder of them, in the order of their names."""
    paths = []
    for each in data if isinstance(data, list | tuple) else [data]:
        path = Path(each)
        paths += sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not paths:
        raise RequestError(f"no .npz among {data}; give an .npz with one array per graph input, or a folder of them")
    return paths


def _admits(shape: Sequence[int], dims: Sequence[int | None] | None, batched: bool) -> bool:
    """Whether a graph's input of these sizes (None: dynamic) takes an array; batched: of any number of samples."""
    if dims is None:
        return True
    pairs = list(zip(shape, dims, strict=False))
    return len(shape) == len(dims) and all(wanted in (None, size) for size, wanted in pairs[1 if batched else 0 :])


def _unstacked(arrays: Batch, dims: dict[str, list[int | None] | None]) -> list[Batch]:
    """The feeds that lie along the first axis of all arrays; none where they cannot be the graph's."""
    if {array.ndim > 0 for array in arrays.values()} != {True} or len({len(array) for array in arrays.values()}) > 1:
        return []
    shapes = {name: _sample_shape(array.shape[1:], dims[name]) for name, array in arrays.items()}
    return [
        {name: np.asarray(array[i]).reshape(shapes[name] or ()) for name, array in arrays.items()}
        for i in range(length(arrays) if None not in shapes.values() else 0)
    ]


def _sample_shape(shape: tuple[int, ...], dims: list[int | None] | None) -> tuple[int, ...] | None:
    """The shape of one sample as an input takes it: its own, or with the batch axis that it lacks; else None."""
    if _admits(shape, dims, False):
        return shape
    for axis, wanted in enumerate(dims or []):
        longer = (*shape[:axis], 1, *shape[axis:])
        if wanted in (None, 1) and _admits(longer, dims, False):
            return longer
    return None


def _cast(name: str, array: NDArray[Any], dtype: Any, path: Path, said: dict[str, None]) -> NDArray[Any]:
    """An array in a graph input's dtype, and a line in `said` where that is another one.

    Between floats values are rounded; nothing else may change them. Raises RequestError where values would be lost.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype or array.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
        if array.dtype.kind == dtype.kind == "f":
            kept = bool((np.isfinite(result) | ~np.isfinite(array)).all())
        else:
            kept = bool(np.isfinite(array).all()) and np.array_equal(result.astype(array.dtype), array)
            kept = kept and (dtype.kind == "b" or np.array_equal(result < 0, array < 0))
    if not kept:
        raise RequestError(
            f"{path} holds {name} as {array.dtype}; the graph takes {dtype}, which cannot hold its values; save it so"
        )
    said[f"{name} is cast from {array.dtype} to {dtype}, as the graph takes it ({path})"] = None
    return result


def is_image_folder(data: Any) -> bool:
    """Whether data are a folder of images, not of .npz files."""
    return isinstance(data, str | os.PathLike) and Path(data).is_dir() and not any(Path(data).glob("*.npz"))


def _spec(data: Any, preprocess: Model | None) -> Preprocess:
    if preprocess is None:
        example = json.dumps(Preprocess(224, 256).to_json())
        raise RequestError(
            f"{data} is a folder of images; say what the network takes with --preprocess FILE.json, such as {example}"
        )
    value = files.read_json(Path(preprocess))
    try:
        return Preprocess.from_json(value)
    except RequestError as error:
        raise RequestError(f"{preprocess}: {error}") from error


def _ports(model: ir.Model) -> dict[str, Port]:
    """dtype and shape of every input of a graph, as `Session.inputs` has them."""
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    return {
        str(each.name): Port(ir.DataType(each.dtype or 1).numpy(), tuple(query.dimensions(each) or ()))
        for each in inputs
    }


def _misfit(ports: dict[str, Port], arrays: Batch, source: Any, label: bool = False) -> RequestError:
    """The error for arrays, read from `source`, that are not the graph's inputs. label: whether labels may be there."""
    found = ", ".join(f"{name} {each.dtype} [{', '.join(map(str, each.shape))}]" for name, each in arrays.items())
    wanted = ", ".join(
        f"{name} {each.dtype} [{', '.join(str(size or 'n') for size in each.shape)}]" for name, each in ports.items()
    )
    more = f", and {LABEL} if known" if label else ""
    return RequestError(f"{source} holds {found or 'nothing'}; wanted the graph's inputs, {wanted}{more}")


def _evaluation(model: ir.Model, data: Any, preprocess: Model | None) -> tuple[list[Batch], NDArray[Any] | None]:
    """Evaluation samples as one batch, or as feeds (see `_feeds`), and the labels of one batch, if there are any."""
    if not is_image_folder(data):
        feeds = _feeds(model, data, label=True)
        if len(feeds) == 1 and _batched(model):
            arrays = dict(feeds[0])
            labels = arrays.pop(LABEL, None)
            return [arrays], labels
        if any(LABEL in each for each in feeds):
            raise RequestError(
                f"the samples in {data} cannot be cut into batches, for their shapes differ or the first axis of the "
                f"graph's inputs is not that of samples; such samples are judged without {LABEL}"
            )
        return feeds, None
    folder = Path(data)
    if not (folder / "labels.csv").is_file() and not any(each.is_dir() for each in folder.iterdir()):
        return [joined(list(samples_of(model, data, preprocess)))], None
    labelled = images.labelled(folder)
    return [joined(list(images.batches(labelled.paths, _spec(data, preprocess), _ports(model))))], labelled.labels


def quality_metric_of(
    model: ir.Model, evaluation: Any, calibration: Any, batch_size: int, preprocess: Model | None = None
) -> tuple[QualityMetric, Samples]:
    """Returns the quality metric and the calibration samples for an ONNX graph.

    Args:
        model: ONNX graph.
        evaluation: Evaluation samples, as `samples_of` takes them, with labels if known.
        calibration: Calibration samples; None for every fifth evaluation sample.
        batch_size: Samples of one inference, if the graph fixes no batch size.
        preprocess: JSON file with the image preprocessing.

    Raises:
        RequestError: The data are unusable.
    """
    found, labels = _evaluation(model, evaluation, preprocess)
    if len(found) > 1 or not _batched(model):
        return _feed_metric(model, found, calibration)
    arrays, fixed = found[0], fixed_batch(model)
    size = fixed or batch_size
    if calibration is None:
        logger.warning(NO_CALIBRATION)
        chosen = np.arange(length(arrays)) % FIFTH == 0
        calibrating = {name: array[chosen] for name, array in arrays.items()}
        arrays = {name: array[~chosen] for name, array in arrays.items()}
        labels = None if labels is None else labels[~chosen]
        samples = _in_memory(calibrating, fixed)
    elif is_image_folder(calibration) or len(feeds := _feeds(model, calibration)) > 1:
        samples = samples_of(model, calibration, preprocess)
    else:
        samples = _in_memory(feeds[0], fixed)
    arrays = _whole_batches(arrays, size)
    return OutputMetric(arrays, None if labels is None else labels[: length(arrays)], size), samples


NO_CALIBRATION = (
    "no calibration data: every fifth evaluation sample is used for calibration, the others for the evaluation"
)


def _feed_metric(model: ir.Model, feeds: list[Batch], calibration: Any) -> tuple[QualityMetric, Samples]:
    """`quality_metric_of` for feeds that are run one at a time."""
    if calibration is not None:
        return FeedMetric(feeds), samples_of(model, calibration)
    if len(feeds) < 2:
        raise RequestError("found one sample; to calibrate on some and judge by others give 2 or more")
    logger.warning(NO_CALIBRATION)
    calibrating = feeds[::FIFTH]
    judging = [each for at, each in enumerate(feeds) if at % FIFTH]
    return FeedMetric(judging), Samples(lambda: calibrating, sum(map(length, calibrating)))


def _in_memory(arrays: Batch, fixed: int | None) -> Samples:
    """Samples in memory, as many as fill batches of `fixed`."""
    arrays = _whole_batches(arrays, fixed or 1)
    return Samples(lambda: cut(arrays, fixed or BATCH), length(arrays))


def _whole_batches(arrays: Batch, size: int) -> dict[str, Any]:
    """As many samples as fill batches of `size`."""
    count = length(arrays)
    if count < size:
        raise RequestError(f"found {count} samples; the batch size {size} needs at least so many")
    return {name: array[: count - count % size] for name, array in arrays.items()}


def read_once(path: Any, batch_size: int = 256) -> Samples:
    """Reads an .npz file into memory.

    Args:
        path: The .npz file.
        batch_size: Samples of one batch.
    """
    stream, total = npz.read_npz(path, batch_size)
    batches = list(stream)
    return Samples(lambda: batches, total)


def raw_samples(
    folder: ModelFolder,
    data: Any,
    option: str,
    count: int | None = None,
    on_error: str = "raise",
    columns: Sequence[str] = (),
) -> Samples:
    """Opens calibration samples of a zoo model.

    Args:
        folder: Model folder.
        data: Raw input; None for the samples kept by the training.
        option: Name of the option for `data`, for the message.
        count: Maximum number of samples; None for `Pipeline.CALIBRATION`.
        on_error: "raise" to stop at an invalid sample, "skip" to leave it out.
        columns: Columns of tables of texts.

    Raises:
        RequestError: There are no samples.
    """
    if data is None:
        if not (folder.path / SAMPLES).is_file():
            raise RequestError(
                f"{folder.card.name} has no samples of its training data; calibrate on yours with {option} FILE"
            )
        return read_once(folder.ensure(SAMPLES))
    opened: Any = folder.entry.pipeline()(folder, "fp32", "onnxruntime")
    if columns:
        opened.read_columns(columns)
    batch = opened.calibration(data, count or opened.CALIBRATION, on_error)
    return Samples(lambda: [batch], length(batch))


def examples_of(
    model: ir.Model, data: Model | None, sizes: Sequence[int], preprocess: Model | None = None
) -> list[Batch]:
    """Returns one batch of each size for an ONNX graph.

    Args:
        model: ONNX graph. If its inputs share no sample axis, there is one batch: the first feed of `data`.
        data: Samples (see `samples_of`), repeated if there are too few; None for zeros.
        sizes: Batch sizes, if the graph fixes none.
        preprocess: JSON file with the image preprocessing.

    Raises:
        RequestError: The data are unusable, or an input of dynamic shape needs data.
    """
    inputs = {str(each.name): each for each in model.graph.inputs if each.name not in model.graph.initializers}
    fixed = fixed_batch(model)
    sizes = [fixed] if fixed else sizes
    if data is not None or preprocess is not None:
        if preprocess is not None or is_image_folder(data):
            arrays: Batch = joined(list(samples_of(model, data, preprocess, count=max(sizes))))
        else:
            arrays = _feeds(model, data)[0]
            if not _batched(model):
                return [dict(arrays)]
        return [{name: np.resize(arrays[name], (size, *arrays[name].shape[1:])) for name in arrays} for size in sizes]
    ports = {}
    for name, each in inputs.items():
        known = query.dimensions(each) or []
        if not known or None in known[1:] or each.dtype is None:
            raise RequestError(
                f"input {name} has the shape {each.shape}, which leaves sizes open; give an example with --data "
                "FILE.npz, or a folder of images with --preprocess FILE.json"
            )
        ports[name] = [size or 0 for size in known[1:]], each.dtype.numpy()
    return [{name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in ports.items()} for size in sizes]


class TaskMetric:
    """A zoo model's own metric on raw labelled data: the first metric that its `evaluate` returns.

    BLEU and chrF have a scale of 0 to 100; their drop is divided by 100.

    Args:
        folder: The model.
        data: Raw labelled data, as `evaluate` takes it.
        samples: Batch of the graph's inputs; latency is measured on its first `batch_size` samples.
        batch_size: Number of samples of `example`.

    Attributes:
        engines: Engines that the model may be tuned for on this machine.
    """

    def __init__(self, folder: ModelFolder, data: Any, samples: Batch, batch_size: int) -> None:
        self._folder, self._data, self._kind = folder, data, folder.entry.pipeline()
        self.engines = [name for name in self._kind.TUNED if name in available() or name not in STOCK]
        ports = self.open(folder.ensure("rewritten.onnx"), self.engines[0], 1).pipeline.input_ports
        self.name = ""
        self.example: Batch = {name: samples[name][:batch_size] for name in ports}
        digests = [files.sha256(path) if Path(str(path)).is_file() else str(path) for path in listed(data)]
        self.digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def open(self, path: Path, engine: str, threads: int) -> Predictor:
        """Opens the model's pipeline over an ONNX file of its graph.

        Args:
            path: ONNX file.
            engine: Name of the engine.
            threads: Number of threads.

        Returns:
            The pipeline as a session.
        """
        return Predictor(self._kind.over(self._folder, path, engine, threads))

    def __call__(self, fp32: Predictor, int8: Predictor) -> QualityDrop:
        """See `QualityMetric`; raises MetricError if the float model cannot be evaluated on the data."""
        pipelines = {"fp32": fp32.pipeline, "int8": int8.pipeline}
        evaluate = self._folder.entry.evaluate
        try:
            metrics = evaluate(pipelines, self._data, "raise")["metrics"]
        except RequestError:
            try:
                evaluate({"fp32": fp32.pipeline}, self._data, "raise")
            except RequestError as error:  # the data are no use to the float model either
                raise MetricError(str(error)) from error
            raise
        self.name = next(iter(metrics["fp32"]))
        scores = {precision: float(values[self.name]) for precision, values in metrics.items()}
        best = 100.0 if self.name in PERCENT else 1.0
        return QualityDrop((scores["fp32"] - scores["int8"]) / best, None, scores)
