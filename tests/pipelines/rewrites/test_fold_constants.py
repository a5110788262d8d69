"""FoldConstants, from ONNX text."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.rewriting import fires, integers, model, ops, reasons, rewritten

from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.shared import SHARED


def test_constants_are_computed_once(normal):
    net = model(
        "(float[n,3] x) => (float[n,3] y) "
        "{ a = Mul(k, k) b = Transpose(a) c = ReduceSum<keepdims=0>(b) y = Mul(x, c) }",
        k=normal(3, 3),
    )
    assert fires(net, FoldConstants(), "Mul", exact=True, x=normal(2, 3)).fired("FoldConstants") == 3


def test_parts_of_constants_are_constants(normal):
    """torch.nn.MultiheadAttention of other keys than queries divides its weights in the graph."""
    net = model(
        "(float[n,3] x, float[n,3] z) => (float[n,4] y) { q, k = Split<axis=0>(w, sizes) a = Transpose(q) b = Transpose(k)"
        " f = MatMul(x, a) g = MatMul(z, b) h = Concat<axis=1>(f, g) y = Mul(h, h) }",
        w=normal(4, 3),
        sizes=integers(1, 3),
    )
    left = "MatMul MatMul Concat Mul"
    assert fires(net, FoldConstants(), left, x=normal(2, 3), z=normal(2, 3)).fired("FoldConstants") == 3


def test_shapes_of_static_dimensions_are_constants(normal):
    text = """(float[n,4,6] x) => (int64[1] a, int64 b, int64[2] c, int64[3] d, int64 e) {
        s = Shape(x) a = Gather(s, two) b = Gather(s, one) c = Slice(s, start, end) d = Shape(x) e = Size(k) }"""
    net = model(text, two=integers(2), one=np.int64(-1), start=integers(1), end=integers(9), k=normal(2, 3))
    report = rewritten(net, FoldConstants(), exact=True, x=normal(2, 4, 6))
    assert report.fired("FoldConstants") == 4 and ops(net).count("Shape") == 1  # d holds the batch


@pytest.mark.parametrize(
    "body",
    [
        "k = RandomNormal<shape=[3]>() y = Mul(x, k)",
        "k = RandomUniformLike(w) y = Mul(x, k)",
        "k = DequantizeLinear(q, s) y = Mul(x, k)",
        "s0 = Shape(x) n = Gather(s0, zero) f = Cast<to=1>(n) y = Mul(x, f)",
    ],
)
def test_what_is_not_constant_stays(normal, body):
    net = model(
        f"(float[n,3] x) => (float[n,3] y) {{ {body} }}",
        w=normal(3),
        q=np.ones(3, np.int8),
        s=np.float32(2),
        zero=np.int64(0),
    )
    before = len(net.graph)
    assert not rewrite(net, [FoldConstants()]).fired("FoldConstants") and len(net.graph) == before


def test_constants_that_would_blow_up_the_file_stay(normal):
    net = model(
        "(float[n,3] x) => (float[n,3] y) { k = Expand(one, big) m = ReduceMax<keepdims=0>(k) y = Mul(x, m) }",
        one=np.float32(1),
        big=integers(5000, 1000),
    )
    report = rewritten(net, FoldConstants(), x=normal(2, 3))
    assert ops(net) == ["Expand", "ReduceMax", "Mul"] and "19 MiB" in reasons(report, "FoldConstants").popitem()[1]


def test_a_constant_of_a_custom_domain_stays(normal):
    text = '<ir_version: 9, opset_import: ["": 17, "my": 1]> g (float[n] x) => (float[n] y) { k = my.Twice(w) y = Mul(x, k) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(normal(1), "w"))
    net = ir.from_proto(proto)
    rewrite(net, [pass_() for pass_ in SHARED])
    assert ops(net) == ["Twice", "Mul"]
