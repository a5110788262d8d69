"""Rows of a log to a model's inputs: against a plain reference, one row after the other, and every defined fault."""

import csv
import gzip
import io
import json
import math
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from zoo.recommenders.data.cell_values import canonical, parse_floats
from zoo.recommenders.data.columns.times import seconds_since_1970
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import hash_buckets
from zoo.recommenders.data.logs import CRITEO, is_criteo, open_log
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.transforms import MAX_DEVIATIONS

LISTS = {"kind": "categories", "separator": "|", "length": 3}
COLUMNS = [
    {"name": "y", "kind": "label"},
    {"name": "w", "kind": "weight"},
    {"name": "when", "kind": "timestamp", "unit": "s"},
    {"name": "user", "kind": "category", "encoding": {"type": "hash", "buckets": 7}},
    {"name": "a", "kind": "number", "missing": 1, "encoding": {"type": "standard", "mean": 2.0, "deviation": 0.5}},
    {"name": "b", "kind": "number", "encoding": {"type": "log1p", "minimum": -1.0, "maximum": 99.0}},
    {"name": "c", "kind": "number", "encoding": {"type": "min-max", "minimum": -1.0, "maximum": 3.0}},
    {"name": "d", "kind": "number", "missing": 5, "encoding": {"type": "quantile", "quantiles": [0, 1, 1, 4]}},
    {
        "name": "town, größe",
        "kind": "category",
        "encoding": {"type": "vocabulary", "values": ["Köln", 'say "hi"', "x"]},
    },
    {"name": "mean", **LISTS, "pooling": "mean", "encoding": {"type": "vocabulary", "values": ["p", "q", "r s"]}},
    {"name": "sum", **LISTS, "pooling": "sum", "encoding": {"type": "hash", "buckets": 5}},
    {"name": "max", **LISTS, "pooling": "max", "encoding": {"type": "vocabulary", "values": ["p", "q"]}},
    {"name": "other", "kind": "ignored"},
]
SCHEMA = Schema.from_json({"columns": COLUMNS})
FEATURES = Features(SCHEMA)
NAMES = [column["name"] for column in COLUMNS]
EXACT = ("ids", "numbers", "scales", "labels", "weights", "times")


def bucket(text, count):
    return 1 + int(hash_buckets(pa.array([text]), count)[0])


def category(encoding, text):
    if encoding["type"] == "hash":
        return encoding["buckets"] + 1 if text is None else bucket(text, encoding["buckets"])
    values = list(encoding["values"])
    return len(values) + 1 if text is None else values.index(text) + 1 if text in values else 0


def number(text):
    try:
        value = float(text) if text is not None and not set(text) & set("_xXpP") else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def encoded(encoding, x):
    match encoding["type"]:
        case "standard":
            return np.clip((x - encoding["mean"]) / encoding["deviation"], -MAX_DEVIATIONS, MAX_DEVIATIONS)
        case "min-max":
            return np.clip((x - encoding["minimum"]) / (encoding["maximum"] - encoding["minimum"]), 0, 1)
        case "log1p":
            inside = np.log1p(max(x - encoding["minimum"], 0)) / np.log1p(encoding["maximum"] - encoding["minimum"])
            return np.clip(inside, 0, 1)
    points = np.array(encoding["quantiles"], float)
    return np.interp(x, points, np.linspace(0, 1, len(points)))


