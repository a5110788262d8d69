"""Graph queries that passes share: constants, shapes, readers, shape arithmetic, embedding lookups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

CHOOSING = ("NonMaxSuppression", "NonZero", "Compress", "Unique")  # the size of their results depends on the data
MAX_SHAPE_ELEMENTS = 64  # elements of a tensor of shape arithmetic, at most


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Returns the array of an initializer or a Constant node, else None.

    Args:
        value: Value of a graph, or None.
    """
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def used_names(graph: ir.Graph) -> set[str]:
    """Returns the names of all nodes and values, including those of subgraphs.

    Args:
        graph: Graph, with its subgraphs.
    """
    values = [*graph.inputs, *graph.initializers.values()]
    names = {value.name for value in values}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names |= {node.name, *(value.name for value in (*node.inputs, *node.outputs) if value is not None)}
    return {name for name in names if name}


def weight_bytes(model: ir.Model) -> int:
    """Returns the size of the constant initializers, in bytes.

    Args:
        model: The model.
    """
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


def op_counts(model: ir.Model) -> dict[str, int]:
    """Returns the number of nodes of the main graph by operator type, most frequent first.

    Args:
        model: The model.
    """
    counts: dict[str, int] = {}
    for node in model.graph:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def dequantized(value: ir.Value | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None] | None:
    """Returns the constant behind a DequantizeLinear.

    Args:
        value: Value of a graph, or None.

    Returns:
        (integers, scale, zero point or None for 0), or None for another value.
    """
    node = producer(value, "DequantizeLinear")
    if node is None:
        return None
    integers, scale, zero = (constant(source) for source in (*node.inputs, None)[:3])
    return None if integers is None or scale is None else (integers, scale, zero)


def producer(value: ir.Value | None, *types: str) -> ir.Node | None:
    """Returns the node that computes a value; None for an input, an initializer, and for None.

    Args:
        value: Value of a graph, or None.
        *types: Operator types; with them, also None for other operators, see `is_op`.
    """
    node = None if value is None else value.producer()
    return node if not types or is_op(node, *types) else None


def sole_user(value: ir.Value) -> ir.Node | None:
    """Returns the only node that reads a value; None if there are others, or it is a graph output.

    Args:
        value: Value of a graph.
    """
    uses = list(value.uses())
    return (
        uses[0].node if len(uses) == 1 and not value.is_graph_output() and uses[0].node.graph is value.graph else None
    )


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """Returns the shape if all of it is static, else None.

    Args:
        value: Value of a graph, or None.
    """
    sizes = dimensions(value)
    return None if sizes is None or None in sizes else tuple(size for size in sizes if size is not None)


def dimensions(value: ir.Value | None) -> list[int | None] | None:
    """Returns the shape with None for dynamic dimensions; None if the rank is unknown.

    Args:
        value: Value of a graph, or None.
    """
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


def symbolic_shape(value: ir.Value | None) -> list[int | str | None] | None:
    """Returns `dimensions` with the symbolic names of dynamic dimensions; equal names are equal sizes.

    Args:
        value: Value of a graph, or None.
    """
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def scalar(value: ir.Value | None) -> float | None:
    """Returns the number in a constant of one element, else None.

    Args:
        value: Value of a graph, or None.
    """
    array = constant(value)
    return float(array.item()) if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None


def integers(node: ir.Node, key: str, position: int) -> list[int] | None:
    """Returns integers that are an attribute in old opsets and a constant input in newer ones (axes, pads, split, ...).

    Args:
        node: Operator.
        key: Name of the attribute.
        position: Index of the input.

    Returns:
        The integers, or None if absent or computed.
    """
    if (attribute := node.attributes.get(key)) is not None:
        return [int(number) for number in attribute.as_ints()]
    array = constant(node.inputs[position]) if len(node.inputs) > position else None
    return None if array is None else [int(number) for number in array.ravel()]


def shape_elements(value: ir.Value | None) -> list[int | str | None] | None:
    """Returns the integers of a scalar or 1-D tensor of shape arithmetic.

    Follows Shape, Gather, Slice, Concat, Cast, Squeeze and Unsqueeze.

    Args:
        value: Value of a graph, or None.

    Returns:
        The integers, dynamic ones as in `symbolic_shape`; None for another value.
    """
    if value is None or (rank(value) or 0) > 1:
        return None
    if (array := constant(value)) is not None:
        return (
            [int(number) for number in array.ravel()]
            if array.dtype.kind in "iu" and array.size <= MAX_SHAPE_ELEMENTS
            else None
        )
    node = value.producer()
    if node is None or not is_op(node, "Shape", "Gather", "Slice", "Concat", "Cast", "Squeeze", "Unsqueeze"):
        return None
    if node.op_type == "Shape":
        sizes = symbolic_shape(node.inputs[0])
        return (
            None
            if sizes is None
            else sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))]
        )
    if node.op_type == "Cast" and value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    elements: list[int | str | None] = []
    for source in node.inputs if node.op_type == "Concat" else node.inputs[:1]:
        part = shape_elements(source)
        if part is None:
            return None
        elements += part
    if node.op_type == "Gather":
        picks = shape_elements(node.inputs[1])
        if picks is None or any(
            not isinstance(pick, int) or not -len(elements) <= pick < len(elements) for pick in picks
        ):
            return None
        return [elements[pick] for pick in picks if isinstance(pick, int)]
    if node.op_type == "Slice":
        bounds = [
            [1] if index == 4 and len(node.inputs) < 5 else shape_elements(node.inputs[index]) for index in (1, 2, 4)
        ]
        numbers = [bound[0] for bound in bounds if bound is not None and len(bound) == 1 and isinstance(bound[0], int)]
        return elements[slice(*numbers)] if len(numbers) == 3 else None
    return elements


