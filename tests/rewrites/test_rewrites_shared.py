"""The passes before quantization, from ONNX text: the op list after, numerics before against after, near misses,
idempotence.
"""

import random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from rewriting import model, ops, reasons, rewritten, run

from pipelines.graph import io, query
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.fold_pad import FoldPad
from pipelines.rewrites.fuse_activations import FuseActivations
from pipelines.rewrites.merge_siblings import MergeSiblings
from pipelines.rewrites.push_transposes import PushTransposes
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
from pipelines.rewrites.reshape_chains import ReshapeChains
from pipelines.rewrites.shared import SHARED
from pipelines.rewrites.simplify_concat import SimplifyConcat
from pipelines.rewrites.widen_half import WidenHalf

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def integers(*values):
    return np.array(values, np.int64)


def fires(found, one, wanted, exact=False, **feeds):
    """Apply the pass; the op list after must be `wanted`. Returns its reasons where it did nothing."""
    report = rewritten(found, one, exact=exact, **feeds)
    assert ops(found) == wanted.split()
    return report


# --- FoldBatchNorm

BN = {"g": normal(6), "be": normal(6), "m": normal(6), "v": np.abs(normal(6)) + 0.5}
IMAGE = {"x": normal(2, 4, 5, 5)}
NORM = "y = BatchNormalization<epsilon=0.01>(c, g, be, m, v)"
CONV = "(float[n,4,5,5] x) => (float[n,6,h,w] y) {{ {} }}"


def conv(body, opset=17, **weights):
    return model(CONV.format(body), opset, **{"W": normal(6, 4, 3, 3), "b": normal(6)} | weights)


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_batch_norm_goes_into_the_conv_before_it(bias, opset):
    found = conv(f"c = Conv<pads=[1,1,1,1]>(x, W{bias}) {NORM}", opset, **BN)
    assert fires(found, FoldBatchNorm(), "Conv", **IMAGE).fired("FoldBatchNorm") == 1
    assert set(found.graph.initializers) == {"y.weight", "y.bias"} and found.graph.outputs[0].name == "y"


def test_batch_norm_goes_into_a_grouped_conv_and_a_transposed_one():
    found = conv(f"c = Conv<group=2>(x, G) {NORM}", G=normal(6, 2, 3, 3), **BN)
    fires(found, FoldBatchNorm(), "Conv", **IMAGE)
    found = conv(f"c = ConvTranspose<group=2,strides=[2,2]>(x, T, b) {NORM}", T=normal(4, 3, 3, 3), **BN)
    fires(found, FoldBatchNorm(), "ConvTranspose", **IMAGE)


@pytest.mark.parametrize("transposed", [0, 1])
def test_batch_norm_goes_into_a_gemm(transposed):
    text = f"(float[n,4] x) => (float[n,6] y) {{ c = Gemm<transB={transposed}>(x, W, b) {NORM} }}"
    found = model(text, W=normal(6, 4) if transposed else normal(4, 6), b=normal(6), **BN)
    fires(found, FoldBatchNorm(), "Gemm", x=normal(3, 4))


def test_scales_and_shifts_after_a_conv_are_a_batch_norm_too():
    """As tf2onnx writes it."""
    found = conv("c = Conv(x, W) d = Mul(c, s) e = Add(t, d) f = Sub(e, u) y = Div(f, two)", s=normal(1, 6, 1, 1), t=normal(6, 1, 1),
                 u=normal(1, 6, 1, 1), two=np.float32(2))  # fmt: skip
    assert fires(found, FoldBatchNorm(), "Conv", **IMAGE).fired("FoldBatchNorm") == 4


def test_a_scale_after_a_matmul_but_no_shift():
    found = model(
        "(float[n,k,4] x) => (float[n,k,6] y) { c = MatMul(x, W) d = Mul(c, s) y = Add(d, b) }",
        W=normal(4, 6),
        s=normal(6),
        b=normal(6),
    )
    fires(found, FoldBatchNorm(), "MatMul Add", x=normal(2, 3, 4))


def test_batch_norm_before_a_conv_without_padding():
    small = {name: each[:4] for name, each in BN.items()}
    found = conv("c = BatchNormalization(x, g, be, m, v) y = Conv(c, W, b)", **small)
    fires(found, FoldBatchNorm(), "Conv", **IMAGE)
    found = conv("c = BatchNormalization(x, g, be, m, v) y = Conv<group=2>(c, G)", G=normal(6, 2, 3, 3), **small)
    fires(found, FoldBatchNorm(), "Conv", **IMAGE)


def test_input_normalization_before_a_layer():
    found = conv(
        "c = Sub(x, mean) d = Div(c, std) y = Conv(d, W)", mean=normal(1, 4, 1, 1), std=np.abs(normal(4, 1, 1)) + 1
    )
    fires(found, FoldBatchNorm(), "Conv", **IMAGE)
    found = model(
        "(float[n,4] x) => (float[n,6] y) { c = Mul(x, s) d = Add(c, t) y = Gemm(d, W) }",
        s=normal(4),
        t=normal(1, 4),
        W=normal(4, 6),
    )
    fires(found, FoldBatchNorm(), "Gemm", x=normal(3, 4))


PADDED = "c = Add(x, t) y = Conv<pads=[1,1,1,1]>(c, W)"
T4 = normal(1, 4, 1, 1)


