"""Quality of fp32 and int8 on the same samples, their difference, and how sure it is: of clicks, of classes and of
translations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError

Floats = NDArray[np.floating[Any]]
EPSILON = 1e-7  # probabilities are clipped to [EPSILON, 1 - EPSILON] before the logarithm
RESAMPLES = 1000
TOP = (1, 5)  # a classifier is right where the right class is among its first so many


def auc(labels: Floats, scores: Floats, weights: Floats | None = None) -> float:
    """Area under the ROC curve = P(score of a positive > score of a negative) + half of the ties (Mann-Whitney U).

    labels: [n] of 0 / 1; scores: [n]; weights: [n] counts of each sample (bootstrap). NaN where a class is missing.
    """
    order = np.argsort(scores, kind="stable")
    return _auc_sorted(
        labels[order], _tie_groups(scores[order]), np.ones(len(order)) if weights is None else weights[order]
    )


def _tie_groups(ordered: Floats) -> NDArray[np.int64]:
    """Start index of every run of equal values."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])).astype(np.int64)


def _auc_sorted(labels: Floats, groups: NDArray[np.int64], weights: Floats) -> float:
    positive = np.add.reduceat(weights * labels, groups)
    negative = np.add.reduceat(weights * (1 - labels), groups)
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


def logloss(labels: Floats, probabilities: Floats) -> float:
    """Mean of -(y ln p + (1 - y) ln(1 - p)), in nats."""
    return float(_losses(labels, probabilities).mean())


def _losses(labels: Floats, probabilities: Floats) -> Floats:
    p = np.clip(probabilities.astype(np.float64), EPSILON, 1 - EPSILON)
    return -(labels * np.log(p) + (1 - labels) * np.log1p(-p))


def click_metrics(labels: Floats, probabilities: Floats) -> dict[str, float]:
    """{"auc", "logloss", "accuracy"} of click probabilities [n] against labels [n] of 0 / 1; accuracy at the threshold
    0.5.
    """
    return {
        "auc": auc(labels, probabilities),
        "logloss": logloss(labels, probabilities),
        "accuracy": float(((probabilities >= 0.5) == (labels > 0.5)).mean()),
    }


def compare_clicks(labels: Floats, outputs: Mapping[str, Floats], seed: int = 0) -> dict[str, Any]:
    """Metrics of several precisions on the same rows, outputs = {"fp32": probabilities [n], "int8": ..., ...}, and each
    against fp32.

    Returns {"metrics": per precision, "difference": int8 - fp32 of every metric, and max_probability = the largest
    |p_int8 - p_fp32|, mean_probability = the mean of that, agreement = share of rows on the same side of 0.5;
    "interval": 95% paired bootstrap intervals of the differences (Efron and Tibshirani 1993: rows are drawn with
    replacement, both precisions see the same draw)}, and of any further precision the last two under "others". Raises
    RequestError for no rows or only one class, ZooError for NaN.
    """
    if len(labels) == 0 or labels.min() == labels.max():
        what = "no rows" if len(labels) == 0 else f"only rows with label {int(labels[0])}"
        raise RequestError(f"found {what}; AUC needs clicks and non-clicks")
    if not all(np.isfinite(each).all() for each in outputs.values()):
        raise ZooError("the model computes NaN or infinite probabilities; check its weights and the input")
    exact = {name: each.astype(np.float64) for name, each in outputs.items()}
    return _against_fp32(
        exact, lambda each: click_metrics(labels, each), lambda a, b: _compare_scores(labels, a, b, seed)
    )


