"""Float32 steps over all pixels of a tensor: interpolation, and normalization of groups of channels or by responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, fits
from pipelines.kernels.images.steps.floats import FloatMean, FloatStep, PackedOperand

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True, eq=False)
class Interpolation(FloatStep):
    """Weighted sums of pixels, of rows first, then of columns: resizing by linear or cubic functions.

        m[y, i] = sum_t row_weights[y, t] x[rows[y, t], i]
        out[y, z] = sum_t column_weights[z, t] m[y, columns[z, t]]

    The sums are in order, each operation rounded.

    Attributes:
        rows: int64 [height of `to`, taps]: rows of x.
        row_weights: float32 of the same shape.
        columns: int64 [width of `to`, taps]: columns of x.
        column_weights: float32 of the same shape.
    """

    rows: Array
    row_weights: Array
    columns: Array
    column_weights: Array
    method: ClassVar[str] = "interpolation"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        rows, columns, same = self.to.write(self, program, written)
        fits(self, channels == same)
        for places, weights, size, count in (
            (self.rows, self.row_weights, height, rows),
            (self.columns, self.column_weights, width, columns),
        ):
            fits(self, places.ndim == 2 and places.size > 0)
            require("Interpolation", "places", places, np.int64, (count, places.shape[1]))
            require("Interpolation", "weights", weights, np.float32, places.shape)
            fits(self, 0 <= int(places.min()) <= int(places.max()) < size and bool(np.isfinite(weights).all()))

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        mixed = _weighted(x, self.rows, self.row_weights)
        return _weighted(mixed.swapaxes(0, 1), self.columns, self.column_weights).swapaxes(0, 1)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        rows, columns = self.rows.ravel().tolist(), self.columns.ravel().tolist()
        return self.x.packed(), self.to.packed(), rows, self.row_weights, columns, self.column_weights

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: PackedOperand,
        out: PackedOperand,
        rows: Sequence[int],
        row_weights: Array,
        columns: Sequence[int],
        column_weights: Array,
    ) -> None:
        """See `Step`."""
        network.interpolation(
            x=x, out=out, rows=rows, row_weights=row_weights, columns=columns, column_weights=column_weights
        )


def _weighted(x: NDArray[np.float32], places: Array, weights: Array) -> NDArray[np.float32]:
    """Weighted sums of the first axis."""
    taps = (x[places[:, t]] * weights[:, t, None, None] for t in range(places.shape[1]))
    total: NDArray[np.float32] = next(taps)
    for tap in taps:
        total = total + tap
    return total


@dataclass(frozen=True, eq=False)
class GroupNormalization(FloatStep):
    """Normalization over all pixels and the channels of each group (Wu and He 2018); of single channels: of instances.

    Sums are over pixels in order, then over channels; with mean m, variance v and f = gain / sqrt(v + epsilon):

        out = x f + (bias - m f)

    Attributes:
        gain: float32 [channels].
        bias: float32 [channels].
        groups: Number of groups.
        epsilon: Added to the variance.
    """

    gain: Array
    bias: Array
    groups: int
    epsilon: float
    method: ClassVar[str] = "group_norm"

    def check_channels(self, channels: int) -> None:
        """See `FloatStep`."""
        require("GroupNormalization", "gain", self.gain, np.float32, (channels,))
        require("GroupNormalization", "bias", self.bias, np.float32, (channels,))
        fits(self, self.groups >= 1 and channels % self.groups == 0 and 0 <= self.epsilon < np.inf)

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        pixels = x.reshape(-1, x.shape[2])
        mean = self._of_groups(pixels)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.float32(1) / np.sqrt(self._of_groups(np.square(pixels - mean)) + np.float32(self.epsilon))
            factor = factor * self.gain
            return np.asarray(x * factor + (self.bias - mean * factor), np.float32)

    def _of_groups(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean of each group, for each of its channels."""
        total = np.add.accumulate(pixels, axis=0, dtype=np.float32)[-1].reshape(self.groups, -1)
        count = np.float32(len(pixels) * total.shape[1])
        mean = np.add.accumulate(total, axis=1, dtype=np.float32)[:, -1] / count
        return np.asarray(np.repeat(mean, total.shape[1]), np.float32)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.gain, self.bias, self.groups, self.epsilon

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: PackedOperand,
        out: PackedOperand,
        gain: Array,
        bias: Array,
        groups: int,
        epsilon: float,
    ) -> None:
        """See `Step`."""
        network.group_norm(x=x, out=out, gain=gain, bias=bias, groups=groups, epsilon=epsilon)


@dataclass(frozen=True, eq=False)
class ResponseGate(FloatMean):
    """The gate of a global response normalization (Woo et al. 2023), floats [1, 1, channels]: g / (mean(g) + epsilon).

    g is the root of the sum of squares of a channel's pixels in order, its mean that of the sum over channels in order.

    Attributes:
        epsilon: Added to the mean.
    """

    epsilon: float
    method: ClassVar[str] = "response_gate"

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        squares = np.square(x.reshape(-1, x.shape[2]))
        norms = np.sqrt(np.add.accumulate(squares, axis=0, dtype=np.float32)[-1])
        total = np.add.accumulate(norms, dtype=np.float32)[-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            gate = norms / (total / np.float32(len(norms)) + np.float32(self.epsilon))
        return np.asarray(gate, np.float32)[None, None]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.epsilon

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, epsilon: float) -> None:  # type: ignore[override]
        """See `Step`."""
        network.response_gate(x=x, out=out, epsilon=epsilon)
