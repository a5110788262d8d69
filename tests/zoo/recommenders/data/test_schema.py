"""Schemas of click logs: read, inferred, checked, edited."""

import csv
import gzip
import importlib.util
import json
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from zoo.cli import app as cli
from zoo.recommenders.data.columns import statistics as module
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import FEATURES, JSON_SCHEMA, Schema
from zoo.recommenders.data.schema_inference import infer

GENRES = ["Drama", "Comedy", 'Sci-Fi, "hard"', "Noël", "Krimi"]


def rows(count=2000, seed=0):
    """A log with ugly columns: quotes, unicode, empty lists, missing values."""
    draw = random.Random(seed)
    for index in range(count):
        yield {
            "clicked": draw.randint(0, 1),
            "timestamp": 874_724_710 + 13 * index,
            "user_id": draw.randint(1, 300),
            "price, EUR": "" if draw.random() < 0.1 else round(draw.lognormvariate(2, 2), 2),
            "age": draw.randint(7, 73),
            "occupation": draw.choice(["writer", "Künstler", "", "NA"]),
            "genres": "|".join(draw.sample(GENRES, draw.randint(0, 3))),
            "history": " ".join(str(draw.randint(1, 40)) for _ in range(draw.randint(0, 9))),
            "nothing": "",
            "same": "x",
        }


def write_csv(path, found, delimiter=","):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(found)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("log") / "log.csv", list(rows()))


def test_a_likely_row_is_one_that_the_log_might_hold(log):
    schema = infer(open_log(log))
    row = schema.typical_row()
    assert list(row) == [column.name for column in schema.of(*FEATURES)]
    assert row["genres"] in GENRES and row["occupation"] in ("writer", "Künstler")
    assert 7 <= float(row["age"]) <= 73 and float(row["price, EUR"]) >= 0 and 1 <= int(row["user_id"]) <= 300


def test_kinds_encodings_and_counts(log):
    schema = infer(open_log(log))
    columns = {column.name: column for column in schema.columns}
    assert schema.rows == 2000 and list(columns) == list(next(rows()))
    kinds = {name: column.kind for name, column in columns.items()}
    assert kinds == {
        "clicked": "label",
        "timestamp": "timestamp",
        "user_id": "category",
        "price, EUR": "number",
        "age": "number",
        "occupation": "category",
        "genres": "categories",
        "history": "categories",
        "nothing": "ignored",
        "same": "ignored",
    }
    truth = list(rows())
    assert columns["timestamp"].unit == "s" and columns["user_id"].distinct == len({row["user_id"] for row in truth})
    assert columns["price, EUR"].encoding["type"] == "log1p"
    assert columns["price, EUR"].missing == sum(row["price, EUR"] == "" for row in truth)
    ages = np.array([row["age"] for row in truth])
    assert columns["age"].encoding == {
        "type": "standard",
        "mean": pytest.approx(ages.mean()),
        "deviation": pytest.approx(ages.std()),
    }
    assert columns["occupation"].missing == sum(row["occupation"] in ("", "NA") for row in truth)
    assert sorted(columns["genres"].encoding["values"]) == sorted(GENRES)
    assert columns["genres"].separator == "|" and columns["genres"].length == 3 and columns["genres"].pooling == "mean"
    assert columns["history"].separator == " " and columns["history"].length == 9 and columns["history"].distinct == 40


@pytest.mark.parametrize("name", ["log.tsv", "log.csv.gz", "log;.csv", "log.jsonl", "log.jsonl.gz", "log.parquet"])
def test_every_form_of_a_log_gives_the_same_schema(log, tmp_path, name):
    table, path = list(rows()), tmp_path / name
    if "json" in name:
        lists = [row | {"genres": row["genres"].split("|") if row["genres"] else []} for row in table]
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in lists) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    elif name.endswith("parquet"):
        lists = [row["genres"].split("|") if row["genres"] else [] for row in table]
        columns = {key: [str(row[key]) for row in table] for key in table[0]}
        pq.write_table(pa.table(columns | {"genres": lists, "age": [row["age"] for row in table]}), path)
    else:
        write_csv(path, table, {"tsv": "\t", "log;.csv": ";"}.get(name if ";" in name else path.suffix[1:], ","))
    schema, wanted = infer(open_log(path)), infer(open_log(log))
    for column, other in zip(schema.columns, wanted.columns, strict=True):
        assert (column.name, column.kind, column.distinct, column.missing) == (
            other.name,
            other.kind,
            other.distinct,
            other.missing,
        )
        assert column.encoding == other.encoding


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_names_hold_quotes_delimiters_and_ends_of_lines(tmp_path, delimiter):
    names = ["clicked", 'the "new", one', "first line\nsecond; line", "💡"]
    table = [dict(zip(names, (i % 2, f"a{i % 3}", f"b\n{i % 5}", i % 7), strict=True)) for i in range(60)]
    log = open_log(write_csv(tmp_path / "log.csv", table, delimiter))
    schema = infer(log)
    assert log.delimiter == delimiter and [column.name for column in schema.columns] == names
    assert schema.columns[2].encoding["values"] == [f"b\n{i}" for i in range(5)]
    (read,) = Features(schema).read(str(log.path))
    assert read.ids.tolist() == [[i % 3 + 1, i % 5 + 1] for i in range(60)]


