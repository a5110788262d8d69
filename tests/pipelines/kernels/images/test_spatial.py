"""Interpolation, products and normalization of groups: the reference's bits everywhere, close to ONNX Runtime's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, linear, results, weights
from helpers.token_graphs import CHANNELS, HEADS, check, patches
from onnx import TensorProto

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images import reference
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import (
    Attention,
    ChannelScale,
    Dequantize,
    FloatClip,
    FloatCopy,
    FloatProduct,
    FloatSum,
    GroupNormalization,
    Interpolation,
    Normalization,
    Operand,
    Pixels,
    Resampling,
    ResponseGate,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.mark.parametrize("channels", [5, 24, 80])
def test_every_step(channels: int) -> None:
    """Bytes and floats read and written, groups of one channel, some and all, and one pixel times all."""
    rng = np.random.default_rng(channels)
    byte = lambda tensor: Operand(tensor, 0.02 + 0.01 * tensor, 90 + tensor)  # noqa: E731
    gain, bias = (rng.normal(1, 0.5, channels).astype(np.float32) for _ in range(2))
    shape, wide = (4, 6, channels), (7, 5, channels)
    taps = [
        (rng.integers(0, size, (count, most)), rng.normal(0, 1, (count, most)).astype(np.float32))
        for size, count, most in ((4, 7, 3), (6, 5, 1))
    ]
    norm = lambda x, to, groups: GroupNormalization(x, to, gain, bias, groups, 1e-5)  # noqa: E731
    pixel = (np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(byte(0), Operand(1)),
        norm(byte(0), byte(2), 1),
        norm(Operand(1), Operand(3), channels),
        Interpolation(byte(2), byte(4), *taps[0], *taps[1]),
        Interpolation(Operand(3), Operand(5), *taps[0], *taps[1]),
        FloatProduct(byte(4), Operand(5), Operand(6)),
        Interpolation(byte(4), byte(7), *pixel, *pixel),
        Interpolation(Operand(5), Operand(8), *pixel, *pixel),
        FloatProduct(Operand(6), byte(7), byte(9)),
        FloatProduct(Operand(6), Operand(8), Operand(10)),
        Normalization(Operand(10), Operand(11), gain, None, 1e-6),
        FloatSum(Operand(11), byte(9), byte(12)),
        Dequantize(12, 0.25, 3),
    ]
    tensors = [shape] * 4 + [wide] * 3 + [(1, 1, channels)] * 2 + [wide] * 4
    made = program(shape, tensors, steps, 35 * channels, floats=frozenset({1, 3, 5, 6, 8, 10, 11}))
    same_bits(made, rng.integers(0, 256, (2, *shape), dtype=np.uint8))
    for step in (
        FloatSum(byte(4), Operand(8), Operand(6)),
        FloatProduct(Operand(8), byte(4), Operand(6)),
        norm(byte(2), Operand(3), channels - 1),
        Interpolation(byte(2), byte(4), *taps[1], *taps[0]),
    ):
        with pytest.raises(RequestError):
            program(shape, tensors, [*steps[:9], step, Dequantize(9, 1, 0)], 1, floats=frozenset({1, 3, 5, 6, 8}))


def image(g: Graph) -> str:
    """Channels of an image 8 x 8, quantized."""
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2])
    return g.quantize(x, 0.03, 120)


def head(g: Graph, x: str, channels: int = CHANNELS) -> str:
    """A layer whose results are the network's."""
    return g.quantize(g.layer("Conv", g.quantize(x, 0.03, 120), (4, channels, 1, 1), 0.03), 0.1, 120)


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize(
    ("mode", "transform", "scale"),
    [("linear", "half_pixel", 2.0), ("linear", "align_corners", 0.75), ("cubic", "half_pixel", 1.5)],
)
def test_resizing(mode: str, transform: str, scale: float, floats: bool, tmp_path: Path) -> None:
    """Up and down, by sizes that depend on the number of samples or by scales, of floats and of bytes."""
    g = Graph()
    x = image(g)
    arguments = ["", g.constant(np.array([1, 1, scale, scale], np.float32))]
    if floats:
        x = g.add("Add", [x, g.layer("Conv", x, (CHANNELS, CHANNELS, 1, 1), 0.03)])
        count = g.add("Slice", [g.add("Shape", [x]), *(g.constant(np.array([n])) for n in (0, 2, 0))])
        to = g.constant(np.array([int(8 * scale)] * 2))
        arguments = ["", "", g.add("Concat", [count, to], axis=0)]
    x = g.add("Resize", [x, *arguments], mode=mode, coordinate_transformation_mode=transform)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x), opset=20))
    assert kinds.count(Interpolation) == 1
    assert Resampling not in kinds


