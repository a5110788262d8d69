"""Finds target attention (DIN, Zhou et al. 2018) in the graph of an imported ranker, by its structure.

The items of a history are weighted by a network on [q, k, q - k, q * k], its parts in any order, and summed. Its layers
may be Gemm, or MatMul and Add, with batch normalization; its activations Dice, PReLU or ReLU. The weights are the
results of the network, their sigmoid or their softmax; a mask may leave out places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from zoo.recommenders.lowering.sequences.matcher import NoMatch, both

Array = NDArray[Any]
Activation = tuple[Array, Array, Array, Array]  # scale, shift, rise, slope, see `steps.Dice`; empty but for a slope
VIEWS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Dropout", "Expand", "Tile")


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
    units = []
    for node in model.graph:
        for shares, keys in _sums(node):
            try:
                units.append(_unit(node.outputs[0], shares, keys))
                break
            except NoMatch:
                continue
    return units


def _plain(value: ir.Value | None) -> ir.Value:
    """The value before operators that only move or repeat entries."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in VIEWS and not _takes_all(node):
            break
        value = node.inputs[0]
    if value is None:
        raise NoMatch
    return value


def _takes_all(node: ir.Node) -> bool:
    """Whether an operator joins one value, or takes the first of an axis: the only one, behind one output."""
    if node.op_type == "Concat":
        return len(node.inputs) == 1
    at = query.constant(node.inputs[1]) if node.op_type == "Gather" else None
    return at is not None and at.size == 1 and not at.any() and query.constant(node.inputs[0]) is None


def _up(value: ir.Value | None, *ops: str) -> ir.Node:
    """The operator that computes a value, of one of these types."""
    node = _plain(value).producer()
    if node is None or node.op_type not in ops:
        raise NoMatch
    return node


