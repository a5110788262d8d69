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
)  # folders or splits; of several to hold out, the first is used
SPLITS = {**{each: each for each in (TRAIN, *HELD_OUT)}, "training": TRAIN, "testing": HELD_OUT[0]}  # in lower case
SMALL = 64  # pixels a side up to which images are decoded once and kept
MEMORY = 1 << 30  # bytes of decoded small images, or of the files in an archive, that are kept
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Item:
    """An image file: its name in the source, the split and the class that the source says, and how its bytes are
    had.
    """

    name: str
    split: str
    label: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Images:
    """Images of one split. names and readers: of each; labels int64 [n]; pixels: uint8 [n, h, w, 3] where they are
    small, else None.
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
    """Images to train on and held-out ones, both labelled with indices into `classes`, which are sorted by name, or
    number.

    left_out: a message for every image that could not be read. digest: of names, labels and contents (for large images,
    of names and labels alone).
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
        raise RequestError(f"on_error is {on_error!r}; wanted raise or skip")
    items = find_images(data)
    left_out: list[str] = []
    pixels = _look(items, on_error, left_out)
    kept = [item for item, array in zip(items, pixels, strict=True) if array is not None]
    small = [array for array in pixels if array is not None]
    whole = np.stack(small) if small and all(each.size and each.shape == small[0].shape for each in small) else None

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
        found = f"{len(classes)} classes, {len(train)} images to train on and {len(test)} held out in {data}"
        raise RequestError(
            f"found {found}, wanted two classes or more and some of each" + (f"; none of {unseen[0]}" if unseen else "")
        )
    digest = hashlib.sha256("\n".join(f"{item.split}/{item.name}={item.label}" for item in kept).encode())
    digest.update(b"" if whole is None else whole.tobytes())
    return LabelledImages(classes, train, test, left_out, digest.hexdigest())


def find_images(data: Any) -> list[Item]:
    """All labelled images of a source (see `open_images`) by name, none of them opened. Raises RequestError where there
    are none.
    """
    source = one_source(data)
    items = sorted(_items(source), key=lambda item: item.name)
    if not items:
        raise RequestError(
            f"found no images in {source}, wanted a subfolder of them for every class, or labels.csv (file,label)"
        )
    return items


def one_source(data: Any) -> str:
    """The path or hub id in `data`, which may be a list of one. Raises RequestError for none or several."""
    sources = list(data) if isinstance(data, list | tuple) else [data]
    if len(sources) != 1 or not isinstance(sources[0], str | os.PathLike):
        raise RequestError(f"found {len(sources)} sources of images, wanted one folder, archive or hub id")
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


def _look(items: Sequence[Item], on_error: str, left_out: list[str]) -> list[Pixels | None]:
    """For every item its pixels, empty where they are not kept, or None where it cannot be read."""
    pixels: list[Pixels | None] = []
    nothing, keep, budget, first = np.empty(0, np.uint8), True, MEMORY, None
    with progress("reading images", len(items)) as advance, ThreadPoolExecutor() as pool:
        look = map if _look_at(items[0])[0].size else pool.map  # threads pay for photos, whose decoding leaves Python
        for start in range(0, len(items), 1024):
            block = items[start : start + 1024]
            for item, (array, reason) in zip(block, look(_look_at, block), strict=True):
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
                if keep and (
                    array.shape != first or budget < 0
                ):  # one image is large, or all are: they are read again when needed
                    keep, pixels = False, [None if each is None else nothing for each in pixels]
                pixels.append(array if keep else nothing)
    return pixels


