"""Expressions on the fields of a sample: gates of vectors, and attention between fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from zoo.recommenders.lowering.expressions import Array, Crossed, Expression, Linear, parts_of

Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class GatedCodes(Expression):
    """Vectors times gates, factor x sigmoid(gates) (Mao et al. 2023, "FinalMLP", feature selection)."""

    x: Expression
    gates: Linear
    factor: float
    readable: ClassVar[bool] = True


def vectors_of(part: Expression) -> list[Expression]:
    """Returns the vectors of a layer's input: the vectors before its gates or cross layers, or the input itself.

    Args:
        part: Input of a layer.
    """
    return parts_of(part.x) if isinstance(part, Crossed | GatedCodes) else [part]


@dataclass(frozen=True, eq=False)
class Sigmoids(Expression):
    """factor sigmoid(x), an intermediate value."""

    x: Linear
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Rescaled(Expression):
    """x by, float64 [width]; a linear layer merges it into its weights."""

    x: Expression
    by: Array


@dataclass(frozen=True, eq=False)
class Heads(Expression):
    """Layer split into heads, [n, heads, 1, columns]; turned: [n, heads, columns, 1]; an intermediate value."""

    x: Linear
    heads: int
    turned: bool


@dataclass(frozen=True, eq=False)
class HeadDots(Expression):
    """Dot products of the heads of two layers, an intermediate value."""

    x: Linear
    y: Linear
    value: str


@dataclass(frozen=True, eq=False)
class FieldLayer(Expression):
    """Linear layer of the vector of every field, [n, fields, columns]; an intermediate value.

    Attributes:
        x: Attention whose results it reads, or None.
        vectors: Vectors of the fields where `x` is None.
        weight: float64 [inputs, columns].
        bias: float64 [columns].
        value: Name in the graph.
    """

    x: FieldAttention | None
    vectors: list[Expression]
    weight: Array
    bias: Array
    value: str


@dataclass(frozen=True, eq=False)
class FieldAttention(Expression):
    """Multi-head attention of every field to all fields, see `pipelines.kernels.recommenders.steps.FieldAttention`.

    Attributes:
        x: Attention whose results it reads, or None.
        vectors: Vectors of the fields where `x` is None.
        fields: Number of fields.
        heads: Number of heads.
        layers: Queries, keys and values, and the residual where there is one.
        score: Factor of scores.
        relu: Whether it ends in a ReLU.
        value: Name of the result in the graph.
    """

    x: FieldAttention | None
    vectors: list[Expression]
    fields: int
    heads: int
    layers: tuple[FieldLayer, ...]
    score: float
    relu: bool
    value: str
    readable: ClassVar[bool] = True

    @property
    def columns(self) -> int:
        """Columns of a field."""
        return self.width // self.fields


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores <q, k> of fields, and their softmax.

    Attributes:
        query: Queries.
        key: Keys.
        factor: Factor of the scores.
        softmax: Whether it is the softmax along the keys.
    """

    query: FieldLayer
    key: FieldLayer
    factor: float = 1.0
    softmax: bool = False


@dataclass(frozen=True, eq=False)
class Attended:
    """Values weighted by a softmax.

    Attributes:
        scores: The softmax.
        layer: Values.
        head: The one head that is picked, or None.
        value: Name in the graph.
    """

    scores: Scores
    layer: FieldLayer
    head: int | None = None
    value: str = ""


@dataclass(frozen=True, eq=False)
class FieldTensor(Expression):
    """Value with an axis of fields, in any layout; an intermediate value.

    Attributes:
        content: Vectors of the fields, a layer, an attention, or a part of one.
        axes: What the axes of the value hold, outermost first: "n" samples, "f" fields, "g" fields of keys, "h" heads,
            "c" columns of a head, "m" columns.
        sizes: Sizes of all of these but of "n".
    """

    content: list[Expression] | FieldLayer | FieldAttention | Scores | Attended
    axes: Axes
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def order(self) -> tuple[str, ...]:
        """All axes in order."""
        return tuple(name for group in self.axes for name in group)


def identity(x: FieldAttention | None, vectors: list[Expression], columns: int, value: str) -> FieldLayer:
    """Creates the layer that returns its input.

    Args:
        x: See `FieldLayer`.
        vectors: See `FieldLayer`.
        columns: Columns of a field.
        value: Name in the graph.

    Returns:
        The layer.
    """
    fields = x.fields if x is not None else len(vectors)
    return FieldLayer(fields * columns, x, vectors, np.eye(columns), np.zeros(columns), value)


def same_source(layers: Sequence[FieldLayer]) -> bool:
    """Whether layers read the same vectors.

    Args:
        layers: Layers.

    Returns:
        Whether they do.
    """
    first: Any = layers[0]
    return all(layer.x is first.x and layer.vectors == first.vectors for layer in layers)
