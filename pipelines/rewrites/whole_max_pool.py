"""The largest value of each channel as a MaxPool, which moves bytes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite


class WholeMaxPool(OperatorRewrite):
    """GlobalMaxPool(x) = ReduceMax(x, [2, 3]) = MaxPool(x) with a window of the whole image.

    Such layers are channel attention (CBAM) and heads of one-dimensional networks. A Squeeze follows where ReduceMax
    drops the axes. Exact, but for NaN. Does not fire for other axes or unknown sizes.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("GlobalMaxPool", "ReduceMax")

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, graph = node.inputs[0], node.graph
        sizes = query.dimensions(x)
        if x is None or sizes is None or len(sizes) not in (3, 4) or not query.is_float(x):
            return 0
        spatial, rank = list(range(2, len(sizes))), len(sizes)
        if node.op_type == "ReduceMax":
            axes = query.integers(node, "axes", 1)
            if axes is None or sorted(axis % rank for axis in axes) != spatial:
                return 0
        window = [size for size in sizes[2:] if size]
        if len(window) != len(spatial):
            self.refuse(node, "the size of the image is unknown")
            return 0
        assert isinstance(graph, ir.Graph)
        taken, name = query.used_names(graph), str(node.outputs[0].name)
        new = edit.node("MaxPool", [x], f"{name}.pooled", dtype=x.dtype, taken=taken, kernel_shape=window)
        if node.op_type == "ReduceMax" and not node.attributes.get_int("keepdims", 1):
            graph.insert_before(node, new)
            axes_of = edit.initializer(graph, f"{name}.axes", np.array(spatial), taken)
            new = ir.node("Squeeze", [new.outputs[0], axes_of])
        new.name = node.name
        edit.substitute([node], new)
        return 1
