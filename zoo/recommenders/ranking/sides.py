"""The two sides of a ranking: columns of the user, with the context, and columns of the items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.native import SharedInputs
from zoo.recommenders.data.cell_values import LIST, as_texts
from zoo.recommenders.data.csv_reader import MAX_ROWS, CsvReader, ParsedRows, RowReader, parser_of, scale_pending
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import Log, open_logs

INPUTS = ("ids", np.int32), ("numbers", np.float32), ("scales", np.float32)


@dataclass(frozen=True, eq=False)
class Side:
    """Columns of one side.

    Attributes:
        features: Encoding of these columns alone.
        ids: Their columns among the ids of the model.
        numbers: Their columns among its numbers.
        scales: Their columns among its scales.
    """

    features: Features
    ids: tuple[int, ...]
    numbers: tuple[int, ...]
    scales: tuple[int, ...]

    @classmethod
    def of(cls, features: Features, item: bool) -> Side:
        """Selects the columns of the items, or all others: those of the user and of the context.

        Args:
            features: Encoding of all columns.
            item: Whether the items' columns are selected.
        """
        read = features.schema.feature_names
        columns = tuple(
            column for column in features.schema.columns if column.name in read and (column.tower == "item") == item
        )
        names = {column.name for column in columns}
        fields = [field for field in features.fields if field.name in names]
        numbers = [index for index, number in enumerate(features.numbers) if number.name in names]
        indicators = [
            len(features.numbers) + index for index, number in enumerate(features.indicators) if number in set(numbers)
        ]
        return cls(
            Features(replace(features.schema, columns=columns)),
            tuple(column for field in fields for column in range(field.start, field.start + field.width)),
            tuple(numbers + indicators),
            tuple(field.scale for field in fields if field.scale >= 0),
        )

    @cached_property
    def shared(self) -> SharedInputs:
        """The inputs of this side."""
        return SharedInputs(self.ids, self.numbers, self.scales)

    def _parsed(self, log: Log, key: str, index: int) -> tuple[Rows, pa.Array | None] | None:
        """CSV in memory parsed natively, see `read`; None for other logs, and if the native parser declines."""
        names = self.features.schema.feature_names
        reader = CsvReader.of(self.features, log, names) if isinstance(log.place, bytes) and names else None
        if reader is None:
            return None
        parts = list(reader.batches(None, defaultdict(float), MAX_ROWS))
        if not parts or not all(isinstance(part, ParsedRows) for part in parts):
            return None
        ids, numbers, scales = (np.concatenate([part[index] for part in parts]) for index in range(3))
        count, texts = len(ids), None
        if key:
            texts = pa.concat_arrays([batch[0] for batch in log.batches([key], forms=self.features.schema.forms)])
            if len(texts) != count:
                return None
        positions = np.arange(index, index + count)
        weights, times = np.ones(count, np.float32), positions.astype(np.float64)
        return Rows(ids, numbers, scales, None, weights, times, positions), texts

    def _require(self, log: Log) -> None:
        """Raises RequestError if a log lacks a column of this side."""
        try:
            self.features.require(log)
        except RequestError as error:
            of_items = any(column.tower == "item" for column in self.features.schema.columns)
            here, there = ("items", "user") if of_items else ("user", "items")
            tower = "item" if there == "items" else "user"
            raise RequestError(
                f'{error}; a column belongs to the {here} by its tower in the schema, "tower": "{tower}" and a new '
                f"training move it to the {there}"
            ) from error

    def parse(self, model: Features, rows: Any, batch: Mapping[str, NDArray[Any]]) -> bool:
        """Parses and encodes rows of Python natively into inputs of the model; columns of the other side stay.

        Args:
            model: Encoding of all columns.
            rows: {column: value} each.
            batch: Arrays [n, columns of the model], changed in place.

        Returns:
            False for rows that the native parser does not know; `batch` is then undefined.
        """
        names = self.features.schema.feature_names
        if not names:
            return True
        parser = self._parser_of(model)
        if parser is None or type(rows) is not list:
            return False
        count = len(rows)
        arrays: list[Any] = [batch[name] if name in batch else np.empty((count, 0), dtype) for name, dtype in INPUTS]
        parsed = parser.parse_rows(rows, names, *arrays)
        if parsed is None:
            return False
        scale_pending(model, ParsedRows(arrays[0], arrays[1], arrays[2], None, None, None), parsed[-3:])
        return True

    def _parser_of(self, model: Features) -> Any:
        """Native parser of this side's columns into the inputs of the model."""
        if not self._parsers:
            names = self.features.schema.feature_names
            self._parsers.append(parser_of(model, names, names, ",", "quoted"))
        return self._parsers[0]

    @cached_property
    def _parsers(self) -> list[Any]:
        return []

    @cached_property
    def runs(self) -> dict[str, list[tuple[slice, slice]]]:
        """Neighbouring columns of this side by input: (columns of the model, columns of this side)."""
        return {name: _runs(getattr(self, name)) for name in self.features.inputs}

    def place(self, rows: Rows, batch: Mapping[str, NDArray[Any]], chosen: Any = slice(None)) -> None:
        """Writes rows of this side into inputs of the model.

        Args:
            rows: The rows; one row is written into all samples.
            batch: Arrays [n, columns of the model].
            chosen: Which of the rows are written.
        """
        for name, runs in self.runs.items():
            values = getattr(rows, name)[chosen]
            for to, columns in runs:
                batch[name][:, to] = values[:, columns]

    def read(self, source: Any, key: str = "") -> Iterator[tuple[Rows, pa.Array | None]]:
        """Reads and encodes rows of this side.

        Args:
            source: Source of the rows, see `Features.read`.
            key: Column of names, if they are wanted.

        Returns:
            Batches of encoded rows, and the texts of the key, null where missing; None without a key.

        Raises:
            RequestError: A column is missing.
        """
        schema, index = self.features.schema, 0
        names = schema.feature_names
        if (reader := RowReader.of(self.features, source)) is not None:
            texts = as_texts((row.get(key) for row in source), key, LIST) if key else None
            rows = Rows.concatenate(list(self.features.of_rows(reader)))
            yield rows, None if texts is None else schema.forms[key].apply(texts)
            return
        for log in open_logs(source):
            self._require(log)
            if (parsed := self._parsed(log, key, index)) is not None:
                yield parsed
                index += len(parsed[0])
                continue
            for batch in log.batches(names, forms=schema.forms):
                columns = dict(zip(names, batch.columns, strict=True))
                positions = np.arange(index, index + batch.num_rows)
                index += batch.num_rows
                yield self.features.encode_columns(columns, positions, labelled=False), columns.get(key)


