"""The label of a log, and columns of two values that nearly equal it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.columns import names
from zoo.recommenders.data.columns.statistics import ColumnStatistics
from zoo.recommenders.data.schema import REGRESSION

LABELS = ("label", "click", "clicked", "target", "y")
EQUAL = 0.9  # correlation with the label from which on a column nearly equals it
CERTAIN = 0.99  # share of one label among the rows of a value that decides it
DECIDED = 10  # rows of the value that show it, and of the column, at least
MOST = 3  # values of a column that is compared: two, and missing


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
    names = tuple(requested)
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise RequestError(f"found the label {twice[0]} twice, expected every label once; leave one of them out")
    if len(names) < 2:
        return (label_among(path, seen, names[0] if names else None, skip),)
    return tuple(label_among(path, seen, name, skip, missing=True) for name in names)


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
            f"{names.listed(seen)[:300]}"
        )
    if binary := [name for name in named if _is_binary(seen[name], skip, missing)]:
        return requested or min(binary, key=lambda name: LABELS.index(name.lower()))
    first = seen[named[0]]
    if not first.numeric and int(first.distinct) == 2 and not first.missing:
        raise RequestError(
            f"{path}: the label {first.name} holds {_some(first)}; expected 0 and 1, write those in their place, "
            "or name another column with --label"
        )
    either = first.zeros + first.ones
    no_other = 0 < either == first.count - first.missing
    everywhere = "" if missing else ", in every row"
    expected = f"both of them{everywhere}" if no_other else f"name their column with --label; {REGRESSION}"
    raise RequestError(f"{path}: the label {first.name} holds {_some(first)}; expected 0 and 1, {expected}")


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
    """Finds columns of two values that nearly equal the label, or decide it.

    Args:
        requested: Columns to predict; none: all columns named in `LABELS` are compared with the others.
    """

    def __init__(self, requested: Sequence[str] = ()) -> None:
        self.requested = requested
        self._values: dict[str, list[str | None]] = {}  # of the columns that have few
        self._many: set[str] = set()
        self._counts: dict[tuple[str, str], NDArray[np.int64]] = {}  # (label, column): rows, [values, label]

    def add(self, columns: Mapping[str, pa.Array]) -> None:
        """Adds a batch.

        Args:
            columns: {column: text array [n]}, null where missing.
        """
        codes = {name: self._codes(name, texts) for name, texts in columns.items() if name not in self._many}
        labels = [name for name in columns if self._is_label(name)]
        for label in labels:
            truth = np.select([_equal(columns[label], "1"), _equal(columns[label], "0")], [1, 0], -1)
            for name, code in codes.items():
                if code is not None and name != label:
                    cells = np.bincount((2 * code + truth)[truth >= 0], minlength=2 * MOST).reshape(MOST, 2)
                    self._counts[label, name] = self._counts.get((label, name), 0) + cells

    def _is_label(self, name: str) -> bool:
        return name in self.requested if self.requested else name.lower() in LABELS

    def _codes(self, name: str, texts: pa.Array) -> NDArray[np.int64] | None:
        """Index of every value among those of the column; None if there are more than `MOST`."""
        encoded = texts.dictionary_encode(null_encoding="encode")
        values = self._values.setdefault(name, [])
        values += [value for value in encoded.dictionary.to_pylist()[: MOST + 1] if value not in values]
        if len(values) > MOST or len(encoded.dictionary) > MOST:
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
        reasons = {name: self._reason(label, name) for name in columns if name not in self._many and name != label}
        return {name: why for name, why in reasons.items() if why}

    def _reason(self, label: str, name: str) -> str:
        counts = self._counts.get((label, name))
        values = self._values.get(name, [])
        if counts is None:
            return ""
        if len(values) == MOST and None in values:  # two values, and rows without one
            counts = np.delete(counts, values.index(None), 0)
            values = [value for value in values if value is not None]
        if len(values) != 2:
            return ""
        table = counts[:2].astype(np.float64)
        sides = [*table.sum(0), *table.sum(1)]
        if not all(sides):
            return ""
        correlation = float(np.linalg.det(table)) / float(np.sqrt(np.prod(sides)))
        if abs(correlation) >= EQUAL:
            equal = max(table[0, 0] + table[1, 1], table[0, 1] + table[1, 0]) / table.sum()
            return f"two values that match the label {label} in {equal:.1%} of the rows"
        if name.lower() in LABELS:
            return f"another label by its name, beside {label}"
        base = table.sum(0) / table.sum()
        for row, value in enumerate(values):
            for truth in (1, 0):
                certain = table[row, truth] / table[row].sum()
                rare = 1 - certain < 0.1 * (1 - base[truth])
                if table[row].sum() < DECIDED or certain < CERTAIN or not rare or not (truth or names.is_outcome(name)):
                    continue
                shown = "missing" if value is None else value
                return f"{label} is {truth} in {certain:.1%} of the rows where it is {shown}, as after {label}"
        return ""


def _equal(texts: pa.Array, value: str) -> NDArray[np.bool_]:
    return pc.equal(texts, value).fill_null(False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