@pytest.mark.parametrize(
    ("body", "weights", "left", "reason"),
    [
        (PADDED, {"t": T4}, "Add Conv", "pads its input with zeros"),
        (PADDED.replace("pads=[1,1,1,1]", 'auto_pad="SAME_UPPER"'), {"t": T4}, "Add Conv", "pads its input with zeros"),
        (PADDED.replace("Add", "Mul"), {"t": T4}, "Conv", None),  # 0 * t = 0
        ("c = Conv(x, W) d = Relu(c) e = BatchNormalization(c, g, be, m, v) y = Add(d, e)", BN, None, "its result is read by others"),
        # weights are computed
        (f"k = ReduceMean<keepdims=0>(x) Wc = Mul(W, k) c = Conv(x, Wc) {NORM}", BN, None, None),
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normal(1, 6, 3, 1)}, None, None),  # a scale that varies along a picture
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normal(2, 6, 1, 1)}, None, None),  # along the batch
        ("c = Conv(x, W) y = Mul(c, s)", {"s": normal(6, 1)[:3]}, None, None),
        ("c = Conv(x, W) y = Add(c, s)", {"s": normal(2, 1, 6, 1, 1)[:1]}, None, None),  # raises the rank
        # one channel becomes six
        ("c = Conv(x, one) y = Mul(c, s)", {"one": normal(1, 4, 3, 3), "s": normal(1, 6, 1, 1)}, None, None),
        ("c = Conv(x, W) y = Sub(s, c)", {"s": normal(1, 6, 1, 1)}, None, None),
        ("c = Conv(x, W) y = Div(c, s)", {"s": np.zeros((1, 6, 1, 1), np.float32)}, None, None),
        ("c = Conv(x, W) y = Mul(c, s)", {"s": np.full((6, 1, 1), 3e38, np.float32), "W": normal(6, 4, 3, 3, scale=9)}, None, "the range"),
        ("c = Conv(x, W) y = Mul(c, c)", {}, None, None),
    ],
)  # fmt: skip
def test_fold_batch_norm_near_misses(body, weights, left, reason):
    found = conv(body, **weights)
    before = ops(found)
    found.graph.outputs[0].shape = None
    one = FoldBatchNorm()
    report = rewrite(found, [one])
    assert ops(found) == (before if left is None else left.split())
    assert (reason is None) == (not one.refused) and all(
        reason in each for each in reasons(report, "FoldBatchNorm").values()
    )


def test_the_last_factor_of_a_gelu_stays():
    text = "(float[n,4] x) => (float[n,6] y) { a = Div(x, r) e = Erf(a) p = Add(e, one) m = Mul(x, p) h = Mul(m, half) y = MatMul(h, W) }"
    found = model(text, r=np.sqrt(np.float32(2)), one=np.float32(1), half=np.float32(0.5), W=normal(4, 6))
    report = fires(found, FoldBatchNorm(), "Div Erf Add Mul Mul MatMul", x=normal(3, 4))
    assert "Gelu" in reasons(report, "FoldBatchNorm")["h"]


def test_fold_batch_norm_in_training_mode_is_left_alone():
    text = "(float[n,4] x) => (float[n,6] y) { c = Gemm(x, W) y, mm, vv = BatchNormalization<training_mode=1>(c, g, be, m, v) }"
    found = model(text, W=normal(4, 6), **BN)
    assert not rewrite(found, [FoldBatchNorm()]).fired("FoldBatchNorm")


def test_a_shared_weight_is_folded_for_its_own_reader_only():
    found = conv("u = Neg(x) c = Conv(x, W) z = Conv(u, W) d = Mul(c, s) y = Add(d, z)", s=normal(1, 6, 1, 1))
    fires(found, FoldBatchNorm(), "Neg Conv Conv Add", **IMAGE)


# --- FoldConstants


def test_constants_are_computed_once():
    found = model(
        "(float[n,3] x) => (float[n,3] y) "
        "{ a = Mul(k, k) b = Transpose(a) c = ReduceSum<keepdims=0>(b) y = Mul(x, c) }",
        k=normal(3, 3),
    )
    assert fires(found, FoldConstants(), "Mul", exact=True, x=normal(2, 3)).fired("FoldConstants") == 3


def test_shapes_of_static_dimensions_are_constants():
    text = """(float[n,4,6] x) => (int64[1] a, int64 b, int64[2] c, int64[3] d, int64 e) {
        s = Shape(x) a = Gather(s, two) b = Gather(s, one) c = Slice(s, start, end) d = Shape(x) e = Size(k) }"""
    found = model(text, two=integers(2), one=np.int64(-1), start=integers(1), end=integers(9), k=normal(2, 3))
    report = rewritten(found, FoldConstants(), exact=True, x=normal(2, 4, 6))
    assert report.fired("FoldConstants") == 4 and ops(found).count("Shape") == 1  # d holds the batch


@pytest.mark.parametrize(
    "body",
    [
        "k = RandomNormal<shape=[3]>() y = Mul(x, k)",
        "k = RandomUniformLike(w) y = Mul(x, k)",
        "k = DequantizeLinear(q, s) y = Mul(x, k)",
        "s0 = Shape(x) n = Gather(s0, zero) f = Cast<to=1>(n) y = Mul(x, f)",
    ],
)
def test_what_is_not_constant_stays(body):
    found = model(
        f"(float[n,3] x) => (float[n,3] y) {{ {body} }}",
        w=normal(3),
        q=np.ones(3, np.int8),
        s=np.float32(2),
        zero=np.int64(0),
    )
    before = len(found.graph)
    assert not rewrite(found, [FoldConstants()]).fired("FoldConstants") and len(found.graph) == before


def test_constants_that_would_blow_up_the_file_stay():
    found = model(
        "(float[n,3] x) => (float[n,3] y) { k = Expand(one, big) m = ReduceMax<keepdims=0>(k) y = Mul(x, m) }",
        one=np.float32(1),
        big=integers(5000, 1000),
    )
    report = rewritten(found, FoldConstants(), x=normal(2, 3))
    assert ops(found) == ["Expand", "ReduceMax", "Mul"] and "19 MiB" in reasons(report, "FoldConstants").popitem()[1]


