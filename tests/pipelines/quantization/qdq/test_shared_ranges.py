"""One range for parts of a Split and int8 Concats behind them."""

import numpy as np
import pytest
from helpers.arrays import floats
from helpers.quantizing import checked
from helpers.rewriting import integers, model

UNITS = """(float[n,4,5,5] x) => (float[n,8,5,5] y) {
    a = Conv(x, w) b = Relu(a) k, p = Split<axis=1>(b, halves) c = Conv(p, v) d = Relu(c) e = Concat<axis=1>(k, d)
    f = Reshape(e, groups) g = Transpose<perm=[0,2,1,3,4]>(f) h = Reshape(g, whole)
    l, q = Split<axis=1>(h, halves) r = Conv(q, v) s = Relu(r) t = Concat<axis=1>(l, s) y = Conv(t, u) }"""


def _model(first: float = 1.0):
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["v"] *= 0.4  # as batch norms keep sizes
    weights["w"][:4] *= first
    sizes = {"halves": integers(4, 4), "groups": integers(0, 2, 4, 5, 5), "whole": integers(0, 8, 5, 5)}
    return model(UNITS, **weights, **sizes)


SHAPES = {"w": (8, 4, 1, 1), "v": (4, 4, 1, 1), "u": (8, 8, 1, 1)}


def test_channels_of_shufflenet_are_never_quantized_again():
    result, report = checked(_model(), x=floats(1, 8, 4, 5, 5))
    assert all(op.precision == "int8" for op in report.operators if op.type != "Relu")
    quantizers = [node for node in result.graph if node.op_type == "QuantizeLinear"]
    scales = {node.inputs[1].const_value.numpy().item() for node in quantizers[1:4]}
    assert len(scales) == 1  # from the first Relu to the last Concat


@pytest.mark.parametrize("first", [0.1, 10.0])
def test_parts_of_another_size_keep_their_range(first):
    _, report = checked(_model(first), x=floats(1, 8, 4, 5, 5))
    assert "Split" in {op.type for op in report.operators if op.precision == "float"}
