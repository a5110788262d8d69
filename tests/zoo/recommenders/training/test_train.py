"""Recommenders on a log with columns of its own: training, resuming, export, int8, evaluation and scoring."""

import csv
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.click_logs import written
from helpers.tiers import one_in
from helpers.trainings import TORCHRUN, TwoProcesses, assert_same_weights, broken_off, weights

import zoo
from pipelines.core.errors import RequestError
from pipelines.models import stages
from pipelines.models.pipeline import choose_engine
from pipelines.models.record import NATIVE
from zoo.cli import app as cli
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.data.schema_inference import infer
from zoo.recommenders.training.fitting import shifted_logloss
from zoo.recommenders.training.trainer import Trainer
from zoo.training.runs import Processes, checkpoint_hook

torch = pytest.importorskip("torch", reason="needs the train extra")
training = importlib.import_module("zoo.recommenders.training.train")
checkpoints = importlib.import_module("zoo.recommenders.models.checkpoints")
field_layers = importlib.import_module("zoo.recommenders.models.field_layers")
load_checkpoint = checkpoints.load_checkpoint
torch.set_num_threads(1)  # such small work only waits for a second thread

ROOT = Path(__file__).resolve().parents[4]
FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "autoint", "finalmlp", "gdcn", "two-tower")
SMALL = {
    "hidden": "16,8",
    "embedding_size": "8",
    "epochs": "2",
    "refit": "false",
    "batch_size": "128",
    "l2_embeddings": "10",
}
QUICK = {**SMALL, "hidden": "32,16", "epochs": "5", "learning_rate": "0.004", "ema": "0.9", "patience": "9"}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    subprocess.run(
        [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", "4000", "--users", "80", "--items", "50"],
        check=True,
    )
    return path


@pytest.fixture(scope="module")
def models(log, tmp_path_factory):
    """A small model of each family, built up to int8."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp("models") / family
        zoo.train(family, str(log), folders[family], settings=QUICK)
        zoo.build(folders[family])
    return folders


def network(folder):
    """The trained network and its features."""
    about = json.loads((folder / "train.json").read_text())
    features = Features.from_json(about["features"])
    entry = zoo.load(folder).entry
    config = type(entry.config)(**{name: tuple(x) if isinstance(x, list) else x for name, x in about["config"].items()})
    model = entry.build(features, config)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True)["state_dict"])
    return model.eval(), features


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_graph_computes_what_the_network_does(models, log, family):
    model, features = network(models[family])
    rows = next(features.read(log, batch_rows=500))
    with torch.inference_mode():
        outputs = model(*(torch.from_numpy(array) for array in (rows.ids, rows.numbers, rows.scales)))
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    opened = zoo.pipeline(models[family], precision="fp32", engine="onnxruntime")
    out = opened.predict(opened.encode(rows))
    np.testing.assert_allclose(out["probability"], torch.sigmoid(logits).numpy(), atol=1e-6)
    if family == "two-tower":
        for name, vectors in zip(("user", "item"), outputs[1:], strict=True):
            np.testing.assert_allclose(out[name], vectors.numpy(), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_starts_from_all_weights_of_the_graph(models, family):
    trained, _ = network(models[family])
    other, _ = network(models[family])
    with torch.no_grad():
        for weight in other.parameters():
            weight.fill_(7)
    weights = checkpoints.weights_of(other, models[family] / "fp32.onnx")
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=1e-5, msg=name)


def test_gates_and_heads_are_restored_from_what_is_exported():
    gates, heads = field_layers.ConstantGates(5), field_layers.BilinearHeads(6, 4, 2)
    torch.nn.init.normal_(gates.logits)
    restored = gates.restored({"x.gates": gates.gates().detach()}, "x")
    torch.testing.assert_close(restored["x.logits"], gates.logits.detach())
    restored = heads.restored({"x.matrix": heads.matrix()}, "x")
    torch.testing.assert_close(restored["x.weight"], heads.weight.detach())


KINDS = ("wide-deep",)  # OpenVINO compiles the others longer, and they are near it
OTHERS = [pytest.param(family, "openvino", marks=[] if family in KINDS else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(("family", "engine"), [*one_in(2, ((family, "onnxruntime") for family in FAMILIES)), *OTHERS])
def test_int8_is_close_to_float_in_every_stock_engine(models, log, family, engine):
    evaluation = zoo.evaluate(models[family], [str(log)], engine=engine)
    assert evaluation["samples"] == 4000 and evaluation["metrics"]["fp32"]["auc"] > 0.6
    assert {"auc", "logloss", "accuracy", "calibration_error"} <= set(evaluation["metrics"]["int8"])
    assert evaluation["difference"]["mean_probability"] < 0.01
    assert abs(evaluation["difference"]["logloss"]) < 0.003


def test_two_towers_are_judged_by_what_they_find(models, log, tmp_path):
    evaluation = zoo.evaluate(models["two-tower"], [str(log)], engine="onnxruntime")
    for metrics in evaluation["metrics"].values():
        assert 10 / 50 < metrics["recall@10"] <= metrics["recall@50"] == 1.0 and 0 < metrics["ndcg@10"] < 1
    output = tmp_path / "best.csv"
    report = zoo.run(models["two-tower"], [str(log)], output, engine="onnxruntime", items=str(log), top=3)
    lines = list(csv.DictReader(output.open()))
    assert (
        report["items"] == 50
        and len(lines) == 3 * 4000
        and [line["rank"] for line in lines[:4]] == ["1", "2", "3", "1"]
    )
    opened = zoo.pipeline(models["two-tower"], engine="onnxruntime")
    names, index = opened.index(log)
    rows = next(opened.rows(log, batch_rows=1))
    vectors = opened.predict(opened.encode(rows))["user"]
    best, scores = index.top(vectors, 3)
    assert [names[position] for position in best[0]] == [line["item"] for line in lines[:3]]
    with log.open(newline="") as file:
        user = next(csv.DictReader(file))
    catalogue = opened.catalogue(log)
    assert opened.retrieve(user, catalogue, 3) == [names[position] for position in best[0]]
    assert opened.retrieve(user, catalogue, 2, exclude=[names[best[0][0]]]) == [
        names[position] for position in best[0][1:]
    ]
    exact = index.codes.astype(int) @ np.rint(vectors[0] * 127).astype(int)
    assert sorted(exact, reverse=True)[:3] == np.rint(scores[0] * 127**2).astype(int).tolist()


def test_auto_times_the_float_file_of_a_trained_model(models, log):
    batch = zoo.pipeline(models["deepfm"], engine="onnxruntime").preprocess(log)
    choice = choose_engine(zoo.load(models["deepfm"]), "int8", batch, 1, fresh=True)
    assert {"onnxruntime", "onnxruntime+fp32"} <= choice.milliseconds.keys()


def test_a_native_form_of_other_steps_is_made_anew(models, monkeypatch):
    folder = zoo.load(models["deepfm"])
    stages.build(folder, until=NATIVE)
    assert stages.build(folder, until=NATIVE)[NATIVE] == "kept"
    monkeypatch.setattr(stages, "NATIVE_FORM", 99)
    assert stages.build(folder, until=NATIVE)[NATIVE] == "made"


def test_an_index_of_faiss_finds_the_same_items(models, log, tmp_path):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    results = []
    for name, faiss in (("all", None), ("flat", "Flat")):
        zoo.run(models["two-tower"], [str(log)], tmp_path / f"{name}.csv", items=str(log), top=5, faiss=faiss)
        lines = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
        results.append([(line["row"], line["rank"], float(line["score"])) for line in lines])
    assert [hit[:2] for hit in results[0]] == [hit[:2] for hit in results[1]]
    np.testing.assert_allclose([hit[2] for hit in results[0]], [hit[2] for hit in results[1]], atol=0.02)
    with pytest.raises(RequestError, match="faiss makes no index 'WRONG'"):
        zoo.run(models["two-tower"], [str(log)], tmp_path / "x.csv", items=str(log), faiss="WRONG")
    with pytest.raises(RequestError, match="without a file of items"):
        zoo.run(models["two-tower"], [str(log)], tmp_path / "x.csv", faiss="Flat")


def test_users_alone_and_items_alone_are_enough_to_find_items(models, tmp_path):
    users = [{"user_id": "u1", "age": "30", "country": "日本", "device": "phone", "history": "i3|i4"}]
    items = [{"item_id": f"i{number}", "price, EUR": "3", "categories": "books"} for number in range(9)] * 2
    for name, records in (("users", users), ("items", items)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    output = tmp_path / "best.jsonl"
    report = zoo.run(
        models["two-tower"], [str(tmp_path / "users.csv")], output, items=str(tmp_path / "items.csv"), top=20
    )
    assert report["items"] == 9 and len(output.read_text().splitlines()) == 9
    asked = ["run", str(models["two-tower"]), str(tmp_path / "users.csv"), "--items", str(tmp_path / "items.csv")]
    said = CliRunner().invoke(cli.cli, [*asked, "-o", str(output)])
    assert said.exit_code == 0 and said.stderr.splitlines()[-1].startswith("1 rows, the best of 9 items each, ")
    with pytest.raises(RequestError, match="lacks the columns item_id"):
        zoo.run(models["two-tower"], [str(tmp_path / "users.csv")], output, items=str(tmp_path / "users.csv"))


@pytest.mark.parametrize("family", ["deepfm"])
def test_scoring_takes_any_order_of_columns_and_no_label(models, log, tmp_path, family):
    lines = list(csv.DictReader(log.open()))[:50]
    path = tmp_path / "other.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["new", *reversed([name for name in lines[0] if name != "clicked"])])
        writer.writeheader()
        writer.writerows({**{k: v for k, v in line.items() if k != "clicked"}, "new": "x"} for line in lines)
    outputs = []
    for source in (log, path):
        zoo.run(models[family], [str(source)], tmp_path / "out.csv", engine="onnxruntime")
        outputs.append((tmp_path / "out.csv").read_text().splitlines()[:51])
    assert outputs[0] == outputs[1]
    in_memory = zoo.pipeline(models[family], engine="onnxruntime")(lines)
    written = [float(line.split(",")[1]) for line in outputs[0][1:]]
    np.testing.assert_allclose([result["probability"] for result in in_memory], written, rtol=0, atol=1e-6)


def test_what_training_leaves(models, log):
    folder = models["deepfm"]
    assert {"model.pt", "train.json", "schema.json", "calibration.npz", "learning_curve.png", "card.json"} <= {
        path.name for path in folder.iterdir()
    }
    about = json.loads((folder / "train.json").read_text())
    assert about["rows"] == {"train": 3600, "held_out": 400, "final": 3600, "left_out": 0}
    assert about["data"][0]["file"] == "log.csv" and len(about["history"]) == 5
    model, features = network(folder)
    model_fields = {field.name: index for index, field in enumerate(model.embeddings.fields)}
    history = model.embeddings.table(model_fields["history"]).detach().numpy()
    assert not history[-1].any() and history[:-1].any(axis=1).all()  # places without an item add nothing
    missing = model.embeddings.table(model_fields["country"]).detach().numpy()
    np.testing.assert_array_equal(missing[-1], missing[0])  # never missing in training: as the unknown one
    assert features.schema.of("label")[0].name == "clicked"


def config(**changes):
    settings = importlib.import_module("zoo.recommenders.models.deepfm").DeepFMConfig
    small = settings(hidden=(8,), embedding_size=4, epochs=3, batch_size=256, patience=9)
    return replace(small, **changes)


def build():
    return importlib.import_module("zoo.recommenders.models.deepfm").DeepFM


@pytest.mark.parametrize("at", [2, 4])
def test_resuming_gives_the_same_weights(log, tmp_path, monkeypatch, at):
    """Broken off in the search, and in the refit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    training.train(build(), str(log), whole, config=config())
    saves = []

    def save(*arguments):
        if len(saves) == at:
            raise KeyboardInterrupt
        saves.append(original(*arguments))

    original = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        training.train(build(), str(log), broken, config=config())
    monkeypatch.undo()
    with pytest.raises(RequestError, match="made with epochs 3"):
        training.train(build(), str(log), broken, config=config(epochs=4), resume=True)
    training.train(build(), str(log), broken, config=config(), resume=True)
    assert_same_weights(whole, broken)


@pytest.mark.parametrize("refit", [True, False])
def test_a_finished_training_keeps_no_weights_but_the_model(log, tmp_path, capsys, refit):
    """The best weights of a model that is not trained on all rows lie beside the checkpoint meanwhile."""
    kept, folder, settings = [], tmp_path / "model", config(refit=refit, l2_embeddings=(10.0,))
    with checkpoint_hook(lambda output: kept.append({path.name for path in (output / "checkpoint").iterdir()})):
        metrics = training.train(build(), str(log), folder, config=settings)
    best = json.loads((folder / "train.json").read_text())["epochs"]
    assert kept[-1] == {"state.pt"} | (set() if refit else {f"best-0-{best}.pt"})
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["state.pt"]
    assert (folder / "checkpoint/state.pt").stat().st_size < 10_000
    before = (folder / "model.pt").read_bytes()
    capsys.readouterr()
    assert training.train(build(), str(log), folder, config=settings, resume=True) == metrics
    assert "is finished: nothing to resume" in "".join(capsys.readouterr())
    assert (folder / "model.pt").read_bytes() == before
    with pytest.raises(RequestError, match="made with epochs 3"):
        training.train(build(), str(log), folder, config=replace(settings, epochs=4), resume=True)
    (folder / "model.pt").unlink()
    with pytest.raises(RequestError, match="is finished, but model.pt is gone; train into an empty folder"):
        training.train(build(), str(log), folder, config=settings, resume=True)


def test_the_best_epoch_is_the_model(log, tmp_path, monkeypatch):
    """Resumed behind it, from the checkpoint of an epoch that is worse."""
    shifted = iter([0.7, 0.5, 0.6] * 9)
    monkeypatch.setattr("zoo.recommenders.training.fitting.shifted_logloss", lambda *_: next(shifted))
    settings = config(refit=False, l2_embeddings=(10.0,), patience=9)
    weights = []
    with checkpoint_hook(lambda output: weights.append(torch.load(output / "checkpoint/state.pt", weights_only=True))):
        training.train(build(), str(log), tmp_path / "whole", config=settings)
    model = torch.load(tmp_path / "whole/model.pt", weights_only=True)["state_dict"]
    averages = weights[1]["trainer"]["average"]
    biases = [bias for name, bias in model.items() if name.endswith("bias")]
    assert biases and all(any(torch.equal(bias, average) for average in averages) for bias in biases)
    broken_off(Trainer, 30, lambda **_: training.train(build(), str(log), tmp_path / "broken", config=settings))
    monkeypatch.setattr("zoo.recommenders.training.fitting.shifted_logloss", lambda *_: 0.6)
    training.train(build(), str(log), tmp_path / "broken", config=settings, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")


def in_processes(data: str, folder: str, *, resume: bool) -> None:
    training.train(build(), data, folder, config=config(refit=False, l2_embeddings=(10.0,), dropout=0.0), resume=resume)


@pytest.mark.slow  # as that of images
def test_two_processes_train_what_one_does(log, tmp_path):
    """Each takes every other row of a batch; the gradients are summed in another order, and nothing else differs."""
    TwoProcesses("tests.zoo.recommenders.training.test_train", log, tmp_path, TORCHRUN).train(tmp_path / "two")
    in_processes(str(log), str(tmp_path / "one"), resume=False)
    assert json.loads((tmp_path / "two/train.json").read_text())["processes"] == 2
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-3, rtol=0)


def test_finetuning_goes_on_from_the_weights(models, log, tmp_path):
    zoo.finetune(models["deepfm"], str(log), tmp_path / "tuned", settings={"epochs": "1", "refit": "false"})
    before, after = weights(models["deepfm"]), weights(tmp_path / "tuned")
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 0 < moved < 0.1


def test_finetuning_keeps_the_sizes(models, log, tmp_path):
    with pytest.raises(
        RequestError, match="found the setting embedding_size 3, but fine-tuning keeps that of the model"
    ):
        zoo.finetune(models["deepfm"], str(log), tmp_path / "tuned", settings={"embedding_size": "3"})


def test_a_shipped_model_is_tuned_without_its_checkpoint(log, tmp_path):
    zoo.finetune("shop-clicks", str(log), tmp_path / "tuned", settings={"epochs": "1", "refit": "false"})
    before = zoo.pipeline("shop-clicks", precision="fp32", engine="onnxruntime")
    after = zoo.pipeline(tmp_path / "tuned", precision="fp32", engine="onnxruntime")
    rows = next(before.rows(log))
    moved = np.abs(before.score(rows) - after.score(rows))
    assert 0 < moved.mean() < 0.1


def test_a_schema_may_be_given_and_the_label_named(log, tmp_path):
    schema = infer(open_log(log))
    columns = tuple(column for column in schema.columns if column.name != "history")
    path = replace(schema, columns=columns).save(tmp_path / "schema.json")
    zoo.train("deepfm", str(log), tmp_path / "model", settings={**SMALL, "epochs": "1"}, schema=path, label="clicked")
    assert zoo.pipeline(tmp_path / "model", engine="onnxruntime").features.shape == (9, 3, 1)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"clicked": ["1"] * 90, "x": "ab" * 45}, "clicked holds 1; expected 0 and 1, both of them"),
        (
            {"clicked": ["0", "2"] * 45, "x": "ab" * 45},
            "clicked holds 0, 2; expected 0 and 1, .* regression targets are not",
        ),
        ({"clicked": ["0", "1"] * 45, "x": [""] * 90}, "nothing to predict clicked from .x: every value is missing"),
        ({"clicked": ["0", "1"] * 2, "x": "abba"}, "found 4 rows, expected more than the 0 to hold out"),
        ({"clicked": ["0", "1"] * 40 + ["1"] * 10, "x": "abc" * 30}, "found only label 1 in the last 9 rows"),
        ({"clicked": ["0", "1"] * 45, "age": range(90, 0, -1)}, "found numbers alone, expected a category or a list"),
    ],
)
def test_logs_that_cannot_be_trained_on(tmp_path, columns, said):
    with pytest.raises(RequestError, match=said):
        zoo.train("deepfm", written(tmp_path / "log.csv", **columns), tmp_path / "model")
    assert not (tmp_path / "model").exists() or not any((tmp_path / "model").iterdir())


