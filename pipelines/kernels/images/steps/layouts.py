"""Steps that begin and end a program, and those that move bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Shape, Step, bytes_fit, fits, quantized_pixels

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True)
class Pixels(Step):
    """An input [C, H, W], or [H, W, C] if `last`, as the tensor `out` [H, W, C + len(fills)].

    uint8: the bytes. float32: clip(rint(x / scale) + zero, 0, 255), NaN as 0; the floats where `out` has floats.

    Attributes:
        out: Tensor to write.
        fills: Bytes of additional channels.
        last: Whether channels are last.
        scale: Scale of a float32 input.
        zero: Zero point of a float32 input.
        offset: Elements of the sample before this input.
    """

    out: int
    fills: tuple[int, ...] = ()
    last: bool = False
    scale: float = 0.0
    zero: int = 0
    offset: int = 0
    method: ClassVar[str] = "pixels"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        real = self.out in program.floats
        height, width, channels = program.write(self, self.out, written, real)
        channels -= len(self.fills)
        end = self.offset + height * width * channels
        if program.inputs:
            fits(self, self.offset >= 0 and end <= program.shape[0])
        else:
            fits(self, program.shape == ((height, width, channels) if self.last else (channels, height, width)))
        fits(self, channels > 0 and not (real and self.fills) and (bool(program.inputs) or self.offset == 0))
        bytes_fit(self, *self.fills, self.zero)
        fits(self, (program.dtype == "float32" and not real) == (self.scale > 0) and np.isfinite(self.scale))
        fits(self, program.dtype == "float32" or not real)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return ()

    def compute(self, run: Run) -> None:
        """See `Step`."""
        floats = run.x.dtype == np.float32 and self.scale == 0
        height, width, channels = run.shapes[self.out]
        channels -= len(self.fills)
        flat = run.x.reshape(-1)[self.offset :][: height * width * channels]
        pixels = flat.reshape((height, width, channels) if self.last else (channels, height, width))
        pixels = pixels if self.last else pixels.transpose(1, 2, 0)
        if run.x.dtype == np.float32 and not floats:
            pixels = quantized_pixels(pixels, self.scale, self.zero)
        fills = np.broadcast_to(np.array(self.fills, pixels.dtype), (*pixels.shape[:2], len(self.fills)))
        run.tensors[self.out] = np.concatenate([pixels, fills], axis=2)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        channels = packing.program.tensors[self.out][2] - len(self.fills)
        floats = packing.program.dtype == "float32"
        return self.out, channels, list(self.fills), self.last, floats, self.scale, self.zero, self.offset

    @staticmethod
    def add_to(
        network: ImageNetwork,
        out: int,
        channels: int,
        fills: Sequence[int],
        last: bool,
        floats: bool,
        scale: float,
        zero: int,
        offset: int,
    ) -> None:
        """See `Step`."""
        network.pixels(
            out=out, channels=channels, fills=fills, last=last, floats=floats, scale=scale, zero=zero, offset=offset
        )


@dataclass(frozen=True)
class Concatenation(Step):
    """The concatenated channels of `xs`, all bytes or all floats."""

    xs: tuple[int, ...]
    out: int
    method: ClassVar[str] = "concatenation"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        floats = self.out in program.floats
        shapes = [program.read(self, x, written, floats) for x in self.xs]
        fits(self, bool(shapes) and len({shape[:2] for shape in shapes}) == 1)
        whole = (*shapes[0][:2], sum(shape[2] for shape in shapes))
        fits(self, program.write(self, self.out, written, floats) == whole)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.xs

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.tensors[self.out] = np.concatenate([run.tensors[x] for x in self.xs], axis=2)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return list(self.xs), self.out

    @staticmethod
    def add_to(network: ImageNetwork, xs: Sequence[int], out: int) -> None:
        """See `Step`."""
        network.concatenation(xs=xs, out=out)


@dataclass(frozen=True)
class Stacking(Concatenation):
    """The pixels of `xs` below each other, in a tensor of width 1."""

    method: ClassVar[str] = "stacking"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        floats = self.out in program.floats
        shapes = [program.read(self, x, written, floats) for x in self.xs]
        fits(self, bool(shapes) and len({shape[2] for shape in shapes}) == 1)
        whole = (sum(shape[0] * shape[1] for shape in shapes), 1, shapes[0][2])
        fits(self, program.write(self, self.out, written, floats) == whole)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        tensors = [run.tensors[x] for x in self.xs]
        run.tensors[self.out] = np.concatenate([x.reshape(-1, 1, x.shape[2]) for x in tensors])

    @staticmethod
    def add_to(network: ImageNetwork, xs: Sequence[int], out: int) -> None:
        """See `Step`."""
        network.stacking(xs=xs, out=out)


@dataclass(frozen=True)
class Selection(Step):
    """Selected channels of x, in the order of `channels`."""

    x: int
    out: int
    channels: tuple[int, ...]
    method: ClassVar[str] = "selection"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        fits(self, bool(self.channels) and min(self.channels) >= 0 and max(self.channels) < shape[2])
        fits(self, program.write(self, self.out, written) == (*shape[:2], len(self.channels)))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.tensors[self.out] = run.tensors[self.x][..., self.channels]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, list(self.channels)

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, channels: Sequence[int]) -> None:
        """See `Step`."""
        network.selection(x=x, out=out, channels=channels)


@dataclass(frozen=True)
class Resampling(Step):
    """The pixels of x at `rows` and `columns`: nearest-neighbour resizing."""

    x: int
    out: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    method: ClassVar[str] = "resampling"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written)
        for places, size in ((self.rows, height), (self.columns, width)):
            fits(self, bool(places) and min(places) >= 0 and max(places) < size)
        fits(self, program.write(self, self.out, written) == (len(self.rows), len(self.columns), channels))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.tensors[self.out] = run.tensors[self.x][list(self.rows)][:, list(self.columns)]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, list(self.rows), list(self.columns)

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, rows: Sequence[int], columns: Sequence[int]) -> None:
        """See `Step`."""
        network.resampling(x=x, out=out, rows=rows, columns=columns)


@dataclass(frozen=True, eq=False)
class Dequantize(Step):
    """Results: scale (x - zero) of bytes, or a function of bytes, or floats, in the order [C, H, W] or [H, W, C].

    Several may end a program, each with its places among the results.

    Attributes:
        x: Number of the tensor.
        scale: Scale of bytes.
        zero: Zero point of bytes.
        last: Whether the order is [H, W, C].
        table: float32 [256] of the bytes, in place of scale and zero point, or None.
        offset: Place of the first result; -1: behind the results of the step before it.
        pitch: Places from one channel to the next or, if `last`, from pixel to pixel; 0: results follow each other.
    """

    x: int
    scale: float
    zero: int
    last: bool = False
    table: Array | None = None
    offset: int = -1
    pitch: int = 0
    method: ClassVar[str] = "dequantize"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        floats = self.x in program.floats
        shape = program.read(self, self.x, written, floats)
        behind = program.steps[program.steps.index(self) :]
        fits(self, all(isinstance(step, Dequantize) for step in behind) and bool(np.isfinite(self.scale)))
        if self is program.steps[-1]:
            shapes = [program.tensors[step.x] for step in program.steps if isinstance(step, Dequantize)]
            fits(self, program.results == sum(int(np.prod(shape)) for shape in shapes))
        bytes_fit(self, self.zero)
        if self.table is not None:
            require("Dequantize", "table", self.table, np.float32, (256,))
            fits(self, not floats)
        offset, (runs, pitch, run) = self._offset(program.steps, program.tensors), self._runs(shape)
        fits(self, pitch >= run and 0 <= offset <= program.results - (runs - 1) * pitch - run)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.tensors[self.x]
        if x.dtype == np.float32:
            real = x
        elif self.table is not None:
            real = self.table[x]
        else:
            real = (x.astype(np.float32) - np.float32(self.zero)) * np.float32(self.scale)
        runs, pitch, _ = self._runs(x.shape)
        values = (real if self.last else real.transpose(2, 0, 1)).reshape(runs, -1)
        before = run.offset if self.offset < 0 else self.offset
        places = before + np.arange(runs)[:, None] * pitch + np.arange(values.shape[1])
        run.results.append((places.ravel(), values.ravel()))
        run.offset = before + values.size

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        program = packing.program
        _, pitch, _ = self._runs(program.tensors[self.x])
        return self.x, self.scale, self.zero, self.last, self.table, self._offset(program.steps, program.tensors), pitch

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        scale: float,
        zero: int,
        last: bool,
        table: Array | None,
        offset: int,
        pitch: int,
    ) -> None:
        """See `Step`."""
        network.dequantize(x=x, scale=scale, zero=zero, last=last, table=table, offset=offset, pitch=pitch)

    def _runs(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The number of runs of results, the places from one to the next, and the results of one."""
        pixels, channels = shape[0] * shape[1], shape[2]
        runs, run = (pixels, channels) if self.last else (channels, pixels)
        return runs, self.pitch or run, run

    def _offset(self, steps: Sequence[Step], shapes: Sequence[Shape]) -> int:
        """The place of the first result."""
        if self.offset >= 0:
            return self.offset
        before = 0
        for step in steps[: steps.index(self)]:
            if isinstance(step, Dequantize):
                before = (before if step.offset < 0 else step.offset) + int(np.prod(shapes[step.x]))
        return before
