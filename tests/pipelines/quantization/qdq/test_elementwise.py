"""Operators between layers, recipes and traps: small graphs that must run in int8 in both engines and stay near float."""

import re

import numpy as np
import pytest
from helpers.quantizing import ATTENTION, LAST, attention, check, checked, decibels, image, quantized
from helpers.rewriting import EXACT, model, run
from helpers.tiers import one_in
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.engines.catalog import load
from pipelines.graph import edit, io, query
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe

# what an engine may do in float beside the layer under test: the first quantize step, the last operator and what brings
# it back
AT_THE_ENDS = {"QuantizeLinear", "Neg", "Subgraph", "Reorder", "Softmax", "Add"}


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
    "depthwise": ("a = Conv<pads=[1,1,1,1], group=8>(r, d, kb) s = Clip(a, zero, six) " + LAST.format("s"), [], 30),
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


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_operators_run_in_int8_in_both_engines(normal, tmp_path, name):
    body, wanted, least = CASES[name]
    report, ran = check(image(body), least, tmp_path, x=normal(16, 3, 8, 8))
    assert [op.type for op in report.operators if op.precision != "int8"] == ["Neg"], report
    kinds = [kind for kind, _ in ran["onnxruntime"]]
    for op_type in set(wanted):
        assert kinds.count(op_type) == wanted.count(op_type), ran
    allowed = AT_THE_ENDS | {"QLinearConcat"}  # its first input is a scale
    for engine, executed in ran.items():
        assert [
            kind for kind, precision in executed if precision == "f32" and kind not in allowed and kind != "Reshape"
        ] == [], (
            engine,
            executed,
        )
    assert kinds.count("QuantizeLinear") == 1 and kinds.count("DequantizeLinear") <= 1  # at the ends


@pytest.mark.parametrize("function", ["HardSwish(i)", "Tanh(i)", "PRelu(i, slope)", "Elu(i)"])
def test_functions_without_an_integer_kernel_stand_between_bytes(normal, tmp_path, function):
    report, _ = check(
        image(f"i = Conv(r, m) s = {function} t = Add(s, r) " + LAST.format("t")), 24, tmp_path, x=normal(16, 3, 8, 8)
    )
    decisions = {op.type: (op.precision, op.reason) for op in report.operators}
    assert decisions[function.split("(")[0]] == ("float", "computed in float between int8 tensors") and decisions[
        "Add"
    ] == (
        "int8",
        "",
    )


def test_a_function_takes_the_numbers_behind_it(normal, tmp_path):
    """PaddleOCR's networks scale and shift each hard swish by a number: one function, without bytes inside."""
    body = "i = Conv(r, m) f = HardSwish(i) s = Mul(six, f) t = Add(s, six) u = Mul(t, r) " + LAST.format("u")
    report, _ = check(image(body), 24, tmp_path, x=normal(16, 3, 8, 8))
    decisions = {op.name: (op.precision, op.reason) for op in report.operators}
    assert decisions["s"] == decisions["t"] == ("float", "it is one function with the operator before it")
    assert decisions["u"] == ("int8", "")
    other = image(body.replace("Mul(t, r)", "Mul(t, s)"))  # the bytes of the product have a reader of their own
    report, _ = check(other, 20, tmp_path, x=normal(16, 3, 8, 8))
    assert {op.name: op.precision for op in report.operators}["t"] == "int8"


def test_the_last_operators_stay_float(normal, tmp_path):
    net = image(
        "a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Add(a, r) t = Relu(s) g = GlobalAveragePool(t) y = Softmax<axis=1>(g)"
    )
    report, _ = check(net, 30, tmp_path, x=normal(16, 3, 8, 8))
    decisions = {op.name: (op.precision, op.reason) for op in report.operators}
    assert decisions["s"] == ("float", "nothing after it is int8") == decisions["g"] and decisions["a"] == ("int8", "")


def test_a_product_with_something_computed_from_constants_stays_float(normal, tmp_path):
    report, _ = check(
        image("c = Relu(half) e = Reshape(c, same) s = Mul(r, e) " + LAST.format("s")),
        30,
        tmp_path,
        x=normal(16, 3, 8, 8),
    )
    decisions = {op.name: (op.precision, op.reason) for op in report.operators}
    assert decisions["s"] == ("float", "its input e is float") and decisions["z"] == ("int8", "")


def test_steps_that_cancel_are_removed(normal):
    net = image(
        "a = Conv(r, m) s = Concat<axis=1>(r, r) t = Transpose<perm=[0,1,3,2]>(s) z = Conv(t, c2) u = Add(z, a) y = "
        "Neg(u)"
    )
    result, _ = quantized(net, x=normal(16, 3, 8, 8))
    for node in result.graph:
        source = node.inputs[0].producer() if node.op_type == "QuantizeLinear" else None
        if source is not None and source.op_type == "DequantizeLinear":
            assert [query.constant(parameter).item() for parameter in source.inputs[1:]] != [
                query.constant(parameter).item() for parameter in node.inputs[1:]
            ]


