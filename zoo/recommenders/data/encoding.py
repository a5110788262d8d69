"""Encodes text columns of a click log as the inputs of a model, according to the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zoo.recommenders.data.cell_values import LIST, canonical, parse_floats
from zoo.recommenders.data.columns import dense, times
from zoo.recommenders.data.columns.gaps import PlacedItems, gap_ids
from zoo.recommenders.data.columns.label_values import label_values
from zoo.recommenders.data.hashing import buckets_of, fingerprints, hash_buckets
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.data.transforms import encoded, fill_of, log1p_min_max, log1p_scaled

Floats = NDArray[np.float32]
UNKNOWN = 0  # the id of a category that is none of its vocabulary


@dataclass(frozen=True, eq=False)
class Rows:
    """n encoded rows.

    Attributes:
        ids: Table rows of the categories, int32 [n, columns], see `Field`.
        numbers: Scaled numbers, float32 [n, numbers].
        scales: 1 / number of items for every list with mean pooling, 0 for empty lists; float32 [n, lists].
        labels: 0 or 1, float32 [n]; of several labels float32 [n, labels], NaN where missing or not defined; None if
            no labels were read.
        weights: Sample weights, float32 [n].
        times: Seconds since 1970, or the position of the row if there is no timestamp; float64 [n].
        index: 0-based position of the row in the whole input, counting the rows left out; int64 [n].
        kept: Texts of further columns of the log, None where missing, object [n, columns]; None if none were read.
    """

    ids: NDArray[np.int32]
    numbers: Floats
    scales: Floats
    labels: Floats | None
    weights: Floats
    times: NDArray[np.float64]
    index: NDArray[np.int64]
    kept: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(*(None if array is None else array[rows] for array in self._arrays()))  # type: ignore[arg-type]

    def _arrays(self) -> tuple[Any, ...]:
        return self.ids, self.numbers, self.scales, self.labels, self.weights, self.times, self.index, self.kept

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """Concatenates batches.

        Args:
            parts: At least one batch.

        Returns:
            All rows in order.
        """
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part._arrays() for part in parts), strict=True)
        joined: list[Any] = [None if column[0] is None else np.concatenate(column) for column in columns]
        return Rows(*joined)


@dataclass(frozen=True)
class Field:
    """Encoding of one category, or list of categories, as `width` columns of ids and one embedding table.

    Ids of a table of `rows` rows: 0 is an unknown value, 1 and above are known values or hash buckets, the last row is
    a missing value. In a list the last row, which is zeros, pads the places without an item; with max pooling the first
    item is repeated instead. A sequence (pooling none) has the newest item first, which is the last one of the log. The
    encoding "id" uses 0 for both unknown and missing values, which are not items of a list; with `unknown` it uses that
    row for them, and unknown values are items. A list with `skip_unknown` has no unknown items either. The encoding
    "hash-bucket" has hash buckets from 0 on and no row for unknown values.

    Attributes:
        column: Column of the schema.
        start: First column of the ids.
        scale: Column of `Rows.scales` for mean pooling, else -1.
        canonical: Whether texts are in canonical form, see `cell_values.canonical`.
    """

    column: Column
    start: int
    scale: int
    canonical: bool = False

    @property
    def name(self) -> str:
        """Name of the column."""
        return self.column.name

    @property
    def is_list(self) -> bool:
        """Whether a row has several values."""
        return self.column.kind == "categories"

    @property
    def is_sequence(self) -> bool:
        """Whether the items of a list are kept apart."""
        return self.column.pooling == "none"

    @property
    def is_gaps(self) -> bool:
        """Whether the ids are those of the time gaps of a sequence."""
        return bool(self.column.gaps_of)

    @property
    def table(self) -> str:
        """Name of the column whose embedding table this one uses."""
        return self.column.shares or self.name

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
        if encoding["type"] == "hash-bucket":
            return int(encoding["buckets"]) + bool(encoding.get("missing_row"))
        return 2 + (len(encoding["values"]) if encoding["type"] == "vocabulary" else int(encoding["buckets"]))

    @property
    def has_unknown(self) -> bool:
        """Whether row 0 of the table stands for unknown values."""
        return bool(self.column.encoding["type"] != "hash-bucket")

    @cached_property
    def last(self) -> int:
        """The id of a missing value, or of a place without an item."""
        encoding = self.column.encoding
        if encoding["type"] == "hash-bucket" and not encoding.get("missing_row"):
            nothing = np.zeros(1, np.int64)  # the text "" as numpy: an array of pyarrow would import pandas, .2 s
            return int(buckets_of(fingerprints(np.zeros(0, np.uint8), nothing, nothing), int(encoding["buckets"]))[0])
        return 0 if encoding["type"] == "id" else self.rows - 1

    @cached_property
    def values(self) -> pa.Array:
        """Values of the vocabulary in the form of the texts."""
        values = pa.array(self.column.encoding["values"], pa.string())
        return pc.coalesce(canonical(values, self.column.separator or LIST), values) if self.canonical else values

    def ids(self, texts: pa.Array, out_of_range: Counter[str] | None = None) -> NDArray[np.int32]:
        """Encodes texts as ids.

        Args:
            texts: Text array [n], null where missing.
            out_of_range: Counts the texts that are no row number of a table, by column; None: not counted.

        Returns:
            Ids, int32 [n].
        """
        encoding = self.column.encoding
        if encoding["type"] in ("hash", "hash-bucket"):
            ids = hash_buckets(texts, int(encoding["buckets"])) + np.int32(encoding["type"] == "hash")
        elif encoding["type"] == "id":
            numbers = parse_floats(texts)
            valid = (numbers >= 0) & (numbers < self.rows) & (numbers == np.floor(numbers))
            if out_of_range is not None and not valid.all():
                filled = pc.not_equal(texts, "").fill_null(False).to_numpy(zero_copy_only=False)
                out_of_range[self.name] += int(np.count_nonzero(filled & ~valid))
            return np.where(valid, numbers, encoding.get("unknown", UNKNOWN)).astype(np.int32)
        else:
            values = self.values if pa.types.is_string(texts.type) else self.values.cast(texts.type)
            places = pc.index_in(texts, value_set=values, skip_nulls=True)
            ids = places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32) + np.int32(1)
        if texts.null_count:
            ids[texts.is_null().to_numpy(zero_copy_only=False)] = self.last
        return ids

    def split(self, texts: pa.Array) -> tuple[pa.Array, NDArray[Any]]:
        """Splits lists into their items, in the form of the texts.

        Args:
            texts: Text array [n], null where missing.

        Returns:
            Items, text array [m], "" where an item is missing; and the number of items of every list, int32 [n].
        """
        lists = pc.split_pattern(texts, self.column.separator)
        counts = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        values = pc.utf8_trim_whitespace(lists.flatten())
        return canonical(values, self.column.separator).fill_null("") if self.canonical else values, counts

    def placed(self, texts: pa.Array, out_of_range: Counter[str] | None = None) -> PlacedItems:
        """Finds the items of lists that are kept, see `items`.

        Args:
            texts: Text array [n], null where missing.
            out_of_range: See `ids`.

        Returns:
            The items in order.
        """
        values, lengths = self.split(texts)
        rows = np.repeat(np.arange(len(texts)), lengths)
        filled = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
        ids = self.ids(values, out_of_range)
        if self.column.encoding["type"] == "id" or self.column.encoding.get("skip_unknown"):
            filled &= ids > 0
        index, rows = np.flatnonzero(filled), rows[filled]
        counts = np.bincount(rows, minlength=len(texts))
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        places -= np.maximum(counts - self.width, 0)[rows]
        kept, counts = places >= 0, np.minimum(counts, self.width)
        index, rows, places = index[kept], rows[kept], places[kept]
        places = counts[rows] - 1 - places if self.is_sequence else places
        return PlacedItems(ids[index], index, rows, places, lengths, counts)

    def items(self, texts: pa.Array, out_of_range: Counter[str] | None = None) -> tuple[NDArray[np.int32], Floats]:
        """Encodes lists of items. Spaces around items are ignored, as are items without text.

        Args:
            texts: Text array [n], null where missing.
            out_of_range: See `ids`.

        Returns:
            Ids of the last `width` items of every list in order, or in reverse for a sequence, int32 [n, width], and 1
            / number of items, float32 [n].
        """
        placed = self.placed(texts, out_of_range)
        counts = placed.counts
        out = np.full((len(texts), self.width), self.last, np.int32)
        out[placed.rows, placed.places] = placed.ids
        if self.column.pooling == "max":
            out = np.where(np.arange(self.width) < counts[:, None], out, out[:, :1])
        with np.errstate(divide="ignore"):
            return out, np.where(counts > 0, np.float32(1) / counts.astype(np.float32), np.float32(0))


@dataclass(frozen=True)
class Encoding:
    """Encoding of the columns of a schema as the inputs of a model.

    The columns of `Rows.numbers` are the numbers, followed by missing-value indicators (1 where missing). A number has
    an indicator if the log of the schema had missing values and its encoding has no fill; a missing value is then 0.
    A vector has one indicator.
    """

    schema: Schema

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The categories, in the order of the schema."""
        fields: list[Field] = []
        start = scale = 0
        for column in self.schema.of("category", "categories"):
            mean = column.pooling == "mean"
            canonical_texts = self.schema.canonical and not column.gaps_of
            fields.append(Field(column, start, scale if mean else -1, canonical_texts))
            start, scale = start + fields[-1].width, scale + mean
        return tuple(fields)

    @cached_property
    def line_parsers(self) -> dict[bool, Any]:
        """Native parsers of rows without a header, by whether rows begin with a label; filled by `line_reader`."""
        return {}

    @cached_property
    def csv_parsers(self) -> dict[tuple[Any, ...], Any]:
        """Native parsers of CSV, by the columns of the log, those that are read, delimiter, form and instruction set.

        They are filled by `csv_reader`; None for columns that the parser cannot read.
        """
        return {}

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """Numbers in the order of the schema; every number of a vector is one, under the name of its column."""
        return tuple(number for column in self.schema.of("number", "vector") for number in dense.numbers_of(column))

    @cached_property
    def vectors(self) -> tuple[tuple[Column, slice], ...]:
        """Columns of vectors and their places among the numbers."""
        names = [number.name for number in self.numbers]
        columns = [(column, names.index(column.name), names.count(column.name)) for column in self.schema.of("vector")]
        return tuple((column, slice(first, first + width)) for column, first, width in columns)

    @cached_property
    def indicators(self) -> tuple[int, ...]:
        """Indices of the numbers that have a missing-value indicator."""
        return tuple(i for i, column in enumerate(self.numbers) if column.missing and "fill" not in column.encoding)

    @cached_property
    def fills(self) -> Floats:
        """Encoding of a missing value of every number, float32 [numbers]."""
        return np.array([fill_of(number.encoding) for number in self.numbers], np.float32)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Columns of ids, numbers and scales."""
        return (
            sum(field.width for field in self.fields),
            len(self.numbers) + len(self.indicators),
            sum(field.scale >= 0 for field in self.fields),
        )

    def scaled(self, number: int, x: NDArray[np.float64]) -> Any:
        """Scales the values of one number as `schema.ENCODINGS` defines.

        Args:
            number: Index of the number among `numbers`.
            x: Values, float64 [n]; NaN where missing.

        Returns:
            Scaled values, float [n]; NaN where missing.
        """
        return encoded(self.numbers[number].encoding, x)

    @cached_property
    def raw(self) -> Encoding:
        """Encoding of the same rows without a header that keeps numbers unscaled and reads every column once.

        Missing numbers are NaN.
        """
        as_is = {"type": "value", "fill": np.nan}
        columns: dict[str, Column] = {}
        for column in self.schema.columns:
            number = Column(column.log_name, "number", encoding=as_is) if column.kind == "number" else column
            columns.setdefault(column.log_name, number)
        return Encoding(replace(self.schema, columns=tuple(columns.values())))

    @cached_property
    def sources(self) -> list[int]:
        """Index in `raw` of the number that every number is computed from."""
        names = [number.name for number in self.raw.numbers]
        return [names.index(number.log_name) for number in self.numbers]

    def fill(self, values: Floats) -> None:
        """Fills missing values (NaN) of the numbers, and their missing-value indicators.

        Args:
            values: float32 [n, numbers and indicators], changed in place.
        """
        count = len(self.numbers)
        missing = np.isnan(values[:, :count])
        values[:, count:] = missing[:, list(self.indicators)]
        np.copyto(values[:, :count], self.fills, where=missing)

    def scaled_mixed(self, columns: NDArray[np.int64], x: NDArray[np.float64]) -> Any:
        """Scales values that belong to different numbers, see `scaled`.

        Args:
            columns: Index of the number of every value, int64 [n].
            x: Values, float64 [n]; NaN where missing.

        Returns:
            Scaled values, float64 [n]; NaN where missing.
        """
        scaled, done = np.empty_like(x), np.zeros(len(self.numbers), bool)
        for scale, which, low, high in self._by_logarithm:  # all columns of a kind at once
            done |= which
            chosen = which[columns]
            if chosen.all():
                return scale(x, low[columns], high[columns])
            of = columns[chosen]
            scaled[chosen] = scale(x[chosen], low[of], high[of])
        for number in np.flatnonzero(~done):
            chosen = columns == number
            scaled[chosen] = self.scaled(int(number), x[chosen])
        return scaled

    @cached_property
    def _by_logarithm(self) -> list[tuple[Callable[..., Any], NDArray[np.bool_], NDArray[Any], NDArray[Any]]]:
        """Scaling function, mask of the numbers and both bounds, for the encodings log1p and log1p-min-max."""
        encodings = [number.encoding for number in self.numbers]
        log1ps, scaled = ([encoding["type"] == kind for encoding in encodings] for kind in ("log1p", "log1p-min-max"))
        low = np.array([encoding.get("minimum", 0) for encoding in encodings], np.float64)
        most = [
            np.log1p(encoding["maximum"] - encoding["minimum"]) if log else 1
            for encoding, log in zip(encodings, log1ps, strict=True)
        ]
        bounds = [np.array([encoding.get(bound, 0) for encoding in encodings], np.float32) for bound in ("low", "high")]
        groups: list[tuple[Callable[..., Any], NDArray[np.bool_], NDArray[Any], NDArray[Any]]] = [
            (log1p_scaled, np.array(log1ps, bool), low, np.array(most, np.float64)),
            (log1p_min_max, np.array(scaled, bool), bounds[0], bounds[1]),
        ]
        return [group for group in groups if group[1].any()]

    def scaled_whole(self, start: int, stop: int) -> Floats:
        """Tabulates the scaled values of integers. Tables are computed once.

        Args:
            start: First whole number.
            stop: One more than the last whole number.

        Returns:
            Scaled values, float32 [numbers, stop - start].
        """
        if (tables := self._tables.get((start, stop))) is None:
            x = np.arange(start, stop, dtype=np.float64)
            scaled = [self.scaled(number, x).astype(np.float32) for number in range(len(self.numbers))]
            tables = self._tables[start, stop] = np.array(scaled, np.float32).reshape(len(scaled), len(x))
        return tables

    @cached_property
    def _tables(self) -> dict[tuple[int, int], Floats]:
        return {}

    def _gaps(self, field: Field, columns: Mapping[str, pa.Array], when: NDArray[np.float64] | None) -> NDArray[Any]:
        """Encodes the times of a sequence's items as ids of time gaps, int32 [n, width]."""
        sequence = next(other for other in self.fields if other.name == field.column.gaps_of)
        values, lengths = field.split(columns[field.name])
        seconds = times.seconds_since_1970(values, field.column.unit)
        out = np.full((len(lengths), field.width), field.last, np.int32)
        placed, buckets = sequence.placed(columns[sequence.name]), int(field.column.encoding["buckets"])
        out[placed.rows, placed.places] = gap_ids(placed, seconds, lengths, when, buckets)
        return out

    def encode_columns(
        self,
        columns: Mapping[str, pa.Array],
        index: NDArray[np.int64],
        labelled: bool,
        out_of_range: Counter[str] | None = None,
        faulty: list[tuple[int, str]] | None = None,
    ) -> Rows:
        """Encodes text columns.

        Args:
            columns: {column name: text array [n]}, null where missing. Absent features count as missing.
            index: Positions of the rows in the input, int64 [n].
            labelled: Whether to encode labels and weights.
            out_of_range: See `Field.ids`.
            faulty: Takes (row, message) of the vectors of another width, which count as missing; None: the
                first one raises.

        Returns:
            n rows. Labels and weights that are no numbers are NaN, see `label_values`.

        Raises:
            RequestError: A vector has another width than that of the schema, and `faulty` is None.
        """
        count, (width, numbers, lists) = len(index), self.shape
        columns = {**dict.fromkeys(self.schema.feature_names, pa.nulls(count, pa.string())), **columns}
        ids, scales = np.empty((count, width), np.int32), np.empty((count, lists), np.float32)
        when = None
        for column in self.schema.of("timestamp"):
            if column.name in columns:
                when = times.seconds_since_1970(columns[column.name], column.unit)
        for field in self.fields:
            if field.is_gaps:
                ids[:, field.start : field.start + field.width] = self._gaps(field, columns, when)
            elif field.is_list:
                ids[:, field.start : field.start + field.width], scale = field.items(columns[field.name], out_of_range)
                if field.scale >= 0:
                    scales[:, field.scale] = scale
            else:
                ids[:, field.start] = field.ids(columns[field.name], out_of_range)

        zero = 0.0 if self.schema.canonical else -0.0  # added, it makes -0 that is canonical 0
        values = np.zeros((count, numbers), np.float32)
        for number, column in enumerate(self.numbers):
            if column.encoding["type"] != "per-element":
                values[:, number] = self.scaled(number, parse_floats(columns[column.name]) + zero)
        for column, places in self.vectors:
            values[:, places] = dense.encode(column, columns[column.name], index, faulty)
        self.fill(values)
        labels, weights = None, np.ones(count, np.float32)
        if labelled:
            labels = label_values(self.schema, columns)
            for weight in [column for column in self.schema.of("weight") if column.name in columns]:
                weights = (parse_floats(columns[weight.name]) + zero).astype(np.float32)
        when = index.astype(np.float64) if when is None else when
        return Rows(ids, np.nan_to_num(values, copy=False), scales, labels, weights, when, index)
