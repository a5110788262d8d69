"""Inference of image classifiers: from image files to class names."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json
from pipelines.core.ordered_map import ordered_map
from pipelines.core.progress import progress
from pipelines.data.images import prepare
from pipelines.data.preprocess import Preprocess
from pipelines.data.tables import on_terminal, writing
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import GraphPipeline
from zoo.vision.data.datasets import Item
from zoo.vision.data.sources import (
    SHOWN,
    as_text,
    content,
    decoded,
    listed_images,
    log_unreadable,
    name_of,
    raw_images,
    synthetic_jpeg,
    unlabelled_images,
)

INPUT, OUTPUT = "image", "logits"
CLASSES_FILE = "classes.txt"  # in a model folder: class names, one per line
IMAGENET = (
    Path(__file__).parent / "imagenet.txt"
)  # lemmas of WordNet 3.0 (Princeton University) for the synsets of ImageNet-1k, in order
TOP = 5
DIGITS = 6  # of numbers that `run` writes
WORKERS = 8  # maximum number of decoding threads
BRIEF = ("label", "probability", "score", "xmin", "ymin", "xmax", "ymax", "file", "error")  # columns on a terminal
SYNTHETIC_IMAGES = 16  # different images of `ImagePipeline.example`


class Loaded(NamedTuple):
    """A batch of decoded images.

    Attributes:
        names: Names of the images.
        faults: Error message of every image, "" for a readable one.
        pixels: Pixels of the readable images, uint8 [n, 3, size, size].
        decode: Seconds of decoding.
        preprocess: Seconds of preprocessing.
        contexts: What `ImagePipeline.fill` returns, of the readable images.
    """

    names: list[str]
    faults: list[str]
    pixels: NDArray[Any]
    decode: float
    preprocess: float
    contexts: Sequence[Any] = ()


class ImagePipeline(GraphPipeline):
    """Classifies images; see `zoo.pipeline`."""

    BATCH_SIZE: ClassVar[int] = 4  # 20% faster than 1; larger batches gain little
    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "files"
    DOING: ClassVar[str] = "classifying"  # for the progress of `run`

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
        images = list(raw_images(raw))
        if not images:
            raise RequestError("found no images; expected at least one")
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
        return [best_classes(row, self.names(logits.shape[1])) for row in logits]

    def rows(self, result: Any) -> list[dict[str, Any]]:
        """Returns the rows that `run` writes for the result of an image, by the names of `columns`.

        Args:
            result: Result of `postprocess`.
        """
        row = {"index": result["index"]}
        for place, (label, probability) in enumerate(result["top5"], 1):
            row |= {f"label{place}" if place > 1 else "label": label}
            row |= {f"probability{place}" if place > 1 else "probability": probability}
        return [row]

    @functools.cached_property
    def columns(self) -> dict[str, Any]:
        """Types of the columns that `run` writes besides file and error, see `pipelines.data.tables.writing`."""
        ranks = range(2, min(TOP, self.classes) + 1)
        more: dict[str, Any] = {
            name: kind for i in ranks for name, kind in ((f"label{i}", str), (f"probability{i}", np.float64))
        }
        return {"label": str, "index": np.int64, "probability": np.float64, **more}

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """One input: uint8 [n, 3, size, size]."""
        return {INPUT: (np.dtype(np.uint8), (None, 3, self.spec.size, self.spec.size))}

    # --------------------------------------------------------------------------------------------------------- classes

    @functools.cached_property
    def class_names(self) -> list[str] | None:
        """Class names of the model's card, classes.txt or train.json; None if there are none."""
        classes = self.folder.card.details.get("classes")
        if isinstance(classes, list):
            return [str(name) for name in classes]
        file = IMAGENET if self.folder.card.details.get("names") == IMAGENET.stem else self.path / CLASSES_FILE
        try:
            if file.is_file():
                return [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {file}: {error}; expected the class names in UTF-8, one a line") from error
        trained = self.path / "train.json"
        return [str(name) for name in read_json(trained)["classes"]] if trained.is_file() else None

    def names(self, classes: int) -> list[str]:
        """Returns the names of all outputs: `class_names`, or "class 0", "class 1", ...

        Args:
            classes: Number of outputs of the network.

        Raises:
            RequestError: The model has another number of class names.
        """
        if len(self._names) != classes:
            labels = self.class_names or [f"class {index}" for index in range(classes - self.background)]
            names = [*["background"] * self.background, *labels] if len(labels) == classes - self.background else labels
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
        contexts: list[Any] = []
        spent, start = [0.0, 0.0], time.perf_counter()
        for image in images:
            fault = ""
            try:
                whole = decoded(image, self.smallest)
                spent[0] -= start - (start := time.perf_counter())
                contexts.append(self.fill(whole, pixels, len(contexts)))
            except RequestError as error:
                if on_error == "raise":
                    raise
                fault = str(error)
            spent[1] -= start - (start := time.perf_counter())
            faults.append(fault)
        names = [name_of(image) for image in images]
        return Loaded(names, faults, pixels[: len(contexts)], spent[0], spent[1], contexts)

    def fill(self, decoded: NDArray[np.uint8], pixels: NDArray[Any], index: int) -> Any:
        """Preprocesses an image into a batch.

        Args:
            decoded: uint8 [height, width, 3], RGB.
            pixels: The batch.
            index: Position in the batch.

        Returns:
            What `results` needs of the image.
        """
        prepare(decoded, self.spec, pixels[index])

    def compute(self, batch: Loaded) -> dict[str, NDArray[Any]]:
        """Returns the outputs of `predict` for the readable images of a batch.

        Args:
            batch: The batch.
        """
        return self.predict({INPUT: batch.pixels})

    def results(self, out: dict[str, NDArray[Any]], contexts: Sequence[Any]) -> list[Any]:
        """Returns the results of `postprocess` for images that `fill` preprocessed.

        Args:
            out: Outputs of `predict`.
            contexts: What `fill` returned, of each image.
        """
        return self.postprocess(out)

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
        columns = {"file": str, **self.columns, "error": str}
        faults: list[str] = []
        count = skipped = 0
        seconds = dict.fromkeys(("decode", "preprocess", "model", "postprocess", "wall"), 0.0)
        with (
            writing(output, columns, [name for name in BRIEF if name in columns]) as write,
            progress(f"{self.DOING} images")
            if not on_terminal(output)
            else nullcontext(lambda amount: None) as advance,
            closing(self.stream(listed_images(inputs), on_error)) as batches,
        ):
            start = time.perf_counter()
            for batch in batches:
                begin = time.perf_counter()
                out = self.compute(batch) if len(batch.pixels) else {}
                computed = time.perf_counter()
                write(self._cells(columns, batch, self.results(out, batch.contexts) if out else []))
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
            "split_ms": {name: round(1e3 * total / max(count, 1), 4) for name, total in seconds.items()},
            "engine": self.engine,
            "precision": self.precision,
        }

    def _cells(self, columns: Mapping[str, Any], batch: Loaded, results: list[Any]) -> dict[str, list[Any]]:
        """Returns the columns of a batch: the rows of each image, or its fault."""
        cells: dict[str, list[Any]] = {name: [] for name in columns}
        remaining = iter(results)
        for name, fault in zip(batch.names, batch.faults, strict=True):
            rows = [{"error": as_text(fault.removeprefix(f"{name} "))}] if fault else self.rows(next(remaining))
            for row in rows or [{}]:  # a detector may find nothing
                for column, values in cells.items():
                    value = as_text(name) if column == "file" else row.get(column)
                    values.append(round(value, DIGITS) if isinstance(value, float) else value)
        return cells

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
            height, width = self.side * 375 // 224, self.side * 500 // 224
            files = [synthetic_jpeg(seed, width, height) for seed in range(min(count, SYNTHETIC_IMAGES))]
        else:
            files = [content(image) for image in unlabelled_images(data)[:count]]
        return list(itertools.islice(itertools.cycle(files), count))

    @property
    def side(self) -> int:
        """Side of the input, in pixels."""
        return self.spec.size

    def _slots(self, count: int) -> NDArray[np.uint8]:
        return np.empty((count, 3, self.spec.size, self.spec.size), np.uint8)

    def blank(self) -> Batch:
        """Returns a batch of black images, uint8 [batch_size, 3, size, size]."""
        return {INPUT: np.zeros((self.batch_size, 3, self.spec.size, self.spec.size), np.uint8)}


def best_classes(scores: NDArray[np.float32], names: Sequence[str], softmax: bool = True) -> dict[str, Any]:
    """Finds the classes with the highest scores.

    Args:
        scores: float32 [classes].
        names: Names of the classes.
        softmax: Whether scores are logits, otherwise probabilities.

    Returns:
        {"label": class name, "index": class index, "probability", "top5": [(name, probability), ...]}.

    Raises:
        ZooError: A score is not finite.
    """
    count = min(TOP, len(scores))
    top = scores.argpartition(-count)[-count:]
    top.sort()  # equal scores keep the order of their classes, as in argmax
    top = top[(-scores[top]).argsort(kind="stable")]
    if not np.isfinite(scores[top]).all():  # NaN counts as the largest
        raise ZooError("the model computes NaN or infinite logits; check its weights and the input")
    if softmax:
        powers = np.exp(scores - scores[top[0]])
        total = float(powers.sum())
        probabilities = [power / total for power in powers[top].tolist()]
    else:
        probabilities = scores[top].tolist()
    best = [(names[i], probability) for i, probability in zip(top.tolist(), probabilities, strict=True)]
    return {"label": best[0][0], "index": int(top[0]), "probability": best[0][1], "top5": best}
