"""What the quantizer says of an operator is what engines do: residual networks, layers of all kinds, graphs at random."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.quantizing import GEMMS, TRANSPOSED, check_executed, checked, precisions
from helpers.rewriting import EXACT, model, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.engines.catalog import load
from pipelines.graph import edit, io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fuse_linear import FuseLinear

RESIDUAL = """(float[n,16] x) => (float[n,4] y) {
    h = Gemm(x, w, b) r = Relu(h) s = Add(x, r) i = Gemm(s, w, b) q = Relu(i) t = Add(s, q) y = Gemm(t, v) }"""


CONVS = """(float[n,3,8,8] x) => (float[n,10] y) {
    h = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(h)
    a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Relu(a) b = Conv<pads=[1,1,1,1]>(s, l, kb) c = Add(b, r) d = Relu(c)
    e = Conv<strides=[2,2]>(d, m) f = Conv<pads=[1,1,1,1], strides=[2,2]>(d, l, kb) g = Add(e, f) i = Clip(g, zero, six)
    p = GlobalAveragePool(i) o = Flatten(p) y = Gemm(o, w, wb) }"""


def layer_weights(normal):
    return {
        "x16": {"w": normal(16, 16, scale=0.3), "b": normal(16), "v": normal(16, 4)},
        "convs": {
            **{
                "k": normal(8, 3, 3, 3, scale=0.3),
                "kb": normal(8),
                "l": normal(8, 8, 3, 3, scale=0.15),
                "m": normal(8, 8, 1, 1),
            },
            **{"w": normal(8, 10), "wb": normal(10), "zero": np.float32(0), "six": np.float32(6)},
        },
    }


def check_runs_as_reported(found, folder, **feeds):
    result, report = checked(found, **feeds)
    check_executed(result, report, folder, **feeds)
    path, expected = io.save(result, folder / "int8.onnx"), run(found, **feeds)
    for engine in EXACT:
        output = load(path, engine).run(feeds)
        assert list(output) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(output[name], value, atol=0.06 * np.abs(value).max())
    return result, report


def test_a_residual_mlp_runs_as_reported(normal, tmp_path):
    _, report = check_runs_as_reported(model(RESIDUAL, **layer_weights(normal)["x16"]), tmp_path, x=normal(64, 16))
    assert report.counts() == {"int8": 7}


def test_a_residual_convolutional_net_runs_as_reported(normal, tmp_path):
    result, report = check_runs_as_reported(
        model(CONVS, **layer_weights(normal)["convs"]), tmp_path, x=normal(16, 3, 8, 8)
    )
    assert {how for kind, how in precisions(report) if kind in ("Conv", "Gemm")} == {"int8"}
    assert (
        next(node for node in result.graph if node.outputs[0].name == "y").op_type == "Gemm"
    )  # logits are not quantized


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("h = Gemm(x, w, b) r = Relu(h) y = Neg(r)", 2),
        ("h = MatMul(x, w) r = Relu(h) y = Add(x, r)", 2),
        ("h = Gemm(x, w, b) y = Relu(h)", 2),  # leaves the graph
        ("h = Gemm(x, w, b) r = Clip(h, zero, six) y = Neg(r)", 2),
        ("h = Gemm(x, w, b) r = Clip(h, , half) y = Neg(r)", 2),
        ("h = Gemm(x, w, b) r = Clip(h, half, six) y = Gemm(r, w)", 3),  # bounds that saturation does not keep
        ("h = Gemm(x, w, b) r = Relu(h) c = Concat<axis=1>(r, x) y = Gemm(c, d)", 3),  # x keeps the step that h reads
        ("h = Gemm(x, w, b) r = Relu(h) y = Add(h, r)", 1),
        ("h = Gemm(x, w, b) y = Sigmoid(h)", 1),
        ("h = Gemm(x, w, b) a = Add(h, b) y = Sigmoid(a)", 1),
        ("h = MatMul(x, w) a = Add(h, x) y = Neg(a)", 1),
        ("y = Gemm(x, w, b)", 1),
        ("h = Gemm(x, w, b) r = Relu(h) s = Gemm(r, w) y = Add(r, s)", 2),  # one pair for both readers
        ("h = Gemm(x, w, b) r = Relu(h) a = Neg(r) s = Gemm(r, w) y = Add(a, s)", 2),  # the float reader comes first
    ],
)
def test_int8_layers_run_in_int8(normal, tmp_path, body, steps):
    weights = {"w": normal(16, 16, scale=0.3), "b": normal(16), "d": normal(32, 16, scale=0.2)}
    weights |= {"zero": np.float32(0), "six": np.float32(6), "half": np.float32(0.5)}
    net = model(f"(float[n,16] x) => (float[n,16] y) {{ {body} }}", **weights)
    result, _ = check_runs_as_reported(net, tmp_path, x=normal(64, 16))
    assert sum(node.op_type == "QuantizeLinear" for node in result.graph) == steps


@pytest.mark.parametrize("wide", [True, False])
def test_an_operator_of_another_domain_stays_and_its_bytes_feed_the_next_layer(normal, tmp_path, wide):
    text = f"""<ir_version: 9, opset_import: ["": 17, "other": 1]> g (int64[n,3] ids) => (float[n,5] y{", float[n,1] t" if wide else ""}) {{
        h{", t" if wide else ""} = other.Lookup<shift=3>(ids, , table) x = DequantizeLinear(h, s, z) y = Gemm(x, w, b) }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        "table": np.ones((9, 24), np.uint8),
        "s": np.float32(0.1),
        "z": np.uint8(0),
        "w": normal(24, 5),
        "b": normal(5),
    }
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()
    )
    net = ir.from_proto(proto)
    net.graph[0].outputs[0].type, net.graph[0].outputs[0].shape = (
        ir.TensorType(ir.DataType.UINT8),
        ir.Shape(["n", 24]),
    )
    x = TensorRange(0, 25.5, 0, 25.5, 1)
    table = CalibrationTable(io.digest(net), "minmax", 1, "", {"x": x})
    result, report = quantize(net, QuantRecipe(), table)
    assert [(op.type, op.precision) for op in report.operators] == [("Lookup", "int8"), ("Gemm", "int8")]
    assert "QuantizeLinear" not in ops(result) and len(result.graph[0].outputs) == 1 + wide
    loaded = io.load(io.save(result, tmp_path / "m.onnx"))
    assert io.digest(loaded) == io.digest(result) and loaded.opset_imports == {"": 17, "other": 1}