def test_a_constant_of_a_custom_domain_stays():
    text = '<ir_version: 9, opset_import: ["": 17, "my": 1]> g (float[n] x) => (float[n] y) { k = my.Twice(w) y = Mul(x, k) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(normal(1), "w"))
    found = ir.from_proto(proto)
    rewrite(found, [each() for each in SHARED])
    assert ops(found) == ["Twice", "Mul"]


# --- RemoveDeadBranches

IF = """({inputs}float[n] x) => (float[n] y) {{ h = Abs(x)
    y = If(c) <then_branch = f () => (float[n] a) {{ t = Relu(h) a = Add(t, x) }},
               else_branch = g () => (float[n] d) <float[1] k = {{2}}> {{ t = Mul(h, k) d = Neg(t) }}> }}"""


@pytest.mark.parametrize(("condition", "left"), [(True, "Abs Relu Add"), (False, "Abs Mul Neg")])
def test_the_branch_taken_is_inlined(condition, left):
    found = model(IF.format(inputs=""), c=np.array(condition))
    fires(found, RemoveDeadBranches(), left, exact=True, x=normal(3))
    assert found.graph.outputs[0].name == "y"


def test_an_if_that_decides_at_run_time_stays():
    found = model(IF.format(inputs="bool c, "))
    report = fires(found, RemoveDeadBranches(), "Abs If", exact=True, x=normal(3), c=np.array(True))
    assert "its condition is computed" in reasons(report, "RemoveDeadBranches").popitem()[1]


def test_two_ifs_with_the_same_inner_names():
    branches = "<then_branch = f () => (float[n] a) { t = Relu(h) a = Neg(t) }, else_branch = g () => (float[n] a) { a = Identity(h) }>"
    found = model(f"(float[n] x) => (float[n] y) {{ h = Exp(x) u = If(c) {branches} w = If(d) {branches} y = Add(u, w) }}",
                  c=np.array(True), d=np.array(False))  # fmt: skip
    fires(found, RemoveDeadBranches(), "Exp Relu Neg Add", exact=True, x=normal(3))


def test_dropout_and_casts_to_the_same_type_go():
    found = model(
        "(float[n] x) => (float[n] y, float[n] z) "
        "{ a, mask = Dropout(x, r) b = Cast<to=1>(a) y = Relu(b) z = Dropout(y) }",
        r=np.float32(0.5),
    )
    rewritten(found, RemoveDeadBranches(), exact=True, x=normal(3))
    assert "Dropout" not in ops(found) and "Cast" not in ops(found)


@pytest.mark.parametrize("body", ["y, m = Dropout(x, r, t)", "y, z = Dropout(x)"])
def test_dropout_that_does_something_stays(body):
    outputs = "float[n] y, bool[n] z" if "z" in body else "float[n] y"
    found = model(f"(float[n] x) => ({outputs}) {{ {body} }}", r=np.float32(0.5), t=np.array(True))
    one = RemoveDeadBranches()
    rewrite(found, [one])
    assert ops(found) == ["Dropout"] and one.refused


# --- FuseActivations

ACT = "(float[n,3] x) => (float[n,3] y) {{ {} }}"
NUMBERS = {
    name: np.float32(value)
    for name, value in {"zero": 0, "six": 6, "three": 3, "top": np.inf, "sixth": 1 / 6, "slope": 0.1, "two": 2}.items()
}
WIDE = {"x": normal(40, 3, scale=5)}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("y = Clip(x, zero)", "Relu"),
        ("y = Clip(x, zero, top)", "Relu"),
        ("y = Clip(x, zero, six)", "Clip"),
        ("y = Max(zero, x)", "Relu"),
        ("y = Max(x, two)", "Clip"),
        ("y = Min(x, two)", "Clip"),
        ("a = Max(x, zero) y = Min(six, a)", "Clip"),
        ("a = Relu(x) y = Clip(a, , six)", "Clip"),
        ("a = Clip(x, zero, six) y = Relu(a)", "Clip"),
        ("a = Clip(x, two, six) y = Clip(a, three)", "Clip"),
        ("a = Relu(x) y = Relu(a)", "Relu"),
        ("a = Mul(x, slope) y = Max(x, a)", "LeakyRelu"),
        ("a = Add(x, three) b = Clip(a, zero, six) y = Div(b, six)", "HardSigmoid"),
        ("a = Add(three, x) b = Clip(a, zero, six) y = Mul(sixth, b)", "HardSigmoid"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Div(b, six) y = Mul(c, x)", "HardSwish"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) y = Div(c, six)", "HardSwish"),
        ("a = Add(x, three) r = Relu(a) b = Min(r, six) c = Mul(x, b) y = Mul(c, sixth)", "HardSwish"),
        ("a = HardSigmoid<alpha=0.16666667,beta=0.5>(x) y = Mul(x, a)", "HardSwish"),
    ],
)
def test_activations(body, left):
    fires(model(ACT.format(body), **NUMBERS), FuseActivations(), left, **WIDE)


def test_hard_swish_needs_opset_14():
    body = "a = Add(x, three) b = Clip(a, zero, six) c = Div(b, six) y = Mul(c, x)"
    fires(model(ACT.format(body), 13, **NUMBERS), FuseActivations(), "HardSigmoid Mul", **WIDE)


