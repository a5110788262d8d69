"""Elements in other orders and shapes: parts of pixels, windows, heads, and what depends on the number of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, linear, results, weights
from helpers.token_graphs import CHANNELS, HEADS, SIZE, attention, check, patches, rolled
from onnx import helper

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images import reference
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import (
    Attention,
    Concatenation,
    Dequantize,
    FloatCopy,
    FloatSum,
    Gathering,
    Operand,
    Pixels,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.mark.parametrize("part", [1, 6, 12])
def test_parts_of_pixels(part: int) -> None:
    """Bytes and floats read and written, in pixels of another number of channels, beside zeros and constants."""
    rng = np.random.default_rng(part)
    one, other = Operand(0, 0.02, 120), Operand(5, 0.03, 99)
    wide, shape = (5, 4, 12), (3, 6, 36)
    places = rng.integers(-1, 20 * 12 // part, (*shape[:2], 36 // part))
    added = rng.normal(0, 1, (18, 36)).astype(np.float32)
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(one, Operand(1)),
        Gathering(one, Operand(2, 0.02, 120), places, part=part),
        Gathering(Operand(1), Operand(3), places, added, part=part),
        Concatenation((3, 3), 4),
        FloatSum(Operand(2, 0.02, 120), Operand(3), other),
        Gathering(other, Operand(6), places[:, :, :1] * 0, part=36),
        FloatSum(Operand(6), Operand(3), Operand(7, 0.03, 99)),
        Gathering(Operand(4), Operand(8, 0.05, 120), np.arange(18).reshape(3, 6)),
        Dequantize(7, 0.25, 3),
        Dequantize(8, 0.25, 3),
    ]
    tensors = [wide, wide, shape, shape, (3, 6, 72), shape, shape, shape, (3, 6, 72)]
    made = program(wide, tensors, steps, 18 * 108, floats=frozenset({1, 3, 4, 6}))
    same_bits(made, rng.integers(0, 256, (2, *wide), dtype=np.uint8))
    with pytest.raises(RequestError):
        program(wide, tensors[:3], [*steps[:2], Gathering(one, Operand(2, 0.02, 120), places)], 648)


def test_blocks_of_the_input_as_channels(tmp_path: Path) -> None:
    """The pixels of an image of three channels are four bytes apart."""
    g = Graph()
    qparams = [g.constant(np.float32(0.02)), g.constant(np.uint8(128))]
    image = g.add("QuantizeLinear", ["image", *qparams])
    parts = []
    for place in np.ndindex(2, 2):
        bounds = [np.array(bound, np.int64) for bound in (place, [2**31] * 2, [2, 3], [2, 2])]
        parts.append(g.add("Slice", [image, *map(g.constant, bounds)]))
    blocks = g.add("DequantizeLinear", [g.add("Concat", parts, axis=1), *qparams])
    y = g.quantize(g.layer("Conv", blocks, (8, 12, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.05, 120)
    path = g.save(tmp_path / "n.onnx", [3, 8, 6], y)
    made, samples = image_program(io.load(path)), g.rng.normal(0, 1, (2, 3, 8, 6)).astype(np.float32)
    same_bits(made, samples)
    wanted = results(path, samples)
    assert np.abs(np.stack([reference.run(made, feed) for feed in samples]).reshape(wanted.shape) - wanted).max() < 0.06


def test_the_input_reshaped_to_its_own_shape(tmp_path: Path) -> None:
    g = Graph()
    image = g.add("Reshape", ["image", g.add("Shape", ["image"])])
    y = g.quantize(g.layer("Conv", g.quantize(image, 0.02, 128), (8, 3, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.05, 120)
    check(g, g.save(tmp_path / "n.onnx", [3, 16, 16], y))


@pytest.mark.parametrize("form", ["bytes", "floats", "norm"])
def test_float_steps_on_the_pixels_of_the_input(form: str, tmp_path: Path) -> None:
    """A network that resizes its images first, in bytes or floats, or normalizes each."""
    g = Graph()
    qparams = [g.constant(np.float32(0.02)), g.constant(np.uint8(128))]
    x = g.add("QuantizeLinear", ["image", *qparams])
    x = x if form == "bytes" else g.add("DequantizeLinear", [x, *qparams])
    if form == "norm":
        x = g.add("InstanceNormalization", [x, weights(g, 3), weights(g, 3)])
    else:
        x = g.add("Resize", [x, "", g.constant(np.array([1, 1, 2, 1.5], np.float32))], mode="linear")
    x = g.add("DequantizeLinear", [x, *qparams]) if form == "bytes" else g.quantize(x, 0.02, 128)
    y = g.quantize(g.layer("Conv", x, (8, 3, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.05, 120)
    path = g.save(tmp_path / "n.onnx", [3, 8, 6], y)
    made, samples = image_program(io.load(path)), g.rng.normal(0, 1, (2, 3, 8, 6)).astype(np.float32)
    same_bits(made, samples)
    wanted = results(path, samples)
    assert (
        np.abs(np.stack([reference.run(made, sample) for sample in samples]).reshape(wanted.shape) - wanted).max()
        < 0.16
    )


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("form", ["bytes", "signed bytes", "real", "floats"])
def test_padded_values(form: str, mode: str, tmp_path: Path) -> None:
    """Zeros or pixels around a value, quantized, dequantized, or the float result of a layer."""
    g = Graph(7)
    zero = np.int8(-8) if form == "signed bytes" else np.uint8(120)
    qparams = [g.constant(np.float32(0.03)), g.constant(zero)]
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (8, 3, 3, 3), 0.02, strides=[2, 2])
    x = x if form == "floats" else g.add("QuantizeLinear", [x, *qparams])
    x = g.add("DequantizeLinear", [x, *qparams]) if form == "real" else x
    fills = [qparams[1]] if "bytes" in form else []
    widths = g.constant(np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64))
    x = g.add("Pad", [x, widths, *fills], mode=mode)
    x = g.add("DequantizeLinear", [x, *qparams]) if "bytes" in form else g.quantize(x, 0.03, 120)
    y = g.quantize(g.layer("Conv", x, (8, 8, 3, 3), 0.03), 0.05, 120)
    assert Gathering in check(g, g.save(tmp_path / "n.onnx", [3, 16, 16], y))


@pytest.mark.parametrize(("zero", "fill"), [(-128, None), (-8, 120)])
def test_signed_bytes_padded_with_another_value_have_no_native_form(
    zero: int, fill: int | None, tmp_path: Path
) -> None:
    """A 0, the default, and 120 are the zero points as unsigned bytes."""
    g = Graph(7)
    qparams = [g.constant(np.float32(0.03)), g.constant(np.int8(zero))]
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (8, 3, 3, 3), 0.02, strides=[2, 2])
    fills = [] if fill is None else [g.constant(np.int8(fill))]
    widths = g.constant(np.array([0, 0, 1, 2, 0, 0, 3, 0], np.int64))
    x = g.add("Pad", [g.add("QuantizeLinear", [x, *qparams]), widths, *fills])
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.add("DequantizeLinear", [x, *qparams]))
    with pytest.raises(RequestError, match="pads with other values than zeros"):
        image_program(io.load(path))


@pytest.mark.parametrize(("count", "biased"), [(3, 0), (17, 1), (60, 2)])
def test_attention_to_other_tokens(count: int, biased: int) -> None:
    """Fewer keys than queries, or more, in windows; the keys of few are shared by blocks of queries."""
    rng = np.random.default_rng(count)
    heads, size, windows, tokens = 2, 5, 2, 300
    bias = rng.normal(0, 1, (biased, heads, tokens, count)).astype(np.float32) if biased else None
    queries, keys = (windows, tokens, heads * 16), (windows, count, heads * 32)
    places = [rng.integers(0, 20, shape) for shape in ((*queries[:2], 4), (*keys[:2], 8))]
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(Operand(0, 0.02, 120), Operand(1)),
        Gathering(Operand(1), Operand(2), places[0], part=8),
        Gathering(Operand(1), Operand(3), places[1], part=8),
        Attention(2, Operand(4, 0.01, 120), heads, size, windows, bias, keys=3),
        Attention(2, Operand(5), heads, size, windows, bias, keys=3),
        FloatSum(Operand(4, 0.01, 120), Operand(5), Operand(6, 0.02, 99)),
        Dequantize(6, 0.25, 3),
    ]
    narrow = (windows, tokens, heads * size)
    made = program(
        (5, 4, 8),
        [(5, 4, 8)] * 2 + [queries, keys] + [narrow] * 3,
        steps,
        int(np.prod(narrow)),
        floats=frozenset({1, 2, 3, 5}),
    )
    same_bits(made, rng.integers(0, 256, (2, 5, 4, 8), dtype=np.uint8))


def sizes(g: Graph, x: str, *rest: int, times: int = 1) -> str:
    """[times n, *rest] as exporters compute it from the shape of x."""
    count = g.add("Gather", [g.add("Shape", [x]), g.constant(np.array([0]))])
    many = g.add("Mul", [count, g.constant(np.array([times]))])
    return g.add("Concat", [many, g.constant(np.array(rest))], axis=0)


def windows_of(g: Graph, x: str, channels: int = CHANNELS) -> str:
    """Windows of 4 x 4 of an image 8 x 8."""
    x = g.add("Reshape", [x, g.constant(np.array([-1, 2, 4, 2, 4, channels]))])
    return g.add("Reshape", [g.add("Transpose", [x], perm=[0, 1, 3, 2, 4, 5]), sizes(g, x, 16, channels, times=4)])


def whole(path: Path, g: Graph) -> list[Any]:
    """`check` of a network of any number of samples, which are independent."""
    samples = g.rng.normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    alone = np.concatenate([results(path, feed[None]) for feed in samples])
    np.testing.assert_allclose(results(path, samples), alone, rtol=1e-3, atol=1e-3)
    return check(g, path)


def head(g: Graph, x: str, axes: list[int], channels: int = CHANNELS) -> str:
    """The mean of tokens, and classes."""
    mean = g.quantize(g.add("ReduceMean", [x, g.constant(np.array(axes))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", mean, (5, channels), 0.03, transB=1)
    return g.flat


def test_shifted_windows_of_a_free_batch_are_whole(tmp_path: Path) -> None:
    """Swin as transformers exports it: masks expanded to all samples, windows merged, patches of 2 x 2 joined."""
    g = Graph()
    x = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2]), 0.03, 120
    )
    x = g.add("Reshape", [g.add("Transpose", [x], perm=[0, 2, 3, 1]), g.constant(np.array([-1, 64, CHANNELS]))])
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    rows = rolled(g, g.add("Reshape", [norm, g.constant(np.array([-1, 8, 8, CHANNELS]))]), 2)
    rows = g.quantize(windows_of(g, rows), 0.03, 125)
    mask = g.constant(np.where(g.rng.random((1, 4, 1, 16, 16)) < 0.3, -100, 0).astype(np.float32))
    expanded = g.add("Expand", [mask, sizes(g, x, 4, 1, 16, 16)])
    expanded = g.add("Reshape", [expanded, g.constant(np.array([-1, 1, 16, 16]))])
    bias = g.add("Add", [weights(g, 1, HEADS, 16, 16), expanded])
    back = linear(
        g, attention(g, rows, False, 16, (bias, g.constant(np.zeros((1, 4, 1, 16, 16), np.float32)))), (32, 32)
    )
    back = g.add("Reshape", [back, g.constant(np.array([-1, 2, 2, 4, 4, CHANNELS]))])
    back = g.add("Reshape", [g.add("Transpose", [back], perm=[0, 1, 3, 2, 4, 5]), sizes(g, x, 8, 8, CHANNELS)])
    x = g.add("Add", [x, g.add("Reshape", [rolled(g, back, -2), g.constant(np.array([-1, 64, CHANNELS]))])])
    x = g.add("Reshape", [x, g.constant(np.array([-1, 8, 8, CHANNELS]))])
    cut = lambda x, lo, axis: g.add("Slice", [x, *(g.constant(np.array([n])) for n in (lo, 99, axis, 2))])  # noqa: E731
    x = g.add("Concat", [cut(cut(x, i, 1), j, 2) for j in (0, 1) for i in (0, 1)], axis=-1)
    x = g.add("Reshape", [x, g.constant(np.array([-1, 16, 4 * CHANNELS]))])
    x = g.add("LayerNormalization", [x, weights(g, 4 * CHANNELS), weights(g, 4 * CHANNELS)])
    x = linear(g, g.quantize(x, 0.03, 125), (4 * CHANNELS, CHANNELS))
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x, [1]), opset=20), g)
    assert kinds.count(Attention) == 1
    assert kinds.count(Gathering) <= 4  # windows, tokens back, patches


def test_attention_with_fewer_keys_is_whole(tmp_path: Path) -> None:
    """SegFormer: keys and values of a smaller image; weights of attention without NaN."""
    g = Graph()
    x = patches(g)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    small = g.add("Reshape", [g.add("Transpose", [norm], perm=[0, 2, 1]), g.constant(np.array([0, CHANNELS, 4, 4]))])
    small = g.quantize(g.layer("Conv", small, (CHANNELS, CHANNELS, 2, 2), 0.03, strides=[2, 2]), 0.05, 120)
    small = g.add("Transpose", [g.add("Reshape", [small, g.constant(np.array([0, CHANNELS, 4]))])], perm=[0, 2, 1])
    q, k, v = (linear(g, value, (CHANNELS, CHANNELS)) for value in (norm, small, small))
    split = lambda x, order: g.add(  # noqa: E731
        "Transpose", [g.add("Reshape", [x, g.constant(np.array([0, 0, HEADS, SIZE]))])], perm=order
    )
    scores = g.add("MatMul", [split(q, [0, 2, 1, 3]), split(k, [0, 2, 3, 1])])
    share = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(0.02))])], axis=-1)
    share = g.add("Where", [g.add("IsNaN", [share]), g.constant(np.float32(0)), share])
    rows = g.add("Transpose", [g.add("MatMul", [share, split(v, [0, 2, 1, 3])])], perm=[0, 2, 1, 3])
    rows = g.quantize(g.add("Reshape", [rows, g.constant(np.array([0, 0, -1]))]), 0.02, 128)
    x = g.add("Add", [linear(g, rows, (CHANNELS, CHANNELS)), x])
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x, [1]), opset=20), g)
    assert kinds.count(Attention) == 1


def test_tokens_in_windows_that_are_summed(tmp_path: Path) -> None:
    """MobileViT: every fourth pixel is in a window, in which blocks stay, and the channels of two images are joined."""
    g = Graph()
    image = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2]), 0.03, 120
    )
    x = g.add("Reshape", [image, g.constant(np.array([-1, 2, 4, 2]))])
    x = g.add("Reshape", [g.add("Transpose", [x], perm=[0, 2, 1, 3]), g.constant(np.array([-1, CHANNELS, 16, 4]))])
    x = g.add("Reshape", [g.add("Transpose", [x], perm=[0, 3, 2, 1]), sizes(g, image, 16, -1, times=4)])
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)])
    mixed = attention(g, g.quantize(norm, 0.03, 125), False, 16)
    x = g.add("Add", [linear(g, mixed, (CHANNELS, CHANNELS)), x])
    norm = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)])
    x = g.quantize(g.add("Add", [linear(g, g.quantize(norm, 0.03, 125), (CHANNELS, CHANNELS)), x]), 0.05, 120)
    x = g.add("Transpose", [g.add("Reshape", [x, sizes(g, image, 4, 16, -1)])], perm=[0, 3, 2, 1])
    x = g.add("Transpose", [g.add("Reshape", [x, g.constant(np.array([-1, 4, 2, 2]))])], perm=[0, 2, 1, 3])
    x = g.add("Concat", [g.add("Reshape", [x, g.constant(np.array([-1, CHANNELS, 8, 8]))]), image], axis=1)
    x = g.quantize(g.layer("Conv", g.quantize(x, 0.05, 120), (CHANNELS, 2 * CHANNELS, 1, 1), 0.05), 0.2, 120)
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x, [2, 3]), opset=20), g)
    assert kinds.count(Attention) == 1


def test_joined_floats(tmp_path: Path) -> None:
    """DINOv2: the class token beside the mean of the others, and a gain per channel."""
    g = Graph()
    x = linear(g, patches(g), (CHANNELS, CHANNELS))
    x = g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)])
    first = g.add("Gather", [x, g.constant(np.array(0))], axis=1)
    others = g.add("Slice", [x, *(g.constant(np.array([n])) for n in (1, 99, 1))])
    both = g.add("Concat", [first, g.add("ReduceMean", [others, g.constant(np.array([1]))], keepdims=0)], axis=1)
    both = g.quantize(g.add("Mul", [both, weights(g, 2 * CHANNELS)]), 0.05, 120)
    g.flat = g.layer("Gemm", both, (5, 2 * CHANNELS), 0.05, transB=1)
    whole(g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20), g)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_pooled_value_is_taken_by_indices(dynamic: bool, tmp_path: Path) -> None:
    """torch's as_strided: a Gather of all samples' values by indices that count the samples."""
    g = Graph()
    x = g.add("LayerNormalization", [patches(g), weights(g, CHANNELS), weights(g, CHANNELS)])
    x = g.add("Unsqueeze", [g.add("Transpose", [x], perm=[0, 2, 1]), g.constant(np.array([-2]))])
    mean = g.add("ReduceMean", [x, g.constant(np.array([-1, -2]))])
    count = g.add("Gather", [g.add("Shape", ["image"]), g.constant(np.array(0))])
    places = g.add("Range", [g.constant(np.array(0)), count, g.constant(np.array(1))])
    step = CHANNELS if dynamic else CHANNELS + 1
    places = g.add("Mul", [g.add("Reshape", [places, g.constant(np.array([-1, 1]))]), g.constant(np.array(step))])
    places = g.add("Add", [places, g.constant(np.arange(CHANNELS)[None])])
    x = g.add("Gather", [g.add("Reshape", [mean, g.constant(np.array([-1]))]), places])
    g.flat = g.layer("Gemm", g.quantize(x, 0.03, 125), (5, CHANNELS), 0.03, transB=1)
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20)
    if dynamic:
        whole(path, g)
        return
    with pytest.raises(RequestError, match="no constant indices"):
        image_program(io.load(path))


@pytest.mark.parametrize("same", [True, False])
def test_tokens_of_a_fixed_batch(same: bool, tmp_path: Path) -> None:
    """A class token for each of two samples is that of one, if both have the same."""
    g = Graph()
    token = np.repeat(g.rng.normal(0, 1, (1, 1, CHANNELS)), 2, 0).astype(np.float32)
    token[1] += 0 if same else 1
    x = g.add("Concat", [g.constant(token), patches(g)], axis=1)
    x = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    g.flat = g.layer("Gemm", g.add("Gather", [x, g.constant(np.array(0))], axis=1), (5, CHANNELS), 0.03, transB=1)
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20, batch=2)
    if not same:
        with pytest.raises(RequestError, match="Concat"):
            image_program(io.load(path))
        return
    samples = g.rng.normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    outputs = np.stack([reference.run(image_program(io.load(path)), feed) for feed in samples])
    np.testing.assert_allclose(outputs, results(path, samples), atol=0.05)


def test_a_reshape_that_joins_samples_is_refused(tmp_path: Path) -> None:
    g = Graph()
    x = patches(g)
    count = g.add("Gather", [g.add("Shape", [x]), g.constant(np.array([0]))])
    many = g.add("Mul", [count, g.constant(np.array([16 * CHANNELS]))])
    x = g.add("Reshape", [x, g.add("Concat", [g.constant(np.array([1])), many], axis=0)])
    g.flat = g.layer("Gemm", x, (5, 16 * CHANNELS), 0.03, transB=1)
    with pytest.raises(RequestError, match="Reshape"):
        image_program(io.load(g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=20)))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_channels_as_blocks_of_pixels(mode: str, tmp_path: Path) -> None:
    """Layers on pixels of half the size, and their channels as pixels again."""
    g = Graph()
    x = g.add(
        "SpaceToDepth",
        [g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (8, 3, 1, 1), 0.02), 0.03, 120)],
        blocksize=2,
    )
    x = g.quantize(g.layer("Conv", x, (32, 32, 1, 1), 0.03), 0.05, 120)
    x = g.quantize(g.layer("Conv", g.add("DepthToSpace", [x], blocksize=2, mode=mode), (4, 8, 1, 1), 0.05), 0.1, 120)
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], x, opset=20), g)
    assert kinds.count(Gathering) == 2


def test_larger_pixels_are_joined_with_others(tmp_path: Path) -> None:
    """U-Net's: phases of pixels side by side beside the map of the encoder, and a larger image as the output."""
    g = Graph()
    first = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (8, 3, 1, 1), 0.02), 0.05, 120)
    small = g.quantize(g.layer("Conv", first, (32, 8, 2, 2), 0.05, strides=[2, 2]), 0.05, 110)
    x = g.add("Concat", [first, g.add("DepthToSpace", [small], blocksize=2)], axis=1)
    x = g.layer("Conv", g.quantize(x, 0.06, 118), (12, 16, 1, 1), 0.06)
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.add("DepthToSpace", [x], blocksize=2), opset=20)
    kinds = whole(path, g)
    assert kinds.count(Gathering) == 2


