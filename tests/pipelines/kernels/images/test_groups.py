"""Steps on runs of channels, and detectors' heads as exporters write them: softmax over bins, boxes, joined results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, results
from helpers.token_graphs import CHANNELS, check, patches
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import (
    ChannelScale,
    Dequantize,
    FloatActivation,
    FloatCopy,
    FloatDifference,
    FloatLookup,
    GroupLinear,
    Operand,
    Pixels,
    Softmax,
    Stacking,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")
CLASSES, SIDES = 7, (8, 4)  # of the detector, and pixels along the sides of its levels


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_step_on_runs(data: st.DataObject) -> None:
    """Runs of any size, constants of each pixel, functions of bytes, and results at their places."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, size, groups, outputs = np.random.default_rng(draw(0, 2**32)), draw(1, 40), draw(1, 5), draw(1, 3)
    height, width, before, behind = draw(1, 5), draw(1, 7), draw(0, 9), draw(5, 9)
    shape, runs = (height, width, before + size * groups + behind), (height, width, size * groups)
    floats = lambda *wide: rng.normal(0, 2, wide).astype(np.float32)  # noqa: E731
    byte, last = Operand(0, float(rng.uniform(0.01, 0.2)), draw(0, 255)), bool(draw(0, 1))
    short, pixels = (height, width, groups * outputs), height * width
    steps: list[Any] = [
        Pixels(0, last=True),
        FloatCopy(byte, Operand(1)),
        Softmax(byte, Operand(2), before, size),
        Softmax(Operand(1), Operand(3, 1 / 255, 0), before, size),
        FloatDifference(Operand(2), Operand(3, 1 / 255, 0), Operand(4)),
        ChannelScale(Operand(2), Operand(5), floats(pixels, size * groups), floats(pixels, size * groups)),
        GroupLinear(Operand(5), Operand(6), floats(outputs, size), floats(outputs)),
        FloatActivation(Operand(6), Operand(7, 0.004, 3), "sigmoid"),
        FloatLookup(7, 8, floats(256)),
        Stacking((6, 8), 9),
        Dequantize(4, 1, 0, last),
        Dequantize(7, 1, 0, last, floats(256), pixels * size * groups, 2 * (short[2] if last else pixels)),
        Dequantize(
            8,
            1,
            0,
            last,
            None,
            pixels * size * groups + (short[2] if last else pixels),
            2 * (short[2] if last else pixels),
        ),
        Dequantize(9, 1, 0, last),
    ]
    tensors = [shape, shape, runs, runs, runs, runs, short, short, short, (2 * pixels, 1, short[2])]
    # the two placed values take turns, so the last one begins behind both
    end = pixels * (size * groups + 2 * short[2])
    steps[-1] = Dequantize(9, 1, 0, last, None, end)
    network = program(shape, tensors, steps, end + 2 * pixels * short[2], floats=frozenset({1, 2, 4, 5, 6, 8, 9}))
    same_bits(network, rng.integers(0, 256, (2, *shape), dtype=np.uint8))


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_runs_of_sixteen_that_follow_each_other(groups: int) -> None:
    """Eight runs at a time and those behind them, functions of bytes of partial tiles of pixels, constants of pixels that are alike."""
    rng, pixels, runs = np.random.default_rng(groups), 347, (1, 347, 16 * groups)
    floats = lambda *wide: rng.normal(0, 2, wide).astype(np.float32)  # noqa: E731
    of_pixels = lambda channels: np.repeat(floats(pixels, 1), channels, axis=1)  # noqa: E731
    steps: list[Any] = [
        Pixels(0, last=True),
        Softmax(Operand(0, 0.05, 100), Operand(1), 0, 16),
        GroupLinear(Operand(1), Operand(2), floats(1, 16), floats(1)),
        ChannelScale(Operand(2), Operand(3), of_pixels(groups), np.tile(floats(1, groups), (pixels, 1))),
        ChannelScale(Operand(3), Operand(4), np.tile(floats(1, groups), (pixels, 1)), of_pixels(groups)),
        Dequantize(4, 1, 0),
        Dequantize(0, 1, 0, False, floats(256), groups * pixels, pixels),
    ]
    tensors = [runs, runs, *[(1, pixels, groups)] * 3]
    network = program(runs, tensors, steps, 17 * groups * pixels, floats=frozenset({1, 2, 3, 4}))
    same_bits(network, rng.integers(0, 256, (2, *runs), dtype=np.uint8))