@pytest.mark.parametrize(
    ("body", "left", "reason"),
    [
        (
            "a = Max(x, zero) b = Neg(a) c = Min(six, a) y = Add(b, c)",
            "Relu Neg Clip Add",
            "Relu a before it has another reader",
        ),
        ("a = HardSigmoid(x) y = Mul(x, a)", "HardSigmoid Mul", "alpha 0.2"),
        ("a = HardSigmoid<alpha=0.16666667>(x) b = Neg(x) y = Mul(b, a)", "HardSigmoid Neg Mul", None),
        ("a = HardSigmoid<alpha=0.16666667>(x) b = Mul(x, a) y = Add(a, b)", "HardSigmoid Mul Add", "another reader"),
        ("a = Sigmoid(x) y = Mul(x, a)", "Sigmoid Mul", None),
        ("a = Add(x, two) b = Clip(a, zero, six) y = Div(b, six)", "Add Clip Div", None),
        ("a = Add(x, three) b = Clip(a, zero, three) y = Div(b, six)", "Add Clip Div", None),
        ("a = Add(x, three) b = Clip(a, zero, six) y = Div(six, b)", "Add Clip Div", None),
        ("a = Mul(x, two) y = Max(x, a)", "Mul Max", None),
        ("a = Neg(x) y = Max(x, a)", "Neg Max", None),
        ("y = Max(x, row)", "Max", None),
        ("y = Max(x, cube)", "Max", None),
        ("y = Clip(x, six, zero)", "Clip", None),
        ("a = ReduceMax<keepdims=0>(x) y = Clip(x, zero, a)", "ReduceMax Clip", None),
    ],
)
def test_activations_that_only_look_alike(body, left, reason):
    found = model(ACT.format(body), row=normal(3), cube=np.float32([[[0]]]), **NUMBERS)
    found.graph.outputs[0].shape = None
    report = rewritten(found, FuseActivations(), **WIDE)
    assert ops(found) == left.split()
    assert (
        reason in " ".join(reasons(report, "FuseActivations").values())
        if reason
        else not reasons(report, "FuseActivations")
    )


# --- PushTransposes

NHWC, NCHW = "Transpose<perm=[0,2,3,1]>", "Transpose<perm=[0,3,1,2]>"
T4D = "(float[n,4,5,6] x) => (float[n,p,q,r] y) {{ {} }}"
X4D = {
    "x": normal(2, 4, 5, 6),
}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (f"a = {NHWC}(x) b = {NCHW}(a) y = Relu(b)", "Relu"),
        (f"a = {NHWC}(x) b = {NHWC}(a) y = Relu(b)", "Transpose Relu"),
        (f"a = {NHWC}(x) b = Relu(a) c = Neg(b) y = {NCHW}(c)", "Relu Neg"),
        (f"a = {NHWC}(x) b = Add(a, k) c = Mul(two, b) d = Sub(c, one) y = {NCHW}(d)", "Add Mul Sub"),
        (f"a = {NHWC}(x) e = Exp(x) b = {NHWC}(e) y = Add(a, b)", "Exp Add Transpose"),
        (f"a = {NHWC}(x) e = Exp(x) b = {NHWC}(e) c = Concat<axis=3>(a, b) y = {NCHW}(c)", "Exp Concat"),
        (f"a = {NHWC}(x) b = Pad(a, pads) y = {NCHW}(b)", "Pad"),
        (f"a = {NHWC}(x) b = ReduceMean<axes=[1,2]>(a) y = {NCHW}(b)", "ReduceMean"),
        (f"a = {NHWC}(x) b = ReduceMean<axes=[1,2],keepdims=0>(a) y = Unsqueeze(b, ends)", "ReduceMean Unsqueeze"),
        (f"a = {NHWC}(x) b = ReduceSum(a, ends2) y = {NCHW}(b)", "ReduceSum"),
        (f"a = {NHWC}(x) b = Clip(a, one, two) c = {NCHW}(b) d = {NCHW}(b) e = Relu(d) y = Add(c, e)", "Clip Relu Add"),
        (
            f"a = {NHWC}(x) b = Relu(a) c = {NCHW}(b) d = Abs(c) e = {NHWC}(d) f = Add(b, e) y = {NCHW}(f)",
            "Relu Abs Add",
        ),  # residual
        ("y = Transpose<perm=[0,1,2,3]>(x)", ""),
    ],
)
def test_transposes_cancel(body, left):
    weights = {
        "k": normal(5, 1, 4),
        "two": np.float32(2),
        "one": np.float32(-1),
        "pads": integers(0, 1, 2, 0, 0, 0, 1, 0),
        "ends": integers(1, 2),
    }
    found = model(T4D.format(body), 13, ends2=integers(1, 2), **weights)
    found.graph.outputs[0].shape = None
    report = rewritten(found, PushTransposes(), exact="Reduce" not in body, **X4D)
    assert sorted(ops(found)) == sorted(left.split()) or (left == "" and ops(found) == ["Identity"]), report


@pytest.mark.parametrize(
    "body",
    [
        f"a = {NHWC}(x) y = Relu(a)",  # nothing to meet
        f"a = {NHWC}(x) b = Relu(a) c = MaxPool<kernel_shape=[2,2]>(b) y = {NCHW}(c)",  # a pool knows one layout
        f"a = {NHWC}(x) b = Softmax<axis=-1>(a) y = {NCHW}(b)",
        f"a = {NHWC}(x) b = Reshape(a, flat) c = Relu(b) d = Reshape(c, back) y = {NCHW}(d)",
        f"a = {NHWC}(x) b = Relu(a) c = Softmax(a) d = Mul(b, c) y = {NCHW}(d)",
        f"a = {NHWC}(x) b = Add(a, w5) y = Relu(b)",
        f"a = {NHWC}(x) b = {NCHW}(x) c = Shape(a) d = Shape(b) e = Add(c, d) f = ReduceSum(e) g = Cast<to=1>(f) y = "
        "Mul(x, g)",
    ],
)
def test_transposes_that_are_needed_stay(body):
    found = model(T4D.format(body), 13, flat=integers(-1), back=integers(-1, 5, 6, 4), w5=normal(1, 1, 1, 1, 4))
    found.graph.outputs[0].shape = None
    before = sorted(ops(found))
    assert (
        rewritten(found, PushTransposes(), exact=True, **X4D).fired("PushTransposes") == 0
        and sorted(ops(found)) == before
    )


