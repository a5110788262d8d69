"""Writes the transformer layer of an imported ranker in the form of `zoo.recommenders.export.sequence_blocks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.recommenders.data.encoding import Field
from zoo.recommenders.importers.sequences.attention_form import LARGE, looked_up, sequence_of
from zoo.recommenders.importers.sequences.transformer_units import Layer, TransformerUnit
from zoo.recommenders.importers.values import Array, Layout, Writer


def transform(writer: Writer, unit: TransformerUnit, keys: object, target: object, heads: int) -> Layout:
    """Writes a transformer layer up to the state of the target.

    Args:
        writer: Writer of the new graph.
        unit: The layer.
        keys: Layout of the items.
        target: Layout of the targets.
        heads: Number of heads.

    Returns:
        Layout of the state.

    Raises:
        RequestError: Items or targets are not the rows that ids select.
    """
    size = unit.position.shape[1]
    field, single, table = sequence_of(writer, keys, target, size)
    return Layout(writer.base((size,), lambda: _Form(writer, unit, heads).written(field, single, table)).entries())


class _Form:
    """The operators of one layer."""

    def __init__(self, writer: Writer, unit: TransformerUnit, heads: int) -> None:
        self.writer, self.unit, self.heads = writer, unit, heads

    def written(self, field: Field, single: Field, table: Array) -> ir.Value:
        """Returns the state, [n, size]."""
        unit, add, weight = self.unit, self._add, self._weight
        places, size = unit.position.shape
        keys, query, mask = looked_up(self.writer, field, single, table, unit.masked)
        axis1, one = weight(np.array([1])), weight(np.ones(()))
        joint = add("Concat", [add("Unsqueeze", [query, axis1], "target"), keys], "places", axis=1)
        x = add("Add", [joint, weight(unit.position)], "placed")
        mask = add("Pad", [mask, weight(np.array([0, 1, 0, 0])), one], "mask.places")
        mask = add("Unsqueeze", [mask, weight(np.array([1, 2]))], "mask.heads")
        projected = self._layer(x, unit.projected, "projected")
        key, value = (self._cut(projected, index * size, (index + 1) * size, 2) for index in range(2))
        target = self._cut(x, 0, 1, 1)
        own = self._apart(self._layer(target, unit.query, "query"), 1, [0, 2, 1, 3])
        own = add("Mul", [own, weight(np.array(unit.scale))], "query.scaled")
        scores = add("MatMul", [own, self._apart(key, places, [0, 2, 3, 1])], "products")
        barred = add("Mul", [add("Sub", [mask, one], "absent"), weight(np.array(LARGE))], "barred")
        shares = add("Softmax", [add("Add", [scores, barred], "scores")], "shares", axis=-1)
        total = add("MatMul", [shares, self._apart(value, places, [0, 2, 1, 3])], "total")
        turned = add("Transpose", [total], "turned", perm=[0, 2, 1, 3])
        together = add("Reshape", [turned, weight(np.array([-1, 1, size]))], "together")
        x = self._norm(add("Add", [target, self._layer(together, unit.joined, "joined")], "attended"), 0)
        inner = add("LeakyRelu", [self._layer(x, unit.inner, "inner")], "leaky", alpha=unit.slope)
        x = self._norm(add("Add", [x, self._layer(inner, unit.outer, "outer")], "result"), 2)
        return add("Squeeze", [x, axis1], "state")

    def _layer(self, x: ir.Value, layer: Layer, name: str) -> ir.Value:
        product = self._add("MatMul", [x, self._weight(layer[0])], f"{name}.product")
        return self._add("Add", [product, self._weight(layer[1])], name)

    def _norm(self, x: ir.Value, index: int) -> ir.Value:
        scale, bias = self.unit.norms[index : index + 2]
        inputs = [x, self._weight(scale), self._weight(bias)]
        return self._add("LayerNormalization", inputs, "norm", axis=-1, epsilon=self.unit.epsilon)

    def _cut(self, x: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        return self._add("Slice", [x, *(self._weight(np.array([bound])) for bound in (start, end, axis))], "part")

    def _apart(self, x: ir.Value, places: int, perm: list[int]) -> ir.Value:
        shape = self._weight(np.array([-1, places, self.heads, self.unit.position.shape[1] // self.heads]))
        return self._add("Transpose", [self._add("Reshape", [x, shape], "apart")], "heads", perm=perm)

    def _add(self, op: str, inputs: list[ir.Value], name: str, **more: Any) -> ir.Value:
        return self.writer.node(op, inputs, f"transformer.{name}", **more)

    def _weight(self, array: Array) -> ir.Value:
        made = np.ascontiguousarray(array, array.dtype if array.dtype.kind == "i" else np.float32)
        return self.writer.weight(made, "transformer.weight")
