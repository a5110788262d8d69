"""Logs without a header, read by a schema: natively and in numpy the same bits, positions and faults."""

import io

import numpy as np
import pyarrow as pa
import pytest
from helpers.readings import ARRAYS, outcome, same_without_kernels
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data import line_reader
from zoo.recommenders.data.encoding import Encoding
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import hash_buckets
from zoo.recommenders.data.schema import Schema

NUMBERS = {
    "value": {"type": "value"},
    "filled": {"type": "value", "fill": -2.5},
    "scaled": {"type": "log1p-min-max", "low": 0.5, "high": 9.25, "fill": 0.25},
    "constant": {"type": "log1p-min-max", "low": 1.5, "high": 1.5, "fill": 0.0},
    "log1p": {"type": "log1p", "minimum": -1.0, "maximum": 99.0},
    "standard": {"type": "standard", "mean": 2.0, "deviation": 0.5},
    "min-max": {"type": "min-max", "minimum": 0, "maximum": 3.0},
    "quantile": {"type": "quantile", "quantiles": [0, 1, 1, 4]},
}
CATEGORIES = {
    "bucket": {"type": "hash-bucket", "buckets": 1000},
    "own": {"type": "hash-bucket", "buckets": 7, "missing_row": True},
    "hash": {"type": "hash", "buckets": 7},
    "words": {"type": "vocabulary", "values": ["Köln", "12345678", "x", "a longer one", "NA"]},
}
COLUMNS = [
    {"name": "click", "kind": "label"},
    *({"name": name, "kind": "number", "missing": 3, "encoding": encoding} for name, encoding in NUMBERS.items()),
    {"name": "other", "kind": "ignored"},
    *({"name": name, "kind": "category", "encoding": encoding} for name, encoding in CATEGORIES.items()),
]


def features(*names):
    columns = [column for column in COLUMNS if not names or column["name"] in names]
    return Features(Schema.from_json({"header": False, "columns": columns}))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Asserts that bytes read the same natively and without."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"

    def compare(content, reader, block=1 << 20):
        path.write_bytes(content)
        return same_without_kernels(reader.read, path, block)

    return compare


number = st.one_of(
    st.integers(-(10**9), 10**9).map(lambda x: b"%d" % x),
    st.integers(-20, 17_000).map(lambda x: b"%d" % x),
    st.floats(width=32).map(lambda x: repr(x).encode()),
    st.sampled_from([b"", b"-0", b"+3", b".5", b"5.", b"1e3", b"007", b"16383", b"16384", b"99999999", b"123456789"]),
)
odd = st.sampled_from(
    [b"-", b"+-3", b"1e", b"1e400", b"1e-400", b"3.4028236e38", b"nan", b"0x1", b" 1", b"NA", b"\xff"]
)
category = st.sampled_from([b"", b"12345678", b"x", b"NA", b"a\rb", b"a longer one", "Köln".encode()]) | st.binary(
    max_size=80
).map(lambda x: x.translate(None, b"\t\n"))


@st.composite
def contents(draw):
    """Rows of all columns, with faults where asked for."""
    faulty = draw(st.booleans())
    label = st.sampled_from([b"0", b"1", b"1", *([b"", b"2", b"yes"] if faulty else [b"1.0", b"+1"])])
    lines = []
    for _ in range(draw(st.integers(1, 8))):
        numbers = [draw(number | odd if faulty else number) for _ in NUMBERS]
        cells = [draw(label), *numbers, draw(category), *(draw(category) for _ in CATEGORIES)]
        lines.append(b"\t".join(cells) + draw(st.sampled_from([b"\n", b"\n", b"\r\n", *[b"\t\n", b"\n\n"] * faulty])))
    return b"".join(lines)


@given(content=contents(), labelled=st.booleans(), block=st.sampled_from([40, 300, 1 << 20]))
@example(content=b"\n", labelled=True, block=40)
def test_any_rows_read_the_same(both, content, labelled, block):
    lines = content.split(b"\n")
    if not labelled:
        lines = [line.partition(b"\t")[2] for line in lines]
    both(b"\n".join(lines), features(), block)


@given(st.lists(st.sampled_from([*b"\t\t\t\n\n01279-+.eE\r \0\xffab"]), max_size=300).map(bytes))
def test_any_bytes(both, content):
    both(content, features("value", "own"))
    both(content, features("own"))


