"""Replaces a Sum by an Add, the operator that has an int8 form."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite


class SumToAdd(OperatorRewrite):
    """Sum(a, b, c) = Add(Add(a, b), c), in the order in which ONNX Runtime adds; Sum(a) = a.

    Caffe2, PaddlePaddle and older exporters write the shortcuts of residual networks as Sum.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Sum",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        graph, first = node.graph, node.inputs[0]
        assert isinstance(graph, ir.Graph) and first is not None
        if len(node.inputs) == 1:
            edit.bypass(node, first)
            return 1
        taken, name = query.used_names(graph), str(node.outputs[0].name)
        total = first
        for term in node.inputs[1:-1]:
            part = edit.node("Add", [total, term], f"{name}.part", dtype=first.dtype, taken=taken)
            graph.insert_before(node, part)
            total = part.outputs[0]
        edit.substitute([node], ir.node("Add", [total, node.inputs[-1]], name=node.name))
        return 1
