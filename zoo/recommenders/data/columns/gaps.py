"""Time gaps: the age of every item of a sequence at the time of its row, in logarithmic buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.columns import names, times
from zoo.recommenders.data.columns.statistics import NUMBER, ColumnStatistics
from zoo.recommenders.data.schema import Column

ENCODING = {"type": "gaps", "buckets": 32}  # from seconds to decades


class PlacedItems(NamedTuple):
    """The items of n lists that are kept, m in all.

    Attributes:
        ids: Ids, int32 [m].
        positions: Positions among the items of all lists, int64 [m].
        rows: Rows, int64 [m].
        places: Places in the ids of their rows, int64 [m].
        lengths: Items of every list as it is written, int [n].
        counts: Items of every list that are kept, int64 [n].
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    lengths: NDArray[Any]
    counts: NDArray[np.int64]


def buckets_of(seconds: NDArray[np.float64], buckets: int) -> NDArray[np.int32]:
    """Returns the id of every gap: 1 + floor(log2(1 + seconds)), at most `buckets`; negative gaps count as 0.

    Args:
        seconds: Gaps, float64 [n]; not finite where unknown.
        buckets: Number of buckets.

    Returns:
        int32 [n]; 0 where the gap is unknown.
    """
    finite = np.isfinite(seconds)
    exponents = np.frexp(1 + np.maximum(np.where(finite, seconds, 0), 0))[1]  # of 2^(e - 1) <= x < 2^e
    return np.where(finite, np.minimum(exponents, buckets), 0).astype(np.int32)


def gap_ids(
    placed: PlacedItems,
    seconds: NDArray[np.float64],
    lengths: NDArray[Any],
    row_times: NDArray[np.float64] | None,
    buckets: int,
) -> NDArray[np.int32]:
    """Returns the ids of the time gaps of a sequence's items.

    The gap of an item is the time between it and its row; without times of the rows, between it and the newest item.
    Gaps are unknown in rows that have another number of times than of items.

    Args:
        placed: The m items.
        seconds: Times of all lists, float64 [times], not finite where unknown.
        lengths: Number of times of every row, int [n].
        row_times: Times of the rows in seconds, float64 [n], not finite where unknown; None for a log without them.
        buckets: Number of buckets.

    Returns:
        int32 [m].
    """
    rows = placed.rows
    same = lengths[rows] == placed.lengths[rows]
    first, own = (np.cumsum(counts) - counts for counts in (lengths, placed.lengths))
    happened = np.full(len(rows), -np.inf)
    happened[same] = seconds[(first[rows] + placed.positions - own[rows])[same]]
    if row_times is None:
        row_times = np.full(len(lengths), -np.inf)
        row_times[rows[placed.places == 0]] = happened[placed.places == 0]
    with np.errstate(invalid="ignore"):  # of two unknown times
        return buckets_of(row_times[rows] - happened, buckets)


def column_of(statistics: ColumnStatistics, sequence: str, separator: str, unit: str = "", length: int = 0) -> Column:
    """Returns the column of the times of a sequence.

    Args:
        statistics: Statistics of the values.
        sequence: Name of the sequence.
        separator: Separator of the times.
        unit: Their unit; "": inferred.
        length: Places of the sequence; 0 for a column of JSON, whose length is derived.

    Returns:
        The column.

    Raises:
        RequestError: The items are no times.
    """
    unit = unit or unit_of(statistics.name, statistics.examples[separator])
    if not unit:
        raise RequestError(
            f"column {statistics.name}: found no times separated by {separator!r} in it, expected "
            f"{', '.join(times.NAMES.values())}"
        )
    counts = {"distinct": int(statistics.items[separator]), "missing": statistics.missing}
    form = {
        "separator": separator,
        "gaps_of": sequence,
        "unit": unit,
        "pooling": "none" * bool(length),
        "length": length,
    }
    why = f"{times.NAMES[unit]}, as many as the items of {sequence}: their time gaps"
    return Column(statistics.name, "categories", **counts, encoding=ENCODING, **form, why=why)  # type: ignore[arg-type]


def with_gaps(columns: Sequence[Column], statistics: Mapping[str, ColumnStatistics]) -> list[Column]:
    """Makes lists of times the time gaps of a sequence that has as many items a row.

    Args:
        columns: Columns of a schema.
        statistics: Statistics of their values.

    Returns:
        The columns.
    """
    made = list(columns)
    for sequence in (column for column in columns if column.pooling == "none"):
        own, separator = statistics[sequence.name], sequence.separator
        for index, column in enumerate(made):
            other = statistics.get(column.name)
            if other is None or column.kind not in ("categories", "category", "ignored") or column.pooling == "none":
                continue
            alike = np.array_equal(own.lengths[separator], other.lengths[separator]) and own.missing == other.missing
            if alike and other.with_separator[separator] and (unit := unit_of(column.name, other.examples[separator])):
                gaps = column_of(other, sequence.name, separator, unit, sequence.length)
                made[index] = replace(gaps, tower=sequence.tower)
                break
    return made


def unit_of(name: str, texts: Sequence[str]) -> str:
    """Finds the unit of the times of a list.

    Args:
        name: Name of the column.
        texts: Some of the times.

    Returns:
        Unit of a timestamp, see `times.seconds_since_1970`; "" for texts that are no times.
    """
    values = pa.array(texts, pa.string())
    if not len(values):
        return ""
    if not pc.all(pc.match_substring_regex(values, NUMBER)).as_py():
        return "text" if np.isfinite(times.seconds_since_1970(values, "text")).all() else ""
    numbers: NDArray[Any] = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    calendar = times.CalendarUnits()
    calendar.add(numbers)
    dates = [unit for unit in calendar.units if unit != "yymmddhh"]  # which ids are by chance
    return dates[0] if dates else times.epoch_unit(numbers, times.WIDE if names.is_time(name) else times.NARROW)