def _look_at(item: Item) -> tuple[Pixels, str]:
    """Pixels of a small image, or an empty array, and what is wrong with it."""
    try:
        content = item.read()
        with Image.open(io.BytesIO(content)) as image:
            small = max(image.size) <= SMALL
        array = np.asarray(
            decode(content, 0 if small else 8)
        )  # at an eighth of the size a JPEG's every byte is still read
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
    """A number in [0, 1) that is the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


# ------------------------------------------------------------------------------------------------------------- sources


def _items(name: str) -> Iterator[Item]:
    path = Path(name)
    if path.is_dir():
        if any((path / each).is_file() for each in ("dataset_info.json", "dataset_dict.json")):
            return _dataset(name, lambda datasets: datasets.load_from_disk(name))
        files = [
            each for each in path.rglob("*") if not any(part.startswith(".") for part in each.relative_to(path).parts)
        ]
        return _labelled(name, {each.relative_to(path).as_posix(): each.read_bytes for each in files if each.is_file()})
    if path.is_file():
        return _labelled(name, _archive(path))
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        from pipelines.core.settings import offline

        if offline():
            raise RequestError(f"found no folder {name}, and ZOO_OFFLINE forbids to look for it on the hub")
        return _dataset(name, lambda datasets: datasets.load_dataset(name))
    raise RequestError(
        f"found no {name}, wanted a folder of images, a .tar or .tar.gz of one, or the hub id org/name of a data set"
    )


def _archive(path: Path) -> dict[str, Callable[[], bytes]]:
    files: dict[str, Callable[[], bytes]] = {}
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or any(part.startswith(".") for part in name.parts if part != "."):
                    continue
                if (total := total + member.size) > MEMORY:
                    raise RequestError(
                        f"found more than {MEMORY >> 30} GB of files in {path}; unpack it (tar xf) and give the folder"
                    )
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                files[name.as_posix()] = functools.partial(bytes, content.read())
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass  # a damaged header passes for the end of the archive; gzip knows better, at its own
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RequestError(
            f"cannot read {path}: {_reason(error)}; wanted a .tar or .tar.gz archive of image folders"
        ) from error
    return files


def _labelled(source: str, files: dict[str, Callable[[], bytes]]) -> Iterator[Item]:
    """Items of the files of a folder or archive: {relative path: how its bytes are had}."""
    known = {
        name: PurePosixPath(name)
        for name in files
        if PurePosixPath(name).suffix.lower() in SUFFIXES or name.endswith("labels.csv")
    }
    while (
        known
        and len({path.parts[0] for path in known.values()}) == 1
        and all(len(path.parts) > 2 for path in known.values())
    ):
        known = {name: path.relative_to(path.parts[0]) for name, path in known.items()}  # an archive's one outer folder
    by_path = {path: files[name] for name, path in known.items()}
    for top, split in _splits(source, by_path).items():
        inside = {path.relative_to(top): read for path, read in by_path.items() if not top or path.parts[0] == top}
        table = inside.pop(PurePosixPath("labels.csv"), None)
        place = f"{source}/{top}" if top else source
        pairs = _table(f"{place}/labels.csv", table()) if table else _subfolders(place, inside)
        for path, label in pairs:
            yield Item((top / path).as_posix(), split, label, inside.get(path) or functools.partial(_missing, path))


def _splits(source: str, paths: Collection[PurePosixPath]) -> dict[str, str]:
    """{folder: its split}; {"": ""} where the folders are classes. Raises RequestError where some may be either."""
    if any(len(path.parts) == 1 for path in paths):  # labels.csv, which says the classes, or what is refused
        return {"": ""}
    folders = {path.parts[0] for path in paths}
    found = {each: SPLITS[each.lower()] for each in sorted(folders) if each.lower() in SPLITS}
    if len(found) == len(folders):
        return found
    # Images in the folder train itself, in none below it, can only be of the class train; those in test may have none.
    nested = {path.parts[0] for path in paths if len(path.parts) > 2 or path.name == "labels.csv"}
    if either := [each for each, split in found.items() if split != TRAIN or each in nested]:
        others = ", ".join(sorted(folders - set(either)))
        raise RequestError(
            f"found {', '.join(either)} beside {others[:200]} in {source}, wanted splits alone (train, test or val) or "
            "classes alone; take out what is neither, or name the classes in labels.csv (file,label)"
        )
    return {"": ""}


def _subfolders(place: str, paths: Iterable[PurePosixPath]) -> Iterator[tuple[PurePosixPath, str]]:
    for path in paths:
        if len(path.parts) < 2:
            raise RequestError(
                f"found {path} in {place} outside the classes' subfolders, and no labels.csv (file,label) beside it"
            )
        yield path, path.parts[0]


def _table(place: str, content: bytes) -> Iterator[tuple[PurePosixPath, str]]:
    try:
        rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        for row in rows:
            yield PurePosixPath(row["file"]), row["label"].strip()
    except (KeyError, AttributeError, ValueError, csv.Error) as error:
        raise RequestError(
            f"cannot read {place} ({_reason(error)}); wanted UTF-8 with the columns file and label"
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
            raise RequestError(f"found the columns {', '.join(rows.features)} in {name}, wanted an image and its label")
        names = getattr(rows.features[label], "names", None)
        pictures = rows.select_columns([image]).cast_column(image, datasets().Image(decode=False))
        for i, value in enumerate(rows[label]):
            text = names[value] if names else str(value)
            yield Item(f"{split}/{i:08d}", split, text, functools.partial(_row, pictures, i, image))


def _row(rows: Any, index: int, column: str) -> bytes:
    value = rows[index][column]
    content: bytes = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return content
