"""Chooses the layers of a sequence encoder whose int8 weights would move probabilities too far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.recommenders.lowering.expressions import Expression, Field, L2Normalized, Product, Total

Array = NDArray[Any]
Layer = tuple[Array, Array]  # weight [inputs, outputs] and bias, float64

SEQUENCES = 48  # drawn from the items; half of them are full
ERROR_BOUND = 0.003  # of a probability, as that of the families' recipes
ITEMS = 32  # scored with the state of every sequence


@dataclass(frozen=True, eq=False)
class StateUse:
    """Use of the state of a sequence: a logit factor (state . vector).

    Attributes:
        factor: Factor of the dot product in the logit.
        unit: Whether the state is L2-normalized first.
        vectors: Vectors that it is multiplied by, float32 [rows, width].
    """

    factor: float
    unit: bool
    vectors: Array


def uses_of_states(outputs: Iterable[Expression]) -> dict[Expression, StateUse]:
    """Finds the vectors that meet another one in a dot product of a logit.

    Args:
        outputs: Results of a graph.

    Returns:
        {vector before its normalization: its use}.
    """
    uses: dict[Expression, StateUse] = {}
    for total in outputs:
        for term, factor in total.terms if isinstance(total, Total) else ():
            if not isinstance(term, Product):
                continue
            for x, other in ((term.x, term.y), (term.y, term.x)):
                vectors = other.x if isinstance(other, L2Normalized) else other
                if not isinstance(vectors, Field):
                    continue
                table = vectors.table.astype(np.float64)
                if isinstance(other, L2Normalized):
                    table = table / np.sqrt(np.maximum((table**2).sum(axis=1, keepdims=True), 1e-12))
                state = x.x if isinstance(x, L2Normalized) else x
                uses[state] = StateUse(factor, isinstance(x, L2Normalized), table)
    return uses


def float_layers(
    use: StateUse,
    table: Array,
    factor: float,
    position: Array,
    blocks: Sequence[Sequence[Layer]],
    heads: int,
    norms: Array,
    epsilon: float,
    gaps: Array | None = None,
) -> tuple[int, ...]:
    """Chooses the layers that stay float32, the most harmful ones first.

    Sequences of random items are encoded with int8 layers and in float64. The measure is the largest change of the
    probability over random vectors of `use`, which must stay below `ERROR_BOUND`.

    Args:
        use: What becomes of the state.
        table: Vectors of the items, [rows, width].
        factor: Factor of the vectors.
        position: Vectors of the places, [count, width].
        blocks: Projection to query, keys and values, joined, inner and outer of every block.
        heads: Number of heads.
        norms: Scale and bias of the normalizations, [2 blocks + 1, 2, width].
        epsilon: Added to the variances.
        gaps: Vectors of the time gaps, [rows, width], if the items have some.

    Returns:
        Numbers of the layers, 5 block + 0 query, 1 keys and values, 2 joined, 3 inner, 4 outer.
    """
    rng = np.random.default_rng(0)
    count = len(position)
    lengths = np.where(np.arange(SEQUENCES) % 2, count, rng.integers(1, count + 1, SEQUENCES))
    present = np.arange(count) < lengths[:, None]
    x = table[rng.integers(0, len(table), (SEQUENCES, count))] * factor + position
    if gaps is not None:
        x = x + gaps[rng.integers(0, len(gaps), (SEQUENCES, count))]
    vectors = use.vectors[rng.integers(0, len(use.vectors), ITEMS)] * use.factor

    def probabilities(exact: Collection[int]) -> Array:
        states = _state(x, present, blocks, heads, norms, epsilon, exact)
        if use.unit:
            states = states / np.sqrt(np.maximum((states**2).sum(axis=1, keepdims=True), 1e-12))
        logits = states @ vectors.T
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))))

    every = range(5 * len(blocks))
    truth = probabilities(every)
    exact: list[int] = []

    def change(more: int | None = None) -> float:
        return float(np.abs(probabilities([*exact, *([] if more is None else [more])]) - truth).max())

    while len(exact) < len(every) and change() > ERROR_BOUND:
        exact.append(min((number for number in every if number not in exact), key=change))
    return tuple(sorted(exact))


def _state(
    x: Array,
    present: Array,
    blocks: Sequence[Sequence[Layer]],
    heads: int,
    norms: Array,
    epsilon: float,
    exact: Collection[int],
) -> Array:
    """Encodes [n, count, width]; layers whose number is not among `exact` are rounded as int8 layers are."""
    width = x.shape[2]
    size = width // heads

    def normed(x: Array, number: int) -> Array:
        centred = x - x.mean(axis=2, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=2, keepdims=True) + epsilon)
        return np.asarray(centred / deviation * norms[number, 0] + norms[number, 1])

    def apply(x: Array, layer: Layer, number: int) -> Array:
        weight, bias = layer
        if number not in exact:
            scale = np.maximum(np.abs(weight).max(axis=0), 1e-30) / 127
            weight = np.rint(weight / scale) * scale
            low = 255.0 if number % 5 == 4 else 127.0
            row = np.maximum(np.abs(x).max(axis=2, keepdims=True), 1e-30) / low
            x = np.rint(x / row) * row
        return np.asarray(x @ weight + bias)

    def apart(x: Array) -> Array:
        return x.reshape(*x.shape[:2], heads, size).swapaxes(1, 2)

    count = x.shape[1]
    barred = np.where(np.triu(np.ones((count, count), bool)) & present[:, None, None], 0.0, -1e9)
    for block, (projected, joined, inner, outer) in enumerate(blocks):
        first = 5 * block
        y = normed(x, 2 * block)
        (weight, bias), parts = projected, np.s_[width:]
        queries = apart(apply(y, (weight[:, :width], bias[:width]), first))
        keys, values = map(apart, np.split(apply(y, (weight[:, parts], bias[parts]), first + 1), 2, axis=2))
        scores = queries @ keys.swapaxes(2, 3) / np.sqrt(size) + barred
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        together = (weights / weights.sum(axis=3, keepdims=True)) @ values
        x = x + apply(together.swapaxes(1, 2).reshape(x.shape), joined, first + 2)
        hidden = np.maximum(apply(normed(x, 2 * block + 1), inner, first + 3), 0)
        x = x + apply(hidden, outer, first + 4)
    return normed(x[:, :1], len(norms) - 1)[:, 0]