@pytest.mark.parametrize("kind", ["Transpose", "Slice"])
def test_an_output_in_another_order(kind: str, tmp_path: Path) -> None:
    g = Graph()
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (8, 3, 1, 1), 0.02), 0.05, 120)
    bounds = [g.constant(np.array([bound])) for bound in (3, 12, 2)]
    x = g.add("Transpose", [x], perm=[0, 1, 3, 2]) if kind == "Transpose" else g.add("Slice", [x, *bounds])
    assert whole(g.save(tmp_path / "m.onnx", [3, 16, 16], x, opset=20), g).count(Gathering) == 1


def test_a_sum_of_tokens_in_rows_of_another_length(tmp_path: Path) -> None:
    """Two grids of sixteen tokens: images of 4 x 4 and of 8 x 2."""
    g = Graph()
    tall = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 8), 0.02, strides=[2, 8])
    tall = g.add("Reshape", [g.quantize(tall, 0.03, 120), g.constant(np.array([0, CHANNELS, 16]))])
    other = linear(g, g.add("Transpose", [tall], perm=[0, 2, 1]), (CHANNELS, CHANNELS))
    total = g.add("Add", [linear(g, patches(g), (CHANNELS, CHANNELS)), other])
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, total, [1]), opset=20), g)
    assert kinds.count(Gathering) == 1


