"""Fine-tuning on ids that are new: rows of old ids stay, new ones learn, rare and old ones go."""

import csv
import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.graph import io
from zoo.recommenders.criteo import category
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.export.tables import changed_rows
from zoo.recommenders.metrics import click_metrics
from zoo.recommenders.training.growth.survey import survey

torch = pytest.importorskip("torch", reason="needs the train extra")

TINY = {"epochs": "1", "hidden": "8", "embedding_size": "8", "batch_size": "64", "l2_embeddings": "10"}
AGAIN = {"epochs": "1", "batch_size": "64"}


def write(path, users, items=range(12), rows=240, seed=0, taste=None):
    """Writes a log of users and items whose history holds items too."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["click", "bought", "user_id", "item_id", "history", "price", "ts"])
        for index in range(rows):
            user, item = draw.choice(users), draw.choice(items)
            odds = 0.8 if (user + item) % 2 else 0.2
            click = int(draw.random() < (odds if taste is None else taste[user]))
            history = "|".join(f"i{draw.choice(items)}" for _ in range(draw.randrange(1, 5)))
            row = [click, click * draw.randrange(2), f"u{user}", f"i{item}", history, draw.randrange(100), index]
            table.writerow(row)
    return path


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    first = write(folder / "day0.csv", range(20))
    return first, write(folder / "day1.csv", range(10, 30), range(6, 18), seed=1)


def schema_of(path, log, family, encodings=None, **fields):
    """Writes the schema of a log with other encodings or fields of its columns."""
    value = zoo.schema(log, label="click", ignore=["bought", "ts"], family=family)["schema"]
    for column in value["columns"]:
        if column["name"] in ("history", "price"):
            column["tower"] = "user"
        column.update(fields.get(column["name"], {}))
        if encodings and column["name"] in encodings:
            column["encoding"] = encodings[column["name"]]
    path.write_text(json.dumps(value))
    return path


def tables(folder):
    """Tables of the float graph: {"user_id": {value or row: vectors of all its tables}}."""
    zoo.build(folder)
    graph = io.load(folder / "fp32.onnx")
    features = Features.from_json(read_json(folder / "card.json")["preprocessing"])
    arrays = {name: value.const_value.numpy() for name, value in graph.graph.initializers.items()}
    named = {}
    for field in features.fields:
        own = [arrays[name] for name in sorted(arrays) if name.endswith(f".{field.name}.table")]
        if own:
            named[field.name] = field, np.concatenate(own, 1)
    return named


def vector(folder, column, text):
    field, table = tables(folder)[column]
    return table[field.ids(pa.array([text]))[0]]


SLOW = ["wide-deep", "dcn-v2", "dlrm", "two-tower", "autoint", "finalmlp", "gdcn", "bst"]
FAMILIES = ["deepfm", "din", "sasrec", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


def write_films(path, films, rows=300, seed=0):
    """Writes a log of films with a genre and a column that differs from row to row."""
    draw = random.Random(seed)
    lines = ["click,user_id,item_id,genre,item_position"]
    for _ in range(rows):
        film = draw.choice(films)
        genre = "odd" if film % 2 else "even" if film < 40 else "other"
        lines.append(
            f"{int(draw.random() < 0.2 + 0.6 * (film % 2))},u{draw.randrange(9)},f{film},{genre},p{draw.randrange(3)}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_new_ids_start_from_the_mean_of_similar_ones(tmp_path, capsys):
    """Similar are the ids with the same genre; a new genre's film starts from the row of unknown values."""
    first = write_films(tmp_path / "day0.csv", range(10))
    second = write_films(tmp_path / "day1.csv", [*range(2, 14), 40, 41], seed=1)
    value = zoo.schema(first, label="click")["schema"]
    for column in value["columns"]:
        if column["name"] in ("genre", "item_position"):
            column["tower"] = "item"
    (tmp_path / "schema.json").write_text(json.dumps(value))
    zoo.train(
        "deepfm", first, tmp_path / "a", settings=TINY | {"learning_rate": "0.05"}, schema=tmp_path / "schema.json"
    )
    still = AGAIN | {"learning_rate": "0.000000001", "ema": "0"}
    capsys.readouterr()
    zoo.finetune(tmp_path / "a", second, tmp_path / "b", settings=still | {"new_ids": "similar"})
    assert "6 new ids start from the row of unknown values, but 5 from the mean of ids with the same genre" in str(
        capsys.readouterr()
    )
    vectors = {i: vector(tmp_path / "a", "item_id", f"f{i}") for i in range(2, 10)}
    odd, even = (np.mean([vectors[i] for i in vectors if i % 2 == side], axis=0) for side in (1, 0))
    for film, expected in ((11, odd), (13, odd), (41, odd), (10, even), (12, even)):
        np.testing.assert_allclose(vector(tmp_path / "b", "item_id", f"f{film}"), expected, atol=1e-5)
    unknown = vector(tmp_path / "a", "item_id", "nothing")
    np.testing.assert_allclose(vector(tmp_path / "b", "item_id", "f40"), unknown, atol=1e-5)
    zoo.finetune(tmp_path / "a", second, tmp_path / "c", settings=still)
    np.testing.assert_allclose(vector(tmp_path / "c", "item_id", "f11"), unknown, atol=1e-5)
    with pytest.raises(RequestError, match="found new_ids 'mean', expected unknown or similar"):
        zoo.finetune(tmp_path / "a", second, tmp_path / "d", settings={"new_ids": "mean"})


