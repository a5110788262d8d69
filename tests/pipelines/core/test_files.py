"""Atomic writes, JSON and digests of files."""

import errno
import gzip
import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from pipelines.core import files
from pipelines.core.errors import RequestError, ZooError


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "er" / "out.csv.gz"
    with files.replacing(target) as temporary:
        temporary.write_text("half")
        assert not target.exists() and temporary.parent == target.parent and temporary.suffix == ".gz"
    assert target.read_text() == "half" and listing(target.parent) == ["out.csv.gz"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error), files.replacing(tmp_path / "out.txt") as temporary:
        temporary.write_text("half")
        raise error
    assert listing(tmp_path) == []


def test_a_failure_keeps_what_was_there(tmp_path):
    target = files.write_text(tmp_path / "out.txt", "old")
    with pytest.raises(ValueError), files.replacing(target) as temporary:
        temporary.write_text("new")
        raise ValueError
    assert target.read_text() == "old" and listing(tmp_path) == ["out.txt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        path = files.write_text(tmp_path / "out.txt", "x")
        assert os.umask(mask) == mask  # and the umask is as it was
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_relative_path_and_a_name_without_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.write_text("plain", "x") == Path("plain") and listing(tmp_path) == ["plain"]


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "out.txt", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(RequestError, match="cannot write .*; choose another output path$") as caught:
            files.write_text(path, "x")
        assert "\n" not in str(caught.value)
    assert listing(tmp_path) == ["file", "folder"]


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="a folder or a device"):
        files.write_text(pipe, "x")
    assert pipe.is_fifo() and listing(tmp_path) == ["pipe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_by_the_target(tmp_path):
    target = files.write_text(tmp_path / "out.txt", "old")
    with (
        pytest.raises(ZooError, match=r"cannot write .*/out\.txt: No space left on device; free space") as caught,
        files.replacing(target),
    ):
        Path("/dev/full").write_text("new")
    assert not isinstance(caught.value, RequestError) and caught.value.exit_code == 1
    assert target.read_text() == "old" and listing(tmp_path) == ["out.txt"]


def test_no_room_for_the_temporary_file(tmp_path, monkeypatch):
    def full(**where):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "elsewhere")

    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    with pytest.raises(files.DiskFull, match=r"cannot write .*/out\.txt: No space left"):
        files.write_text(tmp_path / "out.txt", "x")


def test_a_target_that_cannot_be_replaced_is_named(tmp_path, monkeypatch):
    def refuse(path, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(
        RequestError, match=r"cannot write .*/out\.txt: Operation not permitted; choose another output path$"
    ):
        files.write_text(tmp_path / "out.txt", "x")
    monkeypatch.setenv("ZOO_HOME", str(tmp_path))  # of huggingface_hub: a read-only cache; the output is not at fault
    with pytest.raises(RequestError, match="; set ZOO_HOME to a folder you may write$"):
        files.write_text(tmp_path / "out.txt", "x")
    assert listing(tmp_path) == []


def test_errors_of_other_files_pass(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"input\.txt"), files.replacing(tmp_path / "out.txt"):
        (tmp_path / "input.txt").read_text()
    assert listing(tmp_path) == []


def test_json_round_trip(tmp_path):
    value = {"z": [1, 0.1, None], "a": "ü"}
    path = files.write_json(tmp_path / "v.json", value)
    assert files.read_json(path) == value
    text = path.read_text(encoding="utf-8")
    assert list(json.loads(text)) == ["z", "a"] and "ü" in text and text.endswith("}\n")


def test_numbers_that_json_lacks_become_null(tmp_path):
    path = files.write_json(tmp_path / "v.json", {"a": [float("nan"), (float("-inf"), 1.5)], "b": {"c": float("inf")}})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": [None, [None, 1.5]], "b": {"c": None}}


def test_a_value_that_is_no_json_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "v.json", {"a": object()})
    assert listing(tmp_path) == []


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe{}", b"{} {}"])
def test_broken_json_is_named(tmp_path, body):
    (tmp_path / "v.json").write_bytes(body)
    with pytest.raises(RequestError, match="v.json is not valid JSON"):
        files.read_json(tmp_path / "v.json")


def test_missing_json_is_named(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(RequestError, match=f"cannot read {path}"):
            files.read_json(path)


def test_sha256(tmp_path):
    body = os.urandom(300_000)
    (tmp_path / "x").write_bytes(body)
    assert files.sha256(tmp_path / "x") == hashlib.sha256(body).hexdigest()


def test_bytes_and_copies_replace_a_file_whole(tmp_path):
    first, second = tmp_path / "new" / "a.bin", tmp_path / "b.bin"
    second.write_bytes(b"before")
    assert files.write_bytes(first, b"\x00after") == first and files.copy_file(first, second) == second
    assert second.read_bytes() == first.read_bytes() == b"\x00after"
    with pytest.raises(FileNotFoundError, match="missing"):
        files.copy_file(tmp_path / "missing", second)
    assert second.read_bytes() == b"\x00after" and sorted(path.name for path in tmp_path.iterdir()) == ["b.bin", "new"]


def test_json_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    packed = gzip.compress(b'{"a": 1}', mtime=0)
    path.write_bytes(packed)
    assert files.read_json(path) == {"a": 1} and files.unzipped_size(path) == 8
    for damaged in (packed[:-9], packed[:12] + b"?" + packed[13:]):
        path.write_bytes(damaged)
        with pytest.raises(RequestError, match=r"value\.json is damaged"):
            files.read_json(path)


def test_visible_files_follow_links_once(tmp_path):
    """Of torchvision and timm: the files of linked folders were left out."""
    folder, elsewhere = tmp_path / "photos", tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir(parents=True)
    for path in (elsewhere / "deep" / "b", elsewhere / "_c", folder / "a", folder / ".hidden" / "d"):
        path.touch()
    for name, target in {"broken": "gone", "self": "self", "z": elsewhere, "file": elsewhere / "_c"}.items():
        (folder / name).symlink_to(target)
    (elsewhere / "up").symlink_to(folder)
    expected = ["a", "file", "z/_c", "z/deep/b"]
    assert [str(path.relative_to(folder)) for path in files.visible_files(folder)] == expected
    assert [path.name for path in files.visible_files(folder, hidden="._")] == ["a", "file", "b"]
