"""Reads target attention (DIN) and Dice in the float graph of a recommender.

The forms are those that `zoo.recommenders.export.sequence_parts` writes, after the rewrites.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.recommenders.steps import Activation
from zoo.recommenders.lowering.sequences.expressions import TargetAttention
from zoo.recommenders.lowering.sequences.matcher import (
    Columns,
    Matcher,
    NoMatch,
    both,
    same,
    sequence_columns,
    target_column,
)
from zoo.recommenders.lowering.sequences.time_gaps import gaps_of, without_gaps

Array = NDArray[Any]
NONE = np.zeros(0, np.float32)
LINE = Activation(NONE, NONE, NONE, np.ones(1, np.float32))  # the activation x


def dice(matched: Matcher, value: ir.Value | None) -> tuple[ir.Value | None, Activation]:
    """Reads Dice, x (slope + rise sigmoid(z)), z of a Mul and an Add or a LayerNormalization of x, or a PRelu.

    Args:
        matched: Matcher.
        value: The result.

    Returns:
        Its input, and the activation.

    Raises:
        NoMatch: The operators are others.
    """
    if query.producer(value, "PRelu") is not None:
        x, slope = matched.with_constant(value, "PRelu")
        return x, Activation(NONE, NONE, NONE, slope.ravel())
    for x, gate in both(matched.up(value, "Mul", 2)):
        if query.producer(gate, "Add") is None:
            continue
        risen, slope = matched.with_constant(gate, "Add")
        share, rise = matched.with_constant(risen, "Mul")
        standard, epsilon = matched.up(share, "Sigmoid", 1)[0], 0.0
        if query.producer(standard, "LayerNormalization") is not None:
            source, (scale, shift), epsilon = matched.norm(standard)
        else:
            scaled, shift = matched.with_constant(standard, "Add")
            source, scale = matched.with_constant(scaled, "Mul")
        if source is x:
            return x, Activation(scale.ravel(), shift.ravel(), rise.ravel(), slope.ravel(), epsilon)
    raise NoMatch


def _scores(matched: Matcher, shares: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None, bool, bool]:
    """Reads the weights of the items as scores and mask.

    Returns:
        The scores, the mask, whether a Softmax makes weights of the scores, and whether the scores are the weights
        (neither a Softmax nor a Sigmoid).
    """
    if query.producer(shares, "Softmax") is not None:
        scores, barred = matched.up(matched.up(shares, "Softmax", 1)[0], "Add", 2)
        return scores, matched.barred(barred), True, False
    scores, mask = matched.up(shares, "Mul", 2)
    node = query.producer(scores)
    raw = node is not None and node.op_type != "Sigmoid"
    return scores if raw else matched.up(scores, "Sigmoid", 1)[0], mask, False, raw


def _unit(
    matched: Matcher, scores: ir.Value | None
) -> tuple[ir.Value | None, tuple[Array, Array, Array, Array], tuple[Activation, Activation]]:
    """Reads the layers of the activation unit behind its first one, whose result comes first.

    One hidden layer is read as two, the second one linear.

    Returns:
        The first layer's result; the second layer's weight and bias, the weight and bias of the score; the activations.
    """
    x, score, score_bias = matched.layer(scores)
    x, one = dice(matched, x)
    try:
        before, hidden, bias = matched.layer(x)
        before, first = dice(matched, before)
    except NoMatch:
        hidden, bias = score, np.zeros(1, np.float32)
        return x, (hidden, bias, np.ones((1, 1), np.float32), score_bias), (one, LINE)
    return before, (hidden, bias, score, score_bias), (first, one)


def target_attention(matched: Matcher, value: ir.Value, columns: Columns) -> TargetAttention:
    """Reads target attention.

    Args:
        matched: Matcher.
        value: The result.
        columns: Reads integers as (column of the ids, offset).

    Returns:
        The expression.

    Raises:
        NoMatch: The operators are others.
    """
    shares, keys = matched.up(matched.up(value, "Squeeze", 1)[0], "MatMul", 2)
    scores, mask, softmax, raw = _scores(matched, matched.up(shares, "Transpose", 1)[0])
    ids, padding = matched.mask(matched.up(mask, "Unsqueeze", 1)[0])
    keys, gaps = without_gaps(matched, keys)
    gap_weight = None
    if gaps is not None:
        distance, scores = matched.sum_of(scores, "MatMul")
        distant, gap_weight = matched.with_constant(distance, "MatMul")
        if distant is not gaps:
            raise NoMatch
    x, (hidden, bias, score, score_bias), activations = _unit(matched, scores)
    compared, queried = matched.up(x, "Add", 2)
    key, product = matched.up(compared, "Add", 2)
    own, key_weight = matched.with_constant(key, "MatMul")
    products, product_weight = matched.with_constant(product, "MatMul")
    items, target = matched.up(products, "Mul", 2)
    vector = matched.up(target, "Unsqueeze", 1)[0]
    gemm = matched.up(matched.up(queried, "Unsqueeze", 1)[0], "Gemm", 3)
    query_weight, query_bias = query.constant(gemm[1]), query.constant(gemm[2])
    table, sequence = matched.lookup(keys)
    other, single = matched.lookup(vector)
    if own is not keys or items is not keys or gemm[0] is not vector or sequence is not ids:
        raise NoMatch
    if query_weight is None or query_bias is None or not same(table, other):
        raise NoMatch
    start, count = sequence_columns(columns, sequence)
    arrays = (key_weight, query_weight.T, query_bias, product_weight, hidden, bias, score[:, 0])
    return TargetAttention(
        table.shape[1],
        str(value.name),
        table,
        target_column(columns, single),
        start,
        count,
        padding,
        tuple(array.astype(np.float64) for array in arrays),
        float(score_bias[0]),
        activations,
        softmax,
        raw,
        gaps_of(matched, columns, gaps, table.shape[1], count, gap_weight),
    )
