"""Moves the batch of an imported graph to the first axis: where it is joined with another axis, or stands behind one.

`x.view(-1, d)` makes of [n, k, d] a matrix of n k rows, for linear layers and activations, before a view separates them
again (`tensordot` and `ActivationUnit` in DIN). `torch.stack(torch.split(x, ...))` stacks heads along a new first axis,
[heads, n, k, d] (AutoInt in DeepCTR-Torch).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from zoo.recommenders.importers.index_ops import is_matmul

Array = NDArray[Any]
Run = Mapping[str, Array]  # {value name: array}

SAME_SHAPE = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Identity", "Dropout", "Cast")
BINARY = ("Add", "Sub", "Mul", "Div", "PRelu")


def batch_first(model: ir.Model, runs: Sequence[Run], sizes: Sequence[int]) -> ir.Model:
    """Moves the batch to the first axis wherever all operators in between allow it.

    Args:
        model: Graph; it is not changed.
        runs: Values of the graph for two batches.
        sizes: Sizes of the batches.

    Returns:
        A graph with the same results.
    """
    moved = model.clone()
    shapes = _Shapes(runs, sizes)
    changed = _cancel_views(moved.graph)
    changed += _separate_rows(moved.graph, shapes)
    changed += _unstack(moved.graph, shapes)
    return moved if changed else model


class _Shapes:
    """Shapes of values for two batch sizes."""

    def __init__(self, runs: Sequence[Run], sizes: Sequence[int]) -> None:
        self.runs, self.sizes = runs, sizes

    def of(self, value: ir.Value | None, axis: int) -> tuple[int, ...] | None:
        """Returns the sizes without the batch axis; None if the batch stands elsewhere."""
        if value is None or any(str(value.name) not in run for run in self.runs):
            return None
        a, b = (run[str(value.name)].shape for run in self.runs)
        if len(a) != len(b) or len(a) <= axis or (a[axis], b[axis]) != tuple(self.sizes):
            return None
        sizes = a[:axis] + a[axis + 1 :]
        return sizes if sizes == b[:axis] + b[axis + 1 :] else None

    def joined(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Returns [k, ...] of a value [n k, ...] whose rows are k of every sample, k > 1; None for other values."""
        if value is None or any(str(value.name) not in run for run in self.runs):
            return None
        a, b = (run[str(value.name)].shape for run in self.runs)
        if len(a) < 2 or a[1:] != b[1:] or a[0] * self.sizes[1] != b[0] * self.sizes[0]:
            return None
        count, remainder = divmod(a[0], self.sizes[0])
        return (count, *a[1:]) if count > 1 and not remainder else None


def _cancel_views(graph: ir.Graph) -> int:
    """Leaves out a Squeeze of the axes that the Unsqueeze before it added; returns the number of pairs."""
    count = 0
    for node in list(graph):
        before = query.producer(node.inputs[0], "Unsqueeze") if node.op_type == "Squeeze" else None
        if before is None or len(node.inputs) < 2:
            continue
        removed, added = query.constant(node.inputs[1]), query.constant(before.inputs[1])
        x = before.inputs[0]
        if removed is not None and added is not None and x is not None and np.array_equal(removed, added):
            edit.bypass(node, x)
            if not before.outputs[0].uses():
                graph.remove(before)
            count += 1
    return count


# ------------------------------------------------------------------------------------------------------- joined rows


