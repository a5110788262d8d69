"""LiftRows, from ONNX text."""

import numpy as np
from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.rewrites.fold_pad import FoldPad
from pipelines.rewrites.lift_rows import LiftRows


def test_convolutions_pools_and_what_is_between_them(normal):
    net = model(
        """(float[n,4,20] x) => (float[n,c,t] y, float[n,8,20] r) {
            a = Conv<kernel_shape=[3], pads=[2, 0], group=2>(x, w, b)
            r = Relu(a)
            s = Mul(r, gain)
            p = MaxPool<kernel_shape=[2], strides=[2]>(s)
            q = Concat<axis=-2>(p, p)
            y = ConvTranspose<strides=[2], output_padding=[1]>(q, v)
        }""",
        w=normal(8, 2, 3),
        b=normal(8),
        gain=normal(8, 1),
        v=normal(16, 3, 4),
    )
    report = rewritten(net, LiftRows(), x=normal(2, 4, 20))
    assert report.fired("LiftRows") == 2
    assert ops(net) == ["Unsqueeze", "Conv", "Relu", "Squeeze", "Mul", "MaxPool", "Concat", "ConvTranspose", "Squeeze"]


def test_a_pad_before_a_causal_convolution(normal):
    net = model(
        "(float[n,4,9] x) => (float[n,4,9] y) { p = Pad(x, pads, zero) y = Conv(p, w) }",
        pads=integers(0, 0, 2, 0, 0, 0),
        zero=np.float32(0),
        w=normal(4, 4, 3),
    )
    rewritten(net, LiftRows(), FoldPad(), x=normal(2, 4, 9))
    assert ops(net) == ["Unsqueeze", "Conv", "Squeeze"]


def test_values_from_outside_and_readers_outside(normal):
    net = model(
        """(float[n,4,9] x, float[n,4,9] z) => (float[n,9,4] y) {
            a = Conv<dilations=[2], pads=[2, 2]>(x, w)
            s = Add(a, z)
            t = Transpose<perm=[0, 2, 1]>(s)
            y = MatMul(t, v)
        }""",
        w=normal(4, 4, 3),
        v=normal(4, 4),
    )
    rewritten(net, LiftRows(), x=normal(3, 4, 9), z=normal(3, 4, 9))
    assert sorted(ops(net)) == ["Add", "Conv", "MatMul", "Squeeze", "Transpose", "Unsqueeze", "Unsqueeze"]


def test_operators_without_a_convolution_near_and_other_ranks_are_left_alone(normal):
    net = model("(float[n,4,9] x) => (float[n,4,9] y) { r = Relu(x) y = Add(r, x) }")
    assert rewritten(net, LiftRows(), x=normal(2, 4, 9)).fired("LiftRows") == 0
    net = model("(float[n,4,5,9] x) => (float[n,c,h,t] y) { y = Conv(x, w) }", w=normal(2, 4, 1, 3))
    assert rewritten(net, LiftRows(), x=normal(2, 4, 5, 9)).fired("LiftRows") == 0 and ops(net) == ["Conv"]


def test_weights_that_vary_are_refused(normal):
    net = model("(float[n,4,9] x, float[2,4,3] w) => (float[n,2,7] y) { y = Conv(x, w) }")
    report = rewritten(net, LiftRows(), x=normal(2, 4, 9), w=normal(2, 4, 3))
    assert report.fired("LiftRows") == 0 and len(reasons(report, "LiftRows")) == 1
