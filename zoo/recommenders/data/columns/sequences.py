"""Lists that are sequences of the values of another column, as the items clicked before are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from zoo.recommenders.data.columns.statistics import ColumnStatistics, Distinct
from zoo.recommenders.data.schema import OF_LISTS, Column

SHARED = 0.5  # of a list's distinct items that are values of the category whose table it shares


def with_sequences(
    columns: Sequence[Column], seen: Mapping[str, ColumnStatistics], pooled: bool = False
) -> list[Column]:
    """Makes sequences of the lists whose items are values of a category.

    Args:
        columns: Columns of a schema.
        seen: Statistics of their values.
        pooled: Whether the sequences keep their pooling, and only share a table.

    Returns:
        The columns; a list with more than `SHARED` of its distinct items in a category has the pooling none and shares
        the table of that category.
    """
    categories = [column for column in columns if column.kind == "category" and column.encoding.get("type") in OF_LISTS]

    def sequence(column: Column) -> Column:
        if column.kind != "categories" or not categories:
            return column
        items = seen[column.name].items[column.separator]
        shares = {other.name: containment(items, seen[other.name].distinct) for other in categories}
        best = max(categories, key=lambda other: shares[other.name])
        if shares[best.name] < SHARED:
            return column
        why = f"{column.why}; {shares[best.name]:.0%} of its items are values of {best.name}: a sequence of them"
        pooling = column.pooling if pooled else "none"
        return replace(column, pooling=pooling, shares=best.name, encoding=best.encoding, why=why)

    return [sequence(column) for column in columns]


def containment(items: Distinct, values: Distinct) -> float:
    """Estimates the share of one set's values that another set has (Broder 1997, from the smallest hashes).

    Args:
        items: Values to look for.
        values: Values to look among.

    Returns:
        0 to 1.
    """
    if not len(items.least) or not len(values.least):
        return 0.0
    end = min(items.least[-1], values.least[-1]) if items.values is None or values.values is None else np.inf
    common = items.least[items.least <= end]
    return float(np.isin(common, values.least).mean()) if len(common) else 0.0
