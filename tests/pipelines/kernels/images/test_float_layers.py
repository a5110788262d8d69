"""Layers with float weights: every instruction set returns the reference's bits, close to ONNX Runtime's."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, linear, weights
from helpers.token_graphs import check, patches
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.images import native
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps import Convolution, Dequantize, FloatConvolution, FloatCopy, Operand, Pixels
from pipelines.kernels.images.steps.convolution import multiply_add

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@settings(max_examples=30)
@given(st.data())
def test_convolutions_of_any_shape(data: st.DataObject) -> None:
    """Groups of any width, strides, dilations and pads, a residual, bounds, and bytes as the result."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, groups = np.random.default_rng(draw(0, 2**32)), draw(1, 3)
    inputs, outputs = groups * draw(5, 9), groups * draw(1, 40)
    shape, kernel = (draw(1, 8), draw(1, 9)), (draw(1, 3), draw(1, 4))
    strides, dilations, pads = (draw(1, 2), draw(1, 3)), (draw(1, 2), draw(1, 2)), tuple(draw(0, 2) for _ in range(4))
    counts = windows(shape, kernel, strides, pads, dilations)
    if min(counts) < 1:
        return
    random = lambda *size: rng.normal(0, 0.3, size).astype(np.float32)  # noqa: E731
    bounds = data.draw(st.sampled_from([{}, {"low": 0.0}, {"low": -0.2, "high": 0.3}]))
    summed = data.draw(st.booleans())
    geometry: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations, "groups": groups}
    taps = random(outputs, *kernel, inputs // groups)
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(Operand(0, 0.02, 120), Operand(1)),
        FloatConvolution(1, Operand(2), taps, random(outputs), **geometry),
        FloatConvolution(
            1, Operand(3), taps, random(outputs), **geometry, **bounds, **({"residual": 2} if summed else {})
        ),
        FloatConvolution(3, Operand(4, 0.01, 130), random(5, 1, 1, outputs), random(5)),
        Dequantize(4, 0.25, 3),
    ]
    tensors = [(*shape, inputs)] * 2 + [(*counts, outputs)] * 2 + [(*counts, 5)]
    if not summed:  # a step without readers
        del steps[2], tensors[2]
        steps[2:4] = [
            FloatConvolution(1, Operand(2), taps, steps[2].bias, **geometry, **bounds),
            FloatConvolution(2, Operand(3, 0.01, 130), *[getattr(steps[3], name) for name in ("weight", "bias")]),
        ]
        steps[-1] = Dequantize(3, 0.25, 3)
    floats = frozenset({1, 2, 3} if summed else {1, 2})
    same_bits(
        program((*shape, inputs), tensors, steps, counts[0] * counts[1] * 5, floats=floats),
        rng.integers(0, 256, (2, *shape, inputs), dtype=np.uint8),
    )


@pytest.mark.parametrize(("outputs", "groups", "exact"), [(40, 1, True), (6, 2, True), (24, 1, False)])
def test_weights_of_eight_bits_are_read_as_such(outputs: int, groups: int, exact: bool) -> None:
    """Of few pixels, where each weight is exactly a whole number times the scale of its output."""
    rng = np.random.default_rng(outputs)
    codes = rng.integers(-127, 128, (outputs, 3, 3, 32 // groups))
    codes[:, 0, 0, 0] = 127
    weight = codes * (rng.integers(2**15, 2**16, (outputs, 1, 1, 1)) * 2.0**-24).astype(np.float32)
    weight[-1, 1, 1, 1] += 0 if exact else 1e-4
    layer = FloatConvolution(
        1, Operand(2), weight.astype(np.float32), rng.normal(0, 0.3, outputs).astype(np.float32), groups=groups
    )
    steps = [Pixels(0, last=True), FloatCopy(Operand(0, 0.02, 120), Operand(1)), layer, Dequantize(2, 1, 0)]
    made = program((3, 3, 32), [(3, 3, 32)] * 2 + [(1, 1, outputs)], steps, outputs, floats=frozenset({1, 2}))
    same_bits(made, rng.integers(0, 256, (2, 3, 3, 32), dtype=np.uint8))
    packed = native.pack(made, extension.isas()[0])
    dtypes = {array.dtype for _, arguments in packed.calls for array in arguments if isinstance(array, np.ndarray)}
    assert (np.dtype(np.int8) in dtypes) == exact


def test_products_and_sums_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=2000).astype(np.float32) * 2.0 ** rng.integers(-40, 40, 2000) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    c = (-a.astype(np.float64) * b * rng.uniform(0.99, 1.01, 2000)).astype(np.float32)  # sums that cancel
    c[::3] *= np.float32(2.0**24)
    for result, *terms in zip(multiply_add(a, b, c), a, b, c, strict=True):
        x, y, z = (Fraction(float(term)) for term in terms)
        exact = x * y + z
        near = [np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf)]
        errors = [abs(Fraction(float(value)) - exact) for value in (result, *near)]
        assert errors[0] == min(errors)
    assert math.isnan(multiply_add(*(np.array([value], np.float32) for value in (np.inf, 0, 1)))[0])


