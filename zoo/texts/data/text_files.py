"""Readers of texts and of text pairs: text files, and columns of CSV, TSV, JSON lines or Parquet.

Rows stream in order; a row that is no text is returned with its error.
"""

from __future__ import annotations

import collections
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import RequestError, one_line
from pipelines.data.text_files import STDIN, read_lines

TABLE_FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
# Names of columns of texts, second texts and labels: a row with one of them is a header, and without column names the
# first that exists is taken.
TEXT_COLUMNS = (
    "text",
    "sentence",
    "content",
    "body",
    "sentence1",
    "text1",
    "query",
    "question",
    "anchor",
    "premise",
    "title",
)
SECOND_TEXT_COLUMNS = (
    "sentence2",
    "text2",
    "passage",
    "document",
    "context",
    "answer",
    "positive",
    "hypothesis",
    "text",
    "content",
    "body",
)
LABEL_COLUMNS = ("score", "label", "similarity", "relevance")
CLASS_COLUMNS = ("label", "labels", "class", "category", "target")  # of single texts
COLUMNS = frozenset((*TEXT_COLUMNS, *SECOND_TEXT_COLUMNS, *LABEL_COLUMNS))
EXPECTED_FORMATS = "expected text, a line each, or .csv, .tsv, .jsonl (also .gz) or .parquet"
NOT_UTF8, EMPTY, NO_VALUE = "is not UTF-8", "is empty", "has no value"
SURROGATE = "holds half a surrogate pair"  # no UTF-8 has it, but JSON's escapes can write it


Kinds = Sequence[Sequence[str]]  # usual names of every column that is read


def require_on_error(on_error: Any) -> None:
    """Checks what to do with invalid rows.

    Args:
        on_error: A value.

    Raises:
        RequestError: It is neither "raise" nor "skip".
    """
    if on_error not in ("raise", "skip"):
        raise RequestError(f"found on_error {on_error!r:.40}; expected raise or skip")


class Row(NamedTuple):
    """One row of input.

    Attributes:
        location: File and line, for messages.
        texts: Its columns.
        error: Reason why it is invalid; "" if it is valid.
    """

    location: str
    texts: tuple[str, ...]
    error: str = ""


class MissingColumnsError(RequestError):
    """A table lacks the requested columns."""


def describe(data: Any) -> str:
    """Returns the names of the sources for a message.

    Args:
        data: A source or a list of sources.
    """
    return ", ".join(map(str, data)) if isinstance(data, list | tuple) else str(data)


def too_few_columns(columns: int, expected: int) -> str:
    """Returns the beginning of the message for a row with too few columns.

    Args:
        columns: Number of columns of the row.
        expected: Expected number of columns.
    """
    return f"has {columns} columns, expected {expected}"


def read_rows(
    data: Any, count: int, columns: Sequence[str] = (), extra: int = 0, *, names: bool = True
) -> Iterator[Row]:
    """Reads rows of texts.

    Args:
        data: Files, "-" for stdin, or rows: texts, or tuples of texts. Rows may have more columns with `names` alone.
        count: Texts per row, 1 or 2.
        columns: Names of the columns, in order, or positions from 1 in CSV without a header; default: columns with
            usual names (`COLUMNS`), else the first columns of text.
        extra: Further columns per row, e.g. a score.
        names: Whether a str is the name of a file; otherwise it is a text, and only a path names a file.

    Returns:
        Iterator over the rows.

    Raises:
        RequestError: A file is missing, a table lacks the columns, or the list holds other values.
    """
    labels = (LABEL_COLUMNS if count > 1 else CLASS_COLUMNS,) * extra
    kinds: Kinds = (*(TEXT_COLUMNS, SECOND_TEXT_COLUMNS)[:count], *labels)
    width = len(kinds)
    location: Any = str | os.PathLike if names else os.PathLike
    listed: Any = [data] if isinstance(data, location) else data
    if isinstance(listed, list | tuple) and _are_files(listed, location):
        for name in map(os.fspath, listed):
            yield from _read_file(name, kinds, columns)
        return
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise RequestError(f"found {type(data).__name__}; expected files, or a list of texts")
    for number, sample in enumerate(data, 1):
        row = (sample,) if isinstance(sample, str) else tuple(sample) if isinstance(sample, list | tuple) else ()
        lost = not names and len(row) > width  # of what is computed, no column may be left out
        if len(row) < width or lost or not all(isinstance(part, str) for part in row[:count]):
            raise RequestError(
                f"text {number} is {sample!r:.60}; expected {'text' if width == 1 else f'{width} columns'}"
            )
        yield _row(f"text {number}", [str(part) for part in row[:width]], count)


