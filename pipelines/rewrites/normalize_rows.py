"""Batch normalization of flattened tokens becomes a scale and shift of channels, which the layer before absorbs."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite
from pipelines.rewrites.fold_batch_norm import as_affine


class NormalizeRows(OperatorRewrite):
    """BatchNorm(Reshape(x, [n t, C])) = Reshape(a x + c, [n t, C]) for x [..., C]; BatchNorm(x W) = a (x W) + c.

    a = gamma / sqrt(variance + epsilon) and c = beta - a mean, computed in float64. `FoldBatchNorm` and `FuseLinear`
    fold them into a MatMul (LeViT). Does not fire after other operators, whose layers absorb a BatchNormalization as it
    is, or where the result of the Reshape has other readers.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("BatchNormalization",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        rows, graph = node.inputs[0], node.graph
        sizes = query.dimensions(rows)
        if rows is None or sizes is None or len(sizes) != 2 or sizes[1] is None or not query.is_float(rows):
            return 0
        affine, before = as_affine(node, rows, sizes[1], 2), rows.producer()
        flattens = query.is_op(before, "Flatten", "Reshape") and query.sole_user(rows) is node
        source = before.inputs[0] if before is not None and flattens else rows
        if affine is None or before is None or source is None or not (flattens or query.is_op(before, "MatMul")):
            return 0
        if (query.dimensions(source) or [None])[-1] != sizes[1]:
            self.refuse(node, "the Reshape before it splits or joins channels")
            return 0
        assert isinstance(graph, ir.Graph)
        taken, x = query.used_names(graph), source
        for op_type, array in (("Mul", affine.scale), ("Add", affine.shift)):
            constant = edit.initializer(
                graph, f"{node.outputs[0].name}.{op_type.lower()}", array.astype(np.float32), taken
            )
            made = edit.node(op_type, [x, constant], f"{constant.name}.rows", dtype=ir.DataType.FLOAT, taken=taken)
            made.outputs[0].shape = source.shape
            graph.insert_before(before if flattens else node, made)
            x = made.outputs[0]
        if flattens:
            before.replace_input_with(0, x)
            x = rows
        edit.bypass(node, x)
        return 1
