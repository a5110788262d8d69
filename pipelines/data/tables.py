"""Result rows to CSV (plain or .gz), JSON lines or Parquet, streamed and written atomically."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, plain
from pipelines.core.files import replacing
from pipelines.kernels import extension

Columns = Mapping[str, NDArray[Any] | Sequence[Any]]
FORMATS = (".csv", ".csv.gz", ".jsonl", ".parquet")
_TEXTS = {str, list, dict}
GROUP = 1 << 16  # rows of a row group of Parquet, at least


def on_terminal(output: str | Path) -> bool:
    """Returns whether a table is written to a terminal.

    Args:
        output: Path, or "-" for stdout.
    """
    return str(output) == "-" and sys.stdout is not None and sys.stdout.isatty()


@contextlib.contextmanager
def writing(
    output: str | Path, columns: Mapping[str, Any], brief: Sequence[str] = ()
) -> Iterator[Callable[[Columns], None]]:
    """Context with a function that appends rows to a table.

    Args:
        output: A .csv, .csv.gz, .jsonl or .parquet path, which appears if the block ends without an error, or "-" for
            CSV on stdout.
        columns: Type by column: numpy dtypes, `str`, `list` of float32 values, or `dict`; CSV has JSON text for
            lists and dicts, Parquet for dicts.
        brief: Columns of a table for a terminal, instead of CSV.

    Yields:
        `write(columns)`. A column is an array, or a list in which None is a missing value: empty in CSV, left out of a
        JSON line.

    Raises:
        RequestError: The format is unknown, or the output cannot be written.
    """
    import pyarrow as pa

    types = {str: pa.string(), dict: pa.string(), list: pa.list_(pa.float32())}
    schema = pa.schema(
        [
            (name, types[dtype] if dtype in types else pa.from_numpy_dtype(np.dtype(dtype)))
            for name, dtype in columns.items()
        ]
    )
    if str(output) == "-":
        if sys.stdout is None:
            raise RequestError("stdout is closed; name a file with -o")
        if brief and on_terminal(output):
            yield _aligned(sys.stdout, {name: columns[name] for name in brief})
            return
        with _csv(sys.stdout.buffer, schema, columns) as write:
            yield write
        return
    name = Path(output).name.lower()
    if not name.endswith(FORMATS):
        raise RequestError(f"cannot tell the format of {output}; name it {', '.join(FORMATS)}, or - for CSV on stdout")
    with replacing(output) as temporary:
        if name.endswith(".parquet"):
            import pyarrow.parquet as parquet

            with parquet.ParquetWriter(temporary, schema) as writer, _gathered(writer, schema) as write:
                yield write
        elif name.endswith(".jsonl"):
            with temporary.open("w", encoding="utf-8") as lines:
                yield lambda rows: lines.writelines(_json(columns, row) for row in _rows(rows, columns))
        else:
            with (
                temporary.open("wb") as file,
                _packing(file) if name.endswith(".gz") else nullcontext(file) as sink,
                _csv(sink, schema, columns) as write,
            ):
                yield write


@contextlib.contextmanager
def _gathered(writer: Any, schema: Any) -> Iterator[Callable[[Columns], None]]:
    """Rows to row groups of `GROUP` rows or some more: a group a call would be slow to write and to read."""
    import pyarrow as pa

    waiting: list[Any] = []

    def flush() -> None:
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema))
            waiting.clear()

    def write(rows: Columns) -> None:
        waiting.append(_batch(rows, schema))
        if sum(len(batch) for batch in waiting) >= GROUP:
            flush()

    yield write
    flush()


def _packing(file: Any) -> Any:
    """Opens a gzip writer of fixed output: five times as fast as the default level at a tenth more bytes."""
    return gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0)


@contextlib.contextmanager
def _csv(sink: Any, schema: Any, columns: Mapping[str, Any]) -> Iterator[Callable[[Columns], None]]:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter, WriteOptions

    # The header comes with the first rows, so that bad input prints nothing; pyarrow would quote its names.
    header = (",".join(schema.names) + "\n").encode()
    schema = pa.schema([field.with_type(pa.string()) if pa.types.is_list(field.type) else field for field in schema])
    native = extension.native() if {str(schema.field(name).type) for name in columns} <= {"int64", "float"} else None
    with CSVWriter(sink, schema, write_options=WriteOptions(include_header=False)) as writer:

        def write(rows: Columns) -> None:
            nonlocal header
            sink.write(header)
            header = b""
            arrays = [rows[name] for name in schema.names]
            if native is not None and [getattr(array, "dtype", None) for array in arrays] == list(columns.values()):
                # the same text, quicker; and pyarrow's arrays load pandas where it is installed
                sink.write(native.csv_lines([np.ascontiguousarray(array) for array in arrays]))
            elif _TEXTS & {*columns.values()}:  # pyarrow would quote every text
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(_rows(rows, columns, json_text=(list, dict)))
                sink.write(text.getvalue().encode())
            else:
                writer.write_batch(_batch(rows, schema))

        yield write
        sink.write(header)  # a table without rows still has columns


def _batch(rows: Columns, schema: Any) -> Any:
    import pyarrow as pa

    def cells(name: str) -> Any:
        column = rows[name]
        if isinstance(column, list) and any(isinstance(cell, dict) for cell in column):
            return [None if cell is None else json.dumps(cell) for cell in column]
        return column

    return pa.record_batch([pa.array(cells(field.name), field.type) for field in schema], schema=schema)


def _rows(rows: Columns, types: Mapping[str, Any], json_text: Sequence[type] = ()) -> Iterator[tuple[Any, ...]]:
    """Plain Python values, a float32 as the shortest number that means it; values of some types as JSON text."""
    columns = []
    for name, dtype in types.items():
        column = rows[name]
        if isinstance(column, np.ndarray):
            column = (column.astype(str).astype(np.float64) if column.dtype == np.float32 else column).tolist()
        elif dtype in json_text:
            column = [None if value is None else json.dumps(value) for value in column]
        elif dtype not in _TEXTS and np.dtype(dtype) == np.float32:
            column = [None if value is None else float(str(np.float32(value))) for value in column]
        columns.append(column)
    return zip(*columns, strict=True)


def _json(names: Iterable[str], row: Iterable[Any]) -> str:
    return (
        json.dumps(
            {name: value for name, value in zip(names, row, strict=True) if value is not None}, ensure_ascii=False
        )
        + "\n"
    )


def _aligned(sink: Any, brief: Mapping[str, Any]) -> Callable[[Columns], None]:
    """Writes columns as wide as their first rows need."""
    widths: list[int] = []

    def write(rows: Columns) -> None:
        cells = [[_cell(cell) for cell in row] for row in _rows(rows, brief)]
        if not widths:
            cells.insert(0, list(brief))
            widths.extend(max(map(len, column)) for column in zip(*cells, strict=True))
        for row in cells:
            print(plain("  ".join(map(str.ljust, row, widths)).rstrip()), file=sink)

    return write


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