def _sums(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """What may be weights and items of a weighted sum."""
    if node.op_type == "MatMul" and all(query.constant(source) is None for source in node.inputs):
        return [(node.inputs[0], node.inputs[1])]
    if node.op_type == "ReduceSum" and query.integers(node, "axes", 1) in ([1], (1,)):
        product = node.inputs[0].producer() if node.inputs[0] is not None else None
        if product is not None and product.op_type == "Mul":
            return both(list(product.inputs))
    return []


def _unit(pooled: ir.Value, shares: ir.Value | None, items: ir.Value | None) -> AttentionUnit:
    keys = _plain(items)
    x, kind, masked = _weights(shares)
    layers: list[tuple[Array, Array]] = []
    activations: list[Activation] = []
    while True:
        x, weight, bias = _layer(x)
        parts = _plain(x).producer()
        layers.insert(0, (weight, bias))
        if parts is not None and parts.op_type == "Concat":
            break
        x, activation = _activation(x, len(weight))
        activations.insert(0, activation)
    if not activations or layers[-1][0].shape[1] != 1:
        raise NoMatch
    target, first = _first(parts, keys, *layers[0])
    nodes = _inner_nodes(pooled, {keys, target})
    return AttentionUnit(pooled, keys, target, first, layers[1:], activations, kind, masked, nodes)


def _weights(value: ir.Value | None, depth: int = 0) -> tuple[ir.Value, str, bool]:
    """The result of the network, the kind of the weights, and whether they are masked."""
    try:
        _layer(value)
        return _plain(value), "raw", False
    except NoMatch:
        if depth > 6:
            raise
    node = _up(value, "Softmax", "Sigmoid", "Where", "Mul", "Add", "Sub")
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


def _layer(value: ir.Value | None) -> tuple[ir.Value, Array, Array]:
    """Input, weight [inputs, outputs] and bias of a linear layer, with the batch normalization behind it."""
    node = _up(value, "Gemm", "MatMul", "Add", "BatchNormalization")
    if node.op_type == "BatchNormalization":
        x, weight, bias = _layer(node.inputs[0])
        scale, shift = _normalization(node)
        return x, weight * scale, bias * scale + shift
    if node.op_type == "Add":
        for product, constant in both(list(node.inputs)):
            added = query.constant(constant)
            if added is not None and product is not None:
                x, weight, none = _layer(product)
                return x, weight, none + np.broadcast_to(added.ravel().astype(np.float64), none.shape)
        raise NoMatch
    matrix = query.constant(node.inputs[1])
    if matrix is None or matrix.ndim != 2:
        raise NoMatch
    weight = matrix.astype(np.float64)
    bias = np.zeros(1)
    if node.op_type == "Gemm":
        if node.attributes.get_int("transA", 0) or any(
            node.attributes.get_float(a, 1.0) != 1 for a in ("alpha", "beta")
        ):
            raise NoMatch
        weight = weight.T if node.attributes.get_int("transB", 0) else weight
        given = query.constant(node.inputs[2]) if len(node.inputs) > 2 else bias
        if given is None:
            raise NoMatch
        bias = given
    return _plain(node.inputs[0]), weight, np.broadcast_to(bias.ravel().astype(np.float64), weight.shape[1:])


def _normalization(node: ir.Node) -> tuple[Array, Array]:
    """Scale and shift of a batch normalization."""
    arrays = [query.constant(source) for source in node.inputs[1:5]]
    if len(arrays) < 4 or any(array is None for array in arrays):
        raise NoMatch
    scale, bias, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    scale = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return scale, bias - mean * scale


def _activation(value: ir.Value | None, units: int) -> tuple[ir.Value, Activation]:
    """Input of an activation, and its arrays."""
    none = np.zeros(0)
    node = _up(value, "Relu", "PRelu", "LeakyRelu", "Add")
    if node.op_type != "Add":
        slope: Array | None = np.zeros(1)
        if node.op_type == "PRelu":
            slope = query.constant(node.inputs[1])
        elif node.op_type == "LeakyRelu":
            slope = np.array([node.attributes.get_float("alpha", 0.01)])
        if slope is None:
            raise NoMatch
        return _plain(node.inputs[0]), (none, none, none, np.broadcast_to(slope.ravel(), (units,)))
    for gated, rest in both(list(node.inputs)):
        try:
            return _dice(_factors(gated), _factors(rest), units)
        except NoMatch:
            continue
    raise NoMatch


def _factors(value: ir.Value | None) -> list[ir.Value]:
    """The factors of a product."""
    node = _plain(value).producer()
    if node is None or node.op_type != "Mul":
        return [_plain(value)]
    return [factor for source in node.inputs for factor in _factors(source)]


def _dice(gated: Sequence[ir.Value], rest: Sequence[ir.Value], units: int) -> tuple[ir.Value, Activation]:
    """Dice, p x + alpha (1 - p) x with p = sigmoid(x scale + shift), from the factors of both summands."""
    shares = [factor for factor in gated if (made := factor.producer()) is not None and made.op_type == "Sigmoid"]
    if len(gated) != 2 or len(shares) != 1 or len(rest) not in (2, 3):
        raise NoMatch
    share = shares[0]
    (x,) = (factor for factor in gated if factor is not share)
    alpha, seen = np.ones(1), 0
    for factor in rest:
        constant, made = query.constant(factor), factor.producer()
        if constant is not None:
            alpha = constant
        elif factor is x:
            seen += 1
        elif made is not None and made.op_type == "Sub" and _plain(made.inputs[1]) is share:
            one = query.constant(made.inputs[0])
            if one is None or (one != 1).any():
                raise NoMatch
            seen += 2
        else:
            raise NoMatch
    made = share.producer()
    assert made is not None
    inner = _plain(made.inputs[0])
    scale, shift = np.ones(1), np.zeros(1)
    if inner is not x:
        normalized = _up(inner, "BatchNormalization")
        if _plain(normalized.inputs[0]) is not x:
            raise NoMatch
        scale, shift = _normalization(normalized)
    if seen != 3:
        raise NoMatch
    alpha = np.broadcast_to(alpha.ravel().astype(np.float64), (units,))
    return x, (np.broadcast_to(scale, (units,)), np.broadcast_to(shift, (units,)), 1 - alpha, alpha)


def _first(
    parts: ir.Node, keys: ir.Value, weight: Array, bias: Array
) -> tuple[ir.Value, tuple[Array, Array, Array, Array]]:
    """The targets, and the first layer on keys, targets and products."""
    operands = [_plain(part) for part in parts.inputs]
    targets = {
        operand for operand in operands if operand is not keys and not _is(operand, "Sub") and not _is(operand, "Mul")
    }
    if len(targets) != 1 or len(weight) % len(operands):
        raise NoMatch
    (target,) = targets
    size = len(weight) // len(operands)
    made = np.zeros((3, size, weight.shape[1]))  # of keys, targets and products
    for at, operand in enumerate(operands):
        own = weight[at * size : (at + 1) * size]
        if operand is keys or operand is target:
            made[0 if operand is keys else 1] += own
            continue
        node = operand.producer()
        assert node is not None
        pair = [_plain(source) for source in node.inputs]
        if set(pair) != {keys, target}:
            raise NoMatch
        if node.op_type == "Mul":
            made[2] += own
        else:
            made[0 if pair[0] is keys else 1] += own
            made[0 if pair[1] is keys else 1] -= own
    return target, (made[0], made[1], made[2], bias)


def _is(value: ir.Value, op: str) -> bool:
    node = value.producer()
    return node is not None and node.op_type == op


def _inner_nodes(pooled: ir.Value, ends: set[ir.Value]) -> set[ir.Node]:
    """The operators between these values and the result that nothing else reads."""
    ordered: list[ir.Node] = []
    waiting = [pooled.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in ordered:
            continue
        ordered.append(node)
        waiting += [source.producer() for source in node.inputs if source is not None and source not in ends]
    inner = {node for node in ordered if node is not pooled.producer()}
    changed = True
    while changed:
        read = {
            node
            for node in inner
            if any(
                use.node not in inner and use.node is not pooled.producer()
                for out in node.outputs
                for use in out.uses()
            )
            or any(out.is_graph_output() for out in node.outputs)
        }
        inner, changed = inner - read, bool(read)
    return inner
