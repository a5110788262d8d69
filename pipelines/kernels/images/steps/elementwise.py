"""Steps on single values: sums, products and functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.extension import required
from pipelines.kernels.images.steps.base import Packing, Run, Step, bytes_fit, clipped, fits

if TYPE_CHECKING:
    from pipelines.kernels._native import ByteSum, ImageNetwork
    from pipelines.kernels.images.program import ImageProgram

PackedSum = tuple[float, float, float, int, int]


@dataclass(frozen=True)
class Sum:
    """The quantized sum of two tensors, as onnxruntime's QLinearAdd computes it.

        clip(rint(fma(a, a_ratio, fma(b, b_ratio, fixed))), low, high)      fma: rounded to float32 once

    a_ratio = s_a / s_y, b_ratio = s_b / s_y, fixed = z_y - fma(a_ratio, z_a, b_ratio z_b), in float32.
    """

    a_ratio: float
    b_ratio: float
    fixed: float
    low: int = 0
    high: int = 255

    def check(self, step: object) -> None:
        """Checks that the values are finite and in bounds.

        Args:
            step: Step that contains the sum, for the error message.

        Raises:
            RequestError: A value is out of bounds.
        """
        fits(step, self.in_bounds)
        bytes_fit(step, self.low, self.high)

    @property
    def in_bounds(self) -> bool:
        """Whether sums are exact: no factor is too large."""
        values = np.array([self.a_ratio, self.b_ratio, self.fixed])
        return bool(np.isfinite(values).all() and np.abs(values).max() < 2**20)

    def of(self, a: Array, b: Array) -> NDArray[np.uint8]:
        """Computes the sum; products are exact in long doubles, which are rounded to float32 once.

        Args:
            a: uint8 of the first tensor.
            b: uint8 of the second tensor.

        Returns:
            uint8 of the same shape.
        """
        exact = np.longdouble
        inner = (b.astype(exact) * exact(np.float32(self.b_ratio)) + exact(np.float32(self.fixed))).astype(np.float32)
        outer = (a.astype(exact) * exact(np.float32(self.a_ratio)) + inner.astype(exact)).astype(np.float32)
        return clipped(np.rint(outer), self.low, self.high)

    def packed(self) -> PackedSum:
        """Returns the arguments of `byte_sum`, in a form that a file can hold."""
        return self.a_ratio, self.b_ratio, self.fixed, self.low, self.high


def quantized_sum(
    scales: tuple[np.float32, np.float32],
    zeros: tuple[int, int],
    scale: np.float32,
    zero: int,
    low: int = 0,
    high: int = 255,
) -> Sum:
    """Returns the `Sum` of two tensors with these qparams.

    Args:
        scales: Scales of the tensors.
        zeros: Zero points of the tensors.
        scale: Scale of the result.
        zero: Zero point of the result.
        low: Lower bound of the result.
        high: Upper bound of the result.
    """
    ratios = scales[0] / scale, scales[1] / scale
    # one rounding, of a product in a fused multiply-add: onnxruntime is compiled so
    shift = np.longdouble(ratios[0]) * zeros[0] + np.longdouble(ratios[1] * np.float32(zeros[1]))
    return Sum(float(ratios[0]), float(ratios[1]), float(np.float32(zero) - np.float32(shift)), low, high)


def byte_sum(a_ratio: float, b_ratio: float, fixed: float, low: int, high: int) -> ByteSum:
    """Creates the parameters of a native sum, see `Sum`.

    Args:
        a_ratio: s_a / s_y.
        b_ratio: s_b / s_y.
        fixed: Constant of the sum.
        low: Lower bound of the result.
        high: Upper bound of the result.

    Returns:
        The native object.

    Raises:
        RequestError: The kernels are missing.
    """
    native: ByteSum = required().ByteSum(a_ratio=a_ratio, b_ratio=b_ratio, fixed=fixed, low=low, high=high)
    return native


@dataclass(frozen=True)
class Addition(Step):
    """`Sum` of the tensors a and b."""

    a: int
    b: int
    out: int
    sum: Sum
    method: ClassVar[str] = "addition"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        self.sum.check(self)
        shape = program.read(self, self.a, written)
        fits(self, program.read(self, self.b, written) == shape == program.write(self, self.out, written))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.a, self.b)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.tensors[self.out] = self.sum.of(run.tensors[self.a], run.tensors[self.b])

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.a, self.b, self.out, self.sum.packed()

    @staticmethod
    def add_to(network: ImageNetwork, a: int, b: int, out: int, packed_sum: PackedSum) -> None:
        """See `Step`."""
        network.addition(a=a, b=b, out=out, sum=byte_sum(*packed_sum))


@dataclass(frozen=True)
class Product(Step):
    """x times `gate`, a tensor of the same shape or one pixel for all, as onnxruntime's QLinearMul computes it.

        clip(rint(float32(a b) ((x_scale gate_scale) / scale) + zero), 0, 255)                     without bounds
        clip(rint((float32(a) x_scale) (float32(b) gate_scale) / scale) + zero, low, high)         with a Relu or Clip

    a = x - x_zero, b = gate - gate_zero.
    """

    x: int
    gate: int
    out: int
    x_zero: int
    gate_zero: int
    x_scale: float
    gate_scale: float
    scale: float
    zero: int
    low: int = 0
    high: int = 255
    method: ClassVar[str] = "product"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        fits(self, program.read(self, self.gate, written) in (shape, (1, 1, shape[2])))
        fits(self, program.write(self, self.out, written) == shape)
        scales = np.array([self.x_scale, self.gate_scale, self.scale], np.float32)
        fits(self, bool(np.isfinite(scales).all() and (scales > 0).all()))
        fits(self, bool(np.isfinite(scales[0] * scales[1] / scales[2])))
        bytes_fit(self, self.x_zero, self.gate_zero, self.zero, self.low, self.high)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x, self.gate)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        a = run.tensors[self.x].astype(np.int32) - self.x_zero
        b = run.tensors[self.gate].astype(np.int32) - self.gate_zero
        scales = [np.float32(scale) for scale in (self.x_scale, self.gate_scale, self.scale)]
        run.tensors[self.out] = product(a, b, scales, self.zero, self.low, self.high)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        scales = (self.x_scale, self.gate_scale, self.scale)
        numbers = (self.x_zero, self.gate_zero, *scales, self.zero, self.low, self.high)
        return self.x, self.gate, self.out, numbers

    @staticmethod
    def add_to(
        network: ImageNetwork, x: int, gate: int, out: int, numbers: tuple[int, int, float, float, float, int, int, int]
    ) -> None:
        """See `Step`."""
        x_zero, gate_zero, x_scale, gate_scale, scale, zero, low, high = numbers
        network.product(
            x=x,
            gate=gate,
            out=out,
            x_zero=x_zero,
            gate_zero=gate_zero,
            x_scale=x_scale,
            gate_scale=gate_scale,
            scale=scale,
            zero=zero,
            low=low,
            high=high,
        )


@dataclass(frozen=True, eq=False)
class Lookup(Step):
    """table[x], any function of a byte: uint8 [256], or [channels, 256] for one table per channel."""

    x: int
    out: int
    table: Array
    method: ClassVar[str] = "lookup"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        require("Lookup", "table", self.table, np.uint8, (256,) if self.table.ndim == 1 else (shape[2], 256))
        fits(self, shape == program.write(self, self.out, written))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.tensors[self.x]
        run.tensors[self.out] = self.table[x] if self.table.ndim == 1 else self.table[np.arange(x.shape[2]), x]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, np.ascontiguousarray(self.table)

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, table: Array) -> None:
        """See `Step`."""
        network.lookup(x=x, out=out, table=table)


def product(a: Array, b: Array, scales: Sequence[np.float32], zero: int, low: int, high: int) -> NDArray[np.uint8]:
    """Computes `Product` of factors without their zero points.

    Args:
        a: int32 of x, minus its zero point.
        b: int32 of the gate, minus its zero point; broadcast to `a`.
        scales: (x scale, gate scale, result scale).
        zero: Zero point of the result.
        low: Lower bound.
        high: Upper bound.

    Returns:
        uint8 of the shape of `a`.
    """
    a_scale, b_scale, scale = scales
    if (low, high) == (0, 255):
        ratio = (a_scale * b_scale) / scale
        return clipped(np.rint((a * b).astype(np.float32) * ratio + np.float32(zero)))
    real = (a.astype(np.float32) * a_scale) * (b.astype(np.float32) * b_scale)
    return clipped(np.rint(real / scale) + np.float32(zero), low, high)
