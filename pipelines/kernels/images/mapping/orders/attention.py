"""Mapping of attention in quantized image networks: queries times keys, a softmax, times values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.orders.choices import Choices
from pipelines.kernels.images.mapping.orders.heads import Outer
from pipelines.kernels.images.mapping.orders.views import ORDERS, Scores, View
from pipelines.kernels.images.mapping.qdq import input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Layer, Pending
from pipelines.kernels.images.steps import (
    Attention,
    ChannelScale,
    Concatenation,
    Convolution,
    Gathering,
    MatrixProduct,
    Operand,
    Step,
)
from pipelines.kernels.transformer.operations.base import LANES

MASKED = np.float32(-1e9)  # score of a key that is masked


class Attentions(Choices):
    """Mapping of attention."""

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps a node of an attention; see `Views` for other nodes that read a view."""
        try:
            self._of_attention(node, reason)
        except RequestError:
            if node.op_type == "Softmax" or not self._compute_scores(node):
                raise
            self._of_attention(node, reason)

    def _of_attention(self, node: ir.Node, reason: RequestError | None) -> None:
        views = self._views_of(node)
        if node.op_type == "MatMul":
            views = [self._whole_view(node, value) for value in node.inputs]
            views = [self._constant_heads(node, views, position) for position in range(2)]
        first, second = [*views, None, None][:2]
        if node.op_type in ORDERS and isinstance(first, Scores):
            self._regroup(node, first)
        elif node.op_type == "MatMul" and isinstance(first, View) and isinstance(second, View):
            self._scores(node, first, second)
        elif node.op_type == "MatMul" and _are_weights(first, False) and isinstance(second, View):
            self._attention(node, first, second)
        elif node.op_type == "MatMul" and isinstance(first, View) and _are_weights(second, True):
            values = replace(first, index=first.index.swapaxes(-1, -2))
            self._attention(node, second, values, turned=True)
        elif node.op_type == "Softmax" and isinstance(first, Scores) and not first.weights:
            if first.turned or node.attributes.get_int("axis", -1) % len(first.shape) != len(first.shape) - 1:
                raise refused(node, "is not over the keys")
            self.views[node.outputs[0]] = replace(first, weights=True)
        elif node.op_type == "Attention":
            self._whole_attention(node)
        elif node.op_type == "InstanceNormalization" and isinstance(first, View):
            self._normalize_view(node, first)
        elif node.op_type in ("IsNaN", "Where") and any(isinstance(view, Scores) and view.weights for view in views):
            self._without_nan(node, views)
        elif node.op_type == "Add" and any(isinstance(view, Scores) for view in views):
            self._biased(node, views)
        elif node.op_type == "Mul" and any(isinstance(view, Scores) for view in views) and not self._is_scaled(node):
            self._scale_heads(node, views)
        else:
            super()._viewed(node, reason)

    def _compute_scores(self, node: ir.Node) -> bool:
        """Makes products that are no scores of an attention (linear attention) views; returns whether there are any."""
        made = False
        for value in node.inputs:
            scores = None if value is None else self.views.get(value)
            if value is None or not isinstance(scores, Scores) or scores.weights or _is_quantized(value):
                continue
            del self.views[value]
            self._settle(value, self._product(node, scores))
            made = True
        return made

    def _product(self, node: ir.Node, scores: Scores) -> View:
        """Queries times keys, plus a bias, as floats."""
        windows, heads, tokens, size = scores.queries.index.shape
        count, groups = scores.keys.index.shape[-1], windows * heads
        factors = []
        for view, length in ((scores.queries, tokens), (scores.keys, size)):
            rows = replace(view, factor=1.0, index=view.index.reshape(1, groups * length, -1))
            gathered = self._gathered(node, rows, self._grid(groups * length))
            factors.append(self._whole(gathered, True, False, False))
        shape = (*self._shape(factors[0])[:2], count)

        def add(to: Operand) -> Step:
            a, b = (self._float_tensor(node, mapped) for mapped in factors)
            return MatrixProduct(a, b, to.tensor, groups)

        product = self._float_pending(shape, add, shared=True, last=True)
        index = scores.outer.restored(np.arange(math.prod(shape)).reshape(windows, heads, tokens, count))
        index = index.swapaxes(-1, -2) if scores.turned else index
        view = View(product, index.reshape(scores.shape), scores.factor)
        if scores.bias is None:
            return self._plain(node, view)
        bias = np.broadcast_to(scores.bias, (windows, heads, tokens, count)).reshape(-1, count).astype(np.float32)
        gain = np.full_like(bias, scores.factor)
        return View(self._scaled(node, self._whole(view, True, False, False), gain, bias), view.index)

    def _constant_heads(self, node: ir.Node, views: list[View | Scores | None], position: int) -> View | Scores | None:
        """A factor of a MatMul; constant queries, keys or values of heads become floats, the same for all samples."""
        value, other = input_at(node, position), views[1 - position]
        if not isinstance(other, View) or other.index.ndim not in (3, 4) or views[position] is not None:
            return views[position]
        plain, first = other.index.ndim == 3, len(other.index)
        constant = None if value is None else self.constants.real(value, first)
        if constant is None or constant.ndim != other.index.ndim or len(constant) != first:
            return None
        whole = constant[None] if plain else constant
        if len(whole) != 1:
            return None
        x, (_, heads, tokens, size) = self._operand_of(node, other.source), whole.shape
        part = math.gcd(self._shape(other.source)[2], heads * size)
        places = np.full((tokens, 1, heads * size // part), -1)
        rows = np.ascontiguousarray(whole[0].swapaxes(0, 1).reshape(tokens, -1), np.float32)
        made = self._float_pending(
            (tokens, 1, heads * size), lambda to: Gathering(x, to, places, rows, part), shared=True, last=True
        )
        index = np.ascontiguousarray(np.arange(rows.size).reshape(1, tokens, heads, size).swapaxes(1, 2))
        return View(made, index[0] if plain else index)

    def _scores(self, node: ir.Node, queries: View, keys: View) -> None:
        """Maps queries times keys [..., windows, heads, ...], or [heads, ...] as of a bmm."""
        shape, (*sizes, size, count) = queries.index.shape, keys.index.shape
        if len(shape) < 3 or (*sizes, size) != (*shape[:-2], shape[-1]):
            raise refused(node, "multiplies values in another order, but not queries and keys of heads")
        outer, factor = Outer.of(queries.index, self._shape(queries.source)[2]), queries.factor * keys.factor
        queries, keys = (replace(view, index=outer.grouped(view.index)) for view in (queries, keys))
        self.views[node.outputs[0]] = Scores(queries, keys, factor, (*shape[:-1], count), outer)

    def _whole_attention(self, node: ir.Node) -> None:
        """Maps an Attention of opset 23."""
        attributes = node.attributes
        if len(node.outputs) > 1 or len(node.inputs) > 4 or attributes.get_float("softcap", 0.0) != 0:
            raise refused(node, "has a cache, a cap or several results")
        views: list[View] = []
        counts = ("q_num_heads", "kv_num_heads", "kv_num_heads")
        for value, name in zip(node.inputs[:3], counts, strict=True):
            view = None if value is None else self._view_of(node, value)
            if not isinstance(view, View):
                raise refused(node, "reads weights of attention")
            index, heads = view.index, attributes.get_int(name, 0)
            if index.ndim == 3 and heads > 0 and index.shape[2] % heads == 0:
                index = index.reshape(*index.shape[:2], heads, -1).transpose(0, 2, 1, 3)
            if index.ndim != 4:
                raise refused(node, "has no heads")
            if views and views[0].index.shape[1] % index.shape[1] == 0:
                index = np.repeat(index, views[0].index.shape[1] // index.shape[1], axis=1)
            views.append(replace(view, index=index))
        joined = (self._dimensions(node.inputs[0]) or ())[3:] == ()
        queries, keys, values = views
        shape = (*queries.index.shape[:3], keys.index.shape[2])
        bias = np.zeros(shape, np.float32)
        if (mask := input_at(node, 3)) is not None:
            constant = self.constants.real(mask, shape[0])
            if constant is None:
                raise refused(node, "has a mask that is not constant")
            bias = bias + (np.where(constant, 0, MASKED) if constant.dtype == np.bool_ else constant)
        if attributes.get_int("is_causal", 0):
            bias = bias + np.triu(np.full(shape[2:], MASKED), 1)
        scale = attributes.get_float("scale", 0.0) or _head_scale(queries)
        turned = replace(keys, index=keys.index.swapaxes(2, 3))
        factor = scale * queries.factor * keys.factor
        whole = np.maximum(np.asarray(bias, np.float32), MASKED)
        scores = Scores(queries, turned, factor, shape, Outer(shape[:2], (0, 1)), whole, True)
        self._attention(node, scores, values, joined)

    def _normalize_view(self, node: ir.Node, view: View) -> None:
        """Maps an InstanceNormalization of groups of channels, as GroupNormalization was exported before opset 18."""
        channels, groups = self._shape(view.source)[2], view.index.shape[1]
        size = channels // groups
        elements = np.arange(view.index.size).reshape(-1, channels)
        for group in range(groups if len(view.index) == 1 and channels % groups == 0 and view.factor == 1 else 0):
            own = np.sort(view.index[0, group].ravel())
            if not np.array_equal(own, elements[:, group * size : (group + 1) * size].ravel()):
                raise refused(node, "does not normalize groups of channels")
        gain, bias = (self._of_groups(node, index, channels, groups) for index in (1, 2))
        self._normalize_groups(node, self._whole(view, True, False, False), groups, gain, bias)
        made = self.values.pop(node.outputs[0])
        assert isinstance(made, Pending)
        self._settle(node.outputs[0], View(made, view.index))

    def _without_nan(self, node: ir.Node, views: list[View | Scores | None]) -> None:
        """Maps weights whose NaN are replaced by 0: there is none where a query has a key."""
        weights = views[-1]
        if node.op_type == "Where" and (views[0] is not weights or not self._zero(node.inputs[1])):
            raise refused(node, "replaces weights of attention")
        assert isinstance(weights, Scores)
        if weights.bias is not None and (weights.bias <= MASKED).all(-1).any():
            raise refused(node, "replaces weights of queries without a key")
        self.views[node.outputs[0]] = weights

    def _zero(self, value: ir.Value | None) -> bool:
        """Whether a value is the constant 0."""
        constant = None if value is None else self.constants.real(value)
        return constant is not None and not constant.any()

    def _regroup(self, node: ir.Node, scores: Scores) -> None:
        order = list(range(len(scores.shape)))
        if node.op_type == "Transpose" and node.attributes.get_ints("perm", []) == (*order[:-2], order[-1], order[-2]):
            shape = (*scores.shape[:-2], scores.shape[-1], scores.shape[-2])
            self.views[node.outputs[0]] = replace(scores, shape=shape, turned=not scores.turned)
            return
        shape = self._rearranged(node, np.arange(math.prod(scores.shape)).reshape(scores.shape))[0].shape
        if node.op_type not in ("Reshape", "Unsqueeze", "Squeeze", "Identity") or scores.weights or scores.turned:
            raise refused(node, "rearranges scores of attention")
        self.views[node.outputs[0]] = replace(scores, shape=shape)

    def _biased(self, node: ir.Node, views: list[View | Scores | None]) -> None:
        position = 0 if views[0] is not None else 1
        scores, other = views[position], input_at(node, 1 - position)
        size = scores.shape[0] if isinstance(scores, Scores) else 0
        constant = None if other is None else self.constants.real(other, size)
        if not isinstance(scores, Scores) or scores.weights or scores.turned or constant is None:
            raise refused(node, "adds to values in another order, but no constant to scores of attention")
        try:
            bias = np.broadcast_to(constant, scores.shape)
        except ValueError as error:
            raise refused(node, "adds a constant of another shape") from error
        bias = scores.outer.grouped(bias.reshape(*scores.outer.sizes, *scores.shape[-2:]))
        bias = np.maximum(np.asarray(bias, np.float32), MASKED)  # a mask of infinities
        total = bias if scores.bias is None else scores.bias + bias
        self.views[node.outputs[0]] = replace(scores, bias=total)

    def _scale_heads(self, node: ir.Node, views: list[View | Scores | None]) -> None:
        """Maps scores times a constant per head: the queries are multiplied by it."""
        position = 0 if views[0] is not None else 1
        scores, other = views[position], input_at(node, 1 - position)
        constant = None if other is None else self.constants.real(other)
        whole = isinstance(scores, Scores) and scores.shape == (*scores.queries.index.shape[:3], scores.shape[-1])
        if constant is None or not isinstance(scores, Scores) or scores.weights or scores.bias is not None or not whole:
            raise refused(node, "multiplies scores of attention by no constant per head")
        heads = (1, scores.shape[1], 1, 1)
        if constant.size != scores.shape[1] or np.broadcast_shapes(constant.shape, heads) != heads:
            raise refused(node, "multiplies scores of attention by no constant per head")
        queries = self._multiplied(node, scores.queries, constant.reshape(heads))
        self.views[node.outputs[0]] = replace(scores, queries=queries, factor=scores.factor / scores.queries.factor)

    # ------------------------------------------------------------------------------------------------------- attention

    def _attention(
        self, node: ir.Node, scores: Scores, values: View, joined: bool = False, turned: bool = False
    ) -> None:
        """Adds an attention; queries and keys, or values, get columns of zeros where they have fewer.

        joined: whether heads are one axis in the result. turned: whether tokens are its last axis.
        """
        windows, heads, tokens, size = scores.queries.index.shape
        alike = len(values.index.shape[:-2]) > 2 or values.index.shape[:-2] == scores.outer.sizes
        outer = scores.outer if alike else Outer.of(values.index, self._shape(values.source)[2])
        if outer.sizes != values.index.shape[:-2]:
            raise refused(node, "is an attention with values of another shape")
        values = replace(values, index=outer.grouped(values.index))
        keys = replace(scores.keys, index=scores.keys.index.swapaxes(2, 3))
        if values.index.shape[:-1] != keys.index.shape[:-1] or values.factor != 1:
            raise refused(node, "is an attention with values of another shape")
        queries, keys, values = (self._in_columns(node, view) for view in (scores.queries, keys, values))
        (pixels, query), (attended, key), (same, value) = (self._heads(view) for view in (queries, keys, values))
        if not np.array_equal(attended, same):
            keys, values = (self._in_columns(node, view, always=True) for view in (keys, values))
            (attended, key), (_, value) = (self._heads(view) for view in (keys, values))
        width, size = value.shape[1], max(size, value.shape[1])
        query, key, value = (
            np.pad(index, ((0, 0), (0, size - index.shape[1])), constant_values=-1) for index in (query, key, value)
        )
        parts = [(queries.source, scores.factor, query), (keys.source, 1, key), (values.source, 1, value)]
        bias = scores.bias
        if bias is not None and windows > 1 and (bias == bias[:1]).all():
            bias = bias[:1]
        if bias is not None and (bias == bias[..., :1]).all():  # a softmax does not see it
            bias = None
        grids = [self._token_grid(of, view) for of, view in ((pixels, queries), (attended, values))]

        def add(to: Operand) -> Step:
            whole = None if bias is None else np.ascontiguousarray(bias, np.float32)
            if np.array_equal(pixels, attended) and len({_layer_input(source) for source, _, _ in parts}) == 1:
                x = self._merged(node, parts, pixels.reshape(grids[0]))
                return Attention(x, to, heads, size, windows, whole)
            x = self._merged(node, parts[:1], pixels.reshape(grids[0]))
            return Attention(
                x, to, heads, size, windows, whole, self._merged(node, parts[1:], attended.reshape(grids[1]))
            )

        out_shape = (*grids[0], heads * size)
        pending = self._float_pending(out_shape, add, shared=len(node.outputs[0].uses()) > 1)
        index: NDArray[np.int64] = np.arange(math.prod(out_shape)).reshape(windows, tokens, heads * size)
        index = index.reshape(windows, tokens, heads, size)[..., :width]
        index = index.reshape(windows, tokens, -1) if joined else outer.restored(index.transpose(0, 2, 1, 3))
        index = index.swapaxes(-1, -2) if turned else index
        self._settle(node.outputs[0], View(pending, np.ascontiguousarray(index)))

    def _token_grid(self, pixels: NDArray[np.int64], view: View) -> tuple[int, ...]:
        """Height and width of tokens [windows, tokens]: those of the view's source where they are all its pixels."""
        grid = self._shape(view.source)[:2]
        if len(pixels) == 1 and np.array_equal(pixels.ravel(), np.arange(grid[0] * grid[1])):
            return grid
        return pixels.shape if len(pixels) > 1 else (pixels.size, 1)

    def _in_columns(self, node: ir.Node, view: View, always: bool = False) -> View:
        """The elements [windows, heads, tokens, size] of a view, gathered where heads are no columns of tokens.

        always: gather them in the order of the windows in any case.
        """
        pixels, columns = np.divmod(view.index, self._shape(view.source)[2])
        if not always and (pixels == pixels[:, :1, :, :1]).all() and (columns == columns[:1, :, :1]).all():
            return view
        windows, heads, tokens, size = view.index.shape
        index = view.index.transpose(0, 2, 1, 3).reshape(1, windows * tokens, heads * size)
        gathered = self._gathered(node, replace(view, index=index), self._grid(windows * tokens))
        elements = gathered.index.reshape(windows, tokens, heads, size).transpose(0, 2, 1, 3)
        return replace(gathered, index=elements, factor=view.factor)

    def _heads(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(pixel of each token [windows, tokens], column of each element [heads, size])."""
        pixels, columns = np.divmod(view.index, self._shape(view.source)[2])
        return pixels[:, 0, :, 0], columns[0, :, 0]

    def _merged(
        self, node: ir.Node, parts: list[tuple[Bytes | Pending, float, NDArray[np.int64]]], places: NDArray[np.int64]
    ) -> int:
        """A float tensor of pixels `places` with some columns of sources, times a factor, for each head.

        parts: sources, factors and columns, int64 [heads, size]; -1: zeros.
        """
        layers: list[Layer] = []
        for source, factor, columns in parts:
            layer = _layer(source)
            if layer is not None and factor != 1:
                gain = np.full(len(layer.scales), factor, np.float32)
                layer = layer.scaled(gain, np.zeros(len(layer.scales), np.float32))
            if layer is None or _layer_input(source) != _layer_input(parts[0][0]):
                return self._assembled(node, parts, places)
            heads, size = columns.shape
            room = np.full((heads, -(-size // LANES) * LANES), -1)
            room[:, :size] = columns
            layers.append(layer.chosen(room.ravel()))

        def joined(name: str) -> Array:
            split = [getattr(layer, name).reshape(heads, 1, room.shape[1], -1) for layer in layers]
            shape = getattr(layers[0], name).shape[1:]
            return np.ascontiguousarray(np.concatenate(split, 1).reshape(-1, *shape))

        x = layers[0].x
        tensor = x.tensor
        if not np.array_equal(places.ravel(), np.arange(places.size)) or places.shape != self.tensors[tensor][:2]:
            tensor = self._new((*places.shape, self.tensors[tensor][2]))
            read, to = (Operand(index, float(x.scale or 0), x.zero) for index in (x.tensor, tensor))
            self.steps.append(Gathering(read, to, np.ascontiguousarray(places)))
        weight, biases = joined("weight"), joined("biases").astype(np.int32)
        out = self._new_floats((*places.shape, len(weight)))
        self.steps.append(Convolution(tensor, out, weight, biases, joined("scales"), fill=x.zero, floats=True))
        return out

    def _assembled(
        self, node: ir.Node, parts: list[tuple[Bytes | Pending, float, NDArray[np.int64]]], places: NDArray[np.int64]
    ) -> int:
        """`_merged` of any values: columns are gathered from each, then joined and put in the order of the heads."""
        heads, size = parts[0][2].shape
        room, count = -(-size // LANES) * LANES, len(parts)
        tensors: list[int] = []
        for source, factor, columns in parts:
            x, channels = self._operand_of(node, source), self._shape(source)[2]
            width = int((columns >= 0).sum(1).max())
            columns, part = columns[:, :width], math.gcd(width, room, channels)
            if (columns[:, ::part] % part).any() or (columns != _runs(columns[:, ::part], part)).any():
                part = 1
            first = np.full((heads, room // part), -1)
            first[:, : width // part] = columns[:, ::part] // part
            whole = np.where(first.ravel() < 0, -1, places[..., None] * (channels // part) + first.ravel())
            tensors.append(self._new_floats((*places.shape, heads * room)))
            self.steps.append(Gathering(x, Operand(tensors[-1]), np.ascontiguousarray(whole), part=part))
            if factor != 1:
                plain = Operand(tensors[-1])
                tensors[-1] = self._new_floats((*places.shape, heads * room))
                gain = np.full(heads * room, factor, np.float32)
                self.steps.append(ChannelScale(plain, Operand(tensors[-1]), gain[None], np.zeros_like(gain[None])))
        if count == 1:
            return tensors[0]
        joined, out = (self._new_floats((*places.shape, count * heads * room)) for _ in range(2))
        self.steps.append(Concatenation(tuple(tensors), joined))
        order = np.arange(places.size * count * heads).reshape(*places.shape, count, heads).swapaxes(-1, -2)
        order = np.ascontiguousarray(order.reshape(*places.shape, -1))
        self.steps.append(Gathering(Operand(joined), Operand(out), order, part=room))
        return out


def _is_quantized(value: ir.Value) -> bool:
    """Whether a value is the result of a QuantizeLinear, also in another order."""
    node = value.producer()
    while node is not None and node.op_type in ORDERS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return query.is_op(node, "QuantizeLinear")


def _are_weights(view: View | Scores | None, turned: bool) -> TypeGuard[Scores]:
    """Whether a value is weights of attention, of queries by keys or, if `turned`, keys by queries."""
    return isinstance(view, Scores) and view.weights and view.turned == turned


def _runs(first: NDArray[np.int64], part: int) -> NDArray[np.int64]:
    """Columns that follow each of the first ones of parts."""
    return (first[..., None] + np.arange(part)).reshape(*first.shape[:-1], -1)


def _layer(source: Bytes | Pending) -> Layer | None:
    """The layer on single pixels of a value, also of one that was quantized: attention has codes of its own."""
    value: Pending | None = source if isinstance(source, Pending) else None
    if isinstance(source, Bytes) and source.origin is not None:
        same = source.origin[:3] == (source.tensor, source.scale, source.zero)
        value = source.origin[3] if same else None
    layer = None if value is None else value.layer
    if layer is None or layer.weight.shape[1:3] != (1, 1):
        return None
    of, plain = layer.geometry, {"strides": (1, 1), "pads": (0, 0, 0, 0), "groups": 1}
    return layer if all(of.get(name, default) == default for name, default in plain.items()) else None


def _head_scale(queries: View) -> float:
    """1 / sqrt(size of a head), the factor of scores where none is given."""
    return float(1 / math.sqrt(queries.index.shape[3]))


def _layer_input(source: Bytes | Pending) -> tuple[Any, ...]:
    """The tensor that the layer of a value reads, and its qparams."""
    layer = _layer(source)
    return () if layer is None else (layer.x.tensor, layer.x.scale, layer.x.zero)
