"""Sample weights: they choose the epoch, and weight the held-out metrics and those of an evaluation."""

import json

import numpy as np
import pytest
from helpers.click_logs import written

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders.metrics import logloss

pytest.importorskip("torch", reason="needs the train extra")
from zoo.recommenders.training.fitting import shifted_logloss

SMALL = {"hidden": "16,8", "embedding_size": "8", "refit": "false", "batch_size": "128", "l2_embeddings": "10"}


@pytest.mark.parametrize("shift", [-14.0, -8.0, -4.0, -2.5, 0.0, 2.5, 4.0, 8.0, 14.0])
@pytest.mark.parametrize("rate", [-5.0, 0.0, 3.0])
def test_the_shift_is_found_from_any_start(shift, rate):
    """Plain Newton steps leave for infinity from 2.5 below the root, or 4 above it."""
    random = np.random.default_rng(0)
    logits = random.normal(rate, 0.5, 4000)
    labels = (random.random(4000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    wanted = shifted_logloss(labels, 1 / (1 + np.exp(-logits)))
    assert wanted == pytest.approx(logloss(labels, 1 / (1 + np.exp(-logits))), abs=0.002)
    clipped = 0.02 if abs(shift + rate) > 14 else 1e-6  # probabilities are, at 1e-7
    assert shifted_logloss(labels, 1 / (1 + np.exp(-logits - shift))) == pytest.approx(wanted, abs=clipped)


def test_one_label_has_a_finite_loss():
    assert shifted_logloss(np.ones(3), np.array([0.1, 0.5, 0.9])) < 1e-6
    assert shifted_logloss(np.zeros(3), np.array([0.1, 0.5, 0.9])) < 1e-6


def sampled(path, count=20_000, seed=0):
    """Rows with 2% clicks, of which the others are kept 1 in 20 and weigh 20; and all rows, without weights."""
    random = np.random.default_rng(seed)
    of_user, of_item = random.normal(0, 1, 60), random.normal(0, 1, 20)
    users, items = random.integers(0, 60, count), random.integers(0, 20, count)
    clicks = random.random(count) < 1 / (1 + np.exp(5.2 - of_user[users] - of_item[items]))
    kept = np.flatnonzero(clicks | (random.random(count) < 0.05))
    rows = {"click": clicks.astype(int), "user_id": [f"u{x}" for x in users], "item_id": [f"i{x}" for x in items]}
    every = written(path / "all.csv", **rows)
    subset = {name: [column[row] for row in kept] for name, column in rows.items()}
    return written(path / "some.csv", **subset, weight=[1 if clicks[row] else 20 for row in kept]), every


def test_only_rows_of_a_weight_above_0_are_both_labels(tmp_path):
    rows = {"click": [0, 1] * 45, "item_id": list("abc") * 30, "weight": [0, 1] * 45}
    with pytest.raises(
        RequestError, match="found only label 1 in the first 81 rows of a weight above 0, expected both"
    ):
        zoo.train("deepfm", written(tmp_path / "log.csv", **rows), tmp_path / "model", settings=SMALL)


def test_sampled_negatives_choose_the_epoch_and_are_evaluated_by_their_weights(tmp_path, caplog):
    subset, every = sampled(tmp_path)
    settings = {**SMALL, "epochs": "8", "learning_rate": "0.01", "ema": "0.9", "held_out": "0.3"}
    zoo.train("deepfm", subset, tmp_path / "model", settings=settings)
    record = json.loads((tmp_path / "model/train.json").read_text())
    shifted = [epoch["shifted"] for epoch in record["history"]]
    assert max(shifted) < 0.5 and len(set(shifted)) == len(shifted)  # once 13.3277 in every epoch
    assert shifted[record["epochs"] - 1] < min(shifted) + 2e-4 and record["metrics"]["auc"] > 0.75
    assert record["metrics"]["logloss"] < 0.2  # of 2% clicks, as the weights say, not 30%
    report = zoo.evaluate(tmp_path / "model", subset, engine="onnxruntime")
    assert report["weighted"] is True and report["metrics"]["int8"]["logloss"] < 0.2
    assert not caplog.records
    report = zoo.evaluate(tmp_path / "model", every, engine="onnxruntime")
    assert report["weighted"] is False and report["metrics"]["int8"]["logloss"] < 0.2
    assert "the rows lack the weight column of the model's training; the metrics are unweighted" in caplog.text
    with pytest.raises(RequestError, match="all.csv lacks the column weight"):  # of two logs, one has none
        zoo.evaluate(tmp_path / "model", [subset, every], engine="onnxruntime")
    with pytest.raises(RequestError, match="all.csv lacks the column weight"):
        zoo.train("deepfm", every, tmp_path / "other", settings=settings, schema=tmp_path / "model/schema.json")
