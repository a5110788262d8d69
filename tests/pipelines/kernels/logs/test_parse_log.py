"""The native parser of lines, hashes and lines of CSV against the numpy and pyarrow code that they stand in for."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from helpers.criteo_logs import read_rows
from helpers.readings import same_without_kernels
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.kernels import extension
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.hashing import buckets_of, fingerprints

native = extension.native()
pytestmark = pytest.mark.skipif(native is None, reason=extension.missing())

NUMBERS = [
    b"",
    b"0",
    b"7",
    b"12345678",
    b"123456789",
    b"-1",
    b"-",
    b"-0",
    b"+3",
    b"+-3",
    b"007",
    b"1.5",
    b".5",
    b"5.",
    b".",
    b"-.25",
    b"1e3",
    b"1E-3",
]
NUMBERS += [
    b"1e",
    b"1e+",
    b"1e400",
    b"1e-400",
    b"1e00005",
    b"3.4028235e38",
    b"3.4028236e38",
    b"-123456789",
    b"0.1" * 9,
    b"nan",
    b"inf",
    b"0x1",
    b" 1",
]
NUMBERS += [
    b"16777217",
    b"99999999999999999999999",
    b"1_0",
    b"\x001",
    b"12345678\r",
    b"\r",
    b"1:2",
    b"1/2",
    b"\xb1",
    b"-1234567",
    b"-12345678",
    b"--1",
]
number = (
    st.sampled_from(NUMBERS)
    | st.integers(-(10**9), 10**9).map(lambda x: b"%d" % x)
    | st.floats(width=32).map(lambda x: repr(x).encode())
)
label = st.sampled_from([b"0", b"1", b"1", b"0", b"", b"2", b"01", b"1.0", b"-0", b"x", b"-1", b"1 "])
category = st.sampled_from([b"", b"1234abcd", b"a\rb", b"\r"]) | st.binary(max_size=200).map(
    lambda x: x.translate(None, b"\t\n")
)
ending = st.sampled_from([b"\n", b"\n", b"\r\n", b"\t\n", b"\n\n"])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Asserts that a file of these bytes reads the same with the native parser and without."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"

    def compare(content, block=1 << 20, **sizes):
        path.write_bytes(content)
        return same_without_kernels(lambda source, **more: read_rows([source], **more), path, block, **sizes)

    return compare


def regular(count, numeric, categorical, seed=0):
    rng = np.random.default_rng(seed)
    small, large = rng.integers(-500, 3000, (count, numeric)), rng.integers(0, 1 << 32, (count, categorical))
    lines = []
    for row in range(count):
        numbers = [b"" if value % 5 == 0 else b"%d" % value for value in small[row].tolist()]
        categories = [b"" if value % 7 == 0 else b"%08x" % value for value in large[row].tolist()]
        lines.append(b"\t".join([b"%d" % (row % 2), *numbers, *categories]) + b"\n")
    return b"".join(lines)


@pytest.mark.parametrize("block", [300, 4096, 1 << 20])
@pytest.mark.parametrize(("numeric", "categorical"), [(13, 26), (1, 1), (40, 3)])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_regular_rows_never_leave_the_native_parser(both, monkeypatch, numeric, categorical, block, end):
    content = regular(500, numeric, categorical)
    both(content.replace(b"\n", end), block, numeric=numeric, categorical=categorical, buckets=1000)
    monkeypatch.setattr("zoo.recommenders.data.line_reader._Reader._split", None)
    rows = Rows.concatenate(list(read_rows(content.splitlines(), numeric=numeric, categorical=categorical)))
    assert len(rows) == 500
    assert np.isnan(rows.numbers).any()


@given(
    rows=st.lists(st.tuples(label, number, number, category, category, ending), min_size=1, max_size=12),
    buckets=st.sampled_from([1, 2, 1000, 2**31 - 1]),
    labelled=st.booleans(),
    block=st.sampled_from([1, 40, 1 << 20]),
)
def test_rows_of_all_kinds(both, rows, buckets, labelled, block):
    content = b"".join(b"\t".join(row[not labelled : -1]) + row[-1] for row in rows)
    both(content, block, numeric=2, categorical=2, buckets=buckets)


@pytest.mark.parametrize("value", NUMBERS)
def test_every_number_alone(both, value):
    """Alone in its file, so that it cannot hide behind another one's fault."""
    for content in (
        b"1\t%s\tabc\n" % value,
        b"%s\tabc\n" % value,
        b"a\t%s\n" % value,
        b"%s\t\n" % value,
        b"1\t5\t5\n" * 3 + b"1\t%s\t\n" % value,
    ):
        both(content, numeric=1, categorical=1)