# --- FoldPad

PAD = "(float[n,2,5,5] x) => (float[n,c,h,w] y) {{ {} }}"
PADS = {
    "W": normal(3, 2, 3, 3),
    "p": integers(0, 0, 1, 2, 0, 0, 1, 0),
    "k": np.float32(0),
    "low": np.float32(-np.inf),
    "one": np.float32(1),
}
PICTURE = {"x": normal(2, 2, 5, 5)}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Pad(x, p) y = Conv(a, W)", "Conv"),
        ("a = Pad(x, p, k) y = Conv<pads=[1,1,0,0],strides=[2,2]>(a, W)", "Conv"),
        ("a = Pad(x, p) y = AveragePool<kernel_shape=[3,3]>(a)", "AveragePool"),
        ("a = Pad(x, p) y = AveragePool<kernel_shape=[4,4],pads=[1,1,1,1],count_include_pad=1>(a)", "AveragePool"),
        ("a = Relu(x) b = Pad(a, p) y = MaxPool<kernel_shape=[3,3],strides=[2,2]>(b)", "Relu MaxPool"),
        ("a = Pad(x, p, low) y = MaxPool<kernel_shape=[3,3]>(a)", "MaxPool"),
    ],
)
def test_pads_go_into_the_operator(body, left):
    fires(model(PAD.format(body), **PADS), FoldPad(), left, **PICTURE)


def test_pads_with_axes():
    found = model(
        PAD.format("a = Pad(x, q, , ax) y = Conv(a, W)"), 18, q=integers(1, 0, 0, 2), ax=integers(-1, 2), **PADS
    )
    fires(found, FoldPad(), "Conv", **PICTURE)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a = Pad(x, p) y = MaxPool<kernel_shape=[3,3]>(a)", "pads with the lowest value, not 0"),
        ("a = Relu(x) b = Pad(a, p) y = MaxPool<kernel_shape=[2,2]>(b)", "windows of padding alone"),
        (
            "a = Pad(x, p) y = AveragePool<kernel_shape=[3,3],pads=[1,1,1,1],count_include_pad=1>(a)",
            "windows of padding alone",
        ),
        ("a = Relu(x) b = Pad(a, p) y = MaxPool<kernel_shape=[4,4],pads=[1,1,1,1]>(b)", "its own value"),
        ("a = Relu(x) b = Pad(a, p) y = MaxPool<kernel_shape=[3,3],ceil_mode=1>(b)", "ceil_mode"),
        ("a = Pad(x, p, one) y = Conv(a, W)", "pads with 0"),
        ('a = Pad<mode="reflect">(x, p) y = Conv(a, W)', "does not pad with constants"),
        ("a = Pad(x, batch) y = Conv(a, W)", "pads batch or channels"),
        ("a = Pad(x, cut) y = Conv(a, W)", "or cuts"),
        ('a = Pad(x, p) y = Conv<auto_pad="SAME_UPPER">(a, W)', "auto_pad"),
        ("a = Pad(x, p) y = AveragePool<kernel_shape=[4,4],pads=[1,1,1,1]>(a)", "does not count its own padding"),
        ("a = Pad(x, p) b = Conv(a, W) c = ReduceMean<keepdims=0>(a) y = Mul(b, c)", "several readers"),
    ],
)
def test_fold_pad_near_misses(body, reason):
    found = model(
        PAD.format(body), batch=integers(1, 0, 0, 0, 0, 0, 0, 0), cut=integers(0, 0, -1, 0, 0, 0, 0, 0), **PADS
    )
    report = rewritten(found, FoldPad(), exact=True, **PICTURE)
    assert "Pad" in ops(found) and reason in reasons(report, "FoldPad").popitem()[1]


# --- SimplifyConcat

CAT = "(float[n,4] x, float[n,2] z) => (float[n,k] y) {{ {} }}"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Concat<axis=1>(x) y = Relu(a)", "Relu"),
        ("a = Concat<axis=1>(x, z) b = Concat<axis=-1>(z, a, x) y = Relu(b)", "Concat Relu"),
        ("a, b = Split<axis=1>(x) c = Concat<axis=-1>(a, b) y = Relu(c)", "Relu"),
        (
            "a = Concat<axis=1>(x, z) b, c = Split<axis=1>(a, widths) d = Relu(c) y = Concat<axis=1>(d, b)",
            "Relu Concat",
        ),
        (
            "a = Concat<axis=1>(x, z) b = Concat<axis=1>(a, x) c = Concat<axis=1>(z, b) d = Concat<axis=1>(c, z) y = "
            "Relu(d)",
            "Concat Relu",
        ),
    ],
)
def test_concats_that_need_not_copy(body, left):
    fires(
        model(CAT.format(body), widths=integers(4, 2)),
        SimplifyConcat(),
        left,
        exact=True,
        x=normal(3, 4),
        z=normal(3, 2),
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a, b = Split<axis=1>(x) y = Concat<axis=1>(b, a)", None),
        ("a, b = Split<axis=1>(x) y = Concat<axis=0>(a, b)", "on another axis"),
        ("a, b = Split<axis=1>(x) y = Concat<axis=1>(a, b, z)", None),
        ("a = Concat<axis=0>(z, z) b = Concat<axis=1>(a, a) y = Relu(b)", "joins another axis"),
        ("a = Concat<axis=1>(x, z) b = Relu(a) y = Concat<axis=1>(a, b)", "another reader"),
        ("a = Concat<axis=1>(x, z) b, c = Split<axis=1>(a) y = Concat<axis=1>(c, b)", "other places than its seams"),
    ],
)
def test_concats_that_are_needed_stay(body, reason):
    found = model(CAT.format(body))
    before = len(found.graph)
    report = rewritten(found, SimplifyConcat(), exact=True, x=normal(3, 4), z=normal(3, 2))
    assert len(found.graph) == before and (
        reason is None or reason in " ".join(reasons(report, "SimplifyConcat").values())
    )


