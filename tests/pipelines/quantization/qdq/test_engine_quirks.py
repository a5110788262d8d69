"""Every quirk of an engine: on record, worked around in a graph that shows it, and not on a near miss."""

import importlib
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.quantizing import WEIGHTS, check, check_executed, decibels, image, quantized
from helpers.quirks import attention_over_keys, bias_of_the_first_column, recurrent_time_first
from helpers.rewriting import EXACT, model, run
from onnx_ir.passes.common import ShapeInferencePass

from pipelines.engines.openvino.session import library
from pipelines.graph import io, query
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq import engine_quirks
from pipelines.quantization.qdq.engine_quirks import QUIRKS

needs_openvino = pytest.mark.skipif("openvino" not in EXACT, reason="needs openvino, and a CPU where it is exact")
TESTS = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.workaround.rpartition(".")[2])
def test_a_quirk_s_workaround_and_test_exist(quirk):
    assert quirk.engine in ("onnxruntime", "openvino") and re.fullmatch(r"\d+\.\d+", quirk.version)
    assert quirk.fault and quirk.remove_when
    parts = quirk.workaround.split(".")
    owner = importlib.import_module(".".join(parts[:3]))
    for name in parts[3:]:  # a function, or a class and its method
        owner = getattr(owner, name)
    assert callable(owner)
    assert any(re.search(rf"^def {quirk.test}\(", path.read_text(), re.M) for path in TESTS.rglob("test_*.py"))


def test_every_workaround_is_on_record():
    functions = {
        name
        for name, value in vars(engine_quirks).items()
        if callable(value)
        and not name.startswith("_")
        and not isinstance(value, type)
        and value.__module__ == engine_quirks.__name__
    }
    recorded = {quirk.workaround for quirk in QUIRKS}
    assert functions and all(f"{engine_quirks.__name__}.{name}" in recorded for name in functions)


# how a workaround is asked about one node: whether it fires there
FIRES = {
    "subsample_before_pointwise_conv": lambda node, taken: engine_quirks.subsample_before_pointwise_conv(
        node, {}, {"x": TensorRange(0, 1, 0, 1, 1)}, taken
    ),
    "gemm_of_matmul_before_add": lambda node, taken: engine_quirks.gemm_of_matmul_before_add(node),
    "dequantize_around_transpose": lambda node, taken: engine_quirks.dequantize_around_transpose(node, taken),
    "keep_reduced_axes": lambda node, taken: engine_quirks.keep_reduced_axes(node, taken) is not None,
    "needs_output_qdq": lambda node, taken: engine_quirks.needs_output_qdq(node),
    "hide_sizes": lambda node, taken: bool(engine_quirks.hide_sizes(node.graph, taken)),
}
CONV = ("float[n,8,8,8] x", "y = Conv<strides=[2,2]>(x, m)")
GEMM = ("float[n,8] x", "h = MatMul(x, w) y = Add(h, b)")
TURN = ("uint8[n,8] q", "t = Transpose<perm=[1,0]>(q) y = DequantizeLinear(t, half_step, middle)")
REDUCE = ("float[n,6,8] x", "v = DequantizeLinear(w8, half_step) h = MatMul(x, v) y = ReduceSum<keepdims=0>(h, one)")
SIZES = (
    "float[n,8,8,8] x",
    """v = DequantizeLinear(m8, half_step) c = Conv(x, v, kb) s = Shape(c) i = Gather(s, first) e = ConstantOfShape(i)
    j = Cast<to=1>(i) o = Add(e, j) a = ReduceMean<axes=[1,2,3],keepdims=0>(c) y = Add(a, o)""",
)
PLACES = {  # of sizes in a shape
    "second": [1],
    "third": [2],
    "two": [2, 3],
    "three": [3],
    "four": [4],
    "minus": [-1],
    "ones1": [1],
    "wide": [4],
}
ARRAYS = WEIGHTS | {
    "m8": np.ones((8, 8, 1, 1), np.int8),
    "half_step": np.float32(0.5),
    "middle": np.uint8(128),
    "w8": np.ones((8, 8), np.int8),
}


def changed(case, *pairs):
    inputs, body = case
    for old, new in pairs:
        assert old in inputs + body
        inputs, body = inputs.replace(old, new), body.replace(old, new)
    return inputs, body


