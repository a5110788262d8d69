"""Quality of multi-vector encoders: correlation or ranking by MaxSim, and the difference of int8 to fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.texts import metrics

if TYPE_CHECKING:
    from zoo.texts.heads.late_interaction.pipeline import MultiVectorPipeline


def evaluate(pipelines: Mapping[str, MultiVectorPipeline], data: Any, on_error: str) -> dict[str, Any]:
    """Compares several precisions with fp32 on the same labelled pairs, see `zoo.texts.metrics.evaluate`.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Rows of a query, a document and a label.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"}; "difference" has "rank_correlation" of
        the scores and "cosine", the mean cosine of the documents' vectors.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    pairs, labels, skipped, is_ranking = metrics.labelled_pairs(first, data, on_error)
    queries, documents = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    vectors = {
        name: (pipeline.encode_query(queries), pipeline.encode_document(documents))
        for name, pipeline in pipelines.items()
    }
    places = [(queries.index(query), documents.index(document)) for query, document in pairs]
    scores = {
        name: np.array([pipelines[name].similarity(several[i], others[j])[0, 0] for i, j in places])
        for name, (several, others) in vectors.items()
    }

    def versus_fp32(name: str) -> dict[str, float]:
        exact, other = (np.concatenate(vectors[precision][1]) for precision in ("fp32", name))
        cosine = float((exact * other).sum(axis=1).mean())
        return {"rank_correlation": metrics.spearman(scores["fp32"], scores[name]), "cosine": cosine}

    return {
        "samples": len(pairs),
        "skipped": skipped,
        **metrics.compare_scores(scores, pairs, labels, is_ranking, versus_fp32),
    }
