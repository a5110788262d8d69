"""Times written as numbers or texts: their units, and their conversion to seconds since 1970."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zoo.recommenders.data.cell_values import parse_floats

PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # of numbers that count from 1970 on
CALENDAR = {  # of numbers whose digits are fields: (field, digits) in order
    "yyyymmdd": (("year", 4), ("month", 2), ("day", 2)),
    "yymmddhh": (("year", 2), ("month", 2), ("day", 2), ("hour", 2)),
    "yyyymmddhh": (("year", 4), ("month", 2), ("day", 2), ("hour", 2)),
    "yyyymmddhhmm": (("year", 4), ("month", 2), ("day", 2), ("hour", 2), ("minute", 2)),
    "yyyymmddhhmmss": (("year", 4), ("month", 2), ("day", 2), ("hour", 2), ("minute", 2), ("second", 2)),
}
NAMES = {
    "s": "seconds since 1970",
    "ms": "milliseconds since 1970",
    "us": "microseconds since 1970",
    "ns": "nanoseconds since 1970",
    "text": "dates in ISO 8601",
    **{unit: f"dates as whole numbers {unit}" for unit in CALENDAR},
}
WIDE = 3e8, 1e10  # seconds since 1970 that a column named as a time may hold: 1979 to 2286
NARROW = 9.46e8, 2.05e9  # and one that has another name: 2000 to 2034
MAX_OUTLIER_RATIO = 0.01  # of the values may lie outside, such as 0 for an unknown time
YEARS = 1900, 2100
ZONES = (  # as databases write them (BigQuery, Postgres), and as ISO 8601 has them
    (" ?(UTC|GMT|Z)", "Z"),
    (r" ?([+-]\d\d)", r"\3:00"),
    (r" ([+-]\d\d:?\d\d)", r"\3"),
)
ENDS = r"(UTC|GMT|Z|[+-]\d\d:?(\d\d)?)$"  # of texts that one of `ZONES` matches
FIRST_HOUR = 7_010_100  # the smallest yymmddhh that is one under any name: that of 2007


def seconds(values: NDArray[np.float64], unit: str) -> NDArray[np.float64]:
    """Converts times to seconds.

    Args:
        values: Times, float64 [n], NaN where missing.
        unit: Key of `PER_SECOND` or `CALENDAR`.

    Returns:
        Seconds since 1970 (UTC), float64 [n]; NaN where the value is no time.
    """
    if unit in PER_SECOND:
        return values / PER_SECOND[unit]
    fields = CALENDAR[unit]
    valid = np.isfinite(values) & (values >= 0) & (values < 10 ** sum(width for _, width in fields))
    digits = np.where(valid, values, 0).astype(np.int64)
    valid &= digits == values
    units = {"hour": np.zeros_like(digits), "minute": np.zeros_like(digits), "second": np.zeros_like(digits)}
    for name, width in reversed(fields):
        units[name], digits = digits % 10**width, digits // 10**width
    year = units["year"] + (0 if fields[0][1] == 4 else 2000)
    valid &= (year >= YEARS[0]) & (year <= YEARS[1]) & (units["month"] >= 1) & (units["month"] <= 12)
    valid &= (units["day"] >= 1) & (units["hour"] < 24) & (units["minute"] < 60) & (units["second"] < 60)
    months = (np.where(valid, 12 * (year - 1970) + units["month"] - 1, 0)).astype("M8[M]")
    days = months.astype("M8[D]") + np.where(valid, units["day"] - 1, 0)
    valid &= days.astype("M8[M]") == months  # not the 30th of February
    clock = 3600 * units["hour"] + 60 * units["minute"] + units["second"]
    return np.where(valid, 86400.0 * days.astype(np.int64) + clock, np.nan)


def epoch_unit(values: NDArray[np.float64], bounds: tuple[float, float]) -> str:
    """Finds the unit of numbers that count from 1970 on.

    Args:
        values: Sample of the numbers, float64 [n].
        bounds: Smallest and largest plausible time, in seconds.

    Returns:
        Key of `PER_SECOND`; "" if too many of the values are out of bounds in every unit.
    """
    for unit, rate in PER_SECOND.items():
        outside = (values < bounds[0] * rate) | (values >= bounds[1] * rate)
        if len(values) and outside.mean() <= MAX_OUTLIER_RATIO:
            return unit
    return ""


class CalendarUnits:
    """Finds the units in which all numbers of a column are dates.

    Attributes:
        units: The units, keys of `CALENDAR`; empty after a number that is no date in any of them.
    """

    def __init__(self) -> None:
        self.units = tuple(CALENDAR)

    def add(self, values: NDArray[np.float64]) -> None:
        """Adds numbers.

        Args:
            values: float64 [n].
        """
        distinct = np.unique(values) if self.units else values
        self.units = tuple(unit for unit in self.units if np.isfinite(seconds(distinct, unit)).all())


def seconds_since_1970(texts: pa.Array, unit: str) -> NDArray[np.float64]:
    """Parses timestamps.

    Args:
        texts: Text array [n], null where missing.
        unit: "text" for ISO 8601 (UTC without a zone), also with UTC, GMT or +00 as zone, or a unit of numbers, a key
            of `PER_SECOND` or `CALENDAR`.

    Returns:
        Seconds since 1970, float64 [n]; -inf where the text is not a timestamp.
    """
    if unit != "text":
        return np.nan_to_num(seconds(parse_floats(texts), unit), nan=-np.inf)
    texts = pc.replace_substring_regex(texts, r"(:\d\d\.\d{6})\d{1,3}", r"\1")  # nanoseconds, as Arrow writes them
    for written, zone in ZONES if pc.any(pc.match_substring_regex(texts, ENDS)).as_py() else ():
        texts = pc.replace_substring_regex(texts, rf"(:\d\d(\.\d+)?){written}$", rf"\1{zone}")
    time = r"([01]\d|2[0-3]):[0-5]\d"
    is_time = pc.match_substring_regex(
        texts,
        rf"^\d{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
        rf"([T ]{time}(:[0-5]\d(\.\d{{1,6}})?)?(Z|[+-]([01]\d|2[0-3]):?[0-5]\d)?)?$",
    )
    whole = pc.replace_substring_regex(texts, r"^(.{10})$", r"\1T00:00Z")
    whole = pc.replace_substring_regex(whole, r"^(.{10}[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)$", r"\1Z")
    whole = pc.if_else(is_time, whole, pa.scalar(None, pa.string()))
    try:
        timestamps = whole.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:  # the 30th of February
        timestamps = pa.array([_instant(text) for text in whole], pa.timestamp("us", "UTC"))
    instants = timestamps.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.float64) / 1e6
    return np.asarray(np.nan_to_num(instants, nan=-np.inf))


def _instant(text: pa.Scalar) -> pa.Scalar:
    try:
        return text.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:
        return pa.scalar(None, pa.timestamp("us", "UTC"))
