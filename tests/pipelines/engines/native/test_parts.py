"""Graphs in parts: native regions, and operators without a native form in ONNX Runtime between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.qdq_graphs import Graph, linear
from helpers.token_graphs import deformable_attention
from onnx import TensorProto, helper

from pipelines.core.errors import RequestError
from pipelines.engines import catalog
from pipelines.engines.native import images, validation
from pipelines.engines.session import BatchError
from pipelines.kernels import extension
from pipelines.kernels.images.parts.region import Region

SHAPE = [3, 12, 16]
HEADS = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])  # orders of axes of queries, keys and values
pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))


def layer(g: Graph, x: str, inputs: int, outputs: int = 32, scale: float = 0.1) -> str:
    """A quantized convolution with Relu."""
    made = g.layer("Conv", x, (outputs, inputs, 3, 3), scale, pads=[1, 1, 1, 1])
    return g.quantize(g.add("Relu", [made]), 0.1, 0)


def agree(path: Path, batch: Any, step: float, count: int = 3) -> list[str]:
    """Compares with onnxruntime, up to a step of quantization, on one thread and on two; returns the parts."""
    wanted = catalog.load(path, "onnxruntime").run(batch)
    outputs = [catalog.load(path, "native", threads).run(batch) for threads in (1, 2)]
    for name, array in wanted.items():
        np.testing.assert_array_equal(outputs[0][name], outputs[1][name])
        assert outputs[0][name].dtype == array.dtype
        assert np.abs(outputs[0][name] - array).max() <= step * 1.01
        assert np.mean(outputs[0][name] != array) < 0.01
    parts: list[str] = images.form(path).get("parts", [])
    return parts


def batch_of(count: int = 3) -> dict[str, Any]:
    return {"image": np.random.default_rng(1).normal(0, 1, (count, *SHAPE)).astype(np.float32)}


def odd_middle(g: Graph) -> tuple[str, str]:
    """(a map before an operator without a native form, the map behind it)."""
    x = layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02)
    high = layer(g, x, 32)
    return high, layer(g, g.quantize(g.add("LRN", [high], size=3), 0.1, 0), 32)


def test_an_operator_between_layers_runs_in_onnxruntime(tmp_path: Path) -> None:
    g = Graph()
    high, low = odd_middle(g)
    total = g.quantize(g.add("Add", [low, high]), 0.15, 0)  # over the border
    path = g.save(tmp_path / "m.onnx", SHAPE, layer(g, total, 32, 8, 0.15))
    parts = agree(path, batch_of(), 0.1)
    assert [part.split(":")[0] for part in parts] == ["native", "onnxruntime", "native"]
    form = images.form(path)
    assert form["steps"]["Convolution"] == 4 and form["rest"]["LRN"] == 1 and "LRN" in form["reason"]
    kinds = [operator.type.split()[0] for operator in catalog.load(path, "native").executed(batch_of(2))]
    assert kinds.count("convolution") == 4 and "LRN" in kinds
    with pytest.raises(BatchError, match=r"expected image float32 \[n, 3, 12, 16\]"):
        catalog.load(path, "native").run({"image": np.zeros((1, 3, 8, 8), np.float32)})


def test_a_branch_reads_a_layer(tmp_path: Path) -> None:
    """The result of a layer is read by the subgraphs of an If alone, besides its quantization."""
    g = Graph()
    first = layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02)
    made = g.layer("Conv", first, (32, 32, 3, 3), 0.1, pads=[1, 1, 1, 1])
    high = g.quantize(made, 0.1, 100)
    flag = g.add("Greater", [g.add("ReduceMax", [high], keepdims=0), g.constant(np.float32(0))])
    branches = {}
    for key, kind in (("then_branch", "Sin"), ("else_branch", "Cos")):
        end = helper.make_tensor_value_info(kind, TensorProto.FLOAT, None)
        branches[key] = helper.make_graph([helper.make_node(kind, [made], [kind])], kind, [], [end])
    low = layer(g, g.quantize(g.add("If", [flag], **branches), 0.01, 128), 32, scale=0.01)
    total = g.quantize(g.add("Add", [low, high]), 0.15, 0)
    path = g.save(tmp_path / "m.onnx", SHAPE, layer(g, total, 32, 8, 0.15))
    parts = agree(path, batch_of(), 0.1)
    assert [part.split(":")[0] for part in parts] == ["native", "onnxruntime", "native"]


def test_axes_of_one_value_pass_a_border(tmp_path: Path) -> None:
    """The means of channels [n, 32, 1], which native steps hold as [n, 32], are transposed in ONNX Runtime."""
    g = Graph()
    high = layer(g, layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02), 32)
    means = g.quantize(g.add("Squeeze", [g.add("GlobalAveragePool", [high]), g.constant(np.array([3]))]), 0.1, 0)
    odd = g.add("Sin", [g.add("Transpose", [means], perm=[0, 2, 1])])
    gates = g.add("Reshape", [odd, g.constant(np.array([0, 32, 1, 1]))])
    scaled = g.quantize(g.add("Mul", [high, g.quantize(gates, 0.01, 128)]), 0.3, 0)
    path = g.save(tmp_path / "m.onnx", SHAPE, layer(g, layer(g, scaled, 32, scale=0.3), 32, 8))
    parts = agree(path, batch_of(), 0.1)  # "Invalid rank for input" before
    assert [part.split(":")[0] for part in parts] == ["native", "onnxruntime", "native"]


@pytest.mark.parametrize("batch", ["n", None])
def test_an_axis_of_samples_that_a_reshape_loses_is_found(tmp_path: Path, batch: str | None) -> None:
    """tf2onnx turns images of one channel around by a Reshape, whose first axis is free."""
    g = Graph()
    padded = g.add("Pad", ["image", g.constant(np.array([0, 1, 1, 0, 0, 1, 1, 0]))])
    turned = g.add("Reshape", [g.quantize(padded, 0.02, 120), g.constant(np.array([-1, 1, 14, 18]))])
    x = layer(g, layer(g, g.quantize(turned, 0.02, 120), 1, scale=0.02), 32)
    path = g.save(tmp_path / "m.onnx", [12, 16, 1], layer(g, x, 32, 8), batch=batch)
    parts = agree(path, {"image": np.ascontiguousarray(batch_of()["image"][:, 0, :, :, None])}, 0.1)
    assert [part.split(":")[0] for part in parts] == ["onnxruntime", "native"]


def test_heads_of_an_attention_pass_a_border(tmp_path: Path) -> None:
    """RT-DETR's decoder: values are computed in an earlier region than queries and keys."""
    g = Graph()
    x = layer(g, layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02), 32)
    x = g.quantize(g.layer("Conv", x, (32, 32, 3, 4), 0.1, strides=[3, 4]), 0.1, 120)
    tokens = g.add("Transpose", [g.add("Reshape", [x, g.constant(np.array([0, 32, 16]))])], perm=[0, 2, 1])
    odd = g.quantize(g.add("Sin", [tokens]), 0.01, 128)
    shape = g.constant(np.array([-1, 16, 2, 16]))
    cut = [g.add("Reshape", [linear(g, value, (32, 32)), shape]) for value in (odd, odd, tokens)]
    q, k, v = (g.add("Transpose", [value], perm=order) for value, order in zip(cut, HEADS, strict=True))
    weight = g.add("Softmax", [g.add("Mul", [g.add("MatMul", [q, k]), g.constant(np.float32(0.25))])], axis=-1)
    y = g.add("Transpose", [g.add("MatMul", [weight, v])], perm=[0, 2, 1, 3])
    y = g.quantize(g.add("Reshape", [y, g.constant(np.array([-1, 16, 32]))]), 0.05, 128)
    y = g.quantize(linear(g, g.quantize(linear(g, y, (32, 900)), 0.05, 128), (900, 32)), 0.05, 128)
    g.ranks[y] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, y)
    output, wanted = (catalog.load(path, engine).run(batch_of())[y] for engine in ("native", "onnxruntime"))
    assert np.square(output - wanted).sum() < 0.01 * np.square(wanted).sum()
    form = images.form(path)
    assert [part.split(":")[0] for part in form["parts"]] == ["native", "onnxruntime", "native"]
    assert set(form["rest"]) <= {"Sin", "QuantizeLinear", "DequantizeLinear"}


