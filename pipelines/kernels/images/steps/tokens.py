"""Steps on all pixels of a tensor: gathering and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Step, fits
from pipelines.kernels.images.steps.convolution import multiply_add
from pipelines.kernels.images.steps.floats import Operand, PackedOperand
from pipelines.kernels.transformer.operations import QuantizedAttention
from pipelines.kernels.transformer.operations.base import LANES
from pipelines.kernels.transformer.reference.attention import quantized_attention

LONGEST = 2**16  # keys whose products of codes a sum of 32 bits takes

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True, eq=False)
class Gathering(Step):
    """The pixels of x at `places`, or parts of its pixels, or zeros where a place is -1, plus `added`.

    Attributes:
        x: The tensor that is read.
        to: The tensor that is written.
        places: int64 [height, width] of `to`: pixels of x, row by row; or [height, width, parts]: parts of pixels of x.
        added: float32 [height width, channels] of `to`, or None.
        part: Channels of a part, 0: all of x.
    """

    x: Operand
    to: Operand
    places: Array
    added: Array | None = None
    part: int = 0
    method: ClassVar[str] = "gathering"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        rows, columns, count = self.to.write(self, program, written)
        part = self.part or channels
        fits(self, part >= 1 and channels % part == count % part == 0)
        parts = (count // part,) if self.part else ()
        require("Gathering", "places", self.places, np.int64, (rows, columns, *parts))
        last = height * width * (channels // part) - 1
        fits(self, self.places.size * part == rows * columns * count)
        fits(self, -1 <= int(self.places.min()) <= int(self.places.max()) <= last)
        if self.added is not None:
            require("Gathering", "added", self.added, np.float32, (rows * columns, count))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = self.x.real(run)
        parts = x.reshape(-1, self.part or x.shape[2])
        real = np.where((self.places >= 0)[..., None], parts[self.places], np.float32(0))
        real = real.reshape(*self.places.shape[:2], -1)
        if self.added is not None:
            real = real + self.added.reshape(real.shape)
        self.to.store(run, real)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.places.ravel().tolist(), self.added

    @staticmethod
    def add_to(
        network: ImageNetwork, x: PackedOperand, out: PackedOperand, places: Sequence[int], added: Array | None
    ) -> None:
        """See `Step`."""
        network.gathering(x=x, out=out, places=places, added=added)


@dataclass(frozen=True)
class MatrixProduct(Step):
    """Products of two matrices of float32 in each group: pixels are rows, channels are columns.

    A sum begins with 0 and takes the products in order, each by a fused multiply-add, which rounds once:

        y[i, j] = fma(a[i, n], b[n, j], ... fma(a[i, 0], b[0, j], 0))

    Attributes:
        a: Number of the float tensor of the first factors; its pixels are `groups` of as many.
        b: Number of the float tensor of the second ones, as many pixels of a group as `a` has channels.
        out: Number of the float tensor that is written.
        groups: Number of groups.
    """

    a: int
    b: int
    out: int
    groups: int = 1
    method: ClassVar[str] = "matrix_product"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, inner = program.read(self, self.a, written, floats=True)
        rows, columns, channels = program.read(self, self.b, written, floats=True)
        fits(self, self.groups >= 1 and height * width % self.groups == 0 and rows * columns == self.groups * inner)
        fits(self, program.write(self, self.out, written, floats=True) == (height, width, channels))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.a, self.b

    def compute(self, run: Run) -> None:
        """See `Step`."""
        a, b = (run.tensors[x].reshape(self.groups, -1, run.tensors[x].shape[2]) for x in (self.a, self.b))
        total = np.zeros((*a.shape[:2], b.shape[2]), np.float32)
        for k in range(a.shape[2]):
            total = multiply_add(a[..., k, None], b[:, k, None], total)
        run.tensors[self.out] = total.reshape(run.shapes[self.out])

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.a, self.b, self.out, self.groups

    @staticmethod
    def add_to(network: ImageNetwork, a: int, b: int, out: int, groups: int) -> None:
        """See `Step`."""
        network.matrix_product(a=a, b=b, out=out, groups=groups)


@dataclass(frozen=True, eq=False)
class Attention(Step):
    """Attention in each of `windows` of pixels that follow each other: `QuantizedAttention` of one head at a time.

    The codes of keys are of their distances to the middle of each column, see `quantized_attention`.

    Attributes:
        x: Number of the float tensor that is read: in each head [query | key | value], each of `size` columns and
            padded with zeros to whole 16. The scale of scores is in the queries. With `keys`, queries alone.
        to: The tensor that is written, heads x size channels.
        heads: Number of heads.
        size: Columns of a head.
        windows: Number of windows.
        bias: float32 [1 or windows, heads, queries of a window, keys of a window], added to scores, or None.
        keys: Number of the float tensor of other pixels: in each head [key | value], padded likewise; -1: none.
    """

    x: int
    to: Operand
    heads: int
    size: int
    windows: int = 1
    bias: Array | None = None
    keys: int = -1
    method: ClassVar[str] = "attention"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    @property
    def room(self) -> int:
        """Columns of a head's query with its padding."""
        return -(-self.size // LANES) * LANES

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written, floats=True)
        fits(self, min(self.heads, self.size, self.windows) >= 1 and height * width % self.windows == 0)
        tokens = attended = height * width // self.windows
        fits(self, channels == self.heads * (3 if self.keys < 0 else 1) * self.room)
        if self.keys >= 0:
            rows, columns, channels = program.read(self, self.keys, written, floats=True)
            fits(self, channels == self.heads * 2 * self.room and rows * columns % self.windows == 0)
            attended = rows * columns // self.windows
        fits(self, attended <= LONGEST)
        fits(self, self.to.write(self, program, written) == (height, width, self.heads * self.size))
        if self.bias is not None:
            fits(self, len(self.bias) in (1, self.windows) and bool(np.isfinite(self.bias).all()))
            require("Attention", "bias", self.bias, np.float32, (len(self.bias), self.heads, tokens, attended))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,) if self.keys < 0 else (self.x, self.keys)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.tensors[self.x]
        heads = x.reshape(self.windows, -1, self.heads, x.shape[2] // self.heads)
        apart = None
        if self.keys >= 0:
            apart = run.tensors[self.keys].reshape(self.windows, -1, self.heads, 2 * self.room)
        attended = np.empty((self.windows, heads.shape[1], self.heads, self.size), np.float32)
        for window in range(self.windows):
            for head in range(self.heads):
                bias = None if self.bias is None else self.bias[window % len(self.bias), head : head + 1]
                one = QuantizedAttention(0, 1, 0, bias=bias)
                keys = None if apart is None else apart[window, :, head]
                outputs = quantized_attention(heads[window, :, head], one, keys=keys, centered=True)
                attended[window, :, head] = outputs[:, : self.size]
        self.to.store(run, attended.reshape(*x.shape[:2], -1))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.keys, self.to.packed(), self.heads, self.size, self.windows, self.bias

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        keys: int,
        out: PackedOperand,
        heads: int,
        size: int,
        windows: int,
        bias: Array | None,
    ) -> None:
        """See `Step`."""
        network.attention(x=x, keys=keys, out=out, heads=heads, size=size, windows=windows, bias=bias)
