"""FuseActivations, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import fires, model, ops, reasons, rewritten

from pipelines.rewrites.fuse_activations import FuseActivations

ACT = "(float[n,3] x) => (float[n,3] y) {{ {} }}"
NUMBERS = {
    name: np.float32(value)
    for name, value in {"zero": 0, "six": 6, "three": 3, "top": np.inf, "sixth": 1 / 6, "slope": 0.1, "two": 2}.items()
}
WIDE = {"x": normals(0)(40, 3, scale=5)}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("y = Clip(x, zero)", "Relu"),
        ("y = Clip(x, zero, top)", "Relu"),
        ("y = Clip(x, zero, six)", "Clip"),
        ("y = Max(zero, x)", "Relu"),
        ("y = Max(x, two)", "Clip"),
        ("y = Min(x, two)", "Clip"),
        ("a = Max(x, zero) y = Min(six, a)", "Clip"),
        ("a = Relu(x) y = Clip(a, , six)", "Clip"),
        ("a = Clip(x, zero, six) y = Relu(a)", "Clip"),
        ("a = Clip(x, two, six) y = Clip(a, three)", "Clip"),
        ("a = Relu(x) y = Relu(a)", "Relu"),
        ("a = Mul(x, slope) y = Max(x, a)", "LeakyRelu"),
        ("a = Add(x, three) b = Clip(a, zero, six) y = Div(b, six)", "HardSigmoid"),
        ("a = Add(three, x) b = Clip(a, zero, six) y = Mul(sixth, b)", "HardSigmoid"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Div(b, six) y = Mul(c, x)", "HardSwish"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) y = Div(c, six)", "HardSwish"),
        ("a = Add(x, three) r = Relu(a) b = Min(r, six) c = Mul(x, b) y = Mul(c, sixth)", "HardSwish"),
        ("a = HardSigmoid<alpha=0.16666667,beta=0.5>(x) y = Mul(x, a)", "HardSwish"),
    ],
)
def test_activations(body, left):
    fires(model(ACT.format(body), **NUMBERS), FuseActivations(), left, **WIDE)


@pytest.mark.parametrize(
    ("opset", "after", "left"), [(12, 12, "HardSigmoid Mul"), (13, 14, "HardSwish"), (17, 17, "HardSwish")]
)
def test_a_graph_of_opset_13_with_a_hard_swish_becomes_one_of_14(opset, after, left):
    body = "a = Add(x, three) b = Clip(a, zero, six) c = Div(b, six) y = Mul(c, x)"
    net = model(ACT.format(body), opset, **NUMBERS)
    fires(net, FuseActivations(), left, **WIDE)
    assert net.opset_imports[""] == after


@pytest.mark.parametrize(
    ("body", "left", "reason"),
    [
        (
            "a = Max(x, zero) b = Neg(a) c = Min(six, a) y = Add(b, c)",
            "Relu Neg Clip Add",
            "Relu a before it has another reader",
        ),
        ("a = HardSigmoid(x) y = Mul(x, a)", "HardSigmoid Mul", "alpha 0.2"),
        ("a = HardSigmoid<alpha=0.16666667>(x) b = Neg(x) y = Mul(b, a)", "HardSigmoid Neg Mul", None),
        ("a = HardSigmoid<alpha=0.16666667>(x) b = Mul(x, a) y = Add(a, b)", "HardSigmoid Mul Add", "another reader"),
        ("a = Sigmoid(x) y = Mul(x, a)", "Sigmoid Mul", None),
        ("a = Add(x, two) b = Clip(a, zero, six) y = Div(b, six)", "Add Clip Div", None),
        ("a = Add(x, three) b = Clip(a, zero, three) y = Div(b, six)", "Add Clip Div", None),
        ("a = Add(x, three) b = Clip(a, zero, six) y = Div(six, b)", "Add Clip Div", None),
        ("a = Mul(x, two) y = Max(x, a)", "Mul Max", None),
        ("a = Neg(x) y = Max(x, a)", "Neg Max", None),
        ("y = Max(x, row)", "Max", None),
        ("y = Max(x, cube)", "Max", None),
        ("y = Clip(x, six, zero)", "Clip", None),
        ("a = ReduceMax<keepdims=0>(x) y = Clip(x, zero, a)", "ReduceMax Clip", None),
    ],
)
def test_activations_that_only_look_alike(normal, body, left, reason):
    net = model(ACT.format(body), row=normal(3), cube=np.float32([[[0]]]), **NUMBERS)
    net.graph.outputs[0].shape = None
    report = rewritten(net, FuseActivations(), **WIDE)
    assert ops(net) == left.split()
    assert (
        reason in " ".join(reasons(report, "FuseActivations").values())
        if reason
        else not reasons(report, "FuseActivations")
    )
