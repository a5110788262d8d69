"""The native reader of logs against the Python one: the same bits, positions and faults, whatever the bytes are."""

import gzip
import itertools

import numpy as np
import pytest
from helpers.tiers import one_in
from hypothesis import event, example, given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data import csv_reader, logs
from zoo.recommenders.data.csv_reader import CsvReader
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import CRITEO, open_log
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import FEATURES, Schema

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())

HASH, WORDS = (
    {"type": "hash", "buckets": 7},
    {"type": "vocabulary", "values": ["Köln", 'say "hi"', "x", "a longer one", ""]},
)
LIST = {"kind": "categories", "length": 3}
COLUMNS = [
    {"name": "y", "kind": "label"},
    {"name": "w", "kind": "weight"},
    {"name": "t", "kind": "timestamp", "unit": "ms"},
    {"name": "user", "kind": "category", "encoding": HASH},
    {"name": "a", "kind": "number", "missing": 1, "encoding": {"type": "standard", "mean": 2.0, "deviation": 0.5}},
    {"name": "b", "kind": "number", "encoding": {"type": "log1p", "minimum": -1.0, "maximum": 99.0}},
    {"name": "c", "kind": "number", "encoding": {"type": "min-max", "minimum": 0, "maximum": 3.0}},
    {"name": "d", "kind": "number", "missing": 5, "encoding": {"type": "quantile", "quantiles": [0, 1, 1, 4]}},
    {"name": "town", "kind": "category", "encoding": WORDS},
    {"name": "mean", **LIST, "separator": "|", "pooling": "mean", "encoding": WORDS},
    {"name": "sum", **LIST, "separator": " ", "pooling": "sum", "encoding": HASH},
    {"name": "max", **LIST, "separator": ",", "pooling": "max", "encoding": WORDS},
    {"name": "other", "kind": "ignored"},
]
KINDS = {spec["name"]: spec["kind"] for spec in COLUMNS}
ARRAYS = ("ids", "numbers", "scales", "labels", "weights", "times", "index")


def features(unit="ms", names=tuple(KINDS)):
    columns = [spec | ({"unit": unit} if spec["name"] == "t" else {}) for spec in COLUMNS if spec["name"] in names]
    return Features(Schema.from_json({"columns": columns}))


def outcome(reader, path, labelled):
    """What reading gives, both ways of treating faults."""
    results = []
    for on_error in ("raise", "skip"):
        errors = ErrorLog(limit=100)
        try:
            rows = Rows.concatenate(list(reader.read(path, on_error=on_error, errors=errors, labelled=labelled)))
            arrays = [getattr(rows, name) for name in ARRAYS]
            results += [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in arrays]
        except RequestError as error:
            results.append(str(error))
        results += [errors.counts, errors.messages]
    return results


