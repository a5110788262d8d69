"""Rows of embedding tables that are seldom seen: which go, what stands for them, and the model that is left."""

import csv
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers.trainings import broken_off, random_network, results

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

from zoo.recommenders.data.features import Features  # noqa: E402
from zoo.recommenders.data.logs import open_logs  # noqa: E402
from zoo.recommenders.data.schema import Schema  # noqa: E402
from zoo.recommenders.data.schema_inference import infer  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFM  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFMConfig as Settings  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTower  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTowerConfig as OfTowers  # noqa: E402
from zoo.recommenders.training import rare_rows  # noqa: E402
from zoo.recommenders.training.distillation import LogSource, Teacher  # noqa: E402
from zoo.recommenders.training.pruning import PrunableRecommender  # noqa: E402
from zoo.recommenders.training.row_store import CategoryCounts, RowStore  # noqa: E402
from zoo.recommenders.training.trainer import Trainer  # noqa: E402

ROWS, HELD = 1000, 200
SETTINGS = {"batch_size": "128", "held_out": "0.2", "l2_embeddings": "10"}
STRATEGY = {
    "epochs": 3,
    "drop": 1,
    "strategies": [
        {"kind": "distil", "weight": 0.5},
        {"kind": "prune", "from": 0, "to": 2, "goal": "ratio=.3,rows=5", "schedule": "iterative", "times": 2},
        {"kind": "qat", "from": 2, "to": 3},
    ],
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Twenty users and items are frequent, 60 of each are seen two or three times; clicks depend on the frequent."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("log") / "log.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["click", "user_id", "item_id", "history", "hashed_id", "row_id", "price"])
        for _ in range(ROWS):
            user, item = (draw.randrange(20) if draw.random() < 0.85 else draw.randrange(20, 80) for _ in "ui")
            history = "|".join(f"i{draw.choice([1, 2, 3, draw.randrange(90)])}" for _ in range(draw.randrange(4)))
            click = draw.random() < (0.8 if (user + item) % 2 else 0.2)
            row = [
                int(click),
                f"u{user}",
                f"i{item}",
                history,
                f"h{draw.randrange(9) if draw.random() < 0.8 else draw.randrange(9, 60)}",
                draw.randrange(4),
                round(draw.random() * 9, 2),
            ]
            rows.writerow(row)
    return str(path)


@pytest.fixture(scope="module")
def schema(log):
    """As inferred, but one column hashed, and one that holds row numbers."""
    inferred = infer(open_logs(log)[0], None)
    encodings = {"hashed_id": {"type": "hash", "buckets": 32}, "row_id": {"type": "id", "rows": 4}}
    return replace(
        inferred,
        columns=tuple(replace(spec, encoding=encodings.get(spec.name, spec.encoding)) for spec in inferred.columns),
    )