@given(
    st.lists(st.sampled_from([*b"\t\t\t\n\n01279-+.eE\r \0\xffab"]), max_size=400).map(bytes),
    st.integers(1, 3),
    st.integers(1, 3),
)
@example(b"\n", 1, 1)
@example(b"\t\n", 1, 1)
@example(b"\t\t", 1, 1)
@example(b"1\t2\n\r\n", 1, 1)
def test_any_bytes(both, content, numeric, categorical):
    both(content, numeric=numeric, categorical=categorical)


@pytest.mark.parametrize("size", [*range(60, 70), 127, 128, 129, 4095, 4096, 4097, 8192])
def test_blocks_of_sizes_around_those_of_the_loops(both, size):
    """Rows without any value are the densest in separators; a long category is the sparsest."""
    both(b"1\t\t\t\n" * (size // 5) + b"1\t\t\t" + b"x" * (size % 5) + b"\n", numeric=1, categorical=2)
    both(b"0\t1\t\t" + b"x" * size + b"\n" + b"1\t\ta\tb\n", numeric=1, categorical=2)


def parse(block, numeric, categorical, buckets, labelled, isa=""):
    """(labels, numbers, ids) of a block of lines, numbers as they are; None where it is declined.

    buckets: of all categories, or of each, which then have a bucket of their own for an empty field.
    """
    parser = native.LogParser(labelled + numeric + categorical, "\t", "lines", [], categorical, numeric, 0, isa)
    if labelled:
        parser.real(0, "label")
    for index in range(numeric):
        parser.number(labelled + index, index, -1, "value", 0, 1, np.nan, np.zeros(0, np.float32))
    sizes = [buckets] * categorical if isinstance(buckets, int) else buckets
    for index, size in enumerate(sizes):
        empty = int(buckets_of(fingerprints(np.zeros(0, np.uint8), *np.zeros((2, 1), int)), max(size, 1))[0])
        missing = empty if isinstance(buckets, int) else size
        parser.hash_bucket(labelled + numeric + index, index, size, missing)
    room = [np.empty((0, width), kind) for width, kind in ((categorical, "i4"), (numeric, "f4"), (0, "f4"))]
    taken, rows, arrays = parser.parse(np.frombuffer(block + bytes(64), np.uint8), len(block), *room)
    if arrays is None:
        return None
    assert (taken, rows) == (len(block), arrays[0])
    return arrays[4], arrays[2], arrays[1]


@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2", "portable"])
def test_all_versions_give_the_same_bits(isa):
    numbers = [b"", b"0", b"7", b"12345678", b"123456789", b"-1", b"-0", b"+3", b".5", b"-.25", b"1e3", b"5.", b"0.1"]
    block = regular(700, 13, 26) + b"\t".join([b"1", *numbers, *[b"c" * 5 * i for i in range(26)]]) + b"\n"
    try:
        arrays = parse(block, 13, 26, 1000, True, isa)
    except ValueError:
        pytest.skip(f"this CPU has no {isa}")
    for array, wanted in zip(arrays, parse(block, 13, 26, 1000, True), strict=True):
        assert array.tobytes() == wanted.tobytes()


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="no kernels for neon"):
        parse(b"1\t2\n", 1, 1, 10, False, "neon")


def test_hashes_of_all_lengths_are_those_of_numpy():
    rng = np.random.default_rng(1)
    lengths = np.concatenate([np.arange(600), rng.integers(0, 40, 3000)])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    data = rng.integers(0, 256, lengths.sum(), np.uint8)
    for buckets in (1, 2, 3, 1000, 1 << 20, 2**31 - 2, 2**31 - 1):
        hashes = native.hash_buckets(data, starts, lengths, buckets)
        assert hashes.dtype == np.int32
        np.testing.assert_array_equal(hashes, buckets_of(fingerprints(data, starts, lengths), buckets))


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 1), (0, 11), (10, 1), (11, 0), (3, -1), (2**62, 2**62), (5, 2**63 - 1)]
)
def test_strings_outside_the_data_are_refused(start, length):
    with pytest.raises(ValueError, match="outside"):
        native.hash_buckets(np.zeros(10, np.uint8), np.array([0, start]), np.array([10, length]), 10)


