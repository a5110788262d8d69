"""Reads small transformers over sequences in the float graph of a recommender: the layer of BST, the encoder of SASRec.

The forms are those that `zoo.recommenders.export.sequence_blocks` writes, after the rewrites.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from zoo.recommenders.lowering.sequences.expressions import EncodedSequence, TransformedTarget
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
Layer = tuple[Array, Array]


def transformed_target(matched: Matcher, value: ir.Value, columns: Columns) -> TransformedTarget:
    """Reads a transformer layer of the target and a sequence.

    Args:
        matched: Matcher.
        value: The result.
        columns: Reads integers as (column of the ids, offset).

    Returns:
        The expression.

    Raises:
        NoMatch: The operators are others.
    """
    result, last_norm, epsilon = matched.norm(matched.up(value, "Squeeze", 1)[0])
    x, network = matched.sum_of(result, "LayerNormalization")
    leaky, outer = _layer(matched, network)
    inner_result = matched.up(leaky, "LeakyRelu", 1)[0]
    assert leaky is not None
    slope = leaky.producer().attributes.get_float("alpha", 0.01)  # type: ignore[union-attr]
    normed, inner = _layer(matched, inner_result)
    attended, first_norm, other_epsilon = matched.norm(x)
    joined_result, own = _joined(matched, attended)
    together, joined = _layer(matched, joined_result)
    total = matched.together(together)
    weights, values = matched.up(total, "MatMul", 2)
    scores, barred = matched.up(matched.up(weights, "Softmax", 1)[0], "Add", 2)
    mask = matched.up(matched.up(matched.barred(barred), "Unsqueeze", 1)[0], "Pad", 3)
    pads, fill = query.constant(mask[1]), query.constant(mask[2])
    ids, padding = matched.mask(mask[0])
    products, keys = matched.up(scores, "MatMul", 2)
    queries, scale = matched.with_constant(products, "Mul")
    query_result, heads = matched.heads(queries)
    asked, query_layer = _layer(matched, query_result)
    placed, start, end = matched.cut(own, 1)
    key_part, value_part = matched.heads(keys, key=True), matched.heads(values)
    (projected, *key_bounds), (other, *value_bounds) = matched.cut(key_part[0], 2), matched.cut(value_part[0], 2)
    source, layer = _layer(matched, projected)
    joint, position = matched.with_constant(placed, "Add")
    target, items = matched.up(joint, "Concat", 2)
    items, gaps = without_gaps(matched, items)
    table, sequence = matched.lookup(items)
    same_table, single = matched.lookup(matched.up(target, "Unsqueeze", 1)[0])
    width = table.shape[1]
    alike = normed is x and asked is own and other is projected and source is placed and sequence is ids
    if not alike or not same(table, same_table) or (start, end) != (0, 1) or epsilon != other_epsilon:
        raise NoMatch
    if key_bounds != [0, width] or value_bounds != [width, 2 * width] or {key_part[1], value_part[1]} != {heads}:
        raise NoMatch
    if pads is None or fill is None or pads.tolist() != [0, 1, 0, 0] or fill.item() != 1 or scale.size != 1:
        raise NoMatch
    begin, count = sequence_columns(columns, sequence)
    return TransformedTarget(
        width,
        str(value.name),
        table,
        target_column(columns, single),
        begin,
        count,
        padding,
        heads,
        position,
        (query_layer, layer, joined, inner, outer),
        float(scale.item()),
        slope,
        np.concatenate([first_norm, last_norm]),
        epsilon,
        gaps_of(matched, columns, gaps, table.shape[1], count),
    )


def encoded_sequence(matched: Matcher, value: ir.Value, columns: Columns) -> EncodedSequence:
    """Reads an encoder of a sequence up to the state of the newest item.

    Args:
        matched: Matcher.
        value: The state.
        columns: Reads integers as (column of the ids, offset).

    Returns:
        The expression.

    Raises:
        NoMatch: The operators are others.
    """
    x, norm, epsilon = matched.norm(matched.up(value, "Squeeze", 1)[0])
    blocks: list[_Block] = []
    while True:
        block = _Block(matched, x, newest=not blocks)
        blocks.insert(0, block)
        x = block.x
        total = query.producer(x, "Add")
        if total is None or any(query.constant(y) is not None for y in total.inputs):
            break
    scaled, position = matched.with_constant(x, "Add")
    scaled, gaps = without_gaps(matched, scaled)
    items, factor = matched.with_constant(scaled, "Mul")
    table, sequence = matched.lookup(items)
    norms, heads, masks = [norm for block in blocks for norm in block.norms], blocks[0].heads, blocks[0].mask
    alike = all((block.heads, block.mask) == (heads, masks) for block in blocks)
    mask, first = matched.with_constant(matched.up(masks, "Unsqueeze", 1)[0], "Max")
    ids, padding = matched.mask(mask)
    begin, count = sequence_columns(columns, sequence)
    if not alike or ids is not sequence or factor.size != 1 or any(block.epsilon != epsilon for block in blocks):
        raise NoMatch
    if first.ravel().tolist() != [1.0] + [0.0] * (count - 1) or table.shape[1] % heads:
        raise NoMatch
    return EncodedSequence(
        table.shape[1],
        str(value.name),
        table,
        begin,
        count,
        padding,
        float(factor.item()),
        heads,
        position.reshape(count, -1),
        tuple(block.layers for block in blocks),
        np.stack([*norms, norm]),
        epsilon,
        gaps_of(matched, columns, gaps, table.shape[1], count),
    )


class _Block:
    """Block of self-attention, the newest item first; `newest`: computed for it alone.

    Raises NoMatch where the operators are others.

    Attributes:
        x: Its input.
        layers: The projection to query, keys and values, joined, inner and outer.
        norms: Scale and bias of both normalizations.
        epsilon: Added to their variances.
        heads: Number of heads.
        mask: 1 where there is an item, [n, 1, 1, items].
    """

    def __init__(self, matched: Matcher, value: ir.Value | None, newest: bool) -> None:
        for network, attended in both(matched.up(value, "Add", 2)):
            try:
                self._network(matched, network, attended)
                break
            except NoMatch:
                continue
        else:
            raise NoMatch
        joined_result, own = _joined(matched, attended)
        together, joined = _layer(matched, joined_result)
        weights, values = matched.up(matched.together(together), "MatMul", 2)
        scores, barred = matched.up(matched.up(weights, "Softmax", 1)[0], "Add", 2)
        if not newest:
            barred, future = matched.with_constant(barred, "Add")
            seen = np.triu(np.ones(future.shape[-2:], bool))
            if future.reshape(seen.shape)[seen].any() or (future.reshape(seen.shape)[~seen] > -1e3).any():
                raise NoMatch
        self.mask = matched.barred(barred)
        products, keys = matched.up(scores, "MatMul", 2)
        queries, scale = matched.with_constant(products, "Mul")
        (asked, self.heads), (key, key_heads) = matched.heads(queries), matched.heads(keys, key=True)
        kept, value_heads = matched.heads(values)
        if newest:
            asked, *bounds = matched.cut(asked, 1)
            own, *own_bounds = matched.cut(own, 1)
            if bounds != [0, 1] or own_bounds != [0, 1]:
                raise NoMatch
        cuts = [matched.cut(part, 2) for part in (asked, key, kept)]
        projected, layer = _layer(matched, cuts[0][0])
        width = len(layer[0])
        source, norm, epsilon = matched.norm(projected)
        expected = [(cuts[0][0], index * width, (index + 1) * width) for index in range(3)]
        if cuts != expected or source is not own or {key_heads, value_heads} != {self.heads}:
            raise NoMatch
        if epsilon != self.epsilon or scale.size != 1 or not np.isclose(scale.item(), (width / self.heads) ** -0.5):
            raise NoMatch
        self.x, self.norms = own, [norm, self._second]
        self.layers = (layer, joined, self._inner, self._outer)

    def _network(self, matched: Matcher, network: ir.Value | None, attended: ir.Value | None) -> None:
        """Reads the feed-forward network of a block."""
        hidden, self._outer = _layer(matched, network)
        normed, self._inner = _layer(matched, matched.up(hidden, "Relu", 1)[0])
        source, self._second, self.epsilon = matched.norm(normed)
        if source is not attended:
            raise NoMatch


def _joined(matched: Matcher, attended: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """The result of attention and the input, of their sum."""
    for joined, own in both(matched.up(attended, "Add", 2)):
        try:
            x, _ = _layer(matched, joined)
            matched.together(x)
            return joined, own
        except NoMatch:
            continue
    raise NoMatch


def _layer(matched: Matcher, value: ir.Value | None) -> tuple[ir.Value | None, Layer]:
    """Input and (weight, bias) of a layer, float64."""
    x, weight, bias = matched.layer(value)
    return x, (weight.astype(np.float64), np.array(bias, np.float64))
