"""Maps the columns of a log to the features of a TensorFlow graph, as a schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo import mapped_schema
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Column
from zoo.recommenders.data.transforms import stepped

if TYPE_CHECKING:
    from zoo.recommenders.importers.tensorflow.columns import Network


def map_features(network: Network, columns: Sequence[str] | None = None) -> Features:
    """Creates the preprocessing of a network; numbers are not scaled yet, see `fitted`.

    Args:
        network: Network from `zoo.recommenders.importers.tensorflow.columns`.
        columns: Names of the columns of a row, see `ordered`. Entries of a wide numeric feature x are x_1, x_2, ...

    Returns:
        The features.

    Raises:
        RequestError: `columns` does not fit the network.
    """
    names = {
        (feature, i): feature if len(number.fill) == 1 else f"{feature}_{i + 1}"
        for feature, number in network.numbers.items()
        for i in range(len(number.fill))
    }
    fills = {name: network.numbers[feature].fill[i] for (feature, i), name in names.items()}
    numeric, categorical = ordered(list(names.values()), list(network.fields), columns)
    places = {key: numeric.index(name) for key, name in names.items()}
    placed = sorted((places[column.feature, column.position], column.steps) for column in network.columns)
    numbers = [(place, steps, 0.0, 1.0) for place, steps in placed]
    buckets = [network.fields[name] for name in categorical]
    return Features(mapped_schema(numeric, [fills[name] for name in numeric], numbers, categorical, buckets))


def fitted(features: Features, rows: Rows) -> Features:
    """Sets the ranges of the numbers to those in given rows, without infinities.

    Args:
        features: Features from `map_features`.
        rows: Rows that were read with `features.raw`.

    Returns:
        Features with ranges.
    """
    sources = dict(zip((number.name for number in features.numbers), features.sources, strict=True))

    def ranged(column: Column) -> Column:
        if column.kind != "number":
            return column
        values = stepped(column.encoding, rows.numbers[:, sources[column.name]])
        values = values[np.isfinite(values)]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        return replace(column, encoding={**column.encoding, "minimum": low, "maximum": high})

    return Features(replace(features.schema, columns=tuple(map(ranged, features.schema.columns))))


def ordered(
    numeric: Sequence[str], categorical: Sequence[str], columns: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Orders the names of numbers and categories as in a row.

    Args:
        numeric: Names of the numbers.
        categorical: Names of the categories.
        columns: Columns of a whole row in order; None: natural order (I2 before I10).

    Returns:
        (numbers, categories) in order.

    Raises:
        RequestError: Columns are missing, unknown, duplicate or out of order; the message lists all of them.
    """
    if columns is None:
        return sorted(numeric, key=natural), sorted(categorical, key=natural)
    names = [
        name
        for i, name in enumerate(columns)
        if not (i == 0 and name == "label" and name not in (*numeric, *categorical))
    ]
    kinds = {**dict.fromkeys(numeric, "number"), **dict.fromkeys(categorical, "category")}
    faults = [f"{name} is no column of the graph" for name in dict.fromkeys(names) if name not in kinds]
    faults += [f"{name} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    faults += [f"the graph's {kind} {name} is missing" for name, kind in kinds.items() if name not in names]
    last = max((i for i, name in enumerate(names) if kinds.get(name) == "number"), default=-1)
    faults += [
        f"the category {name} stands in front of a number"
        for name in names[: max(last, 0)]
        if kinds.get(name) == "category"
    ]
    if faults:
        raise RequestError(
            f"--columns does not fit the graph: {'; '.join(faults)}; "
            f"a row is a label (optional), then the numbers {_some(numeric)}, then the categories "
            f"{_some(categorical)}, each in any order"
        )
    return [name for name in names if name in numeric], [name for name in names if name in categorical]


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key for names that compares numbers in them by value.

    Args:
        name: Name such as C10.

    Returns:
        Key.
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _some(names: Sequence[str]) -> str:
    names = sorted(names, key=natural)
    return ", ".join(names) if len(names) < 30 else f"{', '.join(names[:28])}, ... {names[-1]}"
