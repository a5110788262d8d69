"""The float remainder of a quantized graph behind its int8 layers: a detector's boxes and scores."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query
from pipelines.kernels.images.program import SELECTION, ValuePart


class FloatRemainder:
    """The first node without a native form, and all nodes that read its results.

    Args:
        model: QDQ model.

    Attributes:
        reason: Why the first node has no native form.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._nodes: list[ir.Node] = []
        self._made: set[ir.Value] = set()
        self._deferred: dict[ir.Value, ir.Node] = {}
        self.reason: RequestError | None = None

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def reads(self, node: ir.Node) -> bool:
        """Returns whether a node reads a value of the remainder.

        Args:
            node: Operator of the graph.
        """
        return any(value in self._made for value in node.inputs if value is not None)

    def take(self, node: ir.Node, why: RequestError | None = None) -> None:
        """Adds a node to the remainder.

        Args:
            node: The node.
            why: Why it has no native form, None if it only reads the remainder.
        """
        self.reason = self.reason or why
        self._nodes.append(node)
        self._made.update(node.outputs)
        for value in node.inputs:
            if value in self._deferred and value not in self._made:
                self.take(self._deferred[value])

    def is_shape(self, node: ir.Node) -> bool:
        """Returns whether a node computes sizes of values alone; it is added when the remainder reads its result.

        Args:
            node: Operator of the graph.
        """
        sizes = query.is_op(node, "Shape", "Size")
        if not sizes and not any(value in self._deferred for value in node.inputs):
            return False
        if not sizes and any(value.dtype != ir.DataType.INT64 for value in node.outputs):
            return False
        self.defer(node)
        return True

    def defer(self, node: ir.Node) -> None:
        """Keeps a node that is added when the remainder reads its result.

        Args:
            node: Operator of the graph.
        """
        self._deferred.update(dict.fromkeys(node.outputs, node))

    def weights(self) -> int:
        """Returns the number of elements of the remainder's constants, including int8 ones."""
        total = 0
        for value in (value for node in self._nodes for value in node.inputs):
            constant, int8 = query.constant(value), query.dequantized(value)
            total += constant.size if constant is not None else int8[0].size if int8 is not None else 0
        return total

    def inputs(self, computed: Container[ir.Value]) -> list[ir.Value]:
        """Lists the values that the native program computes for the remainder and the graph outputs.

        Args:
            computed: Values that the native program can compute.

        Returns:
            `computed` values that the remainder reads, then graph outputs outside the remainder, each once.
        """
        read = [value for node in self._nodes for value in node.inputs if value is not None and value in computed]
        return list(dict.fromkeys(value for value in (*read, *self._model.graph.outputs) if value not in self._made))

    def model(self, parts: tuple[ValuePart, ...]) -> bytes:
        """Serializes the remainder as an ONNX model from `parts` to the graph outputs that it computes.

        Args:
            parts: Its inputs.

        Returns:
            Bytes of the model; empty if it computes no graph output.
        """
        outputs = [str(output.name) for output in self._model.graph.outputs if output in self._made]
        if not outputs:
            return b""
        remainder = edit.extract(self._model, [name for name, _, _ in parts], outputs)
        for value, (_, shape, kind) in zip(remainder.graph.inputs, parts, strict=True):
            selects = kind == SELECTION
            value.type = ir.TensorType(ir.DataType.INT64 if selects else ir.DataType.from_numpy(np.dtype(kind)))
            value.shape = ir.Shape(["boxes", 3] if selects else [self._batch(), *shape])
        return io.serialized(remainder)

    def _batch(self) -> int | str:
        """The number of samples that the graph fixes, or a name for any."""
        dimensions = query.dimensions(self._model.graph.inputs[0])
        return (dimensions[0] if dimensions else None) or "n"
