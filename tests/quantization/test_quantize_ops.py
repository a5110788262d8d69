"""Operators between layers, recipes and traps: small graphs that must run on bytes in both engines and stay near
float.
"""

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting import EXACT, model, ops, run

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.engines.openvino import library
from pipelines.graph import edit, io, query
from pipelines.quantization.calibrate import calibrate
from pipelines.quantization.quantize import quantize
from pipelines.quantization.recipe import QuantRecipe

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


WEIGHTS = {
    **{
        "k": normal(8, 3, 3, 3, scale=0.3),
        "kb": normal(8),
        "l": normal(8, 8, 3, 3, scale=0.15),
        "m": normal(8, 8, 1, 1, scale=0.4),
    },
    **{
        "d": normal(8, 1, 3, 3, scale=0.4),
        "c2": normal(8, 16, 1, 1, scale=0.3),
        "w": normal(8, 8, scale=0.4),
        "b": normal(8),
    },
    **{
        "w3": normal(4, 16, 8, scale=0.3),
        "zero": np.float32(0),
        "six": np.float32(6),
        "half": np.full((1, 8, 1, 1), 0.5, np.float32),
    },
    **{
        "axes": np.array([2, 3]),
        "twice": np.array([1, 1, 2, 2], np.float32),
        "even": np.array([0, 2, 4]),
        "rows": np.array([0, 8, -1]),
    },
    **{
        "image": np.array([0, 8, 8, 8]),
        "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "slope": np.full((8, 1, 1), 0.1, np.float32),
    },
    **{"one": np.array([1]), "same": np.array([1, 8, 1, 1]), "two": np.array([2]), "w4": normal(64, 8, scale=0.2)},
    **{"flat": np.array([0, 8, 9]), "first": np.array([0]), "sizes": np.array([1, 8]), "token": normal(1, 1, 8)},
}


def image(body, opset=17, outputs="float y", **inputs):
    """A graph over images x [n, 3, 8, 8]: r = Relu(Conv(x)) [n, 8, 8, 8], then `body`."""
    more = "".join(f", float[{shape}] {name}" for name, shape in inputs.items())
    text = f"(float[n,3,8,8] x{more}) => ({outputs}) {{ h = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(h) {body} }}"
    found = model(text, opset, **{name: each for name, each in WEIGHTS.items() if re.search(rf"[(, ]{name}[,)]", text)})
    for each in found.graph.outputs:
        each.shape = None
    return found


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
        ran[engine] = [(each.type, each.precision) for each in session.executed(feeds)]
    return report, ran


# what an engine may do in float beside the layer under test: the first quantize step, the last operator and what brings
# it back
AT_THE_ENDS = {"QuantizeLinear", "Neg", "Subgraph", "Reorder", "Softmax", "Add"}
LAST = "z = Conv({}, m) y = Neg(z)"

