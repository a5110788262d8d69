"""Permutation importance of columns (Breiman 2001; Fisher et al. 2019): the loss of quality with permuted values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import auc
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.metrics import known_rows, logloss, unless_ones

if TYPE_CHECKING:
    from zoo.recommenders.log_pipeline import LogPipeline

MAX_ROWS = 100_000  # rows that are permuted; of more a random sample


def importance(
    pipeline: LogPipeline, data: Any, *, repeats: int = 5, seed: int = 0, on_error: str = "raise"
) -> dict[str, Any]:
    """Measures the drop of the AUC and the rise of the LogLoss when the cells of a column change their rows.

    A list is permuted as a whole. Columns are permuted one at a time; of columns that carry the same, each may seem
    unimportant. Up to `MAX_ROWS` rows are used.

    Args:
        pipeline: Opened model.
        data: Labelled rows.
        repeats: Permutations of every column.
        seed: Seed of the permutations.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        {"precision", "repeats", "rows", "columns": [{"column", "auc_drop", "auc_drop_std", "logloss_rise",
        "logloss_rise_std"}, ...], most important first}; of several labels, "columns" is that of the first one, and
        "labels" has {label: columns}.

    Raises:
        RequestError: Rows have no label, or one value of it alone.
    """
    random = np.random.default_rng(seed)
    rows = _sample(pipeline, data, on_error, random)
    weights = unless_ones(rows.weights)
    labels = list(pipeline.outputs.values()) if len(pipeline.outputs) > 1 else [""]
    before = _quality(pipeline, rows, weights, labels)
    places = _places(pipeline)
    changes: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in places}
    with progress("permuting columns", len(places) * repeats) as advance:
        for name, place in places.items():
            for _ in range(repeats):
                moved = _permuted(rows, place, random.permutation(len(rows)))
                after = _quality(pipeline, moved, weights, labels)
                change = {
                    label: (before[label][0] - after[label][0], after[label][1] - before[label][1]) for label in labels
                }
                changes[name].append(change)
                advance(1)
    by_label = {
        label: _sorted({name: [change[label] for change in repeated] for name, repeated in changes.items()})
        for label in labels
    }
    report = {"precision": pipeline.precision, "repeats": repeats, "rows": len(rows), "columns": by_label[labels[0]]}
    return report if labels == [""] else {**report, "labels": by_label}


def _sorted(changes: Mapping[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the changes of every column, most important first."""
    columns = []
    for name, pairs in changes.items():
        mean, deviation = np.mean(pairs, axis=0), np.std(pairs, axis=0)
        columns.append(
            {
                "column": name,
                "auc_drop": float(mean[0]),
                "auc_drop_std": float(deviation[0]),
                "logloss_rise": float(mean[1]),
                "logloss_rise_std": float(deviation[1]),
            }
        )
    return sorted(columns, key=lambda column: (-column["auc_drop"], -column["logloss_rise"]))


def _sample(pipeline: LogPipeline, data: Any, on_error: str, random: np.random.Generator) -> Rows:
    """Reads the rows, of many a random sample, in constant memory."""
    errors, kept, keys = ErrorLog(), [], []
    for rows in pipeline.rows(data, on_error, errors, labelled=True):
        if rows.labels is None:
            raise RequestError("the rows have no label; importance needs one of 0 or 1 in every row")
        kept.append(rows)
        keys.append(random.random(len(rows)))
        if sum(map(len, kept)) > 2 * MAX_ROWS:
            kept, keys = _fewest(kept, keys)
    errors.warn()
    return _fewest(kept, keys)[0][0]


def _fewest(kept: list[Rows], keys: list[NDArray[np.float64]]) -> tuple[list[Rows], list[NDArray[np.float64]]]:
    """Keeps the `MAX_ROWS` rows of the smallest keys, in order."""
    rows, key = Rows.concatenate(kept), np.concatenate(keys)
    chosen = np.sort(np.argsort(key, kind="stable")[:MAX_ROWS])
    return [rows[chosen]], [key[chosen]]


def _places(pipeline: LogPipeline) -> dict[str, dict[str, list[int]]]:
    """Columns of ids, numbers and scales of every column of the log."""
    features = pipeline.features
    places: dict[str, dict[str, list[int]]] = {}
    for field in features.fields:
        own = {"ids": [*range(field.start, field.start + field.width)]}
        places[field.name] = own | ({"scales": [field.scale]} if field.scale >= 0 else {})
    for index, column in enumerate(features.numbers):
        numbers = places.setdefault(column.log_name, {}).setdefault("numbers", [])
        numbers.append(index)
        numbers += [len(features.numbers) + of for of, number in enumerate(features.indicators) if number == index]
    return places


def _permuted(rows: Rows, place: Mapping[str, list[int]], order: NDArray[np.int64]) -> Rows:
    """Moves the cells of a column to other rows."""
    arrays = {name: getattr(rows, name).copy() for name in place}
    for name, columns in place.items():
        arrays[name][:, columns] = arrays[name][order][:, columns]
    return replace(rows, **arrays)


def _quality(pipeline: LogPipeline, rows: Rows, weights: Any, labels: list[str]) -> dict[str, tuple[float, float]]:
    """AUC and LogLoss of every label."""
    assert rows.labels is not None
    step = 65_536
    parts = [pipeline.score(rows[np.arange(row, min(row + step, len(rows)))]) for row in range(0, len(rows), step)]
    scores = np.concatenate(parts).reshape(len(rows), -1)
    truth, quality = rows.labels.reshape(len(rows), -1), {}
    for index, label in enumerate(labels):
        truths, scored, weighed = known_rows(truth[:, index], scores[:, index], weights)
        if not len(truths) or truths.min() == truths.max():
            raise RequestError(f"found only one value of the label {label}, expected both 0 and 1".replace("  ", " "))
        value = auc(truths, scored, None if weighed is None else weighed.astype(np.float64))
        quality[label] = value, logloss(truths, scored, weighed)
    return quality
