"""Parts of quantized vision transformers, and the check of a whole one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from helpers.qdq_graphs import Graph, linear, results, weights
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.images import native, reference
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.steps import Step

CHANNELS, HEADS, SIZE = 32, 2, 16


def attention(g: Graph, x: str, merged: bool, tokens: int, bias: tuple[str, str] | None = None) -> str:
    """Attention of tokens [n, tokens, C], scaled and quantized: one layer of queries, keys and values, or three."""
    shape = g.constant(np.array([-1, tokens, *([3] if merged else []), HEADS, SIZE]))
    if merged:
        rows = g.add("Reshape", [linear(g, x, (CHANNELS, 3 * CHANNELS)), shape])
        rows = g.quantize(g.add("Transpose", [rows], perm=[2, 0, 3, 1, 4]), 0.02, 128)
        q, k, v = (g.add("Gather", [rows, g.constant(np.array(index))], axis=0) for index in range(3))
    else:
        parts = [g.add("Reshape", [linear(g, x, (CHANNELS, CHANNELS)), shape]) for _ in range(3)]
        q, k, v = (g.quantize(g.add("Transpose", [part], perm=[0, 2, 1, 3]), 0.02, 128) for part in parts)
    q = g.quantize(g.add("Mul", [q, g.constant(np.float32(SIZE**-0.5))]), 0.01, 128)
    scores = g.add("MatMul", [q, g.add("Transpose", [k], perm=[0, 1, 3, 2])])
    if bias is not None:
        own, mask = bias
        scores = g.add("Add", [scores, own])
        five = g.add("Reshape", [scores, g.constant(np.array([-1, 4, HEADS, tokens, tokens]))])
        scores = g.add("Reshape", [g.add("Add", [five, mask]), g.constant(np.array([-1, HEADS, tokens, tokens]))])
    share = g.quantize(g.add("Softmax", [scores], axis=-1), 1 / 255, 0)
    heads = g.quantize(g.add("MatMul", [share, v]), 0.02, 128)
    rows = g.add("Transpose", [heads], perm=[0, 2, 1, 3])
    rows = g.add("Reshape", [rows, g.constant(np.array([-1, tokens, CHANNELS]))])
    return g.quantize(g.add("Mul", [rows, weights(g, CHANNELS)]), 0.02, 128)  # as SmoothQuant leaves it


def check(g: Graph, path: Path, share: float = 0.01) -> list[type[Step]]:
    """The kinds of the steps of a network [n, 3, 16, 16]; results are close to ONNX Runtime's, of the same bits everywhere."""
    made = image_program(io.load(path))
    assert not made.remainder
    samples = g.rng.normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    outputs = np.stack([reference.run(made, sample) for sample in samples])
    for isa in extension.isas():
        for threads in (1, 2):
            assert np.array_equal(native.pack(made, isa).open()(samples, threads), outputs)
    wanted = np.concatenate([results(path, sample[None]) for sample in samples]).reshape(outputs.shape)
    assert np.square(outputs - wanted).sum() < share * np.square(wanted - wanted.mean()).sum()
    return [type(step) for step in made.steps]


def rolled(g: Graph, x: str, by: int) -> str:
    """torch.roll of both spatial axes, as it is exported."""
    for axis in (1, 2):
        ends = g.constant(np.array([9000]))
        cut, along, none = (g.constant(np.array([number])) for number in (by, axis, 0))
        x = g.add("Concat", [g.add("Slice", [x, cut, ends, along]), g.add("Slice", [x, none, cut, along])], axis=axis)
    return x


def patches(g: Graph) -> str:
    """Sixteen tokens of an image [3, 16, 16], quantized."""
    x = g.layer("Conv", g.quantize("image", 0.02, 120), (CHANNELS, 3, 4, 4), 0.02, strides=[4, 4])
    x = g.add("Reshape", [g.quantize(x, 0.03, 120), g.constant(np.array([0, CHANNELS, 16]))])
    return g.add("Transpose", [x], perm=[0, 2, 1])


def deformable_attention(g: Graph, values: str, queries: str, sides: tuple[int, ...], points: int = 2) -> str:
    """Attention to sampled places of levels of these sides (Zhu et al. 2020), as transformers exports RT-DETR.

    values: tokens [n, all places, C] of all levels; queries: tokens [n, 16, C]. Returns tokens [n, 16, C].
    """
    count, total = len(sides), sum(side * side for side in sides)

    def shaped(x: str, *shape: int) -> str:
        return g.add("Reshape", [x, g.constant(np.array(shape))])

    def constant(*shape: int) -> str:
        return g.constant(g.rng.uniform(0.2, 0.6, shape).astype(np.float32))

    heads = shaped(linear(g, values, (CHANNELS, CHANNELS)), -1, total, HEADS, SIZE)
    offsets = shaped(linear(g, queries, (CHANNELS, HEADS * count * points * 2)), -1, 16, HEADS, count, points, 2)
    weights = shaped(linear(g, queries, (CHANNELS, HEADS * count * points)), -1, 16, HEADS, count * points)
    weights = shaped(g.add("Softmax", [weights], axis=-1), -1, 16, HEADS, count, points)
    boxes = shaped(g.add("Sigmoid", [linear(g, queries, (CHANNELS, 4))]), -1, 16, 1, 1, 1, 4)
    ends = [g.constant(np.array([end])) for end in (0, 2, 4, 5)]
    centre, size = (g.add("Slice", [boxes, ends[index], ends[index + 1], ends[3]]) for index in (0, 1))
    moved = g.add("Mul", [g.add("Div", [offsets, constant(1, 1, 1, count, 1, 2)]), size])
    places = g.add("Add", [centre, g.add("Mul", [moved, g.constant(np.float32(0.5))])])
    grid = g.add("Sub", [g.add("Mul", [places, g.constant(np.float32(2))]), g.constant(np.float32(1))])
    sampled, first = [], 0
    for level, side in enumerate(sides):
        bounds = [g.constant(np.array([bound])) for bound in (first, first + side * side, 1)]
        own = shaped(g.add("Slice", [heads, *bounds]), -1, side * side, CHANNELS)
        own = shaped(g.add("Transpose", [own], perm=[0, 2, 1]), -1, SIZE, side, side)
        own_grid = g.add("Gather", [grid, g.constant(np.array(level))], axis=3)
        own_grid = shaped(g.add("Transpose", [own_grid], perm=[0, 2, 1, 3, 4]), -1, 16, points, 2)
        samples = g.add("GridSample", [own, own_grid], mode="bilinear", padding_mode="zeros", align_corners=0)
        sampled.append(g.add("Unsqueeze", [samples, g.constant(np.array([-2]))]))
        first += side * side
    joined = shaped(g.add("Concat", sampled, axis=-2), -1, SIZE, 16, count * points)
    shares = shaped(g.add("Transpose", [weights], perm=[0, 2, 1, 3, 4]), -1, 1, 16, count * points)
    y = g.add("ReduceSum", [g.add("Mul", [joined, shares]), g.constant(np.array([-1]))], keepdims=0)
    return g.add("Transpose", [shaped(y, -1, CHANNELS, 16)], perm=[0, 2, 1])
