"""Feature preprocessing: encodes the rows of a click log as the inputs of a model, in constant memory.

Columns are found by name, in any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.models.protocols import NoRow
from zoo.recommenders.criteo import schema_of
from zoo.recommenders.data.columns.label_values import faulty_labels
from zoo.recommenders.data.columns.names import listed
from zoo.recommenders.data.csv_reader import MAX_ROWS, CsvReader, ParsedRows, RowReader
from zoo.recommenders.data.encoding import Encoding, Field, Rows
from zoo.recommenders.data.line_reader import read_lines
from zoo.recommenders.data.logs import Log, open_logs
from zoo.recommenders.data.row_errors import MAX_SKIPPED, MAX_SKIPPED_SHARE, ErrorLog, RowPositions, timed
from zoo.recommenders.data.schema import FEATURES, REGRESSION, Schema

BINARY = "0 or 1"


@dataclass(frozen=True)
class Features(Encoding):
    """Preprocessing of a model, saved with the model: its schema and the encoding of every column."""

    @classmethod
    def from_json(cls, preprocessing: Mapping[str, Any]) -> Features:
        """Creates the features of a model from its card.

        Args:
            preprocessing: Preprocessing on the card, see `to_json`; also those of version 0.2.0.

        Returns:
            The features.

        Raises:
            RequestError: The preprocessing is broken.
        """
        if "schema" not in preprocessing:
            return cls(schema_of(preprocessing))
        schema = preprocessing["schema"]
        if isinstance(schema, Mapping):  # of version 0.2.0
            schema = {"canonical": False, **schema}
        return cls(Schema.from_json(schema, "the schema in the card"))

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values for the card."""
        return {"schema": self.schema.to_json()}

    @property
    def key(self) -> Field:
        """Category that identifies items: the category of the item tower with the most values.

        Raises:
            RequestError: The schema has no category of the tower item.
        """
        fields = [field for field in self.fields if field.column.tower == "item" and not field.is_list]
        if not fields:
            raise RequestError(
                'the schema has no category of the tower item; give the item\'s id "tower": "item" (zoo schema LOG -o '
                "schema.json, then --schema schema.json)"
            )
        return max(fields, key=lambda field: max(field.rows, field.column.distinct))  # seldom seen ones may have no row

    @cached_property
    def inputs(self) -> dict[str, tuple[np.dtype[Any], tuple[int | None, ...]]]:
        """Name, dtype and shape of the model's inputs; inputs without columns are omitted."""
        names = {"ids": np.int32, "numbers": np.float32, "scales": np.float32}
        sizes = zip(names.items(), self.shape, strict=True)
        return {name: (np.dtype(kind), (None, width)) for (name, kind), width in sizes if width}

    @cached_property
    def last_ids(self) -> NDArray[np.int64]:
        """Largest id of every column of the ids, int64 [columns]."""
        return np.concatenate([np.zeros(0, np.int64), *(np.full(field.width, field.rows - 1) for field in self.fields)])

    def encode(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Returns the inputs of the model.

        Args:
            rows: Encoded rows.

        Returns:
            {input name: C-contiguous array [n, columns]}.
        """
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
        weighted: bool = True,
        tower: str = "",
        with_label: bool | None = None,
        keep: Sequence[str] = (),
    ) -> Iterator[Rows]:
        """Reads and encodes rows. Columns are found by name; other columns are ignored.

        In logs with a header, text in a numeric column counts as missing.

        Args:
            source: One source or a list of sources, see `open_logs`; without a header, see `line_reader.read_lines`.
            on_error: "raise", or "skip" to leave out faulty rows. Faulty rows have another number of columns, a
                vector of another width than in the schema or, with `labelled`, a label other than 0 and 1 or a negative
                weight.
            errors: Counts the rows left out by "skip", and ids that are no row of their table.
            batch_rows: Rows of a batch; the last batch may have fewer.
            seconds: "read" is increased by the seconds that the sources took.
            labelled: Whether to read labels and, with `weighted`, weights.
            weighted: Whether to read the weights of labelled rows; else they are 1.
            tower: Read the columns of this tower only; columns of the other tower count as missing. "": all columns.
            with_label: Whether rows without a header begin with a label; None: decided by the first row. Used only for
                schemas without a header.
            keep: Columns of the log whose texts are read as well, into `Rows.kept`.

        Returns:
            Batches of encoded rows in input order.

        Raises:
            RequestError: A faulty row with on_error "raise"; with "skip", nearly all of the first million rows are
                faulty; a column is missing, the input has no row, or `on_error` is unknown.
        """
        if on_error not in ("raise", "skip"):
            raise RequestError(f"found on_error {on_error!r}, expected raise or skip")
        log = None if on_error == "raise" else ErrorLog() if errors is None else errors
        if not self.schema.header:
            if keep:
                raise RequestError(f"rows without a header have no column {keep[0]} to keep")
            options: Any = {"batch_rows": batch_rows, "errors": log, "seconds": seconds, "with_label": with_label}
            in_steps = any(number.encoding["type"] == "steps" for number in self.numbers)
            return (
                self.encode_raw(read_lines(self.raw, source, **options))
                if in_steps
                else read_lines(self, source, **options)
            )
        plain = not (labelled or tower or keep)
        if plain and (reader := RowReader.of(self, source)) is not None:
            return self.of_rows(reader, min(batch_rows, MAX_ROWS))
        logs = [self.require(opened, tower, labelled, weighted, keep) for opened in open_logs(source)]
        clock: defaultdict[str, float] = defaultdict(float) if seconds is None else seconds
        labels = ("label", "weight")[: 1 + weighted] if labelled else ()
        outside = None if errors is None else errors.outside
        return self._batches(logs, batch_rows, log, clock, labels, tower, outside, tuple(keep))

    def of_rows(self, reader: RowReader, size: int = MAX_ROWS) -> Iterator[Rows]:
        """Reads and encodes Python rows; rows that the native reader declines are read as text columns.

        Args:
            reader: Reader of the rows.
            size: Rows of a batch.

        Returns:
            Batches of encoded rows in input order.

        Raises:
            RequestError: A value has no text.
        """
        names, start = self.schema.feature_names, 0
        for batch in reader.batches(size):
            if isinstance(batch, ParsedRows):
                index = np.arange(start, start + len(batch.ids))
                yield _placed(batch, index)
            else:
                index = np.arange(start, start + len(batch))
                (log,) = open_logs(batch)
                nested = {name for row in batch for name in names if isinstance(row.get(name), Mapping)}
                self.require(replace(log, columns=(*log.columns, *(name for name in names if name not in nested))))
                texts = pa.Table.from_batches(log.batches(names, forms=self.schema.forms)).combine_chunks()
                columns = {name: texts.column(name).combine_chunks() for name in names}
                yield self.encode_columns(columns, index, labelled=False)
            start += len(index)

    def encode_raw(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """Encodes the numbers of rows that were read with `raw`.

        Args:
            batches: Batches of rows with raw numbers.

        Returns:
            Batches of encoded rows.
        """
        for rows in batches:
            numbers = np.empty((len(rows), self.shape[1]), np.float32)
            for index, source in enumerate(self.sources):
                numbers[:, index] = self.scaled(index, rows.numbers[:, source].astype(np.float64))
            self.fill(numbers)
            yield replace(rows, numbers=numbers)

    def weighted(self, source: Any) -> bool | None:
        """Tells whether rows have the weight column of the schema.

        Args:
            source: Source of the rows, as in `read`.

        Returns:
            Whether any of the logs has the column; None for a schema without one.
        """
        names = {column.name for column in self.schema.of("weight")}
        return any(names & set(log.columns) for log in open_logs(source)) if names else None

    def require(
        self, log: Log, tower: str = "", labelled: bool = False, weighted: bool = True, keep: Sequence[str] = ()
    ) -> Log:
        """Checks that a log has the columns of the schema.

        Args:
            log: Log to check.
            tower: Check the columns of this tower only; "": all feature columns.
            labelled: Whether to check the label as well.
            weighted: With `labelled`, whether to check the weight as well.
            keep: Further columns that the log must have.

        Returns:
            The log, see `Log.having`.

        Raises:
            RequestError: Columns are missing.
        """
        names = self.schema.feature_names
        required = [
            column.name
            for column in self.schema.columns
            if column.name in names and tower in ("", "user" if column.kind == "timestamp" else column.tower)
        ]
        required += [column.name for column in self.schema.of("label", *(("weight",) if weighted else ())) if labelled]
        required += [name for name in keep if name not in required]
        log = log.having(required)
        types = dict(log.unread)
        if unread := [f"{name} ({types[name]})" for name in required if name in types]:
            raise RequestError(f"{log.path} has the column {', '.join(unread)[:200]}, expected texts, numbers or lists")
        if missing := [name for name in required if name not in log.columns]:
            raise RequestError(
                f"{log.path} lacks the column{'s' * (len(missing) > 1)} {listed(missing)}; found "
                f"{listed(log.columns)[:200] or 'none'}"
            )
        return log

    def _batches(
        self,
        logs: Sequence[Log],
        size: int,
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labels: tuple[str, ...],
        tower: str,
        outside: Counter[str] | None,
        keep: tuple[str, ...],
    ) -> Iterator[Rows]:
        parts: list[Rows] = []
        count, start, empty = 0, 0, True
        for log in logs:
            positions = RowPositions(start)
            for rows in self._encoded(log, positions, errors, seconds, labels, tower, size, outside, keep):
                parts.append(rows)
                count, empty = count + len(rows), False
                if count >= size:
                    joined, whole = Rows.concatenate(parts), count - count % size
                    yield from (joined[begin : begin + size] for begin in range(0, whole, size))
                    parts, count = [joined[whole:]] if whole < count else [], count - whole
            start = positions.end
        if empty:
            message = f"found no row to use: {errors or 'the input holds only its header'}"
            raise NoRow(message, errors.total if errors else 0)
        if count:
            yield Rows.concatenate(parts)

    def _encoded(
        self,
        log: Log,
        positions: RowPositions,
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labels: tuple[str, ...],
        tower: str,
        size: int,
        outside: Counter[str] | None,
        keep: tuple[str, ...],
    ) -> Iterator[Rows]:
        kinds, labelled = (*FEATURES, "timestamp", *labels), bool(labels)
        wanted = [
            column for column in self.schema.of(*kinds) if column.kind not in FEATURES or tower in ("", column.tower)
        ]
        names = [column.name for column in wanted if column.name in log.columns]

        def bad(row: int, kind: str, message: str) -> None:
            assert errors is not None
            errors.add(kind, message)
            positions.skip(row)

        on_bad_row = None if errors is None else bad
        names += [name for name in keep if name not in names]
        reader = None if tower or keep else CsvReader.of(self, log, names)
        if reader is None:
            batches: Iterator[Any] = timed(log.batches(names, on_bad_row, self.schema.forms), seconds, "read")
        else:
            batches = reader.batches(on_bad_row, seconds, size)
        for batch in batches:
            if isinstance(batch, ParsedRows):
                columns, rows = {}, _placed(batch, positions.take(len(batch.ids)))
            else:
                columns = dict(zip(names, batch.columns, strict=True))
                vectors: list[tuple[int, str]] = []
                rows = self.encode_columns(columns, positions.take(batch.num_rows), labelled, outside, vectors)
                if keep:
                    texts = [columns[name].to_numpy(zero_copy_only=False) for name in keep]
                    rows = replace(rows, kept=np.stack(texts, axis=1).astype(object))
                faults = _faults(rows, self.schema) if labelled else []
                _report(faults, columns, self.schema, f"{log.path}", errors)
                left_out = {row for row, _, _ in faults}
                for row, message in vectors:
                    place = f"{log.path} row {rows.index[row] - positions.start + 1}, {message}"
                    if errors is None:
                        raise RequestError(place)
                    if row not in left_out:
                        errors.add("vector", place)
                        left_out.add(row)
                rows = rows[np.setdiff1d(np.arange(len(rows)), sorted(left_out))] if left_out else rows
            if errors is not None and errors.total >= MAX_SKIPPED and errors.total > MAX_SKIPPED_SHARE * positions.end:
                raise RequestError(f"found almost no valid rows, expected a log of this schema: {errors}")
            if len(rows):
                yield rows


def _placed(parsed: ParsedRows, index: NDArray[np.int64]) -> Rows:
    """Adds positions to parsed rows."""
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


def _faults(rows: Rows, schema: Schema) -> list[tuple[int, str, str]]:
    """Rows without usable labels or weight: (row, kind, column), in order and each once."""
    assert rows.labels is not None
    wrong = faulty_labels(rows.labels).reshape(len(rows), len(schema.labels))
    bad = np.flatnonzero(wrong.any(axis=1))
    faults = [
        (row, "label", schema.labels[column]) for row, column in zip(bad.tolist(), wrong[bad].argmax(1), strict=True)
    ]
    for weight in schema.of("weight"):
        left = np.flatnonzero(~(rows.weights >= 0) & ~wrong.any(axis=1))
        faults += [(row, "weight", weight.name) for row in left.tolist()]
    return sorted(faults)


def _report(
    faults: list[tuple[int, str, str]],
    columns: Mapping[str, pa.Array],
    schema: Schema,
    name: str,
    errors: ErrorLog | None,
) -> None:
    """Counts rows left out; without an error log, raises RequestError for the first one."""
    expected = {column.name: "0 or more" for column in schema.of("weight")}
    for label in schema.of("label"):
        expected[label.name] = ("a number" if "at_least" in label.positive else "a value") if label.positive else BINARY
    for row, kind, column in faults:
        text = columns[column][row].as_py()
        message = f"{name}: found the {kind} {column} {text!r}, expected {expected[column]}"
        if errors is None:
            raise RequestError(f"{message}; {REGRESSION}" if expected[column] == BINARY else message)
        errors.add(kind, message)
