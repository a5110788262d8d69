"""Statistics of a column of texts, collected in one pass and in constant memory."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zoo.recommenders.data.cell_values import LIST, canonical
from zoo.recommenders.data.columns.dense import VectorStatistics
from zoo.recommenders.data.columns.times import CalendarUnits

VOCABULARY = 10_000  # values of a category that are listed; more are hashed
SKETCH = 4096  # smallest hashes kept to estimate how many values there are: an error of 1.6%
SAMPLE = 100_000  # numbers kept for means and quantiles, at least, where there are more: drawn at random
MAX_LIST_ITEMS = 50  # items of a list that are read, at most
STRAY = 0.01  # of a column of numbers that may be something else, which counts as missing
EXAMPLES = 1000  # items of a list that are kept
STRAYS = 3  # values that are no numbers and are kept
SEPARATORS = (LIST, ";", ",", " ")
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_AMOUNT = r"\.?\d[\d.,]*"  # beside a currency or a percent sign
# (1.5), a long minus, and digits of other scripts
_TYPESET = rf"\({_AMOUNT}\)|\x{{2212}}{_AMOUNT}|[\p{{Nd}}.,]*[^\x00-\x7F\P{{Nd}}][\p{{Nd}}.,]*"
_GROUPS = r"\d{1,3}(,\d{3})+\.\d+|\d{1,3}(\.\d{3})+,\d+"
_FORMS = rf"{_TYPESET}|\p{{Sc}}[\s\pZ]*[+-]?{_AMOUNT}|{_AMOUNT}[\s\pZ]*(%|\p{{Sc}})|{_GROUPS}|\d+\.?\d*|\.\d+"
_DECORATED = rf"^[\s\pZ]*[+-]?({_FORMS})[\s\pZ]*$"
INFINITY = r"^[+-]?(?i:inf|infinity)$"
_COMMA = r"^[+-]?\d+,\d+$"  # a number as much of Europe writes it
_THOUSANDS = r"^[+-]?[1-9]\d{0,2},\d{3}$"  # of these, a number that may have groups of thousands
_DAY = r"(\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{4})"
_ZONE = r" ?([A-Z]{1,5}|[A-Z][a-z]+/\w+|[+-]\d\d(:?\d\d)?)"  # also by name: CET, Europe/Berlin
# also dates that are no ISO 8601
_DATE = f"^{_DAY}" rf"([T ]\d{{1,2}}:\d\d(:\d\d(\.\d+)?)?( ?[AaPp][Mm])?({_ZONE})?)?$"
_ISO = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?( ?(Z|UTC|GMT|[+-]\d\d(:?\d\d)?))?)?$"
_PADDED = r"^0\d+$"  # 00123 is a code
_ITEM_WITH_WEIGHT = r"[^:|;, ]+:[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_WEIGHTED = f"^{_ITEM_WITH_WEIGHT}([|;, ] ?{_ITEM_WITH_WEIGHT})*$"


class Distinct:
    """Counts distinct values: exactly up to `VOCABULARY`, then by a sketch of k minimum values.

    Bar-Yossef et al. 2002, "Counting distinct elements in a data stream".

    Attributes:
        values: {value: occurrences}; None beyond `VOCABULARY`.
        least: The smallest hashes of the values, ascending, uint64 of up to `SKETCH`.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] | None = {}
        self.least = np.empty(0, np.uint64)

    def add(self, values: pa.Array) -> None:
        """Adds values.

        Args:
            values: Text array without null.
        """
        counts = values.value_counts()
        texts, numbers = counts.field(0).to_pylist(), counts.field(1).to_pylist()
        hashes = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts]
        self.least = np.unique(np.concatenate([self.least, np.array(hashes, np.uint64)]))[:SKETCH]
        if self.values is not None:
            for text, number in zip(texts, numbers, strict=True):
                self.values[text] = self.values.get(text, 0) + number
            if len(self.values) > VOCABULARY:
                self.values = None

    def __int__(self) -> int:
        if self.values is not None:
            return len(self.values)
        return round((SKETCH - 1) / (float(self.least[-1]) / 2**64))


