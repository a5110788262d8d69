"""Samples for calibration and evaluation: arrays or images for an .onnx file, or raw data for a zoo model."""

from __future__ import annotations

import functools
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
from pipelines.core.derived import temporary_derived
from pipelines.core.errors import RequestError
from pipelines.data import images
from pipelines.data.preprocess import Preprocess
from pipelines.engines.stock import STOCK, available
from pipelines.graph import query, token_mask
from pipelines.models import npz
from pipelines.models.feeds import LABEL, fixed_batch, input_ports, read_feeds, shares_sample_axis
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import Predictor
from pipelines.models.protocols import ShipsSamples
from pipelines.models.record import SAMPLES
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import MEMORY
from pipelines.quantization.calibration.effort import effort_of
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import make_table_of_file
from pipelines.quantization.recipe import QuantRecipe
from zoo.api.paths import Model, as_list, is_file

BATCH = 64  # samples per read
PERCENT = ("bleu", "chrf")  # metrics from 0 to 100
FIFTH = 5  # without calibration data every fifth evaluation sample is kept for calibration
EFFORT = "default"  # of the calibration of an .onnx file
ImageBatches = Callable[[list[Path], int, list[str] | None], Iterator[Batch]]
NO_CALIBRATION = (
    "no calibration data: every fifth evaluation sample is used for calibration, the others for the evaluation"
)
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
    model: ir.Model,
    data: Any,
    preprocess: Model | None = None,
    on_error: str = "raise",
    count: int | None = None,
    file: Path | None = None,
) -> Samples:
    """Opens samples for an ONNX graph.

    An .npz holds samples along the first axis of its arrays. If the graph's inputs share no such axis (e.g. a state [2,
    batch, 128], a scalar), or samples differ in shape, an .npz holds one feed, or feeds stacked along an additional
    first axis (see `read_feeds`). Images are read on demand, in batches of `BATCH` or the fixed size of the graph; an
    incomplete last batch is dropped if the size is fixed.

    Args:
        model: ONNX graph.
        data: An .npz file, several, a folder of .npz files, or a folder of images.
        preprocess: JSON file with the image preprocessing (`pipelines.data.preprocess.Preprocess`).
        on_error: "raise" to stop at an unreadable image, "skip" to log it and leave it out.
        count: Maximum number of samples, evenly spaced; None for all.
        file: ONNX file of the graph. Without `preprocess`, or with the file of transformers or timm, images are
            prepared as `zoo run` prepares them for it.

    Returns:
        The samples.

    Raises:
        RequestError: The data are unusable.
    """
    fixed = fixed_batch(model)
    if not is_image_folder(data):
        if preprocess is not None:
            raise RequestError(f"--preprocess requires a folder of images; {data} is none")
        feeds = read_feeds(model, data)
        if shares_sample_axis(model) and len(feeds) == 1:
            arrays = feeds[0]
            if count is None:
                return Samples(lambda: cut(arrays, fixed or BATCH), length(arrays))
            chosen = _evenly(length(arrays), count)
            return _in_memory({name: array[chosen] for name, array in arrays.items()}, fixed)
        if count is not None:
            feeds = [feeds[i] for i in _evenly(len(feeds), count)]
        return Samples(lambda: feeds, sum(length(feed) for feed in feeds))
    batches, paths = _image_batches(model, data, preprocess, file), list(images.listed(data))
    paths = paths if count is None else [paths[i] for i in _evenly(len(paths), count)]
    warned: set[str] = set()

    def start() -> Iterator[Batch]:
        skipped: list[str] | None = [] if on_error == "skip" else None
        for batch in batches(paths, fixed or BATCH, skipped):
            if fixed is None or length(batch) == fixed:
                yield batch
        for problem in skipped or []:
            if problem not in warned:
                logger.warning("left out: %s", problem)
        warned.update(skipped or [])

    return Samples(start, len(paths))