@pytest.mark.parametrize("family", FAMILIES)
def test_old_ids_keep_their_rows_and_new_ones_get_theirs(family, days, tmp_path):
    schema = schema_of(tmp_path / "schema.json", days[0], family)
    settings = {name: value for name, value in TINY.items() if not (family == "bst" and name == "hidden")}
    zoo.train(family, days[0], tmp_path / "a", settings=settings, schema=schema)
    report = zoo.finetune(tmp_path / "a", days[1], tmp_path / "b", settings=AGAIN)
    assert report["ids"]["item_id"]["unknown_before"] > report["ids"]["item_id"]["unknown_after"] == 0
    assert report["ids"]["item_id"]["added"] == 6
    before, after = tables(tmp_path / "a"), tables(tmp_path / "b")
    assert after["item_id"][1].shape[0] == before["item_id"][1].shape[0] + 6
    unseen = [text for text in before["item_id"][0].column.encoding["values"] if int(text[1:]) < 6]
    for text in unseen if family != "sasrec" else ():  # whose softmax trains the rows of all items
        assert np.array_equal(vector(tmp_path / "a", "item_id", text), vector(tmp_path / "b", "item_id", text))
    unknown = vector(tmp_path / "b", "item_id", "never seen")
    assert not np.array_equal(vector(tmp_path / "b", "item_id", "i17"), unknown)
    first = [{"user_id": "u25", "item_id": "i17", "history": "i1|i17", "price": "3"}]
    for precision in ("fp32", "int8"):
        (result,) = zoo.pipeline(tmp_path / "b", precision)(first)
        assert 0 < result["probability"] < 1
    if family != "sasrec":
        ranked = zoo.pipeline(tmp_path / "b", "int8").rank(first[0], [{"item_id": "i17"}, {"item_id": "i3"}])
        assert len(ranked) == 2
    assert zoo.evaluate(tmp_path / "b", days[1])["samples"] == 240


@pytest.mark.slow
def test_several_labels_grow_too(days, tmp_path):
    schema = tmp_path / "schema.json"
    value = zoo.schema(days[0], label=["click", "bought"], family="mmoe")["schema"]
    schema.write_text(json.dumps(value))
    for family in ("mmoe", "ple", "esmm"):
        settings = {name: value for name, value in TINY.items() if name != "hidden"}
        zoo.train(family, days[0], tmp_path / family, settings=settings, schema=schema)
        report = zoo.finetune(tmp_path / family, days[1], tmp_path / f"{family}-2", settings=AGAIN)
        assert report["ids"]["user_id"]["added"] == 10


def test_a_hash_table_doubles_and_no_id_changes_its_vector(days, tmp_path):
    encoding = {"type": "hash", "buckets": 32}
    schema = schema_of(tmp_path / "schema.json", days[0], None, {"user_id": encoding})
    zoo.train("deepfm", days[0], tmp_path / "a", settings=TINY, schema=schema)
    report = zoo.finetune(tmp_path / "a", days[1], tmp_path / "b", settings=AGAIN)["ids"]["user_id"]
    field = tables(tmp_path / "b")["user_id"][0]
    assert field.column.encoding["buckets"] == 64 and report["rows"] == 66
    assert report["unknown_before"] > 0 == report["unknown_after"]
    seen = {field.ids(pa.array([f"u{user}"]))[0] for user in range(10, 30)}
    for user in range(10):
        if field.ids(pa.array([f"u{user}"]))[0] not in seen:
            text = f"u{user}"
            assert np.array_equal(vector(tmp_path / "a", "user_id", text), vector(tmp_path / "b", "user_id", text))


