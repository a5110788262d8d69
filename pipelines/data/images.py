"""Images to the uint8 pixels that a network takes: decoding, resizing, cropping; lists, labels, batches of samples."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from pipelines.core.errors import RequestError
from pipelines.core.files import visible_files
from pipelines.data.preprocess import Preprocess
from pipelines.kernels import extension
from pipelines.kernels.images import native, reference
from pipelines.kernels.images.operators import Resize

if TYPE_CHECKING:  # the engines take long to import
    from pipelines.engines.session import Port

Pixels = NDArray[np.uint8]
Location = str | os.PathLike[str]

SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 178_956_970  # Pillow refuses more, too
MAX_SIDE = 65_535  # as JPEG; beyond it memory would grow with the side alone
MAX_BYTES = 1 << 30
# formats that Pillow may open; EPS would start another program
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # the EXIF tag


def decode(image: bytes | Location, *, smallest: int = 0, name: str = "") -> Pixels:
    """Decodes an image upright to uint8 [H, W, 3] RGB, C-contiguous.

    Formats are JPEG, PNG, WebP, GIF and TIFF (first frame), BMP, PPM, AVIF and JPEG 2000. EXIF orientation is applied,
    alpha is dropped (as Pillow's `convert("RGB")`), 16-bit channels keep the upper 8 bits, CMYK and palettes become
    RGB. JPEGs have the same pixels as in Pillow.

    Args:
        image: Path, or the bytes of a file.
        smallest: A JPEG may be decoded at 1/2, 3/8, 1/4 or 1/8 of its size if both sides keep at least so many pixels;
            0: full size.
        name: Name of the image in errors; by default its path or size.

    Returns:
        The pixels.

    Raises:
        RequestError: The file is missing, no image, broken, truncated (also a JPEG that its decoder would fill with
            grey), or larger than `MAX_PIXELS`.
    """
    name = name or (f"the image of {len(image)} bytes" if isinstance(image, bytes) else os.fspath(image))
    data = image if isinstance(image, bytes) else read(image)
    if not data:
        raise RequestError(f"{name} is empty; expected an image")
    pixels = _jpeg(data, name, smallest) if data.startswith(b"\xff\xd8") else None
    return _decode_by_pillow(data, name) if pixels is None else pixels


def decoding_cost(data: bytes, name: str = "") -> float:
    """Estimates the work of decoding an image from its header.

    Args:
        data: Bytes of a file.
        name: Name of the image in errors.

    Returns:
        Number of pixels, weighted by the time and memory of its format: 1/2 for JPEG with up to 16 scans, 2 for JPEG
        2000, 1 for others.

    Raises:
        RequestError: The file is no image.
    """
    name = name or f"the image of {len(data)} bytes"
    if data.startswith(b"\xff\xd8"):
        with contextlib.suppress(ValueError):
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            scans = data.count(b"\xff\xda", _scan(data))  # every scan of a progressive JPEG visits all pixels
            return float(height * width * max(0.5, scans / 32))
    with _opened(data, name) as image:
        return image.width * image.height * (2 if image.format == "JPEG2000" else 1)


def prepare(
    image: bytes | Location | Pixels | Image.Image, preprocess: Preprocess, out: Pixels | None = None
) -> Pixels:
    """Prepares one image up to the normalization: uint8 [3, size, size] in the order R, G, B.

    The short side becomes `resize` pixels and the long one int(resize * long / short); the crop begins at round((side -
    size) / 2), half to even, as in torchvision. The pixels are those of `pipelines.kernels.images.operators.Resize`,
    with and without native kernels.

    Args:
        image: Input of `decode`, a Pillow image (EXIF orientation is applied), or pixels uint8 [H, W, 3] RGB or [H, W]
            grey.
        preprocess: Sizes, crop and interpolation.
        out: C-contiguous array for the result, such as a slot of a batch.

    Returns:
        The pixels.

    Raises:
        RequestError: See `decode`; or the array has another form.
    """
    pixels = as_pixels(image, 2 * (preprocess.resize or preprocess.size) if preprocess.scaled_decode else 0)
    if out is None:
        out = np.empty((3, preprocess.size, preprocess.size), np.uint8)
    resize(pixels, _resizing(pixels.shape[1], pixels.shape[0], preprocess), out)
    return out


def as_pixels(image: bytes | Location | Pixels | Image.Image, smallest: int = 0) -> Pixels:
    """Converts an image to pixels uint8 [height, width, 3], RGB; see `prepare`.

    Args:
        image: See `prepare`.
        smallest: See `decode`.
    """
    if isinstance(image, np.ndarray):
        pixels = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise RequestError(
                f"found an array {image.dtype} {list(image.shape)}; expected pixels uint8 [height, width, 3] or "
                "[height, width]"
            )
        _check_size(pixels.shape[1], pixels.shape[0], "the array")
        return pixels
    return _to_pixels(image, "the image") if isinstance(image, Image.Image) else decode(image, smallest=smallest)


def normalized(pixels: Pixels, preprocess: Preprocess) -> NDArray[np.float32]:
    """Computes (pixels / 255 - mean) / std in float32.

    Args:
        pixels: uint8 [..., 3, height, width] in the order R, G, B.
        preprocess: Mean, std and the order of the channels.

    Returns:
        float32 of the same shape, in the order of `preprocess.channels`.
    """
    mean, std = (np.array(channels, np.float32)[:, None, None] for channels in (preprocess.mean, preprocess.std))
    values = (pixels.astype(np.float32) / np.float32(255) - mean) / std
    return values[..., ::-1, :, :] if preprocess.channels == "BGR" else values


# --------------------------------------------------------------------------------------------------------------- lists


def listed(inputs: Location | Iterable[Location]) -> Iterator[Path]:
    """Yields the paths of images.

    Args:
        inputs: Files, folders (searched recursively for image suffixes, in sorted order), or "-" for paths on stdin,
            one per line.

    Yields:
        Paths; missing files are reported by `decode`.

    Raises:
        RequestError: A folder holds no images, or a name is empty.
    """
    for location in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        if not str(location):
            raise RequestError("found an empty name, expected an image or a folder of images")
        path = Path(location)
        if str(location) == "-":
            yield from (Path(os.fsdecode(line)) for raw in sys.stdin.buffer if (line := raw.rstrip(b"\r\n")))
        elif path.is_dir():
            images = _search(path)
            if not images:
                raise RequestError(
                    f"found no images in the folder {path}; expected files with the suffixes {' '.join(SUFFIXES)}"
                )
            yield from images
        else:
            yield path


class Labelled(NamedTuple):
    """Images with classes.

    Attributes:
        paths: Paths of the images.
        labels: int64 [n].
        names: Class names in the order of the labels; None if labels are plain numbers.
    """

    paths: list[Path]
    labels: NDArray[np.int64]
    names: list[str] | None


def labelled(folder: Location) -> Labelled:
    """Reads a folder with labels.csv, or with one subfolder of images per class.

    labels.csv has the columns file and label (a number or a name); further columns are ignored. Names are sorted, and
    label i is the i-th name.

    Args:
        folder: The folder.

    Returns:
        The images and labels.

    Raises:
        RequestError: The folder has neither form, or the table has gaps.
    """
    folder = Path(folder)
    table = folder / "labels.csv"
    if table.is_file():
        try:
            with table.open(newline="", encoding="utf-8-sig") as file:
                rows = [(row.get("file"), row.get("label")) for row in csv.DictReader(file)]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RequestError(f"cannot read {table}: {error}") from error
        gap = next((i for i, row in enumerate(rows) if not all(row)), None if rows else 0)
        if gap is not None:
            raise RequestError(
                f"{table}: row {gap + 1} has no file or no label; expected the columns file,label and a row an image"
            )
        paths, labels = [folder / str(file) for file, _ in rows], [str(label).strip() for _, label in rows]
        if all(label.isdecimal() and len(label) < 19 for label in labels):
            return Labelled(paths, np.array([int(label) for label in labels], np.int64), None)
    else:
        visible = sorted(folder.glob("[!.]*")) if folder.is_dir() else []  # not .ipynb_checkpoints
        classes = [subfolder for subfolder in visible if subfolder.is_dir()]
        pairs = [(path, subfolder.name) for subfolder in classes for path in _search(subfolder)]
        if not pairs:
            raise RequestError(
                f"{folder} has neither labels.csv (columns file,label) nor subfolders of images, one a class"
            )
        paths, labels = [path for path, _ in pairs], [name for _, name in pairs]
    names = sorted(set(labels))
    index = {name: i for i, name in enumerate(names)}
    return Labelled(paths, np.array([index[label] for label in labels], np.int64), names)


def batches(
    images: Location | Iterable[Location],
    preprocess: Preprocess,
    inputs: Mapping[str, Port],
    batch_size: int = 32,
    skipped: list[str] | None = None,
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yields batches of images as a graph takes them: [n, 3, size, size] or [n, size, size, 3].

    Args:
        images: See `listed`.
        preprocess: Preprocessing of the network.
        inputs: The graph's only input and its `Port`: the shape gives the layout, the dtype whether it takes pixels
            (uint8) or `normalized` values (float).
        batch_size: Images of a batch.
        skipped: Collects errors of unreadable images, which are then skipped.

    Yields:
        Array by input name, channels in the order of `preprocess.channels`.

    Raises:
        RequestError: An image is unreadable (without `skipped`), none is readable, or the graph takes another input.
    """
    name, dtype, last = _input_layout(inputs, preprocess.size)
    pixels = np.empty((batch_size, 3, preprocess.size, preprocess.size), np.uint8)
    filled = total = 0

    def batch() -> dict[str, NDArray[Any]]:
        rgb = pixels[:filled]
        values = (
            normalized(rgb, preprocess) if dtype != np.uint8 else rgb[:, ::-1] if preprocess.channels == "BGR" else rgb
        )
        return {name: np.array(values.transpose(0, 2, 3, 1) if last else values, dtype, order="C")}

    for path in listed(images):
        try:
            prepare(path, preprocess, pixels[filled])
        except RequestError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        filled, total = filled + 1, total + 1
        if filled == batch_size:
            yield batch()
            filled = 0
    if filled:
        yield batch()
    if not total:
        raise RequestError(
            f"none of {len(skipped)} images could be read; first: {skipped[0]}" if skipped else "found no images"
        )


def _search(folder: Path) -> list[Path]:
    """Returns image files by suffix, recursively, without hidden files and folders."""
    return [file for file in visible_files(folder) if file.suffix.lower() in SUFFIXES]


def _input_layout(inputs: Mapping[str, Port], size: int) -> tuple[str, np.dtype[Any], bool]:
    """Returns name and dtype of the only input, and whether its channels come last."""
    inputs_found = ", ".join(f"{name} {port.dtype} {list(port.shape)}" for name, port in inputs.items())
    expected = f"expected one image, uint8 or float, [n, 3, {size}, {size}] or [n, {size}, {size}, 3]"
    if len(inputs) == 1:
        ((name, port),) = inputs.items()
        for last in (False, True):
            if len(port.shape) == 4 and (port.dtype == np.uint8 or port.dtype.kind == "f"):
                channels, *sides = (*port.shape[3:], *port.shape[1:3]) if last else port.shape[1:]
                fits = all(side in (None, size) for side in sides)
                # a dynamic shape is ambiguous: either the channels or the sides must be fixed
                if (channels == 3 and fits) or (channels is None and sides == [size, size]):
                    return name, port.dtype, last
    raise RequestError(f"the graph takes {inputs_found or 'nothing'}; {expected}")


# ------------------------------------------------------------------------------------------------------------ decoding


def read(path: Location, name: str = "") -> bytes:
    """Reads the bytes of an image file.

    Args:
        path: The file.
        name: Name of the image in errors; by default its path.

    Returns:
        The bytes.

    Raises:
        RequestError: The file cannot be read, or has more than `MAX_BYTES`.
    """
    path = Path(path)
    name = name or str(path)
    try:
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise RequestError(f"{name} {kind}; expected an image")
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{name} has {path.stat().st_size} bytes; images may have {MAX_BYTES}")
        return path.read_bytes()
    except RequestError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RequestError(f"cannot read {name!r}: {getattr(error, 'strerror', None) or error}") from error


def _jpeg(data: bytes, name: str, smallest: int) -> Pixels | None:
    """Decodes a JPEG by libjpeg-turbo; None if only Pillow reads it (CMYK, uncommon subsampling, odd headers)."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if space in ("CMYK", "YCCK"):
        return None
    _check_size(int(width), int(height), name)
    scale = {"min_height": smallest, "min_width": smallest, "min_factor": 2} if smallest else {}
    try:
        try:
            pixels = simplejpeg.decode_jpeg(data, "RGB", **scale)
        except ValueError as error:
            # the most common flaw does not affect pixels: extra bytes before the end, which are removed
            if not (extra := re.search(r"(\d+) extraneous bytes before marker 0xd9", str(error))):
                raise
            end = data.rfind(b"\xff\xd9")
            pixels = simplejpeg.decode_jpeg(data[: end - int(extra[1])] + data[end:], "RGB", **scale)
    except ValueError as error:
        raise _broken(name, error) from error
    header = data[: _scan(data)]  # parsing EXIF is slow, and most photos have no orientation
    turned = b"Exif\0\0" in header or b"tiff:Orientation" in header
    return _upright(pixels, _orientation(data) if turned else 1)


def _scan(data: bytes) -> int:
    """Returns the offset of the first scan of a JPEG, after the header segments (marker, length, content)."""
    offset = 2
    while data[offset : offset + 1] == b"\xff" and data[offset + 1 : offset + 2] != b"\xda":
        fill = data[offset + 1 : offset + 2] == b"\xff"
        offset += 1 if fill else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return offset


def _decode_by_pillow(data: bytes, name: str) -> Pixels:
    """Decodes an image by Pillow."""
    with _opened(data, name) as image:
        return _to_pixels(image, name)


@contextlib.contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """An image and the contents of its header."""
    Image.init()  # formats are looked up by name
    formats = [name for name in _FORMATS if name in Image.OPEN]
    with _reported(name), Image.open(io.BytesIO(data), formats=formats) as image:
        yield image


def _to_pixels(image: Image.Image, name: str) -> Pixels:
    """Converts a Pillow image to the result of `decode`."""
    with _reported(name):
        _check_size(*image.size, name)
        image.load()
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # these have 16 bits
            kind = "floating point" if image.mode == "F" else "32-bit"
            raise RequestError(f"{name} has {kind} pixels; expected integers of 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits, which Pillow's convert would clip at 255
            grey = np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8)
            pixels = np.repeat(grey[:, :, None], 3, axis=2)
        else:
            # Pillow warns where transparency is converted from a palette to RGB
            opaque = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
            pixels = np.asarray(opaque if opaque.mode == "RGB" else opaque.convert("RGB"))
        return _upright(pixels, _orientation(image))


def _orientation(image: Image.Image | bytes) -> Any:
    """Returns the EXIF orientation, 1 to 8; damaged EXIF data are ignored."""
    try:
        opened = Image.open(io.BytesIO(image), formats=("JPEG", "MPO")) if isinstance(image, bytes) else image
        return opened.getexif().get(_ORIENTATION)
    except Exception:
        return 1


def _upright(pixels: Pixels, orientation: Any) -> Pixels:
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """Context manager that reports any exception of Pillow's readers as RequestError."""
    try:
        yield
    except RequestError:
        raise
    except UnidentifiedImageError as error:
        kinds = ", ".join(name for name in _FORMATS if name in Image.OPEN)
        raise RequestError(f"{name} is no image, or of an unsupported kind; expected one of {kinds}") from error
    except Exception as error:
        raise _broken(name, error) from error


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise RequestError(f"{name} has {width} x {height} pixels; images may have {MAX_PIXELS}, and {MAX_SIDE} a side")


def _broken(name: str, error: Exception) -> RequestError:
    return RequestError(f"{name} is broken: {' '.join(str(error).split()) or type(error).__name__}")


# ------------------------------------------------------------------------------------------------------------ resizing


def _resizing(width: int, height: int, preprocess: Preprocess) -> Resize:
    side, size = preprocess.resize, preprocess.size
    if not side:
        resized, left, top = (size, size), 0, 0
    else:
        resized = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
        left, top = (round((side - size) / 2) for side in resized)
    return Resize(resized, (left, top, left + size, top + size), preprocess.interpolation == "bicubic")


def resize(pixels: Pixels, resizing: Resize, out: Pixels) -> None:
    """Resizes and crops pixels, with the same result with and without native kernels.

    Args:
        pixels: uint8 [height, width, 3].
        resizing: Size, crop and interpolation.
        out: C-contiguous uint8 [3, height, width] of the crop.
    """
    (width, height), (left, top, right, bottom) = resizing.size, resizing.crop
    if extension.native() is not None:
        native.resize(pixels, resizing, out)
    elif max(width * len(pixels), (right - left) * height) > MAX_PIXELS:
        out[...] = reference.resize(pixels, resizing)
    else:  # one axis at a time, as Pillow's order depends on its version
        filtered = Image.Resampling.BICUBIC if resizing.bicubic else Image.Resampling.BILINEAR
        half = Image.fromarray(pixels).resize((width, len(pixels)), filtered).crop((left, 0, right, len(pixels)))
        whole = half.resize((right - left, height), filtered).crop((0, top, right - left, bottom))
        out[...] = np.asarray(whole).transpose(2, 0, 1)
