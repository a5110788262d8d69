"""The walk of docs/own-log.md on a log with ugly columns and a million different ids."""

import csv
import json
import math
import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")

from zoo.cli import app as cli
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Schema

IDS = 1_000_000
KINDS = ['a "quoted" kind', "комма, внутри", "行1\n行2", "\u202ertl\u202c", "", "e\u0301 combining", "💡"]
TAGS = ["x, y", "p\nq", '"t"', "ünï", "zero"]


def write(path, rows):
    """Rows in time order: a label that kind and tags decide, and a new id each until all have been."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)  # ends of lines as RFC 4180 has them
        writer.writerow(["clicked", "session, id", 'the "kind"', "tags\nof it", "price €", "seen", "when"])
        for index in range(rows):
            kind, tags = draw.randrange(len(KINDS)), [tag for tag in TAGS if draw.random() < 0.3]
            logit = 0.5 * kind - 1.5 + 1.2 * ("ünï" in tags) - 0.7 * ("p\nq" in tags)
            writer.writerow(
                [
                    int(draw.random() < 1 / (1 + math.exp(-logit))),
                    f'id {index % IDS:07d} "x"',
                    KINDS[kind],
                    "|".join(tags),
                    "" if draw.random() < 0.1 else f"{draw.lognormvariate(2, 1):.2f}",
                    " ".join(str(draw.randrange(300)) for _ in range(draw.randrange(6))),
                    f"2026-01-{1 + index * 28 // rows:02d}T12:00:00",
                ]
            )


@pytest.mark.slow
def test_ugly_columns_and_a_million_ids(tmp_path, capsys):
    log, schema, model = (str(tmp_path / name) for name in ("log.csv", "schema.json", "model"))
    rows = IDS + 50_000
    write(tmp_path / "log.csv", rows)
    cli.call(["schema", log, "-o", schema])
    specs = {spec.name: spec for spec in Schema.load(schema).columns}
    assert [spec.kind for spec in specs.values()] == [
        *("label", "ignored", "category", "categories", "number", "categories", "timestamp")
    ]
    assert "nearly every row has one of its own" in specs["session, id"].why
    assert specs["session, id"].distinct == pytest.approx(IDS, rel=0.05)
    assert sorted(specs['the "kind"'].encoding["values"]) == sorted(filter(None, KINDS))
    assert sorted(specs["tags\nof it"].encoding["values"]) == sorted(TAGS)
    edited = json.loads((tmp_path / "schema.json").read_text())  # by a person, who wants the ids
    edited["columns"][1] |= {"kind": "category", "encoding": {"type": "hash", "buckets": 2 * IDS}}
    (tmp_path / "schema.json").write_text(json.dumps(edited))
    small = {"embedding_size": 4, "hidden": "16", "batch_size": 8192, "epochs": 1, "l2_embeddings": 1000}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    cli.call(["train", "deepfm", "--data", log, "--schema", schema, "-o", model, *options, "--set", "refit=false"])
    cli.call(["run", model, log, "-o", str(tmp_path / "scores.csv")])
    assert f"{rows:,} rows" in "".join(capsys.readouterr())
    scores = np.loadtxt(tmp_path / "scores.csv", delimiter=",", skiprows=1)
    assert scores.shape == (rows, 2) and (scores[:, 0] == np.arange(rows)).all()
    features = Features(Schema.load(schema))
    columns = next(iter(open_log(log).batches()))  # the reference in Python, of the first block
    index = np.arange(columns.num_rows)
    wanted = features.encode_columns(dict(zip(columns.schema.names, columns.columns, strict=True)), index, True)
    read = next(features.read(log, labelled=True, batch_rows=len(index)))
    for name in ("ids", "numbers", "scales", "labels", "times"):
        np.testing.assert_array_equal(getattr(read, name), getattr(wanted, name))
    labels, first = wanted.labels, scores[: len(index), 1]
    assert first[labels == 1].mean() > first[labels == 0].mean() + 0.05
