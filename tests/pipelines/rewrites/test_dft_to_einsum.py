"""DftToEinsum, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.dft_to_einsum import LONGEST, DftToEinsum
from pipelines.rewrites.einsum_to_matmul import EinsumToMatMul


def transform(shape, inputs="x, , a", inverse=0, onesided=0, opset=20, axis="", **constants):
    ranks = ",".join("abcdefg"[: len(shape)])
    text = f"(float[{','.join(map(str, shape))}] x) => (float[{ranks}] y) {{ "
    return model(f"{text} y = DFT<inverse={inverse}, onesided={onesided}{axis}>({inputs}) }}", opset, **constants)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 6, 2), {"a": np.int64(2)}),
        ((2, 6, 3, 2), {"a": np.int64(-3), "inverse": 1}),
        ((2, 3, 6, 1), {"a": np.int64(2), "onesided": 1}),
        ((2, 3, 6, 2), {"a": np.int64(2), "onesided": 1, "inverse": 1}),
        ((2, 3, 5, 2), {"inputs": "x, m, a", "a": np.int64(2), "m": np.int64(9), "onesided": 1, "inverse": 1}),
        ((2, 3, 6, 1), {"inputs": "x, m", "m": np.int64(4)}),  # cut
        ((3, 6, 2), {"inputs": "x, m", "m": np.int64(8), "opset": 17}),  # filled; axis 1
        ((3, 2, 6, 1), {"inputs": "x", "opset": 17, "axis": ", axis=2", "onesided": 1}),
    ],
)
def test_a_transform_is_a_product(normal, shape, options):
    net, x = transform(shape, **options), normal(*shape) / 64
    assert rewritten(net, DftToEinsum(), EinsumToMatMul(), x=x).fired("DftToEinsum") == 1
    assert "MatMul" in ops(net) and "DFT" not in ops(net) and "Einsum" not in ops(net)


def test_scalars_are_folded(normal):
    text = """(float[2,3,6,2] x) => (float[2,3,6,2] y) {
        h = Div(x, c) f = DFT<onesided=0>(h, , a) g = Mul(c, f) i = DFT<inverse=1>(g, , b) y = Mul(i, v) }"""
    net = model(text, 20, c=np.float32(3), v=normal(2), a=np.int64(2), b=np.int64(1))
    assert rewritten(net, DftToEinsum(), x=normal(2, 3, 6, 2) / 64).fired("DftToEinsum") == 2
    assert ops(net) == ["Transpose", "Einsum", "Transpose", "Einsum", "Mul"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, LONGEST + 1, 2), {"a": np.int64(1)}),
        ((2, "n", 2), {"a": np.int64(1)}),
        ((2, 6, 2), {"inputs": "x, m, a", "a": np.int64(1), "m": np.int64(9), "onesided": 1, "inverse": 1}),  # 5 of 6
    ],
)
def test_another_transform_stays(normal, shape, options):
    net, sizes = transform(shape, **options), [6 if size == "n" else size for size in shape]
    report = rewritten(net, DftToEinsum(), x=normal(*sizes))
    assert report.fired("DftToEinsum") == 0 and ops(net) == ["DFT"]
