"""Kind and encoding of a column, with the reason, from the statistics of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.cell_values import LIST
from zoo.recommenders.data.columns import gaps, names, times
from zoo.recommenders.data.columns.statistics import SEPARATORS, STRAY, ColumnStatistics, Distinct
from zoo.recommenders.data.schema import FEATURES, Column, positive_text

QUANTILES = 33
MOST_BUCKETS = 2**22
OWN = 0.9  # values a row, beyond which a category says nothing of other rows
MIN_ROWS = 30  # rows that show it
AS_TEXTS = "numbers written as"  # in the reason of a column of numbers with other characters
AS_NUMBERS = "missing with --number"  # in the reason of a column that may be one of numbers with placeholders
MOSTLY = 0.8  # of the values that are numbers, in such a column
LONG_RUN = 1000  # consecutive numbers that are row numbers of one of several files
SKEWED = 10.0  # how many times the 99th percentile is beyond the median's distance from the minimum
LARGE = 1e9  # whole numbers of this size and more are ids rather than quantities, and of a time if not a known one
CODES, REPEATED, DENSE, EVEN = 200, 3, 0.8, 0.1  # of whole numbers that are ids by their shape, see `_shape_of_ids`


def column_of(
    statistics: ColumnStatistics, kind: str = "", fields: Mapping[str, Any] | None = None, why: str = "chosen"
) -> Column:
    """Determines the kind and the encoding of a column, with the reason.

    Args:
        statistics: Statistics of the values.
        kind: Kind that was chosen; "": inferred.
        fields: Fields of the column that keep their values, with a kind that was chosen: separator, pooling, length,
            tower.
        why: Reason of the kind that was chosen.

    Returns:
        The column.

    Raises:
        RequestError: The values cannot be of the chosen kind.
    """
    common: dict[str, Any] = {
        "name": statistics.name,
        "distinct": int(statistics.distinct),
        "missing": statistics.missing,
    }
    column = _chosen(statistics, kind, dict(fields or {}), common, why) if kind else _inferred(statistics, common)
    tower = (fields or {}).get("tower") or names.tower(statistics.name)
    return replace(column, tower=tower) if column.kind in FEATURES else column


def label_of(statistics: ColumnStatistics, several: bool = False, positive: Mapping[str, Any] | None = None) -> Column:
    """Returns the column of a label.

    Args:
        statistics: Statistics of the labels, of which some are 0 or 1.
        several: Whether there are other labels, on which rows without this one are trained.
        positive: Values of the column that are 1, see `Column`; None or empty: 0 and 1 stand in the log.

    Returns:
        The column.
    """
    either = statistics.zeros + statistics.ones
    fate = "train the other labels alone" if several else "are left out"
    others = f"; the {statistics.count - either:,} rows without {fate}" if either < statistics.count else ""
    which = f"1 where {positive_text(positive)}, else 0" if positive else "0 and 1"
    why = f"{which}, {statistics.ones / either:.1%} of them 1{others}"
    common = int(statistics.distinct), statistics.missing
    return Column(statistics.name, "label", *common, positive=positive or {}, why=why)


def _chosen(seen: ColumnStatistics, kind: str, options: dict[str, Any], common: dict[str, Any], why: str) -> Column:
    """The column of a kind that the user chose, or that the source has."""
    if kind in ("ignored", "weight", "label"):
        return Column(kind=kind, why=why, **common)
    if seen.missing == seen.count:
        raise RequestError(f"column {seen.name}: found no value, expected some for the kind {kind}")
    if kind == "number":
        if not len(seen.numbers):
            raise RequestError(f"column {seen.name}: found no number in it, expected some for the kind number")
        return _number(seen, common, f"{why}; ")
    if kind == "vector":
        if not seen.vectors.width or seen.vectors.fault:
            reason = seen.vectors.fault or "found no such lists in it"
            raise RequestError(f"column {seen.name}: {reason}; a vector is a list of numbers of one length, [0.1, 0.2]")
        return _vector(seen, common, f"{why}; ")
    if kind == "timestamp":
        unit = _unit(seen) or times.epoch_unit(seen.numbers, times.WIDE)
        if not unit:
            expected = ", ".join(times.NAMES.values())
            raise RequestError(f"column {seen.name}: found no times in it, expected {expected}")
        return Column(kind=kind, unit=unit, why=f"{why}; {times.NAMES[unit]}", **common)
    if kind == "categories" and options.get("gaps_of"):
        return gaps.column_of(seen, options["gaps_of"], options.get("separator") or LIST, options.get("unit", ""))
    if kind == "categories":
        often = max(SEPARATORS, key=lambda separator: seen.with_separator[separator])
        separator = (
            options.get("separator") or _separator(seen) or (often if seen.with_separator[often] else SEPARATORS[0])
        )
        column = _list_column(seen, separator, common)
        kept = {name: options[name] for name in ("pooling", "length", "shares") if name in options}
        return replace(column, why=f"{why}; {column.why}", **kept)
    encoding, reason = _encoding_of_categories(seen.distinct)
    return Column(kind="category", encoding=encoding, why=f"{why}; {reason}", **common)


def _inferred(seen: ColumnStatistics, common: dict[str, Any]) -> Column:
    """The column of the kind that the values and the name say."""
    if seen.missing == seen.count:
        return Column(kind="ignored", why="every value is missing", **common)
    if names.is_index(seen.name) and ((seen.numeric and seen.whole) or seen.name.startswith("__")):
        return Column(kind="ignored", why="the index of a table, as pandas writes it", **common)
    if seen.vectors.dense:
        return _vector(seen, common)
    if seen.vectors.fault and not seen.vectors.whole:
        return Column(kind="ignored", why=f"lists of numbers, but {seen.vectors.fault} as in most rows", **common)
    if int(seen.distinct) == 1 and not seen.missing:
        return Column(kind="ignored", why="one value in all rows", **common)
    if unit := _unit(seen):
        if names.is_time_of_row(seen.name) or unit == "text":
            return Column(kind="timestamp", unit=unit, why=times.NAMES[unit], **common)
        return Column(kind="ignored", why=f"{times.NAMES[unit]}, by its name not of the row: not read", **common)
    sound = seen.numeric and seen.parsed == seen.count
    if sound and names.is_weight(seen.name) and seen.minimum >= 0:
        return Column(kind="weight", why="its name, and no value below 0", **common)
    if why := _unread_numbers(seen) if seen.numeric else _unread_texts(seen):
        return Column(kind="ignored", why=why, **common)
    ids = _reason_of_ids(seen)
    if seen.numeric and len(seen.numbers) and not ids:
        return _number(seen, common)
    if not seen.numeric and not _is_decorated(seen) and (separator := _separator(seen)):
        return _list_column(seen, separator, common)
    if int(seen.distinct) > OWN * seen.present and seen.present >= MIN_ROWS:
        about = "about " if seen.distinct.values is None else ""
        why = f"{about}{int(seen.distinct):,} values in {seen.present:,} rows: nearly every row has one of its own"
        why += _placeholders(seen)
        return Column(kind="ignored", why=why, **common)
    encoding, why = _encoding_of_categories(seen.distinct)
    return Column(kind="category", encoding=encoding, why=ids + why + _placeholders(seen), **common)


def _placeholders(seen: ColumnStatistics) -> str:
    """Returns what to do if a column of texts is one of numbers with placeholders; "" for other columns."""
    if seen.numeric or names.is_identity(seen.name):
        return ""
    if _is_decorated(seen):
        return f"; {AS_TEXTS} {seen.example[:20]!r}: to use them as numbers, write them as 1234.5"
    if seen.parsed < MOSTLY * seen.present:
        return ""
    strays = ", ".join(repr(stray[:20]) for stray in seen.strays)
    return f"; {seen.parsed / seen.present:.0%} are numbers, others such as {strays}: {AS_NUMBERS} {seen.name}"


def _is_decorated(seen: ColumnStatistics) -> bool:
    """Whether the values are numbers with other characters, such as $1,200.50."""
    return seen.decorated > STRAY * seen.present and seen.parsed + seen.decorated + seen.commas >= MOSTLY * seen.present


def _number(seen: ColumnStatistics, common: dict[str, Any], why: str = "") -> Column:
    """The column of numbers; other values, and those that are infinite, are missing."""
    encoding, reason = _encoding_of_numbers(seen)
    others = {"values that are no numbers": seen.unparsed, "infinite values": seen.infinite}
    strays = "".join(f"; {count:,} {name} count as missing" for name, count in others.items() if count)
    missing = seen.missing + seen.unparsed + seen.infinite
    return Column(kind="number", encoding=encoding, why=why + reason + strays, **{**common, "missing": missing})


def _unit(seen: ColumnStatistics) -> str:
    """Returns the unit of a timestamp; "" for other columns."""
    if seen.dated and not seen.numeric:
        return "text"
    if seen.parsed < seen.present or not seen.numeric:
        return ""
    named = names.is_time(seen.name)
    if names.is_identity(seen.name) and not named:
        return ""
    if seen.whole:
        old = seen.minimum < times.FIRST_HOUR and not named  # of 10100, 10200, ... as yymmddhh
        units = [unit for unit in seen.calendar.units if not (unit == "yymmddhh" and old)]
        if units:
            return "yymmddhh" if "yymmddhh" in units and names.is_hour(seen.name) else units[0]
    return times.epoch_unit(seen.numbers, times.WIDE) if named else ""


def _unread_numbers(seen: ColumnStatistics) -> str:
    """Returns the reason why numbers are not read; "" for usable columns."""
    run = seen.parsed / seen.runs
    if seen.whole and seen.counting and run >= (MIN_ROWS if seen.runs == 1 else LONG_RUN) and not seen.missing:
        return "row numbers: every value is that of the row before it plus 1"
    if names.is_identity(seen.name):
        return ""
    named = names.is_time(seen.name)
    if named and seen.whole and seen.minimum >= LARGE / 100:
        return f"under the name of a time, but in no known unit ({', '.join(times.NAMES.values())}): not read"
    if unit := times.epoch_unit(seen.numbers, times.NARROW):
        return (
            f"numbers as of {times.NAMES[unit]}, in a column that is not named as a time: not read, make it a "
            "timestamp or a number in the schema"
        )
    return ""


def _unread_texts(seen: ColumnStatistics) -> str:
    """Returns the reason why texts are not read; "" for usable columns."""
    if seen.date:
        return "dates, but not in ISO 8601 as 2024-01-31 12:00 is: not read, rows count in the order of the file"
    if 2 * seen.commas > seen.present and seen.commas + seen.parsed >= (1 - STRAY) * seen.present:
        problem, example = "numbers with a decimal comma", "6.5 for 6,5"
        if seen.thousands == seen.commas:
            problem, example = "numbers with a comma before three digits", "6500 or 6.5 for 6,500"
        return f"{problem}: not read, write {example} (if they are lists, make it categories)"
    if seen.weighted >= (1 - STRAY) * seen.present and any(seen.with_separator.values()):
        return "lists of items with weights (t1:0.53|t2:0.10): weights are not supported, write the items alone (t1|t2)"
    return ""


def _reason_of_ids(seen: ColumnStatistics) -> str:
    """Returns the reason why numbers are ids or codes; "" for quantities and texts."""
    if not (seen.numeric and seen.whole):
        return ""
    if names.is_identity(seen.name):
        return "whole numbers under the name of an id; "
    if seen.padded and seen.minimum >= 0:
        return "numbers with leading zeros; "
    if seen.minimum >= LARGE or _shape_of_hashes(seen):
        return "large whole numbers; "
    return "whole numbers as evenly spread as ids; " if _shape_of_ids(seen) else ""


def _shape_of_hashes(seen: ColumnStatistics) -> bool:
    """Whether integers fill the range of a hash: nearly all are large, and the largest close to its bound."""
    largest = max(-seen.minimum, seen.maximum)
    bounded = any(0.9 * 2**bits < largest <= 2**bits for bits in (31, 32, 63, 64))
    return bounded and bool(np.quantile(np.abs(seen.numbers), 0.1) >= LARGE / 10)


def _shape_of_ids(seen: ColumnStatistics) -> bool:
    """Whether integers are distributed as ids: nearly all of a range occur, repeatedly and evenly."""
    low, high, count = seen.minimum, seen.maximum, int(seen.distinct)
    if low < 0 or count < CODES or seen.present < REPEATED * count or count < DENSE * (high - low + 1):
        return False
    shares = np.linspace(0, 1, QUANTILES)
    points = (np.quantile(seen.numbers, shares) - low) / (high - low)
    return bool(np.abs(points - shares).max() < EVEN)


def _separator(seen: ColumnStatistics) -> str:
    """Returns the separator of the items of a list; "" for a column without lists.

    Items occur in many lists, so they are fewer than the distinct values. A list of words differs from a sentence by
    its items: where the separator is a space, they must be numbers.
    """
    best, least = "", int(seen.distinct)
    for separator in SEPARATORS:
        items = seen.items[separator]
        if seen.with_separator[separator] < 0.02 * seen.present or int(items) >= 0.5 * int(seen.distinct):
            continue
        if separator == " " and not (items.values and all(value.isdigit() for value in items.values if value)):
            continue
        if int(items) < least:
            best, least = separator, int(items)
    return best


def _vector(seen: ColumnStatistics, common: dict[str, Any], why: str = "") -> Column:
    """The column of vectors of numbers."""
    why += f"lists of {seen.vectors.width} numbers"
    return Column(**common, kind="vector", encoding=seen.vectors.encoding(), why=why)


def _list_column(seen: ColumnStatistics, separator: str, common: dict[str, Any]) -> Column:
    items = seen.items.get(separator, Distinct())
    lengths = seen.lengths.get(separator, np.zeros(0, np.int64))
    if not items.values or not lengths.any():  # a list of one item in every row
        items = seen.distinct
    length = int(np.searchsorted(np.cumsum(lengths), 0.99 * lengths.sum()))
    encoding, why = _encoding_of_categories(items)
    return Column(
        **{**common, "distinct": int(items)},
        kind="categories",
        encoding=encoding,
        separator=separator,
        pooling="mean",
        length=max(length, 1),
        why=f"{separator!r} in {seen.with_separator.get(separator, 0):,} rows; {why}; 99% of the lists have up to "
        f"{length}",
    )


def _encoding_of_categories(distinct: Distinct) -> tuple[dict[str, Any], str]:
    count = int(distinct)
    if distinct.values is not None:
        values = sorted((value for value in distinct.values if value), key=lambda text: (-distinct.values[text], text))  # type: ignore[index]
        return {"type": "vocabulary", "values": values}, f"{count:,} values, listed by how often they occur"
    buckets = min(1 << int(np.ceil(np.log2(2 * count))), MOST_BUCKETS)
    return {"type": "hash", "buckets": buckets}, f"about {count:,} values: two buckets or more to each"


def _encoding_of_numbers(seen: ColumnStatistics) -> tuple[dict[str, Any], str]:
    x = seen.numbers
    low, high = float(seen.minimum), float(seen.maximum)
    middle, far = (float(quantile) for quantile in np.quantile(x, [0.5, 0.99]))
    if far - low > SKEWED * max(middle - low, 1e-12) and high > low:
        return {
            "type": "log1p",
            "minimum": low,
            "maximum": high,
        }, f"skewed: the median is {middle:g}, the 99th percentile {far:g}"
    if high > low and int(seen.distinct) <= 2:
        return {"type": "min-max", "minimum": low, "maximum": high}, "two values"
    deviation = float(x.std()) or 1.0
    if _heavy(x, deviation):
        points = np.quantile(x, np.linspace(0, 1, QUANTILES))
        return {"type": "quantile", "quantiles": [float(point) for point in points]}, "values far beyond most others"
    return {"type": "standard", "mean": float(x.mean()), "deviation": deviation}, f"{low:g} to {high:g}"


def _heavy(x: NDArray[np.float64], deviation: float) -> bool:
    """Whether values lie ten deviations and more from the mean."""
    return bool(np.abs(x - x.mean()).max() > 10 * deviation)
