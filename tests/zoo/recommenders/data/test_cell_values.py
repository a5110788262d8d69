"""One value is one text, whatever it was read from: all sources of a log give the same ids, bit for bit."""

import csv
import datetime
import decimal
import enum
import io
import json
import math
import uuid

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data import cell_values
from zoo.recommenders.data.cell_values import CellForm, as_text, as_texts, canonical
from zoo.recommenders.data.csv_reader import CsvReader
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import hash_buckets
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer

HASH = {"type": "hash", "buckets": 1009}
LISTS = {"kind": "categories", "separator": ";", "pooling": "mean", "length": 3}
COLUMNS = [
    {"name": "y", "kind": "label"},
    {"name": "when", "kind": "timestamp", "unit": "s"},
    {"name": "user", "kind": "category", "encoding": HASH},
    {"name": "known", "kind": "category", "encoding": {"type": "vocabulary", "values": ["3.0", "True", "0.5", "-1"]}},
    {"name": "new", "kind": "category", "encoding": {"type": "vocabulary", "values": ["False", "True"]}},
    {"name": "town", "kind": "category", "encoding": HASH},
    {"name": "tags", **LISTS, "encoding": HASH},
    {"name": "sizes", **LISTS, "pooling": "max", "encoding": {"type": "vocabulary", "values": ["1", "2.0", "0.5"]}},
    {"name": "price", "kind": "number", "missing": 1, "encoding": {"type": "standard", "mean": 1.0, "deviation": 2.0}},
    {"name": "flag", "kind": "number", "encoding": {"type": "min-max", "minimum": 0.0, "maximum": 2.0}},
]
SCHEMA = Schema.from_json({"columns": COLUMNS})
EXACT = ("ids", "numbers", "scales", "labels", "weights", "times")
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**6), 10**6).map(float),
    st.sampled_from([3.0, 0.5, -1.0, -0.0, 1e16, 1e-5, 1e300]),
)
WORDS = st.one_of(
    st.sampled_from(["Köln", "a b", "3.0", "1.10", "True", "null", "NaN", "1e5", "[a]", "['p', 'q']", "it's", "(x)"]),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8),
)
ITEMS = st.text(st.sampled_from("pqrä'\"\\10."), min_size=1, max_size=4)
ROW = st.fixed_dictionaries(
    {
        "y": st.booleans(),
        "when": st.integers(0, 2_000_000_000),
        "user": st.none() | FLOATS,
        "known": st.none() | st.sampled_from([3.0, 0.5, -1.0, 7.0]),
        "new": st.none() | st.booleans(),
        "town": st.none() | WORDS,
        "tags": st.none() | st.lists(ITEMS, max_size=5),
        "sizes": st.none() | st.lists(st.none() | st.sampled_from([1.0, 2.0, 0.5, 9.0]), max_size=4),
        "price": st.none() | FLOATS,
        "flag": st.none() | st.booleans(),
    }
)
TYPES = {
    **{"y": pa.bool_(), "when": pa.int64(), "user": pa.float64(), "known": pa.float64(), "new": pa.bool_()},
    **{"town": pa.string(), "tags": pa.list_(pa.string()), "sizes": pa.list_(pa.float64())},
    **{"price": pa.float64(), "flag": pa.bool_()},
}


def cell(value, one=str):
    """A value as someone's script writes it to CSV: lists joined by the separator of the schema, or as Python does."""
    if isinstance(value, list) and one is not repr:
        return ";".join("" if item is None else one(item) for item in value)
    return "" if value is None else str(value)


def text(rows, delimiter, one=str):
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
    writer.writerow(TYPES)
    writer.writerows([cell(row[name], one) for name in TYPES] for row in rows)
    return io.BytesIO(written.getvalue().encode())


def of_numpy(value):
    """A value as rows of pandas and numpy hold it."""
    if isinstance(value, list):
        return tuple(of_numpy(item) for item in value)
    if value is None:
        return pd.NA
    return np.float64(value) if isinstance(value, float) else np.bool_(value) if isinstance(value, bool) else value


