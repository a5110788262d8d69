"""Embedding tables out of a model, and pre-trained vectors into one."""

import json
import random

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.graph import edit, io, query
from zoo import api
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

TINY = {"epochs": "1", "hidden": "8", "embedding_size": "4", "l2_embeddings": "10"}


def write(path, rows=200):
    draw = random.Random(0)
    lines = ["click,user_id,item_id,history"]
    for index in range(rows):
        history = "|".join(f"i{draw.randrange(9)}" for _ in range(2))
        lines.append(f"{index % 2},u{draw.randrange(12)},i{draw.randrange(9)},{history}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write(tmp_path_factory.mktemp("log") / "log.csv")


def schema(path, log, family=None, **tables):
    value = zoo.schema(log, family=family)["schema"]
    for column in value["columns"]:
        if column["name"] in tables:
            column.update(tables[column["name"]])
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("to", ["npz", "safetensors"])
@pytest.mark.parametrize("family", ["deepfm", "din"])
def test_tables_have_the_rows_that_the_model_looks_up(family, to, log, tmp_path, capsys):
    zoo.train(family, log, tmp_path / "a", settings=TINY, schema=schema(tmp_path / "schema.json", log, family))
    out = tmp_path / f"tables.{to}"
    cli.call(["export", str(tmp_path / "a"), "--to", to, "-o", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["columns"]["user_id"] == 14
    if to == "npz":
        tables = dict(np.load(out))
        columns = json.loads(str(tables["metadata"]))["columns"]
        assert tables["user_id/values"].tolist() == columns["user_id"]["encoding"]["values"]
    else:
        from safetensors import safe_open

        with safe_open(out, "np") as file:
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            columns = json.loads(file.metadata()["metadata"])["columns"]
    state = torch.load(tmp_path / "a" / "model.pt")["state_dict"]["embeddings.weight"].numpy()
    assert np.array_equal(tables["user_id/embeddings"], state[:14])
    again = tables["user_id/embeddings.int8"] * tables["user_id/embeddings.scale"][:, None]
    assert tables["user_id/embeddings.int8"].dtype == np.int8
    np.testing.assert_allclose(again, state[:14], atol=np.abs(state).max() / 127)
    assert (columns["user_id"]["unknown_row"], columns["user_id"]["missing_row"]) == (0, 13)
    if family == "din":
        assert columns["history"]["tables"] == columns["item_id"]["tables"] == ["item_id/embeddings"]


def test_tables_of_an_imported_graph_are_found_by_the_columns_that_look_them_up(tmp_path):
    report = api.export("wide-deep-criteo", "npz", tmp_path / "a.npz")
    assert report["columns"] == {f"C{i}": 1000 for i in range(1, 27)}
    tables = dict(np.load(tmp_path / "a.npz"))
    column = json.loads(str(tables["metadata"]))["columns"]["C26"]
    assert column["tables"] == ["C26/deep.embeddings", "C26/wide.weights"]
    assert (column["unknown_row"], column["missing_row"], column["encoding"]["type"]) == (None, 263, "hash-bucket")
    clicks = zoo.pipeline("wide-deep-criteo", "fp32", "onnxruntime")
    graph = io.load(clicks.folder.ensure("fp32.onnx"))
    edit.expand_fp16(graph)
    assert np.array_equal(
        tables["C26/deep.embeddings"], query.constant(graph.graph.initializers["deep/C26/embeddings"])
    )
    assert np.array_equal(tables["C3/wide.weights"], query.constant(graph.graph.initializers["wide/C3/weights"]))


def test_other_tasks_have_no_tables(tmp_path):
    with pytest.raises(RequestError, match="mobilenet-v1-cifar10 has no embedding tables"):
        api.export("mobilenet-v1-cifar10", "npz", tmp_path / "a.npz")


def vectors_of(folder, name, column="user_id"):
    """Table of a column in a fresh checkpoint, {value: vector}."""
    about = read_json(folder / "train.json")["features"]["schema"]["columns"]
    values = next(spec for spec in about if spec["name"] == column)["encoding"]["values"]
    return values, torch.load(folder / "model.pt")["state_dict"][name].numpy()


@pytest.mark.parametrize("form", ["npy and txt", "npy", "npz"])
def test_rows_start_from_vectors(form, log, tmp_path, capsys):
    values = zoo.schema(log)["schema"]["columns"][1]["encoding"]["values"]
    vectors = np.random.default_rng(0).normal(size=(len(values), 4)).astype(np.float32)
    keys = [*values]
    if form == "npy and txt":  # in another order, one unknown value, one value without a vector
        keys = ["unknown", *values[:0:-1]]
        np.save(tmp_path / "vectors.npy", np.concatenate([vectors[:1] * 0, vectors[:0:-1]]))
        (tmp_path / "vectors.txt").write_text("\n".join(keys) + "\n")
    elif form == "npy":
        np.save(tmp_path / "vectors.npy", vectors)
    else:
        np.savez(tmp_path / "vectors.npz", key=np.array(values), value=vectors)
    name = f"vectors.{form[:3]}"
    path = schema(tmp_path / "schema.json", log, user_id={"table": name})
    settings = {**TINY, "learning_rate": "1e-12"}
    zoo.train("deepfm", log, tmp_path / "a", settings=settings, schema=path)
    said = capsys.readouterr().err
    vocabulary, table = vectors_of(tmp_path / "a", "embeddings.weight")
    first = int(form == "npy and txt")
    assert f"user_id: {len(values) - first} of {len(values)} values start from {name}" in said
    assert vocabulary == values
    np.testing.assert_allclose(table[1 + first : 1 + len(values)], vectors[first:], atol=1e-4)
    assert '"table"' not in (tmp_path / "a" / "schema.json").read_text()


@pytest.mark.parametrize("width", [2, 9])
def test_vectors_of_another_width_are_fitted(width, log, tmp_path):
    values = zoo.schema(log)["schema"]["columns"][1]["encoding"]["values"]
    vectors = np.random.default_rng(0).normal(size=(len(values), width)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    path = schema(tmp_path / "schema.json", log, user_id={"table": "vectors.npy"})
    zoo.train("dcn-v2", log, tmp_path / "a", settings={**TINY, "learning_rate": "1e-12"}, schema=path)
    table = vectors_of(tmp_path / "a", "embeddings.weight")[1][1 : 1 + len(values)]
    if width == 2:
        np.testing.assert_allclose(table, np.pad(vectors, ((0, 0), (0, 2))), atol=1e-4)
    else:
        centred = vectors - vectors.mean(0)
        own = np.linalg.svd(centred, compute_uv=False)[:4]
        np.testing.assert_allclose(np.linalg.svd(table, compute_uv=False), own, rtol=1e-3)


def test_unusable_vectors_are_refused(log, tmp_path):
    cases = [
        (None, "does not exist, expected a .npy"),
        (np.zeros(5, np.float32), r"has the shape \[5\] of float32, expected \[values, width\]"),
        (np.zeros((5, 4), np.float32), "has 5 vectors, expected 12, those of the column's vocabulary"),
        (np.full((12, 4), np.nan, np.float32), "has NaN or infinity in row 0"),
    ]
    path = schema(tmp_path / "schema.json", log, user_id={"table": "vectors.npy"})
    for number, (array, message) in enumerate(cases):
        if array is not None:
            np.save(tmp_path / "vectors.npy", array)
        with pytest.raises(RequestError, match=message):
            zoo.train("deepfm", log, tmp_path / f"{number}", settings=TINY, schema=path)
        assert not (tmp_path / f"{number}").exists()


def test_tables_beyond_memory_are_refused(log, tmp_path, monkeypatch):
    zoo.train("deepfm", log, tmp_path / "a", settings={**TINY, "embedding_size": "16"})
    zoo.build(tmp_path / "a")
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "500B")
    with pytest.raises(RequestError, match="found tables of .* expected at most the memory for tables"):
        api.export(tmp_path / "a", "npz", tmp_path / "tables.npz")
    assert not (tmp_path / "tables.npz").exists()
