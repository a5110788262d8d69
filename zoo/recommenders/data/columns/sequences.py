"""Lists of the values of another column, as the items clicked before are: they share its table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from zoo.recommenders.data.columns.statistics import ColumnStatistics, Distinct
from zoo.recommenders.data.schema import OF_LISTS, Column

LEAST_APART, LEAST_POOLED = 0.5, 0.9  # of a list's distinct items that are values of the category with its table
LEAST_VALUES = 0.1  # of the category's distinct values that are items of the list: small codes are values of any ids


def with_shared_tables(
    columns: Sequence[Column], statistics: Mapping[str, ColumnStatistics], as_sequences: bool
) -> list[Column]:
    """Sets `shares` of lists whose items are values of a category: they read the table of that category.

    Args:
        columns: Columns of a schema.
        statistics: Statistics of their values.
        as_sequences: Whether such lists become sequences, whose items are kept apart; else they keep their pooling.

    Returns:
        The columns.
    """
    categories = [column for column in columns if column.kind == "category" and column.encoding.get("type") in OF_LISTS]

    def shared(column: Column) -> Column:
        if column.kind != "categories" or not categories:
            return column
        items = statistics[column.name].items[column.separator]
        shares = {
            other.name: (containment(items, values), containment(values, items))
            for other in categories
            for values in [statistics[other.name].distinct]
        }
        best = max(categories, key=lambda other: math.prod(shares[other.name]))
        of_items, of_values = shares[best.name]
        if of_items < (LEAST_APART if as_sequences else LEAST_POOLED) or of_values < LEAST_VALUES:
            return column
        why = f"{column.why}; {of_items:.0%} of its items are values of {best.name}: {{}} its table"
        if as_sequences:
            why = why.format("a sequence with")
            return replace(column, pooling="none", shares=best.name, encoding=best.encoding, why=why)
        return replace(column, shares=best.name, encoding=best.encoding, why=why.format("it has"))

    return [shared(column) for column in columns]


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
