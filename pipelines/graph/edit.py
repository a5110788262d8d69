"""Graph edits that passes share: nodes and initializers added, substituted, bypassed; subgraphs; float16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph.query import constant, used_names


def extract(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """Copies the subgraph between values as a model.

    Args:
        model: Model; it is not changed.
        inputs: Names of the values that the subgraph takes.
        outputs: Names of the values that it computes.

    Returns:
        The subgraph.

    Raises:
        RequestError: A value is missing, or `inputs` do not suffice.
    """
    try:
        subgraph = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError as error:
        raise RequestError(
            f"the graph {model.graph.name} has no part from {', '.join(inputs)} to {', '.join(outputs)}: {error}"
        ) from error
    _read_as_fed(subgraph)
    return ir.Model(subgraph, ir_version=model.ir_version)


def _read_as_fed(subgraph: ir.Graph) -> None:
    """Reads an input that its own operator, in the subgraph for another result, would compute again.

    An example is a Split with one part as an input. The result of the input's name is renamed, because ONNX defines a
    name once.
    """
    inputs, taken = {value.name: value for value in subgraph.inputs}, used_names(subgraph)
    for node in subgraph:
        for value in node.outputs:
            if value.name in inputs:
                value.replace_all_uses_with(inputs[value.name], replace_graph_outputs=True)
                value.name = unique(f"{value.name}.again", taken)


def unique(name: str, taken: set[str]) -> str:
    """Returns `name`, or `name_1`, ... if it is taken.

    Args:
        name: Preferred name.
        taken: Names in use; the result is added.
    """
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def initializer(
    graph: ir.Graph, name: str, array: NDArray[Any] | ir.LazyTensor, taken: set[str] | None = None
) -> ir.Value:
    """Adds an initializer to a graph.

    Args:
        graph: Graph to change.
        name: Preferred name; numbered if taken.
        array: Elements; a tensor gets the name of the initializer.
        taken: Names in use, updated here; None: `query.used_names(graph)`. Callers that add many gather them once.

    Returns:
        The initializer.
    """
    free = unique(name, used_names(graph) if taken is None else taken)
    tensor = array if isinstance(array, ir.LazyTensor) else ir.Tensor(array, name=free)
    tensor.name = free
    value = ir.Value(name=free, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def node(
    op: str,
    inputs: list[ir.Value | None],
    name: str,
    *,
    dtype: ir.DataType | None = None,
    taken: set[str] | None = None,
    **attributes: Any,
) -> ir.Node:
    """Creates a node with one output of the same name.

    Args:
        op: Operator type.
        inputs: Input values.
        name: Preferred name; numbered if taken.
        dtype: Element type of the output.
        taken: Names in use, see `initializer`; None: the name is used as it is, for a node that replaces another.
        **attributes: Attributes of the operator.

    Returns:
        The node, not in a graph yet.
    """
    name = name if taken is None else unique(name, taken)
    new = ir.node(op, inputs, attributes=attributes or None, name=name, num_outputs=1)
    new.outputs[0].name = name
    if dtype is not None:
        new.outputs[0].type = ir.TensorType(dtype)
    return new


def substitute(nodes: list[ir.Node], new: ir.Node) -> None:
    """Replaces nodes by a new one, which takes the position and the first output (name, type, shape) of the last.

    Args:
        nodes: Nodes to remove.
        new: Node to insert.
    """
    last = nodes[-1]
    main, result = last.graph, last.outputs[0]
    assert isinstance(main, ir.Graph)
    new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(main, last, nodes, [new], [result], new.outputs)


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Removes a node whose first output equals a value; its readers read the value. A graph output keeps its name.

    Args:
        node: Node to remove.
        value: Value that replaces its output.
    """
    if node.outputs[0].is_graph_output():
        substitute([node], ir.node("Identity", [value], name=node.name))
        return
    node.outputs[0].replace_all_uses_with(value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _fp16_casts(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """(Cast to float32, float16 or bfloat16 initializer that it reads) of the main graph."""
    for cast in list(model.graph):
        source = cast.inputs[0] if cast.inputs else None
        if cast.op_type != "Cast" or cast.attributes.get_int("to", 0) != ir.DataType.FLOAT:
            continue
        if cast.outputs[0].is_graph_output():
            continue
        if (
            source is not None
            and source.is_initializer()
            and source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        ):
            yield cast, source


def compress_fp16(model: ir.Model, minimum: int = 64) -> None:
    """Stores float32 weights as float16 behind a Cast to float32 (half the size), rounded to nearest, in place.

    Args:
        model: Model to change.
        minimum: Least number of elements of a weight that is compressed.

    Raises:
        RequestError: A weight does not fit float16.
    """
    graph, taken = model.graph, used_names(model.graph)
    for name, value in list(graph.initializers.items()):
        array = constant(value)
        if array is None or array.dtype != np.float32 or array.size < minimum:
            continue
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float16)
        if not np.isfinite(rounded).all():
            raise RequestError(
                f"weight {name} does not fit float16 (largest magnitude {np.abs(array).max():g}); ship it as float32"
            )
        stored = initializer(graph, f"{name}.fp16", rounded, taken)
        cast = node("Cast", [stored], f"{name}.fp32", dtype=ir.DataType.FLOAT, taken=taken, to=int(ir.DataType.FLOAT))
        value.replace_all_uses_with(cast.outputs[0])
        del graph.initializers[name]
        graph.insert_before(graph[0], cast)


def own_weights(model: ir.Model) -> int:
    """Copies int8 weights and zero points that several DequantizeLinear share, for all but the first, in place.

    Args:
        model: Model to change.

    Returns:
        Number of copies.
    """
    seen: set[ir.Value] = set()
    count, taken = 0, used_names(model.graph)
    for reader in model.graph:
        if reader.op_type != "DequantizeLinear" or constant(reader.inputs[0]) is None:
            continue
        for index, value in enumerate(reader.inputs):
            array = constant(value) if index != 1 else None
            if value is None or array is None or array.dtype != np.int8:
                continue
            if value in seen:
                reader.replace_input_with(index, initializer(model.graph, f"{value.name}.own", array, taken))
                count += 1
            seen.add(value)
    return count


def expand_fp16(model: ir.Model) -> None:
    """Undoes `compress_fp16`, or an exporter's equivalent of float16 or bfloat16: weights become float32, in place.

    Args:
        model: Model with float16 or bfloat16 weights, changed in place.
    """
    graph = model.graph
    for cast, stored in _fp16_casts(model):
        array = constant(stored)
        assert array is not None and stored.name is not None
        value = initializer(graph, stored.name.removesuffix(".fp16"), array.astype(np.float32))
        cast.outputs[0].replace_all_uses_with(value)
        graph.remove(cast, safe=True)
        if not stored.uses():
            del graph.initializers[stored.name]
