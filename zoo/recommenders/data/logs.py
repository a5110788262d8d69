"""Opens click logs as streams of named text columns.

Sources: CSV and TSV with a header, JSON lines and Parquet; text files plain or .gz; data sets of the `datasets`
library, on disk or on the hub; rows and tables in memory.

Columns come as text in batches of constant memory; missing values are null. pyarrow reads CSV (RFC 4180, UTF-8) and
Parquet. Lists in JSON lines or Parquet become text joined by `LIST`; empty lists are null, as in CSV. Rows in Criteo's
format (Kaggle 2014) have no header: their 39 or 40 columns get the names `CRITEO`.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import GZIP, starts_with
from pipelines.data.text_files import not_utf8, open_decoded
from zoo.recommenders.data import sources
from zoo.recommenders.data.cell_values import LIST, RAW_MISSING, CellForm, as_texts, column_as_text, formed
from zoo.recommenders.data.columns import nested
from zoo.recommenders.data.row_errors import closed_quotes

BLOCK = 4 << 20  # bytes of text read at once
HEAD = 10_000  # JSON lines that are read for the names of the columns; all of them if a column is missing
ROWS = 65_536  # of a batch of JSON lines or Parquet; with lists, which may be long, a 16th
INSPECTED_ROWS = 64  # rows of a table that show whether a column of bytes is text
DELIMITERS = (",", "\t", ";", "|")
CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
_QUOTED = re.compile(r'"[^"]*("|$)')
_CRITEO_ROW = re.compile(r"([01]\t)?(-?\d*\t){13}([0-9a-f]{8})?(\t([0-9a-f]{8})?){25}")
# takes a row left out: its 0-based position in the log, its kind of fault, and the message (found and expected)
OnBadRow = Callable[[int, str, str], None]


@dataclass(frozen=True)
class Log:
    """A source of rows.

    Attributes:
        path: Path of the file, or the name of the source in messages.
        kind: "csv", "jsonl", "parquet", "saved" or "hub" (data sets), or "rows" (in memory).
        delimiter: Delimiter of "csv", one character.
        columns: Column names, with those of the partition at the end.
        header: Whether the first line is a header.
        place: Object to open if it is not `path`.
        partition: Columns with one value in all rows, from the folders of the path (Hive): (name, value or None).
        unread: Columns that cannot be read, with their types; they are not among `columns`.
        lists: Columns whose values are lists in the source, not texts with separators.
    """

    path: str | Path
    kind: str
    delimiter: str
    columns: tuple[str, ...]
    header: bool = True
    place: Any = None
    partition: sources.Partition = ()
    unread: tuple[tuple[str, str], ...] = ()
    lists: tuple[str, ...] = ()

    def having(self, names: Iterable[str] | None = None) -> Log:
        """Adds the columns of the JSON lines behind the first `HEAD`, if one of `names` is missing, or for None."""
        if self.kind != "jsonl" or (names is not None and set(names) <= set(self.columns)):
            return self
        with self.reading():
            return partitioned(_of_rows(self, nested.json_objects(self.path, _file(self))), self.partition)

    def batches(
        self,
        columns: Sequence[str] | None = None,
        on_bad_row: OnBadRow | None = None,
        forms: Mapping[str, CellForm] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Reads all rows in order as text columns.

        Args:
            columns: Names of the columns to read; None: all.
            on_bad_row: Called with every row that has another number of columns, see `OnBadRow`; the row is left out.
                None: the first such row raises.
            forms: Form of the texts of a column, by its name; None, and for other columns: canonical.

        Returns:
            Record batches of string columns, null where a value is missing.

        Raises:
            RequestError: The source cannot be read to its end, or a row is bad and `on_bad_row` is None.
        """
        if self.partition:
            yield from self._partitioned(self.columns if columns is None else tuple(columns), on_bad_row, forms or {})
            return
        chosen = self.columns if columns is None else tuple(columns)
        how = {name: (forms or {}).get(name, CellForm()) for name in chosen}
        with self.reading():
            if self.kind == "csv":
                for batch in csv_batches(self, self.stream(), chosen, on_bad_row):
                    yield formed(batch, how)
                return
            size = ROWS // 16 if self.lists else ROWS
            for rows in _tables(self, chosen, size):
                texts = [_texts(rows, name, how[name].separator) for name in chosen]
                yield formed(pa.record_batch(texts, names=list(chosen)), how)

    def _partitioned(
        self, columns: tuple[str, ...], bad: OnBadRow | None, forms: Mapping[str, CellForm]
    ) -> Iterator[pa.RecordBatch]:
        """See `batches`: adds the columns of the partition to those of the file."""
        values = dict(self.partition)
        file = replace(self, columns=self.columns[: len(self.columns) - len(values)], partition=())
        stored = [name for name in columns if name not in values] or file.columns[:1]
        for batch in file.batches(stored, bad, forms):
            constants = {
                name: forms.get(name, CellForm()).apply(pa.repeat(pa.scalar(value, pa.string()), len(batch)))
                for name, value in values.items()
            }
            arrays = {**constants, **dict(zip(stored, batch.columns, strict=True))}
            yield pa.record_batch([arrays[name] for name in columns], names=list(columns))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Converts errors of the readers to RequestError."""
        try:
            yield
        except (pa.ArrowException, EOFError, OSError, ValueError, zlib.error) as error:
            raise RequestError(f"{self.path} cannot be read as {self.kind}: {one_line(error)}") from error

    def stream(self) -> Any:
        """Returns the bytes of a file as a pyarrow stream, decompressed if it is gzip."""
        if isinstance(self.place, bytes):
            return pa.BufferReader(self.place)
        path = Path(self.path)
        return pa.CompressedInputStream(str(path), "gzip") if starts_with(path, GZIP) else pa.OSFile(str(path))


def open_log(source: Any) -> Log:
    """Opens a click log; detects its format by content.

    Args:
        source: A file, or a folder or pattern of one file; a folder of `datasets` or a data set on the hub
            ("org/name"), both optionally with ":split"; "-" for stdin; io.BytesIO with the bytes of CSV or JSON lines;
            a pyarrow table, a data frame, a `Dataset`, or a list of {column: value}; one dict is a row, or, if all its
            values are lists or arrays, the columns of a table. A `Log` is returned as is.

    Returns:
        The log with its column names. No rows are read yet.

    Raises:
        RequestError: The source does not exist or cannot be read, or its columns are unnamed or have duplicate names.
    """
    if isinstance(source, Log):
        return source
    if isinstance(source, io.BytesIO):
        return _by_head("the text", *_head("the text", source, None), place=source.getvalue())
    if not isinstance(source, str | Path):
        rows = _in_memory(source)
        log = Log("the input", "rows", "", (), place=rows)
        return _of_rows(log, rows) if isinstance(rows, list) else _of_tables(log, rows.schema)
    paths = sources.expand(source)
    if len(paths) > 1:
        raise RequestError(f"found {len(paths)} files in {source}, expected one")
    return _open_path(*paths[0], None)


def _open_path(name: str, partition: sources.Partition, delimiter: str | None) -> Log:
    """Opens a file, stdin or data set, see `open_log`, and adds the columns of its partition that it lacks."""
    if partition:
        return partitioned(_open_path(name, (), delimiter), partition)
    path = sources.spool() if name == "-" else Path(name)
    if not path.is_file():
        name, kind, place = sources.locate(name)
        if kind == "text":
            raise RequestError(f"found {name} to be a pipe or a device; expected a file, or - for stdin")
        return _of_tables(Log(name, kind, "", (), place=place), next(sources.tables(name, kind, place)).schema)
    try:
        if starts_with(path, sources.PARQUET):
            from pyarrow import parquet

            return _of_tables(Log(path, "parquet", "", ()), parquet.read_schema(path))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    sources.require_text(path)
    return _by_head(path, *_head(path, path, delimiter))


def partitioned(log: Log, partition: sources.Partition) -> Log:
    """Adds the columns of Hive partitions that a log lacks; none to rows without a header.

    Args:
        log: Log of one file.
        partition: Columns of its path, see `sources.expand`.

    Returns:
        The log with the columns.
    """
    own = tuple((column, value) for column, value in partition if column not in log.columns) if log.header else ()
    return replace(log, columns=(*log.columns, *(column for column, _ in own)), partition=own)


def open_logs(source: Any, delimiter: str | None = None) -> list[Log]:
    """Opens one source or a list of sources.

    Args:
        source: A source, see `open_log`, or a list of sources. Folders and patterns stand for all their files, see
            `sources.expand`.
        delimiter: Delimiter of CSV; None: the most frequent candidate in the header of a log.

    Returns:
        The logs in order.

    Raises:
        RequestError: As `open_log`.
    """
    several = isinstance(source, list | tuple) and source and not isinstance(source[0], dict)
    logs = []
    for part in source if several else [source]:
        is_path = isinstance(part, str | Path)
        logs += [_open_path(*location, delimiter) for location in sources.expand(part)] if is_path else [open_log(part)]
    return logs


def _head(name: str | Path, source: Path | io.BytesIO, delimiter: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Returns the first line of a text and, for CSV, the delimiter and the names in the header.

    The header may span several lines.
    """
    try:
        with open_decoded(source) as file:
            line = file.readline(BLOCK)
            if not line.strip() or line.lstrip().startswith(("{", "[{")):
                return line, "", ()
            chosen = delimiter or max(DELIMITERS, key=_QUOTED.sub("", line).count)
            return line, chosen, tuple(next(csv.reader(itertools.chain([line], file), delimiter=chosen)))
    except (pa.ArrowException, EOFError, OSError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str | Path, error: Exception) -> RequestError:
    if isinstance(error, UnicodeDecodeError):
        return RequestError(not_utf8(name, error))
    expected = "CSV, TSV or JSON lines in UTF-8 (plain or .gz), or Parquet"
    return RequestError(f"{name} cannot be read: {one_line(error)}; expected {expected}")


