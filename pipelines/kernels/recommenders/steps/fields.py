"""Steps on the fields of a sample: gates of codes and of layers, a bilinear form, and attention between fields."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    CODES,
    VECTORS,
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
from pipelines.kernels.recommenders.steps.sequences import SEGMENTS
from pipelines.kernels.transformer.reference import exponential, sigmoid

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

WEIGHTS = (2**31 - 1) // CODES  # the sum of the integer weights of all fields, so that sums fit int32
GATE_SCALE = 3.0  # segments of the curve of gates within 1
MAX_SIZE = 64  # of a head: differences of two scores fit int32


@dataclass(frozen=True, eq=False)
class SigmoidProduct(Step):
    """out_j = x_j sigmoid(gates_j), all float32."""

    x: int
    gates: int
    out: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        require_fit(self, slots.read(self, self.gates, "f4") == width == slots.write(self, self.out, "f4"))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out] = run.buffers[self.x] * sigmoid(run.buffers[self.gates])

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.sigmoid_product(self.x, self.gates, self.out)


@functools.cache
def gate_curve() -> Array:
    """Returns the sigmoid in quadratic pieces, see `GateCodes`: float32 [3, SEGMENTS], within 3e-5."""
    curve = np.zeros((3, SEGMENTS))
    for segment in range(SEGMENTS - 1):
        t = segment + 0.5 + np.cos(np.pi * np.array([5, 3, 1]) / 6) / 2  # nodes of Chebyshev
        curve[:, segment] = np.linalg.solve(np.vander(t, 3, increasing=True), 1 / (1 + np.exp(-t / GATE_SCALE)))
    curve[0, -1] = 1
    return curve.astype(np.float32)


@dataclass(frozen=True, eq=False)
class GateCodes(Step):
    """Codes times their gates, y_j = x_j s_j with s_j near sigmoid(gates_j), as codes or bytes.

        t = min(|gates_j| GATE_SCALE, SEGMENTS - 1);  s = c0 + t (c1 + t c2), c = curve[:, floor(t)];  s_j = s
        s_j = 1 - s for gates below 0
        out_j = clip(rint(y_j), -CODES, CODES)               unless out is None
        bytes_j = clip(rint(y_j factors_j), -128, 127) + 128 unless bytes is None

    Attributes:
        x: Buffer "i2" of the codes.
        gates: Buffer "f4" of the gates.
        out: Buffer "i2", or None.
        curve: Coefficients of the pieces, float32 [3, SEGMENTS].
        bytes: Buffer "u1", or None.
        factors: float32 [width] for bytes, else None.
    """

    x: int
    gates: int
    out: int | None
    curve: Array = field(default_factory=gate_curve)
    bytes: int | None = None
    factors: Array | None = None

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.gates, "f4")
        require_fit(self, slots.read(self, self.x, "i2") == width)
        require_fit(self, (self.bytes is None) == (self.factors is None) and (self.out, self.bytes) != (None, None))
        if self.out is not None:
            require_fit(self, slots.write(self, self.out, "i2") == width)
        if self.bytes is not None and self.factors is not None:
            require_fit(self, slots.write(self, self.bytes, "u1") == width)
            require("GateCodes", "factors", self.factors, np.float32, (width,))
            require_finite(self, self.factors)
        require("GateCodes", "curve", self.curve, np.float32, (3, SEGMENTS))
        require_finite(self, self.curve)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        gates = run.buffers[self.gates]
        t = np.abs(gates) * np.float32(GATE_SCALE)
        t = np.where(t < SEGMENTS - 1, t, np.float32(SEGMENTS - 1))  # also for NaN
        c0, c1, c2 = self.curve[:, t.astype(np.int64)]
        y = c0 + t * (c1 + t * c2)
        gated = run.buffers[self.x].astype(np.float32) * np.where(gates < 0, 1 - y, y)
        if self.out is not None:
            run.buffers[self.out] = to_codes(gated)
        if self.bytes is not None and self.factors is not None:
            run.buffers[self.bytes] = to_bytes(gated * self.factors)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        factors = None if self.factors is None else contiguous(self.factors)
        program.gate_codes(self.x, self.gates, self.out, contiguous(self.curve), GATE_SCALE, self.bytes, factors)


@dataclass(frozen=True, eq=False)
class CodeProduct(Step):
    """out = scale sum_j x_j float32(y_j), for floats x and codes y."""

    x: int
    y: int
    out: int
    scale: float

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, slots.read(self, self.x, "f4") == slots.read(self, self.y, "i2"))
        require_fit(self, slots.write(self, self.out, "f4") == 1)
        require_finite(self, self.scale)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        products = run.buffers[self.x] * run.buffers[self.y].astype(np.float32)
        run.buffers[self.out][:, 0] = lane_sum(products) * np.float32(self.scale)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.code_product(self.x, self.y, self.out, self.scale)


@dataclass(frozen=True, eq=False)
class FieldAttention(Step):
    """Multi-head attention of every field f of a sample to all its fields g (Song et al. 2019, "AutoInt", eq. 5 to 8).

        [q_f k_f v_f] = clip(rint(float32(x_f weight) scale + bias), -CODES, CODES)    codes
        r_f           = float32(x_f weight) scale + bias                               in units of the result
        e_fg          = rint(exp((<q_f, k_g> - max_g <q_f, k_g>) score) most), most = min(32767, WEIGHTS // F)
        out_f         = clip(rint(sum_g e_fg v_g (value / sum_g e_fg) + r_f), -CODES or, with relu, 0, CODES)

    per head; x_f are the codes of field f. The result has the columns of all fields one after the other: column c of
    field f is code c F + f.

    Attributes:
        x: Buffer "i2" of the codes.
        out: Buffer "i2" of width F heads size.
        fields: F.
        heads: Heads.
        size: Size of a head.
        weight: int16 [inputs, 4 heads size]: columns of q, k, v and r; without those of r, r is 0.
        scale: float32 [columns].
        bias: float32 [columns].
        score: Factor of scores.
        value: Factor of values, in units of the result.
        relu: Whether the result ends in a ReLU.
        positions: First code of every field, int32 [F]; None: x has the columns of all fields one after the other.
    """

    x: int
    out: int
    fields: int
    heads: int
    size: int
    weight: Array
    scale: Array
    bias: Array
    score: float
    value: float
    relu: bool
    positions: Array | None = None

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width, room = self.heads * self.size, slots.read(self, self.x, "i2")
        require_fit(self, 1 <= self.fields <= VECTORS and self.heads >= 1 and 1 <= self.size <= MAX_SIZE)
        inputs, columns = self.weight.shape if self.weight.ndim == 2 else (0, 0)
        require_fit(self, inputs >= 1 and self.heads <= MAX_SIZE and columns in (3 * width, 4 * width))
        require("FieldAttention", "weight", self.weight, np.int16, (inputs, columns))
        for name in ("scale", "bias"):
            require("FieldAttention", name, getattr(self, name), np.float32, (columns,))
        if self.positions is None:
            require_fit(self, room == self.fields * inputs)
        else:
            require_vectors(self, self.positions, inputs, room)
            require_fit(self, self.positions.size == self.fields)
        require_fit(self, slots.write(self, self.out, "i2") == self.fields * width)
        if CODES * int(np.abs(self.weight.astype(np.int64)).sum(axis=0).max()) >= 2**31:
            raise RequestError("FieldAttention can overflow 32 bits; use smaller weights")
        require_finite(self, self.scale, self.bias, self.score, self.value)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        fields, size, x = self.fields, self.size, run.buffers[self.x]
        if self.positions is None:
            x = x.reshape(len(x), len(self.weight), fields).transpose(0, 2, 1)
        else:
            x = vectors(x, self.positions, len(self.weight))
        sums = x.astype(np.int64) @ self.weight.astype(np.int64)
        y = sums.astype(np.float32) * self.scale + self.bias
        parts = self.weight.shape[1] // (self.heads * size)
        heads = y.reshape(len(x), fields, parts, self.heads, size).transpose(2, 0, 3, 1, 4)  # [qkvr, n, heads, F, size]
        q, k, v = to_codes(heads[:3]).astype(np.int64)
        scores = q @ k.transpose(0, 1, 3, 2)
        below = (scores - scores.max(axis=-1, keepdims=True)).astype(np.float32) * np.float32(self.score)
        e = np.rint(exponential(below) * np.float32(min(32767, WEIGHTS // fields))).astype(np.int64)
        inverse = np.float32(self.value) / e.sum(axis=-1, keepdims=True).astype(np.float32)
        result = (e @ v).astype(np.float32) * inverse
        codes = to_codes(result + heads[3] if len(heads) > 3 else result)
        codes = np.maximum(codes, 0) if self.relu else codes
        run.buffers[self.out] = codes.transpose(0, 1, 3, 2).reshape(len(x), self.heads * size * fields)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        positions = None if self.positions is None else contiguous(self.positions)
        arrays = contiguous(self.weight), contiguous(self.scale), contiguous(self.bias)
        sizes = self.fields, self.heads, self.size
        program.field_attention(self.x, self.out, *sizes, positions, *arrays, self.score, self.value, self.relu)