def unordered(found):
    """What `outcome` gives without the order of its messages: pyarrow splits a block before the one in front of it is
    judged, so that of two faults in small blocks either may be met first.
    """
    return [
        result.partition("; first: ")[0]
        if isinstance(result, str)
        else sorted(map(str, result))
        if isinstance(result, list)
        else result
        for result in found
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Asserts that bytes read the same natively and without; returns what they give. isa, block: see the reader."""
    folder = tmp_path_factory.mktemp("logs")

    def compare(content, reader, labelled=True, block=logs.BLOCK, isa="", packed=False):
        path = folder / "log"
        path.write_bytes(gzip.compress(content, 1) if packed else content)
        of = CsvReader.of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logs, "BLOCK", block)
            patch.setattr(CsvReader, "of", lambda *arguments: of(*arguments, isa))
            quick = outcome(reader, path, labelled)
            patch.setattr(CsvReader, "of", lambda *arguments: None)
            plain = outcome(reader, path, labelled)
        if block == logs.BLOCK or "straddling" not in str(plain):  # a row longer than the block
            assert unordered(quick) == unordered(plain) if block < logs.BLOCK else quick == plain
        return quick

    return compare


NUMBERS = st.one_of(
    st.integers(-(10**10), 10**10).map(str),
    st.integers(-10, 5000).map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["", "NA", "nan", "inf", "-inf", "+3", "5.", ".5", "1e1", "abc", "1_0", "0x10", "-0", "-0.0", "1e400"]
    ),
    st.sampled_from(
        ["1e-400", "-1e-400", "1e-320", " 7", "7\u2003", "\x1f7", "7\u200b", "٣", "1e", ".", "-", "+", "+-1", "\x00"]
    ),
    st.sampled_from(
        ["9007199254740993", "0." + "0" * 400 + "1", "1" + "0" * 400 + "e-400", "123456789012345678901e-5"]
    ),
    st.from_regex(r"\A[+-]?[0-9]{0,25}\.?[0-9]{0,25}([eE][+-]?[0-9]{0,3})?\Z"),
)
TIMES = st.one_of(
    NUMBERS,
    st.datetimes().map(str),
    st.datetimes().map(lambda moment: moment.isoformat("T", "minutes") + "+0130"),
    st.sampled_from(
        [
            "2024-02-29",
            "2023-01-01T00:00Z",
            "1900-03-01 07:08:09.5-01:00",
            "2023-02-29",
            "0000-00-00",
            "2024-01-01 24:00",
            "2024-01-01T",
            "2024-01-01Z",
            "2024-01-01 UTC",
            "2024-01-01 10:00:00 UTC",
            "2024-01-01 10:00GMT",
            "2024-01-01 10:00:00.25+00",
            "2024-01-01 10:00:00 -05",
            "2024-01-01 10:00:00 +0200",
            "2024-01-01 10:00 ",
            "2024-01-01 10:00  UTC",
        ]
    ),
    st.from_regex(
        r"\A[0-9]{4}-[01][0-9]-[0-2][0-9]([T ][01][0-9]:[0-5][0-9](:[0-5][0-9](\.[0-9]{1,10})?)?( ?(Z|UTC|GMT|[+-]01(:?00)?))?)?\Z"
    ),
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["", "NA", "null", "\\N", "12345678", "Köln", 'say "hi"', "a longer one", "x" * 70, "a,b\n2", "\r", '"']
    ),
)
ITEMS = st.lists(st.sampled_from(["x", "Köln", "NA", " x ", "", "\u2003", "ä\xa0", "a longer one"]), max_size=6)
VALUES = {
    "label": st.sampled_from(["0", "1", "1", "0", "1.0", "1", "0"]),
    "weight": st.sampled_from(["0", "1", "2.5", "1e-3", "+7"]),
    "timestamp": TIMES,
    "category": TEXT,
    "number": NUMBERS,
    "categories": st.builds(str.join, st.sampled_from("| ,"), ITEMS),
    "ignored": TEXT,
}
FAULTY = {"label": st.sampled_from(["2", "", "yes", "1", "0"]), "weight": st.sampled_from(["-1", "much", "NA", "1"])}


@st.composite
def contents(draw):
    """Bytes of a log with a header: quotes where needed, or anywhere; any line ends; strays where asked for."""
    names = draw(st.permutations([*KINDS]))
    delimiter, faulty = draw(st.sampled_from(",;\t|")), draw(st.booleans())
    kinds = {**VALUES, **(FAULTY if faulty else {})}
    ends = draw(st.sampled_from([["\n"], ["\r\n"], ["\n", "\r\n"], ["\n", "\n\n", "\r", "\r\n\r\n"]]))

    def line(values):
        cells = []
        for value in values:
            needed = set(value) & {delimiter, "\r", "\n", '"'}
            if needed or draw(st.integers(0, 5)) == 0:
                value = '"' + value.replace('"', '""') + '"'
            cells.append(value)
        return delimiter.join(cells) + draw(st.sampled_from(ends))

    lines = [line([draw(kinds[KINDS[name]]) for name in names]) for _ in range(draw(st.integers(1, 8)))]
    if faulty:
        strays = [
            line(["1"] * 3),
            line([*"1" * 13, "more"]),
            'a"b' + delimiter * 12 + "\n",
            '"a"b' + delimiter * 12 + "\n",
            '"',
        ]
        for _ in range(draw(st.integers(0, 2))):
            lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(strays)))
    text = (delimiter.join(names) + draw(st.sampled_from(["\n", "\r\n"])) + "".join(lines)).encode()
    text = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"])) + text
    if faulty and draw(st.booleans()):
        n = draw(st.integers(len(text) // 2, len(text)))
        text = text[:n] + draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b'"', b"\r"])) + text[n:]
    return text[:-1] if draw(st.booleans()) else text


def test_times_to_the_nanosecond_are_read(both):
    reader = features("text", ("y", "t", "town"))
    lines = "".join(f"1,x,2024-01-01 00:00:{second:02}.{second:09}\n" for second in range(60))
    times = both(f"y,town,t\n0,x,\n{lines}".encode(), reader)[ARRAYS.index("times")]
    seconds = np.frombuffer(times[2], times[0])
    assert seconds[0] == -np.inf and seconds[1:].tolist() == [1_704_067_200.0 + second for second in range(60)]


@given(
    content=contents(),
    unit=st.sampled_from(["s", "ms", "text"]),
    labelled=st.booleans(),
    cut=st.one_of(st.just(logs.BLOCK), st.integers(100, 2000)),
    isa=st.sampled_from(["", *extension.isas()]),
    packed=st.booleans(),
)
def test_any_log_reads_the_same(both, content, unit, labelled, cut, isa, packed):
    results = both(content, features(unit), labelled, cut, isa, packed)
    event("error" if len(results) < 18 else "rows")


@given(
    st.lists(st.sampled_from([*b',,,\n\n019-."""\r ax\0\xff\xc3\xa4']), max_size=300).map(bytes),
    st.sampled_from([["user"], ["user", "a"], ["mean", "b", "max"]]),
    st.one_of(st.just(logs.BLOCK), st.integers(30, 200)),
)
@example(b"\n\n", ["user"], logs.BLOCK)
@example(b'"', ["user"], logs.BLOCK)
@example(b'"\n', ["user"], logs.BLOCK)
@example(b'a"\n"b"\n', ["user"], logs.BLOCK)
@example(b'1\n"\r', ["user"], logs.BLOCK)
def test_any_bytes(both, content, names, block):
    both(",".join(names).encode() + b"\n" + content, features(names=names), False, block)


