"""Rows of a click log to a model's inputs, as its schema says: columns by name, in any order, in constant memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.models.sharding import NoRow
from zoo.recommenders.criteo import schema_of
from zoo.recommenders.data.csv_reader import NativeReader, Parsed
from zoo.recommenders.data.encoding import Encoding, Field, Rows
from zoo.recommenders.data.line_reader import read_lines
from zoo.recommenders.data.logs import Log, open_logs
from zoo.recommenders.data.row_errors import BAD_SHARE, HOPELESS, ErrorLog, Positions, timed
from zoo.recommenders.data.schema import FEATURES, REGRESSION, Schema


@dataclass(frozen=True)
class Features(Encoding):
    """The preprocessing that travels with a model: its schema, and what each column becomes."""

    @classmethod
    def from_json(cls, preprocessing: Mapping[str, Any]) -> Features:
        """The features of a model's card. Raises RequestError where they are broken."""
        if "schema" not in preprocessing:
            return cls(schema_of(preprocessing))
        return cls(Schema.from_json(preprocessing["schema"], "the schema in the card"))

    def to_json(self) -> dict[str, Any]:
        """Plain values for the card."""
        return {"schema": self.schema.to_json()}

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

    @cached_property
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
        with_label: bool | None = None,
    ) -> Iterator[Rows]:
        """Rows of a source, or of several in turn (see `open_logs`), `batch_rows` at a time, the last ones fewer.

        Columns are found by name; others may stand beside them. labelled: read labels and weights, too. tower: read
        the columns of this tower alone, those of the other as missing. A row with another number of columns, or (where
        labelled) another label than 0 and 1 or a weight below 0, raises RequestError; with on_error "skip" it is left
        out and counted in `errors`, unless nearly all of the first million rows are such. Values that are no number
        count as missing. Raises RequestError as well where a column is missing, and where there is no row. Of a schema
        without a header rows are read by `line_reader.read_lines`, which alone uses `with_label`.
        """
        if on_error not in ("raise", "skip"):
            raise RequestError(f"found on_error {on_error!r}, wanted raise or skip")
        log = None if on_error == "raise" else ErrorLog() if errors is None else errors
        if not self.schema.header:
            options: Any = {"batch_rows": batch_rows, "errors": log, "seconds": seconds, "with_label": with_label}
            in_steps = any(each.encoding["type"] == "steps" for each in self.numbers)
            return (
                self.by_steps(read_lines(self.raw, source, **options))
                if in_steps
                else read_lines(self, source, **options)
            )
        logs = open_logs(source)
        for each in logs:
            self.require(each, tower, labelled)
        clock: defaultdict[str, float] = defaultdict(float) if seconds is None else seconds
        return self._batches(logs, batch_rows, log, clock, labelled, tower)

    def by_steps(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """Rows that were read as `raw`, encoded."""
        for rows in batches:
            numbers = np.empty((len(rows), self.shape[1]), np.float32)
            for at, source in enumerate(self.sources):
                numbers[:, at] = self.scaled(at, rows.numbers[:, source].astype(np.float64))
            self.fill(numbers)
            yield replace(rows, numbers=numbers)

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
        count, start, empty = 0, 0, True
        for log in logs:
            positions = Positions(start)
            for rows in self._encoded(log, positions, errors, seconds, labelled, tower, size):
                parts.append(rows)
                count, empty = count + len(rows), False
                if count >= size:
                    joined, whole = Rows.concatenate(parts), count - count % size
                    yield from (joined[begin : begin + size] for begin in range(0, whole, size))
                    parts, count = [joined[whole:]] if whole < count else [], count - whole
            start = positions.end
        if empty:
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
