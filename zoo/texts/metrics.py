"""Quality of text encoders: Spearman's correlation, NDCG@10 and MRR@10, and the difference between int8 and fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import LEVEL, RESAMPLES, against_fp32, interval
from pipelines.core.errors import RequestError
from zoo.texts.data import text_files, vector_files

if TYPE_CHECKING:
    from zoo.texts.text_pipeline import TextPipeline

TOP_K = 10  # ranks that NDCG and MRR count
NEIGHBOURS = 10
LOW_COSINE = 0.99  # cosine to fp32 below which texts are counted
MAX_TEXTS = 5000  # texts among which nearest neighbours are searched
MIN_TEXTS_PER_QUERY = 2.0  # mean number of texts per first text from which on pairs are a ranking
Floats = NDArray[np.floating[Any]]


def ranks(x: Floats) -> NDArray[np.float64]:
    """Computes ranks from 1; ties get their mean rank.

    Args:
        x: float [n].

    Returns:
        float64 [n].
    """
    order = np.argsort(x, kind="stable")
    ordered = x[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff([*first, len(x)])
    ranked = np.empty(len(x))
    ranked[order] = np.repeat(first + (counts + 1) / 2, counts)
    return ranked


def spearman(a: Floats, b: Floats) -> float:
    """Computes Spearman's rank correlation; NaN if a vector is constant.

    Args:
        a: float [n].
        b: float [n].

    Returns:
        -1 to 1.
    """
    return pearson(ranks(a), ranks(b))


def pearson(a: Floats, b: Floats) -> float:
    """Computes Pearson's correlation; NaN if a vector is constant.

    Args:
        a: float [n].
        b: float [n].

    Returns:
        -1 to 1.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float("nan")


def ndcg(scores: Floats, gains: Floats, k: int = TOP_K) -> float:
    """Computes NDCG of one query, with discount log2(1 + rank) (Järvelin and Kekäläinen 2002).

    Args:
        scores: Scores of the texts, float [n].
        gains: Relevance labels of the texts, float [n].
        k: Number of top-ranked texts.

    Returns:
        NDCG@k; NaN if no text is relevant.
    """
    discounts = 1 / np.log2(np.arange(2, k + 2))
    best = np.sort(gains)[::-1][:k]
    ranking = gains[np.argsort(-scores, kind="stable")][:k]
    ideal = float(best @ discounts[: len(best)])
    return float(ranking @ discounts[: len(ranking)]) / ideal if ideal > 0 else float("nan")


def reciprocal_rank(scores: Floats, gains: Floats, k: int = TOP_K) -> float:
    """Computes the reciprocal rank of the first relevant text of one query.

    Args:
        scores: Scores of the texts, float [n].
        gains: Relevance labels of the texts, float [n]; above 0 is relevant.
        k: Number of top-ranked texts.

    Returns:
        1 / rank; 0 if the rank is above `k`; NaN if no text is relevant.
    """
    positions = np.flatnonzero(gains[np.argsort(-scores, kind="stable")] > 0)
    return float("nan") if not len(positions) else float(positions[0] < k) / (positions[0] + 1)