def reference(rows):
    """What `Features` reads, by the words of the schema, a value at a time."""
    arrays = {name: [] for name in EXACT}
    for row in rows:
        text = {name: canonical(pa.array([row[name]]))[0].as_py() for name in NAMES}
        ids, scales, values, gaps = [], [], [], []
        for column in SCHEMA.columns:
            if column.kind == "category":
                ids.append(category(column.encoding, text[column.name]))
            elif column.kind == "categories":
                items = [item.strip() for item in (text[column.name] or "").split("|") if item.strip()]
                kept = [category(column.encoding, item) for item in items][-column.length :]
                count = column.encoding.get("buckets") or len(column.encoding["values"])
                padding = kept[0] if kept and column.pooling == "max" else count + 1
                ids += kept + [padding] * (column.length - len(kept))
                if column.pooling == "mean":
                    scales.append(1 / len(kept) if kept else 0)
            elif column.kind == "number":
                x = number(text[column.name])
                values.append(0.0 if math.isnan(x) else encoded(column.encoding, x))
                gaps += [float(math.isnan(x))] if column.missing else []
        arrays["ids"].append(ids)
        arrays["numbers"].append(values + gaps)
        arrays["scales"].append(scales)
        arrays["labels"].append(number(text["y"]))
        arrays["weights"].append(number(text["w"]))
        arrays["times"].append(number(text["when"]))
    kinds = {"ids": np.int32, "times": np.float64}
    return {name: np.array(values, kinds.get(name, np.float32)) for name, values in arrays.items()}


def written(rows, path, delimiter=","):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


NUMBERS = st.one_of(
    st.integers(-5, 200).map(str),
    st.floats(-5, 200).map(repr),
    st.sampled_from(["", "NA", "nan", "inf", "-inf", "+3", "5.", ".5", "1e1", "abc", "1_0", "0x10"]),
)
ITEMS = st.lists(st.sampled_from(["p", "q", "r s", "zzz", " p ", "", "ä"]), max_size=6).map("|".join)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
ROW = st.fixed_dictionaries(
    {
        "y": st.sampled_from(["0", "1", "1.0"]),
        "w": st.sampled_from(["0", "1", "2.5"]),
        "when": st.integers(0, 2_000_000_000).map(str),
        "user": st.one_of(TEXT, st.sampled_from(["", "null", "7"])),
        **dict.fromkeys("abcd", NUMBERS),
        "town, größe": st.one_of(st.sampled_from(["Köln", 'say "hi"', "x", "NULL", "a,b\n2"]), TEXT),
        "mean": ITEMS,
        "sum": ITEMS,
        "max": ITEMS,
        "other": TEXT,
    }
)


@given(rows=st.lists(ROW, min_size=1, max_size=8), order=st.permutations(NAMES), delimiter=st.sampled_from(",;\t"))
def test_any_row_is_read_as_the_schema_says(tmp_path_factory, rows, order, delimiter):
    """Quotes, line feeds in quotes, unicode, lists, strays among numbers, columns in any order, and an extra one."""
    path = tmp_path_factory.mktemp("log") / "log.csv"
    written([{name: row[name] for name in order} | {"more": "1"} for row in rows], path, delimiter)
    wanted = reference(rows)
    batch = Rows.concatenate(list(FEATURES.read(path, labelled=True, batch_rows=3)))
    for name in EXACT:
        np.testing.assert_array_equal(getattr(batch, name), wanted[name], err_msg=name)
    assert batch.index.tolist() == list(range(len(rows)))
    in_memory = Rows.concatenate(list(FEATURES.read(rows, labelled=True)))
    for name in EXACT:
        np.testing.assert_array_equal(getattr(in_memory, name), wanted[name], err_msg=name)


def rows(count=5):
    values = {"y": "1", "w": "1", "when": "7", "user": "u", "town, größe": "x", "mean": "p|q", "sum": "p", "max": "q"}
    return [values | dict.fromkeys("abcd", "1") | {"other": "-", "y": str(i % 2)} for i in range(count)]


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.parquet", "log.jsonl", "saved"])
def test_every_source_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    if name == "saved":
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(rows())
        dataset.save_to_disk(path)
        assert next(FEATURES.read(dataset)).ids.tolist() == next(FEATURES.read(rows())).ids.tolist()
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows()), path)
    elif name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row | {"mean": row["mean"].split("|")}) + "\n" for row in rows()))
    else:
        written(rows(), path)
    batch = Rows.concatenate(list(FEATURES.read(path, labelled=True)))
    wanted = reference(rows())
    for field in EXACT:
        np.testing.assert_array_equal(getattr(batch, field), wanted[field])


