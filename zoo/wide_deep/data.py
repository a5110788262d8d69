"""Rows of the Criteo format, read from any source into arrays, in constant memory.

A row is a label (0 or 1; optional), 13 numbers and 26 categories, tab separated, an empty field where a value is
missing (Kaggle's Display Advertising Challenge, 2014). Categories are hashed into buckets while reading; numbers stay
raw until `zoo.wide_deep.features` brings them to [0, 1].

Text is split by the native parser of `pipelines.kernels`. A block with a row that is not as it should be, and
everything where there is no native parser, goes through numpy: the reference, which alone reports faults. No CSV
library is used: every byte but tab and line feed may stand in a category, and line numbers are those of the file
(pyarrow makes an empty line a row of missing values and splits at a bare CR).
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
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.clicks import sources as row_sources
from zoo.clicks.hashing import buckets_of, fingerprints, hash_buckets, per_field
from zoo.clicks.numbers import PAD, Floats, Ints, parse_numbers
from zoo.clicks.reading import BAD_SHARE, HOPELESS, ErrorLog, NoRow, timed

NUMERIC, CATEGORICAL, BUCKETS = 13, 26, 1000


class Counts(TypedDict):
    """Sizes of a row, as `read_rows` takes them."""

    numeric: int
    categorical: int
    buckets: int | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows as read: `numbers` raw, `ids` hashed.

    numbers: float32 [n, numeric], NaN = missing (exact up to 2^24; the relative error of larger ones, 6e-8, vanishes in
    their logarithm).
    ids: int32 [n, categorical], bucket of each category, an empty one being the empty string's bucket.
    labels: float32 [n], 0 or 1; None where the input has none.
    index: int64 [n], 0-based position of each row in the whole input, rows left out counted.
    """

    numbers: Floats
    ids: npt.NDArray[np.int32]
    labels: Floats | None
    index: Ints

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(
            self.numbers[rows], self.ids[rows], None if self.labels is None else self.labels[rows], self.index[rows]
        )

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """One Rows of several (at least one), in order; all of them labelled or none."""
        if len(parts) == 1:
            return parts[0]
        labels = [part.labels for part in parts if part.labels is not None]
        return Rows(
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(labels) if labels else None,
            np.concatenate([part.index for part in parts]),
        )


# ------------------------------------------------------------------------------------------------------------- reading


def read_rows(
    sources: Any,
    *,
    numeric: int = NUMERIC,
    categorical: int = CATEGORICAL,
    buckets: int | Sequence[int] = BUCKETS,
    batch_rows: int = 65536,
    on_error: str = "raise",
    errors: ErrorLog | None = None,
    seconds: defaultdict[str, float] | None = None,
    with_label: bool | None = None,
) -> Iterator[Rows]:
    """Read rows as a stream of `Rows` of `batch_rows` rows each (the last one shorter), in input order and constant
    memory.

    `buckets` is that of all categories, or a sequence with that of each, see `hashing.buckets_of`. `sources` is one or
    a list of: a TSV file, plain or gzip (told by its content); a .parquet file; "-" for stdin; a folder written by
    `datasets.save_to_disk` or a data set on the hub, "org/name", both optionally with ":split" (parquet and data sets:
    columns label / click / clicked, I1.. or integer_feature_1.., C1.. or categorical_feature_1.. in any case, else 39
    or 40 columns by order); the bytes of a TSV file as io.BytesIO; an Arrow table. Or it is a list of raw rows: each a
    tab separated str or bytes, or a sequence of values where None, NaN and "" are missing. Whether rows have a label is
    decided by the first row's column count, unless `with_label` says it, and must hold for all of them.

    A row with a wrong column count, a number that is none (plain integers and decimals are; nan and inf are not), or a
    label other than 0 and 1 raises RequestError with file and line; with on_error="skip" it is left out and counted in
    `errors`, unless nearly all of the first million rows are such. Input that is missing, empty, truncated, of another
    kind, or without one complete row raises RequestError; a hub that fails on the way raises ZooError.
    `seconds["read"]` counts the time in which the sources gave their bytes or tables.
    """
    if on_error not in ("raise", "skip"):
        raise RequestError(f"found on_error {on_error!r}, wanted raise or skip")
    if batch_rows < 1:
        raise RequestError(f"found {batch_rows} rows a batch, wanted at least 1")
    log = None if on_error == "raise" else ErrorLog() if errors is None else errors
    reader = _Reader(numeric, categorical, buckets, log, defaultdict(float) if seconds is None else seconds, with_label)
    if isinstance(sources, io.BytesIO):
        return _batches(reader.whole(sources.getvalue()), batch_rows, log)
    if isinstance(sources, pa.Table):
        return _batches(reader.tables("the table", [sources]), batch_rows, log)
    if isinstance(sources, str | bytes | os.PathLike):
        sources = [sources]
    if not isinstance(sources, list | tuple | np.ndarray):
        raise RequestError(f"found {type(sources).__name__} as input, wanted paths or a list of rows")
    if not len(sources):
        raise RequestError("found no input, wanted at least one file or row")
    if _is_row(sources[0]):
        return _batches(reader.memory(sources), batch_rows, log)
    try:
        opened = [
            row_sources.find(source) for source in sources
        ]  # a file that is missing shows before the first one is read
    except OSError as error:
        raise RequestError(f"cannot read {error.filename}: {error.strerror}") from error
    return _batches(
        (rows for name, kind, place in opened for rows in reader.source(name, kind, place)), batch_rows, log
    )


