"""Reads gates of vectors and of layers, and bilinear forms of two layers by heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from zoo.recommenders.lowering.algebra import joined, stacked, times
from zoo.recommenders.lowering.expressions import (
    Array,
    Concat,
    ElementwiseProduct,
    Expression,
    Linear,
    Numbers,
    Product,
    SigmoidGated,
    Vectors,
    is_value,
)
from zoo.recommenders.lowering.fields.expressions import (
    FieldLayer,
    FieldTensor,
    GatedCodes,
    HeadDots,
    Heads,
    Rescaled,
    Scores,
    Sigmoids,
)

if TYPE_CHECKING:
    from zoo.recommenders.lowering.graph_reader import GraphReader


def read_sigmoid(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads a sigmoid of a layer.

    Args:
        reader: Reader of the graph.
        node: Operator.
        value: Its result.

    Returns:
        The expression; None for other operators.
    """
    x = reader.read(node.inputs[0])
    return Sigmoids(x.width, x) if isinstance(x, Linear) and x.width > 1 and not x.relu else None


def read_mul(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads a product with gates, or with a constant.

    Args:
        reader: Reader of the graph.
        node: Operator.
        value: Its result.

    Returns:
        The expression; None for other operators.
    """
    for index in (0, 1):
        if (constant := query.constant(node.inputs[index])) is not None:
            return _scaled(reader, node, value, reader.read(node.inputs[1 - index]), constant.astype(np.float64))
    x, y = (reader.read(source) for source in node.inputs)
    for gates, other in ((x, y), (y, x)):
        if not isinstance(gates, Sigmoids) or other.width != gates.width:
            continue
        if gates.factor == 1 and (gated := _gated(other, gates.x, str(value.name))) is not None:
            return gated
        if is_value(other) and not isinstance(other, Linear):
            return GatedCodes(other.width, other, gates.x, gates.factor)
    return None


def _gated(x: Expression, gates: Linear, name: str) -> Expression | None:
    """Returns x sigmoid(gates) for a layer, or for x_0 times a layer."""
    if isinstance(x, Linear) and not x.relu:
        return SigmoidGated(x.width, name, x, gates)
    if isinstance(x, ElementwiseProduct):
        for layer, same in ((x.x, x.y), (x.y, x.x)):
            if isinstance(layer, Linear) and not layer.relu:
                return times(same, SigmoidGated(layer.width, layer.value, layer, gates))
    return None


def _scaled(reader: GraphReader, node: ir.Node, value: ir.Value, x: Expression, by: Array) -> Expression | None:
    """Returns x times a constant, where other operators have no form for it."""
    if isinstance(x, Sigmoids) and by.size == 1:
        return replace(x, factor=x.factor * float(by.item()))
    numbers = stacked(x)
    if numbers and query.rank(value) == 3 and all(isinstance(part, Numbers) and part.width == 1 for part in numbers):
        rows = by.reshape(-1, by.shape[-1]) if by.ndim > 1 else np.empty((0, 0))
        if len(rows) != len(numbers):
            return None
        spread: list[Expression] = [
            Numbers(len(row), part.columns * len(row), part.factor * row)  # type: ignore[attr-defined]
            for part, row in zip(numbers, rows, strict=True)
        ]
        return Vectors(rows.size, spread)
    if isinstance(x, FieldTensor):
        return _scaled_tensor(x, by)
    if isinstance(x, Concat) and by.size == x.width > 1 and query.rank(value) == 2:
        cuts = np.split(by.ravel(), np.cumsum([part.width for part in x.parts])[:-1])
        return joined([Rescaled(part.width, part, cut) for part, cut in zip(x.parts, cuts, strict=True)])
    return None


def _scaled_tensor(x: FieldTensor, by: Array) -> FieldTensor | None:
    if by.size != 1:
        return None
    factor = float(by.item())
    if isinstance(x.content, Scores) and not x.content.softmax:
        return replace(x, content=replace(x.content, factor=x.content.factor * factor))
    if isinstance(x.content, FieldLayer):
        layer = x.content
        scaled = replace(layer, weight=layer.weight * factor, bias=layer.bias * factor)
        return replace(x, content=replace(scaled, value=f"{layer.value}*{factor:g}"))
    return None


def read_div(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads a quotient by a constant.

    Args:
        reader: Reader of the graph.
        node: Operator.
        value: Its result.

    Returns:
        The expression; None for other operators.
    """
    constant = query.constant(node.inputs[1])
    x = reader.read(node.inputs[0]) if constant is not None and constant.size == 1 else None
    return None if x is None or constant is None else _scaled(reader, node, value, x, 1 / constant.astype(np.float64))


def heads_of(x: Expression, shape: list[int | None]) -> Heads | None:
    """Splits a layer into heads.

    Args:
        x: Value.
        shape: Shape of its view: [samples, heads, 1, columns] or [samples, heads, columns, 1].

    Returns:
        The heads; None for other values and shapes.
    """
    if not isinstance(x, Linear) or len(shape) != 4 or 1 not in shape[2:]:
        return None
    heads, columns = shape[1] or 0, (shape[2] or 0) * (shape[3] or 0)
    if heads * columns != x.width:
        return None
    return Heads(x.width, x, heads, turned=shape[2] != 1)


def bilinear(x: Heads, y: Expression, name: str) -> HeadDots | None:
    """Returns the dot products of the heads of two layers.

    Args:
        x: Heads of the first layer, rows.
        y: Heads of the second layer, columns.
        name: Name in the graph.

    Returns:
        The products; None for other values.
    """
    fits = isinstance(y, Heads) and x.heads == y.heads and x.width == y.width and not x.turned and y.turned
    return HeadDots(x.heads, x.x, y.x, name) if isinstance(y, Heads) and fits else None


def layer_of_heads(x: Heads, weight: Array, name: str) -> Heads | None:
    """Returns a linear layer of every head, with one matrix a head.

    Args:
        x: Heads.
        weight: float32 [heads, inputs, outputs].
        name: Name in the graph.

    Returns:
        The results; None for other shapes.
    """
    columns = x.width // x.heads
    if x.turned or weight.ndim != 3 or weight.shape[:2] != (x.heads, columns):
        return None
    outputs = weight.shape[2]
    blocks = np.zeros((x.heads, columns, x.heads, outputs))
    blocks[np.arange(x.heads), :, np.arange(x.heads)] = weight
    matrix = blocks.reshape(x.width, x.heads * outputs)
    layer = Linear(x.heads * outputs, x.x, matrix, np.zeros(x.heads * outputs), False, name)
    return Heads(layer.width, layer, x.heads, turned=False)


def read_reducesum(reader: GraphReader, node: ir.Node, value: ir.Value) -> Expression | None:
    """Reads the sum of the products of all heads.

    Args:
        reader: Reader of the graph.
        node: Operator.
        value: Its result.

    Returns:
        The sum; None for other operators.
    """
    x = reader.read(node.inputs[0])
    last = query.integers(node, "axes", 1) in ([1], [-1]) and query.rank(node.inputs[0]) == 2
    return Product(1, x.x, x.y) if isinstance(x, HeadDots) and last else None
