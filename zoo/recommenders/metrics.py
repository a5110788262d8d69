"""Quality metrics of click models: AUC, LogLoss, accuracy and calibration error, and their changes by quantization."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import (
    LEVEL,
    RESAMPLES,
    Floats,
    against_fp32,
    auc,
    auc_sorted,
    interval,
    tie_groups,
)
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from zoo.recommenders.data.row_errors import ErrorLog

if TYPE_CHECKING:
    from zoo.recommenders.inference import ClickPipeline

BINS = 20
EPSILON = 1e-7  # probabilities are clipped to [EPSILON, 1 - EPSILON] before the logarithm

logger = logging.getLogger(__name__)


def evaluate(pipelines: Mapping[str, ClickPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares all precisions on the same labelled rows, see `compare_clicks`.

    Args:
        pipelines: {precision: pipeline}; "fp32" is the reference.
        data: Labelled rows.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        Result of `compare_clicks`, with the keys samples, clicks and skipped; for models with a weight column also
        "weighted": whether the rows have that column, by which the metrics then weight them; for models trained on a
        share of the negatives "negative_rate", that share; with
        `ClickPipeline.grouped_by` also "groups": number of users with both labels, which the metric gauc is over. Of
        several labels, all this is of the first one, and "labels" has {label: samples, clicks, metrics, ...} of each,
        on the rows that have it.

    Raises:
        RequestError: Rows have no label, or a row is faulty with "raise".
    """
    errors, first = ErrorLog(), next(iter(pipelines.values()))
    weighted = first.weighted(data)
    if weighted is False:
        logger.warning("the rows lack the weight column of the model's training; the metrics are unweighted")
    grouped = [first.grouped_by] if first.grouped_by else []
    users: dict[str | None, int] = {}
    groups: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.float32]] = []
    weights: list[NDArray[np.float32]] = []
    scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in pipelines}
    with progress("evaluating rows") as advance:
        for rows in first.rows(data, on_error, errors, labelled=True, keep=grouped):
            if rows.labels is None:
                raise RequestError("the rows have no label; evaluation needs one of 0 or 1 in every row")
            labels.append(rows.labels)
            if weighted:
                weights.append(rows.weights)
            if grouped:
                texts = rows.kept[:, 0].tolist()
                groups.append(np.array([-1 if text is None else users.setdefault(text, len(users)) for text in texts]))
            for name, pipeline in pipelines.items():
                scores[name].append(pipeline.score(rows))
            advance(len(rows))
    errors.warn()
    truth = np.concatenate(labels) if labels else np.zeros(0, np.float32)
    outputs = {name: np.concatenate(parts) for name, parts in scores.items()} if labels else {}
    of_rows = np.concatenate(weights) if weights else None
    of_users = np.concatenate(groups) if groups else None
    shown = {"skipped": errors.total, **({} if weighted is None else {"weighted": weighted})}
    if rate := first.folder.card.details.get("training", {}).get("config", {}).get("negative_rate"):
        shown["negative_rate"] = rate
    if truth.ndim == 1:
        return _compared(truth, outputs, of_rows, of_users, shown)
    by_label = {}
    for i, label in enumerate(first.outputs.values()):
        labelled = ~np.isnan(truth[:, i])
        scored = {name: scores[labelled, i] for name, scores in outputs.items()}
        weights_known = None if of_rows is None else of_rows[labelled]
        users_known = None if of_users is None else of_users[labelled]
        try:
            by_label[label] = _compared(truth[labelled, i], scored, weights_known, users_known, {})
        except RequestError as error:
            raise RequestError(f"label {label}: {error}") from error
    return {**next(iter(by_label.values())), **shown, "labels": by_label}


