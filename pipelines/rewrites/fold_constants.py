"""Constant folding: values that depend on constants alone are computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query, reference_session
from pipelines.rewrites.driver import Rewrite

LIMIT = 1 << 24  # maximum bytes of a result that is larger than its inputs
RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
    "Dropout",
)
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")  # int8 weights stay int8
SKIPPED = (*RANDOM, *QUANTIZED, "Constant", "Identity", "If", "Loop", "Scan", "SequenceMap")


class FoldConstants(Rewrite):
    """Constant folding: f(constants) = a constant, also for static dimensions read by Shape next to dynamic ones.

    Evaluated by onnxruntime, one operator at a time, without its optimizations. Does not fire for random operators,
    custom domains, operators with subgraphs, several results but those of Split, (De)QuantizeLinear (int8 weights stay
    int8), static dimensions inside a subgraph (in a Loop they may hold for one round only), operators that onnxruntime
    cannot run, and results above 16 MiB that are larger than their inputs (an Expand would only enlarge the file).
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every operator on constants by its value."""
        count = 0
        for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
            if not query.is_op(node, node.op_type) or node.op_type in SKIPPED:
                continue
            if len(node.outputs) != 1:
                count += node.op_type == "Split" and self._split(model, node)
                continue
            array = _shape_arithmetic(node) if node.graph is model.graph else None
            if array is None:
                array = self._computed(model, node)
            if array is not None:
                edit.bypass(node, edit.initializer(model.graph, f"{node.outputs[0].name}.folded", array))
                count += 1
        return count

    def _split(self, model: ir.Model, node: ir.Node) -> bool:
        """Replaces the parts of a constant, such as the weights of queries, keys and values; returns whether it did."""
        if any(part.is_graph_output() for part in node.outputs):
            return False
        computed = [self._computed(model, node, position) for position in range(len(node.outputs))]
        arrays = [array for array in computed if array is not None]
        if len(arrays) < len(computed):
            return False
        for part, array in zip(node.outputs, arrays, strict=True):
            part.replace_all_uses_with(edit.initializer(model.graph, f"{part.name}.folded", array))
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        return True

    def _computed(self, model: ir.Model, node: ir.Node, position: int = 0) -> NDArray[Any] | None:
        feeds: dict[str, NDArray[Any]] = {}
        for value in node.inputs:
            if value is not None:
                array = query.constant(value)
                if array is None:
                    return None
                feeds[str(value.name)] = array
        if not feeds:
            return None
        try:
            array = reference_session.computed(node, feeds, model.opset_imports.get("", io.OPSET), position)
        except RequestError as error:
            self.refuse(node, str(error))
            return None
        if not isinstance(array, np.ndarray) or array.dtype == object:
            return None
        if array.nbytes > LIMIT and array.nbytes > sum(feed.nbytes for feed in feeds.values()):
            self.refuse(node, f"its result of {array.nbytes >> 20} MiB is larger than what it is computed from")
            return None
        return array


def _shape_arithmetic(node: ir.Node) -> NDArray[np.int64] | None:
    """Returns the result of a node that follows from static dimensions, or None."""
    result = node.outputs[0]
    if node.op_type == "Size":
        static = query.static_shape(node.inputs[0])
        return None if static is None else np.asarray(np.prod(static, dtype=np.int64))
    if (
        node.op_type not in ("Shape", "Gather", "Slice")
        or query.rank(result) not in (0, 1)
        or result.dtype != ir.DataType.INT64
    ):
        return None
    elements = query.shape_elements(result)
    if elements is None or not all(isinstance(element, int) for element in elements):
        return None
    array = np.array(elements, np.int64)
    return array.reshape(()) if query.rank(result) == 0 else array
