"""Preprocessing of image networks: letterbox, squeeze, crop or shortest edge, and the place of the image in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.data.images import Pixels, resize
from pipelines.data.preprocess import CHANNELS, MAX_SIDE, Preprocess
from pipelines.kernels.images.operators import Resize

LETTERBOX, STRETCH, CROP, SHORTEST_EDGE, AS_IS = "letterbox", "stretch", "crop", "shortest edge", "as it is"
PADDING = 114  # grey of a letterbox, as Ultralytics pads
INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, in transformers' files
PIXEL = 1 / 255
FILES = ("preprocessor_config.json", "processor_config.json", "config.json")  # beside a model
Mean = tuple[float, float, float]


@dataclass(frozen=True)
class Placement:
    """Place of an image in the input of a network: x of the input is x of the image * scale + offset.

    Attributes:
        width: Width of the image.
        height: Height of the image.
        scale: Pixels of the input for a pixel of the image, (x, y).
        offset: Input pixels left of and above the image, (x, y); negative where the image is cropped.
        size: (height, width) of the input.
    """

    width: int
    height: int
    scale: tuple[float, float]
    offset: tuple[int, int]
    size: tuple[int, int]

    def boxes(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Converts boxes of the input to boxes of the image, clipped to it.

        Args:
            boxes: float32 [n, 4], x and y of two corners.

        Returns:
            The same in pixels of the image.
        """
        offset, scale = (np.array(pair * 2, np.float32) for pair in (self.offset, self.scale))
        limits = np.array((self.width, self.height) * 2, np.float32)
        clipped: NDArray[np.float32] = np.clip((boxes - offset) / scale, np.float32(0), limits)
        return clipped


