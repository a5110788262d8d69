"""Pools: largest bytes and means of windows or of all pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps.base import Packing, Run, Shape, Step, bytes_fit, clipped, fits

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True)
class MaxPool(Step):
    """The largest byte of each window, without padding."""

    x: int
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    method: ClassVar[str] = "max_pool"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        _pool(self, self.kernel, self.strides, self.pads, program.read(self, self.x, written), program, written)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        taps = _taps(self, run.tensors[self.x])
        run.tensors[self.out] = np.max([np.where(inside, values, 0) for values, inside in taps], 0)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, self.kernel, self.strides, self.pads

    @staticmethod
    def add_to(
        network: ImageNetwork, x: int, out: int, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
    ) -> None:
        """See `Step`."""
        network.max_pool(x=x, out=out, kernel=kernel, strides=strides, pads=pads)


@dataclass(frozen=True)
class AveragePool(Step):
    """The mean of each window, without padding unless `padded`, as onnxruntime's QLinearAveragePool.

    clip(rint(sum(x_scale (x - x_zero)) / count / scale + zero), 0, 255)    in float32, summed in order
    """

    x: int
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    x_scale: float
    x_zero: int
    scale: float
    zero: int
    padded: bool = False
    method: ClassVar[str] = "average_pool"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        _pool(self, self.kernel, self.strides, self.pads, program.read(self, self.x, written), program, written)
        fits(self, bool(np.isfinite([self.x_scale, self.scale]).all()) and min(self.x_scale, self.scale) > 2**-60)
        fits(self, self.x_scale / self.scale < 2**20)
        bytes_fit(self, self.x_zero, self.zero)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        total: Array = np.zeros(1, np.float32)
        count: Array = np.zeros(1, np.float32)
        for taps, inside in _taps(self, run.tensors[self.x]):
            real = (taps.astype(np.float32) - np.float32(self.x_zero)) * np.float32(self.x_scale)
            total = np.where(inside, total + real, total)
            count = count + (inside | self.padded).astype(np.float32)
        run.tensors[self.out] = clipped(np.rint(total / count / np.float32(self.scale) + np.float32(self.zero)))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        values = (self.x_scale, self.x_zero, self.scale, float(self.zero), self.padded)
        return (self.x, self.out, self.kernel, self.strides, self.pads, *values)

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        out: int,
        kernel: Sequence[int],
        strides: Sequence[int],
        pads: Sequence[int],
        x_scale: float,
        x_zero: int,
        scale: float,
        zero: float,
        padded: bool,
    ) -> None:
        """See `Step`."""
        network.average_pool(
            x=x,
            out=out,
            kernel=kernel,
            strides=strides,
            pads=pads,
            x_scale=x_scale,
            x_zero=x_zero,
            scale=scale,
            zero=zero,
            padded=padded,
        )


@dataclass(frozen=True)
class GlobalAverage(Step):
    """The mean of each channel, [1, 1, channels]: clip(rint(float32(sum x - H W x_zero) scale) + zero, 0, 255).

    scale = s_x / (s_y H W), in float32. If `out` is -1, the program's result is float32(sum x - H W x_zero) scale with
    scale = s_x / (H W).
    """

    x: int
    out: int
    x_zero: int
    scale: float
    zero: int
    method: ClassVar[str] = "global_average"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written)
        if self.out < 0:
            fits(self, program.steps[-1] is self and program.results == channels)
        else:
            fits(self, program.write(self, self.out, written) == (1, 1, channels))
        fits(self, height * width < 2**23 and 0 < self.scale * height * width < 2**20)
        bytes_fit(self, self.x_zero, self.zero)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        height, width, _ = run.tensors[self.x].shape
        sums = run.tensors[self.x].sum(axis=(0, 1), dtype=np.int64) - height * width * self.x_zero
        mean: Array = sums.astype(np.float32) * np.float32(self.scale)
        if self.out < 0:
            run.results.append((np.arange(mean.size), mean))
        else:
            run.tensors[self.out] = clipped(np.rint(mean) + self.zero)[None, None]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, self.x_zero, self.scale, self.zero

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, x_zero: int, scale: float, zero: int) -> None:
        """See `Step`."""
        network.global_average(x=x, out=out, x_zero=x_zero, scale=scale, zero=zero)


def _pool(
    step: MaxPool | AveragePool,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    shape: Shape,
    program: ImageProgram,
    written: set[int],
) -> None:
    """Raises RequestError if windows do not fit the tensors, or one lies outside."""
    fits(step, min(*kernel, *strides) >= 1 and min(pads) >= 0)
    fits(step, all(max(pads[axis], pads[axis + 2]) < kernel[axis] for axis in range(2)))
    sizes = (*windows(shape, kernel, strides, pads), shape[2])
    fits(step, min(sizes) >= 1 and program.write(step, step.out, written) == sizes)


def _taps(step: MaxPool | AveragePool, x: Array) -> Iterator[tuple[Array, NDArray[np.bool_]]]:
    """For each place in a window, in order: the bytes there of all windows, and which of them lie inside."""
    top, left, bottom, right = step.pads
    rows, columns = windows(x.shape, step.kernel, step.strides, step.pads)
    padded = np.pad(x, ((top, bottom), (left, right), (0, 0)))
    inside = np.pad(np.ones((*x.shape[:2], 1), bool), ((top, bottom), (left, right), (0, 0)))
    for i in range(step.kernel[0]):
        for j in range(step.kernel[1]):
            cut = slice(i, None, step.strides[0]), slice(j, None, step.strides[1])
            yield padded[cut][:rows, :columns], inside[cut][:rows, :columns]
