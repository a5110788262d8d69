"""Rows of a click log to a model's inputs, as its schema says: columns by name, in any order, in constant memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.clicks.hashing import hash_buckets
from zoo.clicks.logs import Log, open_logs
from zoo.clicks.native_reader import NativeReader, Parsed
from zoo.clicks.reading import BAD_SHARE, HOPELESS, ErrorLog, NoRow, Positions, timed
from zoo.clicks.schema import FEATURES, REGRESSION, Column, Schema

Floats = NDArray[np.float32]
LARGEST = 8.0  # standard deviations to which a "standard" number is clipped
_NO_BOUNDS = {"minimum": 0.0, "maximum": 1.0}
UNKNOWN = 0  # the id of a category that is none of its vocabulary


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows, encoded.

    ids: int32 [n, columns], see `Field`. numbers: float32 [n, numbers]. scales: float32 [n, lists of mean pooling], 1 /
    items, 0 for none. labels: float32 [n], 0 or 1; None where none were asked for. weights: float32 [n]. times: float64
    [n], seconds since 1970, or the position where there is no timestamp. index: int64 [n], 0-based position of each row
    in the whole input, rows left out counted.
    """

    ids: NDArray[np.int32]
    numbers: Floats
    scales: Floats
    labels: Floats | None
    weights: Floats
    times: NDArray[np.float64]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(*(None if each is None else each[rows] for each in self._arrays()))  # type: ignore[arg-type]

    def _arrays(self) -> tuple[Any, ...]:
        return self.ids, self.numbers, self.scales, self.labels, self.weights, self.times, self.index

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """One of several (at least one), in order."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(each._arrays() for each in parts), strict=True)
        joined: list[Any] = [None if each[0] is None else np.concatenate(each) for each in columns]
        return Rows(*joined)


@dataclass(frozen=True)
class Field:
    """What one category, or list of categories, becomes: `width` columns of the ids from `start` on, and a table.

    Ids of a table of `rows` rows: 0 an unknown value, from 1 on known values or hash buckets, the last one a missing
    value. In a list the last one fills the places that the row has no items for, and its row of the table is zeros; of
    max pooling they repeat the first item. Of the encoding "id" 0 stands for unknown and missing values alike, and is
    no item of a list; nor is it of a list that skips unknown values. scale: the column of `Rows.scales` for mean
    pooling, else -1.
    """

    column: Column
    start: int
    scale: int

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name

    @property
    def is_list(self) -> bool:
        """Whether a row has several values."""
        return self.column.kind == "categories"

    @property
    def width(self) -> int:
        """Columns of the ids."""
        return self.column.length if self.is_list else 1

    @property
    def rows(self) -> int:
        """Rows of the table."""
        encoding = self.column.encoding
        if encoding["type"] == "id":
            return int(encoding["rows"])
        return 2 + (int(encoding["buckets"]) if encoding["type"] == "hash" else len(encoding["values"]))

    @property
    def last(self) -> int:
        """The id of a missing value, or of a place without an item."""
        return 0 if self.column.encoding["type"] == "id" else self.rows - 1

    @cached_property
    def _values(self) -> pa.Array:
        return pa.array(self.column.encoding["values"], pa.string())

    def ids(self, texts: pa.Array) -> NDArray[np.int32]:
        """Ids of texts, int32 [n]; null is missing."""
        if self.column.encoding["type"] == "hash":
            found = hash_buckets(texts, int(self.column.encoding["buckets"])) + np.int32(1)
        elif self.column.encoding["type"] == "id":
            numbers = floats(texts)
            known = (numbers > 0) & (numbers < self.rows) & (numbers == np.floor(numbers))
            return np.where(known, numbers, 0).astype(np.int32)
        else:
            places = pc.index_in(texts, value_set=self._values, skip_nulls=True)
            found = places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32) + np.int32(1)
        if texts.null_count:
            found[texts.is_null().to_numpy(zero_copy_only=False)] = self.last
        return found

    def items(self, texts: pa.Array) -> tuple[NDArray[np.int32], Floats]:
        """Ids of lists, int32 [n, width], the last `width` items of each in order, and 1 / items, float32 [n].

        Spaces around an item do not count, an item without text is none.
        """
        lists = pc.split_pattern(texts, self.column.separator)
        counts = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        values = pc.utf8_trim_whitespace(lists.flatten())
        rows = np.repeat(np.arange(len(texts)), counts)
        some = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
        known = self.ids(values)
        if self.column.encoding["type"] == "id" or self.column.encoding.get("skip_unknown"):
            some &= known > 0
        rows, known = rows[some], known[some]
        counts = np.bincount(rows, minlength=len(texts))
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        place -= np.maximum(counts - self.width, 0)[rows]
        kept = place >= 0
        out = np.full((len(texts), self.width), self.last, np.int32)
        out[rows[kept], place[kept]] = known[kept]
        counts = np.minimum(counts, self.width)
        if self.column.pooling == "max":
            out = np.where(np.arange(self.width) < counts[:, None], out, out[:, :1])
        with np.errstate(divide="ignore"):
            return out, np.where(counts > 0, np.float32(1) / counts.astype(np.float32), np.float32(0))


@dataclass(frozen=True)
class Features:
    """The preprocessing that travels with a model: its schema, and what each column becomes.

    numbers: the columns of `Rows.numbers`, then, for those that had missing values when the schema was made, 1 where
    the value is missing; the value itself is then 0.
    """

    schema: Schema

    @classmethod
    def from_json(cls, preprocessing: Mapping[str, Any]) -> Features:
        """The features of a model's card. Raises RequestError where they are broken."""
        if "schema" not in preprocessing:
            raise RequestError("the card's preprocessing holds no schema; train or download the model again")
        return cls(Schema.from_json(preprocessing["schema"], "the schema in the card"))

    def to_json(self) -> dict[str, Any]:
        """Plain values for the card."""
        return {"schema": self.schema.to_json()}

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The categories, in the order of the schema."""
        found: list[Field] = []
        start = scale = 0
        for column in self.schema.of("category", "categories"):
            mean = column.pooling == "mean"
            found.append(Field(column, start, scale if mean else -1))
            start, scale = start + found[-1].width, scale + mean
        return tuple(found)

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """The columns of numbers."""
        return self.schema.of("number")

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Which of the numbers have a column that says whether they are missing."""
        return tuple(i for i, each in enumerate(self.numbers) if each.missing)

    @property
    def key(self) -> Field:
        """The category that tells items apart: the item's of most values. Raises RequestError for none."""
        fields = [each for each in self.fields if each.column.tower == "item" and not each.is_list]
        if not fields:
            raise RequestError(
                'the schema has no category of the tower item; give the item\'s id "tower": "item" (zoo schema LOG -o '
                "schema.json, then --schema schema.json)"
            )
        return max(fields, key=lambda each: max(each.rows, each.column.distinct))  # seldom seen ones may have no row

    @property
    def shape(self) -> tuple[int, int, int]:
        """Columns of ids, numbers and scales."""
        return (
            sum(each.width for each in self.fields),
            len(self.numbers) + len(self.gaps),
            sum(each.scale >= 0 for each in self.fields),
        )

    @property
    def inputs(self) -> dict[str, tuple[np.dtype[Any], tuple[int | None, ...]]]:
        """Name, dtype and shape of a model's inputs; those without a column are none."""
        names = {"ids": np.int32, "numbers": np.float32, "scales": np.float32}
        sizes = zip(names.items(), self.shape, strict=True)
        return {name: (np.dtype(kind), (None, width)) for (name, kind), width in sizes if width}

    @cached_property
    def last_ids(self) -> NDArray[np.int64]:
        """The largest id of each column of the ids, int64 [columns]."""
        return np.concatenate([np.zeros(0, np.int64), *(np.full(each.width, each.rows - 1) for each in self.fields)])

    def encode(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """The model's inputs, C-contiguous."""
        return {name: np.ascontiguousarray(getattr(rows, name)) for name in self.inputs}

    def read(
        self,
        source: Any,
        *,
        on_error: str = "raise",
        errors: ErrorLog | None = None,
        batch_rows: int = 65_536,
        seconds: defaultdict[str, float] | None = None,
        labelled: bool = False,
        tower: str = "",
    ) -> Iterator[Rows]:
        """Rows of a source, or of several in turn (see `open_logs`), `batch_rows` at a time, the last ones fewer.

        Columns are found by name; others may stand beside them. labelled: read labels and weights, too. tower: read
        the columns of this tower alone, those of the other as missing. A row with another number of columns, or (where
        labelled) another label than 0 and 1 or a weight below 0, raises RequestError; with on_error "skip" it is left
        out and counted in `errors`, unless nearly all of the first million rows are such. Values that are no number
        count as missing. Raises RequestError as well where a column is missing, and where there is no row.
        """
        if on_error not in ("raise", "skip"):
            raise RequestError(f"found on_error {on_error!r}, wanted raise or skip")
        log = None if on_error == "raise" else ErrorLog() if errors is None else errors
        logs = open_logs(source)
        for each in logs:
            self.require(each, tower, labelled)
        clock: defaultdict[str, float] = defaultdict(float) if seconds is None else seconds
        return self._batches(logs, batch_rows, log, clock, labelled, tower)

    def require(self, log: Log, tower: str = "", labelled: bool = False) -> None:
        """Raises RequestError for a log that lacks columns, of one tower or, where `tower` is empty, of all."""
        wanted = [each.name for each in self.schema.of(*FEATURES) if tower in ("", each.tower)]
        wanted += [each.name for each in self.schema.of("label", "weight") if labelled]
        if missing := [name for name in wanted if name not in log.columns]:
            raise RequestError(
                f"{log.path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; found "
                f"{', '.join(log.columns)[:200]}"
            )

    def _batches(
        self,
        logs: Sequence[Log],
        size: int,
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labelled: bool,
        tower: str,
    ) -> Iterator[Rows]:
        parts: list[Rows] = []
        count = start = 0
        for log in logs:
            positions = Positions(start)
            for rows in self._encoded(log, positions, errors, seconds, labelled, tower, size):
                parts.append(rows)
                count += len(rows)
                if count >= size:
                    joined, whole = Rows.concatenate(parts), count - count % size
                    yield from (joined[begin : begin + size] for begin in range(0, whole, size))
                    parts, count = [joined[whole:]], count - whole
            start = positions.end
        if not parts:
            said = f"found no row to use: {errors or 'the input holds only its header'}"
            raise NoRow(said, errors.total if errors else 0)
        if count:
            yield Rows.concatenate(parts)

    def _encoded(
        self,
        log: Log,
        positions: Positions,
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labelled: bool,
        tower: str,
        size: int,
    ) -> Iterator[Rows]:
        kinds = (*FEATURES, "timestamp", *(("label", "weight") if labelled else ()))
        known = [each for each in self.schema.of(*kinds) if each.kind not in FEATURES or tower in ("", each.tower)]
        names = [each.name for each in known if each.name in log.columns]

        def bad(row: int, kind: str, message: str) -> None:
            assert errors is not None
            errors.add(kind, message)
            positions.leave_out(row)

        tell = None if errors is None else bad
        reader = None if tower else NativeReader.of(self, log, names)
        batches = (
            timed(log.batches(names, tell), seconds, "read") if reader is None else reader.batches(tell, seconds, size)
        )
        for batch in batches:
            if isinstance(batch, Parsed):
                columns, rows = {}, _placed(batch, positions.take(len(batch.ids)))
            else:
                columns = dict(zip(names, batch.columns, strict=True))
                rows = self.encode_columns(columns, positions.take(batch.num_rows), labelled)
            if columns and labelled and (faults := _faults(rows)):
                _report(faults, columns, self.schema, f"{log.path}", errors)
                rows = rows[np.setdiff1d(np.arange(len(rows)), [row for row, _ in faults])]
            if errors is not None and errors.total >= HOPELESS and errors.total > BAD_SHARE * positions.end:
                raise RequestError(f"nearly no row can be used: {errors}")
            if len(rows):
                yield rows

    def scaled(self, at: int, x: NDArray[np.float64]) -> Any:
        """Values of the number `at` as `zoo.clicks.schema.ENCODINGS` says, NaN where missing: float64 [n] to [n]."""
        encoding = self.numbers[at].encoding
        match encoding["type"]:
            case "value":
                return x
            case "standard":
                return np.clip((x - encoding["mean"]) / encoding["deviation"], -LARGEST, LARGEST)
            case "min-max":
                return np.clip((x - encoding["minimum"]) / (encoding["maximum"] - encoding["minimum"]), 0, 1)
            case "log1p":
                most = np.log1p(encoding["maximum"] - encoding["minimum"])
                return np.clip(np.log1p(np.maximum(x - encoding["minimum"], 0)) / most, 0, 1)
            case _:
                points = np.asarray(encoding["quantiles"], np.float64)
                found = np.interp(x, points, np.linspace(0, 1, len(points)))
                return np.where(np.isnan(x), np.nan, found)

    def scaled_mixed(self, columns: NDArray[np.int64], x: NDArray[np.float64]) -> Any:
        """The same of a value of the number `columns[i]` each, float64 [n] to [n]."""
        logs, low, most = self._log_bounds
        if logs.all():  # all of them at once
            return np.clip(np.log1p(np.maximum(x - low[columns], 0)) / most[columns], 0, 1)
        found, some = np.empty_like(x), logs[columns]
        of = columns[some]
        found[some] = np.clip(np.log1p(np.maximum(x[some] - low[of], 0)) / most[of], 0, 1)
        for at in np.flatnonzero(~logs):
            some = columns == at
            found[some] = self.scaled(int(at), x[some])
        return found

    @cached_property
    def _log_bounds(self) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        """Of every number, whether its encoding is log1p; and its minimum and logarithm of the maximum, where it is."""
        logs = np.array([each.encoding["type"] == "log1p" for each in self.numbers], bool)
        bounds = [each.encoding if log else _NO_BOUNDS for each, log in zip(self.numbers, logs, strict=True)]
        low = np.array([each["minimum"] for each in bounds], np.float64)
        return logs, low, np.array([np.log1p(each["maximum"] - each["minimum"]) for each in bounds], np.float64)

    def scaled_whole(self, start: int, stop: int) -> Floats:
        """What the whole numbers from `start` to below `stop` become, float32 [numbers, stop - start]; made once."""
        if (tables := self._tables.get((start, stop))) is None:
            x = np.arange(start, stop, dtype=np.float64)
            found = [self.scaled(at, x).astype(np.float32) for at in range(len(self.numbers))]
            tables = self._tables[start, stop] = np.array(found, np.float32).reshape(len(found), len(x))
        return tables

    @cached_property
    def _tables(self) -> dict[tuple[int, int], Floats]:
        return {}

    def encode_columns(self, columns: Mapping[str, pa.Array], index: NDArray[np.int64], labelled: bool) -> Rows:
        """n rows of text columns by name, null where missing, as are features whose column is not there. index: their
        positions, int64 [n]. Labels and weights that are none are NaN.
        """
        count, (width, numbers, lists) = len(index), self.shape
        absent = pa.nulls(count, pa.string())
        columns = {**dict.fromkeys((each.name for each in self.schema.of(*FEATURES)), absent), **columns}
        ids, scales = np.empty((count, width), np.int32), np.empty((count, lists), np.float32)
        for field in self.fields:
            if field.is_list:
                found, scale = field.items(columns[field.name])
                ids[:, field.start : field.start + field.width] = found
                if field.scale >= 0:
                    scales[:, field.scale] = scale
            else:
                ids[:, field.start] = field.ids(columns[field.name])
        values = np.zeros((count, numbers), np.float32)
        for at, column in enumerate(self.numbers):
            values[:, at] = self.scaled(at, floats(columns[column.name]))
        for at, which in enumerate(self.gaps):
            values[:, len(self.numbers) + at] = np.isnan(values[:, which])
        labels, weights = None, np.ones(count, np.float32)
        if labelled:
            (label,) = self.schema.of("label")
            labels = floats(columns[label.name]).astype(np.float32)
            for each in self.schema.of("weight"):
                weights = floats(columns[each.name]).astype(np.float32)
        times = index.astype(np.float64)
        for each in self.schema.of("timestamp"):
            if each.name in columns:
                times = seconds_since_1970(columns[each.name], each.unit)
        return Rows(ids, np.nan_to_num(values, copy=False), scales, labels, weights, times, index)


def floats(texts: pa.Array) -> NDArray[np.float64]:
    """Texts as numbers, float64 [n]; NaN for null, for what is no number, and for infinity."""
    try:
        found = texts.cast(pa.float64())
    except pa.ArrowInvalid:
        trimmed = pc.utf8_trim_whitespace(texts)
        is_number = pc.match_substring_regex(trimmed, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        found = pc.if_else(is_number, trimmed, pa.scalar(None, pa.string())).cast(pa.float64())
    values = found.to_numpy(zero_copy_only=False).astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def seconds_since_1970(texts: pa.Array, unit: str) -> NDArray[np.float64]:
    """Timestamps, float64 [n]; those that are none as before all others. unit: "s", "ms", or "text" for ISO 8601, UTC
    where it has no zone.
    """
    if unit != "text":
        return np.nan_to_num(floats(texts) / (1000 if unit == "ms" else 1), nan=-np.inf)
    texts = pc.replace_substring_regex(texts, r"(:\d\d\.\d{6})\d{1,3}", r"\1")  # nanoseconds, as Arrow writes them
    time = r"([01]\d|2[0-3]):[0-5]\d"
    is_time = pc.match_substring_regex(
        texts,
        rf"^\d{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
        rf"([T ]{time}(:[0-5]\d(\.\d{{1,6}})?)?(Z|[+-]([01]\d|2[0-3]):?[0-5]\d)?)?$",
    )
    whole = pc.replace_substring_regex(texts, r"^(.{10})$", r"\1T00:00Z")
    whole = pc.replace_substring_regex(whole, r"^(.{10}[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)$", r"\1Z")
    whole = pc.if_else(is_time, whole, pa.scalar(None, pa.string()))
    try:
        times = whole.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:  # the 30th of February
        times = pa.array([_instant(each) for each in whole], pa.timestamp("us", "UTC"))
    found = times.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.float64) / 1e6
    return np.asarray(np.nan_to_num(found, nan=-np.inf))


def _instant(text: pa.Scalar) -> pa.Scalar:
    try:
        return text.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:
        return pa.scalar(None, pa.timestamp("us", "UTC"))


def _placed(parsed: Parsed, index: NDArray[np.int64]) -> Rows:
    """Rows at these positions."""
    ids, numbers, scales, labels, weights, times = parsed
    return Rows(
        ids,
        numbers,
        scales,
        labels,
        np.ones(len(ids), np.float32) if weights is None else weights,
        index.astype(np.float64) if times is None else times,
        index,
    )


def _faults(rows: Rows) -> list[tuple[int, str]]:
    """Rows without a usable label or weight: (row, kind), in order."""
    assert rows.labels is not None
    faults = [(int(row), "label") for row in np.flatnonzero((rows.labels != 0) & (rows.labels != 1))]
    known = {row for row, _ in faults}
    faults += [(int(row), "weight") for row in np.flatnonzero(~(rows.weights >= 0)) if row not in known]
    return sorted(faults)


def _report(
    faults: list[tuple[int, str]], columns: Mapping[str, pa.Array], schema: Schema, name: str, errors: ErrorLog | None
) -> None:
    """Count rows left out. Raises RequestError for the first where none may be."""
    wanted = {"label": "0 or 1", "weight": "0 or more"}
    for row, kind in faults:
        (column,) = schema.of(kind)
        text = columns[column.name][row].as_py()
        message = f"{name}: found the {kind} {column.name} {text!r}, wanted {wanted[kind]}"
        if errors is None:
            raise RequestError(f"{message}; {REGRESSION}" if kind == "label" else message)
        errors.add(kind, message)
