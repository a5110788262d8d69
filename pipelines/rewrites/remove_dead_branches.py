"""Removes branches on constant conditions and operators without effect."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class RemoveDeadBranches(Rewrite):
    """Dead branch elimination: If(constant) = the branch taken, inlined; Dropout(x) = x; Cast(x) = x of x's own type.

    The values of an inlined branch get names that are unused in the whole graph. Unused nodes and outputs are removed
    by the clean-up between rounds. Loop, Scan, an If on a computed condition, and a Dropout in training mode or with a
    mask that is read do not change.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Inlines or removes every such operator of the main graph."""
        return sum(self._remove(node) for node in list(model.graph))

    def _remove(self, node: ir.Node) -> int:
        if query.is_op(node, "If"):
            return self._inline(node)
        x = node.inputs[0] if node.inputs else None
        if (
            query.is_op(node, "Cast")
            and x is not None
            and x.dtype is not None
            and x.dtype == node.attributes.get_int("to", 0)
        ):
            edit.bypass(node, x)
            return 1
        if query.is_op(node, "Dropout") and x is not None:
            training = query.constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else False
            if training is None or training or any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
                self.refuse(
                    node, "it is in training mode, or may be" if training is None or training else "its mask is read"
                )
                return 0
            if node.outputs[0].is_graph_output() and len(node.outputs) > 1:
                node.resize_outputs(1)
            edit.bypass(node, x)
            return 1
        return 0

    def _inline(self, node: ir.Node) -> int:
        condition = query.constant(node.inputs[0])
        if condition is None or condition.size != 1:
            self.refuse(node, "its condition is computed: both branches stay as they are")
            return 0
        main = node.graph
        assert isinstance(main, ir.Graph)
        branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
        inner = list(branch)
        results = list(branch.outputs)
        branch.outputs.clear()
        branch.remove(inner)
        taken = query.used_names(main)
        for name, value in list(branch.initializers.items()):
            del branch.initializers[name]
            value.name = edit.unique(name, taken)
            main.register_initializer(value)
        for operator in inner:
            operator.name = edit.unique(str(operator.name or operator.outputs[0].name), taken)
            for value in operator.outputs:
                if value.name:
                    value.name = edit.unique(value.name, taken)
        main.insert_before(node, inner)
        for result, value in zip(node.outputs, results, strict=True):
            copy = ir.node("Identity", [value])
            copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = result.name, result.type, result.shape
            main.insert_before(node, copy)
            result.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
        main.remove(node, safe=True)
        return 1
