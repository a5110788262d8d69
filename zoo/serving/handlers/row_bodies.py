"""Request bodies of rows: text, JSON, Arrow streams and Parquet, as sources of `ClickPipeline.rows`.

Columns are chosen before their cells are read, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.errors import RequestError, one_line
from zoo.recommenders.data.cell_values import LIST, as_text
from zoo.recommenders.data.columns import nested
from zoo.recommenders.data.logs import open_log
from zoo.serving.handlers.base import json_value
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job

TEXT = ("text/tab-separated-values", "text/csv", "text/plain")
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")  # defaults of HTTP clients: text
PARQUET = "application/vnd.apache.parquet"
CONTENT_TYPES = (*TEXT, responses.JSON, responses.ARROW, PARQUET)
DELIMITERS = (b"\t", b",", b";", b"|")

Choose = Callable[[Sequence[str]], list[str]]


def row_source(
    job: Job, headerless: bool, choose: Choose, separators: Mapping[str, str], parsed: Sequence[str] = ()
) -> Any:
    """Converts a body to an argument of `ClickPipeline.rows`; never a path.

    Args:
        job: The job.
        headerless: Whether texts are rows without a header.
        choose: Chooses the columns that the model reads, given all columns; see `ClickPipeline.columns_of`.
        separators: Separators of the items of lists, by column.
        parsed: Columns of rows of Python that are parsed natively, see `ClickPipeline.parsed_columns`.

    Returns:
        io.BytesIO, pyarrow.Table, or rows as a list of {column: value}.

    Raises:
        RequestError: The body is invalid.
        ContentTooLarge: The body holds too many rows or values.
    """
    if not job.body:
        raise RequestError("the body is empty; expected at least one row")
    if job.content_type in (*TEXT, *UNTYPED):
        cells = job.body.count(b"\n") + max(map(job.body.count, DELIMITERS[:1] if headerless else DELIMITERS))
        limits.VALUES.require(cells, job.received_bytes)
        return io.BytesIO(job.body)
    if job.content_type == responses.JSON:
        return _json_rows(job, headerless, choose, separators, parsed)
    try:
        if job.content_type == responses.ARROW:
            return _arrow(job, choose)
        if job.content_type == PARQUET:
            return _parquet(job, choose)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the body cannot be read as {job.content_type}: {one_line(error)}") from error
    raise RequestError(f"Content-Type is {job.content_type[:100]!r}; expected one of {', '.join(CONTENT_TYPES)}")


# ----------------------------------------------------------------------------------------------------------------- JSON


def _json_rows(job: Job, headerless: bool, choose: Choose, separators: Mapping[str, str], parsed: Sequence[str]) -> Any:
    """Returns JSON rows, [{column: value}, ...] or {"rows": [...]}, as they are or as CSV.

    Rows that the native parser does not take become CSV, which is parsed several times as fast as a table. Models of
    rows without a header, and names that a CSV header cannot represent, need a table.
    """
    rows = json_value(job, "rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError('the body must be {"rows": [{column: value, ...}, ...]} with at least one row')
    try:
        rows = [nested.flat_row(row) for row in rows]
    except RecursionError:
        raise RequestError("a value is hundreds of objects deep; expected text, a number or a list of them") from None
    names = choose(tuple(dict.fromkeys(name for row in rows for name in row)))
    limits.VALUES.require(len(rows) * len(names), job.received_bytes)
    if parsed and all(map(rows[0].__contains__, parsed)) and all(map(nested.is_plain, rows)):
        return rows
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    try:
        if not headerless and _header_has_names(text.getvalue(), tuple(names)):
            joins = {name: separators.get(name, LIST) for name in names}
            writer.writerows([text_of(row.get(name), join) for name, join in joins.items()] for row in rows)
            return io.BytesIO(text.getvalue().encode())
        cells = {name: [text_of(row.get(name), separators.get(name, LIST)) for row in rows] for name in names}
        return pa.table({name: pa.array(texts, pa.string()) for name, texts in cells.items()})
    except RecursionError:
        raise RequestError("a value is hundreds of lists deep; expected text, a number or a list of them") from None
    except RequestError as error:
        faulty = next((name for row in rows for name in nested.lists_of_objects(row) if name in names), None)
        raise RequestError(f"column {faulty}: {error}" if faulty else str(error)) from None


@lru_cache(64)  # most requests have the same columns
def _header_has_names(line: str, names: tuple[str, ...]) -> bool:
    """Whether the CSV header is parsed as these names."""
    try:
        log = open_log(io.BytesIO(line.encode()))
    except RequestError:
        return False
    return log.kind == "csv" and log.columns == names and line.count("\n") == 1


def text_of(value: Any, separator: str = LIST) -> str | None:
    """Returns the text of a JSON value in CSV.

    Args:
        value: A JSON value.
        separator: Separator of the items of lists.

    Returns:
        The text; None for a missing value.

    Raises:
        RequestError: The value is an object.
    """
    if isinstance(value, list):
        return separator.join(text for item in value if (text := text_of(item, separator)) is not None) or None
    if isinstance(value, dict):
        raise RequestError("a value is an object; expected text, a number, a list of them, or null")
    return value if isinstance(value, str) else as_text(value)


# --------------------------------------------------------------------------------------------------------------- tables


def _arrow(job: Job, choose: Choose) -> pa.Table:
    rows = size = 0
    for length, decompressed in _messages(job.body):
        rows, size = rows + length, size + decompressed
        limits.ROWS.require(rows, job.received_bytes)
        limits.TABLE.require(size, job.received_bytes)
    schema = pa.ipc.open_stream(job.body).schema
    chosen = _chosen(schema, choose)
    options = pa.ipc.IpcReadOptions(included_fields=nested.holders(schema, set(chosen)))
    table = pa.ipc.open_stream(job.body, options=options).read_all()
    table.validate(full=True)  # offsets in the body are not trusted
    return _checked(nested.flat_table(table, chosen), job)


def _messages(body: bytes) -> Iterator[tuple[int, int]]:
    """Number of rows and decompressed bytes of every message of an Arrow stream, from its metadata.

    Source: https://github.com/apache/arrow/blob/main/format/Message.fbs. A compressed buffer begins with its size.
    """
    from flatbuffers.number_types import Int64Flags
    from flatbuffers.table import Table

    reader = pa.ipc.MessageReader.open_stream(body)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type not in ("record batch", "dictionary"):
            continue
        metadata, data = message.metadata.to_pybytes(), memoryview(message.body or b"")
        try:
            root = Table(metadata, int.from_bytes(metadata[:4], "little"))
            header = Table(metadata, 0)
            root.Union(header, root.Offset(8))
            if message.type == "dictionary":
                header = Table(metadata, header.Indirect(header.Pos + header.Offset(6)))
            length_at, buffers_at, compression_at = header.Offset(4), header.Offset(8), header.Offset(10)
            length = header.Get(Int64Flags, header.Pos + length_at) if length_at else 0
            decompressed = 0
            if compression_at and buffers_at:
                start, count = header.Vector(buffers_at), header.VectorLen(buffers_at)
                buffers = np.frombuffer(metadata, "<i8", 2 * count, start).reshape(-1, 2)
                for offset in buffers[buffers[:, 1] >= 8, 0].tolist():
                    decompressed += max(int.from_bytes(data[offset : offset + 8], "little", signed=True), 0)
        except Exception as error:  # the metadata are not trusted
            raise RequestError(f"the Arrow stream is damaged: {one_line(error)}") from error
        yield (length if message.type == "record batch" else 0), decompressed


def _parquet(job: Job, choose: Choose) -> pa.Table:
    import pyarrow.parquet as parquet  # rarely needed

    source = pa.BufferReader(job.body)
    metadata = parquet.read_metadata(source)
    limits.ROWS.require(metadata.num_rows, job.received_bytes)
    chosen = _chosen(metadata.schema.to_arrow_schema(), choose)
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    columns = set(chosen)
    paths = [itertools.accumulate(leaf.path.split("."), "{}.{}".format) for leaf in leaves]  # a, a.b, a.b.c
    read = [i for i, prefixes in enumerate(paths) if not columns.isdisjoint(prefixes)]
    values = size = 0
    for group in range(metadata.num_row_groups):
        for i in read:
            chunk = metadata.row_group(group).column(i)
            values, size = values + chunk.num_values, size + chunk.total_uncompressed_size
    limits.VALUES.require(values, job.received_bytes)
    limits.TABLE.require(size, job.received_bytes)
    # a dictionary of long values stays one
    texts = [leaves[i].path for i in read if leaves[i].physical_type == "BYTE_ARRAY"]
    with parquet.ParquetFile(source, read_dictionary=texts) as file:
        table = file.read(chosen, use_threads=False)
    return _checked(nested.flat_table(table, chosen), job)


def _chosen(schema: pa.Schema, choose: Choose) -> list[str]:
    """The columns of a table to read; the fields of structs are columns. Raises RequestError if names repeat."""
    names = nested.flat_schema(schema).names
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise RequestError(f"the body has the column {twice[0]!r} more than once; expected a name of its own for each")
    return choose(names)


def _checked(table: pa.Table, job: Job) -> pa.Table:
    """The table, unless its cells as text would be too large."""
    limits.VALUES.require(table.num_rows * table.num_columns, job.received_bytes)
    limits.TABLE.require(sum(map(_text_bytes, table.columns)), job.received_bytes)
    return table


def _text_bytes(column: Any) -> int:
    """Bytes of the texts of a column, repeated and overlapping texts counted each time."""
    if isinstance(column, pa.ChunkedArray):
        return sum(map(_text_bytes, column.chunks))
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _text_bytes(column.flatten())
    if pa.types.is_dictionary(kind):
        values = column.dictionary
        if not _is_text(values.type):
            return 8 * len(column)
        lengths = np.asarray(pc.fill_null(pc.binary_length(values.cast(pa.large_binary())), 0), np.int64)
        return int(lengths[np.asarray(column.indices.drop_null())].sum()) if len(lengths) else 0
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):  # views may overlap
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        return int(views[column.offset : column.offset + len(column), 0].astype(np.int64).sum())
    return 0  # in other columns every value is stored by itself


def _is_text(kind: Any) -> bool:
    types = pa.types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))
