"""Steps on all pixels of a tensor: gathering and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import Packing, Run, Step, fits
from pipelines.kernels.images.steps.floats import Operand, PackedOperand
from pipelines.kernels.transformer.operations import QuantizedAttention
from pipelines.kernels.transformer.operations.base import LANES
from pipelines.kernels.transformer.reference.attention import quantized_attention

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True, eq=False)
class Gathering(Step):
    """The pixels of x at `places`, or zeros where a place is -1, plus `added`.

    Attributes:
        x: The tensor that is read.
        to: The tensor that is written.
        places: int64 [height, width] of `to`: pixels of x, row by row.
        added: float32 [height width, channels] of `to`, or None.
    """

    x: Operand
    to: Operand
    places: Array
    added: Array | None = None
    method: ClassVar[str] = "gathering"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        rows, columns, same = self.to.write(self, program, written)
        require("Gathering", "places", self.places, np.int64, (rows, columns))
        fits(self, channels == same and -1 <= self.places.min() <= self.places.max() < height * width)
        if self.added is not None:
            require("Gathering", "added", self.added, np.float32, (rows * columns, channels))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = self.x.real(run)
        real = np.where((self.places >= 0)[..., None], x.reshape(-1, x.shape[2])[self.places], np.float32(0))
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


@dataclass(frozen=True, eq=False)
class Attention(Step):
    """Self-attention in each of `windows` of pixels that follow each other: `QuantizedAttention` of one head at a time.

    Attributes:
        x: Number of the float tensor that is read: in each head [query | key | value], each of `size` columns and
            padded with zeros to whole 16. The scale of scores is in the queries.
        to: The tensor that is written, heads x size channels.
        heads: Number of heads.
        size: Columns of a head.
        windows: Number of windows.
        bias: float32 [1 or windows, heads, tokens of a window, tokens of a window], added to scores, or None.
    """

    x: int
    to: Operand
    heads: int
    size: int
    windows: int = 1
    bias: Array | None = None
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
        fits(self, channels == self.heads * 3 * self.room)
        fits(self, self.to.write(self, program, written) == (height, width, self.heads * self.size))
        if self.bias is not None:
            tokens = height * width // self.windows
            fits(self, len(self.bias) in (1, self.windows) and bool(np.isfinite(self.bias).all()))
            require("Attention", "bias", self.bias, np.float32, (len(self.bias), self.heads, tokens, tokens))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.tensors[self.x]
        heads = x.reshape(self.windows, -1, self.heads, 3 * self.room)
        found = np.empty((self.windows, heads.shape[1], self.heads, self.size), np.float32)
        for window in range(self.windows):
            for head in range(self.heads):
                bias = None if self.bias is None else self.bias[window % len(self.bias), head : head + 1]
                one = QuantizedAttention(0, 1, 0, bias=bias)
                found[window, :, head] = quantized_attention(heads[window, :, head], one)[:, : self.size]
        self.to.store(run, found.reshape(*x.shape[:2], -1))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.to.packed(), self.heads, self.size, self.windows, self.bias

    @staticmethod
    def add_to(
        network: ImageNetwork, x: int, out: PackedOperand, heads: int, size: int, windows: int, bias: Array | None
    ) -> None:
        """See `Step`."""
        network.attention(x=x, out=out, heads=heads, size=size, windows=windows, bias=bias)
