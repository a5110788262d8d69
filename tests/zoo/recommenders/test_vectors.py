"""Columns of vectors: lists of numbers of one length, such as pre-trained embeddings, are dense inputs."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders.data.columns.dense import parse_vectors
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer

ROWS, WIDTH = 240, 3
ITEMS = np.sin(np.arange(20 * WIDTH)).reshape(20, WIDTH) * [1, 2, 3] + 5
COLUMNS = {
    "clicked": [i * 7 % 5 % 2 for i in range(ROWS)],
    "user_id": [f"u{i * 5 % 9}" for i in range(ROWS)],
    "item_id": [f"i{i % 20}" for i in range(ROWS)],
    "age": [18 + i * 11 % 50 for i in range(ROWS)],
}
VECTORS = [None if i % 20 == 7 else ITEMS[i % 20].astype(np.float32).tolist() for i in range(ROWS)]
EXPECTED = np.array([[np.nan] * WIDTH if vector is None else vector for vector in VECTORS])


def table(vectors=VECTORS, kind=None):
    return pa.table(COLUMNS | {"item_vector": pa.array(vectors, kind or pa.list_(pa.float32()))})


def as_text(write):
    return pd.DataFrame(COLUMNS | {"item_vector": ["" if vector is None else write(vector) for vector in VECTORS]})


def json_lines(path):
    rows = table().to_pylist()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SOURCES = {
    "parquet": lambda folder: pq.write_table(table(), folder / "log.parquet") or folder / "log.parquet",
    "jsonl": lambda folder: json_lines(folder / "log.jsonl"),
    "fixed size": lambda _: table(kind=pa.list_(pa.float32(), WIDTH)),
    "large": lambda _: table(kind=pa.large_list(pa.float64())),
    "frame": lambda _: pd.DataFrame(COLUMNS | {"item_vector": [v and np.array(v, np.float32) for v in VECTORS]}),
    "rows": lambda _: table().to_pylist(),
    "json text": lambda _: as_text(json.dumps),
    "numpy text": lambda _: as_text(lambda vector: str(np.array(vector, np.float32))),
    "semicolons": lambda _: as_text(lambda vector: ";".join(map(str, vector))),
    "blanks": lambda _: as_text(lambda vector: " ".join(map(str, vector))),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_the_same_numbers(source, tmp_path):
    log = SOURCES[source](tmp_path)
    schema = Schema.from_json(infer(open_logs(log)).to_json())
    column = next(column for column in schema.columns if column.name == "item_vector")
    assert (column.kind, column.tower, column.missing) == ("vector", "item", 12)
    mean, deviation = np.nanmean(EXPECTED, 0), np.nanstd(EXPECTED, 0)
    np.testing.assert_allclose(column.encoding["means"], mean, rtol=1e-6)
    np.testing.assert_allclose(column.encoding["deviations"], deviation, rtol=1e-6)
    (rows,) = Features(schema).read(log, labelled=True)
    assert rows.numbers.shape == (ROWS, 1 + WIDTH + 1)  # age, the vector, and whether it is missing
    np.testing.assert_allclose(rows.numbers[:, 1:-1], np.nan_to_num((EXPECTED - mean) / deviation), atol=1e-4)
    np.testing.assert_array_equal(rows.numbers[:, -1], np.isnan(EXPECTED[:, 0]))


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.5, 2.0], "item_vector: found 2 numbers in '1.5|2', expected 3"),
        ([1.5, None, 2.0], "item_vector: found 2 numbers"),
        ([1.5, float("nan"), 2.0], "item_vector: found 2 numbers"),
        ([1.5, float("inf"), 2.0], "item_vector: found 2 numbers"),
        ([1.5, 2.0, 3.0, 4.0], "item_vector: found 4 numbers"),
    ],
)
def test_a_vector_of_another_width_is_refused_with_its_row_or_left_out(vector, message):
    features = Features(infer(open_logs(table())))
    faulty = table([*VECTORS[:29], vector, *VECTORS[30:]])
    with pytest.raises(RequestError, match=r"the input row 30, column") as raised:
        list(features.read(faulty))
    assert message in str(raised.value)
    errors = ErrorLog()
    (rows,) = features.read(faulty, on_error="skip", errors=errors)
    assert len(rows) == ROWS - 1 and 29 not in rows.index and errors.counts == {"vector": 1}
    (spec,) = (column for column in infer(open_logs(faulty)).columns if column.name == "item_vector")
    assert spec.kind == "ignored" and "row 30: found" in spec.why


def test_whole_numbers_are_items_of_a_list_unless_the_kind_is_chosen():
    log = table([[i % 2, i % 3, 1] for i in range(ROWS)], pa.list_(pa.int64()))
    assert infer(open_logs(log)).columns[-1].kind == "categories"
    assert infer(open_logs(log), kinds={"item_vector": "vector"}).columns[-1].kind == "vector"
    with pytest.raises(RequestError, match=r"column user_id: found no such lists in it; a vector is a list of numbers"):
        infer(open_logs(log), kinds={"user_id": "vector"})


def test_decimal_commas_are_no_separators():
    for text in ("0,5;0,7", "0,5 0,7", "[0,5 | 0,7]", "0,5", "1.000,50", "-1,000.50"):
        numbers, _ = parse_vectors(pa.array([text]))
        assert np.isnan(numbers).all(), text
    for text in ("0.5,0.7", "0.5, 0.7", "[5,7]", "48.85,2.35", "(0.5 , 0.7)", "0.5\t0.7"):
        numbers, lengths = parse_vectors(pa.array([text, None, "[]"]))
        assert np.isfinite(numbers).all() and lengths.tolist() == [2, 0, 0], text


def test_autoint_makes_one_field_of_a_vector():
    torch = pytest.importorskip("torch", reason="needs the train extra")
    features, entry = Features(infer(open_logs(table()))), zoo.entry("autoint")
    network = entry.build(features, type(entry.config)(embedding_size=4, hidden=(8,))).eval()
    assert network.join.fields == 2 + 2 + 1  # categories, the age and whether the vector is missing, the vector
    (rows,) = features.read(table())
    with torch.no_grad():
        logits = network(*(torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")))
    assert logits.shape == (ROWS, 1) and logits.std() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["autoint", "wide-deep", "deepfm", "dcn-v2", "dlrm", "finalmlp", "gdcn", "two-tower"]
)
def test_families_train_and_run_on_vectors(family, tmp_path, caches):
    pytest.importorskip("torch", reason="needs the train extra")
    settings = {"embedding_size": "4", "hidden": "8", "epochs": "1", "l2_embeddings": "10", "refit": "false"}
    zoo.train(family, table(), tmp_path / "model", settings=settings)
    zoo.build(tmp_path / "model")
    rows = table().to_pylist()[:50]
    row, engines = rows[3], [zoo.pipeline(tmp_path / "model", engine=engine) for engine in ("native", "onnxruntime")]
    native, expected = (np.array([row["probability"] for row in pipeline(rows)]) for pipeline in engines)
    np.testing.assert_allclose(native, expected, atol=0.02)
    user, items = ({name: row[name] for name in names} for names in (("user_id", "age"), ("item_id", "item_vector")))
    ranked = engines[0].rank(user, [items, {**items, "item_vector": VECTORS[0]}])
    full = engines[0]([{**user, **items}, {**user, **items, "item_vector": VECTORS[0]}])
    assert sorted(row["probability"] for row in ranked) == sorted(row["probability"] for row in full)


@pytest.mark.slow
def test_one_category_alone_runs_in_native_kernels_and_is_finetuned(tmp_path, caches):
    """No pair of embeddings has a product."""
    pytest.importorskip("torch", reason="needs the train extra")
    log, settings = table().drop_columns(["user_id"]), {"embedding_size": "4", "hidden": "8", "epochs": "1"}
    zoo.train("deepfm", log, tmp_path / "model", settings=settings | {"l2_embeddings": "10"})
    zoo.finetune(tmp_path / "model", log, tmp_path / "tuned", settings={"epochs": "1"})
    zoo.build(tmp_path / "tuned")
    assert len(zoo.pipeline(tmp_path / "tuned", engine="native")(log.to_pylist()[:9])) == 9
