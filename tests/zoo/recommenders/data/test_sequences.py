"""Sequences: lists whose items are kept apart, with the table of another column."""

import gzip
import json
from datetime import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders.data import csv_reader
from zoo.recommenders.data.encoding import Encoding
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer, load_schema

HISTORIES = ["a|b", "", None, "c", " b |a| c||d", "d|d|d|e", "x|a"]
EXPECTED = [[2, 1, 6], [6, 6, 6], [6, 6, 6], [3, 6, 6], [4, 3, 1], [5, 4, 4], [1, 0, 6]]


def column(**changed):
    history = {"name": "history", "kind": "categories", "separator": "|", "pooling": "none", "length": 3}
    return {**history, "shares": "item_id", **changed}


def schema_json(of_item=None, **changed):
    item = {"name": "item_id", "kind": "category", "encoding": of_item or {"type": "vocabulary", "values": [*"abcde"]}}
    return {"canonical": True, "columns": [{"name": "clicked", "kind": "label"}, item, column(**changed)]}


def rows():
    return {"clicked": [1, 0, 1, 0, 1, 0, 1], "item_id": [*"abcdexa"], "history": HISTORIES}


@pytest.fixture
def sources(tmp_path):
    frame = pd.DataFrame(rows())
    frame.to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    frame.to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    lists = [None if not text else [item.strip() for item in text.split("|") if item.strip()] for text in HISTORIES]
    with (tmp_path / "lists.jsonl").open("w") as file:
        for item, history in zip(frame.item_id, lists, strict=True):
            file.write(json.dumps({"clicked": 1, "item_id": item, "history": history}) + "\n")
    frame.to_parquet(tmp_path / "log.parquet")
    frame.assign(history=lists).to_parquet(tmp_path / "lists.parquet")
    paths = [tmp_path / name for name in ("log.csv", "log.csv.gz", "log.jsonl", "lists.jsonl", "log.parquet")]
    return [*paths, tmp_path / "lists.parquet", pa.table(frame), frame.to_dict("records")]


def test_same_ids_of_all_sources(sources):
    features = Features(Schema.from_json(schema_json()))
    for source in sources:
        (batch,) = features.read(source)
        assert batch.ids[:, 1:].tolist() == EXPECTED, source
        assert batch.ids[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 1]
        assert batch.scales.shape == (7, 0)


@pytest.mark.parametrize("encoding", [None, {"type": "hash", "buckets": 50}])
def test_native_reader_has_the_ids_of_the_definition(sources, encoding):
    encoded = Encoding(Schema.from_json(schema_json(encoding)))
    (log,) = open_logs(sources[0])
    reader = csv_reader.CsvReader.of(Features(encoded.schema), log, log.columns)
    if reader is None:
        pytest.skip("no native code")
    (parsed,) = reader.batches(None, {"read": 0.0}, 100)
    (texts,) = log.batches(forms=encoded.schema.forms)
    columns = dict(zip(log.columns, texts.columns, strict=True))
    assert parsed.ids.tolist() == encoded.encode_columns(columns, np.arange(7), False).ids.tolist()


def test_row_numbers_as_ids():
    features = Features(Schema.from_json(schema_json({"type": "id", "rows": 9})))
    (batch,) = features.read([{"item_id": "3", "history": "1|2|3|8"}, {"item_id": "", "history": "11|5"}])
    assert batch.ids.tolist() == [[3, 8, 3, 2], [0, 5, 0, 0]]


def test_schema_keeps_one_vocabulary(tmp_path):
    schema = Schema.from_json(schema_json())
    assert schema.columns[2].encoding == schema.columns[1].encoding
    schema.save(tmp_path / "schema.json")
    written = json.loads((tmp_path / "schema.json").read_text())["columns"][2]
    assert "encoding" not in written and written["shares"] == "item_id"
    assert Schema.load(tmp_path / "schema.json") == schema
    assert "that of item_id, sequence of the last 3" in schema.table()[2][4]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shares": "film"}, "shares film .absent., expected a category"),
        ({"shares": "clicked"}, "shares clicked .label., expected a category"),
        ({"encoding": {"type": "hash", "buckets": 7}}, "found an encoding, expected none beside that of item_id"),
        ({"pooling": "first"}, "'first' is not one of"),
        ({"kind": "category", "pooling": "", "separator": ""}, "history"),
    ],
)
def test_faults(changed, words):
    with pytest.raises(RequestError, match=words):
        Schema.from_json(schema_json(**changed))