class ColumnStatistics:
    """Statistics of the values of a column.

    Args:
        name: Name of the column.
        rows: Number of rows before the first batch; the column is missing there.

    Attributes:
        name: Name of the column.
        count: Number of rows.
        missing: Number of missing values.
        distinct: Distinct values.
        whole: Whether all numbers are whole.
        dated: Whether all values are dates in ISO 8601.
        date: Whether all values are dates in any notation.
        counting: Whether every number is its predecessor plus 1, or the first number again.
        runs: Number of times that such numbers begin, with `counting`.
        padded: Number of values with leading zeros.
        parsed: Number of values that are numbers.
        infinite: Number of values that are infinite, which count as missing in a column of numbers.
        unparsed: Number of values that are neither.
        strays: The first of these values, up to `STRAYS` distinct ones.
        commas: Number of values with a decimal comma.
        thousands: Number of these values with three digits behind the comma.
        decorated: Number of values that are numbers with blanks, a currency, a percent sign or groups of thousands.
        example: The first of these values.
        weighted: Number of values that are items with weights, such as t1:0.53|t2:0.10.
        zeros: Number of values that are 0.
        ones: Number of values that are 1.
        numbers: Random sample of the numbers, float64.
        minimum: Smallest number.
        maximum: Largest number.
        calendar: Units in which all numbers are dates.
        vectors: Statistics of the values as vectors of numbers; of dense ones there are no further statistics.
        items: Distinct items by separator.
        with_separator: Number of values with several items, by separator.
        lengths: Histogram of the number of items, by separator.
        examples: The first items, by separator.
    """

    def __init__(self, name: str, rows: int = 0) -> None:
        self.name, self.count, self.missing = name, rows, rows
        self.distinct = Distinct()
        self.whole = self.dated = self.date = self.counting = True
        self.strays: list[str] = []
        self.parsed = self.infinite = self.unparsed = self.commas = self.padded = 0
        self.decorated = self.thousands = self.weighted = 0
        self.example = ""
        self.zeros = self.ones = 0
        self.runs = 1
        self.numbers = np.empty(0)
        self.minimum, self.maximum = np.inf, -np.inf
        self.calendar = CalendarUnits()
        self.vectors = VectorStatistics()
        self._ends = np.empty(0)  # the first number of all, and the last one so far
        # Each number draws another at random, and stays while that is below the share: rows in turns (1, 0, 1, 0) are
        # drawn like any others, and the size of batches changes nothing.
        self._random, self._drawn, self._share = np.random.default_rng(0), np.empty(0), 1.0
        self.items = {separator: Distinct() for separator in SEPARATORS}
        self.with_separator = dict.fromkeys(SEPARATORS, 0)
        self.lengths = {separator: np.zeros(MAX_LIST_ITEMS + 1, np.int64) for separator in SEPARATORS}
        self.examples: dict[str, list[str]] = {separator: [] for separator in SEPARATORS}

    @property
    def present(self) -> int:
        """Number of values."""
        return self.count - self.missing

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, up to `STRAY` of them."""
        return self.parsed > 0 and self.unparsed <= STRAY * (self.parsed + self.unparsed)

    def add(self, column: pa.Array) -> None:
        """Adds a batch.

        Args:
            column: Text array [n], null where missing.
        """
        before = self.count
        self.count += len(column)
        self.missing += column.null_count
        texts = column.drop_null()
        if not len(texts):
            return
        self.vectors.add(column, before)
        if self.vectors.dense:
            self.unparsed += len(texts)
            return
        self.distinct.add(texts)
        is_number = pc.match_substring_regex(texts, NUMBER)
        numbers = texts.filter(is_number)
        self.parsed += len(numbers)
        if len(numbers) < len(texts):
            self._add_strays(texts.filter(pc.invert(is_number)))
        self.padded += pc.sum(pc.match_substring_regex(numbers, _PADDED)).as_py() or 0
        self._add_numbers(numbers.cast(pa.float64()).to_numpy(zero_copy_only=False))
        self.dated = self.dated and bool(pc.all(pc.match_substring_regex(texts, _ISO)).as_py())
        self.date = self.date and bool(pc.all(pc.match_substring_regex(texts, _DATE)).as_py())
        if not self.numeric:
            self.commas += pc.sum(pc.match_substring_regex(texts, _COMMA)).as_py()
            self.thousands += pc.sum(pc.match_substring_regex(texts, _THOUSANDS)).as_py()
            self.weighted += pc.sum(pc.match_substring_regex(texts, _WEIGHTED)).as_py()
            for item in list(self.items):
                self._add_items(texts, item)

    def _add_strays(self, texts: pa.Array) -> None:
        """Counts texts that are no numbers."""
        infinite = pc.match_substring_regex(texts, INFINITY)
        count = pc.sum(infinite).as_py()
        self.infinite, self.unparsed = self.infinite + count, self.unparsed + len(texts) - count
        decorated = texts.filter(pc.match_substring_regex(texts, _DECORATED))
        self.decorated += len(decorated)
        if len(decorated) and not self.example:
            self.example = decorated[0].as_py()
        if len(self.strays) < STRAYS:
            others = pc.unique(texts.filter(pc.invert(infinite))).to_pylist()
            self.strays = list(dict.fromkeys([*self.strays, *others]))[:STRAYS]

    def _add_numbers(self, numbers: NDArray[np.float64]) -> None:
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return
        self.whole = self.whole and bool((numbers == np.rint(numbers)).all())
        self.calendar.add(numbers)
        if self.counting:
            run = np.concatenate([self._ends[1:], numbers])
            first = self._ends[0] if len(self._ends) else numbers[0]
            again = (np.diff(run) != 1) & (run[1:] == first)
            self.counting, self.runs = bool(((np.diff(run) == 1) | again).all()), self.runs + int(again.sum())
            self._ends = np.array([first, numbers[-1]])
        self.minimum, self.maximum = min(self.minimum, numbers.min()), max(self.maximum, numbers.max())
        self.zeros += int((numbers == 0).sum())
        self.ones += int((numbers == 1).sum())
        drawn = self._random.random(len(numbers))
        kept = drawn < self._share
        self.numbers = np.concatenate([self.numbers, numbers[kept]])
        self._drawn = np.concatenate([self._drawn, drawn[kept]])
        while len(self.numbers) > 2 * SAMPLE:
            self._share /= 2
            kept = self._drawn < self._share
            self.numbers, self._drawn = self.numbers[kept], self._drawn[kept]

    def _add_items(self, texts: pa.Array, separator: str) -> None:
        lists = pc.split_pattern(texts, separator)
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        self.with_separator[separator] += int((lengths > 1).sum())
        self.lengths[separator] += np.bincount(np.minimum(lengths, MAX_LIST_ITEMS), minlength=MAX_LIST_ITEMS + 1)
        if self.with_separator[separator]:
            items = pc.utf8_trim_whitespace(lists.flatten())
            examples = self.examples[separator]
            examples += items.slice(0, EXAMPLES - len(examples)).to_pylist()
            self.items[separator].add(canonical(items, separator).drop_null())