@pytest.mark.parametrize("buckets", [0, -1, 2**31])
def test_impossible_numbers_of_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match=f"found {buckets} hash buckets"):
        parse(b"1\t2\n", 1, 1, buckets, False)
    with pytest.raises(ValueError, match=f"found {buckets} hash buckets"):
        native.hash_buckets(np.zeros(1, np.uint8), np.array([0]), np.array([1]), buckets)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_field_has_buckets_of_its_own_and_one_for_nothing(isa):
    if isa not in ("portable", *native.isas()):
        pytest.skip(f"this CPU has no {isa}")
    fields = [b"", b"12345678", b"a", b"a longer one, of more than 32 bytes"]
    block = b"".join(b"1\t%s\t%s\n" % (a, b) for a in fields for b in fields) * 100
    _, _, ids = parse(block, 1, 2, [7, 2**31 - 2], False, isa)
    for k, size in enumerate((7, 2**31 - 2)):
        _, _, shared = parse(block, 1, 2, size, False, isa)
        empty = np.array([not line.split(b"\t")[1 + k] for line in block.splitlines()])
        assert (ids[:, k] == np.where(empty, size, shared[:, k])).all()
    for wrong in ([7, 8, 9], [7, 0]):
        with pytest.raises(ValueError, match="expected|outside"):
            parse(block, 1, 2, wrong, False, isa)


@pytest.mark.parametrize(
    "block", [b"", b"1\t2", b"\n", b"1\n", b"1\t2\n3", b"1\t2\t3\n", b"1\t2\n\n", b"x\t2\n", b"1\n2\t3\n4\t"]
)
def test_what_is_no_block_of_right_rows_is_declined(block):
    assert parse(block, 1, 1, 10, False) is None


def pyarrow_lines(whole, real):
    batch = pa.record_batch({"a": pa.array(whole), "b": pa.array(real)})
    with io.BytesIO() as out:
        with pyarrow.csv.CSVWriter(
            out, batch.schema, write_options=pyarrow.csv.WriteOptions(include_header=False)
        ) as writer:
            writer.write_batch(batch)
        return out.getvalue()


def test_lines_are_those_of_pyarrow():
    rng = np.random.default_rng(3)
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-6,
        9.9999e-7,
        1e-7,
        1e9,
        9999999488,
        1e10,
        123456789,
        1e-45,
        3.4028235e38,
        0.1,
        1 / 3,
        100,
        1e5,
    ]
    real = np.concatenate(
        [
            np.array([*edges, *(-edge for edge in edges)], np.float32),
            10.0 ** np.arange(-44, 38, dtype=np.float32),
            rng.random(20_000, np.float32),
            rng.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32),
            rng.integers(0, 1 << 24, 5000).astype(np.float32),
        ]
    ).astype(np.float32)
    whole = rng.integers(-(2**63), 2**63 - 1, len(real)) >> rng.integers(0, 64, len(real))
    whole[:2] = -(2**63), 2**63 - 1
    written = native.csv_lines([whole, real])
    assert written == pyarrow_lines(whole, real)
    text = [line.split(b",")[1] for line in written.splitlines()]
    np.testing.assert_array_equal(np.array([float(field) for field in text], np.float32), real)


def test_lines_of_other_columns_are_refused():
    assert native.csv_lines([np.arange(0), np.zeros(0, np.float32)]) == b""
    assert native.csv_lines([np.ones(2, np.float32)] * 3) == b"1,1,1\n1,1,1\n"
    for wrong in (
        [np.zeros(2)],
        [np.arange(4)[::2]],
        [np.arange(2), np.arange(3)],
        [np.zeros((2, 2), np.float32)],
        [[1, 2]],
    ):
        with pytest.raises(ValueError, match="expected"):
            native.csv_lines(wrong)