def test_row_numbers_grow(tmp_path):
    for number, users in enumerate((range(10), range(5, 20))):
        path = write(tmp_path / f"day{number}.csv", users, seed=number)
        path.write_text(re.sub(",u([0-9])", r",\1", path.read_text()))
    encoding = {"type": "id", "rows": 10}
    schema = schema_of(tmp_path / "schema.json", tmp_path / "day0.csv", None, {"user_id": encoding})
    zoo.train("dcn-v2", tmp_path / "day0.csv", tmp_path / "a", settings=TINY, schema=schema)
    report = zoo.finetune(tmp_path / "a", tmp_path / "day1.csv", tmp_path / "b", settings=AGAIN)["ids"]["user_id"]
    assert report["rows"] == 20 and report["unknown_after"] == 0
    assert np.array_equal(vector(tmp_path / "a", "user_id", "3"), vector(tmp_path / "b", "user_id", "3"))


def test_ids_need_a_count_over_all_days_if_the_schema_says_so(tmp_path):
    rows = "click,user_id,item_id\n" + "".join(f"{i % 2},u{i % 4},i{i % 3}\n" for i in range(200))
    (tmp_path / "day0.csv").write_text(rows)
    (tmp_path / "day1.csv").write_text(rows + "1,new,i1\n0,new,i2\n")
    (tmp_path / "day2.csv").write_text(rows + "1,new,i1\n0,other,i2\n")
    schema = tmp_path / "schema.json"
    value = zoo.schema(tmp_path / "day0.csv", label="click")["schema"]
    next(column for column in value["columns"] if column["name"] == "user_id")["min_count"] = 3
    schema.write_text(json.dumps(value))
    zoo.train("deepfm", tmp_path / "day0.csv", tmp_path / "0", settings=TINY, schema=schema)
    first = zoo.finetune(tmp_path / "0", tmp_path / "day1.csv", tmp_path / "1", settings=AGAIN)["ids"]["user_id"]
    assert (first["unknown_before"], first["unknown_after"], first["added"]) == (2, 2, 0)
    second = zoo.finetune(tmp_path / "1", tmp_path / "day2.csv", tmp_path / "2", settings=AGAIN)["ids"]["user_id"]
    assert (second["unknown_before"], second["unknown_after"], second["added"]) == (2, 1, 1)
    counts = pq.read_table(tmp_path / "2" / "id_counts.parquet").to_pylist()
    assert {line["value"]: (line["row"], line["count"]) for line in counts if line["value"] in ("new", "other")} == {
        "new": (5, 3),
        "other": (None, 1),
    }


def test_eviction_by_age_and_by_count(days, tmp_path):
    zoo.train("deepfm", days[0], tmp_path / "0", settings=TINY, label="click")
    old = zoo.finetune(tmp_path / "0", days[1], tmp_path / "1", settings={**AGAIN, "evict_after": "1"})["ids"]
    assert old["item_id"]["evicted"] == 6 and old["user_id"]["evicted"] == 10
    field, table = tables(tmp_path / "1")["item_id"]
    assert sorted(field.column.encoding["values"]) == sorted(f"i{item}" for item in range(6, 18))
    assert np.array_equal(vector(tmp_path / "1", "item_id", "i3"), table[0])
    kept = zoo.finetune(tmp_path / "0", days[1], tmp_path / "2", settings={**AGAIN, "evict_after": "2"})["ids"]
    assert kept["item_id"]["evicted"] == 0
    seldom = zoo.finetune(tmp_path / "0", days[1], tmp_path / "3", settings={**AGAIN, "evict_below": "50"})["ids"]
    counts = pq.read_table(tmp_path / "3" / "id_counts.parquet").to_pylist()
    assert seldom["user_id"]["evicted"] > 0
    assert all(line["count"] >= 1 for line in counts if line["column"] == "user_id" and line["value"])


@pytest.mark.parametrize("family", ["wide-deep", "din"])
def test_frozen_towers_train_tables_alone(family, days, tmp_path):
    schema = schema_of(tmp_path / "schema.json", days[0], family)
    zoo.train(family, days[0], tmp_path / "a", settings=TINY, schema=schema)
    zoo.finetune(tmp_path / "a", days[1], tmp_path / "b", settings={**AGAIN, "freeze_towers": "true"})
    states = [torch.load(tmp_path / name / "model.pt")["state_dict"] for name in "ab"]
    larger = {name for name in states[0] if states[0][name].shape != states[1][name].shape}
    assert larger
    for name in states[0].keys() - larger:  # statistics of Dice are read from its scale and shift, which rounds
        assert torch.allclose(
            states[0][name], states[1][name], rtol=1e-5 if "mean" in name or "var" in name else 0, atol=0
        )
    with pytest.raises(RequestError, match="freeze_towers in a training from random weights"):
        zoo.train(family, days[0], tmp_path / "c", settings={**TINY, "freeze_towers": "true"}, schema=schema)


