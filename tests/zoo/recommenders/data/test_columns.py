"""Kinds of columns: ids, times, indexes of tables, second labels, and kinds that were chosen or edited."""

import json
import random
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.click_logs import written

import zoo
from pipelines.core.errors import RequestError
from zoo.cli import app as cli
from zoo.recommenders.data import logs
from zoo.recommenders.data.columns import names, times
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer, load_schema

ROWS = 600
START = datetime(2024, 1, 30)
CLICKS = [int(draw < 0.4) for draw in np.random.default_rng(0).random(ROWS)]


def column(tmp_path, name, values, **others):
    """The inferred column of a log that has a label, a country and these values."""
    count = len(values)
    path = written(
        tmp_path / "log.csv",
        click=(CLICKS * 9)[:count],
        country=(["DE", "FR", "US"] * count)[:count],
        **{name: values},
        **others,
    )
    return next(spec for spec in infer(open_log(path)).columns if spec.name == name)


@pytest.mark.parametrize(
    "name",
    [
        "USER_ID",
        "ITEM_ID",
        "user",
        "item",
        "userId",
        "userid",
        "MovieID",
        "adgroup",
        "cate_id",
        "City",
        "device_type",
        "movieid",
        "visitor",
        "用户id",
    ],
)
def test_whole_numbers_under_the_name_of_an_id_are_categories(tmp_path, name):
    spec = column(tmp_path, name, [i * 7 % 50 for i in range(ROWS)])
    assert spec.kind == "category" and spec.why.startswith("whole numbers under the name of an id; 50 values")


@pytest.mark.parametrize(
    "name",
    [
        "age",
        "user_age",
        "item_price",
        "items",
        "num_users",
        "item_count",
        "price",
        "movie_year",
        "session_length",
        "views",
        "paid",
    ],
)
def test_whole_numbers_under_other_names_are_quantities(tmp_path, name):
    assert not names.is_identity(name)
    assert column(tmp_path, name, [i * 7 % 50 for i in range(ROWS)]).kind == "number"


@pytest.mark.parametrize("name", ["item_id", "movieId", "movieid", "ItemID", "item.id", "hotelId", "tagList", "stock"])
def test_columns_of_items_are_recognized_by_their_names(name):
    assert names.tower(name) == "item"
    assert names.tower(f"user_{name}") == names.tower(f"clicked.{name}") == names.tower(f"hist_{name}") == "user"


@pytest.mark.parametrize("name", ["userId", "age", "adidas", "upload", "country", "userMovieCount", "hour", "premium"])
def test_other_columns_are_the_users(name):
    assert names.tower(name) == "user" and not names.is_outcome(name)


@pytest.mark.parametrize("name", ["is_clicked", "isClicked", "CONVERSION_TYPE", "hasConverted", "purchase.id", "liked"])
def test_outcomes_are_recognized_by_their_names(name):
    assert names.is_outcome(name)