def regular(count, quoted=False, end=b"\n"):
    rng = np.random.default_rng(1)
    towns = np.array(
        ["Köln", '"say ""hi"""', "x", '"a,b\n"', '"' + "y" * 30_000 + '"'] if quoted else ["Köln", "x", "yy", "", "NA"]
    )
    lines = []
    for row in range(count):
        town = towns[rng.choice(5, p=[0.3, 0.3, 0.2, 0.195, 0.005])]
        n = rng.integers(-5, 6000, 4)
        cells = [
            str(row % 2),
            "1",
            str(row),
            f"{n[0]:08x}",
            *map(str, n),
            town,
            "x|Köln",
            "7 8 9",
            "",
            f'"{row}"' if quoted else "-",
        ]
        lines.append(",".join(cells).encode() + end)
    return ",".join(KINDS).encode() + end + b"".join(lines)


@pytest.mark.parametrize(
    ("isa", "quoted", "end", "block"),
    one_in(3, itertools.product(extension.isas(), (False, True), (b"\n", b"\r\n"), (70_000, logs.BLOCK))),
)
def test_right_rows_never_leave_the_native_parser(both, monkeypatch, isa, quoted, end, block):
    content = regular(2000, quoted, end)
    both(content, features(), True, block, isa)
    monkeypatch.setattr(csv_reader, "csv_batches", None)
    both(content, features(), True, block, isa)