# --- ReshapeChains

RES = "(float[n,4,6] x) => (float[p,q] y) {{ {} }}"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Reshape(x, flat) b = Reshape(a, pairs) y = Relu(b)", "Reshape Relu"),
        ("a = Unsqueeze(x, one) b = Squeeze(a, one) c = Relu(b) y = Flatten(c)", "Relu Flatten"),
        ("a = Flatten(x) b = Unsqueeze(a, one) c = Squeeze(b, one) y = Relu(c)", "Reshape Relu"),
        ("s = Shape(x) n = Gather(s, first) t = Concat<axis=0>(n, m) a = Reshape(x, t) y = Relu(a)", "Reshape Relu"),
        ("a = Relu(x) b = Reshape(a, same) y = Flatten(b)", "Relu Flatten"),
        ("a = Relu(x) b = Reshape(a, copy) y = Flatten(b)", "Relu Flatten"),
        ("y = Flatten(x)", "Flatten"),
    ],
)
def test_reshapes_become_one(body, left):
    shapes = {
        "flat": integers(-1),
        "pairs": integers(-1, 2),
        "one": integers(1),
        "first": integers(0),
        "m": integers(24),
        "same": integers(-1, 4, 6),
    }
    fires(
        model(RES.format(body), copy=integers(0, 0, -1), **shapes), ReshapeChains(), left, exact=True, x=normal(3, 4, 6)
    )


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Flatten(x) b = Relu(a) c = Unsqueeze(a, one) d = Squeeze(c, one) y = Add(b, d)", None),
        (
            "s = Shape(x) n = Gather(s, first) v = Gather(t, n) w = Concat<axis=0>(v, rest) y = Reshape(x, w)",
            "two dimensions",
        ),
    ],
)
def test_reshapes_that_stay(body, left):
    found = model(RES.format(body), one=integers(1), first=integers(0), t=integers(*range(9)), rest=integers(-1))
    report = rewritten(found, ReshapeChains(), exact=True, x=normal(3, 4, 6))
    assert left is None or left in " ".join(reasons(report, "ReshapeChains").values())


# --- MergeSiblings

SIB = "(float[n,4] x) => (float[n,k] y) {{ {} }}"
LAYERS = {f"w{i}": normal(4, i + 1) for i in range(9)} | {f"b{i}": normal(i + 1) for i in range(9)}


def heads(count, layer="h{i} = Gemm(x, w{i}, b{i}) r{i} = Relu(h{i}) s{i} = Neg(r{i})"):
    return (
        " ".join(layer.format(i=i) for i in range(count))
        + f" y = Concat<axis=-1>({', '.join(f's{i}' for i in range(count))})"
    )


def test_siblings_become_one_layer_and_a_split_where_asked_for():
    found = model(SIB.format(heads(3)), **LAYERS)
    assert rewritten(found, MergeSiblings(split=True), x=normal(3, 4)).fired("MergeSiblings") == 1
    assert ops(found) == ["Gemm", "Relu", "Split", "Neg", "Neg", "Neg", "Concat"]
    found = model("(float[n,2,5,5] x) => (float[n,3,3,3] y, float[n,2,3,3] z) { y = Conv(x, W, p) z = Conv(x, V, q) }",
                  W=normal(3, 2, 3, 3), V=normal(2, 2, 3, 3), p=normal(3), q=normal(2))  # fmt: skip
    fires(found, MergeSiblings(split=True), "Conv Split", **PICTURE)


@pytest.mark.parametrize(
    "layer", ["a{i} = MatMul(x, w{i}) s{i} = Add(a{i}, b{i})", "s{i} = MatMul(x, w{i})", "s{i} = Gemm(x, w{i}, b{i})"]
)
def test_siblings_that_are_joined_become_one_layer(layer):
    found = model(SIB.format(heads(3, layer)), **LAYERS)
    left = ["MatMul", "Add"] if "Add" in layer else [layer.split("(")[0].split()[-1]]
    passes = [MergeSiblings(), SimplifyConcat()]
    rewritten(found, *passes, x=normal(3, 4))
    assert ops(found) == left and found.graph.outputs[0].name == "y"


