"""Channel groups: values whose channels can be scaled together with no effect on a graph's outputs.

Channels lie on axis 1 around convolutions, on the last axis around linear layers (MatMul and Gemm with constant 2-D
weights) and LayerNormalization.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query

LINEAR = ("MatMul", "Gemm")
WRITERS = ("Conv", "LayerNormalization", *LINEAR)  # whose constants can scale the channels of their output
GATHERS = ("Gather", "GatherND")
MOVES = (*GATHERS, "Reshape", "Transpose")
HOMOGENEOUS = {  # f(k x) = k f(x), channel by channel, for k > 0; by whether channels are last
    False: ("Relu", "Clip", "Add", "MaxPool", "AveragePool"),
    True: ("Relu", "Clip", "Add", *MOVES),
}


@dataclass
class ChannelGroup:
    """Values whose channels must be scaled alike, and the operators around them.

    linear: whether channels are last, not axis 1. writers: the layers that compute them, and the Adds of their biases.
    readers: the layers whose input they are. clips: the Clips between.
    """

    linear: bool
    values: dict[ir.Value, None] = field(default_factory=dict)
    writers: dict[ir.Node, None] = field(default_factory=dict)
    readers: dict[ir.Node, None] = field(default_factory=dict)
    clips: dict[ir.Node, None] = field(default_factory=dict)

    @property
    def channels(self) -> set[int]:
        """The numbers of channels of its layers: one if these fit each other. Readers count where channels are last."""
        written = {
            np.asarray(query.constant(node.inputs[1])).shape[scaled_constants(node)[1]]
            for node in self.writers
            if node.op_type != "Add"
        }
        return written | {outputs_first(node).shape[1] for node in self.readers if self.linear}

    @property
    def rounded(self) -> dict[ir.Value, None]:
        """The values that int8 quantizes: what readers read, and parts of sums."""
        sums = [
            node
            for value in self.values
            if (node := value.producer()) and node.op_type == "Add" and node not in self.writers
        ]
        ends = [value for node in sums for value in node.inputs] + [node.inputs[0] for node in self.readers]
        return dict.fromkeys(value for value in ends if value is not None)


def find(start: ir.Node) -> ChannelGroup | str:
    """The group of the channels that `start` writes; the reason, as text, where something there cannot be scaled."""
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
                    query.constant(each) is None for each in node.inputs[1:] if each is not None
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
                    parts = [each for each in parts if query.constant(each) is None]
                todo += [each for each in (*node.outputs, *parts) if each is not None]
    if group.linear and len(group.channels) > 1:
        return f"its layers have {' and '.join(map(str, sorted(group.channels)))} channels"
    return group


def scaled_constants(node: ir.Node) -> dict[int, int]:
    """{input: its axis of channels} of the constants of a writer that are scaled with the channels of its output."""
    if node.op_type == "Add":
        axes = {at: -1 for at, value in enumerate(node.inputs) if query.constant(value) is not None}
    elif node.op_type == "Conv":
        axes = dict.fromkeys(range(1, len(node.inputs)), 0)
    else:
        axes = {1: 0 if node.attributes.get_int("transB", 0) else -1, 2: -1}
    return {at: axis for at, axis in axes.items() if len(node.inputs) > at and node.inputs[at] is not None}


def outputs_first(node: ir.Node, weight: NDArray[Any] | None = None) -> NDArray[Any]:
    """Constant weights of a layer, or others laid out alike, as [out, in / groups, ...]; its own inverse."""
    weight = np.asarray(query.constant(node.inputs[1]) if weight is None else weight)
    return weight.T if node.op_type in LINEAR and not node.attributes.get_int("transB", 0) else weight


def gathered_from(value: ir.Value) -> ir.Value:
    """The value that `value` is gathered from, or itself: other samples, or later decoding steps, gather other rows."""
    while (producer := value.producer()) is not None and producer.op_type in GATHERS and producer.inputs[0] is not None:
        value = producer.inputs[0]
    return value


def why_not_linear(node: ir.Node) -> str:
    """Why a MatMul or Gemm of constants is no linear layer, "" where it is one."""
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