class Sides:
    """The user's and the items' columns of a model.

    Args:
        features: Encoding of all columns.

    Raises:
        RequestError: The schema has no column of items.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.user, self.item = Side.of(features, item=False), Side.of(features, item=True)
        if not self.has_items(features):
            raise RequestError(
                'the schema has no column of items; give them "tower": "item" in the schema (zoo schema LOG -o '
                "schema.json, then zoo train --schema schema.json)"
            )

    @staticmethod
    def has_items(features: Features) -> bool:
        """Whether a model has columns of items.

        Args:
            features: Encoding of all columns.
        """
        names = features.schema.feature_names
        return features.schema.header and any(
            column.tower == "item" and column.name in names for column in features.schema.columns
        )

    @cached_property
    def key(self) -> str:
        """Column that names the items; "" if they have numbers alone."""
        try:
            return self.features.key.name
        except RequestError:
            return ""

    def ids(self, items: Sequence[Any]) -> list[str | None] | None:
        """Ids of rows of items.

        Args:
            items: {column: value} each.

        Returns:
            Their ids; None if the model has no column that names items.
        """
        if not self.key:
            return None
        key, forms = self.key, self.features.schema.forms
        if all(key in row for row in items):
            return [forms[key].text(row[key]) for row in items]
        (log,) = open_logs(list(items))
        return [text for batch in log.batches([key], forms=forms) for text in batch[0].to_pylist()]

    @cached_property
    def absent_user(self) -> Rows:
        """The user's side with missing values, one row."""
        return self.user.features.encode_columns({}, np.zeros(1, np.int64), labelled=False)

    def read_user(self, user: Any) -> Rows:
        """Encodes the user's side of a request.

        Args:
            user: {column: value}, or a source of one row; columns that the model does not have are ignored.

        Returns:
            One row.

        Raises:
            RequestError: A column is missing, or there is another number of rows.
        """
        if not self.user.features.schema.columns:
            user = [{"": ""}]
        parts = [rows for rows, _ in self.user.read([user] if isinstance(user, dict) else user)]
        if (count := sum(map(len, parts))) != 1:
            raise RequestError(f"found {count} rows as the user, expected one")
        return Rows.concatenate(parts)

    def inputs(self, user: Any, items: Any) -> dict[str, NDArray[Any]] | None:
        """Parses one user and rows of items natively, the user once and of the items their columns alone.

        Args:
            user: {column: value}.
            items: {column: value} each.

        Returns:
            Inputs of the model, as from `join`; None for values that the native parser declines.
        """
        if type(items) is not list or not items or type(user) is not dict:
            return None
        one = self._parsed_user(user)
        if one is None:
            return None
        batch = {name: row.repeat(len(items), axis=0) for name, row in one.items()}
        return batch if self.item.parse(self.features, items, batch) else None

    def user_inputs(self, user: Any) -> dict[str, NDArray[Any]]:
        """Reads the user's side of a request.

        Args:
            user: See `read_user`.

        Returns:
            Inputs of the model, one row; those of items are zeros.

        Raises:
            RequestError: See `read_user`.
        """
        if type(user) is dict and (one := self._parsed_user(user)) is not None:
            return one
        return self.user_row(self.read_user(user))

    def user_row(self, user: Rows) -> dict[str, NDArray[Any]]:
        """Inputs of the model for a user, one row; those of items are zeros.

        Args:
            user: The user's side, one row.
        """
        one = self._zeros()
        self.user.place(user, one)
        return one

    def _parsed_user(self, user: Any) -> dict[str, NDArray[Any]] | None:
        """The user's side parsed natively; None for values that the native parser declines."""
        one = self._zeros()
        return one if self.user.parse(self.features, [user], one) else None

    def _zeros(self) -> dict[str, NDArray[Any]]:
        return {name: np.zeros((1, width), dtype) for name, dtype, width in self._shapes}

    def _empty(self, count: int) -> dict[str, NDArray[Any]]:
        """Inputs of the model without values."""
        return {name: np.empty((count, width), dtype) for name, dtype, width in self._shapes}

    def join(self, user: Rows, items: Rows, chosen: slice | NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Inputs of the model for one user and n items.

        Args:
            user: The user's side, one row.
            items: The items' side.
            chosen: The rows of the items.

        Returns:
            {"ids", "numbers", "scales"}: C-contiguous arrays [n, columns]; inputs without columns are omitted.
        """
        batch = self._empty(len(items.index[chosen]))
        self.user.place(user, batch)
        self.item.place(items, batch, chosen)
        return batch

    @cached_property
    def _shapes(self) -> list[tuple[str, np.dtype[Any], int]]:
        """Name, dtype and columns of the inputs of the model."""
        return [(name, dtype, int(width or 0)) for name, (dtype, (_, width)) in self.features.inputs.items()]


def _runs(columns: Sequence[int]) -> list[tuple[slice, slice]]:
    """Runs of consecutive columns: (the columns, their positions)."""
    runs: list[tuple[slice, slice]] = []
    for position, column in enumerate(columns):
        if runs and runs[-1][0].stop == column:
            (first, positions) = runs[-1]
            runs[-1] = slice(first.start, column + 1), slice(positions.start, position + 1)
        else:
            runs.append((slice(column, column + 1), slice(position, position + 1)))
    return runs
