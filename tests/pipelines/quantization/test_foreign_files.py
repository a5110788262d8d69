"""Files of other tools: bfloat16 weights, Pad with axes, layers that are int8 already, samples that hold NaN."""

import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.qdq.engine_quirks import pad_all_axes
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED

BFLOAT16 = onnx.TensorProto.BFLOAT16
CAST = """(float[n,3,8,8] x) => (float[n,5] y) {
    k = Cast<to=1>(K) b = Cast<to=1>(B) c = Conv<pads=[1,1,1,1]>(x, k, b) r = Relu(c)
    p = GlobalAveragePool(r) f = Flatten(p) w = Cast<to=1>(W) y = Gemm(f, w) }"""
WHOLE = """(float[n,16] x) => (float[n,4] y) {
    a = Cast<to=16>(x) b = MatMul(a, K) c = Relu(b) d = MatMul(c, W) y = Cast<to=1>(d) }"""


def half(text, **arrays):
    """A model whose weights are bfloat16."""
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    for name, array in arrays.items():
        proto.graph.initializer.append(onnx.helper.make_tensor(name, BFLOAT16, array.shape, array.ravel()))
    return ir.from_proto(proto)


def int8_layers(found, **feeds):
    rewrite(found, [pass_() for pass_ in SHARED])
    int8, report = quantize(found, QuantRecipe(), calibrate(found, [feeds], "minmax"))
    return int8, [op.precision for op in report.operators if op.type in ("Conv", "Gemm", "MatMul")]


def test_bfloat16_weights_behind_a_cast():
    normal = normals(1)
    net = half(CAST, K=normal(8, 3, 3, 3) / 5, B=normal(8), W=normal(8, 5))
    x = normal(16, 3, 8, 8)
    before = run(net, x=x)["y"]
    int8, layers = int8_layers(net, x=x)
    assert layers == ["int8"] * 2  # "its weights are not constant" before
    assert not any(node.op_type == "Cast" for node in int8.graph)
    after = run(int8, x=x)["y"]
    assert np.square(after - before).sum() < 0.001 * np.square(before).sum()


def test_a_bfloat16_graph():
    """ONNX Runtime has no bfloat16 MatMul on CPUs, so it runs as float32."""
    normal = normals(2)
    weights = {"K": normal(16, 32) / 4, "W": normal(32, 4) / 6}
    net = half(WHOLE, **weights)
    x = normal(64, 16)
    int8, layers = int8_layers(net, x=x)
    assert layers == ["int8"] * 2
    expected = np.maximum(x @ weights["K"], 0) @ weights["W"]
    assert np.square(run(int8, x=x)["y"] - expected).sum() < 0.001 * np.square(expected).sum()


PAD = """(float[n,3,8,8] x{more}) => (float[n,4,8,8] y) <int64[2] axes = {{2, -1}}> {{
    a = Conv<pads=[1,1,1,1]>(x, K) b = Relu(a) p = Pad<mode="reflect">(b, {widths}, , axes) y = Conv(p, L) }}"""


@pytest.mark.parametrize("computed", [False, True])
def test_a_pad_of_some_axes_runs(computed, tmp_path):
    normal = normals(3)
    weights = {"K": normal(4, 3, 3, 3) / 5, "L": normal(4, 4, 3, 3) / 6}
    widths = np.array([1, 2, 1, 0])
    text = PAD.format(more=", int64[4] widths" if computed else "", widths="widths")
    net = model(text, opset=18, **weights, **({} if computed else {"widths": widths}))
    feeds = {"x": normal(4, 3, 8, 8), **({"widths": widths} if computed else {})}
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, [feeds], "minmax"))
    pad = next(node for node in int8.graph if node.op_type == "Pad")
    assert len(pad.inputs) == 3  # no axes any more; the value is the zero point
    session = ort.InferenceSession(io.save(int8, tmp_path / "int8.onnx"), providers=["CPUExecutionProvider"])
    before, after = run(net, **feeds)["y"], session.run(None, feeds)[0]  # "indices element out of data bounds" before
    assert after.shape == (4, 4, 8, 8)
    assert np.square(after - before).sum() < 0.01 * np.square(before).sum()
    assert not any(pad_all_axes(node, set()) for node in int8.graph)


class Reader(CalibrationDataReader):
    def __init__(self, x):
        self.left = [{"x": sample[None]} for sample in x]

    def get_next(self):
        return self.left.pop() if self.left else None


NETWORK = """(float[n,3,8,8] x) => (float[n,5] y) {
    a = Conv<pads=[1,1,1,1]>(x, K) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, L) d = Relu(c)
    p = GlobalAveragePool(d) f = Flatten(p) y = Gemm(f, W) }"""


def network(folder):
    normal = normals(4)
    weights = {"K": normal(8, 3, 3, 3) / 5, "L": normal(8, 8, 3, 3) / 8, "W": normal(8, 5)}
    net = model(NETWORK, **weights)
    for index, node in enumerate(net.graph):
        node.name = f"node{index}"
    np.savez(folder / "x.npz", x=normals(5)(16, 3, 8, 8))
    return io.save(net, folder / "float.onnx"), normals(5)(16, 3, 8, 8)


@pytest.mark.parametrize("form", ["QOperator", "QDQ", "dynamic"])
def test_a_file_that_is_int8_already_is_refused(form, tmp_path):
    path, x = network(tmp_path)
    if form == "dynamic":
        quantize_dynamic(path, tmp_path / "a.onnx")
    else:
        quantize_static(path, tmp_path / "a.onnx", Reader(x), quant_format=QuantFormat[form])
    for verb in (zoo.quantize, zoo.calibrate):
        samples = {"calibration_data" if verb is zoo.quantize else "data": tmp_path / "x.npz"}
        with pytest.raises(RequestError, match=r"a\.onnx is quantized already \(.*\); expected a float model"):
            verb(tmp_path / "a.onnx", output=tmp_path / "b.out", **samples)
    assert zoo.rewrite(tmp_path / "a.onnx", tmp_path / "c.onnx")


def test_layers_that_are_int8_already_count_as_such(tmp_path):
    path, x = network(tmp_path)
    quantize_static(path, tmp_path / "a.onnx", Reader(x), quant_format=QuantFormat.QDQ, nodes_to_exclude=["node2"])
    result = zoo.quantize(tmp_path / "a.onnx", tmp_path / "b.onnx", calibration_data=tmp_path / "x.npz")
    layers = [op for op in result["operators"] if op["type"] in ("Conv", "Gemm")]
    assert [layer["precision"] for layer in layers] == ["int8"] * 3
    assert sum(layer["reason"] == "its weights are int8 already" for layer in layers) == 2
    assert result["summary"]["int8_layers"] == result["summary"]["layers"] == 3


@pytest.mark.parametrize("place", [0, 5, 63, 64, 99])
def test_the_sample_that_holds_nan_is_named(place):
    net, x = model("(float[n,4] x) => (float[n,2] y) { y = Gemm(x, W) }", W=normals(6)(4, 2)), normals(7)(100, 4)
    x[place, 2] = np.nan
    with pytest.raises(RequestError, match=re.escape(f"calibration sample {place} (the first is 0) holds NaN in x")):
        calibrate(net, [{"x": x[:64]}, {"x": x[64:]}])
    x[place] = 3e38
    with pytest.raises(RequestError, match=f"NaN or infinity on calibration sample {place} "):
        calibrate(net, [{"x": x[:64]}, {"x": x[64:]}])
