"""Families of several labels: MMoE, PLE and ESMM from a log to answers, missing labels, and what is refused."""

import csv
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from helpers.sample_files import call
from helpers.trainings import assert_same_weights, broken_off

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.training.trainer import Trainer
from zoo.serving.handlers.rows import RowHandler
from zoo.serving.workers.channel import Job

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[5]
FAMILIES = ("mmoe", "ple", "esmm")
LABELS = ("clicked", "bought")
SMALL = {
    "hidden": "32,16",
    "embedding_size": "8",
    "epochs": "6",
    "refit": "false",
    "batch_size": "128",
    "l2_embeddings": "10",
    "learning_rate": "0.004",
    "ema": "0.9",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of clicks, of which dear ones are often bought, and of some the purchase is unknown."""
    folder = tmp_path_factory.mktemp("log")
    command = [sys.executable, ROOT / "scripts/synthesize_log.py", folder / "clicks.csv", "-n", "3000"]
    subprocess.run([*command, "--users", "60", "--items", "40"], check=True)
    random = np.random.default_rng(0)
    with (folder / "clicks.csv").open(encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    prices = np.array([float(row["price, EUR"] or 0) for row in rows])
    likely = np.where(prices > np.median(prices), 0.8, 0.2)
    with (folder / "log.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "bought"])
        writer.writeheader()
        for row, share, draw, lost in zip(
            rows, likely, random.random(len(rows)), random.random(len(rows)), strict=True
        ):
            bought = str(int(row["clicked"] == "1" and draw < share))
            writer.writerow(row | {"bought": "" if lost < 0.05 else bought})
    return folder / "log.csv"


@pytest.fixture(scope="module")
def models(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        zoo.train(family, str(log), folder / family, label=LABELS, settings=SMALL)
        zoo.build(folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_from_log_to_scores(models, log, family, tmp_path, capsys):
    folder = models[family]
    metrics = json.loads((folder / "train.json").read_text())["metrics"]
    assert set(metrics["labels"]) == set(LABELS) and metrics["labels"]["bought"]["auc"] > 0.6
    assert metrics["auc"] == pytest.approx(np.mean([scores["auc"] for scores in metrics["labels"].values()]))
    code, _, err = call(capsys, "run", str(folder), str(log), "-o", str(tmp_path / "scores.csv"), "--keep", "user_id")
    assert code == 0 and "in native" in err, err
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines[0] == "row,probability_clicked,probability_bought,user_id" and len(lines) == 3001
    scores = np.genfromtxt(tmp_path / "scores.csv", delimiter=",", skip_header=1, usecols=(1, 2))
    if family == "esmm":
        assert (scores[:, 1] < scores[:, 0]).all()
    report = zoo.evaluate(folder, str(log), columns=["user_id"])
    assert list(report["labels"]) == list(LABELS) and report["labels"]["clicked"]["metrics"] == report["metrics"]
    assert report["samples"] == 3000 > report["labels"]["bought"]["samples"] > 2700
    for label in LABELS:
        of_label = report["labels"][label]
        assert of_label["difference"]["max_probability"] < 0.005 and abs(of_label["difference"]["auc"]) < 0.002
        assert {"auc", "gauc", "logloss", "calibration_error"} <= set(of_label["metrics"]["int8"])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_a_server(models, family):
    pipeline = zoo.pipeline(models[family], engine="native")
    rows = [pipeline.typical_row(), {**pipeline.typical_row(), "age": "71"}]
    expected = pipeline(rows)
    assert list(expected[0]) == ["probability_clicked", "clicked", "probability_bought", "bought"]
    handler = RowHandler(family, "1", pipeline)
    handler.load_items(None)
    handler.warm_up()
    body = orjson.dumps({"rows": rows})
    (answer,) = handler.run([Job(1, "run", "application/json", "", {}, -1, body)])
    assert answer.status == 200, answer.body
    for result, wanted in zip(json.loads(answer.body)["results"], expected, strict=True):
        assert [result[f"probability_{label}"] for label in LABELS] == pytest.approx(
            [wanted[f"probability_{label}"] for label in LABELS], abs=1e-7
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_of_vectors_are_multiplied(models, log, family):
    """Without its towers, every logit is the sum of the dot products of all pairs of embeddings."""
    about, network = zoo.entry(family).network(models[family])
    (rows, *_) = zoo.pipeline(models[family], engine="onnxruntime").rows(str(log))
    ids, numbers, scales = (torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales"))
    with torch.inference_mode():
        for tower in network.towers:
            tower[-1].weight.zero_()
            tower[-1].bias.zero_()
        vectors = network.embeddings(ids, scales).split(about["config"].embedding_size, 1)
        expected = sum((a * b).sum(1) for a, b in itertools.combinations(vectors, 2))
        outputs = network(ids, numbers, scales)
    assert outputs.shape[1] == 2 and expected.abs().max() > 0.01
    for logits in outputs.T:
        np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-4)


def test_missing_labels_do_not_train(log, tmp_path):
    schema = zoo.schema(log, tmp_path / "schema.json", label=LABELS)
    assert [spec["name"] for spec in schema["schema"]["columns"] if spec["kind"] == "label"] == list(LABELS)
    assert "train the other labels alone" in json.dumps(schema["schema"])
    columns = [
        {**spec, "where": "clicked"} if spec["name"] == "bought" else spec for spec in schema["schema"]["columns"]
    ]
    conditional = Features(Schema.from_json({**schema["schema"], "columns": columns}))
    (plain,) = Features(Schema.load(tmp_path / "schema.json")).read(log, labelled=True)
    (masked,) = conditional.read(log, labelled=True)
    assert plain.labels.shape == (3000, 2) and 60 < np.isnan(plain.labels[:, 1]).sum() < 240
    clicked = plain.labels[:, 0] == 1
    assert np.isnan(masked.labels[~clicked, 1]).all()
    np.testing.assert_array_equal(masked.labels[clicked], plain.labels[clicked])


def test_the_order_of_labels_is_that_of_the_options(log):
    schema = Schema.from_json(zoo.schema(log, label=("bought", "clicked"))["schema"])
    assert schema.labels == ("bought", "clicked")


@pytest.mark.parametrize(
    ("family", "labels", "words"),
    [
        (
            "deepfm",
            LABELS,
            "labels clicked, bought, expected one; train a family of several labels (mmoe, ple, esmm), or",
        ),
        ("esmm", ("clicked",), "the label clicked alone, expected at least 2"),
        ("mmoe", ("clicked", "age"), "the label age holds"),
        ("mmoe", ("clicked", "sold"), "no column 'sold'"),
    ],
)
def test_refused(log, tmp_path, family, labels, words):
    with pytest.raises(RequestError) as caught:
        zoo.train(family, str(log), tmp_path / "model", label=labels, settings=SMALL)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_one_label_keeps_its_output(log, tmp_path):
    zoo.train("mmoe", str(log), tmp_path / "model", label="clicked", settings={**SMALL, "epochs": "1"})
    (row,) = zoo.pipeline(tmp_path / "model")([zoo.pipeline(tmp_path / "model").typical_row()])
    assert list(row) == ["probability", "click"]


def test_faulty_labels_are_named(log, tmp_path):
    text = log.read_text(encoding="utf-8").splitlines()
    (tmp_path / "log.csv").write_text("\n".join([*text, text[1].rsplit(",", 1)[0] + ",2"]), encoding="utf-8")
    schema = Schema.from_json(zoo.schema(log, label=LABELS)["schema"])
    with pytest.raises(RequestError, match="found the label bought '2', expected 0 or 1"):
        list(Features(schema).read(tmp_path / "log.csv", labelled=True))
    rows = list(Features(schema).read(tmp_path / "log.csv", labelled=True, on_error="skip"))
    assert sum(map(len, rows)) == 3000


def test_a_history_reads_the_table_of_the_items(models):
    (history,) = (column for column in Schema.load(models["mmoe"] / "schema.json").columns if column.name == "history")
    assert history.shares == "item_id" and history.pooling == "mean"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_pruned_and_ranges_trained(models, log, family, tmp_path):
    settings = {"epochs": "1", "refit": "false", "batch_size": "128"}
    pruned = zoo.finetune(models[family], str(log), tmp_path / "small", settings=settings, prune="ratio=.1", drop=1.0)
    assert pruned
    before, after = (
        zoo.load(folder).ensure("fp32.onnx").stat().st_size for folder in (models[family], tmp_path / "small")
    )
    assert after < before
    zoo.finetune(models[family], str(log), tmp_path / "trained", settings={**settings, "qat": "true"})
    rows = [zoo.pipeline(models[family]).typical_row()]
    for folder in (tmp_path / "small", tmp_path / "trained"):
        (result,) = zoo.pipeline(folder, engine="native")(rows)
        assert set(result) == {"probability_clicked", "clicked", "probability_bought", "bought"}
        if family == "esmm":
            assert result["probability_bought"] < result["probability_clicked"]


def test_a_training_is_resumed(log, tmp_path):
    settings = {**SMALL, "epochs": "2"}
    zoo.train("ple", str(log), tmp_path / "whole", label=LABELS, settings=settings)
    train = functools.partial(zoo.train, "ple", str(log), tmp_path / "broken", label=LABELS, settings=settings)
    broken_off(Trainer, 30, train)
    train(resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")
