"""Graphs, quantized models and references that tests of the quantizer share."""

import collections
import re

import numpy as np
import onnx
import onnx_ir as ir

from helpers.arrays import normals
from helpers.rewriting import EXACT, model, run
from pipelines.engines.catalog import load
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

TWO = "(float[n,24] x) => (float[n,5] y) {{ h = {} r = Relu(h) {} }}"
GEMMS = TWO.format("Gemm(x, w, b)", "y = Gemm(r, v, c)")
TRANSPOSED = TWO.format("Gemm<transB=1>(x, w, b)", "y = Gemm<transB=1>(r, v, c)")


def checked(found, recipe=None, observer="minmax", **feeds):
    """(int8 model, report), calibrated on `feeds`; what must hold for every result is checked on the way."""
    before = io.digest(found)
    result, report = quantize(found, recipe or QuantRecipe(), calibrate(found, [feeds], observer))
    assert io.digest(found) == before, "the input model changed"
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    check_steps(result)
    check_report(result, report)
    return result, report


def check_steps(result):
    for node in result.graph:
        if node.op_type == "QuantizeLinear":
            source = node.inputs[0].producer()
            assert source is None or source.op_type != "DequantizeLinear", f"{node.name} undoes a dequantize"
        if node.op_type in ("Gemm", "MatMul", "Conv") and node.inputs[1].producer() is not None:
            assert node.inputs[1].producer().inputs[0].dtype == ir.DataType.INT8


