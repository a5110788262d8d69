"""What is left of a quantized graph that goes on in float behind its int8 layers: a detector's boxes and scores."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query


class Rest:
    """The nodes that the image kernels do not compute: the first that has no form, and all that read its results.

    reason: why that has no form.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._nodes: list[ir.Node] = []
        self._made: set[ir.Value] = set()
        self.reason: RequestError | None = None

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def reads(self, node: ir.Node) -> bool:
        """Whether a node reads what is computed here."""
        return any(value in self._made for value in node.inputs if value is not None)

    def take(self, node: ir.Node, why: RequestError | None = None) -> None:
        """Let a node be computed here; why: it has no form in the kernels."""
        self.reason = self.reason or why
        self._nodes.append(node)
        self._made.update(node.outputs)

    def weights(self) -> int:
        """The elements of its nodes' constants, int8 ones too."""
        total = 0
        for value in (value for node in self._nodes for value in node.inputs):
            constant, int8 = query.constant(value), query.dequantized(value)
            total += constant.size if constant is not None else int8[0].size if int8 is not None else 0
        return total

    def inputs(self, computed: Container[ir.Value]) -> list[ir.Value]:
        """Which of the values `computed` it goes on from, and the outputs of the graph that it does not compute."""
        read = [value for node in self._nodes for value in node.inputs if value is not None and value in computed]
        return list(dict.fromkeys(each for each in (*read, *self._model.graph.outputs) if each not in self._made))

    def model(self, parts: tuple[tuple[str, tuple[int, ...]], ...]) -> bytes:
        """The ONNX model from `parts` to those outputs of the graph that are none of them, serialized; b"" without."""
        outputs = [str(each.name) for each in self._model.graph.outputs if each in self._made]
        if not outputs:
            return b""
        found = edit.extract(self._model, [name for name, _ in parts], outputs)
        for value, (_, shape) in zip(found.graph.inputs, parts, strict=True):
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([self._batch(), *shape])
        return io.serialized(found)

    def _batch(self) -> int | str:
        """The number of samples that the graph fixes, or a name for any."""
        found = query.dimensions(self._model.graph.inputs[0])
        return (found[0] if found else None) or "n"
