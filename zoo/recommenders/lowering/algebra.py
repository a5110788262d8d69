"""Algebra on expressions: sums, products, concatenations and the layers that they equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zoo.recommenders.lowering.expressions import (
    Array,
    Concat,
    Crossed,
    ElementwiseProduct,
    Expression,
    Factorization,
    Field,
    FloatVector,
    GatedSum,
    Linear,
    Numbers,
    Product,
    Shifted,
    SigmoidGated,
    Total,
    Vectors,
    is_relu,
    parts_of,
)
from zoo.recommenders.lowering.fields.expressions import Rescaled


def joined(parts: Sequence[Expression]) -> Expression:
    """Concatenates values.

    Args:
        parts: Values.

    Returns:
        Their concatenation; the value itself if there is one.
    """
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Concat) else [part]
    return flat[0] if len(flat) == 1 else Concat(sum(part.width for part in flat), flat)


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
    return GatedSum(width, value, list(vectors), gates)


def unshifted(x: Expression) -> tuple[Expression, Any]:
    """Splits a value into itself without a constant summand, and that constant.

    Args:
        x: Value.

    Returns:
        (value, constant), the constant float64 [width] or 0.
    """
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


def without_constants(x: Expression, weight: Array, bias: Array) -> tuple[Expression, Array, Array]:
    """Merges constant summands and factors of the parts of an input into the layer that reads it.

    Args:
        x: Input of the layer.
        weight: float64 [x.width, outputs].
        bias: float64 [outputs].

    Returns:
        (input, weight, bias) of the same layer, without constants in the input.
    """
    parts, start = [], 0
    for part in parts_of(x):
        rows = slice(start, start + part.width)
        if isinstance(part, Shifted):
            bias = bias + part.by @ weight[rows]
            part = part.x
        elif isinstance(part, Rescaled):
            weight = weight.copy()
            weight[rows] *= part.by[:, None]
            part = part.x
        parts.append(part)
        start = rows.stop
    return joined(parts), weight, bias


def layer_of(x: Expression) -> Linear | None:
    """Converts a value to a linear layer; numbers and shifted numbers are layers, too.

    Args:
        x: Value.

    Returns:
        The layer; None for other values.
    """
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
    """Yields an expression and all expressions that it depends on, each once.

    Args:
        x: Expression.
    """
    waiting, met = [x], {x}
    while waiting:
        yield (x := waiting.pop())
        for name in ("x", "y", "gates", "parts", "vectors", "changes", "terms"):
            operands = getattr(x, name, ())
            for operand in operands if isinstance(operands, list) else [operands]:
                inner = operand[0] if isinstance(operand, tuple) and operand else operand
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
    """Returns the operand of a square.

    Args:
        x: Value.

    Returns:
        The operand; None for other values.
    """
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
        layer = isinstance(u, SigmoidGated) or (isinstance(u, Linear) and not u.relu)
        if layer and parts_of(same) == parts_of(x):
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
    terms = [(term, weight * float(factor[0])) for term, weight in total.terms]
    return Total(1, terms, total.bias * float(factor[0]))


def total_of(x: Expression) -> Total | None:
    """Converts a value of one column to a sum.

    Args:
        x: Value.

    Returns:
        The sum; None for other values.
    """
    if isinstance(x, Total):
        return None if x.sigmoid else x
    fits = isinstance(x, Linear | Field | Factorization | Product | Numbers) and not (isinstance(x, Linear) and x.relu)
    return Total(1, [(x, 1.0)], 0.0) if fits and x.width == 1 else None


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
    linears = [(layer, factor) for layer, factor in layers if layer is not None and not layer.relu]
    if total is None or not linears or len(linears) < len(layers):
        return None
    weight = np.concatenate([layer.weight * factor for layer, factor in linears])
    bias = np.array([total.bias + sum(float(layer.bias[0]) * factor for layer, factor in linears)])
    return Linear(1, joined([layer.x for layer, _ in linears]), weight, bias, False, value)


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
    return Total(1, [*a.terms, *((term, sign * factor) for term, factor in b.terms)], a.bias + sign * b.bias)
