"""Float steps between int8 layers: every instruction set returns the reference's bits, close to ONNX Runtime's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, gelu, linear, results, weights
from helpers.token_graphs import check
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images import native, reference
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps import (
    ChannelScale,
    Convolution,
    Dequantize,
    FloatActivation,
    FloatCopy,
    FloatDepthwise,
    FloatMean,
    FloatSum,
    Normalization,
    Operand,
    Pixels,
)
from pipelines.kernels.images.steps.activation import activation_table, exact

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@settings(max_examples=25)
@given(st.data())
def test_every_float_step(data: st.DataObject) -> None:
    """Any number of channels, bytes and floats read and written, and a depthwise convolution of any shape."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, channels = np.random.default_rng(draw(0, 2**32)), draw(5, 90)
    shape, kernel = (draw(1, 9), draw(1, 11)), (draw(1, 7), draw(1, 7))
    strides, dilations, pads = (draw(1, 2), draw(1, 3)), (draw(1, 2), draw(1, 2)), tuple(draw(0, 3) for _ in range(4))
    counts = windows(shape, kernel, strides, pads, dilations)
    if min(counts) < 1:
        return
    gain, bias = (rng.normal(1, 0.5, channels).astype(np.float32) for _ in range(2))
    taps = rng.normal(0, 0.3, (*kernel, channels)).astype(np.float32)
    byte = lambda tensor: Operand(tensor, float(rng.uniform(0.01, 0.05)), draw(0, 255))  # noqa: E731
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(byte(0), Operand(1)),
        Normalization(byte(0), Operand(2), gain, bias, 1e-6),
        FloatSum(Operand(1), byte(0), byte(3)),
        FloatSum(byte(3), Operand(2), Operand(4)),
        ChannelScale(Operand(4), Operand(5), gain[None], bias[None]),
        FloatActivation(Operand(5), byte(6), data.draw(st.sampled_from(["gelu", "gelu_tanh", "swish"]))),
        FloatCopy(byte(6), Operand(7)),
        FloatDepthwise(7, 8, taps, bias, strides, pads, dilations),  # type: ignore[arg-type]
        FloatMean(Operand(8), Operand(9)),
        FloatMean(byte(6), Operand(10)),
        FloatSum(Operand(9), Operand(10), Operand(11)),
        Normalization(Operand(11), byte(12), bias, gain, 1e-5),
        Dequantize(12, 0.25, 3),
    ]
    tensors = [(*shape, channels)] * 8 + [(*counts, channels)] + [(1, 1, channels)] * 4
    floats = frozenset({1, 2, 4, 5, 7, 8, 9, 10, 11})
    same_bits(
        program((*shape, channels), tensors, steps, channels, floats=floats),
        rng.integers(0, 256, (2, *shape, channels), dtype=np.uint8),
    )


def test_rows_pass_through_layers_in_blocks() -> None:
    """A block of ConvNeXt on a map that is larger than a block of rows, from a layer with padding and to another one."""
    rng, x, wide = np.random.default_rng(0), 40, 72
    one, taps = np.ones(x, np.float32), rng.normal(0, 0.3, (3, 3, x)).astype(np.float32)
    weight = lambda *shape: rng.integers(-128, 128, shape).astype(np.int8)  # noqa: E731
    first = Convolution(
        3, 4, weight(wide, 1, 1, x), np.zeros(wide, np.int32), np.full(wide, 1e-4, np.float32), floats=True
    ).activated("gelu", 0.02, 9, 4)
    assert first is not None
    second = (weight(x, 1, 1, wide), np.zeros(x, np.int32), np.full(x, 1e-4, np.float32))
    steps = [
        Pixels(0, last=True),
        FloatCopy(Operand(0, 0.02, 120), Operand(1)),
        FloatDepthwise(1, 2, taps, one, (1, 1), (1, 1, 1, 1), (1, 1)),
        Normalization(Operand(2), Operand(3, 0.03, 128), one, one, 1e-6),
        first,
        Convolution(4, 5, *second, floats=True, residual=1),
        FloatDepthwise(5, 6, taps, one, (2, 2), (1, 1, 0, 0), (1, 1)),
        FloatMean(Operand(6), Operand(7)),
        FloatCopy(Operand(7), Operand(8, 0.02, 120)),
        Dequantize(8, 1, 0),
    ]
    shape = (70, 52)
    tensors = [(*shape, x)] * 4 + [(*shape, wide), (*shape, x), (35, 26, x)] + [(1, 1, x)] * 2
    made = program((*shape, x), tensors, steps, x, floats=frozenset({1, 2, 5, 6, 7}))
    same_bits(made, rng.integers(0, 256, (2, *shape, x), dtype=np.uint8))


