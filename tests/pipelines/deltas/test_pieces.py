"""Differences of files: the newer file byte for byte, and few bytes for rows and lines that moved."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pipelines.core.errors import RequestError
from pipelines.deltas import pieces
from pipelines.deltas.pieces import FileDelta, Piece, difference
from pipelines.deltas.tables import tables_of


def table(rows: int, seed: int = 0, width: int = 16) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def save(path: Path, *tables: NDArray[np.float32], outside: bool = False) -> Path:
    names = [f"table{number}" for number in range(len(tables))]
    nodes = [helper.make_node("Gather", [name, "ids"], [f"{name}.rows"]) for name in names]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info(f"{name}.rows", TensorProto.FLOAT, ["n", None]) for name in names],
        [numpy_helper.from_array(array, name) for array, name in zip(tables, names, strict=True)],
    )
    options = {"save_as_external_data": True, "location": f"{path.name}.data"} if outside else {}
    onnx.save(helper.make_model(graph), path, **options)
    return path


def again(made: FileDelta, old: Path, size: int) -> bytes:
    new = np.zeros(size, np.uint8)
    data = np.concatenate([np.zeros(0, np.uint8), *made.data])
    indices = np.concatenate([np.zeros(0, np.int64), *made.indices])
    before = np.frombuffer(old.read_bytes() if old.is_file() else b"", np.uint8)
    pieces.write(made.pieces, before, new, data, indices)
    if before.size and pieces.keeps_places(made.pieces, len(before)):
        content = before.copy()
        pieces.change(made.pieces, content, data, indices)
        assert content.tobytes() == new.tobytes()
    return new.tobytes()


def test_changed_rows_alone_are_in_the_delta_and_keep_their_places(tmp_path: Path) -> None:
    before, after = table(1000), table(1000)
    after[[3, 500, 999]] += 1
    old, new = save(tmp_path / "old.onnx", before), save(tmp_path / "new.onnx", after)
    made = difference(old, new)
    assert again(made, old, new.stat().st_size) == new.read_bytes()
    assert sum(piece.data for piece in made.pieces) == 3 * 64
    assert pieces.keeps_places(made.pieces, old.stat().st_size)


@pytest.mark.parametrize("outside", [False, True])
def test_rows_behind_new_and_evicted_ones_are_copied(tmp_path: Path, outside: bool) -> None:
    before = table(2000)
    after = np.concatenate([before[:700], before[750:], table(40, seed=1)])
    folders = tmp_path / "old", tmp_path / "new"
    for folder, own in zip(folders, (before, after), strict=True):
        folder.mkdir()
        save(folder / "model.onnx", own, table(100, 2), outside=outside)
    for name in ("model.onnx", *(["model.onnx.data"] if outside else [])):
        old, new = (folder / name for folder in folders)
        made = difference(old, new)
        assert again(made, old, new.stat().st_size) == new.read_bytes()
        assert sum(piece.data + 8 * piece.indices for piece in made.pieces) < 40 * 64 + 2000


def test_all_rows_moved(tmp_path: Path) -> None:
    before = table(500)
    old, new = save(tmp_path / "old.onnx", before), save(tmp_path / "new.onnx", before[::-1].copy())
    made = difference(old, new)
    assert again(made, old, new.stat().st_size) == new.read_bytes()
    assert sum(piece.data for piece in made.pieces) == 0 and not pieces.keeps_places(made.pieces, old.stat().st_size)


@pytest.mark.parametrize(("before", "after"), [(None, 100), (100, 0), (0, 100), (7, 9), (4000, 4100)])
def test_files_of_any_bytes(tmp_path: Path, before: int | None, after: int) -> None:
    old, new, draw = tmp_path / "old.bin", tmp_path / "new.bin", np.random.default_rng(0)
    if before is not None:
        old.write_bytes(draw.bytes(before))
    new.write_bytes(draw.bytes(after))
    assert again(difference(old, new), old, after) == new.read_bytes()


def test_lines_of_text_that_are_there_are_copied(tmp_path: Path) -> None:
    lines = [f'      "value {number}",\n' for number in range(5000)]
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("".join(lines))
    new.write_text("".join([*lines[:100], *lines[101:], "another\n", *lines[5:8], "end"]))
    made = difference(old, new)
    assert again(made, old, new.stat().st_size) == new.read_bytes()
    assert sum(piece.data for piece in made.pieces) == len("another\nend")


def test_tables_of_a_file_are_its_large_initializers(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", table(1000), table(3), table(100))
    tables = tables_of(path)
    assert [(info.name, info.rows, info.row_bytes) for info in tables] == [("table0", 1000, 64), ("table2", 100, 64)]
    assert path.read_bytes()[tables[0].offset : tables[0].end] == table(1000).tobytes()
    assert tables_of(tmp_path / "none.onnx") == [] and tables_of(tmp_path / "model.txt") == []


def test_pieces_that_do_not_fit_are_refused() -> None:
    empty, numbers = np.zeros(0, np.uint8), np.zeros(0, np.int64)
    with pytest.raises(RequestError, match="do not fit"):
        pieces.write([Piece("data", 4)], empty, np.zeros(4, np.uint8), np.zeros(3, np.uint8), numbers)
    with pytest.raises(RequestError, match="do not fit"):
        pieces.change([Piece("copy", 4, 0)], np.zeros(5, np.uint8), empty, numbers)
