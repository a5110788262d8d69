"""Inference of image classifiers: from image files to class names."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, refuse_names
from pipelines.core.ordered_map import ordered_map
from pipelines.core.progress import progress
from pipelines.data.images import SUFFIXES, decode, listed, prepare
from pipelines.data.preprocess import Preprocess
from pipelines.data.tables import on_terminal, writing
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import GraphPipeline
from zoo.vision.data.datasets import SPLITS, TRAIN, Item, find_images

INPUT, OUTPUT = "image", "logits"
CLASSES_FILE = "classes.txt"  # in a model folder: class names, one per line
IMAGENET = (
    Path(__file__).parent / "imagenet.txt"
)  # lemmas of WordNet 3.0 (Princeton University) for the synsets of ImageNet-1k, in order
TOP = 5
WORKERS = 8  # maximum number of decoding threads
SHOWN = 3  # unreadable images that a message names
SYNTHETIC_IMAGES = 16  # different images of `ImagePipeline.example`

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A batch of decoded images.

    Attributes:
        names: Names of the images.
        faults: Error message of every image, "" for a readable one.
        pixels: Pixels of the readable images, uint8 [n, 3, size, size].
        decode: Seconds of decoding.
        preprocess: Seconds of preprocessing.
    """

    names: list[str]
    faults: list[str]
    pixels: NDArray[np.uint8]
    decode: float
    preprocess: float


