"""Embedding tables that a layer multiplies by too (tied embeddings): one int8 matrix for both."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq.scales import Array, weight_qparams

MIN_BYTES = 1 << 20  # of a float32 table that is worth it: smaller ones stay in the second-level cache


def int8_layers(graph: ir.Graph, table: Array) -> list[ir.Node]:
    """Finds the int8 weights of layers that are a table with a scale per row, as it is or transposed.

    Args:
        graph: Graph with int8 layers.
        table: Float table [rows, columns].

    Returns:
        The DequantizeLinear of each.
    """
    if table.ndim != 2 or table.nbytes < MIN_BYTES:
        return []
    weights = [node for node in graph if node.op_type == "DequantizeLinear" and _fits(node, table)]
    if not weights:
        return []
    scale, rows = weight_qparams(table, 0)
    return [node for node in weights if _is_form(node, rows, scale)]


def share(graph: ir.Graph, weights: list[ir.Node], rows: ir.Value, taken: set[str]) -> set[str]:
    """Lets layers read the rows of a table: W = Transpose(DequantizeLinear(rows)) where a layer has them as columns.

    Both engines run a layer of such weights in int8.

    Args:
        graph: Graph to change.
        weights: Result of `int8_layers`.
        rows: The int8 table.
        taken: Names in use; new ones are added.

    Returns:
        Names of the added nodes.
    """
    added = set()
    for node in weights:
        node.replace_input_with(0, rows)
        if node.attributes.get_int("axis", 1) == 0:
            continue
        weight = node.outputs[0]
        name = f"{weight.name}.columns"
        turned = edit.node("Transpose", [weight], name, dtype=ir.DataType.FLOAT, taken=taken, perm=[1, 0])
        node.attributes["axis"] = ir.AttrInt64("axis", 0)
        turned.outputs[0].shape, weight.shape = weight.shape, rows.shape
        weight.replace_all_uses_with(turned.outputs[0])
        turned.replace_input_with(0, weight)
        graph.insert_after(node, turned)
        added.add(str(turned.name))
    return added


def _fits(node: ir.Node, table: Array) -> bool:
    weight = node.inputs[0]
    shape = query.static_shape(weight) if weight is not None and weight.dtype == ir.DataType.INT8 else None
    return shape == (table.shape if node.attributes.get_int("axis", 1) == 0 else table.shape[::-1])


def _is_form(node: ir.Node, rows: Array, scale: Array) -> bool:
    weight, scales, zero = (query.constant(value) for value in (*node.inputs, None)[:3])
    if weight is None or scales is None or (zero is not None and zero.any()) or not np.array_equal(scales, scale):
        return False
    return np.array_equal(weight, rows if node.attributes.get_int("axis", 1) == 0 else rows.T)
