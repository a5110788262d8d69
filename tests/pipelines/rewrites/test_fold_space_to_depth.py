"""FoldSpaceToDepth, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import fires, integers, model, ops, reasons, rewritten

from pipelines.rewrites.fold_space_to_depth import FoldSpaceToDepth

FOCUS = """(float[n,3,h,w] x) => (float[n,5,r,c] y) {{
    t = Slice(x, zero, end, two, step) l = Slice(t, zero, end, three, step) r = Slice(t, one, end, three, step)
    m = Slice(x, one, end, two, step) p = Slice(m, zero, end, three, step) q = Slice(m, one, end, three, step)
    f = Concat<axis=1>(l, p, r, {last}) y = Conv<{attributes}>(f, W, b) }}"""
SCALARS = {
    "zero": integers(0),
    "one": integers(1),
    "two": integers(2),
    "three": integers(3),
    "step": integers(2),
    "end": integers(2**63 - 1),
}


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 1, 0]])
def test_slices_of_every_other_pixel_are_a_stride(normal, pads):
    text = FOCUS.format(last="q", attributes=f"pads={pads}")
    net = model(text, W=normal(5, 12, 3, 3), b=normal(5), **SCALARS)
    fires(net, FoldSpaceToDepth(), "Conv", x=normal(2, 3, 8, 6))


def test_blocks_of_an_operator(normal):
    text = (
        "(float[n,3,h,w] x) => (float[n,5,r,c] y) { f = SpaceToDepth<blocksize=3>(x) y = Conv<pads=[1,0,0,1]>(f, W) }"
    )
    fires(model(text, W=normal(5, 27, 2, 3)), FoldSpaceToDepth(), "Conv", x=normal(2, 3, 9, 12))


@pytest.mark.parametrize(
    ("last", "attributes", "changed", "reason"),
    [
        ("q", "strides=[2,2]", {}, ["it has strides, groups, dilations or automatic padding"]),
        ("q", 'auto_pad="SAME_UPPER"', {}, ["it has strides, groups, dilations or automatic padding"]),
        ("q", "pads=[1,1,1,1]", {"end": integers(6)}, []),
        ("q", "pads=[1,1,1,1]", {"one": integers(0)}, []),
        ("x", "pads=[1,1,1,1]", {"step": integers(1), "one": integers(0)}, []),
    ],
)
def test_near_misses(normal, last, attributes, changed, reason):
    net = model(FOCUS.format(last=last, attributes=attributes), W=normal(5, 12, 3, 3), b=normal(5), **SCALARS | changed)
    report = rewritten(net, FoldSpaceToDepth(), exact=True, x=normal(2, 3, 8, 8))
    assert "Concat" in ops(net)
    assert list(reasons(report, "FoldSpaceToDepth").values()) == reason


def test_blocks_that_others_read_stay(normal):
    text = """(float[n,3,h,w] x) => (float[n,5,r,c] y, float[n,12,r,c] z) {
        z = SpaceToDepth<blocksize=2>(x) y = Conv(z, W) }"""
    net = model(text, W=normal(5, 12, 1, 1).astype(np.float32))
    report = rewritten(net, FoldSpaceToDepth(), exact=True, x=normal(1, 3, 4, 4))
    assert list(reasons(report, "FoldSpaceToDepth").values()) == ["its input has several readers"]
