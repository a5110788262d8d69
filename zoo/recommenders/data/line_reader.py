"""Reads logs without a header: tab-separated lines whose columns are identified by position, such as Criteo's.

A row is an optional label, 0 or 1, followed by the columns of the schema. Empty fields are missing values (Kaggle
Display Advertising Challenge, 2014). Categories may contain every byte except tab and line feed. Faulty rows have
another number of columns, another label, or text in a numeric column.

The native parser reads blocks without faults. Blocks with a fault, and all blocks without native code, go through
numpy, which defines the results and reports the faults. Line numbers refer to the file.
"""

from __future__ import annotations

import io
import math
import os
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.models.protocols import NoRow
from zoo.recommenders.data import sources as row_sources
from zoo.recommenders.data.cell_values import PAD as FRONT
from zoo.recommenders.data.cell_values import Ints, parse_numbers
from zoo.recommenders.data.columns import nested
from zoo.recommenders.data.csv_reader import PAD, ParsedRows, RowBatcher, add_columns, scale_pending
from zoo.recommenders.data.encoding import Encoding, Field, Floats, Rows
from zoo.recommenders.data.hashing import buckets_of, fingerprints
from zoo.recommenders.data.row_errors import MAX_SKIPPED, MAX_SKIPPED_SHARE, ErrorLog, timed

_MAX_BLOCK_BYTES = 2**32 - PAD  # bytes of a block that the native parser takes
_BEHIND = bytes(PAD)


def read_lines(
    encoding: Encoding,
    sources: Any,
    *,
    batch_rows: int = 65_536,
    errors: ErrorLog | None = None,
    seconds: defaultdict[str, float] | None = None,
    with_label: bool | None = None,
) -> Iterator[Rows]:
    """Reads rows without a header as a stream, in input order and constant memory.

    Args:
        encoding: Encoding of the columns; its schema has the columns of a row in their order.
        sources: One source or a list of sources: a TSV file, plain or gzip (detected by content); a .parquet file; "-"
            for stdin; a folder written by `datasets.save_to_disk` or a data set on the hub, "org/name", both optionally
            with ":split" (columns of tables by `sources.choose_columns`); the bytes of a TSV file as io.BytesIO; an
            Arrow table. Or a list of raw rows: tab-separated str or bytes, or sequences of values where None, NaN and
            "" are missing.
        batch_rows: Rows of a batch; the last batch may have fewer.
        errors: Counts faulty rows, which are left out; None: the first faulty row raises.
        seconds: "read" is increased by the seconds that the sources took.
        with_label: Whether all rows begin with a label; None: decided by the number of columns of the first row.

    Returns:
        Batches of rows; labels are None for rows without labels.

    Raises:
        RequestError: A faulty row, with file and line; input that is missing, empty, truncated, of another kind, or
            without a complete row; with `errors`, nearly all of the first million rows are faulty.
        ZooError: The hub fails while it is read.
    """
    if batch_rows < 1:
        raise RequestError(f"found {batch_rows} rows a batch, expected at least 1")
    reader = _Reader(encoding, errors, defaultdict(float) if seconds is None else seconds, with_label, batch_rows)
    if isinstance(sources, io.BytesIO):
        return _batches(reader.all(reader.whole(sources.getvalue())), batch_rows, errors)
    if isinstance(sources, pa.Table):
        return _batches(reader.tables("the table", [sources]), batch_rows, errors)
    if isinstance(sources, str | bytes | os.PathLike):
        sources = [sources]
    if not isinstance(sources, list | tuple | np.ndarray):
        raise RequestError(f"found {type(sources).__name__} as input, expected paths or a list of rows")
    if not len(sources):
        raise RequestError("found no input, expected at least one file or row")
    if _is_row(sources[0]):
        return _batches(reader.all(reader.memory(sources)), batch_rows, errors)
    try:  # a missing file is found before the first one is read
        paths = [path for source in sources for path in _paths(source)]
        opened = [row_sources.locate(path) for path in paths]
    except OSError as error:
        raise RequestError(f"cannot read {error.filename}: {error.strerror}") from error
    pieces = (rows for name, kind, place in opened for rows in reader.source(name, kind, place))
    return _batches(reader.all(pieces), batch_rows, errors)


def _paths(source: Any) -> list[Any]:
    """The files that a source stands for, see `sources.expand`."""
    return [path for path, _ in row_sources.expand(source)] if isinstance(source, str | os.PathLike) else [source]


