"""Labelled images from folders, archives and data sets, and their preprocessing."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import visible_files
from pipelines.core.progress import progress
from pipelines.data.images import SUFFIXES
from pipelines.data.images import decode as decode_pixels
from pipelines.data.images import prepare as prepare_pixels
from pipelines.data.preprocess import Preprocess
from zoo.training.runs import datasets, load_dataset

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], RGB

TRAIN, HELD_OUT = (
    "train",
    ("test", "val", "valid", "validation"),
)  # folders or splits; the first held-out one that exists is used
SPLITS = {**{name: name for name in (TRAIN, *HELD_OUT)}, "training": TRAIN, "testing": HELD_OUT[0]}  # in lower case
SMALL = 64  # maximum height and width of images that stay decoded in memory, in pixels
MEMORY = 1 << 30  # maximum bytes of decoded small images, or of the files of an archive, in memory
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Item:
    """An image file of a data set.

    Attributes:
        name: Name in the source.
        split: "train", "test", ..., or "" without a split.
        label: Class name or class number.
        read: Returns the content of the file.
    """

    name: str
    split: str
    label: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Images:
    """Images of one split.

    Attributes:
        names: Names of the n images.
        labels: Class indices, int64 [n].
        readers: Functions that return the content of the files.
        pixels: uint8 [n, h, w, 3] of small images, else None.
    """

    names: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    readers: tuple[Callable[[], bytes], ...]
    pixels: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int, scale_to: int = 0) -> Image.Image:
        """Decodes one image.

        Args:
            index: Index of the image.
            scale_to: See `decode`.

        Raises:
            ZooError: The file became unreadable during the run.
        """
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index])
        try:
            return decode(self.readers[index](), scale_to)
        except Exception as error:
            raise ZooError(
                f"cannot read {self.names[index]}: {_reason(error)}; it was readable when the run began"
            ) from error


@dataclass(frozen=True)
class LabelledImages:
    """A data set of labelled images, split into training and held-out images.

    Attributes:
        classes: Names of the classes, sorted, or numbers in order.
        train: Training images.
        held_out: Held-out images.
        left_out: A message for every unreadable image.
        digest: Digest of names, labels and, for small images, contents.
    """

    classes: tuple[str, ...]
    train: Images
    held_out: Images
    left_out: list[str] = field(default_factory=list)
    digest: str = ""


def open_images(data: Any, *, held_out: float = 0.1, seed: int = 0, on_error: str = "raise") -> LabelledImages:
    """Opens a data set of labelled images and checks every image once.

    Supported sources are a folder or .tar(.gz) archive with one subfolder per class or with labels.csv (columns file
    and label), optionally split into train and test (or val); a folder written by `datasets`; or a hub id org/name.
    Files without an image suffix are ignored. Images of one size up to `SMALL` pixels stay decoded in memory while they
    take less than `MEMORY` bytes.

    Args:
        data: Path, or hub id.
        held_out: Share of held-out images if the source has no split; selected by a hash of `seed` and the file's name.
        seed: Seed of the split.
        on_error: "raise" to stop at the first unreadable image, "skip" to leave it out.

    Returns:
        Training and held-out images.

    Raises:
        RequestError: There are fewer than two classes, or an image is unreadable.
    """
    if on_error not in ("raise", "skip"):
        raise RequestError(f"on_error is {on_error!r}; expected raise or skip")
    items = find_images(data)
    left_out: list[str] = []
    pixels = _read_small(items, on_error, left_out)
    kept = [item for item, array in zip(items, pixels, strict=True) if array is not None]
    small = [array for array in pixels if array is not None]
    whole = np.stack(small) if small and all(array.size and array.shape == small[0].shape for array in small) else None

    labels = {item.label for item in kept}
    classes = tuple(sorted(labels, key=int if all(label.isdecimal() for label in labels) else str))
    index = {label: i for i, label in enumerate(classes)}
    splits = {item.split for item in kept}
    chosen = next((name for name in HELD_OUT if name in splits), None)
    parts: list[list[int]] = [[], []]
    for i, item in enumerate(kept):
        if chosen is None:
            parts[_share(f"{seed}:{item.name}") < held_out].append(i)
        elif item.split in (TRAIN, chosen):
            parts[item.split == chosen].append(i)
    train, test = (
        Images(
            tuple(kept[i].name for i in part),
            np.array([index[kept[i].label] for i in part], np.int64),
            tuple(kept[i].read for i in part),
            None if whole is None else whole[part],
        )
        for part in parts
    )
    unseen = [label for i, label in enumerate(classes) if i not in set(train.labels.tolist())]
    if len(classes) < 2 or unseen or not len(test):
        content = f"{len(classes)} classes, {len(train)} images to train on and {len(test)} held out in {data}"
        raise RequestError(
            f"found {content}, expected two classes or more and some of each"
            + (f"; none of {unseen[0]}" if unseen else "")
        )
    digest = hashlib.sha256("\n".join(f"{item.split}/{item.name}={item.label}" for item in kept).encode())
    digest.update(b"" if whole is None else whole.tobytes())
    return LabelledImages(classes, train, test, left_out, digest.hexdigest())


def find_images(data: Any) -> list[Item]:
    """Finds the labelled images of a source without opening them.

    Args:
        data: Path or hub id (see `open_images`).

    Returns:
        Images, sorted by name.

    Raises:
        RequestError: There are no images.
    """
    source = one_source(data)
    items = sorted(_items(source), key=lambda item: item.name)
    if not items:
        raise RequestError(
            f"found no images in {source}, expected a subfolder of them for every class, or labels.csv (file,label)"
        )
    return items


def one_source(data: Any) -> str:
    """Returns the source of a data set.

    Args:
        data: Path or hub id, or a list of one.

    Returns:
        The path or hub id.

    Raises:
        RequestError: There are several sources, or none.
    """
    sources = list(data) if isinstance(data, list | tuple) else [data]
    if len(sources) != 1 or not isinstance(sources[0], str | os.PathLike):
        raise RequestError(f"found {len(sources)} sources of images, expected one folder, archive or hub id")
    return os.fspath(sources[0])


def decode(content: bytes, scale_to: int = 0) -> Image.Image:
    """Decodes an image file as `pipelines.data.images.decode` does for inference.

    Args:
        content: Content of the file.
        scale_to: Minimum height and width after scaled decoding, in pixels; 0 for full size.
    """
    return Image.fromarray(decode_pixels(content, smallest=scale_to))


def prepare(image: Image.Image, features: dict[str, Any]) -> Pixels:
    """Preprocesses an image as `pipelines.data.images.prepare` does for inference.

    Args:
        image: RGB image.
        features: Preprocessing of the model's card.

    Returns:
        Pixels, uint8 [size, size, 3].
    """
    return prepare_pixels(np.asarray(image), Preprocess.from_json(features)).transpose(1, 2, 0)


def _read_small(items: Sequence[Item], on_error: str, left_out: list[str]) -> list[Pixels | None]:
    """Returns the pixels of every small image, an empty array for a large one, None for an unreadable one."""
    pixels: list[Pixels | None] = []
    nothing, keep, budget, first = np.empty(0, np.uint8), True, MEMORY, None
    with progress("reading images", len(items)) as advance, ThreadPoolExecutor() as pool:
        check = map if _check(items[0])[0].size else pool.map  # decoding of large images releases the GIL
        for start in range(0, len(items), 1024):
            block = items[start : start + 1024]
            for item, (array, reason) in zip(block, check(_check, block), strict=True):
                advance(1)
                if reason:
                    if on_error == "raise":
                        raise RequestError(
                            f"cannot read {item.name}: {reason}; repair it, or leave such files out with --on-error "
                            "skip"
                        )
                    left_out.append(f"{item.name}: {reason}")
                    pixels.append(None)
                    continue
                first = first or array.shape
                budget -= array.nbytes
                if keep and (array.shape != first or budget < 0):  # large images are decoded when needed
                    keep, pixels = False, [None if array is None else nothing for array in pixels]
                pixels.append(array if keep else nothing)
    return pixels


def _check(item: Item) -> tuple[Pixels, str]:
    """Returns the pixels of a small image, or an empty array, and the error message, "" for a readable file."""
    try:
        content = item.read()
        with Image.open(io.BytesIO(content)) as image:
            small = max(image.size) <= SMALL
        array = np.asarray(decode(content, 0 if small else 8))  # scaled decoding of a JPEG still reads the whole file
        return array if small else np.empty(0, np.uint8), ""
    except Exception as error:  # Pillow raises dozens of kinds for damaged files
        return np.empty(0, np.uint8), _reason(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


def _share(text: str) -> float:
    """Hashes a text to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


