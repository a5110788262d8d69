"""Preprocessing of a model that came as a TensorFlow graph: which column of a log is which of its features, and what
becomes of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo.data import Counts, Rows
from zoo.recommenders.criteo.features import Features

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

HASH = "farmhash fingerprint64 mod buckets, missing = buckets"
ELEMENTWISE: dict[
    str, Callable[..., Any]
] = {  # of one number, or of a number and a constant; "from" has the constant in front
    "add": np.add,
    "subtract": np.subtract,
    "subtract from": lambda x, c: c - x,
    "multiply": np.multiply,
    "divide": np.divide,
    "divide from": lambda x, c: c / x,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "negative": np.negative,
    "absolute": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sign": np.sign,
    "floor": np.floor,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "relu": lambda x: np.maximum(x, np.float32(0)),
}
WITH_CONSTANT = ("add", "subtract", "subtract from", "multiply", "divide", "divide from", "maximum", "minimum", "power")
Transform = tuple[str] | tuple[str, float]


def apply(transform: tuple[Any, ...], x: Array) -> Floats:
    """A transform of one number on float32 values, as TensorFlow computes it; its constant may be an array that fits
    theirs.
    """
    name, *constant = transform
    with np.errstate(all="ignore"):
        found: Floats = ELEMENTWISE[name](x, *map(np.float32, constant)).astype(np.float32)
    return found


@dataclass(frozen=True, order=True)
class Number:
    """One column of the input `numbers`: a number of the log, 0-based among its numbers, after `steps`, as (value - lo)
    / (hi - lo).

    lo and hi are finite; equal ones stand for a span of 1. Nothing is clipped: the graph has the same output for any
    number.
    """

    column: int
    steps: tuple[Transform, ...] = ()
    lo: float = 0.0
    hi: float = 1.0

    @property
    def span(self) -> float:
        """What [0, 1] stands for."""
        return self.hi - self.lo if self.hi > self.lo else 1.0

    def value(self, raw: Floats) -> Floats:
        """The graph's own value of a raw number."""
        for step in self.steps:
            raw = apply(step, raw)
        return raw