def test_many_values_are_hashed_and_counted_about_right(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "VOCABULARY", 100)
    table = [{"label": i % 2, "item": f"item {i % 30_000}"} for i in range(60_000)]
    column = infer(open_log(write_csv(tmp_path / "log.csv", table))).columns[1]
    assert column.distinct == pytest.approx(30_000, rel=0.06)
    assert column.encoding == {"type": "hash", "buckets": 65_536}


def test_a_few_values_that_are_no_numbers_count_as_missing(tmp_path):
    table = [{"label": i % 2, "year": 1900 + i % 90 if i % 200 else "unknown"} for i in range(1000)]
    column = infer(open_log(write_csv(tmp_path / "log.csv", table))).columns[1]
    assert column.kind == "number" and column.why.endswith("5 values that are no numbers count as missing")
    table = [{"label": i % 2, "year": 1900 + i % 90 if i % 20 else "unknown"} for i in range(1000)]
    assert infer(open_log(write_csv(tmp_path / "log.csv", table))).columns[1].kind == "category"


def test_batches_change_nothing(log, monkeypatch):
    whole = infer(open_log(log))
    monkeypatch.setattr("zoo.recommenders.data.logs.BLOCK", 4096)
    assert infer(open_log(log)) == whole


def test_a_schema_comes_back_from_its_file(log, tmp_path):
    schema = infer(open_log(log))
    assert Schema.load(schema.save(tmp_path / "schema.json")) == schema
    assert JSON_SCHEMA["properties"]["columns"]["items"]["properties"].keys() >= {"name", "kind", "encoding"}