@pytest.mark.parametrize("native", [True, False])
def test_positions_count_rows_left_out_where_they_stand(monkeypatch, tmp_path, native):
    if not native:
        monkeypatch.setattr(CsvReader, "of", lambda *arguments: None)
    monkeypatch.setattr(logs, "BLOCK", 3000)
    paths, lines = [tmp_path / "one", tmp_path / "two"], regular(1000).splitlines(keepends=True)
    for out in (1, 2, 400, 999, 1000):  # counted with the header
        lines[out] = b"too,short\n"
    lines[700] = b"2" + lines[700][1:]
    for path in paths:
        path.write_bytes(b"".join(lines))
    rows = Rows.concatenate(list(features().read(paths, on_error="skip", labelled=True)))
    wanted = np.setdiff1d(np.arange(1000), [0, 1, 399, 699, 998, 999])
    np.testing.assert_array_equal(rows.index, np.concatenate([wanted, wanted + 1000]))


def test_a_quote_inside_a_value_is_one_of_its_characters(both, monkeypatch, tmp_path):
    lines = regular(3000).splitlines(keepends=True)
    (town,) = [index for index, name in enumerate(lines[0].decode().strip().split(",")) if name == "town"]
    cells = lines[20].split(b",")
    lines[20] = b",".join([*cells[:town], b'5" screen', *cells[town + 1 :]])
    both(b"".join(lines), features(), True, 2000)
    lines[10] = lines[2500] = b"too,short\n"  # in front of it and behind
    both(b"".join(lines), features(), True, 2000)
    monkeypatch.setattr(logs, "BLOCK", 2000)
    (tmp_path / "log").write_bytes(b"".join(lines))
    rows = Rows.concatenate(list(features().read(tmp_path / "log", on_error="skip", labelled=True)))
    np.testing.assert_array_equal(rows.index, np.setdiff1d(np.arange(3000), [9, 2499]))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block", [40, logs.BLOCK])
def test_a_lone_quote_that_joins_rows_is_refused(monkeypatch, tmp_path, end, block):
    monkeypatch.setattr(logs, "BLOCK", block)
    lines = [
        'y,town,"of\nKöln"',
        '1,"say ""hi""",x',
        '0,"two\nlines",x',
        '0,a "b",x',
        '0,"a" b,x',
        '1,"x,x',
        '0,O"Brian,x',
        "1,x,x",
    ]
    path = tmp_path / "log"
    path.write_text(end.join(lines) + end)
    fault = 'row 6: found a quote that begins a cell and is closed some lines later .*"a ""b"" c" for a "b" c'
    with pytest.raises(RequestError, match=f"^{path} cannot be read as csv: {fault}"):
        list(logs.open_log(path).batches())
    columns = [
        {"name": "y", "kind": "label"},
        {"name": "town", "kind": "category", "encoding": {"type": "hash", "buckets": 9}},
    ]
    with pytest.raises(RequestError, match=fault):
        list(Features(Schema.from_json({"columns": columns})).read([path], on_error="skip"))


def test_one_tower_leaves_the_columns_of_the_other_missing(monkeypatch, tmp_path):
    of_user = ("user", "a", "mean")
    towers = {name: "user" if name in of_user else "item" for name in KINDS if KINDS[name] in FEATURES}
    columns = [spec | ({"tower": towers[spec["name"]]} if spec["name"] in towers else {}) for spec in COLUMNS]
    reader = Features(Schema.from_json({"columns": columns}))
    path = tmp_path / "log"
    path.write_bytes(regular(50))
    for tower in ("user", "item"):
        quick = next(reader.read(path, tower=tower))
        with monkeypatch.context() as patch:
            patch.setattr(CsvReader, "of", lambda *arguments: None)
            plain = next(reader.read(path, tower=tower))
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(quick, name), getattr(plain, name))