@dataclass(frozen=True)
class ImageTransform:
    """Preprocessing of an image for a network of any input size.

    Attributes:
        size: (height, width) of the input; (0, 0) for that of the image.
        fit: `LETTERBOX` (padded around), `STRETCH`, `CROP` (resized to `resize`, then the centre), `SHORTEST_EDGE`
            (of `resize[0]` pixels, the other at most `resize[1]`, both multiples of `resize[2]`), or `AS_IS`.
        resize: `CROP`: short side before the crop, or (height, width) of the whole image before it.
        interpolation: "bilinear" or "bicubic" (antialiased), "nearest" or "lanczos"; a letterbox is bilinear without
            antialiasing, as OpenCV resizes.
        scale: Factor of the pixels of 0 to 255, before the mean.
        mean: Mean of R, G and B, after the scale.
        std: Standard deviation of R, G and B, after the scale.
        channels: "RGB" or "BGR".
    """

    size: tuple[int, int]
    fit: str = STRETCH
    resize: tuple[int, ...] = ()
    interpolation: str = "bilinear"
    scale: float = PIXEL
    mean: Mean = (0.0, 0.0, 0.0)
    std: Mean = (1.0, 1.0, 1.0)
    channels: str = "RGB"

    def apply(self, pixels: Pixels) -> tuple[Pixels, Placement]:
        """Resizes, pads and crops an image.

        Args:
            pixels: uint8 [height, width, 3], RGB.

        Returns:
            uint8 [3, height, width], and the place of the image in it.
        """
        height, width = pixels.shape[:2]
        if self.fit == AS_IS:
            return np.ascontiguousarray(pixels.transpose(2, 0, 1)), Placement(
                width, height, (1, 1), (0, 0), (height, width)
            )
        if self.fit == LETTERBOX:
            return self._letterboxed(pixels)
        if self.fit == SHORTEST_EDGE:
            resized = self._shortest(height, width)
            return self._cropped(pixels, resized, resized)
        if self.fit == CROP and len(self.resize) == 1:
            short = self.resize[0]
            resized = (short, short * width // height) if height <= width else (short * height // width, short)
        else:
            resized = (self.resize[0], self.resize[1]) if self.resize else self.size
        return self._cropped(pixels, resized, self.size)

    def values(self, pixels: Pixels, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Converts pixels to the values that a network takes.

        Args:
            pixels: uint8 [3, height, width], RGB.
            dtype: Element type of the input; uint8 takes the pixels.

        Returns:
            Array of this type and shape, channels in the order of `channels`.
        """
        if dtype == np.uint8:
            return pixels[::-1] if self.channels == "BGR" else pixels
        mean, std = (np.array(channels, np.float32)[:, None, None] for channels in (self.mean, self.std))
        # (pixel / 255 - mean) / std, as torchvision and `pipelines.data.images.normalized` round it
        scaled = pixels.astype(np.float32) / np.float32(255) if self.scale == PIXEL else pixels * np.float32(self.scale)
        values = ((scaled - mean) / std).astype(dtype, copy=False)
        return values[::-1] if self.channels == "BGR" else values

    def _letterboxed(self, pixels: Pixels) -> tuple[Pixels, Placement]:
        (height, width), (rows, columns) = pixels.shape[:2], self.size
        ratio = min(rows / height, columns / width)
        inner = max(round(height * ratio), 1), max(round(width * ratio), 1)
        top, left = (round((side - own) / 2 - 0.1) for side, own in zip(self.size, inner, strict=True))
        image = Image.fromarray(pixels)
        if (height, width) != inner:
            steps = (width / inner[1], 0, 0, 0, height / inner[0], 0)
            image = image.transform(inner[::-1], Image.Transform.AFFINE, steps, Image.Resampling.BILINEAR)
        padded = np.full((3, rows, columns), PADDING, np.uint8)
        padded[:, top : top + inner[0], left : left + inner[1]] = np.asarray(image).transpose(2, 0, 1)
        scale = inner[1] / width, inner[0] / height
        return padded, Placement(width, height, scale, (left, top), self.size)

    def _shortest(self, height: int, width: int) -> tuple[int, int]:
        short, longest, multiple = self.resize
        if longest and max(height, width) / min(height, width) * short > longest:
            short = round(longest * min(height, width) / max(height, width))
        rows, columns = (short, short * width // height) if height <= width else (short * height // width, short)
        return max(rows // multiple, 1) * multiple, max(columns // multiple, 1) * multiple

    def _cropped(self, pixels: Pixels, resized: tuple[int, int], size: tuple[int, int]) -> tuple[Pixels, Placement]:
        """Resizes an image to (height, width) and takes the centre of the size; missing pixels are black."""
        resized = max(resized[0], 1), max(resized[1], 1)
        height, width = pixels.shape[:2]
        top, left = (round((whole - own) / 2) for whole, own in zip(resized, size, strict=True))
        scale = resized[1] / width, resized[0] / height
        placement = Placement(width, height, scale, (-left, -top), size)
        outside = min(top, left) < 0
        crop = (0, 0, *resized[::-1]) if outside else (left, top, left + size[1], top + size[0])
        if self.interpolation in ("bilinear", "bicubic"):
            resampled = np.empty((3, crop[3] - crop[1], crop[2] - crop[0]), np.uint8)
            resize(pixels, Resize(resized[::-1], crop, self.interpolation == "bicubic"), resampled)
        else:
            method = Image.Resampling[self.interpolation.upper()]
            image = Image.fromarray(pixels).resize(resized[::-1], method).crop(crop)
            resampled = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
        if not outside:
            return resampled, placement
        padded = np.zeros((3, *size), np.uint8)
        (rows, above), (columns, before) = map(_overlap, (top, left), size, resized)
        padded[:, rows, columns] = resampled[:, above, before]
        return padded, placement


def _overlap(offset: int, size: int, whole: int) -> tuple[slice, slice]:
    """Slices of the crop and of the image, along one axis, for a crop that begins at an offset of the image."""
    start, stop = max(offset, 0), min(offset + size, whole)
    return slice(start - offset, stop - offset), slice(start, stop)


def of_preprocess(spec: Preprocess) -> ImageTransform:
    """Returns the transform of a preprocessing in this project's form.

    Args:
        spec: The preprocessing.
    """
    fit, resize = (CROP, (spec.resize,)) if spec.resize else (STRETCH, ())
    return ImageTransform(
        (spec.size, spec.size), fit, resize, spec.interpolation, PIXEL, spec.mean, spec.std, spec.channels
    )


def _own(value: Any) -> ImageTransform:
    """Reads this project's form; size and resize may be [height, width]."""
    if not isinstance(value, Mapping) or not isinstance(value.get("size"), list):
        return of_preprocess(Preprocess.from_json(value))
    size, resize = value["size"], value.get("resize", 0)
    resized = resize if isinstance(resize, list) else [resize] * bool(resize)
    in_range = all(type(side) is int and 1 <= side <= MAX_SIDE for side in (*size, *resized))
    if len(size) != 2 or len(resized) > 2 or not in_range:
        raise RequestError(
            f"found the size {size} and resize {resize}; expected [height, width], resize also as the short side, of 1 "
            f"to {MAX_SIDE} pixels"
        )
    square = of_preprocess(Preprocess.from_json({**value, "size": 1, "resize": 0}))
    return replace(square, size=(size[0], size[1]), fit=CROP if resized else STRETCH, resize=tuple(resized))


def read_transform(path: Path) -> ImageTransform:
    """Reads a preprocessing: this project's JSON, transformers' preprocessor_config.json, or timm's config.json.

    Args:
        path: JSON file.

    Returns:
        The transform.

    Raises:
        RequestError: The file has none of these forms, or a value of it is not supported.
    """
    value = read_json(path)
    try:
        transform = _transform(value)
        if transform is None:
            return _own(value)
        return transform
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise RequestError(
            f"{path}: found a preprocessing that is not read ({error}); expected size, resize, interpolation, mean, "
            "std and channels, or the file of transformers or timm"
        ) from error


def beside(path: Path) -> ImageTransform | None:
    """Reads the preprocessing that lies beside a model, or in the folder above its folder "onnx".

    Args:
        path: ONNX file.

    Returns:
        The transform; None if no file has one.

    Raises:
        RequestError: The file is not supported.
    """
    for folder in folders(path):
        for name in FILES:
            file = folder / name
            if file.is_file() and isinstance(value := read_json(file), dict):
                if name == "processor_config.json":
                    value = value.get("image_processor", {})
                if isinstance(value, dict) and ("pretrained_cfg" in value or _of_transformers(value)):
                    return _checked(file, value)
    return None


def folders(path: Path) -> list[Path]:
    """Returns the folders that may hold the configuration of a model: its own, and that above a folder "onnx".

    Args:
        path: ONNX file.
    """
    parent = path.absolute().parent
    return [parent, parent.parent] if parent.name == "onnx" else [parent]


def _checked(path: Path, value: Mapping[str, Any]) -> ImageTransform | None:
    try:
        return _transform(value)
    except (RequestError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise RequestError(
            f"{path}: found a preprocessing that is not read ({error}); give another one with --preprocess FILE.json"
        ) from error


def _transform(value: Any) -> ImageTransform | None:
    """Reads transformers' or timm's form; None for another one."""
    if not isinstance(value, Mapping):
        return None
    if "pretrained_cfg" in value:
        return _timm(value["pretrained_cfg"])
    if "input_size" in value:
        return _timm(value)
    return _transformers(value) if _of_transformers(value) else None


def _of_transformers(value: Mapping[str, Any]) -> bool:
    return bool(value.keys() & {"do_resize", "do_normalize", "image_mean", "image_processor_type"})


def _timm(value: Mapping[str, Any]) -> ImageTransform:
    """Reads timm's `pretrained_cfg` (timm.data.create_transform of an evaluation)."""
    _, height, width = value["input_size"]
    share = float(value.get("crop_pct") or 0.875)
    whole = math.floor(height / share), math.floor(width / share)
    mode = value.get("crop_mode") or "center"
    if mode not in ("center", "squash") or (mode == "center" and height != width):
        raise RequestError(f"found crop_mode {mode!r} for {height} x {width}, expected center or squash")
    interpolation = str(value.get("interpolation") or "bicubic")
    return ImageTransform(
        (height, width),
        CROP,
        whole[:1] if mode == "center" else whole,
        _interpolation(interpolation),
        PIXEL,
        _three(value.get("mean", (0.485, 0.456, 0.406))),
        _three(value.get("std", (0.229, 0.224, 0.225))),
    )


def _transformers(value: Mapping[str, Any]) -> ImageTransform:
    """Reads an image processor's configuration, of any version."""
    kind = str(value.get("image_processor_type") or value.get("feature_extractor_type") or "")
    fit, resize, sides = _resizing(value, kind)
    scale = float(value.get("rescale_factor", PIXEL)) if value.get("do_rescale", True) else 1.0
    normalizes = value.get("do_normalize", "image_mean" in value and not kind.startswith("MobileViT"))
    mean = _three(value["image_mean"]) if normalizes and value.get("image_mean") else (0.0, 0.0, 0.0)
    std = _three(value["image_std"]) if normalizes and value.get("image_std") else (1.0, 1.0, 1.0)
    if value.get("include_top"):  # EfficientNet, which divides twice
        std = _three([channel**2 for channel in std])
    if value.get("rescale_offset"):  # to -1 to 1
        mean = _three([channel + 1 for channel in mean])
    flips = value.get("do_flip_channel_order", kind.startswith("MobileViT"))
    return ImageTransform(
        sides,
        fit,
        resize,
        _interpolation(INTERPOLATIONS.get(value.get("resample", 2), "")),
        PIXEL if math.isclose(scale, PIXEL, rel_tol=1e-6) else scale,
        mean,
        std,
        CHANNELS[1] if flips else CHANNELS[0],
    )


def _resizing(value: Mapping[str, Any], kind: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns `fit`, `resize` and `size` of the `ImageTransform` of an image processor of a kind."""
    size, crop, share = value.get("size"), value.get("crop_size"), value.get("crop_pct")
    center_crop, multiple = bool(value.get("do_center_crop")), 16 if kind.startswith("Yolos") else 1
    if not value.get("do_resize", True):
        return AS_IS, (), (0, 0)
    if isinstance(size, Mapping) and "shortest_edge" in size and len(size) > 1:
        return SHORTEST_EDGE, (int(size["shortest_edge"]), int(size["longest_edge"]), multiple), (0, 0)
    if not isinstance(size, int) and not (isinstance(size, Mapping) and "shortest_edge" in size):
        return (CROP, _sides(size), _sides(crop or size)) if center_crop else (STRETCH, (), _sides(size))
    edge = int(size["shortest_edge"] if isinstance(size, Mapping) else size)
    if share and edge < 384:  # ConvNeXt
        return CROP, (int(edge / share),), (edge, edge)
    if center_crop:
        short = int(256 / 224 * edge) if kind.startswith("Levit") else edge
        return CROP, (short,), _sides(crop or edge)
    if isinstance(size, int) and "max_size" in value:
        return SHORTEST_EDGE, (edge, int(value["max_size"]), multiple), (0, 0)
    if isinstance(size, int) or share:
        return STRETCH, (), (edge, edge)
    return SHORTEST_EDGE, (edge, 0, multiple), (0, 0)


def _sides(size: Any) -> tuple[int, int]:
    return (int(size["height"]), int(size["width"])) if isinstance(size, Mapping) else (int(size), int(size))


def _three(values: Any) -> Mean:
    """Three values, one a channel; one number stands for all of them."""
    one, two, three = [values] * 3 if isinstance(values, int | float) else values
    return float(one), float(two), float(three)


def _interpolation(name: str) -> str:
    if name not in INTERPOLATIONS.values():
        raise RequestError(f"found the interpolation {name!r}, expected {', '.join(INTERPOLATIONS.values())}")
    return name
