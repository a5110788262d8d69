"""Permutation importance: columns that decide the label come first."""

import json
import random

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

SETTINGS = {"epochs": "8", "hidden": "8", "embedding_size": "8", "l2_embeddings": "10", "learning_rate": "0.01"}


def write(path, rows, bought=False):
    draw = random.Random(len(path.name))
    lines = ["click,bought,user_id,noise,history,price"] if bought else ["click,user_id,noise,history,price"]
    for _ in range(rows):
        user, items, price = draw.randrange(8), [draw.randrange(6) for _ in range(3)], draw.random()
        odds = 0.9 if user % 2 else 0.1
        click, buy = int(draw.random() < odds), int(draw.random() < (0.9 if items[0] < 3 else 0.1))
        cells = [click, *([buy] if bought else []), f"u{user}", f"n{draw.randrange(9)}"]
        lines.append(",".join(map(str, [*cells, "|".join(f"i{items[0]}" for _ in items), f"{price:.3f}"])))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_columns_are_sorted_by_the_drop_of_the_auc(tmp_path, capsys):
    log = write(tmp_path / "log.csv", 1500)
    zoo.train("deepfm", log, tmp_path / "model", settings=SETTINGS, label="click")
    cli.call(["evaluate", str(tmp_path / "model"), "--data", str(log), "--importance", "--repeats", "3", "--json"])
    report = json.loads(capsys.readouterr().out)
    importance = report["importance"]
    assert (importance["precision"], importance["repeats"], importance["rows"]) == ("int8", 3, 1500)
    columns = {column["column"]: column for column in importance["columns"]}
    assert columns.keys() == {"user_id", "noise", "history", "price"}
    assert importance["columns"][0]["column"] == "user_id" and columns["user_id"]["auc_drop"] > 0.2
    assert columns["user_id"]["logloss_rise"] > 0.2 and columns["user_id"]["auc_drop_std"] > 0
    assert all(abs(columns[name]["auc_drop"]) < 0.05 for name in ("noise", "history", "price"))
    drops = [column["auc_drop"] for column in importance["columns"]]
    assert drops == sorted(drops, reverse=True)
    cli.call(["evaluate", str(tmp_path / "model"), "--data", str(log), "--importance"])
    assert "user_id" in capsys.readouterr().out
    pipeline = zoo.pipeline(tmp_path / "model", "int8")
    scores = np.array([row["probability"] for row in pipeline(log)])
    assert len(scores) == 1500 and "importance" not in zoo.evaluate(tmp_path / "model", log)


@pytest.mark.slow
def test_every_label_has_its_own(tmp_path, capsys):
    log = write(tmp_path / "log.csv", 1500, bought=True)
    settings = {name: value for name, value in SETTINGS.items() if name != "hidden"}
    zoo.train("mmoe", log, tmp_path / "model", settings=settings, label=["click", "bought"])
    importance = zoo.evaluate(tmp_path / "model", log, importance=2)["importance"]
    assert {label: columns[0]["column"] for label, columns in importance["labels"].items()} == {
        "click": "user_id",
        "bought": "history",
    }
    assert importance["columns"] == importance["labels"]["click"]


def test_other_tasks_have_none(tmp_path):
    with pytest.raises(RequestError, match="mobilenet-v1 has no --importance of columns"):
        zoo.evaluate("mobilenet-v1-cifar10", tmp_path, importance=1)
