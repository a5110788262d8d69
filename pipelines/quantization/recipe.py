"""Options of post-training quantization: a frozen dataclass, validated on creation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.plain import to_plain

OBSERVERS = ("auto", "minmax", "percentile", "mse", "kl")


@dataclass(frozen=True)
class QuantRecipe:
    """Options of the post-training quantization of one model.

    Attributes:
        observer: Method that chooses activation ranges from calibration samples: "minmax", "percentile" (99.99), "mse",
            "kl" (see `pipelines.quantization.calibration.observers`), or "auto", which takes the method of least
            quantization error for each tensor.
        quantize_tables: Store embedding tables as uint8 with the qparams of the int8 operator that reads them, or else
            as int8 with a scale per row (weight-only).
        keep_float: Regular expressions; an operator whose full name matches one stays float32.
        reduced_range: Use 7-bit weights, for CPUs without VNNI, where u8 x s8 products saturate in pairwise 16-bit
            sums.
        dynamic: Regular expressions; a Gemm or MatMul whose full name matches one is quantized dynamically: its input
            gets qparams at run time.
        symmetric: Give activations with negatives zero point 128. Engines then skip a correction, at the price of part
            of the range.
        search: Search channel equalization between convolutions and between linear layers or a LayerNormalization and
            linear layers (SmoothQuant), weight clipping and activation ranges, by the SQNR of the outputs on the
            calibration samples. Takes minutes for a large model.
        correct: Apply GPTQ (rounding errors of weights cancel on the calibration samples) and bias correction.
        bound: Largest allowed change of a value of the first output on the calibration samples, such as a probability.
            Layers that exceed it stay float32 (`pipelines.quantization.algorithms.error_bound`). 0: no bound.
        smooth: Scale down outlier channels before the linear layers that read them (`smooth_channels`), as BERT needs
            it. `auto_calibrate` decides this automatically.

        only_faster: Keep operators float32 that int8 does not make faster: small products of two activations, such as
            attention over few positions (`pipelines.quantization.qdq.layers.small_product`), gates of rows (LSTM) and
            depthwise convolutions between float32 operators (`gates_rows` and `deselect` in
            `pipelines.quantization.qdq.elementwise`).
        tie_tables: Store a table that a Gather reads and a layer multiplies by (tied embeddings) as one int8 matrix.

    Raises:
        RequestError: The observer is unknown, a regular expression is invalid, or the bound is negative.
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
    tie_tables: bool = False
    only_faster: bool = False

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
        """Returns whether an operator stays float32.

        Args:
            name: Name of an operator.
        """
        return bool(matching(self.keep_float, (name,)))

    def is_dynamic(self, name: str) -> bool:
        """Returns whether the input of a layer is quantized at run time.

        Args:
            name: Name of a layer.
        """
        return bool(matching(self.dynamic, (name,)))

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as plain JSON values; unset options that older files lack are left out."""
        unset = {name for name in ("bound", "tie_tables", "only_faster") if not getattr(self, name)}
        return {name: value for name, value in to_plain(self).items() if name not in unset}

    def same_but_observer(self, other: Mapping[str, Any], names: Collection[str] = ()) -> bool:
        """Compares two recipes apart from `observer` and `search`, which only affect calibration tables.

        Args:
            other: Result of `to_json`, possibly of an older version.
            names: Operators of a graph: patterns are equal if they match the same ones. Without: if they are the same.

        Returns:
            Whether the remaining options are equal.
        """
        both = []
        for options in (self.to_json(), {"smooth": False, **other}):  # older tables have no `smooth`
            options |= {"observer": "", "search": False}
            if names:
                options |= {kind: matching(options.get(kind, ()), names) for kind in ("keep_float", "dynamic")}
            both.append(options)
        return both[0] == both[1]


def matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Returns the names of operators that patterns of a recipe match.

    Args:
        patterns: Regular expressions of whole names.
        names: Names of operators.
    """
    patterns = tuple(patterns)
    return {name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)}