@pytest.mark.parametrize("kind", ["group", "exported", "instance"])
def test_normalization_of_groups(kind: str, tmp_path: Path) -> None:
    """GroupNormalization, the form of older exporters, and InstanceNormalization."""
    g = Graph()
    x = image(g)
    if kind == "group":
        x = g.add("GroupNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)], num_groups=4)
    elif kind == "exported":
        ones, zeros = (g.constant(np.full(4, value, np.float32)) for value in (1, 0))
        x = g.add("InstanceNormalization", [g.add("Reshape", [x, g.constant(np.array([0, 4, -1]))]), ones, zeros])
        x = g.add("Reshape", [x, g.constant(np.array([-1, CHANNELS, 8, 8]))])
        x = g.add("Add", [g.add("Mul", [x, weights(g, CHANNELS, 1, 1)]), weights(g, CHANNELS, 1, 1, mean=0)])
    else:
        x = g.add("InstanceNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x), opset=21))
    assert kinds.count(GroupNormalization) == 1


@pytest.mark.parametrize("pixel", [True, False])
def test_products_of_floats(pixel: bool, tmp_path: Path) -> None:
    """Gated layers, and a gate per channel."""
    g = Graph()
    x = image(g)
    a, b = (g.layer("Conv", x, (CHANNELS, CHANNELS, 1, 1), 0.03) for _ in range(2))
    if pixel:
        b = g.add("ReduceMean", [b, g.constant(np.array([2, 3]))])
    x = g.add("Mul", [b, a])
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x), opset=20))
    assert kinds.count(FloatProduct) == 1


@pytest.mark.parametrize("form", ["joined", "heads", "causal", "grouped"])
def test_attention_of_opset_23(form: str, tmp_path: Path) -> None:
    """Attention as one operator, of tokens or of heads, masked, and keys for several queries, behind an RMS norm."""
    g = Graph()
    norm = g.add("RMSNormalization", [patches(g), weights(g, CHANNELS)], epsilon=1e-5)
    norm = g.quantize(g.add("Mul", [norm, weights(g, CHANNELS)]), 0.03, 125)
    few = CHANNELS // 2 if form == "grouped" else CHANNELS
    parts = [linear(g, norm, (CHANNELS, size)) for size in (CHANNELS, few, few)]
    more: dict[str, Any] = {"scale": 0.02}
    if form in ("joined", "grouped"):
        more |= {"q_num_heads": HEADS, "kv_num_heads": 1 if form == "grouped" else HEADS}
    else:
        shape = g.constant(np.array([0, 0, HEADS, -1]))
        parts = [g.add("Transpose", [g.add("Reshape", [part, shape])], perm=[0, 2, 1, 3]) for part in parts]
    if form == "heads":
        parts.append(g.constant(np.tril(np.ones((16, 16), np.bool_), 3)))
    x = g.add("Attention", parts, **more, **({"is_causal": 1} if form == "causal" else {}))
    if form in ("heads", "causal"):
        x = g.add("Reshape", [g.add("Transpose", [x], perm=[0, 2, 1, 3]), g.constant(np.array([0, 0, -1]))])
    x = linear(g, g.quantize(x, 0.02, 120), (CHANNELS, 5))
    g.flat = g.add("ReduceMean", [g.quantize(x, 0.02, 120), g.constant(np.array([1]))], keepdims=0)
    g.flat = g.quantize(g.flat, 0.01, 120)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat, opset=23))
    assert kinds.count(Attention) == 1
    assert ChannelScale not in kinds  # in the norm before it


@pytest.mark.parametrize("kind", ["channels", "crop", "groups"])
def test_near_misses_are_refused(kind: str, tmp_path: Path) -> None:
    g = Graph()
    x = image(g)
    if kind == "groups":  # of rows
        x = g.add("Reshape", [g.add("Transpose", [x], perm=[0, 2, 1, 3]), g.constant(np.array([0, 4, -1]))])
        x = g.add("InstanceNormalization", [x, *(g.constant(np.ones(4, np.float32)) for _ in range(2))])
        x = g.add("Reshape", [x, g.constant(np.array([-1, CHANNELS, 8, 8]))])
    else:
        scales = g.constant(np.array([1, 2 if kind == "channels" else 1, 2, 2], np.float32))
        roi = g.constant(np.array([0, 0, 0, 0, 1, 1, 0.5, 0.5], np.float32)) if kind == "crop" else ""
        transform = "tf_crop_and_resize" if kind == "crop" else "half_pixel"
        x = g.add("Resize", [x, roi, scales], mode="linear", coordinate_transformation_mode=transform)
    path = g.save(
        tmp_path / "m.onnx", [3, 16, 16], head(g, x, 2 * CHANNELS if kind == "channels" else CHANNELS), opset=20
    )
    if kind != "channels":  # which onnxruntime does not resize
        assert results(path, np.zeros((1, 3, 16, 16), np.float32)).size
    with pytest.raises(RequestError, match="Resize|InstanceNormalization"):
        image_program(io.load(path))


def test_resizing_to_the_same_size_is_nothing(tmp_path: Path) -> None:
    g = Graph()
    x = g.add("Resize", [image(g), "", g.constant(np.ones(4, np.float32))], mode="cubic")
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], head(g, x), opset=20)
    made, sample = image_program(io.load(path)), g.rng.normal(0, 1, (3, 16, 16)).astype(np.float32)
    assert not any(isinstance(step, Interpolation | Resampling) for step in made.steps)
    np.testing.assert_allclose(reference.run(made, sample), results(path, sample[None]).ravel(), atol=0.101)


