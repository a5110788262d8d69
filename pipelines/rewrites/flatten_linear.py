"""Computes linear layers of four and more axes on three: OpenVINO fuses nothing into an int8 layer of four."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

FUNCTIONS = ("Relu", "Clip", "Erf", "Gelu", "Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "LeakyRelu", "Elu", "Mish")
ARITHMETIC = ("Add", "Sub", "Mul", "Div")


class FlattenLinear(Rewrite):
    """MatMul([n, h, w, c], W) = Reshape(MatMul(Reshape([n, h, w, c]), W)), on [n, h w, c], with what follows it.

    With the MatMul come the operators behind it that compute value by value or along the last axis: functions,
    arithmetic with a constant row, further MatMuls of constant matrices. One Reshape stands before them and one at each
    result that others read. Exact. Does not fire on tensors with an unknown size beside the first axis.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Flattens every linear layer of four and more axes.

        Args:
            model: Model to change.

        Returns:
            Number of flattened groups of operators.
        """
        return sum(self._flatten(model.graph, node) for node in list(model.graph) if node.graph is not None)

    def _flatten(self, graph: ir.Graph, first: ir.Node) -> int:
        x = first.inputs[0] if _is_linear(first) else None
        if x is None or not _sizes(x):
            return 0
        values: dict[ir.Value, list[int]] = {}  # results of the group, and their sizes beside the first axis
        group: list[ir.Node] = []
        for node in graph:  # in order of computation
            y = node.outputs[0] if len(node.outputs) == 1 else None
            joins = node is first or (group and _joins(node, values))
            if y is not None and joins and (sizes := _sizes(y)):
                values[y] = sizes
                group.append(node)
        if not group or group[0] is not first:
            self.refuse(first, "a size of its result is unknown")
            return 0
        *outer, channels = _sizes(x)
        flat = self._reshape(graph, x, [0, int(np.prod(outer)), channels], "flat")
        graph.insert_before(first, flat)
        first.replace_input_with(0, flat.outputs[0])
        for y, sizes in values.items():
            outside = [use for use in y.uses() if use.node not in group]
            y.shape = ir.Shape([y.shape[0] if y.shape is not None else None, int(np.prod(sizes[:-1])), sizes[-1]])
            if outside or y.is_graph_output():
                self._restore(graph, y, sizes, group)
        return 1

    def _restore(self, graph: ir.Graph, y: ir.Value, sizes: list[int], group: list[ir.Node]) -> None:
        """Inserts a Reshape to the former shape before the readers of `y` outside the group."""
        producer = y.producer()
        assert producer is not None
        back = self._reshape(graph, y, [0, *sizes], "unflat")
        out = back.outputs[0]
        out.shape = ir.Shape([y.shape[0] if y.shape is not None else None, *sizes])
        graph.insert_after(producer, back)
        for node, index in [(use.node, use.idx) for use in y.uses()]:
            if node not in group and node is not back:
                node.replace_input_with(index, out)
        for index, output in enumerate(graph.outputs):
            if output is y:
                graph.outputs[index] = out
                y.name, out.name = out.name, y.name

    def _reshape(self, graph: ir.Graph, x: ir.Value, sizes: list[int], stem: str) -> ir.Node:
        shape = edit.initializer(graph, f"{x.name}.{stem}.shape", np.array(sizes, np.int64))
        reshape = edit.node(
            "Reshape", [x, shape], f"{x.name}.{stem}", dtype=ir.DataType.FLOAT, taken=query.used_names(graph)
        )
        reshape.outputs[0].type = x.type
        if stem == "flat":
            reshape.outputs[0].shape = ir.Shape([x.shape[0] if x.shape is not None else None, *sizes[1:]])
        return reshape


def _is_linear(node: ir.Node) -> bool:
    """Whether a node multiplies by a constant matrix."""
    weight = query.constant(node.inputs[1]) if query.is_op(node, "MatMul") else None
    return weight is not None and weight.ndim == 2


def _sizes(x: ir.Value | None) -> list[int]:
    """Sizes of a float tensor of four and more axes beside the first; [] if one of them is unknown or 0."""
    shape = query.dimensions(x)
    sizes = [size for size in (shape or [])[1:] if isinstance(size, int) and size > 0]
    return sizes if shape is not None and len(shape) > 3 and len(sizes) == len(shape) - 1 else []


def _joins(node: ir.Node, values: dict[ir.Value, list[int]]) -> bool:
    """Whether a node computes a result of the group from results of the group and constants alone."""
    inputs = [value for value in node.inputs if value is not None]
    inside = [value for value in inputs if value in values]
    if not inside:
        return False
    if _is_linear(node):
        return inputs[0] in values
    if query.is_op(node, *FUNCTIONS):
        return inputs[0] in values and all(query.constant(value) is not None for value in inputs[1:])
    if not query.is_op(node, *ARITHMETIC):
        return False
    others = [query.constant(value) for value in inputs if value not in values]
    same = all(values[value] == values[inside[0]] for value in inside)
    return same and all(array is not None and array.ndim < 2 for array in others)
