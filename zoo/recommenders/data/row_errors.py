"""Shared parts of the log readers: rows left out, row positions and timing."""

from __future__ import annotations

import csv
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

LINE_ENDS = b"\n\r"
MAX_SKIPPED, MAX_SKIPPED_SHARE = 1_000_000, 0.99  # rows left out, and the share of all rows, from which on reading ends


@dataclass
class ErrorLog:
    """Counts rows that were left out, and keeps the first messages.

    Attributes:
        limit: Number of messages to keep.
        counts: Rows per kind of fault ("columns", "label", "number", "weight", "vector").
        messages: The first `limit` messages.
        outside: Values of columns of row numbers that are no row of their table, by column.
    """

    limit: int = 5
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    outside: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, message: str) -> None:
        """Counts one row.

        Args:
            kind: Kind of fault: "columns", "label", "number", "weight" or "vector".
            message: Description of the fault, with the place of the row.
        """
        self.counts[kind] += 1
        if len(self.messages) < self.limit:
            self.messages.append(message)

    def warn(self) -> None:
        """Logs the rows left out, and the ids that are no row of their table."""
        if self.total:
            logger.warning("%s", self)
        for name, count in self.outside.items():
            logger.warning("%s: ids out of the range of its table, taken as unknown: %s", name, f"{count:,}")

    @property
    def total(self) -> int:
        """Rows left out."""
        return self.counts.total()

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))
        rows = "1 row" if self.total == 1 else f"{self.total} rows"
        return f"{rows} left out ({kinds}); first: {self.messages[0]}" if self.total else "no rows left out"


class RowPositions:
    """0-based positions of the rows of one log in the input of all logs, counting the rows left out.

    Args:
        start: Position of the first row of the log.

    Attributes:
        start: Position of the first row of the log.
        end: One past the position of the last row so far.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = self._next = start
        self._left_out: list[int] = []  # at or behind `_next`, ascending

    def skip(self, row: int) -> None:
        """Leaves out a row. Rows are skipped in order, and before any later row is taken.

        Args:
            row: Index of the row in the log.
        """
        self._left_out.append(self.start + row)
        self.end = max(self.end, self.start + row + 1)

    def take(self, count: int) -> NDArray[np.int64]:
        """Returns the positions of the next rows that are not left out.

        Args:
            count: Number of rows.

        Returns:
            Positions, int64 [count].
        """
        if not self._left_out:
            index: NDArray[np.int64] = np.arange(self._next, self._next + count)
            self._next += count
            self.end = max(self.end, self._next) if count else self.end
            return index
        out, rows = np.array(self._left_out, np.int64), np.arange(count)
        in_front = out - np.arange(len(out)) - self._next  # of each one left out: rows that stay
        index = self._next + rows + np.searchsorted(in_front, rows, side="right")
        if count:
            self._next = int(index[-1]) + 1
            self._left_out = out[out >= self._next].tolist()
            self.end = max(self.end, self._next)
        return index


def closed_quotes(
    batches: Iterable[pa.RecordBatch], text: Callable[[], AbstractContextManager[IO[str]]], delimiter: str, before: int
) -> Iterator[pa.RecordBatch]:
    """Refuses CSV in which a quoted cell spans lines and ends in the middle of a value: a lone quote has joined rows.

    Args:
        batches: Text columns of the records; they are passed through.
        text: Opens the text of the records; it is read at the first value of several lines.
        delimiter: Delimiter of the columns.
        before: Number of records in front of the text, including the header.

    Returns:
        The same batches.

    Raises:
        pyarrow.ArrowInvalid: There is such a cell.
    """
    unread = True
    for batch in batches:
        if unread and any(map(_has_line_ends, batch.columns)):
            unread = False
            with text() as lines:
                _require_closed_quotes(lines, delimiter, before)
        yield batch


def _has_line_ends(column: pa.StringArray) -> bool:
    """Whether a text of a column has a line end; the smallest byte of all texts excludes nearly all columns."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return False
    begin, end = np.frombuffer(offsets, np.int32)[[column.offset, column.offset + len(column)]]
    texts = np.frombuffer(data, np.uint8)[begin:end]
    if not len(texts) or texts.min() > max(LINE_ENDS):
        return False
    return any(pc.any(pc.match_substring(column, chr(end))).as_py() for end in LINE_ENDS)


def _require_closed_quotes(lines: Iterable[str], delimiter: str, before: int) -> None:
    """See `closed_quotes`."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    record = before
    while True:
        line = reader.line_num
        try:
            record += bool(next(reader))  # empty lines are no records
        except StopIteration:
            return
        except csv.Error as error:
            record += 1
            if "expected after" not in str(error):  # a cell longer than this reader takes: what follows is not known
                return
            if reader.line_num > line + 1:
                raise pa.ArrowInvalid(
                    f"row {record}: found a quote that begins a cell and is closed some lines later within a value; "
                    'expected quotes as CSV has them ("a ""b"" c" for a "b" c); write a log whose quotes are plain '
                    "characters as Parquet"
                ) from error


def timed(items: Iterable[Item], seconds: defaultdict[str, float], name: str) -> Iterator[Item]:
    """Measures the time that an iterator takes to produce its items.

    Args:
        items: Items to pass through.
        seconds: `seconds[name]` is increased by the seconds.
        name: Key of `seconds`.

    Returns:
        The same items.
    """
    iterator = iter(items)
    while True:
        begin = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            seconds[name] += time.perf_counter() - begin
        yield item
