"""Attention in a walk over a quantized image network's graph: queries times keys, a softmax, times values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.qdq import input_at, real_constant, refused
from pipelines.kernels.images.mapping.views import ORDERS, Scores, View, Views
from pipelines.kernels.images.mapping.walk import Bytes, Layer, Pending
from pipelines.kernels.images.steps import Attention, Convolution, Gathering, Operand, Step


class Attentions(Views):
    """A walk that knows attention."""

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps a node of an attention; see `Views` for other nodes that read a view."""
        found = self._views_of(node)
        first, second = [*found, None, None][:2]
        if node.op_type in ORDERS and isinstance(first, Scores):
            self._regroup(node, first)
        elif node.op_type == "MatMul" and isinstance(first, View) and isinstance(second, View):
            self._scores(node, first, second)
        elif node.op_type == "MatMul" and isinstance(first, Scores) and first.weights and isinstance(second, View):
            self._attention(node, first, second)
        elif node.op_type == "Softmax" and isinstance(first, Scores) and not first.weights:
            if node.attributes.get_int("axis", -1) % len(first.shape) != len(first.shape) - 1:
                raise refused(node, "is not over the keys")
            self.views[node.outputs[0]] = replace(first, weights=True)
        elif node.op_type == "Add" and any(isinstance(each, Scores) for each in found):
            self._biased(node, found)
        else:
            super()._viewed(node, reason)

    def _scores(self, node: ir.Node, queries: View, keys: View) -> None:
        shape = queries.index.shape
        if len(shape) != 4 or keys.index.shape != (*shape[:2], shape[3], shape[2]):
            raise refused(node, "multiplies values in another order, but not queries and keys of as many tokens")
        self.views[node.outputs[0]] = Scores(queries, keys, queries.factor * keys.factor, (*shape[:3], shape[2]))

    def _regroup(self, node: ir.Node, found: Scores) -> None:
        windows, heads, tokens, _ = found.queries.index.shape
        shape = self._rearranged(node, np.arange(windows * heads * tokens * tokens).reshape(found.shape))[0].shape
        if node.op_type not in ("Reshape", "Unsqueeze", "Squeeze", "Identity") or found.weights:
            raise refused(node, "rearranges scores of attention")
        self.views[node.outputs[0]] = replace(found, shape=shape)

    def _biased(self, node: ir.Node, found: list[View | Scores | None]) -> None:
        position = 0 if found[0] is not None else 1
        scores, other = found[position], input_at(node, 1 - position)
        constant = None if other is None else real_constant(other)
        if not isinstance(scores, Scores) or scores.weights or constant is None:
            raise refused(node, "adds to values in another order, but no constant to scores of attention")
        windows, heads, tokens, _ = scores.queries.index.shape
        try:
            bias = np.broadcast_to(constant, scores.shape).reshape(windows, heads, tokens, tokens)
        except ValueError as error:
            raise refused(node, "adds a constant of another shape") from error
        bias = np.maximum(np.asarray(bias, np.float32), np.float32(-1e9))  # a mask of infinities
        total = bias if scores.bias is None else scores.bias + bias
        self.views[node.outputs[0]] = replace(scores, bias=total)

    # ------------------------------------------------------------------------------------------------------- attention

    def _attention(self, node: ir.Node, scores: Scores, values: View) -> None:
        windows, heads, tokens, size = scores.queries.index.shape
        views = (scores.queries, replace(scores.keys, index=scores.keys.index.swapaxes(2, 3)), values)
        if values.index.shape != scores.queries.index.shape or values.factor != 1:
            raise refused(node, "is an attention with values of another shape")
        split = [self._heads(node, view) for view in views]
        if not all(np.array_equal(split[0][0], pixels) for pixels, _ in split):
            raise refused(node, "is an attention whose queries, keys and values are of other tokens")
        room = -(-size // 16) * 16
        grid, pixels = self._shape(values.source)[:2], split[0][0]
        if windows > 1 or not np.array_equal(pixels.ravel(), np.arange(grid[0] * grid[1])):
            grid = (windows, tokens) if windows > 1 else (tokens, 1)
        columns = np.full((heads, 3, room), -1)
        for part, (_, column) in enumerate(split):
            columns[:, part, :size] = column
        bias = scores.bias
        if bias is not None and windows > 1 and (bias == bias[:1]).all():
            bias = bias[:1]

        def add(to: Operand) -> Step:
            sources = [view.source for view in views]
            x = self._merged(node, sources, columns, scores.factor, pixels.reshape(grid))
            whole = None if bias is None else np.ascontiguousarray(bias, np.float32)
            return Attention(x, to, heads, size, windows, whole)

        out_shape = (*grid, heads * size)
        pending = self._float_pending(out_shape, add, shared=len(node.outputs[0].uses()) > 1)
        index = np.arange(int(np.prod(out_shape))).reshape(windows, tokens, heads, size).transpose(0, 2, 1, 3)
        self._settle(node.outputs[0], View(pending, np.ascontiguousarray(index)))

    def _heads(self, node: ir.Node, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(pixel of each token [windows, tokens], column of each element [heads, size])."""
        pixels, columns = np.divmod(view.index, self._shape(view.source)[2])
        same = (pixels == pixels[:, :1, :, :1]).all() and (columns == columns[:1, :, :1]).all()
        if not same:
            raise refused(node, "is an attention whose heads are no columns of tokens")
        return pixels[:, 0, :, 0], columns[0, :, 0]

    def _merged(
        self,
        node: ir.Node,
        sources: list[Bytes | Pending],
        columns: NDArray[np.int64],
        factor: float,
        places: NDArray[np.int64],
    ) -> int:
        """A float tensor of pixels `places` with queries (times the factor), keys and values of each head.

        columns: of the three sources, int64 [heads, 3, size].
        """
        scale = np.array([factor, 1, 1], np.float32)
        layers = [source.layer if isinstance(source, Pending) else None for source in sources]
        if (
            None not in layers
            and len({(each.x.tensor, each.x.scale, each.x.zero) for each in layers if each is not None}) == 1
        ):
            parts = [
                part.scaled(np.full(len(part.scales), factor, np.float32), np.zeros(len(part.scales), np.float32))
                for part, factor in zip(layers, scale, strict=True)
                if part is not None
            ]
            if all(part is not None for part in parts):
                return self._merged_layers([part for part in parts if part is not None], columns, places)
        raise refused(node, "is an attention whose queries, keys and values are not results of layers of one value")

    def _merged_layers(self, layers: list[Layer], columns: NDArray[np.int64], places: NDArray[np.int64]) -> int:
        ordered = [layer.chosen(columns[:, part].ravel()) for part, layer in enumerate(layers)]
        heads, _, room = columns.shape

        def joined(name: str) -> Array:
            parts = [getattr(layer, name) for layer in ordered]
            split = [part.reshape(heads, 1, room, *part.shape[1:]) for part in parts]
            return np.ascontiguousarray(np.concatenate(split, 1).reshape(heads * 3 * room, *parts[0].shape[1:]))

        x = layers[0].x
        tensor = x.tensor
        if not np.array_equal(places.ravel(), np.arange(places.size)) or places.shape != self.tensors[tensor][:2]:
            tensor = self._new((*places.shape, self.tensors[tensor][2]))
            source, to = (Operand(each, float(x.scale or 0), x.zero) for each in (x.tensor, tensor))
            self.steps.append(Gathering(source, to, np.ascontiguousarray(places)))
        out = self._new_floats((*places.shape, heads * 3 * room))
        weight, biases = joined("weight"), joined("biases").astype(np.int32)
        self.steps.append(Convolution(tensor, out, weight, biases, joined("scales"), fill=x.zero, floats=True))
        return out
