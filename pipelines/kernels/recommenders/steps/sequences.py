"""Steps on sequences: target attention, and the activation of its units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    MAX_WIDTH,
    NONE,
    Run,
    Slots,
    Step,
    lane_sum,
    require_finite,
    require_fit,
    require_gaps,
    require_ids,
)
from pipelines.kernels.transformer.reference import exponential, layer_norm, sigmoid

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

LANES = 16  # columns of tables come in whole vectors
DEPTH = 32  # codes of items, too
SEGMENTS = 32  # of the curves of target attention
ITEM, PRODUCT, HIDDEN = 11585, 4096, 16383  # largest magnitudes of codes; ITEM**2 / 2**15 is PRODUCT


class Activation(NamedTuple):
    """x (slope + rise sigmoid(z scale + shift)), z = x (Dice, Zhou et al. 2018); arrays [width] each.

    Without scale, shift and rise, which are then empty, it is x, times slope where x is below 0.

    Attributes:
        scale: Factor of z.
        shift: Added to it.
        rise: Factor of the sigmoid.
        slope: Added to it.
        epsilon: Above 0, z is x normalized over the row: less its mean, divided by the root of variance and epsilon.
    """

    scale: Array
    shift: Array
    rise: Array
    slope: Array
    epsilon: float = 0.0


@dataclass(frozen=True, eq=False)
class Dice(Step):
    """out = `Activation` of x; float32 [width] each."""

    x: int
    out: int
    scale: Array
    shift: Array
    rise: Array
    slope: Array
    epsilon: float = 0.0

    @property
    def activation(self) -> Activation:
        """The activation."""
        return Activation(self.scale, self.shift, self.rise, self.slope, self.epsilon)

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.read(self, self.x, "f4")
        require_fit(self, slots.write(self, self.out, "f4") == width)
        _require_activation(self, self.activation, width)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out] = activated(run.buffers[self.x], self.activation)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        scale, shift, rise, slope = map(contiguous, self.activation[:4])
        program.dice(self.x, self.out, scale, shift, rise, slope, self.epsilon)


@dataclass(frozen=True, eq=False)
class TargetAttention(Step):
    """Weighted sum of the items of a sequence, by a network on every item and the target (DIN), in int16.

        p_k = (codes[item]_k codes[target]_k + 2^14) >> 15
        h = keys[item] + queries[target] + sum_k product_k p_k               int32
        g = bias + sum_j hidden_j rint(clip(f_j(h_j), -HIDDEN, HIDDEN))      int32
        a = score_bias + sum_m f'_m(g_m)                                     float32, added in this order
        out = sum of items[item] w(a), w the sigmoid, the softmax over the items, or a itself

    With time gaps an item is items[item] + gap_items[gap], and gap_scores[gap] is added to its a last.

    f and f' are quadratic in t = float32(x) scale + shift between integers, with the coefficients of the segment
    min(max(floor(t), 0), SEGMENTS - 1): f = c0 + t (c1 + t c2). Sums run in the order of the items. Places with the id
    `padding` are left out; the sum of no item is 0.

    Attributes:
        out: Buffer "f4" of the width of an item.
        column: Column of the ids with the target.
        begin: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        items: float32 [rows, size], size a multiple of 16, zeros behind the width of an item.
        codes: int16 [rows, depth] in [-ITEM, ITEM], depth a multiple of 32, zeros behind the width of an item.
        keys: int32 [rows, first], first a multiple of 16.
        queries: int32 [rows, first], with the bias of h.
        product: int16 [width, units of h].
        one_scale: float32 [units].
        one_shift: float32 [units].
        one_curve: (c0, c1, c2) of every segment of f, float32 [units, 3, SEGMENTS].
        hidden: int16 [units of h, second].
        bias: int32 [second].
        two_scale: float32 [second].
        two_shift: float32 [second].
        two_curve: The same of f', times the score, float32 [second, 3, SEGMENTS].
        score_bias: Added to a.
        softmax: Whether w is the softmax.
        raw: Whether w is a itself.
        gap_begin: First column of the ids of the time gaps, as many as places; -1: there are none.
        gap_items: float32 [gaps, size], zeros behind the width of an item.
        gap_scores: float32 [gaps].
    """

    out: int
    column: int
    begin: int
    count: int
    padding: int
    items: Array
    codes: Array
    keys: Array
    queries: Array
    product: Array
    one_scale: Array
    one_shift: Array
    one_curve: Array
    hidden: Array
    bias: Array
    two_scale: Array
    two_shift: Array
    two_curve: Array
    score_bias: float
    softmax: bool
    raw: bool = False
    gap_begin: int = -1
    gap_items: Array = field(default_factory=lambda: NONE)
    gap_scores: Array = field(default_factory=lambda: NONE)

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "f4")
        require_fit(self, all(array.ndim == 2 for array in (self.items, self.codes, self.keys, self.hidden)))
        (rows, size), depth, first = self.items.shape, self.codes.shape[1], self.keys.shape[1]
        units, second = self.hidden.shape
        kinds: dict[str, tuple[type, tuple[int, ...]]] = {
            "items": (np.float32, (rows, size)),
            "codes": (np.int16, (rows, depth)),
            "keys": (np.int32, (rows, first)),
            "queries": (np.int32, (rows, first)),
            "product": (np.int16, (width, units)),
            "one_scale": (np.float32, (units,)),
            "one_shift": (np.float32, (units,)),
            "one_curve": (np.float32, (units, 3, SEGMENTS)),
            "hidden": (np.int16, (units, second)),
            "bias": (np.int32, (second,)),
            "two_scale": (np.float32, (second,)),
            "two_shift": (np.float32, (second,)),
            "two_curve": (np.float32, (second, 3, SEGMENTS)),
        }
        for name, (dtype, shape) in kinds.items():
            require("TargetAttention", name, getattr(self, name), dtype, shape)
            require_finite(self, getattr(self, name))
        require_fit(self, rows >= 1 and size % LANES == 0 == first % LANES and width <= size < width + LANES)
        require_fit(self, depth % DEPTH == 0 and width <= depth < width + DEPTH and not self.codes[:, width:].any())
        require_fit(self, 1 <= units <= first <= MAX_WIDTH and second >= 1)
        _require_sequence(self, program, width)
        require_finite(self, self.score_bias)
        for scale, shift, curve in (
            (self.one_scale, self.one_shift, self.one_curve),
            (self.two_scale, self.two_shift, self.two_curve),
        ):
            require_fit(
                self, np.abs(scale).max() < 2**9 and np.abs(shift).max() < 2**40 and np.abs(curve).max() < 2**40
            )
        reach = _reach(self.product) * PRODUCT + _reach(self.keys)[:units] + _reach(self.queries)[:units]
        require_fit(self, np.abs(self.codes.astype(np.int32)).max() <= ITEM and reach.max() < 2**31)
        require_fit(self, (_reach(self.hidden) * HIDDEN + np.abs(self.bias.astype(np.int64))).max() < 2**31)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        width, units = self.product.shape
        targets, ids = run.ids[:, self.column], run.ids[:, self.begin : self.begin + self.count]
        codes = self.codes.astype(np.int64)[:, :width]
        products = (codes[ids] * codes[targets][:, None] + 2**14) >> 15
        keys, queries = self.keys.astype(np.int64)[:, :units], self.queries.astype(np.int64)[:, :units]
        x = keys[ids] + queries[targets][:, None] + products @ self.product.astype(np.int64)
        curve = _curve(x, self.one_scale, self.one_shift, self.one_curve)
        y = np.rint(np.clip(curve, -HIDDEN, HIDDEN)).astype(np.int64) @ self.hidden.astype(np.int64) + self.bias
        scores = np.full(ids.shape, self.score_bias, np.float32)
        for term in np.moveaxis(_curve(y, self.two_scale, self.two_shift, self.two_curve), 2, 0):
            scores = scores + term
        run.buffers[self.out] = _weighted_items(self, run, width, scores)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.target_attention(
            self.out,
            self.column,
            self.begin,
            self.count,
            self.padding,
            contiguous(self.items),
            contiguous(self.codes),
            contiguous(self.keys),
            contiguous(self.queries),
            contiguous(self.product),
            [contiguous(array) for array in (self.one_scale, self.one_shift, self.one_curve)],
            contiguous(self.hidden),
            contiguous(self.bias),
            [contiguous(array) for array in (self.two_scale, self.two_shift, self.two_curve)],
            self.score_bias,
            self.softmax,
            self.raw,
            self.gap_begin,
            _gap_tables(self),
        )


@dataclass(frozen=True, eq=False)
class ScoredAttention(Step):
    """Weighted sum of the items of a sequence as of `TargetAttention`, from the scores of all pairs.

        out = sum of items[item] w(scores[target, item]), w the sigmoid, the softmax over the items, or the score itself

    Time gaps add to items and scores as there.

    Attributes:
        out: Buffer "f4" of the width of an item.
        column: Column of the ids with the target.
        begin: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        items: float32 [rows, size], size a multiple of 16, zeros behind the width of an item.
        scores: float32 [rows, rows].
        softmax: Whether w is the softmax.
        raw: Whether w is the score itself.
        gap_begin: First column of the ids of the time gaps, as many as places; -1: there are none.
        gap_items: float32 [gaps, size], zeros behind the width of an item.
        gap_scores: float32 [gaps].
    """

    out: int
    column: int
    begin: int
    count: int
    padding: int
    items: Array
    scores: Array
    softmax: bool
    raw: bool = False
    gap_begin: int = -1
    gap_items: Array = field(default_factory=lambda: NONE)
    gap_scores: Array = field(default_factory=lambda: NONE)

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "f4")
        require_fit(self, self.items.ndim == 2)
        rows, size = self.items.shape
        for name, shape in (("items", (rows, size)), ("scores", (rows, rows))):
            require("ScoredAttention", name, getattr(self, name), np.float32, shape)
            require_finite(self, getattr(self, name))
        require_fit(self, rows >= 1 and size % LANES == 0 and width <= size < width + LANES)
        _require_sequence(self, program, width)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        width = run.buffers[self.out].shape[1]
        targets, ids = run.ids[:, self.column], run.ids[:, self.begin : self.begin + self.count]
        run.buffers[self.out] = _weighted_items(self, run, width, self.scores[targets[:, None], ids])

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.scored_attention(
            self.out,
            self.column,
            self.begin,
            self.count,
            self.padding,
            contiguous(self.items),
            contiguous(self.scores),
            self.softmax,
            self.raw,
            self.gap_begin,
            _gap_tables(self),
        )


def _require_sequence(step: TargetAttention | ScoredAttention, program: ClickProgram, width: int) -> None:
    """Raises RequestError unless items, target, sequence and time gaps fit."""
    rows, size = step.items.shape
    require_fit(step, not step.items[:, width:].any() and not (step.softmax and step.raw) and step.padding >= 0)
    require_ids(step, program, step.column, 1, rows)
    require_ids(step, program, step.begin, step.count, rows)
    gaps = {"gap_items": (step.gap_items, (size,)), "gap_scores": (step.gap_scores, ())}
    require_gaps(step, program, step.gap_begin, step.count, gaps)
    require_fit(step, step.gap_begin < 0 or not step.gap_items[:, width:].any())


def _gap_tables(step: TargetAttention | ScoredAttention) -> list[Array]:
    return [contiguous(step.gap_items), contiguous(step.gap_scores)] if step.gap_begin >= 0 else []


def _weighted_items(step: TargetAttention | ScoredAttention, run: Run, width: int, scores: Array) -> Array:
    """Sums of items with weights that follow from scores, float32 [n, width]."""
    ids = run.ids[:, step.begin : step.begin + step.count]
    items = step.items[ids, :width]
    if step.gap_begin >= 0:
        gaps = run.ids[:, step.gap_begin : step.gap_begin + step.count]
        items, scores = items + step.gap_items[gaps, :width], scores + step.gap_scores[gaps]
    out = np.zeros((len(ids), width), np.float32)
    for row, (present, score) in enumerate(zip(ids != step.padding, scores, strict=True)):
        if step.softmax and present.any():
            exponents = exponential(score[present] - score[present].max())
            weights = exponents * (np.float32(1) / lane_sum(exponents[None]))
        else:
            weights = score[present] if step.raw else sigmoid(score[present])
        for item, weight in zip(items[row, present], weights, strict=True):
            out[row] += item * weight
    return out


def _reach(matrix: Array) -> Array:
    """Largest magnitude of the sum of a column's entries (weights), or of one of them (int32 rows)."""
    magnitudes = np.abs(matrix.astype(np.int64))
    return np.asarray(magnitudes.max(axis=0) if matrix.dtype == np.int32 else magnitudes.sum(axis=0))