def _compared(
    truth: Floats,
    outputs: Mapping[str, Floats],
    weights: Floats | None,
    users: NDArray[np.int64] | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Counts and comparison of the precisions for one label; `users` are the groups of GAUC."""
    compared = compare_clicks(truth, outputs, weights=weights)
    if users is not None:
        compared |= _grouped(compared, truth, outputs, users, weights)
    return {"samples": len(truth), "clicks": int(truth.sum()), **more, **compared}


def _grouped(
    report: Mapping[str, Any],
    labels: Floats,
    outputs: Mapping[str, Floats],
    groups: NDArray[np.int64],
    weights: Floats | None,
) -> dict[str, Any]:
    """Adds gauc to the metrics and differences of a report of `compare_clicks`; returns {"groups"}."""
    counts = 0
    for name, probabilities in outputs.items():
        report["metrics"][name]["gauc"], counts = gauc(labels, probabilities, groups, weights)
        if name != "fp32":
            compared = report.get("others", {}).get(name, report)["difference"]
            compared["gauc"] = report["metrics"][name]["gauc"] - report["metrics"]["fp32"]["gauc"]
    return {"groups": counts}


def gauc(
    labels: Floats, probabilities: Floats, groups: NDArray[np.int64], weights: Floats | None = None
) -> tuple[float, int]:
    """Computes the mean AUC of groups of rows, weighted by their rows (Zhou et al. 2018, DIN, section 6.2).

    Args:
        labels: 0 or 1, [n].
        probabilities: [n].
        groups: Group of every row, usually the user; rows below 0 are left out; int64 [n].
        weights: Sample weights, [n]; None: 1.

    Returns:
        GAUC over the groups with both labels, NaN if there are none; and their number.
    """
    kept = np.flatnonzero(groups >= 0)
    order = kept[np.lexsort((probabilities[kept], groups[kept]))]
    group, scores, clicked = groups[order], probabilities[order], labels[order].astype(np.float64)
    rows = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    if not len(order):
        return float("nan"), 0
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    ties = np.flatnonzero(np.concatenate([[True], (group[1:] != group[:-1]) | (scores[1:] != scores[:-1])]))
    negative = np.add.reduceat(rows * (1 - clicked), ties)
    before = np.cumsum(negative) - negative  # of all earlier groups, too
    starts = np.searchsorted(ties, first)
    of_group = np.repeat(np.arange(len(first)), np.diff([*starts, len(ties)]))
    below = before - before[starts][of_group]
    pairs = np.add.reduceat(np.add.reduceat(rows * clicked, ties) * (below + negative / 2), starts)
    positives, negatives = (np.add.reduceat(rows * clicks, first) for clicks in (clicked, 1 - clicked))
    both = (positives > 0) & (negatives > 0)
    if not both.any():
        return float("nan"), 0
    areas = pairs[both] / (positives[both] * negatives[both])
    return float(np.average(areas, weights=(positives + negatives)[both])), int(both.sum())


def logloss(labels: Floats, probabilities: Floats, weights: Floats | None = None) -> float:
    """Computes the mean of -(y ln p + (1 - y) ln(1 - p)).

    Args:
        labels: y, 0 or 1, [n].
        probabilities: p, [n].
        weights: Weights of the rows in the mean, [n]; None: 1.

    Returns:
        LogLoss in nats.
    """
    return mean(_losses(labels, probabilities), weights)


def mean(values: NDArray[Any], weights: Floats | None) -> float:
    """Computes a mean over rows.

    Args:
        values: [n].
        weights: Weights of the rows, [n]; None: 1.

    Returns:
        The mean.
    """
    return float(values.mean()) if weights is None else float(np.average(values, weights=weights.astype(np.float64)))


def _losses(labels: Floats, probabilities: Floats) -> Floats:
    """The cross-entropy of each row, [n], in nats."""
    p = np.clip(probabilities.astype(np.float64), EPSILON, 1 - EPSILON)
    return -(labels * np.log(p) + (1 - labels) * np.log1p(-p))


def unless_ones(weights: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Returns sample weights, or None where all are 1.

    Args:
        weights: [n].

    Returns:
        `weights`, or None.
    """
    return None if (weights == 1).all() else weights


def click_metrics(labels: Floats, probabilities: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Computes the metrics of click probabilities.

    Args:
        labels: 0 or 1, [n].
        probabilities: [n].
        weights: Sample weights, 0 or more, [n]: a row of weight 20 counts as 20 rows. None: 1.

    Returns:
        {"auc", "logloss", "accuracy" (at the threshold 0.5), "calibration_error"}.
    """
    return {
        "auc": auc(labels, probabilities, None if weights is None else weights.astype(np.float64)),
        "logloss": logloss(labels, probabilities, weights),
        "accuracy": mean((probabilities >= 0.5) == (labels > 0.5), weights),
        "calibration_error": calibration_error(labels, probabilities, weights),
    }


def label_metrics(
    labels: Floats, probabilities: Floats, weights: Floats | None = None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Computes the metrics of one label, or of several.

    Args:
        labels: 0 or 1, [n]; or [n, labels], NaN where missing.
        probabilities: Click probabilities, float of the same shape.
        weights: Sample weights, see `click_metrics`.
        names: Names of several labels.

    Returns:
        As `click_metrics`; for several labels the means of their metrics, and "labels": {name: its metrics on the rows
        that have it}.
    """
    if labels.ndim == 1:
        return click_metrics(labels, probabilities, weights)
    by_label = {
        name: click_metrics(*known_rows(labels[:, i], probabilities[:, i], weights)) for i, name in enumerate(names)
    }
    return mean_metrics(by_label)


def mean_metrics(by_label: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns the means of metrics over labels, and the metrics of the labels.

    Args:
        by_label: {label: {metric: value}}.

    Returns:
        {metric: mean, ..., "labels": `by_label`}.
    """
    keys = next(iter(by_label.values()))
    means = {key: float(np.mean([metrics[key] for metrics in by_label.values()])) for key in keys}
    return {**means, "labels": dict(by_label)}


def known_rows(labels: Floats, probabilities: Floats, weights: Floats | None) -> tuple[Floats, Floats, Floats | None]:
    """Selects the rows that have a label.

    Args:
        labels: 0, 1 or NaN, [n].
        probabilities: [n].
        weights: [n] or None.

    Returns:
        Labels, probabilities and weights of these rows.
    """
    labelled = ~np.isnan(labels)
    return labels[labelled], probabilities[labelled], None if weights is None else weights[labelled]


def calibration_error(labels: Floats, probabilities: Floats, weights: Floats | None = None) -> float:
    """Computes the expected calibration error (Naeini et al. 2015).

    Rows are sorted by probability into `BINS` bins of equal size, or of equal weight.

    Args:
        labels: 0 or 1, [n].
        probabilities: [n].
        weights: Sample weights, [n]; None: 1.

    Returns:
        Mean over rows of |mean label - mean probability| of the row's bin.
    """
    order = np.argsort(probabilities, kind="stable")
    apart = labels.astype(np.float64) - probabilities.astype(np.float64)
    apart, total = (apart, float(len(order))) if weights is None else (apart * weights, float(weights.sum(dtype=float)))
    gaps = np.cumsum(np.insert(apart[order], 0, 0.0))
    cuts = np.linspace(0, len(order), BINS + 1).astype(np.int64)
    if weights is not None:
        ends = np.cumsum(weights[order], dtype=np.float64)
        cuts = np.concatenate([[0], np.searchsorted(ends, np.linspace(0, ends[-1], BINS + 1)[1:-1]), [len(order)]])
    return float(np.abs(np.diff(gaps[cuts])).sum() / total)


def compare_clicks(
    labels: Floats, outputs: Mapping[str, Floats], seed: int = 0, weights: Floats | None = None
) -> dict[str, Any]:
    """Compares the metrics of several precisions on the same rows with those of fp32.

    Args:
        labels: 0 or 1, [n].
        outputs: {"fp32": probabilities [n], "int8": ..., ...}.
        seed: Seed of the bootstrap.
        weights: Sample weights of the metrics and their intervals, [n]; None: 1.

    Returns:
        {"metrics": per precision, "difference": int8 - fp32 of every metric, max_probability = largest |p_int8 -
        p_fp32|, mean_probability = its mean, agreement = share of rows on the same side of 0.5, both unweighted;
        "interval": 95% paired bootstrap intervals of the differences (Efron and Tibshirani 1993), with the same draw
        of rows for both precisions}. Further precisions have both under "others".

    Raises:
        RequestError: There are no rows, or only one class, among the rows of a weight above 0.
        ZooError: A probability is NaN or infinite.
    """
    present = labels if weights is None else labels[weights > 0]
    if len(present) == 0 or present.min() == present.max():
        what = "no rows" if len(present) == 0 else f"only rows with label {int(present[0])}"
        what += "" if len(present) == len(labels) else " and a weight above 0"
        raise RequestError(f"found {what}; AUC needs clicks and non-clicks")
    if not all(np.isfinite(probabilities).all() for probabilities in outputs.values()):
        raise ZooError("the model computes NaN or infinite probabilities; check its weights and the input")
    exact = {name: probabilities.astype(np.float64) for name, probabilities in outputs.items()}
    return against_fp32(
        exact,
        lambda probabilities: click_metrics(labels, probabilities, weights),
        lambda fp32, other: _compare_probabilities(labels, fp32, other, seed, weights),
    )


def _compare_probabilities(
    labels: Floats, a: Floats, b: Floats, seed: int, sample_weights: Floats | None
) -> dict[str, Any]:
    """Differences of b to a, both [n]; see `compare_clicks`."""
    before, after = click_metrics(labels, a, sample_weights), click_metrics(labels, b, sample_weights)
    moved = np.abs(a - b)
    difference = {key: after[key] - before[key] for key in before} | {
        "max_probability": float(moved.max()),
        "mean_probability": float(moved.mean()),
        "agreement": float(((a >= 0.5) == (b >= 0.5)).mean()),
    }
    return {"difference": difference, "interval": _intervals(labels, a, b, seed, sample_weights)}


def _intervals(labels: Floats, a: Floats, b: Floats, seed: int, sample_weights: Floats | None) -> dict[str, Any]:
    """Paired bootstrap intervals of every metric of b less a's, on `resamples` draws of rows with replacement."""
    rng = np.random.default_rng(seed)
    n = len(labels)
    resamples = int(np.clip(2e8 // n, 50, RESAMPLES))
    orders = [np.argsort(scores, kind="stable") for scores in (a, b)]
    sorted_labels = [labels[order] for order in orders]
    groups = [tie_groups(scores[order]) for scores, order in zip((a, b), orders, strict=True)]
    loss = _losses(labels, b) - _losses(labels, a)
    hit = ((b >= 0.5) == (labels > 0.5)).astype(np.float64) - ((a >= 0.5) == (labels > 0.5))
    draws: dict[str, list[float]] = {"auc": [], "logloss": [], "accuracy": []}
    for _ in range(resamples):
        weights = np.bincount(rng.integers(0, n, n), minlength=n).astype(np.float64)
        weights = weights if sample_weights is None else weights * sample_weights
        total = float(weights.sum()) or np.nan
        left, right = (
            auc_sorted(y, group, weights[order]) for y, group, order in zip(sorted_labels, groups, orders, strict=True)
        )
        draws["auc"].append(right - left)
        draws["logloss"].append(float(loss @ weights) / total)
        draws["accuracy"].append(float(hit @ weights) / total)
    return {"level": LEVEL, "resamples": resamples} | {key: interval(values) for key, values in draws.items()}
