"""Q/DQ pairs and quantized constants: biases that int32 must hold, tensors with several readers, names."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.quantizing import LAYERS, checked, layer, precisions
from helpers.rewriting import model, ops, run

from pipelines.engines.catalog import load
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

LINEAR = "(float[n,6] x) => (float[n,4] y) { y = Gemm(x, w, b) }"


def int8_error(found, x):
    result, _ = checked(found, x=x)
    expected = run(found, x=x)["y"]
    return np.abs(run(result, x=x)["y"] - expected), np.abs(run(result, optimized=True, x=x)["y"] - expected), expected


@pytest.mark.parametrize("dead", [0.0, 1e-42, 1e-30])
@pytest.mark.parametrize("bias", [0.3, 0.0, 1e-4])
def test_dead_channels_keep_their_bias(normal, dead, bias):
    """The output of a channel without weights is its bias, however coarse the input's steps are."""
    w = normal(6, 4)
    w[:, 1] = dead
    x = normal(64, 6, scale=100)
    b = np.array([1, bias, -1, 2], np.float32)
    plain, engine, _ = int8_error(model(LINEAR, w=w, b=b), x)
    assert max(plain[:, 1].max(), engine[:, 1].max()) <= 1e-6 * bias + 1e-25


@pytest.mark.parametrize("weight_scale", [1e-3, 1e-6, 1e-9, 1e-18])
def test_tiny_weights_beside_a_big_bias(normal, weight_scale):
    """A bias that int32 does not hold in steps of s_x s_w."""
    w = normal(6, 4, scale=weight_scale)
    w[:, 2] = normal(6)
    x, b = normal(64, 6), np.array([50, -50, 3, 1e4], np.float32)
    plain, engine, expected = int8_error(model(LINEAR, w=w, b=b), x)
    for error in (plain, engine):
        assert np.isfinite(error).all()
        assert (error[:, [0, 1, 3]] <= 50 * weight_scale + 1e-5 * np.abs(expected[:, [0, 1, 3]])).all()
        assert error[:, 2].max() < 0.1


def test_bias_leaves_room_for_the_sum():
    k = 4096  # inputs at 255 with weights at 127
    w = np.full((k, 1), 1e-5, np.float32)
    x = np.ones((4, k), np.float32)
    text = f"(float[n,{k}] x) => (float[n,1] y) {{ y = Gemm(x, w, b) }}"
    for b in (1e3, -1e3):
        plain, engine, _ = int8_error(model(text, w=w, b=np.array([b], np.float32)), x)
        assert max(plain.max(), engine.max()) < 0.05


def test_an_input_that_is_always_zero(normal):
    x = np.zeros((4, 6), np.float32)
    plain, engine, _ = int8_error(model(LINEAR, w=normal(6, 4), b=normal(4)), x)
    assert max(plain.max(), engine.max()) < 0.02  # half a step of the bias, at s_x = 1


def test_layers_that_share_weights_and_bias(normal):
    text = "(float[n,8] x) => (float[n,8] y) { h = Gemm(x, w, b) r = Relu(h) y = Gemm(r, w, b) }"
    net, x = model(text, w=normal(8, 8), b=normal(8)), normal(64, 8)
    result, report = checked(net, x=x)
    assert report.counts() == {"int8": 3} and "w" not in result.graph.initializers
    expected = run(net, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_one_tensor_read_by_two_layers_is_quantized_once(normal):
    text = "(float[n,8] x) => (float[n,4] y, float[n,4] z) { r = Relu(x) y = Gemm(r, w) z = Gemm(r, v) }"
    result, _ = checked(model(text, w=normal(8, 4), v=normal(8, 4)), x=normal(64, 8))
    assert sum(node.op_type == "QuantizeLinear" for node in result.graph) == 1


def test_a_value_that_also_leaves_the_graph_stays_float_there(normal):
    text = "(float[n,8] x) => (float[n,4] y, float[n,8] r) { r = Relu(x) y = Gemm(r, w) }"
    net, x = model(text, w=normal(8, 4)), normal(64, 8)
    result, report = checked(net, x=x)
    np.testing.assert_array_equal(run(result, x=x)["r"], np.maximum(x, 0))
    assert precisions(report) == [("Relu", "float"), ("Gemm", "int8")]


GIVEN = "(uint8[n,24] q) => (float[n,5] y) { x = DequantizeLinear(q, s, z) y = Gemm(x, w, b) }"


@pytest.mark.parametrize(
    ("step", "reused"),
    [
        ((np.float32(0.02), np.uint8(0)), True),
        ((np.float32(0.02), np.uint8(100)), True),
        ((np.array([0.02], np.float32), np.array([7], np.uint8)), True),
        ((np.full(24, 0.02, np.float32), np.zeros(24, np.uint8)), False),  # a step for each column
    ],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_an_activation_that_is_bytes_already_is_used_as_it_is(rng, normal, tmp_path, step, reused, calibrated):
    w, b, q = normal(24, 5), normal(5), rng.integers(0, 256, (200, 24)).astype(np.uint8)
    net = model(GIVEN, w=w, b=b, s=step[0], z=step[1])
    table = calibrate(net, [{"q": q}])
    if not calibrated:
        table = replace(table, tensors={})
    result, report = quantize(net, QuantRecipe(), table)
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    assert ("QuantizeLinear" in ops(result)) == (calibrated and not reused)
    if not calibrated and not reused:
        assert report.operators[0].reason == "no calibrated range for its input x"
        return
    assert precisions(report) == [("Gemm", "int8")]
    if reused:
        ran = load(io.save(result, tmp_path / "m.onnx"), "onnxruntime").executed({"q": q})
        assert [op.precision for op in ran if op.type in LAYERS["onnxruntime"]] == ["u8"]
        sums, steps = layer(q.astype(np.int64), int(step[1].item()), np.float32(step[0].item()), w, b)
        np.testing.assert_allclose(run(result, q=q)["y"], sums * steps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taken", ["x.quantized", "x.scale", "h/w.dequantized", "h.dequantized", "r.quantized"])
def test_names_that_the_model_already_uses(normal, taken):
    text = "(float[n,8] x) => (float[n,8] y) { other = Neg(x) h = Gemm(x, w) r = Relu(h) s = Add(r, other) y = Gemm(s, w) }"
    net, x = model(text, w=normal(8, 8, scale=0.3)), normal(32, 8)
    net.graph[0].outputs[0].name = taken
    result, _ = checked(net, x=x)
    names = [value.name for node in result.graph for value in node.outputs] + list(result.graph.initializers)
    assert len(set(names)) == len(names)
    expected = run(net, x=x)["y"]
    np.testing.assert_allclose(run(result, optimized=True, x=x)["y"], expected, atol=0.06 * np.abs(expected).max())