def _separate_rows(graph: ir.Graph, shapes: _Shapes) -> int:
    """Turns values [n k, ...] to [n, k, ...]; returns the number of views that joined the axes."""
    entries = [
        node
        for node in graph
        if node.op_type == "Reshape" and shapes.joined(node.outputs[0]) and not shapes.joined(node.inputs[0])
    ]
    region, exits = _region((node.outputs[0] for node in entries), lambda node: _leaves_rows(node, shapes))
    if region is None or not entries or any(not _allows_rows(node, region, shapes) for node in exits[0]):
        return 0
    inner, left = exits
    for node in entries:
        _reshape(graph, node, [-1, *(shapes.joined(node.outputs[0]) or ())])
    for node in left:
        _reshape(graph, node, [-1, *(shapes.of(node.outputs[0], 0) or ())])
    for node in inner:
        if node.op_type == "Reshape":
            _reshape(graph, node, [-1, *(shapes.joined(node.outputs[0]) or ())])
        elif node.op_type in ("Gemm", "Einsum"):
            _as_matmul(graph, node)
        elif node.op_type in ("Softmax", "Concat"):
            node.attributes["axis"] = ir.AttrInt64("axis", -1)
    return len(entries)


def _region(
    starts: Iterable[ir.Value], leaves: Any
) -> tuple[set[ir.Value] | None, tuple[list[ir.Node], list[ir.Node]]]:
    """Follows values to the operators that `leaves` names; returns the values, and the operators inside and those."""
    region: set[ir.Value] = set()
    inner: dict[ir.Node, None] = {}
    left: dict[ir.Node, None] = {}
    open_values = list(starts)
    while open_values:
        value = open_values.pop()
        if value in region:
            continue
        region.add(value)
        if value.is_graph_output():
            return None, ([], [])
        for use in value.uses():
            if leaves(use.node):
                left[use.node] = None
            else:
                inner[use.node] = None
                open_values += use.node.outputs
    return region, (list(inner), list(left))


def _leaves_rows(node: ir.Node, shapes: _Shapes) -> bool:
    """Whether a view gives the batch an axis of its own again."""
    return node.op_type == "Reshape" and shapes.of(node.outputs[0], 0) is not None


def _allows_rows(node: ir.Node, region: set[ir.Value], shapes: _Shapes) -> bool:
    """Whether an operator computes the same of [n, k, ...] as of [n k, ...]."""
    rows = shapes.joined(node.outputs[0])
    constants = [query.constant(value) if value is not None else None for value in node.inputs]
    if node.domain or rows is None or len(node.outputs) > 1:
        return False
    if node.op_type == "Reshape":
        return rows[0] == (shapes.joined(node.inputs[0]) or (0,))[0]
    if node.op_type in SAME_SHAPE:
        return True
    last = len(rows) - 1  # of a value [n k, ...]
    if node.op_type == "Concat":
        return node.attributes.get_int("axis", 0) in (-1, last) and all(value in region for value in node.inputs)
    if node.op_type == "Softmax":
        return node.attributes.get_int("axis", -1) in (-1, last)
    if node.op_type in BINARY:
        return all(
            value in region or (constant is not None and constant.ndim <= 2 and constant.shape[:-1] in ((), (1,)))
            for value, constant in zip(node.inputs, constants, strict=True)
        )
    matrix = len(constants) > 1 and constants[1] is not None and constants[1].ndim == 2 and last == 1
    if node.op_type == "Gemm":
        return matrix and not node.attributes.get_int("transA", 0) and all(x is not None for x in constants[1:])
    return matrix and (node.op_type == "MatMul" or is_matmul(node))


def _reshape(graph: ir.Graph, node: ir.Node, sizes: Sequence[int]) -> None:
    node.replace_input_with(1, edit.initializer(graph, f"{node.outputs[0].name}.shape", np.array(sizes, np.int64)))


def _as_matmul(graph: ir.Graph, node: ir.Node) -> None:
    """Replaces a layer on a matrix by one on vectors of any number of axes."""
    weight = query.constant(node.inputs[1])
    assert weight is not None
    name, bias = str(node.outputs[0].name), query.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if node.op_type == "Gemm":
        weight = query.inputs_first(node, weight)
        weight = weight * np.float32(node.attributes.get_float("alpha", 1.0))
    more: dict[str, Any] = {"dtype": ir.DataType.FLOAT, "taken": query.used_names(graph)}
    made = [edit.node("MatMul", [node.inputs[0], _weight(graph, name, weight)], name, **more)]
    if bias is not None:
        bias = bias * np.float32(node.attributes.get_float("beta", 1.0))
        made.append(edit.node("Add", [made[0].outputs[0], _weight(graph, name, bias)], name, **more))
    graph.insert_before(node, made)
    node.outputs[0].replace_all_uses_with(made[-1].outputs[0])
    graph.remove(node, safe=True)