def _by_head(path: str | Path, line: str, delimiter: str, names: tuple[str, ...], place: bytes | None = None) -> Log:
    """Returns the log of a text from its first line, see `open_log` and `_head`."""
    if not line.strip():
        raise RequestError(f"{path} is empty, or begins with an empty line; expected a header that names the columns")
    if line.lstrip().startswith("[{"):
        expected = "an object a line; run: jq -c '.[]' FILE > log.jsonl"
        raise RequestError(f"{path} holds an array of JSON, expected {expected}")
    if line.lstrip().startswith("{"):
        return _of_rows(log := Log(path, "jsonl", "", (), place=place), _first_rows(log, line))
    if _CRITEO_ROW.fullmatch(line.rstrip("\r\n")):
        labelled = line.count("\t") == len(CRITEO) - 1
        return Log(path, "csv", "\t", CRITEO if labelled else CRITEO[1:], header=False, place=place)
    return _named(Log(path, "csv", delimiter, names, place=place))


def is_criteo(source: Any) -> bool:
    """Whether a source has rows in the Criteo format instead of named columns.

    Args:
        source: A source or a list of sources, see `open_log`.

    Returns:
        Whether it does; also true if it cannot be opened.
    """
    if isinstance(source, list | tuple) and source:
        return is_criteo(source[0]) if isinstance(source[0], str | Path) else not isinstance(source[0], dict)
    try:
        log = open_logs(source)[0] if str(source) != "-" else None
    except RequestError:
        return True
    if log is None or not log.header:
        return True
    if log.kind == "csv":  # whose header that reader does not take
        return False
    lower = {column.lower() for column in log.columns}
    return len(lower & {f"c{i}" for i in range(1, 27)} | lower & {f"categorical_feature_{i}" for i in range(1, 27)}) > 9