def levels(g: Graph, quantizes: bool = True) -> list[tuple[str, str]]:
    """Boxes [n, 64, side, side] and scores of two levels."""
    x, channels, made = g.quantize("image", 0.02, 128), 3, []
    for stride in (2, 2):
        x = g.layer("Conv", x, (24, channels, 3, 3), 0.02, strides=[stride] * 2, pads=[1] * 4)
        x, channels = g.quantize(g.add("Relu", [x]), 0.02, 0), 24
        pair = [g.layer("Conv", x, (outputs, 24, 1, 1), 0.02) for outputs in (64, CLASSES)]
        made.append((g.quantize(pair[0], 0.03, 120), g.quantize(pair[1], 0.05, 140)) if quantizes else tuple(pair))
    return made  # type: ignore[return-value]


def expected_sides(g: Graph, boxes: str, form: str, count: int) -> str:
    """The expectation over 16 bins of each of four sides, [n, 4, count]."""
    bins = np.arange(16, dtype=np.float32)
    whole = [g.constant(np.array(shape)) for shape in ([-1, 4, 16, count], [-1, 4, count])]
    x = g.add("Reshape", [boxes, whole[0]])
    if form == "MatMul":  # over the last axis
        x = g.add("Softmax", [g.add("Transpose", [x], perm=[0, 3, 1, 2])], axis=3)
        return g.add("Transpose", [g.add("MatMul", [x, g.constant(bins)])], perm=[0, 2, 1])
    x = g.add("Softmax", [g.add("Transpose", [x], perm=[0, 2, 1, 3])], axis=1)
    if form == "ReduceSum":
        shares = g.add("Mul", [x, g.constant(bins.reshape(1, 16, 1, 1))])
        return g.add("ReduceSum", [shares, g.constant(np.array([1]))], keepdims=0)
    if form == "int8":
        scale = g.add(
            "DequantizeLinear", [g.constant(bins.astype(np.int8).reshape(1, 16, 1, 1)), g.constant(np.float32(1))]
        )
        x = g.quantize(g.add("Conv", [g.quantize(x, 1 / 255, 0), scale]), 15 / 255, 0)
    else:
        x = g.add("Conv", [x, g.constant(bins.reshape(1, 16, 1, 1))])
    return g.add("Reshape", [x, whole[1]])


def decoded(g: Graph, sides: str, count: int) -> str:
    """Centres and sizes [n, 4, count] of boxes by their distances to anchors."""
    anchors = g.constant(g.rng.uniform(0, 8, (1, 2, count)).astype(np.float32))
    cut = [g.constant(np.array([bound])) for bound in (0, 2, 4, 1)]
    near, far = (g.add("Slice", [sides, cut[index], cut[index + 1], cut[3]]) for index in (0, 1))
    first, last = g.add("Sub", [anchors, near]), g.add("Add", [anchors, far])
    centre = g.add("Div", [g.add("Add", [first, last]), g.constant(np.float32(2))])
    both = g.add("Concat", [centre, g.add("Sub", [last, first])], axis=1)
    return g.add("Mul", [both, g.constant(g.rng.choice([8, 16], (1, count)).astype(np.float32))])


def detector(g: Graph, form: str) -> str:
    """A detector as Ultralytics exports YOLOv8."""
    count, joined = sum(side**2 for side in SIDES), []
    for (box, score), side in zip(levels(g), SIDES, strict=True):
        both = g.add("Concat", [box, score], axis=1)
        joined.append(g.add("Reshape", [both, g.constant(np.array([-1, 64 + CLASSES, side**2]))]))
    whole = g.add("Concat", joined, axis=2)
    g.nodes.append(_split(whole, g.constant(np.array([64, CLASSES]))))
    boxes = decoded(g, expected_sides(g, "boxes", form, count), count)
    return g.add("Concat", [boxes, g.add("Sigmoid", ["scores"])], axis=1)


def _split(x: str, sizes: str) -> Any:
    from onnx import helper

    return helper.make_node("Split", [x, sizes], ["boxes", "scores"], axis=1)


@pytest.mark.parametrize("form", ["Conv", "MatMul", "ReduceSum", "int8"])
def test_a_detector_is_whole(form: str, tmp_path: Path) -> None:
    """YOLOv8's head has a native form whole, and ONNX Runtime's results; scores move once, from bytes to their places."""
    g = Graph(3)
    out = detector(g, form)
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], out)
    kinds = check(g, path)
    assert kinds.count(Softmax) == 1
    assert kinds.count(GroupLinear) == (form != "int8")
    assert kinds.count(Dequantize) == 1 + len(SIDES)


@pytest.mark.parametrize("form", ["sum", "function", "first part", "function of a part", "whole"])
def test_results_are_within_bounds(form: str, tmp_path: Path) -> None:
    """Clip at the end of a network, and in parts of a Concat that are written to their places among the results."""
    g = Graph(9)
    (boxes, _), _ = levels(g, quantizes=False)
    sides = [g.constant(np.float32(bound)) for bound in (-0.2, 0.3)]
    x = g.add("Tanh", [g.quantize(boxes, 0.02, 120)]) if "function" in form else boxes
    joined = [g.add("Clip", [x, *sides]) if "part" in form else x, boxes]
    if form in ("sum", "function"):
        out = g.add("Clip", [x, *sides])
    else:
        out = g.add("Concat", joined, axis=1)
        out = g.add("Clip", [out, *sides]) if form == "whole" else out
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out), share=1e-6)