@pytest.mark.parametrize("labelled", [False, True])
def test_rows_of_criteo(both, tmp_path, labelled):
    rng = np.random.default_rng(2)
    numbers = [
        {"name": f"I{i}", "kind": "number", "encoding": {"type": "log1p", "minimum": -1.0, "maximum": 9e4}}
        for i in range(1, 14)
    ]
    columns = [
        {"name": f"C{i}", "kind": "category", "encoding": {"type": "hash", "buckets": 50 + i}} for i in range(1, 27)
    ]
    reader = Features(Schema.from_json({"columns": [{"name": "label", "kind": "label"}, *numbers, *columns]}))
    lines = []
    for _ in range(3000):
        numbers = ["" if value % 5 == 0 else str(value) for value in rng.integers(-3, 20_000, 13).tolist()]
        values = ["" if value % 7 == 0 else f"{value:08x}" for value in rng.integers(0, 1 << 32, 26).tolist()]
        lines.append("\t".join([*["1"] * labelled, *numbers, *values]) + "\n")
    lines[2500] = lines[2500][:-9] + '"\r\n'
    results = both("".join(lines).encode(), reader, labelled, 50_000)
    assert results[0][1] == (3000, 26)
    (tmp_path / "log").write_text("".join(lines))
    assert open_log(tmp_path / "log").columns == (CRITEO if labelled else CRITEO[1:])


def test_a_torn_archive_is_refused_alike(both, tmp_path):
    content = gzip.compress(regular(2000))
    for part in (content[:-100], content + b"more"):
        results = both(part, features())
        assert "cannot be read" in results[0] or len(results) == 18


def test_what_does_not_fit_is_refused():
    new = extension.native().LogParser
    for size, sign in ((0, ","), (2, "ä"), (2, ",,"), (2, '"'), (2, "\n")):
        with pytest.raises(ValueError, match="expected"):
            new(size, sign, "quoted", [], 1, 1, 1)
    with pytest.raises(ValueError, match="found the form loose, expected quoted, unquoted or lines"):
        new(2, ",", "loose", [], 1, 1, 1)
    with pytest.raises(ValueError, match="no kernels for neon"):
        new(2, ",", "quoted", [], 1, 1, 1, "neon")
    with pytest.raises(ValueError, match="more than 8 bytes"):
        new(2, ",", "quoted", ["not a number"], 1, 1, 1)
    parser = new(2, ",", "quoted", [], 3, 1, 1)
    table = np.zeros(4, np.float32)
    room = np.zeros((5, 3), np.int32), np.zeros((5, 1), np.float32), np.zeros((5, 1), np.float32)
    for call in (
        lambda: parser.hashed(2, 0, 5),
        lambda: parser.hashed(0, 3, 5),
        lambda: parser.hashed(0, 0, 0),
        lambda: parser.hash_bucket(0, 3, 5, 0),
        lambda: parser.hash_bucket(0, 0, 0, 0),
        lambda: parser.vocabulary(5, 0, ["a"]),
        lambda: parser.hashed_list(0, 1, 5, 3, "|", False, -1),
        lambda: parser.hashed_list(0, 0, 5, 0, "|", False, -1),
        lambda: parser.vocabulary_list(0, 0, ["a"], 3, "|", False, 1),
        lambda: parser.vocabulary_list(0, 0, ["a"], 3, "||", False, 0),
        lambda: parser.number(0, 1, -1, "log1p", 0, 1, 0, table),
        lambda: parser.number(0, 0, 1, "log1p", 0, 1, 0, table),
        lambda: parser.real(0, "year"),
        lambda: parser.real(2, "s"),
        lambda: parser.parse(np.zeros(100, np.uint8), 37, *room),
        lambda: parser.parse(np.zeros(10, np.uint8), 11, *room),
        lambda: parser.parse(np.zeros(100, np.uint8), 36, room[0][:, :2].copy(), *room[1:]),
        lambda: parser.parse(np.zeros(100, np.uint8), 36, *room[:2], room[2][:4]),
    ):
        with pytest.raises(ValueError, match="expected|outside|found"):
            call()
