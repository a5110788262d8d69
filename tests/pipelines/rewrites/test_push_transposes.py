"""PushTransposes, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, ops, rewritten

from pipelines.rewrites.push_transposes import PushTransposes

NHWC, NCHW = "Transpose<perm=[0,2,3,1]>", "Transpose<perm=[0,3,1,2]>"
T4D = "(float[n,4,5,6] x) => (float[n,p,q,r] y) {{ {} }}"
X4D = {
    "x": normals(0)(2, 4, 5, 6),
}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (f"a = {NHWC}(x) b = {NCHW}(a) y = Relu(b)", "Relu"),
        (f"a = {NHWC}(x) b = {NHWC}(a) y = Relu(b)", "Transpose Relu"),
        (f"a = {NHWC}(x) b = Relu(a) c = Neg(b) y = {NCHW}(c)", "Relu Neg"),
        (f"a = {NHWC}(x) b = Add(a, k) c = Mul(two, b) d = Sub(c, one) y = {NCHW}(d)", "Add Mul Sub"),
        (f"a = {NHWC}(x) e = Exp(x) b = {NHWC}(e) y = Add(a, b)", "Exp Add Transpose"),
        (f"a = {NHWC}(x) e = Exp(x) b = {NHWC}(e) c = Concat<axis=3>(a, b) y = {NCHW}(c)", "Exp Concat"),
        (f"a = {NHWC}(x) b = Pad(a, pads) y = {NCHW}(b)", "Pad"),
        (f"a = {NHWC}(x) b = ReduceMean<axes=[1,2]>(a) y = {NCHW}(b)", "ReduceMean"),
        (f"a = {NHWC}(x) b = ReduceMean<axes=[1,2],keepdims=0>(a) y = Unsqueeze(b, ends)", "ReduceMean Unsqueeze"),
        (f"a = {NHWC}(x) b = ReduceSum(a, ends2) y = {NCHW}(b)", "ReduceSum"),
        (f"a = {NHWC}(x) b = Clip(a, one, two) c = {NCHW}(b) d = {NCHW}(b) e = Relu(d) y = Add(c, e)", "Clip Relu Add"),
        (
            f"a = {NHWC}(x) b = Relu(a) c = {NCHW}(b) d = Abs(c) e = {NHWC}(d) f = Add(b, e) y = {NCHW}(f)",
            "Relu Abs Add",
        ),  # residual
        ("y = Transpose<perm=[0,1,2,3]>(x)", ""),
    ],
)
def test_transposes_cancel(normal, body, left):
    weights = {
        "k": normal(5, 1, 4),
        "two": np.float32(2),
        "one": np.float32(-1),
        "pads": integers(0, 1, 2, 0, 0, 0, 1, 0),
        "ends": integers(1, 2),
    }
    net = model(T4D.format(body), 13, ends2=integers(1, 2), **weights)
    net.graph.outputs[0].shape = None
    report = rewritten(net, PushTransposes(), exact="Reduce" not in body, **X4D)
    assert sorted(ops(net)) == sorted(left.split()) or (left == "" and ops(net) == ["Identity"]), report


@pytest.mark.parametrize(
    "body",
    [
        f"a = {NHWC}(x) y = Relu(a)",  # nothing to meet
        f"a = {NHWC}(x) b = Relu(a) c = MaxPool<kernel_shape=[2,2]>(b) y = {NCHW}(c)",  # a pool knows one layout
        f"a = {NHWC}(x) b = Softmax<axis=-1>(a) y = {NCHW}(b)",
        f"a = {NHWC}(x) b = Reshape(a, flat) c = Relu(b) d = Reshape(c, back) y = {NCHW}(d)",
        f"a = {NHWC}(x) b = Relu(a) c = Softmax(a) d = Mul(b, c) y = {NCHW}(d)",
        f"a = {NHWC}(x) b = Add(a, w5) y = Relu(b)",
        f"a = {NHWC}(x) b = ReduceSum<keepdims=0>(a, none) c = Neg(x) d = {NHWC}(c) y = Add(b, d)",  # no axes are all
        f"a = {NHWC}(x) b = {NCHW}(x) c = Shape(a) d = Shape(b) e = Add(c, d) f = ReduceSum(e) g = Cast<to=1>(f) y = "
        "Mul(x, g)",
    ],
)
def test_transposes_that_are_needed_stay(normal, body):
    weights = {"flat": integers(-1), "back": integers(-1, 5, 6, 4), "none": integers()}
    net = model(T4D.format(body), 13, w5=normal(1, 1, 1, 1, 4), **weights)
    net.graph.outputs[0].shape = None
    before = sorted(ops(net))
    assert (
        rewritten(net, PushTransposes(), exact=True, **X4D).fired("PushTransposes") == 0 and sorted(ops(net)) == before
    )


def test_squeeze_and_excitation_of_tensorflow_keeps_no_transpose(normal):
    """The mean and the product read one function of a transposed value; the factor passes a function, too."""
    text = """(float[n,4,5,6] x) => (float[n,2,5,6] y) {
        a = Conv(x, w) t = Transpose<perm=[0,2,3,1]>(a) h = HardSwish(t) m = ReduceMean<axes=[1,2]>(h)
        u = Transpose<perm=[0,3,1,2]>(m) b = Conv(u, w) c = Transpose<perm=[0,2,3,1]>(b) g = HardSigmoid(c)
        p = Mul(h, g) q = Transpose<perm=[0,3,1,2]>(p) y = Conv(q, v) }"""
    net = model(text, w=normal(4, 4, 1, 1), v=normal(2, 4, 1, 1))
    rewritten(net, PushTransposes(), x=normal(2, 4, 5, 6))
    assert "Transpose" not in ops(net)


def test_a_function_with_a_reader_that_keeps_the_transpose_is_not_passed(normal):
    text = """(float[n,4,5,6] x) => (float[n,4,5,6] y, float[n,5,6,4] z) {
        t = Transpose<perm=[0,2,3,1]>(x) h = Relu(t) z = Softmax(h) m = Exp(h) k = Softmax(m)
        y = Transpose<perm=[0,3,1,2]>(k) }"""
    net = model(text)
    rewritten(net, PushTransposes(), exact=True, x=normal(2, 4, 5, 6))
    assert ops(net)[:2] == ["Transpose", "Relu"]
