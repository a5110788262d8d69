"""Vision transformers as image programs: tokens, attention over all of them or in windows, and near misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, gelu, linear, results, weights
from helpers.token_graphs import CHANNELS, HEADS, SIZE, attention, check, patches, rolled
from onnx import helper

from pipelines.core.errors import RequestError
from pipelines.engines.native import images
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import (
    Attention,
    ChannelScale,
    Convolution,
    Dequantize,
    FloatActivation,
    FloatCopy,
    FloatSum,
    Gathering,
    MatrixProduct,
    Normalization,
    Operand,
    Pixels,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.mark.parametrize("biased", [0, 1, 4])
@pytest.mark.parametrize(("size", "tokens"), [(5, 10), (16, 10), (40, 37), (64, 83)])
def test_attention_in_windows(biased: int, size: int, tokens: int) -> None:
    """Heads of any size, a bias of each pair or none, bytes and floats written, in windows whose pixels are gathered."""
    rng = np.random.default_rng(size + biased)
    heads, windows = 3, 4
    wide, bytes_in = heads * 3 * -(-size // 16) * 16, Operand(0, 0.02, 120)
    bias = rng.normal(0, 1, (biased, heads, tokens, tokens)).astype(np.float32) if biased else None
    if biased == 4:
        bias[2] = bias[0]  # windows that are alike
    places = rng.permutation(windows * tokens).reshape(windows, tokens)
    back = np.append(rng.permutation(windows * tokens)[:20], -1)[:, None]
    steps: list[Any] = [
        Pixels(0, last=True),
        Gathering(bytes_in, Operand(1, 0.02, 120), places),
        FloatCopy(Operand(1, 0.02, 120), Operand(2)),
        Attention(2, Operand(3, 0.01, 125), heads, size, windows, bias),
        Attention(2, Operand(4), heads, size, windows, bias),
        FloatSum(Operand(3, 0.01, 125), Operand(4), Operand(5)),
        Gathering(Operand(5), Operand(6, 0.02, 99), back, rng.normal(0, 1, (21, heads * size)).astype(np.float32)),
        Dequantize(6, 0.25, 3),
    ]
    narrow = (windows, tokens, heads * size)
    tensors = [(windows, tokens, wide)] * 3 + [narrow] * 3 + [(21, 1, heads * size)]
    made = program((windows, tokens, wide), tensors, steps, 21 * heads * size, floats=frozenset({2, 4, 5}))
    same_bits(made, rng.integers(0, 256, (2, windows, tokens, wide), dtype=np.uint8))


@pytest.mark.parametrize("groups", [1, 6])
def test_products_of_matrices(groups: int) -> None:
    """Of few and of many columns, in groups of pixels."""
    rng, inner, channels = np.random.default_rng(groups), 7, 39
    a, b = (4, 3, inner), (groups * inner, 1, channels)
    sizes = [int(np.prod(shape)) for shape in (a, b)]
    steps: list[Any] = [
        Pixels(0, (), True, 0.0, 0, 0),
        Pixels(1, (), True, 0.0, 0, sizes[0]),
        MatrixProduct(0, 1, 2, groups),
        Dequantize(2, 1, 0),
    ]
    made = program(
        (sum(sizes),),
        [a, b, (4, 3, channels)],
        steps,
        12 * channels,
        floats=frozenset({0, 1, 2}),
        dtype="float32",
        inputs=(("a", (sizes[0],)), ("b", (sizes[1],))),
    )
    same_bits(made, rng.normal(0, 1, (2, sum(sizes))).astype(np.float32))


@pytest.mark.parametrize("merged", [True, False])
def test_linear_attention_is_whole(merged: bool, tmp_path: Path) -> None:
    """EfficientViT's: keys times values first, without a softmax; a column of ones, or a sum, normalizes."""
    g = Graph(1)
    norm = g.quantize(g.add("LayerNormalization", [patches(g), weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    shape = g.constant(np.array([-1, 16, HEADS, SIZE]))
    parts = [g.add("Reshape", [linear(g, norm, (CHANNELS, CHANNELS)), shape]) for _ in range(3)]
    q, k, v = (g.add("Transpose", [part], perm=[0, 2, 1, 3]) for part in parts)
    q, k = (g.quantize(g.add("Relu", [x]), 0.02, 0) for x in (q, k))
    turned = g.add("Transpose", [k], perm=[0, 1, 3, 2])
    v = g.quantize(v, 0.02, 128)
    if not merged:  # a column of ones
        v = g.add("Pad", [v, g.constant(np.array([0, 0, 0, 0, 0, 0, 0, 1])), g.constant(np.float32(1))])
    out = g.add("MatMul", [q, g.add("MatMul", [turned, v])])
    if not merged:
        starts, ends, axes = ([0, SIZE], [SIZE, SIZE + 1], g.constant(np.array([3])))
        out, total = (
            g.add("Slice", [out, *(g.constant(np.array([number])) for number in part), axes])
            for part in zip(starts, ends, strict=True)
        )
        out = g.add("Div", [out, g.add("Add", [total, g.constant(np.float32(1))])])
    else:
        total = g.add("MatMul", [q, g.add("ReduceSum", [turned, g.constant(np.array([-1]))], keepdims=1)])
        out = g.add("Div", [out, g.add("Add", [total, g.constant(np.float32(1))])])
    rows = g.add("Reshape", [g.add("Transpose", [out], perm=[0, 2, 1, 3]), g.constant(np.array([0, 0, -1]))])
    y = linear(g, g.quantize(rows, 0.02, 128), (CHANNELS, CHANNELS))
    mean = g.quantize(g.add("ReduceMean", [y, g.constant(np.array([1]))], keepdims=0), 0.03, 120)
    g.flat = g.layer("Gemm", mean, (5, CHANNELS), 0.03, transB=1)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))
    assert kinds.count(MatrixProduct) >= 2


def test_codes_of_a_product_in_another_order_are_left_to_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product has no bytes, so what reads them in another order has no native form."""
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    g = Graph()
    shape = g.constant(np.array([-1, 16, HEADS, SIZE]))
    parts = [g.add("Reshape", [linear(g, patches(g), (CHANNELS, CHANNELS)), shape]) for _ in range(2)]
    q, k = (g.quantize(g.add("Transpose", [part], perm=[0, 2, 1, 3]), 0.02, 128) for part in parts)
    product = g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 1, 3, 2])])
    qparams = [g.constant(np.float32(0.02)), g.constant(np.uint8(128))]
    turned = g.add("Transpose", [g.add("QuantizeLinear", [product, *qparams])], perm=[0, 2, 1, 3])
    y = g.add("DequantizeLinear", [turned, *qparams])
    rows = g.quantize(g.add("Reshape", [y, g.constant(np.array([0, 16, -1]))]), 0.02, 128)
    for width in (HEADS * 16, 64, 64, 64):
        rows = g.quantize(linear(g, rows, (width, 64)), 0.02, 128)
    out = g.add("ReduceMean", [rows, g.constant(np.array([1]))])
    g.ranks = {out: 3}
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], out, opset=20)
    x = g.rng.normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    made = images.opened(path, 1, validate=False).run({"image": x})
    np.testing.assert_allclose(made[out], results(path, x).reshape(made[out].shape), atol=0.021)


def block(g: Graph, x: str, merged: bool, tokens: int) -> str:
    """A block of a vision transformer, whose residual stays float."""
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    mixed = attention(g, g.quantize(norm, 0.03, 125), merged, tokens)
    x = g.add("Add", [x, linear(g, mixed, (CHANNELS, CHANNELS))])
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    norm = g.add("Mul", [norm, weights(g, CHANNELS)])  # as SmoothQuant leaves it
    wide = gelu(g, linear(g, g.quantize(norm, 0.03, 125), (CHANNELS, 4 * CHANNELS)))
    wide = g.add("Mul", [wide, weights(g, 4 * CHANNELS)])
    return g.add("Add", [linear(g, g.quantize(wide, 0.02, 10), (4 * CHANNELS, CHANNELS)), x])


@pytest.mark.parametrize("merged", [True, False])
def test_a_vision_transformer_is_whole(merged: bool, tmp_path: Path) -> None:
    """Patches, a token of the class or the mean of all, positions, and blocks as timm and transformers export them."""
    g = Graph()
    x = patches(g)
    token = weights(g, 1, 1, CHANNELS)
    if not merged:  # one of each sample
        count = g.add("Gather", [g.add("Shape", ["image"]), g.constant(np.array([0]))])
        token = g.add("Expand", [token, g.add("Concat", [count, g.constant(np.array([1, 1]))], axis=0)])
    x = g.add("Concat", [token, x], axis=1)
    x = g.add("Add", [x, weights(g, 1, 17, CHANNELS, mean=0)])
    for _ in range(2):
        x = block(g, x, merged, 17)
    x = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    if merged:
        first = g.add("Gather", [x, g.constant(np.array(0))], axis=1)
    else:
        first = g.quantize(g.add("ReduceMean", [x, g.constant(np.array([1]))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", first, (5, CHANNELS), 0.03, transB=1)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20, batch=1 if merged else "n"))
    assert kinds.count(Attention) == 2
    assert FloatActivation not in kinds  # in the layers before them
    assert FloatSum not in kinds
    assert kinds.count(ChannelScale) == 1  # the positions; factors are in the normalizations before them
    assert kinds.count(Convolution) == 2 + 2 * 4


@pytest.mark.parametrize("merged", [True, False])
def test_attention_of_constant_queries_is_whole(merged: bool, tmp_path: Path) -> None:
    """DETR's queries: a layer of tokens that all samples share; its heads are an axis, or one with samples (bmm)."""
    g = Graph()
    x = patches(g)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    count = g.add("Gather", [g.add("Shape", ["image"]), g.constant(np.array([0]))])
    sizes = g.add("Concat", [count, g.constant(np.array([7, CHANNELS]))], axis=0)
    shared = g.quantize(g.add("Expand", [weights(g, 1, 7, CHANNELS, mean=0), sizes]), 0.01, 128)

    def heads(value: str, of: int, order: list[int]) -> str:
        split = g.add("Reshape", [linear(g, value, (CHANNELS, CHANNELS)), g.constant(np.array([-1, of, HEADS, SIZE]))])
        split = g.add("Transpose", [split], perm=order)
        rows = [of, SIZE] if order[-1] == 3 else [SIZE, of]
        return g.add("Reshape", [split, g.constant(np.array([-1, *rows]))]) if merged else split

    scores = g.add("MatMul", [heads(shared, 7, [0, 2, 1, 3]), heads(norm, 16, [0, 2, 3, 1])])
    share = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(0.05))])], axis=-1)
    mixed = g.add("MatMul", [share, heads(norm, 16, [0, 2, 1, 3])])
    if merged:
        mixed = g.add("Reshape", [mixed, g.constant(np.array([-1, HEADS, 7, SIZE]))])
    rows = g.add("Reshape", [g.add("Transpose", [mixed], perm=[0, 2, 1, 3]), g.constant(np.array([0, 0, -1]))])
    y = linear(g, g.quantize(rows, 0.02, 128), (CHANNELS, CHANNELS))
    pooled = g.quantize(g.add("ReduceMean", [g.add("Mul", [y, y]), g.constant(np.array([1]))], keepdims=0), 0.03, 20)
    g.flat = g.layer("Gemm", pooled, (5, CHANNELS), 0.03, transB=1)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20), 0.03)
    assert kinds.count(Attention) == 1


