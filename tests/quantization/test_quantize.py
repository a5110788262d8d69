"""The quantizer against integer arithmetic in numpy, against onnxruntime's own quantizer, and on graphs drawn at random."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime.quantization as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizing import RNG, check_executed, checked, input_qparams, layer, normal, precisions, to_uint8
from rewriting import EXACT, model, ops, run

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.graph import edit, io, query
from pipelines.quantization.calibrate import CalibrationTable, TensorRange, calibrate
from pipelines.quantization.quantize import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fuse_linear import FuseLinear


def weights_of(result):
    """{float weight: (int8 weight, scales)} of the operators' second inputs."""
    found = {}
    for node in result.graph:
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            q, s, _ = node.inputs[1].producer().inputs
            found[q.name.removesuffix(".quantized").split("/", 1)[1]] = (query.constant(q), query.constant(s))
    return found


TWO = "(float[n,24] x) => (float[n,5] y) {{ h = {} r = Relu(h) {} }}"


GEMMS = TWO.format("Gemm(x, w, b)", "y = Gemm(r, v, c)")


TRANSPOSED = TWO.format("Gemm<transB=1>(x, w, b)", "y = Gemm<transB=1>(r, v, c)")


MATMULS = TWO.format("MatMul(x, w)", "y = MatMul(r, v)")


@pytest.mark.parametrize("text", [GEMMS, TRANSPOSED, MATMULS], ids=["Gemm", "Gemm transB", "MatMul"])
@pytest.mark.parametrize("signed", [True, False], ids=["asymmetric", "non-negative"])
@pytest.mark.parametrize("optimized", [True, False], ids=["engine", "plain"])
def test_two_layers_against_integers(text, signed, optimized):
    w, b, v, c = normal(24, 40), normal(40), normal(40, 5), normal(5)
    x = normal(256, 24) if signed else np.abs(normal(256, 24))
    turned = "transB" in text
    weights = {"w": w.T.copy() if turned else w, "v": v.T.copy() if turned else v}
    if "Gemm" in text:
        weights |= {"b": b, "c": c}
    else:
        b, c = np.zeros_like(b), np.zeros_like(c)
    result, report = checked(model(text, **weights), x=x)
    kind = text.split("h = ")[1][:4]
    assert [(each[:4], how) for each, how in precisions(report)] == [(kind, "int8"), ("Relu", "int8"), (kind, "int8")]
    between = next(value for node in result.graph for value in node.outputs if value.name == "r.quantized")
    result.graph.outputs.append(between)
    found = run(result, optimized, x=x)

    x_scale, zero = input_qparams(x)
    assert (zero > 0) == signed
    sums, step = layer(to_uint8(x, x_scale, zero), zero, x_scale, w, b)
    r_scale, _ = input_qparams(np.maximum(x @ w + b, 0))
    r_q = np.clip(np.rint(sums * step / r_scale), 0, 255).astype(
        np.int64
    )  # requantized: half to even; the clip at 0 is the ReLU
    off = np.abs(found["r.quantized"].astype(np.int64) - r_q)
    assert off.max() <= 1 and (off > 0).mean() < 0.01
    sums, step = layer(found["r.quantized"].astype(np.int64), 0, r_scale, v, c)
    np.testing.assert_allclose(found["y"], sums * step, rtol=1e-5, atol=float(step.max()))
    np.testing.assert_allclose(found["y"], np.maximum(x @ w + b, 0) @ v + c, atol=0.03 * np.abs(found["y"]).max())