def log_of(count=300, items=40):
    rng = np.random.default_rng(0)
    names = np.array([f"i{i}" for i in range(items)])
    histories = ["|".join(rng.choice(names, rng.integers(0, 6))) for _ in range(count)]
    tags = ["|".join(rng.choice(["red", "blue", "green"], rng.integers(1, 3))) for _ in range(count)]
    columns = {"clicked": rng.integers(0, 2, count), "item_id": rng.choice(names, count)}
    return pd.DataFrame({**columns, "history": histories, "tags": tags})


def test_inferred_for_families_of_sequences(tmp_path):
    log_of().to_csv(tmp_path / "log.csv", index=False)
    pooled = {spec.name: spec for spec in infer(open_logs(tmp_path / "log.csv")).columns}
    assert pooled["history"].pooling == pooled["tags"].pooling == "mean"
    assert (pooled["history"].shares, pooled["tags"].shares) == ("item_id", "")
    report = zoo.schema(tmp_path / "log.csv", family="din")
    columns = {spec["name"]: spec for spec in report["schema"]["columns"]}
    assert columns["history"]["pooling"] == "none" and columns["history"]["shares"] == "item_id"
    assert columns["tags"]["pooling"] == "mean"
    with pytest.raises(RequestError, match="found the family 'resnet50', expected one that has a schema"):
        zoo.schema(tmp_path / "log.csv", family="resnet50")


def test_the_table_is_that_of_the_category_with_the_same_values(tmp_path):
    """Ids that are whole numbers are values of every column of ids with more of them, and codes of all."""
    rng = np.random.default_rng(0)
    histories = ["|".join(map(str, rng.integers(1, 41, rng.integers(1, 6)))) for _ in range(900)]
    codes = ["|".join(map(str, rng.integers(1, 4, 2))) for _ in range(900)]
    columns = {
        "clicked": rng.integers(0, 2, 900),
        "user_id": rng.integers(1, 600, 900),
        "item_id": rng.integers(1, 45, 900),
    }
    pd.DataFrame({**columns, "history": histories, "genre_codes": codes}).to_csv(tmp_path / "log.csv", index=False)
    inferred = {spec.name: spec for spec in infer(open_logs(tmp_path / "log.csv")).columns}
    assert (inferred["history"].shares, inferred["genre_codes"].shares) == ("item_id", "")
    assert inferred["history"].encoding == inferred["item_id"].encoding


def test_edited_by_hand(tmp_path):
    log_of().to_csv(tmp_path / "log.csv", index=False)
    value = infer(open_logs(tmp_path / "log.csv")).to_json()
    edited = [
        {"name": "history", "kind": "categories", "pooling": "none", "shares": "item_id"}
        if spec["name"] == "history"
        else spec
        for spec in value["columns"]
    ]
    (tmp_path / "schema.json").write_text(json.dumps({**value, "columns": edited}))
    (history,) = [spec for spec in load_schema(tmp_path / "schema.json", tmp_path / "log.csv").columns if spec.shares]
    assert (history.pooling, history.length, history.separator) == ("none", 5, "|")
    assert history.encoding["type"] == "vocabulary"


TIMES = ["100|1100", "", None, "5", "5|7| 9 ||11", "1|2|3", "x|1000"]  # of the items in HISTORIES
WHEN = [1103, 5, 5, "", 42, 9, 1000]
GAPS = [[3, 10, 33], [33, 33, 33], [33, 33, 33], [0, 33, 33], [6, 6, 6], [0, 0, 0], [1, 0, 33]]
WITHOUT_WHEN = [[1, 10, 33], [33, 33, 33], [33, 33, 33], [1, 33, 33], [1, 2, 3], [0, 0, 0], [1, 0, 33]]


def gaps_json(timed=True, **changed):
    gaps = {"name": "times", "kind": "categories", "separator": "|", "gaps_of": "history", "unit": "s"}
    gaps["encoding"] = {"type": "gaps", "buckets": 32}
    value = schema_json()
    when = [{"name": "when", "kind": "timestamp", "unit": "s"}] if timed else []
    return {**value, "columns": [*when, {**gaps, **changed}, *value["columns"]]}


@pytest.fixture
def timed_sources(tmp_path):
    frame = pd.DataFrame({"when": [str(moment) for moment in WHEN], **rows(), "times": TIMES})
    frame.to_csv(tmp_path / "log.csv", index=False)
    frame.to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "log.parquet")
    return [tmp_path / "log.csv", tmp_path / "log.jsonl", tmp_path / "log.parquet", frame.to_dict("records")]


