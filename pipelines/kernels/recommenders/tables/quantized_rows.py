"""Rows of 8, 4 or 2 bits with a scale and a bias each, and pooling of them in numpy, which defines the kernels' bits.

    value = scale_unit scale code + bias_unit bias, with int16 scales and biases of a row and units of the whole table

Rows are summed as integers: float32(sum scale code) scale_unit + float32(sum bias) bias_unit. A row is its packed
codes, then scale and bias. Codes of 4 and 2 bits are packed in groups of 16 bytes: byte j holds
entry j of the group in its lowest bits, entry 16 + j in the next. The last group has 8 bytes for at most 64 bits of
codes, and 4 for at most 32, so that rows of 16 columns have no more bytes than elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

Floats = NDArray[np.float64]

BITS = (8, 4, 2)
MAX_SCALE = 32639  # 256 * 127 + 127: two signed bytes
MAX_BIAS = 32767
SLACK = 64  # bytes behind the last row, which kernels may read
GROUP = 16  # bytes of a whole group of codes
CHECKED_ROWS = 2**20  # rows whose scales are read together
BLOCK = 2**22  # entries that are quantized together
SMALLEST = np.float32(1e-35)  # unit, of a table of zeros
SHRUNK = (1.0, 0.93, 0.86, 0.79, 0.72)  # ranges that rows of less than 8 bits are tried with


def code_bytes(width: int, bits: int) -> int:
    """Returns the bytes of a row's packed codes.

    Args:
        width: Columns of the table.
        bits: 8, 4 or 2.
    """
    return width if bits == 8 else sum(group for _, group, _ in _groups(width, bits))


def row_bytes(width: int, bits: int) -> int:
    """Returns the bytes of a row: its codes, scale and bias.

    Args:
        width: Columns of the table.
        bits: 8, 4 or 2.
    """
    return code_bytes(width, bits) + 4


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A table of quantized rows.

    Attributes:
        data: uint8 [rows * row_bytes(width, bits) + SLACK].
        rows: Number of rows.
        width: Columns of the table.
        bits: 8, 4 or 2.
        scale_unit: Factor of all scales, float32.
        bias_unit: Factor of all biases, float32.
    """

    data: Array
    rows: int
    width: int
    bits: int
    scale_unit: float
    bias_unit: float

    def check(self, values: bool = True) -> None:
        """Checks the table.

        Args:
            values: Whether to check the scales, which reads the table.

        Raises:
            RequestError: Its sizes do not fit, a scale is out of range or a unit is not finite.
        """
        if self.bits not in BITS or self.width < 1 or self.rows < 1:
            raise RequestError(
                f"found a table of {self.rows} x {self.width} in {self.bits} bits; expected 8, 4 or 2 bits"
            )
        require("QuantizedRows", "data", self.data, np.uint8, (self.rows * row_bytes(self.width, self.bits) + SLACK,))
        right = bool(np.isfinite([self.scale_unit, self.bias_unit]).all())
        for first in range(0, self.rows if values else 0, CHECKED_ROWS):
            scales = self.parameters(slice(first, first + CHECKED_ROWS))[:, 0]
            right = right and scales.min() >= 0 and scales.max() <= MAX_SCALE
        if not right:
            raise RequestError(f"QuantizedRows has scales outside 0 to {MAX_SCALE}, or units that are not finite")

    def check_sums(self, count: int) -> None:
        """Checks that sums of so many rows fit int32.

        Args:
            count: Number of rows.

        Raises:
            RequestError: They do not.
        """
        most = (2**31 - 1) // ((2**self.bits - 1) * MAX_SCALE)
        if not 1 <= count <= most:
            raise RequestError(f"found lists of {count} ids in a table of {self.bits} bits; expected 1 to {most}")

    def matrix(self) -> NDArray[np.uint8]:
        """Returns the rows, uint8 [rows, row_bytes], a view."""
        stride = row_bytes(self.width, self.bits)
        return np.asarray(self.data[: self.rows * stride]).reshape(self.rows, stride)

    def parameters(self, rows: slice = slice(None)) -> NDArray[np.int16]:
        """Returns scale and bias of rows, int16 [rows, 2], a copy.

        Args:
            rows: The rows.
        """
        return np.ascontiguousarray(self.matrix()[rows, -4:]).view("<i2")

    def codes(self, ids: Array) -> NDArray[np.uint8]:
        """Returns the codes of rows.

        Args:
            ids: Row numbers of any shape.

        Returns:
            uint8 [*ids.shape, width], 0 to 2^bits - 1.
        """
        packed = self.matrix()[ids][..., :-4]
        return packed if self.bits == 8 else _unpacked(packed, self.width, self.bits)

    def dequantized(self, ids: Array) -> NDArray[np.float32]:
        """Returns rows as floats.

        Args:
            ids: Row numbers of any shape.

        Returns:
            float32 [*ids.shape, width].
        """
        return self.pooled(np.asarray(ids)[..., None])

    def pooled(self, ids: Array, factor: Array | float = 1.0) -> NDArray[np.float32]:
        """Sums rows.

        Args:
            ids: Row numbers [..., count].
            factor: float32 factor of the units; of each sample [...], or of all.

        Returns:
            float32 [..., width]: float32(sum scale code) (scale_unit factor) + float32(sum bias) (bias_unit factor).
        """
        parameters = np.ascontiguousarray(self.matrix()[ids][..., -4:]).view("<i2").astype(np.int32)
        sums = (parameters[..., :1] * self.codes(ids).astype(np.int32)).sum(axis=-2, dtype=np.int32)
        biases = parameters[..., 1].sum(axis=-1, dtype=np.int32)[..., None]
        factors = np.asarray(factor, np.float32)
        factors = factors[..., None] if factors.ndim else factors
        scaled = sums.astype(np.float32) * (np.float32(self.scale_unit) * factors)
        return np.asarray(scaled + biases.astype(np.float32) * (np.float32(self.bias_unit) * factors), np.float32)


