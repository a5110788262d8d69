"""Training of Wide & Deep on small planted logs."""

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, sha256
from zoo.recommenders.criteo import checkpoint
from zoo.recommenders.criteo.data import Rows, read_rows
from zoo.recommenders.criteo.features import Features

training = pytest.importorskip("zoo.recommenders.criteo.train", reason="needs the train extra")
freezing = pytest.importorskip("zoo.recommenders.criteo.freeze")
row_store = importlib.import_module("zoo.recommenders.criteo.row_store")
from helpers.wide_deep_training import (  # noqa: E402
    COUNTS,
    MADE,
    TINY,
    assert_same_weights,
    record_of,
    weights_of,
    write_log,
)

train, TRAIN, FINETUNE, TrainConfig = training.train, training.TRAIN, training.FINETUNE, training.TrainConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory, log):
    """(folder, metrics) of a finished run with TINY."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, train(log, folder, config=TINY)


def test_the_model_is_the_paper_s():
    features = Features((0.0,) * 3, (1.0,) * 3, (0.0,) * 3, **COUNTS)
    model = training.build_model(features, TINY)
    random = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(random.normal(size=variable.shape))
    w = {variable.path: variable.numpy().astype(np.float64) for variable in model.weights}
    assert {name: array.shape for name, array in w.items() if "C" not in name} == {
        "hidden_0/kernel": (2 * 4 + 3, 8),
        "hidden_0/bias": (8,),
        "hidden_1/kernel": (8, 6),
        "hidden_1/bias": (6,),
        "deep_logit/kernel": (6, 1),
        "deep_logit/bias": (1,),
    }
    assert sorted(name for name in w if "C" in name) == sorted(
        f"{part}/C{i}/{kind}" for part, kind in (("deep", "embeddings"), ("wide", "weights")) for i in (1, 2)
    )
    ids = random.integers(0, 50, (5, 2)).astype(np.int32)
    numbers = random.random((5, 3)).astype(np.float32)
    x = np.concatenate([*(w[f"deep/C{i + 1}/embeddings"][ids[:, i]] for i in range(2)), numbers], axis=1)
    for k in range(2):
        x = np.maximum(x @ w[f"hidden_{k}/kernel"] + w[f"hidden_{k}/bias"], 0)
    logit = (
        x @ w["deep_logit/kernel"]
        + w["deep_logit/bias"]
        + sum(w[f"wide/C{i + 1}/weights"][ids[:, i]] for i in range(2))
    )
    np.testing.assert_allclose(model([ids, numbers], training=False).numpy(), 1 / (1 + np.exp(-logit)), rtol=1e-5)


@pytest.mark.parametrize("hidden", [(8, 6), (12,)])
def test_neurons_are_numbered_by_activity(hidden):
    features = Features((0.0,) * 3, (1.0,) * 3, (0.0,) * 3, **COUNTS)
    model = training.build_model(features, replace(TINY, hidden=hidden))
    random = np.random.default_rng(1)
    for variable in model.weights:
        variable.assign(random.normal(size=variable.shape))
    samples = {"ids": random.integers(0, 50, (300, 2)).astype(np.int32), "numbers": random.random((300, 3), np.float32)}

    def active(layer):
        values = np.asarray(training.keras.Model(model.inputs, model.get_layer(layer).output)(list(samples.values())))
        return (values > values.max() / 512).mean(axis=0)

    before, unsorted = np.asarray(model(list(samples.values()))), active("hidden_0")
    training.sort_neurons(model, samples)
    np.testing.assert_allclose(np.asarray(model(list(samples.values()))), before, rtol=1e-4, atol=1e-6)
    for k in range(len(hidden)):
        assert (np.diff(active(f"hidden_{k}")) <= 0).all()
    assert (np.diff(unsorted) > 0).any()
    np.testing.assert_allclose(np.sort(active("hidden_0")), np.sort(unsorted))


def test_the_defaults_are_those_of_the_article():
    assert (TRAIN.numeric, TRAIN.categorical, TRAIN.buckets, TRAIN.embedding_size) == (13, 26, 1000, 32)
    assert TRAIN.hidden == (1024, 512, 256)
    assert FINETUNE.learning_rate < TRAIN.learning_rate


def test_a_run_leaves_its_files_and_nothing_else(trained, log):
    folder, metrics = trained
    assert {path.name for path in folder.iterdir()} == MADE
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["state.npz"]
    record = read_json(folder / "train.json")
    assert record["metrics"] == metrics and set(metrics) == {"auc", "logloss", "accuracy"}
    assert record["rows"] == {"train": 300, "held_out": 100, "final": 400, "left_out": 0}
    assert record["trained_rows"] == 3 * 300 + record["epochs"] * 400
    assert (
        record["seconds"].keys() == {"read", "wait", "step", "evaluate", "save"} and min(record["seconds"].values()) > 0
    )
    assert record["data"] == [{"file": "log.tsv", "sha256": sha256(log)}]
    assert Features.from_json(record["features"]).buckets == 50
    assert [each["epoch"] for each in record["history"]] == [1, 2, 3]
    best = min(record["history"], key=lambda each: each["logloss"])
    assert (record["epochs"], metrics["logloss"]) == (best["epoch"], best["logloss"])
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert str(log.parent) not in json.dumps(record)


def test_statistics_come_from_the_training_rows_alone(trained, log):
    numbers = Rows.concatenate(list(read_rows(log, **COUNTS)))[slice(0, 300)].numbers
    features = Features.from_json(read_json(trained[0] / "train.json")["features"])
    np.testing.assert_allclose(features.hi, np.log1p(np.nanmax(numbers, axis=0)), rtol=1e-6)


def test_calibration_samples_are_distinct_training_rows(tmp_path, log, monkeypatch):
    monkeypatch.setattr(training, "CALIBRATION_ROWS", 50)
    train(log, tmp_path / "m", config=replace(TINY, epochs=1, refit=False))
    features = Features.from_json(read_json(tmp_path / "m" / "train.json")["features"])
    inputs = features.encode(Rows.concatenate(list(read_rows(log, **COUNTS)))[slice(0, 300)])
    rows = {(*ids.tolist(), *numbers.tolist()) for ids, numbers in zip(inputs["ids"], inputs["numbers"], strict=True)}
    with np.load(tmp_path / "m" / "calibration.npz") as file:
        assert sorted(file.files) == ["ids", "numbers"]
        assert (file["ids"].dtype, file["numbers"].dtype, file["ids"].shape) == (np.int32, np.float32, (50, 2))
        drawn = {(*ids.tolist(), *numbers.tolist()) for ids, numbers in zip(file["ids"], file["numbers"], strict=True)}
    assert len(drawn) == 50 and drawn <= rows


def test_training_learns(tmp_path, log):
    metrics = train(log, tmp_path / "m", config=replace(TINY, epochs=12, patience=12, refit=False))
    history = read_json(tmp_path / "m" / "train.json")["history"]
    assert metrics["auc"] > 0.7
    assert history[-1]["train_logloss"] < history[0]["train_logloss"] - 0.1


def test_refit_sees_the_held_out_rows(tmp_path, log):
    """Buckets that occur in held-out rows only keep their first wide weight, 0, unless the rows are trained on."""
    lines = log.read_text().splitlines()
    lines[-40:] = [line.rpartition("\t")[0] + "\tnew" for line in lines[-40:]]
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(lines) + "\n")
    bucket = int(Rows.concatenate(list(read_rows(path, **COUNTS))).ids[-1, 1])
    for refit in (False, True):
        train(path, tmp_path / str(refit), config=replace(TINY, epochs=1, refit=refit))
        assert (weights_of(tmp_path / str(refit))["wide/C2/weights"][bucket, 0] != 0) == refit


@pytest.mark.parametrize("from_start", [False, True])
def test_the_prior_pulls_the_whole_table(from_start):
    """To 0, or to the weights that training started from; without it a bucket that never occurs stays where it is."""
    features = Features((0.0,) * 3, (1.0,) * 3, (0.0,) * 3, **COUNTS)
    start = (
        {each.path: np.full(each.shape, 0.03, np.float32) for each in training.build_model(features, TINY).weights}
        if from_start
        else None
    )
    batch = np.ones((8, 2), np.int32), np.ones((8, 3), np.float32), np.ones(8, np.float32)
    for strength in (0.0, 1000.0):
        trainer = training.Trainer(
            features, replace(TINY, l2_embeddings=strength, learning_rate=1e-3), 100, start, training.Workers()
        )
        table = next(each for each in trainer.model.weights if each.path == "deep/C1/embeddings")
        before = table.numpy()
        table.assign(before + 0.05)
        for _ in range(10):
            trainer.step(*batch, 8)
        moved = (before + 0.05 - table.numpy())[2:]  # rows that never occur
        if strength:
            toward = np.sign(0.05 if from_start else before[2:] + 0.05)
            far = np.abs(before[2:] + 0.05) > 0.02
            assert (moved * toward > 0.005)[far].all() and far.any()
        else:
            np.testing.assert_array_equal(moved, 0)


def test_one_seed_gives_the_same_weights(tmp_path, log, trained):
    assert train(log, tmp_path / "again", config=TINY) == trained[1]
    assert_same_weights(tmp_path / "again", trained[0])
    assert (tmp_path / "again" / "model.weights.h5").read_bytes() == (trained[0] / "model.weights.h5").read_bytes()
    features = Features.from_json(read_json(trained[0] / "train.json")["features"])
    first, second = (
        training.Trainer(features, replace(TINY, seed=seed), 300, None, training.Workers()).model.get_weights()
        for seed in (0, 1)
    )
    assert any((a != b).any() for a, b in zip(first, second, strict=True))


STEPS = 5  # of an epoch of TINY's search, 7 of its refit


@pytest.mark.parametrize(
    ("steps", "every"),  # step in which the run is interrupted, seconds between checkpoints within an epoch
    [
        pytest.param(2, 1e9, marks=pytest.mark.slow),  # in the first epoch: from the start
        (2 * STEPS + 2, 1e9),  # in the search: from the end of epoch 2
        (STEPS + 3, 0.0),  # from the middle of epoch 2
        (3 * STEPS + 4, 0.0),  # in the refit
    ],
)
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, log, trained, monkeypatch, steps, every):
    made, calls, resumed = training.Trainer.__init__, 0, []

    def interrupted(self, *arguments):
        made(self, *arguments)
        step = self.step

        def counted(*batch):
            nonlocal calls
            calls += 1
            if calls == steps + 1:
                raise KeyboardInterrupt
            return step(*batch)

        self.step = counted

    folder = tmp_path / "m"
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", every)
    monkeypatch.setattr(training.Trainer, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(log, folder, config=TINY)
    assert {path.name for path in folder.iterdir()} == {"checkpoint"}
    calls, whole = -1000, calls
    whole_run = row_store.RowStore.batches
    monkeypatch.setattr(
        row_store.RowStore,
        "batches",
        lambda self, *a, skip, **b: resumed.append(skip) or whole_run(self, *a, skip=skip, **b),
    )
    assert train(log, folder, config=TINY, resume=True) == trained[1]
    assert resumed[0] == (0 if every else (whole - 1) % STEPS if steps < 3 * STEPS else steps - 3 * STEPS)
    assert record_of(folder) == {**record_of(trained[0]), "trained_rows": record_of(folder)["trained_rows"]}
    if not every:
        assert record_of(folder) == record_of(trained[0])  # no step was done twice
    assert_same_weights(folder, trained[0])


def test_resuming_a_finished_run_changes_nothing(trained, log):
    before = weights_of(trained[0])
    assert train(log, trained[0], config=TINY, resume=True) == trained[1]
    for name, array in weights_of(trained[0]).items():
        np.testing.assert_array_equal(array, before[name])


def test_patience_ends_the_search(tmp_path, log):
    train(log, tmp_path / "m", config=replace(TINY, epochs=30, patience=2, min_delta=0.01, refit=False))
    record = read_json(tmp_path / "m" / "train.json")
    losses = [each["logloss"] for each in record["history"]]
    best = record["epochs"] - 1
    assert len(losses) == best + 3 < 30
    assert min(losses[best + 1 :]) >= losses[best] - 0.01 and losses[best] < min([9.0, *losses[:best]]) - 0.01
    assert record["metrics"]["logloss"] == losses[best]


def refusal(*arguments, error=RequestError, **options) -> str:
    with pytest.raises(error) as caught:
        train(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_resuming_another_run_is_refused(tmp_path, trained, log):
    folder = trained[0]
    message = refusal(log, folder, config=replace(TINY, dropout=0.5), resume=True)
    assert "dropout" in message and "0.5" in message and "patience" not in message
    assert "data" in refusal(write_log(tmp_path / "other.tsv", seed=1), folder, config=TINY, resume=True)
    assert "resume" in refusal(log, tmp_path / "nothing", config=TINY, resume=True)
    assert not (tmp_path / "nothing").exists()
    broken = tmp_path / "broken" / "checkpoint" / "state.npz"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no zip")
    assert "state.npz" in refusal(log, tmp_path / "broken", config=TINY, resume=True)


def test_a_folder_in_use_is_refused(tmp_path, log):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    assert "used" in refusal(log, tmp_path / "used", config=TINY)
    assert "mine.txt" in refusal(log, tmp_path / "used" / "mine.txt", config=TINY)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]


def test_unusable_data_is_refused(tmp_path, log):
    assert "without labels" in refusal(
        write_log(tmp_path / "unlabelled.tsv", labelled=False), tmp_path / "m", config=TINY
    )
    lines = log.read_text().splitlines()
    one_class = tmp_path / "one.tsv"
    one_class.write_text("\n".join([*lines[:-100], *("0" + line[1:] for line in lines[-100:])]) + "\n")
    assert "only label 0" in refusal(one_class, tmp_path / "m", config=TINY)
    assert "400 rows" in refusal(log, tmp_path / "m", config=replace(TINY, validation=400))
    assert not (tmp_path / "m").exists()


def test_bad_rows_can_be_left_out(tmp_path, log):
    path = tmp_path / "log.tsv"
    path.write_text("not\ta row\n".join(log.read_text().splitlines(keepends=True)[:200]))
    assert "log.tsv" in refusal(path, tmp_path / "m", config=TINY)
    train(path, tmp_path / "m", config=replace(TINY, epochs=1, refit=False), on_error="skip")
    assert read_json(tmp_path / "m" / "train.json")["rows"]["left_out"] == 199


def test_settings_out_of_range_are_all_named():
    with pytest.raises(RequestError) as caught:
        TrainConfig(dropout=1.0, batch_size=0, hidden=(8, 0))
    assert all(name in str(caught.value) for name in ("dropout", "batch_size", "hidden"))
    assert "ema" not in str(caught.value)


def test_diverging_training_stops(tmp_path, log):
    message = refusal(log, tmp_path / "m", error=ZooError, config=replace(TINY, learning_rate=1e38))
    assert "diverged" in message and "learning_rate" in message


def test_data_larger_than_a_block_trains(tmp_path, log, trained, monkeypatch):
    monkeypatch.setattr(row_store, "CHUNK_ROWS", 20)
    monkeypatch.setattr(row_store, "BLOCK_ROWS", 96)
    config = replace(TINY, epochs=1, refit=False)
    train(log, tmp_path / "m", config=config)
    assert read_json(tmp_path / "m" / "train.json")["rows"] == {
        **read_json(trained[0] / "train.json")["rows"],
        "final": 300,
    }


def test_data_sets_and_pipes_train_like_files(tmp_path, log, trained, monkeypatch):
    """What can be read only once, or costs a download every time, is read once."""
    datasets = pytest.importorskip("datasets")
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    names = ["label", "I1", "I2", "I3", "C1", "C2"]
    columns = {
        name: [row[i] if name[0] == "C" else int(row[i]) if row[i] else None for row in rows]
        for i, name in enumerate(names)
    }
    saved = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "saved"))
    opened = []

    def load_dataset(name, split=None, streaming=False):
        opened.append((name, split, streaming))
        return saved.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    for number, source in enumerate((f"{tmp_path / 'saved'}:train", "someone/clicks:train")):
        assert train(source, tmp_path / str(number), config=TINY) == trained[1]
        assert_same_weights(tmp_path / str(number), trained[0])
    assert opened == [("someone/clicks", "train", True)]


def test_finetuning_starts_from_a_model_and_keeps_its_preprocessing(tmp_path, trained):
    folder = trained[0]
    freezing.freeze(folder)
    own = write_log(tmp_path / "own.tsv", rows=120, seed=5)
    still = replace(FINETUNE, learning_rate=1e-12, epochs=1)
    train(own, tmp_path / "still", config=still, start_from=folder)
    record = read_json(tmp_path / "still" / "train.json")
    assert record["features"] == read_json(trained[0] / "train.json")["features"]
    assert (record["config"]["hidden"], record["config"]["embedding_size"], record["config"]["buckets"]) == (
        [8, 6],
        4,
        50,
    )
    for name, array in weights_of(folder).items():
        found = weights_of(tmp_path / "still")[name]
        if "/C" not in name:  # neurons are numbered anew, by their activity on the own data
            found, array = np.sort(found, axis=None), np.sort(array, axis=None)
        np.testing.assert_allclose(found, array, atol=1e-6, err_msg=name)
    refused = refusal(own, tmp_path / "still", config=still, resume=True)
    assert "start" in refused


def test_starting_from_something_else_is_refused(tmp_path, trained, log):
    import onnx

    other = tmp_path / "other"
    other.mkdir()
    assert "card.json" in refusal(log, tmp_path / "m", start_from=other)
    (other / "train.json").write_bytes((trained[0] / "train.json").read_bytes())
    assert "fp32.onnx" in refusal(log, tmp_path / "m", start_from=other)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8),
        other / "fp32.onnx",
    )
    assert "no Wide & Deep" in refusal(log, tmp_path / "m", start_from=other)
    assert not (tmp_path / "m").exists()


def test_a_pipe_gets_a_line_an_epoch_and_no_bars(tmp_path, log, capfd):
    train(log, tmp_path / "m", config=replace(TINY, epochs=1, refit=False))
    out, err = capfd.readouterr()
    assert out == "" and re.fullmatch(
        r"(search: epoch \d+/\d+  LogLoss \d\.\d{4}  held out \d\.\d{4}  AUC \d\.\d{4}\n)+", err
    ), err


@pytest.mark.slow
@pytest.mark.data
def test_the_recipe_on_real_rows(tmp_path):
    path = Path(os.environ.get("ZOO_SHARED", "../shared")) / "data/criteo/criteo_10390.tsv"
    if not path.is_file():
        pytest.skip(f"needs {path} ($ZOO_SHARED)")
    metrics = train(path, tmp_path / "m", config=replace(TRAIN, refit=False))
    assert metrics["auc"] > 0.747 and metrics["logloss"] < 0.484
