"""AffineToDepthwise, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import fires, model, ops

from pipelines.rewrites.affine_to_depthwise import AffineToDepthwise
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm

BN = {"g": normals(0)(8), "be": normals(2)(8), "m": normals(3)(8), "v": np.abs(normals(4)(8)) + 0.5}
IMAGE = {"x": normals(5)(2, 4, 5, 5)}
NORM = "n = BatchNormalization<epsilon=0.01>(c, g, be, m, v)"


def graph(body, out="float[n,8,5,5] y", **weights):
    return model(f"(float[n,4,5,5] x) => ({out}) {{ {body} }}", 17, **weights)


@pytest.mark.parametrize("after", ["y = Relu(n)", "h = Mul(n, two) y = Relu(h)"])
def test_batch_norm_after_a_concat(after):
    net = graph(f"c = Concat<axis=1>(x, x) {NORM} {after}", two=np.float32(2), **BN)
    fires(net, AffineToDepthwise(), "Concat Conv Relu", **IMAGE)
    (conv,) = (node for node in net.graph if node.op_type == "Conv")
    assert conv.attributes.get_int("group", 1) == 8


def test_what_normalizes_an_input_before_a_conv_that_pads(normal):
    body = "a = Div(x, white) s = Sub(a, mean) z = Div(s, sd) y = Conv<pads=[1,1,1,1]>(z, W)"
    weights = {"white": np.float32(255), "mean": normal(4, 1, 1), "sd": np.abs(normal(1, 4, 1, 1)) + 0.5}
    net = graph(body, "float[n,2,5,5] y", **weights, W=normal(2, 4, 3, 3))
    fires(net, AffineToDepthwise(), "Conv Conv", x=IMAGE["x"] * 100)


@pytest.mark.parametrize(
    ("body", "out"),
    [
        ("y = Mul(x, k)", "float[n,4,5,5] y"),  # of a float input, but before no Conv
        ("r = Relu(x) a = Mul(r, k) y = Conv<pads=[1,1,1,1]>(a, W)", "float[n,2,5,5] y"),  # may be a part of a Gelu
        ("f = Flatten(x) y = BatchNormalization(f, g, be, m, v)", "float[n,100] y"),
    ],
)
def test_other_arithmetic_stays(normal, body, out):
    norm = {"g": normal(100), "be": normal(100), "m": normal(100), "v": np.abs(normal(100)) + 0.5}
    net = graph(body, out, k=np.float32(0.5), W=normal(2, 4, 3, 3), **norm)
    assert rewrite(net, [AffineToDepthwise()]).fired("AffineToDepthwise") == 0


def test_a_layer_beside_it_takes_it_first(normal):
    net = graph(f"c = Conv(x, W) {NORM} y = Relu(n)", "float[n,8,3,3] y", W=normal(8, 4, 3, 3), **BN)
    rewrite(net, [FoldBatchNorm(), AffineToDepthwise()])
    assert ops(net) == ["Conv", "Relu"]


def test_a_batch_norm_of_doubles_stays(normal):
    text = "(double[n,8,5,5] c) => (double[n,8,5,5] y) { n = BatchNormalization(c, g, be, m, v) y = Relu(n) }"
    net = model(text, **{name: array.astype(np.float64) for name, array in BN.items()})
    fires(net, AffineToDepthwise(), "BatchNormalization Relu", c=normal(2, 8, 5, 5).astype(np.float64))
