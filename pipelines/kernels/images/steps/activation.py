"""Activations of sums that become bytes, by a table in integers of 16 bits; bounds, logarithms, quotients of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.extension import required
from pipelines.kernels.images.steps.base import Packing, Run, clipped, fits
from pipelines.kernels.images.steps.floats import FloatProduct, FloatStep, PackedOperand

if TYPE_CHECKING:
    from pipelines.kernels import _native
    from pipelines.kernels._native import ImageNetwork

PackedTable = tuple[int, int, int, Array]
SEGMENTS = 64
LARGEST = 2**15 - 1
FACTORS = range(
    2**8, 2**12 + 1
)  # with lower ones 255 steps are more than int16, with higher ones the first rounding counts
NEGLIGIBLE, MOST_OFF = 1 / 32, 1 / 4  # steps of the bytes
LOG = (  # factors of log(1 + m) / m^3 + 1 / (2 m) - 1 / m^2, from that of m^8 on
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


@dataclass(frozen=True, eq=False)
class ActivationTable:
    """An activation f(x) = max(x, 0) - g(|x|) whose result is quantized, with g between the starts of 64 segments.

        x = int16(rint(float32(acc) scale))     scale: of factor / 2^15 steps of the bytes; int16 saturates
        u = min(|x|, 64 2^shift - 1), i = u >> shift, p = (u mod 2^shift) 2^(15 - shift)
        g = starts_i + (((starts_{i+1} - starts_i) p + 2^14) >> 15)
        byte = clip(((int16(max(x, 0) - g) factor + 2^14) >> 15) + zero, 0, 255)

    With gains of channels, int16(max(x, 0) - g) is first replaced by (int16(max(x, 0) - g) gain + 2^14) >> 15.

    Attributes:
        factor: Steps of the bytes that 2^15 is.
        zero: Zero point of the bytes.
        shift: Bits of a segment.
        starts: int16 [65].
    """

    factor: int
    zero: int
    shift: int
    starts: Array

    def check(self, step: object) -> None:
        """Checks that the values are in bounds.

        Args:
            step: Step that contains the table, for the error message.

        Raises:
            RequestError: A value is out of bounds.
        """
        require("ActivationTable", "starts", self.starts, np.int16, (SEGMENTS + 1,))
        fits(step, self.factor in FACTORS and 1 <= self.shift <= 9 and 0 <= self.zero <= 255)
        fits(step, int(np.abs(self.starts.astype(np.int32)).max()) <= LARGEST // 2)

    def of(self, rounded: NDArray[np.float32], gains: Array | None = None) -> NDArray[np.uint8]:
        """Computes the bytes.

        Args:
            rounded: rint(float32(acc) scale), float32 of any shape.
            gains: int16 [channels] of its last axis, or None.

        Returns:
            uint8 of the same shape.
        """
        x = _word(rounded).astype(np.int32)
        u = np.minimum(np.abs(x), (SEGMENTS << self.shift) - 1)
        segment, part = u >> self.shift, (u << (15 - self.shift)) & LARGEST
        starts = self.starts.astype(np.int32)
        g = starts[segment] + _product(starts[segment + 1] - starts[segment], part)
        result = _word(np.maximum(x, 0) - g)
        if gains is not None:
            result = _product(result, gains.astype(np.int32))
        return clipped(_product(result, self.factor) + self.zero)

    def packed(self) -> PackedTable:
        """Returns the arguments of `native_table`, in a form that a file can hold."""
        return self.factor, self.zero, self.shift, self.starts


def _word(x: Array) -> Array:
    return np.clip(x, -LARGEST - 1, LARGEST)


def _product(x: NDArray[np.int32], factor: Any) -> NDArray[np.int32]:
    """Returns x factor / 2^15, rounded."""
    return np.asarray((x * factor + 2**14) >> 15, np.int32)


def native_table(factor: int, zero: int, shift: int, starts: Array) -> _native.ActivationTable:
    """Creates the native `ActivationTable`, see there.

    Args:
        factor: Steps of the bytes that 2^15 is.
        zero: Zero point of the bytes.
        shift: Bits of a segment.
        starts: int16 [65].

    Raises:
        ValueError: A value is out of bounds.
        RequestError: The kernels are missing.
    """
    table: _native.ActivationTable = required().ActivationTable(factor=factor, zero=zero, shift=shift, starts=starts)
    return table


def exact(kind: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes an activation as it is defined; all but the sigmoid s are x s(x) with s(-x) = 1 - s(x).

    Args:
        kind: One of `ACTIVATIONS`, or sigmoid.
        x: float64 [n].

    Returns:
        float64 [n].
    """
    if kind == "gelu":
        return np.asarray(x * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x])) / 2)
    if kind == "gelu_tanh":
        return np.asarray(x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2)
    with np.errstate(over="ignore"):
        return np.asarray((1 if kind == "sigmoid" else x) / (1 + np.exp(-x)))


