"""Builds ONNX graphs operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query

MASKED = -1e9  # added to scores and logits that a softmax or a maximum leaves out


class GraphBuilder:
    """Appends operators to a graph; Python numbers and arrays among the inputs become initializers.

    Calling the builder appends one operator with one output:

        y = builder("Add", x, 1.0)

    Attributes:
        graph: The graph that grows.
        taken: Names in use. Builders of nested graphs share one set, so that no name shadows another.
    """

    def __init__(self, graph: ir.Graph, prefix: str = "", taken: set[str] | None = None) -> None:
        """Wraps a graph.

        Args:
            graph: The graph to append to.
            prefix: Begins the names of new values.
            taken: Names that new values must not have, extended in place; the graph's own names are added.
        """
        self.graph, self.prefix = graph, prefix
        self.taken = set() if taken is None else taken
        self.taken |= query.used_names(graph)
        self._constants: dict[tuple[Any, ...], ir.Value] = {}

    def __call__(self, op: str, *inputs: Any, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: Any) -> ir.Value:
        """Appends an operator of the default domain.

        Args:
            op: The operator type.
            *inputs: Values, or numbers and arrays, see `constant`.
            dtype: Element type of the output; the target type of a Cast.
            **attributes: Attributes of the operator.

        Returns:
            The output.
        """
        if op == "Cast":
            attributes["to"] = int(dtype)
        values = [operand if isinstance(operand, ir.Value) else self.constant(operand) for operand in inputs]
        name = f"{self.prefix}{op.lower()}"
        node = edit.node(op, list(values), name, dtype=dtype, taken=self.taken, **attributes)
        self.graph.append(node)
        return node.outputs[0]

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str | None] | None) -> ir.Value:
        """Appends a graph input.

        Args:
            name: Its name; numbered if taken.
            dtype: Element type.
            shape: Dimensions; a string or None for a dynamic one. None: any shape.

        Returns:
            The input.
        """
        value = ir.Value(
            name=edit.unique(name, self.taken),
            type=ir.TensorType(dtype),
            shape=None if shape is None else ir.Shape(shape),
        )
        self.graph.inputs.append(value)
        return value

    def constant(self, number: Any) -> ir.Value:
        """Returns a small initializer; equal constants share one.

        Args:
            number: A number, a sequence, an array or an `ir.Tensor`; Python floats become float32.

        Returns:
            The initializer.
        """
        array = number.numpy() if isinstance(number, ir.Tensor) else np.asarray(number)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.weight("constant", array)
        return self._constants[key]

    def weight(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Appends an initializer.

        Args:
            name: Its name after the prefix; numbered if taken.
            array: Its elements, not copied.

        Returns:
            The initializer.
        """
        return edit.initializer(self.graph, f"{self.prefix}{name}", array, self.taken)

    def split(self, x: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """Appends a Split along the last axis.

        Args:
            x: float32 [..., sum(sizes)].
            sizes: Columns of each part.

        Returns:
            The parts, float32 [..., size].
        """
        name = edit.unique(f"{self.prefix}split", self.taken)
        inputs = [x, self.constant(np.array(sizes, np.int64))]
        node = ir.node("Split", inputs, {"axis": -1}, num_outputs=len(sizes), name=name)
        for number, value in enumerate(node.outputs):
            value.name, value.type = edit.unique(f"{name}.{number}", self.taken), x.type
        self.graph.append(node)
        return list(node.outputs)

    def top(self, x: ir.Value, count: ir.Value, largest: int = 1) -> tuple[ir.Value, ir.Value]:
        """Appends a TopK along the last axis, sorted; of equal elements the first comes first.

        Args:
            x: Any numbers [..., n].
            count: int64 [1], k.
            largest: 1 for the largest elements, 0 for the smallest.

        Returns:
            Values [..., k] and their indices, int64 [..., k].
        """
        name = edit.unique(f"{self.prefix}topk", self.taken)
        node = ir.node("TopK", [x, count], {"axis": -1, "largest": largest, "sorted": 1}, num_outputs=2, name=name)
        for value, kind, dtype in zip(node.outputs, ("values", "indices"), (x.dtype, ir.DataType.INT64), strict=True):
            value.name, value.type = f"{name}.{kind}", None if dtype is None else ir.TensorType(dtype)
        self.graph.append(node)
        return node.outputs[0], node.outputs[1]

    def arange(self, size: ir.Value) -> ir.Value:
        """Appends 0, 1, ..., size - 1.

        Args:
            size: int64 [1].

        Returns:
            int64 [size].
        """
        int64 = ir.DataType.INT64
        return self("Range", 0, self("Squeeze", size, dtype=int64), 1, dtype=int64)

    def loop(self, name: str, body: ir.Graph, inputs: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Appends a Loop.

        Args:
            name: Its name; numbered if taken.
            body: (iteration, condition, states) -> (condition, states, scan outputs).
            inputs: Most iterations or None, the condition, the first states.

        Returns:
            The last states and the scan outputs.
        """
        name = edit.unique(name, self.taken)
        node = ir.node("Loop", inputs, {"body": body}, num_outputs=len(body.outputs) - 1, name=name)
        for value, inner in zip(node.outputs, body.outputs[1:], strict=True):
            value.name, value.type = edit.unique(f"{name}/{inner.name}", self.taken), inner.type
        self.graph.append(node)
        return list(node.outputs)
