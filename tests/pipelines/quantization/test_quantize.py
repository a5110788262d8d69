"""The quantizer against integer arithmetic in numpy, against onnxruntime's own quantizer, and on graphs drawn at random."""

import itertools
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime.quantization as oracle
import pytest
from helpers.arrays import normals
from helpers.quantizing import (
    GEMMS,
    TRANSPOSED,
    TWO,
    check_executed,
    checked,
    input_qparams,
    layer,
    precisions,
    to_uint8,
)
from helpers.rewriting import EXACT, model, ops, run
from helpers.tiers import one_in

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.graph import io, query
from pipelines.quantization import quantizer as module
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.quantizer import Quantizer, quantize
from pipelines.quantization.recipe import QuantRecipe


def weights_of(result):
    """{float weight: (int8 weight, scales)} of the operators' second inputs."""
    weights = {}
    for node in result.graph:
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            q, s, _ = node.inputs[1].producer().inputs
            weights[q.name.removesuffix(".quantized").split("/", 1)[1]] = (query.constant(q), query.constant(s))
    return weights


MATMULS = TWO.format("MatMul(x, w)", "y = MatMul(r, v)")


@pytest.mark.parametrize("text", [GEMMS, TRANSPOSED, MATMULS], ids=["Gemm", "Gemm transB", "MatMul"])
@pytest.mark.parametrize("signed", [True, False], ids=["asymmetric", "non-negative"])
@pytest.mark.parametrize("optimized", [True, False], ids=["engine", "plain"])
def test_two_layers_against_integers(normal, text, signed, optimized):
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
    assert [(label[:4], how) for label, how in precisions(report)] == [(kind, "int8"), ("Relu", "int8"), (kind, "int8")]
    between = next(value for node in result.graph for value in node.outputs if value.name == "r.quantized")
    result.graph.outputs.append(between)
    outputs = run(result, optimized, x=x)

    x_scale, zero = input_qparams(x)
    assert (zero > 0) == signed
    sums, step = layer(to_uint8(x, x_scale, zero), zero, x_scale, w, b)
    r_scale, _ = input_qparams(np.maximum(x @ w + b, 0))
    r_q = np.clip(np.rint(sums * step / r_scale), 0, 255).astype(
        np.int64
    )  # requantized: half to even; the clip at 0 is the ReLU
    off = np.abs(outputs["r.quantized"].astype(np.int64) - r_q)
    assert off.max() <= 1 and (off > 0).mean() < 0.01
    sums, step = layer(outputs["r.quantized"].astype(np.int64), 0, r_scale, v, c)
    np.testing.assert_allclose(outputs["y"], sums * step, rtol=1e-5, atol=float(step.max()))
    np.testing.assert_allclose(outputs["y"], np.maximum(x @ w + b, 0) @ v + c, atol=0.03 * np.abs(outputs["y"]).max())


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


@pytest.mark.parametrize(
    ("groups", "bias", "signed"), one_in(5, itertools.product((4, 2, 1), (True, False), (True, False)))
)
def test_convolution_against_integers(normal, tmp_path, groups, bias, signed):
    w, b = normal(8, 4 // groups, 3, 3), normal(8)
    x = normal(3, 4, 9, 9) if signed else np.abs(normal(3, 4, 9, 9))
    text = f"""(float[n,4,9,9] x) => (float[n,8,a,b] y) {{
        y = Conv<group={groups}, pads=[1,1,1,1], strides=[2,2]>(x, w{", bias" if bias else ""}) }}"""
    net = model(text, w=w, **({"bias": b} if bias else {}))
    result, report = checked(net, x=x)
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
    y_scale, y_zero = input_qparams(np.asarray(run(net, x=x)["y"]))
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


def test_parameters_are_those_of_onnxruntimes_quantizer(normal, tmp_path):
    """quantize_static with MinMax, per-channel symmetric int8 weights and asymmetric uint8 activations."""
    net = model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5))
    x = normal(500, 24)
    result, _ = checked(net, x=x)
    source = io.save(net, tmp_path / "m.onnx")
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
    theirs = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "q.onnx").graph.initializer
    }
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


def mlp(normal):
    return model(GEMMS, w=normal(24, 40), b=normal(40), v=normal(40, 5), c=normal(5))


def test_same_inputs_same_bytes(normal, tmp_path):
    net, x = mlp(normal), normal(64, 24)
    table = calibrate(net, [{"x": x}])
    first, second = (
        io.save(quantize(copy, QuantRecipe(), table)[0], tmp_path / f"{number}.onnx").read_bytes()
        for number, copy in enumerate((net, net.clone()))
    )
    again = io.load(io.save(net, tmp_path / "float.onnx"))
    third = io.save(quantize(again, QuantRecipe(), calibrate(again, [{"x": x}]))[0], tmp_path / "2.onnx").read_bytes()
    assert first == second == third


