"""Attention in floats and in integers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.operations import QuantizedAttention
from pipelines.kernels.transformer.reference.rows import (
    LOG2_E,
    SMALLEST_ABS_MAX,
    Floats,
    exponential,
    rms_norm,
    sum_lanes,
)


def self_attention(
    query: Floats, keys: Floats, values: Floats, heads: int, position_bias: Floats | None = None
) -> Floats:
    """Computes self-attention of one decoder token of every row; q . k has the order of `sum_lanes`.

    Args:
        query: float32 [..., W].
        keys: float32 [..., t, W].
        values: float32 [..., t, W].
        heads: Number of heads.
        position_bias: See `SelfAttention`.

    Returns:
        float32 [..., W].
    """
    count = keys.shape[-2]
    split = keys.reshape(*keys.shape[:-1], heads, -1)
    scores = sum_lanes(query.reshape(*query.shape[:-1], 1, heads, -1) * split).swapaxes(-1, -2)
    if position_bias is not None:
        columns = np.arange(count) + position_bias.shape[1] - count
        scores = scores + position_bias[:, np.maximum(columns, 0)]
    return _softmax_weighted(scores, values)


def attention(queries: Floats, keys: Floats, values: Floats, heads: int, causal: bool = False) -> Floats:
    """Computes attention of several queries over the same keys; q . k is summed column by column.

    Args:
        queries: float32 [n, W].
        keys: float32 [t, W].
        values: float32 [t, W].
        heads: Number of heads.
        causal: Whether query i attends to the keys from i on, as in a sequence with the newest item first.

    Returns:
        float32 [n, W].
    """
    split = keys.reshape(len(keys), heads, -1).transpose(2, 1, 0)  # [size, heads, t]
    scores = np.zeros((len(queries), heads, len(keys)), np.float32)
    for factor, column in zip(queries.reshape(len(queries), heads, len(split)).transpose(2, 0, 1), split, strict=True):
        scores = scores + factor[:, :, None] * column
    if causal:
        scores = np.where(np.arange(len(keys)) < np.arange(len(queries))[:, None, None], np.float32(-np.inf), scores)
    return _softmax_weighted(scores, values)


def quantized_attention(
    x: Floats,
    operation: QuantizedAttention,
    attended: int | None = None,
    keys: Floats | None = None,
    centered: bool = False,
) -> Floats:
    """Computes `QuantizedAttention` of one sentence.

    Args:
        x: [query | key | value], float32 `[n, (heads + 2 key_heads) size]`.
        operation: The operation; its bias may have a value per pair, [heads, n, n].
        attended: How many of the first tokens are keys; None: all.
        keys: [key | value] of other tokens, float32 `[t, 2 key_heads size]`; x then has queries alone.
        centered: Whether the codes of keys are of their distances to the middle of each column's range. A constant of
            all keys adds the same to all scores of a query, which changes no softmax.

    Returns:
        float32 [n, heads size]; 0 for a query without a key within reach.
    """
    n, heads = len(x), operation.heads
    key_heads = operation.key_heads or heads
    queries, keys_values = np.split(x.reshape(n, heads + (2 * key_heads if keys is None else 0), -1), [heads], axis=1)
    keys_values = keys_values if keys is None else keys.reshape(len(keys), 2 * key_heads, -1)
    keys, values = np.split(keys_values, 2, axis=1)
    count = len(values) if attended is None else attended
    values = values[:count]
    queries = positioned(queries, operation, None if operation.norm is None else operation.norm.query)
    keys = positioned(keys, operation, None if operation.norm is None else operation.norm.key)[:count]
    middle = keys.min(axis=0) * np.float32(0.5) + keys.max(axis=0) * np.float32(0.5) if centered else np.float32(0)
    key_scale, key_inverse = _code_scales(keys - middle, 0)
    value_scale, value_inverse = _code_scales(values, 0)
    groups = heads // key_heads
    key_codes, value_codes, key_scale, value_scale = (
        np.repeat(part, groups, axis=1)
        for part in (np.rint((keys - middle) * key_inverse), np.rint(values * value_inverse), key_scale, value_scale)
    )
    scaled = queries * key_scale
    scale, inverse = _code_scales(scaled, 2)
    factor = (scale * LOG2_E).transpose(1, 0, 2)  # [heads, n, 1]
    sums = np.einsum("ihd,thd->hit", np.rint(scaled * inverse), key_codes, dtype=np.float64)  # exact: below 2^53
    scores = sums.astype(np.float32) * factor
    distances = np.arange(count) - np.arange(n)[:, None]
    for product in _position_scores(queries, keys, operation, distances):
        scores = scores + product
    if operation.bias is not None:
        by_distance = operation.bias.ndim == 2
        bias = operation.bias[:, distances + operation.bias.shape[1] // 2] if by_distance else operation.bias
        scores = scores + bias * LOG2_E
    before, after = (max(n, count) if side is None else side for side in (operation.before, operation.after))
    within = (distances >= -before) & (distances <= after)
    scores = np.where(within | ~within.any(axis=1, keepdims=True), scores, np.float32(-np.inf))
    codes = _weight_codes(scores - scores.max(axis=2, keepdims=True))
    totals = np.einsum("hit,thd->ihd", codes, value_codes, dtype=np.float64).astype(np.float32)
    share = np.float32(1) / codes.sum(axis=2, dtype=np.float64).astype(np.float32)
    output: Floats = ((totals * share.T[:, :, None]) * value_scale).reshape(n, -1)
    output[~within.any(axis=1)] = 0
    return output


def _position_scores(
    queries: Floats, keys: Floats, operation: QuantizedAttention, distances: NDArray[np.int64]
) -> Iterator[Floats]:
    """Yields the scores of content and relative position, [heads, queries, keys], of `Disentangled`."""
    part = operation.positions
    if part is None:
        return
    rows = part.rows[distances + len(part.rows) // 2]
    for x, table, column_scale, order in (
        (queries, part.to_position, part.to_position_scale, (0, 1, 2)),
        (keys, part.to_content, part.to_content_scale, (0, 2, 1)),
    ):
        if table is None or column_scale is None:
            continue
        scaled = x * column_scale
        scale, inverse = _code_scales(scaled, 2)
        sums = np.einsum("ihd,hrd->hir", np.rint(scaled * inverse), table, dtype=np.float64).astype(np.float32)
        products = sums * (scale * LOG2_E).transpose(1, 0, 2)
        index = rows if order == (0, 1, 2) else rows.T
        yield np.take_along_axis(products, np.broadcast_to(index, (len(products), *index.shape)), 2).transpose(order)


def positioned(x: Floats, operation: QuantizedAttention, scale: Floats | None) -> Floats:
    """Normalizes queries or keys, and turns them by their positions.

    Args:
        x: float32 [n, heads, size].
        operation: The operation with `norm` and `rotary`.
        scale: Scale of the normalization, float32 [size], or None.

    Returns:
        float32 [n, heads, size].
    """
    if operation.norm is not None and scale is not None:
        x = rms_norm(x, scale, operation.norm.epsilon)
    if operation.rotary is None:
        return x
    cos, sin = (table[: len(x), None] for table in (operation.rotary.cos, operation.rotary.sin))
    turned = cos.shape[-1]
    low, high, tail = np.split(x, [turned, 2 * turned], axis=2)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, tail], axis=2)


def _code_scales(x: Floats, axis: int) -> tuple[Floats, Floats]:
    """Scales of codes -127 to 127, by the range along `axis`, and their inverses."""
    largest = np.abs(x).max(axis=axis, keepdims=True)
    nonzero, levels = largest >= SMALLEST_ABS_MAX, np.float32(127)
    divisor = np.where(nonzero, largest, np.float32(1))
    return np.where(nonzero, largest / levels, np.float32(1)), np.where(nonzero, levels / divisor, np.float32(0))


def _weight_codes(x: Floats) -> Floats:
    """rint(255 2^x) for x <= 0, to .03 before it is rounded, 0 from -16 down."""
    x = np.maximum(x, np.float32(-16))
    n = np.rint(x)
    f = x - n
    p = np.full_like(f, 14.027278)
    for coefficient in (61.763796, 176.78715, 255):
        p = p * f + np.float32(coefficient)
    codes: Floats = np.rint(np.ldexp(p, n.astype(np.int32)))
    return codes


def _softmax_weighted(scores: Floats, values: Floats) -> Floats:
    """Values [..., t, W] weighted by the softmax of their scores [..., heads, t]: [..., W]."""
    weights = exponential(scores - scores.max(axis=-1, keepdims=True))
    heads, count = scores.shape[-2:]
    split = values.reshape(*values.shape[:-1], heads, -1)
    total = np.zeros((*scores.shape[:-1], split.shape[-1]), np.float32)
    for t in range(count):
        total = total + weights[..., t, None] * split[..., t, :, :]
    normalized: Floats = total * (np.float32(1) / sum_lanes(weights))[..., None]
    joined: Floats = normalized.reshape(*scores.shape[:-2], values.shape[-1])
    return joined
