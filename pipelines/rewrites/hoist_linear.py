"""Computes a linear layer of all slices of a tensor at once: the input layers of unrolled recurrent cells."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.flatten_linear import FUNCTIONS


class HoistLinear(Rewrite):
    """slice(x) W + b = slice(x W + b) for layers with one W and b that read slices of x on another axis than the last.

    A slice is a Gather, a Slice or a part of a Split, also with a Squeeze behind it. Exporters that unroll a recurrent
    network write one layer for the input of every step; one layer of all steps reads its weights once. Does not fire if
    the slices have fewer rows than x, or before an activation, which engines fuse into the layer.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Joins the layers of each tensor that have the same weights."""
        groups: dict[tuple[Hashable, ...], list[_Layer]] = {}
        for node in model.graph:
            if (layer := _Layer.of(node)) is not None:
                groups.setdefault(layer.kind, []).append(layer)
        return sum(self._hoist(model.graph, layers) for layers in groups.values() if len(layers) > 1)

    def _hoist(self, graph: ir.Graph, layers: list[_Layer]) -> int:
        first = layers[0]
        rows = sum(layer.rows for layer in layers)
        if rows < first.size:
            self.refuse(first.node, f"it and its siblings read {rows} of {first.size} slices")
            return 0
        if any(query.is_op(query.sole_user(layer.node.outputs[0]), *FUNCTIONS) for layer in layers):
            self.refuse(first.node, "engines fuse the activation behind it into the layer")
            return 0
        taken = query.used_names(graph)
        values: dict[ir.Value | None, ir.Value] = {first.path[0].inputs[0]: first.insert_whole(graph, taken)}
        for layer in layers:
            for node in layer.path:
                if node.outputs[0] not in values:
                    inputs = [values[node.inputs[0]], *node.inputs[1:]]
                    name = edit.unique(f"{node.outputs[0].name}.hoisted", taken)
                    count, attributes = len(node.outputs), node.attributes.values()
                    copy = ir.Node("", node.op_type, inputs, attributes, num_outputs=count, name=name)
                    _insert(layer.node, copy, node.outputs, first.weight.shape[1], taken)
                    values.update(zip(node.outputs, copy.outputs, strict=True))
            edit.bypass(layer.node, values[layer.node.inputs[0]])
        return 1


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer with weights [k, m] of `rows` of the `size` slices of a tensor, and the operators between the two."""

    node: ir.Node
    path: tuple[ir.Node, ...]
    weight: NDArray[Any]
    bias: NDArray[Any] | None
    rows: int
    size: int
    kind: tuple[Hashable, ...]

    @classmethod
    def of(cls, node: ir.Node) -> _Layer | None:
        """Returns the layer if it reads a slice, else None."""
        weight = query.constant(node.inputs[1]) if query.is_op(node, "Gemm", "MatMul") else None
        if weight is None or weight.ndim != 2 or weight.dtype.kind != "f" or node.attributes.get_int("transA", 0) != 0:
            return None
        if any(node.attributes.get_float(key, 1.0) != 1 for key in ("alpha", "beta")):
            return None
        weight = query.inputs_first(node, weight)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        row = query.constant(bias)
        path, axis = _path(node.inputs[0])
        if axis is None or (
            bias is not None and (row is None or not row.shape[-1:] == (row.size,) == weight.shape[1:])
        ):
            return None
        x = path[0].inputs[0]
        size, rows = (query.dimensions(x) or [])[axis], _rows(path[0], axis)
        kind = (x, axis, node.inputs[1], bias, query.is_transposed(node))
        return None if size is None or rows is None else cls(node, path, weight, row, rows, size, kind)

    def insert_whole(self, graph: ir.Graph, taken: set[str]) -> ir.Value:
        """Inserts the layer of the whole tensor, and returns its result."""
        x, weight = self.path[0].inputs[0], self.node.inputs[1]
        name, width = f"{self.node.outputs[0].name}.whole", self.weight.shape[1]
        assert x is not None
        if query.is_transposed(self.node):
            weight = edit.initializer(graph, f"{name}.weight", np.ascontiguousarray(self.weight), taken)
        made = [ir.node("MatMul", [x, weight], name=edit.unique(name, taken))]
        if self.bias is not None:
            row = edit.initializer(graph, f"{name}.bias", self.bias.ravel(), taken)
            made.append(ir.node("Add", [made[0].outputs[0], row], name=edit.unique(f"{name}.biased", taken)))
        for node in made:
            _insert(self.node, node, [x], width, taken)
        return made[-1].outputs[0]


def _insert(reader: ir.Node, node: ir.Node, models: Sequence[ir.Value], width: int, taken: set[str]) -> None:
    """Inserts a node before another; its results are as `models`, with `width` channels."""
    for value, model in zip(node.outputs, models, strict=True):
        value.name, value.type = edit.unique(f"{node.name}.result", taken), model.type
        if model.shape is not None:
            value.shape = ir.Shape([*model.shape[:-1], width])
    assert reader.graph is not None
    reader.graph.insert_before(reader, node)


def _path(value: ir.Value | None) -> tuple[tuple[ir.Node, ...], int | None]:
    """The slice that computes a value, a Squeeze behind it, and the axis of the slice; None if it is the last axis."""
    squeeze = query.producer(value, "Squeeze")
    piece = query.producer(value if squeeze is None else squeeze.inputs[0], "Gather", "Slice", "Split")
    rank = query.rank(piece.inputs[0]) if piece is not None else None
    if piece is None or not rank or query.constant(piece.inputs[0]) is not None:
        return (), None
    axes = query.integers(piece, "axes", 3) if piece.op_type == "Slice" else [piece.attributes.get_int("axis", 0)]
    if axes is None or len(axes) != 1 or axes[0] % rank == rank - 1:
        return (), None
    if squeeze is None:
        return (piece,), axes[0] % rank
    dropped, ranks = query.integers(squeeze, "axes", 1), query.rank(squeeze.inputs[0])
    if not dropped or not ranks or any(axis % ranks == ranks - 1 for axis in dropped):
        return (), None
    return (piece, squeeze), axes[0] % rank


def _rows(piece: ir.Node, axis: int) -> int | None:
    """The number of rows of a slice."""
    if piece.op_type == "Gather":
        indices = query.constant(piece.inputs[1])
        return None if indices is None else indices.size
    sizes = query.dimensions(piece.outputs[0])
    return None if sizes is None else sizes[axis]