def _in_memory(source: Any) -> pa.Table | list[Mapping[str, Any]]:
    """Returns rows as they are, and anything else as a table."""
    if isinstance(source, Mapping):
        scalars = (str, bytes, bytearray, Mapping)
        if not all(hasattr(values, "__len__") and not isinstance(values, scalars) for values in source.values()):
            source = [source]
    if isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        return [nested.flat_row(row) for row in source]
    try:
        return nested.flat_table(_table(source))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as error:
        raise RequestError(
            f"found {type(source).__name__} as rows ({one_line(error)}); expected a path, a table or a list of "
            "{column: value}"
        ) from error


def _table(source: Any) -> pa.Table:
    """A table or a data frame as a table of Arrow."""
    if isinstance(source, Mapping):
        return pa.table({name: _column(values, name) for name, values in source.items()})
    if hasattr(source, "items") and hasattr(source, "dtypes"):  # a data frame of pandas, whose objects may be mixed
        return pa.table({str(name): _column(values, str(name)) for name, values in source.items()})
    if hasattr(source, "with_format"):  # a data set of the library `datasets`
        return source.with_format("arrow")[:]
    return pa.table(source.collect() if hasattr(source, "sink_parquet") else source)  # a lazy frame of polars


def _column(values: Any, name: str) -> Any:
    """A column as Arrow array; objects that Arrow has no type for, or takes for lists, as texts."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        column = pa.array(values)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return as_texts(values, name, LIST)
    is_set = pa.types.is_list(column.type) and any(isinstance(value, Set) for value in values)
    return as_texts(values, name, LIST) if is_set else column


def _tables(log: Log, columns: Sequence[str], size: int = ROWS) -> Iterator[Any]:
    """Yields rows or Arrow tables of a source; of a Parquet file with these columns alone, `size` rows each."""
    if log.kind == "jsonl":
        rows = nested.json_objects(log.path, _file(log))
        while part := list(itertools.islice(rows, size)):
            yield part
    elif isinstance(log.place, list):
        yield from (log.place[begin : begin + size] for begin in range(0, len(log.place), size))
    elif log.kind == "rows":
        yield from log.place.to_batches(size)
    elif log.kind == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(log.path) as file:
            yield from nested.parquet_batches(file, size, columns)
    else:
        for table in map(nested.flat_table, sources.tables(str(log.path), log.kind, log.place)):
            yield table.combine_chunks().to_batches()[0] if len(table) else table


def _of_tables(log: Log, schema: pa.Schema) -> Log:
    """The log of tables with a schema; columns that have no text, such as maps, are set aside."""
    schema = nested.flat_schema(schema)
    types = [(name, schema.field(index).type) for index, name in enumerate(schema.names)]
    unread = tuple((name, str(kind)) for name, kind in types if not nested.has_text(kind))
    lists = tuple(name for name, kind in types if "list" in str(kind).partition("<")[0])  # also views and fixed sizes
    unread += tuple((name, "bytes that are no UTF-8 text") for name in _binary(log, types))
    named = {name for name, _ in unread}
    columns = tuple(name for name, _ in types if name not in named)
    return _named(replace(log, columns=columns, unread=unread, lists=lists))


def _binary(log: Log, types: Iterable[tuple[str, pa.DataType]]) -> list[str]:
    """Names the columns of bytes whose first values are no text."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    names = [name for name, kind in types if any(test(kind) for test in tests)]
    with log.reading():
        rows = next(_tables(log, names, INSPECTED_ROWS), None) if names else None
    return [name for name in names if rows is not None and not _is_text(rows.slice(0, INSPECTED_ROWS), name)]


