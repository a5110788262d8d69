"""Computes one-dimensional convolutions and the operators between them on images of one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

LAYERS = ("Conv", "ConvTranspose")
POOLS = ("AveragePool", "MaxPool")
NORMS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization")
ELEMENTWISE = (
    *("Abs", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish"),
    *("Neg", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu"),
)
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "PRelu", "Sub")
ALONG = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}  # and the number of the axis of height


class LiftRows(Rewrite):
    """Conv([n, C, T], W) = Squeeze(Conv(Unsqueeze([n, C, T]), Unsqueeze(W))), on [n, C, 1, T], with what is around it.

    With the convolutions come pools, Pads, normalizations of channels, functions of single values, arithmetic and
    Concat of channels that read each other's results. One Unsqueeze stands before them for each value from outside, one
    Squeeze at each result that others read. Exact. Engines and other passes know layers of two dimensions best. Does
    not fire for weights that are not constant, or an `output_shape`.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Lifts every group of operators with a one-dimensional convolution.

        Args:
            model: Model to change.

        Returns:
            Number of lifted convolutions.
        """
        graph = model.graph
        lifted = self._with_layers([node for node in graph if self._can_be_lifted(node)])
        if not lifted:
            return 0
        self._graph, self._taken, self._rows = graph, query.used_names(graph), dict[ir.Value, ir.Value]()
        made = {value for node in lifted for value in node.outputs}
        for node in lifted:
            self._lift(node, made)
        members = set(lifted)
        for value in made:
            self._restore(value, members)
        return sum(node.op_type in LAYERS for node in lifted)

    def _can_be_lifted(self, node: ir.Node) -> bool:
        """Whether a node computes values [n, C, T] of such values and constants."""
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return False
        if node.op_type in LAYERS:
            weight = query.constant(node.inputs[1])
            if weight is None and query.rank(node.inputs[0]) == 3:
                self.refuse(node, "its weights are not constant")
            return weight is not None and weight.ndim == 3 and "output_shape" not in node.attributes
        varying = [value for value in node.inputs if value is not None and query.constant(value) is None]
        if not varying or any(query.rank(value) != 3 or not query.is_float(value) for value in varying):
            return False
        if node.op_type == "Concat":
            return len(varying) == len(node.inputs) and node.attributes.get_int("axis", 1) in (1, -2)
        if node.op_type in ARITHMETIC:
            return all(_fits(value) for value in node.inputs)
        if node.op_type == "Pad":
            pads = query.constant(node.inputs[1])
            return len(node.inputs) < 4 and pads is not None and pads.size == 6 and varying == list(node.inputs[:1])
        return node.op_type in (*POOLS, *NORMS, *ELEMENTWISE) and varying == list(node.inputs[:1])

    @staticmethod
    def _with_layers(nodes: list[ir.Node]) -> list[ir.Node]:
        """The nodes that are connected with a convolution, in order."""
        members = set(nodes)
        reached = {node for node in nodes if node.op_type in LAYERS}
        waiting = list(reached)
        while waiting:
            node = waiting.pop()
            near = [value.producer() for value in node.inputs if value is not None]
            near += [use.node for value in node.outputs for use in value.uses()]
            for other in near:
                if other is not None and other in members and other not in reached:
                    reached.add(other)
                    waiting.append(other)
        return [node for node in nodes if node in reached]

    def _lift(self, node: ir.Node, made: set[ir.Value]) -> None:
        """Makes a node read and compute images of one row."""
        for position, value in enumerate(node.inputs):
            constant = query.constant(value)
            if value is None or value in made:
                continue
            if constant is None:
                node.replace_input_with(position, self._row(value))
            elif node.op_type == "Pad" and position == 1:
                row = np.insert(constant, [2, 5], 0)
                node.replace_input_with(1, edit.initializer(self._graph, f"{value.name}.row", row, self._taken))
            elif (node.op_type in LAYERS and position == 1) or (node.op_type in ARITHMETIC and constant.ndim > 1):
                row = np.expand_dims(constant, -2)
                node.replace_input_with(position, edit.initializer(self._graph, f"{value.name}.row", row, self._taken))
        for name, axis in ALONG.items():
            if (numbers := node.attributes.get_ints(name, None)) is not None:
                node.attributes[name] = ir.AttrInt64s(name, [axis, *numbers])
        if (pads := node.attributes.get_ints("pads", None)) is not None:
            begin, end = pads
            node.attributes["pads"] = ir.AttrInt64s("pads", [0, begin, 0, end])
        if node.op_type == "Concat":
            node.attributes["axis"] = ir.AttrInt64("axis", 1)

    def _row(self, value: ir.Value) -> ir.Value:
        """A value as an image of one row."""
        if value not in self._rows:
            unsqueeze = self._moved("Unsqueeze", value, "row", _with_height(value))
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(next(iter(self._graph)), unsqueeze)
            else:
                self._graph.insert_after(producer, unsqueeze)
            self._rows[value] = unsqueeze.outputs[0]
        return self._rows[value]

    def _restore(self, value: ir.Value, lifted: set[ir.Node]) -> None:
        """Makes the other readers of a value read it without the axis of height."""
        producer, shape = value.producer(), value.shape
        assert producer is not None
        value.shape = _with_height(value)
        outside = [(use.node, use.idx) for use in value.uses() if use.node not in lifted]
        if not outside and not value.is_graph_output():
            return
        squeeze = self._moved("Squeeze", value, "line", shape if query.rank(value) == 4 else None)
        self._graph.insert_after(producer, squeeze)
        out = squeeze.outputs[0]
        for node, position in outside:
            node.replace_input_with(position, out)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = out
                value.name, out.name = out.name, value.name

    def _moved(self, op_type: str, value: ir.Value, stem: str, shape: ir.Shape | None) -> ir.Node:
        """Returns an Unsqueeze or Squeeze of the axis of height, whose result has the shape."""
        axes = edit.initializer(self._graph, f"{value.name}.{stem}.axes", np.array([2]), self._taken)
        made = edit.node(op_type, [value, axes], f"{value.name}.{stem}", dtype=value.dtype, taken=self._taken)
        made.outputs[0].shape = shape
        return made


def _with_height(value: ir.Value) -> ir.Shape | None:
    """Returns the shape [n, C, 1, T] of a value [n, C, T]; None if it is not known."""
    sizes = () if value.shape is None else tuple(value.shape)
    return ir.Shape([*sizes[:2], 1, *sizes[2:]]) if len(sizes) == 3 else None


def _fits(value: ir.Value | None) -> bool:
    """Whether an argument of arithmetic has no more axes than the values."""
    constant: NDArray[Any] | None = query.constant(value)
    return constant is None or constant.ndim <= 3
