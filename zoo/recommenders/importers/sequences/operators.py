"""Operators of imported rankers around attention: layers, and operators that only move entries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from zoo.recommenders.lowering.sequences.matcher import NoMatch, both

Array = NDArray[Any]
T = TypeVar("T")
VIEWS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Dropout", "Expand", "Tile")


def matches(model: ir.Model, read: Callable[[ir.Node], T]) -> list[T]:
    """Reads a structure at all operators of a graph.

    Args:
        model: Graph.
        read: Reads the structure whose last operator is given; raises NoMatch for another operator.

    Returns:
        The structures, in the order of their results.
    """
    structures = []
    for node in model.graph:
        with contextlib.suppress(NoMatch):
            structures.append(read(node))
    return structures


def plain(value: ir.Value | None) -> ir.Value:
    """Returns the value before operators that only move or repeat entries; raises NoMatch for None.

    Args:
        value: Value of a graph, or None.
    """
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in VIEWS and not _takes_all(node):
            break
        value = node.inputs[0]
    if value is None:
        raise NoMatch
    return value


def _takes_all(node: ir.Node) -> bool:
    """Whether an operator joins one value, or takes the first of an axis: the only one, behind one output."""
    if node.op_type == "Concat":
        return len(node.inputs) == 1
    indices = query.constant(node.inputs[1]) if node.op_type == "Gather" else None
    return indices is not None and indices.size == 1 and not indices.any() and query.constant(node.inputs[0]) is None


def producer(value: ir.Value | None, *ops: str) -> ir.Node:
    """Returns the operator that computes a value.

    Args:
        value: The value; operators that only move entries are passed.
        *ops: Its types.

    Raises:
        NoMatch: The operator is of another type.
    """
    node = query.producer(plain(value), *ops)
    if node is None:
        raise NoMatch
    return node


def layer(value: ir.Value | None) -> tuple[ir.Value, Array, Array]:
    """Returns input, weight [inputs, outputs] and bias of a linear layer, with the batch normalization behind it.

    Args:
        value: Result of the layer, or None.
    """
    node = producer(value, "Gemm", "MatMul", "Add", "BatchNormalization")
    if node.op_type == "BatchNormalization":
        x, weight, bias = layer(node.inputs[0])
        scale, shift = normalization(node)
        return x, weight * scale, bias * scale + shift
    if node.op_type == "Add":
        for product, constant in both(list(node.inputs)):
            added = query.constant(constant)
            if added is not None and product is not None:
                x, weight, none = layer(product)
                return x, weight, none + np.broadcast_to(added.ravel().astype(np.float64), none.shape)
        raise NoMatch
    matrix = query.constant(node.inputs[1])
    if matrix is None or matrix.ndim != 2:
        raise NoMatch
    weight = matrix.astype(np.float64)
    bias = np.zeros(1)
    if node.op_type == "Gemm":
        if node.attributes.get_int("transA", 0) or any(
            node.attributes.get_float(a, 1.0) != 1 for a in ("alpha", "beta")
        ):
            raise NoMatch
        weight = query.inputs_first(node, weight)
        addend = query.constant(node.inputs[2]) if len(node.inputs) > 2 else bias
        if addend is None:
            raise NoMatch
        bias = addend
    return plain(node.inputs[0]), weight, np.broadcast_to(bias.ravel().astype(np.float64), weight.shape[1:])


def normalization(node: ir.Node) -> tuple[Array, Array]:
    """Returns scale and shift of a batch normalization.

    Args:
        node: The BatchNormalization.
    """
    arrays = [query.constant(source) for source in node.inputs[1:5]]
    if len(arrays) < 4 or any(array is None for array in arrays):
        raise NoMatch
    scale, bias, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    scale = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return scale, bias - mean * scale


def row_normalization(node: ir.Node, x: ir.Value, units: int) -> tuple[float, float]:
    """Factor and epsilon of (x - mean) / root: factor times x less its mean, divided by sqrt(variance + epsilon).

    The root is that of the sum or mean of the squared deviations; a constant may be added before or after it.

    Args:
        node: The Div.
        x: The input.
        units: Size of its last axis.

    Raises:
        NoMatch: The operators are others.
    """
    deviation, root = node.inputs
    if not _is_deviation(deviation, x):
        raise NoMatch
    total = producer(producer(root, "Sqrt").inputs[0], "ReduceSum", "ReduceMean", "Add")
    after = before = 0.0
    if total.op_type == "Add":
        summed, after = _with_number(total)
        total = producer(summed, "ReduceSum", "ReduceMean")
    squares = producer(total.inputs[0], "Pow", "Mul", "Add")
    if squares.op_type == "Add":
        summed, before = _with_number(squares)
        squares = producer(summed, "Pow", "Mul")
    if squares.op_type == "Pow" and _with_number(squares)[1] != 2:
        raise NoMatch
    factors = squares.inputs[: 1 if squares.op_type == "Pow" else 2]
    if not _over_units(total) or not all(_is_deviation(factor, x) for factor in factors):
        raise NoMatch
    count = units if total.op_type == "ReduceSum" else 1  # number of variances in the sum
    return count**-0.5, (after + before * count) / count


def _is_deviation(value: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value is x less its mean over the units."""
    node = query.producer(plain(value), "Sub")
    if node is None or plain(node.inputs[0]) is not x:
        return False
    mean = query.producer(plain(node.inputs[1]), "ReduceMean")
    return mean is not None and plain(mean.inputs[0]) is x and _over_units(mean)


def _over_units(reduction: ir.Node) -> bool:
    """Whether an operator reduces the last axis."""
    axes, rank = query.integers(reduction, "axes", 1), query.rank(reduction.inputs[0])
    return axes is not None and len(axes) == 1 and axes[0] in (-1, 1 if rank is None else rank - 1)


def _with_number(node: ir.Node) -> tuple[ir.Value | None, float]:
    """The other input, and the constant one, of an operator."""
    for x, constant in both(list(node.inputs)):
        array = query.constant(constant)
        if array is not None and array.size == 1:
            return x, float(array.item())
    raise NoMatch


def inner_nodes(pooled: ir.Value, ends: set[ir.Value]) -> set[ir.Node]:
    """Finds the operators between values that nothing else reads.

    Args:
        pooled: The result, whose operator is left out.
        ends: The inputs.

    Returns:
        The operators.
    """
    ordered: list[ir.Node] = []
    waiting = [pooled.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in ordered:
            continue
        ordered.append(node)
        waiting += [source.producer() for source in node.inputs if source is not None and source not in ends]
    inner = {node for node in ordered if node is not pooled.producer()}
    changed = True
    while changed:
        read = {
            node
            for node in inner
            if any(
                use.node not in inner and use.node is not pooled.producer()
                for out in node.outputs
                for use in out.uses()
            )
            or any(out.is_graph_output() for out in node.outputs)
        }
        inner, changed = inner - read, bool(read)
    return inner
