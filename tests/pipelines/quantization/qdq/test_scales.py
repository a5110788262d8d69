"""Scales and zero points: of activations, of weights per channel."""

import itertools

import numpy as np
import pytest
from helpers.rewriting import model, run
from helpers.tiers import one_in
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.ptq import make_table
from pipelines.quantization.qdq.scales import (
    EMPTY,
    LEAST_SCALE,
    activation_qparams,
    stored_scales,
    uint8_qparams,
    weight_qparams,
)
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero"),
    [
        (0.0, 2.55, 0.01, 0),
        (0.5, 2.55, 0.01, 0),  # zero is part of every range
        (-1.0, 1.55, 0.01, 100),
        (-2.55, -1.0, 0.01, 255),
        (0.0, 0.0, 1.0, 0),
        (-1e-13, 1e-13, 1.0, 0),
    ],
)
def test_activation_qparams(low, high, scale, zero):
    qparams = activation_qparams(TensorRange(-9, 9, low, high, 1))
    assert qparams == (np.float32(scale), zero) and [parameter.dtype for parameter in qparams] == [np.float32, np.uint8]


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32))
def test_activation_qparams_cover_the_range_and_hold_zero(a, b):
    low, high = min(a, b), max(a, b)
    scale, zero = activation_qparams(TensorRange(low, high, low, high, 1))
    assert 0 <= int(zero) <= 255 and (low < 0 or zero == 0)
    for x in (low, high, 0.0):
        back = (np.clip(np.rint(x / float(scale)) + int(zero), 0, 255) - int(zero)) * float(scale)
        assert abs(back - x) <= float(scale) * 0.5001 + 1e-12
        assert x != 0 or back == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from([7, 8]), st.sampled_from([0, 1]))
def test_weights_are_never_saturated(seed, bits, axis):
    rng = np.random.default_rng(seed)
    w = (
        rng.standard_normal((6, 7))
        * 10.0 ** rng.uniform(-12, 6, (6, 7)[axis]).reshape((-1, 1) if axis == 0 else (1, -1))
    ).astype(np.float32)
    scale, q = weight_qparams(w, axis, bits)
    top = 2 ** (bits - 1) - 1
    assert q.dtype == np.int8 and (np.abs(q).max(axis=1 - axis) == top).all()  # every channel uses the whole range
    broad = np.expand_dims(scale, 1 - axis).astype(np.float64)
    assert (np.abs(q * broad - w) <= 0.5001 * broad).all()


def test_weights_of_a_convolution_have_a_scale_an_output(normal):
    w = normal(5, 2, 3, 3)
    scale, _ = weight_qparams(w, 0)
    np.testing.assert_allclose(scale, np.abs(w).max(axis=(1, 2, 3)) / 127, rtol=1e-6)


def test_weights_that_were_int8_keep_their_integers():
    """Whatever their step was: one of the tensor, other ones of merged parts, or of the channel."""
    integers = np.random.default_rng(0).integers(-90, 91, (64, 12)).astype(np.int8)
    integers[:, 3] = 0
    step = np.repeat(np.float32([0.0123, 7.1, 3e-4]), 4)
    scale, q = weight_qparams(integers * step, 1)
    np.testing.assert_array_equal(q, integers)
    np.testing.assert_allclose(np.delete(scale, 3), np.delete(step, 3), rtol=1e-6)
    moved = integers * step + np.float32(1e-3) * step * (np.arange(64) == 5)[:, None]  # no longer whole steps
    scale, q = weight_qparams(moved, 1)
    np.testing.assert_allclose(scale[:3], np.abs(moved).max(axis=0)[:3] / 127, rtol=1e-6)
    scale, q = weight_qparams(integers * step, 1, min_scale=1.0)
    assert (scale >= 1).all()


def test_a_channel_of_zeros():
    w = np.stack([np.zeros(4), np.full(4, 1e-42), [1, 2, 3, 4]]).astype(np.float32)
    scale, q = weight_qparams(w, 0)
    assert scale.tolist()[:2] == [1, 1] and not q[:2].any() and q[2].tolist() == [32, 64, 95, 127]
    scale, q = weight_qparams(w, 0, min_scale=np.array([0.25, 0, 8.0]))
    assert scale.tolist() == [0.25, 1, 8] and q[2].tolist() == [0, 0, 0, 0]


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4), st.booleans())
def test_uint8_qparams_are_those_of_one_activation(one, other, symmetric):
    low, high = min(one, other), max(one, other)
    scale, zero = uint8_qparams(low, high, symmetric)
    expected = activation_qparams(TensorRange(low, high, low, high, 1), symmetric)
    assert (scale, zero) == expected and scale.dtype == np.float32


TINY = (0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-24, 1e-20, 1e-12, 1e-6)


@pytest.mark.parametrize(
    ("weight", "bias", "reach"),
    one_in(5, itertools.product(TINY, (0.0, 1e-45, 1e-20, 1.0), (0.0, 1e-40, 1e-11, 1e6))),
)
def test_no_scale_is_zero_or_makes_undefined_integers(weight, bias, reach):
    """Channels, biases and ranges down to the least float32: nothing is divided by 0, no integer is made of NaN."""
    net = model(
        "(float[n,3] x) => (float[n,2] y) { y = Gemm(x, w, b) }",
        w=np.array([[weight, 0.5], [-weight, 1], [0, 0.25]], np.float32),
        b=np.array([bias, 0.1], np.float32),
    )
    x = np.array([[reach, 0, -reach], [0, reach, 0]], np.float32)
    samples = [{"x": x}] * 2
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        table = make_table(net, QuantRecipe(observer="minmax"), samples)
        int8, _ = quantize(net, QuantRecipe(observer="minmax"), table)
    for name, value in int8.graph.initializers.items():
        if name.endswith(".scale"):
            scale = value.const_value.numpy()
            assert (scale >= np.finfo(np.float32).tiny).all() and np.isfinite(scale).all(), (name, scale)
    assert np.isfinite(run(int8, x=x)["y"]).all()


def test_stored_scales_are_normal_floats():
    scales = stored_scales([0.0, 1e-45, 1e-30, np.nan, np.inf, 0.25, -1.0])
    assert scales.dtype == np.float32 and scales.tolist() == [1, 1, 1, 1, 1, 0.25, 1]
    assert np.finfo(np.float32).tiny <= LEAST_SCALE * EMPTY / 255  # a bias's scale


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weight = np.ones((4, 3), np.float32)
    weight[2, 1] = value
    with pytest.raises(RequestError, match=r"a weight of shape \[4, 3\] holds NaN or infinity"):
        weight_qparams(weight, 0)
    with pytest.raises(RequestError, match=r"found a weight of shape \[0, 8\], expected some values"):
        weight_qparams(np.ones((0, 8), np.float32), 1)