def _is_text(rows: Any, name: str) -> bool:
    """Whether the values of a column can be read as text."""
    try:
        column_as_text(rows.column(name))
    except pa.ArrowInvalid:
        return False
    return True


def _named(log: Log) -> Log:
    """`log`, unless its columns have no proper names."""
    twice = [name for name, count in Counter(log.columns).items() if count > 1]
    if twice:
        expected = "a name of its own for each"
        raise RequestError(f"{log.path} has the column {twice[0]!r} more than once; expected {expected}")
    numbers = [name for name in log.columns if _is_number(name)]
    unnamed = log.columns.count("") > (log.kind == "csv" and len(log.columns) > 1)
    if unnamed or (log.kind == "csv" and len(numbers) * 2 > len(log.columns)):
        raise RequestError(
            f"{log.path} begins with {', '.join(log.columns)[:80]!r}, which names no columns; expected a header"
        )
    return log


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not any(character.isalpha() for character in text)
    return True


def _file(log: Log) -> Path | io.BytesIO:
    """The bytes of the text of a log."""
    return io.BytesIO(log.place) if isinstance(log.place, bytes) else Path(log.path)


def _first_rows(log: Log, line: str) -> Iterator[Mapping[str, Any]]:
    """Rows of the first `HEAD` JSON lines, up to a faulty one behind the first, which is reported when it is read."""
    yield nested.json_object(log.path, 1, line)
    with suppress(RequestError, EOFError, OSError, UnicodeDecodeError, zlib.error):
        yield from itertools.islice(nested.json_objects(log.path, _file(log)), HEAD)