def test_joined_convs_become_one():
    text = """(float[n,2,5,5] x) => (float[n,7,5,5] y) {
        a = Conv<pads=[1,1,1,1]>(x, W, p) b = Relu(a) c = Conv<pads=[1,1,1,1]>(x, V, q) d = Relu(c)
        y = Concat<axis=1>(x, b, d) }"""
    found = model(text, W=normal(3, 2, 3, 3), V=normal(2, 2, 3, 3), p=normal(3), q=normal(2))
    fires(found, MergeSiblings(), "Conv Relu Concat", **PICTURE)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (heads(7), True),  # a Split would remain
        (
            heads(2, "s{i} = Gemm(x, w{i}, b{i})").replace("axis=-1>(s0, s1)", "axis=-1>(s0, x, s1)"),
            True,
        ),  # not side by side
        (
            "a = Gemm(x, w3, b3) b = Gemm(x, w3, b3) c = Relu(b) y = Concat<axis=0>(c, c)",
            False,
        ),  # repeated: the clean-up makes it one
        ("a = Gemm(x, w3) b = Gemm<alpha=2.0>(x, w3) y = Concat<axis=1>(a, b)", False),
        ("a = Gemm(x, w3, b3) c = Relu(a) b = Gemm(x, w2, b2) y = Concat<axis=1>(c, b)", False),  # another activation
        ("z = Neg(x) a = Gemm(x, w3) b = Gemm(z, w3) y = Concat<axis=1>(a, b)", False),  # another input
        ("a = Gemm(x, w3) b = Gemm(x, v3) y = Concat<axis=0>(a, b)", True),  # joined along the batch
    ],
)
def test_siblings_that_stay(body, refused):
    one = MergeSiblings()
    found = model(SIB.format(body), v3=normal(4, 4), **LAYERS)
    assert rewritten(found, one, x=normal(3, 4)).fired("MergeSiblings") == 0
    assert bool(one.refused) == refused


# --- WidenHalf


def half(*shape):
    return normal(*shape).astype(np.float16)


def test_a_float16_graph_computes_in_float32():
    text = """(float16[n,4] x, float16[n,4] z) => (float16[n,3] y, float16[n,4] t) {
        a = Add(x, z) h = MatMul(a, w) r = Relu(h) c = Cast<to=1>(r) d = Cast<to=10>(c) y = Add(d, b) t = Neg(a) }"""
    weights = {"w": half(4, 3), "b": half(3)}
    found = model(text, **weights)
    feeds = {"x": half(5, 4), "z": half(5, 4)}
    before = run(found, **feeds)
    report = rewrite(found, [WidenHalf(), RemoveDeadBranches()])
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    assert report.fired("WidenHalf") == 1 and ops(found).count("Cast") == 4
    assert {value.dtype for value in found.graph.initializers.values()} == {ir.DataType.FLOAT}
    after = run(found, **feeds)
    for name, value in before.items():
        assert after[name].dtype == np.float16
        np.testing.assert_allclose(value.astype(np.float32), after[name].astype(np.float32), rtol=0.01, atol=0.01)
    assert rewrite(found, [again := WidenHalf()]).fired("WidenHalf") == 0 and not again.refused


def test_a_float16_graph_with_subgraphs_stays():
    text = """(bool c, float16[n] x) => (float16[n] y) { h = Neg(x)
        y = If (c) <then_branch = f () => (float16[n] a) { a = Relu(h) }, else_branch = g () => (float16[n] d) { d = Neg(h) }> }"""
    found, one = model(text), WidenHalf()
    rewrite(found, [one])
    assert ops(found) == ["Neg", "If"] and "subgraphs" in one.refused.popitem()[1]


def test_widening_of_an_output_that_is_read_too():
    found = model("(float16[n] x) => (float16[n] y, float16[n] z) { y = Mul(x, k) z = Add(y, x) }", k=half(1))
    before = run(found, x=half(6) * 0 + 1)
    rewrite(found, [WidenHalf()])
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    np.testing.assert_allclose(run(found, x=half(6) * 0 + 1)["z"], before["z"], rtol=0.01)


# --- all of them

NET = f"""(float[n,16,16,3] image) => (float[n,5] y) {{
    t = {NCHW}(image) p = Pad(t, pads) c = Conv<strides=[2,2]>(p, W) m = Mul(c, s) a = Add(m, o) l = Max(a, zero) h = Min(l, six)
    dw = Conv<group=8,pads=[1,1,1,1]>(h, D) bn = BatchNormalization(dw, g, be, me, v) r = Clip(bn, zero)
    n1 = {NHWC}(r) n2 = Add(n1, bias) n3 = Tanh(n2) n4 = {NCHW}(n3) skip = Add(n4, h)
    pool = GlobalAveragePool(skip) sh = Shape(pool) b0 = Gather(sh, first) shape = Concat<axis=0>(b0, minus) f = Reshape(pool, shape)
    drop = Dropout(f) d = MatMul(drop, F) y = Add(d, fb) }}"""
SIDE = {
    "pads": integers(0, 0, 0, 0, 0, 0, 1, 1), "W": normal(8, 3, 3, 3), "s": normal(1, 8, 1, 1), "o": normal(1, 8, 1, 1),
    "D": normal(8, 1, 3, 3), "g": normal(8), "be": normal(8), "me": normal(8), "v": np.abs(normal(8)) + 1, "zero": np.float32(0),
    "six": np.float32(6), "bias": normal(8), "first": integers(0), "minus": integers(-1), "F": normal(8, 5), "fb": normal(5),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17])
def test_the_shared_passes_on_a_small_net(opset, tmp_path):
    found = model(NET, opset, **SIDE)
    rewritten(found, *[each() for each in SHARED], image=normal(2, 16, 16, 3))
    assert ops(found) == [
        "Transpose",
        "Conv",
        "Clip",
        "Conv",
        "Relu",
        "Add",
        "Tanh",
        "Add",
        "GlobalAveragePool",
        "Reshape",
        "Gemm",
    ]
    once = io.save(found, tmp_path / "once.onnx").read_bytes()
    again = model(NET, opset, **SIDE)
    rewrite(again, [each() for each in SHARED])
    assert io.save(again, tmp_path / "again.onnx").read_bytes() == once
    loaded = io.load(tmp_path / "once.onnx")
    rewrite(loaded, [each() for each in SHARED])
    assert io.save(loaded, tmp_path / "loaded.onnx").read_bytes() == once