# body, what onnxruntime must run on bytes, least dB; measured ones lie 3 dB or more above
CASES = {
    "add, relu": (
        "a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Add(a, r) t = Relu(s) " + LAST.format("t"),
        ["QLinearAdd"],
        34,
    ),
    "add, signed": ("a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Add(a, r) " + LAST.format("s"), ["QLinearAdd"], 34),
    "add of one tensor twice": ("s = Add(r, r) " + LAST.format("s"), ["QLinearAdd"], 34),
    "two adds in a row": (
        "a = Conv(r, m) s = Add(a, r) b1 = Conv(s, m) t = Add(b1, s) " + LAST.format("t"),
        ["QLinearAdd", "QLinearAdd"],
        28,
    ),
    "squeeze and excite": (
        "g = GlobalAveragePool(r) e = Conv(g, m) f = Sigmoid(e) s = Mul(r, f) " + LAST.format("s"),
        ["QLinearGlobalAveragePool", "QLinearSigmoid", "QLinearMul"],
        31,
    ),
    "swish": ("i = Conv(r, m) f = Sigmoid(i) s = Mul(i, f) " + LAST.format("s"), ["QLinearSigmoid", "QLinearMul"], 24),
    "leaky relu": ("i = Conv(r, m) s = LeakyRelu<alpha=0.1>(i) " + LAST.format("s"), ["QLinearLeakyRelu"], 25),
    "relu6": ("i = Conv(r, m) s = Clip(i, zero, six) " + LAST.format("s"), [], 30),
    "product with a constant": ("s = Mul(r, half) " + LAST.format("s"), ["QLinearMul"], 33),
    "concat": (
        "a = Conv(r, m) i = Conv<pads=[1,1,1,1]>(r, l) s = Concat<axis=1>(a, i) z = Conv(s, c2) y = Neg(z)",
        ["Concat"],
        30,
    ),
    "concat, densely": ("a = Conv(r, m) s = Concat<axis=1>(r, a) z = Conv(s, c2) y = Neg(z)", [], 31),
    "concat of a tensor and itself": ("s = Concat<axis=1>(r, r) z = Conv(s, c2) y = Neg(z)", [], 30),
    "max pool": (
        "s = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r) " + LAST.format("s"),
        ["NhwcMaxPool"],
        36,
    ),
    "max pool beside a layer": (
        "s = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(r) a = Conv(r, m) t = Add(s, a) " + LAST.format("t"),
        ["NhwcMaxPool", "QLinearAdd"],
        31,
    ),
    "average pool": (
        "s = AveragePool<kernel_shape=[2,2], strides=[2,2]>(r) " + LAST.format("s"),
        ["QLinearAveragePool"],
        35,
    ),
    "mean over the image": (
        "s = ReduceMean<axes=[2,3], keepdims=0>(r) z = Gemm(s, w, b) y = Neg(z)",
        ["QLinearGlobalAveragePool", "QGemm"],
        40,
    ),
    "mean, axes from the end": (
        "s = ReduceMean<axes=[-2,-1]>(r) " + LAST.format("s"),
        ["QLinearGlobalAveragePool"],
        37,
    ),
    "global average pool": (
        "s = GlobalAveragePool(r) f = Flatten(s) z = Gemm(f, w, b) y = Neg(z)",
        ["QLinearGlobalAveragePool", "QGemm"],
        40,
    ),
    "resize": ('s = Resize<mode="nearest">(r, , twice) ' + LAST.format("s"), ["Resize"], 32),
    "resize, linear": ('s = Resize<mode="linear">(r, , twice) ' + LAST.format("s"), ["Resize"], 28),
    "reshape, transpose": (
        "s = Reshape(r, rows) t = Transpose<perm=[0,2,1]>(s) z = MatMul(t, w) y = Neg(z)",
        ["MatMulIntegerToFloat"],
        37,
    ),
    "gather": ("s = Gather<axis=2>(r, even) " + LAST.format("s"), ["Gather"], 33),
    "slice": ("s = Slice(r, one, two, two) " + LAST.format("s"), ["Slice"], 30),
    "pad": ("s = Pad(r, around) z = Conv(s, l) y = Neg(z)", ["Pad"], 31),
    "depthwise": ("a = Conv<pads=[1,1,1,1], group=8>(r, d, kb) s = Clip(a, zero, six) " + LAST.format("s"), [], 34),
    "1x1 with strides": (
        "a = Conv<strides=[2,2]>(r, m) c = Conv<strides=[2,2]>(r, m, kb) s = Add(a, c) " + LAST.format("s"),
        ["QLinearAdd"],
        29,
    ),
    "batched weights": (
        "s = Reshape(r, rows) t = Reshape(s, image) z = MatMul(t, w) y = Neg(z)",
        ["MatMulIntegerToFloat"],
        35,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_run_on_bytes_in_both_engines(tmp_path, name):
    body, wanted, least = CASES[name]
    report, ran = check(image(body), least, tmp_path, x=normal(16, 3, 8, 8))
    assert [each.type for each in report.operators if each.precision != "int8"] == ["Neg"], report
    on_bytes = [kind for kind, _ in ran["onnxruntime"]]
    for each in set(wanted):
        assert on_bytes.count(each) == wanted.count(each), ran
    allowed = AT_THE_ENDS | {"QLinearConcat"}  # its first input is a scale
    for engine, found in ran.items():
        assert [
            kind for kind, precision in found if precision == "f32" and kind not in allowed and kind != "Reshape"
        ] == [], (
            engine,
            found,
        )
    assert on_bytes.count("QuantizeLinear") == 1 and on_bytes.count("DequantizeLinear") <= 1  # at the ends


@pytest.mark.parametrize("function", ["HardSwish(i)", "Tanh(i)", "PRelu(i, slope)", "Elu(i)"])
def test_functions_without_an_integer_kernel_stand_between_bytes(tmp_path, function):
    report, _ = check(
        image(f"i = Conv(r, m) s = {function} t = Add(s, r) " + LAST.format("t")), 24, tmp_path, x=normal(16, 3, 8, 8)
    )
    told = {each.type: (each.precision, each.reason) for each in report.operators}
    assert told[function.split("(")[0]] == ("float", "computed in float between bytes") and told["Add"] == ("int8", "")


def test_the_last_operators_stay_float(tmp_path):
    found = image(
        "a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Add(a, r) t = Relu(s) g = GlobalAveragePool(t) y = Softmax<axis=1>(g)"
    )
    report, _ = check(found, 30, tmp_path, x=normal(16, 3, 8, 8))
    told = {each.name: (each.precision, each.reason) for each in report.operators}
    assert told["s"] == ("float", "nothing after it is int8") == told["g"] and told["a"] == ("int8", "")


def test_a_product_with_something_computed_from_constants_stays_float(tmp_path):
    report, _ = check(
        image("c = Relu(half) e = Reshape(c, same) s = Mul(r, e) " + LAST.format("s")),
        30,
        tmp_path,
        x=normal(16, 3, 8, 8),
    )
    told = {each.name: (each.precision, each.reason) for each in report.operators}
    assert told["s"] == ("float", "its input e is float") and told["z"] == ("int8", "")


def test_steps_that_cancel_are_removed():
    found = image(
        "a = Conv(r, m) s = Concat<axis=1>(r, r) t = Transpose<perm=[0,1,3,2]>(s) z = Conv(t, c2) u = Add(z, a) y = "
        "Neg(u)"
    )
    result, _ = quantized(found, x=normal(16, 3, 8, 8))
    for node in result.graph:
        source = node.inputs[0].producer() if node.op_type == "QuantizeLinear" else None
        if source is not None and source.op_type == "DequantizeLinear":
            assert [query.constant(each).item() for each in source.inputs[1:]] != [
                query.constant(each).item() for each in node.inputs[1:]
            ]


def test_a_relu_beside_another_reader(tmp_path):
    body = "a = Conv(r, m) s = Add(a, r) t = Relu(s) c = Conv(t, m) u = Add(c, s) " + LAST.format("u")
    report, ran = check(image(body), 28, tmp_path, x=normal(16, 3, 8, 8))
    told = {each.name: each for each in report.operators}
    assert told["t"].precision == "float" and told["t"].reason == "computed in float between bytes"
    assert [kind for kind, _ in ran["onnxruntime"]].count("QLinearAdd") == 2


def test_an_output_that_is_read_inside_too(tmp_path):
    found = image("a = Conv(r, m) s = Add(a, r) z = Conv(s, m) y = Neg(z)", outputs="float y, float s, float r")
    report, _ = check(found, 28, tmp_path, x=normal(16, 3, 8, 8))
    assert {each.precision for each in report.operators if each.type in ("Conv", "Add")} == {"int8"}


def test_one_weight_of_two_convolutions(tmp_path):
    report, _ = check(
        image("a = Conv(r, m, kb) i = Conv(a, m) s = Add(a, i) " + LAST.format("s")),
        24,
        tmp_path,
        x=normal(16, 3, 8, 8),
    )
    assert report.counts() == {"int8": 6, "float": 1}


def test_several_inputs(tmp_path):
    found = image("p = Conv(q, m) s = Add(p, r) z = Conv(s, m) y = Neg(z)", q="n,8,8,8")
    report, _ = check(found, 30, tmp_path, x=normal(16, 3, 8, 8), q=normal(16, 8, 8, 8))
    assert report.counts() == {"int8": 5, "float": 1}


def test_weights_in_half_precision(tmp_path):
    found = image("a = Conv(r, m, kb) s = Add(a, r) " + LAST.format("s"))
    edit.compress_fp16(found, minimum=1)
    report, _ = check(found, 30, tmp_path, x=normal(16, 3, 8, 8))
    assert report.counts() == {"int8": 5, "float": 1}


@pytest.mark.parametrize("opset", [13, 15, 18, 19, 21, 23])
def test_opsets(tmp_path, opset):
    mean = "ReduceMean<axes=[2,3], keepdims=0>(t)" if opset < 18 else "ReduceMean<keepdims=0>(t, axes)"
    found = image(f"a = Conv(r, m) s = Add(a, r) t = Relu(s) g = {mean} z = Gemm(g, w, b) y = Neg(z)", opset)
    report, ran = check(found, 34, tmp_path, x=normal(16, 3, 8, 8))
    assert report.counts() == {"int8": 8, "float": 1}
    assert {"QLinearAdd", "QLinearGlobalAveragePool", "QGemm"} <= {kind for kind, _ in ran["onnxruntime"]}


def test_a_mean_over_something_else_stays_float(tmp_path):
    report, _ = check(
        image("s = ReduceMean<axes=[1]>(r) z = MatMul(s, w) y = Neg(z)"), 30, tmp_path, x=normal(16, 3, 8, 8)
    )
    assert {each.type: each.reason for each in report.operators}[
        "ReduceMean"
    ] == "its mean is not over height and width"


ATTENTION = """(float[n,16,64] x) => (float y) {
    q0 = MatMul(x, wq) q1 = Add(q0, b) q2 = Reshape(q1, heads) q = Transpose<perm=[0,2,1,3]>(q2)
    k0 = MatMul(x, wk) k1 = Add(k0, b) k2 = Reshape(k1, heads) k = Transpose<perm=[0,2,3,1]>(k2)
    v0 = MatMul(x, wv) v1 = Add(v0, b) v2 = Reshape(v1, heads) v = Transpose<perm=[0,2,1,3]>(v2)
    s = MatMul(q, k) p = Softmax<axis=-1>(s) o = MatMul(p, v)
    o1 = Transpose<perm=[0,2,1,3]>(o) o2 = Reshape(o1, joined) z = MatMul(o2, wo) z1 = Add(z, b) y = Add(z1, x) }"""


def attention(text=ATTENTION, **more):
    weights = {name: normal(64, 64, scale=0.12) for name in ("wq", "wk", "wv", "wo")}
    found = model(
        text, **weights, b=normal(64, scale=0.2), heads=np.array([0, 16, 4, 16]), joined=np.array([0, 16, 64]), **more
    )
    found.graph.outputs[0].shape = None
    return found


def test_products_of_two_activations(tmp_path):
    report, ran = check(attention(), 30, tmp_path, x=normal(16, 16, 64))
    told = {each.name: each for each in report.operators}
    assert all(each.precision == "int8" for each in report.operators if each.type == "MatMul")
    assert (
        told["p"].reason == "Softmax has no int8 form here"
        and told["q1"].reason == "engines make it part of the product before it"
    )
    kinds = [kind for kind, _ in ran["onnxruntime"]]
    assert sum(kinds.count(each) for each in ("MatMulIntegerToFloat", "QLinearMatMul")) == 6
    if "openvino" in EXACT:
        assert [precision for kind, precision in ran["openvino"] if kind == "FullyConnected"] == ["u8"] * 4


def test_attention_masked_by_infinity(tmp_path):
    found = attention(
        ATTENTION.replace("p = Softmax<axis=-1>(s)", "m = Add(s, mask) p = Softmax<axis=-1>(m)"),
        mask=np.triu(np.full((16, 16), -np.inf, np.float32), 1),
    )
    report, _ = check(found, 30, tmp_path, x=normal(16, 16, 64))
    assert all(each.precision == "int8" for each in report.operators if each.type == "MatMul")
    assert "m" not in calibrate(found, [{"x": normal(16, 16, 64)}]).tensors


@pytest.mark.parametrize("shaped", ["t", "x", "a"])
def test_a_token_before_the_patches_of_an_image(tmp_path, shaped):
    """As a vision transformer begins. OpenVINO must not lose the channels' biases where it is given no batch size."""
    found = image(
        f"""a = Conv<strides=[2,2]>(x, k, kb) f = Reshape(a, flat) t = Transpose<perm=[0,2,1]>(f)
            s = Shape({shaped}) n = Gather(s, first) e = Concat<axis=0>(n, sizes) c = Expand(token, e)
            j = Concat<axis=1>(c, t) o = LayerNormalization<axis=-1>(j, b) z = MatMul(o, w) y = Neg(z)"""
    )
    x = np.abs(normal(16, 3, 8, 8))
    report, ran = check(found, 30, tmp_path, x=x)
    assert next(each for each in report.operators if each.type == "Conv").precision == "int8"
    assert shaped == "a" or "QLinearConv" in [kind for kind, _ in ran["onnxruntime"]]
    if "openvino" in EXACT:
        compiled = library().Core().compile_model(tmp_path / "int8.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        assert decibels(compiled({"x": x})[0], run(found, x=x)["y"]) > 30


@pytest.mark.parametrize(
    "reduce",
    ["ReduceMean<axes=[1],keepdims=0>(h)", "ReduceMax<axes=[1],keepdims=0>(h)", "ReduceSum<keepdims=0>(h, one)"],
)
@pytest.mark.parametrize("rest", ["z = MatMul(r, w) y = Neg(z)", "y = Neg(r)"])
def test_products_without_bias_that_are_reduced(tmp_path, reduce, rest):
    """OpenVINO must not take the steps of the channels along another axis."""
    text = f"(float[n,6,8] x) => (float[n,8] y) {{ h = MatMul(x, w) r = {reduce} {rest} }}"
    report, _ = check(model(text, **{name: WEIGHTS[name] for name in ("w", "one")}), 25, tmp_path, x=normal(16, 6, 8))
    assert [each.type for each in report.operators[:2]] == ["MatMul", reduce.split("<")[0]]


# --- recipes


def test_dynamic_products(tmp_path):
    recipe = QuantRecipe(dynamic=("[qkv]0|z",), keep_float=("s", "o"))
    found, x = attention(), normal(16, 16, 64)
    report, ran = check(found, 30, tmp_path, recipe, x=x)
    told = [(each.precision, each.reason) for each in report.operators if each.type == "MatMulInteger"]
    assert told == [("int8", "its input is quantized at run time")] * 4
    assert not [
        each for each in report.operators if each.type in ("Cast", "Mul", "DynamicQuantizeLinear")
    ]  # parts of the products
    result, _ = quantized(found, recipe, x=x)
    assert ops(result).count("DynamicQuantizeLinear") == 2  # one for q, k and v
    kinds = [kind for kind, _ in ran["onnxruntime"]]
    assert (
        kinds.count("DynamicQuantizeMatMul") + kinds.count("MatMulIntegerToFloat") == 4 and "MatMulInteger" not in kinds
    )


@pytest.mark.parametrize("turned", [0, 1])
def test_a_dynamic_gemm(tmp_path, turned):
    text = f"(float[n,8] x) => (float[n,5] y) {{ h = Gemm<transB={turned}>(x, w, b) y = Neg(h) }}"
    w = normal(8, 5)
    found = model(text, w=w.T.copy() if turned else w, b=normal(5))
    report, _ = check(found, 35, tmp_path, QuantRecipe(dynamic=("h",)), x=normal(16, 8))
    assert report.operators[0].type == "MatMulInteger"


def test_what_cannot_be_dynamic():
    x = normal(16, 3, 8, 8)
    found = image("z = Conv(r, m) y = Neg(z)")
    with pytest.raises(RequestError, match=r"dynamic 'nothing' matches no operator; quantizable ones are: h, z"):
        quantized(found, QuantRecipe(dynamic=("nothing",)), x=x)
    _, report = quantized(found, QuantRecipe(dynamic=("z",)), x=x)
    assert report.operators[2].precision == "int8"  # as a Conv, its range is the table's
    with pytest.raises(RequestError, match="dynamic is 'z'; give a tuple of patterns"):
        QuantRecipe(dynamic="z")


def test_symmetric_activations(tmp_path):
    found, x = image("a = Conv(h, m) s = Add(a, r) z = Conv(s, m) y = Neg(z)"), normal(16, 3, 8, 8)
    check(found, 24, tmp_path, QuantRecipe(symmetric=True), x=x)
    result, _ = quantized(found, QuantRecipe(symmetric=True), x=x)
    zeros = {
        name: int(query.constant(value))
        for name, value in result.graph.initializers.items()
        if name[1:] == ".zero_point"
    }
    assert zeros["x"[0] + ".zero_point"] == 128 and zeros["r.zero_point"] == 0 and set(zeros.values()) == {0, 128}
    scale = query.constant(result.graph.initializers["x.scale"])
    np.testing.assert_allclose(scale, np.abs(x).max() / 127, rtol=1e-6)


def vpmaddubsw(x, w):
    """u8 [n, k] times s8 [k, m] as AVX2 sums it: pairs of products saturate to 16 bits, then they are added in 32."""
    products = x[:, :, None].astype(np.int64) * w[None].astype(np.int64)
    pairs = np.clip(products[:, 0::2] + products[:, 1::2], -(2**15), 2**15 - 1)
    return pairs.sum(axis=1)


@pytest.mark.parametrize("reduced", [False, True])
def test_reduced_range_avoids_the_saturation_of_16_bit_pairs(reduced):
    w = np.abs(normal(32, 6, scale=0.1)) + 1
    x = np.abs(normal(64, 32, scale=0.1)) + 1
    found = model("(float[n,32] x) => (float[n,6] y) { y = MatMul(x, w) }", w=w)
    result, _ = quantized(found, QuantRecipe(reduced_range=reduced), x=x)
    q, scale = (query.constant(result.graph.initializers[f"y/w.{each}"]) for each in ("quantized", "scale"))
    step = query.constant(result.graph.initializers["x.scale"])
    x_q = np.clip(np.rint(x / step), 0, 255).astype(np.uint8)
    exact, found_sums = x_q.astype(np.int64) @ q.astype(np.int64), vpmaddubsw(x_q, q)
    if reduced:
        np.testing.assert_array_equal(found_sums, exact)
        assert 255 * 2 * 63 <= 2**15 - 1 and np.abs(q).max() == 63  # so it holds for any input
        assert decibels(found_sums * step * scale, x @ w) > 30
    else:
        assert (found_sums < exact).mean() > 0.3 and decibels(found_sums * step * scale, x @ w) < 20


# --- graphs drawn at random


@st.composite
def networks(draw):
    """A float model over images: convolutions, sums, products, pools, joins, functions and moves in any order, of any
    tensors so far.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    body, weights, pool = ["t0 = Conv<pads=[1,1,1,1]>(x, w0, b0)"], {}, ["t0"]

    def weight(name, *shape, fan):
        weights[name] = (rng.standard_normal(shape) * np.sqrt(1.5 / fan)).astype(np.float32)

    weight("w0", 8, 3, 3, 3, fan=27)
    weights["b0"] = rng.normal(0, 0.3, 8).astype(np.float32)
    for number in range(1, draw(st.integers(2, 9))):
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        t, w = f"t{number}", f"w{number}"
        kind = draw(
            st.sampled_from(
                [*("conv", "pointwise", "depthwise") * 2, "relu", "relu6", "add", "add", "gate", "concat", *MOVED]
            )
        )
        if kind == "conv":
            weight(w, 8, 8, 3, 3, fan=72)
            body.append(f"{t} = Conv<pads=[1,1,1,1]>({a}, {w})")
        elif kind == "pointwise":
            weight(w, 8, 8, 1, 1, fan=8)
            body.append(f"{t} = Conv({a}, {w}, b0)")
        elif kind == "depthwise":
            weight(w, 8, 1, 3, 3, fan=9)
            body.append(f"{t} = Conv<pads=[1,1,1,1], group=8>({a}, {w})")
        elif kind == "add":
            body.append(f"{t} = Add({a}, {b})")
        elif kind == "gate":
            body.append(f"{t}g = GlobalAveragePool({b}) {t}s = Sigmoid({t}g) {t} = Mul({a}, {t}s)")
        elif kind == "concat":
            weight(w, 8, 16, 1, 1, fan=16)
            body.append(f"{t}c = Concat<axis=1>({a}, {b}) {t} = Conv({t}c, {w})")
        else:
            body.append(f"{t} = " + {"relu": "Relu({})", "relu6": "Clip({}, zero, six)", **MOVED}[kind].format(a))
        pool.append(t)
    weight("wz", 8, 6, fan=8)
    weights |= {
        "image": np.array([0, 8, 8, 8]),
        "zero": np.float32(0),
        "six": np.float32(6),
        "order": np.arange(8)[::-1].copy(),
    }
    also = draw(st.sampled_from(pool))  # also leaves the graph
    body.append(f"g = GlobalAveragePool({pool[-1]}) f = Flatten(g) z = Gemm(f, wz) y = Neg(z) also = Neg({also})")
    text = f"(float[n,3,8,8] x) => (float[n,6] y, float[n,8,8,8] also) {{ {' '.join(body)} }}"
    return model(text, **{name: array for name, array in weights.items() if re.search(rf"[(, ]{name}[,)]", text)}), rng


MOVED = {
    "max": "MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({})",
    "average": "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>({})",
    "transpose": "Transpose<perm=[0,1,3,2]>({})",
    "reshape": "Reshape({}, image)",
    "gather": "Gather<axis=1>({}, order)",
    "leaky": "LeakyRelu<alpha=0.2>({})",
    "hardswish": "HardSwish({})",
}


@given(networks(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_networks(tmp_path_factory, case, symmetric):
    found, rng = case
    x = rng.standard_normal((24, 3, 8, 8)).astype(np.float32)
    result, report = quantized(found, QuantRecipe(symmetric=symmetric), x=x)
    assert all(each.precision == "int8" for each in report.operators if each.type in ("Conv", "Gemm"))
    assert all(each.reason for each in report.operators if each.precision == "float")
    path, expected = io.save(result, tmp_path_factory.mktemp("random") / "int8.onnx"), run(found, x=x)
    for engine in EXACT:
        session = load(path, engine)
        ran = [
            each
            for each in session.executed({"x": x})
            if each.type in ("Convolution", "QLinearConv", "Conv", "FusedConv", "FullyConnected")
        ]
        assert {each.precision for each in ran} == {"u8"}, (engine, ran)
        for name, output in session.run({"x": x}).items():
            assert decibels(output, expected[name]) > 15, (engine, name, decibels(output, expected[name]))
