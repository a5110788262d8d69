import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.analysis.metrics import (
    Ranked,
    auc,
    class_metrics,
    click_metrics,
    compare_classes,
    compare_clicks,
    logloss,
    rank,
)
from pipelines.core.errors import RequestError, ZooError


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
@settings(max_examples=200, deadline=None)
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


def test_logloss():
    labels, p = np.array([1, 0, 1], np.float32), np.array([0.9, 0.2, 0.5], np.float32)
    assert logloss(labels, p) == pytest.approx(-(np.log(0.9) + np.log(0.8) + np.log(0.5)) / 3, rel=1e-6)
    assert logloss(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(
        -np.log(1e-7)
    )  # wrong and sure, but finite
    assert logloss(np.array([1.0]), np.array([1.0])) == pytest.approx(1e-7, rel=1e-3)


def test_click_metrics():
    found = click_metrics(np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.5, 0.49, 0.2, 0.8]))
    assert found["accuracy"] == 0.5 and found["auc"] == 0.25 and list(found) == ["auc", "logloss", "accuracy"]


def scored(seed=0, n=2000, noise=0.0):
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 0.95, n)
    labels = (rng.uniform(size=n) < p).astype(np.float32)
    return labels, p.astype(np.float32), np.clip(p + rng.normal(0, noise, n), 0, 1).astype(np.float32)


def test_differences_are_int8_minus_fp32():
    labels, fp32, int8 = scored(noise=0.3)
    found = compare_clicks(labels, {"int8": int8, "fp32": fp32})
    assert found["metrics"] == {"fp32": click_metrics(labels, fp32), "int8": click_metrics(labels, int8)}
    difference = found["difference"]
    assert difference["auc"] == found["metrics"]["int8"]["auc"] - found["metrics"]["fp32"]["auc"] < 0
    assert difference["logloss"] > 0 > difference["accuracy"]
    assert difference["max_probability"] == np.abs(int8 - fp32.astype(np.float64)).max()
    assert 0 < difference["mean_probability"] < difference["max_probability"]
    assert difference["agreement"] == ((fp32 >= 0.5) == (int8 >= 0.5)).mean() < 1
    for key in ("auc", "logloss", "accuracy"):
        low, high = found["interval"][key]
        assert low < difference[key] < high and not low <= 0 <= high


def test_identical_outputs_differ_by_nothing():
    labels, fp32, _ = scored()
    found = compare_clicks(labels, {"fp32": fp32, "int8": fp32.copy()})
    assert found["difference"] == dict.fromkeys(
        ["auc", "logloss", "accuracy", "max_probability", "mean_probability"], 0
    ) | {"agreement": 1}
    assert [found["interval"][key] for key in ("auc", "logloss", "accuracy")] == [[0, 0]] * 3


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
    found = compare_clicks(labels, {"fp32": fp32, "int8": int8}, seed=5)["interval"]
    rng = np.random.default_rng(6)
    draws = []
    for _ in range(1000):
        rows = rng.integers(0, 400, 400)
        draws.append([click_metrics(labels[rows], each[rows]) for each in (int8, fp32)])
    for key in ("auc", "logloss", "accuracy"):
        plain = np.quantile([a[key] - b[key] for a, b in draws], [0.025, 0.975])
        np.testing.assert_allclose(found[key], plain, atol=0.15 * (plain[1] - plain[0]))
    assert (found["level"], found["resamples"]) == (0.95, 1000)


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


def test_a_rank_is_the_place_in_a_stable_order():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 6, (200, 12)).astype(np.float32)  # many ties
    labels = rng.integers(0, 12, 200)
    found = rank(logits, labels)
    orders = np.argsort(-logits, axis=1, kind="stable").tolist()
    assert found.place.tolist() == [order.index(label) for order, label in zip(orders, labels, strict=True)]
    assert found.first.tolist() == [order[0] for order in orders]
    assert class_metrics(found) == {
        "top1": np.mean([label in order[:1] for order, label in zip(orders, labels, strict=True)]),
        "top5": np.mean([label in order[:5] for order, label in zip(orders, labels, strict=True)]),
    }
    logits[3, 3] = np.nan
    with pytest.raises(ZooError, match="NaN"):
        rank(logits, labels)


def test_classes_are_compared_in_pairs():
    rng = np.random.default_rng(1)
    fp32 = Ranked(rng.integers(0, 3, 4000), rng.choice([0, 1, 7], 4000, p=[0.7, 0.2, 0.1]))
    moved = rng.random(4000) < 0.1
    int8 = Ranked(np.where(moved, 9, fp32.first), np.where(moved, 6, fp32.place))
    found = compare_classes({"fp32": fp32, "int8": int8, "bf16": fp32})
    lost = float(np.mean(moved & (fp32.place == 0)))
    assert found["metrics"]["int8"]["top1"] == pytest.approx(found["metrics"]["fp32"]["top1"] - lost)
    assert found["difference"] == {
        "top1": pytest.approx(-lost),
        "top5": pytest.approx(-float(np.mean(moved & (fp32.place < 5)))),
        "agreement": pytest.approx(1 - moved.mean()),
    }
    low, high = found["interval"]["top1"]
    wide = 2 * 1.96 * np.sqrt(lost * (1 - lost) / 4000)  # the normal one
    assert low < -lost < high and high - low == pytest.approx(wide, rel=0.15)
    assert found["others"]["bf16"]["difference"] == {"top1": 0, "top5": 0, "agreement": 1}
    assert found["others"]["bf16"]["interval"]["top5"] == [0, 0]
    assert found == compare_classes({"fp32": fp32, "int8": int8, "bf16": fp32})


def test_no_images_have_no_accuracy():
    with pytest.raises(RequestError, match="found no images"):
        compare_classes({"fp32": Ranked(np.zeros(0, np.int64), np.zeros(0, np.int64))})