def test_one_quantizer_makes_the_models_of_single_ones(normal, monkeypatch):
    """Candidates of a calibration share the clean-up; narrow ranges raise the scales of weights, by their biases."""
    net, batches = mlp(normal), [{"x": normal(64, 24)}]
    table = calibrate(net, batches)
    narrow = {
        name: replace(tensor, low=1e-9 * tensor.low, high=1e-9 * tensor.high) for name, tensor in table.tensors.items()
    }
    first = next(str(node.outputs[0].name) for node in net.graph if node.op_type == "Gemm")
    scaled = replace(table, equalization={first: tuple(np.linspace(0.5, 2, 40).tolist())})
    quantizer, cleaned = Quantizer(net, QuantRecipe()), []
    clean_up = module.clean_up
    for candidate in (table, replace(table, tensors=narrow), table, scaled, scaled):
        expected, report = quantize(net, QuantRecipe(), candidate)
        with monkeypatch.context() as patch:
            patch.setattr(module, "clean_up", lambda model: (cleaned.append(1), clean_up(model)))
            int8, same = quantizer.quantize(candidate)
        assert io.digest(int8) == io.digest(expected) and same == report
    assert len(cleaned) == 2
    with pytest.raises(RequestError, match="made for the graph"):
        quantizer.quantize(replace(table, graph="other"))


def test_a_table_of_another_graph_is_refused(normal):
    net, other = mlp(normal), mlp(normal)
    with pytest.raises(RequestError, match="the calibration table was made for the graph"):
        quantize(net, QuantRecipe(), calibrate(other, [{"x": normal(4, 24)}]))


def test_an_old_opset_is_refused(normal):
    net = model("(float[n,3] x) => (float[n,3] y) { y = MatMul(x, w) }", opset=12, w=normal(3, 3))
    table = CalibrationTable(io.digest(net), "minmax", 1, "", {"x": TensorRange(-1, 1, -1, 1, 3)})
    for refuse in (lambda: quantize(net, QuantRecipe(), table), lambda: calibrate(net, iter([{"never": "run"}]))):
        with pytest.raises(RequestError, match="the model has opset 12, int8 per channel needs 13 or newer"):
            refuse()


def test_the_report(normal):
    net, x = mlp(normal), normal(64, 24)
    recipe = QuantRecipe(observer="kl")
    _, report = checked(net, recipe, observer="kl", x=x)
    assert report.counts() == {"int8": 3} and report.graph == io.digest(net)
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


def test_the_report_names_the_observer_that_chose_the_ranges(normal):
    _, report = checked(mlp(normal), QuantRecipe(), observer="kl", x=normal(64, 24))
    assert report.recipe.observer == "kl"


def test_operators_without_a_name_are_told_apart(normal):
    net = mlp(normal)
    assert not net.graph[0].name
    net.graph[1].name = "h"  # what the first one would be called
    _, report = checked(net, QuantRecipe(keep_float=("y",)), x=normal(64, 24))
    assert [(op.type, op.precision) for op in report.operators] == [
        ("Gemm", "int8"),
        ("Relu", "int8"),
        ("Gemm", "float"),
    ]


def test_keep_float_keeps_layers_and_what_moves(normal):
    text = "(float[n,4] a, float[n,4] b) => (float[n,5] y) { x = Concat<axis=1>(a, b) h = Gemm(x, w) y = Gemm(h, v) }"
    net = model(text, w=normal(8, 6), v=normal(6, 5))
    feeds = {"a": normal(32, 4), "b": normal(32, 4)}
    _, report = checked(net, QuantRecipe(keep_float=("h",)), **feeds)
    assert precisions(report) == [("Concat", "float"), ("Gemm", "float"), ("Gemm", "int8")]
    assert report.operators[1].reason == "kept float by the recipe"
    result, report = checked(net, QuantRecipe(keep_float=("x",)), **feeds)
    assert precisions(report) == [("Concat", "float"), ("Gemm", "int8"), ("Gemm", "int8")]
    assert report.operators[0].reason == "kept float by the recipe"
    assert ops(result)[:2] == ["Concat", "QuantizeLinear"]
    _, report = checked(net, QuantRecipe(keep_float=(".*",)), **feeds)
    assert report.counts() == {"float": 3}
    _, report = checked(net, **feeds)
    assert report.counts() == {"int8": 3}


def test_reduced_range_stays_within_seven_bits(normal):
    net, x = mlp(normal), normal(64, 24)
    full, reduced = (weights_of(checked(net, QuantRecipe(reduced_range=flag), x=x)[0]) for flag in (False, True))
    for name, (q, scale) in reduced.items():
        assert np.abs(q.astype(int)).max() == 63 and np.abs(full[name][0].astype(int)).max() == 127
        np.testing.assert_allclose(scale / full[name][1], 127 / 63, rtol=1e-6)


LOOKED_UP = "(int64[n] i, float[n,3] x) => (float[n,5] y) { e = Gather(T, i) c = Concat<axis=1>(e, x) y = Gemm(c, w) }"


