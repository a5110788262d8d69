"""Wide & Deep: hashing, reading raw rows, features, and the generator of synthetic rows."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError, ZooError
from zoo.clicks import sources
from zoo.clicks.hashing import buckets_of, fingerprint64, hash_buckets
from zoo.clicks.reading import ErrorLog
from zoo.wide_deep.data import Rows, read_rows
from zoo.wide_deep.features import Features
from zoo.wide_deep.fitting import fit

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "synthesize_criteo.py"
SHARED = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
EMPTY = 263  # bucket of the empty string in 1000


def synthesize():
    spec = importlib.util.spec_from_file_location("synthesize_criteo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def buckets(*strings, count=1000):
    return hash_buckets(pa.array(strings, pa.binary()), count).tolist()


def line(label=b"1", numbers=None, categories=None):
    numbers = [b"%d" % i for i in range(13)] if numbers is None else numbers
    categories = [b"%08x" % i for i in range(26)] if categories is None else categories
    return b"\t".join([*([] if label is None else [label]), *numbers, *categories])


def read(sources, **options):
    return Rows.concatenate(list(read_rows(sources, **options)))


def same(a, b):
    assert (a.labels is None) == (b.labels is None)
    assert a.labels is None or np.array_equal(a.labels, b.labels)
    assert np.array_equal(a.numbers, b.numbers, equal_nan=True)
    assert np.array_equal(a.ids, b.ids)
    assert np.array_equal(a.index, b.index)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """40,000 rows: ten megabytes, several blocks."""
    path = tmp_path_factory.mktemp("synthetic") / "rows.tsv"
    with path.open("wb") as file:
        synthesize().write(file, 40_000, 5)
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 700)


# ------------------------------------------------------------------------------------------------------------- hashing


def random_strings(lengths, seed=0):
    source = np.random.default_rng(seed)
    return [source.integers(0, 256, length, np.uint8).tobytes() for length in lengths]


def arrow(strings):
    return np.cumsum([0, *map(len, strings)]), np.frombuffer(b"".join(strings), np.uint8)


# Fingerprint64 as TensorFlow 2.21 gives it, one or more for every length class.
VECTORS = {
    b"": 0x9AE16A3B2F90404F,
    b"a": 0xB3454265B6DF75E3,
    b"abc": 0x24A5B3A074E7F369,
    b"68fd1e64": 0x6DEA854A18F8CA86,
    b"hello world": 0x588FB7478BD6B01B,
    b"The quick brown fox jumps over": 0xE75880B807DFB05A,
    b"x" * 50: 0x3FF2E52EF910C925,
    bytes(range(200)): 0x74C7FCC26D66FB3,
}


def test_fixed_fingerprints_of_every_length_class():
    assert fingerprint64(*arrow(list(VECTORS))).tolist() == list(VECTORS.values())


def test_all_lengths_keep_their_fingerprints():
    # digest of the fingerprints of one string of each length 0..300, made when they were equal to TensorFlow's
    strings = [bytes((7 * i + length) % 256 for i in range(length)) for length in range(301)]
    digest = hashlib.sha256(fingerprint64(*arrow(strings)).astype("<u8").tobytes()).hexdigest()
    assert digest == "12dd152a81425c4159f4268e2cb5d5d8cfe62c71b77917478c7acc3e1e6fc312"


@pytest.mark.parametrize("count", [1000, 2, 2**62, 2**63 - 1])
def test_fingerprints_equal_tensorflow(count):
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    strings = random_strings([*range(301), *range(301), *[8] * 100])
    expected = tensorflow.strings.to_hash_bucket_fast(strings, count).numpy().astype(np.uint64)
    assert np.array_equal(fingerprint64(*arrow(strings)) % np.uint64(count), expected)


def test_hash_is_that_of_each_string_alone():
    strings = random_strings([8, 0, 3, 200, 8, 70, 0, 16, 33, 5] * 3)
    alone = [int(fingerprint64(*arrow([string]))[0]) for string in strings]
    assert fingerprint64(*arrow(strings)).tolist() == alone
    assert fingerprint64(arrow(strings)[0].astype(np.int32), arrow(strings)[1]).tolist() == alone


def test_more_strings_than_one_chunk():
    digits = np.frombuffer(b"".join(b"%08x" % i for i in range(70_000)), np.uint8)
    hashes = fingerprint64(np.arange(70_001) * 8, digits)
    assert int(hashes[69_999]) == int(fingerprint64(*arrow([b"%08x" % 69_999]))[0])
    assert np.unique(hashes).size == 70_000


@pytest.mark.parametrize("offsets", [[0, 5], [-1, 2], [0, 3, 2], []])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(ValueError, match="offsets"):
        fingerprint64(np.array(offsets, np.int64), np.zeros(4, np.uint8))


def test_hash_buckets_of_every_arrow_type():
    strings = ["68fd1e64", "", None, "é", "68fd1e64"]
    expected = buckets(b"68fd1e64", b"", b"", "é".encode(), b"68fd1e64")
    assert expected[1] == EMPTY
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        array = pa.array(strings, kind)
        assert hash_buckets(array, 1000).dtype == np.int32
        assert hash_buckets(array, 1000).tolist() == expected
        assert hash_buckets(array[1:4], 1000).tolist() == expected[1:4]
        assert hash_buckets(array[:0], 1000).shape == (0,)
        assert hash_buckets(pa.nulls(2, kind), 1000).tolist() == [EMPTY, EMPTY]
    with pytest.raises(TypeError, match="int64"):
        hash_buckets(pa.array([1]), 1000)


def test_bytes_behind_a_null_do_not_count():
    valid = pa.py_buffer(b"\x01")  # of two strings only the first
    array = pa.Array.from_buffers(
        pa.string(), 2, [valid, pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"aaaa")]
    )
    assert hash_buckets(array, 1000).tolist() == buckets(b"a", b"")


def test_modulo_is_exact():
    hashes = np.array([0, 1, 999, 1000, 2**64 - 1, 2**63], np.uint64)
    for count in (1, 2, 1000, 2**31 - 1):
        assert buckets_of(hashes, count).tolist() == [int(value) % count for value in hashes]
    for count in (0, -1, 2**31):
        with pytest.raises(ValueError, match="hash buckets"):
            buckets_of(hashes, count)


# ------------------------------------------------------------------------------------------------------------- reading


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


def synthetic_lines(count, **options):
    file = io.BytesIO()
    synthesize().write(file, count, 1, **options)
    return file.getvalue().splitlines()


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
    (b"", "columns", "found 1 column, wanted 40, with a label like the rows before"),
    (b"\r", "columns", "found 1 column, wanted 40"),
    (line(None), "columns", "found 39 columns, wanted 40"),
    (line() + b"\t", "columns", "found 41 columns, wanted 40"),
    (line(b"2"), "label", "found label '2', wanted 0 or 1"),
    (line(b""), "label", "found label '', wanted 0 or 1"),
    (line(b"-1"), "label", "found label '-1', wanted 0 or 1"),
    (line(b"yes"), "label", "found label 'yes', wanted 0 or 1"),
    *(
        (
            line(b"0", [b"1"] * 12 + [text]),
            "number",
            f"found {text.decode()!r} in column 14, wanted a number or nothing",
        )
        for text in b"abc,nan,inf,-inf,1e99,1 , 1,-,.,1_0,0x10,--1,1.2.3,1;5".split(b",")
    ),
    (line(b"0", [b"1", "١".encode(), *[b"1"] * 11]), "number", "found '١' in column 3"),
    (line(b"0", [b"9" * 400] * 13), "number", "found '999999999999...9999999999999' in column 2"),
]


@pytest.mark.parametrize(("row", "kind", "message"), BROKEN)
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
    same(Rows(rows.numbers, rows.ids, rows.labels, np.arange(20)), read(good))


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
        RequestError, match=r"rows:1: found 1 column, wanted 40 \(with label\) or 39 \(without\), and no header line"
    ):
        read([b"x", line(None)])


def test_labels_are_in_all_rows_or_in_none():
    with pytest.raises(RequestError, match="rows:2: found 39 columns, wanted 40, with a label like the rows before"):
        read([line(), line(None)])


def test_labels_are_in_all_files_or_in_none(tmp_path):
    one, other = tmp_path / "a.tsv", tmp_path / "b.tsv"
    one.write_bytes(line() + b"\n")
    other.write_bytes(line(None) + b"\n")
    with pytest.raises(RequestError, match=r"b.tsv:1: found 39 columns, wanted 40, with a label"):
        read([one, other])
    with pytest.raises(RequestError, match=r"a.tsv:1: found 40 columns, wanted 39, without a label"):
        read([other, one])


def test_a_header_is_refused(tmp_path):
    file = tmp_path / "rows.tsv"
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    file.write_bytes("\t".join(names).encode() + b"\n" + line())
    with pytest.raises(RequestError, match=r":1: found label 'label', wanted 0 or 1, and no header line"):
        read(file)
    assert len(read(file, on_error="skip")) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.tsv", b"", "found .*empty.tsv empty"),
        ("empty.gz", gzip.compress(b"", mtime=0), "found .*empty.gz empty"),
        ("cut.tsv.gz", gzip.compress(os.urandom(9000))[:6000], "found .*cut.tsv.gz cut short"),
        ("head.gz", b"\x1f\x8b\x08", "found .*head.gz cut short"),
        ("bad.gz", b"\x1f\x8bnonsense and more of it", "cannot read .*bad.gz"),
        ("flip.gz", gzip.compress(b"x" * 99, mtime=0)[:-8] + b"12345678", "cannot read .*flip.gz"),
        ("bad.parquet", b"PAR1 and then nothing", "cannot read .*bad.parquet"),
        ("commas.csv", b"1,2,3\n4,5,6\n", "found 1 column, wanted 40"),
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
    with pytest.raises(RequestError, match=r"rows.tsv.gz cut short"):
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
    monkeypatch.setattr(sources, "LONGEST", 1 << 21)
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


# ----------------------------------------------------------------------------------------------- parquet and data sets


INTEGER, TEXT = pa.int64(), pa.string()


def table(lines, names=None, numbers=INTEGER, text=TEXT, label=INTEGER):
    values = list(zip(*([value.decode() or None for value in row.split(b"\t")] for row in lines), strict=True))
    names = names or ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    kinds = [label, *[numbers] * 13, *[text] * 26]
    columns = [pa.array(column, pa.string()).cast(kind) for column, kind in zip(values, kinds, strict=True)]
    return pa.table(columns, names)


@pytest.mark.parametrize(
    ("numbers", "text", "label"),
    [
        (pa.int64(), pa.string(), pa.int8()),
        (pa.float32(), pa.large_string(), pa.bool_()),
        (pa.float64(), pa.binary(), pa.string()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.float64()),
    ],
)
def test_parquet(tmp_path, numbers, text, label):
    lines = synthetic_lines(60)
    whole = table(lines, None, numbers, text, label)
    file = tmp_path / "rows.parquet"
    pq.write_table(whole, file, row_group_size=25)
    same(read(file), read(lines))
    other = tmp_path / "other_name"
    order = np.random.default_rng(0).permutation(40).tolist()
    names = [
        f"{'' if i == 0 else 'integer_feature_' if i < 14 else 'Categorical_Feature_'}{[i, i - 13][i > 13] or 'CLICK'}"
        for i in range(40)
    ]
    renamed = whole.rename_columns(names).select(order).append_column("extra", pa.array([1] * 60))
    pq.write_table(renamed, other)
    same(read(other), read(lines))


def test_parquet_by_order_and_without_label(tmp_path):
    lines = synthetic_lines(10)
    whole = table(lines, [f"column{i}" for i in range(40)])
    pq.write_table(whole, tmp_path / "a.parquet")
    same(read(tmp_path / "a.parquet"), read(lines))
    pq.write_table(whole.drop_columns(["column0"]), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet").labels is None
    with pytest.raises(RequestError, match=r"b.parquet without a label"):
        read([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    pq.write_table(whole.drop_columns(["column0", "column1"]), tmp_path / "c.parquet")
    with pytest.raises(RequestError, match=r"found the columns column2, .* wanted label, I1 to I13 and C1 to C26"):
        read(tmp_path / "c.parquet")
    pq.write_table(whole.slice(0, 0), tmp_path / "d.parquet")
    with pytest.raises(RequestError, match=r"d.parquet empty"):
        read(tmp_path / "d.parquet")


@pytest.mark.parametrize("gone", ["I1", "C26", "I7"])
def test_parquet_without_some_of_the_named_columns(tmp_path, gone):
    whole = table(synthetic_lines(10))
    pq.write_table(whole.drop_columns(gone), tmp_path / "a.parquet")  # 39 columns, as many as by order without a label
    with pytest.raises(RequestError, match=f"found no column {gone.lower()} in .*a.parquet, wanted all 39 by name"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["I2", "i2", "LABEL"])
def test_parquet_with_a_name_twice(tmp_path, name):
    whole = table(synthetic_lines(10))
    pq.write_table(whole.append_column(name, whole["I1"]), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"more than once in .*a.parquet"):
        read(tmp_path / "a.parquet")


def test_broken_values_in_parquet(tmp_path):
    lines = synthetic_lines(6)
    whole = table(lines, None, pa.float64(), pa.string(), pa.int64())
    infinite = whole.set_column(3, "I3", pa.array([1, math.inf, math.nan, None, 1e300, 5.0]))
    labels = infinite.set_column(0, "label", pa.array([0, 1, 1, None, 0, 2]))
    pq.write_table(labels, tmp_path / "rows.parquet")
    with pytest.raises(RequestError, match=r"rows.parquet:2: found inf in column 4"):
        read(tmp_path / "rows.parquet")
    log = ErrorLog()
    rows = read(tmp_path / "rows.parquet", on_error="skip", errors=log)
    assert (rows.index.tolist(), log.counts) == ([0, 2], {"number": 2, "label": 2})
    assert np.isnan(rows.numbers[1, 2])  # NaN in a table is missing
    for column, values, message in (
        (4, [[1]] * 6, "found list.* in the column I4"),
        (20, [1.5] * 6, "found double in the column C7"),
    ):
        name = whole.column_names[column]
        pq.write_table(whole.set_column(column, name, pa.array(values)), tmp_path / "kind.parquet")
        with pytest.raises(RequestError, match=message):
            read(tmp_path / "kind.parquet")


def test_whole_numbers_as_categories(tmp_path):
    lines = synthetic_lines(3)
    whole = table(lines).set_column(14, "C1", pa.array([7, None, -12])).set_column(15, "C2", pa.nulls(3))
    pq.write_table(whole, tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert rows.ids[:, 0].tolist() == buckets(b"7", b"", b"-12")
    assert rows.ids[:, 1].tolist() == [EMPTY] * 3


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    lines = synthetic_lines(30)
    whole = datasets.Dataset(table(lines))
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    same(read(tmp_path / "one"), read(lines))
    same(read(f"{tmp_path / 'two'}:test"), read(lines[:5]))
    with pytest.raises(RequestError, match=r"found the splits train, test in .*, wanted one of them: .*two:train"):
        read(tmp_path / "two")
    with pytest.raises(RequestError, match="found the splits"):
        read(f"{tmp_path / 'two'}:nonsense")
    with pytest.raises(RequestError, match="wanted the folder without :train"):
        read(f"{tmp_path / 'one'}:train")


def test_hub_data_sets_are_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("ZOO_OFFLINE", "0")
    lines = synthetic_lines(30)
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        stream = datasets.Dataset(table(lines)).to_iterable_dataset()
        return stream if split else datasets.IterableDatasetDict({"train": stream})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    same(read("someone/criteo"), read(lines))
    same(read("someone/criteo:test"), read(lines))
    assert asked == [("someone/criteo", None, True), ("someone/criteo", "test", True)]

    def broken(*arguments, **keywords):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(
        RequestError, match=r"found neither a file someone/criteo nor that data set on the hub: no network$"
    ):
        read("someone/criteo")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(RequestError, match="ZOO_OFFLINE"):
        read("someone/criteo")


def test_a_hub_that_fails_on_the_way(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)

    class Failing:
        def with_format(self, name):
            return self

        def iter(self, batch_size):
            yield table(synthetic_lines(3))
            raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **keywords: Failing())
    rows = read_rows("someone/criteo", batch_rows=3)
    assert len(next(rows)) == 3
    with pytest.raises(ZooError, match="reading someone/criteo failed: reset"):
        next(rows)


def test_without_the_datasets_library(monkeypatch):
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match=r'pip install "int8-zoo\[train\]"'):
        read("someone/criteo")


def test_importing_loads_nothing_heavy():
    code = "import sys, zoo.wide_deep.data; print([m for m in ('torch', 'tensorflow', 'datasets', 'pandas') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


# ------------------------------------------------------------------------------------------------------------ features


def rows_of(numbers, ids=None):
    numbers = np.asarray(numbers, np.float32)
    ids = np.zeros((len(numbers), 2), np.int32) if ids is None else np.asarray(ids, np.int32)
    return Rows(numbers, ids, None, np.arange(len(numbers)))


E1 = math.e - 1  # log1p of it is 1


def test_fit_and_normalize():
    nan = math.nan
    batches = [rows_of([[0, E1, nan, 7], [nan, -5, nan, 7]]), rows_of([[math.e**2 - 1, math.e**3 - 1, nan, nan]])]
    features = fit(batches, buckets=50)
    assert (features.numeric, features.categorical, features.buckets) == (4, 2, 50)
    assert features.lo == pytest.approx([0, 0, 0, math.log(8)])
    assert features.hi == pytest.approx([2, 3, 0, math.log(8)])
    assert features.fill == (0, 0, 0, 0)
    values = features.normalize(
        np.array([[E1, E1, 4, 7], [nan, nan, nan, nan], [-3, 1e300, 1e300, 1e300], [1e9, 0, 0, 0]])
    )
    assert values.tolist() == [pytest.approx([1 / 2, 1 / 3, 0, 0]), [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert values.dtype == np.float32
    assert values.flags.c_contiguous


def test_fill_with_the_mean_of_the_normalized_column():
    features = fit(
        [rows_of([[0, 3], [math.nan, 3]]), rows_of([[E1, math.nan], [math.e**4 - 1, math.nan]])], fill="mean"
    )
    assert features.fill == pytest.approx((5 / 12, 0))
    assert features.normalize(np.full((1, 2), np.nan)).tolist() == [pytest.approx([5 / 12, 0])]


def test_fit_does_not_depend_on_the_batches(synthetic):
    once, parts = fit(read_rows(synthetic), fill="mean"), fit(read_rows(synthetic, batch_rows=777), fill="mean")
    assert (once.lo, once.hi) == (parts.lo, parts.hi)
    assert once.fill == pytest.approx(parts.fill)


def test_encode(synthetic):
    rows = read(synthetic)
    features = fit([rows])
    inputs = features.encode(rows)
    assert {name: (array.dtype, array.shape) for name, array in inputs.items()} == {
        "ids": (np.int32, (40_000, 26)),
        "numbers": (np.float32, (40_000, 13)),
    }
    assert all(array.flags.c_contiguous for array in inputs.values())
    numbers = inputs["numbers"]
    assert numbers.min() == 0
    assert numbers.max(axis=0).tolist() == [1] * 13
    logs = np.log1p(np.maximum(rows.numbers.astype(np.float64), 0))
    lo, hi = np.nanmin(logs, axis=0), np.nanmax(logs, axis=0)
    np.testing.assert_allclose(numbers, np.nan_to_num((logs - lo) / (hi - lo)), atol=3e-7)
    parts = [features.encode(batch)["numbers"] for batch in read_rows(synthetic, batch_rows=999)]
    assert np.array_equal(np.concatenate(parts), numbers)  # no row depends on its batch
    assert np.array_equal(features.normalize(rows.numbers.astype(np.float64)), numbers)
    assert np.array_equal(features.normalize(np.asfortranarray(rows.numbers)), numbers)


def test_encode_refuses_rows_read_otherwise():
    features = Features((0.0,), (1.0,), (0.0,), 1, 2, 10)
    assert features.counts == {"numeric": 1, "categorical": 2, "buckets": 10}
    with pytest.raises(RequestError, match=r"features.counts"):
        features.encode(rows_of([[1]], [[1, 10]]))
    with pytest.raises(RequestError, match=r"features.counts"):
        features.encode(rows_of([[1]], [[1, 1, 1]]))
    with pytest.raises(RequestError, match=r"wanted \[n, 1\]"):
        features.encode(rows_of([[1, 2]], [[1, 1]]))
    read_rows([b"1\ta\tb"], **features.counts)


def test_no_rows_to_fit():
    with pytest.raises(RequestError, match="no rows to fit"):
        fit([])
    with pytest.raises(RequestError, match="fill 'median'"):
        fit([rows_of([[1]])], fill="median")


def test_features_come_back_exactly(synthetic):
    features = fit(read_rows(synthetic), fill="mean")
    assert Features.from_json(json.loads(json.dumps(features.to_json()))) == features


GOOD = Features((0.0, 0.5), (1.0, 0.5), (0.0, 1.0), 2, 3, 10).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"lo": [0.0]},
        {"lo": [2.0, 0.0]},
        {"lo": [-1.0, 0.0]},
        {"hi": "no"},
        {"hi": [1.0, "x"]},
        {"hi": [1.0, True]},
        {"hi": [math.inf, 1.0]},
        {"hi": [math.nan, 1.0]},
        {"fill": [0.0, 1.5]},
        {"fill": None},
        {"numeric": 3},
        {"numeric": 0},
        {"numeric": 2.0},
        {"categorical": -1},
        {"buckets": 0},
        {"buckets": 2**31},
        {"buckets": True},
        {"hash": "murmur"},
        {"transform": "minmax"},
    ],
)
def test_broken_features_are_refused(change):
    with pytest.raises(RequestError, match="broken features"):
        Features.from_json({**GOOD, **change})


def test_features_with_something_missing_or_more():
    for key in GOOD:
        with pytest.raises(RequestError, match=f"broken features: {key} missing"):
            Features.from_json({name: value for name, value in GOOD.items() if name != key})
    for value in (None, [], "x"):
        with pytest.raises(RequestError, match="wanted an object"):
            Features.from_json(value)
    assert Features.from_json({**GOOD, "note": "kept by the card", "hi": [1, 0.5]}).to_json() == GOOD


# ------------------------------------------------------------------------------------------------------ synthetic rows


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, check=False)


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["synthesize_criteo.py", *map(str, arguments)])
    synthesize().main()


def test_script_output_is_the_same_everywhere(tmp_path, monkeypatch):
    result = run_script("-n", 300, "-o", "-", "--seed", 4)
    assert (result.returncode, result.stderr) == (0, b"")
    assert len(result.stdout.splitlines()) == 300
    for name in ("rows.tsv", "rows.tsv.gz"):
        main(monkeypatch, "-n", 300, "-o", tmp_path / name, "--seed", 4)
    assert (tmp_path / "rows.tsv").read_bytes() == result.stdout
    packed = (tmp_path / "rows.tsv.gz").read_bytes()
    assert gzip.decompress(packed) == result.stdout
    assert packed[4:8] == bytes(4)  # no time in it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.tsv", "rows.tsv.gz"]
    main(monkeypatch, "-n", 300, "-o", tmp_path / "rows.tsv", "--seed", 5)
    assert (tmp_path / "rows.tsv").read_bytes() != result.stdout


def test_script_refuses_wrong_requests(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_bytes(b"")
    for arguments, message in (
        (("-n", 0, "-o", tmp_path / "rows.tsv"), "wanted at least 1 row"),
        (("-n", 5, "-o", tmp_path / "rows.tsv", "--seed", -1), "a seed from 0"),
        (("-n", 5, "-o", tmp_path / "rows.tsv", "--click-rate", 1.5), "a click rate"),
        (("-n", 5, "-o", tmp_path / "file" / "rows.tsv"), "cannot write"),
    ):
        with pytest.raises(SystemExit) as exit_code:
            main(monkeypatch, *arguments)
        assert exit_code.value.code == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_stopped_script_leaves_nothing_behind(tmp_path, monkeypatch):
    script = synthesize()

    def stopped(*arguments, **keywords):
        yield next(blocks(*arguments, **keywords))
        raise KeyboardInterrupt

    blocks = script.blocks
    monkeypatch.setattr(script, "blocks", stopped)
    monkeypatch.setattr(sys, "argv", ["", "-n", "50000", "-o", str(tmp_path / "rows.tsv.gz")])
    with pytest.raises(SystemExit) as exit_code:
        script.main()
    assert exit_code.value.code == 130
    assert list(tmp_path.iterdir()) == []


def test_the_first_rows_do_not_depend_on_how_many_there_are():
    script = synthesize()
    long, short = synthetic_lines(script.BLOCK + 10), synthetic_lines(script.BLOCK - 10)
    assert (len(long), len(short)) == (script.BLOCK + 10, script.BLOCK - 10)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)
    bare = synthetic_lines(20, label=False)
    assert [row.split(b"\t", 1)[1] for row in long[:20]] == bare


def test_synthetic_rows_look_like_the_log(synthetic):
    rows = read(synthetic)
    assert rows.labels.mean() == pytest.approx(0.22, abs=0.015)
    missing = np.isnan(rows.numbers).mean(axis=0)
    assert (missing[1], missing[7]) == (0, 0)
    assert missing[11] == pytest.approx(0.76, abs=0.02)
    assert rows.numbers[:, 1].min() == -1
    assert np.nanmin(np.delete(rows.numbers, 1, axis=1)) == 0
    first = [row.split(b"\t") for row in synthetic.read_bytes().splitlines()]
    categories = [{row[14 + field] for row in first} - {b""} for field in range(26)]
    assert all(len(value) == 8 and int(value, 16) >= 0 for values in categories for value in values)
    assert (len(categories[8]), len(categories[19])) == (3, 4)  # small vocabularies are used up
    assert len(categories[2]) > 10_000  # large ones never
    counts = np.unique([row[16] for row in first], return_counts=True)[1]
    assert counts.max() > 20 * counts.mean()  # and both are skewed
    assert synthetic_rate(0.5) == pytest.approx(0.5, abs=0.03)


def synthetic_rate(rate):
    return np.mean([row[:1] == b"1" for row in synthetic_lines(4000, click_rate=rate)])


def auc(labels, scores):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks))


def logistic_regression(train, test, epochs=3):
    """Scores of `test` after AdaGrad on `train`: one weight per bucket and number."""
    weights, slopes = np.zeros((26, 1000)), np.zeros(14)
    squares, steep = np.full_like(weights, 1e-6), np.full(14, 1e-6)
    fields = np.arange(26)

    def score(inputs):
        numbers = np.column_stack([inputs["numbers"], np.ones(len(inputs["ids"]))])
        return weights[fields, inputs["ids"]].sum(axis=1) + numbers @ slopes, numbers

    features = fit([train])
    inputs = features.encode(train)
    for begin in list(range(0, len(train), 256)) * epochs:
        part = {name: array[begin : begin + 256] for name, array in inputs.items()}
        scores, numbers = score(part)
        error = (1 / (1 + np.exp(-scores)) - train.labels[begin : begin + 256]) / len(scores)
        gradient = np.zeros_like(weights)
        np.add.at(gradient, (fields, part["ids"]), error[:, None])
        squares += gradient**2
        weights -= 0.03 * gradient / np.sqrt(squares)
        steep += (numbers.T @ error) ** 2
        slopes -= 0.1 * (numbers.T @ error) / np.sqrt(steep)
    return score(features.encode(test))[0]


@pytest.mark.slow
def test_the_planted_model_can_be_learnt_and_holds_for_other_seeds(synthetic, tmp_path):
    other = tmp_path / "other.tsv"
    with other.open("wb") as file:
        synthesize().write(file, 10_000, 6)
    test = read(other)
    assert auc(test.labels, logistic_regression(read(synthetic), test)) > 0.72


@pytest.mark.slow
def test_speed_and_memory(tmp_path):
    file = tmp_path / "rows.tsv"
    assert run_script("-n", 300_000, "-o", file).returncode == 0
    code = (
        "import re, sys, time\nfrom zoo.wide_deep.data import read_rows; from zoo.wide_deep.fitting import fit\n"
        "f = fit(read_rows(sys.argv[1])); t = time.process_time()\n"
        "n = sum(len(f.encode(rows)['ids']) for rows in read_rows(sys.argv[1]))\n"
        "print(n, n / (time.process_time() - t), int(re.search(r'VmHWM:\\s*(\\d+)', "
        "open('/proc/self/status').read())[1]) / 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, file], cwd=ROOT, capture_output=True, text=True, check=True)
    rows, speed, memory = map(float, result.stdout.split())
    assert rows == 300_000
    assert speed > 200_000  # about a million on a quiet machine
    assert memory < 300  # MB; the file alone has 70


@pytest.mark.slow
def test_hashing_speed():
    data = np.random.default_rng(0).integers(0, 256, 8_000_000, np.uint8)
    offsets = np.arange(1_000_001) * 8
    start = time.process_time()
    fingerprint64(offsets, data)
    assert time.process_time() - start < 0.2  # 20 to 100 million a second


# ----------------------------------------------------------------------------------------------------------- real rows


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
    features = fit([rows])
    assert 0 < features.encode(rows)["numbers"].mean() < 0.5
