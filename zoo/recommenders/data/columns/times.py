"""Times written as numbers: their units, and their conversion to seconds since 1970."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
FEW = 0.01  # of the values may lie outside, such as 0 for an unknown time
YEARS = 1900, 2100
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
    rest = np.where(valid, values, 0).astype(np.int64)
    valid &= rest == values
    found = {"hour": np.zeros_like(rest), "minute": np.zeros_like(rest), "second": np.zeros_like(rest)}
    for name, width in reversed(fields):
        found[name], rest = rest % 10**width, rest // 10**width
    year = found["year"] + (0 if fields[0][1] == 4 else 2000)
    valid &= (year >= YEARS[0]) & (year <= YEARS[1]) & (found["month"] >= 1) & (found["month"] <= 12)
    valid &= (found["day"] >= 1) & (found["hour"] < 24) & (found["minute"] < 60) & (found["second"] < 60)
    months = (np.where(valid, 12 * (year - 1970) + found["month"] - 1, 0)).astype("M8[M]")
    days = months.astype("M8[D]") + np.where(valid, found["day"] - 1, 0)
    valid &= days.astype("M8[M]") == months  # not the 30th of February
    clock = 3600 * found["hour"] + 60 * found["minute"] + found["second"]
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
        if len(values) and outside.mean() <= FEW:
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