@pytest.mark.parametrize(
    ("values", "kind", "why"),
    [
        (lambda draw: f"{draw.randint(1, 400):05}", "category", "numbers with leading zeros"),
        (lambda draw: 7_000_000_000 + 977 * draw.randint(1, 80), "category", "large whole numbers"),
        (lambda draw: draw.randint(-(2**31), 2**31 - 1) // 2**25 * 2**25 + 7, "category", "large whole numbers"),
        (lambda draw: draw.randint(0, 255) * 2**24 + 123_456, "category", "large whole numbers"),
        (lambda draw: draw.randint(0, 299), "category", "as evenly spread as ids"),
        (lambda draw: round(draw.gauss(500, 60)), "number", ""),
        (lambda draw: round(draw.expovariate(1 / 200)), "number", ""),
        (lambda draw: draw.randint(18, 80), "number", ""),
        (lambda draw: draw.randint(0, 299) / 2, "number", ""),
        (lambda draw: draw.randint(-200, 200) * 10**9, "number", ""),
        (lambda draw: draw.randint(0, 300) * 10**7, "number", ""),
    ],
    ids=[
        *(
            "padded",
            "large",
            "signed-hash",
            "hash",
            "spread",
            "bell",
            "skewed",
            "ages",
            "halves",
            "balances",
            "amounts",
        ),
    ],
)
def test_ids_are_recognized_by_their_shape(tmp_path, values, kind, why):
    draw = random.Random(3)
    spec = column(tmp_path, "x1", [values(draw) for _ in range(5 * ROWS)])
    assert spec.kind == kind and why in spec.why


def instants(count=ROWS):
    """Times 100 minutes apart, and their order in a shuffled log."""
    order = np.random.default_rng(1).permutation(count)
    return [START + timedelta(minutes=100 * int(position)) for position in order], order


WRITTEN = {
    "s": lambda t: int((t - datetime(1970, 1, 1)).total_seconds()),
    "ms": lambda t: int((t - datetime(1970, 1, 1)).total_seconds() * 10**3),
    "us": lambda t: int((t - datetime(1970, 1, 1)).total_seconds()) * 10**6 + 627_491,
    "ns": lambda t: int((t - datetime(1970, 1, 1)).total_seconds()) * 10**9 + 627_491_123,
    "yyyymmdd": lambda t: f"{t:%Y%m%d}",
    "yymmddhh": lambda t: f"{t:%y%m%d%H}",
    "yyyymmddhh": lambda t: f"{t:%Y%m%d%H}",
    "yyyymmddhhmm": lambda t: f"{t:%Y%m%d%H%M}",
    "yyyymmddhhmmss": lambda t: f"{t:%Y%m%d%H%M%S}",
}
HOURS = {"yyyymmdd": 24, "yymmddhh": 1, "yyyymmddhh": 1}  # to which a unit rounds


@pytest.mark.parametrize("unit", WRITTEN)
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_whole_numbers_of_times_are_recognized_and_order_the_rows(tmp_path, unit, form):
    moments, _ = instants()
    name = "event_time" if unit in times.PER_SECOND else "when_1"
    values = [int(WRITTEN[unit](moment)) for moment in moments]
    rows = {"click": CLICKS, "item": [i % 7 for i in range(ROWS)], name: values}
    if form == "csv":
        path = written(tmp_path / "log.csv", **rows)
    elif form == "jsonl":
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join(json.dumps({key: rows[key][i] for key in rows}) for i in range(ROWS)))
    else:
        pq.write_table(pa.table(rows), tmp_path / "log.parquet")
        path = tmp_path / "log.parquet"
    schema = infer(open_log(path))
    assert [(spec.name, spec.unit) for spec in schema.of("timestamp")] == [(name, unit)]
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    read = Rows.concatenate(list(Features(schema).read(path)))
    wanted = np.array([(moment - datetime(1970, 1, 1)).total_seconds() for moment in moments])
    wanted -= wanted % (3600 * HOURS.get(unit, 1 / 3600))
    assert (
        (read.times == wanted).all()
        if unit not in ("us", "ns")
        else np.abs(read.times - wanted - 0.627491).max() < 1e-5
    )


def test_ambiguous_dates_follow_the_name(tmp_path):
    values = [20_101_112 + i % 12 for i in range(ROWS)]  # the 12th of November 2010, or 12 o'clock
    assert column(tmp_path, "hour", values).unit == "yymmddhh"
    assert column(tmp_path, "date", values).unit == "yyyymmdd"
    assert column(tmp_path, "price", [10_100 + 100 * (i % 20) for i in range(ROWS)]).kind == "number"
    assert column(tmp_path, "order_code", values).kind == "category"


def test_times_of_other_names_or_units_are_ignored_with_the_reason(tmp_path):
    spec = column(tmp_path, "last_login", [1_700_000_000 + 977 * (i % 83) for i in range(ROWS)])
    assert spec.kind == "ignored" and spec.why.startswith("numbers as of seconds since 1970, in a column that is not")
    spec = column(tmp_path, "event_time", [638_000_000_000_000_000 + 10**11 * (i % 83) for i in range(ROWS)])
    assert spec.kind == "timestamp" or "in no known unit" in spec.why
    spec = column(tmp_path, "time", [50_000_000 + 977 * (i % 83) for i in range(ROWS)])
    assert spec.kind == "ignored" and "in no known unit (seconds since 1970, milliseconds" in spec.why
    spec = column(tmp_path, "birth_date", [19_850_101 + i % 28 for i in range(ROWS)])
    assert spec.kind == "ignored" and "by its name not of the row" in spec.why
    assert column(tmp_path, "time", [i * 7 % 86_400 for i in range(ROWS)]).kind == "number"  # of a day
    assert column(tmp_path, "hour", [i % 24 for i in range(ROWS)]).kind == "number"