def test_columns_without_any_value(tmp_path, capsys):
    """An inferred schema ignores them and says so; one that a person wrote must not read them."""
    columns = {"clicked": ["0", "1"] * 45, "x": "abc" * 30, "n": [""] * 90, "c": ["NA"] * 90, "l": [""] * 90}
    log = written(tmp_path / "log.csv", **columns, zero=["5"] * 90)
    settings = {**SMALL, "epochs": "1"}
    zoo.train("deepfm", log, tmp_path / "inferred", settings=settings)
    out = capsys.readouterr()
    said = "; ignored: " + "".join(f"{name} (every value is missing), " for name in "ncl") + "zero (one value in all"
    assert said in out.out + out.err
    numbers = {"type": "standard", "mean": 5.0, "deviation": 1.0}
    values = {"type": "vocabulary", "values": ["a", "b", "c"]}
    schema = Schema(
        (
            Column("clicked", "label"),
            Column("x", "category", encoding=values),
            Column("n", "number", encoding=numbers),
            Column("c", "category", encoding=values),
            Column("l", "categories", encoding=values, separator="|", pooling="sum", length=2),
            Column("zero", "number", encoding=numbers),
        )
    )
    with pytest.raises(
        RequestError, match="found no value in the columns n, c, l, expected some to train on; give what"
    ):
        zoo.train("deepfm", log, tmp_path / "given", settings=settings, schema=schema)
    assert not (tmp_path / "given").exists()


