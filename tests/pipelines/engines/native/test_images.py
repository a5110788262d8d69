"""The engine native for image classifiers."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.qdq_graphs import Graph, results

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import unzipped
from pipelines.engines import catalog
from pipelines.engines.native import images, prepared
from pipelines.engines.session import BatchError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images.native import PackedProgram

INT8 = Path(zoo.__file__).parent / "weights" / "mobilenet-v1-cifar10" / "int8.onnx"
pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))


def test_a_quantized_classifier_opens_and_agrees_with_onnxruntime() -> None:
    batch = {"image": np.random.default_rng(0).integers(0, 256, (5, 3, 64, 64), dtype=np.uint8)}
    native = {threads: catalog.load(INT8, "native", threads) for threads in (1, 2)}
    wanted = catalog.load(INT8, "onnxruntime").run(batch)
    for session in native.values():
        np.testing.assert_array_equal(session.run(batch)["logits"], wanted["logits"])
        assert session.run({"image": batch["image"][:0]})["logits"].shape == (0, 10)
    assert {operator.precision for operator in native[1].executed(batch)} == {"u8"}
    assert native[1].inputs["image"].shape == (None, 3, 64, 64)


def test_its_packed_weights_are_kept_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = images.packed(INT8)
    monkeypatch.setattr(images, "store", lambda *_: pytest.fail("made twice"))
    again = images.packed(INT8)
    assert [method for method, _ in first.calls] == [method for method, _ in again.calls]
    (file,) = (tmp_path / "home" / "derived").glob("*.zoo")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RequestError, match="not readable"):
        images.program_file.load(file, images.CLASSES, images.VERSION)


def test_a_prepared_program_is_used_for_its_file_and_version_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(INT8, tmp_path))
    batch = {"image": np.zeros((1, 3, 64, 64), np.uint8)}
    made = images.prepare(path, batch)
    assert made == tmp_path / f"int8.{extension.isas()[0]}.zoo"
    content, read = made.read_bytes(), functools.partial(prepared.load, path, images.VERSION)
    assert isinstance(read().program, PackedProgram) and prepared.load(path, images.VERSION + 1) is None
    os.utime(path, (0, 0))  # a copy
    assert read() is not None
    for damaged in (content[: len(content) // 2], content[:4], content.replace(b"origin", b"absent")):
        made.write_bytes(damaged)
        assert read() is None
        assert catalog.load(path, "native").run(batch)["logits"].shape == (1, 10)
    made.write_bytes(content)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert read() is None
    monkeypatch.setattr(prepared, "save", lambda *_: pytest.fail("saved"))
    assert images.prepare(Path(shutil.copy(INT8.with_name("card.json"), tmp_path / "half.onnx")), batch) is None


def test_a_wrong_batch_and_a_graph_without_a_form_are_refused(tmp_path: Path) -> None:
    session = catalog.load(INT8, "native")
    with pytest.raises(BatchError, match=r"expected image uint8 \[n, 3, 64, 64\]"):
        session.run({"image": np.zeros((1, 3, 32, 32), np.uint8)})
    half = tmp_path / "fp16.onnx"
    half.write_bytes(unzipped(INT8.with_name("fp16.onnx").read_bytes()))
    with pytest.raises(RequestError, match=r"the operator image.float \(Cast\) has no native form"):
        catalog.load(half, "native")
    assert "reason" in images.form(half)
    model = io.load(INT8)
    weight = next(iter(model.graph.initializers.values()))
    model.graph.outputs.append(weight)
    io.save(model, tmp_path / "constant.onnx")
    assert (
        images.form(tmp_path / "constant.onnx")["reason"]
        == f"the output {weight.name} is a constant, which no native step computes"
    )
    assert images.form(INT8)["steps"]["Convolution"] == 28


def test_a_packed_program_of_an_unknown_step_is_named_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = replace(images.packed(INT8), calls=(("absent", ()),))
    monkeypatch.setattr(images, "packed", lambda *_: packed)
    with pytest.raises(RequestError, match=r"damaged: .*absent"):
        images.ImageSession(INT8, 1)


def test_a_packed_program_of_another_result_shape_is_named_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = replace(images.packed(INT8), result_shape=(0,))
    monkeypatch.setattr(images, "packed", lambda *_: packed)
    session = images.ImageSession(INT8, 1)
    with pytest.raises(RequestError, match=r"damaged: .*reshape"):
        session.run({"image": np.zeros((1, 3, 64, 64), np.uint8)})


def _free(path: Path, remainder: bool) -> tuple[Path, np.random.Generator]:
    """A network of free height and width, whose Resize and Reshape compute their sizes."""
    g = Graph()
    x = g.quantize("image", 0.02, 120)
    large = g.quantize(g.layer("Conv", x, (32, 3, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.1, 120)
    small = g.add("MaxPool", [large], kernel_shape=[2, 2], strides=[2, 2])
    small = g.quantize(g.layer("Conv", small, (32, 32, 1, 1), 0.1), 0.1, 120)
    ends = [g.constant(np.array(end)) for end in ([0], [2], [4])]
    channels = g.add("Slice", [g.add("Shape", [small]), ends[0], ends[1]])
    sizes = g.add("Concat", [channels, g.add("Slice", [g.add("Shape", [large]), ends[1], ends[2]])], axis=0)
    up = g.add("Resize", [small, "", "", sizes], mode="nearest", coordinate_transformation_mode="asymmetric")
    out = g.quantize(g.add("Concat", [large, g.quantize(up, 0.1, 120)], axis=1), 0.1, 120)
    if remainder:
        rows = g.add(
            "Concat", [g.add("Slice", [g.add("Shape", [out]), ends[0], ends[1]]), g.constant(np.array([-1]))], axis=0
        )
        out = g.add("Reshape", [g.add("LRN", [out], size=3), rows])
        g.ranks[out] = 3
    return g.save(path, [3, "h", "w"], out), g.rng  # type: ignore[list-item]


@pytest.mark.parametrize("remainder", [False, True])
def test_a_network_of_free_sizes_has_a_program_for_each_of_the_first_sizes(
    remainder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = _free(tmp_path / "m.onnx", remainder)
    monkeypatch.setattr(images, "SIZES", 2)
    form = images.form(path)
    assert form["steps"]["Resampling"] == 1 and ("LRN" in form.get("rest", {})) == remainder
    session = catalog.load(path, "native")
    assert session.inputs["image"].shape == (None, 3, None, None)
    for sizes, native in (((8, 6), True), ((12, 10), True), ((8, 6), True), ((16, 16), False)):
        batch = {"image": rng.normal(0, 1, (2, 3, *sizes)).astype(np.float32)}
        (output,), wanted = session.run(batch).values(), results(path, batch["image"])
        np.testing.assert_allclose(output, wanted, rtol=1e-6)
        assert any("convolution" in operator.type for operator in session.executed(batch)) == native
    monkeypatch.setattr(images, "_fixed", None)  # that its sizes are free is kept in the cache
    with pytest.raises(images.FreeSizesError, match="are free"):
        images.packed(path)


@pytest.mark.parametrize("batch", ["n", None])
def test_a_network_of_free_sizes_that_no_nominal_size_fits_has_parts(tmp_path: Path, batch: str | None) -> None:
    """As recognizers of text lines, exported with free height, whose layers leave one row of 8."""
    g = Graph()
    x = g.quantize("image", 0.02, 120)
    layer = g.layer("Conv", x, (32, 3, 3, 3), 0.02, pads=[1, 1, 1, 1])
    foreign = g.quantize(g.add("LRN", [layer], size=3), 0.02, 120)
    wide = g.quantize(g.layer("Conv", foreign, (64, 32, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.02, 120)
    row = g.add("Squeeze", [g.add("MaxPool", [wide], kernel_shape=[8, 1]), g.constant(np.array([2]))])
    g.ranks[row] = 3
    path = g.save(tmp_path / "m.onnx", [3, "?", "w"], row, batch=batch)  # type: ignore[list-item]
    session = catalog.load(path, "native")
    image = g.rng.normal(0, 1, (2, 3, 8, 12)).astype(np.float32)
    (output,) = session.run({"image": image}).values()
    np.testing.assert_allclose(output, results(path, image), rtol=1e-6)
    types = [operator.type for operator in session.executed({"image": image})]
    assert any("convolution" in kind for kind in types) and "LRN" in types


def test_the_prepared_program_of_a_network_of_free_sizes_is_for_those_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = _free(tmp_path / "m.onnx", remainder=True)
    batches = [{"image": rng.normal(0, 1, (2, 3, *sizes)).astype(np.float32)} for sizes in ((8, 6), (12, 10))]
    assert images.prepare(path, batches[0]) == prepared.path_of(path)
    mapped = []
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(images, "_mapped", lambda model, map_=images._mapped: mapped.append(model) or map_(model))
    session = catalog.load(path, "native")
    for batch, count in zip(batches, (0, 1), strict=True):
        np.testing.assert_allclose(*session.run(batch).values(), results(path, batch["image"]), rtol=1e-6)
        assert len(mapped) == count


def test_sequences_of_free_length_have_a_program_for_each_length(tmp_path: Path) -> None:
    """As audio networks, [n, C, T], whose convolutions `zoo quantize` makes two-dimensional."""
    g = Graph()
    rows = g.add("Unsqueeze", [g.quantize("image", 0.02, 120), g.constant(np.array([2]))])
    x = g.quantize(g.layer("Conv", rows, (32, 16, 1, 3), 0.05, pads=[0, 1, 0, 1]), 0.05, 120)
    x = g.quantize(g.layer("Conv", x, (32, 32, 1, 5), 0.05, strides=[1, 2]), 0.05, 120)
    out = g.add("Squeeze", [x, g.constant(np.array([2]))])
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", [16, "t"], out)  # type: ignore[list-item]
    session = catalog.load(path, "native")
    for length in (40, 24, 40):
        batch = {"image": g.rng.normal(0, 1, (2, 16, length)).astype(np.float32)}
        np.testing.assert_allclose(session.run(batch)[out], results(path, batch["image"]), rtol=1e-6)
        assert any("convolution" in operator.type for operator in session.executed(batch))


def test_a_size_with_wrong_results_runs_in_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = _free(tmp_path / "m.onnx", remainder=False)

    def wrong(*_: object) -> None:
        raise images.WrongResultsError("wrong; use onnxruntime")

    monkeypatch.setattr(images.ImageSession, "run", wrong)
    batch = {"image": np.zeros((1, 3, 8, 6), np.float32)}
    session = images.FreeSizeSession(path, 1)
    for _ in range(2):
        (output,) = session.run(batch).values()
        np.testing.assert_array_equal(output, results(path, batch["image"]))
