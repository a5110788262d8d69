"""Samples in .npz files, and what is none."""

import zlib

import numpy as np
import pytest
from helpers.three_lines import samples

from pipelines.core.errors import RequestError
from pipelines.models.npz import read_npz, write_npz


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_written_and_read(tmp_path, compressed):
    x, i = samples(10), np.arange(10)
    write_npz(tmp_path / "s.npz", {"x": x, "i": i}, compressed=compressed)
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
    batches, total = read_npz(tmp_path / "s.npz", 4)
    batches = list(batches)
    assert total == 10 and [len(batch["x"]) for batch in batches] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), x)
    np.testing.assert_array_equal(np.concatenate([batch["i"] for batch in batches]), i)


def archive(path, **arrays):
    np.savez(path, **arrays)


def damaged(path):
    np.savez_compressed(path, x=samples(1000))
    body = bytearray(path.read_bytes())
    body[500:900] = bytes(400)
    path.write_bytes(body)


def member(path):
    import zipfile

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "hello")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: path.write_bytes(b""), "cannot read"),
        (lambda path: path.write_bytes(b"x,y\n1,2\n"), "cannot read"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "cannot read"),
        (lambda path: path.write_bytes(zlib.compress(b"x" * 99)), "cannot read"),
        (damaged, "cannot read"),
        (lambda path: path.open("wb").write(b"") or np.save(path.open("wb"), samples()), "cannot read"),
        (lambda path: archive(path, x=np.array([{}], dtype=object)), "cannot read"),
        (member, "holds arrays of"),
        (lambda path: archive(path), "holds arrays of nothing samples"),
        (lambda path: archive(path, x=samples(3), y=samples(4)), r"holds arrays of \{'x': 3, 'y': 4\} samples"),
        (lambda path: archive(path, x=samples(0)), r"holds arrays of \{'x': 0\} samples"),
        (lambda path: archive(path, x=np.float32(1)), r"holds arrays of \{'x': 0\} samples"),
    ],
    ids=[
        "none",
        "folder",
        "empty",
        "csv",
        "cut",
        "zlib",
        "damaged",
        "npy",
        "objects",
        "text",
        "nothing",
        "lengths",
        "no samples",
        "scalar",
    ],
)
def test_what_is_no_npz_of_samples(tmp_path, make, what):
    path = tmp_path / "s.npz"
    make(path)
    with pytest.raises(RequestError, match=what) as caught:
        read_npz(path)
    assert "s.npz" in str(caught.value) and "\n" not in str(caught.value)
