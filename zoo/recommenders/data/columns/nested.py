"""Values within values: objects in rows, and structs of Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.core.errors import RequestError, one_line


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


def json_object(path: str | Path, number: int, line: str) -> Mapping[str, Any]:
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


def flat_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row whose values are no objects: those of objects in it get names such as user.id.

    Args:
        row: {name: value}.
    """
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
    lists = [(name, value) for name, value in row.items() if isinstance(value, list | tuple)]
    return [name for name, value in lists if any(isinstance(item, Mapping) for item in value)]


def flat_table(table: Any) -> Any:
    """Returns a table whose columns are no structs: their fields are columns with names such as user.id.

    Args:
        table: pyarrow.Table, or RecordBatch of at least one row.
    """
    if not any(pa.types.is_struct(kind) for kind in table.schema.types):
        return table
    if isinstance(table, pa.RecordBatch):
        return flat_table(pa.Table.from_batches([table])).combine_chunks().to_batches()[0]
    return flat_table(table.flatten())


def flat_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of `flat_table`.

    Args:
        schema: Schema of the table.
    """
    return flat_table(schema.empty_table()).schema
