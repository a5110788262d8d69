"""The engine native for image classifiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import unzipped
from pipelines.engines import catalog
from pipelines.engines.native import images
from pipelines.engines.session import BatchError
from pipelines.kernels import extension

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
    assert {each.precision for each in native[1].executed(batch)} == {"u8"}
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


def test_a_wrong_batch_and_a_graph_without_a_form_are_refused(tmp_path: Path) -> None:
    session = catalog.load(INT8, "native")
    with pytest.raises(BatchError, match=r"expected image uint8 \[n, 3, 64, 64\]"):
        session.run({"image": np.zeros((1, 3, 32, 32), np.uint8)})
    half = tmp_path / "fp16.onnx"
    half.write_bytes(unzipped(INT8.with_name("fp16.onnx").read_bytes()))
    with pytest.raises(RequestError, match=r"the operator image.float \(Cast\) has no native form"):
        catalog.load(half, "native")
    assert "reason" in images.form(half)
    assert images.form(INT8)["steps"]["Convolution"] == 28


def test_a_packed_program_of_an_unknown_step_is_named_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = replace(images.packed(INT8), calls=(("absent", ()),))
    monkeypatch.setattr(images, "packed", lambda _: packed)
    with pytest.raises(RequestError, match=r"damaged: .*absent"):
        images.ImageSession(INT8, 1)


def test_a_packed_program_of_another_result_shape_is_named_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = replace(images.packed(INT8), result_shape=(0,))
    monkeypatch.setattr(images, "packed", lambda _: packed)
    session = images.ImageSession(INT8, 1)
    with pytest.raises(RequestError, match=r"damaged: .*reshape"):
        session.run({"image": np.zeros((1, 3, 64, 64), np.uint8)})
