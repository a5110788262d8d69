"""Vectors of numbers in one column, such as pre-trained embeddings of the items: dense inputs of a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.cell_values import parse_floats
from zoo.recommenders.data.schema import Column
from zoo.recommenders.data.transforms import MAX_DEVIATIONS

Floats = NDArray[np.float64]
HEAD = 64  # values that show whether a column may have vectors
MOSTLY = 0.9  # of them that have the same number of numbers
DIGITS = 7  # of means and deviations in a schema
EXAMPLE = 40  # characters of a value in messages
_BRACKETS = " \t\r\n[]()"
_BETWEEN = r"[\s,;|]+"
_DECIMAL_COMMA = r"\d,\d+\s*[;|]|\d,\d+\s+[-+.\d]"  # 0,5;0,7 may be two numbers or four
_ONE_NUMBER = (
    r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+\s*$|^\s*[+-]?\d{1,3}(,\d{3})+\.\d+\s*$"  # 0,5 or 1.000,50 or 1,000.50
)


def parse_vectors(texts: pa.Array) -> tuple[Floats, NDArray[np.int64]]:
    """Parses vectors: numbers between blanks, commas, semicolons or |, with or without brackets around them.

    Texts that may have decimal commas are no vectors.

    Args:
        texts: Text array [n], null where missing.

    Returns:
        The numbers of all vectors, float64 [m], NaN for text that is no finite number; and the number of numbers in
        every vector, int64 [n], 0 where missing or empty.
    """
    if pc.any(pc.match_substring(texts, ",")).as_py():
        ambiguous = pc.match_substring_regex(texts, f"{_DECIMAL_COMMA}|{_ONE_NUMBER}")
        texts = pc.if_else(ambiguous, pa.scalar("?"), texts)
    texts = pc.utf8_trim(texts, _BRACKETS)
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    lists = pc.split_pattern(pc.replace_substring_regex(texts, _BETWEEN, " "), " ")
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return parse_floats(lists.flatten()), lengths


def vectors_of(texts: pa.Array, width: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Parses vectors of one width.

    Args:
        texts: Text array [n], null where missing.
        width: Numbers of a vector.

    Returns:
        Vectors, float64 [n, width], NaN where a vector is missing or faulty; the indices of the faulty ones, int64 [m],
        which have fewer or more finite numbers; and the number of finite numbers in every vector, int64 [n].
    """
    numbers, lengths = parse_vectors(texts)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    finite = np.bincount(rows[np.isfinite(numbers)], minlength=len(lengths))
    sound = (lengths == width) & (finite == width)
    out = np.full((len(lengths), width), np.nan)
    out[sound] = numbers[np.repeat(sound, lengths)].reshape(-1, width)
    return out, np.flatnonzero((lengths > 0) & ~sound), finite


def fault(texts: pa.Array, row: int, count: int, width: int) -> str:
    """Describes a faulty vector.

    Args:
        texts: The column.
        row: Index of the vector.
        count: Its number of finite numbers.
        width: The expected number.
    """
    text = texts[row].as_py()
    example = repr(text if len(text) <= EXAMPLE else f"{text[:EXAMPLE]}...")
    return f"found {count} numbers in {example}, expected {width}"


def numbers_of(column: Column) -> Iterator[Column]:
    """Returns the numbers of a column as columns of their own.

    Args:
        column: A number, or a vector, whose first number has its missing-value indicator.

    Returns:
        Columns of the kind number under the name of the column.
    """
    if column.kind == "number":
        yield column
        return
    for i, (mean, deviation) in enumerate(zip(column.encoding["means"], column.encoding["deviations"], strict=True)):
        encoding = {"type": "per-element", "mean": mean, "deviation": deviation}
        yield Column(column.name, "number", missing=0 if i else column.missing, encoding=encoding, tower=column.tower)


def encode(column: Column, texts: pa.Array, index: NDArray[np.int64], faulty: list[tuple[int, str]] | None) -> Floats:
    """Encodes vectors by the mean and the deviation of every number.

    Args:
        column: Column of the schema.
        texts: Text array [n], null where missing.
        index: Positions of the rows in the input, int64 [n].
        faulty: Takes (row, message) of the vectors of another width, which count as missing; None: the first raises.

    Returns:
        float64 [n, width], NaN where missing.

    Raises:
        RequestError: A vector has another width, and `faulty` is None.
    """
    width = len(column.encoding["means"])
    vectors, bad, counts = vectors_of(texts, width)
    for row in bad.tolist():
        message = f"column {column.name}: {fault(texts, row, int(counts[row]), width)}"
        if faulty is None:
            raise RequestError(f"row {index[row] + 1}, {message}")
        faulty.append((row, message))
    vectors -= np.array(column.encoding["means"])
    vectors /= np.array(column.encoding["deviations"])
    return np.clip(vectors, -MAX_DEVIATIONS, MAX_DEVIATIONS, out=vectors)


class VectorStatistics:
    """Mean and standard deviation of every number of a column of vectors, in one pass.

    The moments of batches are joined as Chan et al. 1979 do, "Updating formulae and a pairwise algorithm for computing
    sample variances".

    Attributes:
        width: Numbers of a vector; 0: the first values are no vectors of one width.
        whole: Whether all numbers are whole.
        fault: Description of the first value that is no vector of this width; "" without one.
    """

    def __init__(self) -> None:
        self.width, self.whole, self.fault = 0, True, ""
        self._open, self._count = True, 0
        self._mean = self._squares = np.zeros(0)

    @property
    def dense(self) -> bool:
        """Whether the values so far are vectors with fractions, not lists of items."""
        return bool(self.width) and not self.fault and not self.whole

    def add(self, column: pa.Array, before: int) -> None:
        """Adds a batch.

        Args:
            column: Text array [n], null where missing.
            before: Number of rows before the batch.
        """
        if not self._open:
            return
        if not self.width:
            numbers, lengths = parse_vectors(column.drop_null().slice(0, HEAD))
            self.width = int(np.median(lengths)) if len(lengths) else 0
            usual = np.count_nonzero(lengths == self.width) >= MOSTLY * len(lengths)
            self._open = bool(self.width > 1 and usual and np.isfinite(numbers).mean() >= MOSTLY)
            if not self._open:
                self.width = 0
                return
        vectors, faulty, counts = vectors_of(column, self.width)
        vectors = vectors[~np.isnan(vectors[:, 0])]
        self.whole = self.whole and bool((vectors == np.rint(vectors)).all())
        self._join(vectors)
        if len(faulty):
            row = int(faulty[0])
            self.fault = f"row {before + row + 1}: {fault(column, row, int(counts[row]), self.width)}"
            self._open = False

    def _join(self, vectors: Floats) -> None:
        """Adds the moments of vectors."""
        if not len(vectors):
            return
        count, total = len(vectors), self._count + len(vectors)
        mean = vectors.mean(axis=0)
        squares = ((vectors - mean) ** 2).sum(axis=0)
        apart = mean - self._mean if self._count else np.zeros(self.width)
        self._squares = squares + (self._squares + apart**2 * self._count * count / total if self._count else 0)
        self._mean = mean if not self._count else self._mean + apart * count / total
        self._count = total

    def encoding(self) -> dict[str, object]:
        """Returns the encoding of a schema for these vectors."""
        deviations = np.sqrt(self._squares / self._count)
        deviations[deviations == 0] = 1
        moments = {"means": self._mean, "deviations": deviations}
        rounded = {name: [float(f"{x:.{DIGITS}g}") for x in values] for name, values in moments.items()}
        return {"type": "per-element", **rounded}