def _batches(pieces: Iterable[Rows], size: int, errors: ErrorLog | None) -> Iterator[Rows]:
    """The same rows, `size` at a time, the last ones fewer. Raises RequestError for no rows."""
    parts: list[Rows] = []
    count, empty = 0, True
    for piece in filter(len, pieces):
        empty = False
        parts.append(piece)
        count += len(piece)
        if count >= size:
            rows, whole = Rows.concatenate(parts), count - count % size
            yield from (rows[begin : begin + size] for begin in range(0, whole, size))
            parts, count = [rows[whole:]] if whole < count else [], count - whole
    if empty:
        raise NoRow(f"found no row to use: {errors or 'the input is empty'}", errors.total if errors else 0)
    if count:
        yield Rows.concatenate(parts)


@dataclass
class _Piece:
    """Some consecutive rows of one source."""

    name: str  # of the source
    before: int  # rows of the source in front of these
    count: int
    complete: Ints  # those of them that have the right number of columns
    faults: list[tuple[int, str, str]]  # row, kind, message (found and expected)


class _Reader:
    """The state of one `read_lines` call across its sources."""

    def __init__(
        self,
        encoding: Encoding,
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labelled: bool | None,
        batch_rows: int,
    ) -> None:
        self.encoding, self.errors, self.seconds = encoding, errors, seconds
        self.columns = [column for column in encoding.schema.columns if column.kind != "label"]
        self.places = {column.name: i for i, column in enumerate(self.columns)}
        self.labelled = labelled  # None: unknown before the first row
        self.seen = self.emitted = 0  # rows met, and those in front of the ones that the batcher holds
        self.batcher = RowBatcher(batch_rows, encoding.shape, partial(scale_pending, encoding))

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.columns) + bool(self.labelled)

    @property
    def numbers_at(self) -> list[int]:
        """Places of the label and of the numbers in a row."""
        first = int(bool(self.labelled))
        return [*range(first), *(self.places[number.name] + first for number in self.encoding.numbers)]

    @property
    def fields_at(self) -> list[int]:
        """Places of the categories in a row."""
        first = int(bool(self.labelled))
        return [self.places[field.name] + first for field in self.encoding.fields]

    def source(self, name: str, kind: str, place: Any) -> Iterator[Rows]:
        """Rows of a source, as `sources.locate` names it."""
        if kind == "text":
            return self.text(name, timed(row_sources.blocks(name, place, PAD), self.seconds, "read"))
        columns, read = None, None
        if kind == "parquet":
            columns = self._choose(name, row_sources.parquet_names(name, *place))
            read = list(dict.fromkeys(columns[i] for i in self._used()))
        tables = row_sources.tables(name, kind, place, read)
        return self.tables(name, timed(tables, self.seconds, "read"), columns)

    def text(self, name: str, blocks: Iterable[bytes]) -> Iterator[Rows]:
        """Blocks of whole lines, `PAD` bytes behind each."""
        start = self.seen
        for block in blocks:
            yield from self._lines(name, self.seen - start, block)

    def whole(self, text: bytes) -> Iterator[Rows]:
        """A text in memory, in blocks of whole lines: the first fault ends it."""
        start = 0
        while start < len(text):
            end = text.rfind(b"\n", start, start + row_sources.BLOCK) + 1 or text.find(b"\n", start) + 1 or len(text)
            if end - start > row_sources.MAX_LINE_BYTES:
                raise RequestError(
                    f"found a line of over {row_sources.MAX_LINE_BYTES >> 20} MB, expected tab separated text"
                )
            feed = b"" if text.endswith(b"\n", start, end) else b"\n"
            yield from self._lines("line", self.seen, b"".join([memoryview(text)[start:end], feed, _BEHIND]))
            start = end

    def memory(self, rows: Any, chunk: int = 4096) -> Iterator[Rows]:
        """Raw rows in a list."""
        for before in range(0, len(rows), chunk):
            part = rows[before : before + chunk]
            if block := _joined(part):
                yield from self._lines("rows", before, block)
                continue
            yield from self.waiting()
            cells = [_values(row, before + i) for i, row in enumerate(part)]
            piece = self._piece("rows", before, np.array([len(row) for row in cells]))
            flat = [value for i in piece.complete.tolist() for value in cells[i]]
            lengths = np.array([len(value) for value in flat], np.int64).reshape(-1, self.width)
            ends = np.cumsum(lengths).reshape(lengths.shape) + len(FRONT)
            yield self._cells(piece, np.frombuffer(b"".join([FRONT, *flat]), np.uint8), ends - lengths, ends)

    def _choose(self, name: str, names: list[str]) -> list[str]:
        """The columns of a row in a table, see `sources.choose_columns`."""
        kinds = [(column.kind, column.name) for column in self.columns]
        columns, labelled = row_sources.choose_columns(name, names, kinds)
        if self.labelled not in (None, labelled):
            raise RequestError(
                f"found {name} {'with' if labelled else 'without'} a label, expected it like the input before it"
            )
        self.labelled = labelled
        return columns

    def tables(self, name: str, tables: Iterable[Any], chosen: list[str] | None = None) -> Iterator[Rows]:
        """Arrow tables with named columns. `chosen`: the columns of a row; None: chosen by their names."""
        yield from self.waiting()
        before = 0
        for table in map(nested.flat_table, tables):
            columns = self._choose(name, table.column_names) if chosen is None else chosen
            arrays = {i: row_sources.without_dictionary(table[columns[i]].combine_chunks()) for i in self._used()}
            numbers = [_numbers(name, columns[i], arrays[i]) for i in self.numbers_at]
            values = np.empty((len(table), len(numbers)), np.float32)
            bad = np.zeros(values.shape, np.bool_)
            for index, (parsed, wrong) in enumerate(numbers):
                values[:, index], bad[:, index] = parsed, wrong
            ids = np.empty((len(table), len(self.encoding.fields)), np.int32)
            for field, index in zip(self.encoding.fields, self.fields_at, strict=True):
                ids[:, field.start] = _ids(name, columns[index], arrays[index], field)
            piece = _Piece(name, before, len(table), np.arange(len(table)), [])
            yield self._rows(piece, values, bad, ids, partial(_shown, arrays))
            before += piece.count

    def _used(self) -> list[int]:
        return [*self.numbers_at, *self.fields_at]

    def _parser(self, labelled: bool) -> Any:
        """The native parser of rows with or without a label; None where there is none."""
        parsers = self.encoding.line_parsers
        if labelled not in parsers:
            native = extension.native()
            parser = None
            if native is not None:
                parser = native.LogParser(len(self.columns) + labelled, "\t", "lines", [], *self.encoding.shape)
                if labelled:
                    parser.real(0, "label")
                if not add_columns(parser, self.encoding, {name: i + labelled for name, i in self.places.items()}):
                    parser = None
            parsers[labelled] = parser
        return parsers[labelled]

    def all(self, pieces: Iterable[Rows]) -> Iterator[Rows]:
        """Yields the same rows, then the buffered rows."""
        yield from pieces
        yield from self.waiting()

    def waiting(self) -> Iterator[Rows]:
        """Rows of the native parser that are not given yet."""
        yield from map(self._placed, self.batcher.flush())

    def _placed(self, parsed: ParsedRows) -> Rows:
        """Yields the next rows with their positions."""
        count = len(parsed.ids)
        index = np.arange(self.emitted, self.emitted + count)
        self.emitted += count
        ids, numbers, scales, labels, *_ = parsed
        return Rows(ids, numbers, scales, labels, np.ones(count, np.float32), index.astype(np.float64), index)

    def _lines(self, name: str, before: int, block: bytes) -> Iterator[Rows]:
        """Rows of a block of whole lines, behind which there are `PAD` bytes, or of the blocks in front of it."""
        if self.labelled is None:
            fields, columns = len(self.columns), block.count(b"\t", 0, block.index(b"\n")) + 1
            labelled = columns > fields if columns in (fields, fields + 1) else None
        else:
            labelled = self.labelled
        parser = None if labelled is None else self._parser(labelled)
        if parser is not None and len(block) < _MAX_BLOCK_BYTES:
            size = len(block) - PAD
            free = self.batcher.scratch(size // len(self.columns) + 1)
            _, _, parsed = parser.parse(np.frombuffer(block, np.uint8), size, *free)
            if parsed is not None:
                self.labelled = labelled
                self.seen += parsed[0]
                yield from map(self._placed, self.batcher.add(parsed))
                return
        yield from self.waiting()
        yield self._split(name, before, block[:-PAD])

    def _split(self, name: str, before: int, block: bytes) -> Rows:
        """Split a block at tabs and line feeds, all its lines at once."""
        data = np.frombuffer(FRONT + block, np.uint8)
        marks = np.flatnonzero(data <= 10)
        kinds = data[marks]
        if kinds.min() < 9:  # other control characters are a category's own bytes
            marks, kinds = marks[kinds >= 9], kinds[kinds >= 9]
        breaks = np.flatnonzero(kinds == 10)
        counts = np.diff(breaks, prepend=-1)
        begins = np.concatenate([[len(FRONT)], marks[breaks[:-1]] + 1])
        piece = self._piece(name, before, counts)
        if piece.faults:
            complete = np.isin(np.arange(piece.count), piece.complete)
            marks, begins = marks[np.repeat(complete, counts)], begins[piece.complete]
        ends = marks.reshape(-1, self.width)
        starts = np.empty_like(ends)
        starts[:, 0], starts[:, 1:] = begins, ends[:, :-1] + 1
        ends[:, -1] -= (ends[:, -1] > starts[:, -1]) & (data[ends[:, -1] - 1] == 13)  # CR LF
        return self._cells(piece, data, starts, ends)

    def _piece(self, name: str, before: int, counts: Ints) -> _Piece:
        """Rows with these numbers of columns; the first row with a possible one decides about labels."""
        fields, first = len(self.columns), 0
        if self.labelled is None:
            possible = np.flatnonzero((counts == fields) | (counts == fields + 1))
            first = int(possible[0]) if possible.size else len(counts)
            self.labelled = bool(counts[first] > fields) if possible.size else None
        complete = counts == self.width if self.labelled is not None else np.zeros(counts.shape, np.bool_)
        either = f"{fields + 1} (with label) or {fields} (without)"
        expected = f"{self.width}, {'with' if self.labelled else 'without'} a label like the rows before"
        faults = []
        wrong = np.flatnonzero(~complete)
        for row in wrong[: 1 if self.errors is None else None].tolist():  # the first one ends the input
            width = "1 column" if counts[row] == 1 else f"{counts[row]} columns"
            faults.append((row, "columns", f"found {width}, expected {either if row < first else expected}"))
        return _Piece(name, before, len(counts), np.flatnonzero(complete), faults)

    def _cells(self, piece: _Piece, data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> Rows:
        """Rows of the text cells `data[starts[i, j]:ends[i, j]]`."""
        values, bad = parse_numbers(data, starts[:, self.numbers_at], ends[:, self.numbers_at])
        begins, lengths = starts[:, self.fields_at], (ends - starts)[:, self.fields_at]
        hashes = fingerprints(data, begins.ravel(), lengths.ravel()).reshape(lengths.shape)
        ids = np.empty(lengths.shape, np.int32)
        for field, begin, length, field_hashes in zip(self.encoding.fields, begins.T, lengths.T, hashes.T, strict=True):
            how = field.column.encoding
            if how["type"] == "vocabulary":
                texts = [data[i : i + n].tobytes() for i, n in zip(begin.tolist(), length.tolist(), strict=True)]
                field_ids = field.ids(pa.array(texts, pa.binary()))
            else:
                field_ids = buckets_of(field_hashes, int(how["buckets"])) + np.int32(how["type"] == "hash")
            ids[:, field.start] = np.where(length == 0, np.int32(field.last), field_ids)
        return self._rows(
            piece, values, bad, ids, lambda i, j: data[starts[i, j] : ends[i, j]].tobytes().decode("utf-8", "replace")
        )

    def _rows(
        self,
        piece: _Piece,
        values: Floats,
        bad: npt.NDArray[np.bool_],
        ids: npt.NDArray[np.int32],
        show: Callable[[int, int], Any],
    ) -> Rows:
        """Check labels and numbers, report the faults of the piece in order, encode the other rows."""
        labelled, faults, complete = bool(self.labelled), piece.faults, piece.complete
        if labelled:
            bad[:, 0] |= (values[:, 0] != 0) & (values[:, 0] != 1)  # so is a missing one
        wrong = bad.any(axis=1)
        for row in np.flatnonzero(wrong)[: 1 if self.errors is None else None].tolist():
            column = self.numbers_at[int(np.argmax(bad[row]))]
            shown = reprlib.repr(show(row, column))
            if labelled and column == 0:
                faults.append((int(complete[row]), "label", f"found label {shown}, expected 0 or 1"))
            else:
                message = f"found {shown} in column {column + 1}, expected a number or nothing"
                faults.append((int(complete[row]), "number", message))
        for row, kind, message in sorted(faults):
            message = f"{piece.name}:{piece.before + row + 1}: {message}"
            if self.errors is None:
                header = ", and no header line" if piece.before + row == 0 else ""
                raise RequestError(f"{message}{header} (--on-error skip leaves such rows out)")
            self.errors.add(kind, message)
        if wrong.any():
            values, ids, complete = values[~wrong], ids[~wrong], complete[~wrong]
        index = self.seen + complete
        self.seen += piece.count
        self.emitted = self.seen
        if self.errors is not None and (left_out := self.errors.total) >= max(
            MAX_SKIPPED, MAX_SKIPPED_SHARE * self.seen
        ):
            raise RequestError(
                f"found {left_out:,} unusable among the first {self.seen:,} rows, expected a log of clicks; "
                f"first: {self.errors.messages[0]}"
            )
        count, (_, width, lists) = len(ids), self.encoding.shape
        numbers = np.zeros((count, width), np.float32)
        for number in range(len(self.encoding.numbers)):
            numbers[:, number] = self.encoding.scaled(number, values[:, labelled + number].astype(np.float64))
        self.encoding.fill(numbers)
        labels = values[:, 0].copy() if labelled else None
        scales, weights = np.empty((count, lists), np.float32), np.ones(count, np.float32)
        return Rows(ids, numbers, scales, labels, weights, index.astype(np.float64), index)


def _is_row(source: Any) -> bool:
    """Whether an element of the input is a raw row rather than the name of a source."""
    return "\t" in source if isinstance(source, str) else not isinstance(source, os.PathLike)


def _joined(rows: Any) -> bytes | None:
    """Raw rows as one block of lines, `PAD` bytes behind them; None where one is no text or has a line break."""
    if all(isinstance(row, str) for row in rows):
        block = b"".join(["\n".join(rows).encode("utf-8", "surrogateescape"), b"\n", _BEHIND])
    elif all(isinstance(row, bytes) for row in rows):
        block = b"\n".join([*rows, _BEHIND])
    else:
        return None
    return block if block.count(b"\n") == len(rows) else None


def _values(row: Any, position: int) -> list[bytes]:
    """Fields of one raw row in memory."""
    if isinstance(row, str):
        row = row.encode("utf-8", "surrogateescape")
    if isinstance(row, bytes):
        return row.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if not isinstance(row, Sequence | np.ndarray):
        raise RequestError(
            f"rows:{position + 1}: found {type(row).__name__}, expected tab separated text or a sequence of values"
        )
    return [_bytes(value) for value in row]


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
            return b""
        value = str(int(value)) if isinstance(value, bool | np.bool_) else str(value)
    encoded: bytes = value.encode("utf-8", "surrogateescape")
    return encoded


def _shown(arrays: dict[int, Any], row: int, column: int) -> Any:
    value = arrays[column][row].as_py()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _numbers(name: str, column: str, array: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """A column as float32 [n], NaN where null, NaN or "", and where it holds no number."""
    kind = array.type
    if pa.types.is_large_binary(kind):
        array = array.fill_null(b"")
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets or b"", np.int64)[array.offset : array.offset + len(array) + 1] + len(FRONT)
        return parse_numbers(np.frombuffer(FRONT + (data.to_pybytes() if data else b""), np.uint8), ends[:-1], ends[1:])
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        raise RequestError(f"found {kind} in the column {column} of {name}, expected numbers")
    with np.errstate(over="ignore"):
        values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
    return values, np.isinf(values)


def _ids(name: str, column: str, array: Any, field: Field) -> npt.NDArray[np.int32]:
    """A column as ids, int32 [n]; integers count as their decimal text."""
    if pa.types.is_integer(array.type):
        array = array.cast(pa.string())
    elif not pa.types.is_large_binary(array.type):
        raise RequestError(f"found {array.type} in the column {column} of {name}, expected text or whole numbers")
    empty = pc.equal(pc.binary_length(array), 0).fill_null(True).to_numpy(zero_copy_only=False)
    return np.where(empty, np.int32(field.last), field.ids(array))
