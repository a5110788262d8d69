"""Ranges judged at the outputs: far values that nothing notices give way, those that count do not."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.range_search import output_sqnr, search_ranges
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

RECIPE = QuantRecipe(observer="minmax")
# what h has beyond 6 does not pass the Clip
CUT = "(float[N,16] x) => (float[N,16] y) { h = Gemm(x, V)\n r = Clip(h, zero, six)\n y = Gemm(r, W) }"
LATE = "(float[N,16] x) => (float[N,16] y) { h = MatMul(x, V)\n s = Add(h, x)\n r = Clip(s, zero, six)\n y = MatMul(r, W) }"


def far(rng, samples):
    normal = normals(rng)
    x = normal(samples, 16)
    x[:, 0] += 40 * (rng.random(samples) < 0.5)
    return {"x": x}


def made(rng, text):
    normal = normals(rng)
    net = model(text, V=np.eye(16, dtype=np.float32), W=normal(16, 16), zero=np.float32(0), six=np.float32(6))
    return net, far(rng, 32)


def test_far_values_that_a_clip_cuts_give_way(rng):
    net, feeds = made(rng, LATE)
    table = calibrate(net, [feeds], "minmax")
    better = search_ranges(net, RECIPE, table, [feeds])
    assert better.tensors["x"].high < 0.6 * table.tensors["x"].high
    assert better.tensors["x"].method.startswith("minmax x 0.")
    unseen = far(rng, 200)
    before, after = (output_sqnr(net, quantize(net, RECIPE, candidate)[0], [unseen]) for candidate in (table, better))
    assert after > before + 3


def test_what_counts_stays_and_a_range_too_narrow_is_widened(rng, normal):
    net = model("(float[N,16] x) => (float[N,16] y) { y = Gemm(x, W) }", W=normal(16, 16))
    feeds = {"x": rng.uniform(-1, 1, (32, 16)).astype(np.float32)}
    table = calibrate(net, [feeds], "minmax")
    assert search_ranges(net, RECIPE, table, [feeds]) == table
    narrow = replace(
        table,
        tensors={
            name: replace(tensor, low=tensor.low / 1.6, high=tensor.high / 1.6)
            for name, tensor in table.tensors.items()
        },
    )
    assert search_ranges(net, RECIPE, narrow, [feeds]).tensors["x"].high == pytest.approx(table.tensors["x"].high)


def test_a_softmax_is_looked_behind_and_idle_tensors_are_left_alone(normal):
    text = "(float[N,16] x) => (float[N,16] y, float[N,16] z) { h = Gemm(x, W)\n y = Softmax(h)\n z = Identity(x) }"
    net = model(text, W=1e-6 * normal(16, 16))
    feeds = {"x": normal(8, 16)}
    table = calibrate(net, [feeds], "minmax")
    assert set(search_ranges(net, RECIPE, table, [feeds]).tensors) == set(table.tensors)
    assert run(net, **feeds)["y"].shape == (8, 16)


def test_infinity_before_a_softmax_does_not_count(normal):
    text = "(float[N,16] x) => (float[N,16] y) {{ h = Gemm(x, W)\n m = {} \n y = Softmax(m) }}"
    weights, feeds, mask = (
        normal(16, 16),
        {"x": normal(32, 16)},
        np.where(np.arange(16) % 4, 0, -np.inf).astype(np.float32),
    )
    masked = model(text.format("Add(h, mask)"), W=weights, mask=mask)
    table = calibrate(masked, [feeds], "minmax")
    assert 25 < output_sqnr(masked, quantize(masked, RECIPE, table)[0], [feeds]) < 60
    assert search_ranges(masked, RECIPE, table, [feeds]).tensors["x"].high > 0.7 * table.tensors["x"].high
