"""Metrics of image classifiers."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError, ZooError
from zoo.vision.metrics import Ranked, class_metrics, compare_classes, rank


def test_a_rank_is_the_place_in_a_stable_order():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 6, (200, 12)).astype(np.float32)  # many ties
    labels = rng.integers(0, 12, 200)
    ranked = rank(logits, labels)
    orders = np.argsort(-logits, axis=1, kind="stable").tolist()
    assert ranked.place.tolist() == [order.index(label) for order, label in zip(orders, labels, strict=True)]
    assert ranked.first.tolist() == [order[0] for order in orders]
    assert class_metrics(ranked) == {
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
    report = compare_classes({"fp32": fp32, "int8": int8, "bf16": fp32})
    lost = float(np.mean(moved & (fp32.place == 0)))
    assert report["metrics"]["int8"]["top1"] == pytest.approx(report["metrics"]["fp32"]["top1"] - lost)
    assert report["difference"] == {
        "top1": pytest.approx(-lost),
        "top5": pytest.approx(-float(np.mean(moved & (fp32.place < 5)))),
        "agreement": pytest.approx(1 - moved.mean()),
    }
    low, high = report["interval"]["top1"]
    wide = 2 * 1.96 * np.sqrt(lost * (1 - lost) / 4000)  # the normal one
    assert low < -lost < high and high - low == pytest.approx(wide, rel=0.15)
    assert report["others"]["bf16"]["difference"] == {"top1": 0, "top5": 0, "agreement": 1}
    assert report["others"]["bf16"]["interval"]["top5"] == [0, 0]
    assert report == compare_classes({"fp32": fp32, "int8": int8, "bf16": fp32})


def test_no_images_have_no_accuracy():
    with pytest.raises(RequestError, match="found no images"):
        compare_classes({"fp32": Ranked(np.zeros(0, np.int64), np.zeros(0, np.int64))})
