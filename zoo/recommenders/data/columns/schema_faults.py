"""Faults of a schema that concern several columns, and the encodings that columns share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.recommenders.data.transforms import WITH_CONSTANT

_NEEDS = {  # of an encoding, besides its type
    "hash": ("buckets",),
    "hash-bucket": ("buckets",),
    "vocabulary": ("values",),
    "id": ("rows",),
    "gaps": ("buckets",),
    "log1p-min-max": ("low", "high", "fill"),
    "log1p": ("minimum", "maximum"),
    "standard": ("mean", "deviation"),
    "min-max": ("minimum", "maximum"),
    "quantile": ("quantiles",),
    "value": (),
    "per-element": ("means", "deviations"),
    "steps": ("steps", "minimum", "maximum", "fill"),
}
_MAY = {
    ("categories", "vocabulary"): ("skip_unknown", "unknown"),
    ("categories", "id"): ("unknown",),
    ("category", "vocabulary"): ("unknown",),
    ("category", "id"): ("unknown",),
    ("category", "hash-bucket"): ("missing_row",),
    ("number", "value"): ("fill",),
}


def with_shared_encodings(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gives the columns that share a table the encoding of that table's column, and time gaps the form of their list.

    Args:
        columns: JSON of the columns.

    Returns:
        The columns with their encodings.
    """
    named = {column["name"]: column for column in columns}

    def derived(column: Mapping[str, Any]) -> dict[str, Any]:
        if "shares" in column:
            return {**column, "encoding": named.get(column["shares"], {}).get("encoding", {})}
        if "gaps_of" in column:
            return {**column, "pooling": "none", "length": named[column["gaps_of"]]["length"]}
        return dict(column)

    return [derived(column) for column in columns]


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


def gap_faults(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the faults of the columns of times whose gaps are those of a sequence.

    Args:
        columns: JSON of the columns.

    Returns:
        One line a fault.
    """
    faults, by_name = [], {column["name"]: column for column in columns}
    for column in columns:
        if not (name := column.get("gaps_of")):
            continue
        other = by_name.get(name, {"kind": "absent"})
        if other.get("pooling") != "none" or other.get("gaps_of"):
            fault = f"column {column['name']}: found gaps_of {name} ({other['kind']})"
            faults.append(f'{fault}, expected a sequence, "pooling": "none"')
        if twice := [candidate["name"] for candidate in columns if candidate.get("gaps_of") == name][1:]:
            faults += [f"column {twice[0]}: found other times of {name}, expected one list"] * (column["name"] in twice)
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


def column_faults(
    column: Mapping[str, Any],
    encodings: Mapping[str, Sequence[str]],
    of_a_list: Sequence[str],
    of_rows: Sequence[str],
) -> list[str]:
    """Lists the faults of one column.

    Args:
        column: JSON of the column.
        encodings: Encodings of every kind that has one.
        of_a_list: Fields of the kind categories.
        of_rows: Kinds whose values have rows of tables.

    Returns:
        One line a fault.
    """
    kind, encoding = column["kind"], column.get("encoding", {})
    expected = encodings.get(kind, ())
    if column.get("shares") and kind == "categories":
        expected, encoding = (), {}
    faults = []
    if column.get("gaps_of"):
        expected, of_a_list = ("gaps",) * (kind == "categories"), ("separator", "unit")
        foreign = ("shares", "pooling", "length", "min_count", "table")
        faults += [f"times with gaps_of have no {key} of their own" for key in foreign if column.get(key)]
    if expected and encoding.get("type") not in expected:
        faults.append(f"found the encoding {encoding.get('type', 'none')}, expected {', '.join(expected)} for a {kind}")
    elif expected:
        needs = _NEEDS[encoding["type"]]
        faults += [f"its {encoding['type']} encoding lacks {need!r}" for need in needs if need not in encoding]
        extra = [key for key in encoding if key not in ("type", *needs, *_MAY.get((kind, encoding["type"]), ()))]
        faults += [f"its {encoding['type']} encoding has no {key!r}" for key in extra]
        if encoding["type"] in ("min-max", "log1p") and not faults and encoding["minimum"] >= encoding["maximum"]:
            faults.append(f"its minimum {encoding['minimum']} is not below its maximum {encoding['maximum']}")
        if encoding["type"] == "log1p-min-max" and not faults and not 0 <= encoding["low"] <= encoding["high"]:
            faults.append(f"found low {encoding['low']} and high {encoding['high']}, expected 0 <= low <= high")
        if encoding["type"] == "id" and not faults and encoding.get("unknown", 0) >= encoding["rows"]:
            last = encoding["rows"] - 1
            faults.append(f"found its row of unknown values {encoding['unknown']}, expected 0 to {last}")
        if encoding["type"] == "steps" and not faults:
            wrong = [step for step in encoding["steps"] if len(step) != 1 + (step[0] in WITH_CONSTANT)]
            faults += [f"its step {step[0]} takes {'a' if len(step) == 1 else 'no'} constant" for step in wrong]
            if encoding["minimum"] > encoding["maximum"]:
                faults.append(f"its minimum {encoding['minimum']} is above its maximum {encoding['maximum']}")
        if (
            encoding["type"] == "per-element"
            and not faults
            and len({*map(len, (encoding["means"], encoding["deviations"]))}) > 1
        ):
            sizes = len(encoding["means"]), len(encoding["deviations"])
            faults.append(f"found {sizes[0]} means and {sizes[1]} deviations, expected as many")
        if "quantiles" in encoding and sorted(encoding["quantiles"]) != list(encoding["quantiles"]):
            faults.append("its quantiles do not rise")
    elif encoding:
        faults.append(f"a {kind} has no encoding")
    if kind == "categories":
        faults += [f"lacks {key!r}" for key in of_a_list if not column.get(key)]
    else:
        faults += [f"a {kind} has no {key}" for key in (*of_a_list, "shares", "gaps_of") if column.get(key)]
    if kind not in of_rows or column.get("shares"):
        whose = "a column that shares a table" if kind in of_rows else f"a {kind}"
        faults += [f"{whose} has no {key}" for key in ("min_count", "table") if column.get(key)]
    if kind == "timestamp" and not column.get("unit"):
        faults.append("lacks 'unit'")
    if kind != "label" and column.get("where"):
        faults.append(f"a {kind} has no where")
    if kind != "label" and column.get("positive"):
        faults.append(f"a {kind} has no positive")
    return faults
