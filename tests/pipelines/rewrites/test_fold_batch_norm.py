"""FoldBatchNorm, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import fires, model, ops, reasons

from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm

BN = {"g": normals(0)(6), "be": normals(2)(6), "m": normals(3)(6), "v": np.abs(normals(4)(6)) + 0.5}
IMAGE = {"x": normals(5)(2, 4, 5, 5)}
NORM = "y = BatchNormalization<epsilon=0.01>(c, g, be, m, v)"
CONV = "(float[n,4,5,5] x) => (float[n,6,h,w] y) {{ {} }}"


def conv(normal, body, opset=17, **weights):
    return model(CONV.format(body), opset, **{"W": normal(6, 4, 3, 3), "b": normal(6)} | weights)


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_batch_norm_goes_into_the_conv_before_it(normal, bias, opset):
    net = conv(normal, f"c = Conv<pads=[1,1,1,1]>(x, W{bias}) {NORM}", opset, **BN)
    assert fires(net, FoldBatchNorm(), "Conv", **IMAGE).fired("FoldBatchNorm") == 1
    assert set(net.graph.initializers) == {"y.weight", "y.bias"} and net.graph.outputs[0].name == "y"


def test_batch_norm_goes_into_a_grouped_conv_and_a_transposed_one(normal):
    net = conv(normal, f"c = Conv<group=2>(x, G) {NORM}", G=normal(6, 2, 3, 3), **BN)
    fires(net, FoldBatchNorm(), "Conv", **IMAGE)
    net = conv(normal, f"c = ConvTranspose<group=2,strides=[2,2]>(x, T, b) {NORM}", T=normal(4, 3, 3, 3), **BN)
    fires(net, FoldBatchNorm(), "ConvTranspose", **IMAGE)


@pytest.mark.parametrize("transposed", [0, 1])
def test_batch_norm_goes_into_a_gemm(normal, transposed):
    text = f"(float[n,4] x) => (float[n,6] y) {{ c = Gemm<transB={transposed}>(x, W, b) {NORM} }}"
    net = model(text, W=normal(6, 4) if transposed else normal(4, 6), b=normal(6), **BN)
    fires(net, FoldBatchNorm(), "Gemm", x=normal(3, 4))


def test_scales_and_shifts_after_a_conv_are_a_batch_norm_too(normal):
    """As tf2onnx writes it."""
    net = conv(normal, "c = Conv(x, W) d = Mul(c, s) e = Add(t, d) f = Sub(e, u) y = Div(f, two)", s=normal(1, 6, 1, 1), t=normal(6, 1, 1),
                 u=normal(1, 6, 1, 1), two=np.float32(2))  # fmt: skip
    assert fires(net, FoldBatchNorm(), "Conv", **IMAGE).fired("FoldBatchNorm") == 4


def test_a_scale_after_a_matmul_but_no_shift(normal):
    net = model(
        "(float[n,k,4] x) => (float[n,k,6] y) { c = MatMul(x, W) d = Mul(c, s) y = Add(d, b) }",
        W=normal(4, 6),
        s=normal(6),
        b=normal(6),
    )
    fires(net, FoldBatchNorm(), "MatMul Add", x=normal(2, 3, 4))


def test_batch_norm_before_a_conv_without_padding(normal):
    small = {name: array[:4] for name, array in BN.items()}
    net = conv(normal, "c = BatchNormalization(x, g, be, m, v) y = Conv(c, W, b)", **small)
    fires(net, FoldBatchNorm(), "Conv", **IMAGE)
    net = conv(normal, "c = BatchNormalization(x, g, be, m, v) y = Conv<group=2>(c, G)", G=normal(6, 2, 3, 3), **small)
    fires(net, FoldBatchNorm(), "Conv", **IMAGE)


def test_input_normalization_before_a_layer(normal):
    net = conv(
        normal,
        "c = Sub(x, mean) d = Div(c, std) y = Conv(d, W)",
        mean=normal(1, 4, 1, 1),
        std=np.abs(normal(4, 1, 1)) + 1,
    )
    fires(net, FoldBatchNorm(), "Conv", **IMAGE)
    net = model(
        "(float[n,4] x) => (float[n,6] y) { c = Mul(x, s) d = Add(c, t) y = Gemm(d, W) }",
        s=normal(4),
        t=normal(1, 4),
        W=normal(4, 6),
    )
    fires(net, FoldBatchNorm(), "Gemm", x=normal(3, 4))


PADDED = "c = Add(x, t) y = Conv<pads=[1,1,1,1]>(c, W)"
T4 = normals(6)(1, 4, 1, 1)


@pytest.mark.parametrize(
    ("body", "weights", "left", "reason"),
    [
        (PADDED, {"t": T4}, "Add Conv", "pads its input with zeros"),
        (PADDED.replace("pads=[1,1,1,1]", 'auto_pad="SAME_UPPER"'), {"t": T4}, "Add Conv", "pads its input with zeros"),
        (PADDED.replace("Add", "Mul"), {"t": T4}, "Conv", None),  # 0 * t = 0
        ("c = Conv(x, W) d = Relu(c) e = BatchNormalization(c, g, be, m, v) y = Add(d, e)", BN, None, "its result is read by others"),
        # weights are computed
        (f"k = ReduceMean<keepdims=0>(x) Wc = Mul(W, k) c = Conv(x, Wc) {NORM}", BN, None, None),
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normals(6)(1, 6, 3, 1)}, None, None),  # a scale that varies along a picture
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normals(6)(2, 6, 1, 1)}, None, None),  # along the batch
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normals(6)(6, 1)[:3]}, None, None),
        ("c = Conv(x, W) y = Add(c, s)", {"s": normals(6)(2, 1, 6, 1, 1)[:1]}, None, None),  # raises the rank
        # one channel becomes six
        ("c = Conv(x, one) y = Mul(c, s)", {"one": normals(6)(1, 4, 3, 3), "s": normals(7)(1, 6, 1, 1)}, None, None),
        ("c = Conv(x, W) y = Sub(s, c)", {"s": normals(6)(1, 6, 1, 1)}, None, None),
        ("c = Conv(x, W) y = Div(c, s)", {"s": np.zeros((1, 6, 1, 1), np.float32)}, None, None),
        ("c = Conv(x, W) y = Mul(c, s)", {"s": np.full((6, 1, 1), 3e38, np.float32), "W": normals(6)(6, 4, 3, 3, scale=9)}, None, "the range"),
        ("c = Conv(x, W) y = Mul(c, c)", {}, None, None),
    ],
)  # fmt: skip
def test_fold_batch_norm_near_misses(normal, body, weights, left, reason):
    net = conv(normal, body, **weights)
    before = ops(net)
    net.graph.outputs[0].shape = None
    one = FoldBatchNorm()
    report = rewrite(net, [one])
    assert ops(net) == (before if left is None else left.split())
    assert (reason is None) == (not one.refused) and all(
        reason in message for message in reasons(report, "FoldBatchNorm").values()
    )


def test_the_last_factor_of_a_gelu_stays(normal):
    text = "(float[n,4] x) => (float[n,6] y) { a = Div(x, r) e = Erf(a) p = Add(e, one) m = Mul(x, p) h = Mul(m, half) y = MatMul(h, W) }"
    net = model(text, r=np.sqrt(np.float32(2)), one=np.float32(1), half=np.float32(0.5), W=normal(4, 6))
    report = fires(net, FoldBatchNorm(), "Div Erf Add Mul Mul MatMul", x=normal(3, 4))
    assert "Gelu" in reasons(report, "FoldBatchNorm")["h"]


def test_fold_batch_norm_in_training_mode_is_left_alone(normal):
    text = "(float[n,4] x) => (float[n,6] y) { c = Gemm(x, W) y, mm, vv = BatchNormalization<training_mode=1>(c, g, be, m, v) }"
    net = model(text, W=normal(4, 6), **BN)
    assert not rewrite(net, [FoldBatchNorm()]).fired("FoldBatchNorm")


def test_a_shared_weight_is_folded_for_its_own_reader_only(normal):
    net = conv(normal, "u = Neg(x) c = Conv(x, W) z = Conv(u, W) d = Mul(c, s) y = Add(d, z)", s=normal(1, 6, 1, 1))
    fires(net, FoldBatchNorm(), "Neg Conv Conv Add", **IMAGE)


@pytest.mark.parametrize(
    ("text", "weights", "x"),
    [
        ("(float[n,1,5,5] x) => (float[n,6,h,w] y) { d = Sub(x, s) y = Conv(d, W) }", (6, 4, 3, 3), (2, 1, 5, 5)),
        ("(float[n,k,1] x) => (float[n,k,6] y) { d = Mul(x, t) y = MatMul(d, W) }", (4, 6), (2, 3, 1)),
        ("(float[n,4] x) => (float[1,n,6] y) { d = Mul(x, u) y = MatMul(d, W) }", (4, 6), (3, 4)),
        ("(float[n,4] x) => (float[1,n,6] y) { d = MatMul(x, W) y = Mul(d, v) }", (4, 6), (3, 4)),
    ],
)
def test_constants_that_spread_the_data_stay(normal, text, weights, x):
    constants = {"s": normals(6)(1, 4, 1, 1), "t": normal(4), "u": normal(1, 1, 4), "v": normal(1, 1, 6)}
    net = model(
        text, W=normal(*weights), **{name: constant for name, constant in constants.items() if f" {name})" in text}
    )
    fires(net, FoldBatchNorm(), " ".join(ops(net)), x=normal(*x))
