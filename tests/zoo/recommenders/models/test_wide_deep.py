"""Training of Wide & Deep on rows of Criteo's form."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.criteo_logs import read

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, sha256
from zoo.recommenders.data.features import Features

torch = pytest.importorskip("torch", reason="needs the train extra")
from helpers.trainings import assert_same_weights  # noqa: E402
from helpers.wide_deep_training import (  # noqa: E402
    COUNTS,
    MADE,
    TINY,
    record_of,
    weights_of,
    write_log,
)

from zoo.recommenders import criteo  # noqa: E402
from zoo.recommenders.models import wide_deep as family  # noqa: E402
from zoo.recommenders.models.deepfm import DEEPFM  # noqa: E402
from zoo.recommenders.models.wide_deep import WIDE_DEEP, CriteoConfig, WideDeep, train  # noqa: E402
from zoo.recommenders.training import train as training  # noqa: E402
from zoo.recommenders.training.trainer import Trainer  # noqa: E402
from zoo.training.runs import Processes  # noqa: E402

OF_CRITEO = WIDE_DEEP.for_data(None, criteo.NAME)
CRITEO, CRITEO_FINETUNE = OF_CRITEO.train_config(), OF_CRITEO.finetune_config()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, log):
    """(folder, metrics) of a finished run with TINY."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, train(log, folder, config=TINY)


@pytest.fixture(scope="module")
def features(log):
    return Features(criteo.schema(log, **COUNTS))


def network(features, config=TINY, seed=0):
    model = WideDeep(features, config)
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape)).astype(np.float32)))
    return model.eval()


def some_inputs(rows, seed=1):
    random = np.random.default_rng(seed)
    ids, numbers = random.integers(0, 50, (rows, 2), np.int32), random.random((rows, 3), np.float32)
    return {"ids": ids, "numbers": numbers, "scales": np.zeros((rows, 0), np.float32)}


def tensors(inputs):
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


def test_the_model_is_the_paper_s(features):
    model, inputs = network(features), some_inputs(5)
    w = {name: tensor.numpy().astype(np.float64) for name, tensor in model.state_dict().items()}
    assert {name: array.shape for name, array in w.items()} == {
        "embeddings.weight": (2 * 50, 4),
        "wide.weight": (2 * 50, 1),
        "deep.0.weight": (8, 2 * 4 + 3),
        "deep.0.bias": (8,),
        "deep.3.weight": (6, 8),
        "deep.3.bias": (6,),
        "deep.6.weight": (1, 6),
        "deep.6.bias": (1,),
    }
    ids, numbers = inputs["ids"] + np.array([0, 50]), inputs["numbers"]
    x = np.concatenate([*(w["embeddings.weight"][ids[:, i]] for i in range(2)), numbers], axis=1)
    for k in (0, 3):
        x = np.maximum(x @ w[f"deep.{k}.weight"].T + w[f"deep.{k}.bias"], 0)
    logit = x @ w["deep.6.weight"].T + w["deep.6.bias"] + sum(w["wide.weight"][ids[:, i]] for i in range(2))
    with torch.no_grad():
        np.testing.assert_allclose(model(**tensors(inputs)).numpy(), logit, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [(8, 6), (12,)])
def test_neurons_are_ordered_by_activity(features, hidden):
    model, inputs = network(features, replace(TINY, hidden=hidden)), tensors(some_inputs(300))

    def active(layer):
        seen = []
        hook = model.deep[layer].register_forward_hook(lambda *arguments: seen.append(arguments[-1]))
        with torch.no_grad():
            model(**inputs)
        hook.remove()
        return (seen[0] > seen[0].max() / 512).float().mean(0).numpy()

    with torch.no_grad():
        before, unsorted = model(**inputs).numpy(), active(1)
        model.sort_neurons(inputs)
        np.testing.assert_allclose(model(**inputs).numpy(), before, rtol=1e-4, atol=1e-5)
    for k in range(len(hidden)):
        assert (np.diff(active(3 * k + 1)) <= 0).all()
    assert (np.diff(unsorted) > 0).any()
    np.testing.assert_allclose(np.sort(active(1)), np.sort(unsorted))


def test_the_defaults_are_those_of_the_article():
    assert (CRITEO.numeric, CRITEO.categorical, CRITEO.buckets, CRITEO.embedding_size) == (13, 26, 1000, 32)
    assert CRITEO.hidden == (1024, 512, 256)
    assert CRITEO_FINETUNE.learning_rate < CRITEO.learning_rate


