"""The kernels in numpy: slow, plain, and the definition of what the native ones return, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.clicks.operators import NUMBER_LIMIT, ZERO, EmbeddingLayer, LinearLayer


def parallel_embedding(
    layer: EmbeddingLayer, ids: NDArray[Any], numbers: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(hidden uint8 [n, H], wide float32 [n, 1]) of `EmbeddingLayer` for ids integer [n, columns], all in range, and
    numbers [n, M].
    """
    rows = layer.offsets + ids[:, layer.columns]
    sums = (layer.table[rows].astype(np.int32) - ZERO).sum(axis=1, dtype=np.int64)[:, : layer.width]
    scaled_numbers = np.nan_to_num(numbers * layer.number_scale, nan=0.0, posinf=np.inf, neginf=-np.inf)
    quantized = np.clip(np.rint(scaled_numbers), -NUMBER_LIMIT, NUMBER_LIMIT).astype(np.int64)
    accumulated = (sums << layer.shift) + quantized @ layer.weight.astype(np.int64)
    scaled = accumulated.astype(np.float32) * layer.scale + layer.bias
    hidden = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    wide = np.zeros(len(ids), np.float32)
    if layer.wide is not None:
        for column in rows.T:
            wide += layer.wide[column]
    return hidden, wide[:, None]


def linear(layer: LinearLayer, x: NDArray[np.uint8]) -> NDArray[Any]:
    """`LinearLayer` for x uint8 [n, K]: uint8 or float32 [n, N]."""
    accumulated = x.astype(np.int64) @ layer.weight.astype(np.int64) + layer.bias
    scaled = accumulated.astype(np.float32) * layer.scale
    if layer.zero_point is None:
        return scaled
    return np.clip(np.rint(scaled) + np.float32(layer.zero_point), layer.low, 255).astype(np.uint8)
