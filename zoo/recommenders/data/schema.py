"""Schema of a click log: kind and encoding of every column. It can be edited as JSON and is saved with the model.

The file is described by `JSON_SCHEMA` (JSON Schema, draft 2020-12): {"rows", "columns": [{"name", "kind", ...}]}.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from zoo.recommenders.data.cell_values import LIST, CellForm
from zoo.recommenders.data.columns.schema_faults import (
    column_faults,
    faults_without_header,
    gap_faults,
    sharing_faults,
    with_shared_encodings,
)
from zoo.recommenders.data.transforms import STEPS

KINDS = {
    "number": "a quantity: age, price, a count",
    "category": "one of many values without an order: an id, a country",
    "categories": "a list of categories: genres, the items clicked before",
    "vector": "a list of numbers of one length: a pre-trained embedding of the item or user",
    "timestamp": "time of the row; it orders the rows for the held-out split and is no input of the model",
    "label": "the target of the prediction, 0 or 1; rows with a missing label train only their other labels",
    "weight": "weight of the row in training and in the metrics, 0 or more",
    "ignored": "not used",
}
ENCODINGS = {
    "hash": "a category's id is 1 + FarmHash Fingerprint64 of its text modulo buckets",
    "hash-bucket": "a category's id is FarmHash Fingerprint64 of its text modulo buckets, as in TensorFlow; a "
    "missing value has the id of the empty text or, with missing_row, the number of buckets",
    "vocabulary": "a category's id is its position in values, from 1 on; other values have the id 0 or, in an imported "
    "ranker, the row unknown",
    "id": "the text is the row number itself; other values than 0 to rows - 1 and missing values have the row unknown, "
    "0 unless given",
    "gaps": "1 + floor(log2(1 + seconds)), at most buckets, of the seconds between the time of a sequence's item and "
    "that of its row, or that of the newest item in a log without a timestamp; 0 if a time is unknown",
    "log1p": "log(1 + x - minimum) / log(1 + maximum - minimum), clipped to 0 to 1",
    "log1p-min-max": "(log(1 + x) - low) / (high - low) in float32, x at least 0, log(1 + x) clipped to low to high; a "
    "missing value becomes fill",
    "standard": "(x - mean) / standard deviation, clipped to -8 to 8",
    "min-max": "(x - minimum) / (maximum - minimum), clipped to 0 to 1",
    "quantile": "the share of training values below x",
    "value": "x itself; a missing value becomes fill, 0 unless given",
    "per-element": "of a vector: every number x as (x - its mean) / its standard deviation, clipped to -8 to 8; a "
    "missing vector becomes zeros",
    "steps": "in float32: each of the steps in turn, then (x - minimum) / (maximum - minimum); a missing value "
    "counts as x = fill",
}
OF_CATEGORIES = ("hash", "hash-bucket", "vocabulary", "id")
OF_LISTS = ("hash", "vocabulary", "id")
OF_NUMBERS = ("log1p", "log1p-min-max", "standard", "min-max", "quantile", "value", "steps")
POOLINGS = ("mean", "sum", "max", "none")  # none: the items are kept apart, as a sequence
TOWERS = ("user", "item")
MOST_BUCKETS = 2**31 - 1
REGRESSION = (
    "regression targets are not supported; say which values are 1, such as --label 'rating>=4' or --label 'event=buy'"
)
OF_VECTORS = ("per-element",)
OF_KINDS = {"number": OF_NUMBERS, "category": OF_CATEGORIES, "categories": OF_LISTS, "vector": OF_VECTORS}
OF_A_LIST = ("separator", "pooling", "length")  # fields of the kind categories
UNITS = ("s", "ms", "us", "ns", "text", "yyyymmdd", "yymmddhh", "yyyymmddhh", "yyyymmddhhmm", "yyyymmddhhmmss")
OF_ROWS = ("category", "categories")  # the kinds whose values have rows of tables
FEATURES = ("number", "category", "categories", "vector")  # the kinds that a model predicts from
AS_THEY_STAND = ("timestamp", "vector")  # the kinds whose texts have no canonical form
POSITIONAL = ("label", "number", "category", "ignored")  # the kinds of a log without a header

_number = {"type": "number"}
_encoding = {
    "type": "object",
    "properties": {
        "type": {"enum": list(ENCODINGS)},
        "buckets": {"type": "integer", "minimum": 1, "maximum": MOST_BUCKETS},
        "rows": {"type": "integer", "minimum": 1, "maximum": MOST_BUCKETS},
        "values": {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
        "unknown": {"type": "integer", "minimum": 0, "description": "of an imported ranker: its row of unknown values"},
        "missing_row": {"type": "boolean", "description": "of hash-bucket: missing values have a row of their own"},
        "low": _number,
        "high": _number,
        "fill": _number,
        "steps": {
            "type": "array",
            "description": "names of STEPS, each with its constant, if it has one",
            "items": {"type": "array", "prefixItems": [{"enum": list(STEPS)}, _number], "minItems": 1, "maxItems": 2},
        },
        "skip_unknown": {"type": "boolean", "description": "of a list's vocabulary: other values are no items of it"},
        "minimum": _number,
        "maximum": _number,
        "mean": _number,
        "deviation": {"type": "number", "exclusiveMinimum": 0},
        "quantiles": {"type": "array", "items": _number, "minItems": 2},
        "means": {"type": "array", "items": _number, "minItems": 1},
        "deviations": {"type": "array", "items": {**_number, "exclusiveMinimum": 0}, "minItems": 1},
    },
    "required": ["type"],
    "additionalProperties": False,
}
JSON_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Schema of a click log",
    "type": "object",
    "properties": {
        "rows": {"type": "integer", "minimum": 0, "description": "number of rows that the schema was inferred from"},
        "header": {
            "type": "boolean",
            "description": "false: rows are tab separated lines without a header and without quotes, whose columns are "
            "in the order of the schema; the label, the first one, may be absent; only an empty field is missing",
        },
        "canonical": {
            "type": "boolean",
            "description": "one text for one value, whatever it was read from: 51.0 is 51, True is 1, a list in the "
            "notation of Python is its items; models of version 0.2.0 read texts as they stand",
        },
        "columns": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "kind": {"enum": list(KINDS), "description": "; ".join(f"{k}: {v}" for k, v in KINDS.items())},
                    "distinct": {"type": "integer", "minimum": 0, "description": "different values; items of lists"},
                    "missing": {"type": "integer", "minimum": 0},
                    "encoding": _encoding,
                    "separator": {"type": "string", "minLength": 1, "maxLength": 1, "description": "between items"},
                    "pooling": {
                        "enum": list(POOLINGS),
                        "description": "pooling of a list's embeddings; none: a sequence of "
                        "embeddings, the newest first, for models of sequences",
                    },
                    "length": {"type": "integer", "minimum": 1, "description": "items read of a list, the last ones"},
                    "shares": {
                        "type": "string",
                        "minLength": 1,
                        "description": "of a list: the category whose encoding and table it uses",
                    },
                    "gaps_of": {
                        "type": "string",
                        "minLength": 1,
                        "description": "of a list of times: the sequence whose items have these times, one per item; "
                        "the length and the pooling are those of the sequence",
                    },
                    "min_count": {
                        "type": "integer",
                        "minimum": 1,
                        "description": "of categories: occurrences in all trainings from which a value has a row",
                    },
                    "table": {
                        "type": "string",
                        "minLength": 1,
                        "description": "of a category: file of vectors (.npy, .npz) that its rows start from in "
                        "training; relative to the schema",
                    },
                    "tower": {
                        "enum": list(TOWERS),
                        "description": "side of the column in two-tower models and in ranking",
                    },
                    "source": {
                        "type": "string",
                        "minLength": 1,
                        "description": "of a number without a header: the column that it is computed from, if not its "
                        "own; listed beside the other numbers of that column",
                    },
                    "unit": {
                        "enum": list(UNITS),
                        "description": "of a timestamp and of times with gaps_of: seconds to nanoseconds since 1970, "
                        "ISO 8601, or a whole number whose digits are year to second",
                    },
                    "where": {
                        "type": "string",
                        "minLength": 1,
                        "description": "of a label: another label; this label is defined only in rows where the "
                        "other one is 1, such as a purchase after a click",
                    },
                    "positive": {
                        "type": "object",
                        "description": "of a label: the values that are 1, numbers of at least so much or one of these "
                        "texts; all others are 0",
                        "properties": {
                            "at_least": _number,
                            "values": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                        },
                        "minProperties": 1,
                        "maxProperties": 1,
                        "additionalProperties": False,
                    },
                    "why": {"type": "string", "description": "reason for the choice"},
                },
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["columns"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Column:
    """One column, as `JSON_SCHEMA` describes it.

    Attributes:
        encoding: Encoding of the values; {} for kinds without one.
        positive: Values of a label that are 1; {} if they are 0 and 1 in the log.
    """

    name: str
    kind: str
    distinct: int = 0
    missing: int = 0
    encoding: Mapping[str, Any] = field(default_factory=dict)
    separator: str = ""
    pooling: str = ""
    length: int = 0
    shares: str = ""
    gaps_of: str = ""
    min_count: int = 0
    table: str = ""
    tower: str = ""
    source: str = ""
    unit: str = ""
    where: str = ""
    positive: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def log_name(self) -> str:
        """Name of the column in the log."""
        return self.source or self.name

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without empty fields."""
        derived = ("encoding",) * bool(self.shares) + ("pooling", "length") * bool(self.gaps_of)
        own = {key: value for key, value in asdict(self).items() if key not in derived}
        return {key: value for key, value in own.items() if value or key in ("name", "kind", "distinct", "missing")}


