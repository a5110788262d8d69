"""Metrics shared by all families: comparison with fp32 on the same samples, bootstrap intervals, AUC.

Metrics of a single family are in the metrics.py of its task.
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
    """Computes the area under the ROC curve: P(score of a positive > score of a negative) + half of the ties.

    This is the Mann-Whitney U statistic.

    Args:
        labels: [n] of 0 and 1.
        scores: [n].
        weights: [n], count of each sample (bootstrap); None: 1.

    Returns:
        The AUC, NaN if a class is missing.
    """
    order = np.argsort(scores, kind="stable")
    return auc_sorted(
        labels[order], tie_groups(scores[order]), np.ones(len(order)) if weights is None else weights[order]
    )


def tie_groups(ordered: Floats) -> NDArray[np.int64]:
    """Returns the start index of every run of equal values.

    Args:
        ordered: Sorted values, float64 [n].

    Returns:
        int64 [groups].
    """
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])).astype(np.int64)


def auc_sorted(labels: Floats, groups: NDArray[np.int64], weights: Floats) -> float:
    """Computes `auc` of samples sorted by score.

    Args:
        labels: [n] of 0 and 1.
        groups: Result of `tie_groups`.
        weights: [n].

    Returns:
        The AUC, NaN if a class is missing.
    """
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
    """Computes the metrics of every precision and compares each with fp32.

    Args:
        outputs: Outputs by precision, "fp32" first.
        metrics: Metrics of the outputs of a precision.
        compare: Compares fp32 outputs with others; returns {"difference", "interval"}.

    Returns:
        {"metrics": metrics by precision, and the result of `compare` for the first precision besides fp32; "others":
        further results by precision}.
    """
    compared = {name: compare(outputs["fp32"], output) for name, output in outputs.items() if name != "fp32"}
    first, *further = compared or [""]
    return {
        "metrics": {name: metrics(output) for name, output in outputs.items()},
        **compared.get(first, {}),
        **({"others": {name: compared[name] for name in further}} if further else {}),
    }


def interval(draws: Any) -> list[float]:
    """Returns the 95% percentile interval [low, high] of bootstrap draws (Efron and Tibshirani 1993), without NaN.

    Args:
        draws: Metric of every bootstrap sample, [n].
    """
    values = np.asarray(draws)
    values = values[~np.isnan(values)]  # none of them where no sample has a metric
    bounds: list[float] = np.quantile(values, [0.025, 0.975]).tolist() if len(values) else [float("nan")] * 2
    return bounds
