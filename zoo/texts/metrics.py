"""Quality of text encoders: Spearman's correlation, NDCG@10 and MRR@10, and the difference between int8 and fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import LEVEL, RESAMPLES, against_fp32, interval
from pipelines.core.errors import RequestError
from zoo.texts.data import text_files, vector_files

if TYPE_CHECKING:
    from zoo.texts.inference import TextPipeline

CUT = 10  # places of a ranking that count
NEIGHBOURS = 10
MOST = 5000  # texts among which neighbours are looked for
RANKED = 2.0  # labelled texts of a query, in the mean, from which on pairs are a ranking
Floats = NDArray[np.floating[Any]]


def ranks(x: Floats) -> NDArray[np.float64]:
    """Ranks from 1, ties by their mean."""
    order = np.argsort(x, kind="stable")
    ordered = x[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff([*first, len(x)])
    found = np.empty(len(x))
    found[order] = np.repeat(first + (counts + 1) / 2, counts)
    return found


def spearman(a: Floats, b: Floats) -> float:
    """Computes Spearman's rank correlation; NaN if a vector is constant.

    Args:
        a: float [n].
        b: float [n].
    """
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float("nan")


def ndcg(scores: Floats, gains: Floats, cut: int = CUT) -> float:
    """Computes NDCG of one query, with discount log2(1 + rank) (Järvelin and Kekäläinen 2002).

    Args:
        scores: Scores of the texts, float [n].
        gains: Relevance labels of the texts, float [n].
        cut: Number of top-ranked texts.

    Returns:
        NDCG@cut; NaN if no text is relevant.
    """
    discounts = 1 / np.log2(np.arange(2, cut + 2))
    best = np.sort(gains)[::-1][:cut]
    found = gains[np.argsort(-scores, kind="stable")][:cut]
    ideal = float(best @ discounts[: len(best)])
    return float(found @ discounts[: len(found)]) / ideal if ideal > 0 else float("nan")


def reciprocal_rank(scores: Floats, gains: Floats, cut: int = CUT) -> float:
    """Computes the reciprocal rank of the first relevant text of one query.

    Args:
        scores: Scores of the texts, float [n].
        gains: Relevance labels of the texts, float [n]; above 0 is relevant.
        cut: Number of top-ranked texts.

    Returns:
        1 / rank; 0 if the rank is above `cut`; NaN if no text is relevant.
    """
    places = np.flatnonzero(gains[np.argsort(-scores, kind="stable")] > 0)
    return float("nan") if not len(places) else float(places[0] < cut) / (places[0] + 1)


def overlap(one: NDArray[np.float32], other: NDArray[np.float32], count: int = NEIGHBOURS) -> float:
    """Computes the mean overlap of the nearest neighbours in two similarity matrices.

    Args:
        one: float32 [n, n].
        other: float32 [n, n].
        count: Number of nearest neighbours.

    Returns:
        Share from 0 to 1; NaN for fewer than two texts.
    """
    count = min(count, len(one) - 1)
    if count < 1:
        return float("nan")
    nearest = []
    for matrix in (one, other):
        alone = matrix.copy()
        np.fill_diagonal(alone, -np.inf)
        nearest.append(np.argpartition(-alone, count - 1, axis=1)[:, :count])
    return float(np.mean([len(np.intersect1d(a, b)) / count for a, b in zip(*nearest, strict=True)]))


def read_pairs(
    pipeline: TextPipeline, data: Any, on_error: str
) -> tuple[list[tuple[str, str]], NDArray[np.float64], int]:
    """Reads rows of two texts and a numeric label.

    Args:
        pipeline: Pipeline of the model.
        data: Files (see `zoo.texts.data.text_files.items`).
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        Pairs of texts, labels float64 [n], and the number of invalid rows.

    Raises:
        RequestError: A row is invalid, or there are no valid rows.
    """
    pairs, labels, faults = [], [], text_files.Faults()
    for each in text_files.items(data, 2, pipeline.columns, extra=1):
        fault, label = each.fault, float("nan")
        if not fault:
            try:
                label = float(each.texts[2])
            except ValueError:
                fault = f"has the label {each.texts[2]!r:.40}, expected a number"
            fault = fault or ("" if np.isfinite(label) else "has a label that is no number")
        pipeline._note([each._replace(fault=fault)], faults, on_error)
        if not fault:
            pairs.append((each.texts[0], each.texts[1]))
            labels.append(label)
    if not pairs:
        raise RequestError(
            f"found no pairs in {text_files.named(data)}; "
            "expected two texts and a number, such as: text TAB text TAB 4.2"
        )
    return pairs, np.array(labels), faults.total()


def evaluate(pipelines: Mapping[str, TextPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares several precisions with fp32 on the same labelled pairs of texts.

    The metric is Spearman's correlation of similarities. If a first text has `RANKED` rows on average, it is a query,
    and the metrics are NDCG@10 and MRR@10, averaged over the queries with a relevant text (label above 0).

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Rows of two texts and a label (see `read_pairs`).
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`). For embeddings,
        "difference" has "cosine", the mean cosine similarity to fp32, and "overlap" of the 10 nearest neighbours among
        the first `MOST` texts; "kept" is the same overlap for quantized embeddings, by dtype.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    pairs, labels, skipped = read_pairs(first, data, on_error)
    queries = list(dict.fromkeys(query for query, _ in pairs))
    ranked = len(pairs) >= RANKED * len(queries)
    if (labels.max() <= 0) if ranked else (len(pairs) < 2 or np.ptp(labels) == 0):
        raise RequestError(
            f"found {len(pairs)} pairs, all with the label {labels[0]:g}; expected "
            + ("relevant texts among them, with a label above 0" if ranked else "pairs of different similarity")
        )
    if first.COUNT == 2:
        return {"samples": len(pairs), "skipped": skipped, **_of_scores(pipelines, pairs, labels, ranked)}
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    place = {text: i for i, text in enumerate(texts)}
    ends = np.array([[place[text] for text in pair] for pair in pairs])
    found = {name: pipeline.of_texts([(each,) for each in texts]) for name, pipeline in pipelines.items()}
    units = {name: _unit(each) for name, each in found.items()}
    scores = {name: (each[ends[:, 0]] * each[ends[:, 1]]).sum(axis=1) for name, each in units.items()}
    some = {name: each[:MOST] for name, each in units.items()}

    def beside(name: str) -> dict[str, float]:
        cosines = (units["fp32"] * units[name]).sum(axis=1)
        alike, other = (vector_files.similarities(some[each], "float32") for each in ("fp32", name))
        return {"cosine": float(cosines.mean()), "least_cosine": float(cosines.min()), "overlap": overlap(alike, other)}

    last = list(units)[-1]
    base = vector_files.similarities(some[last], "float32")
    kept = {dtype: overlap(base, vector_files.similarities(some[last], dtype)) for dtype in vector_files.DTYPES[1:]}
    compared = _compared(scores, pairs, labels, ranked, beside)
    return {"samples": len(pairs), "skipped": skipped, "texts": len(texts), **compared, "kept": kept}


def _of_scores(
    pipelines: Mapping[str, TextPipeline], pairs: Sequence[tuple[str, str]], labels: Floats, ranked: bool
) -> dict[str, Any]:
    """`evaluate` of cross-encoders, by the score, or the last label's, of each pair."""
    scores = {name: pipeline.of_texts(pairs)[:, -1] for name, pipeline in pipelines.items()}

    def beside(name: str) -> dict[str, float]:
        return {"rank_correlation": spearman(scores["fp32"], scores[name])}

    return _compared(scores, pairs, labels, ranked, beside)


