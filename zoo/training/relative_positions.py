"""Buckets of relative positions in attention (Raffel et al. 2020, "T5", section 2.1)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def relative_buckets(
    ahead: NDArray[np.int64], buckets: int, furthest: int, *, both_sides: bool = True
) -> NDArray[np.int64]:
    """Returns the bucket of each distance of a key from the query.

    With both sides, half of the buckets are of keys before the query, half of keys after it. On a side, one half of the
    buckets is one distance each, the other half grows logarithmically up to `furthest`.

    Args:
        ahead: Distances in tokens, int64 of any shape, positive for keys after the query.
        buckets: Number of buckets.
        furthest: Distance from which on all keys share the last bucket.
        both_sides: Whether keys after the query have buckets; else they share that of the query's own key.

    Returns:
        int64 of the shape of `ahead`, 0 to buckets - 1.
    """
    side = buckets // 2 if both_sides else buckets
    exact = side // 2
    distance = np.abs(ahead) if both_sides else np.maximum(-ahead, 0)
    large = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / math.log(furthest / exact)
    large = np.minimum(exact + (large * (side - exact)).astype(np.int64), side - 1)
    bucket: NDArray[np.int64] = np.where(distance < exact, distance, large)
    return np.where((ahead > 0) & both_sides, side, 0) + bucket