# ------------------------------------------------------------------------------------------------------------- sources


def _items(name: str) -> Iterator[Item]:
    path = Path(name)
    if path.is_dir():
        if any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            return _dataset(name, lambda datasets: datasets.load_from_disk(name))
        return _labelled(name, {file.relative_to(path).as_posix(): file.read_bytes for file in visible_files(path)})
    if path.is_file():
        return _labelled(name, _archive(path))
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        from pipelines.core.settings import offline

        if offline():
            raise RequestError(f"found no folder {name}, and ZOO_OFFLINE forbids access to the hub")
        return _dataset(name, lambda datasets: datasets.load_dataset(name))
    raise RequestError(
        f"found no {name}, expected a folder of images, a .tar or .tar.gz of one, or the hub id org/name of a data set"
    )


def _archive(path: Path) -> dict[str, Callable[[], bytes]]:
    files: dict[str, Callable[[], bytes]] = {}
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or any(part.startswith(".") for part in name.parts if part not in (".", "..")):
                    continue
                if name.is_absolute() or ".." in name.parts:
                    raise RequestError(f"found {member.name} in {path}, expected paths inside of a folder of images")
                if (total := total + member.size) > MEMORY:
                    raise RequestError(
                        f"found more than {MEMORY >> 30} GB of files in {path}; unpack it (tar xf) and give the folder"
                    )
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                files[name.as_posix()] = functools.partial(bytes, content.read())
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass  # reads to the end: gzip detects a damaged header that tarfile takes for the end
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RequestError(
            f"cannot read {path}: {_reason(error)}; expected a .tar or .tar.gz archive of image folders"
        ) from error
    return files


