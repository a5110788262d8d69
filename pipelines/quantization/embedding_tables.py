"""Embedding tables in bytes, with a scale a row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import Pairs
from pipelines.quantization.scales import weight_parameters

NARROWEST = 16  # columns: of narrower rows, scales and three more operator calls cost what the bytes save
SMALLEST = 1 << 16  # bytes of a float table that are worth it
NOTE = "rows of int8 with a scale each"


def convert(pairs: Pairs) -> dict[str, str]:
    """Gather(T, i) of a constant float matrix = float(Gather(T_q, i)) Gather(s, i), T_q = round(T / s) int8, s = max|T|
    / 127 of each row.

    A quarter of the memory, and of what a lookup reads. Small tables and what the recipe keeps stay. Returns what
    became of which Gather.
    """
    stored: dict[str, tuple[ir.Value, ir.Value]] = {}
    notes: dict[str, str] = {}
    for gather in list(pairs.main):
        table = query.constant(gather.inputs[0]) if query.is_op(gather, "Gather") else None
        if table is None or table.ndim != 2 or table.dtype != np.float32 or gather.attributes.get_int("axis", 0) != 0:
            continue
        if table.shape[1] < NARROWEST or table.nbytes < SMALLEST or pairs.recipe.keeps_float(str(gather.name)):
            continue
        stem = str(gather.inputs[0].name)  # type: ignore[union-attr]
        if stem not in stored:
            scale, integers = weight_parameters(table, 0)
            kinds = (("quantized", integers), ("scale", scale[:, None]))
            rows, scales = (edit.initializer(pairs.main, f"{stem}.{kind}", array, pairs.taken) for kind, array in kinds)
            stored[stem] = rows, scales
        _replace(pairs, gather, *stored[stem])
        notes[str(gather.name)] = NOTE
    return notes


def _replace(pairs: Pairs, gather: ir.Node, rows: ir.Value, scales: ir.Value) -> None:
    y, indices = gather.outputs[0], gather.inputs[1]
    made: list[ir.Node] = []

    def add(
        op: str, inputs: list[ir.Value | None], kind: str, dtype: ir.DataType, columns: int, **attributes: int
    ) -> ir.Value:
        node = edit.node(op, inputs, f"{y.name}.{kind}", dtype=dtype, taken=pairs.taken, **attributes)
        node.outputs[0].shape = None if y.shape is None else ir.Shape([*y.shape[:-1], columns])
        made.append(node)
        return node.outputs[0]

    width = int(rows.shape[1])  # type: ignore[index, arg-type]
    found = add("Gather", [rows, indices], "bytes", ir.DataType.INT8, width, axis=0)
    made[0].name = gather.name
    found = add("Cast", [found], "integers", ir.DataType.FLOAT, width, to=int(ir.DataType.FLOAT))
    found = add(
        "Mul",
        [found, add("Gather", [scales, indices], "scales", ir.DataType.FLOAT, 1, axis=0)],
        "rows",
        ir.DataType.FLOAT,
        width,
    )
    pairs.helpers |= {str(each.name) for each in made[1:]}
    ir.convenience.replace_nodes_and_values(pairs.main, gather, [gather], made, [y], [found])
