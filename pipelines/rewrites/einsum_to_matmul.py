"""Writes Einsum with a constant as the MatMul that it computes: int8 layers are MatMul, Gemm and Conv."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

ELLIPSIS = "."  # "..." as one label


class EinsumToMatMul(Rewrite):
    """Einsum("...k,kn->...n", x, W) = MatMul(x, W), and the same over several axes k and n between Reshapes.

    The labels of W are those of the last axes of x, and new ones of the result; W may have them in any order, and may
    come first. A Transpose follows where the new axes are not the last ones. Does not fire on labels that both factors
    and the result have (a product for every index), on traces and on axes of x that are summed alone.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every such Einsum of the main graph.

        Args:
            model: Model to change.

        Returns:
            Number of replaced operators.
        """
        taken = query.used_names(model.graph)
        return sum(self._replace(model.graph, node, taken) for node in list(model.graph) if query.is_op(node, "Einsum"))

    def _replace(self, graph: ir.Graph, einsum: ir.Node, taken: set[str]) -> bool:
        factors = _factors(einsum)
        if factors is None:
            return False
        x, labels, weight, weight_labels, result = factors
        summed = [label for label in weight_labels if label not in result]
        new = [label for label in result if label in weight_labels]
        outer = labels[: len(labels) - len(summed)]
        fits = sorted(summed + new) == sorted(weight_labels) and sorted(labels[len(outer) :]) == sorted(summed)
        if not fits or not summed or not new or set(outer) & set(weight_labels) or set(outer) - set(result):
            self.refuse(einsum, "its constant is no matrix of the last axes")
            return False
        summed = labels[len(outer) :]
        several = len(summed) > 1 or len(new) > 1 or [*outer, *new] != result
        if several and ELLIPSIS in outer:
            self.refuse(einsum, "the number of its axes is unknown")
            return False
        order = [weight_labels.index(label) for label in (*summed, *new)]
        sizes = [weight.shape[weight_labels.index(label)] for label in new]
        matrix = np.ascontiguousarray(weight.transpose(order).reshape(-1, int(np.prod(sizes))))
        y, nodes = einsum.outputs[0], list[ir.Node]()

        def add(op: str, inputs: list[ir.Value | None], stem: str, **attributes: list[int]) -> ir.Value:
            nodes.append(edit.node(op, inputs, f"{y.name}.{stem}", dtype=x.dtype, taken=taken, **attributes))
            return nodes[-1].outputs[0]

        def reshaped(value: ir.Value, shape: list[int], stem: str) -> ir.Value:
            target = edit.initializer(graph, f"{y.name}.{stem}.shape", np.array(shape, np.int64), taken)
            return add("Reshape", [value, target], stem)

        value = reshaped(x, [*[0] * len(outer), matrix.shape[0]], "rows") if len(summed) > 1 else x
        value = add("MatMul", [value, edit.initializer(graph, f"{y.name}.matrix", matrix, taken)], "product")
        nodes[-1].name = einsum.name
        value = reshaped(value, [*[0] * len(outer), *sizes], "axes") if len(new) > 1 else value
        if (natural := [*outer, *new]) != result:
            value = add("Transpose", [value], "ordered", perm=[natural.index(label) for label in result])
        value.shape = y.shape
        ir.convenience.replace_nodes_and_values(graph, einsum, [einsum], nodes, [y], [value])
        return True


def _factors(einsum: ir.Node) -> tuple[ir.Value, list[str], NDArray[np.float32], list[str], list[str]] | None:
    """Returns an input and its labels, the float constant and its labels, and the labels of the result."""
    equation = einsum.attributes.get_string("equation", "").replace(" ", "").replace("...", ELLIPSIS)
    left, arrow, right = equation.partition("->")
    labels = [list(part) for part in left.split(",")]
    constants = [query.constant(value) for value in einsum.inputs]
    if not arrow or len(einsum.inputs) != 2 or len(labels) != 2 or (constants[0] is None) == (constants[1] is None):
        return None
    index = 0 if constants[1] is not None else 1
    x, weight = einsum.inputs[index], constants[1 - index]
    own, others = labels[index], labels[1 - index]
    if x is None or weight is None or weight.dtype != np.float32 or weight.ndim != len(others) or ELLIPSIS in others:
        return None
    if any(len(set(part)) != len(part) for part in (own, others, list(right))):
        return None
    return x, own, weight, others, list(right)
