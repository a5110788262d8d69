"""Infers the schema of a click log in one pass over its rows and in constant memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from zoo.recommenders.data.logs import LIST, Log
from zoo.recommenders.data.schema import FEATURES, REGRESSION, Column, Schema

LABELS = ("label", "click", "clicked", "target", "y")
VOCABULARY = 10_000  # values of a category that are listed; more are hashed
SKETCH = 4096  # smallest hashes kept to estimate how many values there are: an error of 1.6%
SAMPLE = 100_000  # numbers kept for means and quantiles, at least, where there are more: drawn at random
QUANTILES = 33
LONGEST = 50  # items of a list that are read, at most
STRAY = 0.01  # of a column of numbers that may be something else, which counts as missing
SEPARATORS = (LIST, ";", ",", " ")
MOST_BUCKETS = 2**22
OWN = 0.9  # values a row, beyond which a category says nothing of other rows
SKEWED = 10.0  # how many times the 99th percentile is beyond the median's distance from the minimum
_IDENTITY = re.compile(
    r"(^|[_\W])(id|ids|uid|uuid|guid|key|hash|code|zip|zipcode|postcode|type|category|cat|class|brand|sku)($|[_\W])|[a-z]I[dD]$"
)
_TIME = re.compile(r"(^|[_\W])(time|timestamp|datetime|date|ts|at|when)($|[_\W])", re.IGNORECASE)
_ITEM = re.compile(
    r"(^|[_\W])(item|items|product|movie|film|article|ad|ads|adgroup|campaign|book|song|track|video|news|sku|asin|"
    r"brand|category|categories|"
    r"genre|genres|price|title|publisher|author|artist|release)($|[_\W])",
    re.IGNORECASE,
)
_OF_USER = re.compile(r"(^|[_\W])(user|history|clicked|viewed|bought|seen|liked)($|[_\W])", re.IGNORECASE)
_WEIGHT = re.compile(r"^(sample_?)?weights?$", re.IGNORECASE)
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_COMMA = r"^[+-]?\d+,\d+$"  # a number as much of Europe writes it
_DAY = r"(\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{4})"
_DATE = f"^{_DAY}" r"([T ]\d{1,2}:\d\d(:\d\d)?( ?[AaPp][Mm])?)?$"  # also those that are no ISO 8601
_ISO = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?)?$"


def infer(log: Log, label: str | None = None, on_error: str = "raise") -> Schema:
    """Infers the kind and encoding of every column, with the reason, in one pass over all rows.

    Args:
        log: Log to read.
        label: Column to predict; None: a column named in `LABELS` that holds 0 and 1.
        on_error: "skip" ignores the rows that training leaves out: rows with another number of columns, and labels
            other than 0 and 1. "raise" raises at the first such row.

    Returns:
        The schema.

    Raises:
        RequestError: The log has no row, no such label column or no feature column, or has a faulty row with "raise".
    """
    skip = on_error == "skip"
    seen = {name: _Seen(name) for name in log.columns}
    rows = 0
    with progress("reading", None) as advance:
        for batch in log.batches(bad=(lambda *_: None) if skip else None):
            rows += batch.num_rows
            for name, column in zip(log.columns, batch.columns, strict=True):
                seen[name].add(column)
            advance(batch.num_rows)
    if not rows:
        raise RequestError(f"{log.path} holds no row below its header; expected a click log")
    chosen = _label(log, seen, label, skip)
    columns = [_of_tower(_column(each, each.name == chosen)) for each in seen.values()]
    columns = _only("timestamp", columns, lambda each: (bool(_TIME.search(each.name)), each.distinct))
    columns = _only("weight", columns, lambda each: len(each.name))  # sample_weight may stand beside the goods' weight
    schema = Schema(tuple(columns), rows)
    if not schema.of(*FEATURES):
        reasons = ", ".join(f"{each.name}: {each.why}" for each in schema.columns if each.kind != "label")
        raise RequestError(f"{log.path} has nothing to predict {chosen} from ({reasons or 'no other column'})")
    return schema


class _Distinct:
    """Counts distinct values: exactly up to `VOCABULARY`, then by a sketch of k minimum values.

    Bar-Yossef et al. 2002, "Counting distinct elements in a data stream".
    """

    def __init__(self) -> None:
        self.values: dict[str, int] | None = {}
        self._least = np.empty(0, np.uint64)

    def add(self, values: pa.Array) -> None:
        counts = values.value_counts()
        texts, numbers = counts.field(0).to_pylist(), counts.field(1).to_pylist()
        hashes = [int.from_bytes(hashlib.blake2b(each.encode(), digest_size=8).digest(), "little") for each in texts]
        self._least = np.unique(np.concatenate([self._least, np.array(hashes, np.uint64)]))[:SKETCH]
        if self.values is not None:
            for text, number in zip(texts, numbers, strict=True):
                self.values[text] = self.values.get(text, 0) + number
            if len(self.values) > VOCABULARY:
                self.values = None

    def __int__(self) -> int:
        if self.values is not None:
            return len(self.values)
        return round((SKETCH - 1) / (float(self._least[-1]) / 2**64))


class _Seen:
    """Statistics of a column, collected in one pass."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.missing = name, 0, 0
        self.distinct = _Distinct()
        self.whole = self.dated = self.date = True
        self.parsed = self.unparsed = self.commas = 0  # values that are numbers; others, and those with a decimal comma
        self.zeros = self.ones = 0
        self.numbers = np.empty(0)
        self.minimum, self.maximum = np.inf, -np.inf
        # Each number draws another at random, and stays while that is below the share: rows in turns (1, 0, 1, 0) are
        # drawn like any others, and the size of batches changes nothing.
        self._random, self._drawn, self._share = np.random.default_rng(0), np.empty(0), 1.0
        self.items = {each: _Distinct() for each in SEPARATORS}
        self.with_separator = dict.fromkeys(SEPARATORS, 0)
        self.lengths = {each: np.zeros(LONGEST + 1, np.int64) for each in SEPARATORS}

    def add(self, column: pa.Array) -> None:
        """Adds a batch of texts."""
        self.count += len(column)
        self.missing += column.null_count
        texts = column.drop_null()
        if not len(texts):
            return
        self.distinct.add(texts)
        numbers = texts.filter(pc.match_substring_regex(texts, _NUMBER))
        self.parsed, self.unparsed = self.parsed + len(numbers), self.unparsed + len(texts) - len(numbers)
        self._add_numbers(numbers.cast(pa.float64()).to_numpy(zero_copy_only=False))
        self.dated = self.dated and bool(pc.all(pc.match_substring_regex(texts, _ISO)).as_py())
        self.date = self.date and bool(pc.all(pc.match_substring_regex(texts, _DATE)).as_py())
        if not self.numeric:
            self.commas += pc.sum(pc.match_substring_regex(texts, _COMMA)).as_py()
            for each in list(self.items):
                self._add_items(texts, each)

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, up to `STRAY` of them."""
        return self.parsed > 0 and self.unparsed <= STRAY * (self.parsed + self.unparsed)

    def _add_numbers(self, numbers: NDArray[np.float64]) -> None:
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return
        self.whole = self.whole and bool((numbers == np.rint(numbers)).all())
        self.minimum, self.maximum = min(self.minimum, numbers.min()), max(self.maximum, numbers.max())
        self.zeros += int((numbers == 0).sum())
        self.ones += int((numbers == 1).sum())
        drawn = self._random.random(len(numbers))
        some = drawn < self._share
        self.numbers = np.concatenate([self.numbers, numbers[some]])
        self._drawn = np.concatenate([self._drawn, drawn[some]])
        while len(self.numbers) > 2 * SAMPLE:
            self._share /= 2
            some = self._drawn < self._share
            self.numbers, self._drawn = self.numbers[some], self._drawn[some]

    def _add_items(self, texts: pa.Array, separator: str) -> None:
        lists = pc.split_pattern(texts, separator)
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        self.with_separator[separator] += int((lengths > 1).sum())
        self.lengths[separator] += np.bincount(np.minimum(lengths, LONGEST), minlength=LONGEST + 1)
        if self.with_separator[separator]:
            self.items[separator].add(pc.utf8_trim_whitespace(lists.flatten()))


def _label(log: Log, seen: dict[str, _Seen], requested: str | None, skip: bool) -> str:
    if requested is not None and requested not in seen:
        raise RequestError(f"{log.path} has no column {requested!r}; its columns are {', '.join(log.columns)}")
    named = [name for name in log.columns if name.lower() in LABELS] if requested is None else [requested]
    if not named:
        why = f"none is called {', '.join(LABELS)}"
        raise RequestError(f"{log.path} has no column of 0 and 1 to predict ({why}); name it with --label")
    if found := [name for name in named if _is_binary(seen[name], skip)]:
        return requested or min(found, key=lambda name: LABELS.index(name.lower()))
    first = seen[named[0]]
    if not first.numeric and int(first.distinct) == 2 and not first.missing:
        raise RequestError(
            f"{log.path}: the label {first.name} holds {_some(first)}; expected 0 and 1, write those in their place, "
            "or name another column with --label"
        )
    either = first.zeros + first.ones
    no_other = 0 < either == first.count - first.missing
    expected = "both of them, in every row" if no_other else f"name their column with --label; {REGRESSION}"
    raise RequestError(f"{log.path}: the label {first.name} holds {_some(first)}; expected 0 and 1, {expected}")


def _is_binary(seen: _Seen, skip: bool) -> bool:
    """Whether a column holds 0 and 1 and, unless rows may be skipped, nothing else.

    With skipped rows, most values must be 0 or 1; ratings from 0 to 5 are not.
    """
    either = seen.zeros + seen.ones
    enough = 2 * either > seen.count - seen.missing if skip else either == seen.count
    return bool(seen.zeros and seen.ones and enough)


def _some(seen: _Seen) -> str:
    """Lists a few values for an error message."""
    if seen.missing == seen.count:
        return "nothing"
    values = list(seen.distinct.values or ()) or [f"{int(seen.distinct):,} different values"]
    missing = f", {seen.missing:,} missing" if seen.missing else ""
    return f"{', '.join(values[:4])}{', ...' if len(values) > 4 else ''}{missing}"


def _column(seen: _Seen, is_label: bool) -> Column:
    """Determines the kind of a column, with the reason."""
    common: dict[str, Any] = {"name": seen.name, "distinct": int(seen.distinct), "missing": seen.missing}
    if is_label:
        either = seen.zeros + seen.ones
        others = f"; the {seen.count - either:,} rows without are left out" if either < seen.count else ""
        return Column(kind="label", why=f"0 and 1, {seen.ones / either:.1%} of them 1{others}", **common)
    if seen.missing == seen.count:
        return Column(kind="ignored", why="every value is missing", **common)
    if int(seen.distinct) == 1 and not seen.missing:
        return Column(kind="ignored", why="one value in all rows", **common)
    if unit := _unit(seen):
        return Column(kind="timestamp", unit=unit, why=_TIMES[unit], **common)
    sound = seen.numeric and not seen.unparsed and not seen.missing
    if sound and _WEIGHT.match(seen.name) and seen.minimum >= 0:
        return Column(kind="weight", why="its name, and no value below 0", **common)
    if seen.numeric and len(seen.numbers) and not (seen.whole and _IDENTITY.search(seen.name)):
        encoding, why = _encoding_of_numbers(seen)
        stray = f"; {seen.unparsed:,} values that are no numbers count as missing" if seen.unparsed else ""
        return Column(kind="number", encoding=encoding, why=why + stray, **common)
    if why := _unread(seen):
        return Column(kind="ignored", why=why, **common)
    if not seen.numeric and (separator := _separator(seen)):
        return _list_column(seen, separator, common)
    encoding, why = _encoding_of_categories(seen.distinct)
    named = "whole numbers under the name of an id; " if seen.numeric else ""
    return Column(kind="category", encoding=encoding, why=named + why, **common)


def _only(kind: str, columns: Sequence[Column], score: Callable[[Column], Any]) -> list[Column]:
    """Keeps the best column of a kind that may occur once in a schema; the others are ignored."""
    found = [each for each in columns if each.kind == kind]
    if len(found) < 2:
        return list(columns)
    kept = max(found, key=score)
    why = f"{kept.name} is taken as the {kind}, of which a row has one"
    return [
        replace(each, kind="ignored", unit="", why=f"{each.why}; {why}") if each.kind == kind and each != kept else each
        for each in columns
    ]


def _of_tower(column: Column) -> Column:
    """Assigns the tower by the name of the column: item, else user."""
    if column.kind not in FEATURES:
        return column
    of_item = _ITEM.search(column.name) and not _OF_USER.search(column.name)
    return replace(column, tower="item" if of_item else "user")


_TIMES = {
    "s": "whole numbers of about the seconds since 1970",
    "ms": "whole numbers of about the milliseconds since 1970",
    "text": "dates in ISO 8601",
}


def _unit(seen: _Seen) -> str:
    """Returns the unit of a timestamp; "" for other columns."""
    if seen.dated and not seen.numeric:
        return "text"
    if seen.unparsed or not (seen.numeric and seen.whole and _TIME.search(seen.name)):
        return ""
    if seen.minimum >= 3e8 and seen.maximum < 1e10:
        return "s"
    return "ms" if seen.minimum >= 3e11 and seen.maximum < 1e13 else ""


def _unread(seen: _Seen) -> str:
    """Returns the reason why a column of texts cannot be learned from; "" for usable columns."""
    present = seen.count - seen.missing
    if seen.date and not seen.numeric:
        return "dates, but not in ISO 8601 as 2024-01-31 12:00 is: not read, rows count in the order of the file"
    if 2 * seen.commas > present and seen.commas + seen.parsed >= (1 - STRAY) * present:
        return "numbers with a decimal comma: not read, write 6.5 for 6,5 (if they are lists, make it categories)"
    if seen.distinct.values is None and int(seen.distinct) > OWN * present:
        return f"about {int(seen.distinct):,} values in {present:,} rows: nearly every row has one of its own"
    return ""


def _separator(seen: _Seen) -> str:
    """Returns the separator of the items of a list; "" for a column without lists.

    Items occur in many lists, so they are fewer than the distinct values. A list of words differs from a sentence by
    its items: where the separator is a space, they must be numbers.
    """
    best, least = "", int(seen.distinct)
    for each in SEPARATORS:
        items = seen.items[each]
        if seen.with_separator[each] < 0.02 * (seen.count - seen.missing) or int(items) >= 0.5 * int(seen.distinct):
            continue
        if each == " " and not (items.values and all(value.isdigit() for value in items.values if value)):
            continue
        if int(items) < least:
            best, least = each, int(items)
    return best


def _list_column(seen: _Seen, separator: str, common: dict[str, Any]) -> Column:
    items, lengths = seen.items[separator], seen.lengths[separator]
    length = int(np.searchsorted(np.cumsum(lengths), 0.99 * lengths.sum()))
    encoding, why = _encoding_of_categories(items)
    return Column(
        **{**common, "distinct": int(items)},
        kind="categories",
        encoding=encoding,
        separator=separator,
        pooling="mean",
        length=max(length, 1),
        why=f"{separator!r} in {seen.with_separator[separator]:,} rows; {why}; 99% of the lists have up to {length}",
    )


def _encoding_of_categories(found: _Distinct) -> tuple[dict[str, Any], str]:
    count = int(found)
    if found.values is not None:
        values = sorted((each for each in found.values if each), key=lambda each: (-found.values[each], each))  # type: ignore[index]
        return {"type": "vocabulary", "values": values}, f"{count:,} values, listed by how often they occur"
    buckets = min(1 << int(np.ceil(np.log2(2 * count))), MOST_BUCKETS)
    return {"type": "hash", "buckets": buckets}, f"about {count:,} values: two buckets or more to each"


def _encoding_of_numbers(seen: _Seen) -> tuple[dict[str, Any], str]:
    x = seen.numbers
    low, high = float(seen.minimum), float(seen.maximum)
    middle, far = (float(each) for each in np.quantile(x, [0.5, 0.99]))
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
        return {"type": "quantile", "quantiles": [float(each) for each in points]}, "values far beyond most others"
    return {"type": "standard", "mean": float(x.mean()), "deviation": deviation}, f"{low:g} to {high:g}"


def _heavy(x: NDArray[np.float64], deviation: float) -> bool:
    """Whether values lie ten deviations and more from the mean."""
    return bool(np.abs(x - x.mean()).max() > 10 * deviation)
