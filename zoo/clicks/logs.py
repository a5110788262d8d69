"""Click logs as streams of named text columns: CSV and TSV with a header, JSON lines, Parquet; text also as .gz.

Every column comes as text, null where a value is missing, in batches of constant memory. pyarrow reads CSV (quotes by
RFC 4180, UTF-8) and Parquet. A list in JSON lines or Parquet becomes text joined by `LIST`; an empty one is
missing, as it is in CSV.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from pipelines.core.errors import RequestError, one_line

LIST = "|"  # joins what is a list in the file
BLOCK = 4 << 20  # bytes of text read at once
ROWS = 65_536  # of a batch of JSON lines or Parquet
DELIMITERS = (",", "\t", ";", "|")
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")


@dataclass(frozen=True)
class Log:
    """A file of rows. kind: "csv", "jsonl" or "parquet". delimiter: of "csv", one character. columns: their names."""

    path: Path
    kind: str
    delimiter: str
    columns: tuple[str, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in order, every column as text, null where missing.

        Raises RequestError for a file that cannot be read to its end, such as one with a row of other columns.
        """
        read = {"csv": _csv_batches, "jsonl": _json_batches, "parquet": _parquet_batches}[self.kind]
        try:
            yield from read(self)
        except (pa.ArrowException, EOFError, OSError, ValueError) as error:
            raise RequestError(f"{self.path} cannot be read as {self.kind}: {one_line(error)}") from error


def open_log(path: str | Path, delimiter: str | None = None) -> Log:
    """The log in a file, by its content. delimiter: of CSV; None: the one that its header has most of.

    Raises RequestError where there is no file, or one whose columns have no names, or names that stand twice.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(
            f"found no file {path}, wanted a click log: CSV, TSV or JSON lines (plain or .gz), or Parquet"
        )
    try:
        if _is(path, b"PAR1"):
            return _named(Log(path, "parquet", "", tuple(pa.parquet.read_schema(path).names)))
        with _text(path) as file:
            line = file.readline(BLOCK)
    except (pa.ArrowException, EOFError, OSError, UnicodeDecodeError) as error:
        wanted = "CSV, TSV or JSON lines in UTF-8 (plain or .gz), or Parquet"
        raise RequestError(f"{path} cannot be read: {one_line(error)}; wanted {wanted}") from error
    if not line.strip():
        raise RequestError(f"{path} is empty, or begins with an empty line; wanted a header that names the columns")
    if line.lstrip().startswith("{"):
        return _named(Log(path, "jsonl", "", tuple(_object(path, 1, line))))
    chosen = delimiter or max(DELIMITERS, key=line.count)
    return _named(Log(path, "csv", chosen, tuple(next(csv.reader([line.rstrip("\r\n")], delimiter=chosen)))))


def _named(log: Log) -> Log:
    """`log`, unless its columns have no proper names."""
    twice = [name for name, count in Counter(log.columns).items() if count > 1]
    if twice:
        raise RequestError(f"{log.path} has the column {twice[0]!r} more than once; wanted a name of its own for each")
    numbers = [name for name in log.columns if _is_number(name)]
    if "" in log.columns or (log.kind == "csv" and len(numbers) * 2 > len(log.columns)):
        raise RequestError(
            f"{log.path} begins with {', '.join(log.columns)[:80]!r}, which names no columns; wanted a header"
        )
    return log


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text
    return True


def _is(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _text(path: Path) -> IO[str]:
    """A text file, unpacked where it is gzip."""
    opener = gzip.open if _is(path, b"\x1f\x8b") else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"line {number} of {path} is no JSON ({one_line(error)}); wanted an object a line"
        ) from error
    if not isinstance(found, dict):
        raise RequestError(f"line {number} of {path} is no JSON object; wanted one a line")
    return found


def _csv_batches(log: Log) -> Iterator[pa.RecordBatch]:
    stream = pa.CompressedInputStream(str(log.path), "gzip") if _is(log.path, b"\x1f\x8b") else str(log.path)
    yield from pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(block_size=BLOCK, use_threads=False),
        parse_options=pa.csv.ParseOptions(delimiter=log.delimiter, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(log.columns, pa.string()),
            null_values=list(MISSING),
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    )


def _json_batches(log: Log) -> Iterator[pa.RecordBatch]:
    """Columns that the first line names; others of later lines are passed over, those that lack are null."""
    with _text(log.path) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        while part := list(itertools.islice(lines, ROWS)):
            rows = [_object(log.path, number, line) for number, line in part]
            yield pa.record_batch(
                [pa.array([_as_text(row.get(name)) for row in rows], pa.string()) for name in log.columns],
                names=list(log.columns),
            )


def _as_text(value: Any) -> str | None:
    if isinstance(value, list):
        return LIST.join(text for each in value if (text := _as_text(each)) is not None) or None
    if isinstance(value, bool):
        return str(int(value))
    return None if value is None or str(value) in MISSING else str(value)


def _parquet_batches(log: Log) -> Iterator[pa.RecordBatch]:
    with pa.parquet.ParquetFile(log.path) as file:
        for batch in file.iter_batches(ROWS):
            yield pa.record_batch([_column_as_text(each) for each in batch.columns], names=list(log.columns))


def _column_as_text(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _column_as_text(column.dictionary_decode())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), LIST)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    text = column.cast(pa.string())
    return pc.if_else(pc.is_in(text, pa.array(MISSING)), pa.scalar(None, pa.string()), text)
