"""Tests of the search of the prior's strength."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.analysis.metrics import auc
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training import fitting

STRENGTHS = (10.0, 1000.0, 20000.0)


def epoch(parts):
    return {"epoch": 1, "auc": float(np.nanmean(parts)), fitting.AUC_OF_PARTS: list(parts)}


def searched(trials, min_delta=0.0001):
    """(strength of the winner, number of trials) of a search whose trials have these AUCs of parts."""
    config = TrainConfig(l2_embeddings=STRENGTHS, min_delta=min_delta)

    class Given(fitting.Fitting):
        def fit(self, state, rows, epochs, l2):
            state |= {"best": epoch(trials[state["trial"]]), "best_weights": "", "history": []}
            return SimpleNamespace(group=SimpleNamespace(rank=0))

    state = {"trial": 0, "winner": {}, **fitting.new_trial()}
    Given(None, None, None, config, None, None, None, None).search(state, 10)
    return state["winner"]["l2"], state["trial"]


EVEN = np.full(10, 0.7)
SCATTER = np.array([0.03, -0.03] * 5)  # its standard error over ten parts is 0.01


def test_a_gain_within_its_error_keeps_the_first_strength(capsys):
    assert searched([EVEN, EVEN + 0.008 + SCATTER]) == (10.0, 2)
    assert "l2_embeddings 1000: AUC +0.0080 (standard error 0.0100); 10 is kept" in capsys.readouterr().err


def test_a_gain_beyond_its_error_is_kept():
    assert searched([EVEN, EVEN + 0.012 + SCATTER, EVEN + 0.012 + SCATTER]) == (1000.0, 3)
    assert searched([EVEN + SCATTER, EVEN + SCATTER + 0.001, EVEN + SCATTER + 0.002]) == (
        20000.0,
        3,
    )  # of equal scatter
    assert searched([EVEN, EVEN + 0.004, EVEN + 0.008], min_delta=0.005) == (10.0, 2)


def test_parts_without_both_labels_say_nothing():
    assert fitting.gain_error(epoch([np.nan] * 9 + [0.8]), epoch(EVEN)) == 0
    assert fitting.gain_error({"auc": 0.8}, epoch(EVEN)) == 0
    error = fitting.gain_error(epoch([np.nan, *(EVEN + SCATTER)[1:]]), epoch(EVEN))
    assert error == pytest.approx(np.std(SCATTER[1:], ddof=1) / 3)


@pytest.mark.parametrize("weighted", [False, True])
def test_auc_of_parts(weighted):
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 205).astype(np.float64), random.random(205)
    labels[:21] = 1
    weights = random.random(205).astype(np.float32) if weighted else None
    aucs = fitting.auc_of_parts(labels, scores, weights)
    assert np.isnan(aucs[0]) and len(aucs) == fitting.PARTS
    part = slice(185, 205)
    wanted = auc(labels[part], scores[part], None if weights is None else weights[part].astype(np.float64))
    assert aucs[-1] == pytest.approx(wanted)


def test_auc_of_parts_of_several_labels():
    random = np.random.default_rng(1)
    labels, scores = random.integers(0, 2, (400, 2)).astype(np.float64), random.random((400, 2))
    labels[:200, 1] = np.nan  # known for half of the rows
    both = fitting.auc_of_parts(labels, scores)
    alone = [fitting.auc_of_parts(labels[labels[:, k] >= 0, k], scores[labels[:, k] >= 0, k]) for k in (0, 1)]
    assert both == pytest.approx(np.mean(alone, axis=0))
