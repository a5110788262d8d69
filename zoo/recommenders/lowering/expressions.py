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

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(first, count, rows) of the columns of the ids that select from so many rows of a table."""
        return []


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
    def spans(self) -> list[tuple[int, int, int]]:
        """See `Expression`."""
        return [(self.column, self.count, len(self.table))]


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
class FloatVector(Expression):
    """Vector that one step computes as floats.

    Attributes:
        value: Name in the graph.
        bounded: Whether all results are within [-1, 1].
    """

    value: str
    bounded: ClassVar[bool] = False

    def sources(self) -> list[Expression]:
        """Returns the layers that the step reads, before a ReLU where they end in one."""
        return []

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """Returns the step.

        Args:
            sources: Buffers of the sources.
            out: Buffer of the result.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Leaky(FloatVector):
    """Leaky ReLU: x, multiplied by `slope`, float64 [width], where it is negative."""

    x: Linear
    slope: Array

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
        return steps.Leaky(sources[0], out, self.slope.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Tanh(FloatVector):
    """tanh(x)."""

    x: Linear
    bounded: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
        return steps.Tanh(sources[0], out)


@dataclass(frozen=True, eq=False)
class Gated(FloatVector):
    """Slices of x, each multiplied by its entry of softmax(gates)."""

    x: Tanh
    gates: Linear
    bounded: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
        return steps.Mixture(sources[0], sources[1], out)


@dataclass(frozen=True, eq=False)
class GatedSum(FloatVector):
    """Mixture of experts: sum_e softmax(gates)_e x_e; all experts or none end in a ReLU."""

    vectors: list[Expression]
    gates: Linear
    rectifies: ClassVar[bool] = True

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [*self.vectors, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
        return steps.GatedSum(tuple(sources[:-1]), sources[-1], out, is_relu(self.vectors[0]))


@dataclass(frozen=True, eq=False)
class Dice(FloatVector):
    """A layer with an activation, see `steps.Activation`."""

    x: Linear
    activation: steps.Activation

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
        scale, shift, rise, slope = (np.ascontiguousarray(array, np.float32) for array in self.activation[:4])
        return steps.Dice(sources[0], out, scale, shift, rise, slope, self.activation.epsilon)


@dataclass(frozen=True, eq=False)
class SigmoidGated(FloatVector):
    """Layer times gates, x sigmoid(gates): a gated cross (Wang et al. 2023, GDCN) without the product with x_0."""

    x: Linear
    gates: Linear

    def sources(self) -> list[Expression]:
        """See `FloatVector`."""
        return [self.x, self.gates]

    def step(self, sources: Sequence[int], out: int) -> steps.Step:
        """See `FloatVector`."""
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
