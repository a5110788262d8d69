"""Activation functions of int8 layers in OpenVINO are computed within the layer."""

import numpy as np
import pytest
from helpers.rewriting import model, needs_vnni, run
from helpers.tiers import one_in

from pipelines.engines.openvino.functions import read_exact_results
from pipelines.engines.openvino.session import OpenVinoSession, library
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

pytest.importorskip("openvino")
SILU = "s = Sigmoid(c) a = Mul(c, s)"
NET = """(float[n,8,h,w] x) => (float[n,8,h,w] y) {{ c = Conv<pads=[1,1,1,1]>(x, k, b) {}
    y = Conv<pads=[1,1,1,1]>(a, l, b) }}"""


def int8(rng, tmp_path, body):
    weights = {name: rng.standard_normal((8, 8, 3, 3)).astype(np.float32) for name in "kl"}
    fp32 = model(NET.format(body), **weights, b=rng.standard_normal(8).astype(np.float32))
    x = rng.standard_normal((4, 8, 12, 12)).astype(np.float32)
    result, _ = quantize(fp32, QuantRecipe(), calibrate(fp32, [{"x": x}]))
    return io.save(result, tmp_path / "int8.onnx"), x, run(fp32, x=x)["y"]


@needs_vnni
@pytest.mark.parametrize(
    "body",
    one_in(
        2, ["a = HardSwish(c)", SILU, "s = Sigmoid(c) a = Mul(s, c)", "a = Sigmoid(c)", "a = Tanh(c)", "a = Elu(c)"]
    ),
)
def test_it_is_part_of_the_layer(rng, tmp_path, body):
    path, x, exact = int8(rng, tmp_path, body)
    session = OpenVinoSession(path, 1)
    operators = [operator.type for operator in session.executed({"x": x})]
    assert operators.count("Convolution") == 2
    assert operators.count("Convert") == 1  # of y; else the first layer's result is converted for the function, too
    errors = [np.square(y - exact).mean() for y in (session.run({"x": x})["y"], _as_in_the_file(path, x))]
    assert errors[0] < 1.02 * errors[1]


def _as_in_the_file(path, x):
    return next(iter(library().Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x).values()))


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ("a = HardSwish(c)", 1),
        (SILU, 1),
        ("s = Sigmoid(c) t = Mul(c, s) a = Add(t, c)", 0),  # the sum reads the int8 form
        ("s = Sigmoid(x) a = Mul(c, s)", 0),  # the gate is of another tensor
        ("a = Relu(c)", 0),
    ],
)
def test_only_pairs_that_functions_alone_read_go(rng, tmp_path, body, pairs):
    path, _, _ = int8(rng, tmp_path, body)
    network = library().Core().read_model(path)
    before = _counted(network)
    assert read_exact_results(network) == pairs
    network.validate_nodes_and_infer_types()
    assert before - _counted(network) >= pairs and (pairs or before == _counted(network))
    assert read_exact_results(network) == 0


def _counted(network):
    return sum(node.get_type_name() == "FakeQuantize" for node in network.get_ordered_ops())
