"""Result rows written as tables."""

import gzip
import io
import json
import sys

import numpy as np
import pyarrow.parquet as parquet
import pytest

from pipelines.core.errors import RequestError
from pipelines.data.tables import writing
from pipelines.kernels import extension

COLUMNS = {"row": np.int64, "probability": np.float32, "click": np.bool_}
CHUNKS = [
    {
        "row": np.arange(3),
        "probability": np.array([0.25, 0.1, 1e-9], np.float32),
        "click": np.array([True, False, False]),
    },
    {"row": np.arange(3, 3), "probability": np.zeros(0, np.float32), "click": np.zeros(0, bool)},
    {
        "row": np.arange(3, 5),
        "probability": np.array([0.5, 1.0, 0.0, 7.0], np.float32)[::3],
        "click": np.array([True, True]),
    },
]
TEXT = "row,probability,click\n0,0.25,true\n1,0.1,false\n2,1e-9,false\n3,0.5,true\n4,7,true\n"


def write(output, chunks=CHUNKS):
    with writing(output, COLUMNS) as rows:
        for chunk in chunks:
            rows(chunk)


def test_csv(tmp_path):
    write(tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == TEXT


def test_csv_gz(tmp_path):
    write(tmp_path / "out.CSV.gz")
    assert gzip.decompress((tmp_path / "out.CSV.gz").read_bytes()).decode() == TEXT


def test_parquet(tmp_path):
    write(tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert [str(dtype) for dtype in table.schema.types] == ["int64", "float", "bool"]
    assert table.column("row").to_pylist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(table.column("probability"), np.array([0.25, 0.1, 1e-9, 0.5, 7], np.float32))


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "out.parquet"])
def test_no_rows_make_a_table_with_columns(tmp_path, name):
    write(tmp_path / name, [])
    if name.endswith("parquet"):
        assert parquet.read_table(tmp_path / name).column_names == list(COLUMNS)
    else:
        body = (tmp_path / name).read_bytes()
        assert (gzip.decompress(body) if name.endswith("gz") else body) == b"row,probability,click\n"


def test_stdout_stays_open(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    write("-")
    print("after")
    sys.stdout.flush()
    assert raw.getvalue().decode() == TEXT + "after\n"


@pytest.mark.parametrize("name", ["out.xlsx", "out", "out.gz", "csv", "out.csv.zip"])
def test_another_format_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(RequestError, match=r"name it \.csv, \.csv\.gz, \.jsonl, \.parquet, or - for CSV on stdout"):
        write(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, name, error):
    with pytest.raises(error), writing(tmp_path / name, COLUMNS) as rows:
        rows(CHUNKS[0])
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
def test_whole_and_real_columns_read_the_same_however_they_are_written(tmp_path, monkeypatch, name):
    """With the native kernels and without, and where a column is of another kind than announced."""
    rng = np.random.default_rng(0)
    chunks = [
        {"probability": rng.random(500, np.float32), "row": np.arange(500)},
        {"row": np.arange(500, 504), "probability": np.array([0, 1, 1e-7, 5, np.nan, 7, 0.1, 8], np.float32)[::2]},
        {"row": np.arange(504, 506, dtype=np.int32), "probability": np.ones(2, np.float32)},
        {"row": np.arange(0), "probability": np.zeros(0, np.float32)},
    ]
    written = []
    for native in (extension.native(), None):
        monkeypatch.setattr(extension, "native", lambda native=native: native)
        with writing(tmp_path / name, {"row": np.int64, "probability": np.float32}) as rows:
            for chunk in chunks:
                rows(chunk)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


MIXED = {"file": str, "index": np.int64, "share": np.float32, "error": str}
ROWS = {
    "file": ['a,"b"\n.jpg', "c é"],
    "index": [7, None],
    "share": np.array([0.1, 1e-9], np.float32),
    "error": [None, "it's broken"],
}


def mixed(output, **options):
    with writing(output, MIXED, **options) as write:
        write(ROWS)
        write({name: column[1:] for name, column in ROWS.items()})


def test_text_and_what_is_missing(tmp_path):
    for name in ("out.csv", "out.csv.gz", "out.jsonl", "out.parquet"):
        mixed(tmp_path / name)
    text = 'file,index,share,error\n"a,""b""\n.jpg",7,0.1,\n' + "c é,,1e-09,it's broken\n" * 2
    assert (
        (tmp_path / "out.csv").read_text() == gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode() == text
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    second = {"file": "c é", "share": 1e-9, "error": "it's broken"}
    assert rows == [{"file": 'a,"b"\n.jpg', "index": 7, "share": 0.1}, second, second]
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table["index"].to_pylist() == [7, None, None]
    assert table["error"].to_pylist() == [None, "it's broken", "it's broken"]


def test_float32_numbers_of_lists_are_the_shortest(tmp_path):
    score = float(np.float32(0.1))
    for name in ("out.csv", "out.jsonl"):
        with writing(tmp_path / name, {"label": str, "score": np.float32, "exact": np.float64}) as write_table:
            write_table({"label": ["a", "b"], "score": [score, None], "exact": [score, score]})
    assert (tmp_path / "out.csv").read_text() == f"label,score,exact\na,0.1,{score}\nb,,{score}\n"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [{"label": "a", "score": 0.1, "exact": score}, {"label": "b", "exact": score}]


def test_numbers_as_json_lines(tmp_path):
    write(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[1] == {"row": 1, "probability": 0.1, "click": False}
    assert len(rows) == 5


def test_a_terminal_shows_the_brief_columns_where_there_are_any(monkeypatch):
    for brief in (("index", "file"), ()):
        raw = io.BytesIO()
        stdout = io.TextIOWrapper(raw, encoding="utf-8")
        monkeypatch.setattr(stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdout", stdout)
        mixed("-", brief=brief)
        stdout.flush()
        first = raw.getvalue().decode().splitlines()[0]
        assert first == ("index  file" if brief else "file,index,share,error")