@pytest.fixture(scope="module")
def start(log, schema, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    schema.save(folder / "schema.json")
    sizes = {"hidden": "48,32", "embedding_size": "32", "epochs": "2", "refit": "false"}
    zoo.train("deepfm", log, folder / "deepfm", settings=SETTINGS | sizes, schema=folder / "schema.json")
    zoo.build(folder / "deepfm")
    return folder / "deepfm"


def read(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def values(features, name):
    (column,) = (spec for spec in features.schema.columns if spec.name == name)
    return column.encoding["values"]


def opened(features, log, folder):
    """The log's rows, and how often each id is in those to train on."""
    store = RowStore(features, log, "raise", folder)
    return store, CategoryCounts(features, store, ROWS - HELD, 1).counts


def logits(network, store, rows):
    return results(network, store.rows(np.array(rows)))[0]


@pytest.mark.parametrize(("build", "settings"), [(DeepFM, Settings), (TwoTower, OfTowers)])
def test_rows_that_hold_frequent_values_give_what_they_gave(build, settings, schema, log, tmp_path):
    features, config = Features(schema), settings(embedding_size=32, hidden=(48, 32))
    network = random_network(build, features, config)
    store, counts = opened(features, log, tmp_path)
    fewer, smaller = rare_rows.prune(network, features, config, counts, 5)
    rows = read(log)
    seen = [row["user_id"] for row in rows[: ROWS - HELD]]
    frequent = {name for name in seen if seen.count(name) >= 5}
    assert set(values(fewer, "user_id")) == frequent and 15 < len(frequent) < 60
    assert values(fewer, "user_id") == [value for value in values(features, "user_id") if value in frequent]
    assert rare_rows.table_rows(fewer)["hashed_id"] == rare_rows.table_rows(features)["hashed_id"]
    assert rare_rows.without_vocabulary(fewer) == ["hashed_id", "row_id"]
    after, _ = opened(fewer, log, tmp_path)
    texts = {name: set(values(fewer, name)) for name in ("user_id", "item_id", "history")}
    kept = [
        index
        for index, row in enumerate(rows)
        if row["user_id"] in texts["user_id"]
        and row["item_id"] in texts["item_id"]
        and set(filter(None, row["history"].split("|"))) <= texts["history"]
    ]
    assert 100 < len(kept) < ROWS
    np.testing.assert_allclose(logits(smaller, after, kept), logits(network, store, kept), rtol=1e-4, atol=1e-5)
    others = sorted(set(range(ROWS)) - set(kept))
    assert np.abs(logits(smaller, after, others) - logits(network, store, others)).max() > 1e-3


def test_the_unknown_row_is_the_mean_of_what_went_by_how_often_it_was_seen():
    table, count = torch.arange(12.0).reshape(6, 2), np.array([0, 9, 1, 3, 0, 7])
    pruned = rare_rows._prune_table(table, np.array([1]), count)  # ids 2, 3 and 4 go
    np.testing.assert_array_equal(pruned, [(table[2] + 3 * table[3]).numpy() / 4, table[1].numpy(), table[5].numpy()])
    unseen = rare_rows._prune_table(table, np.array([1, 2, 3]), count)
    np.testing.assert_array_equal(unseen, table[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize(("column", "buckets"), [("user_id", 60), ("history", 80)])
def test_frequent_values_of_a_hashed_column_get_a_row_each_that_begins_as_their_bucket(
    schema, log, tmp_path, column, buckets
):
    encoding = {"type": "hash", "buckets": buckets}
    columns = tuple(replace(spec, encoding=encoding) if spec.name == column else spec for spec in schema.columns)
    features, config = Features(replace(schema, columns=columns)), Settings(embedding_size=16, hidden=(16,))
    torch.manual_seed(0)
    network = DeepFM(features, config).eval()
    _, counts = opened(features, log, tmp_path)
    names = rare_rows.with_vocabularies(features, log, counts, 5)
    _, named = opened(names, log, tmp_path)
    fewer, smaller = rare_rows.prune(network, features, config, counts, 5, names, named)
    index = [field.name for field in features.fields].index(column)
    width = features.fields[index].width
    seen = [value for row in read(log)[: ROWS - HELD] for value in row[column].split("|")[-width:] if value]
    frequent = {value for value in seen if seen.count(value) >= 5}
    assert set(values(fewer, column)) == frequent and 10 < len(frequent) < min(buckets, len(set(seen)))
    assert set(values(names, column)) >= frequent  # those of all rows, of which those to train on choose
    before, after = (model.get_submodule("embeddings").table(index).detach() for model in (network, smaller))
    place = rare_rows._buckets(pa.array(values(fewer, column)), features.fields[index])
    assert len(set(place.tolist())) < len(place)  # some shared a bucket
    assert torch.equal(after[1:-1], before[place]) and torch.equal(after[-1], before[-1])
    unknown = rare_rows._buckets(pa.array([value for value in seen if value not in frequent]), features.fields[index])
    np.testing.assert_allclose(after[0], before[unknown].mean(0), rtol=1e-5, atol=1e-6)


def test_a_hashed_column_of_too_many_frequent_values_stays(schema, log, tmp_path, monkeypatch):
    features = Features(schema)
    _, counts = opened(features, log, tmp_path)
    assert values(rare_rows.with_vocabularies(features, log, counts, 5), "hashed_id")
    assert rare_rows.with_vocabularies(features, log, counts, 10**6).schema == schema
    monkeypatch.setattr(rare_rows, "MAX_VALUES", 3)
    assert rare_rows.with_vocabularies(features, log, counts, 5).schema == schema


def test_of_a_vocabulary_of_rare_values_the_most_frequent_stays(schema, log, tmp_path):
    features = Features(schema)
    _, counts = opened(features, log, tmp_path)
    fewer, _ = rare_rows.prune(DeepFM(features, Settings()), features, Settings(), counts, 10**6)
    ids = counts[[field.name for field in features.fields].index("user_id")]
    assert values(fewer, "user_id") == [values(features, "user_id")[np.argmax(ids[1:-1])]]
    assert "; the 1 seen 1,000,000 times or more" in fewer.schema.columns[1].why
    assert Schema.from_json(fewer.schema.to_json()) == fewer.schema


def test_where_no_row_goes_it_is_said(schema, log, tmp_path):
    hashed = replace(schema, columns=tuple(spec for spec in schema.columns if not spec.encoding.get("values")))
    for log_schema, least, message in (
        (schema, 1, "found no value with fewer than 1 occurrences in the training rows"),
        (hashed, 5, r"found no column whose rows can be pruned, only hashed_id \(hash\), row_id \(id\)"),
    ):
        features = Features(log_schema)
        _, counts = opened(features, log, tmp_path)
        counts = [np.maximum(count, 1) for count in counts]
        with pytest.raises(RequestError, match=message):
            rare_rows.prune(DeepFM(features, Settings()), features, Settings(), counts, least)


def test_from_the_command_line(start, log, tmp_path):
    out = tmp_path / "out"
    options = [option for name, value in SETTINGS.items() for option in ("--set", f"{name}={value}")]
    command = ["finetune", str(start), "--data", log, "-o", str(out), "--prune", "rows=5", "--epochs", "1"]
    cli.call([*command, "--drop", "1", "--teacher", str(start), *options])
    report = read_json(out / "compression.json")
    before, after = report["rows"]["rows"]
    assert after < 0.6 * before and report["rows"]["kept"] == ["row_id"]
    assert report["rows"]["columns"].keys() == {"user_id", "item_id", "history", "hashed_id"}
    assert report["steps"][-1]["bytes"] < report["base"]["bytes"] - 32 * (before - after) / 2
    schema = Schema.load(out / "schema.json")
    assert len(values(Features(schema), "user_id")) + 2 == report["rows"]["columns"]["user_id"][1]
    scores = {}
    for engine in ("native", "onnxruntime"):
        cli.call(["run", str(out), log, "-o", str(tmp_path / f"{engine}.csv"), "--engine", engine])
        scores[engine] = [float(row["probability"]) for row in read(tmp_path / f"{engine}.csv")]
    assert len(scores["native"]) == ROWS
    np.testing.assert_allclose(scores["native"], scores["onnxruntime"], atol=0.02)
    again = {"settings": SETTINGS | {"epochs": "1", "refit": "false"}}
    zoo.finetune(out, log, tmp_path / "again", **again)
    grown, counts = Schema.load(tmp_path / "again/schema.json"), Counter(row["user_id"] for row in read(log))
    own, larger = values(Features(schema), "user_id"), values(Features(grown), "user_id")
    assert own == larger[: len(own)] and all(counts[value] >= 5 for value in larger[len(own) :])
    again["settings"]["grow"] = "false"
    zoo.finetune(out, log, tmp_path / "kept", **again)
    assert Schema.load(tmp_path / "kept/schema.json") == schema


def test_items_of_a_list_that_skips_unknown_values_are_counted_anew(schema, log, tmp_path):
    skips = tuple(
        replace(spec, encoding={**spec.encoding, "skip_unknown": True}) if spec.name == "history" else spec
        for spec in schema.columns
    )
    replace(schema, columns=skips).save(tmp_path / "schema.json")
    settings = SETTINGS | {"epochs": "1", "refit": "false"}
    zoo.train("deepfm", log, tmp_path / "start", settings=settings, schema=tmp_path / "schema.json")
    zoo.build(tmp_path / "start")
    model = PrunableRecommender(zoo.load(tmp_path / "start"), log, config=Settings(held_out=HELD))
    model.prune_rows(5, tmp_path / "fewer")
    features = Features.from_json(read_json(tmp_path / "fewer/train.json")["features"])
    vocabulary = set(values(features, "history"))
    lists = [[value for value in row["history"].split("|") if value in vocabulary] for row in read(log)]
    after, _ = opened(features, log, tmp_path)
    wanted = [1 / min(len(items), features.fields[2].width) if items else 0 for items in lists]
    np.testing.assert_allclose(after.rows(np.arange(ROWS))["scales"][:, 0], wanted, rtol=1e-6)


def test_a_teacher_with_other_vocabularies_reads_the_log_itself(start, log, tmp_path):
    model = PrunableRecommender(zoo.load(start), log, config=Settings(held_out=HELD))
    model.prune_rows(5, tmp_path / "fewer")
    features = read_json(tmp_path / "fewer/train.json")["features"]
    source = LogSource(log, "raise", tmp_path)
    teacher = Teacher(str(start), features, 1.0, source)
    places = np.array([700, 3, 11])
    batch = {name: tensor.numpy() for name, tensor in model.log.rows(places).items()}
    pipeline = zoo.pipeline(start, "fp32", "onnxruntime")
    wanted = pipeline.predict({name: batch[name] for name in pipeline.input_ports})["probability"][:, 0]
    np.testing.assert_allclose(teacher.labels({}, np.zeros(3, np.float32), places), wanted, atol=1e-6)
    with pytest.raises(RequestError, match="of another preprocessing"):
        Teacher("shop-clicks", features, 1.0, source)


@pytest.fixture(scope="module")
def whole(start, log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "compress.json").write_text(json.dumps(STRATEGY))
    zoo.finetune(start, log, folder / "out", strategy=folder / "compress.json", settings=dict(SETTINGS))
    return folder


@pytest.mark.slow
def test_rows_go_once_before_the_channels(whole):
    names = {path.name for path in (whole / "out/checkpoint").iterdir() if path.is_dir()}
    assert names == {
        "1-prune-distil.rows", "1-prune-distil.cut", "1-prune-distil",
        "2-prune-distil.cut", "2-prune-distil", "3-distil-qat",
    }  # fmt: skip
    sizes = read_json(whole / "out/train.json")["config"]
    assert sizes["embedding_size"] + sum(sizes["hidden"]) <= 0.7 * (32 + 48 + 32)


@pytest.mark.parametrize("steps", [3, 17])
@pytest.mark.slow
def test_interrupted_and_gone_on_it_leaves_the_same_bytes(whole, start, log, tmp_path, steps):
    options = {"strategy": whole / "compress.json", "settings": dict(SETTINGS)}
    broken_off(Trainer, steps, lambda: zoo.finetune(start, log, tmp_path / "out", **options))
    zoo.finetune(start, log, tmp_path / "out", resume=True, **options)
    for name in ("1-prune-distil.rows/model.pt", "3-distil-qat/model.pt", "3-distil-qat/schema.json"):
        assert (tmp_path / "out/checkpoint" / name).read_bytes() == (whole / "out/checkpoint" / name).read_bytes()
    assert read_json(tmp_path / "out/compression.json")["rows"] == read_json(whole / "out/compression.json")["rows"]


def test_models_without_vocabularies_are_refused(tmp_path):
    message = r"found the goal rows=5 for \S+, which has no embedding tables"
    with pytest.raises(RequestError, match=message):
        zoo.finetune("mobilenet-v1-cifar10", __file__, tmp_path / "out", prune="rows=5")
    assert not (tmp_path / "out").exists()