def test_a_relu_beside_another_reader(normal, tmp_path):
    body = "a = Conv(r, m) s = Add(a, r) t = Relu(s) c = Conv(t, m) u = Add(c, s) " + LAST.format("u")
    report, ran = check(image(body), 28, tmp_path, x=normal(16, 3, 8, 8))
    operators = {op.name: op for op in report.operators}
    assert operators["t"].precision == "float" and operators["t"].reason == "computed in float between int8 tensors"
    assert [kind for kind, _ in ran["onnxruntime"]].count("QLinearAdd") == 2


def test_an_output_that_is_read_inside_too(normal, tmp_path):
    net = image("a = Conv(r, m) s = Add(a, r) z = Conv(s, m) y = Neg(z)", outputs="float y, float s, float r")
    report, _ = check(net, 28, tmp_path, x=normal(16, 3, 8, 8))
    assert {op.precision for op in report.operators if op.type in ("Conv", "Add")} == {"int8"}


def test_one_weight_of_two_convolutions(normal, tmp_path):
    report, _ = check(
        image("a = Conv(r, m, kb) i = Conv(a, m) s = Add(a, i) " + LAST.format("s")),
        24,
        tmp_path,
        x=normal(16, 3, 8, 8),
    )
    assert report.counts() == {"int8": 6, "float": 1}


def test_several_inputs(normal, tmp_path):
    net = image("p = Conv(q, m) s = Add(p, r) z = Conv(s, m) y = Neg(z)", q="n,8,8,8")
    report, _ = check(net, 30, tmp_path, x=normal(16, 3, 8, 8), q=normal(16, 8, 8, 8))
    assert report.counts() == {"int8": 5, "float": 1}


def test_weights_in_half_precision(normal, tmp_path):
    net = image("a = Conv(r, m, kb) s = Add(a, r) " + LAST.format("s"))
    edit.compress_fp16(net, minimum=1)
    report, _ = check(net, 30, tmp_path, x=normal(16, 3, 8, 8))
    assert report.counts() == {"int8": 5, "float": 1}


@pytest.mark.parametrize("opset", one_in(2, [13, 15, 18, 19, 21, 23]))
def test_opsets(normal, tmp_path, opset):
    mean = "ReduceMean<axes=[2,3], keepdims=0>(t)" if opset < 18 else "ReduceMean<keepdims=0>(t, axes)"
    net = image(f"a = Conv(r, m) s = Add(a, r) t = Relu(s) g = {mean} z = Gemm(g, w, b) y = Neg(z)", opset)
    report, ran = check(net, 34, tmp_path, x=normal(16, 3, 8, 8))
    assert report.counts() == {"int8": 8, "float": 1}
    assert {"QLinearAdd", "QLinearGlobalAveragePool", "QGemm"} <= {kind for kind, _ in ran["onnxruntime"]}


def test_a_mean_over_something_else_stays_float(normal, tmp_path):
    report, _ = check(
        image("s = ReduceMean<axes=[1]>(r) z = MatMul(s, w) y = Neg(z)"), 30, tmp_path, x=normal(16, 3, 8, 8)
    )
    assert {op.type: op.reason for op in report.operators}["ReduceMean"] == "its mean is not over height and width"


def test_products_of_two_activations(normal, tmp_path):
    report, ran = check(attention(normal), 30, tmp_path, x=normal(16, 16, 64))
    operators = {op.name: op for op in report.operators}
    assert all(op.precision == "int8" for op in report.operators if op.type == "MatMul")
    assert (
        operators["p"].reason == "Softmax has no int8 form here"
        and operators["q1"].reason == "engines make it part of the product before it"
    )
    kinds = [kind for kind, _ in ran["onnxruntime"]]
    assert sum(kinds.count(op_type) for op_type in ("MatMulIntegerToFloat", "QLinearMatMul")) == 6
    if "openvino" in EXACT:
        assert [precision for kind, precision in ran["openvino"] if kind == "FullyConnected"] == ["u8"] * 4


