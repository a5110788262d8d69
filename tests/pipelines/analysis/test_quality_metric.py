"""Quality metrics of models."""

import re

import numpy as np
import pytest

from pipelines.analysis.quality_metric import OutputMetric
from pipelines.core.errors import RequestError


class Constant:
    """A session with this output."""

    def __init__(self, y):
        self.y, self.at = np.asarray(y), 0

    def run(self, batch):
        count = len(batch["x"])
        self.at += count
        return {"y": self.y[self.at - count : self.at]}


LOGITS = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 5.0]], np.float32)
SCORES = np.array([[0.1], [0.2], [0.3], [0.4]], np.float32)


@pytest.mark.parametrize(
    ("x", "y", "labels", "metric", "drop"),
    [
        (LOGITS, LOGITS[[0, 1, 2, 2]], None, "agreement", 0.25),
        (LOGITS, LOGITS[[0, 1, 2, 2]], np.array([0, 1, 0, 1]), "top1", 0.25),
        (LOGITS, LOGITS[[0, 1, 2, 2]], np.array([0, 1, 0, 0]), "top1", -0.25),
        (SCORES, SCORES * 1.1, None, "closeness", 0.1),
        (SCORES, SCORES[[2, 1, 0, 3]], np.array([0, 0, 1, 1]), "auc", 0.5),
        (SCORES, SCORES + 0.1, SCORES, "r2", 0.8),
    ],
)
def test_metrics(x, y, labels, metric, drop):
    measure = OutputMetric({"x": np.zeros((4, 1), np.float32)}, labels, batch_size=3)
    verdict = measure(Constant(x), Constant(y))
    assert measure.name == metric and verdict.drop == pytest.approx(drop, rel=1e-5)
    assert verdict.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), abs=0.006)


def test_labels_that_do_not_fit():
    with pytest.raises(RequestError, match="found 3 labels for 4 samples"):
        OutputMetric({"x": np.zeros((4, 1), np.float32)}, np.zeros(3))
    measure = OutputMetric({"x": np.zeros((4, 1), np.float32)}, np.zeros((4, 3)))
    with pytest.raises(RequestError, match=re.escape("found labels float64 [4, 3] for outputs [4, 2]; expected")):
        measure(Constant(LOGITS), Constant(LOGITS))


def test_nan_is_no_model_to_keep():
    assert (
        OutputMetric({"x": np.zeros((4, 1), np.float32)}, batch_size=4)(
            Constant(LOGITS), Constant(LOGITS * np.nan)
        ).drop
        == np.inf
    )