def _batches(pieces: Iterable[Rows], size: int, log: ErrorLog | None) -> Iterator[Rows]:
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
            parts, count = [rows[whole:]], count - whole
    if empty:
        raise NoRow(f"found no row to use: {log or 'the input is empty'}", log.total if log else 0)
    if count:
        yield Rows.concatenate(parts)


@dataclass
class _Piece:
    """Some consecutive rows of one source."""

    name: str  # of the source
    before: int  # rows of the source in front of these
    count: int
    complete: Ints  # those of them that have the right number of columns
    faults: list[tuple[int, str, str]]  # row, kind, what was found and wanted


class _Reader:
    """What one `read_rows` call knows across its sources."""

    def __init__(
        self,
        numeric: int,
        categorical: int,
        buckets: int | Sequence[int],
        errors: ErrorLog | None,
        seconds: defaultdict[str, float],
        labelled: bool | None,
    ) -> None:
        self.numeric, self.categorical, self.buckets, self.errors, self.seconds = (
            numeric,
            categorical,
            buckets,
            errors,
            seconds,
        )
        self.native = extension.native()
        self.labelled = labelled  # None: unknown before the first row
        self.seen = 0

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.numeric + self.categorical + bool(self.labelled)

    def source(self, name: str, kind: str, place: Any) -> Iterator[Rows]:
        """Rows of a source, as `sources.find` names it."""
        if kind == "text":
            return self.text(name, timed(row_sources.blocks(name, place), self.seconds, "read"))
        return self.tables(name, timed(row_sources.tables(name, kind, place), self.seconds, "read"))

    def text(self, name: str, blocks: Iterable[bytes]) -> Iterator[Rows]:
        """Blocks of whole lines."""
        start = self.seen
        for block in blocks:
            yield self._lines(name, self.seen - start, block)

    def whole(self, text: bytes) -> Iterator[Rows]:
        """A text in memory."""
        if text:
            yield self._lines("line", 0, text if text.endswith(b"\n") else text + b"\n")

    def memory(self, rows: Any, chunk: int = 4096) -> Iterator[Rows]:
        """Raw rows in a list."""
        for before in range(0, len(rows), chunk):
            part = rows[before : before + chunk]
            if block := _joined(part):
                yield self._lines("rows", before, block)
                continue
            cells = [_values(row, before + i) for i, row in enumerate(part)]
            piece = self._piece("rows", before, np.array([len(row) for row in cells]))
            flat = [value for i in piece.complete.tolist() for value in cells[i]]
            lengths = np.array([len(value) for value in flat], np.int64).reshape(-1, self.width)
            ends = np.cumsum(lengths).reshape(lengths.shape) + len(PAD)
            yield self._cells(piece, np.frombuffer(b"".join([PAD, *flat]), np.uint8), ends - lengths, ends)

    def tables(self, name: str, tables: Iterable[Any]) -> Iterator[Rows]:
        """Arrow tables with named columns."""
        before = 0
        for table in tables:
            columns, labelled = row_sources.choose_columns(name, table.column_names, self.numeric, self.categorical)
            if self.labelled not in (None, labelled):
                raise RequestError(
                    f"found {name} {'with' if labelled else 'without'} a label, wanted it like the input before it"
                )
            self.labelled = labelled
            arrays = [row_sources.plain(table[column].combine_chunks()) for column in columns]
            named, split = list(zip(columns, arrays, strict=True)), self.numeric + labelled
            values, bad = (
                np.stack(parts, axis=1)
                for parts in zip(*(_numbers(name, *column) for column in named[:split]), strict=True)
            )
            fields = zip(named[split:], per_field(self.buckets, self.categorical), strict=True)
            ids = np.stack([_hashed(name, *column, size) for column, size in fields], axis=1)
            piece = _Piece(name, before, len(table), np.arange(len(table)), [])
            yield self._rows(piece, values, bad, ids, partial(_shown, arrays))
            before += piece.count

    def _lines(self, name: str, before: int, block: bytes) -> Rows:
        """Rows of a block of whole lines."""
        if self.native is not None and self.labelled is None:
            fields, columns = self.numeric + self.categorical, block.count(b"\t", 0, block.index(b"\n")) + 1
            self.labelled = columns > fields if columns in (fields, fields + 1) else None
        if self.native is not None and self.labelled is not None:
            parsed = self.native.parse_rows(block, self.numeric, self.categorical, self.buckets, self.labelled)
            if parsed is not None:
                labels, numbers, ids = parsed
                self.seen += len(ids)
                return Rows(numbers, ids, labels, np.arange(self.seen - len(ids), self.seen))
        return self._split(name, before, block)

    def _split(self, name: str, before: int, block: bytes) -> Rows:
        """Split a block at tabs and line feeds, all its lines at once."""
        data = np.frombuffer(PAD + block, np.uint8)
        marks = np.flatnonzero(data <= 10)
        kinds = data[marks]
        if kinds.min() < 9:  # other control characters are a category's own bytes
            marks, kinds = marks[kinds >= 9], kinds[kinds >= 9]
        breaks = np.flatnonzero(kinds == 10)
        counts = np.diff(breaks, prepend=-1)
        begins = np.concatenate([[len(PAD)], marks[breaks[:-1]] + 1])
        piece = self._piece(name, before, counts)
        if piece.faults:
            marks, begins = (
                marks[np.repeat(np.isin(np.arange(piece.count), piece.complete), counts)],
                begins[piece.complete],
            )
        ends = marks.reshape(-1, self.width)
        starts = np.empty_like(ends)
        starts[:, 0], starts[:, 1:] = begins, ends[:, :-1] + 1
        ends[:, -1] -= (ends[:, -1] > starts[:, -1]) & (data[ends[:, -1] - 1] == 13)  # CR LF
        return self._cells(piece, data, starts, ends)

    def _piece(self, name: str, before: int, counts: Ints) -> _Piece:
        """Rows with these numbers of columns; the first row with a possible one decides about labels."""
        fields, first = self.numeric + self.categorical, 0
        if self.labelled is None:
            known = np.flatnonzero((counts == fields) | (counts == fields + 1))
            first = int(known[0]) if known.size else len(counts)
            self.labelled = bool(counts[first] > fields) if known.size else None
        complete = counts == self.width if self.labelled is not None else np.zeros(counts.shape, np.bool_)
        either = f"{fields + 1} (with label) or {fields} (without)"
        wanted = f"{self.width}, {'with' if self.labelled else 'without'} a label like the rows before"
        faults = []
        for row in np.flatnonzero(~complete).tolist():
            found = "1 column" if counts[row] == 1 else f"{counts[row]} columns"
            faults.append((row, "columns", f"found {found}, wanted {either if row < first else wanted}"))
        return _Piece(name, before, len(counts), np.flatnonzero(complete), faults)

    def _cells(self, piece: _Piece, data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> Rows:
        """Rows of the text cells `data[starts[i, j]:ends[i, j]]`."""
        split = self.width - self.categorical
        values, bad = parse_numbers(data, starts[:, :split], ends[:, :split])
        hashes = fingerprints(data, starts[:, split:].ravel(), (ends[:, split:] - starts[:, split:]).ravel())
        ids = buckets_of(hashes.reshape(-1, self.categorical), self.buckets)
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
        """Check labels and numbers, report the faults of the piece in order, keep the other rows."""
        labelled, faults, complete = bool(self.labelled), piece.faults, piece.complete
        if labelled:
            bad[:, 0] |= (values[:, 0] != 0) & (values[:, 0] != 1)  # so is a missing one
        wrong = bad.any(axis=1)
        for row in np.flatnonzero(wrong).tolist():
            column = int(np.argmax(bad[row]))
            found = reprlib.repr(show(row, column))
            if labelled and column == 0:
                faults.append((int(complete[row]), "label", f"found label {found}, wanted 0 or 1"))
            else:
                faults.append(
                    (int(complete[row]), "number", f"found {found} in column {column + 1}, wanted a number or nothing")
                )
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
        if self.errors is not None and (left_out := self.errors.total) >= max(HOPELESS, BAD_SHARE * self.seen):
            raise RequestError(
                f"found {left_out:,} unusable among the first {self.seen:,} rows, wanted a log of clicks; "
                f"first: {self.errors.messages[0]}"
            )
        return Rows(np.ascontiguousarray(values[:, labelled:]), ids, values[:, 0].copy() if labelled else None, index)


# ------------------------------------------------------------------------------------------------------------- sources


def _is_row(source: Any) -> bool:
    """Whether an element of the input is a raw row rather than the name of a source."""
    return "\t" in source if isinstance(source, str) else not isinstance(source, os.PathLike)


def _joined(rows: Any) -> bytes | None:
    """Raw rows as one block of lines; None where one is no text or has a line break of its own."""
    if all(isinstance(row, str) for row in rows):
        block = "\n".join(rows).encode("utf-8", "surrogateescape") + b"\n"
    elif all(isinstance(row, bytes) for row in rows):
        block = b"\n".join(rows) + b"\n"
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
            f"rows:{position + 1}: found {type(row).__name__}, wanted tab separated text or a sequence of values"
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


def _shown(arrays: list[Any], row: int, column: int) -> Any:
    value = arrays[column][row].as_py()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _numbers(name: str, column: str, array: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """A column as float32 [n], NaN where null, NaN or "", and where it holds no number."""
    kind = array.type
    if pa.types.is_large_binary(kind):
        array = array.fill_null(b"")
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets or b"", np.int64)[array.offset : array.offset + len(array) + 1] + len(PAD)
        return parse_numbers(np.frombuffer(PAD + (data.to_pybytes() if data else b""), np.uint8), ends[:-1], ends[1:])
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        raise RequestError(f"found {kind} in the column {column} of {name}, wanted numbers")
    with np.errstate(over="ignore"):
        values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
    return values, np.isinf(values)


def _hashed(name: str, column: str, array: Any, buckets: int | Sequence[int]) -> npt.NDArray[np.int32]:
    """A column as int32 [n] buckets; integers count as their decimal text."""
    if pa.types.is_integer(array.type):
        array = array.cast(pa.string())
    elif not pa.types.is_large_binary(array.type):
        raise RequestError(f"found {array.type} in the column {column} of {name}, wanted text or whole numbers")
    return hash_buckets(array, buckets)