def _weight(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    return edit.initializer(graph, f"{name}.weight", np.ascontiguousarray(array, np.float32))


# ----------------------------------------------------------------------------------------------------- stacked first


def _unstack(graph: ir.Graph, shapes: _Shapes) -> int:
    """Turns values [k, n, ...] to [n, k, ...]; returns the number of stacks."""
    stacks = [
        node
        for node in graph
        if node.op_type == "Concat"
        and node.attributes.get_int("axis", 0) == 0
        and all(_is_lifted(value, shapes) for value in node.inputs)
    ]
    region, (inner, left) = _region((node.outputs[0] for node in stacks), _leaves_stack)
    if region is None or not stacks or not all(_allows_stack(node, region, shapes) for node in inner):
        return 0
    lifted = {value.producer(): None for node in stacks for value in node.inputs if value is not None}
    axis = edit.initializer(graph, "stack.axis", np.array([1], np.int64))
    for node in [*filter(None, lifted), *left]:
        node.replace_input_with(1, axis)
    for node in [*stacks, *(node for node in inner if node.op_type == "Split")]:
        node.attributes["axis"] = ir.AttrInt64("axis", 1)
    for node in inner:
        if node.op_type == "Einsum":
            node.attributes["equation"] = ir.AttrString("equation", _swapped(node))
    return len(stacks)


def _is_lifted(value: ir.Value | None, shapes: _Shapes) -> bool:
    """Whether a value is [1, n, ...], made of [n, ...]."""
    node = query.producer(value, "Unsqueeze")
    axes = query.constant(node.inputs[1]) if node is not None else None
    return (
        node is not None
        and axes is not None
        and axes.ravel().tolist() == [0]
        and shapes.of(value, 1) is not None
        and shapes.of(node.inputs[0], 0) is not None
        and len(node.outputs[0].uses()) == 1
    )


def _leaves_stack(node: ir.Node) -> bool:
    """Whether an operator removes the first axis."""
    axes = query.constant(node.inputs[1]) if node.op_type == "Squeeze" and len(node.inputs) > 1 else None
    return axes is not None and axes.ravel().tolist() == [0]


def _allows_stack(node: ir.Node, region: set[ir.Value], shapes: _Shapes) -> bool:
    """Whether an operator computes the same of [n, k, ...] as of [k, n, ...]."""
    if node.domain or any(shapes.of(output, 1) is None for output in node.outputs):
        return False
    axis, own = node.attributes.get_int("axis", 0), [value in region for value in node.inputs]
    if node.op_type == "Einsum":
        return all(own) and bool(_swapped(node))
    if node.op_type == "Split":
        return axis == 0
    rank = len(shapes.of(node.outputs[0], 1) or ()) + 1
    if node.op_type == "Softmax":
        return node.attributes.get_int("axis", -1) % rank > 1
    if node.op_type == "Concat":
        return all(own) and axis % rank > 1
    if node.op_type == "MatMul":
        return all(own) and rank > 2
    return node.op_type in SAME_SHAPE or (node.op_type in BINARY and all(own))


def _swapped(node: ir.Node) -> str:
    """Returns the equation with the first two axes of all operands swapped; "" if they are not the same two."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms = equation.replace("->", ",").split(",")
    if "->" not in equation or any(len(term) < 2 or term[:2] != terms[0][:2] for term in terms):
        return ""
    *operands, result = (term[1] + term[0] + term[2:] for term in terms)
    return f"{','.join(operands)}->{result}"