def random_net(seed):
    """Up to twelve operators that the passes look for, in any order, and weights for them; every result may be an
    output.
    """
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    lines, weights, shapes = [], {}, {"x": (4, 6, 6)}

    def weight(array):
        weights[f"w{len(weights)}"] = np.asarray(array)
        return f"w{len(weights) - 1}"

    def add(op, shape, *inputs):
        name = f"v{len(lines)}"
        lines.append(f"{name} = {op}({', '.join(inputs)})")
        shapes[name] = shape
        return name

    def some(*shape):
        return weight((np.abs(rng.standard_normal(shape)) + 0.5).astype(np.float32))

    for _ in range(12):
        x = choose.choice([*shapes, *[list(shapes)[-1]] * 9])
        c, h, w = shape = shapes[x]
        kind, pad = choose.randrange(10), choose.choice([0, 1])
        if kind == 0:
            add(f"Conv<pads=[{pad},{pad},{pad},{pad}]>", (3, h + 2 * pad, w + 2 * pad), x, some(3, c, 1, 1))
        elif kind == 1:
            add("BatchNormalization", shape, x, *(some(c) for _ in range(4)))
        elif kind == 2:
            add(
                choose.choice(["Mul", "Add", "Sub", "Div"]),
                shape,
                x,
                some(*choose.choice([(), (1,), (1, c, 1, 1), (c, 1, 1), (1, 1, 1, w)])),
            )
        elif kind == 3:
            add(choose.choice(["Max", "Min"]), shape, x, weight(np.float32(choose.choice([-1, 0, 6]))))
        elif kind == 4:
            add(choose.choice(["Relu", "Tanh", "Neg", "Identity", "Dropout"]), shape, x)
        elif kind == 5:
            perm = choose.choice([(0, 2, 3, 1), (0, 3, 1, 2)])
            add(f"Transpose<perm={[*perm]}>", tuple(shape[axis - 1] for axis in perm[1:]), x)
        elif kind == 6:
            add("Pad", (c, h + 2, w + 1), x, weight(integers(0, 0, 1, 1, 0, 0, 1, 0)))
        elif kind == 7 and min(h, w) > 2:
            add(choose.choice(["MaxPool", "AveragePool"]) + "<kernel_shape=[3,3]>", (c, h - 2, w - 2), x)
        elif kind == 8:
            add("Add", shape, x, choose.choice([name for name, other in shapes.items() if other == shape]))
        elif kind == 9:
            flat = add("Reshape", shape, x, weight(integers(0, c * h * w)))
            add("Reshape", shape, flat, weight(integers(-1, c, h, w)))
            del shapes[flat]
    last = list(shapes)[-1]
    outputs = [last, *(name for name in shapes if name not in ("x", last) and choose.random() < 0.1)]
    heads = ", ".join(f"float[{name}0,{name}1,{name}2,{name}3] {name}" for name in outputs)
    return model(f"(float[n,4,6,6] x) => ({heads}) {{ {' '.join(lines)} }}", **weights)


@pytest.mark.parametrize("seed", range(25))
def test_the_shared_passes_on_random_nets(seed):
    found, x = random_net(seed), np.random.default_rng(seed).standard_normal((2, 4, 6, 6)).astype(np.float32)
    before = run(found, x=x)
    rewrite(found, [each() for each in SHARED])
    once = ir.to_proto(found).SerializeToString(deterministic=True)
    for name, value in run(found, x=x).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-3, atol=1e-4 * np.abs(before[name]).max() + 1e-6)
    rewrite(found, [each() for each in SHARED])
    assert ir.to_proto(found).SerializeToString(deterministic=True) == once


LOOP = """(float[n,4] x, int64 trips, bool go) => (float[n,4] y, float[n,4] z) {
    k = Relu(x) c = Clip(k, zero, six) m = MatMul(c, w) a = Add(m, b) t = Transpose(a) u = Transpose(t)
    y = Loop(trips, go, x) <body = f (int64 i, bool g, float[n,4] s) => (bool g2, float[n,4] s2) {
        g2 = Identity(g) r = Add(s, k) q = Mul(r, b) o = Add(q, u) s2 = Add(o, a) }>
    z = If(go) <then_branch = th () => (float[n,4] v) { v = Add(u, c) }, else_branch = el () => (float[n,4] v2) { v2 = Neg(m) }> }"""


@pytest.mark.parametrize("go", [True, False])
def test_values_that_loops_and_branches_read_survive(go):
    found = model(LOOP, w=normal(4, 4), b=normal(4), zero=np.float32(0), six=np.float32(6))
    rewritten(found, *[each() for each in SHARED], x=normal(3, 4), trips=np.array(2), go=np.array(go))
    inner = [node.op_type for node in ir.traversal.RecursiveGraphIterator(found.graph) if node.graph is not found.graph]
    assert ops(found)[-2:] == ["Loop", "If"] and inner.count("Add") == 4 and "Mul" in inner


@pytest.mark.data
@pytest.mark.slow
def test_shared_keeps_what_mobilenet_computes(shared):
    pytest.importorskip("tf2onnx")
    file = shared / "weights" / "mobilenet_v1_1.0_224_imagenet.tflite"
    import tf2onnx

    proto, _ = tf2onnx.convert.from_tflite(str(file), opset=17)
    found = ir.from_proto(proto)
    x = RNG.uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    before = run(found, input=x)
    rewrite(found, [each() for each in SHARED])
    for name, value in run(found, input=x).items():
        np.testing.assert_allclose(value, before[name], atol=1e-4)
    assert query.op_counts(found) == {
        "Conv": 28,
        "Clip": 27,
        "AveragePool": 1,
        "Reshape": 1,
        "Softmax": 1,
        "Transpose": 1,
    }
