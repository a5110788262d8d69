"""Expressions of the float graph of a click model: fields, linear layers, sums, crosses and dot products.

`zoo.recommenders.lowering.graph_reader` builds them from a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


def joined(parts: Sequence[Expression]) -> Expression:
    """Some values side by side."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Concat) else [part]
    return flat[0] if len(flat) == 1 else Concat(sum(each.width for each in flat), flat)


def parts_of(x: Expression) -> list[Expression]:
    """The parts that stand side by side in `x`."""
    return x.parts if isinstance(x, Concat) else [x]


def columns_of(x: Linear, count: int) -> list[Expression]:
    """Splits a layer into layers of neighbouring columns.

    Args:
        x: Layer; its width is divisible by `count`.
        count: Number of layers.

    Returns:
        Layers of width x.width / count in order.
    """
    weights, biases = np.split(x.weight, count, axis=1), np.split(x.bias, count)
    slices = zip(weights, biases, strict=True)
    return [replace(x, width=x.width // count, weight=weight, bias=bias) for weight, bias in slices]


def gated_sum(vectors: Sequence[Expression], gates: Linear, value: str) -> GatedSum | None:
    """Creates sum_e softmax(gates)_e x_e.

    Args:
        vectors: Experts.
        gates: Layer with one output per expert.
        value: Name of the sum in the graph.

    Returns:
        The sum; None unless all experts are layers of one width, and all or none of them end in a ReLU.
    """
    width = vectors[0].width
    alike = all(isinstance(x, Linear | FloatVector) and x.width == width for x in vectors)
    if not alike or len(vectors) != gates.width or len({is_relu(x) for x in vectors}) > 1:
        return None
    return GatedSum(width, list(vectors), gates, value)


def unshifted(x: Expression) -> tuple[Expression, Any]:
    """Splits x into the value and the constant that is added to it."""
    return (x.x, x.by) if isinstance(x, Shifted) else (x, 0.0)


def shifted(x: Expression, by: Any) -> Expression:
    """Adds a constant.

    Args:
        x: Value.
        by: A number or float64 [width].

    Returns:
        x + by.
    """
    x, before = unshifted(x)
    total = np.broadcast_to(before + by, x.width)
    return Shifted(x.width, x, total) if total.any() else x


def layer_of(x: Expression) -> Linear | None:
    """x as a linear layer, which numbers and shifted ones are, too."""
    if isinstance(x, Linear):
        return x
    numbers, by = unshifted(x)
    if not isinstance(numbers, Numbers):
        return None
    columns = sorted(set(numbers.columns))
    weight = np.where(np.array(columns)[:, None] == numbers.columns, numbers.factor, 0)
    source = Numbers(len(columns), columns, np.ones(len(columns)))
    return Linear(x.width, source, weight, np.zeros(x.width) + by, False, numbers.value)


def subexpressions(x: Expression) -> Iterator[Expression]:
    """`x` and all that it is computed from, each once."""
    waiting, met = [x], {x}
    while waiting:
        yield (x := waiting.pop())
        for name in ("x", "y", "gates", "parts", "vectors", "changes", "terms"):
            found = getattr(x, name, ())
            for each in found if isinstance(found, list) else [found]:
                inner = each[0] if isinstance(each, tuple) and each else each
                if isinstance(inner, Expression) and inner not in met:
                    met.add(inner)
                    waiting.append(inner)


def stacked(x: Expression | None, form: str = "stack") -> list[Expression] | None:
    """Returns the vectors of a value.

    Args:
        x: Value.
        form: Required `Vectors.form`.

    Returns:
        The vectors; None for other values and other forms.
    """
    return x.vectors if isinstance(x, Vectors) and x.form == form else None


def square_of(x: Expression) -> Expression | None:
    """Operand of a square."""
    return x.x if isinstance(x, ElementwiseProduct) and x.x is x.y else None


def crossed_with(product: ElementwiseProduct, state: Expression, name: str) -> Expression | None:
    """Recognizes a layer of a cross network, x_{l+1} = x_0 u_l + x_l (Wang et al. 2021, "DCN V2").

    Args:
        product: x_0 u_l.
        state: x_l.
        name: Name of x_{l+1} in the graph.

    Returns:
        x_{l+1}; None if the product is not of this form.
    """
    x = state.x if isinstance(state, Crossed) else state
    changes = state.changes if isinstance(state, Crossed) else []
    for same, u in ((product.x, product.y), (product.y, product.x)):
        if isinstance(u, Linear) and not u.relu and parts_of(same) == parts_of(x):
            return Crossed(x.width, x, [*changes, u], name)
    return None


def times(x: Expression, y: Expression) -> Expression:
    """Multiplies two values element by element.

    Args:
        x: First factor.
        y: Second factor, of the same width.

    Returns:
        The product; for two stacks of vectors, the stack of products.
    """
    a, b = stacked(x), stacked(y)
    if a and b and len(a) == len(b):
        return Vectors(x.width, [times(v, w) for v, w in zip(a, b, strict=True)])
    return ElementwiseProduct(x.width, x, y)


def scaled(x: Expression, factor: Array) -> Expression | None:
    """Multiplies a value by a constant.

    Args:
        x: Value.
        factor: float64 [1] or [width].

    Returns:
        The product; None if no expression represents it.
    """
    if isinstance(x, Numbers) and factor.size in (1, x.width):
        return replace(x, factor=x.factor * factor)
    if isinstance(x, Linear) and not x.relu and factor.size in (1, x.width) and x.width > 1:
        return replace(x, weight=x.weight * factor, bias=x.bias * factor)
    if factor.size != 1:
        return None
    if isinstance(x, Factorization):
        return replace(x, factor=x.factor * float(factor[0]))
    total = total_of(x)
    if total is None:
        return None
    terms = [(term, each * float(factor[0])) for term, each in total.terms]
    return Total(1, terms, total.bias * float(factor[0]))


def total_of(x: Expression) -> Total | None:
    """A value of one column as a sum."""
    if isinstance(x, Total):
        return None if x.sigmoid else x
    known = isinstance(x, Linear | Field | Factorization | Product | Numbers) and not (isinstance(x, Linear) and x.relu)
    return Total(1, [(x, 1.0)], 0.0) if known and x.width == 1 else None


def sum_of_layers(x: Expression, value: str) -> Linear | None:
    """Merges a sum of one column into one linear layer.

    Args:
        x: Value of one column.
        value: Name of the layer in the graph.

    Returns:
        The layer; None if `x` has terms that are not linear layers.
    """
    total = total_of(x)
    layers = [(layer_of(term), factor) for term, factor in total.terms] if total is not None else []
    known = [(each, factor) for each, factor in layers if each is not None and not each.relu]
    if total is None or not known or len(known) < len(layers):
        return None
    weight = np.concatenate([each.weight * factor for each, factor in known])
    bias = np.array([total.bias + sum(float(each.bias[0]) * factor for each, factor in known)])
    return Linear(1, joined([each.x for each, _ in known]), weight, bias, False, value)


def added(x: Expression, y: Expression, sign: float) -> Expression | None:
    """Adds two values of one column.

    Args:
        x: First value.
        y: Second value.
        sign: Factor of `y`.

    Returns:
        x + sign y; None if a value is not a sum.
    """
    a, b = total_of(x), total_of(y)
    if a is None or b is None:
        return None
    return Total(1, [*a.terms, *((term, sign * each) for term, each in b.terms)], a.bias + sign * b.bias)