def _against_fp32(
    outputs: Mapping[str, Any], metrics: Callable[[Any], dict[str, float]], compare: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    """{"metrics": per precision, what `compare` says of fp32 and the next one; "others": of fp32 and each further
    one}.
    """
    found = [(name, compare(outputs["fp32"], each)) for name, each in outputs.items() if name != "fp32"]
    rest = {"others": dict(found[1:])} if found[1:] else {}
    return {
        "metrics": {name: metrics(each) for name, each in outputs.items()},
        **(found[0][1] if found else {}),
        **rest,
    }


def _compare_scores(labels: Floats, a: Floats, b: Floats, seed: int) -> dict[str, Any]:
    before, after = click_metrics(labels, a), click_metrics(labels, b)
    moved = np.abs(a - b)
    difference = {key: after[key] - before[key] for key in before} | {
        "max_probability": float(moved.max()),
        "mean_probability": float(moved.mean()),
        "agreement": float(((a >= 0.5) == (b >= 0.5)).mean()),
    }
    return {"difference": difference, "interval": _intervals(labels, a, b, seed)}


def _intervals(labels: Floats, a: Floats, b: Floats, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    n = len(labels)
    resamples = int(np.clip(2e8 // n, 50, RESAMPLES))
    orders = [np.argsort(each, kind="stable") for each in (a, b)]
    sorted_labels = [labels[order] for order in orders]
    groups = [_tie_groups(each[order]) for each, order in zip((a, b), orders, strict=True)]
    loss = _losses(labels, b) - _losses(labels, a)
    hit = ((b >= 0.5) == (labels > 0.5)).astype(np.float64) - ((a >= 0.5) == (labels > 0.5))
    draws: dict[str, list[float]] = {"auc": [], "logloss": [], "accuracy": []}
    for _ in range(resamples):
        weights = np.bincount(rng.integers(0, n, n), minlength=n).astype(np.float64)
        left, right = (
            _auc_sorted(y, group, weights[order]) for y, group, order in zip(sorted_labels, groups, orders, strict=True)
        )
        draws["auc"].append(right - left)
        draws["logloss"].append(float(loss @ weights) / n)
        draws["accuracy"].append(float(hit @ weights) / n)
    return {"level": 0.95, "resamples": resamples} | {
        key: np.nanquantile(values, [0.025, 0.975]).tolist() for key, values in draws.items()
    }


class Ranked(NamedTuple):
    """What a classifier says of n images: the class it puts first, and the place that it gives the right one (0:
    first), int64 [n].
    """

    first: NDArray[np.int64]
    place: NDArray[np.int64]


def rank(logits: Floats, labels: NDArray[np.int64]) -> Ranked:
    """Logits [n, classes] and the right classes [n]; of equal logits the lower class comes first, as in argmax.
    ZooError for NaN.
    """
    if not np.isfinite(logits).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights and the input")
    right = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    return Ranked(
        logits.argmax(axis=1).astype(np.int64),
        ((logits > right) | ((logits == right) & earlier)).sum(axis=1, dtype=np.int64),
    )


def class_metrics(ranked: Ranked) -> dict[str, float]:
    """{"top1", "top5"}: the share of images whose right class comes first, or among the first five."""
    return {f"top{k}": float((ranked.place < k).mean()) for k in TOP}


def compare_classes(outputs: Mapping[str, Ranked], seed: int = 0) -> dict[str, Any]:
    """Metrics of several precisions on the same images, and each against fp32.

    Returns {"metrics": per precision, "difference": {"top1", "top5": int8 - fp32, "agreement": share of images that
    both put into the same class}, "interval": 95% paired bootstrap intervals of these, see `compare_clicks`}, and of
    any further precision the last two under "others". Raises RequestError for no images.
    """
    if not len(next(iter(outputs.values())).place):
        raise RequestError("found no images; accuracy needs some")
    return _against_fp32(outputs, class_metrics, lambda a, b: _compare_ranked(a, b, seed))


def _compare_ranked(a: Ranked, b: Ranked, seed: int) -> dict[str, Any]:
    values = {f"top{k}": (b.place < k).astype(np.int64) - (a.place < k) for k in TOP} | {
        "agreement": (a.first == b.first).astype(np.int64)
    }
    rng = np.random.default_rng(seed)
    interval: dict[str, Any] = {"level": 0.95, "resamples": RESAMPLES}
    for name, each in values.items():  # a draw of n images with replacement is one of how often every value comes
        kinds, counts = np.unique(each, return_counts=True)
        means = rng.multinomial(len(each), counts / len(each), RESAMPLES) @ kinds / len(each)
        interval[name] = np.quantile(means, [0.025, 0.975]).tolist()
    return {"difference": {name: float(each.mean()) for name, each in values.items()}, "interval": interval}


def translation_metrics(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """{"bleu", "chrf"}, 0 to 100, of translations against one reference each, by sacreBLEU at its defaults (see
    `signatures`).
    """
    return {
        name: metric.corpus_score(list(translations), [list(references)]).score for name, metric in _metrics().items()
    }


def signatures() -> dict[str, str]:
    """How sacreBLEU computes the metrics of `translation_metrics`, with its version (Post 2018)."""
    found = {}
    for name, metric in _metrics().items():
        metric.corpus_score(["one"], [["one"]])  # it knows its signature after use
        found[name] = metric.get_signature().format()
    return found


def _metrics() -> dict[str, Any]:
    try:
        import sacrebleu
    except ImportError as error:
        raise RequestError(
            "BLEU and chrF need sacrebleu, which is not installed; run: pip install 'int8-zoo[train]'"
        ) from error
    return {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}


def compare_translations(
    translations: Mapping[str, Sequence[str]], references: Sequence[str], seed: int = 0
) -> dict[str, Any]:
    """Metrics of several precisions on the same sentences, and each against fp32.

    Returns {"metrics": per precision, "difference": {"bleu", "chrf": int8 - fp32, "agreement": share of equal
    translations}, "interval": 95% paired bootstrap intervals of these (Koehn 2004), "signatures"}, and of any further
    precision the middle two under "others". Raises RequestError for no sentences.
    """
    if not references:
        raise RequestError("found no sentences; BLEU needs some")
    counts = {
        name: {
            key: np.array(metric._extract_corpus_statistics(list(each), [list(references)]))
            for key, metric in _metrics().items()
        }
        for name, each in translations.items()
    }
    draws = np.random.default_rng(seed).multinomial(
        len(references), np.full(len(references), 1 / len(references)), RESAMPLES
    )

    def compare(a: str, b: str) -> dict[str, Any]:
        same = np.array([x == y for x, y in zip(translations[a], translations[b], strict=True)])
        difference, interval = {}, {"level": 0.95, "resamples": RESAMPLES}
        for key, metric in _metrics().items():
            scores = [_score(metric, counts[each][key], draws) for each in (a, b)]
            difference[key] = _score(metric, counts[b][key])[0] - _score(metric, counts[a][key])[0]
            interval[key] = np.quantile(scores[1] - scores[0], [0.025, 0.975]).tolist()
        interval["agreement"] = np.quantile(draws @ same / len(same), [0.025, 0.975]).tolist()
        return {"difference": {**difference, "agreement": float(same.mean())}, "interval": interval}

    named = {name: name for name in translations}
    found = _against_fp32(named, lambda name: translation_metrics(translations[name], references), compare)
    return {**found, "signatures": signatures()}


def _score(metric: Any, counts: NDArray[Any], draws: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """The score of all sentences, [1], or of every draw of them, [draws]; counts: what the metric counts in each
    sentence.
    """
    totals = counts.sum(axis=0)[None] if draws is None else draws @ counts
    return np.array([metric._compute_score_from_stats(each.tolist()).score for each in totals])
