"""Weights that several layers share are quantized once, rounded once for all of them, and stored once."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import EXACT, model, run

from pipelines.engines.catalog import load
from pipelines.graph import io, query
from pipelines.quantization.algorithms.correction import correct_layers
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.ptq import correct_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

STEPS, WIDTH = 5, 24


def unrolled(bias=1.0, wide=WIDTH):
    """(a recurrent network of `STEPS` steps, each h = tanh(x_t W + h V + b), its samples, of a different scale each)."""
    normal = normals(0)
    nodes = [f"x{step} = Gather<axis=1>(x, t{step})" for step in range(STEPS)]
    for step in range(STEPS):
        nodes.append(f"a{step} = Gemm(x{step}, W, b)")
        nodes.append(f"c{step} = Gemm(h{step - 1}, V, d) s{step} = Add(a{step}, c{step})" if step else "")
        nodes.append(f"h{step} = Tanh({'s' if step else 'a'}{step})")
    nodes.append(f"y = Gemm(h{STEPS - 1}, U, e)")
    net = model(
        f"(float[N,{STEPS},{wide}] x) => (float[N,3] y) {{ {' '.join(nodes)} }}",
        W=normal(wide, WIDTH, scale=0.15),
        b=normal(WIDTH, scale=0.3 * bias),
        V=normal(WIDTH, WIDTH, scale=0.15),
        d=normal(WIDTH, scale=0.3),
        U=normal(WIDTH, 3),
        e=normal(3),
        **{f"t{step}": np.int64(step) for step in range(STEPS)},
    )
    x = normal(120, STEPS, 3) @ normal(3, wide) + 0.1 * normal(120, STEPS, wide)
    return net, {"x": (x * (1 + np.arange(STEPS))[:, None]).astype(np.float32)}


def int8_weights(found):
    return [
        value
        for value in found.graph.initializers.values()
        if value.dtype == ir.DataType.INT8 and value.shape.rank() == 2
    ]


def table(found, feeds):
    return calibrate(found, [feeds], "minmax")


def error(found, other, feeds):
    return float(np.square(run(found, **feeds)["y"] - run(other, **feeds)["y"]).mean())


@pytest.mark.parametrize("recipe", [QuantRecipe(), QuantRecipe(dynamic=("a.*", "c.*"))], ids=["static", "dynamic"])
def test_they_are_stored_once(recipe):
    net, feeds = unrolled()
    result, report = quantize(net, recipe, table(net, feeds))
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    assert {op.precision for op in report.operators if op.type == "Gemm"} == {"int8"}
    assert sorted(array.shape.numpy() for array in int8_weights(result)) == [(WIDTH, 3), (WIDTH, WIDTH), (WIDTH, WIDTH)]


def test_biases_are_shared_where_the_scales_of_the_inputs_agree():
    normal = normals(0)
    net = model(
        "(float[N,8] x, float[N,8] z) => (float[N,8] y) { h = Gemm(x, W, b) g = Gemm(z, W, b) s = Mul(h, g) y = Gemm(s, W, b) }",
        W=normal(8, 8),
        b=normal(8),
    )
    x = normal(50, 8)
    feeds = {"x": x, "z": x[::-1].copy()}
    result, _ = quantize(net, QuantRecipe(), table(net, feeds))
    biases = [
        (node.inputs[2].producer().inputs[0], query.dequantized(node.inputs[2])[1])
        for node in result.graph
        if node.op_type == "Gemm"
    ]
    (first, scale), (second, _), (third, other) = biases
    assert first is second and first is not third and not np.array_equal(scale, other)


def test_a_channel_whose_scale_its_bias_decides_has_one_form():
    """A bias of scale s_x s_w that int32 cannot hold widens s_w, by more where s_x is less."""
    net, feeds = unrolled(bias=1000.0)
    weights = query.constant(net.graph.initializers["W"]).copy()
    weights[:, 3] = 0  # what such a channel looks like in trained networks
    net.graph.initializers["W"].const_value = ir.tensor(weights, name="W")
    result, _ = quantize(net, QuantRecipe(), table(net, feeds))
    assert len(int8_weights(result)) == 3


def test_they_are_rounded_once_on_the_inputs_of_all():
    net, feeds = unrolled()
    int8, _ = quantize(net, QuantRecipe(), table(net, feeds))
    together, report = correct_layers(net, int8, [feeds])
    onnx.checker.check_model(ir.to_proto(together), full_check=True)
    assert [layer.name for layer in report.layers if layer.weights] == ["a0", "c1", "y"]
    assert len(int8_weights(together)) == 3
    first = correct_layers(net, int8, [{"x": (feeds["x"] * (np.arange(STEPS) == 0)[:, None])}])[0]

    def error(rounded):
        """What rounding of the weights that all steps read does to their products."""
        layer = next(node for node in rounded.graph if node.name == "a3")
        integers, scale, _ = query.dequantized(layer.inputs[1])
        weights = query.constant(net.graph.initializers["W"])
        return float(np.square(feeds["x"] @ (integers * scale - weights)).mean())

    assert error(together) < 0.5 * error(int8) and error(together) < 0.9 * error(first)


def test_each_reader_has_a_bias_correction_of_its_own():
    normal = normals(0)
    net = model(
        "(float[N,8] x, float[N,8] z) => (float[N,8] y) { h = Gemm(x, W, b) r = Relu(h) g = Gemm(z, W, b) s = Mul(r, g) y = Gemm(s, W, b) }",
        W=normal(8, 8),
        b=normal(8),
    )
    x = np.abs(normal(400, 8))
    feeds = {"x": x, "z": x[::-1].copy()}
    int8, _ = quantize(net, QuantRecipe(), table(net, feeds))
    shared = next(node for node in int8.graph if node.op_type == "Gemm").inputs[2].producer().inputs[0]
    shared.const_value = ir.tensor(query.constant(shared) + 500, name=shared.name)
    result, report = correct_layers(net, int8, [feeds], weights=False)
    assert all(layer.corrected for layer in report.layers[:2])
    biases = [node.inputs[2].producer().inputs[0] for node in result.graph if node.op_type == "Gemm"]
    assert len(set(biases)) == 3
    assert error(net, result, feeds) < 0.1 * error(net, int8, feeds)


def test_a_table_carries_what_was_found(tmp_path):
    net, feeds = unrolled()
    plain = table(net, feeds)
    corrected = correct_table(net, QuantRecipe(), plain, [feeds])
    direct, _ = correct_layers(net, quantize(net, QuantRecipe(), plain)[0], [feeds])
    result, _ = quantize(net, QuantRecipe(), corrected)
    assert io.digest(result) == io.digest(direct)
    # a table made when every reader had a copy of its own rounds the one that all have once
    old = replace(corrected, rounding={**corrected.rounding, "a1": corrected.rounding["a0"]})
    assert io.digest(quantize(net, QuantRecipe(), old)[0]) == io.digest(result)


@pytest.mark.parametrize("engine", EXACT)
def test_engines_run_them(engine, tmp_path):
    net, feeds = unrolled()
    path = io.save(quantize(net, QuantRecipe(), table(net, feeds))[0], tmp_path / "int8.onnx")
    expected = run(net, **feeds)["y"]
    session = load(path, engine)
    assert np.square(session.run(feeds)["y"] - expected).mean() < 0.01 * np.square(expected).mean()
    layers = [
        op.precision for op in session.executed(feeds) if op.type in ("Gemm", "QGemm", "FullyConnected", "MatMul")
    ]
    assert layers.count("u8") >= 2 * STEPS - 1
