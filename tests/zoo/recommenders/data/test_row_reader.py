"""Rows of Python are read natively with the results of text columns."""

import datetime
import io
import math
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data import features as features_module
from zoo.recommenders.data.cell_values import MISSING
from zoo.recommenders.data.csv_reader import RowReader
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Column, Schema
from zoo.serving.handlers.base import RUN
from zoo.serving.handlers.row_bodies import row_source
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job

WORDS = ["a", "b", "1", "51", "-7", "x y", "ü", "0.5", "1e-05", "1e+20"]
SCHEMA = Schema(
    (
        Column("click", "label", 2, 0),
        Column("user", "category", 9, 0, {"type": "hash", "buckets": 1000}),
        Column("item", "category", 9, 0, {"type": "vocabulary", "values": WORDS}, tower="item"),
        Column("price", "number", 9, 0, {"type": "standard", "mean": 2.0, "deviation": 3.0}),
        Column("age", "number", 9, 1, {"type": "log1p", "minimum": 0.0, "maximum": 90.0}),
        Column(
            "tags", "categories", 9, 0, {"type": "vocabulary", "values": WORDS}, separator=";", pooling="mean", length=3
        ),
        Column("seen", "categories", 9, 0, {"type": "hash", "buckets": 50}, separator="|", pooling="max", length=2),
    ),
    10,
)
numbers = (
    st.integers(-(2**70), 2**70)
    | st.integers(-20, 99)
    | st.floats()
    | st.sampled_from([-0.0, 51.0, 2.0**63, 1e-5, 0.1])
)
texts = st.text(max_size=9).filter(lambda text: text.isprintable()) | st.sampled_from(
    [*WORDS, "", "NaN", "NaT", "<NA>", "None", "True", "51.0", "['a', 'b']"]
)
plain = numbers | texts | st.booleans() | st.none()
values = plain | st.lists(plain, max_size=5) | st.tuples(plain, plain) | st.just(datetime.date(2026, 1, 2))
pytestmark = pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")


def columns_of(features, rows):
    """The rows by way of text columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features_module, "RowReader", type("Reader", (), {"of": staticmethod(lambda *_: None)}))
        return features_module.Rows.concatenate(list(features.read(rows)))


def assert_same(read, expected):
    for name in ("ids", "numbers", "scales", "index"):
        np.testing.assert_array_equal(getattr(read, name), getattr(expected, name), strict=True)


@given(
    st.lists(st.fixed_dictionaries({name: values for name in SCHEMA.feature_names}), min_size=1, max_size=6), st.data()
)
def test_rows_are_encoded_as_their_texts(rows, data):
    features = Features(replace(SCHEMA, canonical=data.draw(st.booleans())))
    isa = data.draw(st.sampled_from(extension.isas()))
    try:
        expected = columns_of(features, rows)
    except RequestError:
        with pytest.raises(RequestError):
            list(features.read(rows))
        return
    assert_same(features_module.Rows.concatenate(list(features.read(rows, batch_rows=2))), expected)
    assert_same(features_module.Rows.concatenate(list(features.of_rows(RowReader.of(features, rows, isa)))), expected)


json_plain = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts | st.booleans()
json_values = json_plain | st.none() | st.lists(json_plain | st.none(), max_size=4)


@given(st.lists(st.dictionaries(st.sampled_from(SCHEMA.feature_names), json_values), min_size=1, max_size=6))
def test_json_rows_of_a_server_have_the_ids_of_their_csv(rows):
    """Rows that the native parser takes are not written as CSV."""
    features = Features(SCHEMA)
    rows = [dict.fromkeys(SCHEMA.feature_names), *rows]
    try:
        job = Job(1, RUN, responses.JSON, "", {}, -1, orjson.dumps(rows))
    except orjson.JSONEncodeError:
        return
    separators = {name: form.separator for name, form in SCHEMA.forms.items()}
    text, parsed = (row_source(job, False, list, separators, names) for names in ((), SCHEMA.feature_names))
    assert isinstance(text, io.BytesIO)
    assert isinstance(parsed, list) or any(
        isinstance(value, list) and not set(MISSING).isdisjoint(value) for row in rows for value in row.values()
    )
    actual, expected = (features_module.Rows.concatenate(list(features.read(source))) for source in (parsed, text))
    assert_same(actual, expected)


@given(st.data())
def test_rows_with_keys_in_any_order(data):
    features, rows = Features(SCHEMA), []
    for i in range(data.draw(st.integers(1, 40))):
        names = [*data.draw(st.permutations(SCHEMA.feature_names)), *["other", "more"][: data.draw(st.integers(0, 2))]]
        rows.append({name if i % 2 else "".join(name): f"{i % 3}.5" if name == "price" else i % 9 for name in names})
    assert_same(features_module.Rows.concatenate(list(features.read(rows))), columns_of(features, rows))


def test_plain_rows_take_the_native_reader():
    row = {
        "user": 5,
        "item": "a",
        "price": 1.5,
        "age": None,
        "tags": ["a", None, 51.0],
        "seen": "x|y",
        "more": object(),
    }
    (parsed,) = RowReader.of(Features(SCHEMA), [row] * 3).batches(10)
    assert parsed.ids.shape == (3, 7)
    row["price"] = math.nan
    assert not isinstance(next(RowReader.of(Features(SCHEMA), [row]).batches(10)), list)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"price": np.float32(2)}, id="a number of numpy"),
        pytest.param({"price": None, "user": {"id": 5}}, id="an object"),
        pytest.param({"item": ["a"]}, id="a list where one value belongs"),
        pytest.param({"user": "\ud800"}, id="half of a surrogate pair"),
        pytest.param({"price": 2**64}, id="a number beyond 64 bits"),
    ],
)
def test_other_values_are_left_to_text_columns(other):
    row = dict.fromkeys(SCHEMA.feature_names, 1)
    assert next(RowReader.of(Features(SCHEMA), [row, row | other]).batches(10)) == [row, row | other]


def test_a_row_that_lacks_a_column_has_none_there():
    features = Features(SCHEMA)
    full = dict.fromkeys(SCHEMA.feature_names, 1)
    rows = [full, {"user": 1}, full | {"price": 3}]
    assert_same(features_module.Rows.concatenate(list(features.read(rows, batch_rows=1))), columns_of(features, rows))
    with pytest.raises(RequestError, match="lacks the column"):
        list(features.read([{"user": 1}, {"user": 2}]))
