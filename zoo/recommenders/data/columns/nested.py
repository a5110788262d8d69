"""Values within values: objects in rows, and structs of Arrow."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.errors import RequestError, one_line
from pipelines.data.text_files import open_decoded
from zoo.recommenders.data.cell_values import MISSING

LONGEST_NAMES = 1 << 22  # characters: every name holds those of the structs around it
NO_TEXTS = frozenset(MISSING)  # in a list one way of reading keeps them, another leaves them out
PLAIN = frozenset({str, int, float, bool, type(None)})  # types of most values: neither objects nor lists


def has_text(kind: pa.DataType) -> bool:
    """Whether the values of an Arrow type are read as texts, numbers or lists of them.

    Args:
        kind: Type of a column.
    """
    if pa.types.is_dictionary(kind):
        return has_text(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return not pa.types.is_nested(kind.value_type) and has_text(kind.value_type)
    return not pa.types.is_nested(kind)


def json_object(path: str | Path, number: int, line: str | bytes) -> Mapping[str, Any]:
    """Parses a line of JSON; values of objects in it get names such as user.id.

    Args:
        path: Name of the file in messages.
        number: Number of the line in messages.
        line: The line.

    Returns:
        {name: value}.

    Raises:
        RequestError: The line is not a JSON object.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"line {number} of {path} is no JSON ({one_line(error)}); expected an object a line"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"line {number} of {path} is no JSON object; expected one a line")
    return flat_row(value)


def json_objects(path: str | Path, source: Path | io.BytesIO) -> Iterator[Mapping[str, Any]]:
    """Reads JSON lines, see `json_object`; empty lines are left out.

    Args:
        path: Name of the file in messages.
        source: The file, or the bytes of a text.

    Returns:
        {name: value} of the lines.

    Raises:
        RequestError: A line is not a JSON object.
    """
    with open_decoded(source) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield json_object(path, number, line)


def is_plain(row: Mapping[str, Any]) -> bool:
    """Returns whether all values of a row are texts, numbers, booleans, None or lists of them without missing texts.

    Args:
        row: {name: value}.
    """
    if PLAIN.issuperset(map(type, row.values())):
        return True
    others = [value for value in row.values() if type(value) not in PLAIN]
    lists = all(type(value) is list and PLAIN.issuperset(map(type, value)) for value in others)
    return lists and all(map(NO_TEXTS.isdisjoint, others))


def flat_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Flattens a row: the fields of nested objects become values with names such as user.id.

    Args:
        row: {name: value}.
    """
    if PLAIN.issuperset(map(type, row.values())):
        return row
    return dict(_flat(row)) if any(isinstance(value, Mapping) for value in row.values()) else row


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def lists_of_objects(row: Mapping[str, Any]) -> list[str]:
    """Names the columns of a row that hold lists of objects, which have no text.

    Args:
        row: {name: value}.
    """
    if PLAIN.issuperset(map(type, row.values())):
        return []
    lists = [(name, value) for name, value in row.items() if isinstance(value, list | tuple)]
    return [name for name, value in lists if any(isinstance(item, Mapping) for item in value)]


def flat_table(table: Any, names: Sequence[str] | None = None) -> Any:
    """Flattens a table: the fields of structs become columns with names such as user.id.

    Args:
        table: pyarrow.Table or RecordBatch.
        names: Names of the columns to return, of those of `flat_schema`; None: all.

    Returns:
        The table or record batch; `table` itself if it has no structs and `names` is None.
    """
    if names is None and not any(map(pa.types.is_struct, table.schema.types)):
        return table
    leaves = _leaves(table.schema)
    paths = {field.name: path for path, field in leaves}
    chosen = [path for path, _ in leaves] if names is None else [paths[name] for name in names]
    arrays = [_value(table.column(first), path) for first, *path in chosen]
    return type(table).from_arrays(arrays, [field.name for _, field in leaves] if names is None else list(names))


def flat_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of `flat_table`.

    Args:
        schema: Schema of the table.
    """
    return pa.schema([field for _, field in _leaves(schema)])


def holders(schema: pa.Schema, names: Collection[str]) -> list[int]:
    """Returns the indices of the columns that hold values of a flat table.

    Args:
        schema: Schema of the table.
        names: Names of columns, of those of `flat_schema`.
    """
    return sorted({path[0] for path, field in _leaves(schema) if field.name in names})


def parquet_batches(file: Any, rows: int, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Reads columns of a Parquet file as columns that are no structs, see `flat_table`.

    Args:
        file: pyarrow.parquet.ParquetFile.
        rows: Rows of a batch.
        names: Names of the columns to read, of those of `flat_schema`; None: all. Other columns are not read.

    Returns:
        Record batches.
    """
    batches = file.iter_batches(rows, columns=None if names is None else list(names))
    return (flat_table(batch, names) for batch in batches)


def _leaves(schema: pa.Schema) -> list[tuple[list[int], pa.Field]]:
    """Columns that are no structs: the index of their column and of the fields in it, and their field."""
    leaves: list[tuple[list[int], pa.Field]] = []
    size = 0
    fields = [([i], schema.field(i)) for i in reversed(range(len(schema)))]
    while fields:
        path, field = fields.pop()
        if pa.types.is_struct(field.type):
            inner = [field.type.field(i) for i in range(field.type.num_fields)]
            named = [([*path, i], child.with_name(f"{field.name}.{child.name}")) for i, child in enumerate(inner)]
            fields += reversed(named)
            size += sum(len(child.name) for _, child in named)
            if size > LONGEST_NAMES:
                limit = f"names of at most {LONGEST_NAMES:,} characters together"
                raise RequestError(f"found a schema with longer names of nested columns, expected {limit}")
        else:
            leaves.append((path, field))
    return leaves


def _value(column: Any, path: Sequence[int]) -> Any:
    """A field of a column of structs, null where a struct is; the column itself for no path."""
    return pc.struct_field(column, list(path)) if path else column