def _of_rows(log: Log, rows: Iterable[Mapping[str, Any]]) -> Log:
    """The log of rows, whose columns are their keys; lists of objects, which have no text, are set aside."""
    names, objects, lists = dict[str, None](), set[str](), dict[str, None]()
    for row in rows:
        names |= dict.fromkeys(row)
        lists |= dict.fromkeys(name for name, value in row.items() if isinstance(value, list | tuple))
        objects.update(nested.lists_of_objects(row))
    unread = tuple((name, "a list of objects") for name in names if name in objects)
    columns = tuple(name for name in names if name not in objects)
    return _named(replace(log, columns=columns, unread=unread, lists=tuple(lists)))


def csv_batches(
    log: Log, source: Any, columns: Sequence[str], on_bad_row: OnBadRow | None, before: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Reads CSV records as text columns, see `Log.batches`.

    Args:
        log: Log of the records.
        source: A stream; with `before`, bytes that become one batch.
        columns: Names of the columns to read.
        on_bad_row: Called with every row that has another number of columns; None: the first such row raises.
        before: Number of records in front of `source`, including the header; None: `source` is the whole log.

    Returns:
        Record batches of string columns.

    Raises:
        pyarrow.ArrowInvalid: A record cannot be parsed. Its row number counts from the start of the log.
    """
    path, header, earlier = log.path, log.header and before is None, before or 0

    def skip(row: Any) -> str:
        assert on_bad_row is not None
        number = row.number + earlier
        fault = f"found {row.actual_columns} columns, expected {row.expected_columns}"
        on_bad_row(number - 1 - log.header, "columns", f"{path} row {number}: {fault}")
        return "skip"

    try:
        reader = pa.csv.open_csv(
            source if before is None else pa.BufferReader(source),
            read_options=pa.csv.ReadOptions(
                block_size=BLOCK if before is None else len(source),
                use_threads=False,
                column_names=None if header else list(log.columns),
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=log.delimiter,
                quote_char='"' if log.header else False,
                newlines_in_values=log.header,
                invalid_row_handler=None if on_bad_row is None else skip,  # a thread of Arrow frees it
            ),
            convert_options=pa.csv.ConvertOptions(
                include_columns=list(columns),
                column_types=dict.fromkeys(columns, pa.string()),
                null_values=list(RAW_MISSING),
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
        opened = partial(open_decoded, _file(log) if before is None else io.BytesIO(source))
        with reader:
            yield from closed_quotes(reader, opened, log.delimiter, earlier) if log.header else reader
    except pa.ArrowInvalid as error:
        if "Empty CSV file or block" in str(error):  # a header without a line end
            return
        text = re.sub(r"\bRow #(\d+)", lambda row: f"Row #{int(row[1]) + earlier}", str(error), count=1)
        hint = " (--on-error skip leaves such rows out)" * (" columns, got " in text)
        raise pa.ArrowInvalid(text + hint) from error


def _texts(rows: Any, name: str, separator: str) -> pa.Array:
    """A column of JSON objects, where a missing key is null, or of a table as texts."""
    if isinstance(rows, list):
        return as_texts((row.get(name) for row in rows), name, separator)
    try:
        return column_as_text(rows.column(name), separator, name)
    except pa.ArrowInvalid as error:
        expected = f"texts, numbers or lists; zoo schema --ignore {name} leaves it out"
        raise RequestError(f"column {name} cannot be read ({one_line(error)}), expected {expected}") from error