def _labelled(source: str, files: dict[str, Callable[[], bytes]]) -> Iterator[Item]:
    """Yields the items of a folder or archive.

    Args:
        source: Name of the folder or archive, for messages.
        files: {relative path: function that returns the content}.
    """
    paths = {
        name: PurePosixPath(name)
        for name in files
        if PurePosixPath(name).suffix.lower() in SUFFIXES or name.endswith("labels.csv")
    }
    while (
        paths
        and len({path.parts[0] for path in paths.values()}) == 1
        and all(len(path.parts) > 2 for path in paths.values())
    ):
        paths = {name: path.relative_to(path.parts[0]) for name, path in paths.items()}  # removes a single outer folder
    by_path = {path: files[name] for name, path in paths.items()}
    for top, split in _splits(source, by_path).items():
        inside = {path.relative_to(top): read for path, read in by_path.items() if not top or path.parts[0] == top}
        table = inside.pop(PurePosixPath("labels.csv"), None)
        place = f"{source}/{top}" if top else source
        pairs = _table(f"{place}/labels.csv", table()) if table else _subfolders(place, inside)
        for path, label in pairs:
            yield Item((top / path).as_posix(), split, label, inside.get(path) or functools.partial(_missing, path))


def _splits(source: str, paths: Collection[PurePosixPath]) -> dict[str, str]:
    """Returns {folder: split}, or {"": ""} if the folders are classes. Raises RequestError if a folder may be both."""
    if any(len(path.parts) == 1 for path in paths):  # labels.csv, or files outside of folders, which are refused
        return {"": ""}
    folders = {path.parts[0] for path in paths}
    splits = {folder: SPLITS[folder.lower()] for folder in sorted(folders) if folder.lower() in SPLITS}
    if len(splits) == len(folders):
        return splits
    # Images directly in the folder train belong to a class of that name; images directly in test may be unlabelled.
    nested = {path.parts[0] for path in paths if len(path.parts) > 2 or path.name == "labels.csv"}
    if either := [folder for folder, split in splits.items() if split != TRAIN or folder in nested]:
        others = ", ".join(sorted(folders - set(either)))
        raise RequestError(
            f"found {', '.join(either)} and {others[:200]} in {source}, expected splits alone (train, test or val) "
            "or classes alone; remove the other folders, or name the classes in labels.csv (file,label)"
        )
    return {"": ""}


def _subfolders(place: str, paths: Iterable[PurePosixPath]) -> Iterator[tuple[PurePosixPath, str]]:
    for path in paths:
        if len(path.parts) < 2:
            raise RequestError(
                f"found {path} in {place} outside the classes' subfolders, and no labels.csv (file,label)"
            )
        yield path, path.parts[0]


def _table(place: str, content: bytes) -> Iterator[tuple[PurePosixPath, str]]:
    try:
        rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        for row in rows:
            yield PurePosixPath(row["file"]), row["label"].strip()
    except (KeyError, AttributeError, ValueError, csv.Error) as error:
        raise RequestError(
            f"cannot read {place} ({_reason(error)}); expected UTF-8 with the columns file and label"
        ) from error


def _missing(path: PurePosixPath) -> bytes:
    raise FileNotFoundError(f"labels.csv names {path}, and there is no such file")


def _dataset(name: str, load: Callable[[Any], Any]) -> Iterator[Item]:
    dataset = load_dataset(name, load)
    for key, rows in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
        split = SPLITS.get(key.lower(), "")
        if isinstance(dataset, dict) and not split:
            continue
        image = next((key for key, kind in rows.features.items() if isinstance(kind, datasets().Image)), None)
        label = next((key for key in ("label", "labels", "fine_label") if key in rows.features), None)
        if image is None or label is None:
            raise RequestError(
                f"found the columns {', '.join(rows.features)} in {name}, expected an image and its label"
            )
        names = getattr(rows.features[label], "names", None)
        column = rows.select_columns([image]).cast_column(image, datasets().Image(decode=False))
        for i, value in enumerate(rows[label]):
            text = names[value] if names else str(value)
            yield Item(f"{split}/{i:08d}", split, text, functools.partial(_row, column, i, image))


def _row(rows: Any, index: int, column: str) -> bytes:
    value = rows[index][column]
    content: bytes = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return content