def _compared(
    scores: Mapping[str, Floats], pairs: Sequence[tuple[str, str]], labels: Floats, ranked: bool, beside: Any
) -> dict[str, Any]:
    """The metrics of all precisions, each against fp32, with paired bootstrap intervals over pairs, or queries."""
    groups: dict[str, list[int]] = {}
    for i, (query, _) in enumerate(pairs):
        groups.setdefault(query, []).append(i)
    rows = [np.array(each) for each in groups.values()]
    rng = np.random.default_rng(0)
    if ranked:
        of_query = {
            key: {name: np.array([each(score[at], labels[at]) for at in rows]) for name, score in scores.items()}
            for key, each in (("ndcg10", ndcg), ("mrr10", reciprocal_rank))
        }
        draws = rng.integers(0, len(rows), (RESAMPLES, len(rows)))

        def measured(name: str) -> dict[str, float]:
            return {key: float(np.nanmean(each[name])) for key, each in of_query.items()}

        def drawn(key: str, a: str, b: str) -> Any:
            change = of_query[key][b] - of_query[key][a]
            return np.nanmean(change[draws], axis=1)
    else:
        draws = rng.integers(0, len(labels), (RESAMPLES, len(labels)))

        def measured(name: str) -> dict[str, float]:
            return {"spearman": spearman(scores[name], labels)}

        def drawn(key: str, a: str, b: str) -> Any:
            return [spearman(scores[b][at], labels[at]) - spearman(scores[a][at], labels[at]) for at in draws]

    def compare(a: str, b: str) -> dict[str, Any]:
        before, after = measured(a), measured(b)
        difference = {key: after[key] - before[key] for key in before}
        intervals = {key: interval(drawn(key, a, b)) for key in before}
        return {
            "difference": {**difference, **beside(b)},
            "interval": {"level": LEVEL, "resamples": RESAMPLES, **intervals},
        }

    return against_fp32({name: name for name in scores}, measured, compare)


def _unit(found: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors of length 1."""
    units: NDArray[np.float32] = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))
    return units