def test_a_run_leaves_its_files_and_nothing_else(trained, log):
    folder, metrics = trained
    assert {path.name for path in folder.iterdir()} == MADE
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["state.pt"]
    record = read_json(folder / "train.json")
    assert record["metrics"] == metrics and set(metrics) == {"auc", "logloss", "accuracy"}
    assert record["rows"] == {"train": 300, "held_out": 100, "final": 400, "left_out": 0}
    assert record["data"] == [{"file": "log.tsv", "sha256": sha256(log)}]
    assert [epoch["epoch"] for epoch in record["history"]] == [1, 2, 3]
    assert str(log.parent) not in (folder / "train.json").read_text()
    schema = read_json(folder / "schema.json")
    assert schema["header"] is False and record["features"] == {"schema": schema}
    names = [column["name"] for column in schema["columns"]]
    assert names == ["label", "I1", "I2", "I3", "C1", "C2"]
    assert schema["columns"][4]["encoding"] == {"type": "hash-bucket", "buckets": 50}


def test_numbers_are_scaled_by_their_ranges_in_the_log(features, log):
    numbers = read(log, **COUNTS).numbers
    ranges = [(column.encoding["low"], column.encoding["high"], column.encoding["fill"]) for column in features.numbers]
    logs = np.log1p(np.array([np.nanmin(numbers, axis=0), np.nanmax(numbers, axis=0)]))
    np.testing.assert_allclose(ranges, np.column_stack([*logs, np.zeros(3)]), rtol=1e-6)


def test_calibration_samples_are_distinct_training_rows(tmp_path, log, features, monkeypatch):
    monkeypatch.setattr(training, "CALIBRATION_ROWS", 50)
    train(log, tmp_path / "m", config=replace(TINY, epochs=1, refit=False))
    (every,) = features.read(log)
    rows = {
        (*ids.tolist(), *numbers.tolist()) for ids, numbers in zip(every.ids[:300], every.numbers[:300], strict=True)
    }
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
    bucket = int(read(path, **COUNTS).ids[-1, 1])
    for refit in (False, True):
        train(path, tmp_path / str(refit), config=replace(TINY, epochs=1, refit=refit))
        assert (weights_of(tmp_path / str(refit))["wide.weight"][50 + bucket, 0] != 0) == refit


def test_buckets_have_no_unknown_one(tmp_path, log):
    """None is replaced in training, whatever the setting says, and none takes over another one's weights."""
    for unknown in (0.0, 0.5):
        train(log, tmp_path / str(unknown), config=replace(TINY, epochs=1, unknown=unknown))
    assert_same_weights(tmp_path / "0.0", tmp_path / "0.5")


@pytest.mark.parametrize("from_start", [False, True])
def test_the_prior_pulls_the_whole_table(features, from_start):
    """To 0, or to the weights that training started from; without it a bucket that never occurs stays where it is."""
    batch = tensors({"ids": np.ones((8, 2), np.int32), "numbers": np.ones((8, 3), np.float32)})
    batch |= {"scales": torch.zeros(8, 0), "label": torch.ones(8), "weight": torch.ones(8)}
    for strength in (0.0, 1000.0):
        config = replace(TINY, l2_embeddings=(strength,), learning_rate=1e-3)
        trainer = Trainer(WideDeep(features, config), config, 100, Processes())
        table = trainer.model.embeddings.weight
        if from_start:
            with torch.no_grad():
                table.fill_(0.03)
            trainer.center_priors()
        before = table.detach().numpy().copy()
        with torch.no_grad():
            table += 0.05
        for _ in range(10):
            trainer.step(batch, 8)
        moved = (before + 0.05 - table.detach().numpy())[2:50]  # rows that never occur
        if strength:
            toward = np.sign(0.05 if from_start else before[2:50] + 0.05)
            far = np.abs(before[2:50] + 0.05) > 0.02
            assert (moved * toward > 0.005)[far].all() and far.any()
        else:
            np.testing.assert_allclose(moved, 0, atol=1e-9)


def test_the_prior_is_as_strong_for_few_rows(features):
    few, log = (
        Trainer(WideDeep(features, conf), conf, 100, Processes()).strength for conf in (TINY, WIDE_DEEP.train_config())
    )
    assert few[0] == 10.0 * 2 / 100 and log[0] == 30.0 * 2 / 100_000


def test_one_seed_gives_the_same_weights(tmp_path, log, trained):
    assert train(log, tmp_path / "again", config=TINY) == trained[1]
    assert_same_weights(tmp_path / "again", trained[0])
    assert (tmp_path / "again" / "model.pt").read_bytes() == (trained[0] / "model.pt").read_bytes()


@pytest.mark.parametrize("epochs", [2, 4])  # in the search, in the refit
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, log, trained, monkeypatch, epochs):
    made, ended = Processes.checkpointed, []

    def interrupted(self, output):
        made(self, output)
        ended.append(output)
        if len(ended) == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(Processes, "checkpointed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(log, tmp_path / "m", config=TINY)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"checkpoint"}
    monkeypatch.undo()
    assert train(log, tmp_path / "m", config=TINY, resume=True) == trained[1]
    assert record_of(tmp_path / "m") == record_of(trained[0])
    assert_same_weights(tmp_path / "m", trained[0])


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


def test_a_folder_in_use_is_refused(tmp_path, log):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    assert "used" in refusal(log, tmp_path / "used", config=TINY)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]


