"""Large tables in training: near dense steps, the same after a stop and in two processes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.trainings import TwoProcesses, assert_same_weights, weights

from zoo.training.runs import Processes

torch = pytest.importorskip("torch", reason="needs the train extra")
sparse_adam = importlib.import_module("zoo.recommenders.training.tables.sparse_adam")
layers = importlib.import_module("zoo.recommenders.models.layers")
training = importlib.import_module("zoo.recommenders.training.train")
deepfm = importlib.import_module("zoo.recommenders.models.deepfm")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[5]
RATE, EMA, ROWS, SIZE = 2e-3, 0.99, 40, 4
CONFIG = deepfm.DeepFMConfig(
    hidden=(16, 8), embedding_size=8, epochs=3, batch_size=128, l2_embeddings=(10.0, 1000.0), patience=1
)


def stepped(strength, share, steps, settled=0):
    """(lazy weights and average, dense ones) after steps whose gradients hold this share of the rows each."""
    generator = torch.Generator().manual_seed(0)
    begin, slope = (torch.randn(ROWS, SIZE, generator=generator) * scale for scale in (0.01, 1e-3))
    lazy, dense = (torch.nn.Parameter(begin.clone()) for _ in range(2))
    rows = sparse_adam.SparseAdam(lazy, RATE, strength, EMA, [3])
    averages, optimizer, nothing = [begin.clone(), begin.clone()], torch.optim.Adam([dense], RATE), torch.zeros(())
    for number in range(1, steps + 1):
        chosen = torch.nonzero(torch.rand(ROWS, generator=generator) < share)[:, 0]
        values = slope[chosen] + torch.randn(len(chosen), SIZE, generator=generator) * 1e-3
        lazy.grad = torch.sparse_coo_tensor(chosen[None], values, lazy.shape, check_invariants=False)
        rows.step(number, nothing, averages[0], Processes())
        dense.grad = strength * dense.detach()
        dense.grad[chosen] += values
        dense.grad[3] = 0
        optimizer.step()
        averages[1].lerp_(dense.detach(), 1 - min(EMA, (1 + number) / (10 + number)))
        if settled and number % settled == 0:
            rows.catch_up(number, nothing, averages[0])
    rows.catch_up(steps, nothing, averages[0])
    kept = torch.arange(ROWS) != 3
    return (lazy.detach()[kept], averages[0][kept]), (dense.detach()[kept], averages[1][kept])


def far(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("settled", [0, 7])
def test_rows_in_every_batch_are_adams(settled):
    lazy, dense = stepped(0.0, 1.1, 300, settled)
    for result, wanted in zip(lazy, dense, strict=True):
        assert far(result, wanted) < 1e-5


@pytest.mark.parametrize(("strength", "share", "bound"), [(0.0, 0.02, 0.03), (2e-5, 0.02, 0.05), (2e-3, 1.1, 0.05)])
def test_what_idle_rows_missed_is_made_up_for(strength, share, bound):
    lazy, dense = stepped(strength, share, 2000)
    for result, wanted in zip(lazy, dense, strict=True):
        assert float(wanted.norm()) > 0.5
        assert far(result, wanted) < bound


def test_a_prior_without_data_pulls_to_where_it_pulls():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    rows, start, average = (
        sparse_adam.SparseAdam(weight, RATE, 0.1, EMA, []),
        torch.full((3, 2), 0.25),
        torch.ones(3, 2),
    )
    weight.grad = torch.sparse_coo_tensor([[1]], torch.full((1, 2), 0.5), weight.shape, check_invariants=False)
    rows.step(1, start, average, Processes())
    rows.catch_up(30_000, start, average)
    torch.testing.assert_close(weight.detach(), start)
    torch.testing.assert_close(average, start, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    made = [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", "2000", "--users", "80", "--items", "50"]
    subprocess.run(made, check=True)
    return path


@pytest.mark.parametrize("at", [2, 5])
def test_resuming_gives_the_same_weights(log, tmp_path, monkeypatch, at, capsys):
    """Broken off in the search, and in the refit."""
    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    whole, broken, saves = tmp_path / "whole", tmp_path / "broken", []
    training.train(deepfm.DeepFM, str(log), whole, config=CONFIG)
    assert capsys.readouterr().err.count("a step changes the rows of its batch alone") == 1

    def save(*arguments):
        if len(saves) == at:
            raise KeyboardInterrupt
        saves.append(original(*arguments))

    original = torch.save
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", save)
        training.train(deepfm.DeepFM, str(log), broken, config=CONFIG)
    training.train(deepfm.DeepFM, str(log), broken, config=CONFIG, resume=True)
    assert_same_weights(whole, broken)


def dense_deepfm(features, config):
    model = deepfm.DeepFM(features, config)
    model.embeddings.large = model.order1.large = False
    return model


def test_dense_and_lazy_tables_learn_the_same(log, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    dense = training.train(dense_deepfm, str(log), tmp_path / "dense", config=CONFIG)
    lazy = training.train(deepfm.DeepFM, str(log), tmp_path / "lazy", config=CONFIG)
    assert dense != lazy
    assert lazy["logloss"] == pytest.approx(dense["logloss"], abs=0.01)


def in_processes(data: str, folder: str, *, resume: bool) -> None:
    layers.LARGE_ROWS = 0
    config = deepfm.DeepFMConfig(
        hidden=(8,), embedding_size=4, epochs=3, batch_size=256, l2_embeddings=(10.0,), refit=False, dropout=0.0
    )
    training.train(deepfm.DeepFM, data, folder, config=config, resume=resume)


@pytest.mark.slow
def test_two_processes_train_what_one_does(log, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    TwoProcesses("tests.zoo.recommenders.training.tables.test_sparse_adam", log, tmp_path).train(tmp_path / "two")
    in_processes(str(log), str(tmp_path / "one"), resume=False)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-3, rtol=0)


def test_finetuning_pulls_towards_the_weights_before(log, tmp_path, monkeypatch):
    import zoo

    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    settings = {"hidden": "8", "embedding_size": "4", "epochs": "1", "refit": "false", "batch_size": "256"}
    zoo.train("deepfm", str(log), tmp_path / "model", settings=settings)
    zoo.build(tmp_path / "model")
    zoo.finetune(tmp_path / "model", str(log), tmp_path / "tuned", settings={"epochs": "1", "refit": "false"})
    before, after = weights(tmp_path / "model"), weights(tmp_path / "tuned")
    assert 0 < max(float((before[name] - after[name]).abs().max()) for name in before) < 0.1