@pytest.mark.parametrize(("key", "value", "heads"), [(8, 16, 2), (16, 8, 2), (5, 10, 2), (16, 16, 2), (8, 16, 1)])
def test_attention_of_pixels_whose_tokens_are_last(key: int, value: int, heads: int, tmp_path: Path) -> None:
    """YOLO11's: values times turned weights, with keys of fewer channels, beside a depthwise convolution of values.

    One head, as SHViT's, has no axis.
    """
    g, axes = Graph(), [heads] if heads > 1 else []
    turned = [*range(len(axes) + 1), len(axes) + 2, len(axes) + 1]
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (24, 3, 2, 2), 0.02, strides=[2, 2]), 0.05, 120)
    both = g.quantize(g.layer("Conv", x, (heads * (2 * key + value), 24, 1, 1), 0.05), 0.05, 118)
    both = g.add("Reshape", [both, g.constant(np.array([-1, *axes, 2 * key + value, 64]))])
    split = f"v{len(g.nodes)}"
    parts = [f"{split}{part}" for part in "qkv"]
    g.nodes.append(
        helper.make_node("Split", [both, g.constant(np.array([key, key, value]))], parts, axis=len(axes) + 1)
    )
    scores = g.add("MatMul", [g.add("Transpose", [parts[0]], perm=turned), parts[1]])
    weight = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(key**-0.5))])], axis=-1)
    y = g.add("MatMul", [parts[2], g.add("Transpose", [weight], perm=turned)])
    size = g.constant(np.array([-1, heads * value, 8, 8]))
    y, v = g.add("Reshape", [y, size]), g.quantize(g.add("Reshape", [parts[2], size]), 0.05, 118)
    place = g.layer("Conv", v, (heads * value, 1, 3, 3), 0.05, group=heads * value, pads=[1, 1, 1, 1])
    y = g.add("Add", [y, g.quantize(place, 0.05, 120)])
    x = g.quantize(g.layer("Conv", g.quantize(y, 0.05, 120), (8, heads * value, 1, 1), 0.05), 0.05, 120)
    assert whole(g.save(tmp_path / "m.onnx", [3, 16, 16], x, opset=20), g).count(Attention) == 1


