"""Axes of windows and heads before those of tokens and their elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outer:
    """The axes of an attention before that of the tokens.

    Attributes:
        sizes: Their sizes.
        order: The axes of windows, then those of heads.
        heads: Number of axes of heads.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    heads: int = 1

    @classmethod
    def of(cls, index: NDArray[np.int64], channels: int) -> Outer:
        """Finds the axes of heads: the last one, of more than two axes those along which the pixel is the same.

        Args:
            index: Elements [..., tokens, size] of a tensor of pixels.
            channels: Channels of a pixel.
        """
        sizes, axes = index.shape[:-2], range(index.ndim - 2)
        pixels = index // channels if len(sizes) > 2 else index
        heads = [axis for axis in axes if len(sizes) > 2 and sizes[axis] > 1 and not np.diff(pixels, axis=axis).any()]
        heads = heads or [len(sizes) - 1]
        return cls(sizes, (*(axis for axis in axes if axis not in heads), *heads), len(heads))

    def grouped(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns [windows, heads, a, b] of an array [*sizes, a, b].

        Args:
            array: The array.
        """
        *_, a, b = array.shape
        split = len(self.order) - self.heads
        counts = [
            int(np.prod([self.sizes[axis] for axis in part])) for part in (self.order[:split], self.order[split:])
        ]
        moved = array.transpose(*self.order, len(self.order), len(self.order) + 1)
        return moved.reshape(*counts, a, b)

    def restored(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns [*sizes, a, b] of an array [windows, heads, a, b].

        Args:
            array: The array.
        """
        *_, a, b = array.shape
        moved = array.reshape(*(self.sizes[axis] for axis in self.order), a, b)
        return moved.transpose(*np.argsort(self.order), len(self.order), len(self.order) + 1)
