"""What a model declares: its entry in the zoo and how it is quantized. Frozen, and validated on creation."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import QuantRecipe

INTERPOLATIONS = ("bilinear", "bicubic")
CHANNELS = ("RGB", "BGR")
MAX_SIDE = 8192  # pixels of a network's input or a resize


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the input of a network: RGB, short side to `resize`, centre crop of `size` x `size`, normalized by channel.

    size: side of the network's square input, in pixels.
    resize: the short side before the crop, in pixels, at least `size`; 0 squeezes the whole image to size x size.
    interpolation: "bilinear" or "bicubic", antialiased, as Pillow's `Image.resize` computes them.
    mean, std: of pixels in 0..1, in the order R, G, B, as torchvision and timm give them: the network sees (pixel / 255 - mean) / std.
    channels: "RGB" or "BGR", the order that the network's first convolution sees.
    scaled_decode: large JPEGs are decoded at half their size or less, to no less than twice what the resize makes of them: quicker, and
        other pixels than those of a full decode.

    Raises RequestError for values that make no sense.
    """

    size: int
    resize: int = 0
    interpolation: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channels: str = "RGB"
    scaled_decode: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("interpolation", INTERPOLATIONS), ("channels", CHANNELS), ("scaled_decode", (False, True))):
            if getattr(self, name) not in choices:
                raise RequestError(f"preprocess: unknown {name} {getattr(self, name)!r}; choose one of {', '.join(map(str, choices))}")
        for name in ("size", "resize"):
            if type(getattr(self, name)) is not int:
                raise RequestError(f"preprocess: {name} is {getattr(self, name)!r}; give a whole number of pixels")
        if not 1 <= self.size <= MAX_SIDE or (self.resize and not self.size <= self.resize <= MAX_SIDE):
            raise RequestError(
                f"preprocess: size {self.size}, resize {self.resize}; size is 1 to {MAX_SIDE}, resize 0 (squeeze) or size to {MAX_SIDE}"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            numbers = isinstance(values, list | tuple) and all(isinstance(each, int | float) and math.isfinite(each) for each in values)
            if not numbers or len(values) != 3 or (name == "std" and min(values) <= 0):
                wanted = "three numbers above 0" if name == "std" else "three numbers"
                raise RequestError(f"preprocess: {name} is {values!r}; give {wanted}, for R, G and B of pixels in 0 to 1")
            object.__setattr__(self, name, tuple(float(each) for each in values))  # JSON has lists

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Any) -> Preprocess:
        """Read what `to_json` wrote, or a person: {"size": 224, "resize": 256, ...}. Raises RequestError for what is missing or unknown."""
        names = [each.name for each in fields(cls)]
        if not isinstance(value, Mapping):
            raise RequestError(f"preprocess: found {value!r}; give an object with {', '.join(names)}")
        unknown = sorted(value.keys() - set(names))
        missing = [each.name for each in fields(cls) if each.default is MISSING and each.name not in value]
        if unknown or missing:
            found = f"unknown {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
            raise RequestError(f"preprocess: {found}; its fields are {', '.join(names)}")
        return cls(**value)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: its name, its task, and where its parts are.

    The parts are "module:attribute" strings, resolved on first use, so that looking at an entry loads neither torch nor tensorflow:

    train(data, output, *, config, resume, start_from, on_error) -> metrics: raw data to a folder with a checkpoint
    settings, finetune_settings: the dataclass instances that are train's `config` unless the user changes them
    freeze(folder) -> statistics: checkpoint to fp32.onnx
    rewrites(preprocessing) -> passes: what turns fp32.onnx into rewritten.onnx
    evaluate({"fp32": pipeline, "int8": pipeline, ...}, data, on_error) -> metrics and differences
    checkpoint: the file of a trained folder that freeze starts from
    pipeline: class with preprocess / predict / postprocess, see `zoo.pipeline`
    native: (rewritten model, calibration table, recipe) -> (model for the native kernels, or None, and a report with "fold" and "reason");
        "" for a model that has no such form
    from_graph(path, data, output, *, columns, output_node, on_error) -> details of a card: a frozen TensorFlow graph from elsewhere, with
        rows to calibrate on, to a folder that freeze starts from; "" for a model without one
    harness(pipelines, data, *, scenario, count, least, price_per_hour) -> figures: the quality, then the time from raw input to results,
        one sample after the other or in a stream; "" for a model without one
    """

    name: str
    title: str
    task: str
    train: str
    settings: str
    finetune_settings: str
    freeze: str
    rewrites: str
    evaluate: str
    pipeline: str
    checkpoint: str
    recipe: QuantRecipe = field(default_factory=QuantRecipe)
    native: str = ""
    harness: str = ""
    from_graph: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"entry name {self.name!r} must be lower-case words with hyphens")
        parts = (self.train, self.settings, self.finetune_settings, self.freeze, self.rewrites, self.evaluate, self.pipeline)
        for part in (*parts, *filter(None, (self.native, self.harness, self.from_graph))):
            if part.count(":") != 1:
                raise ValueError(f"{self.name}: {part!r} is not 'module:attribute'")

    def part(self, name: str) -> Any:
        """Import and return one of the parts. Raises RequestError where a library it needs is not installed."""
        module, attribute = str(getattr(self, name)).split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("zoo", "pipelines"):
                raise
            raise RequestError(
                f"{name} of {self.name} needs {error.name}, which is not installed; run: pip install 'int8-zoo[train]'"
            ) from error
