"""Difference of two files: tables by rows, text by lines, other bytes as they are.

A newer file is a sequence of pieces. Rows of a table that the older file has are copied from it, and only the other
rows are in the delta. A row that moves, such as a row behind an evicted id, takes a few bytes at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.deltas.tables import Table, tables_of

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]

BLOCK = 1 << 24  # bytes compared at once
SEARCHED_SHARE = 0.5  # share of changed rows up to which moved rows are not searched
TEXT = (".json", ".csv", ".tsv", ".txt")
PAGE = 64  # bytes of a row of files without tables


@dataclass(frozen=True)
class Piece:
    """A contiguous range of bytes of the newer file.

    Attributes:
        kind: "copy" of the older file, "data" of the delta, or "rows" of both.
        size: Number of bytes.
        old: First byte in the older file, of a copy and of rows.
        row_bytes: Bytes of a row.
        old_rows: Number of rows in the older file.
        runs: Number of runs of rows that are copied from other places of the older table; -1: rows stay in their
            places.
        given: Number of rows in the delta.
        table: Name of the table.
    """

    kind: str
    size: int
    old: int = -1
    row_bytes: int = 0
    old_rows: int = 0
    runs: int = -1
    given: int = 0
    table: str = ""

    @property
    def rows(self) -> int:
        """Number of rows in the newer file."""
        return self.size // self.row_bytes

    @property
    def data(self) -> int:
        """Number of bytes in the delta."""
        return self.size if self.kind == "data" else self.given * self.row_bytes

    @property
    def indices(self) -> int:
        """Number of integers in the delta."""
        return max(self.runs, 0) * 3 + self.given

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes that differ from their defaults."""
        plain = Piece("", 0)
        return {name: value for name, value in asdict(self).items() if value != getattr(plain, name)}


@dataclass(frozen=True)
class FileDelta:
    """Difference of two files.

    Attributes:
        pieces: Pieces of the newer file in order.
        data: Bytes of the delta, one array a piece.
        indices: Of every piece with rows, its runs (row, older row, count) and its rows in the delta; int64.
    """

    pieces: list[Piece]
    data: list[Bytes]
    indices: list[Rows]


def difference(old: Path, new: Path) -> FileDelta:
    """Compares two files.

    Args:
        old: Older file; it may be missing.
        new: Newer file.

    Returns:
        The difference.
    """
    made = FileDelta([], [], [])
    older, newer = _mapped(old), _mapped(new)
    if new.suffix in TEXT:
        _compare_lines(made, older.tobytes(), newer.tobytes())
        return made
    at_old = at_new = 0
    for before, after in _matched(_tables(old, older), _tables(new, newer)):
        _gap(made, older, at_old, before.offset, newer[at_new : after.offset])
        _compare_rows(made, before, after, older, newer)
        at_old, at_new = before.end, after.end
    _gap(made, older, at_old, len(older), newer[at_new:])
    return made