def test_scoring_needs_no_label_and_takes_columns_by_name(tmp_path):
    path = written(
        [{name: row[name] for name in reversed(NAMES) if name not in "yw"} for row in rows()], tmp_path / "a.csv"
    )
    batch = next(FEATURES.read([path, path]))
    assert batch.labels is None and len(batch) == 10 and batch.index.tolist() == list(range(10))


def test_missing_columns_are_named(tmp_path):
    path = written([{"y": "1", "user": "u"}], tmp_path / "a.csv")
    with pytest.raises(RequestError, match='columns a, b, c, d, "town, größe", mean, sum, max; found y, user'):
        FEATURES.read(path)
    with pytest.raises(RequestError, match="lacks the column y"):
        FEATURES.read(written([{k: v for k, v in rows()[0].items() if k != "y"}], path), labelled=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y": "2"}, "found the label y '2', expected 0 or 1; regression targets are not supported"),
        ({"y": ""}, "found the label y None, expected 0 or 1"),
        ({"y": "yes"}, "found the label y 'yes'"),
        ({"w": "-1"}, "found the weight w '-1', expected 0 or more"),
        ({"w": "much"}, "found the weight w 'much'"),
    ],
)
def test_bad_labels_end_reading_or_are_left_out(tmp_path, change, said):
    bad = rows()
    bad[2] |= change
    path = written(bad, tmp_path / "a.csv")
    with pytest.raises(RequestError, match=said):
        list(FEATURES.read(path, labelled=True))
    errors = ErrorLog()
    batch = Rows.concatenate(list(FEATURES.read(path, labelled=True, on_error="skip", errors=errors)))
    assert batch.index.tolist() == [0, 1, 3, 4] and errors.total == 1
    assert len(next(FEATURES.read(path))) == 5  # scoring does not look at them


