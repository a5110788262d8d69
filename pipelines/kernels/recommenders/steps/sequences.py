"""Steps on sequences: target attention, and the activation of its units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    MAX_WIDTH,
    Run,
    Slots,
    Step,
    lane_sum,
    require_finite,
    require_fit,
    softmax,
)
from pipelines.kernels.transformer.reference import sigmoid

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

LANES = 16  # columns of tables come in whole vectors


@dataclass(frozen=True, eq=False)
class Dice(Step):
    """out = x (slope + rise sigmoid(x scale + shift)) (Zhou et al. 2018); float32 [width] each.

    Without scale, shift and rise, which are then empty, out is x, times slope where it is below 0.
    """

    x: int
    out: int
    scale: Array
    shift: Array
    rise: Array
    slope: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        require_fit(self, slots.write(self, self.out, "f4") == width)
        _require_activation(self, (self.scale, self.shift, self.rise, self.slope), width)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out] = activated(run.buffers[self.x], (self.scale, self.shift, self.rise, self.slope))

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.dice(self.x, self.out, *map(contiguous, (self.scale, self.shift, self.rise, self.slope)))


@dataclass(frozen=True, eq=False)
class TargetAttention(Step):
    """Weighted sum of the items of a sequence, by a network on every item and the target (DIN), in float32.

        h = keys[item] + queries[target] + sum_k product_k items[item]_k items[target]_k
        g = bias + sum_k hidden_k f(h)_k;  a = score . f'(g) + score_bias
        out = sum of items[item] w(a), w the sigmoid, or the softmax over the items

    f and f' are activations as in `Dice`. Sums run in the order of k and of the items. Places with the id `padding` are
    left out; the sum of no item is 0.

    Attributes:
        out: Buffer "f4" of the width of an item.
        column: Column of the ids with the target.
        begin: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        items: float32 [rows, size], size a multiple of 16, zeros behind the width of an item.
        keys: float32 [rows, first], first a multiple of 16.
        queries: float32 [rows, first], with the bias of h.
        product: float32 [width, first].
        one: (scale, shift, rise, slope) of f, see `Dice`.
        hidden: float32 [units of h, second].
        bias: float32 [second].
        two: The same of f'.
        score: float32 [second].
        score_bias: Added to a.
        softmax: Whether w is the softmax.
    """

    out: int
    column: int
    begin: int
    count: int
    padding: int
    items: Array
    keys: Array
    queries: Array
    product: Array
    one_scale: Array
    one_shift: Array
    one_rise: Array
    one_slope: Array
    hidden: Array
    bias: Array
    two_scale: Array
    two_shift: Array
    two_rise: Array
    two_slope: Array
    score: Array
    score_bias: float
    softmax: bool

    @property
    def one(self) -> tuple[Array, Array, Array, Array]:
        """Arrays of f."""
        return self.one_scale, self.one_shift, self.one_rise, self.one_slope

    @property
    def two(self) -> tuple[Array, Array, Array, Array]:
        """Arrays of f'."""
        return self.two_scale, self.two_shift, self.two_rise, self.two_slope

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "f4")
        require_fit(self, all(each.ndim == 2 for each in (self.items, self.keys, self.hidden)))
        (rows, size), first, (units, second) = self.items.shape, self.keys.shape[1], self.hidden.shape
        shapes: dict[str, tuple[int, ...]] = {
            "items": (rows, size),
            "keys": (rows, first),
            "queries": (rows, first),
            "product": (width, first),
        }
        shapes |= {"hidden": (units, second), "bias": (second,), "score": (second,)}
        for name, shape in shapes.items():
            require("TargetAttention", name, getattr(self, name), np.float32, shape)
            require_finite(self, getattr(self, name))
        require_fit(self, rows >= 1 and size % LANES == 0 == first % LANES and width <= size < width + LANES)
        require_fit(self, 1 <= units <= first <= MAX_WIDTH and second >= 1 and not self.items[:, width:].any())
        require_fit(self, 0 <= self.column < program.rows.size and 0 <= self.begin <= program.rows.size - self.count)
        limits = program.rows[[self.column, *range(self.begin, self.begin + self.count)]]
        require_fit(self, self.count >= 1 and limits.min() >= 1 and limits.max() <= rows and self.padding >= 0)
        _require_activation(self, self.one, units)
        _require_activation(self, self.two, second)
        require_finite(self, self.score_bias)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        width, units = self.product.shape[0], len(self.hidden)
        targets, ids = run.ids[:, self.column], run.ids[:, self.begin : self.begin + self.count]
        items = self.items[ids, :width]
        x = (self.keys[ids] + self.queries[targets][:, None])[:, :, :units]
        products = items * self.items[targets][:, None, :width]
        for k in range(width):
            x = x + self.product[k, :units] * products[:, :, k, None]
        x = activated(x, self.one)
        y = np.broadcast_to(self.bias, (*ids.shape, len(self.bias)))
        for k in range(units):
            y = y + self.hidden[k] * x[:, :, k, None]
        y = activated(y, self.two) * self.score
        scores = lane_sum(y.reshape(-1, y.shape[2])).reshape(ids.shape) + np.float32(self.score_bias)
        out = np.zeros((len(ids), width), np.float32)
        for row, (known, score) in enumerate(zip(ids != self.padding, scores, strict=True)):
            weights = softmax(score[known][None])[0] if self.softmax and known.any() else sigmoid(score[known])
            for item, weight in zip(items[row][known], weights, strict=True):
                out[row] += item * weight
        run.buffers[self.out] = out

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.target_attention(
            self.out,
            self.column,
            self.begin,
            self.count,
            self.padding,
            contiguous(self.items),
            contiguous(self.keys),
            contiguous(self.queries),
            contiguous(self.product),
            list(map(contiguous, self.one)),
            contiguous(self.hidden),
            contiguous(self.bias),
            list(map(contiguous, self.two)),
            contiguous(self.score),
            self.score_bias,
            self.softmax,
        )


def activated(x: Array, arrays: tuple[Array, Array, Array, Array]) -> Array:
    """Applies the activation of `Dice`.

    Args:
        x: float32 [..., width].
        arrays: (scale, shift, rise, slope).

    Returns:
        float32 of the same shape.
    """
    scale, shift, rise, slope = arrays
    if not scale.size:
        return np.asarray(np.where(x < 0, x * slope, x))
    return np.asarray(x * (sigmoid(x * scale + shift) * rise + slope))


def _require_activation(step: Step, arrays: tuple[Array, Array, Array, Array], width: int) -> None:
    """Raises RequestError unless the arrays of an activation fit."""
    plain = not arrays[0].size
    for name, array in zip(("scale", "shift", "rise", "slope"), arrays, strict=True):
        size = 0 if plain and name != "slope" else width
        require(type(step).__name__, name, array, np.float32, (size,))
        require_finite(step, array)