def test_all_faults_are_named_at_once(tmp_path):
    value = {
        "rows": -1,
        "columns": [{"name": "a", "kind": "nummer"}, {"kind": "label"}, {"name": "c", "kind": "label", "colour": 1}],
    }
    (tmp_path / "form.json").write_text(json.dumps(value))
    with pytest.raises(RequestError) as caught:
        Schema.load(tmp_path / "form.json")
    text = str(caught.value)
    assert "has 4 faults" in text and "column a kind: 'nummer'" in text and "column number 2: 'name'" in text
    assert "rows: -1" in text and "column c: " in text
    value["columns"] += [{"name": "c", "kind": "timestamp"}, "d"]
    for part in ("has 7 faults", "column c: stands 2 times", "column c: lacks 'unit'", "column number 5: 'd' is not"):
        with pytest.raises(RequestError, match=part):
            Schema.from_json(value)
    for value in ([], {"columns": 3}, {"columns": []}, None):
        with pytest.raises(RequestError, match="has 1 fault"):
            Schema.from_json(value)
    columns = [
        {"name": "a", "kind": "label"},
        {"name": "b", "kind": "label", "where": "x"},
        {"name": "w", "kind": "weight", "where": "a"},
        {"name": "v", "kind": "weight"},
        {"name": "x", "kind": "number", "encoding": {"type": "hash", "buckets": 9}},
        {"name": "x", "kind": "category", "encoding": {"type": "hash"}},
        {"name": "l", "kind": "categories", "encoding": {"type": "vocabulary", "values": ["u"]}},
        {"name": "m", "kind": "number", "encoding": {"type": "min-max", "minimum": 2, "maximum": 1}},
        {"name": "t", "kind": "timestamp", "encoding": {"type": "hash", "buckets": 2}},
    ]
    with pytest.raises(RequestError) as caught:
        Schema.from_json({"columns": columns})
    for part in (
        "has 12 faults",
        "column x: stands 2 times",
        "w, v: found 2 columns of kind weight",
        "column b: found where x, expected another label",
        "a weight has no where",
        "found the encoding hash, expected log1p",
        "its hash encoding lacks 'buckets'",
        "column l: lacks 'pooling'",
        "its minimum 2 is not below its maximum 1",
        "a timestamp has no encoding",
        "column t: lacks 'unit'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (lambda n: f"{n % 28 + 1:02}.03.2024 12:{n % 60:02}", "ignored", "dates, but not in ISO 8601"),
        (lambda n: f"{n % 12 + 1}/{n % 28 + 1}/2024", "ignored", "dates, but not in ISO 8601"),
        (lambda n: f"2024-03-{n % 28 + 1:02}", "timestamp", "dates in ISO 8601"),
        (lambda n: f"10.{n % 5}.{n % 7}", "category", "35 values"),  # versions
        (lambda n: f"{n % 50},{n % 9}" if n % 10 else str(n % 50), "ignored", "numbers with a decimal comma"),
        (lambda n: ",".join(str((n + i * (n % 11)) % 20) for i in range(n % 4)), "categories", "',' in"),
        (lambda n: f"key-{n:x}", "ignored", "nearly every row has one of its own"),
        (lambda n: f"key-{n % 10_500:x}", "category", "buckets"),
    ],
    ids=["german", "american", "iso", "versions", "commas", "lists", "keys", "often"],
)
def test_what_nothing_is_learned_from_says_what_to_do(tmp_path, value, kind, why):
    table = [{"click": i % 2, "other": i % 3, "x": value(i)} for i in range(12_000)]
    schema = infer(open_log(write_csv(tmp_path / "log.csv", table, ";")))
    column = {column.name: column for column in schema.columns}["x"]
    assert column.kind == kind and why in column.why


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n1,2\n", "begins with an empty line"),
        ("a,b,a\n1,2,3\n", "has the column 'a' more than once"),
        ("1,0.5,3\n1,2,3\n", "names no columns; expected a header"),
        ("label,x\n", "holds no row below its header"),
        ("label,x\n1,2,3\n", "cannot be read as csv"),
        ("label,x", "holds no row below its header"),
        (
            "price, x \n1,2\n",
            '(none is called label, click, clicked, target, y); name one of its columns with --label: price, " x "',
        ),
        ("label,x\n1,2\n1,3\n", "the label label holds 1; expected 0 and 1, both of them, in every row"),
        ("label,x\n1,2\n,3\n0,1\n", "label holds 1, 0, 1 missing; expected 0 and 1, both of them, in every row"),
        (
            "label,x\n3.5,2\n4,3\n",
            "label holds 3.5, 4; expected 0 and 1, name their column with --label; regression targets are",
        ),
        ("label,x\nyes,2\nno,3\n", "label holds yes, no; expected 0 and 1, say which is 1 (--label 'label=yes')"),
        ('{"label": 1}\n{"label"\n', "line 2 of"),
        ("{}x", "line 1 of"),
        ('[{"label": 1, "x": 2}, {"label": 0, "x": 3}]', "holds an array of JSON, expected an object a line; run: jq"),
        ("label,x\n1,\n0,\n", "has nothing to predict label from (x: every value is missing)"),
        (
            "label,x\n1,\xff\n0,2\n",
            "log.csv is not UTF-8 (byte 0xff); expected UTF-8; convert it: iconv -f WINDOWS-1252",
        ),
        (
            "\xea\0\1\x80",
            "log.csv has bytes of value 0, as binary files and UTF-16 without its mark have; expected text in UTF-8",
        ),
        ("label,x\n1,2\n0,2,3\n", "Row #3: Expected 2 columns, got 3: 0,2,3 (--on-error skip leaves such rows out)"),
        ("\xff\xfel\0a\0b\0\n\0", "log.csv is UTF-16; expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        ("\xff\xff\xff\xff\x90\0", "an Arrow stream; save it as Parquet; expected CSV, TSV"),
        ("PK\x03\x04\x14\0", "a zip archive or a workbook of Excel; unzip it, or save it as CSV; expected CSV, TSV"),
    ],
)
def test_a_log_that_is_none_gets_one_line(tmp_path, capsys, text, said):
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(SystemExit) as ended:
        cli.call(["schema", str(path), "-o", str(tmp_path / "schema.json")])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and said in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "schema.json").exists()


