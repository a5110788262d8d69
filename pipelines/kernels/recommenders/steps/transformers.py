"""Steps that are small transformers over sequences: the layer of BST, the encoder of SASRec, and rows of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipelines.kernels.arrays import Array, contiguous, require
from pipelines.kernels.recommenders.steps.base import (
    NONE,
    Run,
    Slots,
    Step,
    require_finite,
    require_fit,
    require_gaps,
    require_ids,
)
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.operations import RowLinear

if TYPE_CHECKING:
    from pipelines.kernels._native import ClickProgram as NativeProgram
    from pipelines.kernels.recommenders.program import ClickProgram

LANES = 16  # columns of tables and of heads come in whole vectors


@dataclass(frozen=True, eq=False)
class Rows(Step):
    """One row of a table of floats: out = table[ids[column]].

    Attributes:
        out: Buffer "f4" of the width of the table.
        column: Column of the ids.
        table: float32 [rows, width].
    """

    out: int
    column: int
    table: Array

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        require_fit(self, self.table.ndim == 2)
        require("Rows", "table", self.table, np.float32, (len(self.table), slots.write(self, self.out, "f4")))
        require_finite(self, self.table)
        require_ids(self, program, self.column, 1, len(self.table))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.buffers[self.out] = self.table[run.ids[:, self.column]]

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.rows(self.out, self.column, contiguous(self.table))


@dataclass(frozen=True, eq=False)
class TargetTransformer(Step):
    """Transformer layer over a sequence, for the target alone (BST), in float32.

        x = items[target] + position;  q = W_q x + b_q
        [k_p | v_p] = keys_values[id_p] + places_p, p = 0 the target and p = 1, 2, .. the items
        y = norm(x + joined(attention of q to k and v));  out = norm'(y + outer(f(inner(y))))

    With time gaps gap_keys_values[gap_p] is added to keys and values of an item last. f multiplies by `slope` below 0.
    Places with the id `padding` are left out. Sums run in the order of the inputs, those over the keys in sixteen
    lanes.

    Attributes:
        out: Buffer "f4" of the width d of an item.
        column: Column of the ids with the target.
        begin: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        heads: Number of heads.
        items: float32 [rows, D], D = d filled up with zeros to whole 16.
        keys_values: float32 [rows, 2 D].
        places: float32 [1 + count, 2 D].
        position: float32 [D].
        query: float32 [d, d], with the scale of the scores.
        query_bias: float32 [d].
        joined: float32 [d, d].
        joined_bias: float32 [d].
        inner: float32 [d, hidden].
        inner_bias: float32 [hidden].
        outer: float32 [hidden, d].
        outer_bias: float32 [d].
        slope: float32 [hidden].
        norms: float32 [4, d]: scale and bias of norm, scale and bias of norm'.
        epsilon: Added to the variances.
        gap_begin: First column of the ids of the time gaps, as many as places; -1: there are none.
        gap_keys_values: float32 [gaps, 2 D].
    """

    out: int
    column: int
    begin: int
    count: int
    padding: int
    heads: int
    items: Array
    keys_values: Array
    places: Array
    position: Array
    query: Array
    query_bias: Array
    joined: Array
    joined_bias: Array
    inner: Array
    inner_bias: Array
    outer: Array
    outer_bias: Array
    slope: Array
    norms: Array
    epsilon: float
    gap_begin: int = -1
    gap_keys_values: Array = field(default_factory=lambda: NONE)

    @property
    def layers(self) -> list[tuple[Array, Array]]:
        """(weight, bias) of query, joined, inner and outer."""
        names = ("query", "joined", "inner", "outer")
        return [(getattr(self, name), getattr(self, f"{name}_bias")) for name in names]

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "f4")
        room = -(-width // LANES) * LANES
        require_fit(self, self.items.ndim == 2 and self.slope.ndim == 1 and self.slope.size >= 1)
        rows, hidden = len(self.items), self.slope.size
        shapes: dict[str, tuple[int, ...]] = {"items": (rows, room), "keys_values": (rows, 2 * room)}
        shapes |= {"places": (1 + self.count, 2 * room), "position": (room,), "slope": (hidden,), "norms": (4, width)}
        shapes |= {"query": (width, width), "query_bias": (width,), "joined": (width, width), "joined_bias": (width,)}
        shapes |= {"inner": (width, hidden), "inner_bias": (hidden,), "outer": (hidden, width), "outer_bias": (width,)}
        for name, shape in shapes.items():
            require("TargetTransformer", name, getattr(self, name), np.float32, shape)
            require_finite(self, getattr(self, name))
        gaps = {"gap_keys_values": (self.gap_keys_values, (2 * room,))}
        require_gaps(self, program, self.gap_begin, self.count, gaps)
        parts = [table.reshape(-1, 2, room) for table in (self.keys_values, self.places, self.gap_keys_values)]
        require_fit(self, not any(part[..., width:].any() for part in (self.items, self.position, *parts)))
        require_fit(self, 1 <= self.heads <= width and width % self.heads == 0 and self.padding >= 0)
        require_finite(self, self.epsilon)
        require_fit(self, self.epsilon >= 0)
        require_ids(self, program, self.column, 1, rows)
        require_ids(self, program, self.begin, self.count, rows)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        width, room = self.norms.shape[1], self.items.shape[1]
        targets, ids = run.ids[:, self.column], run.ids[:, self.begin : self.begin + self.count]
        x = (self.items[targets] + self.position)[:, :width]
        query, joined, inner, outer = self.layers
        queries = _layer(x, *query)
        attended = np.zeros_like(x)
        for row, (target, items) in enumerate(zip(targets, ids, strict=True)):
            places = np.concatenate([[0], 1 + np.flatnonzero(items != self.padding)])
            sequence = np.concatenate([[target], items[items != self.padding]])
            both = self.keys_values[sequence] + self.places[places]
            if self.gap_begin >= 0:
                both[1:] += self.gap_keys_values[run.ids[row, self.gap_begin + places[1:] - 1]]
            keys, values = both[:, :width], both[:, room : room + width]
            attended[row] = _attention(queries[row], keys, values, self.heads)
        first, second, third, fourth = self.norms
        y = reference.layer_norm(_layer(attended, *joined) + x, first, second, self.epsilon)
        hidden = _layer(y, *inner)
        hidden = np.where(hidden < 0, hidden * self.slope, hidden)
        run.buffers[self.out] = reference.layer_norm(_layer(hidden, *outer) + y, third, fourth, self.epsilon)

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        program.target_transformer(
            self.out,
            self.column,
            self.begin,
            self.count,
            self.padding,
            self.heads,
            contiguous(self.items),
            contiguous(self.keys_values),
            contiguous(self.places),
            contiguous(self.position),
            [contiguous(array) for layer in self.layers for array in layer],
            contiguous(self.slope),
            [contiguous(array) for array in self.norms],
            self.epsilon,
            self.gap_begin,
            [contiguous(self.gap_keys_values)] if self.gap_begin >= 0 else [],
        )


@dataclass(frozen=True, eq=False)
class SequenceEncoder(Step):
    """State of the newest item of a sequence after B blocks of self-attention (SASRec).

        x_p = items[id_p] + positions_p, with time gaps + gap_items[gap_p]
        x = x + joined(attention(query(norm x), keys_values(norm x)));  x = x + outer(relu(inner(norm x)))
        out = norm x_0

    The newest item comes first; an item attends to itself and to those behind it. Places with the id `padding` are left
    out, all but the first. Layers have int8 weights with a scale a column, and read uint8 rows with a scale a row, as
    the layers of `pipelines.kernels.transformer`; those of `exact` have float32 weights, summed from the bias on in the
    order of the inputs. Attention and normalization are float32.

    Attributes:
        out: Buffer "f4" of the width d of an item.
        begin: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        heads: Number of heads, of a multiple of 16 columns each.
        items: float32 [rows, d].
        positions: float32 [count, d].
        norms: float32 [2 B + 1, 2, d]: scale and bias in the order of the norms.
        epsilon: Added to the variances.
        query: int8 [B, d, W], W the columns of all heads; with the scale of the scores.
        query_scale: float32 [B, 2, W], scale and bias; so for the others.
        keys_values: int8 [B, d, 2 W].
        keys_values_scale: float32 [B, 2, 2 W].
        joined: int8 [B, W, d].
        joined_scale: float32 [B, 2, d].
        inner: int8 [B, d, hidden].
        inner_scale: float32 [B, 2, hidden].
        outer: int8 [B, hidden, d].
        outer_scale: float32 [B, 2, d].
        exact: Numbers of the float32 layers, 5 block + the place in the order above; their int8 weights are not read.
        fine: The float32 weights of these layers, one after the other.
        gap_begin: First column of the ids of the time gaps, as many as places; -1: there are none.
        gap_items: float32 [gaps, d].
    """

    out: int
    begin: int
    count: int
    padding: int
    heads: int
    items: Array
    positions: Array
    norms: Array
    epsilon: float
    query: Array
    query_scale: Array
    keys_values: Array
    keys_values_scale: Array
    joined: Array
    joined_scale: Array
    inner: Array
    inner_scale: Array
    outer: Array
    outer_scale: Array
    exact: tuple[int, ...] = ()
    fine: Array = field(default_factory=lambda: NONE)
    gap_begin: int = -1
    gap_items: Array = field(default_factory=lambda: NONE)

    def norm(self, number: int) -> tuple[Array, Array, float]:
        """Returns scale, bias and epsilon of a normalization.

        Args:
            number: Index of the normalization.
        """
        return self.norms[number, 0], self.norms[number, 1], self.epsilon

    def layers(self, block: int) -> list[RowLinear]:
        """Returns query, keys and values, joined, inner and outer of a block.

        Args:
            block: Index of the block.
        """
        names = ("query", "keys_values", "joined", "inner", "outer")
        pairs = [(getattr(self, name)[block], getattr(self, f"{name}_scale")[block]) for name in names]
        return [RowLinear(contiguous(weight), contiguous(both[0]), contiguous(both[1])) for weight, both in pairs]

    def exact_weights(self) -> dict[int, Array]:
        """Returns the weights of the float32 layers, [inputs, outputs] each, by their numbers."""
        names, weights, start = ("query", "keys_values", "joined", "inner", "outer"), {}, 0
        for number in self.exact:
            shape = getattr(self, names[number % 5]).shape[1:]
            size = int(np.prod(shape))
            weights[number] = self.fine[start : start + size].reshape(shape)
            start += size
        return weights

    def check(self, program: ClickProgram, slots: Slots) -> None:
        """See `Step`."""
        width = slots.write(self, self.out, "f4")
        require_fit(self, self.query.ndim == 3 == self.inner.ndim and self.items.ndim == 2)
        (blocks, _, columns), hidden, rows = self.query.shape, self.inner.shape[2], len(self.items)
        require_fit(self, blocks >= 1 and self.heads >= 1 and columns >= 1 and columns % (LANES * self.heads) == 0)
        shapes: dict[str, tuple[int, ...]] = {"items": (rows, width), "positions": (self.count, width)}
        shapes["norms"] = (2 * blocks + 1, 2, width)
        layers = {"query": (width, columns), "keys_values": (width, 2 * columns), "joined": (columns, width)}
        layers |= {"inner": (width, hidden), "outer": (hidden, width)}
        for name, (inputs, outputs) in layers.items():
            require("SequenceEncoder", name, getattr(self, name), np.int8, (blocks, inputs, outputs))
            shapes[f"{name}_scale"] = (blocks, 2, outputs)
        for name, shape in shapes.items():
            require("SequenceEncoder", name, getattr(self, name), np.float32, shape)
            require_finite(self, getattr(self, name))
        require_finite(self, self.epsilon)
        require_fit(self, self.epsilon >= 0 and self.padding >= 0)
        require_ids(self, program, self.begin, self.count, rows)
        require_gaps(self, program, self.gap_begin, self.count, {"gap_items": (self.gap_items, (width,))})
        require_fit(self, list(self.exact) == sorted(set(self.exact) & set(range(5 * blocks))))
        sizes = [inputs * outputs for inputs, outputs in layers.values()]
        require("SequenceEncoder", "fine", self.fine, np.float32, (sum(sizes[number % 5] for number in self.exact),))
        require_finite(self, self.fine)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        states = [self._state(row) for row in run.ids]
        run.buffers[self.out] = np.concatenate(states) if states else self.items[:0]

    def _state(self, row: Array) -> Array:
        """Encodes the sequence of a sample: float32 [1, d]."""
        ids = row[self.begin : self.begin + self.count]
        present = ids != self.padding
        present[0] = True
        x = self.items[ids[present]] + self.positions[present]
        if self.gap_begin >= 0:
            x = x + self.gap_items[row[self.gap_begin : self.gap_begin + self.count][present]]
        exact = self.exact_weights()
        for block in range(len(self.query)):

            def apply(place: int, x: Array, residual: Array | None = None, block: int = block) -> Array:
                layer, weight = self.layers(block)[place], exact.get(5 * block + place)
                if weight is None:
                    quick = {"relu": place == 3, "nonnegative": place == 4}
                    return reference.linear(layer, x, residual=residual, **quick)
                y = _layer(x, weight, layer.bias)
                y = np.where(y < 0, np.float32(0), y) if place == 3 else y
                return y if residual is None else y + residual

            normed = reference.layer_norm(x, *self.norm(2 * block))
            keys, values = np.split(apply(1, normed), 2, axis=1)
            if block + 1 == len(self.query):
                x, normed = x[:1], normed[:1]
            attended = reference.attention(apply(0, normed), keys, values, self.heads, causal=True)
            x = apply(2, attended, x)
            normed = reference.layer_norm(x, *self.norm(2 * block + 1))
            x = apply(4, apply(3, normed), x)
        return reference.layer_norm(x, *self.norm(-1))

    def add_to(self, program: NativeProgram) -> None:
        """See `Step`."""
        layers = [layer for block in range(len(self.query)) for layer in self.layers(block)]
        program.sequence_encoder(
            self.out,
            self.begin,
            self.count,
            self.padding,
            self.heads,
            contiguous(self.items),
            contiguous(self.positions),
            [contiguous(array) for norm in self.norms for array in norm],
            self.epsilon,
            [array for layer in layers for array in (layer.weight, layer.scale, layer.bias)],
            [(number, contiguous(weight)) for number, weight in self.exact_weights().items()],
            self.gap_begin,
            [contiguous(self.gap_items)] if self.gap_begin >= 0 else [],
        )


def _attention(query: Array, keys: Array, values: Array, heads: int) -> Array:
    """Attention of one query, float32 [d], over keys and values, float32 [t, d]."""
    scores = np.zeros((heads, len(keys)), np.float32)
    for factor, column in zip(query.reshape(heads, -1).T, keys.reshape(len(keys), heads, -1).T, strict=True):
        scores = scores + factor[:, None] * column
    weights = reference.exponential(scores - scores.max(axis=1, keepdims=True))
    inverse = np.float32(1) / reference.sum_lanes(weights)
    sums = reference.sum_lanes(values.reshape(len(values), heads, -1).transpose(1, 2, 0) * weights[:, None])
    return np.asarray(sums * inverse[:, None]).ravel()


def _layer(x: Array, weight: Array, bias: Array) -> Array:
    """Computes x weight + bias in float32, summed from the bias on in the order of the inputs."""
    y = np.broadcast_to(bias, (len(x), len(bias)))
    for k in range(len(weight)):
        y = y + weight[k] * x[:, k, None]
    return y
