"""HoistTransposes, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import fires, integers, model, ops, rewritten

from pipelines.rewrites.affine_to_depthwise import AffineToDepthwise
from pipelines.rewrites.fold_pad import FoldPad
from pipelines.rewrites.hoist_transposes import HoistTransposes

KERAS = """(float[n,6,8,3] x) => (float[n,5,r,c] y) {
    a = Mul(x, factor) b = Sub(a, mean) d = Pad(b, pads) e = Transpose<perm=[0,3,1,2]>(d) y = Conv<strides=[2,2]>(e, W) }"""


@pytest.fixture
def keras(normal):
    """An image that is scaled, shifted by channel and padded."""
    pads = integers(0, 0, 1, 0, 0, 1, 2, 0)
    return model(KERAS, factor=np.float32(1 / 255), mean=normal(1, 1, 1, 3), pads=pads, W=normal(5, 3, 3, 3))


def test_prepared_images(normal, keras):
    fires(keras, HoistTransposes(), "Transpose Mul Sub Pad Conv", x=normal(2, 6, 8, 3))


def test_prepared_images_become_layers(normal, keras):
    rewritten(keras, HoistTransposes(), FoldPad(), AffineToDepthwise(), x=normal(2, 6, 8, 3))
    assert ops(keras) == ["Transpose", "Conv", "Conv"]


@pytest.mark.parametrize("shape", [(6, 8, 1), (8, 1, 1)])
def test_a_reshape_of_one_channel(normal, shape):
    text = (
        f"(float[n,{shape[0]},{shape[1]},1] x) => (float[n,5,r,c] y) {{ a = Relu(x) b = Reshape(a, s) y = Conv(b, W) }}"
    )
    net = model(text, s=integers(-1, 1, *shape[:2]), W=normal(5, 1, 3, 1))
    fires(net, HoistTransposes(), "Transpose Relu Conv", x=normal(2, *shape))


@pytest.mark.parametrize(
    "text",
    [
        "a = Mul(x, x) b = Transpose<perm=[0,3,1,2]>(a) y = Conv(b, W)",
        "a = Mul(x, two) b = Transpose<perm=[0,3,1,2]>(a) p = Conv(b, W) q = ReduceMax(a) y = Add(p, q)",
        "b = Transpose<perm=[0,3,1,2]>(x) y = Conv(b, W)",
        "b = Reshape(x, s) y = Conv(b, W)",
    ],
)
def test_near_misses(normal, text):
    net = model(
        f"(float[n,6,8,3] x) => (float[n,5,r,c] y) {{ {text} }}",
        W=normal(5, 3, 2, 2),
        two=np.float32(2),
        s=integers(-1, 3, 6, 8),
    )
    before = ops(net)
    rewritten(net, HoistTransposes(), exact=True, x=normal(2, 6, 8, 3))
    assert ops(net) == before
