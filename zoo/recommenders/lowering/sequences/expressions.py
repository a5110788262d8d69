"""Expressions of sequences: vectors computed from the rows that columns of the ids select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipelines.kernels.recommenders import steps
from zoo.recommenders.lowering.expressions import Array, FloatVector
from zoo.recommenders.lowering.sequences import pair_layers
from zoo.recommenders.lowering.sequences.encoder_precision import StateUse, float_layers
from zoo.recommenders.lowering.sequences.time_gaps import Gaps


@dataclass(frozen=True, eq=False)
class TargetAttention(FloatVector):
    """Weighted sum of the items of a sequence, see `pipelines.kernels.recommenders.steps.sequences.TargetAttention`.

    Attributes:
        table: Vectors of the items, float32 [rows, width].
        column: Column of the ids with the target.
        start: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        weights: Key [width, first], query [width, first], its bias, product [width, first], hidden [first, second], its
            bias and score [second]; float64.
        score_bias: Bias of the score.
        activations: Those of both hidden layers.
        softmax: Whether the weights are a softmax.
        raw: Whether the weights are the scores.
        gaps: Time gaps of the items, if any.
    """

    table: Array
    column: int
    start: int
    count: int
    padding: int
    weights: tuple[Array, ...]
    score_bias: float
    activations: tuple[steps.Activation, steps.Activation]
    softmax: bool
    raw: bool = False
    gaps: Gaps | None = None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """See `Expression`."""
        return _target_spans(self)

    @cached_property
    def _scores(self) -> Array:
        table = self.table.astype(np.float64)
        return pair_layers.pair_scores(table, self.weights, self.activations, self.score_bias)

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`; of few items all scores are kept, of many the projections of keys and queries."""
        made = self._plain_step(out)
        if self.gaps is None:
            return made
        scores = self.gaps.scores.astype(np.float32)
        return replace(made, gap_begin=self.gaps.start, gap_items=_padded(self.gaps.table), gap_scores=scores)

    def _plain_step(self, out: int) -> steps.ScoredAttention | steps.TargetAttention:
        """Returns the step without time gaps."""
        if 4 * len(self.table) ** 2 <= pair_layers.PAIR_SCORES:
            columns = (self.column, self.start, self.count, self.padding)
            return steps.ScoredAttention(out, *columns, _padded(self.table), self._scores, self.softmax, self.raw)
        arrays = pair_layers.pair_layers(self.table.astype(np.float64), self.weights, self.activations)
        return steps.TargetAttention(
            out=out,
            column=self.column,
            begin=self.start,
            count=self.count,
            padding=self.padding,
            score_bias=self.score_bias,
            softmax=self.softmax,
            raw=self.raw,
            gap_begin=-1,
            **arrays,
        )


