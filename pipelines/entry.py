"""What a model declares: its entry in the zoo and how it is quantized. Frozen, and validated on creation."""

from __future__ import annotations

import importlib
import re
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.errors import RequestError

OBSERVERS = ("auto", "minmax", "percentile", "mse", "kl")


@dataclass(frozen=True)
class QuantRecipe:
    """How one model becomes int8.

    observer: how activation ranges are chosen from the calibration samples: "minmax", "percentile" (99.99), "mse", "kl" (see
        `pipelines.observers`), or "auto": for each tensor the one of least quantization error.
    quantize_tables: store embedding tables that feed an int8 operator as uint8 rows with that operator's input scale.
    keep_float: regular expressions; an operator whose name matches one in full stays float.
    reduced_range: 7-bit weights, for CPUs without VNNI, whose u8 x s8 products saturate in pairwise 16-bit sums.
    dynamic: regular expressions; a Gemm or MatMul whose name matches one in full has its input's range taken at run time.
    symmetric: activations with negatives get zero point 128, which saves engines a correction and costs part of the range.

    Raises RequestError for an unknown observer or a broken expression.
    """

    observer: str = "auto"
    quantize_tables: bool = True
    keep_float: tuple[str, ...] = ()
    reduced_range: bool = False
    dynamic: tuple[str, ...] = ()
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.observer not in OBSERVERS:
            raise RequestError(f"unknown observer {self.observer!r}; choose one of {', '.join(OBSERVERS)}")
        for name in ("keep_float", "dynamic"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise RequestError(f"{name} is {patterns!r}; give a tuple of patterns")
            object.__setattr__(self, name, tuple(patterns))  # JSON has lists
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise RequestError(f"{name} pattern {pattern!r} is no regular expression: {error}") from error

    def keeps_float(self, name: str) -> bool:
        """Whether the operator called `name` is to stay float."""
        return any(re.fullmatch(pattern, name) for pattern in self.keep_float)

    def is_dynamic(self, name: str) -> bool:
        """Whether the input of the layer called `name` is to be quantized at run time."""
        return any(re.fullmatch(pattern, name) for pattern in self.dynamic)

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: its name, its task, and where its parts are.

    The parts are "module:attribute" strings, resolved on first use, so that looking at an entry loads neither torch nor tensorflow:

    train(data, output, *, config, resume, start_from, on_error) -> metrics: raw data to a folder with a checkpoint
    settings, finetune_settings: the dataclass instances that are train's `config` unless the user changes them
    freeze(folder) -> statistics: checkpoint to fp32.onnx
    rewrites(preprocessing) -> passes: what turns fp32.onnx into rewritten.onnx
    evaluate({"fp32": pipeline, "int8": pipeline}, data, on_error) -> metrics and differences
    checkpoint: the file of a trained folder that freeze starts from
    pipeline: class with preprocess / predict / postprocess, see `zoo.pipeline`
    native: (rewritten model, calibration table, recipe) -> (model for the native kernels, or None, and a report with "fold" and "reason");
        "" for a model that has no such form
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
    recipe: QuantRecipe = QuantRecipe()
    native: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"entry name {self.name!r} must be lower-case words with hyphens")
        parts = (self.train, self.settings, self.finetune_settings, self.freeze, self.rewrites, self.evaluate, self.pipeline)
        for part in (*parts, *([self.native] if self.native else [])):
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
