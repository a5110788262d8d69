"""Writes target attention of an imported ranker in the form of `zoo.recommenders.export.sequence_parts`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.importers.attention_units import Activation, AttentionUnit
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
    if not isinstance(keys, Layout) or not isinstance(target, Layout) or keys.batch or target.batch:
        raise RequestError("attention over a history that is not looked up by ids")
    size = unit.first[0].shape[0]
    items, targets = keys.entries.reshape(-1, size), target.entries.reshape(-1, size)
    field, table = _looked_up(writer, items)
    single, own = _looked_up(writer, targets)
    if not field.is_list or single.is_list or len(items) != field.width:
        raise RequestError("attention over other than the places of one list")
    shorter, longer = sorted((table, own), key=len)
    if not np.array_equal(shorter, longer[: len(shorter)]):
        raise RequestError(f"the columns {single.name} and {field.name} have tables of their own")
    made = writer.base((size,), lambda: _Form(writer, unit, longer).written(field, single))
    return Layout(made.entries().reshape(shape))


def _looked_up(writer: Writer, entries: Array) -> tuple[Field, Array]:
    """Field and table of rows that successive columns of the ids select."""
    bases = [writer.of(row[0]) for row in entries]
    first = bases[0]
    for at, (base, row) in enumerate(zip(bases, entries, strict=True)):
        if base.table is None or base.table is not first.table or base.column != first.column + at:
            raise RequestError("attention over a history that is not looked up by ids")
        if not np.array_equal(row, base.entries().ravel()):
            raise RequestError("attention over parts of vectors")
    field = writer.field(first.column)
    if first.table is None or field.start != first.column:
        raise RequestError("attention over a part of a list")
    return field, first.table


class _Form:
    """The operators of one attention; a graph without masks gets a padding that no id equals."""

    def __init__(self, writer: Writer, unit: AttentionUnit, table: Array) -> None:
        self.writer, self.unit = writer, unit
        self.table = np.ascontiguousarray(table, np.float32)

    def written(self, field: Field, single: Field) -> ir.Value:
        """Returns the sum, [n, size]."""
        unit, add, weight = self.unit, self._add, self._weight
        self.writer._reads(field, "apart")
        rows = self.writer.weight(self.table, f"{field.name}.table")
        ids = self.writer._cut("ids", field.start, field.width)
        keys = add("Gather", [rows, ids], "items")
        target = add("Gather", [rows, self.writer._ids(single.start)], "target")
        padding = field.last if unit.masked else len(self.table)
        empty = add("Equal", [ids, weight(np.array(padding, np.int32))], "empty", ir.DataType.BOOL)
        mask = add("Cast", [add("Not", [empty], "full", ir.DataType.BOOL)], "mask", to=ir.DataType.FLOAT)
        axis1, axis2 = weight(np.array([1])), weight(np.array([2]))
        key, query, product, bias = unit.first
        products = add("Mul", [keys, add("Unsqueeze", [target, axis1], "apart")], "products")
        compared = [add("MatMul", [keys, weight(key)], "key"), add("MatMul", [products, weight(product)], "product")]
        queried = add("Gemm", [target, weight(query.T), weight(bias)], "query", transB=1)
        x = add("Add", [add("Add", compared, "compared"), add("Unsqueeze", [queried, axis1], "query.apart")], "unit")
        for activation, (layer, constant) in zip(unit.activations, unit.layers, strict=True):
            x = add("MatMul", [self._activated(x, activation), weight(layer)], "layer")
            x = add("Add", [x, weight(constant)], "layer.result")
        known = add("Unsqueeze", [mask, axis2], "known")
        if unit.weights == "softmax":
            absent = add("Sub", [known, weight(np.ones(()))], "absent")
            barred = add("Mul", [absent, weight(np.array(LARGE))], "barred")
            shares = add("Softmax", [add("Add", [x, barred], "scores")], "shares", axis=1)
        else:
            x = add("Sigmoid", [x], "sigmoid") if unit.weights == "sigmoid" else x
            shares = add("Mul", [x, known], "shares")
        turned = add("Transpose", [shares], "turned", perm=[0, 2, 1])
        return add("Squeeze", [add("MatMul", [turned, keys], "total"), axis1], "attended")

    def _activated(self, x: ir.Value, activation: Activation) -> ir.Value:
        scale, shift, rise, slope = activation
        add, weight = self._add, self._weight
        if not scale.size:
            return add("PRelu", [x, weight(slope)], "activation")
        standard = add("Add", [add("Mul", [x, weight(scale)], "scaled"), weight(shift)], "standard")
        risen = add("Mul", [add("Sigmoid", [standard], "share"), weight(rise)], "risen")
        return add("Mul", [x, add("Add", [risen, weight(slope)], "gate")], "activation")

    def _add(
        self, op: str, inputs: list[ir.Value], name: str, dtype: ir.DataType = ir.DataType.FLOAT, **more: object
    ) -> ir.Value:
        make: Callable[..., ir.Value] = self.writer.node
        return make(op, inputs, f"attention.{name}", dtype, **more)

    def _weight(self, array: Array) -> ir.Value:
        made = np.ascontiguousarray(array, array.dtype if array.dtype.kind == "i" else np.float32)
        return self.writer.weight(made, "attention.weight")
