"""What the metrics of all families share: each precision against fp32 on the same samples, intervals by the paired
bootstrap, AUC.

A family's own metrics lie beside it, in its metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
RESAMPLES = 1000  # draws of a bootstrap
LEVEL = 0.95  # of its intervals


def auc(labels: Floats, scores: Floats, weights: Floats | None = None) -> float:
    """Area under the ROC curve = P(score of a positive > score of a negative) + half of the ties (Mann-Whitney U).

    labels: [n] of 0 / 1; scores: [n]; weights: [n] counts of each sample (bootstrap). NaN where a class is missing.
    """
    order = np.argsort(scores, kind="stable")
    return auc_sorted(
        labels[order], tie_groups(scores[order]), np.ones(len(order)) if weights is None else weights[order]
    )


def tie_groups(ordered: Floats) -> NDArray[np.int64]:
    """Start index of every run of equal values."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])).astype(np.int64)


def auc_sorted(labels: Floats, groups: NDArray[np.int64], weights: Floats) -> float:
    """`auc` of samples in the order of their scores: labels and weights [n], groups as `tie_groups` gives them."""
    positive = np.add.reduceat(weights * labels, groups)
    negative = np.add.reduceat(weights * (1 - labels), groups)
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


def against_fp32(
    outputs: Mapping[str, Any],
    metrics: Callable[[Any], dict[str, float]],
    compare: Callable[[Any, Any], dict[str, Any]],
) -> dict[str, Any]:
    """Metrics of every precision in `outputs`, {"fp32": ..., "int8": ..., ...}, and each of them compared with fp32.

    compare(fp32, other) -> {"difference", "interval"}. Returns {"metrics": {precision: metrics}, what `compare` returns
    for the first precision beside fp32; "others": {precision: the same} of any further ones}.
    """
    compared = {name: compare(outputs["fp32"], output) for name, output in outputs.items() if name != "fp32"}
    first, *further = compared or [""]
    return {
        "metrics": {name: metrics(output) for name, output in outputs.items()},
        **compared.get(first, {}),
        **({"others": {name: compared[name] for name in further}} if further else {}),
    }


def interval(draws: Any) -> list[float]:
    """[low, high], the 95% percentile interval of the draws of a bootstrap (Efron and Tibshirani 1993); NaN is left
    out.
    """
    bounds: list[float] = np.nanquantile(draws, [0.025, 0.975]).tolist()
    return bounds
