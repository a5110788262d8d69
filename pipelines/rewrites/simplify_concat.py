"""Simplifies concatenations that need no copy."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class SimplifyConcat(Rewrite):
    """Simplifies Concat and Split: nested Concats merge, a Concat and a Split that undo each other are removed.

    Concat(x) = x, Concat(a, Concat(b, c)) = Concat(a, b, c), Concat(Split(x)) = x, Split(Concat(a, b)) = a, b; all on
    one axis. The third requires all parts in order, the last equal cuts. Does not fire if the inner concatenation has
    another reader: it is needed anyway, and another copy of its parts saves nothing.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Simplifies every Concat and Split of the main graph."""
        return sum(
            self._concat(node) if query.is_op(node, "Concat") else self._split(node) for node in list(model.graph)
        )

    def _concat(self, node: ir.Node) -> int:
        parts = list(node.inputs)
        if len(parts) == 1 and parts[0] is not None:
            edit.bypass(node, parts[0])
            return 1
        axis = _axis(node, node.outputs[0])
        split = query.producer(parts[0] if parts else None, "Split")
        if split is not None and tuple(parts) == tuple(split.outputs) and split.inputs[0] is not None:
            if _axis(split, split.inputs[0], 0) == axis is not None:
                edit.bypass(node, split.inputs[0])
                return 1
            self.refuse(node, "it joins the parts of a Split on another axis")
        for index, part in enumerate(parts):
            inner = query.producer(part, "Concat")
            if inner is None or len(inner.inputs) < 2:
                continue
            if _axis(inner, inner.outputs[0]) != axis or axis is None:
                self.refuse(node, f"Concat {query.label(inner)} before it joins another axis")
            elif query.sole_user(inner.outputs[0]) is not node:
                self.refuse(node, f"Concat {query.label(inner)} before it has another reader")
            else:
                new = ir.node(
                    "Concat", [*parts[:index], *inner.inputs, *parts[index + 1 :]], {"axis": axis}, name=node.name
                )
                edit.substitute([inner, node], new)
                return 1
        return 0

    def _split(self, node: ir.Node) -> int:
        joined = node.inputs[0] if query.is_op(node, "Split") else None
        concat = query.producer(joined, "Concat")
        if joined is None or concat is None or len(concat.inputs) != len(node.outputs):
            return 0
        axis = _axis(concat, joined)
        shapes = [query.dimensions(value) for value in (*concat.inputs, *node.outputs)]
        if axis is None or axis != _axis(node, joined, 0) or any(dims is None or dims[axis] is None for dims in shapes):
            return 0
        widths = [dims[axis] for dims in shapes if dims is not None]
        if widths[: len(concat.inputs)] != widths[len(concat.inputs) :]:
            self.refuse(node, f"it cuts Concat {query.label(concat)} at other places than its seams")
            return 0
        main = node.graph
        assert isinstance(main, ir.Graph)
        for result, part in zip(node.outputs, concat.inputs, strict=True):
            if part is not None and result.is_graph_output():
                copy = ir.node("Identity", [part])
                copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = (
                    result.name,
                    result.type,
                    result.shape,
                )
                main.insert_before(node, copy)
                part = copy.outputs[0]
            if part is not None:
                result.replace_all_uses_with(part, replace_graph_outputs=True)
        main.remove(node, safe=True)
        return 1


def _axis(node: ir.Node, value: ir.Value, default: int | None = None) -> int | None:
    """Returns the axis of the operator, counted from the front."""
    axis, rank = node.attributes.get_int("axis", default), query.rank(value)
    return axis if axis is None or axis >= 0 else None if rank is None else axis + rank
