"""Moves the Transposes of inputs to the inputs, before the operators that prepare them."""

from __future__ import annotations

import math

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.push_transposes import BINARY, UNARY, moved, permutation


class HoistTransposes(Rewrite):
    """T f(x) = f(T x) for an input x, and elementwise functions f of it and of constants, or Pads.

    Keras and tf2onnx prepare images [n, H, W, C]: they scale, shift and pad them, and transpose them for the first
    convolution. Behind the Transpose these operators are what other rewrites fold into that convolution. A Reshape that
    only moves axes of size 1, which tf2onnx writes for images of one channel, becomes a Transpose. Does not fire if a
    value in between has another reader, or if widths of a Pad are not constant.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Moves every Transpose that follows operators on an input."""
        return sum(self._hoist(model.graph, node) for node in list(model.graph))

    def _hoist(self, main: ir.Graph, node: ir.Node) -> int:
        order = permutation(node) or _moved_ones(node)
        chain = None if order is None else _chain(node.inputs[0])
        if order is None or chain is None or (not chain and query.is_op(node, "Transpose")):
            return 0
        chain.reverse()
        x = chain[0][0].inputs[chain[0][1]] if chain else node.inputs[0]
        assert x is not None
        made = [ir.node("Transpose", [x], {"perm": order}, name=node.name)]
        inverse = [order.index(axis) for axis in range(len(order))]
        for operator, index in chain:
            inner = moved(operator, inverse, main)
            inner.replace_input_with(index, made[-1].outputs[0])
            made.append(inner)
        taken = query.used_names(main)
        for value, new in zip([x, *(link.outputs[0] for link, _ in chain)], made, strict=True):
            new.outputs[0].name = edit.unique(f"{value.name}.transposed", taken)
            new.outputs[0].type = value.type
            if value.shape is not None:
                new.outputs[0].shape = ir.Shape([value.shape[axis] for axis in order])
        old = [node, *(link for link, _ in reversed(chain))]
        ir.convenience.replace_nodes_and_values(main, node, old, made, node.outputs, made[-1].outputs)
        return 1


def _chain(value: ir.Value | None) -> list[tuple[ir.Node, int]] | None:
    """The operators between an input and a value, the last first, and the input of each on the way; None for others."""
    chain: list[tuple[ir.Node, int]] = []
    while value is not None and not value.is_graph_input():
        node = value.producer()
        index = None if node is None or query.sole_user(value) is None else _data(node)
        if node is None or index is None:
            return None
        chain.append((node, index))
        value = node.inputs[index]
    return None if value is None or value.is_initializer() else chain


def _data(node: ir.Node) -> int | None:
    """The input of an operator that is not constant; None for an operator that no Transpose passes."""
    places = [i for i, value in enumerate(node.inputs) if value is not None and query.constant(value) is None]
    if len(places) != 1 or not query.is_op(node, *UNARY, *BINARY, "Pad") or len(node.outputs) != 1:
        return None
    (index,) = places
    x = node.inputs[index]
    if query.is_op(node, *BINARY):
        rank = query.rank(x)
        fits = rank is not None and all((query.rank(value) or 0) <= rank for value in node.inputs)
        return index if fits else None
    further = len(node.inputs) > 3 and node.inputs[3] is not None  # axes of a Pad
    static = node.op_type != "Pad" or (query.integers(node, "pads", 1) is not None and not further)
    return index if index == 0 and static else None


def _moved_ones(node: ir.Node) -> list[int] | None:
    """The permutation that a Reshape of an image is, if it only moves an axis of size 1; else None."""
    if not query.is_op(node, "Reshape"):
        return None
    before, after = query.dimensions(node.inputs[0]), query.dimensions(node.outputs[0])
    if before is None or after is None or len(before) != 4 or len(after) != 4 or before[0] != after[0]:
        return None
    for order in ([0, 3, 1, 2], [0, 2, 3, 1]):
        fits = [before[axis] for axis in order] == after and None not in before[1:]
        alone = before[3 if order[1] == 3 else 1] == 1
        if fits and alone and math.prod(size or 0 for size in before[1:]) > 1:
            return order
    return None