def _mapped(path: Path) -> Bytes:
    if not path.is_file() or not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def _tables(path: Path, content: Bytes) -> list[Table]:
    """Returns the tables of a file; a file without tables is one of short rows."""
    return tables_of(path) or [Table("", 0, len(content) // PAGE, PAGE)]


def _matched(old: Sequence[Table], new: Sequence[Table]) -> Iterator[tuple[Table, Table]]:
    """Yields the tables of both files with the same name and width, as long as they have the same order."""
    before, end = {table.name: table for table in old}, 0
    for table in new:
        match = before.get(table.name)
        if match is not None and match.row_bytes == table.row_bytes and match.offset >= end:
            end = match.end
            yield match, table


def _gap(made: FileDelta, older: Bytes, start: int, end: int, new: Bytes) -> None:
    """Adds the bytes between two tables."""
    if not len(new):
        return
    if np.array_equal(older[start:end], new):
        made.pieces.append(Piece("copy", len(new), start))
    else:
        made.pieces.append(Piece("data", len(new)))
        made.data.append(np.asarray(new))


def _compare_rows(made: FileDelta, old: Table, new: Table, older: Bytes, newer: Bytes) -> None:
    if not new.rows:
        return
    before = older[old.offset : old.end].reshape(old.rows, old.row_bytes)
    after = newer[new.offset : new.end].reshape(new.rows, new.row_bytes)
    runs: Rows | None = None
    changed = _changed(before, after)
    if len(changed) > SEARCHED_SHARE * new.rows or old.rows != new.rows:
        kept, moved = _moved(before, after)
        if old.rows != new.rows or len(moved) < len(changed):
            runs, changed = kept, moved
    if len(changed) == new.rows and runs is not None and not len(runs):
        made.pieces.append(Piece("data", new.rows * new.row_bytes))
        made.data.append(after.reshape(-1))
        return
    if runs is None and not len(changed):
        made.pieces.append(Piece("copy", new.rows * new.row_bytes, old.offset))
        return
    count = -1 if runs is None else len(runs)
    size = new.rows * new.row_bytes
    piece = Piece("rows", size, old.offset, new.row_bytes, old.rows, count, len(changed), new.name)
    made.pieces.append(piece)
    made.data.append(after[changed].reshape(-1))
    made.indices.append(np.concatenate([np.zeros(0, np.int64) if runs is None else runs.reshape(-1), changed]))


def _blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    count = max(BLOCK // row_bytes, 1)
    return (slice(start, start + count) for start in range(0, rows, count))


def _changed(before: Bytes, after: Bytes) -> Rows:
    """Returns the rows that differ from the row at the same position; rows beyond the older table differ."""
    common = min(len(before), len(after))
    blocks = [
        block.start
        + np.flatnonzero((before[block][: common - block.start] != after[block][: common - block.start]).any(1))
        for block in _blocks(common, after.shape[1])
    ]
    return np.concatenate([*blocks, np.arange(common, len(after))]).astype(np.int64)


def _moved(before: Bytes, after: Bytes) -> tuple[Rows, Rows]:
    """Finds rows anywhere in the older table; returns runs of them, [runs, 3], and the rows that are not there."""
    keys, sought = _keys(before), _keys(after)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], sought), max(len(keys) - 1, 0))
    source = order[place] if len(order) else np.full(len(after), -1)
    common = min(len(before), len(after))
    source[:common] = np.where(keys[:common] == sought[:common], np.arange(common), source[:common])
    for block in _blocks(len(after), after.shape[1]):
        equal = (before[source[block]] == after[block]).all(1) if len(before) else np.zeros(len(after[block]), bool)
        source[block] = np.where(equal, source[block], -1)
    there = source >= 0
    starts = np.flatnonzero(there & ~(np.r_[False, there[:-1]] & (np.diff(source, prepend=-2) == 1)))
    inner = np.flatnonzero(there)
    counts = np.diff(np.searchsorted(inner, np.r_[starts, len(after)]))
    return np.stack([starts, source[starts], counts], 1).astype(np.int64), np.flatnonzero(~there).astype(np.int64)


