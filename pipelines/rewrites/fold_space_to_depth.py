"""Convolutions over blocks of pixels that were laid into channels (the Focus of YOLOv5 and YOLOX), as strided ones."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

END = 2**31 - 1  # ends from here on mean all of an axis
Phase = tuple[int, int]  # of a pixel in its block: row, column


class FoldSpaceToDepth(OperatorRewrite):
    """Conv(SpaceToDepth(x); W, pads p) = Conv(x; W', stride s, pads s p), with kernels s times as large.

    Phase (a, b) of a block is x[:, :, a::s, b::s], so that the weight of tap (u, v) for it is that of tap (s u + a, s v
    + b) for x. Blocks are SpaceToDepth, or a Concat of Slices with these steps, which copies every pixel. Does not fire
    if the blocks have another reader, a phase is missing at the start or end of an axis, or the Conv has weights that
    are not constant, groups, strides, dilations or automatic padding.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Conv",)

    def replace(self, conv: ir.Node) -> int:
        """See `OperatorRewrite`."""
        blocks = query.producer(conv.inputs[0])
        layout = None if blocks is None else _blocks(blocks)
        if blocks is None or layout is None:
            return 0
        x, size, phases = layout
        weight = query.constant(conv.inputs[1])
        if weight is None or weight.ndim != 4 or weight.shape[1] % len(phases):
            self.refuse(conv, "its weights are not constant")
            return 0
        ones = all(set(conv.attributes.get_ints(key, [1])) == {1} for key in ("strides", "dilations"))
        plain = ones and conv.attributes.get_int("group", 1) == 1
        if not plain or conv.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            self.refuse(conv, "it has strides, groups, dilations or automatic padding")
            return 0
        if query.sole_user(blocks.outputs[0]) is not conv:
            self.refuse(conv, "its input has several readers")
            return 0
        outputs, inputs, height, width = weight.shape
        channels, (rows, columns) = inputs // len(phases), size
        larger = np.zeros((outputs, channels, height * rows, width * columns), weight.dtype)
        for group, (row, column) in enumerate(phases):
            larger[:, :, row::rows, column::columns] += weight[:, group * channels : (group + 1) * channels]
        pads = conv.attributes.get_ints("pads", [0, 0, 0, 0])
        attributes = {
            "kernel_shape": list(larger.shape[2:]),
            "strides": [rows, columns],
            "pads": [pad * step for pad, step in zip(pads, (rows, columns) * 2, strict=True)],
        }
        assert isinstance(conv.graph, ir.Graph)
        made = edit.initializer(conv.graph, f"{conv.outputs[0].name}.weight", larger, query.used_names(conv.graph))
        edit.substitute([conv], ir.node("Conv", [x, made, *conv.inputs[2:]], attributes, name=conv.name))
        return 1


def _blocks(node: ir.Node) -> tuple[ir.Value, Phase, list[Phase]] | None:
    """(x, size of a block, phase of each group of channels) of an operator that lays blocks into channels, or None."""
    if query.is_op(node, "SpaceToDepth") and node.inputs[0] is not None:
        side = node.attributes.get_int("blocksize", 1)
        return node.inputs[0], (side, side), [(row, column) for row in range(side) for column in range(side)]
    if not query.is_op(node, "Concat") or node.attributes.get_int("axis", 0) != 1:
        return None
    parts = [None if value is None else _phase(value) for value in node.inputs]
    matched = [part for part in parts if part is not None]
    if len(matched) != len(parts) or len({(x, size) for x, size, _ in matched}) != 1:
        return None
    x, size, _ = matched[0]
    phases = [phase for _, _, phase in matched]
    for axis, step in enumerate(size):  # of both ends of a block, so that blocks are whole
        if not {0, step - 1} <= {phase[axis] for phase in phases}:
            return None
    return (x, size, phases) if max(size) > 1 else None


def _phase(value: ir.Value) -> tuple[ir.Value, Phase, Phase] | None:
    """Returns (x, steps, first row and column) of a strided slice of rows and columns of x; None for other values."""
    steps, starts = [1, 1], [0, 0]
    while query.is_op(node := value.producer(), "Slice"):
        assert node is not None
        bounds = [query.integers(node, key, index) for index, key in enumerate(("starts", "ends", "axes", "steps"), 1)]
        if any(numbers is None for numbers in bounds) or node.inputs[0] is None:
            return None
        sizes = query.dimensions(node.inputs[0]) or []
        for start, end, axis, step in zip(*(numbers or [] for numbers in bounds), strict=True):
            most = sizes[axis] if 0 <= axis < len(sizes) else None
            whole = end >= END or (most is not None and end >= most)
            if axis not in (2, 3) or not whole or not 0 <= start < step or steps[axis - 2] != 1:
                return None
            steps[axis - 2], starts[axis - 2] = step, start
        value = node.inputs[0]
    return value, (steps[0], steps[1]), (starts[0], starts[1])
