"""Metrics of recommenders."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from zoo.recommenders.metrics import click_metrics, compare_clicks, logloss
from zoo.recommenders.retrieval.metrics import retrieval_metrics


def test_logloss():
    labels, p = np.array([1, 0, 1], np.float32), np.array([0.9, 0.2, 0.5], np.float32)
    assert logloss(labels, p) == pytest.approx(-(np.log(0.9) + np.log(0.8) + np.log(0.5)) / 3, rel=1e-6)
    assert logloss(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(
        -np.log(1e-7)
    )  # wrong and sure, but finite
    assert logloss(np.array([1.0]), np.array([1.0])) == pytest.approx(1e-7, rel=1e-3)


def test_click_metrics():
    metrics = click_metrics(np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.5, 0.49, 0.2, 0.8]))
    assert (
        metrics["accuracy"] == 0.5
        and metrics["auc"] == 0.25
        and list(metrics) == ["auc", "logloss", "accuracy", "calibration_error"]
    )


def scored(seed=0, n=2000, noise=0.0):
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 0.95, n)
    labels = (rng.uniform(size=n) < p).astype(np.float32)
    return labels, p.astype(np.float32), np.clip(p + rng.normal(0, noise, n), 0, 1).astype(np.float32)


def test_differences_are_int8_minus_fp32():
    labels, fp32, int8 = scored(noise=0.3)
    comparison = compare_clicks(labels, {"int8": int8, "fp32": fp32})
    assert comparison["metrics"] == {"fp32": click_metrics(labels, fp32), "int8": click_metrics(labels, int8)}
    difference = comparison["difference"]
    assert difference["auc"] == comparison["metrics"]["int8"]["auc"] - comparison["metrics"]["fp32"]["auc"] < 0
    assert difference["logloss"] > 0 > difference["accuracy"]
    assert difference["max_probability"] == np.abs(int8 - fp32.astype(np.float64)).max()
    assert 0 < difference["mean_probability"] < difference["max_probability"]
    assert difference["agreement"] == ((fp32 >= 0.5) == (int8 >= 0.5)).mean() < 1
    for key in ("auc", "logloss", "accuracy"):
        low, high = comparison["interval"][key]
        assert low < difference[key] < high and not low <= 0 <= high


def test_identical_outputs_differ_by_nothing():
    labels, fp32, _ = scored()
    comparison = compare_clicks(labels, {"fp32": fp32, "int8": fp32.copy()})
    assert comparison["difference"] == dict.fromkeys(
        ["auc", "logloss", "accuracy", "calibration_error", "max_probability", "mean_probability"], 0
    ) | {"agreement": 1}
    assert [comparison["interval"][key] for key in ("auc", "logloss", "accuracy")] == [[0, 0]] * 3


def test_intervals_of_small_noise_hold_zero_and_shrink_with_rows():
    widths = []
    for n in (300, 10000):
        labels, fp32, int8 = scored(3, n, noise=0.001)
        interval = compare_clicks(labels, {"fp32": fp32, "int8": int8})["interval"]
        assert all(interval[key][0] <= 0 <= interval[key][1] for key in ("auc", "logloss"))
        widths.append(interval["logloss"][1] - interval["logloss"][0])
    assert widths[1] < widths[0] / 3


def test_intervals_are_those_of_a_plain_paired_bootstrap():
    labels, fp32, int8 = scored(2, 400, noise=0.1)
    interval = compare_clicks(labels, {"fp32": fp32, "int8": int8}, seed=5)["interval"]
    rng = np.random.default_rng(6)
    draws = []
    for _ in range(1000):
        rows = rng.integers(0, 400, 400)
        draws.append([click_metrics(labels[rows], scores[rows]) for scores in (int8, fp32)])
    for key in ("auc", "logloss", "accuracy"):
        plain = np.quantile([a[key] - b[key] for a, b in draws], [0.025, 0.975])
        np.testing.assert_allclose(interval[key], plain, atol=0.15 * (plain[1] - plain[0]))
    assert (interval["level"], interval["resamples"]) == (0.95, 1000)


def test_the_same_seed_gives_the_same_intervals():
    labels, fp32, int8 = scored(noise=0.1)
    outputs = {"fp32": fp32, "int8": int8}
    assert (
        compare_clicks(labels, outputs, seed=1)
        == compare_clicks(labels, outputs, seed=1)
        != compare_clicks(labels, outputs, seed=2)
    )


@pytest.mark.parametrize(
    ("labels", "what"), [([], "no rows"), ([0.0, 0.0], "only rows with label 0"), ([1.0], "only rows with label 1")]
)
def test_one_class_is_refused(labels, what):
    scores = np.full(len(labels), 0.5, np.float32)
    with pytest.raises(RequestError, match=f"found {what}; AUC needs clicks and non-clicks"):
        compare_clicks(np.array(labels, np.float32), {"fp32": scores, "int8": scores})


def test_a_row_of_weight_3_counts_as_three_rows():
    labels, fp32, int8 = scored(4, 1000, noise=0.1)
    weights = np.random.default_rng(5).integers(0, 4, 1000).astype(np.float32)
    counts = weights.astype(int)
    for scores in (fp32, int8):
        report = click_metrics(labels, scores, weights)
        wanted = click_metrics(*(np.repeat(array, counts) for array in (labels, scores)))
        assert report == {
            name: pytest.approx(value, abs=0.01 if name == "calibration_error" else 1e-6)
            for name, value in wanted.items()
        }
    assert click_metrics(labels, fp32, weights) != click_metrics(labels, fp32)
    report = compare_clicks(labels, {"fp32": fp32, "int8": int8}, weights=weights)
    assert report["metrics"]["int8"] == click_metrics(labels, int8, weights)
    plain = compare_clicks(labels, {"fp32": fp32, "int8": int8}, weights=np.ones(1000, np.float32))
    for key in ("auc", "logloss", "accuracy"):
        low, high = report["interval"][key]
        assert low < report["difference"][key] < high
        assert plain["interval"][key] == pytest.approx(
            compare_clicks(labels, {"fp32": fp32, "int8": int8})["interval"][key]
        )
    ranks = np.array([1, 5, 30, 90])
    repeated = retrieval_metrics(np.repeat(ranks, [2, 0, 1, 3]))
    assert retrieval_metrics(ranks, np.array([2, 0, 1, 3], np.float32)) == pytest.approx(repeated)


def test_rows_of_weight_0_are_no_class():
    labels, scores = np.array([1.0, 0.0, 1.0]), np.array([0.1, 0.2, 0.3])
    with pytest.raises(RequestError, match="found only rows with label 1 and a weight above 0; AUC needs"):
        compare_clicks(labels, {"fp32": scores}, weights=np.array([1.0, 0.0, 1.0]))
