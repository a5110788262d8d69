"""Delta files: the same model byte for byte, and one line for what is no delta of the model."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.deltas.application import apply, apply_in_place
from pipelines.deltas.delta import MANIFEST, model_digest, open_delta, write_delta


def model(folder: Path, seed: int) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    (folder / "card.json").write_text(f'{{\n"name": "m",\n"seed": {seed}\n}}\n')
    (folder / "int8.onnx").write_bytes(b"no graph" + np.random.default_rng(0).bytes(9000) + draw.bytes(9))
    (folder / "model.pt").write_bytes(draw.bytes(5000))
    (folder / "curve.png").write_bytes(draw.bytes(10))
    (folder / (f"only{seed}.txt")).write_text("text")
    return folder


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path, Path]:
    old, new = model(tmp_path / "old", 1), model(tmp_path / "new", 2)
    write_delta(old, new, tmp_path / "d.zoo", "toy", {"user": {"new": 1, "changed": 2, "evicted": 3, "rows": 9}})
    return old, new, tmp_path / "d.zoo"


def test_a_delta_gives_the_newer_model_byte_for_byte(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, file = made
    with open_delta(file) as delta:
        assert (delta.family, delta.rows, delta.removed) == ("toy", 3, ("only1.txt",))
        apply(delta, old, tmp_path / "target")
        assert model_digest(new) == model_digest(tmp_path / "target") == delta.digest
        rows = apply_in_place(delta, old, ["card.json", "int8.onnx"])
    assert rows == 0 and (old / "int8.onnx").read_bytes() == (new / "int8.onnx").read_bytes()
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names == {path.name for path in new.iterdir()} - {"curve.png"}
    assert all((tmp_path / "target" / name).read_bytes() == (new / name).read_bytes() for name in names)


def test_maps_of_a_folder_serve_several_deltas(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, file = made
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "int8.onnx").write_bytes(b"shorter")
    write_delta(new, old, tmp_path / "back.zoo", "toy")
    write_delta(old, tmp_path / "other", tmp_path / "third.zoo", "toy")
    target, maps = tmp_path / "target", dict[str, Any]()
    target.mkdir()
    (target / "int8.onnx").write_bytes((old / "int8.onnx").read_bytes())
    for name, expected in (("d.zoo", new), ("back.zoo", old), ("third.zoo", tmp_path / "other")):
        with open_delta(tmp_path / name) as delta:
            apply_in_place(delta, target, ["int8.onnx"], maps)
        assert (target / "int8.onnx").read_bytes() == (expected / "int8.onnx").read_bytes()
        assert list(maps) == ([] if name == "third.zoo" else ["int8.onnx"])
    with open_delta(file) as delta, pytest.raises(RequestError, match=r"d\.zoo does not fit int8\.onnx"):
        apply_in_place(delta, target, ["int8.onnx"], {"int8.onnx": np.zeros(9, np.uint8)})


def test_another_model_and_damaged_deltas_are_refused(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, new, file = made
    with open_delta(file) as delta, pytest.raises(RequestError, match=r"d\.zoo changes the model .*expected the model"):
        apply(delta, new, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    content = file.read_bytes()
    (tmp_path / "short.zoo").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.zoo").write_text("no delta")
    for name in ("short.zoo", "text.zoo", "none.zoo"):
        with pytest.raises(RequestError, match=f"{name}"), open_delta(tmp_path / name):
            pass


@pytest.mark.parametrize(
    ("key", "value"), [("format", "x"), ("version", 2), ("files", {"../x": {}}), ("files", None), ("parent", None)]
)
def test_manifests_that_are_not_understood(
    made: tuple[Path, Path, Path], tmp_path: Path, key: str, value: object
) -> None:
    with zipfile.ZipFile(made[2]) as archive:
        manifest = json.loads(archive.read(MANIFEST))
    with zipfile.ZipFile(tmp_path / "other.zoo", "w") as archive:
        archive.writestr(MANIFEST, json.dumps(manifest | {key: value} if value else {key: value}))
    with pytest.raises(RequestError, match=r"other\.zoo is no whole delta"), open_delta(tmp_path / "other.zoo"):
        pass


def test_a_changed_byte_of_a_delta_is_found(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, _, file = made
    content = bytearray(file.read_bytes())
    content[content.index(b"int8.onnx/data") + 40] ^= 1
    (tmp_path / "bad.zoo").write_bytes(content)
    with pytest.raises(RequestError, match="no whole delta"), open_delta(tmp_path / "bad.zoo") as delta:
        apply(delta, old, tmp_path / "target")


def test_a_file_that_is_not_the_parents_is_named(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, _, file = made
    (old / "model.pt").write_bytes(b"another")
    with pytest.raises(RequestError, match=r"model\.pt is another file"), open_delta(file) as delta:
        apply(delta, old, tmp_path / "target")
