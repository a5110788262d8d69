"""The quantization recipe of a model. Frozen, and validated on creation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.plain import to_plain

OBSERVERS = ("auto", "minmax", "percentile", "mse", "kl")


@dataclass(frozen=True)
class QuantRecipe:
    """The options of post-training quantization of one model.

    observer: how activation ranges are chosen from the calibration samples: "minmax", "percentile" (99.99), "mse", "kl"
        (see `pipelines.quantization.calibration.observers`), or "auto": for each tensor the one of least quantization
        error.
    quantize_tables: store embedding tables in uint8 with the input qparams of the int8 operator that they feed, else in
        int8 with a scale per row (weight-only).
    keep_float: regular expressions; an operator whose name matches one in full stays float32.
    reduced_range: 7-bit weights, for CPUs without VNNI, whose u8 x s8 products saturate in pairwise 16-bit sums.
    dynamic: regular expressions; a Gemm or MatMul whose name matches one in full has its input quantized
        at run time (dynamic quantization).
    symmetric: activations with negatives get zero point 128, which saves engines a correction and costs part of the
        range.
    search: equalize channels between convolutions and between linear layers or a LayerNormalization and linear layers
        (SmoothQuant), clip weights and choose other ranges where the outputs on the calibration samples say that it
        helps (minutes for a large model).
    smooth: scale outlier channels down before the linear layers that read them (`smooth_channels`), as BERT needs it;
        what brings no recipe of its own is smoothed where that wins (`best_table`).
    correct: GPTQ, weights rounded so that their errors cancel on the calibration samples, and bias correction, shifts
        of channel means taken out of the biases.
    bound: the most that int8 may move a number of the first output on the calibration samples, such as a probability;
        layers that move it further stay float32 (`pipelines.quantization.algorithms.error_bound`). 0: no bound.

    Raises RequestError for an unknown observer, a broken expression or a bound below 0.
    """

    observer: str = "auto"
    quantize_tables: bool = True
    keep_float: tuple[str, ...] = ()
    reduced_range: bool = False
    dynamic: tuple[str, ...] = ()
    symmetric: bool = False
    search: bool = False
    correct: bool = True
    bound: float = 0.0
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.observer not in OBSERVERS:
            raise RequestError(f"unknown observer {self.observer!r}; choose one of {', '.join(OBSERVERS)}")
        if not self.bound >= 0:
            raise RequestError(f"bound is {self.bound}; give 0 or more")
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
        """The recipe as plain JSON values; without `bound` where there is none, as before there were such."""
        found = to_plain(self)
        return found if self.bound else {name: each for name, each in found.items() if name != "bound"}

    def same_but_observer(self, other: Mapping[str, Any]) -> bool:
        """Whether `other`, from `to_json`, is this recipe but for `observer` and `search`, which only tables depend
        on.
        """
        aside = {"observer": "", "search": False}
        return {**self.to_json(), **aside} == {
            "smooth": False,
            **other,
            **aside,
        }  # older tables do not tell of smoothing
