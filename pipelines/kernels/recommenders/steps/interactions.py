"""Steps that multiply vectors of codes with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.operators import LinearLayer
from pipelines.kernels.recommenders.steps.base import (
    Run,
    Slots,
    Step,
    lane_sum,
    require_finite,
    require_fit,
    require_vectors,
    to_bytes,
    to_codes,
    vectors,
)

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram


@dataclass(frozen=True, eq=False)
class Factorization(Step):
    """out = scale sum_j (float32(sum_f k_fj)^2 - float32(sum_f k_fj^2)) for the vectors k_f = x[p_f:p_f + width].

    positions: p, int32 [F].
    """

    x: int
    out: int
    positions: Array
    width: int
    scale: float

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_vectors(self, self.positions, self.width, slots.read(self, self.x, "i2"))
        require_fit(self, slots.write(self, self.out, "f4") == 1)
        require_finite(self, self.scale)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        k = vectors(run.buffers[self.x], self.positions, self.width)
        total, squares = (terms.sum(axis=1).astype(np.float32) for terms in (k, k * k))
        run.buffers[self.out][:, 0] = lane_sum(total * total - squares) * np.float32(self.scale)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.factorization(self.x, self.out, contiguous(self.positions), self.width, self.scale)


@dataclass(frozen=True, eq=False)
class Cross(Step):
    """A layer of a cross network (Wang et al. 2021, DCN V2) in units of the codes k of x_0: x_l = k g_l, g_0 = 1.

    g     = g + u                                        1 + u where `first`
    out   = clip(rint((k g) factor), -CODES, CODES)      the codes of x_{l+1}, unless out is None
    total = sum_j (k g)_j weight_j                       unless total is None; weight: float32
    bytes = clip(rint((k g) factors), -128, 127) + 128   x_{l+1} with a scale of each column, unless bytes is None
    """

    x: int
    u: int
    g: int
    first: bool
    factor: float = 1.0
    out: int | None = None
    total: int | None = None
    weight: Array | None = None
    bytes: int | None = None
    factors: Array | None = None

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.u, "f4")
        require_fit(self, slots.read(self, self.x, "i2") == width == slots.write(self, self.g, "f4"))
        if self.out is not None:
            require_fit(self, slots.write(self, self.out, "i2") == width)
        require_fit(self, (self.total is None) == (self.weight is None))
        if self.total is not None and self.weight is not None:
            require_fit(self, slots.write(self, self.total, "f4") == 1)
            require("Cross", "weight", self.weight, np.float32, (width,))
            require_finite(self, self.weight)
        require_fit(self, (self.bytes is None) == (self.factors is None))
        if self.bytes is not None and self.factors is not None:
            require_fit(self, slots.write(self, self.bytes, "u1") == width)
            require("Cross", "factors", self.factors, np.float32, (width,))
            require_finite(self, self.factors)
        require_finite(self, self.factor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        g = run.buffers[self.u] + (np.float32(1) if self.first else run.buffers[self.g])
        run.buffers[self.g], value = g, run.buffers[self.x].astype(np.float32) * g
        if self.out is not None:
            run.buffers[self.out] = to_codes(value * np.float32(self.factor))
        if self.bytes is not None and self.factors is not None:
            run.buffers[self.bytes] = to_bytes(value * self.factors)
        if self.total is not None and self.weight is not None:
            weighted = np.where(self.weight == 0, np.float32(0), value * self.weight)
            run.buffers[self.total][:, 0] = lane_sum(weighted)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        weight, factors = (None if array is None else contiguous(array) for array in (self.weight, self.factors))
        program.cross(
            self.x, self.u, self.g, self.first, self.factor, self.out, self.total, weight, self.bytes, factors
        )


@dataclass(frozen=True, eq=False)
class CrossLayer(Step):
    """`Dense` of floats u and `Cross` of them in one, without the buffer of u: kernels compute panels of columns."""

    h: int
    layer: LinearLayer
    x: int
    g: int
    first: bool
    factor: float = 1.0
    out: int | None = None
    bytes: int | None = None
    factors: Array | None = None

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        inputs, width = self.layer.weight.shape
        require_fit(self, slots.read(self, self.h, "u1") == inputs and self.layer.zero_point is None)
        require_fit(self, self.first or slots.read(self, self.g, "f4") == width)
        require_fit(self, slots.read(self, self.x, "i2") == width == slots.write(self, self.g, "f4"))
        if self.out is not None:
            require_fit(self, slots.write(self, self.out, "i2") == width)
        require_fit(self, (self.bytes is None) == (self.factors is None) and self.bytes != self.h)
        if self.bytes is not None and self.factors is not None:
            require_fit(self, slots.write(self, self.bytes, "u1") == width)
            require("CrossLayer", "factors", self.factors, np.float32, (width,))
            require_finite(self, self.factors)
        require_finite(self, self.factor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        u = self.layer.compute(run.buffers[self.h])
        run.buffers[self.g] = u + (np.float32(1) if self.first else run.buffers[self.g])
        value = run.buffers[self.x].astype(np.float32) * run.buffers[self.g]
        if self.out is not None:
            run.buffers[self.out] = to_codes(value * np.float32(self.factor))
        if self.bytes is not None and self.factors is not None:
            run.buffers[self.bytes] = to_bytes(value * self.factors)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        layer = self.layer
        arrays = contiguous(layer.weight), contiguous(layer.bias), contiguous(layer.scale)
        factors = None if self.factors is None else contiguous(self.factors)
        program.cross_layer(self.h, *arrays, self.x, self.g, self.first, self.factor, self.out, self.bytes, factors)


@dataclass(frozen=True, eq=False)
class Dots(Step):
    """Dot products of all pairs of vectors as codes: clip(rint(float32(k_i . k_j) factor_ij), -CODES, CODES).

    The pairs are i = 1, 2, ..; j = 0 .. i - 1. Vectors are as in `Factorization`.

    Attributes:
        x: Buffer "i2" of the vectors.
        out: Buffer "i2" of the results.
        position: First code of the results.
        positions: First code of every vector, int32 [F].
        width: Width of the vectors.
        factor: float32 [pairs].
    """

    x: int
    out: int
    position: int
    positions: Array
    width: int
    factor: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_vectors(self, self.positions, self.width, slots.read(self, self.x, "i2"))
        count = self.positions.size * (self.positions.size - 1) // 2
        require_fit(self, count >= 1)
        require("Dots", "factor", self.factor, np.float32, (count,))
        slots.write_codes(self, self.out, self.position, count)
        require_finite(self, self.factor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        k = vectors(run.buffers[self.x], self.positions, self.width)
        lower = np.tril_indices(self.positions.size, -1)
        products = np.einsum("nik,njk->nij", k, k)[:, lower[0], lower[1]]
        codes = to_codes(products.astype(np.float32) * self.factor)
        run.buffers[self.out][:, self.position : self.position + codes.shape[1]] = codes

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        positions, factor = contiguous(self.positions), contiguous(self.factor)
        program.dots(self.x, self.out, self.position, positions, self.width, factor)