def test_time_gaps_of_all_sources(timed_sources):
    """1 + floor(log2(1 + seconds)); 0 is an unknown gap, as in a row with another number of times than of items."""
    for timed, expected in ((True, GAPS), (False, WITHOUT_WHEN)):
        features = Features(Schema.from_json(gaps_json(timed)))
        for source in timed_sources:
            (batch,) = features.read(source)
            assert batch.ids[:, :3].tolist() == expected, source
            assert batch.ids[:, 4:].tolist() == EXPECTED, source


def test_gaps_of_skipped_items_are_left_out():
    value = gaps_json()
    value["columns"][-2]["encoding"] = {"type": "id", "rows": 9}
    (batch,) = Features(Schema.from_json(value)).read(
        [{"when": 100, "item_id": 1, "history": "3|77|4", "times": "99|98|70"}]
    )
    assert batch.ids.tolist() == [[5, 2, 33, 1, 4, 3, 0]]


def test_gaps_of_texts_and_lists_of_times():
    value = gaps_json(unit="text")
    value["columns"][0]["unit"] = "text"
    row = {"when": "2024-01-01T00:00:05", "item_id": "a", "history": ["a", "b"]}
    times = [datetime(2023, 12, 31), datetime(2024, 1, 1, 0, 0, 2)]
    (batch,) = Features(Schema.from_json(value)).read([{**row, "times": times}])
    assert batch.ids[0, :3].tolist() == [3, 17, 33]


def test_the_time_of_the_row_is_required():
    features = Features(Schema.from_json(gaps_json()))
    with pytest.raises(RequestError, match="lacks the column when"):
        list(features.read([{"item_id": "a", "history": "a", "times": "5"}]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gaps_of": "films"}, "found gaps_of films .absent., expected a sequence"),
        ({"gaps_of": "item_id"}, "found gaps_of item_id .category., expected a sequence"),
        ({"encoding": {"type": "hash", "buckets": 5}}, "found the encoding hash, expected gaps"),
        ({"length": 9}, "times with gaps_of have no length of their own"),
        ({"shares": "item_id"}, "times with gaps_of have no shares of their own"),
        ({"unit": ""}, "unit"),
        ({"kind": "number"}, "a number has no gaps_of"),
    ],
)
def test_faults_of_time_gaps(changed, words):
    with pytest.raises(RequestError, match=words):
        Schema.from_json(gaps_json(**changed))


def timed_log(count=300):
    log = log_of(count)
    start = 1_700_000_000 + np.arange(count) * 60
    lengths = [0 if not text else text.count("|") + 1 for text in log.history]
    return log.assign(
        timestamp=start,
        history_at=[
            "|".join(str(t - 1000 * back) for back in range(n, 0, -1)) for t, n in zip(start, lengths, strict=True)
        ],
        shown_at=["|".join([str(t - 5)] * 2) for t in start],
    )


def test_times_beside_a_sequence_are_its_gaps(tmp_path):
    timed_log().to_csv(tmp_path / "log.csv", index=False)
    pooled = {spec.name: spec for spec in infer(open_logs(tmp_path / "log.csv")).columns}
    assert not any(spec.gaps_of for spec in pooled.values())
    schema = infer(open_logs(tmp_path / "log.csv"), sequences=True)
    inferred = {spec.name: spec for spec in schema.columns}
    assert (inferred["history_at"].gaps_of, inferred["history_at"].unit) == ("history", "s")
    assert inferred["history_at"].length == inferred["history"].length
    assert inferred["shown_at"].gaps_of == ""
    assert Schema.from_json(schema.to_json()) == schema
    schema.save(tmp_path / "schema.json")
    value = json.loads((tmp_path / "schema.json").read_text())
    short = {"name": "history_at", "kind": "categories", "gaps_of": "history"}
    value["columns"] = [short if spec["name"] == "history_at" else spec for spec in value["columns"]]
    (tmp_path / "schema.json").write_text(json.dumps(value))
    columns = {spec.name: spec for spec in load_schema(tmp_path / "schema.json", tmp_path / "log.csv").columns}
    completed = columns["history_at"]
    assert (completed.unit, completed.separator, completed.length) == ("s", "|", columns["history"].length)
    value["columns"] = [{**spec, "gaps_of": "history"} if spec["name"] == "tags" else spec for spec in value["columns"]]
    (tmp_path / "schema.json").write_text(json.dumps(value))
    with pytest.raises(RequestError):
        load_schema(tmp_path / "schema.json", tmp_path / "log.csv")