def parse_label(row: Row) -> tuple[float, str]:
    """Reads the label of a row, its last column.

    Args:
        row: A row of two texts and a label.

    Returns:
        The label, and the reason why the row is invalid; NaN and the reason for an invalid row.
    """
    if row.error:
        return math.nan, row.error
    try:
        label = float(row.texts[-1])
    except ValueError:
        return math.nan, f"has the label {row.texts[-1]!r:.40}, expected a number"
    return (label, "") if math.isfinite(label) else (math.nan, f"has the label {label:g}, expected a finite number")


def _are_files(data: Sequence[Any], location: Any) -> bool:
    """Returns whether a list holds locations of files. Raises RequestError for a mixed list."""
    if not any(isinstance(entry, location) for entry in data):
        return False
    if other := [entry for entry in data if not isinstance(entry, location)]:
        raise RequestError(f"found files and {other[0]!r:.200} in one list; expected files, or texts")
    return True


def is_file(name: str) -> bool:
    """Returns whether a text is the path of a file.

    Args:
        name: Any text.
    """
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero in it: a text
        return False


def _row(location: str, texts: Sequence[str], count: int) -> Row:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return Row(location, ("",) * len(texts), SURROGATE)
    empty = any(not part.strip() for part in texts[:count])
    return Row(location, tuple(texts), EMPTY if empty else "")


def _read_file(name: str, kinds: Kinds, columns: Sequence[str]) -> Iterator[Row]:
    if name != STDIN and not is_file(name):
        place = f"the folder {name}" if os.path.isdir(name) else f"no file {name:.200}"  # noqa: PTH112 (pathlib raises for a long name)
        raise RequestError(f"found {place}; {EXPECTED_FORMATS}")
    kind = Path(name.lower().removesuffix(".gz")).suffix
    if name == STDIN or kind not in TABLE_FORMATS:
        if columns:
            raise RequestError(
                f"{name} is text, which has no columns; leave {', '.join(columns)} out, or {EXPECTED_FORMATS}"
            )
        yield from _read_lines(name, kinds)
    elif kind == ".parquet":
        yield from _read_parquet(name, kinds, columns)
    elif kind == ".jsonl":
        yield from _read_jsonl(name, kinds, columns)
    else:
        yield from _read_csv(name, kinds, columns, "\t" if kind == ".tsv" else ",")


def _texts(kinds: Kinds) -> int:
    """Returns how many of the columns are texts, not labels."""
    return sum(kind is not LABEL_COLUMNS and kind is not CLASS_COLUMNS for kind in kinds)


def _read_lines(name: str, kinds: Kinds) -> Iterator[Row]:
    for number, text in enumerate(read_lines(name), 1):
        location = f"{'line' if name == STDIN else f'{name}, line'} {number}"
        parts = [] if text is None else text.split("\t") if len(kinds) > 1 else [text]
        if text is None or len(parts) < len(kinds):
            reason = NOT_UTF8 if text is None else f"{too_few_columns(len(parts), len(kinds))} with a TAB between"
            yield Row(location, ("",) * len(kinds), EMPTY if text == "" else reason)
        else:
            yield _row(location, parts[: len(kinds)], _texts(kinds))


class _CsvLines:
    """Lines of a table for csv.reader, which can rewind: an unclosed quote makes the reader consume all later lines."""

    def __init__(self, name: str) -> None:
        self._lines, self._rewound = read_lines(name, "surrogateescape"), collections.deque[str]()
        self.read: list[str] = []  # since the last row
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = self._rewound.popleft() if self._rewound else f"{next(self._lines)}\n"
        self.number += 1
        self.read.append(text)
        return text

    def rewind(self) -> None:
        """Moves back to the second line after the last row; the first one is invalid."""
        self._rewound.extendleft(reversed(self.read[1:]))
        self.number -= len(self.read) - 1


