"""FlattenLinear, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.flatten_linear import FlattenLinear

BLOCK = """(float[{n},{h},5,8] x) => (float[{n},{h},5,8] y) {{
    a = MatMul(x, W)  b = Add(a, bias)  d = Div(b, two)  e = Erf(d)  f = Add(e, one)  g = Mul(b, f)
    k = MatMul(g, V)  l = Mul(gamma, k)  y = Add(l, x)
}}"""


def block(n="n", h=3):
    random = np.random.default_rng(0)
    weights = {"W": (8, 16), "bias": (16,), "V": (16, 8), "gamma": (8,)}
    constants = {name: random.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    return model(BLOCK.format(n=n, h=h), two=np.float32(2), one=np.float32(1), **constants)


def feed(h=3):
    return {"x": np.random.default_rng(1).normal(size=(2, h, 5, 8)).astype(np.float32)}


@pytest.mark.parametrize("n", ["n", 2])
def test_a_linear_block_is_computed_on_three_axes(n):
    m = block(n)
    rewritten(m, FlattenLinear(), **feed())
    middle = ["MatMul", "Add", "Div", "Erf", "Add", "Mul", "MatMul", "Mul"]
    assert ops(m) == ["Reshape", *middle, "Reshape", "Add"]


def test_a_result_that_is_an_output_and_one_that_others_read():
    m = model(
        "(float[n,3,5,8] x) => (float[n,3,5,4] a, float[n,5,3,4] y) "
        "{ a = MatMul(x, W) r = Relu(a) y = Transpose<perm=[0,2,1,3]>(r) }",
        W=np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
    )
    rewritten(m, FlattenLinear(), **feed())
    assert sorted(ops(m)) == ["MatMul", "Relu", "Reshape", "Reshape", "Reshape", "Transpose"]


@pytest.mark.parametrize("text", ["(float[n,h,5,8] x) => (float[n,h,5,4] y)", "(float[h,8] x) => (float[h,4] y)"])
def test_unknown_sizes_and_matrices_are_left_alone(text):
    m = model(text + " { y = MatMul(x, W) }", W=np.ones((8, 4), np.float32))
    x = np.ones((2, 3, 5, 8) if "5" in text else (2, 8), np.float32)
    rewritten(m, FlattenLinear(), x=x)
    assert ops(m) == ["MatMul"]
