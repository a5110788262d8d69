"""Reading raw rows: every source, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.criteo_logs import EMPTY, SHARED, buckets, line, read, read_rows, same, synthetic_lines
from helpers.tiers import one_in
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from zoo.recommenders import criteo
from zoo.recommenders.data import sources
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.row_errors import ErrorLog


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 700)


def test_one_row():
    rows = read(
        [
            line(
                b"1",
                [
                    b"5",
                    b"-3",
                    b"",
                    b"1.5",
                    b"1382",
                    b"00012",
                    b"99999999",
                    b"123456789",
                    b"+7",
                    b".5",
                    b"2.",
                    b"1e3",
                    b"0",
                ],
            )
        ]
    )
    assert rows.labels.tolist() == [1]
    assert np.isnan(rows.numbers[0, 2])
    assert np.delete(rows.numbers[0], 2).tolist() == [
        5,
        -3,
        1.5,
        1382,
        12,
        1e8,
        np.float32(123456789),
        7,
        0.5,
        2,
        1000,
        0,
    ]
    assert rows.ids[0].tolist() == buckets(*[b"%08x" % i for i in range(26)])
    assert (rows.numbers.dtype, rows.ids.dtype, rows.labels.dtype, rows.index.dtype) == (
        np.float32,
        np.int32,
        np.float32,
        np.int64,
    )
    assert rows.numbers.flags.c_contiguous


@given(st.lists(st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e9, 1e9), st.none()), min_size=13, max_size=13))
def test_numbers_are_those_of_python(values):
    numbers = [b"" if value is None else repr(value).encode() for value in values]
    expected = np.array([np.nan if value is None else value for value in values], np.float32)
    assert np.array_equal(read([line(b"0", numbers)]).numbers[0], expected, equal_nan=True)


@given(st.lists(st.binary(max_size=40).filter(lambda value: not set(b"\t\n") & set(value)), min_size=26, max_size=26))
def test_categories_are_bytes(values):
    values[-1] = values[-1].rstrip(b"\r")  # which would be the line's end
    assert read([line(b"0", None, values)]).ids[0].tolist() == buckets(*values)


def test_reads_what_was_written(synthetic):
    rows = read(synthetic)
    expected = [row.split(b"\t") for row in synthetic.read_bytes().splitlines()]
    assert len(rows) == len(expected) == 40_000
    assert rows.labels.tolist() == [float(row[0]) for row in expected]
    assert np.array_equal(
        rows.numbers, np.array([[float(x or "nan") for x in row[1:14]] for row in expected], np.float32), equal_nan=True
    )
    assert rows.ids.ravel().tolist() == buckets(*itertools.chain.from_iterable(row[14:] for row in expected))
    assert np.array_equal(rows.index, np.arange(40_000))


def test_batches_are_whole(synthetic):
    batches = list(read_rows(synthetic, batch_rows=15_000))
    assert [len(batch) for batch in batches] == [15_000, 15_000, 10_000]
    same(Rows.concatenate(batches), read(synthetic))
    assert [len(batch) for batch in read_rows([line()] * 7, batch_rows=2)] == [2, 2, 2, 1]


def test_every_source_gives_the_same(tmp_path, small_blocks, monkeypatch):
    lines = synthetic_lines(50)
    text = b"".join(row + b"\n" for row in lines)
    expected = read(lines)
    plain, packed, crlf, cut = (tmp_path / name for name in ("rows.tsv", "packed", "crlf.txt", "cut.tsv"))
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))  # told by content, also of two members
    crlf.write_bytes(text.replace(b"\n", b"\r\n"))
    cut.write_bytes(text[:-1])  # no line end at the end of the file
    for source in (plain, packed, crlf, cut, str(plain), [plain], tuple(lines), [row.decode() + "\n" for row in lines]):
        same(read(source), expected)
    for content in (text, gzip.compress(text)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        same(read("-"), expected)
    values = [[None if value == b"" else value.decode() for value in row.split(b"\t")] for row in lines]
    same(read(values), expected)
    same(read(np.array(values, object)), expected)
    typed = [[None if x is None else int(x) if i < 14 else x for i, x in enumerate(row)] for row in values]
    same(read([*typed[:25], *lines[25:]]), expected)  # lists and lines in turn
    same(read([[math.nan if x is None and i < 14 else x for i, x in enumerate(row)] for row in typed]), expected)


def test_a_pipe_can_be_read(tmp_path):
    text = b"\n".join(synthetic_lines(20)) + b"\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())", pipe], stdin=-1
    ) as writer:
        writer.stdin.write(text)
        writer.stdin.close()
        same(read(pipe), read(text.splitlines()))


def test_empty_stdin_is_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(RequestError, match="found nothing on stdin; expected rows, or name a file"):
        sources.spool()


def test_several_files_are_one_input(tmp_path):
    lines = synthetic_lines(30)
    paths = []
    for i in range(3):
        paths.append(tmp_path / f"part{i}.tsv")
        paths[-1].write_bytes(b"\n".join(lines[10 * i : 10 * i + 10]))
    same(read(paths), read(lines))
    assert read(paths).index.tolist() == list(range(30))


def test_without_label(tmp_path):
    rows = read([line(None), line(None)])
    assert rows.labels is None
    assert rows.numbers[0].tolist() == list(range(13))
    assert rows[1:].labels is None
    file = tmp_path / "rows.tsv"
    file.write_bytes(b"\t" * 38 + b"\n")
    rows = read(file)
    assert np.isnan(rows.numbers).all()
    assert (rows.ids == EMPTY).all()


def test_other_sizes():
    rows = read([b"1\t2\t3\ta"], numeric=2, categorical=1, buckets=7)
    assert (rows.labels.tolist(), rows.numbers.tolist(), rows.ids.tolist()) == ([1], [[2, 3]], [buckets(b"a", count=7)])


@pytest.mark.parametrize("byte", [b"\x00", b"\x0b", b"\r", b'"', b"\xff", b" ", b","])
def test_only_tab_and_line_feed_are_special(tmp_path, byte):
    strange = [b"a" + byte + b"b"] * 25 + [b"z"]
    file = tmp_path / "rows.tsv"
    file.write_bytes(line(b"1", None, strange) + b"\n" + line(b"0"))
    rows = read(file)
    assert rows.labels.tolist() == [1, 0]
    assert rows.ids[0].tolist() == buckets(*strange)


# Every broken row, the kind it is counted as, and what the message says.
BROKEN = [
    (b"", "columns", "found 1 column, expected 40, with a label like the rows before"),
    (b"\r", "columns", "found 1 column, expected 40"),
    (line(None), "columns", "found 39 columns, expected 40"),
    (line() + b"\t", "columns", "found 41 columns, expected 40"),
    (line(b"2"), "label", "found label '2', expected 0 or 1"),
    (line(b""), "label", "found label '', expected 0 or 1"),
    (line(b"-1"), "label", "found label '-1', expected 0 or 1"),
    (line(b"yes"), "label", "found label 'yes', expected 0 or 1"),
    *(
        (
            line(b"0", [b"1"] * 12 + [text]),
            "number",
            f"found {text.decode()!r} in column 14, expected a number or nothing",
        )
        for text in b"abc,nan,inf,-inf,1e99,1 , 1,-,.,1_0,0x10,--1,1.2.3,1;5".split(b",")
    ),
    (line(b"0", [b"1", "١".encode(), *[b"1"] * 11]), "number", "found '١' in column 3"),
    (line(b"0", [b"9" * 400] * 13), "number", "found '999999999999...9999999999999' in column 2"),
]


@pytest.mark.parametrize(("row", "kind", "message"), one_in(2, BROKEN))
def test_a_broken_row_is_named(tmp_path, small_blocks, row, kind, message):
    file = tmp_path / "rows.tsv"
    good = synthetic_lines(20)
    file.write_bytes(b"\n".join([*good[:9], row, *good[9:]]) + b"\n")
    with pytest.raises(RequestError) as error:
        read(file)
    assert f"{file}:10: {message}" in str(error.value)
    assert "\n" not in str(error.value)
    log = ErrorLog()
    rows = read(file, on_error="skip", errors=log)
    assert (log.counts, log.total) == ({kind: 1}, 1)
    assert rows.index.tolist() == [*range(9), *range(10, 21)]
    same(replace(rows, index=np.arange(20)), read(good))


def test_line_numbers_hold_in_every_block(tmp_path, small_blocks):
    good = synthetic_lines(40)
    broken = {3: b"x", 4: line(b"7"), 17: line() + b"\tx", 30: line(b"1", [b"?"] * 13), 40: b"\t"}
    lines = [broken.get(number, good[number - 1]) for number in range(1, 41)]
    for file, text in (
        (tmp_path / "a.tsv", b"\n".join(lines)),
        (tmp_path / "b.gz", gzip.compress(b"\r\n".join(lines) + b"\r\n")),
    ):
        file.write_bytes(text)
        log = ErrorLog(limit=10)
        rows = read([file, file], on_error="skip", errors=log)
        assert [int(message.split(":")[1]) for message in log.messages] == [*broken] * 2
        assert log.counts == {"columns": 6, "label": 2, "number": 2}
        assert rows.index.tolist() == [i + 40 * part for part in (0, 1) for i in range(40) if i + 1 not in broken]
        assert "10 rows left out (columns 6, label 2, number 2); first: " in str(log)


def test_the_log_keeps_only_the_first_messages():
    log = ErrorLog()
    assert len(read([line(), *[b"x"] * 100], on_error="skip", errors=log)) == 1
    assert (log.total, len(log.messages), log.messages[0].startswith("rows:2: ")) == (100, 5, True)


def test_the_first_fault_of_a_file_is_raised(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_bytes(b"\n".join([line(), line(b"5"), b"short", line(b"0", [b"?"] * 13)]))
    with pytest.raises(RequestError, match=r"rows.tsv:2: found label '5'"):
        read(file)


def test_a_wrong_first_row_does_not_decide_about_labels():
    log = ErrorLog()
    rows = read([b"x", line(None), line()], on_error="skip", errors=log)
    assert (rows.labels, rows.index.tolist(), log.total) == (None, [1], 2)
    with pytest.raises(
        RequestError, match=r"rows:1: found 1 column, expected 40 \(with label\) or 39 \(without\), and no header line"
    ):
        read([b"x", line(None)])


def test_labels_are_in_all_rows_or_in_none():
    with pytest.raises(RequestError, match="rows:2: found 39 columns, expected 40, with a label like the rows before"):
        read([line(), line(None)])


def test_labels_are_in_all_files_or_in_none(tmp_path):
    one, other = tmp_path / "a.tsv", tmp_path / "b.tsv"
    one.write_bytes(line() + b"\n")
    other.write_bytes(line(None) + b"\n")
    with pytest.raises(RequestError, match=r"b.tsv:1: found 39 columns, expected 40, with a label"):
        read([one, other])
    with pytest.raises(RequestError, match=r"a.tsv:1: found 40 columns, expected 39, without a label"):
        read([other, one])


def test_a_header_is_refused(tmp_path):
    file = tmp_path / "rows.tsv"
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    file.write_bytes("\t".join(names).encode() + b"\n" + line())
    with pytest.raises(RequestError, match=r":1: found label 'label', expected 0 or 1, and no header line"):
        read(file)
    assert len(read(file, on_error="skip")) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.tsv", b"", "found .*empty.tsv empty"),
        ("empty.gz", gzip.compress(b"", mtime=0), "found .*empty.gz empty"),
        ("cut.tsv.gz", gzip.compress(os.urandom(9000))[:6000], "cannot read .*cut.tsv.gz: it is cut short"),
        ("head.gz", b"\x1f\x8b\x08", "cannot read .*head.gz: it is cut short"),
        ("bad.gz", b"\x1f\x8bnonsense and more of it", "cannot read .*bad.gz"),
        ("flip.gz", gzip.compress(b"x" * 99, mtime=0)[:-8] + b"12345678", "cannot read .*flip.gz"),
        ("bad.parquet", b"PAR1 and then nothing", "cannot read .*bad.parquet"),
        ("commas.csv", b"1,2,3\n4,5,6\n", "found 1 column, expected 40"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(RequestError, match=message) as error:
        read(file)
    assert "\n" not in str(error.value)
    with pytest.raises(RequestError):  # which no skipping helps
        read(file, on_error="skip")


def test_a_truncated_gzip_fails_after_its_last_whole_block(tmp_path, small_blocks):
    packed = gzip.compress(b"".join(row + b"\n" for row in synthetic_lines(100)))
    file = tmp_path / "rows.tsv.gz"
    file.write_bytes(packed[: len(packed) // 2])
    batches = read_rows(file, batch_rows=10)
    assert len(next(batches)) == 10
    with pytest.raises(RequestError, match=r"rows.tsv.gz: it is cut short"):
        list(batches)


def test_gzip_members_are_one_stream(tmp_path, small_blocks):
    """As GzipFile reads them: several in a row, empty ones, and zeros behind them, but nothing else."""
    lines = [row + b"\n" for row in synthetic_lines(30)]
    members = [
        gzip.compress(b"".join(lines[:7])),
        gzip.compress(b""),
        gzip.compress(b"".join(lines[7:])),
        bytes(100_000),
    ]
    file = tmp_path / "rows.gz"
    file.write_bytes(b"".join(members))
    assert b"".join(sources.blocks("rows", file)) == b"".join(lines)
    file.write_bytes(b"".join(members) + gzip.compress(b"".join(lines)))
    assert b"".join(sources.blocks("rows", file)) == b"".join(lines) * 2
    file.write_bytes(b"".join(members) + b"more")
    with pytest.raises(RequestError, match=r"cannot read .*rows.gz"):
        read(file)


def test_a_signal_between_two_reads_of_a_pipe_is_seen(tmp_path):
    """Python code runs between the system calls that fill a block: a single `read` would not look at a signal before
    the block is full.
    """
    calls = []

    class Pipe(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:3] = b"abc"
            return 3

    class Watched(io.BufferedReader):
        def read1(self, size=-1):
            calls.append(size)
            return super().read1(size)

    assert sources._read(Watched(Pipe()), 9) == b"abcabcabc"
    assert calls == [9, 6, 3]


def test_endless_lines_do_not_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 21)
    file = tmp_path / "zeros"
    file.write_bytes(bytes(5 << 20))
    with pytest.raises(RequestError, match="found a line of over 2 MB"):
        read(file)


def test_wrong_requests(tmp_path):
    (tmp_path / "folder").mkdir()
    for source, message in (
        (tmp_path / "none.tsv", "found no file .*none.tsv"),
        ("none", "found no file none"),
        ("data/none.tsv.gz", "found no file"),  # no hub id
        ("./none/here", "found no file"),
        (tmp_path / "folder", "found the folder .*save_to_disk"),
        ([], "found no input"),
        ({}, "found dict as input"),
        ([line(), 5], "rows:2: found int"),
        ([tmp_path, 5], "found int among the sources|found the folder"),
    ):
        with pytest.raises(RequestError, match=message):
            read_rows(source) and read(source)
    with pytest.raises(RequestError, match="on_error 'maybe'"):
        read_rows([line()], on_error="maybe")
    with pytest.raises(RequestError, match="0 rows a batch"):
        read_rows([line()], batch_rows=0)


def test_a_missing_file_shows_before_anything_is_read(tmp_path):
    (tmp_path / "a.tsv").write_bytes(line())
    with pytest.raises(RequestError, match="found no file"):
        read_rows([tmp_path / "a.tsv", tmp_path / "b.tsv"])  # not even iterated


def test_reading_twice_gives_the_same(synthetic):
    same(read(synthetic), read(synthetic))


@pytest.mark.data
def test_real_rows():
    file = SHARED / "data" / "criteo" / "criteo_10390.tsv"
    if not file.exists():
        pytest.skip(f"no {file}")
    rows = read(file)
    expected = [row.split(b"\t") for row in file.read_bytes().splitlines()]
    assert len(rows) == len(expected) == 10_390
    assert rows.labels.sum() == sum(row[0] == b"1" for row in expected) == 2281
    assert np.array_equal(
        rows.numbers, np.array([[float(x or "nan") for x in row[1:14]] for row in expected], np.float32), equal_nan=True
    )
    assert rows.ids.ravel().tolist() == buckets(*itertools.chain.from_iterable(row[14:] for row in expected))
    assert rows.numbers[:, 1].min() == -2
    (encoded,) = Features(criteo.schema(file)).read(file)
    assert 0 < encoded.numbers.mean() < 0.5
