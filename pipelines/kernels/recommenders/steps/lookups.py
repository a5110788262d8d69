"""Steps that read tables and numbers by the inputs of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    CODES,
    MAX_WIDTH,
    SLACK,
    Run,
    Slots,
    Step,
    reads_tables,
    require_finite,
    require_fit,
    require_ids,
    to_codes,
)
from pipelines.kernels.recommenders.tables.quantized_rows import QuantizedRows

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

POOLS = ("", "sum", "mean", "max")


@dataclass(frozen=True, eq=False)
class Numbers(Step):
    """Codes of numbers: out[position + k] = clip(rint(numbers[columns_k] scale_k), -CODES, CODES); NaN counts as 0.

    Attributes:
        out: Buffer "i2" of the codes.
        position: First code.
        columns: int32 [K].
        scale: float32 [K].
    """

    out: int
    position: int
    columns: Array
    scale: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require("Numbers", "columns", self.columns, np.int32, (self.columns.size,))
        require("Numbers", "scale", self.scale, np.float32, (self.columns.size,))
        require_fit(self, self.columns.size >= 1 and self.columns.min() >= 0 and self.columns.max() < program.numbers)
        slots.write_codes(self, self.out, self.position, self.columns.size)
        require_finite(self, self.scale)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        scaled, end = run.numbers[:, self.columns] * self.scale, self.position + self.columns.size
        run.buffers[self.out][:, self.position : end] = to_codes(np.where(np.isnan(scaled), np.float32(0), scaled))

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.numbers(self.out, self.position, contiguous(self.columns), contiguous(self.scale))


@dataclass(frozen=True, eq=False)
class Gather(Step):
    """Codes of table rows: out[position:position + width] = rows selected by `count` columns of the ids, pooled.

    - pool "": the row
    - pool "max": the maximum
    - pool "sum": clip(rint(float32(sum of the rows) factor))
    - pool "mean": clip(rint(float32(sum of the rows) (scales[mean] factor))), a factor that is not finite counts as 0

    Rows of a table of bytes go to a buffer of bytes; they are not pooled.

    Attributes:
        out: Buffer "i2" of the codes, or "u1".
        position: First code.
        table: int16 [rows stride + SLACK], flat, entries in [-CODES, CODES], or uint8 [rows stride].
        rows: Rows of the table.
        stride: Entries from one row to the next.
        width: Codes of a row.
        column: First column of the ids.
        count: Number of columns of the ids.
        pool: "", "max", "sum" or "mean".
        factor: Factor of sums.
        mean: Column of the scales for means, else -1.
    """

    out: int
    position: int
    table: Array
    rows: int
    stride: int
    width: int
    column: int
    count: int = 1
    pool: str = ""
    factor: float = 1.0
    mean: int = -1

    @property
    def coarse(self) -> bool:
        """Whether the table has bytes."""
        return bool(self.table.dtype == np.uint8)

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        coarse = self.coarse
        size = self.rows * self.stride + SLACK * (not coarse)
        require("Gather", "table", self.table, np.uint8 if coarse else np.int16, (size,))
        require_fit(self, not (coarse and self.pool))
        require_fit(self, 1 <= self.width <= self.stride <= MAX_WIDTH)
        slots.write_codes(self, self.out, self.position, self.width, "u1" if coarse else "i2")
        _require_pooled(self, program)
        if (
            reads_tables()
            and not coarse
            and max(int(self.table.max(initial=0)), -int(self.table.min(initial=0))) > CODES
        ):
            raise RequestError(f"Gather has entries beyond {CODES}")

    def compute(self, run: Run) -> None:
        """See `Step`."""
        table = self.table[: self.rows * self.stride].reshape(self.rows, self.stride)[:, : self.width]
        rows = table[run.ids[:, self.column : self.column + self.count]]
        if self.pool in ("sum", "mean"):
            factor = np.full((len(run.ids), 1), self.factor, np.float32)
            if self.pool == "mean":
                factor = run.scales[:, self.mean, None] * factor
                factor = np.where(np.isfinite(factor), factor, np.float32(0))
            pooled = to_codes(rows.sum(axis=1, dtype=np.int32).astype(np.float32) * factor)
        else:
            pooled = rows.max(axis=1)
        run.buffers[self.out][:, self.position : self.position + self.width] = pooled

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.gather(
            self.out,
            self.position,
            contiguous(self.table),
            0,
            self.rows,
            self.stride,
            self.width,
            self.column,
            self.count,
            self.pool,
            self.factor,
            self.mean,
        )


@dataclass(frozen=True, eq=False)
class QuantizedGather(Step):
    """Codes of quantized table rows, pooled: out[position:position + width] = clip(rint(pooled(ids, factor))).

    `QuantizedRows.pooled` computes the sums, in units of the codes; a maximum is that of the rows. The factor of a mean
    is scales[mean] factor; one that is not finite counts as 0.

    Attributes:
        out: Buffer "i2" of the codes.
        position: First code.
        table: uint8, see `QuantizedRows.data`.
        rows: Rows of the table.
        width: Codes of a row.
        bits: 8, 4 or 2.
        scale_unit: Factor of the rows' scales.
        bias_unit: Factor of the rows' biases.
        column: First column of the ids.
        count: Number of columns of the ids.
        pool: "", "sum", "mean" or "max".
        factor: Factor of the units.
        mean: Column of the scales for means, else -1.
    """

    out: int
    position: int
    table: Array
    rows: int
    width: int
    bits: int
    scale_unit: float
    bias_unit: float
    column: int
    count: int = 1
    pool: str = ""
    factor: float = 1.0
    mean: int = -1

    def quantized(self) -> QuantizedRows:
        """Returns the table."""
        return QuantizedRows(self.table, self.rows, self.width, self.bits, self.scale_unit, self.bias_unit)

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, 1 <= self.width <= MAX_WIDTH)
        _require_pooled(self, program)
        self.quantized().check(values=reads_tables())
        self.quantized().check_sums(1 if self.pool == "max" else self.count)
        slots.write_codes(self, self.out, self.position, self.width)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        factor: Any = np.float32(self.factor)
        if self.pool == "mean":
            factor = run.scales[:, self.mean] * factor
            factor = np.where(np.isfinite(factor), factor, np.float32(0))
        ids, table = run.ids[:, self.column : self.column + self.count], self.quantized()
        pooled = table.pooled(ids[..., None], factor).max(axis=1) if self.pool == "max" else table.pooled(ids, factor)
        run.buffers[self.out][:, self.position : self.position + self.width] = to_codes(pooled)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.quantized_gather(
            self.out,
            self.position,
            contiguous(self.table),
            self.rows,
            self.width,
            self.bits,
            self.scale_unit,
            self.bias_unit,
            self.column,
            self.count,
            self.pool,
            self.factor,
            self.mean,
        )


def _require_pooled(step: Gather | QuantizedGather, program: ClickProgram) -> None:
    """Raises RequestError unless the ids, the pooling and its factor fit."""
    require_fit(step, 1 <= step.count <= 2**16 and step.pool in POOLS and (step.count == 1 or bool(step.pool)))
    require_ids(step, program, step.column, step.count, step.rows)
    require_fit(step, (step.pool == "mean") == (step.mean >= 0) and step.mean < program.means)
    require_finite(step, step.factor)


@dataclass(frozen=True, eq=False)
class LookupSum(Step):
    """Sum of scalars: out = sum_f table[offsets_f + ids[columns_f]], float32, added in the order of the fields.

    Attributes:
        out: Buffer "f4" of width 1.
        table: float32 [R].
        columns: Columns of the ids, int32 [F].
        offsets: First row of every field, int32 [F].
        rows: Rows of every field, int32 [F].
    """

    out: int
    table: Array
    columns: Array
    offsets: Array
    rows: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        fields = self.columns.size
        require("LookupSum", "table", self.table, np.float32, (self.table.size,))
        for name in ("columns", "offsets", "rows"):
            require("LookupSum", name, getattr(self, name), np.int32, (fields,))
        require_fit(self, fields >= 1 and self.columns.min() >= 0 and self.columns.max() < program.rows.size)
        last = self.offsets.astype(np.int64) + self.rows
        require_fit(self, self.rows.min() >= 1 and self.offsets.min() >= 0 and last.max() <= self.table.size)
        limits = program.rows[self.columns]
        require_fit(self, limits.min() >= 1 and bool((limits <= self.rows).all()))
        require_fit(self, slots.write(self, self.out, "f4") == 1)
        require_finite(self, self.table)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        total = np.zeros(len(run.ids), np.float32)
        for column, offset in zip(self.columns, self.offsets, strict=True):
            total += self.table[offset + run.ids[:, column]]
        run.buffers[self.out][:, 0] = total

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        arrays = contiguous(self.table), contiguous(self.columns), contiguous(self.offsets), contiguous(self.rows)
        program.lookup_sum(self.out, *arrays)
