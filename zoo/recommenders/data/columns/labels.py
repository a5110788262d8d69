"""The label of a log, and columns of two values that nearly equal it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.cell_values import canonical, parse_floats
from zoo.recommenders.data.columns import names
from zoo.recommenders.data.columns.statistics import ColumnStatistics
from zoo.recommenders.data.schema import REGRESSION

_SIGN = re.compile(r"(.+?)(?:\s*(>?=)\s*(.+))?$", re.S)  # column, sign and value of a label as typed
LABELS = ("label", "click", "clicked", "target", "y")
EQUAL = 0.9  # correlation with the label from which on a column nearly equals it
CERTAIN = 0.99  # share of one label among the rows of a value that decides it
DECIDED = 10  # rows of the value that show it, and of the column, at least
MAX_LABEL_VALUES = 3  # values of a column that is compared: two, and missing
FILLERS = pa.array(["0", "-1"])  # of numbers that exist only after a click, such as the time on a page


def label_rules(labels: str | Iterable[str] | None, columns: Collection[str]) -> dict[str, dict[str, Any]]:
    """Reads labels as they are typed: a column, "rating>=4" or "event=buy,cart".

    Args:
        labels: One label or several; None: none.
        columns: Columns of the log; the name of one is never split.

    Returns:
        {column: its values that are 1, see `Column`; {} if it holds 0 and 1}, in order.

    Raises:
        RequestError: A column stands there twice, or a number is missing.
    """
    rules: dict[str, dict[str, Any]] = {}
    for text in (labels,) if isinstance(labels, str) else labels or ():
        name, sign, value = (text, "", "") if text in columns else _SIGN.match(text).groups("")  # type: ignore[union-attr]
        if name in rules:
            raise RequestError(f"found the label {name} twice, expected every label once; leave one of them out")
        if sign == ">=":
            number = parse_floats(pa.array([value]))[0]
            if np.isnan(number):
                raise RequestError(f"found --label {text!r}, expected a number behind >=, such as {name}>=4")
            rules[name] = {"at_least": float(number)}
        else:
            rules[name] = {"values": canonical(pa.array(value.split(","))).to_pylist()} if sign else {}
    return rules


def labels_among(
    path: str, seen: Mapping[str, ColumnStatistics], requested: Sequence[str], skip: bool
) -> tuple[str, ...]:
    """Chooses the columns to predict.

    Args:
        path: Name of the log in messages.
        seen: Statistics by column.
        requested: Columns that were asked for; none: a column named in `LABELS` that holds 0 and 1. One of several may
            have missing values.
        skip: Whether rows with another label are left out.

    Returns:
        Names of the columns, in the order of `requested`.

    Raises:
        RequestError: There is no such column, or it has other values than 0 and 1, or one of them alone.
    """
    if len(requested) < 2:
        return (label_among(path, seen, requested[0] if requested else None, skip),)
    return tuple(label_among(path, seen, name, skip, missing=True) for name in requested)


def label_among(
    path: str, seen: Mapping[str, ColumnStatistics], requested: str | None, skip: bool, missing: bool = False
) -> str:
    """Chooses the column to predict.

    Args:
        path: Name of the log in messages.
        seen: Statistics by column.
        requested: Column that was asked for; None: a column named in `LABELS` that holds 0 and 1.
        skip: Whether rows with another label are left out.
        missing: Whether the label may be missing in some rows.

    Returns:
        Name of the column.

    Raises:
        RequestError: There is no such column, or it has other values than 0 and 1, or one of them alone.
    """
    if requested is not None and requested not in seen:
        raise RequestError(f"{path} has no column {requested!r}; its columns are {names.listed(seen)[:300]}")
    named = [name for name in seen if name.lower() in LABELS] if requested is None else [requested]
    if not named:
        why = f"none is called {', '.join(LABELS)}"
        raise RequestError(
            f"{path} has no column of 0 and 1 to predict ({why}); name one of its columns with --label: "
            f"{names.listed(seen)[:300]}{_headless(seen)}"
        )
    if binary := [name for name in named if _is_binary(seen[name], skip, missing)]:
        return requested or min(binary, key=lambda name: LABELS.index(name.lower()))
    first = seen[named[0]]
    if not first.numeric and int(first.distinct) == 2 and not first.missing:
        value = next(iter(first.distinct.values or ("1",)))
        raise RequestError(
            f"{path}: the label {first.name} holds {_some(first)}; expected 0 and 1, say which is 1 "
            f"(--label '{first.name}={value}'), or name another column with --label"
        )
    either = first.zeros + first.ones
    no_other = 0 < either == first.count - first.missing
    everywhere = "" if missing else ", in every row"
    expected = f"both of them{everywhere}" if no_other else f"name their column with --label; {REGRESSION}"
    raise RequestError(f"{path}: the label {first.name} holds {_some(first)}; expected 0 and 1, {expected}")


def _headless(columns: Iterable[str]) -> str:
    """A hint where a name is a number, as in the first row of a log without a header."""
    return "; a log without a header needs one" if any(name.strip().isdecimal() for name in columns) else ""


def _is_binary(seen: ColumnStatistics, skip: bool, missing: bool) -> bool:
    """Whether a column holds 0 and 1 and, unless rows may be skipped or values be missing, nothing else.

    With skipped rows, most values must be 0 or 1; ratings from 0 to 5 are not.
    """
    either = seen.zeros + seen.ones
    expected = seen.count - seen.missing if missing else seen.count
    enough = 2 * either > seen.count - seen.missing if skip else either == expected
    return bool(seen.zeros and seen.ones and enough)


def _some(seen: ColumnStatistics) -> str:
    """Lists a few values for an error message."""
    if seen.missing == seen.count:
        return "nothing"
    values = list(seen.distinct.values or ()) or [f"{int(seen.distinct):,} different values"]
    missing = f", {seen.missing:,} missing" if seen.missing else ""
    return f"{', '.join(values[:4])}{', ...' if len(values) > 4 else ''}{missing}"


class Leaks:
    """Finds columns that nearly equal the label or decide it: by two values, or by being missing or a filler or not.

    Args:
        requested: Columns to predict; none: all columns named in `LABELS` are compared with the others.
    """

    def __init__(self, requested: Sequence[str] = ()) -> None:
        self.requested = requested
        self._values: dict[str, list[str | None]] = {}  # of the columns that have few
        self._many: set[str] = set()
        self._counts: dict[tuple[str, str], NDArray[np.int64]] = {}  # (label, column): rows, [values, label]
        self._lacking: dict[tuple[str, str], NDArray[np.int64]] = {}  # rows without a value, and with a filler
        self._rows: dict[str, NDArray[np.int64]] = {}  # label: rows, [label]

    def add(self, columns: Mapping[str, pa.Array]) -> None:
        """Adds a batch.

        Args:
            columns: {column: text array [n]}, null where missing.
        """
        codes = {name: self._codes(name, texts) for name, texts in columns.items() if name not in self._many}
        labels = [name for name in columns if self._is_label(name)]
        for label in labels:
            truth = np.select([_equal(columns[label], "1"), _equal(columns[label], "0")], [1, 0], -1)
            self._rows[label] = self._rows.get(label, 0) + np.bincount(truth[truth >= 0], minlength=2)
            for name, texts in columns.items():
                if name != label:
                    absent = [truth[_rows(rows)] for rows in (texts.is_null(), pc.is_in(texts, FILLERS))]
                    lacking = np.stack([np.bincount(values[values >= 0], minlength=2) for values in absent])
                    self._lacking[label, name] = self._lacking.get((label, name), 0) + lacking
            for name, code in codes.items():
                if code is not None and name != label:
                    cells = np.bincount((2 * code + truth)[truth >= 0], minlength=2 * MAX_LABEL_VALUES).reshape(
                        MAX_LABEL_VALUES, 2
                    )
                    self._counts[label, name] = self._counts.get((label, name), 0) + cells

    def _is_label(self, name: str) -> bool:
        return name in self.requested if self.requested else name.lower() in LABELS

    def _codes(self, name: str, texts: pa.Array) -> NDArray[np.int64] | None:
        """Index of every value among those of the column; None if there are more than `MAX_LABEL_VALUES`."""
        encoded = texts.dictionary_encode(null_encoding="encode")
        values = self._values.setdefault(name, [])
        values += [value for value in encoded.dictionary.to_pylist()[: MAX_LABEL_VALUES + 1] if value not in values]
        if len(values) > MAX_LABEL_VALUES or len(encoded.dictionary) > MAX_LABEL_VALUES:
            self._many.add(name)
            return None
        places = np.array([values.index(value) for value in encoded.dictionary.to_pylist()], np.int64)
        codes: NDArray[np.int64] = places[encoded.indices.to_numpy(zero_copy_only=False)]
        return codes

    def reasons(self, label: str, columns: Iterable[str]) -> dict[str, str]:
        """Returns the columns that nearly equal or decide the label.

        Args:
            label: The label.
            columns: Names of columns.

        Returns:
            {column: message}.
        """
        reasons = {name: self._reason(label, name) for name in columns if name != label}
        return {name: why for name, why in reasons.items() if why}

    def _reason(self, label: str, name: str) -> str:
        counts, values = self._counts.get((label, name)), self._values.get(name, [])
        if name in self._many or counts is None:
            lacking = self._lacking.get((label, name))
            if lacking is None:
                return ""
            rows, (absent, fillers) = self._rows[label], lacking
            words = "missing", "present"
            if fillers[1] * rows[0] < fillers[0] * rows[1]:  # rarer beside 1: they may stand for what did not happen
                absent, words = absent + fillers, ("missing, 0 or -1", "another value")
            return _reason(label, name, np.stack([absent, rows - absent]), words)
        if len(values) == MAX_LABEL_VALUES and None in values:  # two values, and rows without one
            counts = np.delete(counts, values.index(None), 0)
            values = [value for value in values if value is not None]
        if len(values) != 2:
            return ""
        return _reason(label, name, counts[:2], ["missing" if value is None else value for value in values])


def _reason(label: str, name: str, counts: NDArray[np.int64], values: Sequence[str]) -> str:
    """Says why a column is no feature.

    Args:
        label: The label.
        name: Name of the column.
        counts: Rows by value of the column and label, int64 [2, 2].
        values: The two values of the column.

    Returns:
        The reason; "" if it neither nearly equals the label nor decides it.
    """
    table = counts.astype(np.float64)
    sides = [*table.sum(0), *table.sum(1)]
    if not all(sides):
        return ""
    correlation = float(np.linalg.det(table)) / float(np.sqrt(np.prod(sides)))
    if abs(correlation) >= EQUAL:
        equal = max(table[0, 0] + table[1, 1], table[0, 1] + table[1, 0]) / table.sum()
        return f"{' and '.join(values)} match the label {label} in {equal:.1%} of the rows"
    if name.lower() in LABELS:
        return f"another label by its name, beside {label}"
    base = table.sum(0) / table.sum()
    for row, value in enumerate(values):
        for truth in (1, 0):
            certain = table[row, truth] / table[row].sum()
            rare = 1 - certain < 0.1 * (1 - base[truth])
            if table[row].sum() < DECIDED or certain < CERTAIN or not rare or not (truth or names.is_outcome(name)):
                continue
            return f"{label} is {truth} in {certain:.1%} of the rows where it is {value}, as after {label}"
    return ""


def _equal(texts: pa.Array, value: str) -> NDArray[np.bool_]:
    return _rows(pc.equal(texts, value).fill_null(False))


def _rows(chosen: pa.Array) -> NDArray[np.bool_]:
    return chosen.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
