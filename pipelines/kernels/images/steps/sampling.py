"""Float32 steps that read pixels at places of a grid, or sum pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Step, fits

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True)
class Sampling(Step):
    """Pixels of x at the places of a grid (GridSample of ONNX), each operation rounded.

    Coordinates g from -1 to 1 are ((g + 1) size - 1) / 2 pixels or, if `align`, (g + 1) / 2 (size - 1). With a, b, c, d
    the four pixels around a place, at parts p of a row and q of a column:

        (1 - q) ((1 - p) a + p b) + q ((1 - p) c + p d)

    Attributes:
        x: Number of the float tensor that is read; its rows are `groups` of as many.
        grid: Number of the float tensor of places across and down, [height, width, 2].
        out: Number of the float tensor that is written, of the grid's height and width; its rows are `groups`.
        groups: Number of groups.
        linear: Whether to interpolate; else the nearest pixel is taken, half to even.
        border: Whether pixels outside are those of the border; else they are 0.
        align: Whether -1 and 1 are the centres of the first and last pixel.
    """

    x: int
    grid: int
    out: int
    groups: int = 1
    linear: bool = True
    border: bool = False
    align: bool = False
    method: ClassVar[str] = "sampling"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written, floats=True)
        grid = program.read(self, self.grid, written, floats=True)
        fits(self, self.groups >= 1 and shape[0] % self.groups == grid[0] % self.groups == 0 and grid[2] == 2)
        fits(self, program.write(self, self.out, written, floats=True) == (*grid[:2], shape[2]))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.x, self.grid

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x, grid = run.tensors[self.x], run.tensors[self.grid]
        x, grid = (array.reshape(self.groups, -1, *array.shape[1:]) for array in (x, grid))
        across, down = (self._coordinate(grid[..., axis], x.shape[2 - axis]) for axis in (0, 1))
        if self.linear:
            left, upper = np.floor(across), np.floor(down)
            p, q = (across - left)[..., None], (down - upper)[..., None]
            i, j, one = _place(upper), _place(left), np.float32(1)
            (a, b), (c, d) = ([self._read(x, i + row, j + column) for column in (0, 1)] for row in (0, 1))
            with np.errstate(invalid="ignore"):
                pixels = (one - q) * ((one - p) * a + p * b) + q * ((one - p) * c + p * d)
        else:
            pixels = self._read(x, _place(np.rint(down)), _place(np.rint(across)))
        run.tensors[self.out] = pixels.reshape(-1, *pixels.shape[2:])

    def _coordinate(self, g: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Coordinates in pixels, within two of the tensor (or NaN), or at its border."""
        one, two, count = np.float32(1), np.float32(2), np.float32(size)
        with np.errstate(invalid="ignore", over="ignore"):
            x = (g + one) / two * (count - one) if self.align else ((g + one) * count - one) / two
            low, high = (np.float32(0), count - one) if self.border else (-two, count + one)
            return np.where(x < low, low, np.where(x > high, high, x))

    def _read(self, x: Array, row: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.float32]:
        """The pixels of x [groups, height, width, channels] at places [groups, ...]."""
        height, width = x.shape[1:3]
        outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
        group = np.arange(len(x)).reshape(-1, 1, 1)
        pixels = x[group, np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]
        return pixels if self.border else np.where(outside[..., None], np.float32(0), pixels)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.grid, self.out, self.groups, self.linear, self.border, self.align

    @staticmethod
    def add_to(
        network: ImageNetwork, x: int, grid: int, out: int, groups: int, linear: bool, border: bool, align: bool
    ) -> None:
        """See `Step`."""
        network.sampling(x=x, grid=grid, out=out, groups=groups, linear=linear, border=border, align=align)


def _place(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """Places of whole coordinates; NaN is outside."""
    return np.where(np.isnan(x), np.float32(-2), x).astype(np.int64)


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