def test_layers_over_tokens_are_whole(tmp_path: Path) -> None:
    """MLP-Mixer: a layer over the tokens of every channel."""
    g = Graph()
    x = linear(g, g.quantize(patches(g), 0.03, 125), (CHANNELS, CHANNELS))
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    hidden = g.quantize(gelu(g, linear(g, g.add("Transpose", [norm], perm=[0, 2, 1]), (16, 24))), 0.03, 10)
    mixed = g.add("Transpose", [linear(g, hidden, (24, 16))], perm=[0, 2, 1])
    y = g.quantize(
        g.add("LayerNormalization", [g.add("Add", [x, mixed]), *(weights(g, CHANNELS) for _ in "wb")]), 0.03, 125
    )
    pooled = g.quantize(
        g.add("ReduceMean", [linear(g, y, (CHANNELS, CHANNELS)), g.constant(np.array([1]))], keepdims=0), 0.03, 125
    )
    g.flat = g.layer("Gemm", pooled, (5, CHANNELS), 0.03, transB=1)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))


def test_attention_among_channels_is_whole(tmp_path: Path) -> None:
    """XCiT and EdgeNeXt: queries and keys are channels, whose elements are tokens, of length 1."""
    g = Graph()
    x = patches(g)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    shape = g.constant(np.array([-1, 16, HEADS, SIZE]))
    q, k, v = (
        g.add("Transpose", [g.add("Reshape", [linear(g, norm, (CHANNELS, CHANNELS)), shape])], perm=[0, 2, 3, 1])
        for _ in "qkv"
    )
    q, k = (g.add("Div", [rows, g.add("ReduceL2", [rows, g.constant(np.array([-1]))])]) for rows in (q, k))
    scores = g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 1, 3, 2])])
    mixed = g.quantize(g.add("MatMul", [g.add("Softmax", [scores], axis=-1), v]), 0.02, 128)
    rows = g.add("Reshape", [g.add("Transpose", [mixed], perm=[0, 3, 1, 2]), g.constant(np.array([-1, 16, CHANNELS]))])
    y = g.add("Add", [linear(g, rows, (CHANNELS, CHANNELS)), x])
    pooled = g.quantize(g.add("ReduceMean", [y, g.constant(np.array([1]))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", pooled, (5, CHANNELS), 0.03, transB=1)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))
    assert kinds.count(Attention) == 1


@pytest.mark.parametrize("masked", [True, False])
def test_attention_in_shifted_windows_is_whole(masked: bool, tmp_path: Path) -> None:
    """A block of Swin: a roll, windows, biases of relative positions and a mask, and all that back."""
    g = Graph()
    x = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2]), 0.03, 120
    )
    x = g.add("Transpose", [x], perm=[0, 2, 3, 1])
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    padded = g.add("Pad", [g.quantize(norm, 0.03, 125), g.constant(np.zeros(8, np.int64))])  # of whole windows
    rows = rolled(g, padded, 2)
    rows = g.add("Reshape", [rows, g.constant(np.array([-1, 2, 4, 2, 4, CHANNELS]))])
    rows = g.add("Transpose", [rows], perm=[0, 1, 3, 2, 4, 5])
    rows = g.add("Reshape", [rows, g.constant(np.array([-1, 16, CHANNELS]))])
    mask = np.where(g.rng.random((1, 4, 1, 16, 16)) < 0.3, -100 if masked else 0, 0).astype(np.float32)
    mixed = attention(g, rows, True, 16, (weights(g, 1, HEADS, 16, 16), g.constant(mask)))
    back = linear(g, mixed, (CHANNELS, CHANNELS))
    back = g.add("Reshape", [back, g.constant(np.array([-1, 2, 2, 4, 4, CHANNELS]))])
    back = g.add("Transpose", [back], perm=[0, 1, 3, 2, 4, 5])
    back = g.add("Reshape", [back, g.constant(np.array([-1, 8, 8, CHANNELS]))])
    x = g.add("Add", [x, rolled(g, back, -2)])
    x = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)])
    mean = g.quantize(g.add("ReduceMean", [x, g.constant(np.array([1, 2]))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", mean, (5, CHANNELS), 0.03, transB=1)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))
    assert kinds.count(Attention) == 1


def test_codes_of_merged_patches_are_padded_by_their_zero_point(tmp_path: Path) -> None:
    """SwinV2: codes of a norm are reshaped before the Pad, whose number is their zero point, not a real value."""
    g = Graph()
    x = g.add("Reshape", [patches(g), g.constant(np.array([-1, 4, 4, CHANNELS]))])
    bounds = [[np.array(bound) for bound in (place, [2**31] * 2, [1, 2], [2, 2])] for place in np.ndindex(2, 2)]
    parts = [g.add("Slice", [x, *map(g.constant, bound)]) for bound in bounds]
    merged = g.add("Reshape", [g.add("Concat", parts, axis=3), g.constant(np.array([-1, 4, 4 * CHANNELS]))])
    x = linear(g, g.quantize(merged, 0.03, 125), (4 * CHANNELS, CHANNELS))
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)])
    qparams = [g.constant(np.float32(0.03)), g.constant(np.uint8(125))]
    codes = g.add("QuantizeLinear", [norm, *qparams])
    codes = g.add("Reshape", [codes, g.constant(np.array([-1, 2, 2, CHANNELS]))])
    codes = g.add("Pad", [codes, g.constant(np.array([0, 0, 0, 0, 0, 1, 2, 0])), qparams[1]])
    rows = linear(g, g.add("DequantizeLinear", [codes, *qparams]), (CHANNELS, CHANNELS))
    mean = g.quantize(g.add("ReduceMean", [rows, g.constant(np.array([1, 2]))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", mean, (5, CHANNELS), 0.03, transB=1)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))


@pytest.mark.parametrize("last", [False, True])
def test_parts_of_tokens_are_of_the_size_that_onnx_gives_them(last: bool, tmp_path: Path) -> None:
    """Sixteen tokens in three parts are six, six and four."""
    g = Graph()
    parts = [f"part{i}" for i in range(3)]
    g.nodes.append(helper.make_node("Split", [patches(g)], parts, axis=1, num_outputs=3))
    rows = linear(g, parts[2 if last else 0], (CHANNELS, CHANNELS))
    mean = g.quantize(
        g.add("ReduceMean", [g.quantize(rows, 0.05, 120), g.constant(np.array([1]))], keepdims=0), 0.05, 120
    )
    g.flat = g.layer("Gemm", mean, (5, CHANNELS), 0.05, transB=1)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))


def test_a_function_whose_results_are_rolled(tmp_path: Path) -> None:
    g = Graph()
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2])
    x = g.add("Transpose", [g.add("Sigmoid", [g.quantize(x, 0.03, 120)])], perm=[0, 2, 3, 1])
    rows = linear(g, g.quantize(rolled(g, x, 2), 1 / 255, 0), (CHANNELS, CHANNELS))
    mean = g.add("ReduceMean", [g.quantize(rows, 0.05, 120), g.constant(np.array([1, 2]))], keepdims=0)
    g.flat = g.layer("Gemm", g.quantize(mean, 0.05, 120), (5, CHANNELS), 0.05, transB=1)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20))