def test_a_column_of_times_holds_some(tmp_path):
    log = written(tmp_path / "log.csv", clicked=["0", "1"] * 45, x="abc" * 30, when=["soon"] * 90)
    values = {"type": "vocabulary", "values": ["a", "b", "c"]}
    columns = Column("clicked", "label"), Column("x", "category", encoding=values)
    schema = Schema((*columns, Column("when", "timestamp", unit="text")))
    with pytest.raises(
        RequestError, match="found no time in the column when, expected 2024-01-31T12:00:00 or the like"
    ):
        zoo.train("deepfm", log, tmp_path / "model", settings={**SMALL, "epochs": "1"}, schema=schema)


def test_rows_without_a_label_may_be_skipped_without_a_schema(tmp_path):
    log = written(tmp_path / "log.csv", clicked=[*["0", "1"] * 45, "", "maybe"], x="abcd" * 23)
    settings = {**SMALL, "epochs": "1"}
    with pytest.raises(RequestError, match="clicked holds 0, 1, maybe, 1 missing; expected 0 and 1"):
        zoo.train("deepfm", log, tmp_path / "strict", settings=settings)
    zoo.train("deepfm", log, tmp_path / "model", settings=settings, on_error="skip")
    rows = json.loads((tmp_path / "model/train.json").read_text())["rows"]
    assert (rows["train"] + rows["held_out"], rows["left_out"]) == (90, 2)