def test_few_unknown_times_come_first(tmp_path):
    values = [0 if i == 7 else 1_700_000_000.25 + i for i in range(ROWS)]
    spec = column(tmp_path, "timestamp", values)
    assert spec.kind == "timestamp" and spec.unit == "s"
    read = next(Features(infer(open_log(tmp_path / "log.csv"))).read(tmp_path / "log.csv"))
    assert read.times.argmin() == 7 and read.times[8] == 1_700_000_008.25


@pytest.mark.parametrize(
    ("value", "unit", "wanted"),
    [
        (20_240_229, "yyyymmdd", 1_709_164_800),
        (20_230_229, "yyyymmdd", None),
        (20_241_301, "yyyymmdd", None),
        (24_022_923, "yymmddhh", 1_709_247_600),
        (24_022_924, "yymmddhh", None),
        (2024.5, "yyyymmdd", None),
        (-1, "yyyymmdd", None),
        (np.nan, "us", None),
        (1e300, "yyyymmdd", None),
        (20_240_229_235_959, "yyyymmddhhmmss", 1_709_251_199),
    ],
)
def test_seconds_of_numbers(value, unit, wanted):
    seconds = times.seconds(np.array([value], np.float64), unit)[0]
    assert np.isnan(seconds) if wanted is None else seconds == wanted


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "Unnamed: 0.1", "__index_level_0__", "row"])
def test_indexes_of_tables_are_ignored(tmp_path, name):
    path = written(tmp_path / "log.csv", **{name: range(ROWS)}, click=CLICKS, item=[i % 7 for i in range(ROWS)])
    schema = infer(open_log(path))
    spec = schema.columns[0]
    assert spec.kind == "ignored" and spec.name == (name or "Unnamed: 0") and spec.distinct == ROWS
    assert len(next(Features(schema).read(path, labelled=True))) == ROWS


def test_the_index_of_pandas_in_parquet_is_ignored(tmp_path):
    index = np.random.default_rng(0).permutation(ROWS)
    pq.write_table(
        pa.table({"click": CLICKS, "item": [i % 7 for i in range(ROWS)], "__index_level_0__": index}),
        tmp_path / "a.parquet",
    )
    assert [spec.kind for spec in infer(open_log(tmp_path / "a.parquet")).columns] == ["label", "category", "ignored"]


def test_nearly_unique_values_are_ignored_in_logs_of_any_size(tmp_path):
    for values in ([f"k{i}" for i in range(ROWS)], [f"k{min(i, 545)}" for i in range(ROWS)]):
        spec = column(tmp_path, "key", values)
        assert spec.kind == "ignored" and "nearly every row has one of its own" in spec.why
    assert column(tmp_path, "key", [f"k{min(i, 530)}" for i in range(ROWS)]).kind == "category"
    spec = column(tmp_path, "user_id", [(i * 7919) % 100_003 for i in range(ROWS)])
    assert spec.kind == "ignored" and spec.why.startswith("600 values in 600 rows")
    draw = random.Random(0)
    long = ["|".join(f"i{draw.randint(1, 37)}" for _ in range(30)) for _ in range(ROWS)]
    assert column(tmp_path, "history", long).kind == "categories"  # lists differ, their items do not


