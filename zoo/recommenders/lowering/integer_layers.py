"""Quantizes float weights and tables to the integers of a native program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.machine import BLOCK_ROWS
from pipelines.kernels.recommenders.operators import ZERO, LinearLayer
from pipelines.kernels.recommenders.steps import CODES
from pipelines.quantization.qdq.scales import weight_qparams
from zoo.recommenders.lowering.expressions import Field

Array = NDArray[Any]
Floats = NDArray[np.float64]

BLOCK = 8192  # table rows multiplied at once, in float64
FINEST = 1 / 64  # table scales below this part of a layer's scale gain nothing
MAX_SUM = 2**31 * 0.99  # limit of sums of weights, so that rounding them does not overflow


@dataclass(frozen=True, eq=False)
class Integers:
    """Integer weights of a `Mixed` step.

    Attributes:
        table: Rows of the folded fields, int16 or uint8 [rows, N]; None if no field is folded.
        offsets: First row of every folded field.
        weight: Weights of the codes, int16 [codes, N].
        scale: Scale of the sums, float64 [N].
        centre: Constant that the rows leave out, float64 [N].
        shift: Steps of rows and of weights differ by 2^shift.
    """

    table: Array | None
    offsets: list[int]
    weight: Array
    scale: Floats
    centre: Floats
    shift: int


def mixed_layer(
    matrix: Floats,
    folded: Sequence[tuple[Field, int]],
    weight: Floats,
    fine: Floats,
    wide: bool,
    ranges: Callable[[Floats, Floats], tuple[Floats, Floats]] = lambda low, high: (low, high),
) -> Integers:
    """Quantizes linear layers that read codes and folded fields.

    A row of the folded table is the product of embedding and weight in float64, minus the middle c_f of the field's
    products, which keeps its scale small. With e_f = E_f[id_f] and P_f = E_f W_f:
    [e_1 .. e_F] W = sum_f (P_f[id_f] - c_f) + sum_f c_f. The steps of rows and of weights differ by 2^shift in every
    column. Columns whose weights then do not fit get larger steps. The shift has the least squared error.

    Args:
        matrix: Weights of the codes in units of the result, float64 [codes, N].
        folded: Folded fields, with the first row of `weight` of every field.
        weight: Weights of the folded fields, float64 [inputs, N].
        fine: Smallest useful step of every result, float64 [N].
        wide: Whether rows are int16; else uint8.
        ranges: Returns the ranges of the rows to use, see `TableScales.ranges`.

    Returns:
        Integer rows and weights with their scales.

    Raises:
        RequestError: A table or weight is not finite.
    """
    largest, reach = np.abs(matrix).max(axis=0, initial=0), CODES * np.abs(matrix).sum(axis=0)
    if not folded:
        scale = np.maximum(np.maximum(largest / 32767, reach / MAX_SUM), 1e-30)
        return Integers(None, [], np.rint(matrix / scale).astype(np.int16), scale, np.zeros(len(scale)), 0)
    low, high = np.full((2, len(folded), weight.shape[1]), [[[np.inf]], [[-np.inf]]])
    for number, (part, start) in enumerate(folded):
        for _, block in products(part, weight[start : start + part.width]):
            low[number] = np.minimum(low[number], block.min(axis=0))
            high[number] = np.maximum(high[number], block.max(axis=0))
    low, high = ranges(low, high)
    middle, top = (low + high) / 2, (2**15 - 1) // len(folded) if wide else 127
    finest = np.maximum((high - low).max(axis=0) / (2 * top), fine)
    if not np.isfinite(finest).all():
        raise RequestError("its tables or weights are not finite")
    least = np.inf
    for number in range(15):
        room = MAX_SUM - (2**15 << number)
        fits = np.maximum(largest / 32767, reach / room) * 2.0**number
        steps = np.maximum(finest, fits)
        noise = (steps**2 * (len(folded) + len(matrix) * (CODES / 2) ** 2 * 4.0**-number) / fine**2).sum()
        if noise < least:
            least, shift, step = noise, number, steps
    offsets = np.cumsum([0, *(len(part.table) for part, _ in folded)])
    table = np.zeros((offsets[-1], weight.shape[1]), np.int16 if wide else np.uint8)
    for number, (part, start) in enumerate(folded):
        for row, block in products(part, weight[start : start + part.width]):
            rows = np.clip(np.rint((block - middle[number]) / step), -top, top) + (0 if wide else ZERO)
            table[offsets[number] + row : offsets[number] + row + len(block)] = rows
    scale = step * 2.0**-shift
    return Integers(
        table, offsets[:-1].tolist(), np.rint(matrix / scale).astype(np.int16), scale, middle.sum(axis=0), shift
    )


def products(part: Field, weight: Floats) -> Iterator[tuple[int, Floats]]:
    """Multiplies a table by weights in blocks of `BLOCK` rows.

    Args:
        part: Field of the table [rows, width].
        weight: float64 [width, N].

    Returns:
        (first row, float64 product [block rows, N]) of every block.
    """
    for start in range(0, len(part.table), BLOCK):
        yield start, part.table[start : start + BLOCK].astype(np.float64) @ weight


def dense_layer(
    weight: Floats,
    bias: Floats,
    scale: float,
    unit: float | Floats,
    form: str,
    zero_point: int = 0,
    means: Floats | None = None,
) -> LinearLayer:
    """Quantizes a linear layer that reads bytes.

    Args:
        weight: float64 [inputs, N].
        bias: float64 [N].
        scale: Scale of the inputs.
        unit: Scale of the result, or of every column.
        form: Format of the result; "f4" is float32 without a ReLU, "s1" has the zero point 128.
        zero_point: Zero point of the inputs.
        means: Means of the inputs, float64 [inputs]: the bias makes up for what rounded weights change on average.

    Returns:
        Layer with symmetric int8 weights per output channel and int32 biases.

    Raises:
        RequestError: The sums can overflow 32 bits.
    """
    scales, codes = weight_qparams(weight.astype(np.float32), 1)
    factor = scales.astype(np.float64) * scale
    if means is not None:
        bias = bias + means @ (weight * scale - codes * factor)
    whole = np.rint(bias / factor) - zero_point * codes.sum(axis=0, dtype=np.int64)
    if not np.abs(whole).max() < 2**31 - 255 * 127 * len(weight):
        raise RequestError("a linear layer can overflow 32 bits")
    zero = None if form == "f4" else ZERO if form == "s1" else 0
    return LinearLayer(codes, whole.astype(np.int32), (factor / unit).astype(np.float32), zero, 0)


def balanced_units(weight: Floats, largest: Floats, rms: Floats) -> tuple[Floats, float]:
    """Computes units of bytes with a scale of each column, so that rounding inputs and weights adds the least error.

    With the unit u_j of column j, rounding the inputs adds sum_j u_j^2 w_j^2 / 12 to the variance of a result, and
    rounding the weights step^2 sum_j (rms_j / u_j)^2 / 12, where the step of int8 weights is max_j |w_j| u_j / 127.
    Columns of small weights get larger units than they need, which makes their weights larger: as in SmoothQuant (Xiao
    et al. 2023), u_j = c sqrt(rms_j / |w_j|), but no less than the bytes must represent. The factor c is searched.

    Args:
        weight: float64 [inputs, N], every column in units in which its noise counts.
        largest: Largest magnitudes of the inputs that bytes represent, float64 [inputs].
        rms: Root of the mean square of the inputs, float64 [inputs].

    Returns:
        (units, float64 [inputs], largest / 127 and more; mean noise of the results).
    """
    least, size = np.where(largest > 0, largest, 1.0) / 127, np.abs(weight)
    row = np.sqrt((size**2).mean(axis=1))
    even = np.sqrt(rms / np.where(row > 0, row, np.inf))

    def noise(units: Floats) -> float:
        step = (size * units[:, None]).max(axis=0) / 127
        return float((units**2 * row**2).sum() + (step**2).mean() * ((rms / units) ** 2).sum())

    start = np.median(least[even > 0] / even[even > 0]) if (even > 0).any() else 0.0
    tried = [least, *(np.maximum(least, start * 2.0 ** (power / 2) * even) for power in range(-8, 13))]
    best = min(tried, key=noise)
    return best, noise(best)


def largest(table: Array) -> float:
    """Returns the largest magnitude in a table.

    Args:
        table: Array of any shape.

    Returns:
        Largest absolute value.
    """
    blocks = [table[first : first + BLOCK_ROWS] for first in range(0, len(table), BLOCK_ROWS)]
    return float(max(max(block.max(), -block.min()) for block in blocks))


def largest_columns(table: Array) -> Floats:
    """Returns the largest magnitude in each column of a table.

    Args:
        table: Array [rows, width].

    Returns:
        float64 [width].
    """
    blocks = [table[first : first + BLOCK_ROWS] for first in range(0, len(table), BLOCK_ROWS)]
    return np.asarray(np.max([np.maximum(block.max(axis=0), -block.min(axis=0)) for block in blocks], axis=0), float)


def positive(scale: float) -> float:
    """Returns a scale, replaced by 1 if it is zero.

    Args:
        scale: Scale.

    Returns:
        Positive scale.

    Raises:
        RequestError: The scale is not finite.
    """
    if not np.isfinite(scale):
        raise RequestError("a range is not finite")
    return scale if scale > 1e-30 else 1.0
