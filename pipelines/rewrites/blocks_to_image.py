"""Col2Im of blocks that do not overlap as a transposition."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite


class BlocksToImage(OperatorRewrite):
    """Col2Im(x, [h a, w b], [a, b]) = Reshape(Transpose(Reshape(x, [n, C, a, b, h, w]))) for blocks side by side.

    torch's `fold` of patches that its `unfold` made (MobileViTv2). Exact: no block overlaps another, so no elements are
    added. Does not fire for other strides than the size of a block, pads, dilations, or sizes that are not constant.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Col2Im",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, graph = node.inputs[0], node.graph
        image, block = (query.constant(value) for value in node.inputs[1:3])
        sizes = query.dimensions(x)
        if x is None or image is None or block is None or len(block) != 2 or not sizes or sizes[1] is None:
            return 0
        (height, width), (rows, columns), ints = image.tolist(), block.tolist(), node.attributes.get_ints
        plain = not any(ints("pads", [0])) and set(ints("dilations", [1])) == {1}
        if not plain or list(ints("strides", [1, 1])) != [rows, columns] or height % rows or width % columns:
            self.refuse(node, "its blocks overlap, are padded or leave pixels out")
            return 0
        assert isinstance(graph, ir.Graph)
        taken, name = query.used_names(graph), str(node.outputs[0].name)
        channels = sizes[1] // (rows * columns)
        blocks = [0, channels, rows, columns, height // rows, width // columns]
        x = self._reshaped(node, x, blocks, f"{name}.blocks", taken)
        order = edit.node("Transpose", [x], f"{name}.order", dtype=x.dtype, taken=taken, perm=[0, 1, 4, 2, 5, 3])
        graph.insert_before(node, order)
        x = self._reshaped(node, order.outputs[0], [0, channels, height, width], f"{name}.image", taken)
        edit.bypass(node, x)
        return 1

    @staticmethod
    def _reshaped(before: ir.Node, x: ir.Value, sizes: list[int], name: str, taken: set[str]) -> ir.Value:
        """Inserts a Reshape; returns its output."""
        graph = before.graph
        assert isinstance(graph, ir.Graph)
        shape = edit.initializer(graph, f"{name}.shape", np.array(sizes), taken)
        made = edit.node("Reshape", [x, shape], name, dtype=x.dtype, taken=taken)
        graph.insert_before(before, made)
        return made.outputs[0]
