"""Wide & Deep on rows of Criteo's form made smaller: units and columns that go, a teacher's labels, a strategy."""

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json

torch = pytest.importorskip("torch", reason="needs the train extra")

from helpers.trainings import assert_same_weights  # noqa: E402

from zoo.api import compression  # noqa: E402
from zoo.recommenders.training.distillation import Teacher  # noqa: E402
from zoo.recommenders.training.pruning import PrunableRecommender  # noqa: E402

SIZES = {"numeric": "3", "categorical": "2", "buckets": "50", "embedding_size": "32", "hidden": "64,48"}


@pytest.fixture(scope="module")
def start(tmp_path_factory, log):
    folder = tmp_path_factory.mktemp("start") / "model"
    settings = SIZES | {"batch_size": "64", "held_out": "0.25", "epochs": "2", "learning_rate": "0.01"}
    zoo.train("wide-deep", log, folder, settings=settings | {"refit": "false"})
    return folder


@pytest.fixture
def model(start, log):
    return PrunableRecommender(zoo.load(start), log, config=zoo.load(start).entry.finetune_config())


def held_out(model):
    return next(model.log.parts(model.split, len(model.log)))


def logits(network, rows):
    with torch.no_grad():
        return network(rows["ids"], rows["numbers"], rows["scales"]).numpy()


def test_the_groups_are_layers_and_columns_of_each_table(model):
    assert model.groups == {"embeddings": 32, "deep.0": 64, "deep.3": 48}
    assert [len(group) for group in model.units.groups.values()] == [2, 1, 1]


def test_units_that_are_silent_go_first_and_change_nothing(model):
    network, rows = model.network, held_out(model)
    with torch.no_grad():
        for k in (0, 3):
            network.deep[k].weight[5:21] = 0
            network.deep[k].bias[5:21] = 0
        network.embeddings.table(0)[:, :16] = 0
        network.embeddings.table(1)[:, 16:] = 0  # other columns in each table
    config, smaller = model._pruned({"deep.0": 48, "deep.3": 32, "embeddings": 16})
    assert (config.hidden, config.embedding_size) == ((48, 32), 16)
    assert [list(layer.weight.shape) for layer in smaller.deep if hasattr(layer, "weight")] == [
        [48, 35],
        [32, 48],
        [1, 32],
    ]
    np.testing.assert_allclose(logits(smaller, rows), logits(network, rows), atol=1e-5)


def test_a_teacher_gives_a_share_of_the_label_and_must_read_the_same(start, model):
    teacher, rows = Teacher(str(start), model.features.to_json(), 0.25), held_out(model)
    batch = {name: rows[name].numpy() for name in ("ids", "numbers")}
    expected = zoo.pipeline(start, "fp32", "onnxruntime").predict(batch)["probability"][:, 0]
    labels = rows["label"].numpy()
    np.testing.assert_allclose(teacher.labels(batch, labels), 0.75 * labels + 0.25 * expected, atol=1e-6)
    with pytest.raises(RequestError, match="of another preprocessing"):
        Teacher("wide-deep-criteo", model.features.to_json(), 0.25)
    with pytest.raises(RequestError, match="of the task images"):
        Teacher("mobilenet-v1-cifar10", model.features.to_json(), 0.25)


def test_a_model_of_0_2_0_is_a_teacher_of_those_that_read_the_same():
    from zoo.recommenders.data.features import Features

    schema = Features.from_json(zoo.load("wide-deep-criteo").preprocessing).to_json()
    assert "schema" in schema
    assert Teacher("wide-deep-criteo", schema, 0.25)._read is None


def test_buckets_have_no_rows_that_go(start, log, tmp_path):
    with pytest.raises(RequestError, match=r"no column whose rows can be pruned, only C1 \(hash-bucket\)"):
        zoo.finetune(start, log, tmp_path / "m", prune="rows=5", settings={"held_out": "0.25", "epochs": "1"})


def test_a_strategy_leaves_a_smaller_model_and_goes_on_to_the_same(start, log, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "TIMED", 0.05)
    settings = {"batch_size": "64", "held_out": "0.25", "teacher": str(start), "epochs": "2"}
    options = {"prune": "ratio=.4", "drop": 1.0}
    log_of = zoo.finetune(start, log, tmp_path / "whole", settings=dict(settings), **options)
    assert [step["step"] for step in log_of["steps"]] == ["1-prune-distil"]
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


def test_it_trains_with_the_rounding_of_int8(start, log, tmp_path):
    settings = {"qat": "true", "held_out": "0.25", "epochs": "1", "learning_rate": "0.0001"}
    zoo.finetune(start, log, tmp_path / "m", settings=settings)
    zoo.build(tmp_path / "m")
    report = zoo.evaluate(tmp_path / "m", str(log), engine="onnxruntime")
    assert report["difference"]["max_probability"] < 0.02
