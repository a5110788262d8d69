"""Large weights apart from the protobuf: the same bytes, the same model, the same results, and no copies."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.engines import stock
from pipelines.graph import io, large_weights, reference_session
from pipelines.quantization.qdq import scales

TEXT = """
<ir_version: 9, opset_import: ["" : 17], doc_string: "kept out">
tables (int64[n] i, float[n, 4] x) => (float[n, 4] y)
<float[4] small = {1, 2, 3, 4}, float[50, 4] table, int8[50, 4] integers, float[4, 4] matrix>
{
    rows = Gather(table, i)
    bytes = Gather(integers, i)
    floats = Cast<to = 1>(bytes)
    added = Add(rows, floats)
    moved = MatMul(added, matrix)
    scaled = Mul(moved, small)
    y = Add(scaled, x)
}
"""
SHAPES = {"table": (50, 4), "integers": (50, 4), "matrix": (4, 4)}


def model() -> ir.Model:
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(TEXT)
    del proto.graph.value_info[:]
    for name, shape in SHAPES.items():
        kind = np.int8 if name == "integers" else np.float32
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array((10 * random.normal(size=shape)).astype(kind), name)
        )
    return ir.from_proto(proto)


@pytest.fixture(params=[1, 100, 1 << 40])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(large_weights, "LARGE_BYTES", request.param)
    return int(request.param)


def test_files_have_the_bytes_of_the_whole_protobuf(least: int, tmp_path: Path) -> None:
    made = model()
    path = io.save(made, tmp_path / "model.onnx")
    assert path.read_bytes() == io.serialized(made)
    again = io.load(path)
    assert io.digest(again) == io.digest(made)
    for name in SHAPES:
        array, expected = (net.graph.initializers[name].const_value for net in (again, made))
        assert array is not None and expected is not None
        np.testing.assert_array_equal(array.numpy(), expected.numpy())
        assert tuple(again.graph.initializers[name].shape or ()) == SHAPES[name]
    assert io.save(again, tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_sessions_read_tables_where_they_lie(least: int) -> None:
    made = model()
    opened = reference_session.session(made, "the test needs")
    assert [value.name for value in opened.get_inputs()] == ["i", "x"]
    feeds = {"i": np.array([3, 49, 3]), "x": np.ones((3, 4), np.float32)}
    (output,) = reference_session.run(opened, feeds)
    arrays = {name: made.graph.initializers[name].const_value.numpy() for name in SHAPES}  # type: ignore[union-attr]
    rows = arrays["table"][feeds["i"]] + arrays["integers"][feeds["i"]]
    np.testing.assert_allclose(output, rows @ arrays["matrix"] * [1, 2, 3, 4] + 1, rtol=1e-5)
    assert large_weights.lookup_tables(made.graph) == ({"table", "integers"} if least <= 200 else set())


def test_damaged_files_get_one_line(least: int, tmp_path: Path) -> None:
    content = io.save(model(), tmp_path / "model.onnx").read_bytes()
    random = np.random.default_rng(1)
    for offset in random.integers(1, len(content), 40).tolist():
        (tmp_path / "short.onnx").write_bytes(content[:offset])
        with pytest.raises(RequestError, match="is not a (readable|valid) ONNX model"):
            io.load(tmp_path / "short.onnx")
        changed = bytearray(content)
        changed[offset] ^= 1 << int(random.integers(8))
        (tmp_path / "changed.onnx").write_bytes(changed)
        try:
            io.load(tmp_path / "changed.onnx")
        except RequestError as error:
            assert "ONNX model" in str(error)


@pytest.mark.parametrize("steps", [False, True])
def test_tables_are_quantized_in_blocks_as_at_once(steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    table = random.normal(size=(1000, 32)).astype(np.float32)
    if steps:  # that was int8 before
        table = (random.integers(-127, 128, (1000, 32)) * random.random((1000, 1))).astype(np.float32)
    table[7] = 0
    whole = scales.weight_qparams(table, 0)
    monkeypatch.setattr(scales, "BLOCK", 4096)
    for array, expected in zip(scales.weight_qparams(table, 0), whole, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype


PEAK = """
import resource, sys
import numpy as np, onnx_ir as ir
from pipelines.graph import io, reference_session
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
model = io.load(sys.argv[1])
io.digest(model)
io.save(model, sys.argv[1] + ".onnx")
opened = reference_session.session(model, "it needs")
reference_session.run(opened, {"i": np.array([3]), "x": np.ones((1, 4), np.float32)})
print(peak() - before)
"""


def test_a_table_is_in_memory_once(tmp_path: Path) -> None:
    made, megabytes = model(), 128
    value = made.graph.initializers["table"]
    value.const_value = ir.tensor(np.ones((megabytes << 16, 4), np.float32), name="table")
    value.shape = value.const_value.shape
    path = io.save(made, tmp_path / "model.onnx")
    command = [sys.executable, "-c", PEAK, str(path)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 1.6 * megabytes, f"{grown} MB for a table of {megabytes} MB"


def test_stacked_arrays_are_written_as_joined_ones(least: int, tmp_path: Path) -> None:
    joined, stacked = model(), model()
    table = stacked.graph.initializers["table"]
    assert table.const_value is not None
    array = table.const_value.numpy()
    table.const_value = large_weights.StackedTensor([array[:7], array[7:7], array[7:]], "table")
    paths = [io.save(net, tmp_path / f"{number}.onnx") for number, net in enumerate((joined, stacked))]
    assert paths[0].read_bytes() == paths[1].read_bytes() == io.serialized(stacked)
    assert io.digest(joined) == io.digest(stacked)


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("least", [0, 1 << 30])
def test_weights_in_a_file_with_several_links_are_read(tmp_path, monkeypatch, link, least):
    """As in the caches of the Hugging Face Hub (symbolic links), and after cp -al; onnx refuses both."""
    monkeypatch.setattr(large_weights, "LARGE_BYTES", least)
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 4] y) { y = MatMul(x, W) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    onnx.save(proto, blobs / "m.onnx", save_as_external_data=True, location="m.onnx_data", size_threshold=0)
    for name in ("m.onnx", "m.onnx_data"):
        link(blobs / name, snapshot / name)
    model = io.load(snapshot / "m.onnx")
    assert np.array_equal(model.graph.initializers["W"].const_value.numpy(), weight)
    x = np.ones((2, 3), np.float32)
    for engine in stock.available():
        (output,) = stock.open_session(snapshot / "m.onnx", engine).run({"x": x}).values()
        assert np.array_equal(output, x @ weight)
    (blobs / "m.onnx_data").write_bytes(b"short")
    with pytest.raises(RequestError, match="which has 5 bytes, expected 48 bytes there"):
        io.load(snapshot / "m.onnx")


@pytest.mark.parametrize("engine", stock.available())
def test_a_damaged_file_behind_a_link_is_refused_in_one_line(tmp_path, engine):
    (tmp_path / "blob").write_bytes(b"<html>")
    (tmp_path / "m.onnx").symlink_to("blob")
    with pytest.raises(RequestError, match=f"{engine} cannot load .*m.onnx"):
        stock.open_session(tmp_path / "m.onnx", engine)


def test_links_to_files_outside_the_folder_are_refused(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Add(x, W) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "W"))
    (tmp_path / "in").mkdir()
    onnx.save(proto, tmp_path / "in" / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    os.link(tmp_path / "in" / "w", tmp_path / "w")
    loaded = onnx.load(tmp_path / "in" / "m.onnx", load_external_data=False)
    loaded.graph.initializer[0].external_data[0].value = "../w"
    onnx.save(loaded, tmp_path / "in" / "m.onnx")
    with pytest.raises(RequestError, match=r"its weights are in \.\./w, expected a file in its folder"):
        io.load(tmp_path / "in" / "m.onnx")


def test_mapped_weights_with_several_links_are_copied(tmp_path):
    x = ir.Value(name="x", shape=ir.Shape(["N", 512]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.Value(name="W", const_value=ir.Tensor(np.ones((512, 1024), np.float32), name="W"))
    node = ir.node("MatMul", [x, weight])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 17}, name="g")
    path = io.save_mapped(ir.Model(graph, ir_version=8), tmp_path / "m.onnx")
    os.link(files.mapped(path), tmp_path / "other")
    weights = io.load_mapped(path).graph.initializers["W"].const_value
    assert weights.numpy().sum() == 512 * 1024 and (tmp_path / "other").stat().st_nlink == 1


def test_copies_of_folders_have_weights_of_their_own(tmp_path):
    for name in ("m.onnx", "m.onnx.data"):
        (tmp_path / name).write_bytes(b"x")
        files.link_or_copy(tmp_path / name, tmp_path / f"copy-{name}")
    assert (tmp_path / "m.onnx").stat().st_nlink == 2 and (tmp_path / "m.onnx.data").stat().st_nlink == 1
