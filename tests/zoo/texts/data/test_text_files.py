"""Which columns of a table are the texts, and what is no row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files

ROWS = [
    {"id": "a1", "question": "who?", "answer": "me", "score": 3.5},
    {"id": "b2", "question": "why?", "answer": "so"},
]


def found(path, *arguments, **options):
    return [row.texts for row in text_files.read_rows(str(path), *arguments, **options) if not row.error]


def table(path, rows):
    """A file of rows in the format of its name."""
    match path.suffix:
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case _:
            mark = "\t" if path.suffix == ".tsv" else ","
            path.write_text(
                "\n".join(mark.join(map(str, cells)) for cells in [rows[0], *(row.values() for row in rows)])
            )
    return path


@pytest.mark.parametrize("suffix", text_files.TABLE_FORMATS)
def test_columns_that_are_not_named_are_those_called_like_it(tmp_path, suffix):
    path = table(tmp_path / f"t{suffix}", ROWS[:1])
    assert found(path, 1) == [("who?",)]
    assert found(path, 2) == [("who?", "me")]
    assert found(path, 2, extra=1) == [("who?", "me", "3.5")]
    assert found(path, 1, ("answer",)) == [("me",)]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_or_the_first_that_hold_text(tmp_path, suffix):
    path = table(tmp_path / f"t{suffix}", [{"id": 7, "words": "the cat", "more": "sat"}])
    assert found(path, 1) == [("the cat",)]
    assert found(path, 2) == [("the cat", "sat")]
    with pytest.raises(RequestError, match="has the columns id; name 1 of them with --column"):
        found(table(tmp_path / f"n{suffix}", [{"id": 7}]), 1)


def test_csv_with_unknown_columns_is_not_guessed(tmp_path):
    path = table(tmp_path / "t.csv", [{"id": 7, "words": "the cat", "n": 2}])
    with pytest.raises(RequestError, match="has 3 columns, none of them named text, .*--column 2"):
        found(path, 1)
    assert found(path, 1, ("words",)) == [("the cat",)]
    assert found(path, 1, ("2",)) == [("words",), ("the cat",)]
    for wrong in (("4",), ("0",), ("1", "2")):
        with pytest.raises(RequestError, match="has 3 columns; name 1 of them"):
            found(path, 1, wrong)
    assert found(table(tmp_path / "two.csv", [{"x": "a", "y": "b"}]), 2) == [("x", "y"), ("a", "b")]


def test_a_quote_that_nothing_closes_costs_its_row_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('text,n\n"one\nline",1\n"two,2\nthree,3\n"four",4\n"five""",5\n')
    items = list(text_files.read_rows(str(path), 1))
    assert [(row.location.rpartition(" ")[2], row.texts[0]) for row in items if not row.error] == [
        ("3", "one\nline"),
        ("5", "three"),
        ("6", "four"),
        ("7", 'five"'),
    ]
    (fault,) = [row for row in items if row.error]
    assert fault.location.endswith("line 4") and fault.error.startswith("is no row of CSV")


def test_many_quotes_that_nothing_closes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("text\n" + 'a\n"b\n' * 50 + '"')
    items = list(text_files.read_rows(str(path), 1))
    outcomes = [row.error[:12] or row.texts[0] for row in items]
    assert outcomes == [*["a", "is no row of"] * 49, "a", "b\n"]  # the last but one is closed by the last


@pytest.mark.parametrize("name", ["t.txt", "t.csv", "t.jsonl"])
def test_utf_16_is_told(tmp_path, name):
    (tmp_path / name).write_text("text\nthe cat\n", encoding="utf-16")
    with pytest.raises(RequestError, match="is UTF-16; expected UTF-8: iconv"):
        found(tmp_path / name, 1)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    path.write_text("the cat\n") if suffix == ".txt" else table(path, [{"text": "the cat"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert found(path, 1) == [("the cat",)]


def test_a_damaged_gz_is_refused(tmp_path):
    whole = gzip.compress("".join(f"text {i * i % 9973}\n" for i in range(9000)).encode())
    for start in range(100, len(whole) - 400, 1500):
        (tmp_path / "t.txt.gz").write_bytes(whole[:start] + b"\xff" * 400 + whole[start + 400 :])
        with pytest.raises(RequestError, match="cannot read .*t.txt.gz"):
            found(tmp_path / "t.txt.gz", 1)