@pytest.mark.parametrize("pooled", [False, True])
def test_a_network_ends_at_one_token(pooled: bool, tmp_path: Path) -> None:
    g = Graph()
    mean = g.add("ReduceMean", [patches(g), g.constant(np.array([1]))], keepdims=1)
    out = mean if pooled else linear(g, g.quantize(mean, 0.05, 120), (CHANNELS, 5))
    g.ranks = {out: 3}
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], out, opset=20)
    assert image_program(io.load(path)).result_shape == results(path, np.zeros((1, 3, 16, 16), np.float32)).shape[1:]
    check(g, path)


@pytest.mark.parametrize("index", [16, -17])
def test_a_token_that_is_not_there_is_refused(index: int, tmp_path: Path) -> None:
    g = Graph()
    first = g.add("Gather", [patches(g), g.constant(np.array(index))], axis=1)
    g.flat = g.layer("Gemm", first, (5, CHANNELS), 0.03, transB=1)
    with pytest.raises(RequestError, match="Gather"):
        image_program(io.load(g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20)))


def test_a_softmax_over_queries_is_refused(tmp_path: Path) -> None:
    g = Graph()
    rows = linear(g, patches(g), (CHANNELS, CHANNELS))
    heads = g.add("Reshape", [rows, g.constant(np.array([-1, 16, HEADS, SIZE]))])
    heads = g.add("Transpose", [heads], perm=[0, 2, 1, 3])
    scores = g.add("MatMul", [heads, g.add("Transpose", [heads], perm=[0, 1, 3, 2])])
    share = g.add("Softmax", [scores], axis=2)
    flat = g.add("Reshape", [g.add("MatMul", [share, heads]), g.constant(np.array([0, -1]))])
    g.flat = g.layer("Gemm", g.quantize(flat, 0.05, 120), (5, 512), 0.05, transB=1)
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20)
    with pytest.raises(RequestError, match="not over the keys"):
        image_program(io.load(path))


