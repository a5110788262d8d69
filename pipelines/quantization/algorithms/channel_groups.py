"""Channel groups: values whose channels can be scaled together without effect on a graph's outputs.

Channels are on axis 1 around convolutions, and on the last axis around LayerNormalization and linear layers (MatMul and
Gemm with constant 2-D weights).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query

LINEAR = ("MatMul", "Gemm")
WRITERS = ("Conv", "LayerNormalization", *LINEAR)  # their constants can scale the channels of their outputs
GATHERS = ("Gather", "GatherND")
MOVES = (*GATHERS, "Reshape", "Transpose")
HOMOGENEOUS = {  # f(k x) = k f(x) per channel, for k > 0; keys: whether channels are last
    False: ("Relu", "Clip", "Add", "MaxPool", "AveragePool"),
    True: ("Relu", "Clip", "Add", *MOVES),
}


@dataclass
class ChannelGroup:
    """Values whose channels must be scaled alike, and the operators around them.

    Attributes:
        linear: Whether channels are on the last axis, not axis 1.
        values: The values.
        writers: Layers that compute the values, and the Adds of their biases.
        readers: Layers that read the values.
        clips: Clips between values.
    """

    linear: bool
    values: dict[ir.Value, None] = field(default_factory=dict)
    writers: dict[ir.Node, None] = field(default_factory=dict)
    readers: dict[ir.Node, None] = field(default_factory=dict)
    clips: dict[ir.Node, None] = field(default_factory=dict)

    @property
    def channels(self) -> set[int]:
        """Channel counts of the layers: one if the layers fit each other; readers count if channels are last."""
        written = {
            np.asarray(query.constant(node.inputs[1])).shape[scaled_constants(node)[1]]
            for node in self.writers
            if node.op_type != "Add"
        }
        return written | {outputs_first(node).shape[1] for node in self.readers if self.linear}

    @property
    def rounded(self) -> dict[ir.Value, None]:
        """Values that int8 quantizes: inputs of readers, and terms of sums."""
        sums = [
            node
            for value in self.values
            if (node := value.producer()) and node.op_type == "Add" and node not in self.writers
        ]
        ends = [value for node in sums for value in node.inputs] + [node.inputs[0] for node in self.readers]
        return dict.fromkeys(value for value in ends if value is not None)


def find(start: ir.Node) -> ChannelGroup | str:
    """Finds the group of the channels that an operator writes.

    Args:
        start: Conv, LayerNormalization, MatMul or Gemm.

    Returns:
        The group, or as text the reason why its channels cannot be scaled.
    """
    group, todo = ChannelGroup(start.op_type != "Conv"), [start.outputs[0]]
    writing, reading = (WRITERS[1:], LINEAR) if group.linear else (("Conv",), ("Conv",))
    while todo:
        value = todo.pop()
        if value in group.values:
            continue
        group.values[value] = None
        producer = value.producer()
        if value.is_graph_output() or producer is None:
            return f"{value.name} is an input or output of the graph"
        for node in (producer, *value.consumers()):
            reads = (
                node is not producer
                and node.op_type in reading
                and [*node.inputs].count(value) == 1
                and node.inputs[0] is value
            )
            if reads or (node is producer and node.op_type in writing):
                if node.graph is not start.graph or any(
                    query.constant(value) is None for value in node.inputs[1:] if value is not None
                ):
                    return f"weights of {node.name} are not constant"
                if node.op_type in LINEAR and (why := why_not_linear(node)):
                    return why
                (group.readers if reads else group.writers)[node] = None
            elif (
                node.op_type not in HOMOGENEOUS[group.linear] or node.graph is not start.graph or len(node.outputs) > 1
            ):
                return f"{node.op_type} {node.name} is not the same when its channels are scaled"
            elif node.op_type in MOVES and not _keeps_last_axis(node):
                return f"{node.op_type} {node.name} may move the axis of the channels"
            else:
                if node.op_type == "Clip":
                    group.clips[node] = None
                parts = node.inputs[: 2 if node.op_type == "Add" else 1]
                if group.linear and node.op_type == "Add" and scaled_constants(node):
                    group.writers[node] = None
                    parts = [part for part in parts if query.constant(part) is None]
                todo += [value for value in (*node.outputs, *parts) if value is not None]
    if group.linear and len(group.channels) > 1:
        return f"its layers have {' and '.join(map(str, sorted(group.channels)))} channels"
    return group


def scaled_constants(node: ir.Node) -> dict[int, int]:
    """Returns the constants of a writer that are scaled with the channels of its output.

    Args:
        node: Writer of a channel group.

    Returns:
        Channel axis by input index.
    """
    if node.op_type == "Add":
        axes = {index: -1 for index, value in enumerate(node.inputs) if query.constant(value) is not None}
    elif node.op_type == "Conv":
        axes = dict.fromkeys(range(1, len(node.inputs)), 0)
    else:
        axes = {1: 0 if query.is_transposed(node) else -1, 2: -1}
    return {index: axis for index, axis in axes.items() if len(node.inputs) > index and node.inputs[index] is not None}


def outputs_first(node: ir.Node, weight: NDArray[Any] | None = None) -> NDArray[Any]:
    """Lays out constant weights of a layer as [out, in / groups, ...]; the function is its own inverse.

    Args:
        node: Conv, MatMul or Gemm.
        weight: Array laid out as the weights; None: the weights themselves.

    Returns:
        A view of the array.
    """
    weight = np.asarray(query.constant(node.inputs[1]) if weight is None else weight)
    return query.inputs_first(node, weight).T if node.op_type in LINEAR else weight


def gathered_from(value: ir.Value) -> ir.Value:
    """Returns the value that `value` is gathered from, or itself.

    Other samples, or later decoding steps, gather other rows.

    Args:
        value: Value of the graph.
    """
    while (producer := value.producer()) is not None and producer.op_type in GATHERS and producer.inputs[0] is not None:
        value = producer.inputs[0]
    return value


def why_not_linear(node: ir.Node) -> str:
    """Returns why a MatMul or Gemm with constants is no linear layer, or "".

    Args:
        node: MatMul or Gemm.
    """
    weight = query.constant(node.inputs[1])
    if weight is None or weight.ndim != 2:
        return f"weights of {node.name} are no matrix"
    if node.attributes.get_int("transA", 0) or query.rank(node.inputs[0]) == 1:
        return f"{node.name} reads no rows"
    return ""


def _keeps_last_axis(node: ir.Node) -> bool:
    """Whether a Reshape, Transpose or Gather keeps the values of the last axis together, in their order."""
    before, after, rank = (
        query.dimensions(node.inputs[0]),
        query.dimensions(node.outputs[0]),
        query.rank(node.inputs[0]),
    )
    if not before or not after or not rank:
        return False
    if node.op_type == "Reshape":
        return before[-1] is not None and before[-1] == after[-1]
    if node.op_type == "Transpose":
        return (node.attributes["perm"].as_ints() if "perm" in node.attributes else [0])[-1] == rank - 1
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) % rank != rank - 1
    width = (query.dimensions(node.inputs[1]) or [None])[-1]
    return width is not None and node.attributes.get_int("batch_dims", 0) + width < rank
