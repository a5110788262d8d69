"""Faults of a schema that concern several columns, and the encodings that columns share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_shared_encodings(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gives the columns that share a table the encoding of that table's column.

    Args:
        columns: JSON of the columns.

    Returns:
        The columns with their encodings.
    """
    encodings = {column["name"]: column.get("encoding", {}) for column in columns}
    return [
        {**column, "encoding": encodings.get(column["shares"], {})} if "shares" in column else dict(column)
        for column in columns
    ]


def sharing_faults(columns: Sequence[Mapping[str, Any]], encodings: Sequence[str]) -> list[str]:
    """Lists the faults of the columns that share the table of another one.

    Args:
        columns: JSON of the columns.
        encodings: Encodings that a list may have.

    Returns:
        One line a fault.
    """
    faults, by_name = [], {column["name"]: column for column in columns}
    for column in columns:
        if not (name := column.get("shares")):
            continue
        other = by_name.get(name, {"kind": "absent"})
        if other["kind"] != "category" or other.get("encoding", {}).get("type") not in encodings:
            faults.append(
                f"column {column['name']}: shares {name} ({other['kind']}), expected a category of the encoding "
                f"{', '.join(encodings)}"
            )
        if "encoding" in column and column["encoding"] != other.get("encoding"):
            faults.append(f"column {column['name']}: found an encoding, expected none beside that of {name}")
    return faults


def faults_without_header(columns: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[str]:
    """Lists the faults of the columns of a schema without a header.

    Args:
        columns: JSON of the columns.
        kinds: Kinds that they may have.

    Returns:
        One line a fault.
    """
    faults = [
        f"column {column['name']}: found the kind {column['kind']}, expected {', '.join(kinds)} without a header"
        for column in columns
        if column["kind"] not in kinds
    ]
    faults += [
        f"column {column['name']}: found a label behind other columns, expected it first without a header"
        for column in columns[1:]
        if column["kind"] == "label"
    ]
    faults += [
        f"column {column['name']}: found a source, expected that of a number in steps alone"
        for column in columns
        if "source" in column and column.get("encoding", {}).get("type") != "steps"
    ]
    return faults + [
        f"column {column['name']}: found the encoding id, expected another one without a header"
        for column in columns
        if column.get("encoding", {}).get("type") == "id"
    ]