def test_a_row_has_one_time_and_one_weight(tmp_path):
    table = [
        {
            "label": i % 2,
            "signup_date": f"2024-01-{i % 28 + 1:02}",
            "born": f"19{i:02}-03-04",
            "when": f"2024-03-04 05:06:{i:02}",
            "weight": i,
            "sample_weight": i % 3,
            "item": i % 5,
        }
        for i in range(60)
    ]
    schema = infer(open_log(write_csv(tmp_path / "log.csv", table)))
    assert Features.from_json(Features(schema).to_json()).schema == schema
    assert [column.name for column in schema.of("timestamp", "weight")] == ["when", "sample_weight"]
    reasons = {column.name: column.why for column in schema.of("ignored")}
    assert reasons["signup_date"] == "dates in ISO 8601; when is taken as the timestamp, of which a row has one"
    assert reasons.keys() == {"signup_date", "born", "weight"}


def test_a_weight_with_gaps_is_a_number(tmp_path):
    table = [{"label": i % 2, "weight": i if i % 9 else "", "item": i % 5} for i in range(60)]
    assert infer(open_log(write_csv(tmp_path / "log.csv", table))).columns[1].kind == "number"


def test_times_to_the_nanosecond_are_read_as_arrow_writes_them(tmp_path):
    path = tmp_path / "log.parquet"
    times = pa.array([10**18 + i for i in range(60)], pa.timestamp("ns"))
    pq.write_table(pa.table({"label": [0, 1] * 30, "item": ["a", "b", "c"] * 20, "when": times}), path)
    schema = infer(open_log(path))
    assert [column.name for column in schema.of("timestamp")] == ["when"]
    assert (next(Features(schema).read(path)).times == 1e9).all()


def test_labels_in_turns_are_seen_both(tmp_path):
    """However the numbers that stand for all are drawn, and however many rows a batch has."""
    pq.write_table(pa.table({"label": [1, 0] * 150_000, "x": ["a", "b", "c"] * 100_000}), tmp_path / "log.parquet")
    (label,) = infer(open_log(tmp_path / "log.parquet")).of("label")
    assert label.why == "0 and 1, 50.0% of them 1"


def test_numbers_in_turns_are_drawn_alike(tmp_path):
    values = np.tile([0.0, 7.0, 1.0, 9.0], 75_000)
    pq.write_table(pa.table({"label": [1, 0] * 150_000, "x": values}), tmp_path / "log.parquet")
    (number,) = infer(open_log(tmp_path / "log.parquet")).of("number")
    assert number.encoding["mean"] == pytest.approx(values.mean(), abs=0.1)


