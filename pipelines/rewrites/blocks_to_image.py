"""Col2Im of blocks that do not overlap as a transposition."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class BlocksToImage(Rewrite):
    """Col2Im(x, [h a, w b], [a, b]) = Reshape(Transpose(Reshape(x, [n, C, a, b, h, w]))) for blocks side by side.

    torch's `fold` of patches that its `unfold` made (MobileViTv2). Exact: no block overlaps another, so no elements are
    added. Does not fire for other strides than the size of a block, pads, dilations, or sizes that are not constant.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every such Col2Im.

        Args:
            model: Model to change.

        Returns:
            Number of replaced operators.
        """
        return sum(self._replace(node) for node in list(model.graph) if query.is_op(node, "Col2Im"))

    def _replace(self, node: ir.Node) -> int:
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
        channels, grid = sizes[1] // (rows * columns), (height // rows, width // columns)
        for stem, target in (("blocks", [0, channels, rows, columns, *grid]), ("image", [0, channels, height, width])):
            shape = edit.initializer(graph, f"{name}.{stem}.shape", np.array(target), taken)
            x = self._made(node, edit.node("Reshape", [x, shape], f"{name}.{stem}", dtype=x.dtype, taken=taken))
            if stem == "blocks":
                order = edit.node(
                    "Transpose", [x], f"{name}.order", dtype=x.dtype, taken=taken, perm=[0, 1, 4, 2, 5, 3]
                )
                x = self._made(node, order)
        edit.bypass(node, x)
        return 1

    @staticmethod
    def _made(before: ir.Node, node: ir.Node) -> ir.Value:
        """Inserts a node; returns its output."""
        assert isinstance(before.graph, ir.Graph)
        before.graph.insert_before(before, node)
        return node.outputs[0]