@pytest.mark.parametrize(
    ("name", "case", "fires"),
    [
        ("subsample_before_pointwise_conv", CONV, True),
        ("subsample_before_pointwise_conv", changed(CONV, ("[2,2]", "[1,1]")), False),
        ("subsample_before_pointwise_conv", changed(CONV, ("strides=", "pads=[1,1,1,1], strides=")), False),
        ("subsample_before_pointwise_conv", changed(CONV, ("x, m", "x, l")), False),  # 3x3
        (
            "subsample_before_pointwise_conv",
            ("uint8[n,8,8,8] q", "x = DequantizeLinear(q, half_step, middle) y = Conv<strides=[2,2]>(x, m)"),
            False,
        ),
        ("gemm_of_matmul_before_add", GEMM, True),
        ("gemm_of_matmul_before_add", changed(GEMM, ("n,8", "n,6,8")), False),
        ("gemm_of_matmul_before_add", changed(GEMM, ("Add(h, b)", "Mul(h, b)")), False),
        ("gemm_of_matmul_before_add", changed(GEMM, ("Add(h, b)", "Add(h, h)")), False),  # reads it twice
        ("dequantize_around_transpose", TURN, True),
        ("dequantize_around_transpose", changed(TURN, ("Transpose<perm=[1,0]>", "Identity")), False),
        ("dequantize_around_transpose", ("float[n,8] x", "y = Transpose<perm=[1,0]>(x)"), False),
        ("keep_reduced_axes", REDUCE, True),
        ("keep_reduced_axes", changed(REDUCE, ("keepdims=0", "keepdims=1")), False),
        ("keep_reduced_axes", changed(REDUCE, ("(x, v)", "(x, w)")), False),  # a float32 product
        ("hide_sizes", SIZES, True),
        ("hide_sizes", changed(SIZES, ("Shape(c)", "Shape<start=0,end=2>(c)")), True),
        ("hide_sizes", changed(SIZES, ("n,8", "4,8")), False),
        ("hide_sizes", changed(SIZES, ("(x, v, kb)", "(x, v)")), False),  # no bias
        ("hide_sizes", changed(SIZES, ("(x, v, kb)", "(x, m, kb)")), False),  # float32
        ("needs_output_qdq", ("float[n,8,8,8] x", "h = Conv(x, m) y = Identity(h)"), True),
        ("needs_output_qdq", ("float[n,8] x", "h = Gemm(x, w, b) y = Relu(h)"), True),
        ("needs_output_qdq", ("float[n,8] x", "h = Gemm(x, w, b) y = Neg(h)"), False),
    ],
)
def test_a_workaround_fires_on_its_graph_and_not_on_a_near_miss(name, case, fires):
    inputs, body = case
    used = {key: array for key, array in ARRAYS.items() if re.search(rf"[(, ]{key}[,)]", body)}
    net = model(f"({inputs}) => (float y) {{ {body} }}", **used)
    net.graph.outputs[0].shape = None
    ShapeInferencePass()(net)
    before, taken = net.clone(), query.used_names(net.graph)
    nodes = list(net.graph)[:1] if name == "needs_output_qdq" else list(net.graph)
    assert any([FIRES[name](node, taken) for node in nodes]) == fires
    onnx.checker.check_model(ir.to_proto(net), full_check=True)
    dtype, key = (np.uint8, "q") if inputs.startswith("uint8") else (np.float32, "x")
    shape = [4 if size == "n" else int(size) for size in re.search(r"\[(.*)\]", inputs)[1].split(",")]
    feeds = {key: np.random.default_rng(0).integers(0, 255, shape).astype(dtype)}
    np.testing.assert_array_equal(run(net, **feeds)["y"], run(before, **feeds)["y"])


def test_strided_convolutions_share_what_they_read():
    text = (
        "(float[n,8,8,8] x) => (float y) { a = Conv<strides=[2,2]>(x, m) c = Conv<strides=[2,2]>(x, m) y = Add(a, c) }"
    )
    net = model(text, m=WEIGHTS["m"])
    pools, ranges, taken = {}, {"x": TensorRange(0, 1, 0, 1, 1)}, query.used_names(net.graph)
    for node in list(net.graph):
        engine_quirks.subsample_before_pointwise_conv(node, pools, ranges, taken)
    assert [node.op_type for node in net.graph] == ["MaxPool", "Conv", "Conv", "Add"]
    assert ranges["x.strided"] == ranges["x"]


