"""Pixels at the places of a grid, and arithmetic of values in other orders: the same bits everywhere, near ONNX Runtime's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph, linear
from helpers.token_graphs import CHANNELS, check, deformable_attention, patches
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import (
    ChannelScale,
    Dequantize,
    FloatCopy,
    FloatLookup,
    FloatProduct,
    Operand,
    Pixels,
    PixelSums,
    Sampling,
)
from pipelines.kernels.images.steps.sampling import OUTSIDE

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_step(data: st.DataObject) -> None:
    """Grids of any size and any coordinates, infinite ones and NaN too, in groups of rows or channels, and sums of pixels."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, groups, channels = np.random.default_rng(draw(0, 2**32)), draw(1, 3), draw(5, 40)
    height, width, rows, columns = draw(1, 4), draw(1, 5), draw(1, 4), draw(1, 5)
    taps, outside, align = (1, 2, 4)[draw(0, 2)], OUTSIDE[draw(0, 2)], bool(draw(0, 1))
    plane = (draw(0, 2), height, width) if draw(0, 1) else None
    channels = channels if plane is None else 16 * draw(1, 2)
    wide, large = (groups * rows, columns, channels), (groups * height, width, channels)
    if plane is not None:
        large = (plane[0] + height * width, 1, groups * channels)
    coordinates = rng.uniform(-1.6, 1.6, 256).astype(np.float32)
    coordinates[:6] = -1, 1, 0, np.inf, -np.inf, np.nan
    one, count = (groups * rows, columns, 1), draw(1, 4)
    steps: list[Any] = [
        Pixels(0, (), True, 0.05, 128, 0),
        Pixels(1, (), True, 0.05, 128, int(np.prod(large))),
        FloatCopy(Operand(0, 0.05, 128), Operand(2)),
        FloatLookup(1, 3, coordinates),
        Sampling(2, 3, 4, groups, taps, outside, align, plane),
        Pixels(5, (), True, 0.0, 0, int(np.prod(large)) + 2 * groups * rows * columns),
        FloatProduct(Operand(4), Operand(5), Operand(6)),
        PixelSums(6, 7, rng.integers(0, groups * rows * columns, (3, count))),
        ChannelScale(Operand(7), Operand(8), np.ones((1, channels), np.float32), np.ones((1, channels), np.float32)),
        Dequantize(4, 1, 0),
        Dequantize(8, 1, 0),
    ]
    grid = (groups * rows, columns, 2)
    sizes = [int(np.prod(shape)) for shape in (large, grid, one)]
    built = program(
        (sum(sizes),),
        [large, grid, large, grid, wide, one, wide, (3, 1, channels), (3, 1, channels)],
        steps,
        int(np.prod(wide)) + 3 * channels,
        floats=frozenset({2, 3, 4, 5, 6, 7, 8}),
        dtype="float32",
        inputs=tuple((name, (size,)) for name, size in zip("abc", sizes, strict=True)),
    )
    same_bits(built, rng.normal(0, 4, (2, sum(sizes))).astype(np.float32))


def sampled(g: Graph, spread: float, **options: Any) -> str:
    """An image of 24 channels at places that a layer computes, times `spread`."""
    x = g.quantize("image", 0.02, 120)
    image = g.quantize(g.layer("Conv", x, (24, 3, 3, 3), 0.02, pads=[1, 1, 1, 1]), 0.05, 120)
    grid = g.layer("Conv", x, (2, 3, 4, 4), 0.02, strides=[4, 4])
    grid = g.add("Mul", [g.add("Transpose", [grid], perm=[0, 2, 3, 1]), g.constant(np.float32(spread))])
    return g.add("GridSample", [image, grid], **options)


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", OUTSIDE)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_gridsample_is_native(mode: str, padding: str, align: int, tmp_path: Path) -> None:
    """A grid that differs between samples."""
    g = Graph(4)
    out = sampled(g, 1.5 if padding == "reflection" else 0.3, mode=mode, padding_mode=padding, align_corners=align)
    assert check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], out), share=1e-6).count(Sampling) == 1


def test_deformable_attention_is_whole(tmp_path: Path) -> None:
    """Offsets and boxes are broadcast, levels joined, and weighted pixels summed; no element is gathered alone."""
    g = Graph(2)
    small = patches(g)
    large = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 2, 2), 0.02, strides=[2, 2])
    large = g.add("Reshape", [g.quantize(large, 0.03, 120), g.constant(np.array([0, CHANNELS, 64]))])
    values = g.quantize(g.add("Concat", [g.add("Transpose", [large], perm=[0, 2, 1]), small], axis=1), 0.03, 120)
    y = g.quantize(deformable_attention(g, values, small, (8, 4)), 0.02, 128)
    out = linear(g, y, (CHANNELS, 5))
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], out)
    assert check(g, path).count(PixelSums) == 1
    steps = image_program(io.load(path)).steps
    assert [step.plane for step in steps if isinstance(step, Sampling)] == [(0, 8, 8), (64, 4, 4)]