def neighbour_overlap(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Computes the mean overlap of the `NEIGHBOURS` nearest neighbours in two similarity matrices.

    Args:
        a: float32 [n, n].
        b: float32 [n, n].

    Returns:
        Share from 0 to 1; NaN for fewer than two texts.
    """
    count = min(NEIGHBOURS, len(a) - 1)
    if count < 1:
        return float("nan")
    nearest = []
    for matrix in (a, b):
        others = matrix.copy()
        np.fill_diagonal(others, -np.inf)
        nearest.append(np.argpartition(-others, count - 1, axis=1)[:, :count])
    return float(np.mean([len(np.intersect1d(*rows)) / count for rows in zip(*nearest, strict=True)]))


def lowest(cosines: Floats) -> dict[str, float]:
    """Describes the texts whose embeddings differ most from those of fp32, which a mean hides.

    Args:
        cosines: Cosine similarity of each text's embeddings, float [n].

    Returns:
        {"least_cosine": minimum, "cosine_below_99": share of texts below `LOW_COSINE`}.
    """
    return {"least_cosine": float(cosines.min()), "cosine_below_99": float((cosines < LOW_COSINE).mean())}


def read_pairs(
    pipeline: TextPipeline, data: Any, on_error: str
) -> tuple[list[tuple[str, str]], NDArray[np.float64], int]:
    """Reads rows of two texts and a numeric label.

    Args:
        pipeline: Pipeline of the model.
        data: Files (see `zoo.texts.data.text_files.read_rows`).
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        Pairs of texts, labels float64 [n], and the number of invalid rows.

    Raises:
        RequestError: A row is invalid, or there are no valid rows.
    """
    pairs, labels, errors = [], [], Counter[str]()
    for row in text_files.read_rows(data, 2, pipeline.columns, extra=1):
        label, error = text_files.parse_label(row)
        pipeline.report_errors([(row.location, error)], errors, on_error)
        if not error:
            pairs.append((row.texts[0], row.texts[1]))
            labels.append(label)
    if not pairs:
        raise RequestError(
            f"found no pairs in {text_files.describe(data)}; "
            "expected two texts and a number, such as: text TAB text TAB 4.2"
        )
    return pairs, np.array(labels), errors.total()


def labelled_pairs(
    pipeline: TextPipeline, data: Any, on_error: str
) -> tuple[list[tuple[str, str]], NDArray[np.float64], int, bool]:
    """Reads labelled pairs whose labels differ.

    Args:
        pipeline: Pipeline of the model.
        data: See `read_pairs`.
        on_error: See `read_pairs`.

    Returns:
        The results of `read_pairs`, and whether the pairs are a ranking of texts for queries.

    Raises:
        RequestError: A row is invalid, or the labels do not differ.
    """
    pairs, labels, skipped = read_pairs(pipeline, data, on_error)
    is_ranking = len(pairs) >= MIN_TEXTS_PER_QUERY * len({query for query, _ in pairs})
    if (labels.max() <= 0) if is_ranking else (len(pairs) < 2 or np.ptp(labels) == 0):
        raise RequestError(
            f"found {len(pairs)} pairs, all with the label {labels[0]:g}; expected "
            + ("relevant texts among them, with a label above 0" if is_ranking else "pairs of different similarity")
        )
    return pairs, labels, skipped, is_ranking


def evaluate(pipelines: Mapping[str, TextPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares several precisions with fp32 on the same labelled pairs of texts.

    The metric is Spearman's correlation of similarities. If a first text has `MIN_TEXTS_PER_QUERY` rows on average,
    it is a query, and the metrics are NDCG@10 and MRR@10, averaged over the queries with a relevant text (label > 0).
    Queries are then embedded with the prompt of queries and texts with that of documents (see `Prompts.role`).

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Rows of two texts and a label (see `read_pairs`).
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`). For embeddings,
        "difference" has "cosine", the mean cosine similarity to fp32, those of `lowest`, and "overlap" of the 10
        nearest neighbours among the first `MAX_TEXTS` texts; "kept" is the same overlap for quantized embeddings, by
        dtype.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    pairs, labels, skipped, is_ranking = labelled_pairs(first, data, on_error)
    if first.TEXTS_PER_ROW == 2:
        return {"samples": len(pairs), "skipped": skipped, **_evaluate_scores(pipelines, pairs, labels, is_ranking)}
    prompts = [first.prompts.role(role) if is_ranking else first.prompt for role in ("query", "document")]
    texts = list(dict.fromkeys(text for pair in pairs for text in zip(prompts, pair, strict=True)))
    index = {text: i for i, text in enumerate(texts)}
    sides = np.array([[index[text] for text in zip(prompts, pair, strict=True)] for pair in pairs])
    rows = [(prompt + text,) for prompt, text in texts]
    embeddings = {name: _normalize(pipeline.compute_texts(rows, "")) for name, pipeline in pipelines.items()}
    scores = {name: (vectors[sides[:, 0]] * vectors[sides[:, 1]]).sum(axis=1) for name, vectors in embeddings.items()}

    def similarities(name: str, dtype: str = "float32") -> NDArray[np.float32]:
        return vector_files.similarities(embeddings[name][:MAX_TEXTS], dtype)

    def versus_fp32(name: str) -> dict[str, float]:
        cosines = (embeddings["fp32"] * embeddings[name]).sum(axis=1)
        overlap = neighbour_overlap(similarities("fp32"), similarities(name))
        return {"cosine": float(cosines.mean()), **lowest(cosines), "overlap": overlap}

    last = list(embeddings)[-1]
    exact = similarities(last)
    kept = {dtype: neighbour_overlap(exact, similarities(last, dtype)) for dtype in vector_files.DTYPES[1:]}
    compared = compare_scores(scores, pairs, labels, is_ranking, versus_fp32)
    used = {"prompts": dict(zip(("query", "document"), prompts, strict=True))} if is_ranking and any(prompts) else {}
    return {"samples": len(pairs), "skipped": skipped, "texts": len(texts), **used, **compared, "kept": kept}


def _evaluate_scores(
    pipelines: Mapping[str, TextPipeline], pairs: Sequence[tuple[str, str]], labels: Floats, is_ranking: bool
) -> dict[str, Any]:
    """Evaluates cross-encoders by the score of the only or the last label."""
    scores = {name: pipeline.compute_texts(pairs)[:, -1] for name, pipeline in pipelines.items()}

    def versus_fp32(name: str) -> dict[str, float]:
        return {"rank_correlation": spearman(scores["fp32"], scores[name])}

    return compare_scores(scores, pairs, labels, is_ranking, versus_fp32)


def compare_scores(
    scores: Mapping[str, Floats],
    pairs: Sequence[tuple[str, str]],
    labels: Floats,
    is_ranking: bool,
    versus_fp32: Callable[[str], dict[str, float]],
) -> dict[str, Any]:
    """Compares the metrics of all precisions with fp32, with paired bootstrap intervals over pairs or queries.

    Args:
        scores: Scores of the pairs, float [pairs], by precision, fp32 first.
        pairs: The pairs.
        labels: Their labels, float64 [n].
        is_ranking: Whether they are a ranking of texts for queries.
        versus_fp32: Returns further differences of a precision to fp32.

    Returns:
        See `against_fp32`.
    """
    groups: dict[str, list[int]] = {}
    for i, (query, _) in enumerate(pairs):
        groups.setdefault(query, []).append(i)
    rows = [np.array(group) for group in groups.values()]
    rng = np.random.default_rng(0)
    if is_ranking:
        per_query = {
            key: {name: np.array([metric(score[i], labels[i]) for i in rows]) for name, score in scores.items()}
            for key, metric in (("ndcg10", ndcg), ("mrr10", reciprocal_rank))
        }
        draws = rng.integers(0, len(rows), (RESAMPLES, len(rows)))

        def metrics_of(name: str) -> dict[str, float]:
            return {key: float(np.nanmean(values[name])) for key, values in per_query.items()}

        def resampled(key: str, a: str, b: str) -> Any:
            change = per_query[key][b] - per_query[key][a]
            return np.nanmean(change[draws], axis=1)
    else:
        draws = rng.integers(0, len(labels), (RESAMPLES, len(labels)))

        def metrics_of(name: str) -> dict[str, float]:
            return {"spearman": spearman(scores[name], labels)}

        def resampled(key: str, a: str, b: str) -> Any:
            return [spearman(scores[b][i], labels[i]) - spearman(scores[a][i], labels[i]) for i in draws]

    def compare(a: str, b: str) -> dict[str, Any]:
        before, after = metrics_of(a), metrics_of(b)
        difference = {key: after[key] - before[key] for key in before}
        intervals = {key: interval(resampled(key, a, b)) for key in before}
        return {
            "difference": {**difference, **versus_fp32(b)},
            "interval": {"level": LEVEL, "resamples": RESAMPLES, **intervals},
        }

    return against_fp32({name: name for name in scores}, metrics_of, compare)


def _normalize(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """L2-normalizes vectors, float32 [n, width]."""
    normalized: NDArray[np.float32] = vectors / np.maximum(
        np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)
    )
    return normalized
