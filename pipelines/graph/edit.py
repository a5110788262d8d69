"""Changes of a graph that passes share: nodes and initializers added, substituted and bypassed, parts cut out, float16
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph.query import constant, used_names


def extract(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """The model that computes the values `outputs` from the values `inputs`, all by name, with the weights that takes;
    a copy.

    Raises RequestError where a value is missing, or where `inputs` are not enough.
    """
    try:
        found = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError as error:
        raise RequestError(
            f"the graph {model.graph.name} has no part from {', '.join(inputs)} to {', '.join(outputs)}: {error}"
        ) from error
    return ir.Model(found, ir_version=model.ir_version)


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name_1`, ... where that is taken; it is, from then on."""
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
    """A node with one output; node and output are both called `name`, or `name_1`, ... where `taken` (see
    `initializer`) holds that.

    Without `taken` the name is used as it is, for a node that takes another one's place.
    """
    name = name if taken is None else unique(name, taken)
    made = ir.node(op, inputs, attributes=attributes or None, name=name, num_outputs=1)
    made.outputs[0].name = name
    if dtype is not None:
        made.outputs[0].type = ir.TensorType(dtype)
    return made


def substitute(nodes: list[ir.Node], new: ir.Node) -> None:
    """Put `new` where the last of `nodes` stands: it takes over that one's result, with name, type and shape, and all
    of `nodes` go.
    """
    last = nodes[-1]
    main, result = last.graph, last.outputs[0]
    assert isinstance(main, ir.Graph)
    new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(main, last, nodes, [new], [result], new.outputs)


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Let the readers of `node`'s first result read `value`, which equals it. A result that leaves the graph keeps its
    name.
    """
    if node.outputs[0].is_graph_output():
        substitute([node], ir.node("Identity", [value], name=node.name))
        return
    node.outputs[0].replace_all_uses_with(value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _half_casts(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    for each in list(model.graph):
        source = each.inputs[0] if each.inputs else None
        if each.op_type != "Cast" or each.attributes.get_int("to", 0) != ir.DataType.FLOAT:
            continue
        if each.outputs[0].is_graph_output():
            continue
        if source is not None and source.is_initializer() and source.dtype == ir.DataType.FLOAT16:
            yield each, source


def compress_fp16(model: ir.Model, minimum: int = 64) -> None:
    """Store float32 weights of `minimum` or more elements as float16, each behind a Cast to float32: half the size,
    still stock ONNX.

    In place. Weights are rounded to the nearest float16; raises RequestError where one does not fit its range.
    """
    graph, taken = model.graph, used_names(model.graph)
    for name, value in list(graph.initializers.items()):
        array = constant(value)
        if array is None or array.dtype != np.float32 or array.size < minimum:
            continue
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise RequestError(
                f"weight {name} does not fit float16 (largest magnitude {np.abs(array).max():g}); ship it as float32"
            )
        stored = initializer(graph, f"{name}.fp16", half, taken)
        cast = node("Cast", [stored], f"{name}.fp32", dtype=ir.DataType.FLOAT, taken=taken, to=int(ir.DataType.FLOAT))
        value.replace_all_uses_with(cast.outputs[0])
        del graph.initializers[name]
        graph.insert_before(graph[0], cast)


def expand_fp16(model: ir.Model) -> None:
    """Undo `compress_fp16`, or what an exporter did alike: float32 weights under their own names, holding float16
    values. In place.
    """
    graph = model.graph
    for cast, stored in _half_casts(model):
        array = constant(stored)
        assert array is not None and stored.name is not None
        value = initializer(graph, stored.name.removesuffix(".fp16"), array.astype(np.float32))
        cast.outputs[0].replace_all_uses_with(value)
        graph.remove(cast, safe=True)
        if not stored.uses():
            del graph.initializers[stored.name]
