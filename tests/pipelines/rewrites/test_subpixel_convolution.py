"""SubpixelConvolution, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.rewrites.subpixel_convolution import SubpixelConvolution

TEXT = "(float[n,3,h,w] x) => (float[n,5,r,c] y) {{ y = ConvTranspose<{}>(x, W, b) }}"


@pytest.mark.parametrize(
    ("kernel", "attributes", "operators"),
    [
        ((2, 2), "strides=[2,2]", ["Conv", "DepthToSpace"]),
        ((4, 4), "strides=[2,2], pads=[1,1,1,1]", ["Conv", "DepthToSpace"]),
        ((3, 3), "strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]", ["Conv", "DepthToSpace"]),
        ((3, 3), "strides=[2,2], pads=[1,1,1,1]", ["Conv", "DepthToSpace", "Slice"]),
        ((3, 5), "strides=[3,3], pads=[0,2,1,0]", ["Conv", "DepthToSpace", "Slice"]),
        ((1, 2), "strides=[2,2], output_padding=[1,0]", ["Conv", "DepthToSpace"]),
        ((16, 16), "strides=[8,8], pads=[4,4,4,4]", ["Conv", "DepthToSpace"]),
        ((3, 3), "pads=[1,1,1,1]", ["Conv"]),
        ((3, 2), "pads=[0,1,0,0]", ["Conv"]),
    ],
)
def test_transposed_convolutions_are_convolutions(normal, kernel, attributes, operators):
    net = model(TEXT.format(attributes), W=normal(3, 5, *kernel), b=normal(5))
    rewritten(net, SubpixelConvolution(), x=normal(2, 3, 6, 7))
    assert ops(net) == operators


@pytest.mark.parametrize(
    ("kernel", "attributes", "cut"),
    [
        ((4, 1), "strides=[2,1], pads=[1,0,1,0]", []),
        ((3, 3), "strides=[1,3], output_padding=[0,1]", ["Slice"]),
        ((3, 5), "strides=[2,3], pads=[0,2,1,0]", []),
    ],
)
def test_unequal_strides_of_known_sizes(normal, kernel, attributes, cut):
    text = TEXT.format(attributes).replace("n,3,h,w", "n,3,6,7")
    net = model(text, W=normal(3, 5, *kernel), b=normal(5))
    rewritten(net, SubpixelConvolution(), x=normal(2, 3, 6, 7))
    assert ops(net) == ["Conv", "Reshape", "Transpose", "Reshape", *cut]


def test_functions_of_single_values_follow_their_layer(normal):
    text = """(float[n,3,h,w] x) => (float[n,5,r,c] y) {
        a = ConvTranspose<strides=[2,2]>(x, W) b = Relu(a) c = Clip(b, , most) y = Conv(c, V) }"""
    net = model(text, W=normal(3, 5, 2, 2), V=normal(5, 5, 1, 1), most=np.float32(1))
    rewritten(net, SubpixelConvolution(), x=normal(2, 3, 4, 5))
    assert ops(net) == ["Conv", "Relu", "Clip", "DepthToSpace", "Conv"]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("strides=[2,1]", "its strides differ, and the size of its input is unknown"),
        ("dilations=[2,2]", "it has groups, dilations or automatic padding"),
        ('strides=[2,2], auto_pad="SAME_UPPER"', "it has groups, dilations or automatic padding"),
        ("strides=[2,2], output_shape=[12,14]", "its size is given"),
        ("pads=[0,0,4,0]", "its padding exceeds its kernel"),
    ],
)
def test_near_misses(normal, attributes, reason):
    net = model(TEXT.format(attributes), W=normal(3, 5, 2, 2), b=normal(5))
    report = rewritten(net, SubpixelConvolution(), exact=True, x=normal(2, 3, 6, 7))
    assert ops(net) == ["ConvTranspose"]
    assert list(reasons(report, "SubpixelConvolution").values()) == [reason]


def test_a_size_that_others_read_stays(normal):
    text = """(float[n,3,4,4] x) => (float[n,5,8,8] y, float[n,5,8,8] z) {
        y = ConvTranspose<strides=[2,2]>(x, W) z = Relu(y) }"""
    net = model(text, W=normal(3, 5, 2, 2), one=integers(1))
    rewritten(net, SubpixelConvolution(), x=normal(2, 3, 4, 4))
    assert ops(net) == ["Conv", "DepthToSpace", "Relu"]
