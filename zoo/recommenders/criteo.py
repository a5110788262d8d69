"""Schema of Criteo's rows (Kaggle 2014): the built-in schema, and the preprocessing of models of version 0.2.0.

A row is a label, 13 numbers and 26 categories, separated by tabs. Empty fields are missing values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.core.progress import progress
from zoo.recommenders.data.encoding import Encoding
from zoo.recommenders.data.line_reader import read_lines
from zoo.recommenders.data.logs import is_criteo
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.data.transforms import STEPS, WITH_CONSTANT, log1p

NUMERIC, CATEGORICAL, BUCKETS = 13, 26, 1000
NAME = "criteo"  # of the built-in schema
SCALED = ("log1p-min-max", "steps")  # encodings of numbers as values from 0 to 1
LABEL = Column("label", "label")
PLAIN = {"hash": "farmhash fingerprint64 mod buckets", "transform": "log1p, minmax"}  # of a model trained by 0.2.0
MAPPED = "farmhash fingerprint64 mod buckets, missing = buckets"  # of one that came as a TensorFlow graph


def category(name: str, buckets: int, missing_row: bool = False) -> Column:
    """Creates a category that is hashed as in TensorFlow.

    Args:
        name: Name of the column.
        buckets: Number of hash buckets.
        missing_row: Whether missing values have a separate table row.

    Returns:
        Column of the schema.
    """
    own = {"missing_row": True} if missing_row else {}
    return Column(name, "category", encoding={"type": "hash-bucket", "buckets": buckets, **own})


def logarithm(name: str, low: float, high: float, fill: float = 0.0) -> Column:
    """Creates a number x that is encoded as (log1p(max(x, 0)) - low) / (high - low), clipped to 0 to 1.

    Args:
        name: Name of the column.
        low: Lower bound of the logarithm.
        high: Upper bound of the logarithm.
        fill: Encoding of a missing value.

    Returns:
        Column of the schema.
    """
    return Column(name, "number", encoding={"type": "log1p-min-max", "low": low, "high": high, "fill": fill})


def schema(
    data: Any,
    *,
    numeric: int = NUMERIC,
    categorical: int = CATEGORICAL,
    buckets: int = BUCKETS,
    on_error: str = "raise",
) -> Schema:
    """Returns the built-in schema of the Criteo format, with the ranges of the numbers in given rows.

    Args:
        data: Rows, see `zoo.recommenders.data.line_reader.read_lines`.
        numeric: Number of numbers of a row.
        categorical: Number of categories of a row.
        buckets: Hash buckets of every category.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        Schema with the columns label, I1, I2, ... and C1, C2, ...

    Raises:
        RequestError: As `read_lines`.
    """
    names = [f"I{i + 1}" for i in range(numeric)]
    categories = [category(f"C{field + 1}", buckets) for field in range(categorical)]
    raw = Encoding(Schema((LABEL, *(logarithm(name, 0.0, 1.0) for name in names), *categories), header=False)).raw
    errors = ErrorLog() if on_error == "skip" else None
    low, high, rows = np.full(numeric, np.inf), np.full(numeric, -np.inf), 0
    with progress("reading") as advance:
        for batch in read_lines(raw, data, errors=errors):
            values = log1p(batch.numbers)
            low = np.fmin(low, np.fmin.reduce(values, axis=0, initial=np.inf))  # fmin and fmax pass over NaN
            high = np.fmax(high, np.fmax.reduce(values, axis=0, initial=-np.inf))
            rows += len(batch)
            advance(len(batch))
    low, high = (np.where(np.isfinite(low), bound, 0.0) for bound in (low, high))  # of a column without a value
    numbers = [
        logarithm(f"I{i + 1}", *bounds) for i, bounds in enumerate(zip(low.tolist(), high.tolist(), strict=True))
    ]
    return Schema((LABEL, *numbers, *categories), rows, header=False)


def is_built_in(schema: Any) -> bool:
    """Returns whether a schema is given as the name of the built-in one.

    Args:
        schema: Name or file of a schema, a `Schema`, or None.
    """
    return str(schema) == NAME and not Path(NAME).exists()


def of_log(data: Any, schema: Any = None, label: str | Sequence[str] | None = None) -> bool:
    """Returns whether a training log has rows without a header.

    Args:
        data: Log, see `zoo.recommenders.data.logs.open_log`; read if there is no schema.
        schema: Schema, its file, or the name of the built-in one.
        label: Columns to predict, which only logs with a header have.

    Raises:
        RequestError: The file of the schema cannot be read.
    """
    if schema is None:
        return not label and is_criteo(data)
    if isinstance(schema, Schema):
        return not schema.header
    return is_built_in(schema) or _is_headerless(read_json(Path(schema)))


def of_card(preprocessing: Mapping[str, Any]) -> bool:
    """Returns whether a model scores rows without a header.

    Args:
        preprocessing: Preprocessing of its card; cards of version 0.2.0 have no schema.
    """
    return _is_headerless(preprocessing["schema"]) if "schema" in preprocessing else "hash" in preprocessing


def _is_headerless(schema: Any) -> bool:
    """Whether the JSON of a schema says that its rows have no header."""
    return isinstance(schema, Mapping) and schema.get("header") is False


def schema_of(preprocessing: Any) -> Schema:
    """Converts preprocessing from a card of version 0.2.0 to a schema.

    Args:
        preprocessing: Preprocessing of a model trained on rows in the Criteo format, or of an imported TensorFlow
            graph.

    Returns:
        Schema without a header that encodes every row to the same bits.

    Raises:
        RequestError: The preprocessing is neither, or holds impossible values.
    """
    if not isinstance(preprocessing, Mapping) or "hash" not in preprocessing:
        raise RequestError("the card's preprocessing holds no schema; train or download the model again")
    try:
        mapped = "numeric_columns" in preprocessing
        return _mapped(preprocessing) if mapped else _plain(preprocessing)
    except RequestError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"broken features: {type(error).__name__} {error}; train, download or freeze the model again"
        ) from error


def _plain(value: Mapping[str, Any]) -> Schema:
    for key, expected in PLAIN.items():
        _require(value[key] == expected, f"found {key} {value[key]!r}, expected {expected!r}")
    counts = [value[key] for key in ("numeric", "categorical", "buckets")]
    _require(all(type(count) is int and 1 <= count < 2**31 for count in counts), f"found sizes {counts}")
    numeric, categorical, buckets = counts
    bounds = [[float(x) for x in value[key]] for key in ("lo", "hi", "fill")]
    _require(all(len(bound) == numeric for bound in bounds), f"expected lo, hi and fill of {numeric} numbers")
    columns = []
    for i, (low, high, fill) in enumerate(zip(*bounds, strict=True)):
        sound = 0 <= low <= high < math.inf and 0 <= fill <= 1
        _require(
            sound,
            f"found {low} to {high}, filled by {fill}, in number {i + 1}; expected 0 <= lo <= hi and a fill to 1",
        )
        columns.append(logarithm(f"I{i + 1}", low, high, fill))
    categories = [category(f"C{field + 1}", buckets) for field in range(categorical)]
    return Schema((LABEL, *columns, *categories), header=False)


def _mapped(value: Mapping[str, Any]) -> Schema:
    _require(value["hash"] == MAPPED, f"found hash {value['hash']!r}, expected {MAPPED!r}")
    names, fills = value["numeric_columns"], [float(fill) for fill in value["fill"]]
    fields, buckets = value["categorical_columns"], value["buckets"]
    _require(
        len(names) == len(fills) and len(fields) == len(buckets) > 0,
        "expected a fill for every number, and buckets for every category",
    )
    _require(all(isinstance(text, str) for text in (*names, *fields)), "expected texts as names of columns")
    _require(all(type(bucket) is int and 1 <= bucket < 2**31 - 1 for bucket in buckets), f"found buckets {buckets}")
    _require(all(map(math.isfinite, fills)), f"found fill {fills}, expected finite numbers")
    return mapped_schema(
        names,
        fills,
        [(number["column"], number["steps"], number["lo"], number["hi"]) for number in value["numbers"]],
        fields,
        buckets,
    )


def mapped_schema(
    names: Sequence[str],
    fills: Sequence[float],
    numbers: Sequence[tuple[int, Sequence[Any], float, float]],
    fields: Sequence[str],
    buckets: Sequence[int],
) -> Schema:
    """Returns the schema of the features of a TensorFlow graph.

    Args:
        names: Names of the numbers of a row.
        fills: Replacement of a missing value of every number.
        numbers: Columns of the graph's input: (index in `names`, steps, minimum, maximum) each.
        fields: Names of the categories of a row.
        buckets: Hash buckets of every category; a missing value has a separate row.

    Returns:
        Schema without a header; a number that the graph reads several times has several columns.

    Raises:
        RequestError: A number has impossible values.
    """
    of: dict[int, list[Column]] = {}
    taken = {*names, *fields}
    for place, steps, low, high in numbers:
        _require(type(place) is int and 0 <= place < len(names), f"found a number of column {place!r}")
        _require(math.isfinite(low) and math.isfinite(high) and low <= high, f"found a number from {low!r} to {high!r}")
        sound = all(step[0] in STEPS and len(step) == 1 + (step[0] in WITH_CONSTANT) for step in steps)
        _require(sound, f"found the steps {steps}, expected names of {', '.join(STEPS)} with their constants")
        copies = of.setdefault(place, [])
        name = names[place] if not copies else _free(f"{names[place]}.{len(copies) + 1}", taken)
        encoding = {
            "type": "steps",
            "steps": [list(step) for step in steps],
            "minimum": float(low),
            "maximum": float(high),
            "fill": fills[place],
        }
        copies.append(Column(name, "number", encoding=encoding, source="" if not copies else names[place]))
    columns = [column for index, name in enumerate(names) for column in of.get(index, [Column(name, "ignored")])]
    return Schema(
        (LABEL, *columns, *(category(*pair, missing_row=True) for pair in zip(fields, buckets, strict=True))),
        header=False,
    )


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(f"broken features: {message}")
