"""FuseQuantizedLinear, from ONNX text."""

import numpy as np
import pytest
from rewriting import model, ops, reasons, rewritten

from pipelines.graph import query
from pipelines.rewrites.fuse_quantized_linear import FuseQuantizedLinear

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
