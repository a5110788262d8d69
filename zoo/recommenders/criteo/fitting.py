"""The statistics of the training data that `Features` scales by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo.data import BUCKETS, Rows
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.data.encoding import log1p


def fit(batches: Iterable[Rows], *, buckets: int = BUCKETS, fill: Literal["zero", "mean"] = "zero") -> Features:
    """Statistics of the training data in one pass over `batches`; memory does not grow with them.

    `buckets` is what the batches were read with. `fill` says what a missing number becomes: 0, or its column's mean
    after normalization. Raises RequestError where there is no row.
    """
    if fill not in ("zero", "mean"):
        raise RequestError(f"found fill {fill!r}, wanted zero or mean")
    lo: Any = math.inf
    hi: Any = -math.inf
    total: Any = 0.0
    count: Any = 0
    categorical = 0
    for rows in batches:
        values = log1p(rows.numbers)
        lo = np.fmin(lo, np.fmin.reduce(values, axis=0, initial=np.inf))  # fmin and fmax ignore NaN
        hi = np.fmax(hi, np.fmax.reduce(values, axis=0, initial=-np.inf))
        total = total + np.nansum(values, axis=0, dtype=np.float64)
        count = count + np.count_nonzero(~np.isnan(values), axis=0)
        categorical = rows.ids.shape[1]
    if not categorical:
        raise RequestError("found no rows to fit the features to, wanted at least one")
    lo, hi = (np.where(count, bound, 0).astype(np.float64) for bound in (lo, hi))  # a column without any value
    mean = np.clip((total / np.maximum(count, 1) - lo) / np.where(hi > lo, hi - lo, 1), 0, 1)
    filled = mean if fill == "mean" else np.zeros_like(mean)
    lows, highs, fills = (tuple(values.tolist()) for values in (lo, hi, filled))
    return Features(lows, highs, fills, numeric=len(lows), categorical=categorical, buckets=buckets)