def label(node: ir.Node | ir.Value) -> str:
    """Returns the name of a node or value in reports: its own, or its first output's.

    Args:
        node: Operator or value.
    """
    return node.name or (isinstance(node, ir.Node) and node.outputs and node.outputs[0].name) or "?"


def is_op(node: ir.Node | None, *types: str) -> bool:
    """Returns whether a node is an operator of the default domain of one of `types`.

    Args:
        node: Node, or None.
        *types: Operator types.
    """
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in types


def is_float(value: ir.Value) -> bool:
    """Returns whether a value is a float32 tensor (a sequence of float32 tensors has this dtype too).

    Args:
        value: Value of a graph with inferred types.
    """
    return isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


def is_array(value: ir.Value) -> bool:
    """Returns whether a value is a tensor of numbers: no sequence, map or optional, no strings.

    Args:
        value: Value of a graph with inferred types.
    """
    return value.dtype != ir.DataType.STRING and (value.type is None or isinstance(value.type, ir.TensorType))


def rank(value: ir.Value | None) -> int | None:
    """Returns the number of dimensions, None if unknown.

    Args:
        value: Value of a graph, or None.
    """
    return None if value is None or value.shape is None else len(value.shape)


@dataclass(frozen=True)
class Lookup:
    """An embedding lookup: Gather of rows of a constant 2-D table, through reshapes that keep the last axis."""

    gather: ir.Node
    table: ir.Value
    indices: ir.Value


def table_lookup(value: ir.Value | None) -> Lookup | None:
    """Returns the embedding lookup that computes a value without other readers in between, else None.

    Args:
        value: Value of a graph, or None.
    """
    width = value.shape[-1] if value is not None and value.shape else None
    while value is not None and (producer := value.producer()) is not None and sole_user(value) is not None:
        if producer.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
            value = producer.inputs[0]
            continue
        table, indices = producer.inputs[0], producer.inputs[1] if len(producer.inputs) > 1 else None
        if (
            producer.op_type != "Gather"
            or producer.attributes.get_int("axis", 0) != 0
            or table is None
            or indices is None
        ):
            return None
        tensor = ir.convenience.get_const_tensor(table)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
            return None
        return Lookup(producer, table, indices) if tensor.shape[1] == width else None
    return None


def downstream(graph: ir.Graph, *values: ir.Value) -> list[ir.Node]:
    """Returns the operators computed from any of some values, in order.

    Args:
        graph: Main graph.
        *values: Values of the graph.
    """
    computed, nodes = set(values), []
    for node in graph:
        if any(value in computed for value in values_read(node)):
            nodes.append(node)
            computed.update(node.outputs)
    return nodes


def values_read(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values that a node reads, including those that its subgraphs capture.

    Args:
        node: Operator.

    Returns:
        Iterator over the values.
    """
    nodes = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nodes += ir.traversal.RecursiveGraphIterator(attribute.as_graph())
    return (value for node in nodes for value in node.inputs if value is not None)


def is_transposed(node: ir.Node) -> bool:
    """Whether a Gemm stores its weights as [outputs, inputs] (`transB`); those of a MatMul are [inputs, outputs]."""
    return node.attributes.get_int("transB", 0) != 0


def inputs_first(node: ir.Node, weights: NDArray[Any]) -> NDArray[Any]:
    """Lays out weights of a layer as [inputs, outputs]; the function is its own inverse.

    Args:
        node: Gemm or MatMul.
        weights: [inputs, outputs], or [outputs, inputs] where `is_transposed`.

    Returns:
        A view of the weights.
    """
    return weights.T if is_transposed(node) else weights


def selected(graph: ir.Graph) -> list[ir.Node]:
    """Returns the operators whose number of rows depends on the data: those of `CHOOSING` and all downstream of them.

    Args:
        graph: Main graph.
    """
    chosen = [node for node in graph if is_op(node, *CHOOSING)]
    return [*chosen, *downstream(graph, *(value for node in chosen for value in node.outputs))]
