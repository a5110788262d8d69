"""Texts, and pairs of them, out of files: a text a line, or columns of CSV, TSV, JSON lines or Parquet by name.

Everything streams, in order; what is no text is an item of its own, with what is wrong with it.
"""

from __future__ import annotations

import collections
import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import RequestError, one_line
from pipelines.data.text_files import STDIN, read_lines

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
# What columns of texts, of what they are compared with, and of labels are called: a header is known by one of them, and
# where no column is named they are taken in this order.
TEXTS = ("text", "sentence", "content", "body", "sentence1", "text1", "query", "question", "anchor", "premise", "title")
OTHERS = ("sentence2", "text2", "passage", "document", "answer", "positive", "hypothesis", "text", "content", "body")
LABELS = ("score", "label", "similarity", "relevance")
COLUMNS = frozenset((*TEXTS, *OTHERS, *LABELS))
EXPECTED = "expected text, a line each, or .csv, .tsv, .jsonl (also .gz) or .parquet"
NOT_UTF8, EMPTY, NO_VALUE = "is not UTF-8", "is empty", "has no value"
HALF = "holds half a surrogate pair"  # which no UTF-8 has: JSON's escapes can write it
SHOWN = 5  # faults that are named


class Item(NamedTuple):
    """One row of input: where it stands, the texts of its columns, and what is wrong with it, "" if nothing."""

    where: str
    texts: tuple[str, ...]
    fault: str = ""


class NoColumnsError(RequestError):
    """A table lacks the requested columns."""


class Faults(collections.Counter[str]):
    """How often each thing was wrong."""


def named(data: Any) -> str:
    """Sources as an error names them."""
    return ", ".join(map(str, data)) if isinstance(data, list | tuple) else str(data)


def suffix(name: str) -> str:
    """The kind of a file by its name, without .gz."""
    return Path(name.lower().removesuffix(".gz")).suffix


def narrow(found: int, expected: int) -> str:
    """Returns the beginning of the message for a row with too few columns.

    Args:
        found: Number of columns of the row.
        expected: Expected number of columns.
    """
    return f"has {found} columns, expected {expected}"


def items(data: Any, count: int, columns: Sequence[str] = (), extra: int = 0) -> Iterator[Item]:
    """Reads rows of texts.

    Args:
        data: Files, "-" for stdin, or a list of texts or tuples of texts.
        count: Texts per row, 1 or 2.
        columns: Names of the columns, in order, or positions from 1 in CSV without a header; default: columns with
            usual names (`COLUMNS`), else the first columns of text.
        extra: Further columns per row, e.g. a score.

    Returns:
        Iterator over the rows.

    Raises:
        RequestError: A file is missing, a table lacks the columns, or the list holds other values.
    """
    width = count + extra
    if isinstance(data, str | os.PathLike) or (isinstance(data, list | tuple) and _are_files(data, width)):
        for name in map(os.fspath, [data] if isinstance(data, str | os.PathLike) else data):
            yield from _of_file(name, width, columns)
        return
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise RequestError(f"found {type(data).__name__}; expected files, or a list of texts")
    for number, each in enumerate(data, 1):
        row = (each,) if isinstance(each, str) else tuple(each) if isinstance(each, list | tuple) else ()
        if len(row) < width or not all(isinstance(part, str) for part in row[:count]):
            raise RequestError(
                f"text {number} is {each!r:.60}; expected {'text' if width == 1 else f'{width} columns'}"
            )
        yield _item(f"text {number}", [str(part) for part in row[:width]], count)


def _are_files(data: Sequence[Any], width: int) -> bool:
    """Whether a list is of files: paths, or strings that name some. Raises RequestError where only part of it is."""
    if any(isinstance(each, os.PathLike) for each in data):  # what does not exist is a fault of its own
        if other := [each for each in data if not isinstance(each, os.PathLike) and each != STDIN]:
            raise RequestError(f"found files and {other[0]!r:.200} in one list; expected files, or texts")
        return True
    strings = [each for each in data if isinstance(each, str)]
    if width > 1:  # a row of texts is no string
        return bool(data) and len(strings) == len(data)
    found = [each for each in strings if each == STDIN or _is_file(each)]
    if found and len(found) < len(data):
        other = next(each for each in data if each not in found)
        raise RequestError(f"found files and {other!r:.200}, which is none, in one list; expected files, or texts")
    return bool(found)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero in it: a text
        return False


def _item(where: str, texts: Sequence[str], count: int) -> Item:
    try:
        for each in texts:
            each.encode()
    except UnicodeEncodeError:
        return Item(where, ("",) * len(texts), HALF)
    empty = any(not each.strip() for each in texts[:count])
    return Item(where, tuple(texts), EMPTY if empty else "")


def _of_file(name: str, width: int, columns: Sequence[str]) -> Iterator[Item]:
    if name != STDIN and not _is_file(name):
        raise RequestError(f"found no file {name}; {EXPECTED}")
    kind = suffix(name)
    if name == STDIN or kind not in TABLES:
        if columns:
            raise RequestError(f"{name} is text, which has no columns; leave {', '.join(columns)} out, or {EXPECTED}")
        yield from _of_lines(name, width)
    elif kind == ".parquet":
        yield from _of_parquet(name, width, columns)
    elif kind == ".jsonl":
        yield from _of_json(name, width, columns)
    else:
        yield from _of_csv(name, width, columns, "\t" if kind == ".tsv" else ",")


