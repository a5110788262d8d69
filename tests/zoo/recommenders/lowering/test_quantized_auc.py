"""A trained model with tables of 4 bits keeps its AUC, and the bound chooses the bits of every table."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.click_logs import written

import zoo
from pipelines.analysis.metrics import auc
from pipelines.core import machine
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.steps import Gather, QuantizedGather
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema_inference import infer
from zoo.recommenders.lowering import quantized_tables
from zoo.recommenders.lowering.lower import lower

ROWS, HELD_OUT, USERS, ITEMS, TAGS = 24_000, 8_000, 1_200, 900, 300
SETTINGS = {
    "epochs": "2",
    "batch_size": "256",
    "learning_rate": "0.01",
    "embedding_size": "16",
    "hidden": "32",
    "refit": "false",
    "l2_embeddings": "10",
}


def write_log(folder):
    """Clicks depend on the user, the item and the best tag of a list; returns the training rows and the others."""
    rng = np.random.default_rng(0)
    users, items = rng.zipf(1.3, ROWS) % USERS, rng.zipf(1.3, ROWS) % ITEMS
    tags = rng.integers(0, TAGS, (ROWS, 3))
    liked, good, tag_good = (rng.standard_normal(count) for count in (USERS, ITEMS, TAGS))
    logit = 0.8 * liked[users] + 0.8 * good[items] + tag_good[tags].max(axis=1) - 1.5
    columns = {
        "click": (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(int).tolist(),
        "user_id": [f"u{user}" for user in users],
        "item_id": [f"i{item}" for item in items],
        "tags": ["|".join(f"t{tag}" for tag in row) for row in tags],
    }
    first = {name: values[:-HELD_OUT] for name, values in columns.items()}
    last = {name: values[-HELD_OUT:] for name, values in columns.items()}
    return written(folder / "first.csv", **first), written(folder / "last.csv", **last)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(graph, calibration table, inputs, labels, float probabilities) of held-out rows."""
    folder = tmp_path_factory.mktemp("auc")
    first, last = write_log(folder)
    schema = infer(open_logs(first)[0], None)
    columns = tuple(replace(column, pooling="max") if column.name == "tags" else column for column in schema.columns)
    replace(schema, columns=columns).save(folder / "schema.json")
    zoo.train("deepfm", first, folder / "m", settings=SETTINGS, schema=folder / "schema.json")
    zoo.build(folder / "m")
    pipeline = zoo.pipeline(folder / "m", "fp32", "onnxruntime")
    rows = Rows.concatenate(list(pipeline.rows(last, labelled=True)))
    batch = pipeline.encode(rows)
    inputs = batch["ids"], batch.get("numbers"), batch.get("scales")
    table = CalibrationTable.load(folder / "m" / "calibration.json")
    return io.load(folder / "m" / "rewritten.onnx"), table, inputs, rows.labels, pipeline.probabilities(batch)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    monkeypatch.setattr(quantized_tables, "SPACE", 0)
    monkeypatch.setattr(machine, "caches", lambda: {"L2": 2**10, "L3": 2**12})


def unfolded(trained, bound):
    """(program of the form "int16", its tables)."""
    graph, report = lower(*trained[:2], QuantRecipe(bound=bound))
    programs = {node.name: click_program(node) for node in graph.graph}
    return programs["int16"], report["tables"]


def test_tables_of_four_bits_keep_the_auc(trained, monkeypatch):
    monkeypatch.setattr(quantized_tables, "BITS", (8, 4))
    program, tables = unfolded(trained, 1.0)
    assert {table["bits"] for table in tables} == {4} and len(tables) == 3
    assert not any(isinstance(step, Gather) for step in program.steps)
    assert "max" in {step.pool for step in program.steps if isinstance(step, QuantizedGather)}
    _, _, inputs, labels, exact = trained
    before = auc(labels, exact)
    assert before > 0.7
    scores = reference.run(program, *inputs)[0].ravel()
    assert auc(labels, scores) >= before - 0.0005
    for isa in extension.isas():
        np.testing.assert_allclose(native.click_program(program, isa)(*inputs).ravel(), scores, atol=1e-6)


def test_the_bound_chooses_the_bits_of_every_table(trained):
    chosen = {}
    for bound in (1.0, 0.006, 1e-6):
        tables = unfolded(trained, bound)[1]
        assert all(table["change"] <= bound / 2 for table in tables)  # the other half is for what layers add
        chosen[bound] = [table["bits"] for table in tables]
    assert set(chosen[1.0]) == {2} and set(chosen[1e-6]) == {16}
    assert len(set(chosen[0.006])) > 1 and all(2 < bits < 16 for bits in chosen[0.006])
