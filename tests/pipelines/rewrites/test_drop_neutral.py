"""DropNeutral, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.drop_neutral import DropNeutral

ZERO, ONE = np.float32(0), np.float32(1)


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("a = Relu(x) y = Add(a, c)", ZERO),
        ("a = Relu(x) y = Add(c, a)", ZERO),
        ("a = Relu(x) y = Sub(a, c)", np.zeros(4, np.float32)),
        ("a = Relu(x) y = Mul(c, a)", np.ones((1, 1, 4), np.float32)),
        ("a = Relu(x) y = Div(a, c)", ONE),
        ("a = Pow(x, c) y = Relu(a)", ONE),
    ],
)
def test_operators_that_change_nothing_are_removed(normal, text, constant):
    net = model(f"(float[n,t,4] x) => (float[n,t,4] y) {{ {text} }}", c=constant)
    rewritten(net, DropNeutral(), exact=True, x=normal(2, 3, 4))
    assert ops(net) == ["Relu"]


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("a = Relu(x) y = Sub(c, a)", ZERO),
        ("a = Relu(x) y = Div(c, a)", ONE),
        ("a = Relu(x) y = Add(a, c)", ONE),
        ("a = ReduceMax<axes=[2], keepdims=1>(x) y = Add(a, c)", np.zeros(4, np.float32)),
        ("a = ReduceMax<keepdims=0>(x) y = Mul(a, c)", np.ones((1, 1, 4), np.float32)),
        ("y = Mul(x, c)", ONE),
    ],
)
def test_near_misses(normal, text, constant):
    net = model(f"(float[n,t,4] x) => (float[n,t,4] y) {{ {text} }}", c=constant)
    before = ops(net)
    rewritten(net, DropNeutral(), exact=True, x=np.abs(normal(1, 1, 4)) + 1)
    assert ops(net) == before
