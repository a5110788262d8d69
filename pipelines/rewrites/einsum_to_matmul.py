"""Writes Einsum as the MatMul that it computes: int8 layers are MatMul, Gemm and Conv, and attention is two MatMul."""

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
    come first. A Transpose follows where the new axes are not the last ones. Does not fire on labels that W, x and the
    result have (a product for every index), on traces and on axes of x that are summed alone.

    Einsum("bhik,bhjk->bhij", x, y) = MatMul(x, Transpose(y)) of computed factors: the labels that both and the result
    have come first, then those of one factor, in Reshapes where they are several of known sizes.
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
            return self._of_computed(graph, einsum, taken)
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
        made = _Nodes(graph, einsum, taken)
        value = made.reshaped(x, [*[0] * len(outer), matrix.shape[0]], "rows") if len(summed) > 1 else x
        value = made.product(value, edit.initializer(graph, f"{einsum.outputs[0].name}.matrix", matrix, taken))
        value = made.reshaped(value, [*[0] * len(outer), *sizes], "axes") if len(new) > 1 else value
        made.finish(made.ordered(value, [*outer, *new], result, "ordered"))
        return True

    def _of_computed(self, graph: ir.Graph, einsum: ir.Node, taken: set[str]) -> bool:
        terms = _terms(einsum)
        if (
            len(einsum.inputs) != 2
            or terms is None
            or any(query.constant(value) is not None for value in einsum.inputs)
        ):
            return False
        (left, right), result = terms
        sizes: dict[str, int | None] = {}
        for value, labels in zip(einsum.inputs, (left, right), strict=True):
            sizes |= dict(zip(labels, query.dimensions(value) or [None] * len(labels), strict=True))
        batch = [label for label in result if label in left and label in right]
        summed = [label for label in left if label in right and label not in result]
        own = [[label for label in labels if label not in (*batch, *summed)] for labels in (left, right)]
        groups = [*own, summed]
        several = any(len(group) != 1 for group in groups)
        if ELLIPSIS in sizes or not summed or sorted([*batch, *own[0], *own[1]]) != sorted(result):
            self.refuse(einsum, "its factors are no matrices")
            return False
        if several and any(sizes[label] is None for group in groups for label in group):
            self.refuse(einsum, "the sizes of its axes are unknown")
            return False
        made, first = _Nodes(graph, einsum, taken), [0] * len(batch)
        a, b = (value for value in einsum.inputs if value is not None)
        a = made.ordered(a, left, [*batch, *own[0], *summed], "left")
        b = made.ordered(b, right, [*batch, *summed, *own[1]], "right")
        if several:
            rows, columns, inner = (int(np.prod([sizes[label] or 0 for label in group])) for group in groups)
            a, b = (
                made.reshaped(a, [*first, rows, inner], "rows"),
                made.reshaped(b, [*first, inner, columns], "columns"),
            )
        value = made.product(a, b)
        if several:
            value = made.reshaped(value, [*first, *(sizes[label] or 0 for label in (*own[0], *own[1]))], "axes")
        made.finish(made.ordered(value, [*batch, *own[0], *own[1]], result, "ordered"))
        return True


class _Nodes:
    """The nodes that replace an Einsum, named after its result."""

    def __init__(self, graph: ir.Graph, einsum: ir.Node, taken: set[str]) -> None:
        self.graph, self.einsum, self.taken = graph, einsum, taken
        self.y, self.nodes = einsum.outputs[0], list[ir.Node]()

    def add(self, op: str, inputs: list[ir.Value | None], stem: str, **attributes: list[int]) -> ir.Value:
        """Adds a node; returns its output."""
        name = f"{self.y.name}.{stem}"
        self.nodes.append(edit.node(op, inputs, name, dtype=self.y.dtype, taken=self.taken, **attributes))
        return self.nodes[-1].outputs[0]

    def reshaped(self, value: ir.Value, shape: list[int], stem: str) -> ir.Value:
        """A value of another shape; 0 keeps an axis."""
        target = edit.initializer(self.graph, f"{self.y.name}.{stem}.shape", np.array(shape, np.int64), self.taken)
        return self.add("Reshape", [value, target], stem)

    def ordered(self, value: ir.Value, labels: list[str], order: list[str], stem: str) -> ir.Value:
        """A value with its axes in another order."""
        if labels == order:
            return value
        return self.add("Transpose", [value], stem, perm=[labels.index(label) for label in order])

    def product(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The product, under the name of the Einsum."""
        value = self.add("MatMul", [a, b], "product")
        self.nodes[-1].name = self.einsum.name
        return value

    def finish(self, value: ir.Value) -> None:
        """Replaces the Einsum; value: the result."""
        value.shape = self.y.shape
        ir.convenience.replace_nodes_and_values(self.graph, self.einsum, [self.einsum], self.nodes, [self.y], [value])


def _terms(einsum: ir.Node) -> tuple[list[list[str]], list[str]] | None:
    """Returns the labels of the inputs and those of the result, unless a term has a label twice."""
    equation = einsum.attributes.get_string("equation", "").replace(" ", "").replace("...", ELLIPSIS)
    left, arrow, right = equation.partition("->")
    terms = [list(part) for part in (*left.split(","), right)]
    if not arrow or len(terms) != 1 + len(einsum.inputs) or any(len(set(part)) != len(part) for part in terms):
        return None
    return terms[:-1], terms[-1]


def _factors(einsum: ir.Node) -> tuple[ir.Value, list[str], NDArray[np.float32], list[str], list[str]] | None:
    """Returns an input and its labels, the float constant and its labels, and the labels of the result."""
    terms = _terms(einsum)
    constants = [query.constant(value) for value in einsum.inputs]
    if terms is None or len(constants) != 2 or (constants[0] is None) == (constants[1] is None):
        return None
    labels, result = terms
    index = 0 if constants[1] is not None else 1
    x, weight = einsum.inputs[index], constants[1 - index]
    own, others = labels[index], labels[1 - index]
    if x is None or weight is None or weight.dtype != np.float32 or weight.ndim != len(others) or ELLIPSIS in others:
        return None
    return x, own, weight, others, result
