"""MixChannels, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.mix_channels import LONGEST, MixChannels

ATTENTION = """(float[n,12,4,5] x) => (float[n,12,4,5] y) {
    p = ReduceMean<axes=[2,3], keepdims=0>(x) l = Unsqueeze(p, one) c = Conv<pads=[1,1]>(l, w) s = Sigmoid(c)
    g = Reshape(s, shape) y = Mul(x, g) }"""


def test_gates_of_channels_are_a_linear_layer(normal):
    net = model(ATTENTION, w=normal(1, 1, 3), one=np.array([1]), shape=np.array([-1, 12, 1, 1]))
    assert rewritten(net, MixChannels(), x=normal(2, 12, 4, 5)).fired("MixChannels") == 1
    assert ops(net) == ["ReduceMean", "Unsqueeze", "MatMul", "Sigmoid", "Reshape", "Mul"]


def test_transposes_around_it_are_reshapes(normal):
    text = """(float[n,12,1] x) => (float[n,12,1] y) {
        l = Transpose<perm=[0,2,1]>(x) c = Conv<pads=[1,1]>(l, w) y = Transpose<perm=[0,2,1]>(c) }"""
    net = model(text, w=normal(1, 1, 3))
    rewritten(net, MixChannels(), x=normal(2, 12, 1))
    assert ops(net) == ["Reshape", "MatMul", "Reshape"]


@pytest.mark.parametrize(
    ("options", "inputs", "operators"),
    [
        ("pads=[2,0]", "x, w", ["MatMul"]),
        ("pads=[3,1], strides=[2], dilations=[2]", "x, w, b", ["MatMul", "Add"]),
        ('auto_pad="SAME_UPPER"', "x, w", ["Conv"]),
    ],
)
def test_pads_strides_and_a_bias(normal, options, inputs, operators):
    net = model(
        f"(float[n,1,9] x) => (float[n,1,m] y) {{ y = Conv<{options}>({inputs}) }}", w=normal(1, 1, 3), b=normal(1)
    )
    rewritten(net, MixChannels(), x=normal(2, 1, 9))
    assert ops(net) == operators


@pytest.mark.parametrize(
    ("shape", "weight"),
    [((1, LONGEST + 1), (1, 1, 3)), ((1, "m"), (1, 1, 3)), ((2, 9), (1, 2, 3)), ((1, 9), (2, 1, 3))],
)
def test_other_convolutions_stay(normal, shape, weight):
    channels, line = shape
    net = model(f"(float[n,{channels},{line}] x) => (float[n,c,k] y) {{ y = Conv(x, w) }}", w=normal(*weight))
    rewritten(net, MixChannels(), x=normal(2, channels, 9 if line == "m" else line))
    assert ops(net) == ["Conv"]