def test_attention_whose_heads_are_rows_of_tokens(tmp_path: Path) -> None:
    """Tokens cut into heads without a Transpose: queries, keys and values are gathered; queries are scaled before."""
    g = Graph()
    x, shape = patches(g), g.constant(np.array([-1, HEADS, 16, SIZE]))
    q, k, v = (g.add("Reshape", [linear(g, x, (CHANNELS, CHANNELS)), shape]) for _ in "qkv")
    q = g.quantize(g.add("Mul", [q, g.constant(np.float32(0.25))]), 0.005, 128)
    k, v = (g.quantize(value, 0.02, 128) for value in (k, v))
    scores = g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 1, 3, 2])])
    weight = g.quantize(g.add("Softmax", [scores], axis=-1), 1 / 255, 0)
    y = g.add("Transpose", [g.quantize(g.add("MatMul", [weight, v]), 0.02, 128)], perm=[0, 2, 1, 3])
    y = g.add("Reshape", [y, g.constant(np.array([-1, 16, CHANNELS]))])
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, y, [1]), opset=20))
    assert kinds.count(Attention) == 1


@pytest.mark.parametrize("form", ["halves", "counted", "pairs"])
def test_registers_and_rotated_heads_are_whole(form: str, tmp_path: Path) -> None:
    """DINOv3: registers, and halves of the heads of patches that are rotated by their places; EVA02 rotates pairs."""
    g = Graph()
    x = g.add("Concat", [weights(g, 1, 1, CHANNELS), patches(g)], axis=1)
    cut = lambda x, low, high, axis: g.add(  # noqa: E731
        "Slice", [x, *(g.constant(np.array([n])) for n in (low, high, axis))]
    )
    x = g.add("Add", [x, weights(g, 1, 17, CHANNELS, mean=0)])
    x = g.add("Concat", [cut(x, 0, 1, 1), weights(g, 1, 2, CHANNELS), cut(x, 1, 99, 1)], axis=1)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    shape = g.constant(np.array([-1, 19, HEADS, SIZE]))
    q, k, v = (
        g.add("Transpose", [g.add("Reshape", [linear(g, norm, (CHANNELS, CHANNELS)), shape])], perm=[0, 2, 1, 3])
        for _ in "qkv"
    )
    angles = g.rng.uniform(0, np.pi, (16, SIZE)).astype(np.float32)
    cosines, sines = g.constant(np.cos(angles)), g.constant(np.sin(angles))

    def rotated(heads: str) -> str:
        count = g.add("Gather", [g.add("Shape", [heads]), g.constant(np.array([2]))])
        first = g.add("Sub", [count, g.constant(np.array([16]))]) if form == "counted" else g.constant(np.array([3]))
        tokens = g.add("Slice", [heads, first, *(g.constant(np.array([n])) for n in (99, 2))])
        if form == "pairs":
            parts = [g.add("Slice", [tokens, *(g.constant(np.array([n])) for n in (i, 99, 3, 2))]) for i in (1, 0)]
            parts[0] = g.add("Neg", parts[:1])
            pairs = g.add("Concat", [g.add("Unsqueeze", [part, g.constant(np.array([4]))]) for part in parts], axis=-1)
            turned = g.add("Reshape", [pairs, g.constant(np.array([-1, HEADS, 16, SIZE]))])
        else:
            parts = [g.add("Neg", [cut(tokens, SIZE // 2, 99, 3)]), cut(tokens, 0, SIZE // 2, 3)]
            turned = g.add("Concat", parts, axis=-1)
        terms = g.add("Mul", [tokens, cosines]), g.add("Mul", [turned, sines])
        return g.add("Concat", [cut(heads, 0, 3, 2), g.add("Add", terms)], axis=-2)

    scores = g.add("MatMul", [rotated(q), g.add("Transpose", [rotated(k)], perm=[0, 1, 3, 2])])
    share = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(0.02))])], axis=-1)
    rows = g.add("Transpose", [g.add("MatMul", [share, v])], perm=[0, 2, 1, 3])
    rows = g.quantize(g.add("Reshape", [rows, g.constant(np.array([0, 0, -1]))]), 0.02, 128)
    x = g.add("Add", [linear(g, rows, (CHANNELS, CHANNELS)), x])
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x, [1]), opset=20, batch=1))
    assert kinds.count(Attention) == 1


