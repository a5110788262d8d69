"""Wide & Deep made smaller: units and columns that go, a teacher's labels, a strategy from end to end."""

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json

pytest.importorskip("zoo.recommenders.criteo.train", reason="needs the train extra")

from helpers.wide_deep_training import assert_same_weights, write_log

from zoo.api import compression
from zoo.recommenders.criteo import pruning
from zoo.recommenders.criteo.train import FINETUNE
from zoo.recommenders.training.distillation import Teacher

SIZES = {"numeric": "3", "categorical": "2", "buckets": "50", "embedding_size": "32", "hidden": "64,48"}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("data") / "log.tsv")


@pytest.fixture(scope="module")
def start(tmp_path_factory, log):
    folder = tmp_path_factory.mktemp("start") / "model"
    settings = SIZES | {"batch_size": "64", "validation": "0.25", "epochs": "2", "learning_rate": "0.01"}
    zoo.train("wide-deep", log, folder, settings=settings | {"refit": "false"})
    return folder


@pytest.fixture
def model(start, log):
    return pruning.PrunableRows(zoo.load(start), log, config=FINETUNE)


def test_what_is_computed_here_is_what_the_graph_computes(model, start):
    found = 1 / (1 + np.exp(-pruning._forward(model.network, model.held)[0]))
    wanted = zoo.pipeline(start, "fp32").predict({"ids": model.held.ids, "numbers": model.held.numbers})
    np.testing.assert_allclose(found, wanted["probability"][:, 0], atol=1e-5)


def test_importance_is_the_first_order_change_of_the_loss(model):
    """Against differences of the loss where a unit gives a little less."""
    network, batch = model.network, model.held
    scores = pruning._importances(network, batch, "taylor")["hidden_1"]

    def losses(kernel):
        logits = pruning._forward(network._replace(kernels=[*network.kernels[:-1], kernel]), batch)[0].astype(
            np.float64
        )
        return np.logaddexp(0, logits) - batch.labels * logits

    step = 1e-3
    for unit in range(3):
        less = network.kernels[-1].astype(np.float64)
        less[unit] *= 1 - step
        change = (losses(less) - losses(network.kernels[-1].astype(np.float64))) / step
        assert np.square(change).mean() == pytest.approx(scores[unit], rel=0.02, abs=1e-9)


def test_units_that_are_silent_go_first_and_change_nothing(model):
    own = model.network
    kernels, biases = [each.copy() for each in own.kernels], [each.copy() for each in own.biases]
    model.network = own._replace(tables=own.tables.copy(), kernels=kernels, biases=biases)
    for k in (0, 1):
        model.network.kernels[k][:, 5:21] = 0
        model.network.biases[k][5:21] = 0
    model.network.tables[0, :, :16] = 0
    model.network.tables[1, :, 16:] = 0  # other columns in each table
    smaller = model._cut({"hidden_0": 48, "hidden_1": 32, "embedding": 16})
    assert [each.shape for each in smaller.kernels] == [(2 * 16 + 3, 48), (48, 32), (32, 1)]
    before, after = (pruning._forward(each, model.held)[0] for each in (model.network, smaller))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_a_teacher_gives_a_share_of_the_label_and_must_read_the_same(start, model):
    teacher = Teacher(str(start), model.features.to_json(), 0.25)
    batch = {"ids": model.held.ids, "numbers": model.held.numbers}
    expected = zoo.pipeline(start, "fp32", "onnxruntime").predict(batch)["probability"][:, 0]
    np.testing.assert_allclose(
        teacher.labels(batch, model.held.labels), 0.75 * model.held.labels + 0.25 * expected, atol=1e-6
    )
    with pytest.raises(RequestError, match="of another preprocessing"):
        Teacher("wide-deep-criteo", model.features.to_json(), 0.25)
    with pytest.raises(RequestError, match="of the task images"):
        Teacher("mobilenet-v1-cifar10", model.features.to_json(), 0.25)


def test_a_strategy_leaves_a_smaller_model_and_goes_on_to_the_same(start, log, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "TIMED", 0.05)
    settings = {"batch_size": "64", "validation": "0.25", "teacher": str(start), "epochs": "2"}
    options = {"prune": "ratio=.4", "drop": 1.0}
    log_of = zoo.finetune(start, log, tmp_path / "whole", settings=dict(settings), **options)
    assert [each["step"] for each in log_of["steps"]] == ["1-prune-distil"]
    sizes = read_json(tmp_path / "whole/train.json")["config"]
    assert sum([*sizes["hidden"], sizes["embedding_size"]]) <= 0.6 * (64 + 48 + 32)
    assert log_of["steps"][0]["bytes"] < log_of["base"]["bytes"]

    def ended(*arguments):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compression._Run, "speed", ended)  # after the training of the step
        zoo.finetune(start, log, tmp_path / "parts", settings=dict(settings), **options)
    zoo.finetune(start, log, tmp_path / "parts", settings=dict(settings), **options, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert (tmp_path / "whole/sensitivity.json").read_bytes() == (tmp_path / "parts/sensitivity.json").read_bytes()