def test_strided_pointwise_convolutions_run_in_int8(normal, tmp_path):
    net, x = image("z = Conv<strides=[2,2]>(r, m, kb) y = Neg(z)"), normal(16, 3, 8, 8)
    check(net, 30, tmp_path, x=x)
    check_executed(*quantized(net, x=x), tmp_path, x=x)


def test_a_matmul_before_an_add_runs_in_int8(normal, tmp_path):
    text = "(float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Add(h, x) y = Neg(a) }"
    net, x = model(text, w=WEIGHTS["w"]), normal(64, 8)
    check(net, 30, tmp_path, x=x)
    check_executed(*quantized(net, x=x), tmp_path, x=x)


def test_a_product_behind_a_transpose_runs_in_int8(normal, tmp_path):
    net = image("s = Reshape(r, rows) t = Transpose<perm=[0,2,1]>(s) z = MatMul(t, w) y = Neg(z)")
    x = normal(16, 3, 8, 8)
    check(net, 30, tmp_path, x=x)
    check_executed(*quantized(net, x=x), tmp_path, x=x)


def test_a_convolution_that_is_read_as_float_runs_in_int8(normal, tmp_path):
    net, x = image("z = Conv(r, m) y = Neg(z)"), normal(16, 3, 8, 8)
    check(net, 30, tmp_path, x=x)
    check_executed(*quantized(net, x=x), tmp_path, x=x)


UNTYPED = {
    "ConcatFromSequence": "s = SequenceConstruct(x, x, x) t = ConcatFromSequence<axis=1>(s)",
    "Scan": """i = Transpose<perm=[1,0]>(x) o = Unsqueeze(i, first) e = Squeeze(o, first)
    t, all = Scan<num_scan_inputs=1, body=step (float[n,24] state, float[n] part) => (float[n,24] next, float[n] out)
    { u = Unsqueeze(part, last) next = Add(state, u) out = Identity(part) }>(zeros, e)""",
}


@pytest.mark.parametrize("body", UNTYPED.values(), ids=list(UNTYPED))
def test_a_tensor_from_a_sequence_is_quantized(normal, tmp_path, body):
    net = model(
        f"(float[16,8] x) => (float[16,4] y) {{ {body} r = Relu(t) y = MatMul(r, w) }}",
        w=normal(24, 4),
        **({} if "Sequence" in body else {"zeros": normal(16, 24), "first": np.array([0]), "last": np.array([1])}),
    )
    x = normal(16, 8)
    path, expected = io.save(quantized(net, x=x)[0], tmp_path / "int8.onnx"), run(net, x=x)["y"]
    assert decibels(run(io.load(path), x=x)["y"], expected) > 30
    if "openvino" in EXACT:
        assert decibels(as_users_open(path, x=x)[0], expected) > 30


@pytest.mark.parametrize("shaped", ["t", "x", "a"])
def test_a_token_before_the_patches_of_an_image(normal, tmp_path, shaped):
    """As a vision transformer begins. OpenVINO must not lose the channels' biases where it is given no batch size."""
    net = image(
        f"""a = Conv<strides=[2,2]>(x, k, kb) f = Reshape(a, flat) t = Transpose<perm=[0,2,1]>(f)
            s = Shape({shaped}) n = Gather(s, first) e = Concat<axis=0>(n, sizes) c = Expand(token, e)
            j = Concat<axis=1>(c, t) o = LayerNormalization<axis=-1>(j, b) z = MatMul(o, w) y = Neg(z)"""
    )
    x = np.abs(normal(16, 3, 8, 8))
    report, ran = check(net, 30, tmp_path, x=x)
    assert next(op for op in report.operators if op.type == "Conv").precision == "int8"
    assert "QLinearConv" in [kind for kind, _ in ran["onnxruntime"]]
    if "openvino" in EXACT:
        assert decibels(as_users_open(tmp_path / "int8.onnx", x=x)[0], run(net, x=x)["y"]) > 30


def as_users_open(path, **feeds):
    """The outputs of OpenVINO where nothing is said of the shapes."""
    return list(library().Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds).values())


