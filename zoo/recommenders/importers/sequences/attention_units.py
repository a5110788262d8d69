"""Finds target attention (DIN, Zhou et al. 2018) in the graph of an imported ranker, by its structure.

The items of a history are weighted by a network on [q, k, q - k, q * k], its parts in any order, and summed. Its layers
may be Gemm, or MatMul and Add, with batch normalization; its activations Dice, PReLU or ReLU. Dice may normalize with
the statistics of training, or over the units of a row (torch-rechub). The weights are the results of the network, their
sigmoid or their softmax; a mask may leave out places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.recommenders.steps import Activation
from zoo.recommenders.importers.sequences.operators import (
    inner_nodes,
    layer,
    matches,
    normalization,
    plain,
    producer,
    row_normalization,
)
from zoo.recommenders.lowering.sequences.matcher import NoMatch, both

Array = NDArray[Any]
NONE = np.zeros(0)


@dataclass(frozen=True, eq=False)
class AttentionUnit:
    """Target attention in an imported graph.

    Attributes:
        pooled: The weighted sum, [n, size] or [n, 1, size].
        keys: Vectors of the items, [n, items, size].
        target: Vectors of the targets, [n, size] or [n, 1, size].
        first: Weights of keys, targets and products [size, units] each, and the bias [units]; float64.
        layers: Weight [inputs, outputs] and bias of the layers behind the first, the last of one output.
        activations: Those of the layers but the last.
        weights: "raw", "sigmoid" or "softmax".
        masked: Whether places without an item are left out.
        nodes: The operators that nothing else reads.
    """

    pooled: ir.Value
    keys: ir.Value
    target: ir.Value
    first: tuple[Array, Array, Array, Array]
    layers: list[tuple[Array, Array]]
    activations: list[Activation]
    weights: str
    masked: bool
    nodes: set[ir.Node]


def attention_units(model: ir.Model) -> list[AttentionUnit]:
    """Finds all target attention of a graph.

    Args:
        model: Graph; it is not changed.

    Returns:
        The units, in the order of their results.
    """
    return matches(model, _pooled)


def dice_activations(model: ir.Model) -> dict[ir.Value, tuple[ir.Value, Activation]]:
    """Finds the Dice of layers.

    Args:
        model: Graph; it is not changed.

    Returns:
        Result of each Dice: its input, and the activation.
    """
    return dict(matches(model, _dice_at))


def _dice_at(node: ir.Node) -> tuple[ir.Value, tuple[ir.Value, Activation]]:
    """Returns the result of Dice, its input and the activation; `node` is its last operator."""
    for x in _factors(node.inputs[0]) if node.op_type == "Add" else ():
        with contextlib.suppress(NoMatch):
            return node.outputs[0], _activation(node.outputs[0], layer(x)[1].shape[1])
    raise NoMatch


def _pooled(node: ir.Node) -> AttentionUnit:
    """Returns the target attention that ends at `node`."""
    for shares, keys in _sums(node):
        with contextlib.suppress(NoMatch):
            return _unit(node.outputs[0], shares, keys)
    raise NoMatch


def _sums(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """Candidates for the weights and items of a weighted sum."""
    if node.op_type == "MatMul" and all(query.constant(source) is None for source in node.inputs):
        return [(node.inputs[0], node.inputs[1])]
    product = query.producer(node.inputs[0], "Mul") if node.op_type == "ReduceSum" else None
    return both(list(product.inputs)) if product is not None and query.integers(node, "axes", 1) == [1] else []


def _unit(pooled: ir.Value, shares: ir.Value | None, items: ir.Value | None) -> AttentionUnit:
    keys = plain(items)
    x, kind, masked = _weights(shares)
    layers: list[tuple[Array, Array]] = []
    activations: list[Activation] = []
    while True:
        x, weight, bias = layer(x)
        layers.insert(0, (weight, bias))
        if (parts := query.producer(plain(x), "Concat")) is not None:
            break
        x, activation = _activation(x, len(weight))
        activations.insert(0, activation)
    if not activations or layers[-1][0].shape[1] != 1:
        raise NoMatch
    target, first = _first(parts, keys, *layers[0])
    nodes = inner_nodes(pooled, {keys, target})
    return AttentionUnit(pooled, keys, target, first, layers[1:], activations, kind, masked, nodes)


def _weights(value: ir.Value | None, depth: int = 0) -> tuple[ir.Value, str, bool]:
    """The result of the network, the kind of the weights, and whether they are masked."""
    try:
        layer(value)
        return plain(value), "raw", False
    except NoMatch:
        if depth > 6:
            raise
    node = producer(value, "Softmax", "Sigmoid", "Where", "Mul", "Add", "Sub")
    if node.op_type in ("Softmax", "Sigmoid"):
        x, kind, masked = _weights(node.inputs[0], depth + 1)
        if kind != "raw":
            raise NoMatch
        return x, node.op_type.lower(), masked
    operands = list(node.inputs[1:2]) if node.op_type == "Where" else list(node.inputs[:2])
    for operand in operands:
        try:
            x, kind, _ = _weights(operand, depth + 1)
            return x, kind, True
        except NoMatch:
            continue
    raise NoMatch


def _activation(value: ir.Value | None, units: int) -> tuple[ir.Value, Activation]:
    """Input of an activation, and its arrays."""
    node = producer(value, "Relu", "PRelu", "LeakyRelu", "Add")
    if node.op_type != "Add":
        slope: Array | None = np.zeros(1)
        if node.op_type == "PRelu":
            slope = query.constant(node.inputs[1])
        elif node.op_type == "LeakyRelu":
            slope = np.array([node.attributes.get_float("alpha", 0.01)])
        if slope is None:
            raise NoMatch
        return plain(node.inputs[0]), Activation(NONE, NONE, NONE, np.broadcast_to(slope.ravel(), (units,)))
    for gated, other in both(list(node.inputs)):
        try:
            return _dice(_factors(gated), _factors(other), units)
        except NoMatch:
            continue
    raise NoMatch


def _factors(value: ir.Value | None) -> list[ir.Value]:
    """The factors of a product."""
    node = query.producer(plain(value), "Mul")
    if node is None:
        return [plain(value)]
    return [factor for source in node.inputs for factor in _factors(source)]


def _dice(gated: Sequence[ir.Value], other: Sequence[ir.Value], units: int) -> tuple[ir.Value, Activation]:
    """Dice, p x + alpha (1 - p) x with p the sigmoid of normalized x, from the factors of both summands."""
    shares = [factor for factor in gated if query.producer(factor, "Sigmoid") is not None]
    if len(gated) != 2 or len(shares) != 1 or len(other) not in (2, 3):
        raise NoMatch
    share = shares[0]
    (x,) = (factor for factor in gated if factor is not share)
    alpha, seen = np.ones(1), 0
    for factor in other:
        constant, made = query.constant(factor), query.producer(factor, "Sub")
        if constant is not None:
            alpha = constant
        elif factor is x:
            seen += 1
        elif made is not None and plain(made.inputs[1]) is share:
            one = query.constant(made.inputs[0])
            if one is None or (one != 1).any():
                raise NoMatch
            seen += 2
        else:
            raise NoMatch
    made = share.producer()
    assert made is not None
    inner = plain(made.inputs[0])
    scale, shift, epsilon = np.ones(1), np.zeros(1), 0.0
    if inner is not x:
        normalized = producer(inner, "BatchNormalization", "Div")
        if normalized.op_type == "Div":
            ratio, epsilon = row_normalization(normalized, x, units)
            scale = np.array([ratio])
        elif plain(normalized.inputs[0]) is x:
            scale, shift = normalization(normalized)
        else:
            raise NoMatch
    if seen != 3:
        raise NoMatch
    alpha = np.broadcast_to(alpha.ravel().astype(np.float64), (units,))
    scale, shift = np.broadcast_to(scale, (units,)), np.broadcast_to(shift, (units,))
    return x, Activation(scale, shift, 1 - alpha, alpha, epsilon)


def _first(
    parts: ir.Node, keys: ir.Value, weight: Array, bias: Array
) -> tuple[ir.Value, tuple[Array, Array, Array, Array]]:
    """The targets, and the first layer on keys, targets and products."""
    operands = [plain(part) for part in parts.inputs]
    targets = {operand for operand in operands if operand is not keys and query.producer(operand, "Sub", "Mul") is None}
    if len(targets) != 1 or len(weight) % len(operands):
        raise NoMatch
    (target,) = targets
    size = len(weight) // len(operands)
    made = np.zeros((3, size, weight.shape[1]))  # of keys, targets and products
    for index, operand in enumerate(operands):
        own = weight[index * size : (index + 1) * size]
        if operand is keys or operand is target:
            made[0 if operand is keys else 1] += own
            continue
        node = operand.producer()
        assert node is not None
        pair = [plain(source) for source in node.inputs]
        if set(pair) != {keys, target}:
            raise NoMatch
        if node.op_type == "Mul":
            made[2] += own
        else:
            made[0 if pair[0] is keys else 1] += own
            made[0 if pair[1] is keys else 1] -= own
    return target, (made[0], made[1], made[2], bias)