def _read_csv(name: str, kinds: Kinds, columns: Sequence[str], delimiter: str) -> Iterator[Row]:
    """Reads CSV or TSV; the first row is a header if it has `columns`, or without them one of `COLUMNS`."""
    csv.field_size_limit(2**31 - 1)
    lines, blank = _CsvLines(name), ("",) * len(kinds)
    rows = csv.reader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    indices: list[int] = []
    while True:
        lines.read.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            lines.rewind()
            yield Row(f"{name}, line {lines.number}", blank, f"is no row of CSV ({one_line(error)})")
            continue
        if row is None:
            return
        location = f"{name}, line {lines.number}"
        if not indices:
            header = [name.strip() for name in row]
            by_index = bool(columns) and all(column.isdecimal() and column not in header for column in columns)
            if not by_index and (columns or {name.lower() for name in header} & COLUMNS):
                indices = _column_indices(name, header, columns, kinds)
                continue
            if by_index and (
                len(columns) != len(kinds) or not 1 <= min(map(int, columns)) <= max(map(int, columns)) <= len(row)
            ):
                raise MissingColumnsError(
                    f"{name} has {len(row)} columns; name {len(kinds)} of them with --column, from 1 on"
                )
            if len(kinds) == 1 < len(row) and not by_index:
                raise RequestError(
                    f"{name} has {len(row)} columns, none of them named {', '.join(TEXT_COLUMNS[:3])} or the like; "
                    "name one with --column, or give its number, such as --column 2"
                )
            indices = [int(column) - 1 for column in columns] if by_index else list(range(len(kinds)))
        if len(row) <= max(indices):
            reason = EMPTY if not any(row) else too_few_columns(len(row), max(indices) + 1)
            yield Row(location, blank, reason)
            continue
        texts = [row[index] for index in indices]
        invalid = any("\udc80" <= letter <= "\udcff" for text in texts for letter in text)
        yield Row(location, blank, NOT_UTF8) if invalid else _row(location, texts, _texts(kinds))


def _column_indices(
    name: str, header: Sequence[str], columns: Sequence[str], kinds: Kinds, texts: Sequence[str] | None = None
) -> list[int]:
    """Returns the indices of the columns in a header.

    texts: Columns that hold text; None: all. Raises MissingColumnsError.
    """
    names = list(columns) or _default_columns(header, kinds, header if texts is None else texts)
    if len(names) != len(kinds) or any(name not in header for name in names):
        raise MissingColumnsError(
            f"{name} has the columns {', '.join(header) or 'none'}; name {len(kinds)} of them with --column"
        )
    return [list(header).index(name) for name in names]


def _default_columns(header: Sequence[str], kinds: Kinds, texts: Sequence[str]) -> list[str]:
    """Returns the columns to read when none is named."""
    chosen: list[str] = []
    for names in kinds:
        chosen += [key for name in names for key in header if key.lower() == name and key not in chosen][:1]
    if len(chosen) == len(kinds):
        return chosen
    first = list(texts[: _texts(kinds)])
    return first + [key for key in header if key not in first][: len(kinds) - _texts(kinds)]


def _read_jsonl(name: str, kinds: Kinds, columns: Sequence[str]) -> Iterator[Row]:
    names: list[str] = list(columns)
    for number, text in enumerate(read_lines(name), 1):
        location = f"{name}, line {number}"
        if text is None or not text.strip():
            yield Row(location, ("",) * len(kinds), NOT_UTF8 if text is None else EMPTY)
            continue
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            yield Row(location, ("",) * len(kinds), "is no JSON object")
            continue
        if number == 1 or not names:
            header, strings = list(row), [key for key, value in row.items() if isinstance(value, str)]
            names = [header[index] for index in _column_indices(name, header, columns, kinds, strings)]
        values = [row.get(name) for name in names]
        yield _row_of_values(location, values, kinds)


def _read_parquet(name: str, kinds: Kinds, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(name) as file:
            header = file.schema_arrow.names
            tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)
            strings = [field.name for field in file.schema_arrow if any(is_text(field.type) for is_text in tests)]
            names = [header[index] for index in _column_indices(name, header, columns, kinds, strings)]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(names))):
                rows = [batch.column(name).to_pylist() for name in names]
                for values in zip(*rows, strict=True):
                    number += 1
                    yield _row_of_values(f"{name}, row {number}", list(values), kinds)
    except (OSError, pa.ArrowException) as error:
        raise RequestError(f"cannot read {name}: {one_line(error)}") from error


def _row_of_values(location: str, values: Sequence[Any], kinds: Kinds) -> Row:
    """Returns the row of the values of a table."""
    if any(value is None for value in values):
        return Row(location, ("",) * len(kinds), NO_VALUE)
    if wrong := next((value for value in values[: _texts(kinds)] if not isinstance(value, str | int | float)), None):
        return Row(location, ("",) * len(kinds), f"holds {type(wrong).__name__}, expected text")
    texts = ["\t".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
    return _row(location, texts, _texts(kinds))
