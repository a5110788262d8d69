"""Time gaps of the items of a sequence in the float graph of a recommender."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from zoo.recommenders.lowering.sequences.matcher import Columns, Matcher, NoMatch, sequence_columns

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Gaps:
    """Time gaps of the items of a sequence.

    Attributes:
        start: First column of their ids, as many as places.
        table: Their vectors, which are added to those of the items, float32 [rows, width].
        scores: Their summands of the scores of target attention, float64 [rows].
    """

    start: int
    table: Array
    scores: Array = field(default_factory=lambda: np.zeros(0))

    def spans(self, count: int) -> list[tuple[int, int, int]]:
        """Returns the `spans` of an expression.

        Args:
            count: Places of the sequence.
        """
        return [(self.start, count, len(self.table))]


def without_gaps(matched: Matcher, value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """The vectors of items, and the rows of a table that an Add adds to them.

    Args:
        matched: Matcher.
        value: The vectors, or the sum.

    Returns:
        The vectors of the items, and those of the time gaps; None without such an Add.
    """
    with contextlib.suppress(NoMatch):
        items, gaps = matched.up(value, "Add", 2)
        matched.lookup(gaps)
        return items, gaps
    return value, None


def gaps_of(
    matched: Matcher, columns: Columns, value: ir.Value | None, width: int, count: int, weight: Array | None = None
) -> Gaps | None:
    """Returns the time gaps of vectors of `without_gaps`.

    Args:
        matched: Matcher.
        columns: Reads integers as (column of the ids, offset).
        value: The vectors of the time gaps, or None.
        width: Width of the items.
        count: Places of the sequence.
        weight: Weight of the summands of the scores, [width, 1].

    Raises:
        NoMatch: The vectors do not fit the items.
    """
    if value is None:
        return None
    table, ids = matched.lookup(value)
    start, places = sequence_columns(columns, ids)
    if table.shape[1] != width or places != count or (weight is not None and weight.shape != (width, 1)):
        raise NoMatch
    scores = np.zeros(0) if weight is None else table.astype(np.float64) @ weight[:, 0].astype(np.float64)
    return Gaps(start, table, scores)
