"""Finds the transformer layer of a target and its history (BST, Chen et al. 2019) in the graph of an imported ranker.

The items and the target, each plus the vector of its place, pass one layer of self-attention with the normalization
behind every sum; the place of the target is read. A mask may leave out places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from zoo.recommenders.importers.sequences.operators import (
    Array,
    inner_nodes,
    layer,
    matches,
    plain,
    producer,
    row_normalization,
)
from zoo.recommenders.lowering.sequences.matcher import NoMatch, both

Layer = tuple[Array, Array]  # weight [inputs, outputs] and bias, float64


@dataclass(frozen=True, eq=False)
class TransformerUnit:
    """A transformer layer in an imported graph.

    Attributes:
        result: State of the target, [n, size].
        keys: Vectors of the items, [n, items, size].
        target: Vectors of the targets, [n, size] or [n, 1, size].
        position: Vectors of the places, the target's first, float32 [1 + items, size].
        query: Layer of the query.
        projected: Layer of keys and values, side by side.
        joined: Layer behind attention.
        inner: First layer of the feed-forward network.
        outer: Second layer of the feed-forward network.
        slope: Factor of inner results below 0.
        scale: Factor of the scores.
        norms: Scale and bias of both normalizations, float32 [4, size].
        epsilon: Added to the variances.
        shares: The weights, of [n, heads, places, places] elements.
        masked: Whether places without an item are left out.
        nodes: The operators that nothing else reads.
    """

    result: ir.Value
    keys: ir.Value
    target: ir.Value
    position: Array
    query: Layer
    projected: Layer
    joined: Layer
    inner: Layer
    outer: Layer
    slope: float
    scale: float
    norms: Array
    epsilon: float
    shares: ir.Value
    masked: bool
    nodes: set[ir.Node]


def transformer_units(model: ir.Model) -> list[TransformerUnit]:
    """Finds all transformer layers of a target in a graph.

    Args:
        model: Graph; it is not changed.

    Returns:
        The units, in the order of their results.
    """
    return matches(model, _unit)


def _unit(taken: ir.Node) -> TransformerUnit:
    if taken.op_type != "Gather" or taken.attributes.get_int("axis", 0) != 1:
        raise NoMatch
    place = query.constant(taken.inputs[1])
    if place is None or place.size != 1:
        raise NoMatch
    summed, last_norm, epsilon = _norm(taken.inputs[0])
    x, network = _sum(summed, _norm)
    activated, *outer = layer(network)
    activation = producer(activated, "Relu", "LeakyRelu")
    slope = activation.attributes.get_float("alpha", 0.01) if activation.op_type == "LeakyRelu" else 0.0
    normed, *inner = layer(activation.inputs[0])
    attended, first_norm, other_epsilon = _norm(x)
    placed, joined_result = _sum(attended, _placed)
    total, *joined = layer(joined_result)
    shares, values = producer(total, "MatMul").inputs
    scores, factor, masked = _scores(producer(shares, "Softmax").inputs[0])
    asked, keys = scores.inputs
    (asked, query_scale), (keys, key_scale) = _scaled(asked), _scaled(keys)
    parts = [_projected(part, placed, role) for role, part in enumerate((asked, keys, values))]
    joint, position = _with_constant(producer(placed, "Add"))
    items, target, own = _joint(producer(joint, "Concat"), int(place.item()), position)
    if normed is not x or epsilon != other_epsilon:
        raise NoMatch
    key, value = parts[1:]
    return TransformerUnit(
        taken.outputs[0],
        items,
        target,
        own,
        parts[0],
        (np.concatenate([key[0], value[0]], axis=1), np.concatenate([key[1], value[1]])),
        (joined[0], joined[1]),
        (inner[0], inner[1]),
        (outer[0], outer[1]),
        slope,
        factor * query_scale * key_scale,
        np.concatenate([first_norm, last_norm]),
        epsilon,
        plain(shares),
        masked,
        inner_nodes(taken.outputs[0], {items, target}),
    )


def _norm(value: ir.Value | None) -> tuple[ir.Value, Array, float]:
    """Input, scale and bias [2, size] and epsilon of a layer normalization."""
    node = producer(value, "LayerNormalization", "Add")
    if node.op_type == "Add":
        return _norm_of_operators(node)
    arrays = [query.constant(source) for source in node.inputs[1:3]]
    if len(arrays) < 2 or any(array is None or array.ndim != 1 for array in arrays):
        raise NoMatch
    return plain(node.inputs[0]), np.stack(arrays), node.attributes.get_float("epsilon", 1e-5)  # type: ignore[arg-type]


def _norm_of_operators(node: ir.Node) -> tuple[ir.Value, Array, float]:
    """The same of (x - mean) / root * scale + bias, as in exports before opset 17."""
    scaled, bias = _with_constant(node)
    standard, scale = _with_constant(producer(scaled, "Mul"))
    division = producer(standard, "Div")
    x = plain(producer(division.inputs[0], "Sub").inputs[0])
    factor, epsilon = row_normalization(division, x, scale.size)
    if factor != 1 or bias.ndim != 1 or scale.shape != bias.shape:
        raise NoMatch
    return x, np.stack([scale, bias]), epsilon


def _sum(value: ir.Value, require: Callable[[ir.Value], object]) -> tuple[ir.Value, ir.Value]:
    """The summand for which `require` raises no NoMatch, and the other one."""
    for one, other in both([plain(source) for source in producer(value, "Add").inputs]):
        assert one is not None and other is not None
        with contextlib.suppress(NoMatch):
            require(one)
            return one, other
    raise NoMatch


def _placed(value: ir.Value) -> None:
    """Raises NoMatch unless an Add adds the vectors of places."""
    _, constant = _with_constant(producer(value, "Add"))
    if constant.ndim not in (2, 3):
        raise NoMatch


def _with_constant(node: ir.Node) -> tuple[ir.Value, Array]:
    """The other input, and the constant one."""
    for x, constant in both(list(node.inputs)):
        if (array := query.constant(constant)) is not None:
            return plain(x), array
    raise NoMatch


def _scores(value: ir.Value | None, depth: int = 0) -> tuple[ir.Node, float, bool]:
    """The product of queries and keys before a softmax, its factor, and whether a mask changes it."""
    x, factor = _scaled(value)
    node = producer(x, "MatMul", "Add", "Where")
    if node.op_type == "MatMul":
        return node, factor, False
    for source in node.inputs if depth < 2 else ():
        with contextlib.suppress(NoMatch):
            product, inner, _ = _scores(source, depth + 1)
            return product, factor * inner, True
    raise NoMatch


def _scaled(value: ir.Value | None) -> tuple[ir.Value, float]:
    """Input and factor of a product with a number."""
    node = query.producer(plain(value), "Mul", "Div")
    if node is None:
        return plain(value), 1.0
    x, constant = _with_constant(node)
    if constant.size != 1 or (node.op_type == "Div" and plain(node.inputs[0]) is not x):
        raise NoMatch
    factor = float(constant.item())
    return x, 1 / factor if node.op_type == "Div" else factor


def _projected(value: ir.Value | None, x: ir.Value, role: int) -> Layer:
    """Layer of query (0), keys (1) or values (2), which may be a part of one layer of all three."""
    node, part = plain(value).producer(), 0
    if node is not None and node.op_type == "Gather":
        index = query.constant(node.inputs[1])
        if index is None or index.size != 1:
            raise NoMatch
        value, part = node.inputs[0], int(index.item())
    elif node is not None and node.op_type == "Split":
        value, part = node.inputs[0], list(node.outputs).index(plain(value))
    source, weight, bias = layer(value)
    size = len(weight)
    if source is not x or weight.shape[1] not in (size, 3 * size) or part != (role if weight.shape[1] > size else 0):
        raise NoMatch
    return weight[:, part * size : (part + 1) * size], bias[part * size : (part + 1) * size]


def _joint(concat: ir.Node, place: int, position: Array) -> tuple[ir.Value, ir.Value, Array]:
    """Items, target, and the vectors of the places, the target's first."""
    if len(concat.inputs) != 2:
        raise NoMatch
    places = position.reshape(-1, position.shape[-1]).astype(np.float32)
    first, second = (plain(source) for source in concat.inputs)
    if place in (-1, len(places) - 1):
        return first, second, np.concatenate([places[-1:], places[:-1]])
    if place == 0:
        return second, first, places
    raise NoMatch
