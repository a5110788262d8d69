"""Weight-only quantization of embedding tables: int8 with a scale per row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import tied_tables
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.scales import weight_qparams
from pipelines.quantization.qdq.tied_tables import MIN_BYTES

MIN_COLUMNS = 16  # of narrower rows, scales and three more operator calls cost what int8 saves
NOTE = "rows of int8 with a scale each"


def quantize_tables(inserter: QdqInserter) -> dict[str, str]:
    """Rewrites Gather(T, i) of a constant float32 matrix as float(Gather(T_q, i)) Gather(s, i).

    T_q = round(T / s) is int8 with s = max|T| / 127 of each row: a quarter of the memory and of the bytes of a lookup.
    Layers that multiply by the table read T_q too if the recipe says `tie_tables`. Small tables do not change, nor do
    those of a Gather that the recipe keeps float.

    Args:
        inserter: Inserter of the graph.

    Returns:
        Note by name of each changed Gather.
    """
    quantized: dict[str, tuple[ir.Value, ir.Value]] = {}  # by table: rows, scales
    notes: dict[str, str] = {}
    for gather in list(inserter.graph):
        table = query.constant(gather.inputs[0]) if query.is_op(gather, "Gather") else None
        if table is None or table.ndim != 2 or table.dtype != np.float32 or gather.attributes.get_int("axis", 0) != 0:
            continue
        if table.shape[1] < MIN_COLUMNS or table.nbytes < MIN_BYTES or inserter.recipe.keeps_float(str(gather.name)):
            continue
        stem = str(gather.inputs[0].name)  # type: ignore[union-attr]
        if stem not in quantized:
            scale, rows = weight_qparams(table, 0)
            tied = tied_tables.int8_layers(inserter.graph, table) if inserter.recipe.tie_tables else []
            quantized[stem] = (
                edit.initializer(inserter.graph, f"{stem}.quantized", rows, inserter.taken),
                edit.initializer(inserter.graph, f"{stem}.scale", scale[:, None], inserter.taken),
            )
            inserter.helpers |= tied_tables.share(inserter.graph, tied, quantized[stem][0], inserter.taken)
        _replace(inserter, gather, *quantized[stem])
        notes[str(gather.name)] = NOTE
    return notes


def _replace(inserter: QdqInserter, gather: ir.Node, rows: ir.Value, scales: ir.Value) -> None:
    """Put the lookups of int8 rows and of their scales, and the product of both, in place of `gather`."""
    y, indices = gather.outputs[0], gather.inputs[1]
    nodes: list[ir.Node] = []

    def add(
        op: str, inputs: list[ir.Value | None], kind: str, dtype: ir.DataType, columns: int, **attributes: int
    ) -> ir.Value:
        """Append a node with that many columns; its output."""
        node = edit.node(op, inputs, f"{y.name}.{kind}", dtype=dtype, taken=inserter.taken, **attributes)
        node.outputs[0].shape = None if y.shape is None else ir.Shape([*y.shape[:-1], columns])
        nodes.append(node)
        return node.outputs[0]

    width = int(rows.shape[1])  # type: ignore[index, arg-type]
    value = add("Gather", [rows, indices], "bytes", ir.DataType.INT8, width, axis=0)
    nodes[0].name = gather.name
    value = add("Cast", [value], "integers", ir.DataType.FLOAT, width, to=int(ir.DataType.FLOAT))
    scale = add("Gather", [scales, indices], "scales", ir.DataType.FLOAT, 1, axis=0)
    value = add("Mul", [value, scale], "rows", ir.DataType.FLOAT, width)
    inserter.helpers |= {str(part.name) for part in nodes[1:]}
    ir.convenience.replace_nodes_and_values(inserter.graph, gather, [gather], nodes, [y], [value])
