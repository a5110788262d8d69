"""Writes target attention of an imported ranker in the form of `zoo.recommenders.export.sequence_parts`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.steps import Activation
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.importers.sequences.attention_units import AttentionUnit
from zoo.recommenders.importers.values import Array, Layout, Writer

LARGE = 1e4  # subtracted from the scores of places without an item


def attend(writer: Writer, unit: AttentionUnit, keys: object, target: object, shape: tuple[int, ...]) -> Layout:
    """Writes target attention.

    Args:
        writer: Writer of the new graph.
        unit: The attention.
        keys: Layout of the items.
        target: Layout of the targets.
        shape: Shape of the result without the batch.

    Returns:
        Layout of the result.

    Raises:
        RequestError: Items or targets are not the rows that ids select.
    """
    size = unit.first[0].shape[0]
    field, single, table = sequence_of(writer, keys, target, size)
    made = writer.base((size,), lambda: _Form(writer, unit, table).written(field, single))
    return Layout(made.entries().reshape(shape))


def sequence_of(writer: Writer, keys: object, target: object, size: int) -> tuple[Field, Field, Array]:
    """Finds the list and the column whose rows attention reads.

    Args:
        writer: Writer of the new graph.
        keys: Layout of the items.
        target: Layout of the targets.
        size: Size of a vector.

    Returns:
        Field of the items, field of the target, and their table.

    Raises:
        RequestError: Items or targets are not the rows that ids select.
    """
    if not isinstance(keys, Layout) or not isinstance(target, Layout) or keys.batch or target.batch:
        raise RequestError("attention over a history that is not looked up by ids")
    items, targets = keys.entries.reshape(-1, size), target.entries.reshape(-1, size)
    field, table = _looked_up(writer, items)
    single, own = _looked_up(writer, targets)
    if not field.is_list or single.is_list or len(items) != field.width:
        raise RequestError("attention over other than the places of one list")
    shorter, longer = sorted((table, own), key=len)
    if not np.array_equal(shorter, longer[: len(shorter)]):
        raise RequestError(f"the columns {single.name} and {field.name} have tables of their own")
    return field, single, np.ascontiguousarray(longer, np.float32)


def looked_up(
    writer: Writer, field: Field, single: Field, table: Array, masked: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Writes items, target and mask of attention; without a mask the padding is an id that there is not.

    Args:
        writer: Writer of the new graph.
        field: Field of the items.
        single: Field of the target.
        table: Vectors, float32 [rows, size].
        masked: Whether places without an item are left out.

    Returns:
        Items [n, items, size], targets [n, size], and the mask [n, items], 1 where there is an item.
    """
    writer._reads(field, "apart")
    rows = writer.weight(table, f"{field.name}.table")
    ids = writer._cut("ids", field.start, field.width)
    keys = writer.node("Gather", [rows, ids], "attention.items")
    target = writer.node("Gather", [rows, writer._ids(single.start)], "attention.target")
    padding = writer.weight(np.array(field.last if masked else len(table), np.int32), "attention.padding")
    empty = writer.node("Equal", [ids, padding], "attention.empty", ir.DataType.BOOL)
    full = writer.node("Not", [empty], "attention.full", ir.DataType.BOOL)
    return keys, target, writer.node("Cast", [full], "attention.mask", to=ir.DataType.FLOAT)


def _looked_up(writer: Writer, entries: Array) -> tuple[Field, Array]:
    """Field and table of rows that successive columns of the ids select."""
    bases = [writer.of(row[0]) for row in entries]
    first = bases[0]
    for index, (base, row) in enumerate(zip(bases, entries, strict=True)):
        if base.table is None or base.table is not first.table or base.column != first.column + index:
            raise RequestError("attention over a history that is not looked up by ids")
        if not np.array_equal(row, base.entries().ravel()):
            raise RequestError("attention over parts of vectors")
    field = writer.field(first.column)
    if first.table is None or field.start != first.column:
        raise RequestError("attention over a part of a list")
    return field, first.table