def _of_lines(name: str, width: int) -> Iterator[Item]:
    for number, text in enumerate(read_lines(name), 1):
        where = f"{'line' if name == STDIN else f'{name}, line'} {number}"
        parts = [] if text is None else text.split("\t") if width > 1 else [text]
        if text is None or len(parts) < width:
            fault = NOT_UTF8 if text is None else f"{narrow(len(parts), width)} with a TAB between"
            yield Item(where, ("",) * width, EMPTY if text == "" else fault)
        else:
            yield _item(where, parts[:width], min(width, 2))


class _Rows:
    """The lines of a table for csv.reader, which takes all that follows a quote that nothing closes: they can be read
    anew.
    """

    def __init__(self, name: str) -> None:
        self._lines, self._again = read_lines(name, "surrogateescape"), collections.deque[str]()
        self.read: list[str] = []  # since the last row
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = self._again.popleft() if self._again else f"{next(self._lines)}\n"
        self.number += 1
        self.read.append(text)
        return text

    def back(self) -> None:
        """Only the first line that was read since the last row is no row: read the others again."""
        self._again.extendleft(reversed(self.read[1:]))
        self.number -= len(self.read) - 1


def _of_csv(name: str, width: int, columns: Sequence[str], delimiter: str) -> Iterator[Item]:
    """Rows of CSV or TSV. The first is a header where it names `columns`, or, without these, one of `COLUMNS`."""
    csv.field_size_limit(2**31 - 1)
    lines, nothing = _Rows(name), ("",) * width
    rows = csv.reader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    places: list[int] = []
    while True:
        lines.read.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            lines.back()
            yield Item(f"{name}, line {lines.number}", nothing, f"is no row of CSV ({one_line(error)})")
            continue
        if row is None:
            return
        where = f"{name}, line {lines.number}"
        if not places:
            header = [each.strip() for each in row]
            by_place = bool(columns) and all(each.isdecimal() and each not in header for each in columns)
            if not by_place and (columns or {each.lower() for each in header} & COLUMNS):
                places = _places(name, header, columns, width)
                continue
            if by_place and (
                len(columns) != width or not 1 <= min(map(int, columns)) <= max(map(int, columns)) <= len(row)
            ):
                raise NoColumnsError(f"{name} has {len(row)} columns; name {width} of them with --column, from 1 on")
            if width == 1 < len(row) and not by_place:
                raise RequestError(
                    f"{name} has {len(row)} columns, none of which is called {', '.join(TEXTS[:3])} or the like; "
                    "name one with --column, or say its place, such as --column 2"
                )
            places = [int(each) - 1 for each in columns] if by_place else list(range(width))
        if len(row) <= max(places):
            fault = EMPTY if not any(row) else narrow(len(row), max(places) + 1)
            yield Item(where, nothing, fault)
            continue
        texts = [row[at] for at in places]
        strange = any("\udc80" <= letter <= "\udcff" for each in texts for letter in each)
        yield Item(where, nothing, NOT_UTF8) if strange else _item(where, texts, min(width, 2))


def _places(
    name: str, header: Sequence[str], columns: Sequence[str], width: int, texts: Sequence[str] | None = None
) -> list[int]:
    """Where in the header the columns stand. texts: those that hold text; None: all. Raises RequestError where they do
    not.
    """
    names = list(columns) or _usual(header, width, header if texts is None else texts)
    if len(names) != width or any(each not in header for each in names):
        raise NoColumnsError(
            f"{name} has the columns {', '.join(header) or 'none'}; name {width} of them with --column"
        )
    return [list(header).index(each) for each in names]


def _usual(header: Sequence[str], width: int, texts: Sequence[str]) -> list[str]:
    """The columns that are meant where none is named."""
    found: list[str] = []
    for names in (TEXTS, OTHERS, LABELS)[:width]:
        found += [each for name in names for each in header if each.lower() == name and each not in found][:1]
    if len(found) == width:
        return found
    first = list(texts[: min(width, 2)])
    return first + [each for each in header if each not in first][: max(width - 2, 0)]


def _of_json(name: str, width: int, columns: Sequence[str]) -> Iterator[Item]:
    names: list[str] = list(columns)
    for number, text in enumerate(read_lines(name), 1):
        where = f"{name}, line {number}"
        if text is None or not text.strip():
            yield Item(where, ("",) * width, NOT_UTF8 if text is None else EMPTY)
            continue
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            yield Item(where, ("",) * width, "is no JSON object")
            continue
        if number == 1 or not names:
            header, strings = list(row), [key for key, value in row.items() if isinstance(value, str)]
            names = [header[at] for at in _places(name, header, columns, width, strings)]
        values = [row.get(each) for each in names]
        yield _valued(where, values, width)


def _of_parquet(name: str, width: int, columns: Sequence[str]) -> Iterator[Item]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(name) as file:
            header = file.schema_arrow.names
            kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)
            strings = [each.name for each in file.schema_arrow if any(kind(each.type) for kind in kinds)]
            names = [header[at] for at in _places(name, header, columns, width, strings)]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(names))):
                rows = [batch.column(each).to_pylist() for each in names]
                for values in zip(*rows, strict=True):
                    number += 1
                    yield _valued(f"{name}, row {number}", list(values), width)
    except (OSError, pa.ArrowException) as error:
        raise RequestError(f"cannot read {name}: {one_line(error)}") from error


def _valued(where: str, values: Sequence[Any], width: int) -> Item:
    """An item of values as tables have them."""
    if any(each is None for each in values):
        return Item(where, ("",) * width, NO_VALUE)
    if wrong := next((each for each in values[:2] if not isinstance(each, str | int | float)), None):
        return Item(where, ("",) * width, f"holds {type(wrong).__name__}, expected text")
    return _item(where, [str(each) for each in values], min(width, 2))