def activation_table(kind: str, scale: float, zero: int, spread: float = 1.0) -> ActivationTable | None:
    """Makes the table of an activation.

    Args:
        kind: One of `ACTIVATIONS`.
        scale: Scale of the bytes.
        zero: Zero point of the bytes.
        spread: The largest gain of a channel over the smallest one.

    Returns:
        The table; None if the steps of the bytes are so small that 16 bits or the segments do not do.
    """
    values = np.arange(0, 40, 0.125)
    curved = values[np.abs(exact(kind, -values)) > NEGLIGIBLE * scale]
    reach = (curved.max(initial=0) + 0.125) / scale  # in steps
    factor = math.ceil(max(FACTORS.start * spread, reach))  # so that int16 reaches as far
    if factor not in FACTORS:
        return None
    unit = scale * factor / 2**15
    shift = max(1, math.ceil(math.log2(reach * scale / unit / SEGMENTS)))
    g = -exact(kind, -np.arange(-1, SEGMENTS + 2) * unit * 2**shift) / unit
    # A chord is off by c t (1 - t) / 2 with c the second difference, c / 12 in the mean, which is taken off.
    off = (g[2:] - 2 * g[1:-1] + g[:-2]) / 12
    starts = np.rint(g[1:-1] - off)
    if np.abs(off).max() * unit > MOST_OFF * scale or np.abs(starts).max() > LARGEST // 2:
        return None
    return ActivationTable(factor, zero, shift, starts.astype(np.int16))


@dataclass(frozen=True, eq=False)
class FloatClip(FloatStep):
    """x with bounds: `high` where x is above, `low` where it is below, as Relu and Clip have them.

    Attributes:
        low: Lower bound.
        high: Upper bound.
    """

    low: float
    high: float
    method: ClassVar[str] = "float_clip"

    def check_channels(self, channels: int) -> None:
        """See `FloatStep`."""
        fits(self, self.low <= self.high)

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        return bounded(x, self.low, self.high)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.low, self.high

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, low: float, high: float) -> None:
        """See `Step`."""
        network.float_clip(x=x, out=out, low=low, high=high)


@dataclass(frozen=True, eq=False)
class FloatLog(FloatStep):
    """The natural logarithm, each operation rounded: e log 2 + log(1 + m) by a polynomial (Moshier, Cephes logf)."""

    method: ClassVar[str] = "float_log"

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        mantissa, exponent = np.frexp(np.where((x > 0) & (x < np.inf), x, np.float32(1)))
        small = mantissa < np.float32(0.70710678)
        power = (exponent - small).astype(np.float32)
        m = np.where(small, mantissa + mantissa, mantissa) - np.float32(1)
        square, y = m * m, np.full_like(m, LOG[0])
        for factor in LOG[1:]:
            y = y * m + np.float32(factor)
        y = y * m * square + power * np.float32(-2.12194440e-4) - square * np.float32(0.5)
        real = m + y + power * np.float32(0.693359375)
        ends = np.where(x == 0, -np.inf, np.where(x > 0, np.inf, np.nan))
        return np.asarray(np.where((x > 0) & (x < np.inf), real, ends), np.float32)

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_log(x=x, out=out)


@dataclass(frozen=True, eq=False)
class FloatFloor(FloatStep):
    """floor(x / divisor).

    Attributes:
        divisor: Divisor.
    """

    divisor: float = 1.0
    method: ClassVar[str] = "float_floor"

    def check_channels(self, channels: int) -> None:
        """See `FloatStep`."""
        fits(self, bool(np.isfinite(np.float32(self.divisor)) and np.float32(self.divisor) != 0))

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(np.floor(x / np.float32(self.divisor)))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.divisor

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, divisor: float) -> None:
        """See `Step`."""
        network.float_floor(x=x, out=out, divisor=divisor)


@dataclass(frozen=True)
class FloatQuotient(FloatProduct):
    """a / b, tensors of the shape of `to`; b may be one pixel for all, or one channel."""

    method: ClassVar[str] = "float_quotient"

    def compute(self, run: Run) -> None:
        """See `Step`."""
        with np.errstate(all="ignore"):
            self.to.store(run, self.a.real(run) / self.b.real(run))

    @staticmethod
    def add_to(network: ImageNetwork, a: PackedOperand, b: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_quotient(a=a, b=b, out=out)


def bounded(x: NDArray[np.float32], low: float, high: float) -> NDArray[np.float32]:
    """Returns values with bounds; NaN stays NaN.

    Args:
        x: float32 of any shape.
        low: Lower bound.
        high: Upper bound.
    """
    least = np.where(x < np.float32(low), np.float32(low), x)
    return np.where(least > np.float32(high), np.float32(high), least)
