"""Replaces a Tile of axes of size 1 by an Expand."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite


class TileToExpand(OperatorRewrite):
    """Tile(x, r) = Expand(x, r) if every axis of x has size 1 or is repeated once.

    onnx infers the sizes of an Expand to a computed number of samples, but not those of a Tile: the queries of a
    pooling attention that are repeated for each sample (SigLIP).
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Tile",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, repeats = node.inputs
        sizes, times = query.dimensions(x), query.shape_elements(repeats)
        if sizes is None or times is None or len(sizes) != len(times):
            return 0
        if any(size != 1 and count != 1 for size, count in zip(sizes, times, strict=True)):
            return 0
        edit.substitute([node], ir.node("Expand", [x, repeats], name=node.name))
        return 1