@pytest.mark.parametrize("outputs", [1, 2])
def test_float_results_of_several_pixels(outputs: int, tmp_path: Path) -> None:
    """A segmentation network whose classes are interpolated last, and a further layer's results."""
    g = Graph()
    x = image(g)
    classes = g.layer("Conv", x, (5, CHANNELS, 1, 1), 0.03)
    larger = g.add("Resize", [classes, "", g.constant(np.array([1, 1, 2, 2], np.float32))], mode="linear")
    more = [classes][: outputs - 1]
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], larger, TensorProto.FLOAT, *more, opset=20)
    made, sample = image_program(io.load(path)), g.rng.normal(0, 1, (3, 16, 16)).astype(np.float32)
    assert not made.remainder
    wanted = results(path, sample[None])
    actual = reference.run(made, sample)
    np.testing.assert_allclose(actual[: wanted.size], wanted.ravel(), rtol=1e-3, atol=1e-3)
    assert len(actual) == wanted.size + (outputs - 1) * 5 * 8 * 8


@pytest.mark.parametrize("last", [True, False])
def test_a_global_response_normalization_is_whole(last: bool, tmp_path: Path) -> None:
    """As ConvNeXtV2 has it, between int8 layers, over [n, H, W, C] and [n, C, H, W]."""
    g = Graph(5)
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 4, 4), 0.02, strides=[4, 4])
    x = g.quantize(x, 0.03, 120)
    x = g.add("Transpose", [x], perm=[0, 2, 3, 1]) if last else x
    pixels, channel, shape = ([1, 2], -1, (1, 1, 1, CHANNELS)) if last else ([2, 3], 1, (1, CHANNELS, 1, 1))
    roots = g.add("ReduceL2", [x], axes=pixels)
    mean = g.add("Add", [g.add("ReduceMean", [roots], axes=[channel]), g.constant(np.float32(1e-6))])
    gated = g.add("Mul", [x, g.add("Div", [roots, mean])])
    affine = g.add("Add", [g.add("Mul", [weights(g, *shape), gated]), weights(g, *shape, mean=0)])
    y = g.quantize(g.add("Add", [affine, x]), 0.06, 120)
    y = g.add("Transpose", [y], perm=[0, 3, 1, 2]) if last else y
    y = g.quantize(g.layer("Conv", y, (8, CHANNELS, 1, 1), 0.06), 0.05, 120)
    assert ResponseGate in check(g, g.save(tmp_path / "n.onnx", [3, 16, 16], y))


def test_the_gate_of_a_response_normalization_has_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    shape, byte = (5, 7, 21), Operand(0, 0.02, 120)
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(byte, Operand(1)),
        ResponseGate(byte, Operand(2), 1e-6),
        ResponseGate(Operand(1), Operand(3), 0.5),
        FloatSum(Operand(2), Operand(3), Operand(4)),
        Dequantize(4, 1.0, 0),
    ]
    made = program(shape, [shape, shape, *[(1, 1, 21)] * 3], steps, 21, floats=frozenset({1, 2, 3, 4}))
    same_bits(made, rng.integers(0, 256, (2, *shape), dtype=np.uint8))
    with pytest.raises(RequestError):
        program(shape, [shape, shape], [*steps[:2], ResponseGate(byte, Operand(1), 1e-6)], 735, floats=frozenset({1}))


@pytest.mark.parametrize("bounds", [(0.0, np.inf), (-0.5, 0.75), (0.25, 6.0)])
def test_bounded_floats_have_the_same_bits(bounds: tuple[float, float]) -> None:
    shape, byte = (5, 7, 21), Operand(0, 0.02, 120)
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatClip(byte, Operand(1), *bounds),
        FloatClip(Operand(1), Operand(2, 0.01, 60), *bounds),
        FloatSum(Operand(1), Operand(2, 0.01, 60), Operand(3)),
        Dequantize(3, 1.0, 0),
    ]
    made = program(shape, [shape] * 4, steps, 735, floats=frozenset({1, 3}))
    same_bits(made, np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8))


def test_a_residual_of_floats_with_bounds(tmp_path: Path) -> None:
    """The result of a Relu behind a normalization is read as floats by a sum and as bytes by a layer (style transfer)."""
    g = Graph(6)
    x = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 4, 4), 0.02, strides=[4, 4]), 0.03, 120
    )
    x = g.add("Relu", [g.add("InstanceNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])])
    y = g.layer("Conv", g.quantize(x, 0.02, 0), (CHANNELS, CHANNELS, 3, 3), 0.02, pads=[1, 1, 1, 1])
    y = g.add("InstanceNormalization", [y, weights(g, CHANNELS), weights(g, CHANNELS, mean=0)])
    y = g.quantize(g.add("Add", [x, y]), 0.04, 100)
    y = g.quantize(g.layer("Conv", y, (8, CHANNELS, 1, 1), 0.04), 0.05, 120)
    assert FloatClip in check(g, g.save(tmp_path / "n.onnx", [3, 16, 16], y))