class ImagePipeline(GraphPipeline):
    """Classifies images; see `zoo.pipeline`."""

    BATCH_SIZE: ClassVar[int] = 4  # 20% faster than 1; larger batches gain little
    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "files"

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self.spec = Preprocess.from_json(folder.preprocessing)
        self.background = int(
            bool(folder.card.details.get("background"))
        )  # number of background classes before class 0
        self.smallest = 2 * (self.spec.resize or self.spec.size) if self.spec.scaled_decode else 0
        self._names: list[str] = []

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Decodes, resizes and crops images; all of them in memory at once, whereas `run` streams.

        Args:
            raw: `Path` of a file or folder, content of an image file, pixels uint8 [h, w, 3] (RGB) or [h, w], a Pillow
                image, or a list of these.

        Returns:
            {"image": uint8 [n, 3, size, size]}, RGB.

        Raises:
            RequestError: An image is unreadable, or there are no images.
        """
        images = list(_each(raw))
        if not images:
            raise RequestError("found no images")
        pixels = self._slots(len(images))
        for image, slot in zip(images, pixels, strict=True):
            prepare(image, self.spec, slot)
        return {INPUT: pixels}

    def items(self, files: Iterable[tuple[str, Callable[[], bytes]]]) -> list[Item]:
        """See `ShardableFiles.items`."""
        return [Item(name, "", "", read) for name, read in files]

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts logits to class names and softmax probabilities.

        Args:
            out: {"logits": float32 [n, classes]}.

        Returns:
            {"label": class name, "index": class index, "probability", "top5": [(name, probability), ...]} of each
            image.

        Raises:
            ZooError: A logit is not finite.
        """
        logits = out[OUTPUT]
        names = self.names(logits.shape[1])
        found = []
        for row in logits:
            some = min(TOP, len(row))
            top = row.argpartition(-some)[-some:]
            top.sort()  # equal logits keep the order of their classes, as in argmax
            top = top[(-row[top]).argsort(kind="stable")]
            if not np.isfinite(row[top]).all():  # NaN counts as the largest
                raise ZooError("the model computes NaN or infinite logits; check its weights and the input")
            powers = np.exp(row - row[top[0]])
            total = float(powers.sum())
            best = [(names[i], p / total) for i, p in zip(top.tolist(), powers[top].tolist(), strict=True)]
            found.append({"label": best[0][0], "index": int(top[0]), "probability": best[0][1], "top5": best})
        return found

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """One input: uint8 [n, 3, size, size]."""
        return {INPUT: (np.dtype(np.uint8), (None, 3, self.spec.size, self.spec.size))}

    # --------------------------------------------------------------------------------------------------------- classes

    @functools.cached_property
    def class_names(self) -> list[str] | None:
        """Class names of the model's card, classes.txt or train.json; None if there are none."""
        found = self.folder.card.details.get("classes")
        if isinstance(found, list):
            return [str(each) for each in found]
        file = IMAGENET if self.folder.card.details.get("names") == IMAGENET.stem else self.path / CLASSES_FILE
        try:
            if file.is_file():
                return [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {file}: {error}; expected the class names in UTF-8, one a line") from error
        trained = self.path / "train.json"
        return [str(each) for each in read_json(trained)["classes"]] if trained.is_file() else None

    def names(self, classes: int) -> list[str]:
        """Returns the names of all outputs: `class_names`, or "class 0", "class 1", ...

        Args:
            classes: Number of outputs of the network.

        Raises:
            RequestError: The model has another number of class names.
        """
        if len(self._names) != classes:
            given = self.class_names or [f"class {index}" for index in range(classes - self.background)]
            names = [*["background"] * self.background, *given] if len(given) == classes - self.background else given
            if len(names) != classes:
                raise RequestError(
                    f"{self.path} names {len(names)} classes, but its network has {classes} outputs; correct its "
                    f"{CLASSES_FILE}"
                )
            self._names = names
        return self._names

    @functools.cached_property
    def classes(self) -> int:
        """Number of outputs of the network, from one inference of black images."""
        return int(self.predict(self.blank())[OUTPUT].shape[1])

    # --------------------------------------------------------------------------------------------------------- streams

    @property
    def workers(self) -> int:
        """Number of decoding threads that run ahead of the inference; 0 on a single core, where they gain nothing."""
        cores = machine.cores()
        return min(WORKERS, max(1, cores - self.threads)) if cores > 1 else 0

    def load(self, images: Sequence[Path | Item], on_error: str = "raise") -> Loaded:
        """Decodes and preprocesses images.

        Args:
            images: Image files.
            on_error: "raise" to stop at the first unreadable image, "skip" to report it in the result.

        Returns:
            The batch.

        Raises:
            RequestError: An image is unreadable.
        """
        pixels = self._slots(len(images))
        faults: list[str] = []
        count, spent, start = 0, [0.0, 0.0], time.perf_counter()
        for image in images:
            fault = ""
            try:
                decoded = _decoded(image, self.smallest)
                spent[0] -= start - (start := time.perf_counter())
                prepare(decoded, self.spec, pixels[count])
                count += 1
            except RequestError as error:
                if on_error == "raise":
                    raise
                fault = str(error)
            spent[1] -= start - (start := time.perf_counter())
            faults.append(fault)
        return Loaded([_name(image) for image in images], faults, pixels[:count], spent[0], spent[1])

    def stream(self, images: Iterable[Path | Item], on_error: str = "raise") -> Generator[Loaded, None, None]:
        """Decodes images in batches of `batch_size`, in order, with `workers` prefetching threads.

        Args:
            images: Image files.
            on_error: See `load`.

        Returns:
            Generator of batches; close it to stop early.
        """
        remaining = iter(images)
        batches = iter(lambda: list(itertools.islice(remaining, self.batch_size)), [])
        return ordered_map(lambda batch: self.load(batch, on_error), batches, self.workers)

    def run(self, inputs: Any, output: str | Path, on_error: str = "skip") -> dict[str, Any]:
        """Classifies any number of images in constant memory and input order.

        Writes the columns file, label, index, probability, label2, probability2, ..., and error. The other columns of
        an unreadable image are empty. `workers` threads decode ahead of the inference.

        Args:
            inputs: Image files and folders (see `pipelines.data.images.listed`), or `Item`s.
            output: Output file; "-" for stdout.
            on_error: "raise" to stop at the first unreadable image, "skip" to write it with its error.

        Returns:
            {"images" (classified), "skipped", "seconds", "images_per_second", "split_ms", "engine", "precision"}.
            "split_ms" has milliseconds per image of "decode", "preprocess" (both per thread), "model", "postprocess"
            (with writing) and "wall"; with decoding threads, the stages overlap.

        Raises:
            RequestError: No image is readable; no file is written.
        """
        some = range(2, min(TOP, self.classes) + 1)
        more: dict[str, Any] = {
            name: kind for i in some for name, kind in ((f"label{i}", str), (f"probability{i}", np.float64))
        }
        columns = {"file": str, "label": str, "index": np.int64, "probability": np.float64, **more, "error": str}
        faults: list[str] = []
        count = skipped = 0
        seconds = dict.fromkeys(("decode", "preprocess", "model", "postprocess", "wall"), 0.0)
        with (
            writing(output, columns, ("label", "probability", "file", "error")) as write,
            progress("classifying images") if not on_terminal(output) else nullcontext(lambda amount: None) as advance,
            closing(self.stream(_images(inputs), on_error)) as batches,
        ):
            start = time.perf_counter()
            for batch in batches:
                begin = time.perf_counter()
                out = self.predict({INPUT: batch.pixels}) if len(batch.pixels) else None
                computed = time.perf_counter()
                write(_columns(columns, batch, self.postprocess(out) if out is not None else []))
                seconds["decode"] += batch.decode
                seconds["preprocess"] += batch.preprocess
                seconds["model"] += computed - begin
                seconds["postprocess"] += time.perf_counter() - computed
                bad = [fault for fault in batch.faults if fault]
                faults += bad[: max(SHOWN - len(faults), 0)]
                count, skipped = count + len(batch.pixels), skipped + len(bad)
                advance(len(batch.names))
            seconds["wall"] = time.perf_counter() - start
            log_unreadable(skipped, count, faults, self.in_parts)
        return {
            "images": count,
            "skipped": skipped,
            "seconds": round(seconds["wall"], 3),
            "images_per_second": round(count / seconds["wall"], 2),
            "split_ms": {name: round(1e3 * each / max(count, 1), 4) for name, each in seconds.items()},
            "engine": self.engine,
            "precision": self.precision,
        }

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Returns calibration images, evenly spaced in the data.

        Args:
            data: Images; if split, the training images are used.
            count: Maximum number of images.
            on_error: See `load`.

        Returns:
            {"image": uint8 [n, 3, size, size]}.

        Raises:
            RequestError: An image is unreadable, or there are no images.
        """
        images = unlabelled_images(data)
        count = min(count, len(images))
        chosen = [images[index * len(images) // count] for index in range(count)]
        with closing(self.stream(chosen, on_error)) as batches, progress("reading images", count) as advance:
            loaded = []
            for batch in batches:
                loaded.append(batch)
                advance(len(batch.names))
        faults = [fault for batch in loaded for fault in batch.faults if fault]
        log_unreadable(len(faults), count - len(faults), faults)
        return {INPUT: np.concatenate([batch.pixels for batch in loaded])}

    def example(self, count: int, data: Any = None) -> list[bytes]:
        """Returns image files for a benchmark.

        Args:
            count: Number of files; repeated if there are too few.
            data: Images; None for synthetic images.

        Returns:
            Contents of the files.
        """
        if data is None:
            # the usual size of ImageNet's images for an input of 224 x 224
            height, width = self.spec.size * 375 // 224, self.spec.size * 500 // 224
            files = [synthetic_jpeg(seed, width, height) for seed in range(min(count, SYNTHETIC_IMAGES))]
        else:
            files = [content(image) for image in unlabelled_images(data)[:count]]
        return list(itertools.islice(itertools.cycle(files), count))

    def _slots(self, count: int) -> NDArray[np.uint8]:
        return np.empty((count, 3, self.spec.size, self.spec.size), np.uint8)

    def blank(self) -> Batch:
        """Returns a batch of black images, uint8 [batch_size, 3, size, size]."""
        return {INPUT: np.zeros((self.batch_size, 3, self.spec.size, self.spec.size), np.uint8)}


def synthetic_jpeg(seed: int, width: int, height: int) -> bytes:
    """Generates a JPEG file of noise at several scales, similar in size and detail to a photograph.

    Args:
        seed: Random seed; the same seed gives the same bytes.
        width: Width in pixels.
        height: Height in pixels.

    Returns:
        Content of the file.
    """
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((3, 0.5), (12, 0.25), (48, 0.15), (192, 0.1)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        pixels += weight * np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _each(raw: Any) -> Iterator[Any]:
    """Yields the images of the input of `preprocess`; folders are expanded."""
    alone = isinstance(raw, str | bytes | os.PathLike | Image.Image) or (isinstance(raw, np.ndarray) and raw.ndim < 4)
    for image in [raw] if alone or not isinstance(raw, Iterable) else raw:
        refuse_names(image, "the bytes of an image file, pixels, or a Pillow image")
        if isinstance(image, os.PathLike):
            yield from listed(image)
        elif isinstance(image, bytes | np.ndarray | Image.Image):
            yield image
        else:
            raise RequestError(
                f"found {type(image).__name__}; expected a path, the bytes of an image file, pixels, or a Pillow image"
            )


def unlabelled_images(data: Any) -> list[Path | Item]:
    """Finds images, labelled or not; only the training images if the source is split.

    Args:
        data: Image files and folders, an archive, or a data set (see `zoo.vision.data.datasets.open_images`).

    Returns:
        The images, unopened.

    Raises:
        RequestError: There are no images.
    """
    sources = list(data) if isinstance(data, list | tuple) else [data]
    path = Path(sources[0]) if len(sources) == 1 else None
    images: list[Path | Item]
    if path is not None and path.is_dir() and not list(path.glob("dataset_*.json")):
        splits = (each for each in sorted(path.iterdir()) if each.is_dir() and SPLITS.get(each.name.lower()) == TRAIN)
        images = list(listed(next(splits, path)))
    elif path is None or path.suffix.lower() in SUFFIXES:
        images = list(listed(sources))
    else:
        items = find_images(sources)
        images = [item for item in items if item.split == TRAIN] or list(items)
    if not images:
        raise RequestError("found no images")
    return images


def content(image: Path | Item) -> bytes:
    """Reads an image file.

    Args:
        image: Path, or item of a data set.

    Returns:
        Content of the file.

    Raises:
        RequestError: The file is unreadable.
    """
    try:
        return image.read() if isinstance(image, Item) else image.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {_name(image)}: {error.strerror or error}") from error


def _images(inputs: Any) -> Iterator[Path | Item]:
    for each in [inputs] if isinstance(inputs, str | os.PathLike | Item) else inputs:
        if isinstance(each, Item):
            yield each
        else:
            yield from listed(each)


def _decoded(image: Path | Item, smallest: int) -> NDArray[np.uint8]:
    if not isinstance(image, Item):
        return decode(image, smallest=smallest)
    return decode(content(image), smallest=smallest, name=image.name)


def _name(image: Path | Item) -> str:
    return image.name if isinstance(image, Item) else str(image)


def _columns(columns: Mapping[str, Any], batch: Loaded, results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Converts the results of a batch to columns for `pipelines.data.tables`."""
    found: dict[str, list[Any]] = {name: [] for name in columns}
    remaining = iter(results)
    for name, fault in zip(batch.names, batch.faults, strict=True):
        row: dict[str, Any] = {"file": _text(name)}
        if fault:
            row["error"] = _text(fault.removeprefix(f"{name} "))
        else:
            result = next(remaining)
            row["index"] = result["index"]
            for place, (label, probability) in enumerate(result["top5"], 1):
                row |= {f"label{place}" if place > 1 else "label": label}
                row |= {f"probability{place}" if place > 1 else "probability": round(probability, 6)}
        for column, values in found.items():
            values.append(row.get(column))
    return found


def _text(name: str) -> str:
    """Replaces bytes of a file name that are not UTF-8."""
    return name.encode("utf-8", "replace").decode()


def log_unreadable(skipped: int, count: int, faults: Sequence[str], in_parts: bool = False) -> None:
    """Logs unreadable images.

    Args:
        skipped: Number of unreadable images.
        count: Number of readable images.
        faults: Messages of the first unreadable images.
        in_parts: Whether the input is one part of a larger input, which may have no readable image.

    Raises:
        RequestError: No image is readable, or there are no images.
    """
    some = "; ".join(faults[:SHOWN]) + (f"; and {skipped - SHOWN} more" if skipped > SHOWN else "")
    if not count and skipped and not in_parts:
        raise RequestError(f"none of {skipped} images could be read: {some}")
    if not count and not skipped:
        raise RequestError("found no images; give files, folders, or their paths on stdin")
    if skipped:
        logger.warning("%d of %d images could not be read: %s", skipped, skipped + count, some)