def test_columns_are_what_the_schema_says():
    (rows,) = features().read([b"1\t5\t\t3\t\t0\t2.5\t1.5\t1\tany\tab\t\tab\tK\xc3\xb6ln", b"0" + b"\t" * 13])
    assert rows.labels.tolist() == [1, 0]
    hashed = int(hash_buckets(pa.array(["ab"]), 1000)[0])
    empty = int(hash_buckets(pa.array([""]), 1000)[0])
    seven = int(hash_buckets(pa.array(["ab"]), 7)[0])
    assert rows.ids.tolist() == [[hashed, 7, 1 + seven, 1], [empty, 7, 8, 6]]
    low, high = np.float32(0.5), np.float32(9.25)
    scaled = (np.log1p(np.float32(3)) - low) / (high - low)
    half = np.float32(np.log1p(1.0) / np.log1p(100.0))
    gaps = (1, 5, 6, 7, 8)  # log1p, standard, min-max and quantile; values of "value" without a fill, too
    assert rows.numbers.shape == (2, len(NUMBERS) + len(gaps))
    wanted = np.float32([5, -2.5, scaled, 0, half, 1, 0.5, 1 - 1 / 3])
    np.testing.assert_array_equal(rows.numbers[0, :8], wanted)
    np.testing.assert_array_equal(rows.numbers[1, :8], np.float32([0, -2.5, 0.25, 0, 0, 0, 0, 0]))
    np.testing.assert_array_equal(rows.numbers[:, 8:], [[0] * 5, [1] * 5])


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_right_rows_never_leave_the_native_parser(both, monkeypatch, labelled, end):
    rng = np.random.default_rng(3)
    lines = []
    for row in range(2000):
        numbers = [b"" if value % 5 == 0 else b"%d" % value for value in rng.integers(-30, 70_000, len(NUMBERS))]
        words = [rng.choice([b"", b"x", b"12345678", b"\xff\r", b"0123456789" * 9]) for _ in range(5)]
        lines.append(b"\t".join([*[b"%d" % (row % 2)] * labelled, *numbers, *words]) + end)
    both(b"".join(lines), features(), 5000)
    monkeypatch.setattr(line_reader._Reader, "_split", None)
    both_ways = outcome(features().read, [line[: -len(end)] for line in lines])
    assert both_ways[0][0][1] == (2000, 4)


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("isa", extension.isas())
def test_all_versions_give_the_same_bits(both, monkeypatch, isa):
    rng = np.random.default_rng(4)
    values = [
        [b"%d" % x for x in rng.integers(-30, 70_000, 8)] + [b"%08x" % x for x in rng.integers(0, 99, 5)]
        for _ in range(999)
    ]
    block = b"".join(b"1\t" + b"\t".join(row) + b"\n" for row in values)
    made = extension.native().LogParser
    (wanted,) = features().read(io.BytesIO(block))
    monkeypatch.setattr(extension.native(), "LogParser", lambda *arguments: made(*arguments, isa))
    (batch,) = features().read(io.BytesIO(block))
    for name in ("ids", "numbers", "labels"):
        assert getattr(batch, name).tobytes() == getattr(wanted, name).tobytes()


def test_tables_are_read_by_names_or_by_order(tmp_path):
    reader = features("click", "value", "other", "bucket", "own")
    (wanted,) = reader.read([b"1\t5\tz\tab\tx", b"0\t\tz\t\t"])
    columns = {"own": ["x", None], "CLICK": [1, 0], "value": [5, None], "bucket": pa.array([b"ab", b""])}
    for table in (
        pa.table(columns),
        pa.table({"a": [1, 0], "b": [5.0, None], "c": [7, 7], "d": ["ab", ""], "e": ["x", None]}),
        pa.table({"label": [1, 0], "I1": [5, None], "C2": ["x", None], "C1": ["ab", ""]}),
    ):
        (batch,) = reader.read(table)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name))
    with pytest.raises(RequestError, match="found no column own"):
        reader.read(pa.table({"value": [1], "bucket": ["x"]})).__next__()


def test_a_schema_without_a_header_says_what_it_cannot_have():
    columns = [
        {"name": "t", "kind": "timestamp", "unit": "s"},
        {"name": "a", "kind": "category", "encoding": {"type": "id", "rows": 4}},
        {"name": "b", "kind": "number", "encoding": {"type": "log1p-min-max", "low": 2, "high": 1, "fill": 0}},
        {"name": "y", "kind": "label"},
    ]
    with pytest.raises(RequestError) as error:
        Schema.from_json({"header": False, "columns": columns})
    for message in (
        "column t: found the kind timestamp, expected label, number, category, ignored without a header",
        "column y: found a label behind other columns, expected it first without a header",
        "column a: found the encoding id, expected another one without a header",
        "column b: found low 2 and high 1, expected 0 <= low <= high",
    ):
        assert message in str(error.value)


def test_a_schema_without_a_header_is_kept(tmp_path):
    schema = features().schema
    assert not schema.header
    assert Schema.load(schema.save(tmp_path / "schema.json")) == schema
    named = Schema.from_json({"columns": COLUMNS})
    assert named.header and "header" not in named.to_json()
    assert Encoding(named).shape == Encoding(schema).shape
