"""Reads sequences in the float graph of a click model: target attention (DIN) and Dice.

The forms are those that `zoo.recommenders.export.sequence_parts` writes, after the rewrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from zoo.recommenders.lowering.expressions import Attended, Dice, Expression, Linear

Array = NDArray[Any]


class _NoMatch(Exception):
    """The operators are others."""


def sequence_value(
    node: ir.Node,
    value: ir.Value,
    read: Callable[[ir.Value | None], Expression],
    columns: Callable[[ir.Value | None], list[tuple[int, int]]],
    nodes: set[ir.Node],
) -> Expression | None:
    """Recognizes target attention in a Squeeze, and Dice in a Mul.

    Args:
        node: The operator.
        value: Its result.
        read: Reads a value as an expression.
        columns: Reads integers as (column of the ids, offset).
        nodes: Receives the operators that are read.

    Returns:
        The expression; None for other operators.
    """
    if node.op_type not in ("Squeeze", "Mul") or node.domain:
        return None
    matched = _Matcher()
    try:
        if node.op_type == "Mul":
            x, arrays = matched.dice(value)
            layer = read(x)
            if not isinstance(layer, Linear) or layer.relu or layer.width == 1:
                return None
            found: Expression = Dice(layer.width, layer, arrays, str(value.name))
        else:
            found = matched.attention(value, columns)
    except _NoMatch:
        return None
    nodes.update(matched.nodes)
    return found


class _Matcher:
    """Walks from results to inputs, and keeps the operators that it passes."""

    def __init__(self) -> None:
        self.nodes: set[ir.Node] = set()

    def up(self, value: ir.Value | None, op: str, inputs: int) -> list[ir.Value | None]:
        """Inputs of the operator of this type that computes a value."""
        node = value.producer() if value is not None else None
        if node is None or node.op_type != op or node.domain or len(node.inputs) < inputs:
            raise _NoMatch
        self.nodes.add(node)
        return list(node.inputs)

    def with_constant(self, value: ir.Value | None, op: str) -> tuple[ir.Value | None, Array]:
        """The other input, and the constant one, of an operator of two inputs."""
        first, second = self.up(value, op, 2)[:2]
        for x, other in ((first, second), (second, first)):
            if (constant := query.constant(other)) is not None:
                return x, constant
        raise _NoMatch

    def dice(self, value: ir.Value | None) -> tuple[ir.Value | None, tuple[Array, ...]]:
        """Input and (scale, shift, rise, slope) of x (slope + rise sigmoid(x scale + shift)), or of a PRelu."""
        node = value.producer() if value is not None else None
        if node is not None and node.op_type == "PRelu":
            x, slope = self.with_constant(value, "PRelu")
            none = np.zeros(0, np.float32)
            return x, (none, none, none, slope.ravel())
        for x, gate in _both(self.up(value, "Mul", 2)):
            if gate is None or gate.producer() is None or gate.producer().op_type != "Add":  # type: ignore[union-attr]
                continue
            risen, slope = self.with_constant(gate, "Add")
            share, rise = self.with_constant(risen, "Mul")
            scaled, shift = self.with_constant(self.up(share, "Sigmoid", 1)[0], "Add")
            source, scale = self.with_constant(scaled, "Mul")
            if source is x:
                return x, tuple(each.ravel() for each in (scale, shift, rise, slope))
        raise _NoMatch

    def layer(self, value: ir.Value | None) -> tuple[ir.Value | None, Array, Array]:
        """Input, weight [inputs, outputs] and bias of a linear layer on the last of three axes."""
        product, bias = self.with_constant(value, "Add")
        x, weight = self.with_constant(product, "MatMul")
        return x, weight, np.broadcast_to(bias.ravel(), weight.shape[1:])

    def attention(
        self, value: ir.Value | None, columns: Callable[[ir.Value | None], list[tuple[int, int]]]
    ) -> Attended:
        """The whole of target attention."""
        shares, keys = self.up(self.up(value, "Squeeze", 1)[0], "MatMul", 2)
        shares = self.up(shares, "Transpose", 1)[0]
        producer = shares.producer() if shares is not None else None
        softmax = producer is not None and producer.op_type == "Softmax"
        if softmax:
            scores, barred = self.up(self.up(shares, "Softmax", 1)[0], "Add", 2)
            absent, _ = self.with_constant(self.with_constant(barred, "Mul")[0], "Sub")
            mask = absent
        else:
            weights, mask = self.up(shares, "Mul", 2)
            scores = self.up(weights, "Sigmoid", 1)[0]
        empty = self.up(self.up(self.up(self.up(mask, "Unsqueeze", 1)[0], "Cast", 1)[0], "Not", 1)[0], "Equal", 2)
        padding = query.constant(empty[1])
        x, score, score_bias = self.layer(scores)
        x, two = self.dice(x)
        x, hidden, bias = self.layer(x)
        x, one = self.dice(x)
        compared, queried = self.up(x, "Add", 2)
        key, product = self.up(compared, "Add", 2)
        own, key_weight = self.with_constant(key, "MatMul")
        products, product_weight = self.with_constant(product, "MatMul")
        items, target = self.up(products, "Mul", 2)
        vector = self.up(target, "Unsqueeze", 1)[0]
        gemm = self.up(self.up(queried, "Unsqueeze", 1)[0], "Gemm", 3)
        query_weight, query_bias = query.constant(gemm[1]), query.constant(gemm[2])
        table, sequence = self.up(keys, "Gather", 2)
        other, single = self.up(vector, "Gather", 2)
        rows, same = query.constant(table), query.constant(other)
        if own is not keys or items is not keys or gemm[0] is not vector or sequence is not empty[0]:
            raise _NoMatch
        if rows is None or padding is None or query_weight is None or query_bias is None or not _same(rows, same):
            raise _NoMatch
        places, (chosen, *more) = columns(sequence), columns(single)
        start = places[0][0]
        if more or chosen[1] or any(place != (start + at, 0) for at, place in enumerate(places)):
            raise _NoMatch
        arrays = (key_weight, query_weight.T, query_bias, product_weight, hidden, bias, score[:, 0])
        return Attended(
            rows.shape[1],
            rows,
            chosen[0],
            start,
            len(places),
            int(padding.item()),
            tuple(each.astype(np.float64) for each in arrays),
            float(score_bias[0]),
            (one, two),
            softmax,
            str(value.name) if value is not None else "",
        )


def _both(pair: list[ir.Value | None]) -> list[tuple[ir.Value | None, ir.Value | None]]:
    return [(pair[0], pair[1]), (pair[1], pair[0])]


def _same(a: Array, b: Array | None) -> bool:
    return b is not None and (a is b or (a.shape == b.shape and np.array_equal(a, b)))
