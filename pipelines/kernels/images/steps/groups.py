"""Float32 steps on runs of channels that follow each other: softmax, and linear layers of few weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Step, fits
from pipelines.kernels.images.steps.floats import Operand, PackedOperand
from pipelines.kernels.transformer.reference.rows import exponential, sum_lanes

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True)
class Softmax(Step):
    """The softmax over each run of `size` channels of a pixel: e (1 / sum e), e = exp(x - max), see `sum_lanes`.

    Attributes:
        x: The tensor that is read.
        to: The tensor that is written; its channels are as many of x from `first` on.
        first: First channel of x.
        size: Channels of a run.
    """

    x: Operand
    to: Operand
    first: int
    size: int
    method: ClassVar[str] = "softmax"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        rows, columns, count = self.to.write(self, program, written)
        fits(self, (rows, columns) == (height, width) and self.size >= 1 and count % self.size == 0)
        fits(self, 0 <= self.first <= channels - count)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        height, width, count = run.shapes[self.to.tensor]
        runs = self.x.real(run)[..., self.first : self.first + count].reshape(height, width, -1, self.size)
        with np.errstate(invalid="ignore"):
            weights = exponential(runs - runs.max(axis=3, keepdims=True))
            real = weights * (np.float32(1) / sum_lanes(weights))[..., None]
        self.to.store(run, real.reshape(height, width, count))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.first, self.size

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, first: int, size: int) -> None:
        """See `Step`."""
        network.softmax(x=x, out=out, first=first, size=size)


@dataclass(frozen=True, eq=False)
class GroupLinear(Step):
    """One linear layer of floats for each run of channels: the products' `sum_lanes`, plus a bias.

    Attributes:
        x: The tensor that is read, runs of `inputs` channels.
        to: The tensor that is written, as many runs of `outputs` channels.
        weight: float32 [outputs, inputs].
        bias: float32 [outputs].
    """

    x: Operand
    to: Operand
    weight: Array
    bias: Array
    method: ClassVar[str] = "group_linear"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        fits(self, self.weight.ndim == 2 and min(self.weight.shape) >= 1)
        outputs, inputs = self.weight.shape
        require("GroupLinear", "weight", self.weight, np.float32, (outputs, inputs))
        require("GroupLinear", "bias", self.bias, np.float32, (outputs,))
        shape = self.to.write(self, program, written)
        fits(self, channels % inputs == 0 and shape == (height, width, channels // inputs * outputs))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = self.x.real(run)
        runs = x.reshape(*x.shape[:2], -1, 1, self.weight.shape[1])
        self.to.store(run, (sum_lanes(runs * self.weight) + self.bias).reshape(*x.shape[:2], -1))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.weight, self.bias

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, weight: Array, bias: Array) -> None:
        """See `Step`."""
        network.group_linear(x=x, out=out, weight=weight, bias=bias)
