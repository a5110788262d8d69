"""Removes sums and products with a constant that change nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}
COMMUTES = ("Add", "Mul")


class DropNeutral(OperatorRewrite):
    """x + 0 = x - 0 = x 1 = x / 1 = x^1 = x.

    PaddlePaddle writes a factor of attention as x c + 0, Keras an unused normalization as (x - 0) / 1. The constant is
    of one element, or leaves the shape as it is. Does not fire between a graph input and a graph output.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = tuple(NEUTRAL)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        result = node.outputs[0]
        for index in (1, 0) if node.op_type in COMMUTES else (1,):
            array, x = query.constant(node.inputs[index]), node.inputs[1 - index]
            if array is None or x is None or not array.size or not np.all(array == NEUTRAL[node.op_type]):
                continue
            rank = query.rank(x)
            same = rank is not None and array.ndim <= rank
            if same and array.size > 1:
                sizes = query.dimensions(x) or []
                same = all(size in (1, own) for size, own in zip(array.shape[::-1], sizes[::-1], strict=False))
            if not same or (result.is_graph_output() and (x.is_graph_input() or x.is_graph_output())):
                continue
            edit.bypass(node, x)
            return 1
        return 0
