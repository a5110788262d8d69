"""Embedding bags: pooled rows of quantized tables, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array
from pipelines.kernels.extension import required
from pipelines.kernels.recommenders.tables.quantized_rows import QuantizedRows

POOLS = ("sum", "mean")


@dataclass(frozen=True)
class Bag:
    """A table and the rows of it that a sample pools.

    Attributes:
        table: The table.
        count: Ids of a sample, columns of the batch.
        pool: "sum" or "mean".
    """

    table: QuantizedRows
    count: int = 1
    pool: str = "sum"

    def check(self) -> None:
        """Checks the bag.

        Raises:
            RequestError: The table, the count or the pool is not valid.
        """
        self.table.check()
        self.table.check_sums(self.count)
        if self.pool not in POOLS:
            raise RequestError(f"found the pool {self.pool!r}; expected sum or mean")


def pooled(bags: Sequence[Bag], ids: Array) -> NDArray[np.float32]:
    """Computes bags in numpy; this defines the bits of `embedding_bags`.

    Args:
        bags: The bags.
        ids: Integers [n, sum of the counts], bag after bag, all in range.

    Returns:
        float32 [n, sum of the widths].
    """
    parts, column = [], 0
    for bag in bags:
        factor = float(np.float32(1) / np.float32(bag.count)) if bag.pool == "mean" else 1.0
        parts.append(bag.table.pooled(ids[:, column : column + bag.count], factor))
        column += bag.count
    return np.concatenate(parts, axis=1)


def embedding_bags(bags: Sequence[Bag], isa: str = "") -> Any:
    """Creates the native object of bags.

    The object is called as (ids int32 or int64 [n, sum of the counts], C-contiguous) and returns float32 [n, sum of the
    widths]. It raises IndexError for an id outside its table, before a row is read with it. Tables are not copied.

    Args:
        bags: The bags.
        isa: Instruction set of the kernels, one of `pipelines.kernels.extension.isas`; "" for the fastest.

    Returns:
        Native `EmbeddingBags`.

    Raises:
        RequestError: A bag is not valid, or there are no native kernels.
    """
    made = required().EmbeddingBags(isa)
    for bag in bags:
        bag.check()
        table = bag.table
        made.add(
            table.data,
            table.rows,
            table.width,
            table.bits,
            table.scale_unit,
            table.bias_unit,
            bag.count,
            bag.pool == "mean",
        )
    return made