def check_report(result, report):
    real = [node.op_type for node in result.graph if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert collections.Counter(operator.type for operator in report.operators) == collections.Counter(real)
    names = [operator.name for operator in report.operators]
    assert len(set(names)) == len(names) and all(names)
    assert all(operator.precision in ("int8", "float", "integer") for operator in report.operators)
    assert all(operator.reason for operator in report.operators if operator.precision == "float")
    assert sum(report.counts().values()) == len(names)


LAYERS = {
    "onnxruntime": (
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
        "MatMulIntegerToFloat",
        "Gemm",
        "FusedGemm",
        "MatMul",
        "Conv",
        "FusedConv",
    ),
    "openvino": ("FullyConnected", "Convolution", "MatMul"),
}


def check_executed(result, report, folder, **feeds):
    """Every layer that the report calls int8 runs on bytes in both engines, and no other one does."""
    path = io.save(result, folder / "executed.onnx")
    expected = sorted(
        "u8" if operator.precision == "int8" else "f32"
        for operator in report.operators
        if operator.type in ("Gemm", "MatMul", "Conv")
    )
    for engine in EXACT:
        ran = [operator for operator in load(path, engine).executed(feeds) if operator.type in LAYERS[engine]]
        assert sorted(operator.precision for operator in ran) == expected, (engine, ran)


def precisions(report):
    return [(operator.type, operator.precision) for operator in report.operators]


def input_qparams(x):
    """(scale, zero point) as the article writes it: 255 / max for what has no negatives, else 255 / (max - min)."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if low == 0:
        return np.float32(high / 255), 0
    scale = np.float32((high - low) / 255)
    return scale, round(-low / float(scale))


def to_uint8(x, scale, zero):
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.int64)


def layer(x_q, zero, x_scale, w, b):
    """u8 [n, k] times float [k, m]: exact integer sums, and their step; the zero point goes into the bias (shifted
    bias).
    """
    w_scale = (np.abs(w).max(axis=0) / 127).astype(np.float32)
    w_q = np.rint(w / w_scale).astype(np.int64)
    assert np.abs(w_q).max() <= 127
    step = (x_scale * w_scale).astype(np.float64)
    shifted = np.rint(b / step).astype(np.int64) - zero * w_q.sum(axis=0)
    sums = x_q @ w_q + shifted
    assert np.abs(sums).max() < 2**31
    return sums, step


def weights():
    """Constants of `image`, by their names."""
    normal = normals(0)
    return {
        "k": normal(8, 3, 3, 3, scale=0.3),
        "kb": normal(8),
        "l": normal(8, 8, 3, 3, scale=0.15),
        "m": normal(8, 8, 1, 1, scale=0.4),
        "d": normal(8, 1, 3, 3, scale=0.4),
        "c2": normal(8, 16, 1, 1, scale=0.3),
        "w": normal(8, 8, scale=0.4),
        "b": normal(8),
        "w3": normal(4, 16, 8, scale=0.3),
        "w4": normal(64, 8, scale=0.2),
        "token": normal(1, 1, 8),
        "zero": np.float32(0),
        "six": np.float32(6),
        "half": np.full((1, 8, 1, 1), 0.5, np.float32),
        "slope": np.full((8, 1, 1), 0.1, np.float32),
        "twice": np.array([1, 1, 2, 2], np.float32),
        "axes": np.array([2, 3]),
        "even": np.array([0, 2, 4]),
        "rows": np.array([0, 8, -1]),
        "image": np.array([0, 8, 8, 8]),
        "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "one": np.array([1]),
        "two": np.array([2]),
        "same": np.array([1, 8, 1, 1]),
        "flat": np.array([0, 8, 9]),
        "first": np.array([0]),
        "sizes": np.array([1, 8]),
    }


WEIGHTS = weights()


def image(body, opset=17, outputs="float y", **inputs):
    """A graph over images x [n, 3, 8, 8]: r = Relu(Conv(x)) [n, 8, 8, 8], then `body`."""
    more = "".join(f", float[{shape}] {name}" for name, shape in inputs.items())
    text = f"(float[n,3,8,8] x{more}) => ({outputs}) {{ h = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(h) {body} }}"
    net = model(text, opset, **{name: array for name, array in WEIGHTS.items() if re.search(rf"[(, ]{name}[,)]", text)})
    for output in net.graph.outputs:
        output.shape = None
    return net


def quantized(found, recipe=None, **feeds):
    result, report = quantize(found, recipe or QuantRecipe(), calibrate(found, [feeds], "minmax"))
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    return result, report


def decibels(output, expected):
    """Signal to quantization noise; infinite where equal."""
    noise = ((output.astype(np.float64) - expected) ** 2).mean()
    return np.inf if noise == 0 else 10 * np.log10((expected.astype(np.float64) ** 2).mean() / noise)


def check(found, least, folder, recipe=None, **feeds):
    """(report, {engine: what ran}); every output is within `least` dB of float in both engines, and of any batch
    size.
    """
    result, report = quantized(found, recipe, **feeds)
    path, expected = io.save(result, folder / "int8.onnx"), run(found, **feeds)
    ran = {}
    for engine in EXACT:
        session = load(path, engine)
        for size in (16, 3):
            part = {name: array[:size] for name, array in feeds.items()}
            for name, output in session.run(part).items():
                assert decibels(output, expected[name][:size]) > least, (
                    engine,
                    name,
                    decibels(output, expected[name][:size]),
                )
        ran[engine] = [(operator.type, operator.precision) for operator in session.executed(feeds)]
    return report, ran


LAST = "z = Conv({}, m) y = Neg(z)"


ATTENTION = """(float[n,16,64] x) => (float y) {
    q0 = MatMul(x, wq) q1 = Add(q0, b) q2 = Reshape(q1, heads) q = Transpose<perm=[0,2,1,3]>(q2)
    k0 = MatMul(x, wk) k1 = Add(k0, b) k2 = Reshape(k1, heads) k = Transpose<perm=[0,2,3,1]>(k2)
    v0 = MatMul(x, wv) v1 = Add(v0, b) v2 = Reshape(v1, heads) v = Transpose<perm=[0,2,1,3]>(v2)
    s = MatMul(q, k) p = Softmax<axis=-1>(s) o = MatMul(p, v)
    o1 = Transpose<perm=[0,2,1,3]>(o) o2 = Reshape(o1, joined) z = MatMul(o2, wo) z1 = Add(z, b) y = Add(z1, x) }"""


def attention(normal, text=ATTENTION, **more):
    weights = {name: normal(64, 64, scale=0.12) for name in ("wq", "wk", "wv", "wo")}
    net = model(
        text, **weights, b=normal(64, scale=0.2), heads=np.array([0, 16, 4, 16]), joined=np.array([0, 16, 64]), **more
    )
    net.graph.outputs[0].shape = None
    return net
