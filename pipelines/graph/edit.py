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
    """The subgraph that computes the values `outputs` from the values `inputs`, by name, as a model; a copy.

    Raises RequestError where a value is missing, or where `inputs` are not enough.
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
    """Have an input read, not computed again, where its operator is in the subgraph for another of its results.

    Such is a Split of which one part is an input. Its own result of the input's name gets another name: ONNX defines a
    name once.
    """
    inputs, taken = {value.name: value for value in subgraph.inputs}, used_names(subgraph)
    for node in subgraph:
        for value in node.outputs:
            if value.name in inputs:
                value.replace_all_uses_with(inputs[value.name], replace_graph_outputs=True)
                value.name = unique(f"{value.name}.again", taken)


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name_1`, ... where that is in `taken`; the result is added to it."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def initializer(graph: ir.Graph, name: str, array: NDArray[Any], taken: set[str] | None = None) -> ir.Value:
    """Add `array` to the graph's initializers under `name`, or under `name_1`, ... where a node or value has it.

    taken: `query.used_names(graph)`, kept up to date here; who adds many gathers them once.
    """
    free = unique(name, used_names(graph) if taken is None else taken)
    tensor = ir.tensor(array, name=free)
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
    """A node with one output; both are called `name`, or `name_1`, ... where `taken` (see `initializer`) holds that.

    Without `taken` the name is used as it is, for a node that takes another one's place.
    """
    name = name if taken is None else unique(name, taken)
    new = ir.node(op, inputs, attributes=attributes or None, name=name, num_outputs=1)
    new.outputs[0].name = name
    if dtype is not None:
        new.outputs[0].type = ir.TensorType(dtype)
    return new


def substitute(nodes: list[ir.Node], new: ir.Node) -> None:
    """Replace `nodes` by `new`, which takes the place and the first output (name, type, shape) of the last one."""
    last = nodes[-1]
    main, result = last.graph, last.outputs[0]
    assert isinstance(main, ir.Graph)
    new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(main, last, nodes, [new], [result], new.outputs)


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Remove `node`, whose first output equals `value`: its readers read that. A graph output keeps its name."""
    if node.outputs[0].is_graph_output():
        substitute([node], ir.node("Identity", [value], name=node.name))
        return
    node.outputs[0].replace_all_uses_with(value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _fp16_casts(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """(Cast to float32, float16 initializer that it reads) of the main graph."""
    for each in list(model.graph):
        source = each.inputs[0] if each.inputs else None
        if each.op_type != "Cast" or each.attributes.get_int("to", 0) != ir.DataType.FLOAT:
            continue
        if each.outputs[0].is_graph_output():
            continue
        if source is not None and source.is_initializer() and source.dtype == ir.DataType.FLOAT16:
            yield each, source


def compress_fp16(model: ir.Model, minimum: int = 64) -> None:
    """Store float32 weights of `minimum` or more elements as float16 behind a Cast to float32: half the size.

    In place; stock ONNX. Weights are rounded to nearest; raises RequestError where one does not fit float16.
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
    """Give every DequantizeLinear of int8 weights that shares them, but the first, copies; in place, returns how many.

    Of their zero point, too.
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
    """Undo `compress_fp16`, or an exporter's like: float32 weights that hold float16 values. In place."""
    graph = model.graph
    for cast, stored in _fp16_casts(model):
        array = constant(stored)
        assert array is not None and stored.name is not None
        value = initializer(graph, stored.name.removesuffix(".fp16"), array.astype(np.float32))
        cast.outputs[0].replace_all_uses_with(value)
        graph.remove(cast, safe=True)
        if not stored.uses():
            del graph.initializers[stored.name]