def test_sums_lie_over_summands_that_are_not_read_again() -> None:
    """A summand that is read again stays; the sum that reads it last may take its memory."""
    rng, x = np.random.default_rng(0), 40
    layer = lambda out: Convolution(  # noqa: E731
        0,
        out,
        rng.integers(-128, 128, (x, 1, 1, x)).astype(np.int8),
        np.zeros(x, np.int32),
        np.full(x, 1e-4, np.float32),
        floats=True,
        residual=1,
    )
    steps = [
        Pixels(0, last=True),
        FloatCopy(Operand(0, 0.02, 120), Operand(1)),
        layer(2),
        layer(3),
        FloatSum(Operand(2), Operand(3), Operand(4)),
        FloatSum(Operand(3), Operand(4), Operand(5)),
        FloatSum(Operand(5), Operand(4), Operand(6, 0.05, 120)),
        Dequantize(6, 1, 0),
    ]
    made = program((5, 6, x), [(5, 6, x)] * 7, steps, 5 * 6 * x, floats=frozenset({1, 2, 3, 4, 5}))
    same_bits(made, rng.integers(0, 256, (2, 5, 6, x), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swish"])
@pytest.mark.parametrize("scale", [0.003, 0.0124, 0.03, 0.4])
def test_activations_of_sums_are_within_a_rounding_of_the_exact_ones(kind: str, scale: float) -> None:
    """Layers of few and many outputs, with sums on both sides of what 16 bits hold."""
    for outputs, zero in ((16, 0), (40, 87), (64, 255), (130, 14)):
        rng, x = np.random.default_rng(outputs), 12
        if kind == "swish" and scale < 0.01:
            assert activation_table(kind, scale, zero) is None
            continue
        weight = rng.integers(-128, 128, (outputs, 1, 1, x)).astype(np.int8)
        bias = rng.integers(-(2**15), 2**15, outputs).astype(np.int32)
        scales = (scale * 10 ** rng.uniform(-4, 0, outputs)).astype(np.float32)
        gain = rng.uniform(0.4, 2, outputs).astype(np.float32) if zero % 2 else np.ones(outputs, np.float32)
        layer = Convolution(0, 1, weight, bias, scales, floats=True).activated(
            kind, scale * float(gain.max()), zero, 1, gain if zero % 2 else None
        )
        assert layer is not None
        scale_of = gain / (scale * gain.max())
        made = program(
            (5, 7, x), [(5, 7, x), (5, 7, outputs)], [Pixels(0, last=True), layer, Dequantize(1, 1, 0)], 35 * outputs
        )
        samples = rng.integers(0, 256, (2, 5, 7, x), dtype=np.uint8)
        same_bits(made, samples)
        real = (samples[0].reshape(-1, x).astype(np.int64) @ weight[:, 0, 0].T + bias) * scales.astype(np.float64)
        wanted = np.clip(exact(kind, real.ravel()).reshape(-1, outputs) * scale_of + zero, 0, 255).ravel()
        output = reference.run(made, samples[0]).reshape(outputs, -1).T
        assert np.abs(output.ravel() - wanted).max() < 0.7
        assert np.square(output.ravel() - wanted).mean() < 1.03 / 12


def test_activations_that_16_bits_do_not_hold_stay_apart() -> None:
    assert activation_table("swish", 1e-4, 0) is activation_table("gelu", 0.0005, 0) is None
    one, ones = np.ones((1, 1, 1, 8), np.int8), np.ones(1, np.float32)
    assert Convolution(0, 1, one, np.zeros(1, np.int32), 1e5 * ones, floats=True).activated("gelu", 0.01, 3, 1) is None
    table = activation_table("gelu", 0.01, 3)
    assert table is not None
    assert activation_table("gelu", 0.01, 3, spread=17) is None
    for wrong in (
        {"activation": table, "gains": -np.ones(1, np.int16)},
        {"gains": np.ones(1, np.int16)},
        {"activation": replace(table, factor=1)},
        {"activation": replace(table, starts=np.full(65, 2**14, np.int16))},
        {"activation": table, "floats": True},
    ):
        with pytest.raises(RequestError):
            layer = Convolution(0, 1, one, np.zeros(1, np.int32), ones, **wrong)  # type: ignore[arg-type]
            floats = frozenset({1} if "floats" in wrong else ())
            steps = [Pixels(0, last=True), layer, Dequantize(1, 1, 0)]
            program((3, 4, 8), [(3, 4, 8), (3, 4, 1)], steps, 12, floats=floats)


def test_floats_and_bytes_are_told_apart() -> None:
    one, byte = np.ones(8, np.float32), Operand(0, 0.1, 3)
    sizes: dict[str, Any] = {"shape": (3, 4, 8), "tensors": [(3, 4, 8)] * 2, "results": 96}
    for floats, step in (
        ({1}, Normalization(byte, Operand(1, 0.1), one, one, 1e-6)),
        (set[int](), Normalization(byte, Operand(1), one, one, 1e-6)),
        (set[int](), FloatDepthwise(0, 1, np.ones((1, 1, 8), np.float32), one)),
        (set[int](), Normalization(byte, Operand(1, 0.1), one[:7], one, 1e-6)),
        (set[int](), FloatActivation(byte, Operand(1, 0.1), "tanh")),
        (set[int](), FloatCopy(Operand(0, -0.1), Operand(1, 0.1))),
    ):
        with pytest.raises(RequestError):
            program(steps=[Pixels(0, last=True), step, Dequantize(1, 1, 0)], floats=frozenset(floats), **sizes)


def convnext(last: bool, channels: int = 24) -> tuple[Graph, str]:
    """Two blocks as timm exports them, or, with layers of [n, H, W, C], as torchvision does, pooled and normalized."""
    g = Graph()
    x = g.quantize(
        g.layer("Conv", g.quantize("image", 0.02, 120), (channels, 3, 2, 2), 0.02, strides=[2, 2]), 0.03, 120
    )
    for _ in range(2):
        taps = [weights(g, channels, 1, 7, 7, mean=0.1), weights(g, channels)]
        deep = g.add("Conv", [x, *taps], group=channels, pads=[3] * 4)
        rows = g.add("Transpose", [deep], perm=[0, 2, 3, 1])
        rows = g.add("LayerNormalization", [rows, weights(g, channels), weights(g, channels, mean=0)], epsilon=1e-6)
        if last:
            wide = linear(g, g.quantize(rows, 0.03, 125), (channels, 4 * channels))
            back = linear(g, g.quantize(gelu(g, wide), 0.02, 10), (4 * channels, channels))
            back = g.add("Transpose", [back], perm=[0, 3, 1, 2])
            back = g.add("Mul", [weights(g, channels, 1, 1), back])
        else:
            y = g.quantize(g.add("Transpose", [g.quantize(rows, 0.03, 125)], perm=[0, 3, 1, 2]), 0.03, 125)
            wide = g.quantize(g.layer("Conv", y, (4 * channels, channels, 1, 1), 0.03), 0.05, 120)
            back = g.layer("Conv", g.quantize(gelu(g, wide), 0.02, 10), (channels, 4 * channels, 1, 1), 0.02)
            back = g.quantize(back, 0.05, 110)
        x = g.add("Add", [back, x])
    pooled = g.add("Transpose", [g.add("ReduceMean", [x, g.constant(np.array([2, 3]))], keepdims=1)], perm=[0, 2, 3, 1])
    pooled = g.add("LayerNormalization", [pooled, weights(g, channels), weights(g, channels)], epsilon=1e-6)
    flat = g.add(
        "Reshape",
        [g.quantize(g.add("Transpose", [pooled], perm=[0, 3, 1, 2]), 0.03, 110), g.constant(np.array([0, -1]))],
    )
    g.flat = g.layer("Gemm", flat, (5, channels), 0.03, transB=1)
    return g, g.flat


@pytest.mark.parametrize("last", [False, True])
def test_a_convnext_is_whole(last: bool, tmp_path: Path) -> None:
    g, out = convnext(last)
    path = g.save(tmp_path / "m.onnx", [3, 20, 16], out, opset=20)
    made = image_program(io.load(path))
    kinds = [type(step) for step in made.steps]
    assert not made.remainder
    assert (kinds.count(FloatDepthwise), kinds.count(Normalization), kinds.count(Convolution)) == (2, 3, 6)
    samples = g.rng.normal(0, 1, (2, 3, 20, 16)).astype(np.float32)
    outputs = np.stack([reference.run(made, sample) for sample in samples])
    for isa in extension.isas():
        assert np.array_equal(native.pack(made, isa).open()(samples), outputs)
    wanted = results(path, samples)
    assert np.square(outputs - wanted).sum() < 0.002 * np.square(wanted).sum()


@pytest.mark.parametrize("counts_pads", [0, 1])
@pytest.mark.parametrize(("stride", "pads"), [(1, [1, 1, 1, 1]), (2, [0, 1, 2, 1]), (2, [0, 0, 0, 0])])
def test_means_of_windows_of_floats(counts_pads: int, stride: int, pads: list[int], tmp_path: Path) -> None:
    g, channels = Graph(), 8
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (channels, 3, 1, 1), 0.02), 0.03, 120)
    normed = g.add("GroupNormalization", [x, weights(g, channels), weights(g, channels)], num_groups=1)
    more: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [stride] * 2, "pads": pads}
    pooled = g.add("AveragePool", [normed], count_include_pad=counts_pads, **more)
    scaled = g.add("Mul", [weights(g, channels, 1, 1), pooled])
    out = g.layer("Conv", g.quantize(scaled, 0.02, 120), (5, channels, 1, 1), 0.02)
    path = g.save(tmp_path / "m.onnx", [3, 9, 7], out, opset=21)
    made = image_program(io.load(path))
    assert not made.remainder
    samples = g.rng.normal(0, 1, (2, 3, 9, 7)).astype(np.float32)
    outputs = np.stack([reference.run(made, sample) for sample in samples])
    for isa in extension.isas():
        assert np.array_equal(native.pack(made, isa).open()(samples), outputs)
    wanted = results(path, samples)
    assert np.square(outputs.reshape(wanted.shape) - wanted).sum() < 0.002 * np.square(wanted).sum()


