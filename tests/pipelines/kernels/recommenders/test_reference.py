"""What the linear layer computes, by hand and against plain float; layers that could overflow are refused."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.operators import LinearLayer


@pytest.mark.parametrize("zero", [None, 0, 100])
def test_a_linear_layer_is_a_product_in_float(rng, zero):
    weight = rng.integers(-127, 128, (30, 7)).astype(np.int8)
    bias = rng.integers(-5000, 5000, 7).astype(np.int32)
    scale = rng.uniform(0.5, 1, 7).astype(np.float32) / 200
    of = LinearLayer(weight, bias, scale, zero, zero or 0)
    x = rng.integers(0, 256, (20, 30)).astype(np.uint8)
    expected = (x.astype(np.float64) @ weight + bias) * scale
    output = of.compute(x)
    assert output.shape == (20, 7)
    if zero is None:
        assert output.dtype == np.float32
        np.testing.assert_allclose(output, expected, rtol=1e-6)
    else:
        assert output.dtype == np.uint8 and output.min() == zero
        assert np.abs(output - np.clip(expected + zero, zero, 255)).max() <= 0.5001


def test_a_linear_layer_by_hand():
    of = LinearLayer(
        np.array([[2], [-3]], np.int8), np.array([1], np.int32), np.array([0.5], np.float32), zero_point=10
    )
    x = np.array([[1, 0], [2, 0], [0, 1], [0, 255], [255, 0]], np.uint8)
    assert of.compute(x).ravel().tolist() == [12, 12, 9, 0, 255]  # 1.5 -> 2, 2.5 -> 2, -1, and both ends
    assert replace(of, low=10).compute(x).ravel().tolist() == [12, 12, 10, 10, 255]
    assert replace(of, zero_point=None).compute(x).ravel().tolist() == [1.5, 2.5, -1.0, -382.0, 255.5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": np.zeros(3, np.int8)}, "shape"),
        ({"weight": np.zeros((2, 1), np.uint8)}, "weight uint8"),
        ({"bias": np.zeros(2, np.int32)}, "bias int32"),
        ({"bias": np.array([2**31 - 1], np.int32), "weight": np.ones((2, 1), np.int8)}, "overflow"),
        ({"scale": np.array([np.inf], np.float32)}, "overflow"),
        ({"zero_point": 256}, "zero point 256"),
        ({"low": -1}, "lower bound -1"),
    ],
)
def test_linear_layers_that_are_refused(changes, reason):
    fields = {
        "weight": np.ones((2, 1), np.int8),
        "bias": np.zeros(1, np.int32),
        "scale": np.ones(1, np.float32),
        "zero_point": 0,
    }
    with pytest.raises(RequestError, match=reason):
        LinearLayer(**fields | changes)
