"""Scales of a lowered model, which a newer model keeps, so that the rows that did not change keep their bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.recommenders.lowering.integer_layers import largest, largest_columns

Array = NDArray[Any]

ROOM = 1.25  # factor by which a range that is too small is widened beyond the new values


class TableScales:
    """Ranges of tables and orders of units; an earlier model's are kept while the values of this model fit them.

    Args:
        earlier: `used` of the earlier model.

    Attributes:
        used: Ranges and orders of this model by name.
    """

    def __init__(self, earlier: Mapping[str, Array] = MappingProxyType({})) -> None:
        self._earlier = earlier
        self.used: dict[str, Array] = {}
        self._magnitudes: dict[int, tuple[Array, float]] = {}  # of tables by their address
        self._columns: dict[int, tuple[Array, Array]] = {}

    def magnitude(self, table: Array) -> float:
        """Returns the largest magnitude in a table, which is read once.

        Args:
            table: Table of any shape.
        """
        if id(table) not in self._magnitudes:
            self._magnitudes[id(table)] = table, largest(table)
        return self._magnitudes[id(table)][1]

    def magnitudes(self, table: Array) -> Array:
        """Returns the largest magnitude in each column of a table, which is read once.

        Args:
            table: Table, float32 [rows, width].
        """
        if id(table) not in self._columns:
            self._columns[id(table)] = table, largest_columns(table)
        return self._columns[id(table)][1]

    def columns(self, value: str, statistics: Array) -> Array:
        """Returns the column statistics for a value in bytes; the earlier model's while they cover this model's.

        Args:
            value: Unique name of the value.
            statistics: Statistics of this model, float64 [n, width], of which the first are the largest magnitudes.
        """
        name = f"columns {value}"
        kept = self._earlier.get(name)
        if kept is not None and kept.shape == statistics.shape and (statistics[0] <= kept[0]).all():
            statistics = kept
        self.used[name] = statistics
        return statistics

    def largest(self, field: str, magnitude: float) -> float:
        """Returns the largest magnitude that codes of a table represent.

        Args:
            field: Name of the field, other than those of other fields.
            magnitude: Largest magnitude of the table.
        """
        name = f"largest {field}"
        kept = self._earlier.get(name)
        if kept is not None and np.isfinite(magnitude):
            magnitude = float(kept) if magnitude <= float(kept) else magnitude * ROOM
        self.used[name] = np.array(magnitude)
        return magnitude

    def ranges_of(self, value: str) -> Callable[[Array, Array], tuple[Array, Array]]:
        """Returns `ranges` of a layer.

        Args:
            value: Name of the layer's result.
        """
        return functools.partial(self.ranges, value)

    def ranges(self, value: str, low: Array, high: Array) -> tuple[Array, Array]:
        """Returns the ranges of folded rows.

        Args:
            value: Name of the layer's result.
            low: Least values, float64 [fields, units].
            high: Greatest values, of the same shape.
        """
        name = f"ranges {value}"
        kept = self._earlier.get(name)
        if kept is not None and kept.shape == (2, *low.shape):
            if (low >= kept[0]).all() and (high <= kept[1]).all():
                low, high = kept
            else:
                low, high = np.minimum(low, kept[0]), np.maximum(high, kept[1])
                more = (high - low) * (ROOM - 1) / 2
                low, high = low - more, high + more
        self.used[name] = np.stack([low, high])
        return low, high

    def order(self, value: str, activity_order: Array) -> Array:
        """Returns the order of the units of a layer.

        Args:
            value: Name of the layer's result.
            activity_order: Order by the activity of this model, int64 [units].
        """
        name = f"order {value}"
        kept = self._earlier.get(name)
        self.used[name] = activity_order if kept is None or kept.shape != activity_order.shape else kept
        return self.used[name]
