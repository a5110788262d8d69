"""Computes functions of a small table's rows for the whole table, before the lookup."""

from __future__ import annotations

from typing import Any, ClassVar

import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

MAX_ROWS = 4096  # of a table that functions are stored in
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
UNARY = ("Abs", "Cast", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Neg", "Relu")


class TabulateRows(OperatorRewrite):
    """f(Gather(T, i), c) = Gather(f(T, c), i) for a function f of single values and constants c of one row.

    `FoldConstants` then computes f(T, c): the bias and the activation behind an embedding. Further operands may be
    other tables with the same indices. Does not fire on tables of more than `MAX_ROWS` rows, as they would be stored
    twice.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = (*BINARY, *UNARY, "Mish", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh")

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        lookups = [query.producer(value, "Gather") for value in node.inputs]
        indices = next((lookup.inputs[1] for lookup in lookups if lookup is not None), None)
        rank = query.rank(indices)
        if indices is None or rank is None or query.constant(indices) is not None:
            return 0
        graph, name = node.graph, str(node.outputs[0].name)
        assert isinstance(graph, ir.Graph)
        taken, operands = query.used_names(graph), list[ir.Value | None]()
        for value, lookup in zip(node.inputs, lookups, strict=True):
            row = _row(value, rank + 1)
            if (table := _table(lookup, indices)) is not None:
                operands.append(table)
            elif row is not None:
                operands.append(edit.initializer(graph, f"{name}.row", row, taken))
            else:
                return 0
        stored = edit.node(node.op_type, operands, f"{name}.table", taken=taken)
        stored.attributes.update(node.attributes)
        graph.insert_before(node, stored)
        edit.substitute([node], ir.node("Gather", [stored.outputs[0], indices], name=node.name))
        return 1


def _table(lookup: ir.Node | None, indices: ir.Value) -> ir.Value | None:
    """The table of rows with these indices."""
    if lookup is None:
        return None
    table = lookup.inputs[0]
    sizes = query.static_shape(table) if query.constant(table) is not None else None
    if lookup.inputs[1] is not indices or lookup.attributes.get_int("axis", 0) != 0 or sizes is None:
        return None
    return table if len(sizes) == 2 and sizes[0] <= MAX_ROWS else None


def _row(value: ir.Value | None, rank: int) -> NDArray[Any] | None:
    """A constant that is the same for all rows of values of `rank` axes, as [size] or a scalar."""
    constant = query.constant(value)
    if constant is None or constant.ndim > rank or constant.shape[:-1] != (1,) * (constant.ndim - 1):
        return None
    return constant.reshape(constant.shape[-1:])