@dataclass(frozen=True)
class Schema:
    """The columns of a log in order.

    Attributes:
        columns: Columns with their kinds and encodings.
        rows: Number of rows that the schema was inferred from.
        header: Whether the log has a header with the column names.
        canonical: Whether texts are read in their canonical form, see `cell_values.canonical`; False without a header.
    """

    columns: tuple[Column, ...]
    rows: int = 0
    header: bool = True
    canonical: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "canonical", self.header and self.canonical)

    def of(self, *kinds: str) -> tuple[Column, ...]:
        """Returns the columns of given kinds.

        Args:
            *kinds: Names of `KINDS`.

        Returns:
            Columns in order.
        """
        return tuple(column for column in self.columns if column.kind in kinds)

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns to predict from, in order; with the timestamp where time gaps are from it."""
        timed = ("timestamp",) * any(column.gaps_of for column in self.columns)
        return tuple(column.name for column in self.of(*FEATURES, *timed))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(column.name for column in self.of("label"))

    @cached_property
    def forms(self) -> dict[str, CellForm]:
        """Form of the texts of every column; texts that TensorFlow hashes, times and vectors are read as they stand."""
        raw = {column.name for column in self.columns if column.encoding.get("type") == "hash-bucket"}
        raw |= {column.name for column in self.columns if column.kind in AS_THEY_STAND or column.gaps_of}
        return {
            column.name: CellForm(column.separator or LIST, self.canonical and column.name not in raw)
            for column in self.columns
        }

    def typical_row(self) -> dict[str, str]:
        """Returns a row with common values, {column: text}.

        Numbers and vectors have their mean, median or minimum, categories the first value of their vocabulary.
        """
        row = {}
        for column in self.of(*FEATURES):
            encoding = column.encoding
            middle = (encoding.get("quantiles") or [None])[len(encoding.get("quantiles", ())) // 2]
            value = next((x for x in (encoding.get("mean"), middle, encoding.get("minimum")) if x is not None), "")
            row[column.name] = f"{value:.6g}" if value != "" else str((encoding.get("values") or [""])[0])
            if column.kind == "vector":
                row[column.name] = LIST.join(f"{mean:.6g}" for mean in encoding["means"])
        return row

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values in the form of `JSON_SCHEMA`."""
        header = {"header": False} if not self.header else {"canonical": True} if self.canonical else {}
        return {"rows": self.rows, **header, "columns": [column.to_json() for column in self.columns]}

    @classmethod
    def from_json(cls, value: Any, source: str = "the schema") -> Schema:
        """Creates a schema from JSON values.

        Args:
            value: Parsed JSON in the form of `JSON_SCHEMA`.
            source: Name of the source in error messages.

        Returns:
            The schema.

        Raises:
            RequestError: The value is not a valid schema; the message lists all faults.
        """
        if faults := _faults(value):
            raise RequestError(f"{source} has {len(faults)} fault{'s' * (len(faults) > 1)}: {'; '.join(faults)}")
        rows, header, canonical = value.get("rows", 0), value.get("header", True), value.get("canonical", True)
        columns = with_shared_encodings(value["columns"])
        return cls(tuple(Column(**column) for column in columns), rows, header, canonical)

    def table(self) -> list[list[str]]:
        """Table for display: one row of text per column, with the header `COLUMNS`."""
        return [
            [
                column.name,
                column.kind,
                "" if column.kind == "vector" else f"{column.distinct:,}",
                f"{column.missing:,}",
                _encoding_text(column),
                column.why,
            ]
            for column in self.columns
        ]

    def save(self, path: str | Path) -> Path:
        """Writes the schema as JSON, one column per line.

        Args:
            path: File to write.

        Returns:
            The file.
        """
        columns = ",\n  ".join(json.dumps(column.to_json(), ensure_ascii=False) for column in self.columns)
        header = ' "header": false,' if not self.header else ' "canonical": true,' if self.canonical else ""
        return files.write_text(path, f'{{"rows": {self.rows},{header} "columns": [\n  {columns}\n]}}\n')

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Reads a schema file.

        Args:
            path: JSON file.

        Returns:
            The schema.

        Raises:
            RequestError: The file is missing or is not a valid schema; the message lists all faults.
        """
        return cls.from_json(files.read_json(Path(path)), str(path))


def positive_text(positive: Mapping[str, Any]) -> str:
    """Describes the values of a label that are 1, such as ">= 4" or "buy or cart".

    Args:
        positive: See `Column.positive`.

    Returns:
        The description.
    """
    return f">= {positive['at_least']:g}" if "at_least" in positive else " or ".join(positive["values"])


COLUMNS = ("column", "kind", "values", "missing", "encoding", "why")


def _encoding_text(column: Column) -> str:
    """Describes the encoding of a column in a few words."""
    if column.positive:
        return f"1 where {positive_text(column.positive)}"
    encoding = column.encoding
    size = {"hash": "buckets", "hash-bucket": "buckets", "vocabulary": "values", "id": "rows", "gaps": "buckets"}.get(
        encoding.get("type", ""), ""
    )
    count = encoding.get(size, 0)
    parts = [encoding["type"], f"{count if isinstance(count, int) else len(count):,} {size}"] if size else []
    parts = parts or [encoding.get("type", column.unit)]
    if column.kind == "vector":
        parts.append(f"{len(encoding['means'])} numbers")
    if column.kind == "categories":
        pooled = "sequence" if column.pooling == "none" else column.pooling
        parts.append(f"{pooled} of the last {column.length} by {column.separator!r}")
    if column.gaps_of:
        return f"{', '.join(parts[:2])} of the times of {column.gaps_of}, {column.unit}"
    if column.shares:
        parts[:-1] = [f"that of {column.shares}"]
    return ", ".join(parts)


def _faults(value: Any) -> list[str]:
    """Lists the faults of a schema: first where it is not of the form `JSON_SCHEMA`.

    Columns of that form are then checked for repeated names, several weights or timestamps, and wrong encodings.
    """
    from jsonschema import Draft202012Validator

    errors = sorted(
        Draft202012Validator(JSON_SCHEMA).iter_errors(value), key=lambda error: [str(step) for step in error.path]
    )
    faults = [f"{_place(value, list(error.path))}: {error.message}" for error in errors]
    columns = value.get("columns") if isinstance(value, dict) else None
    columns = [column for column in columns if isinstance(column, dict)] if isinstance(columns, list) else []
    names = Counter(str(column["name"]) for column in columns if "name" in column)
    faults += [f"column {name}: stands {count} times" for name, count in names.items() if count > 1]
    broken = [value["columns"][error.path[1]] for error in errors if columns and len(error.path) > 1]
    sound = [column for column in columns if not any(column is other for other in broken)]
    for kind in ("timestamp", "weight"):
        same = [column["name"] for column in sound if column["kind"] == kind]
        if len(same) > 1:
            faults.append(f"{', '.join(same)}: found {len(same)} columns of kind {kind}, expected one")
    labels = [column["name"] for column in sound if column["kind"] == "label"]
    faults += [
        f"column {column['name']}: found where {column['where']}, expected another label"
        for column in sound
        if column["kind"] == "label" and column.get("where", "") not in {"", *labels} - {column["name"]}
    ]
    if not errors and not any(column["kind"] in FEATURES for column in sound):
        faults.append("found no number, category, categories or vector; expected a column to predict from")
    if columns and value.get("header") is False:
        faults += faults_without_header(sound, POSITIONAL)
    elif any("source" in column for column in sound):
        faults.append("found a column with a source, expected that of rows without a header alone")
    faults += sharing_faults(sound, OF_LISTS) + gap_faults(sound)
    for column in sound:
        faults += [f"column {column['name']}: {fault}" for fault in column_faults(column, OF_KINDS, OF_A_LIST, OF_ROWS)]
    return faults


def _place(value: Any, path: list[Any]) -> str:
    """Describes a place in the file, with a column by its name."""
    if path[:1] == ["columns"] and len(path) > 1:
        column = value["columns"][path[1]]
        name = column.get("name", f"number {path[1] + 1}") if isinstance(column, dict) else f"number {path[1] + 1}"
        return " ".join([f"column {name}", *(str(step) for step in path[2:])])
    return " ".join(map(str, path)) or "the file"
