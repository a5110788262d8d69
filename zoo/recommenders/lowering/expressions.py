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
    """Float value of the graph.

    Attributes:
        width: Columns of a sample.
        rectifies: Whether its step applies the ReLU in which a source ends.
        readable: Whether linear layers can read it, besides those that `is_value` names.
    """

    width: int
    rectifies: ClassVar[bool] = False
    readable: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class Numbers(Expression):
    """Columns of the numeric input, each multiplied by a factor.

    Attributes:
        columns: Columns of the input.
        factor: float64 [width].
        value: Name in the graph, for a vector of one number; else "".
    """

    columns: list[int]
    factor: Array
    value: str = ""


@dataclass(frozen=True, eq=False)
class Field(Expression):
    """Table rows selected by columns of the ids, pooled.

    Attributes:
        table: float32 [rows, width].
        column: First column of the ids.
        count: Number of columns of the ids.
        pool: "", "sum", "mean" or "max".
        mean: Column of `scales` that multiplies a sum, or -1.
        value: Name in the graph.
    """

    table: Array
    column: int
    count: int
    pool: str
    mean: int
    value: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, count) of the columns of the ids."""
        return [(self.column, self.count)]


@dataclass(frozen=True, eq=False)
class Concat(Expression):
    """Concatenated parts; no part is a Concat."""

    parts: list[Expression]


@dataclass(frozen=True, eq=False)
class Linear(Expression):
    """Linear layer x weight + bias.

    Attributes:
        x: Input.
        weight: float64 [inputs, width].
        bias: float64 [width].
        relu: Whether the value is that after a ReLU.
        value: Name in the graph.
    """

    x: Expression
    weight: Array
    bias: Array
    relu: bool
    value: str


@dataclass(frozen=True, eq=False)
class Leaky(Expression):
    """Leaky ReLU: x, multiplied by `slope`, float64 [width], where it is negative."""

    x: Linear
    slope: Array
    value: str
    bounded: ClassVar[bool] = False

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step from the buffer of `x` to the buffer `out`."""
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
        """See `FloatVector`: the step from the buffer of `x` to the buffer `out`."""
        return steps.Tanh(sources[0], out)


@dataclass(frozen=True, eq=False)
class Gated(Expression):
    """Slices of x, each multiplied by its entry of softmax(gates)."""

    x: Tanh
    gates: Linear
    value: str
    bounded: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step from the buffers of `x` and the gates to the buffer `out`."""
        return steps.Mixture(sources[0], sources[1], out)


@dataclass(frozen=True, eq=False)
class GatedSum(Expression):
    """Mixture of experts: sum_e softmax(gates)_e x_e; all experts or none end in a ReLU."""

    vectors: list[Expression]
    gates: Linear
    value: str
    bounded: ClassVar[bool] = False
    rectifies: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [*self.vectors, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step from the buffers of experts and gates to the buffer `out`."""
        return steps.GatedSum(tuple(sources[:-1]), sources[-1], out, is_relu(self.vectors[0]))


@dataclass(frozen=True, eq=False)
class Dice(Expression):
    """x (slope + rise sigmoid(x scale + shift)): arrays (scale, shift, rise, slope), float32 [width] each."""

    x: Linear
    arrays: tuple[Array, ...]
    value: str
    bounded: ClassVar[bool] = False

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step from the buffer of `x` to the buffer `out`."""
        scale, shift, rise, slope = (np.ascontiguousarray(each, np.float32) for each in self.arrays)
        return steps.Dice(sources[0], out, scale, shift, rise, slope)


@dataclass(frozen=True, eq=False)
class Attended(Expression):
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
        activations: (scale, shift, rise, slope) of both hidden layers.
        softmax: Whether the weights are a softmax.
        value: Name in the graph.
    """

    table: Array
    column: int
    start: int
    count: int
    padding: int
    weights: tuple[Array, ...]
    score_bias: float
    activations: tuple[tuple[Array, ...], tuple[Array, ...]]
    softmax: bool
    value: str
    bounded: ClassVar[bool] = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, count) of the columns of the ids."""
        return [(self.column, 1), (self.start, self.count)]

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return []

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step to the buffer `out`; projections of keys and queries become tables."""
        key, query, query_bias, product, hidden, bias, score = self.weights
        table = self.table.astype(np.float64)

        def padded(x: Array) -> Array:
            return np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % steps.LANES)))

        one, two = (tuple(np.ascontiguousarray(each, np.float32) for each in unit) for unit in self.activations)
        return steps.TargetAttention(
            out,
            self.column,
            self.start,
            self.count,
            self.padding,
            padded(table),
            padded(table @ key),
            padded(table @ query + query_bias),
            padded(product),
            one[0],
            one[1],
            one[2],
            one[3],
            np.ascontiguousarray(hidden, np.float32),
            np.ascontiguousarray(bias, np.float32),
            two[0],
            two[1],
            two[2],
            two[3],
            np.ascontiguousarray(score, np.float32),
            self.score_bias,
            self.softmax,
        )