def test_attention_masked_by_infinity(normal, tmp_path):
    net = attention(
        normal,
        ATTENTION.replace("p = Softmax<axis=-1>(s)", "m = Add(s, mask) p = Softmax<axis=-1>(m)"),
        mask=np.triu(np.full((16, 16), -np.inf, np.float32), 1),
    )
    report, _ = check(net, 30, tmp_path, x=normal(16, 16, 64))
    assert all(op.precision == "int8" for op in report.operators if op.type == "MatMul")
    assert "m" not in calibrate(net, [{"x": normal(16, 16, 64)}]).tensors


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
@settings(max_examples=8)
def test_random_networks(tmp_path_factory, case, symmetric):
    net, rng = case
    x = rng.standard_normal((24, 3, 8, 8)).astype(np.float32)
    result, report = quantized(net, QuantRecipe(symmetric=symmetric), x=x)
    assert all(op.precision == "int8" for op in report.operators if op.type in ("Conv", "Gemm"))
    assert all(op.reason for op in report.operators if op.precision == "float")
    path, expected = io.save(result, tmp_path_factory.mktemp("random") / "int8.onnx"), run(net, x=x)
    for engine in EXACT:
        session = load(path, engine)
        ran = [
            op
            for op in session.executed({"x": x})
            if op.type in ("Convolution", "QLinearConv", "Conv", "FusedConv", "FullyConnected")
        ]
        assert {op.precision for op in ran} == {"u8"}, (engine, ran)
        for name, output in session.run({"x": x}).items():
            assert decibels(output, expected[name]) > 15, (engine, name, decibels(output, expected[name]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = Neg(x) d = Conv<group=8,pads=[1,1,1,1]>(a, k) y = Neg(d)", "float"),
        ("a = Conv(x, w) d = Conv<group=8,pads=[1,1,1,1]>(a, k) y = Neg(d)", "int8"),
        ("a = Neg(x) d = Conv<group=8,pads=[1,1,1,1]>(a, k) y = Conv(d, w)", "int8"),
        ("a = Neg(x) d = Conv<group=8,pads=[1,1,1,1]>(a, k) e = Conv(a, w) y = Neg(d) z = Neg(e)", "int8"),
        ("a = Neg(x) d = Conv<group=2,pads=[1,1,1,1]>(a, v) y = Neg(d)", "int8"),
        ("a = Softmax<axis=1>(x) d = Conv(a, o) y = Neg(d)", "float"),
        ("a = Conv(x, w) d = Conv(a, o) y = Neg(d)", "int8"),
        ("d = Conv(x, o) y = Neg(d)", "int8"),
        ("a = Softmax<axis=1>(x) d = Conv<group=2,pads=[0,0,1,1]>(a, u) y = Neg(d)", "int8"),
    ],
)
def test_layers_of_few_products_between_float_operators_stay_float(normal, text, expected):
    outputs = "float[n,c,6,6] y" + (", float[n,8,6,6] z" if " z = " in text else "")
    weights = {"k": normal(8, 1, 3, 3), "w": normal(8, 8, 1, 1), "v": normal(8, 4, 3, 3)}
    weights |= {"o": normal(1, 8, 1, 1), "u": normal(8, 4, 2, 2)}
    net = model(f"(float[n,8,6,6] x) => ({outputs}) {{ {text} }}", **weights)
    for recipe, precision in ((QuantRecipe(), "int8"), (QuantRecipe(only_faster=True), expected)):
        _, report = quantized(net, recipe, x=normal(4, 8, 6, 6))
        assert next(op for op in report.operators if op.name == "d").precision == precision


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = Gemm(x, w) b = Gemm(x, v) s = Sigmoid(a) t = Tanh(b) d = Mul(s, t) y = Gemm(d, w)", "float"),
        ("a = Gemm(x, w) s = Sigmoid(a) d = Mul(a, s) y = Gemm(d, w)", "int8"),
        ("a = Gemm(x, w) b = Gemm(x, v) d = Mul(a, b) y = Gemm(d, w)", "int8"),
    ],
)
def test_gates_of_rows_stay_float(normal, text, expected):
    """As in cells of an LSTM that an exporter unrolled; SiLU is no gate."""
    graph = model(f"(float[n,8] x) => (float[n,8] y) {{ {text} }}", w=normal(8, 8), v=normal(8, 8))
    for recipe, precision in ((QuantRecipe(), "int8"), (QuantRecipe(only_faster=True), expected)):
        _, report = quantized(graph, recipe, x=normal(16, 8))
        assert next(operator for operator in report.operators if operator.name == "d").precision == precision


@pytest.mark.parametrize(("attributes", "int8"), [("", True), (", pads=[1,1,1,1]", False)])
def test_pools_in_ceil_mode_count_the_pixels_of_the_tensor(normal, attributes, int8):
    """transformers' EfficientNet ends with a window larger than its maps; onnxruntime divides by all of it in int8."""
    window = f"kernel_shape=[4,4], strides=[4,4], ceil_mode=1, count_include_pad=1{attributes}"
    text = f"""(float[n,4,6,6] x) => (float[n,4,h,v] y) {{
        a = Conv(x, w) b = AveragePool<{window}>(a) y = Conv(b, w) }}"""
    net, x = model(text, w=normal(4, 4, 1, 1)), normal(8, 4, 6, 6)
    result, report = checked(net, x=x)
    assert {op.precision for op in report.operators if op.type == "AveragePool"} == {"int8" if int8 else "float"}
    wanted, got = run(net, x=x)["y"], run(result, x=x)["y"]
    assert np.square(wanted - got).sum() < 0.01 * np.square(wanted).sum()