def test_a_model_without_counts_grows_and_several_files_are_one_log(days, tmp_path):
    zoo.train("dlrm", days[0], tmp_path / "a", settings=TINY, label="click")
    (tmp_path / "a" / "id_counts.parquet").unlink()
    folder = tmp_path / "logs"
    folder.mkdir()
    for number, users in enumerate((range(30, 35), range(35, 40))):
        write(folder / f"part{number}.csv", users, rows=120, seed=number)
    report = zoo.finetune(tmp_path / "a", [days[1], folder], tmp_path / "b", settings={**AGAIN, "evict_below": "3"})
    assert report["ids"]["user_id"]["added"] == 20 and report["ids"]["user_id"]["evicted"] == 0
    assert read_json(tmp_path / "b" / "train.json")["ids"] == report["ids"]


def test_a_stopped_finetuning_resumes(days, tmp_path, monkeypatch):
    from zoo.recommenders.training import fitting

    zoo.train("deepfm", days[0], tmp_path / "a", settings=TINY, label="click")
    settings = {**AGAIN, "epochs": "3"}
    zoo.finetune(tmp_path / "a", days[1], tmp_path / "whole", settings=settings)
    save, saved = fitting.save_checkpoint, []

    def stop(path, state):
        save(path, state)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        zoo.finetune(tmp_path / "a", days[1], tmp_path / "b", settings=settings)
    monkeypatch.setattr(fitting, "save_checkpoint", save)
    zoo.finetune(tmp_path / "a", days[1], tmp_path / "b", settings=settings, resume=True)
    whole, resumed = ((tmp_path / name / "model.pt").read_bytes() for name in ("whole", "b"))
    assert whole == resumed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepfm", "wide-deep", "dcn-v2", "two-tower"])
def test_days_one_after_the_other_are_as_good_as_all_at_once(family, tmp_path):
    taste = 1 / (1 + np.exp(-np.random.default_rng(3).normal(0, 2, 400)))
    users = [range(100), range(200), range(300), range(400)]  # of every day, a hundred of them new
    days = [write(tmp_path / f"day{n}.csv", group, range(50), 2000, n, taste) for n, group in enumerate(users)]
    judged = write(tmp_path / "judged.csv", range(400), range(50), 4000, 9, taste)
    ignored = {name: {"kind": "ignored"} for name in ("history", "price")}
    schema = schema_of(tmp_path / "schema.json", days, family, **ignored)
    value = read_json(schema)
    for column in value["columns"]:
        if column["kind"] == "ignored":
            column.pop("encoding", None)
    schema.write_text(json.dumps(value))
    zoo.train(family, days, tmp_path / "all", schema=schema)
    first = schema_of(tmp_path / "first.json", days[0], family, **ignored)
    zoo.train(family, days[0], tmp_path / "0", schema=first)
    for number in (1, 2, 3):
        zoo.finetune(tmp_path / f"{number - 1}", days[number], tmp_path / f"{number}")
    rows = list(csv.DictReader(judged.open()))
    labels = np.array([int(row["click"]) for row in rows], np.float32)
    auc = {}
    for name in ("all", "0", "3"):
        scores = np.array([row["probability"] for row in zoo.pipeline(tmp_path / name, "fp32")(rows)], np.float64)
        auc[name] = click_metrics(labels, scores, None)["auc"]
    assert auc["3"] > auc["all"] - 0.01 > auc["0"] + 0.1


def test_a_log_that_lacks_columns_is_refused_before_its_ids_are_counted(tmp_path):
    features = Features(Schema((Column("click", "label"), category("user", 5), category("item", 5))))
    (tmp_path / "log.csv").write_text("user\nu1\n")
    with pytest.raises(RequestError, match="lacks the columns item, click; found user"):
        survey(features, tmp_path / "log.csv", {})


def test_a_delta_is_of_models_with_the_same_columns():
    def folder(*names):
        schema = Schema((Column("click", "label"), *(category(name, 5) for name in names)))
        return SimpleNamespace(path=names[-1], preprocessing=Features(schema).to_json())

    with pytest.raises(
        RequestError, match="other columns: item reads user, item, shop user, shop; expected a model and"
    ):
        changed_rows(folder("user", "item"), folder("user", "shop"))
