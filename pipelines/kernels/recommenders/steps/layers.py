"""Linear layers of click programs, and their results as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.operators import COLUMNS, FIELDS, ZERO, LinearLayer, exact_product
from pipelines.kernels.recommenders.steps.base import (
    AHEAD,
    BYTE,
    CODES,
    KINDS,
    MAX_OUTPUTS,
    MAX_WIDTH,
    Run,
    Slots,
    Step,
    require_finite,
    require_fit,
    to_bytes,
    to_codes,
)

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram


@dataclass(frozen=True, eq=False)
class Mixed(Step):
    """Linear layers with the same inputs: sums of table rows, where a layer is folded into its tables, and products.

        acc_j = 2^shift sum_f (table[offsets_f + ids[columns_f], j] - zero) + sum_k x[first + k] weight[k, j]
        y_j   = float32(acc_j) scale_j + bias_j                 plus added_j, if there is one

    The results are clip(rint(y), 0, 255) in "u1", clip(rint(y), -CODES or, with relu, 0, CODES) in "i2", and y in "f4".
    A sum of F rows must fit int16, and acc int32.

    Attributes:
        x: Buffer "i2" of the codes; not read if K is 0.
        first: First code.
        weight: int16 [K, N].
        scale: float32 [N].
        bias: float32 [N].
        outs: (buffer, width, relu) of every result; their columns are consecutive, each starting at a multiple of 64.
        columns: Columns of the ids, int32 [F].
        offsets: First table row of every field, int32 [F].
        rows: Table rows of every field, int32 [F].
        shift: Steps of rows and of weights differ by 2^shift.
        table: uint8 [R, N] with zero = 128 and entries from 1 on, or int16 with zero = 0, or None.
        added: Buffer "f4" of width N that is added to y, or -1.
        ahead: Groups of four samples between the prefetch of table rows and their use.
    """

    x: int
    first: int
    weight: Array
    scale: Array
    bias: Array
    outs: tuple[tuple[int, int, bool], ...]
    columns: Array
    offsets: Array
    rows: Array
    shift: int = 0
    table: Array | None = None
    added: int = -1
    ahead: int = 1

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width, fields = sum(-(-columns // COLUMNS) * COLUMNS for _, columns, _ in self.outs), self.columns.size
        inputs = len(self.weight) if self.weight.ndim == 2 else 0
        require("Mixed", "weight", self.weight, np.int16, (inputs, width))
        for name, dtype, size in (
            ("scale", np.float32, width),
            ("bias", np.float32, width),
            *((name, np.int32, fields) for name in ("columns", "offsets", "rows")),
        ):
            require("Mixed", name, getattr(self, name), dtype, (size,))
        require_fit(
            self,
            1 <= width <= MAX_WIDTH
            and 1 <= len(self.outs) <= MAX_OUTPUTS
            and 0 <= self.shift <= 14
            and fields <= FIELDS,
        )
        if inputs:
            require_fit(self, 0 <= self.first <= slots.read(self, self.x, "i2") - inputs)
        require_fit(self, self.added < 0 or slots.read(self, self.added, "f4") == width)
        require_fit(self, (self.table is None) == (fields == 0) and 1 <= self.ahead <= AHEAD)
        if self.table is not None:
            wide = self.table.dtype == np.int16
            require("Mixed", "table", self.table, np.int16 if wide else np.uint8, (len(self.table), width))
            if wide and max(int(self.table.max()), -int(self.table.min())) * fields > 2**15 - 1:
                raise RequestError("Mixed has rows whose sum is beyond 16 bits")
            last = self.offsets.astype(np.int64) + self.rows
            require_fit(self, self.columns.min() >= 0 and self.columns.max() < program.rows.size)
            require_fit(self, self.rows.min() >= 1 and self.offsets.min() >= 0 and last.max() <= len(self.table))
            limits = program.rows[self.columns]
            require_fit(self, limits.min() >= 1 and bool((limits <= self.rows).all()))
        for slot, columns, relu in self.outs:
            kind = slots.slots[slot][0] if 0 <= slot < len(slots.slots) else ""
            require_fit(
                self, kind in KINDS and slots.write(self, slot, kind) == columns and not (relu and kind == "f4")
            )
        reach = ((2**15 if fields else 0) << self.shift) + CODES * np.abs(self.weight.astype(np.int64)).sum(axis=0)
        if reach.max(initial=0) >= 2**31:
            raise RequestError("Mixed can overflow 32 bits; use a smaller shift or weights")
        require_finite(self, self.scale, self.bias)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        accumulated = np.zeros((len(run.ids), self.scale.size), np.int64)
        if self.table is not None:
            rows = self.offsets + run.ids[:, self.columns]
            zero = ZERO if self.table.dtype == np.uint8 else 0
            accumulated += (self.table[rows].astype(np.int64) - zero).sum(axis=1) << self.shift
        if inputs := len(self.weight):
            x = run.buffers[self.x][:, self.first : self.first + inputs]
            accumulated += exact_product(x, self.weight)
        y = accumulated.astype(np.float32) * self.scale + self.bias
        if self.added >= 0:
            y += run.buffers[self.added]
        start = 0
        for slot, width, relu in self.outs:
            part, dtype = y[:, start : start + width], run.buffers[slot].dtype
            if dtype == np.uint8:
                part = np.rint(np.clip(np.where(np.isnan(part), 0, part), 0, 255))
            out = to_codes(part) if dtype == np.int16 else part.astype(dtype)
            run.buffers[slot] = np.maximum(out, 0) if relu and dtype == np.int16 else out
            start += -(-width // COLUMNS) * COLUMNS

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.mixed(
            self.x,
            self.first,
            contiguous(self.weight),
            contiguous(self.scale),
            contiguous(self.bias),
            list(self.outs),
            None if self.table is None else contiguous(self.table),
            contiguous(self.columns),
            contiguous(self.offsets),
            contiguous(self.rows),
            self.shift,
            self.added,
            self.ahead,
        )


@dataclass(frozen=True, eq=False)
class Dense(Step):
    """`LinearLayer` from a buffer "u1" to one of "u1", or of "f4" if its zero point is None."""

    x: int
    out: int
    layer: LinearLayer

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        inputs, outputs = self.layer.weight.shape
        require_fit(self, slots.read(self, self.x, "u1") == inputs)
        require_fit(self, slots.write(self, self.out, "f4" if self.layer.zero_point is None else "u1") == outputs)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out] = self.layer.compute(run.buffers[self.x])

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        layer = self.layer
        arrays = contiguous(layer.weight), contiguous(layer.bias), contiguous(layer.scale)
        program.dense(self.x, self.out, *arrays, layer.zero_point or 0, layer.low)


@dataclass(frozen=True, eq=False)
class Quantize(Step):
    """out[position:] = clip(rint(x factor), -CODES, CODES), or from 0 on where `relu`."""

    x: int
    out: int
    position: int
    factor: float
    relu: bool = False

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        slots.write_codes(self, self.out, self.position, slots.read(self, self.x, "f4"))
        require_finite(self, self.factor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        codes = to_codes(run.buffers[self.x] * np.float32(self.factor))
        codes = np.maximum(codes, 0) if self.relu else codes
        run.buffers[self.out][:, self.position : self.position + codes.shape[1]] = codes

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.quantize(self.x, self.out, self.position, self.factor, self.relu)


@dataclass(frozen=True, eq=False)
class CodeBytes(Step):
    """The higher bits of codes as bytes with zero point 128.

    out[position + j] = clip(((x[first + j] + 16) >> 5) + 128, 0, 255) for j < width
    """

    x: int
    first: int
    out: int
    position: int
    width: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        slots.write_codes(self, self.out, self.position, self.width, "u1")
        require_fit(self, self.width >= 1 and 0 <= self.first <= slots.read(self, self.x, "i2") - self.width)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        codes = run.buffers[self.x][:, self.first : self.first + self.width].astype(np.int32)
        entries = np.clip((codes + BYTE // 2) // BYTE + ZERO, 0, 255)
        run.buffers[self.out][:, self.position : self.position + self.width] = entries

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.code_bytes(self.x, self.first, self.out, self.position, self.width)


@dataclass(frozen=True, eq=False)
class ColumnBytes(Step):
    """Codes as bytes with zero point 128 and a scale of each column: out_j = clip(rint(x[first + j] factor_j)) + 128.

    factor: float32 [width of out].
    """

    x: int
    first: int
    out: int
    factor: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "u1")
        require_fit(self, 0 <= self.first <= slots.read(self, self.x, "i2") - width)
        require("ColumnBytes", "factor", self.factor, np.float32, (width,))
        require_finite(self, self.factor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        codes = run.buffers[self.x][:, self.first : self.first + self.factor.size]
        run.buffers[self.out] = to_bytes(codes.astype(np.float32) * self.factor)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.column_bytes(self.x, self.first, self.out, contiguous(self.factor))