@dataclass(frozen=True)
class Extent:
    """Ranges of the rows of a table.

    Attributes:
        magnitude: Largest magnitude of an entry.
        range: Largest range of a row.
    """

    magnitude: float
    range: float

    @classmethod
    def of(cls, table: Array) -> Extent:
        """Reads a table in blocks.

        Args:
            table: float32 or int16 [rows, width], finite.

        Raises:
            RequestError: The table is not finite.
        """
        magnitude = widest = 0.0
        step = max(BLOCK // table.shape[1], 1)
        for first in range(0, len(table), step):
            block = table[first : first + step]
            low, high = _ends(block[_starts(block)])
            if not np.isfinite([low, high]).all():
                raise RequestError("found values that are not finite in a table; expected finite ones")
            magnitude, widest = max(magnitude, -low.min(), high.max()), max(widest, (high - low).max())
        return cls(float(magnitude), float(widest))


def quantize(table: Array, bits: int, rows: Array | None = None, extent: Extent | None = None) -> QuantizedRows:
    """Quantizes the rows of a table.

    The range of a row is [bias, bias + (2^bits - 1) scale], rounded so that it covers the row. Below 8 bits, narrower
    ranges are tried as well, and a row keeps the one of the smallest squared error.

    Args:
        table: float32 or int16 [rows, width], finite.
        bits: 8, 4 or 2.
        rows: Numbers of the rows to quantize, all others are zero; None: all.
        extent: Ranges of the rows; None: they are read.

    Returns:
        The quantized table.

    Raises:
        RequestError: The table is empty or not finite, or the bits are others.
    """
    if bits not in BITS or table.ndim != 2 or not table.size:
        raise RequestError(
            f"found a table {list(table.shape)} for {bits} bits; expected rows and columns, and 8, 4 or 2 bits"
        )
    height, width = table.shape
    stride, levels = row_bytes(width, bits), 2**bits - 1
    extent = extent or Extent.of(table)
    bias_unit = np.float32(extent.magnitude / (MAX_BIAS - 1))
    scale_unit = np.float32((extent.range + bias_unit) / levels / (MAX_SCALE - 1))
    units = tuple(unit if unit >= SMALLEST else SMALLEST for unit in (scale_unit, bias_unit))
    data = machine.large_zeros((height * stride + SLACK,), np.uint8)  # numpy asks for huge pages
    matrix = data[: height * stride].reshape(height, stride)
    step = max(BLOCK // width, 1)
    for first in range(0, height if rows is None else len(rows), step):
        block: Any = slice(first, first + step) if rows is None else rows[first : first + step]
        values = table[block]
        starts = _starts(values)
        distinct = values[starts]
        codes, parameters = _best_range(distinct, *_ends(distinct), bits, units)
        packed = np.concatenate([codes if bits == 8 else _packed(codes, bits), parameters.view(np.uint8)], axis=1)
        matrix[block] = np.repeat(packed, np.diff(starts, append=len(values)), axis=0)
    return QuantizedRows(data, height, width, bits, *map(float, units))


def _starts(rows: Array) -> NDArray[np.int64]:
    """Returns the first row of every run of equal rows: many rows of a large table are those of unknown values."""
    return np.concatenate([[0], 1 + np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))])


