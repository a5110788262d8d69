"""Samples for calibration and evaluation: of a user's ONNX file (.npz, folders of images), or of a zoo model's raw
data.
"""

from __future__ import annotations

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

from pipelines.analysis.judge import ArrayJudge, Judge
from pipelines.core import files
from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError
from pipelines.data import images
from pipelines.data.preprocess import Preprocess
from pipelines.engines.session import Port
from pipelines.graph import query
from pipelines.models import stages
from pipelines.models.stages import ModelFolder
from zoo.paths import Model

BATCH = 64  # samples read at once
LABEL = "label"  # the array of an evaluation .npz that is no input
FIFTH = 5  # without calibration data every fifth evaluation sample is kept for calibration
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """Samples in batches {graph input: array}, read anew at every iteration. total: how many, or how many there may
    be.
    """

    start: Callable[[], Iterable[Batch]]
    total: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.start())


def samples_of(
    model: ir.Model, data: Any, preprocess: Model | None = None, on_error: str = "raise", count: int | None = None
) -> Samples:
    """The samples of an ONNX file's user: an .npz of the graph's inputs, or a folder of images.

    preprocess: a JSON file (`pipelines.data.preprocess.Preprocess`) that says how an image becomes the graph's one
    input. Images are read as they are needed, `BATCH` at a time or as many as the graph takes; a last batch that such a
    graph cannot take is left out. on_error: "skip" passes over images that cannot be read, and logs which. count: so
    many at most, evenly out of all. Raises RequestError for unusable data.
    """
    fixed = fixed_batch(model)
    if not is_image_folder(data):
        if preprocess is not None:
            raise RequestError(f"--preprocess describes a folder of images; {data} is none")
        if count is None:
            return _read_once(data, fixed or BATCH)
        arrays = _npz(data)
        chosen = _evenly(length(arrays), count)
        return _in_memory({name: array[chosen] for name, array in arrays.items()}, fixed)
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


def is_image_folder(data: Any) -> bool:
    """Whether data are a folder of images."""
    return isinstance(data, str | os.PathLike) and Path(data).is_dir()


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


def _require_fit(model: ir.Model, arrays: Batch, source: Any, more: str = "") -> None:
    """Raise RequestError unless `arrays`, read from `source`, are the graph's inputs, of its dtypes and shapes. more:
    what else may be.
    """
    ports = _ports(model)

    def fits(array: NDArray[Any], port: Port) -> bool:
        dtype = array.dtype == port.dtype or (array.dtype.kind in "US" and port.dtype == object)
        sizes = zip(array.shape[1:], port.shape[1:], strict=False)
        return (
            dtype
            and array.ndim == (len(port.shape) or array.ndim)
            and all(wanted in (None, size) for size, wanted in sizes)
        )

    if set(arrays) != set(ports) or not all(fits(arrays[name], port) for name, port in ports.items()):
        found = ", ".join(f"{name} {each.dtype} [{', '.join(map(str, each.shape))}]" for name, each in arrays.items())
        wanted = ", ".join(
            f"{name} {each.dtype} [{', '.join(str(size or 'n') for size in each.shape)}]"
            for name, each in ports.items()
        )
        raise RequestError(f"{source} holds {found or 'nothing'}; wanted the graph's inputs, {wanted}{more}")


def _evaluation(model: ir.Model, data: Any, preprocess: Model | None) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Evaluation samples as arrays, and their labels, if there are any."""
    if not is_image_folder(data):
        arrays = _npz(data)
        return arrays, arrays.pop(LABEL, None)
    folder = Path(data)
    if not (folder / "labels.csv").is_file() and not any(each.is_dir() for each in folder.iterdir()):
        return joined(list(samples_of(model, data, preprocess))), None
    labelled = images.labelled(folder)
    return joined(list(images.batches(labelled.paths, _spec(data, preprocess), _ports(model)))), labelled.labels


def judge_of(
    model: ir.Model, evaluation: Any, calibration: Any, batch_size: int, preprocess: Model | None = None
) -> tuple[Judge, Samples]:
    """Judge and calibration samples for an ONNX file."""
    arrays, labels = _evaluation(model, evaluation, preprocess)
    _require_fit(model, arrays, evaluation, f", and {LABEL} if known")
    fixed = fixed_batch(model)
    size = fixed or batch_size
    if calibration is None:
        logger.warning(
            "no calibration data: every fifth evaluation sample is used for calibration, the others for the evaluation"
        )
        chosen = np.arange(length(arrays)) % FIFTH == 0
        calibrating = {name: array[chosen] for name, array in arrays.items()}
        arrays = {name: array[~chosen] for name, array in arrays.items()}
        labels = None if labels is None else labels[~chosen]
        samples = _in_memory(calibrating, fixed)
    elif is_image_folder(calibration):
        samples = samples_of(model, calibration, preprocess)
    else:
        samples = _in_memory(_npz(calibration), fixed)
    arrays = _whole_batches(arrays, size)
    return ArrayJudge(arrays, None if labels is None else labels[: length(arrays)], size), samples


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


def _npz(path: Any) -> dict[str, Any]:
    return joined(list(stages.read_npz(path)[0]))


def _read_once(path: Any, batch_size: int = 256) -> Samples:
    """All of an .npz, read once."""
    stream, total = stages.read_npz(path, batch_size)
    batches = list(stream)
    return Samples(lambda: batches, total)


def raw_samples(
    folder: ModelFolder, data: Any, option: str, count: int | None = None, on_error: str = "raise"
) -> Samples:
    """Calibration samples of a zoo model: up to `count` of raw `data` (None: `Pipeline.CALIBRATION`), or all that its
    training kept.

    option: by which a user gives data. Raises RequestError for none.
    """
    if data is None:
        if not (folder.path / stages.SAMPLES).is_file():
            raise RequestError(
                f"{folder.card.name} has no samples of its training data; calibrate on yours with {option} FILE"
            )
        return _read_once(folder.ensure(stages.SAMPLES))
    opened: Any = folder.entry.part("pipeline")(folder, "fp32", "onnxruntime")
    batch = opened.calibration(data, count or opened.CALIBRATION, on_error)
    return Samples(lambda: [batch], length(batch))


def examples_of(model: ir.Model, data: Model | None, sizes: Sequence[int]) -> list[Batch]:
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
            raise RequestError(
                f"input {name} has the shape {each.shape}, which leaves sizes open; give an example with --data "
                "FILE.npz"
            )
        ports[name] = [size or 0 for size in known[1:]], each.dtype.numpy()
    return [{name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in ports.items()} for size in sizes]
