"""Arrow and Parquet bodies: their structs are columns, as in files."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import RequestError
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import Log, open_log
from zoo.recommenders.data.schema_inference import infer
from zoo.serving.handlers.base import RUN
from zoo.serving.handlers.row_bodies import PARQUET, row_source
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job

ROWS = [
    {
        "click": index % 2,
        "item": f"i{index % 7}",
        "user": None
        if index % 11 == 3
        else {"id": f"u{index % 9}", "geo": {"city": "AB"[index % 5 > 1]}, "tags": ["a", "b"][: index % 3]},
        "unused": {"text": "x" * 20, "map": [("k", index)]},
    }
    for index in range(200)
]
KIND = pa.schema(
    [
        ("click", pa.int64()),
        ("unused", pa.struct([("text", pa.string()), ("map", pa.map_(pa.string(), pa.int64()))])),
        (
            "user",
            pa.struct(
                [("id", pa.string()), ("geo", pa.struct([("city", pa.string())])), ("tags", pa.list_(pa.string()))]
            ),
        ),
        ("item", pa.string()),
    ]
)


def body(table: pa.Table, kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == PARQUET:
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


def job(table: pa.Table, kind: str) -> Job:
    return Job(1, RUN, kind, "", {}, -1, body(table, kind))


@pytest.mark.parametrize("kind", [responses.ARROW, PARQUET])
def test_structs_of_bodies_are_columns_as_in_files(kind, tmp_path):
    table = pa.Table.from_pylist(ROWS, KIND)
    pq.write_table(table, tmp_path / "log.parquet")
    schema = infer(open_log(tmp_path / "log.parquet"))
    columns = {column.name: column.kind for column in schema.columns if column.kind != "ignored"}
    assert columns.keys() == {"click", "user.id", "user.geo.city", "user.tags", "item"}
    features = Features(schema)

    def choose(names):
        features.require(Log("the rows", "rows", "", tuple(names)))
        return [name for name in names if name in columns]

    source = row_source(job(table, kind), False, choose, {})
    assert source.column_names == ["click", "user.id", "user.geo.city", "user.tags", "item"]
    (batch,), (expected,) = features.read(source), features.read(tmp_path / "log.parquet")
    assert np.array_equal(batch.ids, expected.ids) and np.array_equal(batch.scales, expected.scales)
    with pytest.raises(RequestError, match="user.id"):
        row_source(job(table.drop_columns(["user"]), kind), False, choose, {})


@pytest.mark.parametrize("kind", [responses.ARROW, PARQUET])
def test_names_of_nested_columns_are_bounded(kind):
    inner = pa.struct([(f"{index}", pa.int8()) for index in range(1000)])
    for _ in range(30):
        inner = pa.struct([("x" * 1000, inner)])
    with pytest.raises(RequestError, match="longer names of nested columns"):
        row_source(job(pa.schema([("a", inner)]).empty_table(), kind), False, list, {})


def test_columns_named_like_fields_of_structs_occur_twice():
    table = pa.table({"a.b": [1], "a": [{"b": 2}]})
    with pytest.raises(RequestError, match="'a.b' more than once"):
        row_source(job(table, PARQUET), False, list, {})