def conv(x, w, strides=1, pad=1, groups=1):
    """Integer convolution of [n, c, h, w], padded with zeros."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    patches = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))[:, :, ::strides, ::strides]
    ins, outs = x.shape[1] // groups, w.shape[0] // groups
    parts = [
        np.einsum("nchwij,ocij->nohw", patches[:, g * ins : (g + 1) * ins], w[g * outs : (g + 1) * outs])
        for g in range(groups)
    ]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_convolution_against_integers(tmp_path, groups, bias, signed):
    w, b = normal(8, 4 // groups, 3, 3), normal(8)
    x = normal(3, 4, 9, 9) if signed else np.abs(normal(3, 4, 9, 9))
    text = f"""(float[n,4,9,9] x) => (float[n,8,a,b] y) {{
        y = Conv<group={groups}, pads=[1,1,1,1], strides=[2,2]>(x, w{", bias" if bias else ""}) }}"""
    found = model(text, w=w, **({"bias": b} if bias else {}))
    result, report = checked(found, x=x)
    assert precisions(report) == [("Conv", "int8")]
    scale, zero = input_qparams(x)
    w_scale = (np.abs(w).reshape(8, -1).max(axis=1) / 127).astype(np.float32)
    w_q = np.rint(w / w_scale[:, None, None, None]).astype(np.int64)
    step = (scale * w_scale).astype(np.float64)[:, None, None]
    # what is padded is zero, so the zero point's term differs at the borders: it is taken out before padding
    sums = conv(to_uint8(x, scale, zero) - zero, w_q, 2, 1, groups)
    if bias:
        sums = sums + np.rint(b / step.ravel()).astype(np.int64)[:, None, None]
    exact = sums * step
    y_scale, y_zero = input_qparams(np.asarray(run(found, x=x)["y"]))
    path = io.save(result, tmp_path / "int8.onnx")
    for output in (run(result, x=x)["y"], *(load(path, engine).run({"x": x})["y"] for engine in EXACT)):
        off = np.abs(np.rint(output / y_scale) + y_zero - to_uint8(exact, y_scale, y_zero))
        assert off.max() <= 1 and (off > 0).mean() < 0.01
    check_executed(result, report, tmp_path, x=x)


# --- the oracle


class Reader(oracle.CalibrationDataReader):
    def __init__(self, batches):
        self.batches = iter(batches)

    def get_next(self):
        return next(self.batches, None)


def test_parameters_are_those_of_onnxruntimes_quantizer(tmp_path):
    """quantize_static with MinMax, per-channel symmetric int8 weights and asymmetric uint8 activations."""
    found = model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5))
    x = normal(500, 24)
    result, _ = checked(found, x=x)
    source = io.save(found, tmp_path / "m.onnx")
    oracle.quantize_static(
        str(source),
        str(tmp_path / "q.onnx"),
        Reader([{"x": x[:200]}, {"x": x[200:]}]),
        quant_format=oracle.QuantFormat.QDQ,
        per_channel=True,
        activation_type=oracle.QuantType.QUInt8,
        weight_type=oracle.QuantType.QInt8,
        calibrate_method=oracle.CalibrationMethod.MinMax,
        extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
    )
    theirs = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "q.onnx").graph.initializer}
    ours = {name: query.constant(value) for name, value in result.graph.initializers.items()}
    for name, owner in (("w", "h"), ("v", "y")):
        # onnxruntime widens the range by a hair in float32, so a value that lies between two steps may fall on the
        # other side
        np.testing.assert_allclose(ours[f"{owner}/{name}.scale"], theirs[f"{name}_scale"], rtol=1e-6)
        off = np.abs(ours[f"{owner}/{name}.quantized"].astype(int) - theirs[f"{name}_quantized"])
        assert off.max() <= 1 and (off > 0).mean() < 1e-3
    for name in ("x", "r"):
        np.testing.assert_allclose(ours[f"{name}.scale"], theirs[f"{name}_scale"], rtol=1e-6)
        assert ours[f"{name}.zero_point"] == theirs[f"{name}_zero_point"]
    for name, owner in (("b", "h"), ("c", "y")):
        off = np.abs(ours[f"{owner}/{name}.quantized"].astype(np.int64) - theirs[f"{name}_quantized"])
        assert off.max() <= 2


# --- what stays, what moves


def mlp():
    return model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5))


def test_same_inputs_same_bytes(tmp_path):
    found, x = mlp(), normal(64, 24)
    table = calibrate(found, [{"x": x}])
    first, second = (
        io.save(quantize(each, QuantRecipe(), table)[0], tmp_path / f"{number}.onnx").read_bytes()
        for number, each in enumerate((found, found.clone()))
    )
    again = io.load(io.save(found, tmp_path / "float.onnx"))
    third = io.save(quantize(again, QuantRecipe(), calibrate(again, [{"x": x}]))[0], tmp_path / "2.onnx").read_bytes()
    assert first == second == third


def test_a_table_of_another_graph_is_refused():
    found, other = mlp(), mlp()
    with pytest.raises(RequestError, match="the calibration table was made for the graph"):
        quantize(found, QuantRecipe(), calibrate(other, [{"x": normal(4, 24)}]))


def test_an_old_opset_is_refused():
    found = model("(float[n,3] x) => (float[n,3] y) { y = MatMul(x, w) }", opset=12, w=normal(3, 3))
    table = CalibrationTable(io.digest(found), "minmax", 1, "", {"x": TensorRange(-1, 1, -1, 1, 3)})
    for refuse in (lambda: quantize(found, QuantRecipe(), table), lambda: calibrate(found, iter([{"never": "run"}]))):
        with pytest.raises(RequestError, match="the model has opset 12, int8 per channel needs 13 or newer"):
            refuse()


def test_the_report():
    found, x = mlp(), normal(64, 24)
    recipe = QuantRecipe(observer="kl")
    _, report = checked(found, recipe, observer="kl", x=x)
    assert report.counts() == {"int8": 3} and report.graph == io.digest(found)
    assert report.to_json() == {
        "graph": report.graph,
        "recipe": recipe.to_json(),
        "operators": [
            {"name": "h", "type": "Gemm", "precision": "int8", "reason": ""},
            {
                "name": "r",
                "type": "Relu",
                "precision": "int8",
                "reason": "fused by engines into the operator before it",
            },
            {"name": "y", "type": "Gemm", "precision": "int8", "reason": ""},
        ],
    }


def test_the_report_names_the_observer_that_chose_the_ranges():
    _, report = checked(mlp(), QuantRecipe(), observer="kl", x=normal(64, 24))
    assert report.recipe.observer == "kl"


def test_operators_without_a_name_are_told_apart():
    found = mlp()
    assert not found.graph[0].name
    found.graph[1].name = "h"  # what the first one would be called
    _, report = checked(found, QuantRecipe(keep_float=("y",)), x=normal(64, 24))
    assert [(each.type, each.precision) for each in report.operators] == [
        ("Gemm", "int8"),
        ("Relu", "int8"),
        ("Gemm", "float"),
    ]


def test_keep_float_keeps_layers_and_what_moves():
    text = "(float[n,4] a, float[n,4] b) => (float[n,5] y) { x = Concat<axis=1>(a, b) h = Gemm(x, w) y = Gemm(h, v) }"
    found = model(text, w=normal(8, 6), v=normal(6, 5))
    feeds = {"a": normal(32, 4), "b": normal(32, 4)}
    _, report = checked(found, QuantRecipe(keep_float=("h",)), **feeds)
    assert precisions(report) == [("Concat", "float"), ("Gemm", "float"), ("Gemm", "int8")]
    assert report.operators[1].reason == "kept float by the recipe"
    result, report = checked(found, QuantRecipe(keep_float=("x",)), **feeds)
    assert precisions(report) == [("Concat", "float"), ("Gemm", "int8"), ("Gemm", "int8")]
    assert report.operators[0].reason == "kept float by the recipe"
    assert ops(result)[:2] == ["Concat", "QuantizeLinear"]
    _, report = checked(found, QuantRecipe(keep_float=(".*",)), **feeds)
    assert report.counts() == {"float": 3}
    _, report = checked(found, **feeds)
    assert report.counts() == {"int8": 3}


def test_reduced_range_stays_within_seven_bits():
    found, x = mlp(), normal(64, 24)
    full, reduced = (weights_of(checked(found, QuantRecipe(reduced_range=each), x=x)[0]) for each in (False, True))
    for name, (q, scale) in reduced.items():
        assert np.abs(q.astype(int)).max() == 63 and np.abs(full[name][0].astype(int)).max() == 127
        np.testing.assert_allclose(scale / full[name][1], 127 / 63, rtol=1e-6)


LOOKED_UP = "(int64[n] i, float[n,3] x) => (float[n,5] y) { e = Gather(T, i) c = Concat<axis=1>(e, x) y = Gemm(c, w) }"


@pytest.mark.parametrize("tables", [True, False])
def test_tables(tables):
    found = model(LOOKED_UP, T=normal(50, 4), w=normal(7, 5))
    feeds = {"i": RNG.integers(0, 50, 64), "x": normal(64, 3)}
    result, report = checked(found, QuantRecipe(quantize_tables=tables), **feeds)
    stored = {value.dtype for value in result.graph.initializers.values() if value.shape == (50, 4)}
    assert stored == {ir.DataType.UINT8 if tables else ir.DataType.FLOAT}
    assert precisions(report) == [("Gather", "int8" if tables else "float"), ("Concat", "int8"), ("Gemm", "int8")]
    assert tables or report.operators[0].reason == "the recipe keeps tables float"
    expected = run(found, **feeds)["y"]
    np.testing.assert_allclose(run(result, **feeds)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_both_forms_of_a_table_compute_the_same_bits():
    found = model(LOOKED_UP, T=normal(50, 4), w=normal(7, 5))
    feeds = {"i": RNG.integers(0, 50, 64), "x": normal(64, 3)}
    stored, looked_up = (
        run(checked(found, QuantRecipe(quantize_tables=each), **feeds)[0], **feeds)["y"] for each in (True, False)
    )
    np.testing.assert_array_equal(stored, looked_up)


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        ("y = Gemm<transA=1>(x, w)", {"w": normal(7, 4)}, "its input is transposed (transA)"),
        ("y = Gemm<alpha=0.5>(x, w)", {}, "alpha or beta is not 1"),
        ("y = Gemm<beta=0.5>(x, w, b)", {}, "alpha or beta is not 1"),
        ("y = Gemm(x, v)", {}, "its weights are not constant"),
        ("y = Gemm(x, w, c)", {}, "its bias is not a constant row"),
        ("y = Gemm(x, w, b)", {"b": np.float32(1)}, "its bias is not a constant row"),
        ("y = MatMul(x, w)", {"w": normal(8)}, "its weights are a vector"),
        ("y = MatMul(k, w)", {}, "no calibrated range for its input k"),
        ("y = Sigmoid(x)", {}, "its input x is float"),
        ("y = Softmax(x)", {}, "Softmax has no int8 form here"),
        ("a = Add(x, x) y = Relu(a)", {}, "Relu has no int8 form here"),
    ],
)
def test_why_an_operator_stays_float(text, weights, reason):
    found = model(
        f"(float[n,8] x, float[8,4] v, float[n,4] c) => (float y) {{ {text} }}",
        **{"w": normal(8, 4), "b": normal(4), "k": normal(7, 8)} | weights,
    )
    found.graph.outputs[0].shape = None
    feeds = {"x": normal(7, 8), "v": normal(8, 4), "c": normal(7, 4)}
    result, report = checked(found, **feeds)
    assert report.operators[-1].precision == "float" and report.operators[-1].reason == reason
    np.testing.assert_array_equal(run(result, **feeds)["y"], run(found, **feeds)["y"])


def test_a_convolution_whose_weights_are_an_input_stays_float():
    found = model("(float[n,2,5,5] x, float[3,2,3,3] w) => (float[n,3,3,3] y) { y = Conv(x, w) }")
    _, report = checked(found, x=normal(2, 2, 5, 5), w=normal(3, 2, 3, 3))
    assert report.operators[0].reason == "its weights or bias are not constant"


def test_a_relu_after_a_float_operator_is_not_called_int8():
    text = "(float[n,8] x) => (float[n,4] y) { s = Sigmoid(x) r = Relu(s) y = Gemm(r, w) }"
    _, report = checked(model(text, w=normal(8, 4)), x=normal(64, 8))
    assert precisions(report) == [("Sigmoid", "float"), ("Relu", "float"), ("Gemm", "int8")]


def test_index_arithmetic_is_called_integer():
    text = "(int64[n] i) => (float[n,5] y) { j = Add(i, one) e = Gather(T, j) y = Gemm(e, w) }"
    found = model(text, T=normal(9, 4), w=normal(4, 5), one=np.int64(1))
    _, report = checked(found, i=RNG.integers(0, 8, 16))
    assert precisions(report) == [("Add", "integer"), ("Gather", "int8"), ("Gemm", "int8")]


def test_an_export_without_names_types_and_with_constant_nodes():
    """Straight from an exporter, not rewritten first."""
    text = """(float[n,3] x) => (float[n,2] y) {
        w = Constant<value = float[3,2] {1, -2, 3, 4, -5, 6}>() i = Identity(x) h = MatMul(i, w) r = Relu(h) y = MatMul(r, v) }"""
    found, x = model(text, v=normal(2, 2)), normal(64, 3)
    result, report = checked(found, x=x)
    assert precisions(report) == [("MatMul", "int8"), ("Relu", "int8"), ("MatMul", "int8")]
    assert [each.name for each in report.operators] == ["h", "r", "y"]
    expected = run(found, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_an_old_file_that_lists_its_weights_as_inputs():
    found, x = (
        model("(float[n,3] x, float[3,2] w) => (float[n,2] y) { y = MatMul(x, w) }", w=normal(3, 2)),
        normal(64, 3),
    )
    result, report = checked(found, x=x)
    assert report.counts() == {"int8": 1} and [each.name for each in result.graph.inputs] == ["x"]
    np.testing.assert_allclose(run(result, x=x)["y"], run(found, x=x)["y"], atol=0.03)


# --- what runs

RESIDUAL = """(float[n,16] x) => (float[n,4] y) {
    h = Gemm(x, w, b) r = Relu(h) s = Add(x, r) i = Gemm(s, w, b) q = Relu(i) t = Add(s, q) y = Gemm(t, v) }"""


CONVS = """(float[n,3,8,8] x) => (float[n,10] y) {
    h = Conv<pads=[1,1,1,1]>(x, k, kb) r = Relu(h)
    a = Conv<pads=[1,1,1,1]>(r, l, kb) s = Relu(a) b = Conv<pads=[1,1,1,1]>(s, l, kb) c = Add(b, r) d = Relu(c)
    e = Conv<strides=[2,2]>(d, m) f = Conv<pads=[1,1,1,1], strides=[2,2]>(d, l, kb) g = Add(e, f) i = Clip(g, zero, six)
    p = GlobalAveragePool(i) o = Flatten(p) y = Gemm(o, w, wb) }"""


def layer_weights():
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


def test_a_residual_mlp_runs_as_reported(tmp_path):
    _, report = check_runs_as_reported(model(RESIDUAL, **layer_weights()["x16"]), tmp_path, x=normal(64, 16))
    assert report.counts() == {"int8": 7}


def test_a_residual_convolutional_net_runs_as_reported(tmp_path):
    result, report = check_runs_as_reported(model(CONVS, **layer_weights()["convs"]), tmp_path, x=normal(16, 3, 8, 8))
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
def test_int8_layers_run_in_int8(tmp_path, body, steps):
    weights = {"w": normal(16, 16, scale=0.3), "b": normal(16), "d": normal(32, 16, scale=0.2)}
    weights |= {"zero": np.float32(0), "six": np.float32(6), "half": np.float32(0.5)}
    found = model(f"(float[n,16] x) => (float[n,16] y) {{ {body} }}", **weights)
    result, _ = check_runs_as_reported(found, tmp_path, x=normal(64, 16))
    assert sum(node.op_type == "QuantizeLinear" for node in result.graph) == steps


@pytest.mark.parametrize("wide", [True, False])
def test_an_operator_of_another_domain_stays_and_its_bytes_feed_the_next_layer(tmp_path, wide):
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
    found = ir.from_proto(proto)
    found.graph[0].outputs[0].type, found.graph[0].outputs[0].shape = (
        ir.TensorType(ir.DataType.UINT8),
        ir.Shape(["n", 24]),
    )
    x = TensorRange(0, 25.5, 0, 25.5, 1)
    table = CalibrationTable(io.digest(found), "minmax", 1, "", {"x": x})
    result, report = quantize(found, QuantRecipe(), table)
    assert [(each.type, each.precision) for each in report.operators] == [("Lookup", "int8"), ("Gemm", "int8")]
    assert "QuantizeLinear" not in ops(result) and len(result.graph[0].outputs) == 1 + wide
    loaded = io.load(io.save(result, tmp_path / "m.onnx"))
    assert io.digest(loaded) == io.digest(result) and loaded.opset_imports == {"": 17, "other": 1}


def test_a_relu_kept_float(tmp_path):
    found, x = (
        model("(float[n,16] x) => (float[n,16] y) { h = Gemm(x, w) r = Relu(h) y = Neg(r) }", w=normal(16, 16)),
        normal(64, 16),
    )
    result, report = checked(found, QuantRecipe(keep_float=("r",)), x=x)
    assert precisions(report) == [("Gemm", "int8"), ("Relu", "float"), ("Neg", "float")]
    check_executed(result, report, tmp_path, x=x)


@pytest.mark.parametrize("text", [GEMMS, TRANSPOSED])
def test_a_bias_of_one_row(text):
    turned = "transB" in text
    w, v = normal(24, 40), normal(40, 5)
    weights = {"w": w.T.copy() if turned else w, "v": v.T.copy() if turned else v}
    b, c, x = normal(40), normal(5), normal(64, 24)
    flat, _ = checked(model(text, **weights, b=b, c=c), x=x)
    row, report = checked(model(text, **weights, b=b[None], c=c[None]), x=x)
    assert report.counts() == {"int8": 3}
    np.testing.assert_array_equal(run(row, x=x)["y"], run(flat, x=x)["y"])


def test_weights_stored_as_float16():
    found, x = model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5)), normal(64, 24)
    edit.compress_fp16(found, minimum=1)
    for name in list(found.graph.initializers):  # as another exporter may call them
        found.graph.initializers[name].name = name.replace(".fp16", "_half")
    found = ir.from_proto(ir.to_proto(found))
    result, report = checked(found, x=x)
    assert precisions(report) == [("Gemm", "int8"), ("Relu", "int8"), ("Gemm", "int8")]
    expected = run(found, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_operators_in_subgraphs_are_listed_as_float():
    text = """(float[n,8] x, bool c) => (float[n,4] y) {
        h = Gemm(x, w) y = If(c) <then_branch = t () => (float[n,4] a) { a = Relu(h) },
                                  else_branch = e () => (float[n,4] b) { b = MatMul(x, w) }> }"""
    found, x = model(text, w=normal(8, 4)), normal(32, 8)
    result, report = quantize(found, QuantRecipe(), calibrate(found, [{"x": x, "c": np.array(True)}]))
    assert [(each.name, each.type, each.precision) for each in report.operators] == [
        ("h", "Gemm", "int8"),
        ("y", "If", "float"),
        ("a", "Relu", "float"),
        ("b", "MatMul", "float"),
    ]
    reasons = ["inside a subgraph of y", "no constant float32 weights of 1024 or more"]
    assert [each.reason for each in report.operators[2:]] == reasons
    expected = run(found, x=x, c=np.array(True))["y"]
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
    found = model(f"({inputs}) => (float[n,{k}] y) {{ {' '.join(body)} }}", **used)
    values = rng.normal(0, 1, (256, numbers)) if signed else rng.uniform(0, 1, (256, numbers))
    feeds = {"numbers": values.astype(np.float32)}
    if fields:
        feeds["ids"] = rng.integers(0, 11, (256, fields)).astype(ids)
    return found, feeds


@given(networks(), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_networks(tmp_path_factory, case, fuse, tables):
    found, feeds = case
    if fuse:
        rewrite(found, [FuseLinear()])
    result, report = checked(found, QuantRecipe(quantize_tables=tables), **feeds)
    layers = [each for each in report.operators if each.type in ("Gemm", "MatMul")]
    assert layers and all(each.precision == "int8" for each in layers)
    path = io.save(result, tmp_path_factory.mktemp("random") / "int8.onnx")
    expected = run(found, **feeds)["y"].astype(np.float64)
    check_executed(result, report, path.parent, **feeds)
    outputs = {engine: load(path, engine).run(feeds)["y"] for engine in EXACT}
    for engine, output in outputs.items():
        noise = ((output - expected) ** 2).mean()
        signal = max(((expected - expected.mean()) ** 2).mean(), 1e-3 * (expected**2).mean())
        assert 10 * np.log10(signal / noise) > 25, engine