def test_lists_with_weights_are_named(tmp_path):
    draw = random.Random(0)
    values = [
        "|".join(f"t{draw.randint(0, 9)}:{draw.random():.2f}" for _ in range(draw.randint(1, 3))) for _ in range(ROWS)
    ]
    spec = column(tmp_path, "tags", values)
    assert spec.kind == "ignored" and "weights are not supported" in spec.why
    assert column(tmp_path, "clock", [f"{i % 24}:{i % 6}0" for i in range(ROWS)]).kind == "category"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("conversion", lambda click, i: click and i % 2, "click is 1 in 100.0% of the rows where it is 1"),
        (
            "conversion",
            lambda click, i: 1 if click and i % 2 else "",
            "click is 1 in 100.0% of the rows where it is 1",
        ),
        ("seen_it", lambda click, i: click if i % 100 else 1 - click, "match the label click in 99.0% of the rows"),
        ("skipped", lambda click, i: 1 - click, "match the label click in 100.0% of the rows"),
        ("outcome", lambda click, i: "yes" if click else "no", "match the label click in 100.0% of the rows"),
        (
            "order_number",
            lambda click, i: i if click and i % 2 else "",
            "click is 1 in 100.0% of the rows where it is pre",
        ),
        (
            "dwell_ms",
            lambda click, i: click * (i + 1),
            "missing, 0 or -1 and another value match the label click in 100",
        ),
        (
            "order_delay",
            lambda click, i: i if click and i % 2 else -1,
            "click is 1 in 100.0% of the rows where it is an",
        ),
        ("visits", lambda click, i: i % 5 if i % 3 else -1, ""),
        ("remark", lambda click, i: i if i % 3 else "", ""),
        ("label", lambda click, i: i % 2, ""),
        ("clicked", lambda click, i: i % 2, "another label by its name, beside click"),
        ("purchase_intent", lambda click, i: click or i % 2, "click is 0 in 100.0% of the rows where it is 0"),
        ("member_now", lambda click, i: click or i % 2, ""),
        ("is_new", lambda click, i: click if i % 3 else i % 2, ""),
    ],
)
def test_second_labels_are_named_and_ignored_until_asked_for(tmp_path, name, value, said):
    path = written(
        tmp_path / "log.csv",
        click=CLICKS,
        **{name: [value(click, i) for i, click in enumerate(CLICKS)]},
        item=[i % 7 for i in range(ROWS)],
    )
    result = {spec.name: spec for spec in infer(open_log(path), "click").columns}[name]
    if name == "label":  # nothing says which of them is meant, and it is asked for
        return
    assert (result.kind == "ignored") == bool(said) and said in result.why
    for kind in ("category", "number")[: 2 if name != "outcome" else 1]:
        assert {spec.name: spec.kind for spec in infer(open_log(path), "click", kinds={name: kind}).columns}[
            name
        ] == kind


def test_kinds_are_chosen_by_the_command(tmp_path, capsys):
    path = written(
        tmp_path / "log.csv",
        click=CLICKS,
        age=[i % 50 for i in range(ROWS)],
        level_id=[i % 9 for i in range(ROWS)],
        note=[f"n{i % 3}" for i in range(ROWS)],
    )
    out = tmp_path / "schema.json"
    cli.call(["schema", path, "--category", "age", "--number", "level_id", "--ignore", "note", "-o", str(out)])
    assert [spec.kind for spec in Schema.load(out).columns] == ["label", "category", "number", "ignored"]
    capsys.readouterr()
    for options, said in (
        ({"category": ["agee"]}, "has no column 'agee'; its columns are click, age"),
        ({"category": ["age"], "number": ["age"]}, "found the column age as category and as number"),
        ({"number": ["note"]}, "column note: found no number in it"),
        ({"category": ["click"]}, "click is the label"),
    ):
        with pytest.raises(RequestError, match=said):
            zoo.schema(path, **options)


def test_changing_the_kind_alone_is_enough(tmp_path):
    path = written(
        tmp_path / "log.csv",
        click=CLICKS,
        age=[i % 50 for i in range(ROWS)],
        user_id=[i % 70 for i in range(ROWS)],
        tags=["a|b", "b", "c|a"] * 200,
        at=[1_700_000_000 + i for i in range(ROWS)],
        note=["x", "y"] * 300,
    )
    value = zoo.schema(path)["schema"]
    edits = {"age": "category", "user_id": "number", "tags": "category", "at": "ignored", "note": "categories"}
    for entry in value["columns"]:
        entry["kind"] = edits.get(entry["name"], entry["kind"])
    (tmp_path / "schema.json").write_text(json.dumps(value))
    specs = {spec.name: spec for spec in load_schema(tmp_path / "schema.json", path).columns}
    assert {name: specs[name].kind for name in edits} == edits
    assert len(specs["age"].encoding["values"]) == 50 and specs["user_id"].encoding["type"] == "standard"
    assert specs["tags"].encoding["values"] == ["a|b", "b", "c|a"] and not specs["at"].unit
    assert specs["note"].length == 1 and specs["note"].separator == "|"
    for kinds in (
        {"tags": "categories", "at": "timestamp", "note": "ignored", "age": "number", "user_id": "category"},
    ):
        for entry in (again := json.loads((tmp_path / "schema.json").read_text()))["columns"]:
            entry["kind"] = kinds.get(entry["name"], entry["kind"])
        (tmp_path / "again.json").write_text(json.dumps(again))
        schema = load_schema(tmp_path / "again.json", path)
        specs = {spec.name: spec for spec in schema.columns}
        assert {name: specs[name].kind for name in kinds} == kinds
        assert specs["tags"].encoding["values"] == ["a", "b", "c"] and specs["at"].unit == "s"
        assert len(next(Features(schema).read(path, labelled=True))) == ROWS
    value["columns"][1]["kind"] = "timestamp"
    (tmp_path / "wrong.json").write_text(json.dumps(value))
    with pytest.raises(RequestError, match="column age: found no times in it, expected seconds since 1970"):
        load_schema(tmp_path / "wrong.json", path)


