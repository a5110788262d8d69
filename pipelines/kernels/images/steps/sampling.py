"""Float32 steps that read pixels at places of a grid, or sum pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Step, fits
from pipelines.kernels.transformer.operations.base import LANES

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram

OUTSIDE = ("zeros", "border", "reflection")
FARTHEST = 2**22  # pixels outside that are reflected


@dataclass(frozen=True)
class Sampling(Step):
    """Pixels of x at the places of a grid (GridSample of ONNX), each operation rounded.

    Coordinates g from -1 to 1 are ((g + 1) size - 1) / 2 pixels or, if `align`, (g + 1) / 2 (size - 1). The result
    interpolates the pixels of each row by the horizontal fraction p, then the rows by the vertical fraction q. The
    weights of a fraction p are 1 - p and p, or the four weights of a cubic function with a = -0.75 (Keys 1981).

    Attributes:
        x: Number of the float tensor that is read; its rows are `groups` of as many.
        grid: Number of the float tensor of places across and down, [height, width, 2].
        out: Number of the float tensor that is written, of the grid's height and width; its rows are `groups`.
        groups: Number of groups.
        taps: Pixels of a row and of a column that are weighed: 1 (the nearest, half to even), 2 (linear) or 4 (cubic).
        outside: One of `OUTSIDE`: pixels outside are 0, those of the border, or reflected at it.
        align: Whether -1 and 1 are the centres of the first and last pixel.
        plane: If set, (first, height, width): the pixels of x from the first on, row by row, are an image of this size.
            Its channels are those of the groups, whole 16 each.
    """

    x: int
    grid: int
    out: int
    groups: int = 1
    taps: int = 2
    outside: str = "zeros"
    align: bool = False
    plane: tuple[int, int, int] | None = None
    method: ClassVar[str] = "sampling"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written, floats=True)
        grid = program.read(self, self.grid, written, floats=True)
        fits(self, self.taps in (1, 2, 4) and self.outside in OUTSIDE)
        fits(self, self.groups >= 1 and grid[0] % self.groups == 0 and grid[2] == 2)
        channels = shape[2]
        if self.plane is None:
            fits(self, shape[0] % self.groups == 0)
        else:
            first, height, width = self.plane
            fits(self, min(first, height - 1, width - 1) >= 0 and first + height * width <= shape[0] * shape[1])
            fits(self, channels % (LANES * self.groups) == 0)
            channels //= self.groups
        fits(self, program.write(self, self.out, written, floats=True) == (*grid[:2], channels))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.x, self.grid

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x, grid = run.tensors[self.x], run.tensors[self.grid]
        if self.plane is not None:
            first, height, width = self.plane
            parts = x.reshape(-1, self.groups, x.shape[2] // self.groups)[first : first + height * width]
            x = np.moveaxis(parts, 1, 0).reshape(self.groups * height, width, -1)
        x, grid = (array.reshape(self.groups, -1, *array.shape[1:]) for array in (x, grid))
        across, down = (self._coordinate(grid[..., axis], x.shape[2 - axis]) for axis in (0, 1))
        if self.taps == 1:
            pixels = self._read(x, _place(np.rint(down)), _place(np.rint(across)))
        else:
            left, upper = np.floor(across), np.floor(down)
            first, near = self.taps // 2 - 1, np.arange(self.taps)
            i, j = ([place - first + tap for tap in near] for place in (_place(upper), _place(left)))
            p, q = self._weights((across - left)[..., None]), self._weights((down - upper)[..., None])
            with np.errstate(invalid="ignore"):
                rows = [_weighed(p, [self._read(x, row, column) for column in j]) for row in i]
                pixels = _weighed(q, rows)
        run.tensors[self.out] = pixels.reshape(-1, *pixels.shape[2:])

    def _weights(self, part: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """The weights of the pixels around a place at a part of the distance between two of them."""
        if self.taps == 2:
            return [np.float32(1) - part, part]
        a, one, two = np.float32(-0.75), np.float32(1), np.float32(2)

        def far(x: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.asarray(((a * x - np.float32(5) * a) * x + np.float32(8) * a) * x - np.float32(4) * a)

        def near(x: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.asarray(((a + two) * x - (a + np.float32(3))) * x * x + one)

        with np.errstate(invalid="ignore"):
            return [far(part + one), near(part), near(one - part), far(two - part)]

    def _coordinate(self, g: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Coordinates in pixels (or NaN), bounded where pixels further outside are the same, or by `FARTHEST`."""
        one, two, count = np.float32(1), np.float32(2), np.float32(size)
        with np.errstate(invalid="ignore", over="ignore"):
            x = (g + one) / two * (count - one) if self.align else ((g + one) * count - one) / two
            low, high = np.float32(-FARTHEST), np.float32(FARTHEST)
            if self.outside != "reflection":
                at_border = self.outside == "border" and self.taps <= 2
                low, high = (np.float32(0), count - one) if at_border else (-two - one, count + two)
            return np.where(x < low, low, np.where(x > high, high, x))

    def _read(self, x: Array, row: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.float32]:
        """The pixels of x [groups, height, width, channels] at places [groups, ...]."""
        height, width = x.shape[1:3]
        outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
        group = np.arange(len(x)).reshape(-1, 1, 1)
        if self.outside == "reflection":
            row, column = self._reflected(row, height), self._reflected(column, width)
        pixels = x[group, np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]
        return np.where(outside[..., None], np.float32(0), pixels) if self.outside == "zeros" else pixels

    def _reflected(self, place: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Places reflected at the borders of an axis: at the centres of the outer pixels if `align`."""
        period = max(2 * (size - self.align), 1)
        place = place % period
        return np.minimum(place, period - 1 + self.align - place)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.grid, self.out, self.groups, self.taps, self.outside, self.align, self.plane

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        grid: int,
        out: int,
        groups: int,
        taps: int,
        outside: str,
        align: bool,
        plane: Sequence[int] | None,
    ) -> None:
        """See `Step`."""
        network.sampling(x=x, grid=grid, out=out, groups=groups, taps=taps, outside=outside, align=align, plane=plane)


def _place(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """Offsets of integer coordinates; NaN is outside."""
    return np.where(np.isnan(x), np.float32(-3), x).astype(np.int64)


def _weighed(weights: Sequence[NDArray[np.float32]], pixels: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The sum of pixels times their weights, in order."""
    total = weights[0] * pixels[0]
    for weight, pixel in zip(weights[1:], pixels[1:], strict=True):
        total = total + weight * pixel
    return total


@dataclass(frozen=True, eq=False)
class PixelSums(Step):
    """Sums of pixels of floats, in order.

    Attributes:
        x: Number of the float tensor that is read.
        out: Number of the float tensor that is written.
        places: int64 [pixels of `out`, count]: pixels of x, row by row.
    """

    x: int
    out: int
    places: Array
    method: ClassVar[str] = "pixel_sums"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written, floats=True)
        rows, columns, same = program.write(self, self.out, written, floats=True)
        fits(self, same == channels and self.places.ndim == 2 and self.places.size > 0)
        require("PixelSums", "places", self.places, np.int64, (rows * columns, self.places.shape[1]))
        fits(self, 0 <= int(self.places.min()) <= int(self.places.max()) < height * width)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        pixels = run.tensors[self.x].reshape(-1, run.tensors[self.x].shape[2])
        total = pixels[self.places[:, 0]]
        for places in self.places.T[1:]:
            total = total + pixels[places]
        run.tensors[self.out] = total.reshape(run.shapes[self.out])

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, self.places.ravel().tolist()

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, places: Sequence[int]) -> None:
        """See `Step`."""
        network.pixel_sums(x=x, out=out, places=places)