def test_a_trial_is_judged_by_logits_shifted_to_the_share_of_clicks():
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, 4000)
    labels = (random.random(4000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    wanted = shifted_logloss(labels, 1 / (1 + np.exp(-logits)))
    assert shifted_logloss(labels, 1 / (1 + np.exp(-logits - 2))) == pytest.approx(wanted, abs=1e-6)
    assert shifted_logloss(labels, 1 / (1 + np.exp(-3 * logits))) > wanted + 0.05  # too sure of itself


def test_two_towers_want_both_sides(tmp_path):
    path = written(tmp_path / "log.csv", clicked=["0", "1"] * 45, user=["a", "b", "c"] * 30)
    with pytest.raises(RequestError, match='no category of the tower item; give its columns "tower": "item"'):
        zoo.train("two-tower", path, tmp_path / "model")


def test_a_schema_is_for_families_of_logs(tmp_path, log):
    with pytest.raises(RequestError, match="resnet50 takes no --schema; these families do: wide-deep, deepfm"):
        zoo.train("resnet50", str(log), tmp_path / "model", schema="schema.json")


def test_weights_of_rows_count(log, tmp_path):
    """Rows of weight 0 are as if they were not there."""
    lines = list(csv.DictReader(log.open()))[:1000]
    for line in lines:
        line["weight"] = "0" if line["device"] == "phone" else "1"
    path = written(tmp_path / "log.csv", **{name: [row[name] for row in lines] for name in lines[0]})
    features = Features(infer(open_log(path)))
    rows = Rows.concatenate(list(features.read(path, labelled=True)))
    assert rows.weights.min() == 0 and rows.weights.max() == 1
    trainer = Trainer(build()(features, config()), config(), 1000, Processes())
    batch = {
        **{name: torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")},
        **{name: torch.from_numpy(getattr(rows, f"{name}s")) for name in ("label", "weight")},
    }
    kept = rows.weights > 0
    subset = {name: tensor[torch.from_numpy(kept)] for name, tensor in batch.items()}
    assert trainer.step(batch, float(kept.sum())) == pytest.approx(
        Trainer(build()(features, config()), config(), 1000, Processes()).step(subset, float(kept.sum())),
        rel=0.2,
    )


def test_the_weights_of_a_loaded_network_are_those_of_the_file(log, tmp_path):
    """Tables are mapped from model.pt, not copied, and no random ones are made before."""
    training.train(build(), str(log), tmp_path, config=config(epochs=1))
    model, _ = load_checkpoint(tmp_path, build(), type(config()))
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    before = (tmp_path / "model.pt").read_bytes()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert (tmp_path / "model.pt").read_bytes() == before