def _evenly(total: int, count: int) -> list[int]:
    """Returns `count` evenly spaced indices below `total`, or all of them."""
    return [i * total // count for i in range(count)] if count < total else list(range(total))


def is_image_folder(data: Any) -> bool:
    """Returns whether data are a folder of images, not of .npz files.

    Args:
        data: Data given by the user.
    """
    return isinstance(data, str | os.PathLike) and Path(data).is_dir() and not any(Path(data).glob("*.npz"))


def _image_batches(model: ir.Model, data: Any, preprocess: Model | None, file: Path | None) -> ImageBatches:
    """How images become samples: by a `Preprocess`, or as `zoo run` prepares them for a file."""
    value = None if preprocess is None else files.read_json(Path(preprocess))
    fields = value if isinstance(value, dict) else {"": None}
    own = fields.keys() <= Preprocess.__dataclass_fields__.keys() and not isinstance(fields.get("size"), list)
    if file is None or own:
        spec, ports = _spec(data, preprocess), input_ports(model)
        return lambda paths, size, skipped: images.batches(paths, spec, ports, size, skipped)
    from zoo.vision.networks.preprocessing import prepared_batches

    return functools.partial(prepared_batches, file, None if preprocess is None else Path(preprocess))


def _spec(data: Any, preprocess: Model | None) -> Preprocess:
    if preprocess is None:
        own = Preprocess(224, 256).to_json()
        example = json.dumps({name: own[name] for name in own if name != "scaled_decode"})  # for speed, seldom set
        raise RequestError(
            f"{data} is a folder of images; give their preprocessing with --preprocess FILE.json, such as {example}"
        )
    value = files.read_json(Path(preprocess))
    try:
        return Preprocess.from_json(value)
    except RequestError as error:
        raise RequestError(f"{preprocess}: {error}") from error


def _evaluation(
    model: ir.Model, data: Any, preprocess: Model | None, file: Path | None
) -> tuple[list[Batch], NDArray[Any] | None]:
    """Reads evaluation samples as one batch or as feeds (see `read_feeds`), and the labels of one batch, or None."""
    if not is_image_folder(data):
        feeds = read_feeds(model, data, label=True)
        if len(feeds) == 1 and shares_sample_axis(model):
            arrays = dict(feeds[0])
            labels = arrays.pop(LABEL, None)
            return [arrays], labels
        if any(LABEL in feed for feed in feeds):
            raise RequestError(
                f"the samples in {data} cannot be cut into batches, because their shapes differ or the inputs share no "
                f"sample axis; such samples are evaluated without {LABEL}"
            )
        return feeds, None
    folder = Path(data)
    if not (folder / "labels.csv").is_file() and not any(path.is_dir() for path in folder.iterdir()):
        return [joined(list(samples_of(model, data, preprocess, file=file)))], None
    labelled = images.labelled(folder)
    batches = _image_batches(model, data, preprocess, file)(labelled.paths, fixed_batch(model) or BATCH, None)
    return [joined(list(batches))], labelled.labels


def quality_metric_of(
    model: ir.Model,
    evaluation: Any,
    calibration: Any,
    batch_size: int,
    preprocess: Model | None = None,
    file: Path | None = None,
) -> tuple[QualityMetric, Samples]:
    """Returns the quality metric and the calibration samples for an ONNX graph.

    Args:
        model: ONNX graph.
        evaluation: Evaluation samples, as `samples_of` takes them, with labels if known.
        calibration: Calibration samples; None for every fifth evaluation sample.
        batch_size: Samples of one inference, if the graph fixes no batch size.
        preprocess: JSON file with the image preprocessing.
        file: See `samples_of`.

    Returns:
        The metric, and the calibration samples.

    Raises:
        RequestError: The data are unusable.
    """
    if preprocess is not None and not is_image_folder(evaluation) and not is_image_folder(calibration):
        raise RequestError(f"--preprocess requires a folder of images; {evaluation} is none")
    evaluated, labels = _evaluation(model, evaluation, preprocess, file)
    if len(evaluated) > 1 or not shares_sample_axis(model):
        return _feed_metric(model, evaluated, calibration)
    arrays, fixed = evaluated[0], fixed_batch(model)
    size = fixed or batch_size
    if calibration is None:
        logger.warning(NO_CALIBRATION)
        chosen = np.arange(length(arrays)) % FIFTH == 0
        calibrating = {name: array[chosen] for name, array in arrays.items()}
        arrays = {name: array[~chosen] for name, array in arrays.items()}
        labels = None if labels is None else labels[~chosen]
        samples = _in_memory(calibrating, fixed)
    elif is_image_folder(calibration) or len(feeds := read_feeds(model, calibration)) > 1:
        samples = samples_of(model, calibration, preprocess, file=file)
    else:
        samples = _in_memory(feeds[0], fixed)
    arrays = _whole_batches(arrays, size)
    return OutputMetric(arrays, None if labels is None else labels[: length(arrays)], size), samples


def _feed_metric(model: ir.Model, feeds: list[Batch], calibration: Any) -> tuple[QualityMetric, Samples]:
    """Implements `quality_metric_of` for feeds that run one at a time."""
    if calibration is not None:
        return FeedMetric(feeds), samples_of(model, calibration)
    if len(feeds) < 2:
        raise RequestError("found one sample; calibration and evaluation need 2 or more")
    logger.warning(NO_CALIBRATION)
    calibrating, evaluated = feeds[::FIFTH], [feed for index, feed in enumerate(feeds) if index % FIFTH]
    return FeedMetric(evaluated), Samples(lambda: calibrating, sum(map(length, calibrating)))


def _in_memory(arrays: Batch, fixed: int | None) -> Samples:
    """Returns samples in memory, without an incomplete last batch of the size `fixed`."""
    arrays = _whole_batches(arrays, fixed or 1)
    return Samples(lambda: cut(arrays, fixed or BATCH), length(arrays))


def _whole_batches(arrays: Batch, size: int) -> dict[str, Any]:
    """Drops an incomplete last batch of `size` samples."""
    count = length(arrays)
    if count < size:
        raise RequestError(f"found {count} samples, expected at least the batch size {size}")
    return {name: array[: count - count % size] for name, array in arrays.items()}


def read_once(path: Any) -> Samples:
    """Reads an .npz file into memory.

    Args:
        path: The .npz file.

    Returns:
        The samples.
    """
    stream, total = npz.read_npz(path)
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
        data: Raw input; None for the samples kept by the training, or else those of the package.
        option: Name of the option for `data`, for the message.
        count: Maximum number of samples; None for `Pipeline.CALIBRATION`.
        on_error: "raise" to stop at an invalid sample, "skip" to leave it out.
        columns: Columns of tables of texts.

    Returns:
        The samples.

    Raises:
        RequestError: There are no samples.
    """
    if data is None:
        if columns or count is not None:
            raise RequestError(f"--{'column' if columns else 'samples'} requires {option} FILE")
        if isinstance(folder.entry, ShipsSamples):
            batches, total = npz.own_samples(folder)
            return Samples(lambda: batches, total)
        if not (folder.path / SAMPLES).is_file():
            raise RequestError(f"{folder.card.name} has no samples of its training data; give yours with {option} FILE")
        return read_once(folder.ensure(SAMPLES))
    with temporary_derived(folder.path):
        opened: Any = folder.entry.pipeline()(folder, "fp32", "onnxruntime")
        if columns:
            opened.read_columns(columns)
        batch = opened.calibration(data, count or opened.CALIBRATION, on_error)
        del opened
    return Samples(lambda: [batch], length(batch))


def examples_of(
    model: ir.Model,
    data: Model | None,
    sizes: Sequence[int],
    preprocess: Model | None = None,
    file: Path | None = None,
) -> list[Batch]:
    """Returns one batch of each size for an ONNX graph.

    Args:
        model: ONNX graph. If its inputs share no sample axis, there is one batch: the first feed of `data`.
        data: Samples (see `samples_of`), repeated if there are too few; None for zeros.
        sizes: Batch sizes, if the graph fixes none.
        preprocess: JSON file with the image preprocessing.
        file: See `samples_of`. Of images of different sizes the first is repeated.

    Returns:
        Batches {graph input: array}.

    Raises:
        RequestError: The data are unusable, or an input of dynamic shape needs data.
    """
    inputs = {str(source.name): source for source in model.graph.inputs if source.name not in model.graph.initializers}
    fixed = fixed_batch(model)
    sizes = [fixed] if fixed else sizes
    if data is not None or preprocess is not None:
        if preprocess is not None or is_image_folder(data):
            samples = list(samples_of(model, data, preprocess, count=max(sizes), file=file))
            shapes = {tuple(array.shape[1:] for array in batch.values()) for batch in samples}
            arrays: Batch = joined(samples if len(shapes) == 1 else samples[:1])
        else:
            arrays = read_feeds(model, data)[0]
            if not shares_sample_axis(model):
                return [dict(arrays)]
        return [{name: np.resize(arrays[name], (size, *arrays[name].shape[1:])) for name in arrays} for size in sizes]
    ports = {}
    for name, port in inputs.items():
        dimensions = query.dimensions(port) or []
        if not dimensions or None in dimensions[1:] or port.dtype is None:
            raise RequestError(
                f"input {name} has the shape {port.shape}, with dynamic sizes; give an example with --data "
                "FILE.npz, or a folder of images with --preprocess FILE.json"
            )
        ports[name] = [size or 0 for size in dimensions[1:]], port.dtype.numpy()
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
        digests = [files.sha256(path) if Path(str(path)).is_file() else str(path) for path in as_list(data)]
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
        """Measures the drop of the metric, see `QualityMetric`.

        Args:
            fp32: Float model.
            int8: Int8 model.

        Returns:
            Drop of the metric, and the metric of both models.

        Raises:
            MetricError: The float model cannot be evaluated on the data.
        """
        pipelines = {"fp32": fp32.pipeline, "int8": int8.pipeline}
        evaluate = self._folder.entry.evaluate
        try:
            metrics = evaluate(pipelines, self._data, "raise")["metrics"]
        except RequestError:
            try:
                evaluate({"fp32": fp32.pipeline}, self._data, "raise")
            except RequestError as error:  # the data are unusable for the float model, too
                raise MetricError(str(error)) from error
            raise
        self.name = next(iter(metrics["fp32"]))
        scores = {precision: float(values[self.name]) for precision, values in metrics.items()}
        return QualityDrop((scores["fp32"] - scores["int8"]) / (100 if self.name in PERCENT else 1), None, scores)


@dataclass(frozen=True)
class Calibration:
    """Options of a calibration: the arguments of `samples_of`, memory limit, time limit and effort."""

    data: Any = None
    count: int | None = None
    max_memory: str | int = MEMORY
    preprocess: Model | None = None
    on_error: str = "raise"
    seconds: float | None = None
    columns: Sequence[str] = ()
    effort: str = EFFORT
    file: Path | None = None

    def table(self, path: Path, recipe: QuantRecipe, samples: Samples) -> CalibrationTable:
        """Makes the calibration table of a zoo model by its recipe.

        Args:
            path: Float model after the rewrites.
            recipe: Quantization options.
            samples: Result of `samples`.

        Returns:
            The table.
        """
        options: dict[str, Any] = {"max_memory": self.max_memory, "seconds": self.seconds}
        return make_table_of_file(path, recipe, samples, samples.total, **options)

    def auto_calibrate(self, float_model: ir.Model, recipe: QuantRecipe, samples: Samples) -> CalibrationTable:
        """Makes the calibration table of an ONNX file; every step is evaluated on held-out samples.

        Args:
            float_model: Float model after the rewrites.
            recipe: Quantization options.
            samples: Result of `samples`.

        Returns:
            The table.
        """
        options: dict[str, Any] = {"max_memory": self.max_memory, "seconds": self.seconds, "effort": self.effort}
        return auto_calibrate(float_model, recipe, samples, samples.total, **options)

    def samples(self, float_model: ir.Model) -> Samples:
        """Opens the samples for an ONNX file, texts without padding (see `pipelines.graph.token_mask`).

        Args:
            float_model: Float model after the rewrites.
        """
        samples = samples_of(float_model, self.data, self.preprocess, self.on_error, self.count, self.file)
        return Samples(lambda: token_mask.Unpadded(float_model, samples), samples.total)


def require_effort(effort: str | None, model: Model) -> None:
    """Checks an effort.

    Args:
        effort: Argument of `quantize` and `calibrate`.
        model: Zoo model, or path of an .onnx file.

    Raises:
        RequestError: The effort is unknown, or given for a zoo model.
    """
    if effort is not None:
        effort_of(effort)
        if not is_file(model):
            raise RequestError(f"--effort requires an .onnx file; {model} is calibrated by its recipe")