STATES = "t = ReduceMean<axes=[2],keepdims=0>(r) p = Transpose<perm=[2,0,1]>(t)"


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(x) n = Gather(s, first) e = ConstantOfShape(n) y = Neg(g) y2 = Exp(e)",
        "n = Shape<start=0,end=1>(x) e = ConstantOfShape(n) y = Neg(g) y2 = Exp(e)",
        "s = Shape(g) h = Gather(s, two) i = Gather(h, first) e = ConstantOfShape(i) y = Neg(g) y2 = Exp(e)",
        "s = Shape(q) h = Gather(s, third) e = ConstantOfShape(h) y = Neg(g) y2 = Exp(e)",
        "s = Shape(r) n = Gather(s, first) u = Slice(s, three, four) f = Concat<axis=0>(n, minus, u) "
        "o = Reshape(g, f) y = Neg(o)",
        f"{STATES} y, y2, y3 = LSTM<hidden_size=4>(p, lw, lr)",
        f"{STATES} y, y2 = GRU<hidden_size=4>(p, gw, gr)",
        f"{STATES} y, y2 = RNN<hidden_size=4>(p, rw, rr)",
        f"{STATES} s = Shape(p) n = Gather(s, second) f = Concat<axis=0>(ones1, n, wide) e = ConstantOfShape(f) "
        "y, y2, y3 = LSTM<hidden_size=4>(p, lw, lr, lb, , e, e)",
    ],
)
@needs_openvino
def test_sizes_of_dynamic_shapes_cost_no_bias(normal, tmp_path, body):
    """Batches and images of several sizes, in OpenVINO as it opens the file, where sizes are used as values."""
    outputs = ", ".join(f"float {name}" for name in ("y", "y2", "y3") if re.search(rf"\b{name} ?[=,]", body))
    text = f"""(float[n,3,h,w] x) => ({outputs}) {{ c = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(c)
        q = Conv<pads=[1,1,1,1]>(r, l, kb) g = Conv<pads=[1,1,1,1]>(q, l, kb) {body} }}"""
    constants = WEIGHTS | {name: np.array(place, np.int64) for name, place in PLACES.items()}
    constants |= {
        f"{kind}{side}": normal(1, 4 * gates, width)
        for kind, gates in (("l", 4), ("g", 3), ("r", 1))
        for side, width in (("w", 8), ("r", 4))
    } | {"lb": np.zeros((1, 32), np.float32)}
    net = model(
        text, **{name: constant for name, constant in constants.items() if re.search(rf"[(, ]{name}[,)]", text)}
    )
    for output in net.graph.outputs:
        output.shape = None
    result, _ = quantized(net, x=np.abs(normal(8, 3, 6, 6)))
    path = io.save(result, tmp_path / "int8.onnx")
    for shape in ((1, 3, 6, 6), (5, 3, 6, 6), (2, 3, 9, 4)):
        x = np.abs(normal(*shape))
        for opened, wanted in zip(as_users_open(path, x=x), run(result, x=x).values(), strict=True):
            assert opened.shape == wanted.shape and decibels(opened, wanted) > 20


@needs_openvino
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_a_network_of_int8_layers_and_recurrent_ones(normal, tmp_path, kind, gates, direction):
    """OpenVINO opens recurrent layers of int8 weights beside int8 convolutions."""
    text = f"""(float[n,3,h,1] x) => (float[h,d,n,32] y) {{ c = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(c)
        t = Squeeze(r, last) p = Transpose<perm=[2,0,1]>(t)
        y = {kind}<hidden_size=32,direction="{direction}">(p, lw, lr) }}"""
    both = 2 if direction == "bidirectional" else 1
    weights = {"lw": normal(both, 32 * gates, 8), "lr": normal(both, 32 * gates, 32) / 8}
    net = model(text, k=WEIGHTS["k"], kb=WEIGHTS["kb"], last=np.array([3]), **weights)
    result, report = quantized(net, x=normal(8, 3, 6, 1))
    assert {op.type for op in report.operators if op.precision == "int8"} >= {"Conv", kind}
    path, x = io.save(result, tmp_path / "int8.onnx"), normal(2, 3, 6, 1)
    assert decibels(as_users_open(path, x=x)[0], run(result, x=x)["y"]) > 40


@pytest.mark.parametrize(
    "reduce",
    ["ReduceMean<axes=[1],keepdims=0>(h)", "ReduceMax<axes=[1],keepdims=0>(h)", "ReduceSum<keepdims=0>(h, one)"],
)
@pytest.mark.parametrize("rest", ["z = MatMul(r, w) y = Neg(z)", "y = Neg(r)"])
def test_products_without_bias_that_are_reduced(normal, tmp_path, reduce, rest):
    """OpenVINO must not apply the per-channel scales along another axis."""
    text = f"(float[n,6,8] x) => (float[n,8] y) {{ h = MatMul(x, w) r = {reduce} {rest} }}"
    report, _ = check(model(text, **{name: WEIGHTS[name] for name in ("w", "one")}), 25, tmp_path, x=normal(16, 6, 8))
    assert [op.type for op in report.operators[:2]] == ["MatMul", reduce.split("<")[0]]