@dataclass(frozen=True)
class MappedFeatures:
    """What `Features` is to a model trained here, to one that came as a TensorFlow graph
    (`zoo.recommenders.importers.tensorflow.columns`).

    A row of a log is an optional label, then the numbers `numeric_columns`, then the categories `categorical_columns`,
    by their names in the graph. fill: what a missing number is to the graph, one of each number. buckets: of each
    category; the id of a missing one is the number of its buckets, one past the last. numbers: the columns of the
    graph's input of that name. Raises RequestError on impossible values.
    """

    numeric_columns: tuple[str, ...]
    fill: tuple[float, ...]
    categorical_columns: tuple[str, ...]
    buckets: tuple[int, ...]
    numbers: tuple[Number, ...]

    def __post_init__(self) -> None:
        def fail(why: str) -> None:
            raise RequestError(f"broken features: {why}")

        if (
            len(self.fill) != len(self.numeric_columns)
            or len(self.buckets) != len(self.categorical_columns)
            or not self.buckets
        ):
            fail("wanted a fill for every number, and buckets for every category, of which there is at least one")
        if not all(isinstance(each, str) for each in (*self.numeric_columns, *self.categorical_columns)):
            fail("wanted texts as names of columns")
        if not all(type(each) is int and 1 <= each < 2**31 - 1 for each in self.buckets):
            fail(f"found buckets {self.buckets}, wanted whole numbers from 1 to {2**31 - 2}")
        if not all(type(each) is float and math.isfinite(each) for each in self.fill):
            fail(f"found fill {self.fill}, wanted finite numbers")
        for each in self.numbers:
            if type(each.column) is not int or not 0 <= each.column < len(self.numeric_columns):
                fail(f"found a number of column {each.column!r}, wanted 0 to {len(self.numeric_columns) - 1}")
            if (
                not all(type(bound) is float and math.isfinite(bound) for bound in (each.lo, each.hi))
                or each.lo > each.hi
            ):
                fail(f"found a number from {each.lo!r} to {each.hi!r}, wanted finite bounds in order")
            for name, *constant in each.steps:
                if (
                    name not in ELEMENTWISE
                    or len(constant) != (name in WITH_CONSTANT)
                    or not all(type(c) is float for c in constant)
                ):
                    fail(
                        f"found the step {[name, *constant]}, wanted one of {', '.join(ELEMENTWISE)} with its constant"
                    )

    @property
    def numeric(self) -> int:
        """How many numbers a row of the log has."""
        return len(self.numeric_columns)

    @property
    def categorical(self) -> int:
        """How many categories a row of the log has."""
        return len(self.categorical_columns)

    @property
    def counts(self) -> Counts:
        """Keyword arguments for `read_rows`."""
        return Counts(numeric=self.numeric, categorical=self.categorical, buckets=self.buckets)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`; they come back exactly through `from_json`."""
        return {"hash": HASH, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> MappedFeatures:
        """The features that `to_json` described. Raises RequestError where a key is missing or holds something else."""
        try:
            if value["hash"] != HASH:
                raise RequestError(f"broken features: found hash {value['hash']!r}, wanted {HASH!r}")
            numbers = tuple(
                Number(each["column"], tuple(map(tuple, each["steps"])), float(each["lo"]), float(each["hi"]))
                for each in value["numbers"]
            )
            names, fields = tuple(value["numeric_columns"]), tuple(value["categorical_columns"])
            return cls(names, tuple(map(float, value["fill"])), fields, tuple(value["buckets"]), numbers)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"broken features: {type(error).__name__} {error}; freeze the graph again") from error

    def raw(self, numbers: Floats) -> Floats:
        """Numbers as read, float32 [n, numeric], NaN = missing, as the graph is to see them: the missing ones
        filled.
        """
        return np.where(np.isnan(numbers), np.array(self.fill, np.float32), numbers)

    def normalize(self, numbers: Floats) -> Floats:
        """Raw numbers, float32 [n, numeric], NaN = missing, to the input `numbers`, float32 [n, len(self.numbers)],
        C-contiguous.
        """
        if numbers.ndim != 2 or numbers.shape[1] != self.numeric:
            raise RequestError(f"found numbers of shape {numbers.shape}, wanted [n, {self.numeric}]")
        out = np.empty((len(numbers), len(self.numbers)), np.float32)
        raw = self.raw(numbers)
        for i, each in enumerate(self.numbers):
            out[:, i] = (each.value(raw[:, each.column]) - np.float32(each.lo)) / np.float32(each.span)
        return out

    def encode(self, rows: Rows) -> dict[str, Array]:
        """The model's inputs: {"ids": int32 [n, categorical], "numbers": float32}, C-contiguous; no numbers where the
        graph reads none.
        """
        if (
            rows.ids.ndim != 2
            or rows.ids.shape[1] != self.categorical
            or (len(rows) and (rows.ids > np.array(self.buckets)).any())
        ):
            raise RequestError(
                f"wanted ids [n, {self.categorical}] below their buckets: read them with read_rows(..., "
                "**features.counts)"
            )
        numbers = {"numbers": self.normalize(rows.numbers)} if self.numbers else {}
        return {"ids": np.ascontiguousarray(rows.ids), **numbers}

    def fitted(self, batches: Iterable[Rows]) -> MappedFeatures:
        """These features with lo and hi of every number as `batches` have it, infinities left out; memory does not grow
        with them.
        """
        lo, hi = (np.full(len(self.numbers), bound) for bound in (np.inf, -np.inf))
        for rows in batches:
            raw = self.raw(rows.numbers)
            for i, each in enumerate(self.numbers):
                values = each.value(raw[:, each.column])
                values = values[np.isfinite(values)]
                lo[i], hi[i] = min(lo[i], values.min(initial=np.inf)), max(hi[i], values.max(initial=-np.inf))
        known = np.isfinite(lo)
        bounds = zip(self.numbers, np.where(known, lo, 0.0).tolist(), np.where(known, hi, 1.0).tolist(), strict=True)
        numbers = tuple(Number(each.column, each.steps, low, high) for each, low, high in bounds)
        return MappedFeatures(self.numeric_columns, self.fill, self.categorical_columns, self.buckets, numbers)


def features_of(preprocessing: Mapping[str, Any]) -> Features | MappedFeatures:
    """The features that a model's card describes. Raises RequestError where they are broken."""
    return (
        MappedFeatures.from_json(preprocessing)
        if "numeric_columns" in preprocessing
        else Features.from_json(preprocessing)
    )


def last_ids(features: Features | MappedFeatures) -> Array:
    """The largest id of each category, int64 [categorical]."""
    if isinstance(features, MappedFeatures):
        return np.array(features.buckets)
    return np.full(features.categorical, features.buckets - 1)


def inputs_of(features: Features | MappedFeatures) -> Mapping[str, tuple[np.dtype[Any], Sequence[int | None]]]:
    """Name, dtype and shape of a model's inputs."""
    width = len(features.numbers) if isinstance(features, MappedFeatures) else features.numeric
    found = {
        "ids": (np.dtype(np.int32), (None, features.categorical)),
        "numbers": (np.dtype(np.float32), (None, width)),
    }
    return found if width else {"ids": found["ids"]}


def ordered(
    numeric: Sequence[str], categorical: Sequence[str], columns: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Names of numbers and categories in the order of a row: that of `columns`, of the whole row, or their natural one
    (I2 before I10).

    Raises RequestError that names all columns that are missing, unknown, named twice or out of place.
    """
    if columns is None:
        return sorted(numeric, key=natural), sorted(categorical, key=natural)
    rest = [
        each
        for i, each in enumerate(columns)
        if not (i == 0 and each == "label" and each not in (*numeric, *categorical))
    ]
    known = {**dict.fromkeys(numeric, "number"), **dict.fromkeys(categorical, "category")}
    faults = [f"{each} is no column of the graph" for each in dict.fromkeys(rest) if each not in known]
    faults += [f"{each} is named twice" for each in dict.fromkeys(rest) if rest.count(each) > 1]
    faults += [f"the graph's {kind} {each} is missing" for each, kind in known.items() if each not in rest]
    last = max((i for i, each in enumerate(rest) if known.get(each) == "number"), default=-1)
    faults += [
        f"the category {each} stands in front of a number"
        for each in rest[: max(last, 0)]
        if known.get(each) == "category"
    ]
    if faults:
        raise RequestError(
            f"--columns does not fit the graph: {'; '.join(faults)}; "
            f"a row is a label (optional), then the numbers {_some(numeric)}, then the categories "
            f"{_some(categorical)}, each in any order"
        )
    return [each for each in rest if each in numeric], [each for each in rest if each in categorical]


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, numbers inside them as numbers."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in re.split(r"(\d+)", name) if each]


def _some(names: Sequence[str]) -> str:
    names = sorted(names, key=natural)
    return ", ".join(names) if len(names) < 30 else f"{', '.join(names[:28])}, ... {names[-1]}"
