"""Quality metrics of two-tower models: click metrics, recall and NDCG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zoo.recommenders import metrics as clicks
from zoo.recommenders.retrieval.index import quantized

if TYPE_CHECKING:
    from zoo.recommenders.retrieval.inference import TwoTowerPipeline
    from zoo.recommenders.retrieval.next_items import NextItemPipeline

CUTS = (10, 50)  # of recall
BLOCK = 4096  # rows at a time


def evaluate(pipelines: Mapping[str, TwoTowerPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Evaluates click metrics, recall@10, recall@50 and ndcg@10 of every precision.

    The item of every clicked row is ranked among all distinct items of the data for the user of the row. A row has one
    relevant item: recall@k is the share of rows whose item is among the first k. NDCG@k is the mean of 1 / log2(1 +
    rank), 0 beyond k (Järvelin and Kekäläinen 2002). Embeddings of the int8 model are compared in int8, as in its
    index.

    Args:
        pipelines: {precision: pipeline}.
        data: Labelled rows, as in `Features.read`.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        As `zoo.recommenders.metrics.evaluate`, with the further metrics.

    Raises:
        RequestError: Rows have no label, or a row is faulty with "raise".
    """
    report = clicks.evaluate(pipelines, data, on_error)
    for name, pipeline in pipelines.items():
        report["metrics"][name] |= retrieval_metrics(*_ranks(pipeline, data, on_error))
    _compare(report, pipelines)
    return report


def evaluate_next_items(
    pipelines: Mapping[str, NextItemPipeline], data: Any, on_error: str = "raise"
) -> dict[str, Any]:
    """Evaluates click metrics, recall@10, recall@50, ndcg@10 and mrr of the next item of every precision.

    The item of every clicked row is ranked among all known items outside the row's history. Rows whose item is
    unknown to the model are left out.

    Args:
        pipelines: {precision: pipeline}.
        data: Labelled rows, as in `Features.read`.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        As `zoo.recommenders.metrics.evaluate`, with the further metrics, and "next_items": number of items ranked.

    Raises:
        RequestError: Rows have no label, no row has a known item, or a row is faulty with "raise".
    """
    report = clicks.evaluate(pipelines, data, on_error)
    for name, pipeline in pipelines.items():
        ranks, weights = pipeline.ranks(data, on_error)
        report["metrics"][name] |= retrieval_metrics(ranks, weights) | {"mrr": clicks.mean(1 / ranks, weights)}
        report["next_items"] = len(ranks)
    _compare(report, pipelines)
    return report


def _compare(report: dict[str, Any], pipelines: Mapping[str, Any]) -> None:
    """Adds the differences of the retrieval metrics to fp32."""
    keys = [key for key in report["metrics"]["fp32"] if "@" in key or key == "mrr"]
    for name in [precision for precision in pipelines if precision != "fp32"]:
        compared = report.get("others", {}).get(name, report)["difference"]
        compared |= {key: report["metrics"][name][key] - report["metrics"]["fp32"][key] for key in keys}


def retrieval_metrics(ranks: NDArray[np.int64], weights: NDArray[np.float32] | None = None) -> dict[str, float]:
    """Computes recall and NDCG from ranks.

    Args:
        ranks: Ranks of the relevant items, from 1 on, int64 [n].
        weights: Weights of the rows in the means, [n]; None: 1.

    Returns:
        {"recall@10", "recall@50", "ndcg@10"}.
    """
    gains = np.where(ranks <= CUTS[0], 1 / np.log2(1 + ranks), 0)
    means = {f"recall@{k}": clicks.mean(ranks <= k, weights) for k in CUTS}
    return means | {f"ndcg@{CUTS[0]}": clicks.mean(gains, weights)}


def _ranks(
    pipeline: TwoTowerPipeline, data: Any, on_error: str
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Returns the rank of the item of every clicked row, from 1 on, and the rows' weights.

    Among equal scores the item is the last.
    """
    users, keys, weights = [], [], []
    column = pipeline.key.start
    vectors: dict[int, NDArray[np.float32]] = {}
    for rows in pipeline.rows(data, on_error, labelled=True):
        out = pipeline.predict(pipeline.encode(rows))
        ids = rows.ids[:, column]
        for key, row in zip(*np.unique(ids, return_index=True), strict=True):
            vectors.setdefault(int(key), out["item"][row])
        clicked = rows.labels == 1
        users.append(out["user"][clicked])
        keys.append(ids[clicked])
        weights.append(rows.weights[clicked])
    order = {key: place for place, key in enumerate(vectors)}
    items = np.stack(list(vectors.values()))
    queries, relevant = np.concatenate(users), np.array([order[int(key)] for key in np.concatenate(keys)])
    if pipeline.precision == "int8":
        items, queries = quantized(items).astype(np.float32), quantized(queries).astype(np.float32)
    ranks = []
    for begin in range(0, len(queries), BLOCK):
        scores = queries[begin : begin + BLOCK] @ items.T
        own = np.take_along_axis(scores, relevant[begin : begin + BLOCK, None], 1)
        ranks.append((scores >= own).sum(1))
    return np.concatenate(ranks).astype(np.int64), clicks.unless_ones(np.concatenate(weights))