@needs_openvino
def test_openvino_still_gives_all_channels_the_bias_of_the_first(tmp_path):
    """The smallest graph that shows it. Where this fails, OpenVINO is mended: `hide_sizes` can go."""
    net = model(
        """(float[n,1,2,2] x) => (float[n,2,2,2] y, float[n] z) {
            a = QuantizeLinear(x, step, zero) b = DequantizeLinear(a, step, zero) k = DequantizeLinear(weight, step)
            c = Conv(b, k, bias) d = QuantizeLinear(c, step, zero) y = DequantizeLinear(d, step, zero)
            s = Shape(x) n = Gather(s, first) z = ConstantOfShape(n) }""",
        step=np.float32(0.5),
        zero=np.uint8(0),
        weight=np.full((2, 1, 1, 1), 2, np.int8),
        bias=np.array([1, 2], np.float32),
        first=np.array([0]),
    )
    path, x = io.save(net, tmp_path / "int8.onnx"), np.ones((3, 1, 2, 2), np.float32)
    wanted = np.broadcast_to(np.array([2, 3], np.float32)[:, None, None], (3, 2, 2, 2))
    np.testing.assert_array_equal(run(net, x=x)["y"], wanted)
    np.testing.assert_array_equal(as_users_open(path, x=x)[0], np.full_like(wanted, 2))
    engine_quirks.hide_sizes(net.graph, query.used_names(net.graph))
    np.testing.assert_array_equal(as_users_open(io.save(net, path), x=x)[0], wanted)


@needs_openvino
@pytest.mark.parametrize(("count", "bias"), [(1, 3), (8, 3), (9, 4)])
def test_openvino_still_gives_all_columns_the_bias_of_the_first(tmp_path, count, bias):
    """The smallest graph that shows it. Where this fails, OpenVINO is mended: `forms.UNFUSED` can go."""
    net, x = bias_of_the_first_column(), np.ones((count, 2), np.float32)
    np.testing.assert_array_equal(run(net, x=x, v=x)["y"], np.full((count, 2), [27, 48], np.float32))
    network = library().Core().read_model(io.save(net, tmp_path / "int8.onnx"))
    network.reshape({"x": [count, 2], "v": [count, 2]})
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    for more, second in (({}, 44 + bias), ({"SNIPPETS_MODE": "DISABLE"}, 48)):
        (y,) = library().Core().compile_model(network, "CPU", options | more)({"x": x, "v": x}).values()
        np.testing.assert_array_equal(y, np.full((count, 2), [27, second], np.float32))


@needs_openvino
def test_openvino_still_keeps_buffers_of_one_key(tmp_path):
    """The smallest graph that shows it. Where this fails, OpenVINO is mended: `probe._fault_of_growth` can go."""
    net = attention_over_keys()
    for more, right in (({}, False), ({"SNIPPETS_MODE": "DISABLE"}, True)):
        options = {"INFERENCE_PRECISION_HINT": "f32"} | more
        request = library().Core().compile_model(io.save(net, tmp_path / "float.onnx"), "CPU", options)
        request = request.create_infer_request()
        for keys in (1, 40):
            batch = {"q": np.ones((1, 2, 8), np.float32), "k": np.linspace(-1, 1, keys * 8, dtype=np.float32)}
            batch["k"] = batch["k"].reshape(1, keys, 8)
            (y,) = request.infer(batch).values()
        assert np.allclose(y, run(net, **batch)["y"], atol=1e-3) is right


@needs_openvino
def test_openvino_still_caches_recurrent_layers_of_static_length_wrongly(normal, tmp_path):
    """The smallest graph that shows it. Where this fails, OpenVINO is mended: growth needs no check from the cache."""
    net, x = recurrent_time_first(), normal(5, 2, 3)
    path, right = io.save(net, tmp_path / "float.onnx"), []
    for _ in range(2):  # compiled, and from the cache
        core = library().Core()
        core.set_property({"CACHE_DIR": str(tmp_path / "cache")})
        network = core.read_model(path)
        network.reshape({"x": [5, -1, 3]})
        (y, *_) = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"x": x}).values()
        right.append(np.allclose(y, run(net, x=x)["y"], atol=1e-5))
    assert right == [True, False]
