"""One opener of text files: plain and gzip by content, stdin, and one line for what cannot be read."""

import gzip
import io
import types

import pytest

from pipelines.core.errors import RequestError
from pipelines.data import text_files
from pipelines.data.text_files import STDIN, open_text, read_lines

TEXT = "\ufefffirst\r\nsecond line\n\nlast".encode()
LINES = ["first", "second line", "", "last"]


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz", "lines"])
@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, lambda text: gzip.compress(text[:9]) + gzip.compress(text[9:])],
    ids=["plain", "gzip", "members"],
)
def test_gzip_is_known_by_its_content(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(TEXT))
    assert list(read_lines(path)) == LINES
    with open_text(path) as file:
        assert file.read() == TEXT


def test_zero_padding_follows_a_gzip_member(tmp_path):
    (tmp_path / "padded").write_bytes(gzip.compress(TEXT) + bytes(100) + gzip.compress(b"!") + bytes(3))
    assert list(read_lines(tmp_path / "padded")) == [*LINES[:-1], "last!"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_stdin_stays_open(monkeypatch, pack):
    buffer = io.BytesIO(pack(TEXT))
    monkeypatch.setattr(text_files.sys, "stdin", types.SimpleNamespace(buffer=buffer))
    assert list(read_lines(STDIN)) == LINES and not buffer.closed


def test_a_line_that_is_not_utf_8_is_none(tmp_path):
    (tmp_path / "t").write_bytes(b"a\n\xff\nb")
    assert list(read_lines(tmp_path / "t")) == ["a", None, "b"]
    assert list(read_lines(tmp_path / "t", "surrogateescape")) == ["a", "\udcff", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(TEXT * 100)[:-20], "cut short"),
        (gzip.compress(TEXT)[:10] + b"\xff" * 200, "cannot read .*decompressing"),
        ("text\n".encode("utf-16"), "is UTF-16; expected UTF-8"),
        (
            gzip.compress(b"rows.csv".ljust(257, b"\0") + b"ustar".ljust(255, b"\0") + TEXT),
            "a tar archive, expected text",
        ),
    ],
    ids=["cut", "damaged", "UTF-16", "tar"],
)
def test_what_cannot_be_read_is_one_line(tmp_path, content, message):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(RequestError, match=message) as error:
        list(read_lines(tmp_path / "t"))
    assert "\n" not in str(error.value) and str(tmp_path / "t") in str(error.value)


def test_a_missing_file_and_a_closed_stdin(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="cannot read .*: No such file"):
        list(read_lines(tmp_path / "none"))
    monkeypatch.setattr(text_files.sys, "stdin", None)
    with pytest.raises(RequestError, match="stdin is closed"):
        list(read_lines(STDIN))
