"""Reads sequences in the float graph of a recommender."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from zoo.recommenders.lowering.expressions import Dice, Expression, Linear
from zoo.recommenders.lowering.sequences.attention import dice, target_attention
from zoo.recommenders.lowering.sequences.matcher import Columns, Matcher, NoMatch
from zoo.recommenders.lowering.sequences.transformers import encoded_sequence, transformed_target

SEQUENCES = (target_attention, transformed_target, encoded_sequence)


def sequence_value(
    node: ir.Node,
    value: ir.Value,
    read: Callable[[ir.Value | None], Expression],
    columns: Columns,
    nodes: set[ir.Node],
) -> Expression | None:
    """Recognizes the result of a sequence in a Squeeze, and Dice in a Mul.

    Args:
        node: The operator.
        value: Its result.
        read: Reads a value as an expression.
        columns: Reads integers as (column of the ids, offset).
        nodes: Receives the operators that are read.

    Returns:
        The expression; None for other operators.
    """
    if node.domain:
        return None
    if node.op_type == "Mul":
        return _dice(value, read, nodes)
    for pattern in SEQUENCES if node.op_type == "Squeeze" else ():
        matched = Matcher()
        try:
            expression = pattern(matched, value, columns)
        except NoMatch:
            continue
        nodes.update(matched.nodes)
        return expression
    return None


def _dice(value: ir.Value, read: Callable[[ir.Value | None], Expression], nodes: set[ir.Node]) -> Expression | None:
    matched = Matcher()
    try:
        x, activation = dice(matched, value)
    except NoMatch:
        return None
    layer = read(x)
    if not isinstance(layer, Linear) or layer.relu or layer.width == 1:
        return None
    nodes.update(matched.nodes)
    return Dice(layer.width, str(value.name), layer, activation)
