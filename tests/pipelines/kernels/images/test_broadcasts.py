"""Values that are broadcast, repeated, averaged over one axis, or divided by their length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.qdq_graphs import Graph, linear, results, weights
from helpers.token_graphs import CHANNELS, HEADS, SIZE, check, patches

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import Attention, Normalization

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


def classes(g: Graph, x: str, axes: list[int], channels: int = CHANNELS) -> str:
    """The mean of tokens or pixels, and classes."""
    mean = g.quantize(g.add("ReduceMean", [x, g.constant(np.array(axes))], keepdims=0), 0.03, 125)
    g.flat = g.layer("Gemm", mean, (5, channels), 0.03, transB=1)
    return g.flat


def slices(g: Graph, x: str, low: int, high: int, axis: int) -> str:
    """A Slice along an axis."""
    return g.add("Slice", [x, *(g.constant(np.array([number])) for number in (low, high, axis))])


@pytest.mark.parametrize("form", ["pixel", "channel", "outer", "bytes"])
def test_maps_are_broadcast(form: str, tmp_path: Path) -> None:
    """A pixel or a channel for all others, a channel times a pixel (FocalNet), and attention maps of bytes (CBAM)."""
    g = Graph()
    x = g.quantize(g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 1, 1), 0.02), 0.03, 120)
    normed = g.add("GroupNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)], num_groups=1)
    rows = g.add("ReduceMean", [normed, g.constant(np.array([2]))])
    pixel, channel = g.add("ReduceMean", [rows, g.constant(np.array([3]))]), slices(g, normed, 3, 4, 1)
    if form == "bytes":
        gate = g.quantize(
            g.layer("Conv", g.quantize(normed, 0.03, 120), (1, CHANNELS, 3, 3), 0.03, pads=[1] * 4), 0.1, 128
        )
        y = g.add("Mul", [x, g.quantize(g.add("Sigmoid", [gate]), 1 / 255, 0)])
    elif form == "outer":
        y = g.add("Add", [normed, g.add("Mul", [pixel, channel])])
    else:
        y = g.add("Add" if form == "pixel" else "Mul", [normed, pixel if form == "pixel" else channel])
    y = g.layer("Conv", g.quantize(y, 0.05, 120), (CHANNELS, CHANNELS, 1, 1), 0.05)
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], classes(g, g.quantize(y, 0.2, 120), [2, 3]), opset=21))


@pytest.mark.parametrize("kind", ["Expand", "Tile"])
def test_a_token_is_repeated_for_all_others(kind: str, tmp_path: Path) -> None:
    """DPT: the class token beside the channels of every other token."""
    g = Graph()
    x = g.add("LayerNormalization", [patches(g), weights(g, CHANNELS), weights(g, CHANNELS)])
    x = g.quantize(linear(g, g.quantize(x, 0.03, 125), (CHANNELS, CHANNELS)), 0.05, 120)
    first = slices(g, x, 0, 1, 1)
    repeats = np.array([1, 16, 1 if kind == "Tile" else CHANNELS])
    both = g.add("Concat", [x, g.add(kind, [first, g.constant(repeats)])], axis=-1)
    y = linear(g, g.quantize(both, 0.05, 120), (2 * CHANNELS, CHANNELS))
    check(g, g.save(tmp_path / "m.onnx", [3, 16, 16], classes(g, y, [1]), opset=20))


def test_samples_that_are_repeated_are_refused(tmp_path: Path) -> None:
    g = Graph()
    x = linear(g, g.quantize(patches(g), 0.03, 125), (CHANNELS, CHANNELS))
    twice = g.add("Tile", [x, g.constant(np.array([2, 1, 1]))])
    out = linear(g, g.quantize(twice, 0.05, 120), (CHANNELS, CHANNELS))
    with pytest.raises(RequestError, match="Tile"):
        image_program(io.load(g.save(tmp_path / "m.onnx", [3, 16, 16], classes(g, out, [1]), opset=20)))


@pytest.mark.parametrize("bound", ["Clip", "Max", "Add", ""])
def test_attention_by_cosines_is_whole(bound: str, tmp_path: Path) -> None:
    """SwinV2: queries and keys of length 1, and a factor of each head."""
    g = Graph()
    x = patches(g)
    norm = g.quantize(g.add("LayerNormalization", [x, weights(g, CHANNELS), weights(g, CHANNELS)]), 0.03, 125)
    shape = g.constant(np.array([0, 16, HEADS, SIZE]))
    q, k, v = (
        g.add("Transpose", [g.add("Reshape", [linear(g, norm, (CHANNELS, CHANNELS)), shape])], perm=[0, 2, 1, 3])
        for _ in "qkv"
    )

    def unit(heads: str) -> str:
        length = g.add("ReduceL2", [heads, g.constant(np.array([-1]))])
        length = g.add(bound, [length, g.constant(np.float32(1e-12))]) if bound else length
        size = g.add("Concat", [slices(g, g.add("Shape", [heads]), 0, 3, 0), g.constant(np.array([SIZE]))], axis=0)
        return g.add("Div", [heads, g.add("Expand", [length, size]) if bound == "Clip" else length])

    scores = g.add("MatMul", [unit(q), g.add("Transpose", [unit(k)], perm=[0, 1, 3, 2])])
    scores = g.add("Mul", [scores, g.constant(np.linspace(2, 9, HEADS, dtype=np.float32).reshape(HEADS, 1, 1))])
    share = g.add("Softmax", [g.add("Add", [scores, weights(g, 1, HEADS, 16, 16)])], axis=-1)
    rows = g.add("Transpose", [g.add("MatMul", [share, v])], perm=[0, 2, 1, 3])
    rows = g.quantize(g.add("Reshape", [rows, g.constant(np.array([0, 0, -1]))]), 0.02, 128)
    y = g.add("Add", [linear(g, rows, (CHANNELS, CHANNELS)), x])
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], classes(g, y, [1]), opset=20)
    kinds = check(g, path)
    assert (kinds.count(Attention), kinds.count(Normalization)) == (1, 3)


def test_values_that_a_large_number_bounds_are_not_of_length_1(tmp_path: Path) -> None:
    g = Graph()
    x = linear(g, g.quantize(patches(g), 0.03, 125), (CHANNELS, CHANNELS))
    length = g.add("ReduceL2", [x, g.constant(np.array([-1]))])
    y = g.add("Div", [x, g.add("Clip", [length, g.constant(np.float32(5))])])
    y = linear(g, g.quantize(y, 0.01, 120), (CHANNELS, CHANNELS))
    path = g.save(tmp_path / "m.onnx", [3, 16, 16], classes(g, y, [1]), opset=20)
    assert np.isfinite(results(path, np.zeros((1, 3, 16, 16), np.float32))).all()
    with pytest.raises(RequestError, match="ReduceL2"):
        image_program(io.load(path))