def _curve(x: Array, scale: Array, shift: Array, curve: Array) -> Array:
    """Applies the functions of `TargetAttention`: integers [..., units] -> float32 of the same shape."""
    t = x.astype(np.float32) * scale + shift
    segment = np.clip(t, 0, SEGMENTS - 1).astype(np.int64)
    c0, c1, c2 = (curve[np.arange(len(scale)), part, segment] for part in range(3))
    return np.asarray(c0 + t * (c1 + t * c2))


def activated(x: Array, activation: Activation) -> Array:
    """Applies an activation.

    Args:
        x: float32 [..., width]; [n, width] for one that normalizes rows.
        activation: The activation.

    Returns:
        float32 of the same shape.
    """
    scale, shift, rise, slope, epsilon = activation
    if not scale.size:
        return np.asarray(np.where(x < 0, x * slope, x))
    standard = layer_norm(x, scale, shift, epsilon) if epsilon else x * scale + shift
    return np.asarray(x * (sigmoid(standard) * rise + slope))


def _require_activation(step: Step, activation: Activation, width: int) -> None:
    """Raises RequestError unless the arrays of an activation fit."""
    plain = not activation.scale.size
    for name, array in zip(Activation._fields[:4], activation[:4], strict=True):
        size = 0 if plain and name != "slope" else width
        require(type(step).__name__, name, array, np.float32, (size,))
        require_finite(step, array)
    require_finite(step, activation.epsilon)
    require_fit(step, activation.epsilon == 0 or (activation.epsilon > 0 and not plain))
