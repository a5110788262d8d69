"""Bias correction from mean inputs removes the mean error that rounded weights cause, layer by layer."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.quantization.algorithms.mean_bias import mean_shifts
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

LAYERS = {
    "Conv": ("(float[n,6,5,5] x) => (float[n,8,5,5] y) { y = Conv(x, w, b) }", (8, 6, 1, 1), (40, 6, 5, 5)),
    "Conv without bias": ("(float[n,6,5,5] x) => (float[n,8,5,5] y) { y = Conv(x, w) }", (8, 6, 1, 1), (40, 6, 5, 5)),
    "groups": (
        "(float[n,6,5,5] x) => (float[n,6,3,3] y) { y = Conv<group = 3>(x, w, b) }",
        (6, 2, 3, 3),
        (40, 6, 5, 5),
    ),
    "Gemm": ("(float[n,6] x) => (float[n,8] y) { y = Gemm(x, w, b) }", (6, 8), (200, 6)),
    "Gemm transB": ("(float[n,6] x) => (float[n,8] y) { y = Gemm<transB = 1>(x, w, b) }", (8, 6), (200, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_error_of_rounded_weights_is_removed(name):
    text, shape, size = LAYERS[name]
    normal = normals(3)
    weights = normal(*shape)
    channels = shape[1] if name == "Gemm" else shape[0]
    net = model(text, w=weights, **({} if "without" in name else {"b": normal(channels)}))
    feeds = {"x": np.abs(normal(*size)) + 1}  # far from zero: roundings do not cancel
    recipe, table = QuantRecipe(), calibrate(net, [feeds], "minmax")
    plain, _ = quantize(net, recipe, table)
    shifts = mean_shifts(net, plain, [feeds])
    corrected, _ = quantize(net, recipe, replace(table, bias=shifts, recipe=recipe.to_json()))
    axes = tuple(axis for axis in range(len(size)) if axis != 1)
    exact, before, after = (run(variant, **feeds)["y"] for variant in (net, plain, corrected))
    shift = [np.abs((output - exact).mean(axis=axes)).max() for output in (before, after)]
    assert shift[1] < 0.35 * shift[0]


def test_weights_without_error_need_no_shift():
    net = model("(float[n,6] x) => (float[n,8] y) { y = Gemm(x, w) }", w=np.ones((6, 8), np.float32))
    feeds = {"x": np.ones((4, 6), np.float32)}
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, [feeds], "minmax"))
    assert mean_shifts(net, int8, [feeds]) == {}


def test_the_fast_effort_corrects_biases_that_raise_the_held_out_sqnr():
    text, shape, size = LAYERS["Conv"]
    normal = normals(5)
    net = model(text, w=normal(*shape), b=normal(shape[0]))
    batches = [{"x": np.abs(normal(*size)) * 0.1 + 2} for _ in range(4)]
    table = auto_calibrate(net, QuantRecipe(), batches, effort="fast")
    assert table.bias and not table.rounding
    int8, plain = (quantize(net, QuantRecipe(), candidate)[0] for candidate in (table, replace(table, bias={})))
    exact, corrected, before = (run(variant, **batches[0])["y"] for variant in (net, int8, plain))
    assert np.square(corrected - exact).mean() < 0.7 * np.square(before - exact).mean()