@pytest.mark.parametrize("tables", [True, False])
def test_tables(rng, normal, tables):
    net = model(LOOKED_UP, T=normal(50, 4), w=normal(7, 5))
    feeds = {"i": rng.integers(0, 50, 64), "x": normal(64, 3)}
    result, report = checked(net, QuantRecipe(quantize_tables=tables), **feeds)
    stored = {value.dtype for value in result.graph.initializers.values() if value.shape == (50, 4)}
    assert stored == {ir.DataType.UINT8 if tables else ir.DataType.FLOAT}
    assert precisions(report) == [("Gather", "int8" if tables else "float"), ("Concat", "int8"), ("Gemm", "int8")]
    assert tables or report.operators[0].reason == "the recipe keeps tables float"
    expected = run(net, **feeds)["y"]
    np.testing.assert_allclose(run(result, **feeds)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_both_forms_of_a_table_compute_the_same_bits(rng, normal):
    net = model(LOOKED_UP, T=normal(50, 4), w=normal(7, 5))
    feeds = {"i": rng.integers(0, 50, 64), "x": normal(64, 3)}
    stored, looked_up = (
        run(checked(net, QuantRecipe(quantize_tables=flag), **feeds)[0], **feeds)["y"] for flag in (True, False)
    )
    np.testing.assert_array_equal(stored, looked_up)


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        ("y = Gemm<transA=1>(x, w)", {"w": normals(0)(7, 4)}, "its input is transposed (transA)"),
        ("y = Gemm<alpha=0.5>(x, w)", {}, "alpha or beta is not 1"),
        ("y = Gemm<beta=0.5>(x, w, b)", {}, "alpha or beta is not 1"),
        ("y = Gemm(x, v)", {}, "its weights are not constant"),
        ("y = Gemm(x, w, c)", {}, "its bias is not a constant row"),
        ("y = Gemm(x, w, b)", {"b": np.float32(1)}, "its bias is not a constant row"),
        ("y = MatMul(x, w)", {"w": normals(0)(8)}, "its weights are a vector"),
        ("y = MatMul(k, w)", {}, "its first factor is constant"),
        ("y = Sigmoid(x)", {}, "its input x is float"),
        ("y = Softmax(x)", {}, "Softmax has no int8 form here"),
        ("a = Add(x, x) y = Relu(a)", {}, "Relu has no int8 form here"),
    ],
)
def test_why_an_operator_stays_float(normal, text, weights, reason):
    net = model(
        f"(float[n,8] x, float[8,4] v, float[n,4] c) => (float y) {{ {text} }}",
        **{"w": normal(8, 4), "b": normal(4), "k": normal(7, 8)} | weights,
    )
    net.graph.outputs[0].shape = None
    feeds = {"x": normal(7, 8), "v": normal(8, 4), "c": normal(7, 4)}
    result, report = checked(net, **feeds)
    assert report.operators[-1].precision == "float" and report.operators[-1].reason == reason
    np.testing.assert_array_equal(run(result, **feeds)["y"], run(net, **feeds)["y"])


def test_a_convolution_whose_weights_are_an_input_stays_float(normal):
    net = model("(float[n,2,5,5] x, float[3,2,3,3] w) => (float[n,3,3,3] y) { y = Conv(x, w) }")
    _, report = checked(net, x=normal(2, 2, 5, 5), w=normal(3, 2, 3, 3))
    assert report.operators[0].reason == "its weights or bias are not constant"


def test_a_relu_after_a_float_operator_is_not_called_int8(normal):
    text = "(float[n,8] x) => (float[n,4] y) { s = Sigmoid(x) r = Relu(s) y = Gemm(r, w) }"
    _, report = checked(model(text, w=normal(8, 4)), x=normal(64, 8))
    assert precisions(report) == [("Sigmoid", "float"), ("Relu", "float"), ("Gemm", "int8")]


def test_index_arithmetic_is_called_integer(rng, normal):
    text = "(int64[n] i) => (float[n,5] y) { j = Add(i, one) e = Gather(T, j) y = Gemm(e, w) }"
    net = model(text, T=normal(9, 4), w=normal(4, 5), one=np.int64(1))
    _, report = checked(net, i=rng.integers(0, 8, 16))
    assert precisions(report) == [("Add", "integer"), ("Gather", "int8"), ("Gemm", "int8")]


def test_an_export_without_names_types_and_with_constant_nodes(normal):
    """Straight from an exporter, not rewritten first."""
    text = """(float[n,3] x) => (float[n,2] y) {
        w = Constant<value = float[3,2] {1, -2, 3, 4, -5, 6}>() i = Identity(x) h = MatMul(i, w) r = Relu(h) y = MatMul(r, v) }"""
    net, x = model(text, v=normal(2, 2)), normal(64, 3)
    result, report = checked(net, x=x)
    assert precisions(report) == [("MatMul", "int8"), ("Relu", "int8"), ("MatMul", "int8")]
    assert [op.name for op in report.operators] == ["h", "r", "y"]
    expected = run(net, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_an_old_file_that_lists_its_weights_as_inputs(normal):
    net, x = (
        model("(float[n,3] x, float[3,2] w) => (float[n,2] y) { y = MatMul(x, w) }", w=normal(3, 2)),
        normal(64, 3),
    )
    result, report = checked(net, x=x)
    assert report.counts() == {"int8": 1} and [value.name for value in result.graph.inputs] == ["x"]
    np.testing.assert_allclose(run(result, x=x)["y"], run(net, x=x)["y"], atol=0.03)
