"""FoldPad, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import fires, integers, model, ops, reasons, rewritten

from pipelines.rewrites.fold_pad import FoldPad

PAD = "(float[n,2,5,5] x) => (float[n,c,h,w] y) {{ {} }}"
PADS = {
    "W": normals(0)(3, 2, 3, 3),
    "p": integers(0, 0, 1, 2, 0, 0, 1, 0),
    "k": np.float32(0),
    "low": np.float32(-np.inf),
    "one": np.float32(1),
}
PICTURE = {"x": normals(2)(2, 2, 5, 5)}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Pad(x, p) y = Conv(a, W)", "Conv"),
        ("a = Pad(x, p, k) y = Conv<pads=[1,1,0,0],strides=[2,2]>(a, W)", "Conv"),
        ('a = Pad(x, p) y = Conv<auto_pad: string = "VALID">(a, W)', "Conv"),
        ("a = Pad(x, p) y = AveragePool<kernel_shape=[3,3]>(a)", "AveragePool"),
        ("a = Pad(x, p) y = AveragePool<kernel_shape=[4,4],pads=[1,1,1,1],count_include_pad=1>(a)", "AveragePool"),
        ("a = Relu(x) b = Pad(a, p) y = MaxPool<kernel_shape=[3,3],strides=[2,2]>(b)", "Relu MaxPool"),
        ("a = Pad(x, p, low) y = MaxPool<kernel_shape=[3,3]>(a)", "MaxPool"),
    ],
)
def test_pads_go_into_the_operator(body, left):
    fires(model(PAD.format(body), **PADS), FoldPad(), left, **PICTURE)


def test_pads_with_axes():
    net = model(
        PAD.format("a = Pad(x, q, , ax) y = Conv(a, W)"), 18, q=integers(1, 0, 0, 2), ax=integers(-1, 2), **PADS
    )
    fires(net, FoldPad(), "Conv", **PICTURE)


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
    net = model(PAD.format(body), batch=integers(1, 0, 0, 0, 0, 0, 0, 0), cut=integers(0, 0, -1, 0, 0, 0, 0, 0), **PADS)
    report = rewritten(net, FoldPad(), exact=True, **PICTURE)
    assert "Pad" in ops(net) and reason in reasons(report, "FoldPad").popitem()[1]