def function_of(g: Graph, x: str, form: str) -> str:
    """A function as exporters write it of several operators."""
    constant = lambda value: g.constant(np.float32(value))  # noqa: E731
    match form:
        case "gelu":
            erf = g.add("Erf", [g.add("Div", [x, constant(np.sqrt(2))])])
            return g.add("Mul", [g.add("Mul", [x, g.add("Add", [erf, constant(1)])]), constant(0.5)])
        case "gelu_tanh":
            cube = g.add("Mul", [g.add("Pow", [x, constant(3)]), constant(0.044715)])
            inner = g.add("Mul", [g.add("Add", [x, cube]), constant(np.sqrt(2 / np.pi))])
            return g.add("Mul", [constant(0.5), g.add("Mul", [x, g.add("Add", [g.add("Tanh", [inner]), constant(1)])])])
        case "swish":
            return g.add("Mul", [x, g.add("Sigmoid", [x])])
    return g.add("Mul", [x, g.add("Exp", [x])])


@pytest.mark.parametrize("form", ["gelu", "gelu_tanh", "swish", "other"])
def test_functions_of_several_operators_are_recognized_by_their_values(form: str, tmp_path: Path) -> None:
    g = Graph()
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (16, 3, 1, 1), 0.02), 0.03, 120)
    wide = linear(g, g.add("Transpose", [x], perm=[0, 2, 3, 1]), (16, 24))
    y = g.quantize(function_of(g, wide, form), 0.03, 20)
    y = g.quantize(linear(g, y, (24, 8)), 0.05, 120)
    path = g.save(tmp_path / "m.onnx", [3, 8, 6], y)
    if form == "other":
        with pytest.raises(RequestError, match="function of float values"):
            image_program(io.load(path))
        return
    made = image_program(io.load(path))
    tables = [step.activation for step in made.steps if isinstance(step, Convolution)]
    wanted = activation_table(form, 0.03, 20)
    assert wanted and tables[1] and tables[0] is tables[2] is None
    assert np.array_equal(tables[1].starts, wanted.starts)
    samples = g.rng.normal(0, 1, (2, 3, 8, 6)).astype(np.float32)
    outputs = np.stack([reference.run(made, sample) for sample in samples])
    np.testing.assert_allclose(outputs.reshape(2, 8, 6, 8), results(path, samples), atol=0.0501)


