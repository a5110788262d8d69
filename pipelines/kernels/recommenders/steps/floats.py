"""Steps on float vectors, and those that end in one float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    MAX_OUTPUTS,
    Run,
    Slots,
    Step,
    lane_sum,
    require_finite,
    require_fit,
    softmax,
)
from pipelines.kernels.transformer.reference import exponential

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram


@dataclass(frozen=True, eq=False)
class Normalize(Step):
    """out = x / sqrt(max(sum_j x_j^2 + epsilon, least)), of max(x, 0) where `relu`."""

    x: int
    out: int
    epsilon: float
    least: float = 0.0
    relu: bool = False

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, slots.read(self, self.x, "f4") == slots.write(self, self.out, "f4") and self.epsilon >= 0)
        require_finite(self, self.epsilon, self.least)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.buffers[self.x]
        x = np.where(x < 0, np.float32(0), x) if self.relu else x
        squares = np.maximum(lane_sum(x * x) + np.float32(self.epsilon), np.float32(self.least))
        run.buffers[self.out] = x / np.sqrt(squares)[:, None]

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.normalize(self.x, self.out, self.epsilon, self.least, self.relu)


@dataclass(frozen=True, eq=False)
class Leaky(Step):
    """out_j = x_j, times slope_j where it is below 0 (a leaky ReLU, or PReLU). slope: float32 [width]."""

    x: int
    out: int
    slope: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        require_fit(self, slots.write(self, self.out, "f4") == width)
        require("Leaky", "slope", self.slope, np.float32, (width,))
        require_finite(self, self.slope)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.buffers[self.x]
        run.buffers[self.out] = np.where(x < 0, x * self.slope, x)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.leaky(self.x, self.out, contiguous(self.slope))


@dataclass(frozen=True, eq=False)
class Tanh(Step):
    """out_j = tanh(x_j), to 1e-7."""

    x: int
    out: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, slots.read(self, self.x, "f4") == slots.write(self, self.out, "f4"))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.buffers[self.x]
        e = exponential(np.float32(-2) * np.abs(x))
        size = (1 - e) / (1 + e)
        run.buffers[self.out] = np.where(x < 0, -size, size)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.tanh(self.x, self.out)


@dataclass(frozen=True, eq=False)
class Mixture(Step):
    """Slices of x, each times the weight of its expert: out_ej = x_ej softmax(gates)_e."""

    x: int
    gates: int
    out: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        require_fit(
            self, width % slots.read(self, self.gates, "f4") == 0 and slots.write(self, self.out, "f4") == width
        )

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x, weights = run.buffers[self.x], softmax(run.buffers[self.gates])
        run.buffers[self.out] = x * np.repeat(weights, x.shape[1] // weights.shape[1], axis=1)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.mixture(self.x, self.gates, self.out)


@dataclass(frozen=True, eq=False)
class GatedSum(Step):
    """out_j = sum_e softmax(gates)_e x_ej, added from the first expert on; max(x, 0) for x where `relu`.

    The mixture of experts of MMoE (Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", eq. 6).

    Attributes:
        x: Buffers "f4" of width d, one an expert.
        gates: Buffer "f4" of the K gate logits.
        out: Buffer "f4" of width d.
        relu: Whether experts end in a ReLU.
    """

    x: tuple[int, ...]
    gates: int
    out: int
    relu: bool = False

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, 1 <= len(self.x) <= MAX_OUTPUTS and len(self.x) == slots.read(self, self.gates, "f4"))
        widths = {slots.read(self, slot, "f4") for slot in self.x}
        require_fit(self, widths == {slots.write(self, self.out, "f4")} and self.out not in (*self.x, self.gates))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        weights, total = softmax(run.buffers[self.gates]), np.zeros_like(run.buffers[self.out])
        for slot, weight in zip(self.x, weights.T, strict=True):
            x = run.buffers[slot]
            total += (np.where(x < 0, np.float32(0), x) if self.relu else x) * weight[:, None]
        run.buffers[self.out] = total

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.gated_sum(list(self.x), self.gates, self.out, self.relu)


@dataclass(frozen=True, eq=False)
class Product(Step):
    """out = sum_j x_j y_j."""

    x: int
    y: int
    out: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, slots.read(self, self.x, "f4") == slots.read(self, self.y, "f4"))
        require_fit(self, slots.write(self, self.out, "f4") == 1)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out][:, 0] = lane_sum(run.buffers[self.x] * run.buffers[self.y])

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.product(self.x, self.y, self.out)


@dataclass(frozen=True, eq=False)
class Weighted(Step):
    """out = sum_j float32(x[first + j]) weight_j. weight: float32 [K]."""

    x: int
    first: int
    weight: Array
    out: int

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require("Weighted", "weight", self.weight, np.float32, (self.weight.size,))
        require_fit(
            self, self.weight.size >= 1 and 0 <= self.first <= slots.read(self, self.x, "i2") - self.weight.size
        )
        require_fit(self, slots.write(self, self.out, "f4") == 1)
        require_finite(self, self.weight)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.buffers[self.x][:, self.first : self.first + self.weight.size]
        run.buffers[self.out][:, 0] = lane_sum(x.astype(np.float32) * self.weight)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.weighted(self.x, self.first, contiguous(self.weight), self.out)


@dataclass(frozen=True, eq=False)
class Total(Step):
    """out = bias + sum_t terms_t factor_t, added in this order, then the sigmoid if `sigmoid`.

    terms: (buffer, factor) each, the first column of a buffer "f4".
    """

    out: int
    terms: tuple[tuple[int, float], ...]
    bias: float
    sigmoid: bool

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        for slot, factor in self.terms:
            slots.read(self, slot, "f4")
            require_finite(self, factor)
        require_fit(self, slots.write(self, self.out, "f4") == 1)
        require_finite(self, self.bias)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        logit = np.full(len(run.ids), self.bias, np.float32)
        for slot, times in self.terms:
            logit += run.buffers[slot][:, 0] * np.float32(times)
        run.buffers[self.out][:, 0] = 1 / (1 + np.exp(-logit)) if self.sigmoid else logit

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.total(self.out, list(self.terms), self.bias, self.sigmoid)
