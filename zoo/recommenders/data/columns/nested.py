"""Values within values: JSON objects in JSON lines, and types of Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def json_object(path: str | Path, number: int, line: str) -> dict[str, Any]:
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
    return dict(_flat(value))


def _flat(row: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of an object; those of objects in it under names such as user.id."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
