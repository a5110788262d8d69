"""Expressions of the float graph of a click model: fields, linear layers, sums, crosses and dot products.

`zoo.recommenders.lowering.graph_reader` builds them from a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.recommenders import steps

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Expression:
    """A float value of `width` columns a sample. rectifies: its step applies the ReLU in which a source ends."""

    width: int
    rectifies: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class Numbers(Expression):
    """Columns of the numeric input, each multiplied by a factor; factors are float64 [width].

    value: name in the graph of a vector of one number, else "".
    """

    columns: list[int]
    factor: Array
    value: str = ""


@dataclass(frozen=True, eq=False)
class Field(Expression):
    """Rows of a table [rows, width] that `count` columns of the ids choose, pooled: "", "sum", "mean" or "max".

    mean: the column of `scales` that a sum is multiplied by. value: its name in the graph.
    """

    table: Array
    column: int
    count: int
    pool: str
    mean: int
    value: str


@dataclass(frozen=True, eq=False)
class Concat(Expression):
    """Parts side by side; none is a Concat itself."""

    parts: list[Expression]


@dataclass(frozen=True, eq=False)
class Linear(Expression):
    """x weight + bias; float64 [inputs, width] and [width]. relu: the value after it is read, not the sum."""

    x: Expression
    weight: Array
    bias: Array
    relu: bool
    value: str


@dataclass(frozen=True, eq=False)
class Leaky(Expression):
    """x, times `slope`, float64 [width], where it is below 0."""

    x: Linear
    slope: Array
    value: str
    bounded: ClassVar[bool] = False

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """Creates the step from the buffer of `x` to the buffer `out`, see `FloatVector`."""
        return steps.Leaky(sources[0], out, self.slope.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Tanh(Expression):
    """tanh(x)."""

    x: Linear
    value: str
    bounded: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """Creates the step from the buffer of `x` to the buffer `out`, see `FloatVector`."""
        return steps.Tanh(sources[0], out)


@dataclass(frozen=True, eq=False)
class Gated(Expression):
    """x in slices, each times its part of softmax(gates)."""

    x: Tanh
    gates: Linear
    value: str
    bounded: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """Creates the step from the buffers of `x` and the gates to the buffer `out`, see `FloatVector`."""
        return steps.Mixture(sources[0], sources[1], out)


@dataclass(frozen=True, eq=False)
class GatedSum(Expression):
    """sum_e softmax(gates)_e x_e of experts, all behind a ReLU or none."""

    vectors: list[Expression]
    gates: Linear
    value: str
    bounded: ClassVar[bool] = False
    rectifies: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [*self.vectors, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """Creates the step from the buffers of experts and gates to the buffer `out`, see `FloatVector`."""
        return steps.GatedSum(tuple(sources[:-1]), sources[-1], out, is_relu(self.vectors[0]))


@dataclass(frozen=True, eq=False)
class Crossed(Expression):
    """x_l of a cross network: x_0 (1 + sum_l u_l).

    Where biases b_l stand beside the products, x_{l+1} = x_0 u_l + b_l + x_l, this is x_l without their sum.
    """

    x: Expression
    changes: list[Expression]
    value: str


@dataclass(frozen=True, eq=False)
class Shifted(Expression):
    """x + by; float64 [width]. A linear layer takes it into its bias."""

    x: Expression
    by: Array


@dataclass(frozen=True, eq=False)
class Dots(Expression):
    """Dot products of vectors, pairs (i, j) each."""

    vectors: list[Expression]
    pairs: list[tuple[int, int]]
    value: str


@dataclass(frozen=True, eq=False)
class Factorization(Expression):
    """factor sum_j ((sum_f v_fj)^2 - sum_f v_fj^2); not yet summed over j where it is wider than 1."""

    vectors: list[Expression]
    factor: float


@dataclass(frozen=True, eq=False)
class L2Normalized(Expression):
    """x / sqrt(max(|x|^2 + epsilon, least))."""

    x: Expression
    epsilon: float
    least: float


@dataclass(frozen=True, eq=False)
class Product(Expression):
    """x . y."""

    x: Expression
    y: Expression


@dataclass(frozen=True, eq=False)
class Total(Expression):
    """bias + sum of terms, each times a factor; one column."""

    terms: list[tuple[Expression, float]]
    bias: float
    sigmoid: bool = False


# values on the way to one of the above


@dataclass(frozen=True, eq=False)
class Vectors(Expression):
    """Vectors of one width. form: "stack", on an axis of their own: [n, vectors, width]; "turned": its last axes
    exchanged; "dots": all their dot products; "sum": their sum.
    """

    vectors: list[Expression]
    form: str = "stack"


@dataclass(frozen=True, eq=False)
class ElementwiseProduct(Expression):
    """x y, element by element."""

    x: Expression
    y: Expression


@dataclass(frozen=True, eq=False)
class SquareSum(Expression):
    """max(|x|^2 + epsilon, least), or its root."""

    x: Expression
    epsilon: float = 0.0
    least: float = 0.0
    root: bool = False


@dataclass(frozen=True, eq=False)
class Softmax(Expression):
    """softmax(x), each entry so many times."""

    x: Linear
    times: int = 1


@dataclass(frozen=True, eq=False)
class WeightedVectors(Expression):
    """Vectors, each times its part of softmax(gates): [n, vectors, width]."""

    vectors: list[Expression]
    gates: Linear


@dataclass(frozen=True, eq=False)
class MeanScale(Expression):
    """A column of `scales`."""

    column: int


# Vectors that one step computes as floats. sources(): the layers that the step reads, before a ReLU where they end in
# one. step(buffers of the sources, buffer of the result): the step. bounded: all results are within [-1, 1].
FloatVector = Leaky | Tanh | Gated | GatedSum


def is_value(x: Expression) -> bool:
    """Whether `x` is one of the values that layers read."""
    return isinstance(x, Numbers | Field | Concat | Linear | FloatVector | Crossed | Dots | L2Normalized)


def is_relu(x: Expression) -> bool:
    """Whether `x` is a layer that ends in a ReLU."""
    return isinstance(x, Linear) and x.relu


def parts_of(x: Expression) -> list[Expression]:
    """The parts that stand side by side in `x`."""
    return x.parts if isinstance(x, Concat) else [x]