def _ends(rows: Array) -> tuple[Floats, Floats]:
    """Returns the least and the greatest value of every row, float64 [n]."""
    return rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)


def _best_range(
    x: NDArray[np.float32], low: Floats, high: Floats, bits: int, units: tuple[np.float32, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Returns the codes [n, width] of rows, and their scales and biases, int16 [n, 2]."""
    levels, (scale_unit, bias_unit) = 2**bits - 1, map(float, units)
    best = np.zeros(x.shape, np.uint8), np.zeros((len(x), 2), "<i2")
    least = np.full(len(x), np.inf)
    for share in SHRUNK if bits < 8 else SHRUNK[:1]:
        cut = (high - low) * ((1 - share) / 2)
        bias = np.floor((low + cut) / bias_unit)
        scale = np.clip(np.ceil((high - cut - bias * bias_unit) / levels / scale_unit), 0, MAX_SCALE)
        offset = x - np.asarray(bias * bias_unit, np.float32)[:, None]
        step = np.asarray(scale * scale_unit, np.float32)[:, None]
        codes = np.clip(np.rint(np.divide(offset, step, out=np.zeros_like(offset), where=step > 0)), 0, levels)
        error = np.square(step * codes - offset, dtype=np.float64).sum(axis=1)
        better = error < least
        least[better] = error[better]
        best[0][better], best[1][better] = codes[better].astype(np.uint8), np.stack([scale, bias], 1)[better]
    return best


def _groups(width: int, bits: int) -> list[tuple[int, int, int]]:
    """Returns (first entry, bytes, first byte) of the groups of a row's codes."""
    entries, groups = GROUP * 8 // bits, []
    for first in range(0, width, entries):
        size = GROUP
        while size > 4 and (size // 2) * 8 // bits >= max(width - first, 16):
            size //= 2
        groups.append((first, size, first * bits // 8))
    return groups


def _packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    packed = np.zeros((len(codes), code_bytes(codes.shape[1], bits)), np.uint8)
    for first, size, start in _groups(codes.shape[1], bits):
        for plane in range(8 // bits):
            part = codes[:, first + plane * size : first + (plane + 1) * size]
            packed[:, start : start + part.shape[1]] |= part << np.uint8(plane * bits)
    return packed


def _unpacked(packed: NDArray[np.uint8], width: int, bits: int) -> NDArray[np.uint8]:
    codes = np.empty((*packed.shape[:-1], width), np.uint8)
    for first, size, start in _groups(width, bits):
        for plane in range(8 // bits):
            part = codes[..., first + plane * size : min(first + (plane + 1) * size, first + size * 8 // bits)]
            part[...] = packed[..., start : start + part.shape[-1]] >> np.uint8(plane * bits) & np.uint8(2**bits - 1)
    return codes
