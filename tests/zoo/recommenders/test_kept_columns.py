"""Columns of a log beside the probabilities of `zoo run`, and GAUC by the column of the users."""

import json
import math

import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest

import zoo
from pipelines.analysis.metrics import auc
from pipelines.core.errors import RequestError
from zoo import api
from zoo.recommenders.metrics import gauc

pytestmark = pytest.mark.usefixtures("shared_home")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of the shipped model's form with a column that the model does not read."""
    rows = pd.DataFrame(zoo.pipeline("shop-clicks").example(300))
    rows["session"] = [None if i % 50 == 3 else f's "{i // 7}", é' for i in range(len(rows))]
    path = tmp_path_factory.mktemp("log") / "log.csv"
    rows.to_csv(path, index=False)
    return path, rows


def test_the_columns_of_every_row_are_written(log, tmp_path):
    path, rows = log
    pipeline = zoo.pipeline("shop-clicks", engine="native", batch_size=64)
    pipeline.run(path, tmp_path / "plain.parquet")
    summary = pipeline.run(path, tmp_path / "kept.parquet", keep="session,item_id")
    plain, kept = (parquet.read_table(tmp_path / f"{name}.parquet").to_pydict() for name in ("plain", "kept"))
    assert summary["rows"] == 300 and list(kept) == ["row", "probability", "session", "item_id"]
    assert {name: kept[name] for name in plain} == plain
    assert kept["session"] == [None if pd.isna(session) else session for session in rows["session"]]
    assert kept["item_id"] == rows["item_id"].tolist()
    pipeline.run(path, tmp_path / "kept.jsonl", keep=["session"])
    lines = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [line.get("session") for line in lines] == kept["session"]


def test_left_out_rows_keep_their_columns_apart(log, tmp_path):
    path, rows = log
    lines = path.read_text().splitlines()
    lines.insert(5, "too,few")
    broken = tmp_path / "broken.csv"
    broken.write_text("\n".join(lines) + "\n")
    zoo.pipeline("shop-clicks").run(broken, tmp_path / "out.parquet", "skip", keep="item_id")
    columns = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert columns["item_id"] == rows["item_id"].tolist() and columns["row"][3:6] == [3, 5, 6]


def test_shards_keep_columns(log, tmp_path):
    path, rows = log
    for number in (1, 2):
        api.run_shard("shop-clicks", [str(path)], tmp_path / "out", f"{number}/2", keep="item_id")
    parts = sorted((tmp_path / "out").glob("*.parquet"))
    items = [name for part in parts for name in parquet.read_table(part)["item_id"].to_pylist()]
    assert items == rows["item_id"].tolist()


@pytest.mark.parametrize(
    ("keep", "words"),
    [("nothing", "lacks the column nothing"), ("item_id,item_id", "'item_id'"), ("row", "'row'"), ("a,,b", "''")],
)
def test_wrong_columns_are_refused(log, tmp_path, keep, words):
    with pytest.raises(RequestError, match=words):
        zoo.pipeline("shop-clicks").run(log[0], tmp_path / "out.csv", keep=keep)
    assert not (tmp_path / "out.csv").exists()


def test_rows_without_a_header_keep_none(tmp_path):
    pipeline = zoo.pipeline("wide-deep-criteo")
    with pytest.raises(RequestError, match="without a header have no column C1"):
        pipeline.run(pipeline.example(3), tmp_path / "out.csv", keep="C1")


def grouped(labels, probabilities, groups, weights):
    """GAUC by its definition."""
    areas, rows = [], []
    for group in set(groups.tolist()) - {-1}:
        chosen = groups == group
        own = weights[chosen].astype(np.float64)
        y, p = labels[chosen].astype(np.float64), probabilities[chosen]
        if (own * y).sum() > 0 and (own * (1 - y)).sum() > 0:
            areas.append(auc(y, p, own))
            rows.append(own.sum())
    return (float(np.average(areas, weights=rows)) if areas else math.nan), len(areas)


def test_gauc_by_its_definition():
    generator = np.random.default_rng(4)
    for trial in range(200):
        count = int(generator.integers(1, 60))
        labels = (generator.random(count) < 0.4).astype(np.float32)
        probabilities = np.round(generator.random(count), 1).astype(np.float32)
        groups = generator.integers(-1, 6, count)
        weights = np.ones(count, np.float32) if trial % 2 else generator.integers(0, 4, count).astype(np.float32)
        expected, size = grouped(labels, probabilities, groups, weights)
        score, counted = gauc(labels, probabilities, groups, None if trial % 2 else weights)
        assert counted == size and (math.isnan(score) if not size else math.isclose(score, expected, abs_tol=1e-12))


def test_evaluate_reports_gauc(log):
    path, rows = log
    report = zoo.evaluate("shop-clicks", path, columns=["session"], engine="onnxruntime")
    pipeline = zoo.pipeline("shop-clicks", engine="onnxruntime")
    scores = np.array([result["probability"] for result in pipeline(rows)], np.float32)
    sessions = [None if pd.isna(session) else session for session in rows["session"]]
    names = {name: i for i, name in enumerate(dict.fromkeys(session for session in sessions if session is not None))}
    groups = np.array([-1 if session is None else names[session] for session in sessions])
    labels = rows["clicked"].astype(np.float32).to_numpy()
    expected, size = grouped(labels, scores, groups, np.ones(len(rows)))
    assert report["groups"] == size and report["metrics"]["int8"]["gauc"] == pytest.approx(expected, abs=1e-9)
    difference = report["metrics"]["int8"]["gauc"] - report["metrics"]["fp32"]["gauc"]
    assert report["difference"]["gauc"] == difference
    with pytest.raises(RequestError, match="expected one"):
        zoo.evaluate("shop-clicks", path, columns=["session", "user_id"])
    with pytest.raises(RequestError, match="lacks the column nothing"):
        zoo.evaluate("shop-clicks", path, columns=["nothing"])