def test_rows_that_training_skips_are_passed_over(tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text("label,x\n" + "1,a\n0,b\n1,b\n0,a\n" * 10 + ",a\nyes,b\n2,b\n1\n")
    with pytest.raises(SystemExit):
        cli.call(["schema", str(path)])
    assert "Expected 2 columns, got 1" in capsys.readouterr().err
    cli.call(["schema", str(path), "--on-error", "skip"])
    assert "0 and 1, 50.0% of them 1; the 3 rows without are left out" in " ".join(capsys.readouterr().out.split())
    path.write_text("label,x\n" + "".join(f"{i % 6},{i % 5}\n" for i in range(60)))  # stars
    with pytest.raises(RequestError, match="holds 0, 1, 2, 3, ...; expected 0 and 1"):
        infer(open_log(path), on_error="skip")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_damaged_gz_gets_one_line(tmp_path, capsys, kind):
    path = tmp_path / f"log.{kind}.gz"
    text = "".join(f"{i * i % 2},{i * 7919 % 1000}\n" for i in range(60_000))
    text = f"label,x\n{text}" if kind == "csv" else "".join(f'{{"label": {i % 2}, "x": {i}}}\n' for i in range(60_000))
    for start in (10, 9000):  # in the block that tells the columns, and later
        packed = bytearray(gzip.compress(text.encode()))
        packed[start : start + 400] = b"\xff" * 400
        path.write_bytes(packed)
        with pytest.raises(SystemExit) as ended:
            cli.call(["schema", str(path)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1 and re.search("cannot (be )?read", error)


@pytest.mark.parametrize("form", ["gz", "parquet"])
def test_a_log_that_breaks_off_gets_one_line(tmp_path, capsys, form):
    path = tmp_path / f"log.{form}"
    more = {"item_id": "i", "country": "c", "device": "d"}  # what shop-clicks reads besides
    table = [{**row, **more, "categories": row["genres"]} for row in rows(4000)]
    if form == "gz":
        whole = gzip.compress(write_csv(tmp_path / "log.csv", table).read_bytes())
    else:
        pq.write_table(pa.table({name: [str(row[name]) for row in table] for name in table[0]}), path)
        whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    trains = [["train", "deepfm", "--data"]] if importlib.util.find_spec("torch") else []
    for command in (["schema"], *trains, ["run", "shop-clicks"]):
        with pytest.raises(SystemExit) as ended:
            cli.call([*command, str(path), "-o", str(tmp_path / "out.csv")])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1 and f"{path} cannot be read" in error
        assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("label", "positive", "ones"),
    [
        ("event=buy,cart", {"values": ["buy", "cart"]}, [0, 1, 1, 0]),
        ("event = buy", {"values": ["buy"]}, [0, 0, 1, 0]),
        ("score>=4", {"at_least": 4.0}, [0, 1, 1, 0]),
        ("score=5.0", {"values": ["5"]}, [0, 0, 1, 0]),
        ("a=b", {}, [1, 0, 1, 0]),
    ],
)
def test_a_label_may_say_which_values_are_1(tmp_path, label, positive, ones):
    names = ("event", "score", "a=b", "item")
    rows = (("view", "3.5", 1, 7), ("cart", "4", 0, 8), ("buy", "5.0", 1, 7), ("view", "1", 0, 9))
    path = write_csv(tmp_path / "log.csv", [dict(zip(names, row, strict=True)) for row in rows * 5])
    schema = infer(open_log(path), label, kinds={"item": "category"})
    saved = Schema.load(schema.save(tmp_path / "schema.json"))
    (column,) = saved.of("label")
    assert saved == schema and column.positive == positive and f"{sum(ones) / 4:.1%} of them 1" in column.why
    (encoded,) = Features(saved).read(path, labelled=True)
    assert encoded.labels.tolist() == ones * 5


@pytest.mark.parametrize(
    ("label", "text", "said"),
    [
        ("score>=x", "1", "found --label 'score>=x', expected a number behind >=, such as score>=4"),
        ("score>=9", "1", "the label score holds 0; expected 0 and 1, both of them"),
        ("score>=2", "high", "found the label score 'high', expected a number"),
        ("score=1", "", "found the label score None, expected a value"),
    ],
)
def test_labels_that_cannot_be_read_are_named(tmp_path, label, text, said):
    path = write_csv(tmp_path / "log.csv", [{"score": i % 4, "item": i % 7} for i in range(40)])
    with pytest.raises(RequestError, match=re.escape(said)):
        features = Features(infer(open_log(path), label))
        other = write_csv(tmp_path / "other.csv", [{"score": text, "item": 3}])
        list(features.read(other, labelled=True))


def test_the_label_is_named(tmp_path, capsys):
    path = write_csv(tmp_path / "log.csv", [{"bought": i % 2, "age": i, "click": 1} for i in range(20)])
    cli.call(["schema", str(path), "--label", "bought", "-o", str(tmp_path / "schema.json")])
    out = capsys.readouterr().out
    assert "bought" in out and "0 and 1, 50.0% of them 1" in out
    assert [column.kind for column in Schema.load(tmp_path / "schema.json").columns] == ["label", "number", "ignored"]
    for name, said in (("age", "holds 0, 1, 2, 3, ..."), ("nope", "has no column 'nope'")):
        with pytest.raises(SystemExit):
            cli.call(["schema", str(path), "--label", name])
        assert said in capsys.readouterr().err


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), st.floats(width=32)),
        min_size=2,
        max_size=30,
    )
)
def test_any_text_and_number_can_be_a_column(tmp_path_factory, values):
    table = [{"label": i % 2, "text": text, "number": number} for i, (text, number) in enumerate(values)]
    path = write_csv(tmp_path_factory.mktemp("any") / "log.csv", table)
    try:
        schema = infer(open_log(path))
    except RequestError as error:
        assert "has nothing to predict label from" in str(error)
        return
    assert schema.rows == len(values) and Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
