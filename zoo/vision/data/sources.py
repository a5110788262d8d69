"""Images as users name them: paths, folders, bytes and pixels, for inference, calibration and benchmarks."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.core.errors import RequestError
from pipelines.core.files import refuse_names
from pipelines.data.images import SUFFIXES, decode, listed
from zoo.vision.data.datasets import SPLITS, TRAIN, Item, find_images

SHOWN = 3  # unreadable images that a message names

logger = logging.getLogger(__name__)


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


def raw_images(raw: Any) -> Iterator[Any]:
    """Yields the images of the input of `ImagePipeline.preprocess`; folders are expanded.

    Args:
        raw: An image, or a list of images.

    Raises:
        RequestError: A value is no image.
    """
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
        splits = (part for part in sorted(path.iterdir()) if part.is_dir() and SPLITS.get(part.name.lower()) == TRAIN)
        images = list(listed(next(splits, path)))
    elif path is None or path.suffix.lower() in SUFFIXES:
        images = list(listed(sources))
    else:
        items = find_images(sources)
        images = [item for item in items if item.split == TRAIN] or list(items)
    if not images:
        raise RequestError("found no images; expected files, folders or their paths")
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
        raise RequestError(f"cannot read {name_of(image)}: {error.strerror or error}") from error


def listed_images(inputs: Any) -> Iterator[Path | Item]:
    """Yields the images of files, folders and items.

    Args:
        inputs: See `ImagePipeline.run`.
    """
    for source in [inputs] if isinstance(inputs, str | os.PathLike | Item) else inputs:
        if isinstance(source, Item):
            yield source
        else:
            yield from listed(source)


def decoded(image: Path | Item, smallest: int) -> NDArray[np.uint8]:
    """Decodes an image, see `pipelines.data.images.decode`.

    Args:
        image: Path, or item of a data set.
        smallest: See `decode`.
    """
    if not isinstance(image, Item):
        return decode(image, smallest=smallest)
    return decode(content(image), smallest=smallest, name=image.name)


def name_of(image: Path | Item) -> str:
    """Returns the name of an image in results and messages.

    Args:
        image: Path of an image, or an image of an archive.
    """
    return image.name if isinstance(image, Item) else str(image)


def as_text(name: str) -> str:
    """Replaces bytes of a file name that are not UTF-8.

    Args:
        name: Name of a file, with surrogate escapes.
    """
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
    reasons = "; ".join(faults[:SHOWN]) + (f"; and {skipped - SHOWN} more" if skipped > SHOWN else "")
    if not count and skipped and not in_parts:
        raise RequestError(f"none of {skipped} images could be read: {reasons}")
    if not count and not skipped:
        raise RequestError("found no images; give files, folders, or their paths on stdin")
    if skipped:
        logger.warning("%d of %d images could not be read: %s", skipped, skipped + count, reasons)
