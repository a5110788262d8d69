"""Text cut into pieces of whole rows."""

import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from pipelines.data import text
from pipelines.data.text import Piece, TextForm, pieces

CSV = TextForm(header=True, delimiter=",", blank=False)
VALUES = st.sampled_from(["a", "bb", "", "x y", '"q"', '"a,b"', '"l\nm"', '"l\r\nm"', '"""z"""', '""', "é"])


def read(data: bytes) -> pa.Table:
    return csv.read_csv(
        io.BytesIO(data),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types={"h": pa.string(), "k": pa.string()}),
    )


@given(
    st.lists(st.tuples(VALUES, VALUES) | st.none(), min_size=1, max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from([1, 5, 30, 10**6]),
    st.sampled_from([1, 3, 7, 20, 1000]),
)
def test_pieces_hold_the_rows_that_pyarrow_finds_in_the_whole(rows, feed, last, size, block):
    lines = ["h,k", *("" if row is None else ",".join(row) for row in rows)]
    data = (feed.join(lines) + feed * last).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK", block)
        spans = pieces(io.BytesIO(data), CSV, size)
    assert spans is not None
    head = data[: data.index(b"\n") + 1]
    parts = [read(head + data[span.begin : span.end]) for span in spans]
    assert [len(part) for part in parts] == [span.rows for span in spans]
    whole = read(data)
    assert pa.concat_tables(parts).equals(whole) if parts else not len(whole)


@pytest.mark.parametrize("rows", ['1,5"\n', 'a"b,2\n', '"open,2\n', '"a"b,1\n', "1,2\r3,4\r"])
def test_text_that_quotes_and_feeds_alone_do_not_cut_is_left_whole(rows):
    assert pieces(io.BytesIO(b"h,k\n" + rows.encode()), CSV, 1) is None


def test_lines_are_rows_where_nothing_else_is_said():
    assert pieces(io.BytesIO(b'a"\n\nb'), TextForm(), 3) == [Piece(0, 3, 1), Piece(3, 5, 2)]
    assert pieces(io.BytesIO(b""), TextForm(), 3) == []