def test_a_map_passes_a_border_to_a_layer_over_its_last_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps a pixel's channels together, the reader a row's pixels."""
    g = Graph()
    high = layer(g, layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02), 32)
    odd = g.quantize(g.add("LRN", [layer(g, high, 32)], size=3), 0.1, 0)
    y = g.quantize(linear(g, g.quantize(g.add("Add", [high, odd]), 0.2, 0), (16, 512)), 0.2, 128)
    y = g.quantize(linear(g, y, (512, 16)), 0.2, 128)
    path = g.save(tmp_path / "m.onnx", SHAPE, y)
    actual, wanted = (catalog.load(path, engine).run(batch_of())[y] for engine in ("native", "onnxruntime"))
    assert np.square(actual - wanted).sum() < 0.001 * np.square(wanted).sum()
    assert [part.split(":")[0] for part in images.form(path)["parts"]] == ["native", "onnxruntime", "native"]
    monkeypatch.setattr(Region, "_note_order", lambda *_: None)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "wrong"))
    exchanged, zeros = images._native_model(path, 1), {"image": np.zeros((1, *SHAPE), np.float32)}
    for batch in (batch_of(), validation.textured(zeros)):
        assert validation.compare(exchanged, batch)["difference"] > 0.1
        lenient = validation.compare(dataclasses.replace(exchanged, limit=0.1), batch)
        assert lenient["difference"] == 0.1  # by the rule of the other native engines


def test_samples_of_earlier_values_pass_a_border(tmp_path: Path) -> None:
    """Heads that are samples of their own, as of deformable attention: the tokens pass, and what only a later region reads is computed there."""
    g = Graph()
    x = layer(g, layer(g, g.quantize("image", 0.02, 120), 3, scale=0.02), 32)
    x = g.quantize(g.layer("Conv", x, (32, 32, 3, 4), 0.1, strides=[3, 4]), 0.1, 120)
    tokens = g.add("Transpose", [g.add("Reshape", [x, g.constant(np.array([0, 32, 16]))])], perm=[0, 2, 1])
    tokens = g.quantize(tokens, 0.1, 120)
    odd = g.quantize(g.add("Sin", [tokens]), 0.01, 128)
    y = g.quantize(deformable_attention(g, tokens, odd, (4,)), 0.05, 128)
    y = g.quantize(linear(g, g.quantize(linear(g, y, (32, 900)), 0.05, 128), (900, 32)), 0.05, 128)
    g.ranks[y] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, y)
    actual, wanted = (catalog.load(path, engine).run(batch_of())[y] for engine in ("native", "onnxruntime"))
    assert np.square(actual - wanted).sum() < 0.01 * np.square(wanted).sum()
    form = images.form(path)
    assert [part.split(":")[0] for part in form["parts"]] == ["native", "onnxruntime", "native"]
    assert form["steps"]["Sampling"] == 1 and set(form["rest"]) <= {"Sin", "QuantizeLinear", "DequantizeLinear"}
    handed = [len(part.program.parts) for part in images.packed(path).parts if part.program is not None]
    assert handed == [1, 1]  # tokens alone: the layer of values is behind the border


def test_bytes_are_joined_over_a_border(tmp_path: Path) -> None:
    """An exporter of int8 graphs joins what is quantized: parts hand each other real values."""
    g = Graph()
    high, low = odd_middle(g)
    qparams = [g.constant(np.float32(0.1)), g.constant(np.uint8(0))]
    quantized = [g.add("QuantizeLinear", [value, *qparams]) for value in (high, low)]
    joined = g.add("DequantizeLinear", [g.add("Concat", quantized, axis=1), *qparams])
    path = g.save(tmp_path / "m.onnx", SHAPE, layer(g, joined, 64, 8), batch=2)
    assert len(agree(path, batch_of(2), 0.1)) == 3


def test_indices_and_floats_leave_a_native_part(tmp_path: Path) -> None:
    g = Graph()
    _, low = odd_middle(g)
    scores = g.layer("Conv", low, (8, 32, 3, 3), 0.1, pads=[1, 1, 1, 1])  # nothing quantizes them
    flat = g.add("Reshape", [scores, g.constant(np.array([0, -1]))])
    g.nodes += [onnx.helper.make_node("TopK", [flat, g.constant(np.array([5]))], ["best", "places"])]
    path = g.save(tmp_path / "m.onnx", SHAPE, "best")
    model = onnx.load(path)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("best", 1, ["n", 5]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("places", 7, ["n", 5]))
    onnx.save(model, path)
    outputs, wanted = (catalog.load(path, engine).run(batch_of()) for engine in ("native", "onnxruntime"))
    np.testing.assert_allclose(outputs["best"], wanted["best"], atol=0.2)
    assert outputs["places"].dtype == np.int64 and images.form(path)["parts"][-1].startswith("native")


def test_layers_that_fill_a_border_go_with_their_readers(tmp_path: Path) -> None:
    """A wide layer whose results an operator in ONNX Runtime reads costs less there than the exchange."""
    g = Graph()
    high, low = odd_middle(g)
    wide = g.layer("Conv", layer(g, high, 32), (128, 32, 1, 1), 0.1)
    pooled = g.add("ReduceL2", [g.add("CumSum", [wide, g.constant(np.array(1))]), g.constant(np.array([1]))])
    path = g.save(tmp_path / "m.onnx", SHAPE, pooled, 1, low, opset=18)
    assert len(images.form(path)["parts"]) == 3 and images.form(path)["rest"]["Conv"] == 1
    outputs, wanted = (catalog.load(path, engine).run(batch_of()) for engine in ("native", "onnxruntime"))
    for name, array in wanted.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-3, atol=0.11)


def test_several_inputs_and_tokens(tmp_path: Path) -> None:
    """Regions of tokens behind an operator without a native form; an input that only ONNX Runtime reads."""
    g = Graph()
    _, low = odd_middle(g)
    tokens = g.add("Transpose", [g.add("Reshape", [low, g.constant(np.array([0, 32, -1]))])], perm=[0, 2, 1])
    odd = g.add("CumSum", [g.add("Mul", [tokens, "gain"]), g.constant(np.array(2))])
    first = g.quantize(linear(g, g.quantize(odd, 0.5, 0), (32, 96)), 2.0, 128)
    out = g.quantize(linear(g, first, (96, 32)), 20.0, 128)
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, out)
    model = onnx.load(path)
    model.graph.input.append(onnx.helper.make_tensor_value_info("gain", 1, ["n", 1, 32]))
    onnx.save(model, path)
    batch = batch_of() | {"gain": np.random.default_rng(2).random((3, 1, 32), np.float32)}
    assert [part.split(":")[0] for part in agree(path, batch, 20.0)][-1] == "native"
    with pytest.raises(BatchError, match="expected image"):
        catalog.load(path, "native").run(batch | {"gain": batch["gain"][:1]})


def test_regions_with_less_work_than_their_borders_are_refused(tmp_path: Path) -> None:
    g = Graph()
    x = g.quantize(g.add("LRN", [g.quantize("image", 0.02, 120)], size=3), 0.02, 120)
    small = g.quantize(g.add("LRN", [g.quantize(g.layer("Conv", x, (3, 3, 1, 1), 0.02), 0.1, 120)], size=3), 0.1, 120)
    path = g.save(tmp_path / "m.onnx", SHAPE, small)
    assert images.form(path).keys() == {"reason"}
    with pytest.raises(RequestError, match="LRN"):
        catalog.load(path, "native")


def test_bytes_are_handed_over_as_floats(tmp_path: Path) -> None:
    """A product and a mean whose Concat ONNX Runtime reads are native."""
    g = Graph()
    high, _ = odd_middle(g)
    thin = layer(g, high, 32, 8)
    parts = [
        g.add("Mul", [thin, g.quantize(g.add("GlobalAveragePool", [thin]), 0.02, 128)]),
        g.add("AveragePool", [thin], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    ]
    odd = g.quantize(g.add("Sin", [g.add("Concat", parts, axis=1)]), 0.01, 128)
    path = g.save(tmp_path / "m.onnx", SHAPE, layer(g, odd, 16, 8, 0.01))
    assert not {"Mul", "AveragePool", "Concat"} & set(images.form(path)["rest"])
    outputs, wanted = (catalog.load(path, engine).run(batch_of()) for engine in ("native", "onnxruntime"))
    for name, array in wanted.items():
        np.testing.assert_allclose(outputs[name], array, atol=0.2)


def test_a_series_without_a_native_region_is_refused_by_its_operator(tmp_path: Path) -> None:
    g = Graph()
    out = g.add("Elu", [g.layer("Gemm", g.quantize("image", 0.02, 120), (4, 5), 0.02, transB=1)])
    out = g.layer("Gemm", g.quantize(out, 0.1, 120), (3, 4), 0.1, transB=1)
    g.ranks = {out: 2}
    assert "(Elu)" in images.form(g.save(tmp_path / "m.onnx", [5], out))["reason"]


def test_series_and_rows_of_numbers_are_native_whole(tmp_path: Path) -> None:
    """Layers of one dimension as `LiftRows` writes them, and fully connected ones of an input of two axes."""
    g = Graph()
    x = g.quantize(g.add("Unsqueeze", ["image", g.constant(np.array([2]))]), 0.02, 120)
    x = g.quantize(g.add("Relu", [g.layer("Conv", x, (32, 4, 1, 5), 0.02, pads=[0, 2, 0, 2])]), 0.1, 0)
    x = g.quantize(g.layer("Conv", x, (32, 32, 1, 3), 0.1, strides=[1, 2]), 0.1, 120)
    x = g.add("Transpose", [g.add("Squeeze", [x, g.constant(np.array([2]))])], perm=[0, 2, 1])
    series = g.quantize(linear(g, x, (32, 16)), 0.1, 120)
    g.ranks = {series: 3}
    batch = {"image": np.random.default_rng(1).normal(0, 1, (3, 4, 40)).astype(np.float32)}
    path = g.save(tmp_path / "series.onnx", [4, 40], series)
    assert agree(path, batch, 0.1) == [] and images.form(path)["steps"]["Convolution"] == 3
    g = Graph()
    x = g.quantize(g.add("Relu", [g.layer("Gemm", g.quantize("image", 0.02, 120), (64, 40), 0.02, transB=1)]), 0.1, 0)
    row = g.quantize(g.layer("Gemm", x, (8, 64), 0.1, transB=1), 0.1, 120)
    g.ranks = {row: 2}
    batch = {"image": np.random.default_rng(1).normal(0, 1, (3, 40)).astype(np.float32)}
    path = g.save(tmp_path / "row.onnx", [40], row)
    assert agree(path, batch, 0.1) == [] and images.form(path)["steps"]["Convolution"] == 2
