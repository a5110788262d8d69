"""Row boundaries of text files, so that processes can read parts of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 8 << 20  # bytes looked at together
FEED, RETURN, QUOTE = b"\n"[0], b"\r"[0], b'"'[0]


@dataclass(frozen=True)
class TextForm:
    """How a text file holds rows.

    Attributes:
        header: Whether the first line names columns.
        delimiter: Delimiter of CSV, whose values may be quoted with line breaks inside (RFC 4180); "": every line is a
            row.
        blank: Whether an empty line is a row.
    """

    header: bool = False
    delimiter: str = ""
    blank: bool = True


class Piece(NamedTuple):
    """A part of a file with whole rows.

    Attributes:
        begin: First byte.
        end: One past the last byte.
        rows: Number of rows.
    """

    begin: int
    end: int
    rows: int


def pieces(stream: Any, form: TextForm, size: int) -> list[Piece] | None:
    """Splits a text file into pieces that end with a row; the first begins behind the header.

    Reads the whole file once, in constant memory.

    Args:
        stream: Binary file.
        form: How the file holds rows.
        size: Least size of a piece in bytes, except the last.

    Returns:
        The pieces, or None if quotes and line feeds do not determine the rows: quotes inside unquoted values, or lines
        that end with a carriage return.
    """
    parts: list[Piece] = []
    begin = rows = last = 0
    head = not form.header  # whether the header is behind
    for offset, ends, blank in _lines(stream, form):
        last = offset
        if ends is None:
            return None
        if not head and len(ends):
            begin, ends, blank, head = int(ends[0]), ends[1:], blank[1:], True
        counted = np.cumsum(~blank | form.blank)
        taken = 0
        while len(ends) and ends[-1] - begin >= size:
            index = int(np.searchsorted(ends, begin + size))
            parts.append(Piece(begin, int(ends[index]), rows + int(counted[index]) - taken))
            begin, rows, taken = int(ends[index]), 0, int(counted[index])
            ends, counted = ends[index + 1 :], counted[index + 1 :]
        rows += int(counted[-1]) - taken if len(counted) else 0
    if last > begin:
        parts.append(Piece(begin, last, rows))
    return parts


def _lines(stream: Any, form: TextForm) -> Iterator[tuple[int, NDArray[np.int64] | None, NDArray[np.bool_]]]:
    """For every block of whole lines: its end, the ends of its rows (offsets), and which rows are empty."""
    offset = start = 0  # of the block, of the row
    odd = False  # whether a quote is open
    before = b"\n"
    while block := stream.read(BLOCK):
        block += stream.readline()
        data = np.frombuffer(before + block + b"\n", np.uint8)[:-1]  # a place in it is one more than in the block
        places = np.flatnonzero(data[1:] == FEED) + 1
        if form.delimiter:
            quotes = np.flatnonzero(data[1:] == QUOTE) + 1
            if not _plain(data, quotes, odd, form.delimiter):
                yield offset, None, np.zeros(0, np.bool_)
                return
            places = places[(np.searchsorted(quotes, places) + odd) % 2 == 0]
            odd ^= bool(len(quotes) % 2)
        offset += len(block)
        ends = places + (offset - len(block))
        if block[-1] != FEED and not odd:  # the last row ends with the file
            ends = np.append(ends, offset)
        lengths = np.diff(ends, prepend=start)
        first = data[np.append(0, places)[: len(ends)] + 1] if len(ends) else data[:0]
        blank = (first == FEED) | ((first == RETURN) & (lengths == 2))
        start = int(ends[-1]) if len(ends) else start
        before = block[-1:]
        yield offset, ends, blank
    if odd:
        yield offset, None, np.zeros(0, np.bool_)


def _plain(data: NDArray[np.uint8], quotes: NDArray[np.int64], odd: bool, delimiter: str) -> bool:
    """Checks that quotes open and close at the ends of values or are doubled, and no line ends with a lone CR."""
    allowed = np.zeros(256, np.bool_)
    allowed[[FEED, RETURN, QUOTE, *delimiter.encode()]] = True
    behind = np.append(data, FEED)
    returns = np.flatnonzero(data == RETURN)
    return bool(
        allowed[data[quotes[int(odd) :: 2] - 1]].all()
        and allowed[behind[quotes[1 - int(odd) :: 2] + 1]].all()
        and (behind[returns + 1] == FEED).all()
    )