@pytest.mark.parametrize(("centered", "axis"), [(False, -1), (True, -1), (True, 1)])
def test_a_normalization_of_many_operators_is_one_step(centered: bool, axis: int, tmp_path: Path) -> None:
    g = Graph(3)
    if axis == 1:
        x = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 4, 4), 0.02, strides=[4, 4])
        x = g.quantize(x, 0.03, 120)
    else:
        x = patches(g)
    d = g.add("Sub", [x, g.add("ReduceMean", [x], axes=[axis])]) if centered else x
    squares = g.add("ReduceMean", [g.add("Pow", [d, g.constant(np.float32(2))])], axes=[axis])
    root = g.add("Sqrt", [g.add("Add", [squares, g.constant(np.float32(1e-6))])])
    gain = weights(g, *(CHANNELS, 1, 1) if axis == 1 else (CHANNELS,))
    y = g.quantize(g.add("Mul", [g.add("Div", [d, root]), gain]), 0.02, 128)
    if axis != 1:
        y = g.quantize(linear(g, y, (CHANNELS, 8)), 0.03, 128)
        g.ranks[y] = 3
    assert check(g, g.save(tmp_path / "n.onnx", [3, 16, 16], y)).count(Normalization) == 1


@pytest.mark.parametrize("pooled", [True, False])
def test_attention_whose_windows_are_behind_its_heads(pooled: bool, tmp_path: Path) -> None:
    """Hiera: [n, heads, windows, tokens, size], and queries that are the largest of two tokens."""
    g = Graph()
    x = g.add("LayerNormalization", [patches(g), weights(g, CHANNELS), weights(g, CHANNELS)])
    rows = linear(g, g.quantize(x, 0.03, 125), (CHANNELS, 3 * CHANNELS))
    rows = g.add("Reshape", [rows, g.constant(np.array([-1, 4, 4, 3, HEADS, SIZE]))])
    rows = g.add("Transpose", [rows], perm=[3, 0, 4, 2, 1, 5])
    q, k, v = (g.add("Gather", [rows, g.constant(np.array(index))], axis=0) for index in range(3))
    if pooled:
        q = g.add("Reshape", [q, g.constant(np.array([-1, HEADS, 4, 2, 2, SIZE]))])
        q = g.add("ReduceMax", [q, g.constant(np.array([3]))], keepdims=0)
    q = g.add("Mul", [q, g.constant(np.float32(0.02))])
    share = g.add("Softmax", [g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 1, 2, 4, 3])])], axis=-1)
    heads = g.add("Transpose", [g.add("MatMul", [share, v])], perm=[0, 3, 2, 1, 4])
    mixed = g.quantize(g.add("Reshape", [heads, g.constant(np.array([-1, 8 if pooled else 16, CHANNELS]))]), 0.05, 128)
    out = linear(g, mixed, (CHANNELS, 5))
    g.ranks = {out: 3}
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out, opset=20))
    assert kinds.count(Attention) == 1