@dataclass(frozen=True, eq=False)
class TransformedTarget(FloatVector):
    """Result of the target in a transformer layer over a sequence, see `steps.transformers.TargetTransformer`.

    Attributes:
        table: Vectors of the items, float32 [rows, width].
        column: Column of the ids with the target.
        start: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        heads: Number of heads.
        position: Vectors of the places, the target's first, float32 [1 + count, width].
        layers: (weight [inputs, outputs], bias) of query, keys and values, joined, inner and outer; float64.
        scale: Factor of the scores.
        slope: Factor of inner results below 0.
        norms: Scale and bias of both normalizations, float32 [4, width].
        epsilon: Added to the variances.
        gaps: Time gaps of the items, if any.
    """

    table: Array
    column: int
    start: int
    count: int
    padding: int
    heads: int
    position: Array
    layers: tuple[tuple[Array, Array], ...]
    scale: float
    slope: float
    norms: Array
    epsilon: float
    gaps: Gaps | None = None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """See `Expression`."""
        return _target_spans(self)

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`; keys and values of the items become a table."""
        (query, query_bias), (projected, projected_bias), *others = self.layers
        joined, joined_bias, inner, inner_bias, outer, outer_bias = (
            np.ascontiguousarray(array, np.float32) for layer in others for array in layer
        )

        def parts(x: Array) -> Array:
            """Keys and values, each filled up with zeros."""
            made = _padded(x.reshape(len(x), 2, self.width))
            return made.reshape(len(x), -1)

        made = steps.TargetTransformer(
            out,
            self.column,
            self.start,
            self.count,
            self.padding,
            self.heads,
            _padded(self.table),
            parts(self.table.astype(np.float64) @ projected),
            parts(self.position.astype(np.float64) @ projected + projected_bias),
            _padded(self.position[0]),
            (query * self.scale).astype(np.float32),
            (query_bias * self.scale).astype(np.float32),
            joined,
            joined_bias,
            inner,
            inner_bias,
            outer,
            outer_bias,
            np.full(len(inner_bias), self.slope, np.float32),
            np.ascontiguousarray(self.norms, np.float32),
            self.epsilon,
        )
        if self.gaps is None:
            return made
        gaps = parts(self.gaps.table.astype(np.float64) @ projected)
        return replace(made, gap_begin=self.gaps.start, gap_keys_values=gaps)


@dataclass(frozen=True, eq=False)
class EncodedSequence(FloatVector):
    """State of the newest item of a sequence, see `steps.transformers.SequenceEncoder`.

    Attributes:
        table: Vectors of the items, float32 [rows, width].
        start: First column of the sequence.
        count: Places of the sequence.
        padding: Id of the places without an item.
        factor: Factor of the vectors.
        heads: Number of heads.
        position: Vectors of the places, float32 [count, width].
        layers: Of every block (weight [inputs, outputs], bias) of the projection to query, keys and values, joined,
            inner and outer; float64.
        norms: Scale and bias of the normalizations, float32 [2 blocks + 1, 2, width].
        epsilon: Added to the variances.
        gaps: Time gaps of the items, if any.
    """

    table: Array
    start: int
    count: int
    padding: int
    factor: float
    heads: int
    position: Array
    layers: tuple[tuple[tuple[Array, Array], ...], ...]
    norms: Array
    epsilon: float
    gaps: Gaps | None = None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """See `Expression`."""
        gaps = [] if self.gaps is None else self.gaps.spans(self.count)
        return [(self.start, self.count, len(self.table)), *gaps]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`; layers become int8."""
        return self.step_for(None, sources, out)

    def step_for(self, use: StateUse | None, sources: Sequence[int], out: int) -> steps.Step:
        """Returns the step; its heads are filled up with zeros.

        Args:
            use: What becomes of the state, for `float_layers`; None: all layers become int8.
            sources: See `FloatVector`.
            out: See `FloatVector`.
        """
        arrays: list[list[tuple[Array, Array]]] = [[], [], [], [], []]
        for projected, joined, inner, outer in self.layers:
            weight, bias = self._heads(projected[0]), self._heads(projected[1][None])[0]
            columns, scale = weight.shape[1] // 3, (self.width // self.heads) ** -0.5
            rows = np.ascontiguousarray(self._heads(joined[0].T).T)
            layers = [(weight[:, :columns] * scale, bias[:columns] * scale), (weight[:, columns:], bias[columns:])]
            for index, layer in enumerate([*layers, (rows, joined[1]), inner, outer]):
                arrays[index].append(layer)
        names = ("query", "keys_values", "joined", "inner", "outer")
        quantized: dict[str, Array] = {}
        for name, pairs in zip(names, arrays, strict=True):
            quantized[name], quantized[f"{name}_scale"] = _quantized(pairs)
        table = self.table.astype(np.float64)
        own = (self.position.astype(np.float64), self.layers, self.heads, self.norms.astype(np.float64), self.epsilon)
        gap_table = None if self.gaps is None else self.gaps.table.astype(np.float64)
        exact = () if use is None else float_layers(use, table, self.factor, *own, gap_table)
        fine = [arrays[number % 5][number // 5][0].ravel() for number in exact]
        made = steps.SequenceEncoder(
            out=out,
            begin=self.start,
            count=self.count,
            padding=self.padding,
            heads=self.heads,
            items=(table * self.factor).astype(np.float32),
            positions=np.ascontiguousarray(self.position, np.float32),
            norms=np.ascontiguousarray(self.norms, np.float32),
            epsilon=self.epsilon,
            exact=exact,
            gap_begin=-1,
            fine=np.concatenate([np.zeros(0), *fine]).astype(np.float32),
            **quantized,
        )
        if self.gaps is None:
            return made
        return replace(made, gap_begin=self.gaps.start, gap_items=np.ascontiguousarray(self.gaps.table, np.float32))

    def _heads(self, x: Array) -> Array:
        """Fills the columns of every head of [rows, parts * width] up with zeros."""
        apart = x.reshape(len(x), -1, self.width // self.heads)
        return np.pad(apart, ((0, 0), (0, 0), (0, -apart.shape[2] % steps.LANES))).reshape(len(x), -1)


def _target_spans(x: TargetAttention | TransformedTarget) -> list[tuple[int, int, int]]:
    rows = len(x.table)
    return [(x.column, 1, rows), (x.start, x.count, rows), *([] if x.gaps is None else x.gaps.spans(x.count))]


def _padded(x: Array) -> Array:
    """Fills the last axis up with zeros to whole vectors, float32."""
    return np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % steps.LANES)])


def _quantized(layers: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Quantizes layers of one shape: int8 [blocks, inputs, outputs], and scales and biases float32 [blocks, 2, ..]."""
    weight = np.stack([weight for weight, _ in layers])
    largest = np.abs(weight).max(axis=1)
    scale = np.where(largest > 0, largest / 127, 1.0)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    return codes, np.stack([scale, np.stack([bias for _, bias in layers])], axis=1).astype(np.float32)