def test_training_completes_an_edited_schema(tmp_path):
    pytest.importorskip("torch", reason="needs the train extra")
    path = written(
        tmp_path / "log.csv", click=CLICKS, age=[i % 50 for i in range(ROWS)], item=[i % 7 for i in range(ROWS)]
    )
    value = zoo.schema(path)["schema"]
    value["columns"][1]["kind"] = "category"
    (tmp_path / "schema.json").write_text(json.dumps(value))
    settings = {"epochs": "1", "refit": "false", "hidden": "4", "embedding_size": "2", "l2_embeddings": "10"}
    for family in ("deepfm", "wide-deep"):
        zoo.train(family, path, tmp_path / family, schema=tmp_path / "schema.json", settings=settings)
        features = Features.from_json(json.loads((tmp_path / family / "train.json").read_text())["features"])
        assert [field.name for field in features.fields] == ["age", "item"] and features.fields[0].rows == 52


@pytest.mark.parametrize("head", [logs.HEAD, 1])
def test_keys_of_later_json_lines_and_nested_objects_are_columns(tmp_path, monkeypatch, head):
    monkeypatch.setattr(logs, "HEAD", head)
    lines = [{"item": f"i{i % 7}", "click": CLICKS[i]} for i in range(ROWS)]
    for n in range(1, ROWS):
        lines[n] |= {"user": {"id": f"u{n % 9}", "geo": {"city": "AB"[n % 2]}}, "tags": ["a", "b"][: n % 3]}
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    schema = infer(open_log(path))
    specs = {spec.name: spec for spec in schema.columns}
    assert list(specs) == ["item", "click", "user.id", "user.geo.city", "tags"]
    assert (
        specs["user.id"].distinct == 9 and specs["user.id"].missing == 1 and specs["user.geo.city"].kind == "category"
    )
    assert Features(schema).fields[0].column.name == "item" and len(next(Features(schema).read(path))) == ROWS
    (tmp_path / "first.jsonl").write_text(json.dumps(lines[0]) + "\n" * 3 + json.dumps(lines[5]))
    read = next(Features(schema).read(tmp_path / "first.jsonl"))
    assert read.ids[0, 1] == Features(schema).fields[1].last and read.ids[1, 1] != read.ids[0, 1]
    (tmp_path / "first.jsonl").write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[3] | {"user": {"id": 1}}))
    with pytest.raises(RequestError, match=r"lacks the column user\.geo\.city; found item, click, user\.id"):
        Features(schema).read(tmp_path / "first.jsonl")


