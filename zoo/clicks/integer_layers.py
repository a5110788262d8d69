"""Real weights and tables as the integers of a click program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.clicks.operators import ZERO, LinearLayer
from pipelines.kernels.clicks.program import CODES
from pipelines.quantization.scales import weight_qparams
from zoo.clicks.expressions import Field
from zoo.clicks.fold import BLOCK, FINEST

Array = NDArray[Any]
Floats = NDArray[np.float64]

MOST = 2**31 * 0.99  # what sums of weights may reach, so that rounding them does not overflow


@dataclass(frozen=True, eq=False)
class Table:
    """Folded fields: rows, the first row of each, what an entry is worth, and what the rows leave out, by column."""

    table: Array | None
    offsets: list[int]
    step: Floats | None  # of a column
    centre: Floats | float


def folded_table(folded: Sequence[tuple[Field, int]], weight: Floats, unit: Floats, wide: bool) -> Table:
    """The products of the fields' tables and their weights as int8, as `fold_layer` of `zoo.clicks.fold` makes them, or
    as int16.
    """
    if not folded:
        return Table(None, [], None, 0.0)
    low, high = np.full((2, len(folded), weight.shape[1]), [[[np.inf]], [[-np.inf]]])
    for number, (part, start) in enumerate(folded):
        for _, block in products(part, weight[start : start + part.width]):
            low[number] = np.minimum(low[number], block.min(axis=0))
            high[number] = np.maximum(high[number], block.max(axis=0))
    middle = (low + high) / 2
    top = (2**15 - 1) // len(folded) if wide else 127
    step = np.maximum((high - low).max(axis=0) / (2 * top), FINEST / 256 * unit)
    if not np.isfinite(step).all():
        raise RequestError("its tables or weights are not finite")
    heights = [len(part.table) for part, _ in folded]
    offsets = np.cumsum([0, *heights])[:-1].tolist()
    table = np.zeros((sum(heights), weight.shape[1]), np.int16 if wide else np.uint8)
    for number, (part, start) in enumerate(folded):
        for at, block in products(part, weight[start : start + part.width]):
            rows = np.clip(np.rint((block - middle[number]) / step), -top, top) + (0 if wide else ZERO)
            table[offsets[number] + at : offsets[number] + at + len(block)] = rows
    return Table(table, offsets, step, middle.sum(axis=0))


def products(part: Field, weight: Floats) -> Iterator[tuple[int, Floats]]:
    """(first row, block of rows of table x weight)."""
    for start in range(0, len(part.table), BLOCK):
        yield start, part.table[start : start + BLOCK].astype(np.float64) @ weight


def integer_weights(matrix: Floats, step: Floats | None) -> tuple[Array, Floats, int]:
    """(int16 weights, scale of the sums, shift) of real weights a code; step: of the folded table.

    As fine as int16 and the int32 sums allow.
    """
    largest, reach = np.abs(matrix).max(axis=0, initial=0), CODES * np.abs(matrix).sum(axis=0)
    if step is None:
        scale = np.maximum(np.maximum(largest / 32767, reach / MOST), 1e-30)
        return np.rint(matrix / scale).astype(np.int16), scale, 0
    for shift in range(14, -1, -1):
        scale = step * 2.0**-shift
        room = MOST - (2**15 << shift)
        if (largest / scale <= 32767).all() and (reach / scale < room).all():
            return np.rint(matrix / scale).astype(np.int16), scale, shift
    raise RequestError("the weights of its codes do not fit int16 beside those of its tables")


def dense_layer(weight: Floats, bias: Floats, scale: float, unit: float, form: str) -> LinearLayer:
    """A layer on a hidden one of this scale."""
    scales, codes = weight_qparams(weight.astype(np.float32), 1)
    factor = scales.astype(np.float64) * scale
    whole = np.rint(bias / factor)
    if not np.abs(whole).max() < 2**31 - 255 * 127 * len(weight):
        raise RequestError("a linear layer can overflow 32 bits")
    zero = None if form == "f4" else 0
    return LinearLayer(codes, whole.astype(np.int32), (factor / unit).astype(np.float32), zero, 0)


def largest(table: Array) -> float:
    """The largest magnitude in a table."""
    return float(max(table.max(), -table.min()))


def positive(scale: float) -> float:
    """A scale, 1 where all is zero. Raises RequestError where it is not finite."""
    if not np.isfinite(scale):
        raise RequestError("a range is not finite")
    return scale if scale > 1e-30 else 1.0
