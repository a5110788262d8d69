"""AUC, comparisons of precisions, and confidence intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.analysis.metrics import against_fp32, auc, interval


def pairs(labels, scores, weights=None):
    """P(positive above negative) + ties / 2, pair by pair."""
    weights = np.ones(len(labels)) if weights is None else weights
    won = total = 0.0
    for y, s, w in zip(labels, scores, weights, strict=True):
        for z, t, v in zip(labels, scores, weights, strict=True):
            if y == 1 and z == 0:
                total += w * v
                won += w * v * (1.0 if s > t else 0.5 if s == t else 0.0)
    return won / total if total else float("nan")


samples = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=25
)


@given(samples)
def test_auc_counts_pairs(rows):
    labels, scores, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    assert auc(labels, scores) == pytest.approx(pairs(labels, scores), nan_ok=True)
    assert auc(labels, scores, weights) == pytest.approx(pairs(labels, scores, weights), nan_ok=True)


def test_auc_of_float32_and_the_extremes():
    labels = np.array([0, 1, 0, 1], np.float32)
    assert auc(labels, np.array([0.1, 0.9, 0.2, 0.8], np.float32)) == 1.0
    assert auc(labels, np.array([0.9, 0.1, 0.8, 0.2], np.float32)) == 0.0
    assert auc(labels, np.zeros(4, np.float32)) == 0.5
    assert np.isnan(auc(np.ones(4), np.arange(4.0)))


def test_auc_of_a_million_rows_does_not_lose_counts():
    n = 1_000_000
    labels = (np.arange(n) % 2).astype(np.float32)
    assert auc(labels, labels * np.float32(0.5)) == 1.0


def test_each_precision_is_compared_with_fp32():
    def compare(fp32, other):
        return {"difference": other - fp32}

    scores = against_fp32({"int8": 5, "fp32": 3, "bf16": 4}, lambda output: {"score": output}, compare)
    assert scores == {
        "metrics": {"int8": {"score": 5}, "fp32": {"score": 3}, "bf16": {"score": 4}},
        "difference": 2,
        "others": {"bf16": {"difference": 1}},
    }
    assert "others" not in against_fp32({"fp32": 3, "int8": 5}, lambda output: {}, compare)
    assert against_fp32({"fp32": 3}, lambda output: {"score": output}, compare) == {"metrics": {"fp32": {"score": 3}}}


def test_an_interval_holds_95_percent_of_the_draws():
    assert interval([*np.arange(1001.0), np.nan]) == [25, 975]
    assert np.isnan(interval([np.nan] * 3)).all()