def sources(rows, folder):
    table = pa.Table.from_pylist(rows, pa.schema(TYPES.items()))
    large = pa.schema(
        [(name, pa.large_list(kind.value_type) if pa.types.is_list(kind) else kind) for name, kind in TYPES.items()]
    )
    frame = table.to_pandas()
    yield "dicts", rows
    yield "numpy", [{name: of_numpy(value) for name, value in row.items()} for row in rows]
    yield "columns", {name: [row[name] for row in rows] for name in TYPES}
    yield "arrow", table
    yield "large lists", table.cast(large)
    yield "pandas", frame
    yield "objects", pd.DataFrame(rows, dtype=object)
    yield "jsonl", io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    yield "csv", text(rows, ",")
    yield "tsv", text(rows, "\t")
    yield "lists in the notation of Python", text(rows, ",", repr)
    yield "csv of pandas", io.BytesIO(frame.to_csv(index=False).encode())
    path = folder / "log.parquet"
    pq.write_table(table, path)
    yield "parquet", path
    try:
        import polars
    except ImportError:
        return
    yield "polars", polars.from_arrow(table)
    yield "lazy frame of polars", polars.from_arrow(table).lazy()


def plain(rows):
    """Rows that text can hold: items without spaces around them."""
    lists = ([tag.strip() for tag in row["tags"] or () if tag.strip()] for row in rows)
    return [{**row, "tags": tags} for row, tags in zip(rows, lists, strict=True)]


@settings(max_examples=25)
@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_every_source_gives_the_same_ids_bit_for_bit(tmp_path_factory, rows):
    rows, folder = plain(rows), tmp_path_factory.mktemp("log")
    features, truth = Features(SCHEMA), None
    assert CsvReader.of(features, open_log(text(rows, ",")), list(TYPES)) or extension.native() is None
    for name, source in sources(rows, folder):
        (encoded,) = features.read(source, labelled=True)
        truth = truth or encoded
        for field in EXACT:
            np.testing.assert_array_equal(getattr(encoded, field), getattr(truth, field), err_msg=f"{name}: {field}")