def test_columns_of_types_without_text_are_named(tmp_path):
    table = pa.table(
        {
            "click": CLICKS,
            "item": [f"i{i % 7}" for i in range(ROWS)],
            "user": [{"id": i, "name": "x"} for i in range(ROWS)],
            "more": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
            "vector": pa.array([[i % 3, 5] for i in range(ROWS)], pa.list_(pa.int64(), 2)),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    for source in (tmp_path / "log.parquet", table):
        schema = infer(open_log(source))
        specs = {spec.name: spec for spec in schema.columns}
        assert "user" not in specs and specs["user.id"].why.startswith("row numbers")
        assert specs["more"].kind == "ignored"
        assert specs["more"].why.startswith("map<string, int64")
        assert specs["vector"].kind in ("category", "categories")
        assert len(next(Features(schema).read(source, labelled=True))) == ROWS
    value = schema.to_json()
    for entry in value["columns"]:
        if entry["name"] == "more":
            entry |= {"kind": "category", "encoding": {"type": "hash", "buckets": 9}}
    with pytest.raises(RequestError, match=r"log.parquet has the column more \(map<.*, expected texts, numbers or l"):
        next(Features(Schema.from_json(value)).read(tmp_path / "log.parquet"))


def test_nested_values_are_the_same_columns_in_every_source(tmp_path):
    """Structs of tables as objects of JSON lines; lists of objects are set aside, and the other columns read."""
    rows = [
        {
            "click": CLICKS[i],
            "user": {"id": f"u{i % 9}", "geo": {"city": "AB"[i % 2]}} if i % 5 else None,
            "seen": [{"id": 1}],
            "price": i % 11,
        }
        for i in range(ROWS)
    ]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(table, tmp_path / "log.parquet")
    sources = [tmp_path / "log.jsonl", tmp_path / "log.parquet", table, table.to_pandas(), rows]
    schema = infer(open_log(sources[0]))
    kinds = {spec.name: spec.kind for spec in schema.columns}
    assert kinds["user.id"] == kinds["user.geo.city"] == "category" and kinds["seen"] == "ignored"
    first, *others = (next(Features(schema).read(source, labelled=True)) for source in sources)
    assert first.ids[0, 0] == first.ids[5, 0] == Features(schema).fields[0].last
    for read in others:
        assert (read.ids == first.ids).all() and (read.numbers == first.numbers).all()
    for source in sources[1:]:
        assert {spec.name for spec in infer(open_log(source)).columns} >= {"user.id", "user.geo.city", "price"}


@pytest.mark.parametrize("parquet", [True, False])
def test_lists_of_a_source_are_lists_however_few(tmp_path, parquet):
    lists = [[], ["New York", "Rome"], ["Rome"], None, ["Oslo", "New York", "Rome"]] * 120
    rows = [
        {"click": click, "seen": seen, "country": "DE" if seen else "FR"}
        for click, seen in zip(CLICKS, lists, strict=True)
    ]
    path = tmp_path / ("log.parquet" if parquet else "log.jsonl")
    if parquet:
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = next(spec for spec in infer(open_log(path)).columns if spec.name == "seen")
    assert (result.kind, result.separator, result.why[:16]) == ("categories", "|", "lists in the log")
    assert sorted(result.encoding["values"]) == ["New York", "Oslo", "Rome"]


def test_infinite_numbers_count_as_missing(tmp_path):
    values = [["inf", "-inf", "Infinity"][i % 3] if i % 20 == 0 else round(i * 0.37, 2) for i in range(ROWS)]
    spec = column(tmp_path, "ratio", values)
    assert spec.kind == "number" and spec.missing == ROWS // 20
    assert spec.why.endswith("; 30 infinite values count as missing")
    assert 0 < spec.encoding["deviation"] < 100


@pytest.mark.parametrize("placeholder", ["-", "?", "unknown"])
def test_numbers_with_placeholders_say_how_these_become_missing(tmp_path, placeholder):
    values = [placeholder if i % 20 == 0 else i % 90 / 2 for i in range(ROWS)]
    result = column(tmp_path, "weight_kg", values)
    assert result.kind == "category"
    assert result.why.endswith(f"; 95% are numbers, others such as {placeholder!r}: missing with --number weight_kg")
    own = column(tmp_path, "weight_kg", [placeholder if i % 20 == 0 else i / 7 for i in range(ROWS)])
    assert own.kind == "ignored" and own.why.endswith("missing with --number weight_kg")
    log = open_log(tmp_path / "log.csv")
    chosen = next(spec for spec in infer(log, kinds={"weight_kg": "number"}).columns if spec.name == "weight_kg")
    assert chosen.kind == "number" and chosen.missing == ROWS // 20


def test_ids_and_texts_with_placeholders_have_no_hint(tmp_path):
    ids = column(tmp_path, "item_id", ["-" if i % 20 == 0 else i % 90 for i in range(ROWS)])
    texts = column(tmp_path, "model", [i % 9 if i % 2 else f"A{i % 9}" for i in range(ROWS)])
    assert ids.kind == texts.kind == "category" and "--number" not in ids.why + texts.why


@pytest.mark.parametrize(
    "written", [" {}", "{}%", "${}", "€ {}", "{} €", "-{},50 €", "$1,{}00.00", "1,00{}", "({})", "\u2212{}"]
)
def test_numbers_with_other_characters_say_so(tmp_path, written):
    """Also after placeholders, and not as lists of the digits around a comma."""
    values = ["-" if row == 0 else written.format(row % 9 + 0.5 * ("00" not in written)) for row in range(ROWS)]
    inferred = column(tmp_path, "discount", values)
    expected = f"numbers written as {values[1]!r}: to use them as numbers, write them as 1234.5"
    assert inferred.kind == "category" and inferred.why.endswith(expected)


@pytest.mark.parametrize("form", ["{:,.2f}", "{:.2f}%"])
def test_few_numbers_with_other_characters_are_not_called_placeholders(tmp_path, form):
    values = [form.format(1200.5 + row) if row % 10 == 0 else f"{row % 90:.2f}" for row in range(ROWS)]
    why = column(tmp_path, "price", values).why
    assert why.endswith(f"numbers written as {values[0]!r}: to use them as numbers, write them as 1234.5")


def test_digits_of_other_scripts_say_so(tmp_path):
    values = ["".join(chr(0x660 + int(digit)) for digit in str(row % 90)) for row in range(ROWS)]
    assert "numbers written as '\u0660': to use them as numbers" in column(tmp_path, "price", values).why


@pytest.mark.parametrize(("zone", "kind"), [("UTC", "timestamp"), ("CET", "ignored"), ("Europe/Berlin", "ignored")])
def test_times_with_the_name_of_their_zone(tmp_path, zone, kind):
    """Repeated, so that they are no category by mistake."""
    values = [f"2026-03-29 01:{row % 20:02d}:00 {zone}" for row in range(ROWS)]
    assert column(tmp_path, "ts", values).kind == kind


def test_a_column_without_a_name_at_the_end_is_ignored(tmp_path):
    """As exports write that end every line with a delimiter."""
    path = written(tmp_path / "log.csv", click=CLICKS, item=[i % 7 for i in range(ROWS)], **{"": [""] * ROWS})
    schema = infer(open_log(path))
    assert [spec.kind for spec in schema.columns] == ["label", "category", "ignored"]
    assert len(next(Features(schema).read(path, labelled=True))) == ROWS


def test_european_numbers_with_and_without_thousands(tmp_path):
    values = [f"1.{row % 9}00,50" if row % 10 == 0 else f"{row % 9},25" for row in range(ROWS)]
    inferred = column(tmp_path, "price", values)
    assert inferred.kind == "category" and "numbers written as '1.000,50'" in inferred.why


def test_groups_of_thousands_are_not_called_decimal_commas(tmp_path):
    inferred = column(tmp_path, "price", [f"{1000 + 37 * (row % 90):,}" for row in range(ROWS)])
    assert inferred.kind == "ignored"
    assert inferred.why.startswith("numbers with a comma before three digits: not read, write 6500 or 6.5 for 6,500")


@pytest.mark.parametrize("items", ["1,2", "0.5,7", "10%,20%", "1,234"])
def test_lists_of_numbers_are_no_numbers_with_other_characters(tmp_path, items):
    values = [",".join(items.split(",")[: 1 + row % 2] + ["9"] * (row % 3)) for row in range(ROWS)]
    assert "numbers written as" not in column(tmp_path, "discount", values).why


def test_bytes_that_are_no_text_are_ignored(tmp_path):
    table = pa.table({"click": CLICKS, "image": [b"\xff\xd8%d" % i for i in range(ROWS)], "code": [b"a", b"b"] * 300})
    pq.write_table(table, tmp_path / "log.parquet")
    for source in (tmp_path / "log.parquet", table):
        specs = {spec.name: spec for spec in infer(open_log(source)).columns}
        assert specs["image"].kind == "ignored" and specs["image"].why.startswith("bytes that are no UTF-8 text")
        assert specs["code"].kind == "category"
    with pytest.raises(RequestError, match=r"has the column image \(bytes that are no UTF-8 text\), expected texts"):
        infer(open_log(tmp_path / "log.parquet"), kinds={"image": "category"})


def test_bytes_that_are_no_text_far_down_name_the_column(tmp_path):
    late = pa.table({"click": CLICKS, "x": [f"{i % 7}" for i in range(ROWS)], "blob": [b"a"] * (ROWS - 1) + [b"\xff"]})
    pq.write_table(late, tmp_path / "log.parquet")
    with pytest.raises(RequestError, match=r"column blob cannot be read .* zoo schema --ignore blob leaves it out"):
        infer(open_log(tmp_path / "log.parquet"))
    kinds = {
        spec.name: spec.kind for spec in infer(open_log(tmp_path / "log.parquet"), kinds={"blob": "ignored"}).columns
    }
    assert kinds == {"click": "label", "x": "number", "blob": "ignored"}