def test_a_difference_of_layers_is_no_sum(tmp_path: Path) -> None:
    """A layer adds floats to its results, but subtracts none."""
    g = Graph(6)
    x = g.quantize("image", 0.02, 120)
    out = g.add("Sub", [g.layer("Conv", x, (20, 3, 1, 1), 0.02) for _ in range(2)])
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out), share=1e-6)


@pytest.mark.parametrize("kind", ["depthwise", "gate", "map", "constant", "mean", "joined"])
def test_results_of_bytes_leave_as_floats(kind: str, tmp_path: Path) -> None:
    """Of layers and functions whose kernels write bytes, where nothing quantizes their results."""
    g = Graph(5)
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (20, 3, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.05, 120)
    gate = g.quantize(g.add("GlobalAveragePool", [x]), 0.02, 128)
    numbers = [
        g.constant(g.rng.integers(-99, 99, (20, 1, 1)).astype(np.int8)),
        *map(g.constant, (np.float32(0.02), np.int8(3))),
    ]
    made = {
        "depthwise": lambda: g.layer("Conv", x, (20, 1, 3, 3), 0.05, group=20, pads=[1, 1, 1, 1]),
        "gate": lambda: g.add("Mul", [gate, x]),
        "map": lambda: g.add("Mul", [x, g.quantize(g.add("Sigmoid", [x]), 1 / 255, 0)]),
        "constant": lambda: g.add("Add", [x, g.add("DequantizeLinear", numbers)]),
        "mean": lambda: g.add("AveragePool", [x], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    }
    parts = [value() for name, value in made.items() if kind in (name, "joined")]
    out = g.add("Concat", parts, axis=1) if kind == "joined" else parts[0]
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out), share=1e-6)