def test_a_relu_kept_float(normal, tmp_path):
    net, x = (
        model("(float[n,16] x) => (float[n,16] y) { h = Gemm(x, w) r = Relu(h) y = Neg(r) }", w=normal(16, 16)),
        normal(64, 16),
    )
    result, report = checked(net, QuantRecipe(keep_float=("r",)), x=x)
    assert precisions(report) == [("Gemm", "int8"), ("Relu", "float"), ("Neg", "float")]
    check_executed(result, report, tmp_path, x=x)


@pytest.mark.parametrize("text", [GEMMS, TRANSPOSED])
def test_a_bias_of_one_row(normal, text):
    turned = "transB" in text
    w, v = normal(24, 40), normal(40, 5)
    weights = {"w": w.T.copy() if turned else w, "v": v.T.copy() if turned else v}
    b, c, x = normal(40), normal(5), normal(64, 24)
    flat, _ = checked(model(text, **weights, b=b, c=c), x=x)
    row, report = checked(model(text, **weights, b=b[None], c=c[None]), x=x)
    assert report.counts() == {"int8": 3}
    np.testing.assert_array_equal(run(row, x=x)["y"], run(flat, x=x)["y"])


def test_weights_stored_as_float16(normal):
    net, x = model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5)), normal(64, 24)
    edit.compress_fp16(net, minimum=1)
    for name in list(net.graph.initializers):  # as another exporter may call them
        net.graph.initializers[name].name = name.replace(".fp16", "_half")
    net = ir.from_proto(ir.to_proto(net))
    result, report = checked(net, x=x)
    assert precisions(report) == [("Gemm", "int8"), ("Relu", "int8"), ("Gemm", "int8")]
    expected = run(net, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_operators_in_subgraphs_are_listed_as_float(normal):
    text = """(float[n,8] x, bool c) => (float[n,4] y) {
        h = Gemm(x, w) y = If(c) <then_branch = t () => (float[n,4] a) { a = Relu(h) },
                                  else_branch = e () => (float[n,4] b) { b = MatMul(x, w) }> }"""
    net, x = model(text, w=normal(8, 4)), normal(32, 8)
    result, report = quantize(net, QuantRecipe(), calibrate(net, [{"x": x, "c": np.array(True)}]))
    assert [(op.name, op.type, op.precision) for op in report.operators] == [
        ("h", "Gemm", "int8"),
        ("y", "If", "float"),
        ("a", "Relu", "float"),
        ("b", "MatMul", "float"),
    ]
    reasons = ["inside a subgraph of y", "no constant float32 weights of 1024 or more"]
    assert [op.reason for op in report.operators[2:]] == reasons
    expected = run(net, x=x, c=np.array(True))["y"]
    np.testing.assert_allclose(run(result, x=x, c=np.array(True))["y"], expected, atol=0.03 * np.abs(expected).max())


# --- graphs drawn at random


@st.composite
def networks(draw):
    """(float model, feeds): lookups and numbers, joined or not, then fully connected layers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fields, numbers, ids = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.sampled_from(["int32", "int64"]))
    widths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["Gemm", "transB", "MatMul", "MatMul + Add"]))
    signed, shared_range = draw(st.booleans()), draw(st.booleans())
    body, weights = [], {}
    parts = ["numbers"]
    for field in range(fields):
        weights |= {f"T{field}": rng.normal(0, 1, (11, 4)).astype(np.float32), f"c{field}": np.int64(field)}
        body.append(f"i{field} = Gather<axis=1>(ids, c{field}) e{field} = Gather(T{field}, i{field})")
        parts.insert(draw(st.integers(0, len(parts))), f"e{field}")
    x, k = "numbers", numbers
    if fields or shared_range:
        body.append(f"x0 = Concat<axis=1>({', '.join(parts)})")
        x, k = "x0", numbers + 4 * fields
    for number, width in enumerate(widths):
        w = rng.normal(0, 1 / np.sqrt(k), (k, width)).astype(np.float32)
        weights |= {
            f"w{number}": w.T.copy() if kind == "transB" else w,
            f"b{number}": rng.normal(0, 0.3, width).astype(np.float32),
        }
        layer = {
            "Gemm": f"h{number} = Gemm({x}, w{number}, b{number})",
            "transB": f"h{number} = Gemm<transB=1>({x}, w{number}, b{number})",
            "MatMul": f"h{number} = MatMul({x}, w{number})",
            "MatMul + Add": f"m{number} = MatMul({x}, w{number}) h{number} = Add(m{number}, b{number})",
        }[kind]
        body.append(layer)
        x, k = f"h{number}", width
        if number < len(widths) - 1 and draw(st.booleans()):
            body.append(f"r{number} = Relu({x})")
            x = f"r{number}"
    body.append(f"y = Sigmoid({x})" if draw(st.booleans()) else f"y = Neg({x})")
    inputs = f"{ids}[n,{max(fields, 1)}] ids, float[n,{numbers}] numbers" if fields else f"float[n,{numbers}] numbers"
    used = {
        name: array for name, array in weights.items() if f"{name})" in " ".join(body) or f"{name}," in " ".join(body)
    }
    net = model(f"({inputs}) => (float[n,{k}] y) {{ {' '.join(body)} }}", **used)
    values = rng.normal(0, 1, (256, numbers)) if signed else rng.uniform(0, 1, (256, numbers))
    feeds = {"numbers": values.astype(np.float32)}
    if fields:
        feeds["ids"] = rng.integers(0, 11, (256, fields)).astype(ids)
    return net, feeds


@given(networks(), st.booleans(), st.booleans())
@settings(max_examples=8)
def test_random_networks(tmp_path_factory, case, fuse, tables):
    net, feeds = case
    if fuse:
        rewrite(net, [FuseLinear()])
    result, report = checked(net, QuantRecipe(quantize_tables=tables), **feeds)
    layers = [op for op in report.operators if op.type in ("Gemm", "MatMul")]
    assert layers and all(layer.precision == "int8" for layer in layers)
    path = io.save(result, tmp_path_factory.mktemp("random") / "int8.onnx")
    expected = run(net, **feeds)["y"].astype(np.float64)
    check_executed(result, report, path.parent, **feeds)
    outputs = {engine: load(path, engine).run(feeds)["y"] for engine in EXACT}
    for engine, output in outputs.items():
        noise = ((output - expected) ** 2).mean()
        signal = max(((expected - expected.mean()) ** 2).mean(), 1e-3 * (expected**2).mean())
        assert 10 * np.log10(signal / noise) > 25, engine
