"""Replaces a Gather of all elements in order by a Reshape."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite


class GatherToReshape(OperatorRewrite):
    """Gather(x, I, axis) = Reshape(x, [..., s_1, ..., s_k, ...]) for I = [0, 1, ..., n - 1] of shape [s_1, ..., s_k].

    n is the size of x's axis. torch's exporter writes `as_strided` of a contiguous tensor so, as Gather(Reshape(x,
    [-1]), I): the mean over the pixels of a network in channels_last, such as MobileNetV3. Does not fire if n is
    unknown, the indices are others, in another order or a scalar, or two sizes of the result are unknown.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Gather",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, indices = node.inputs[0], query.constant(node.inputs[1])
        sizes = query.dimensions(x)
        if x is None or indices is None or not indices.ndim or not sizes:
            return 0
        axis = node.attributes.get_int("axis", 0) % len(sizes)
        count = indices.size
        if sizes[axis] != count or not np.array_equal(indices.ravel(), np.arange(count)):
            return 0
        result = [*sizes[:axis], *indices.shape, *sizes[axis + 1 :]]
        if 0 in result or result.count(None) > 1:
            self.refuse(node, f"the sizes {result} of its result are no shape of a Reshape")
            return 0
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        target = np.array([-1 if size is None else size for size in result], np.int64)
        shape = edit.initializer(graph, f"{node.outputs[0].name}.shape", target)
        edit.substitute([node], ir.node("Reshape", [x, shape], name=node.name))
        return 1
