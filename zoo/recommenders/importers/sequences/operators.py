"""Operators of imported rankers around attention: layers, and operators that only move entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from zoo.recommenders.lowering.sequences.matcher import NoMatch, both

Array = NDArray[Any]
VIEWS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Dropout", "Expand", "Tile")


def plain(value: ir.Value | None) -> ir.Value:
    """Returns the value before operators that only move or repeat entries; raises NoMatch for None."""
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
    at = query.constant(node.inputs[1]) if node.op_type == "Gather" else None
    return at is not None and at.size == 1 and not at.any() and query.constant(node.inputs[0]) is None


def producer(value: ir.Value | None, *ops: str) -> ir.Node:
    """Returns the operator that computes a value.

    Args:
        value: The value; operators that only move entries are passed.
        *ops: Its types.

    Raises:
        NoMatch: The operator is of another type.
    """
    node = plain(value).producer()
    if node is None or node.op_type not in ops:
        raise NoMatch
    return node


def layer(value: ir.Value | None) -> tuple[ir.Value, Array, Array]:
    """Returns input, weight [inputs, outputs] and bias of a linear layer, with the batch normalization behind it."""
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
        weight = weight.T if node.attributes.get_int("transB", 0) else weight
        given = query.constant(node.inputs[2]) if len(node.inputs) > 2 else bias
        if given is None:
            raise NoMatch
        bias = given
    return plain(node.inputs[0]), weight, np.broadcast_to(bias.ravel().astype(np.float64), weight.shape[1:])


def normalization(node: ir.Node) -> tuple[Array, Array]:
    """Returns scale and shift of a batch normalization."""
    arrays = [query.constant(source) for source in node.inputs[1:5]]
    if len(arrays) < 4 or any(array is None for array in arrays):
        raise NoMatch
    scale, bias, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    scale = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return scale, bias - mean * scale


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