@pytest.mark.parametrize("wrong", [{"groups": 3}, {"pads": (0, 0, 0, -1)}, {"low": 1.0, "high": 0.0}, {"residual": 0}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    ones = np.ones((4, 1, 1, 8), np.float32)
    layer = FloatConvolution(1, Operand(2), ones, np.ones(4, np.float32), **wrong)
    steps = [Pixels(0, last=True), FloatCopy(Operand(0, 0.1), Operand(1)), layer, Dequantize(2, 1, 0)]
    with pytest.raises(RequestError):
        program((3, 4, 8), [(3, 4, 8)] * 2 + [(3, 4, 4)], steps, 48, floats=frozenset({1, 2}))


def float_conv(g: Graph, x: str, shape: tuple[int, ...], **attributes: Any) -> str:
    """A Conv with float weights."""
    return g.add("Conv", [x, weights(g, *shape, mean=0), weights(g, shape[0], mean=0)], **attributes)


def test_a_residual_block_in_float_is_whole(tmp_path: Path) -> None:
    """The first layer reads the image as it is; the block's bounds and sum are parts of its layers."""
    g = Graph()
    x = g.add("Relu", [float_conv(g, "image", (32, 3, 3, 3), strides=[2, 2], pads=[1] * 4)])
    deep = g.add("Relu", [float_conv(g, x, (32, 16, 3, 3), pads=[1] * 4, group=2)])
    x = g.add("Relu", [g.add("Add", [float_conv(g, deep, (32, 32, 3, 3), pads=[1] * 4), x])])
    y = g.layer("Conv", g.quantize(x, 0.1, 0), (8, 32, 1, 1), 0.1)
    y = float_conv(g, g.quantize(y, 0.2, 120), (6, 8, 2, 2), dilations=[2, 1])
    g.flat = g.add("Gemm", [g.add("Flatten", [y]), weights(g, 5, 6 * 42, mean=0)], transB=1, alpha=0.5)
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat))
    assert (kinds.count(FloatConvolution), kinds.count(Convolution), kinds.count(Pixels)) == (5, 1, 1)
    assert len(kinds) == 9  # and a copy of bytes, and the result


def test_an_input_that_is_read_as_floats_and_as_bytes_of_two_scales(tmp_path: Path) -> None:
    """Branches on the image, as FastViT and MobileOne have before their fusion."""
    g = Graph()
    scales = (0.02, 0.03)
    ways = [g.layer("Conv", g.quantize("image", scale, 120), (16, 3, 1, 1), scale) for scale in scales]
    x = g.add("Add", [float_conv(g, "image", (16, 3, 3, 3), pads=[1] * 4), g.add("Add", ways)])
    y = g.quantize(g.layer("Conv", g.quantize(x, 0.1, 120), (8, 16, 1, 1), 0.1), 0.2, 120)
    assert check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], y)).count(Pixels) == 3


def test_layers_of_tokens_in_float_are_whole(tmp_path: Path) -> None:
    g = Graph()
    x = patches(g)
    rows = g.quantize(g.add("LayerNormalization", [x, weights(g, 32), weights(g, 32, mean=0)]), 0.03, 128)
    deep = g.add("Relu", [g.add("MatMul", [rows, weights(g, 32, 64, mean=0)])])
    y = g.add("MatMul", [deep, weights(g, 64, 32, mean=0)])
    g.ranks[out := linear(g, g.quantize(g.add("Add", [x, y]), 0.2, 128), (32, 5))] = 3
    kinds = check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out))
    assert kinds.count(FloatConvolution) == 2


def test_int8_weights_of_a_float_value_are_dequantized(tmp_path: Path) -> None:
    g = Graph()
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (16, 3, 1, 1), 0.02)
    x = g.add("GroupNormalization", [x, weights(g, 16), weights(g, 16)], num_groups=1)
    weight = g.add(
        "DequantizeLinear",
        [
            g.constant(g.rng.integers(-127, 128, (8, 16, 3, 3)).astype(np.int8)),
            g.constant(np.full(8, 0.002, np.float32)),
        ],
        axis=0,
    )
    out = g.layer("Conv", g.quantize(g.add("Conv", [x, weight]), 0.05, 120), (4, 8, 1, 1), 0.05)
    assert FloatConvolution in check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out, opset=21))


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [("HardSigmoid", {"alpha": 0.3}), ("HardSwish", {}), ("LeakyRelu", {"alpha": 0.2}), ("Tanh", {})],
)
def test_functions_of_floats_that_are_several_steps(kind: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    g = Graph()
    x = g.add("LayerNormalization", [patches(g), weights(g, 32), weights(g, 32, mean=0)])
    y = g.add(kind, [x], **attributes)
    g.ranks[out := linear(g, g.quantize(g.add("Add", [x, y]), 0.05, 128), (32, 5))] = 3
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out))


def test_a_gate_in_float_is_whole(tmp_path: Path) -> None:
    """Squeeze-and-excitation of MobileNetV3 whose layers are left float: a HardSwish, and a HardSigmoid of one pixel."""
    g = Graph()
    x = g.add("HardSwish", [float_conv(g, "image", (32, 3, 3, 3), pads=[1] * 4)])
    squeezed = g.add("Relu", [float_conv(g, g.add("GlobalAveragePool", [x]), (16, 32, 1, 1))])
    gate = g.add("HardSigmoid", [float_conv(g, squeezed, (32, 16, 1, 1))], alpha=1 / 6, beta=0.5)
    y = g.layer("Conv", g.quantize(g.add("Mul", [x, gate]), 0.02, 10), (8, 32, 1, 1), 0.1)
    g.flat = g.add("Flatten", [g.add("HardSwish", [float_conv(g, g.quantize(y, 0.2, 120), (6, 8, 1, 1))])])
    assert check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], g.flat))
