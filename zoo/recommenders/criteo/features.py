"""The preprocessing of Wide & Deep: hashed categories, and numbers by log1p and min-max scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo.data import BUCKETS, CATEGORICAL, NUMERIC, Counts, Rows
from zoo.recommenders.data.encoding import log1p_min_max
from zoo.recommenders.data.number_parsing import Floats

_FIXED = {
    "hash": "farmhash fingerprint64 mod buckets",
    "transform": "log1p, minmax",
}  # a model made otherwise is refused


@dataclass(frozen=True)
class Features:
    """The preprocessing that travels with a model: sizes, hash buckets, and per numeric column the training data's
    statistics.

    A number x becomes (clip(log1p(max(x, 0)), lo, hi) - lo) / (hi - lo): negative values count as 0, values beyond
    those of the training data as its extremes. A missing number becomes `fill` of its column, which lies in [0, 1] as
    well. A column that was constant or always missing in training is always 0, or `fill` where missing. Raises
    RequestError on impossible values.
    """

    lo: tuple[float, ...]
    hi: tuple[float, ...]
    fill: tuple[float, ...]
    numeric: int = NUMERIC
    categorical: int = CATEGORICAL
    buckets: int = BUCKETS

    def __post_init__(self) -> None:
        for name, low, high in (("numeric", 1, 10_000), ("categorical", 1, 10_000), ("buckets", 1, 2**31 - 1)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise RequestError(
                    f"broken features: found {name} {value!r}, wanted a whole number from {low} to {high}"
                )
        for name in ("lo", "hi", "fill"):
            values = getattr(self, name)
            if len(values) != self.numeric or not all(
                type(value) is float and 0 <= value < math.inf for value in values
            ):
                raise RequestError(
                    f"broken features: wanted {name} to hold {self.numeric} finite numbers, none negative"
                )
        if any(lo > hi for lo, hi in zip(self.lo, self.hi, strict=True)) or max(self.fill) > 1:
            raise RequestError("broken features: wanted lo <= hi and fill <= 1 in every column")

    @property
    def counts(self) -> Counts:
        """Keyword arguments for `read_rows`, so that rows are read the way this model wants them."""
        return Counts(numeric=self.numeric, categorical=self.categorical, buckets=self.buckets)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`; they come back exactly through `from_json`."""
        return {**_FIXED, **self.counts, "lo": list(self.lo), "hi": list(self.hi), "fill": list(self.fill)}

    @classmethod
    def from_json(cls, value: Any) -> Features:
        """The features that `to_json` described. Raises RequestError where a key is missing or holds something else."""
        if not isinstance(value, dict):
            raise RequestError(f"broken features: found {type(value).__name__}, wanted an object")
        if missing := [key for key in (*_FIXED, *Counts.__annotations__, "lo", "hi", "fill") if key not in value]:
            raise RequestError(f"broken features: {', '.join(missing)} missing")
        for key, wanted in _FIXED.items():
            if value[key] != wanted:
                raise RequestError(f"broken features: found {key} {value[key]!r}, wanted {wanted!r}")
        columns: dict[str, Any] = {key: value[key] for key in Counts.__annotations__}
        for key in ("lo", "hi", "fill"):
            if not isinstance(value[key], list):
                raise RequestError(f"broken features: found {key} {value[key]!r}, wanted a list")
            columns[key] = tuple(float(x) if type(x) is int else x for x in value[key])
        return cls(**columns)

    def normalize(self, numbers: npt.NDArray[np.floating[Any]]) -> Floats:
        """Raw numbers [n, numeric] (any float type, NaN = missing) to float32 [n, numeric] in [0, 1], C-contiguous."""
        if numbers.ndim != 2 or numbers.shape[1] != self.numeric:
            raise RequestError(f"found numbers of shape {numbers.shape}, wanted [n, {self.numeric}]")
        lo, hi, fill = self._bounds
        out = np.empty(numbers.shape, np.float32)
        for begin in range(0, len(out), 4096):  # rows at a time that stay in the cache
            values = log1p_min_max(numbers[begin : begin + 4096], lo, hi)
            out[begin : begin + 4096] = np.where(np.isnan(values), fill, values)
        return out

    @cached_property
    def _bounds(self) -> tuple[Floats, Floats, Floats]:
        """lo, hi and fill of each column, float32 [numeric]."""
        lo, hi, fill = (np.array(values, np.float32) for values in (self.lo, self.hi, self.fill))
        return lo, hi, fill

    def encode(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """The model's inputs: {"ids": int32 [n, categorical], "numbers": float32 [n, numeric] in [0, 1]},
        C-contiguous.
        """
        if (
            rows.ids.ndim != 2
            or rows.ids.shape[1] != self.categorical
            or (len(rows) and rows.ids.max() >= self.buckets)
        ):
            raise RequestError(
                f"wanted ids [n, {self.categorical}] below {self.buckets}: read the rows with read_rows(..., "
                "**features.counts)"
            )
        return {"ids": np.ascontiguousarray(rows.ids), "numbers": self.normalize(rows.numbers)}