@pytest.mark.parametrize("kind", ["Add", "Mul"])
@pytest.mark.parametrize("form", ["constant", "number", "floats", "bytes"])
def test_more_axes_move_that_of_samples(form: str, kind: str, tmp_path: Path) -> None:
    """Tokens [n, 16, C] and a value or constant of four axes, whose first one is not that of the tokens' samples."""
    g = Graph(10)
    tokens, axes = patches(g), g.constant(np.array([1]))
    match form:
        case "constant":
            other = g.constant(g.rng.normal(1, 0.1, (1, 1, 1, CHANNELS)).astype(np.float32))
        case "number":
            other = g.constant(np.full((1, 1, 1, 1), 0.3, np.float32))
        case _:
            other = g.add("Unsqueeze", [g.add("ReduceMean", [tokens], axes=[1]), axes])
    if form == "bytes":
        tokens, other = g.quantize(tokens, 0.03, 120), g.quantize(other, 0.03, 120)
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], g.quantize(g.add(kind, [other, tokens]), 0.03, 120), batch=1)
    try:
        remainder = image_program(io.load(path)).remainder
    except RequestError as error:
        assert "different numbers of axes" in str(error)
    else:
        assert kind.encode() in remainder


def test_a_part_without_a_float_form_is_refused(tmp_path: Path) -> None:
    """A depthwise layer of several outputs a channel is computed as bytes alone."""
    g = Graph(9)
    (a, b), _ = levels(g)
    out = g.add("Concat", [g.layer("Conv", a, (128, 1, 1, 1), 0.03, group=64), b], axis=1)
    with pytest.raises(RequestError, match="no native float form"):
        image_program(io.load(g.save(tmp_path / "m.onnx", [3, 16, 16], out)))


@pytest.mark.parametrize("axis", [1, 2, 3, -1])
def test_softmax_over_any_axis(axis: int, tmp_path: Path) -> None:
    """Over channels, rows and columns of a float value."""
    g = Graph(5)
    (x, _), _ = levels(g, quantizes=False)
    path = g.save(
        tmp_path / "m.onnx", [3, 16, 16], g.add("Softmax", [g.add("Mul", [x, g.constant(np.float32(0.3))])], axis=axis)
    )
    assert check(g, path).count(Softmax) == 1


def test_arithmetic_of_bytes_and_constants_of_each_element(tmp_path: Path) -> None:
    """Constants that are broadcast along any axes, before and behind the operator, and a difference of bytes."""
    g = Graph(6)
    (x, _), _ = levels(g)
    other = g.quantize(g.add("Mul", [x, g.constant(g.rng.normal(1, 1, (1, 1, 8, 8)).astype(np.float32))]), 0.05, 128)
    y = g.add("Sub", [g.constant(g.rng.normal(1, 1, (64, 1, 8)).astype(np.float32)), g.add("Sub", [x, other])])
    y = g.add("Div", [y, g.constant(g.rng.uniform(1, 2, (1, 64, 8, 1)).astype(np.float32))])
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], y)
    kinds = check(g, path)
    assert kinds.count(ChannelScale) >= 2
    assert kinds.count(FloatDifference) == 1


@pytest.mark.parametrize("shape", [(1, 16, CHANNELS), (1, 16, 1), (1, 1, CHANNELS)])
@pytest.mark.parametrize("kind", ["Add", "Mul"])
def test_constants_of_8_bits_differ_between_tokens(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Positions and masks of tokens whose operator is quantized with both inputs."""
    g = Graph(8)
    qparams = [g.constant(np.float32(0.01)), g.constant(np.uint8(100))]
    constant = g.constant(g.rng.integers(0, 256, shape).astype(np.uint8))
    pair = [g.quantize(patches(g), 0.03, 120), g.add("DequantizeLinear", [constant, *qparams])]
    out = g.quantize(g.add(kind, pair), 0.03, 120)
    g.ranks[out] = 3
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out))


def test_a_constant_with_more_elements_stays_in_onnxruntime(tmp_path: Path) -> None:
    """A sum with a constant that repeats the value along the axis of samples is no native form."""
    g = Graph(7)
    (x, _), _ = levels(g)
    y = g.add("Sub", [g.constant(np.ones((2, 64, 8, 8), np.float32)), x])
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], y, batch=1)
    assert results(path, np.zeros((1, 3, 16, 16), np.float32)).shape[0] == 2
    with pytest.raises(RequestError, match="has a constant of another shape than its input"):
        image_program(io.load(path))