@dataclass(frozen=True, eq=False)
class SigmoidGated(Expression):
    """Layer times gates, x sigmoid(gates): a gated cross (Wang et al. 2023, GDCN) without the product with x_0."""

    x: Linear
    gates: Linear
    value: str
    bounded: ClassVar[bool] = False

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`: the step from the buffers of `x` and the gates to the buffer `out`."""
        return steps.SigmoidProduct(sources[0], sources[1], out)


@dataclass(frozen=True, eq=False)
class Crossed(Expression):
    """State x_l of a cross network: x_0 (1 + sum_l u_l).

    With biases b_l next to the products, x_{l+1} = x_0 u_l + b_l + x_l, this is x_l without the sum of the biases.
    """

    x: Expression
    changes: list[Expression]
    value: str


@dataclass(frozen=True, eq=False)
class Shifted(Expression):
    """Sum x + by, float64 [width]; a linear layer merges it into its bias."""

    x: Expression
    by: Array


@dataclass(frozen=True, eq=False)
class Dots(Expression):
    """Dot products of pairs (i, j) of vectors."""

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
    """Normalized vector x / sqrt(max(|x|^2 + epsilon, least))."""

    x: Expression
    epsilon: float
    least: float


@dataclass(frozen=True, eq=False)
class Product(Expression):
    """Dot product x . y."""

    x: Expression
    y: Expression


@dataclass(frozen=True, eq=False)
class Total(Expression):
    """Sum of one column: bias + sum of terms, each multiplied by a factor; `sigmoid`: through a sigmoid."""

    terms: list[tuple[Expression, float]]
    bias: float
    sigmoid: bool = False


@dataclass(frozen=True, eq=False)
class ProbabilityProduct(Expression):
    """Product x y of two probabilities, as pCTCVR = pCTR pCVR of ESMM."""

    x: Expression
    y: Expression


# values on the way to one of the above


@dataclass(frozen=True, eq=False)
class Vectors(Expression):
    """Vectors of one width, an intermediate value.

    Attributes:
        vectors: The vectors.
        form: "stack": [n, vectors, width]; "turned": the last axes exchanged; "dots": all dot products; "sum": their
            sum.
    """

    vectors: list[Expression]
    form: str = "stack"


@dataclass(frozen=True, eq=False)
class ElementwiseProduct(Expression):
    """Elementwise product x y, an intermediate value."""

    x: Expression
    y: Expression


@dataclass(frozen=True, eq=False)
class SquareSum(Expression):
    """Sum max(|x|^2 + epsilon, least), or its root; an intermediate value."""

    x: Expression
    epsilon: float = 0.0
    least: float = 0.0
    root: bool = False


@dataclass(frozen=True, eq=False)
class Softmax(Expression):
    """Softmax of x with every entry repeated `times` times, an intermediate value."""

    x: Linear
    times: int = 1


@dataclass(frozen=True, eq=False)
class WeightedVectors(Expression):
    """Vectors multiplied by their entries of softmax(gates), [n, vectors, width]; an intermediate value."""

    vectors: list[Expression]
    gates: Linear


@dataclass(frozen=True, eq=False)
class MeanScale(Expression):
    """Column of `scales`, an intermediate value."""

    column: int


# Vectors that one step computes as floats. sources(): the layers that the step reads, before a ReLU where they end in
# one. step(buffers of the sources, buffer of the result): the step. bounded: all results are within [-1, 1].
FloatVector = Leaky | Tanh | Gated | GatedSum | Dice | Attended | SigmoidGated


def is_value(x: Expression) -> bool:
    """Whether linear layers can read an expression.

    Args:
        x: Expression.

    Returns:
        Whether they can.
    """
    kinds = Numbers | Field | Concat | Linear | FloatVector | Crossed | Dots | L2Normalized
    return x.readable or isinstance(x, kinds)


def is_relu(x: Expression) -> bool:
    """Whether an expression is a layer that ends in a ReLU.

    Args:
        x: Expression.

    Returns:
        Whether it is.
    """
    return isinstance(x, Linear) and x.relu


def parts_of(x: Expression) -> list[Expression]:
    """Returns the concatenated parts of a value.

    Args:
        x: Value.

    Returns:
        Parts in order.
    """
    return x.parts if isinstance(x, Concat) else [x]
