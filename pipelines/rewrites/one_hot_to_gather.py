"""Writes a linear layer of one-hot codes as the lookup of its weights' rows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8)


class OneHotToGather(OperatorRewrite):
    """MatMul(one_hot(i), W) = Gather([W; 0], i), where indices that are no row of W name the last row, of zeros.

    one_hot(i) = Cast(Equal(i, [0, 1, ..., n - 1])) with i of shape [..., 1], as jax writes `jax.nn.one_hot`. Does not
    fire if the size of the last axis of i is unknown, as other axes may be compared.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("MatMul",)

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        weight = query.constant(node.inputs[1])
        equal = query.producer(_before_cast(node.inputs[0]), "Equal")
        if weight is None or weight.ndim != 2 or equal is None:
            return 0
        indices, codes = equal.inputs
        if query.constant(indices) is not None:
            indices, codes = codes, indices
        rows = query.constant(codes)
        if indices is None or rows is None or indices.dtype not in INTEGERS:
            return 0
        count = len(weight)
        if rows.shape != (*[1] * (rows.ndim - 1), count) or not np.array_equal(rows.ravel(), np.arange(count)):
            return 0
        if rows.ndim > (query.rank(indices) or 0) or _last_size(indices) != 1:
            self.refuse(node, "the indices of its one-hot codes have another shape than [..., 1]")
            return 0
        self._look_up(node, indices, weight)
        return 1

    def _look_up(self, node: ir.Node, indices: ir.Value, weight: NDArray[Any]) -> None:
        graph, name = node.graph, str(node.outputs[0].name)
        assert isinstance(graph, ir.Graph)
        taken = query.used_names(graph)
        table = np.concatenate([weight, np.zeros((1, weight.shape[1]), weight.dtype)])

        def constant(label: str, array: NDArray[Any]) -> ir.Value:
            return edit.initializer(graph, f"{name}.{label}", array, taken)

        def add(op_type: str, label: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
            made = edit.node(op_type, list(inputs), f"{name}.{label}", taken=taken, **attributes)
            graph.insert_before(node, made)
            return made.outputs[0]

        wide = add("Cast", "indices", indices, to=ir.DataType.INT64)
        index = add("Squeeze", "index", wide, constant("axis", np.array([-1])))
        least, end = constant("least", np.array(0)), constant("end", np.array(len(weight)))
        is_row = add("And", "is_row", add("GreaterOrEqual", "least", index, least), add("Less", "end", index, end))
        row = add("Where", "row", is_row, index, end)
        edit.substitute([node], ir.node("Gather", [constant("table", table), row], name=node.name))


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    cast = query.producer(value, "Cast")
    return value if cast is None else cast.inputs[0]


def _last_size(value: ir.Value) -> int | None:
    """The size of the last axis, also of an Expand to computed sizes of the other axes."""
    expand, sizes = query.producer(value, "Expand"), query.dimensions(value)
    if expand is None or (sizes and sizes[-1] is not None):
        return sizes[-1] if sizes else None
    concat = query.producer(_before_cast(expand.inputs[1]), "Concat")
    last = None if concat is None else query.constant(concat.inputs[-1])
    if last is None or not last.size or expand.inputs[0] is None:
        return None
    own = _last_size(expand.inputs[0])
    return None if own is None else max(own, int(last.ravel()[-1]))