def test_bytes_of_a_token_joined_with_those_of_all_others(tmp_path: Path) -> None:
    """DPT: the channels of the first token behind those of each pixel's."""
    g = Graph()
    qparams = [g.constant(np.float32(0.05)), g.constant(np.uint8(120))]
    tokens = g.add("QuantizeLinear", [patches(g), *qparams])
    first = g.add("Gather", [tokens, g.constant(np.array([0]))], axis=1)
    first = g.add("Expand", [first, g.constant(np.array([1, 15, CHANNELS]))])
    others = g.add("Slice", [tokens, *(g.constant(np.array([bound])) for bound in (1, 99, 1))])
    joined = g.add("DequantizeLinear", [g.add("Concat", [others, first], axis=2), *qparams])
    out = linear(g, joined, (2 * CHANNELS, 5))
    g.ranks = {out: 3}
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out))


@pytest.mark.parametrize("pooled", [True, False])
def test_attention_of_tokens_before_samples(pooled: bool, tmp_path: Path) -> None:
    """torch.nn.MultiheadAttention, of any number of samples: [tokens, n, channels], [n heads, tokens, size]."""
    g = Graph()
    x = g.add("LayerNormalization", [patches(g), weights(g, CHANNELS), weights(g, CHANNELS)])
    count = g.add("Gather", [g.add("Shape", [x]), g.constant(np.array([0]))])
    x = g.add("Transpose", [g.quantize(x, 0.03, 125)], perm=[1, 0, 2])
    rows = g.add("Reshape", [linear(g, x, (CHANNELS, 3 * CHANNELS)), g.constant(np.array([1, 16, -1, 3, CHANNELS]))])
    rows = g.add("Squeeze", [g.add("Transpose", [rows], perm=[3, 1, 2, 0, 4]), g.constant(np.array([3]))])
    q, k, v = (g.add("Gather", [rows, g.constant(np.array(index))], axis=0) for index in range(3))
    tokens = 1 if pooled else 16
    if pooled:
        times = g.add("Concat", [count, g.constant(np.array([1, 1]))], axis=0)
        query = g.add("Expand", [weights(g, 1, 1, CHANNELS, mean=0), times])
        q = linear(g, g.add("Transpose", [query], perm=[1, 0, 2]), (CHANNELS, CHANNELS))
    heads = [
        g.add("Reshape", [part, g.constant(np.array([size, -1, SIZE]))])
        for part, size in ((q, tokens), (k, 16), (v, 16))
    ]
    q, k, v = (g.add("Transpose", [part], perm=[1, 0, 2]) for part in heads)
    scores = g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 2, 1])])
    share = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(0.02))])], axis=-1)
    mixed = g.add("Transpose", [g.add("MatMul", [share, v])], perm=[1, 0, 2])
    mixed = g.quantize(g.add("Reshape", [mixed, g.constant(np.array([-1, CHANNELS]))]), 0.05, 128)
    mixed = g.layer("Gemm", mixed, (CHANNELS, CHANNELS), 0.05, transB=1)
    mixed = g.add("Reshape", [mixed, g.constant(np.array([tokens, -1, CHANNELS]))])
    out = g.quantize(g.add("Transpose", [mixed], perm=[1, 0, 2]), 0.2, 128)
    g.ranks = {out: 3}
    assert check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out)).count(Attention) == 1