@given(
    texts=st.lists(
        st.one_of(
            WORDS, FLOATS.map(repr), st.text(st.sampled_from("0123456789.eE+-[]()'\",;TrueFalse"), max_size=9), ITEMS
        ),
        min_size=1,
        max_size=40,
    )
)
def test_the_native_reader_writes_the_same_texts(texts):
    """Blocks that it leaves to pyarrow among them."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    names = ["town", "tags", "sizes", "price", "new"]
    writer.writerow(names)
    writer.writerows([string] * len(names) for string in texts)
    columns = [column for column in COLUMNS if column["name"] in names]
    features = Features(Schema.from_json({"columns": columns}))
    truth = features.encode_columns(
        {
            name: features.schema.forms[name].apply(pa.array([string or None for string in texts], pa.string()))
            for name in names
        },
        np.arange(len(texts)),
        labelled=False,
    )
    encoded = Rows.concatenate(list(features.read(io.BytesIO(written.getvalue().encode()))))
    for field in ("ids", "numbers", "scales"):
        np.testing.assert_array_equal(getattr(encoded, field), getattr(truth, field), err_msg=field)


def test_texts_of_one_value():
    texts = {
        "51": ["51.0", "51.", "51.00", "51"],
        "0": ["-0.0", "0.0", "0", "False", "false", "FALSE"],
        "1": ["True", "true", "TRUE", "1.0", "[1.0]"],
        "10000000000000000": ["1e+16", "1e16", "10000000000000000.0"],
        "1e-05": ["1e-05", "1e-5", "0.00001"],
        "1e+20": ["1e+20", "1E20", "100000000000000000000.0"],
        "a;b": ["a;b", "['a', 'b']", '["a","b"]', "['a' 'b']", "('a', 'b')", "['a', None, 'b']", "['a', nan, 'b',]"],
        "1;2": ["[1.0, 2.0]", "[1 2]", "[1. 2.]"],
        "it's": ["it's", '["it\'s"]', "['it\\'s']"],
        None: [None, "", "NA", "nan", "<NA>", "NaT", "[]", "[None]", "(None,)"],
    }
    same = [
        "1.10",
        "007",
        "v1.0",
        "1.2.0",
        "1e999",
        "12e5",
        "a1e5",
        "[a]",
        "(1999)",
        "[1, [2]]",
        "yes",
        "-1",
        "+5",
        "½",
    ]
    for one, forms in {**texts, **{string: [string] for string in same}}.items():
        assert canonical(pa.array(forms, pa.string()), ";").to_pylist() == [one] * len(forms), one


def test_values_of_python():
    day, moment = datetime.date(2024, 1, 31), datetime.datetime(2024, 1, 31, 12, 30)
    number, east = uuid.UUID(int=5), datetime.timezone(datetime.timedelta(hours=2))
    for value, written in [
        *(
            (missing, None)
            for missing in (None, pd.NA, pd.NaT, math.nan, np.datetime64("NaT"), np.float32("nan"), "None", [], [pd.NA])
        ),
        *(
            (three, "3")
            for three in (3, 3.0, np.int8(3), np.float16(3), decimal.Decimal(3), "3", b"3", np.str_("3"), pa.scalar(3))
        ),
        *((one, "1") for one in (True, np.bool_(True), np.array(1.0), np.bytes_(b"1"))),
        *((pair, "a|2") for pair in (["a", 2.0], ("a", 2), ["a", None, 2], np.array(["a", "2"]), pa.array(["a", "2"]))),
        *(
            (np.float32(0.1), "0.1"),
            (decimal.Decimal("1E+2"), "100"),
            (decimal.Decimal("1.10"), "1.10"),
            (number, str(number)),
        ),
        *((day, "2024-01-31"), (moment, "2024-01-31 12:30:00"), (pd.Timestamp(moment), "2024-01-31 12:30:00")),
        (np.datetime64("2024-01-31T12:30"), "2024-01-31 12:30:00"),
        (moment.replace(microsecond=500_000, tzinfo=east), "2024-01-31 10:30:00.500000Z"),
        (datetime.time(12, 30), "12:30:00"),
        (datetime.time(12, 30, 0, 5), "12:30:00.000005"),
        (datetime.timedelta(minutes=1), "60"),
        (enum.Enum("Color", [("RED", "red")]).RED, "red"),
        (enum.Enum("Color", [("RED", "red")], type=str).RED, "red"),
        (enum.IntEnum("Level", [("LOW", 3)]).LOW, "3"),
    ]:
        assert as_text(value) == written, repr(value)
        if not isinstance(value, pa.Array | pa.Scalar | np.ndarray | np.generic | enum.Enum):
            (batch,) = open_log({"town": [value]}).batches()
            assert batch.column("town").to_pylist() == [written], repr(value)
    assert as_text(pd.Timestamp(10**18 + 59)) == "2001-09-09 01:46:40.000000059"
    for unknown in ({"a"}, object(), 1j, [{"a"}]):
        with pytest.raises(RequestError, match=r"column town: found a value of type \w+; expected text, a number"):
            list(open_log([{"town": "x"}, {"town": unknown}]).batches())
    for unknown in ({"a"}, object(), 1j):
        for rows in ({"town": [None, unknown]}, pd.DataFrame({"town": [unknown]})):
            with pytest.raises(RequestError, match=r"column town: found a value of type \w+; expected text, a number"):
                list(open_log(rows).batches())
    with pytest.raises(RequestError, match="column town: .*utf-8"):
        list(open_log([{"town": b"\xff"}]).batches())


@given(st.one_of(WORDS, FLOATS, FLOATS.map(repr), st.integers(), st.booleans(), st.none(), ITEMS, st.text(max_size=6)))
@pytest.mark.parametrize("form", [CellForm(";"), CellForm(";", canonical=False)])
def test_a_value_alone_has_the_text_that_it_has_in_a_column(form, value):
    assert form.text(value) == form.apply(as_texts([value], "a", ";"))[0].as_py()


def test_ids_that_floats_have_rounded_give_a_warning(caplog):
    identity = 2**53 + 1
    columns = [{"name": "big_user", "kind": "category", "encoding": HASH}]
    features = Features(Schema.from_json({"columns": columns}))
    for values, warned in ((pd.array([identity, None], "Int64"), 0), ([identity - 3, None], 0), ([identity, None], 1)):
        list(features.read(pd.DataFrame({"big_user": values})))
        assert len([text for text in caplog.messages if "column big_user: whole numbers from 2**53" in text]) == warned


def test_lists_of_a_column_are_canonical_in_one_call(monkeypatch):
    calls, made = [], cell_values.canonical
    monkeypatch.setattr(cell_values, "canonical", lambda *texts: calls.append(len(texts[0])) or made(*texts))
    texts = ["[1.0, 'a;b', None]", "x", "[]", "1e3", "[broken", None, "(2.50, 3.0)", "[True]"] * 50
    expected = ["1|a;b", "x", None, "1000", "[broken", None, "2.50|3", "1"] * 50
    assert cell_values.canonical(pa.array(texts)).to_pylist() == expected
    assert calls == [len(texts), 50 * (3 + 2 + 1)]


def test_the_schema_says_whether_texts_are_canonical(tmp_path):
    """Models of version 0.2.0, whose cards do not say so, read texts as they stand."""
    path = tmp_path / "log.csv"
    path.write_text(
        "y,user,flag,tags\n" + "".join(f"{k % 2},{k % 7}.0,{k % 3 == 0},['t{k % 4}' 't{k % 5}']\n" for k in range(200))
    )
    schema = infer(open_log(path))
    kinds = {column.name: (column.kind, column.encoding.get("values")) for column in schema.columns}
    assert kinds["tags"] == ("categories", ["t0", "t1", "t2", "t3", "t4"])
    assert schema.to_json()["canonical"] and Schema.load(schema.save(tmp_path / "schema.json")).canonical
    assert Features.from_json(Features(schema).to_json()).schema.canonical
    columns = [{"name": "user", "kind": "category", "encoding": HASH}]
    old = Features.from_json({"schema": {"columns": columns}})
    assert not old.schema.canonical and "canonical" not in old.to_json()["schema"]
    ids = {}
    for name, features in (("old", old), ("new", Features(Schema.from_json({"columns": columns})))):
        for value in ("3.0", "3"):
            (rows,) = features.read(io.BytesIO(f"user,z\n{value},1\n".encode()))
            ids[name, value] = int(rows.ids[0, 0])
    assert ids["old", "3.0"] != ids["old", "3"] == ids["new", "3"] == ids["new", "3.0"]
    assert ids["old", "3.0"] == 1 + int(hash_buckets(pa.array(["3.0"]), HASH["buckets"])[0])


def test_texts_that_tensorflow_hashes_are_read_as_they_stand():
    columns = [{"name": "user", "kind": "category", "encoding": {"type": "hash-bucket", "buckets": 1009}}]
    (rows,) = Features(Schema.from_json({"columns": columns})).read(io.BytesIO(b"user,z\n3.0,1\nTrue,1\n"))
    assert rows.ids[:, 0].tolist() == hash_buckets(pa.array(["3.0", "True"]), 1009).tolist()


@pytest.mark.parametrize("values", [pa.string(), pa.string_view(), pa.binary_view()], ids=str)
def test_dictionaries_of_any_text_are_read(values):
    """Categoricals of polars are dictionaries of views."""
    column = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.uint32()), pa.array(["a", "b"], values))
    assert cell_values.decoded(column).cast(pa.large_binary()).to_pylist() == [b"b", None, b"a"]
    assert cell_values.column_as_text(column, "|").to_pylist() == ["b", None, "a"]
