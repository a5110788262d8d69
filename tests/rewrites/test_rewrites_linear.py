"""Passes around linear layers: a product's scale, and layers of bytes with their bias."""

import numpy as np
import pytest
from rewriting import model, ops, reasons, rewritten

from pipelines.graph import query
from pipelines.rewrites.fold_scale import FoldScale
from pipelines.rewrites.fuse_quantized_linear import FuseQuantizedLinear

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
    assert "nothing else reads" in next(iter(reasons(report, "FoldScale").values()))


QUANTIZED = """({type} x) => (float[n, 3] y) {{
    q = QuantizeLinear(x, s, z)
    dx = DequantizeLinear(q, s, z)
    dw = DequantizeLinear<axis = 1>(W, t)
    p = MatMul(dx, dw)
    y = Add(p, b)
}}"""


def quantized_linear(bias, kind="float[n, 4]"):
    constants = {"s": np.float32(0.5), "z": np.uint8(7), "t": np.array([0.25, 0.5, 1], np.float32)}
    return model(
        QUANTIZED.format(type=kind),
        W=np.arange(-6, 6, dtype=np.int8).reshape(4, 3),
        b=np.array(bias, np.float32),
        **constants,
    )


def test_a_product_of_bytes_takes_its_bias_along():
    m = quantized_linear([1.0, -0.5, 2.5])  # whole steps of the product
    rewritten(m, FuseQuantizedLinear(), exact=True, x=np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32))
    assert sorted(ops(m)) == ["DequantizeLinear"] * 3 + ["Gemm", "QuantizeLinear"]
    assert query.constant(m.graph.initializers["y.bias.quantized"]).tolist() == [8, -2, 5]


def test_what_is_added_to_a_product_of_bytes_may_be_computed():
    text = (
        QUANTIZED.format(type="float[n, 4]").replace("x) =>", "x, float[n, 3] r) =>").replace("Add(p, b)", "Add(r, p)")
    )
    constants = {"s": np.float32(0.5), "z": np.uint8(7), "t": np.array([0.25, 0.5, 1], np.float32)}
    m = model(text, W=np.arange(-6, 6, dtype=np.int8).reshape(4, 3), **constants)
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=(5, n)).astype(np.float32) for name, n in (("x", 4), ("r", 3))}
    rewritten(m, FuseQuantizedLinear(), exact=True, **inputs)
    assert sorted(ops(m)) == ["Add"] + ["DequantizeLinear"] * 2 + ["Gemm", "QuantizeLinear"]


@pytest.mark.parametrize(
    ("bias", "kind", "said"),
    [([[1.0, 2, 3], [4, 5, 6]], "float[2, 4]", "constant row"), ([1.0, 2, 3e9], "float[n, 4]", "32 bits")],
)
def test_a_bias_that_is_no_row_of_integers_stays(bias, kind, said):
    m = quantized_linear(bias, kind)
    report = rewritten(m, FuseQuantizedLinear(), x=np.ones((2, 4), np.float32))
    assert "MatMul" in ops(m)
    assert said in next(iter(reasons(report, "FuseQuantizedLinear").values()))
