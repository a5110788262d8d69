"""Models of logs with a share of their negatives have the probabilities of all rows."""

import csv
import json
import random

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

from zoo.recommenders.data.features import Features  # noqa: E402
from zoo.recommenders.models.multitask.outputs import first_of  # noqa: E402
from zoo.recommenders.training.negative_sampling import shifted, start_at_all_rows  # noqa: E402

RATE = 0.1
FAMILIES = ["wide-deep", "deepfm", "dcn-v2", "dlrm", "two-tower", "autoint", "finalmlp", "gdcn", "din", "bst", "sasrec"]


def write(path, rows, rate=1.0, seed=0):
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["click", "user_id", "item_id", "history", "price"])
        for _ in range(rows):
            user, item = draw.randrange(20), draw.randrange(10)
            click = int(draw.random() < (0.09 if user % 2 else 0.02))
            if click or draw.random() < rate:
                history = "|".join(f"i{draw.randrange(10)}" for _ in range(draw.randrange(1, 4)))
                table.writerow([click, f"u{user}", f"i{item}", history, draw.randrange(9)])
    return path


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    return write(folder / "sampled.csv", 12000, RATE), write(folder / "all.csv", 3000, seed=1)


def test_probabilities_are_those_of_all_rows(logs, tmp_path, capsys):
    sampled, judged = logs
    out = tmp_path / "model"
    command = ["train", "deepfm", "--data", str(sampled), "-o", str(out), "--negative-rate", str(RATE)]
    cli.call([*command, "--epochs", "6", "--set", "hidden=8", "--set", "embedding_size=8", "--set", "l2_embeddings=10"])
    rows = list(csv.DictReader(judged.open()))
    rate = np.mean([int(row["click"]) for row in rows])
    for precision, engine in (("fp32", "onnxruntime"), ("int8", "onnxruntime"), ("int8", "native")):
        mean = np.mean([row["probability"] for row in zoo.pipeline(out, precision, engine=engine)(rows)])
        assert mean == pytest.approx(rate, rel=0.2)
    report = zoo.evaluate(out, judged)
    assert report["negative_rate"] == RATE and report["metrics"]["int8"]["calibration_error"] < 0.02
    cli.call(["evaluate", str(out), "--data", str(judged)])
    assert "trained on 0.1 of the negatives" in capsys.readouterr().out
    zoo.finetune(out, sampled, tmp_path / "tuned", settings={"epochs": "1", "qat": "true"})
    assert read_json(tmp_path / "tuned/train.json")["config"]["negative_rate"] == RATE
    mean = np.mean([row["probability"] for row in zoo.pipeline(tmp_path / "tuned", "int8")(rows)])
    assert mean == pytest.approx(rate, rel=0.2)


def test_every_family_starts_at_the_odds_of_all_rows(logs):
    for name in FAMILIES:
        family = zoo.entry(name)
        value = zoo.schema(logs[0], label="click", family=name)["schema"]
        for column in value["columns"]:
            if column["name"] in ("history", "price"):
                column["tower"] = "user"
        features = Features.from_json({"schema": value})
        model = family.build(features, family.train_config())
        rows = next(iter(features.read(logs[0])))
        inputs = tuple(torch.from_numpy(array[:16].copy()) for array in (rows.ids, rows.numbers, rows.scales))
        with torch.no_grad():
            before = first_of(model.eval()(*inputs))
            start_at_all_rows(model, inputs, 3.0)
            assert torch.allclose(first_of(model(*inputs)), before - 3, atol=1e-4), name
            assert torch.allclose(first_of(shifted(model(*inputs), 3.0)), before, atol=1e-4)


def test_labels_whose_odds_change_otherwise_are_refused(tmp_path):
    path = write(tmp_path / "log.csv", 400)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},bought", *(f"{line},{i % 2}" for i, line in enumerate(lines[1:]))]))
    value = zoo.schema(path, label=["click", "bought"])["schema"]
    (tmp_path / "schema.json").write_text(json.dumps(value))
    with pytest.raises(RequestError, match="found the negative rate 0.1 with the label bought"):
        settings = {"negative_rate": "0.1", "epochs": "1"}
        zoo.train("mmoe", path, tmp_path / "a", settings=settings, schema=tmp_path / "schema.json")
    with pytest.raises(RequestError, match="found the label click twice"):
        zoo.schema(path, label=["click", "click"])
    with pytest.raises(RequestError, match="found the label click twice"):
        zoo.train("mmoe", path, tmp_path / "b", schema=tmp_path / "schema.json", label=["click", "click"])