def _keys(rows: Bytes) -> NDArray[np.uint64]:
    """Returns a key of every row, equal for equal rows."""
    width = rows.shape[1]
    factors = np.random.default_rng(0).integers(1, 1 << 63, -(-width // 8), np.uint64) | np.uint64(1)
    keys = np.zeros(len(rows), np.uint64)
    for block in _blocks(len(rows), width):
        words = np.pad(rows[block], ((0, 0), (0, -width % 8))).view(np.uint64)
        mixed = words * factors
        keys[block] = (mixed ^ (mixed >> np.uint64(29))).sum(axis=1, dtype=np.uint64)
    return keys


def _compare_lines(made: FileDelta, old: bytes, new: bytes) -> None:
    """Adds copies for runs of lines that the older text has, and the bytes of all other lines."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    offsets = [0, *itertools.accumulate(map(len, before))]
    places = {line: number for number, line in reversed([*enumerate(before)])}
    position = number = 0
    while position < len(after):
        start, first = position, number
        while position < len(after) and number < len(before) and before[number] == after[position]:
            position, number = position + 1, number + 1
        if position > start:
            made.pieces.append(Piece("copy", offsets[number] - offsets[first], offsets[first]))
        start = position
        while position < len(after) and after[position] not in places:
            position += 1
        if position > start:
            lines = b"".join(after[start:position])
            made.pieces.append(Piece("data", len(lines)))
            made.data.append(np.frombuffer(lines, np.uint8))
        if position < len(after):
            number = places[after[position]]


def write(pieces: Sequence[Piece], old: Bytes, new: Bytes, data: Bytes, indices: Rows) -> None:
    """Writes the newer file.

    Args:
        pieces: Pieces of the newer file.
        old: Bytes of the older file.
        new: Bytes of the newer file, to write.
        data: Bytes of the delta.
        indices: Whole numbers of the delta.

    Raises:
        RequestError: The pieces do not fit the files.
    """
    for piece, target, own, numbers in _parts(pieces, new, data, indices):
        if piece.kind == "data":
            target[:] = own
        elif piece.kind == "copy":
            target[:] = old[piece.old : piece.old + piece.size]
        else:
            rows = target.reshape(piece.rows, piece.row_bytes)
            before = old[piece.old : piece.old + piece.old_rows * piece.row_bytes].reshape(-1, piece.row_bytes)
            if piece.runs < 0:
                rows[:] = before
            for row, source, count in numbers[: max(piece.runs, 0) * 3].reshape(-1, 3).tolist():
                rows[row : row + count] = before[source : source + count]
            rows[numbers[max(piece.runs, 0) * 3 :]] = own.reshape(-1, piece.row_bytes)


def keeps_places(pieces: Sequence[Piece], old_size: int) -> bool:
    """Returns whether all bytes that are not in the delta keep their places, so that a file can be changed in place.

    Args:
        pieces: Pieces of the newer file.
        old_size: Bytes of the older file.
    """
    starts = itertools.accumulate((piece.size for piece in pieces), initial=0)
    same = all(
        piece.kind == "data" or (piece.old == start and piece.runs < 0)
        for piece, start in zip(pieces, starts, strict=False)
    )
    return same and sum(piece.size for piece in pieces) == old_size


def change(pieces: Sequence[Piece], content: Bytes, data: Bytes, indices: Rows) -> int:
    """Changes the bytes of an older file to those of the newer, where `keeps_places` holds.

    Args:
        pieces: Pieces of the newer file.
        content: Bytes of the file.
        data: Bytes of the delta.
        indices: Whole numbers of the delta.

    Returns:
        Number of rows that were written.

    Raises:
        RequestError: The pieces do not fit the file.
    """
    rows = 0
    for piece, target, own, numbers in _parts(pieces, content, data, indices):
        if piece.kind == "data":
            target[:] = own
        elif piece.kind == "rows":
            row = np.dtype((np.void, piece.row_bytes))  # copied as a whole
            target.view(row)[numbers] = own.view(row)
            rows += len(numbers)
    return rows


def _parts(
    pieces: Sequence[Piece], content: Bytes, data: Bytes, indices: Rows
) -> Iterator[tuple[Piece, Bytes, Bytes, Rows]]:
    """Yields the pieces with their part of the content, and their bytes and integers in the delta.

    Raises RequestError where they do not fit.
    """
    start = offset = first = 0
    if (
        sum(piece.size for piece in pieces) != len(content)
        or sum(piece.data for piece in pieces) != len(data)
        or sum(piece.indices for piece in pieces) != len(indices)
    ):
        raise RequestError("its pieces do not fit its data; make it again with zoo delta")
    for piece in pieces:
        target = content[start : start + piece.size]
        yield piece, target, data[offset : offset + piece.data], indices[first : first + piece.indices]
        start, offset, first = start + piece.size, offset + piece.data, first + piece.indices
