"""Convolutions and fully connected layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.extension import required
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps.activation import (
    ActivationTable,
    PackedTable,
    activation_table,
    bounded,
    native_table,
)
from pipelines.kernels.images.steps.base import LARGEST, Packing, Run, Step, bytes_fit, clipped, fits
from pipelines.kernels.images.steps.elementwise import PackedSum, Sum, byte_sum
from pipelines.kernels.images.steps.floats import Operand, PackedOperand
from pipelines.quantization.qdq.scales import steps

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram

ROUNDED = 2**30  # magnitudes of products that are rounded to int32
BYTES = 256  # magnitude of a product that is 0 or 255, whatever its zero point
LARGEST_GAIN = 2**15 - 1
FEW_PIXELS = 2  # that wait for the weights of a layer


@dataclass(frozen=True, eq=False)
class Convolution(Step):
    """A convolution or, over a window as large as its tensor, a fully connected layer.

        acc[y, x, o] = bias_o + sum_{i, j, k} padded[y sy + i dy, x sx + j dx, g(o) + k] weight[o, i, j, k]

    The tensor `out` gets `requantized(acc)`. If it is -1, the program's result is float32(acc) scale, flat. Integers
    cannot overflow: 255 sum |weight| + |bias| < 2^31 is checked.

    Attributes:
        pads: Rows and columns of the byte `fill` at top, left, bottom and right.
        weight: int8 [O, kh, kw, C / groups].
        bias: int32 [O], with the input's zero point.
        scale: float32 [O]: s_x s_w / s_y, or s_x s_w.
        floats: Whether `out` is a tensor of float32(acc) scale, plus the float tensor `residual`, if it is not -1.
        activation: If set, `out` gets the bytes that it makes of rint(float32(acc) scale).
        gains: int16 [O] of the activation, or None.
        sum: If set, the result is the sum of the requantized bytes and the tensor `other`, which is a if `other_first`.
        table: If set, uint8 [256]: `out` gets table[byte] of the bytes.
    """

    x: int
    out: int
    weight: Array
    bias: Array
    scale: Array
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1
    fill: int = 0
    zero: int = 0
    low: int = 0
    high: int = 255
    floats: bool = False
    sum: Sum | None = None
    other: int = -1
    other_first: bool = False
    residual: int = -1
    activation: ActivationTable | None = None
    gains: Array | None = None
    table: Array | None = None
    method: ClassVar[str] = "convolution"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        require("Convolution", "weight", self.weight, np.int8, (*self.weight.shape[:4], *[1] * (4 - self.weight.ndim)))
        outputs, *kernel, inputs = self.weight.shape
        require("Convolution", "bias", self.bias, np.int32, (outputs,))
        require("Convolution", "scale", self.scale, np.float32, (outputs,))
        fits(self, self.groups >= 1 and self.weight.size > 0 and outputs % self.groups == 0)
        fits(self, inputs * self.groups == shape[2] and min(*self.strides, *self.dilations) >= 1)
        fits(self, min(self.pads) >= 0 and max(*self.pads, *kernel, *self.strides, *self.dilations) <= LARGEST)
        sizes = (*windows(shape, kernel, self.strides, self.pads, self.dilations), outputs)
        fits(self, min(sizes) >= 1)
        bytes_fit(self, self.fill, self.zero, self.low, self.high)
        if self.out < 0:
            fits(
                self,
                self.sum is None and program.steps[-1] is self and program.results == sizes[0] * sizes[1] * outputs,
            )
            fits(self, self.activation is None and self.table is None)
        else:
            if self.sum is not None:
                self.sum.check(self)
                fits(self, program.read(self, self.other, written) == sizes)
            depthwise = inputs == 1 < self.groups
            if self.activation is not None:
                self.activation.check(self)
            if self.gains is not None:
                require("Convolution", "gains", self.gains, np.int16, (outputs,))
                fits(self, self.activation is not None and self.groups == 1 and int(self.gains.min()) >= 0)
            ends = (self.floats, self.sum is not None, self.activation is not None)
            fits(self, sum(ends) <= 1 and not (depthwise and (self.floats or self.activation)))
            if self.table is not None:
                require("Convolution", "table", self.table, np.uint8, (256,))
                fits(self, not self.floats and self.activation is None)
            if self.residual >= 0:
                fits(self, self.floats and program.read(self, self.residual, written, floats=True) == sizes)
            fits(self, program.write(self, self.out, written, self.floats) == sizes)
        results = np.abs(self.scale.astype(np.float64)) * self.largest_sums
        rounds = self.out >= 0 and not self.floats
        if self.largest_sums.max() >= 2**31 or not (results.max() < ROUNDED if rounds else np.isfinite(results).all()):
            raise RequestError("a convolution can overflow 32 bits")

    @functools.cached_property
    def largest_sums(self) -> NDArray[np.int64]:
        """The largest magnitude that the sums of an output can have, int64 [O]."""
        reach = 255 * np.abs(self.weight, dtype=np.int16).sum(axis=(1, 2, 3), dtype=np.int64)
        return np.asarray(reach + np.abs(self.bias.astype(np.int64)))

    def saturated(self) -> Convolution:
        """Returns the layer with smaller scales where every sum but 0 saturates, so that products fit 32 bits."""
        most = (0.99 * ROUNDED / np.maximum(self.largest_sums, 1)).astype(np.float32)
        large = (self.scale > most) & (most > BYTES)
        if self.out < 0 or self.floats or not large.any():
            return self
        return replace(self, scale=np.where(large, most, self.scale))

    def activated(self, kind: str, scale: float, zero: int, out: int, gain: Array | None = None) -> Convolution | None:
        """Fuses an activation into the layer.

        Args:
            kind: Kind of the `FloatActivation`.
            scale: Scale of the result.
            zero: Zero point of the result.
            out: Tensor of the result, bytes.
            gain: float32 [O], by which the activation's values are multiplied, or None.

        Returns:
            The layer of bytes; None if there is no table of the activation, or the layer's sums are too large for it.
        """
        gains, spread = None, 1.0
        if gain is not None:
            if self.groups > 1 or not gain.min() > 0:
                return None
            most = float(gain.max()) * 2**15 / LARGEST_GAIN  # whose gain is 2^15
            gains, scale = np.rint(gain * (2**15 / most)).astype(np.int16), scale / most
            spread = float(gain.max() / gain.min())
        table = None if kind == "sigmoid" else activation_table(kind, scale, zero, spread)
        if table is None:
            return None
        scales = np.asarray(self.scale * (2.0**15 / (table.factor * scale)), np.float32)
        if not (np.abs(scales.astype(np.float64)) * self.largest_sums).max() < ROUNDED:
            return None
        return replace(self, out=out, scale=scales, floats=False, activation=table, gains=gains)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x, *((self.other,) if self.sum else ()), *((self.residual,) if self.residual >= 0 else ()))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        real = _convolved(self, run.tensors[self.x]).astype(np.float32) * self.scale
        if self.out < 0:
            run.results.append((np.arange(real.size), real.ravel()))
            return
        if self.floats:
            run.tensors[self.out] = real if self.residual < 0 else real + run.tensors[self.residual]
            return
        if self.activation is not None:
            run.tensors[self.out] = self.activation.of(np.rint(real), self.gains)
            return
        bytes_of = clipped(np.rint(real) + self.zero, self.low, self.high)
        if self.sum is not None:
            other = run.tensors[self.other]
            bytes_of = self.sum.of(*((other, bytes_of) if self.other_first else (bytes_of, other)))
        run.tensors[self.out] = bytes_of if self.table is None else self.table[bytes_of]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        weight, bias, scale = (np.ascontiguousarray(array) for array in (self.weight, self.bias, self.scale))
        pitch = packing.pitches[self.x]
        packed = required().pack_convolution(
            weight=weight,
            bias=bias,
            scale=scale,
            groups=self.groups,
            pitch=pitch,
            dilated=self.dilations[1] > 1,
            isa=packing.isa,
        )
        geometry = (tuple(self.weight.shape), self.groups, pitch, self.strides, self.pads, self.dilations)
        bounds = (self.zero, self.low, self.high)
        sums = (self.sum.packed() if self.sum else None, self.other, self.other_first)
        table = None if self.table is None else np.ascontiguousarray(self.table)
        ends = (self.residual, self.activation.packed() if self.activation else None, self.gains, table)
        return (self.x, self.out, packed, *geometry, self.fill, bounds, *sums, ends)

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        out: int,
        packed: Array,
        weight_shape: Sequence[int],
        groups: int,
        pitch: int,
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
        fill: int,
        bounds: Sequence[int],
        packed_sum: PackedSum | None,
        other: int,
        other_first: bool,
        ends: tuple[int, PackedTable | None, Array | None, Array | None],
    ) -> None:
        """See `Step`."""
        zero, low, high = bounds
        residual, activation, gains, table = ends
        network.convolution(
            x=x,
            out=out,
            packed=packed,
            weight_shape=weight_shape,
            groups=groups,
            pitch=pitch,
            strides=strides,
            pads=pads,
            dilations=dilations,
            fill=fill,
            zero=zero,
            low=low,
            high=high,
            sum=None if packed_sum is None else byte_sum(*packed_sum),
            other=other,
            other_first=other_first,
            residual=residual,
            activation=None if activation is None else native_table(*activation),
            gains=gains,
            table=table,
        )


def _stored(weight: Array) -> tuple[Array, Array | None]:
    """Weights [O, kh, kw, I] as int8 with the scale of each output, where these are exactly the weights."""
    scale = steps(weight, 0, 127)
    if scale is None or not scale.all():
        return weight, None
    codes = np.rint(weight / scale[:, None, None, None])
    exact = np.array_equal(codes * scale[:, None, None, None], weight)
    return (codes.astype(np.int8), scale) if exact else (weight, None)


@dataclass(frozen=True, eq=False)
class FloatConvolution(Step):
    """A convolution of floats or, over a window as large as its tensor, a fully connected layer.

    A sum begins with its bias and takes the products of a window in order, row by row, pixel by pixel, each by a fused
    multiply-add, which rounds once:

        y[o] = clip(fma(x_n, w_n, ... fma(x_1, w_1, bias_o)) + residual, low, high)

    Where few pixels wait for the weights, those that are int8 times a scale of their output are stored as int8.

    Attributes:
        x: Number of the float tensor that is read; its padding is 0.
        to: The tensor that is written.
        weight: float32 [O, kh, kw, C / groups].
        bias: float32 [O].
        residual: Number of a float tensor of the shape of `to`, -1: none.
        low: Lower bound; NaN stays NaN.
        high: Upper bound.
    """

    x: int
    to: Operand
    weight: Array
    bias: Array
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1
    residual: int = -1
    low: float = -np.inf
    high: float = np.inf
    method: ClassVar[str] = "float_convolution"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written, floats=True)
        fits(self, self.weight.ndim == 4 and self.weight.size > 0 and self.groups >= 1)
        outputs, *kernel, inputs = self.weight.shape
        require("FloatConvolution", "weight", self.weight, np.float32, (outputs, *kernel, inputs))
        require("FloatConvolution", "bias", self.bias, np.float32, (outputs,))
        fits(self, outputs % self.groups == 0 and inputs * self.groups == shape[2])
        fits(self, min(*self.strides, *self.dilations) >= 1 and min(self.pads) >= 0 and self.low <= self.high)
        fits(self, max(*self.pads, *kernel, *self.strides, *self.dilations) <= LARGEST)
        sizes = (*windows(shape, kernel, self.strides, self.pads, self.dilations), outputs)
        fits(self, min(sizes) >= 1)
        if self.residual >= 0:
            fits(self, program.read(self, self.residual, written, floats=True) == sizes)
        fits(self, self.to.write(self, program, written) == sizes)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,) if self.residual < 0 else (self.x, self.residual)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        outputs, *kernel, inputs = self.weight.shape
        size = outputs // self.groups
        total: Array | None = None
        for i, j, taps in _taps(self, run.tensors[self.x], kernel):
            if total is None:
                total = np.broadcast_to(self.bias, (*taps.shape[:2], outputs)).copy()
            for group in range(self.groups):
                outs = slice(group * size, (group + 1) * size)
                for k in range(inputs):
                    x = taps[..., group * inputs + k, None]
                    total[..., outs] = multiply_add(x, self.weight[outs, i, j, k], total[..., outs])
        assert total is not None
        if self.residual >= 0:
            total = total + run.tensors[self.residual]
        self.to.store(run, bounded(total, self.low, self.high))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        weight, bias = (np.ascontiguousarray(array) for array in (self.weight, self.bias))
        geometry = (self.groups, self.strides, self.pads, self.dilations)
        height, width, _ = packing.program.tensors[self.out]
        stored = _stored(weight) if height * width <= FEW_PIXELS else (weight, None)
        return (self.x, self.to.packed(), *stored, bias, *geometry, self.residual, (self.low, self.high))

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        out: PackedOperand,
        weight: Array,
        scale: Array | None,
        bias: Array,
        groups: int,
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
        residual: int,
        bounds: Sequence[float],
    ) -> None:
        """See `Step`."""
        low, high = bounds
        network.float_convolution(
            x=x,
            out=out,
            weight=weight,
            scale=scale,
            bias=bias,
            groups=groups,
            strides=strides,
            pads=pads,
            dilations=dilations,
            residual=residual,
            low=low,
            high=high,
        )


def multiply_add(a: Array, b: Array, c: Array) -> NDArray[np.float32]:
    """Returns a b + c, rounded once.

    The product is exact in float64. The float64 sum is rounded to an odd last bit where it is not exact, by its error
    (Knuth's TwoSum), so that rounding it to float32 is right (Boldo and Melquiond 2008, "Emulation of FMA").

    Args:
        a: float32.
        b: float32, of a shape that broadcasts with that of `a`.
        c: float32, likewise.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product, other = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + other
        own = total - product
        error = (product - (total - own)) + (other - own)
        even = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
        odd = np.where(even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
        return np.asarray(odd.astype(np.float32))


def _taps(
    step: Convolution | FloatConvolution, x: Array, kernel: Sequence[int], fill: int = 0
) -> Iterator[tuple[int, int, Array]]:
    """(row, column, what all windows have there [rows, columns, channels]) of a window of padded x."""
    rows, columns = windows(x.shape, kernel, step.strides, step.pads, step.dilations)
    top, left, bottom, right = step.pads
    padded = np.pad(x, ((top, bottom), (left, right), (0, 0)), constant_values=fill)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            taps = padded[i * step.dilations[0] :: step.strides[0], j * step.dilations[1] :: step.strides[1]]
            yield i, j, taps[:rows, :columns]


def _convolved(step: Convolution, x: Array) -> NDArray[np.int64]:
    """The sums of a convolution."""
    outputs, *kernel, inputs = step.weight.shape
    rows, columns = windows(x.shape, kernel, step.strides, step.pads, step.dilations)
    total = np.broadcast_to(step.bias.astype(np.int64), (rows, columns, outputs)).copy()
    size = outputs // step.groups
    for i, j, taps in _taps(step, x.astype(np.int64), kernel, step.fill):
        for group in range(step.groups):
            outs = slice(group * size, (group + 1) * size)
            part = taps[..., group * inputs : (group + 1) * inputs]
            total[..., outs] += part @ step.weight[outs, i, j].astype(np.int64).T
    return total
