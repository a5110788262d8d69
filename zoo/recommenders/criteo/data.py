"""Rows of the Criteo format, read from any source into arrays, in constant memory.

A row is a label (0 or 1; optional), 13 numbers and 26 categories, tab separated, an empty field where a value is
missing (Kaggle's Display Advertising Challenge, 2014). Categories are hashed into buckets while reading; numbers stay
raw until `zoo.recommenders.criteo.features` brings them to [0, 1].

`zoo.recommenders.data.line_reader` reads them, by a schema of plain numbers and hash buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import Encoding
from zoo.recommenders.data.line_reader import read_lines
from zoo.recommenders.data.number_parsing import Floats, Ints
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.data.sources import criteo_columns

NUMERIC, CATEGORICAL, BUCKETS = 13, 26, 1000


class Counts(TypedDict):
    """Sizes of a row, as `read_rows` takes them."""

    numeric: int
    categorical: int
    buckets: int | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows as read: `numbers` raw, `ids` hashed.

    numbers: float32 [n, numeric], NaN = missing (exact up to 2^24; the relative error of larger ones, 6e-8, vanishes in
    their logarithm).
    ids: int32 [n, categorical], bucket of each category, an empty one being the empty string's bucket.
    labels: float32 [n], 0 or 1; None where the input has none.
    index: int64 [n], 0-based position of each row in the whole input, rows left out counted.
    """

    numbers: Floats
    ids: npt.NDArray[np.int32]
    labels: Floats | None
    index: Ints

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(
            self.numbers[rows], self.ids[rows], None if self.labels is None else self.labels[rows], self.index[rows]
        )

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """One Rows of several (at least one), in order; all of them labelled or none."""
        if len(parts) == 1:
            return parts[0]
        labels = [part.labels for part in parts if part.labels is not None]
        return Rows(
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(labels) if labels else None,
            np.concatenate([part.index for part in parts]),
        )


def read_rows(
    sources: Any,
    *,
    numeric: int = NUMERIC,
    categorical: int = CATEGORICAL,
    buckets: int | Sequence[int] = BUCKETS,
    batch_rows: int = 65536,
    on_error: str = "raise",
    errors: ErrorLog | None = None,
    seconds: defaultdict[str, float] | None = None,
    with_label: bool | None = None,
) -> Iterator[Rows]:
    """Read rows as a stream of `Rows` of `batch_rows` rows each (the last one shorter), in input order and constant
    memory.

    `buckets` is that of all categories, or a sequence with that of each, see `hashing.buckets_of`. `sources` is one or
    a list of: a TSV file, plain or gzip (told by its content); a .parquet file; "-" for stdin; a folder written by
    `datasets.save_to_disk` or a data set on the hub, "org/name", both optionally with ":split" (parquet and data sets:
    columns label / click / clicked, I1.. or integer_feature_1.., C1.. or categorical_feature_1.. in any case, else 39
    or 40 columns by order); the bytes of a TSV file as io.BytesIO; an Arrow table. Or it is a list of raw rows: each a
    tab separated str or bytes, or a sequence of values where None, NaN and "" are missing. Whether rows have a label is
    decided by the first row's column count, unless `with_label` says it, and must hold for all of them.

    A row with a wrong column count, a number that is none (plain integers and decimals are; nan and inf are not), or a
    label other than 0 and 1 raises RequestError with file and line; with on_error="skip" it is left out and counted in
    `errors`, unless nearly all of the first million rows are such. Input that is missing, empty, truncated, of another
    kind, or without one complete row raises RequestError; a hub that fails on the way raises ZooError.
    `seconds["read"]` counts the time in which the sources gave their bytes or tables.
    """
    if on_error not in ("raise", "skip"):
        raise RequestError(f"found on_error {on_error!r}, wanted raise or skip")
    log = None if on_error == "raise" else ErrorLog() if errors is None else errors
    encoding = Encoding(_schema(numeric, categorical, buckets))
    batches = read_lines(encoding, sources, batch_rows=batch_rows, errors=log, seconds=seconds, with_label=with_label)
    return (Rows(each.numbers, each.ids, each.labels, each.index) for each in batches)


def _schema(numeric: int, categorical: int, buckets: int | Sequence[int]) -> Schema:
    """Numbers as they are, NaN where missing; categories hashed."""
    number = {"type": "value", "fill": np.nan}
    shared = isinstance(buckets, int)
    sizes = [buckets] * categorical if isinstance(buckets, int) else list(buckets)
    if len(sizes) != categorical:
        raise RequestError(f"found the buckets of {len(sizes)} categories, wanted those of {categorical}")
    hashed = iter({"type": "hash-bucket", "buckets": each, "missing_row": not shared} for each in sizes)
    columns = criteo_columns(numeric, categorical)
    encodings = (number if kind == "number" else next(hashed) for kind, _ in columns)
    return Schema(
        tuple(Column(name, kind, encoding=how) for (kind, name), how in zip(columns, encodings, strict=True)),
        header=False,
    )
