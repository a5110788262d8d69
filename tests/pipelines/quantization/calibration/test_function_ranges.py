"""Ranges up to where the only function that reads a tensor is level."""

import numpy as np
import pytest
from helpers.rewriting import model, run

from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.function_ranges import TOLERANCE, clip_to_functions, function_range, read_by
from pipelines.quantization.quantizer import Quantizer, quantize
from pipelines.quantization.recipe import QuantRecipe


def table_and_clipped(rng, body, low=-40.0, high=12.0):
    net = model(f"(float[n,8] x) => (float[n,8] y) {{ {body} }}", 18)
    table = calibrate(net, [{"x": rng.uniform(low, high, (64, 8)).astype(np.float32)}], observer="minmax")
    return net, table, clip_to_functions(net, table)


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [
        ("a = Identity(x) y = HardSwish(a)", (-3.1, -2.9), (11, 12)),
        ("a = Identity(x) b = Sigmoid(a) y = Mul(a, b)", (-8, -5), (11, 12)),
        ("a = Identity(x) b = Sigmoid(a) y = Mul(b, a)", (-8, -5), (11, 12)),
        ("a = Identity(x) y = Sigmoid(a)", (-9, -6), (6, 9)),
        ("a = Identity(x) y = HardSigmoid<alpha=0.5,beta=0.5>(a)", (-1.1, -0.9), (0.9, 1.1)),
        ("a = Identity(x) y = Tanh(a)", (-5, -3), (3, 5)),
        ("a = Identity(x) y = Mish(a)", (-12, -5), (11, 12)),
        ("a = Identity(x) y = Softplus(a)", (-8, -3), (11, 12)),
        ("a = Identity(x) y = Elu(a)", (-9, -4), (11, 12)),
    ],
)
def test_a_range_ends_where_the_function_is_level(rng, body, low, high):
    _, table, clipped = table_and_clipped(rng, body)
    tensor = clipped.tensors["a"]
    assert low[0] <= tensor.low <= low[1] and high[0] <= tensor.high <= high[1]
    assert (tensor.minimum, tensor.maximum) == (table.tensors["a"].minimum, table.tensors["a"].maximum)
    assert clipped.tensors["y"] == table.tensors["y"]


@pytest.mark.parametrize(
    "body",
    [
        "a = Identity(x) b = HardSwish(a) y = Add(a, b)",
        "a = Identity(x) b = Sigmoid(a) c = Mul(a, b) y = Add(b, c)",
        "a = Identity(x) b = Sigmoid(a) y = Mul(b, x)",
        "a = Identity(x) y = Relu(a)",
        "a = Identity(x) y = Mul(a, a)",
    ],
)
def test_tensors_that_others_read_keep_their_range(rng, body):
    net, table, clipped = table_and_clipped(rng, body)
    assert clipped.tensors["a"] == table.tensors["a"] or read_by(net.graph[0].outputs[0]) is not None
    if "Mul(b, x)" not in body:
        assert clipped.tensors == table.tensors


def test_an_output_of_the_graph_keeps_its_range():
    net = model("(float[n,8] x) => (float[n,8] a, float[n,8] y) { a = Identity(x) y = HardSwish(a) }")
    assert read_by(net.graph[0].outputs[0]) is None


def test_what_is_clipped_errs_by_less_than_a_step():
    def swish(x):
        return x / (1 + np.exp(-x))

    low, high = function_range(swish, -30.0, 10.0)
    x = np.linspace(-30, 10, 1000)
    step = np.ptp(swish(x)) / 255
    assert low > -10 and np.abs(swish(np.clip(x, low, high)) - swish(x)).max() <= TOLERANCE * step * 1.01
    assert function_range(lambda values: 0 * values, -1.0, 1.0) == (-1.0, 1.0)
    assert function_range(swish, 2.0, 3.0)[0] <= 2.0


def silu(rng):
    weights = {name: rng.choice(np.float32([-1, 1]), (8, 8, 3, 3)) for name in "kl"}
    text = """(float[n,8,h,w] x) => (float[n,8,h,w] y) { a = Conv<pads=[1,1,1,1]>(x, k, c) s = Sigmoid(a) b = Mul(a, s)
        y = Conv<pads=[1,1,1,1]>(b, l) }"""
    return model(text, **weights, c=np.full(8, -10, np.float32))


def test_the_best_ranges_alone_are_narrowed_too(rng, monkeypatch):
    """Every candidate costs a session and its runs."""
    net = silu(rng)
    tables, function = [], Quantizer.quantize
    monkeypatch.setattr(Quantizer, "quantize", lambda self, table: (tables.append(table), function(self, table))[1])
    batches = [{"x": rng.standard_normal((96, 8, 6, 6)).astype(np.float32)}]
    best = auto_calibrate(net, QuantRecipe(correct=False), batches, 96, effort="fast")
    lows = [table.tensors["a"].low for table in tables]
    assert sum(low > -8 for low in lows) == 1 < sum(low < -12 for low in lows)
    assert best.tensors["a"].low > -8


def test_a_network_of_silu_loses_less(rng):
    """The weights are exact in int8, so that the range of `a` decides."""
    net = silu(rng)
    batches = [{"x": rng.standard_normal((16, 8, 6, 6)).astype(np.float32)}]
    recipe = QuantRecipe()
    best = auto_calibrate(net, recipe, batches)
    plain = calibrate(net, batches)
    x = rng.standard_normal((32, 8, 6, 6)).astype(np.float32)
    exact = run(net, x=x)["y"]
    errors = [np.square(run(quantize(net, recipe, table)[0], x=x)["y"] - exact).mean() for table in (best, plain)]
    assert best.tensors["a"].low > -8 > -20 > plain.tensors["a"].low
    assert errors[0] < errors[1]