def test_rows_of_another_width_end_reading_or_are_left_out(tmp_path):
    path = written(rows(), tmp_path / "a.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "1,2", *lines[3:], lines[1] + ",9,9"]) + "\n")
    with pytest.raises(RequestError, match="Expected 13 columns, got 2"):
        list(FEATURES.read(path))
    errors = ErrorLog()
    batch = Rows.concatenate(list(FEATURES.read(path, on_error="skip", errors=errors)))
    assert len(batch) == 5 and errors.counts == {"columns": 2}


def test_a_header_alone_is_no_log(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",".join(f'"{name}"' for name in NAMES) + "\n")
    with pytest.raises(RequestError, match="found no row to use"):
        list(FEATURES.read(path))


def test_rows_of_criteo_are_told_by_their_form(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("\t".join(["1", *"0123456789012", *["05db9164"] * 25, ""]) + "\n")
    log = open_log(path)
    assert log.columns == CRITEO and not log.header and is_criteo(path)
    batch = next(log.batches())
    assert (
        batch.num_rows == 1 and batch.column("C1")[0].as_py() == "05db9164" and batch.column("C26")[0].as_py() is None
    )
    assert not is_criteo(written(rows(), tmp_path / "a.csv")) and not is_criteo(rows())
    path.write_text("\t".join(CRITEO) + "\n" + path.read_text())  # a header makes it any log
    assert open_log(path).header and not is_criteo(path)


def test_numbers_and_times():
    floats = parse_floats(pa.array(["1", " 2 ", None, "x", "1e400", "-3.5"]))
    np.testing.assert_array_equal(floats, [1, 2, np.nan, np.nan, np.nan, -3.5])
    texts = [
        "2024-01-01",
        "2024-01-01T01:00:00Z",
        "2024-01-01 01:00",
        "2024-01-01T01:00:00+01:00",
        "soon",
        None,
        "2023-02-29",
    ]
    start = 1_704_067_200.0
    times = seconds_since_1970(pa.array(texts), "text")
    assert times.tolist() == [start, start + 3600, start + 3600, start, *[-math.inf] * 3]
    zones = ["01:00:00 UTC", "01:00 GMT", "01:00:00.0+00", "03:00:00 +0200", "00:00:00-01", "01:00 CET", "01:00  UTC"]
    times = seconds_since_1970(pa.array([f"2024-01-01 {zone}" for zone in zones]), "text")
    assert times.tolist() == [*[start + 3600] * 5, *[-math.inf] * 2]
    assert seconds_since_1970(pa.array(["5000"]), "ms").tolist() == [5.0]
    fine = ["2024-01-01 00:00:00.123456789", "2024-01-01T00:00:00.1234567Z", "2024-01-01T00:00:00.1234567890"]
    assert seconds_since_1970(pa.array(fine), "text").tolist() == [start + 0.123456] * 2 + [-math.inf]


def test_features_travel_as_json():
    again = Features.from_json(json.loads(json.dumps(FEATURES.to_json())))
    assert again.schema == SCHEMA and again.shape == FEATURES.shape == (11, 6, 1)
    with pytest.raises(RequestError, match="holds no schema"):
        Features.from_json({})


VALUES = {
    "whole": [3.0, 1e10, -0.0, 0.5, None, 1e20, math.nan],
    "list": [["p", None, "q"], [None], [], None, ["NA", "", "r s"], ["q"], [None, "zzz"]],
    "numbers": [[1.0, None], [2.5], [3.0], [], None, [4e12, 5.0], [6.0]],
    "flag": [True, False, None, True, True, False, True],
    "count": [3, 10**10, 0, None, 7, 1, 2],
}


@pytest.mark.parametrize("form", ["dicts", "jsonl", "parquet"])
def test_a_value_is_the_same_text_in_every_source(tmp_path, form):
    """Ids of whole numbers with gaps are floats in some, and lists may lack items."""
    table = pa.table(VALUES, schema=pa.schema({name: pa.array(values).type for name, values in VALUES.items()}.items()))
    path = tmp_path / f"log.{form}"
    match form:
        case "dicts":
            path = table.to_pylist()
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        case "parquet":
            pq.write_table(table, path)
    columns = pa.Table.from_batches(open_log(path).batches()).to_pydict()
    assert columns == {
        "whole": ["3", "10000000000", "0", "0.5", None, "1e+20", None],
        "list": ["p|q", None, None, None, "r s", "q", "zzz"],
        "numbers": ["1", "2.5", "3", None, None, "4000000000000|5", "6"],
        "flag": ["1", "0", None, "1", "1", "0", "1"],
        "count": ["3", "10000000000", "0", None, "7", "1", "2"],
    }


def test_one_dict_is_a_row_and_a_dict_of_lists_a_table():
    row = {"user": "u7", "a": 3, "mean": ["p", "q"]}
    assert open_log(row).columns == ("user", "a", "mean")
    for one in (row, MappingProxyType(row), [row]):
        (batch,) = open_log(one).batches()
        assert batch.to_pylist() == [{"user": "u7", "a": "3", "mean": "p|q"}]
    for columns in ({"user": ["u7", "u8"], "a": np.array([3, 4])}, {"user": pa.array(["u7", "u8"]), "a": (3, 4)}):
        (batch,) = open_log(columns).batches()
        assert batch.to_pylist() == [{"user": "u7", "a": "3"}, {"user": "u8", "a": "4"}]
    whole = {column["name"]: "1" for column in COLUMNS}
    (rows,) = FEATURES.read(whole, labelled=True)
    (truth,) = FEATURES.read([whole], labelled=True)
    assert len(rows) == 1 and all(np.array_equal(getattr(rows, name), getattr(truth, name)) for name in EXACT)
