"""FoldScale, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, reasons, rewritten

from pipelines.rewrites.fold_scale import FoldScale

ATTENTION = """(float[n, t, 8] x, float[n, 2, 4, s] keys) => (float[n, 2, t, s] y) {{
    p = MatMul(x, W)
    q = Add(p, b)
    h = Reshape(q, heads)
    t1 = Transpose<perm = [0, 2, 1, 3]>(h)
    scores = MatMul(t1, keys)
    y = {scale}
}}"""


def attention(scale: str):
    random = np.random.default_rng(0)
    weights = {"W": random.normal(size=(8, 8)).astype(np.float32), "b": random.normal(size=8).astype(np.float32)}
    return model(
        ATTENTION.format(scale=scale),
        heads=np.array([0, 0, 2, -1]),
        c=np.float32(3),
        v=np.ones(5, np.float32),
        **weights,
    )


def attention_inputs():
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(2, 3, 8)).astype(np.float32),
        "keys": random.normal(size=(2, 2, 4, 5)).astype(np.float32),
    }


@pytest.mark.parametrize("scale", ["Div(scores, c)", "Mul(scores, c)", "Mul(c, scores)"])
def test_the_scale_of_a_product_goes_into_the_layer_before_it(scale):
    m = attention(scale)
    rewritten(m, FoldScale(), **attention_inputs())
    assert ops(m) == ["MatMul", "Add", "Reshape", "Transpose", "MatMul"]


@pytest.mark.parametrize("scale", ["Mul(scores, v)", "Div(c, scores)"])
def test_no_scale_of_one_number_is_left_alone(scale):
    m = attention(scale)
    rewritten(m, FoldScale(), **attention_inputs())
    assert len(ops(m)) == 6


def test_a_scale_is_not_folded_into_what_others_read():
    m = model(
        "(float[n, 4] x, float[4, m] k) => (float[n, m] y, float[n, 4] q) "
        "{ q = MatMul(x, W)  s = MatMul(q, k)  y = Div(s, c) }",
        W=np.eye(4, dtype=np.float32),
        c=np.float32(2),
    )
    report = rewritten(m, FoldScale(), x=np.ones((2, 4), np.float32), k=np.ones((4, 3), np.float32))
    assert ops(m) == ["MatMul", "MatMul", "Div"]
    assert "with one reader" in next(iter(reasons(report, "FoldScale").values()))


SDPA = """(float[n, t, 8] x, float[n, 2, 4, s] keys) => (float[n, 2, t, s] y{more}) {{
    p = MatMul(x, W)
    q = Add(p, b)
    h = Reshape(q, heads)
    t1 = Transpose<perm = [0, 2, 1, 3]>(h)
    scaled = {scale}
    y = MatMul(scaled, keys)
}}"""


def scaled_factor(scale: str, more: str = ""):
    random = np.random.default_rng(0)
    weights = {"W": random.normal(size=(8, 8)).astype(np.float32), "b": random.normal(size=8).astype(np.float32)}
    heads = np.array([0, 0, 2, -1])
    return model(SDPA.format(scale=scale, more=more), heads=heads, c=np.float32(3), **weights)


@pytest.mark.parametrize("scale", ["Div(t1, c)", "Mul(t1, c)", "Mul(c, t1)"])
def test_the_scale_of_a_factor_goes_into_the_layer_before_it(scale):
    m = scaled_factor(scale)
    rewritten(m, FoldScale(factors=True), **attention_inputs())
    assert ops(m) == ["MatMul", "Add", "Reshape", "Transpose", "MatMul"]


def test_the_scale_of_a_factor_that_is_also_an_output_stays():
    m = scaled_factor("Mul(t1, c)", ", float[n, 2, t, 4] t1")
    rewritten(m, FoldScale(factors=True), **attention_inputs())
    assert len(ops(m)) == 6


def test_the_scale_of_a_factor_stays_unless_asked_for():
    m = scaled_factor("Mul(t1, c)")
    rewritten(m, FoldScale(), **attention_inputs())
    assert len(ops(m)) == 6