def test_unusable_data_is_refused(tmp_path, log):
    unlabelled = write_log(tmp_path / "unlabelled.tsv", labelled=False)
    assert "without labels" in refusal(unlabelled, tmp_path / "m", config=TINY)
    lines = log.read_text().splitlines()
    one_class = tmp_path / "one.tsv"
    one_class.write_text("\n".join([*lines[:-100], *("0" + line[1:] for line in lines[-100:])]) + "\n")
    assert "only label 0" in refusal(one_class, tmp_path / "m", config=TINY)
    assert "400 rows" in refusal(log, tmp_path / "m", config=replace(TINY, held_out=400))
    assert not (tmp_path / "m").exists()


def test_bad_rows_can_be_left_out(tmp_path, log):
    path = tmp_path / "log.tsv"
    path.write_text("not\ta row\n".join(log.read_text().splitlines(keepends=True)[:200]))
    assert "log.tsv" in refusal(path, tmp_path / "m", config=TINY)
    train(path, tmp_path / "m", config=replace(TINY, epochs=1, refit=False), on_error="skip")
    assert read_json(tmp_path / "m" / "train.json")["rows"]["left_out"] == 199


def test_settings_out_of_range_are_all_named():
    with pytest.raises(RequestError) as caught:
        CriteoConfig(dropout=1.0, batch_size=0, hidden=(8, 0))
    assert all(name in str(caught.value) for name in ("dropout", "batch_size", "hidden"))
    assert "ema" not in str(caught.value)


def test_diverging_training_stops(tmp_path, log):
    message = refusal(log, tmp_path / "m", error=ZooError, config=replace(TINY, learning_rate=1e30))
    assert "diverged" in message and "learning_rate" in message


def test_a_pipe_trains_like_a_file(tmp_path, log, trained, monkeypatch):
    """Standard input, which can be read once, is read twice."""
    with log.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert train("-", tmp_path / "m", config=TINY) == trained[1]
    assert_same_weights(tmp_path / "m", trained[0])


def test_data_sets_train_like_files(tmp_path, log, trained):
    datasets = pytest.importorskip("datasets")
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    names = ["label", "I1", "I2", "I3", "C1", "C2"]
    columns = {
        name: [row[i] if name[0] == "C" else int(row[i]) if row[i] else None for row in rows]
        for i, name in enumerate(names)
    }
    saved = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "saved"))
    assert train(f"{tmp_path / 'saved'}:train", tmp_path / "m", config=TINY) == trained[1]
    assert_same_weights(tmp_path / "m", trained[0])


def test_a_schema_without_a_header_trains_a_family_of_any_log(tmp_path, log, features):
    features.schema.save(tmp_path / "schema.json")
    small = replace(
        DEEPFM.train_config(), embedding_size=4, hidden=(8,), epochs=2, l2_embeddings=(10.0,), held_out=0.25
    )
    metrics = DEEPFM.train(log, tmp_path / "m", config=small, schema=tmp_path / "schema.json")
    assert metrics["auc"] > 0.55
    assert read_json(tmp_path / "m" / "train.json")["features"] == {"schema": read_json(tmp_path / "schema.json")}


def test_finetuning_starts_from_a_model_and_keeps_its_preprocessing(tmp_path, trained):
    folder = trained[0]
    family.freeze(folder)
    own = write_log(tmp_path / "own.tsv", rows=120, seed=5)
    still = replace(CRITEO_FINETUNE, learning_rate=1e-12, epochs=1)
    train(own, tmp_path / "still", config=still, start_from=folder)
    record = read_json(tmp_path / "still" / "train.json")
    assert record["features"] == read_json(folder / "train.json")["features"]
    assert [record["config"][name] for name in ("hidden", "embedding_size", "buckets")] == [[8, 6], 4, 50]
    for name, array in weights_of(folder).items():
        weight = weights_of(tmp_path / "still")[name]
        if name.startswith("deep"):  # neurons are ordered anew, by their activity on the own data
            weight, array = np.sort(weight, axis=None), np.sort(array, axis=None)
        np.testing.assert_allclose(weight, array, atol=1e-6, err_msg=name)
    assert "start" in refusal(own, tmp_path / "still", config=still, resume=True)
    wider = replace(still, hidden=(9, 6))
    assert "fine-tuning keeps that of the model" in refusal(own, tmp_path / "wider", config=wider, start_from=folder)


@pytest.mark.slow
@pytest.mark.data
def test_the_recipe_on_real_rows(tmp_path):
    path = Path(os.environ.get("ZOO_SHARED", "../shared")) / "data/criteo/criteo_10390.tsv"
    if not path.is_file():
        pytest.skip(f"needs {path} ($ZOO_SHARED)")
    metrics = train(path, tmp_path / "m", config=replace(CRITEO, refit=False))
    assert metrics["auc"] > 0.751 and metrics["logloss"] < 0.484
