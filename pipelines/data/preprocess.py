"""Preprocessing of images for a network: a frozen dataclass, validated on creation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.plain import to_plain

INTERPOLATIONS = ("bilinear", "bicubic")
CHANNELS = ("RGB", "BGR")
MAX_SIDE = 8192  # pixels of a network's input or a resize


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of an image: RGB, short side to `resize`, centre crop of `size` x `size`, normalization by channel.

    Attributes:
        size: Side of the network's square input, in pixels.
        resize: Short side before the crop, in pixels, at least `size`; 0 squeezes the whole image to size x size.
        interpolation: "bilinear" or "bicubic", antialiased, as Pillow's `Image.resize`.
        mean: Mean of pixels in 0..1, in the order R, G, B, as in torchvision and timm: the network sees (pixel / 255 -
            mean) / std.
        std: Standard deviation of pixels in 0..1, in the order R, G, B.
        channels: "RGB" or "BGR", the order that the network's first convolution takes.
        scaled_decode: Decode large JPEGs at half their size or less, but at least twice the resized size: faster, with
            other pixels than a full decode.

    Raises:
        RequestError: A value is out of range.
    """

    size: int
    resize: int = 0
    interpolation: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channels: str = "RGB"
    scaled_decode: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("interpolation", INTERPOLATIONS),
            ("channels", CHANNELS),
            ("scaled_decode", (False, True)),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(
                    f"preprocess: unknown {name} {getattr(self, name)!r}; choose one of {', '.join(map(str, choices))}"
                )
        for name in ("size", "resize"):
            if type(getattr(self, name)) is not int:
                raise RequestError(f"preprocess: {name} is {getattr(self, name)!r}; give a whole number of pixels")
        if not 1 <= self.size <= MAX_SIDE or (self.resize and not self.size <= self.resize <= MAX_SIDE):
            raise RequestError(
                f"preprocess: size {self.size}, resize {self.resize}; size is 1 to {MAX_SIDE}, resize 0 (squeeze) or "
                f"size to {MAX_SIDE}"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            numbers = isinstance(values, list | tuple) and all(
                isinstance(value, int | float) and math.isfinite(value) for value in values
            )
            if not numbers or len(values) != 3 or (name == "std" and min(values) <= 0):
                expected = "three numbers above 0" if name == "std" else "three numbers"
                raise RequestError(
                    f"preprocess: {name} is {values!r}; expected {expected}, for R, G and B of pixels in 0 to 1"
                )
            object.__setattr__(self, name, tuple(float(value) for value in values))  # JSON has lists

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; `from_json` reads them."""
        return to_plain(self)

    @classmethod
    def from_json(cls, value: Any) -> Preprocess:
        """Reads the result of `to_json`, or a user's {"size": 224, "resize": 256, ...}.

        Args:
            value: JSON object.

        Returns:
            The preprocessing.

        Raises:
            RequestError: A field is missing, unknown or out of range.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise RequestError(f"preprocess: found {value!r}; give an object with {', '.join(names)}")
        unknown = sorted(value.keys() - set(names))
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in value]
        if unknown or missing:
            problem = f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
            raise RequestError(f"preprocess: {problem}; its fields are {', '.join(names)}")
        return cls(**value)