@pytest.mark.parametrize("form", ["quantized", "normalized", "convolved"])
def test_attention_of_any_values(form: str, tmp_path: Path) -> None:
    """Queries of a layer that were quantized before their heads, or of a layer on several pixels; norms of two parts."""
    g = Graph()
    x = patches(g)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    q, k, v = (linear(g, norm, (CHANNELS, CHANNELS)) for _ in range(3))
    if form == "quantized":
        q = g.quantize(q, 0.05, 120)
    elif form == "normalized":
        q, v = (g.add("LayerNormalization", [value, weights(g, CHANNELS), weights(g, CHANNELS)]) for value in (q, v))
    else:
        q = g.add("Reshape", [g.add("Transpose", [norm], perm=[0, 2, 1]), g.constant(np.array([0, CHANNELS, 4, 4]))])
        q = g.layer("Conv", q, (CHANNELS, CHANNELS, 3, 3), 0.03, pads=[1] * 4)
        q = g.add("Transpose", [g.add("Reshape", [q, g.constant(np.array([0, CHANNELS, 16]))])], perm=[0, 2, 1])
    size = 8  # of a head, less than its room
    split = lambda x, order: g.add(  # noqa: E731
        "Transpose", [g.add("Reshape", [x, g.constant(np.array([0, 0, CHANNELS // size, size]))])], perm=order
    )
    scores = g.add("MatMul", [split(q, [0, 2, 1, 3]), split(k, [0, 2, 3, 1])])
    share = g.add("Softmax", [g.add("Mul", [scores, g.constant(np.float32(0.02))])], axis=-1)
    rows = g.add("Transpose", [g.add("MatMul", [share, split(v, [0, 2, 1, 3])])], perm=[0, 2, 1, 3])
    rows = g.quantize(g.add("Reshape", [rows, g.constant(np.array([0, 0, -1]))]), 0.02, 128)
    x = g.add("Add", [linear(g, rows, (CHANNELS, CHANNELS)), x])
    kinds = whole(g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x, [1]), opset=20), g)
    assert kinds.count(Attention) == 1
    assert (Concatenation in kinds) == (form == "normalized")


def test_a_convolution_over_channels(tmp_path: Path) -> None:
    """ECA: channels of one pixel as a row, of which neighbours are weighed."""
    g = Graph()
    x = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2]), 0.03, 120
    )
    mean = g.quantize(g.add("GlobalAveragePool", [x]), 0.02, 128)
    row = g.add("Reshape", [mean, g.constant(np.array([-1, 1, 1, CHANNELS]))])
    gate = g.add("Sigmoid", [g.quantize(g.layer("Conv", row, (1, 1, 1, 3), 0.02, pads=[0, 1, 0, 1]), 0.02, 128)])
    gate = g.add("Reshape", [gate, g.constant(np.array([-1, CHANNELS, 1, 1]))])
    y = g.quantize(g.add("Mul", [x, gate]), 0.02, 128)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.layer("Conv", y, (4, CHANNELS, 1, 1), 0.02)))