def activated(writer: Writer, layer: object, activation: Activation) -> Layout:
    """Writes the activation of a layer.

    Args:
        writer: Writer of the new graph.
        layer: Layout of the layer.
        activation: The activation.

    Returns:
        Layout of the result.

    Raises:
        RequestError: The layout is no vector a row of the size of the activation.
    """
    if not isinstance(layer, Layout) or layer.batch or layer.entries.shape != activation.slope.shape:
        raise RequestError("Dice of other than a layer")
    x = layer.entries
    return Layout(writer.base(x.shape, lambda: _activated(writer, writer.written(x), activation)).entries())


def _activated(writer: Writer, x: ir.Value, activation: Activation) -> ir.Value:
    arrays = [np.ascontiguousarray(array, np.float32) for array in activation[:4]]
    scale, shift, rise, slope = (writer.weight(array, "activation.weight") for array in arrays)
    if not activation.scale.size:
        return writer.node("PRelu", [x, slope], "activation")
    if activation.epsilon and writer.opset < 17:
        raise RequestError(f"Dice that normalizes rows needs opset 17, found {writer.opset}")
    if activation.epsilon:
        inputs = [x, scale, shift]
        standard = writer.node("LayerNormalization", inputs, "standard", axis=-1, epsilon=activation.epsilon)
    else:
        standard = writer.node("Add", [writer.node("Mul", [x, scale], "scaled"), shift], "standard")
    risen = writer.node("Mul", [writer.node("Sigmoid", [standard], "share"), rise], "risen")
    return writer.node("Mul", [x, writer.node("Add", [risen, slope], "gate")], "activation")


class _Form:
    """The operators of one attention; a graph without masks gets a padding that no id equals."""

    def __init__(self, writer: Writer, unit: AttentionUnit, table: Array) -> None:
        self.writer, self.unit, self.table = writer, unit, table

    def written(self, field: Field, single: Field) -> ir.Value:
        """Returns the sum, [n, size]."""
        unit, add, weight = self.unit, self._add, self._weight
        keys, target, mask = looked_up(self.writer, field, single, self.table, unit.masked)
        axis1, axis2 = weight(np.array([1])), weight(np.array([2]))
        key, query, product, bias = unit.first
        products = add("Mul", [keys, add("Unsqueeze", [target, axis1], "apart")], "products")
        compared = [add("MatMul", [keys, weight(key)], "key"), add("MatMul", [products, weight(product)], "product")]
        queried = add("Gemm", [target, weight(query.T), weight(bias)], "query", transB=1)
        x = add("Add", [add("Add", compared, "compared"), add("Unsqueeze", [queried, axis1], "query.apart")], "unit")
        for activation, (layer, constant) in zip(unit.activations, unit.layers, strict=True):
            x = add("MatMul", [_activated(self.writer, x, activation), weight(layer)], "layer")
            x = add("Add", [x, weight(constant)], "layer.result")
        present = add("Unsqueeze", [mask, axis2], "known")
        if unit.weights == "softmax":
            absent = add("Sub", [present, weight(np.ones(()))], "absent")
            barred = add("Mul", [absent, weight(np.array(LARGE))], "barred")
            shares = add("Softmax", [add("Add", [x, barred], "scores")], "shares", axis=1)
        else:
            x = add("Sigmoid", [x], "sigmoid") if unit.weights == "sigmoid" else x
            shares = add("Mul", [x, present], "shares")
        turned = add("Transpose", [shares], "turned", perm=[0, 2, 1])
        return add("Squeeze", [add("MatMul", [turned, keys], "total"), axis1], "attended")

    def _add(
        self, op: str, inputs: list[ir.Value], name: str, dtype: ir.DataType = ir.DataType.FLOAT, **more: object
    ) -> ir.Value:
        make: Callable[..., ir.Value] = self.writer.node
        return make(op, inputs, f"attention.{name}", dtype, **more)

    def _weight(self, array: Array) -> ir.Value:
        made = np.ascontiguousarray(array, array.dtype if array.dtype.kind == "i" else np.float32)
        return self.writer.weight(made, "attention.weight")
