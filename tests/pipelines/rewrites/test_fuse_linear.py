"""FuseLinear, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.graph import query
from pipelines.rewrites.fuse_linear import FuseLinear

LINEAR = "(float[n,3] x) => (float[n,2] y) { h = MatMul(x, w) y = Add(h, b) }"


@pytest.mark.parametrize("text", [LINEAR, LINEAR.replace("Add(h, b)", "Add(b, h)")])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_fuse_linear(normal, text, shape):
    net = model(text, w=normal(3, 2), b=normal(*shape))
    report = rewritten(net, FuseLinear(), x=normal(4, 3))
    assert report.fired("FuseLinear") == 1 and ops(net) == ["Gemm"]
    assert net.graph[0].name == "y" and query.constant(net.graph[0].inputs[2]).shape == (2,)


def test_fuse_linear_of_layers_that_share_weights_and_bias(normal):
    text = (
        "(float[n,3] x) => (float[n,3] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) k = MatMul(r, w) y = Add(k, b) }"
    )
    net = model(text, w=normal(3, 3), b=normal(1, 3))
    assert rewritten(net, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 2
    assert ops(net) == ["Gemm", "Relu", "Gemm"]


def test_fuse_linear_of_one_column(normal):
    net = model(LINEAR.replace("float[n,2]", "float[n,1]"), w=normal(3, 1), b=normal(1))
    assert rewritten(net, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 1


ROW = "the addend is not a constant with one value per output"


@pytest.mark.parametrize(
    ("text", "weights", "feeds", "reason"),
    [
        (LINEAR.replace("y = Add(h, b)", "a = Add(h, b) y = Mul(a, h)"), {}, {}, None),  # two readers
        (
            LINEAR.replace("(float[n,2] y)", "(float[n,2] y, float[n,2] h)"),
            {},
            {},
            None,
        ),  # the product leaves the graph
        (LINEAR.replace("Add(h, b)", "Sub(h, b)"), {}, {}, None),
        (LINEAR.replace("Add(h, b)", "Add(h, h)"), {}, {}, None),
        (
            LINEAR.replace("n,3", "n,5,3").replace("n,2", "n,5,2"),
            {},
            {"x": normals(0)(4, 5, 3)},
            "input is not known to be 2-D (rank 3)",
        ),
        (LINEAR.replace("n,3] x", "n,3] x, float[2] b"), {"b": None}, {"b": normals(0)(2)}, ROW),
        (LINEAR.replace("n,3] x", "n,3] x, float[3,2] w"), {"w": None}, {"w": normals(0)(3, 2)}, None),
        (LINEAR, {"b": normals(0)(4, 2)}, {}, ROW),
        (LINEAR, {"b": np.float32(0.5)}, {}, ROW),
        (LINEAR, {"b": normals(0)(4, 1)}, {}, ROW),
        (LINEAR.replace("float[n,2]", "float[1,n,2]"), {"b": normals(0)(1, 1, 2)}, {}, ROW),  # the sum is 3-D
        (LINEAR.replace("float[n,2]", "float[m,n,2]"), {"w": normals(0)(5, 3, 2)}, {}, None),
        (
            "(float[n,3] x, int64[k] s) => (float[n,2] y) { z = Reshape(x, s) h = MatMul(z, w) y = Add(h, b) }",
            {},
            {"s": integers(-1, 3)},
            "input is not known to be 2-D (rank None)",
        ),
    ],
)
def test_fuse_linear_near_misses(normal, text, weights, feeds, reason):
    values = {
        name: array for name, array in ({"w": normal(3, 2), "b": normal(2)} | weights).items() if array is not None
    }
    net = model(text, **values)
    kept = ops(net)
    report = rewritten(net, FuseLinear(), exact=True, **({"x": normal(4, 3)} | feeds))
    assert ops(net) == kept and report.fired("FuseLinear") == 0
    assert list(reasons(report, "FuseLinear").values()) == ([] if reason is None else [reason])


@pytest.mark.parametrize("bias", [(2,), (1, 2), (1,), ()])
def test_factors_of_a_gemm_move_into_its_constants(normal, bias):
    text = "(float[n,3] x) => (float[n,2] y) { y = Gemm<alpha=0.5, beta=2.0, transB=1>(x, w, b) }"
    net = model(text, w=normal(2, 3), b=normal(*bias))
    assert rewritten(net, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 1
    assert not {"alpha", "beta"} & set(net.graph[0].attributes)
    assert query.constant(net.graph[0].inputs[2]).shape == (2,)


def test_factors_of_a_gemm_stay_where_its_addend_varies_along_the_batch(normal):
    text = "(float[4,3] x) => (float[4,2] y) { y = Gemm<alpha=0.5>(x, w, b) }"
    net = model(text, w=normal(3, 2), b=normal(4, 2))
    assert rewritten(net, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 0
