"""Elements of values in other orders and shapes: tokens, heads, windows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.constants import Constants
from pipelines.kernels.images.mapping.floats import FloatValues
from pipelines.kernels.images.mapping.orders.heads import Outer
from pipelines.kernels.images.mapping.qdq import data_input, input_at, qparams, refused, split_sizes
from pipelines.kernels.images.mapping.walk import Bytes, Input, Pending, layout_of
from pipelines.kernels.images.steps import Gathering, Operand, Step

LAYOUTS = (  # last, flat, tokens
    *((False, False, False), (True, False, False), (True, False, True), (False, False, True)),
    *((False, True, False), (True, True, False)),
)
ORDERS = {
    *("DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "SpaceToDepth", "Split"),
    *("Squeeze", "Tile", "Transpose", "Unsqueeze"),
}
SPATIAL = {
    "AveragePool",
    "Conv",
    "GlobalAveragePool",
    "GroupNormalization",
    "InstanceNormalization",
    "MaxPool",
    "Resize",
}
ROWS = {"LayerNormalization", "MatMul", "RMSNormalization"}  # operators on the last axis


@dataclass(frozen=True, eq=False)
class View:
    """Elements of a value in another order and shape.

    Attributes:
        source: The value, real.
        index: Elements of a sample [height, width, channels] of `source`, int64 [...]; a first axis of 1 is that of
            samples.
        factor: By which the elements are multiplied.
        qparams: Scale and zero point that quantize the elements without `factor`, None for real ones.
        real: Whether they are dequantized again.
        reason: Why the operator that made it has no other form.
    """

    source: Bytes | Pending
    index: NDArray[np.int64]
    factor: float = 1.0
    qparams: tuple[np.float32, int] | None = None
    real: bool = True
    reason: RequestError | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Attention scores: queries times keys.

    Attributes:
        queries: [windows, heads, tokens, size].
        keys: [windows, heads, size, tokens].
        factor: Factor of the scores.
        shape: Shape in the graph.
        outer: Axes before those of queries and keys.
        bias: float32 [1 or windows, 1 or heads, tokens, tokens], or None.
        weights: Whether they went through a softmax.
        turned: Whether the axis of keys is before that of queries.
    """

    queries: View
    keys: View
    factor: float
    shape: tuple[int, ...]
    outer: Outer
    bias: Array | None = None
    weights: bool = False
    turned: bool = False


class Views(FloatValues):
    """Mapping of orders of elements."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model)
        self.views: dict[ir.Value, View | Scores] = {}

    @abstractmethod
    def _by_rule(self, node: ir.Node) -> None:
        """Maps a node that reads no view."""

    @abstractmethod
    def _join_views(self, node: ir.Node, views: list[View]) -> None:
        """Maps a Concat of views of one value."""

    def _dimensions(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of a value for one sample; None for a value that is not known."""
        mapped = self.views.get(value) or self.values.get(value) if value is not None else None
        if isinstance(mapped, View):
            return mapped.index.shape
        if isinstance(mapped, Scores):
            return mapped.shape
        if isinstance(mapped, Bytes | Pending):
            return self._sizes(mapped)
        return (1, *self.shape) if isinstance(mapped, Input) and mapped.stored == mapped.last else None

    def _is_view(self, node: ir.Node) -> bool:
        """Whether a node reads a view."""
        return any(value in self.views for value in node.inputs if value is not None)

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps a node that reads a view, or rearranges a value in a way that has no other form, for this reason."""
        views = self._views_of(node)
        first = views[0] if views else None
        if node.op_type in ORDERS:
            self._rearrange(node, reason)
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear") and first is not None:
            self._requantize_view(node, first)
        elif node.op_type in ("Mul", "Div") and self._is_scaled(node):
            self._scale_view(node, views)
        elif node.op_type == "Neg" and isinstance(first, View) and first.real:
            self.views[node.outputs[0]] = replace(first, factor=-first.factor)
        elif node.op_type == "Concat" and _have_one_source(views):
            self._join_views(node, [view for view in views if isinstance(view, View)])
        elif self._gather(node):
            self._by_rule(node)
        else:
            self._commute(node)

    def _views_of(self, node: ir.Node) -> list[View | Scores | None]:
        """The views among the inputs of a node."""
        return [None if value is None else self.views.get(value) for value in node.inputs]

    def _commute(self, node: ir.Node) -> None:
        """Maps an operator on the channels of pixels in another order, such as windows, in one order."""
        views: dict[ir.Value, View] = {}
        for value in node.inputs:
            view = None if value is None else self.views.get(value)
            if isinstance(view, View) and view.factor == 1:
                views[value] = view  # type: ignore[index]
            elif view is not None:
                raise getattr(view, "reason", None) or refused(node, "reads values in another order")
        shapes = {view.index.shape[:-1] for view in views.values()}
        if len(shapes) != 1:
            raise refused(node, "reads values in several orders")
        (shape,) = shapes
        places = self._places(next(iter(views.values())))
        orders = [(self._places(view), self._shape(view.source)[:2]) for view in views.values()]
        if places is None or any(
            other is None or not np.array_equal(other, places) or grid != orders[0][1] for other, grid in orders
        ):
            places = np.arange(math.prod(shape)).reshape(shape)
            plain = [grid for other, grid in orders if other is not None and np.array_equal(other, places)]
            grid = plain[0] if plain else self._grid(places.size)
            views = {value: self._gathered(node, view, grid) for value, view in views.items()}
        grid = self._shape(next(iter(views.values())).source)[:2]
        self.values |= {value: self._whole(view, True, False, True) for value, view in views.items()}
        try:
            self._by_rule(node)
        finally:
            for value in views:
                del self.values[value]
        made = self.values.pop(node.outputs[0])
        assert isinstance(made, Bytes | Pending)
        channels = self._shape(made)[2]
        if not made.last or self._shape(made)[:2] != grid:
            raise refused(node, "reads values in another order")
        self._settle(node.outputs[0], View(made, places[..., None] * channels + np.arange(channels)))

    def _any_concat(self, node: ir.Node) -> None:
        try:
            self._concat(node)
        except RequestError as error:
            try:
                self._token_concat(node)
            except RequestError:
                raise error from None

    def _token_concat(self, node: ir.Node) -> None:
        """Maps tokens behind, before or around constant ones, such as that of the class and registers."""
        parts = [(value, None if value is None else self.values.get(value)) for value in node.inputs]
        values = [value for _, value in parts if isinstance(value, Bytes | Pending)]
        widths = {self._shape(value)[2] for value in values}
        if len(widths) != 1 or any(layout_of(value) != (True, False, True) for value in values):
            raise refused(node, "concatenates a float value")
        if node.attributes.get_int("axis", 1) % 3 != 1:
            raise refused(node, "does not concatenate tokens")
        tokens = values[0] if len(values) == 1 else self._joined(node, values, True)
        x, (channels,), places, added, begin = self._operand_of(node, tokens), widths, [], [], 0
        for value, mapped in parts:
            constant = None if value is None or mapped is not None else self.constants.real(value, 1)
            if isinstance(mapped, Bytes | Pending):
                count = math.prod(self._shape(mapped)[:2])
                places.append(np.arange(begin, begin + count))
                added.append(np.zeros((count, channels), np.float32))
                begin += count
            elif constant is not None and constant.size and constant.shape[-1] == channels:
                count = constant.size // channels
                places.append(np.full(count, -1))
                added.append(constant.reshape(count, channels).astype(np.float32))
            else:
                raise refused(node, "concatenates a float value")
        whole, rows = np.concatenate(places)[:, None], np.concatenate(added)
        shape = (len(whole), 1, channels)
        self._float_value(node, shape, lambda to: Gathering(x, to, whole, rows), tokens)

    def _padded(self, node: ir.Node, mapped: Bytes | Pending, pads: Sequence[int] | None) -> None:
        """Maps a Pad of height and width by zeros, or by pixels of the value."""
        mode, value = node.attributes.get_string("mode", "constant"), input_at(node, 2)
        constant, fill, zero = query.constant(value), query.scalar(value), 0
        if isinstance(mapped, Bytes) and not mapped.real:  # an absent fill is a 0 of either type
            zero = mapped.zero - (128 if constant is not None and constant.dtype == np.int8 else 0)
        elif value is None:
            fill = 0.0
        widths = np.zeros((2, 4), int) if pads is None or len(pads) != 8 else np.reshape(pads, (2, 4))
        rows, columns = widths.T[[1, 2] if mapped.last else [2, 3]]
        others = widths.T[[0, 3] if mapped.last else [0, 1]]
        if mode not in ("constant", "reflect", "edge") or (mode == "constant" and fill != zero):
            raise refused(node, "pads with other values than zeros and pixels of its input")
        if mapped.flat or mapped.tokens or widths.min() < 0 or others.any() or not widths.any() or input_at(node, 3):
            raise refused(node, "pads other axes than height and width, or cuts")
        (height, width, channels), ends = self._shape(mapped), [tuple(map(int, pair)) for pair in (rows, columns)]
        fills: dict[str, Any] = {"constant_values": -1} if mode == "constant" else {}
        places = np.pad(np.arange(height * width).reshape(height, width), ends, mode, **fills)  # type: ignore[call-overload]
        shape = (*places.shape, channels)
        if isinstance(mapped, Pending):
            self._float_value(node, shape, lambda to: Gathering(self._operand_of(node, mapped), to, places), mapped)
            return
        out = self._new(shape)
        x, to = (Operand(tensor, float(mapped.scale or 1), mapped.zero) for tensor in (mapped.tensor, out))
        self.steps.append(Gathering(x, to, places))
        self.values[node.outputs[0]] = replace(mapped, tensor=out)

    def _rearrange(self, node: ir.Node, reason: RequestError | None) -> None:
        value = data_input(node)
        is_view = value in self.views
        view = self._view_of(node, value)
        assert isinstance(view, View)
        view = view if is_view else replace(view, reason=reason)
        for output, index in zip(node.outputs, self._rearranged(node, view.index), strict=True):
            if not index.size:
                raise refused(node, "has an empty result")
            self._settle(output, replace(view, index=index))

    def _view_of(self, node: ir.Node, value: ir.Value) -> View | Scores:
        """The elements of a value that a node reads, in their order."""
        if value in self.views:
            return self.views[value]
        source = self.values.get(value)
        if not isinstance(source, Bytes | Pending):
            raise refused(node, "rearranges the input")
        if isinstance(source, Bytes) and not source.real:
            return View(source, self._elements(source), 1.0, (np.float32(source.scale or 0), source.zero), False)
        return View(source, self._elements(source))

    def _settle(self, output: ir.Value, view: View) -> None:
        """Keeps a view, as a value where its elements are a whole value in one of `LAYOUTS`."""
        for layout in LAYOUTS if view.factor == 1 else ():
            same = view.index.shape == self._sizes(view.source, layout)
            if same and np.array_equal(view.index, self._elements(view.source, layout)):
                self.values[output] = self._whole(view, *layout)
                return
        self.views[output] = view

    def _gather(self, node: ir.Node) -> bool:
        """Makes the views of a sample that a node reads values; False where one has no form as a value."""
        for value in dict.fromkeys(value for value in node.inputs if value in self.views):
            assert value is not None
            view = self.views[value]
            if not isinstance(view, View) or view.factor != 1:
                return False
            rank = view.index.ndim
            if len(view.index) != 1 or rank not in (2, 3, 4):
                return False
            channels_first = replace(view, index=np.moveaxis(view.index, 1, -1))
            last = rank == 2 or node.op_type in ROWS or self._places(view) is not None
            if not last and self._places(channels_first) is None:
                others = [self.values[other] for other in node.inputs if other is not None and other in self.values]
                orders = {other.last for other in others if isinstance(other, Bytes | Pending)}
                last = orders == {True} if orders else node.op_type not in SPATIAL and self._is_last(view)
            self._gather_view(node, value, view, last)
        return True

    def _in_rows(self, node: ir.Node) -> None:
        """Maps an operator on the last axis of a value whose channels are another, such as a layer over tokens."""
        value = data_input(node)
        mapped = self.values[value]
        if not isinstance(mapped, Bytes | Pending) or mapped.last or mapped.flat:
            raise refused(node, "has no native form")
        self.views[value] = self._view_of(node, value)
        try:
            if self._gather(node):
                self._by_rule(node)
        finally:
            self.views.pop(value, None)
            self.values[value] = mapped
        if node.outputs[0] not in self.values:
            raise refused(node, "has no native form")

    def _is_last(self, view: View) -> bool:
        """Whether the last axis of a view rather than axis 1 is that of channels that follow each other."""
        channels, index = self._shape(view.source)[2], view.index
        last, first = _part(index, channels), _part(np.moveaxis(index, 1, -1), channels)
        return last > first or (last == first and index.shape[-1] <= index.shape[1])

    def _gather_output(self, node: ir.Node, value: ir.Value) -> None:
        """Makes the view of an output a value, if it has a form as one."""
        view = self.views.get(value)
        if not isinstance(view, View) or view.factor != 1 or (view.qparams is not None and not view.real):
            return
        rank, channels = view.index.ndim, self._shape(view.source)[2]
        real = isinstance(view.source, Bytes) or view.source.real is not None
        if not real or len(view.index) != 1 or rank not in (2, 3, 4):
            return
        parts = [_part(index, channels) for index in (view.index, np.moveaxis(view.index, 1, -1))]
        self._gather_view(node, value, view, rank == 2 or parts[0] > parts[1])

    def _gather_view(self, node: ir.Node, value: ir.Value, view: View, last: bool) -> None:
        """Makes a view of rank 2, 3 or 4 a value, whose channels are the last axis or axis 1."""
        rank = view.index.ndim
        view = view if last else replace(view, index=np.moveaxis(view.index, 1, -1))
        grid = view.index.shape[1:3] if rank == 4 else self._grid(view.index.size // view.index.shape[-1])
        self.values[value] = self._whole(self._gathered(node, view, grid), last, rank == 2, rank == 3)
        del self.views[value]

    def _grid(self, count: int) -> tuple[int, int]:
        """Height and width of `count` tokens, as in the first tensor with as many pixels, to allow sums with it."""
        return next((shape[:2] for shape in self.tensors if shape[0] * shape[1] == count), (count, 1))

    def _rearranged(self, node: ir.Node, x: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        try:
            return _rearranged(node, x, self.constants)
        except RequestError:
            raise
        except (ValueError, IndexError) as error:
            raise refused(node, f"rearranges {list(x.shape)}: {error}") from error

    def _places(self, view: View) -> NDArray[np.int64] | None:
        """The pixels of a view whose last axis is the channels; None for another view."""
        channels = self._shape(view.source)[2]
        if view.index.shape[-1] != channels:
            return None
        first = view.index[..., 0]
        whole = not (first % channels).any() and (view.index == first[..., None] + np.arange(channels)).all()
        return first // channels if whole else None

    def _gathered(self, node: ir.Node, view: View, grid: tuple[int, ...]) -> View:
        """The same elements as a tensor of pixels of this height and width, whose channels are the last axis."""
        mapped, (height, width, own) = self._whole(view, True, False, False), self._shape(view.source)
        channels, part = view.index.shape[-1], _part(view.index, own)
        order = np.arange(view.index.size).reshape(view.index.shape)
        if (*grid, channels) == (height, width, own) and np.array_equal(order.ravel(), view.index.ravel()):
            return View(mapped, order)
        whole = channels == part == own
        places = view.index.reshape(-1, channels // part, part)[..., 0] // part
        places = np.ascontiguousarray(places.reshape(*grid, *(() if whole else (-1,))))
        shape, size = (*grid, channels), 0 if whole else part
        if isinstance(mapped, Bytes):
            out = self._new(shape)
            x, to = (Operand(tensor, float(mapped.scale or 0), mapped.zero) for tensor in (mapped.tensor, out))
            self.steps.append(Gathering(x, to, places, part=size))
            return View(replace(mapped, tensor=out), order)

        def add(to: Operand) -> Step:
            return Gathering(self._operand_of(node, mapped), to, places, part=size)

        return View(replace(self._float_pending(shape, add, shared=True), whole=mapped.whole), order)

    def _float_channels(self, node: ir.Node, mapped: Pending, channels: range) -> int:
        """The tensor of floats of some channels of a real value."""
        index = self._elements(mapped, (True, False, False))[..., channels]
        made = self._gathered(node, View(mapped, index), mapped.shape[:2]).source
        assert isinstance(made, Pending)
        return self._floats_of(made)

    def _whole(self, view: View, last: bool, flat: bool, tokens: bool) -> Bytes | Pending:
        """The value of a view of all its elements in order."""
        source = view.source
        layout: dict[str, Any] = {"last": last, "flat": flat, "tokens": tokens}
        if view.qparams is not None:
            scale, zero = view.qparams
            real = replace(source, real=True) if isinstance(source, Bytes) else source
            tensor = (
                source.tensor if isinstance(source, Bytes) and (source.scale, source.zero) == (scale, zero) else None
            )
            tensor = self._requantized(real, scale, zero, 0, 255) if tensor is None else tensor
            return Bytes(tensor, scale, zero, real=view.real, **layout)
        return replace(source, **layout) if isinstance(source, Bytes) else replace(source, result=None, **layout)

    def _requantize_view(self, node: ir.Node, view: View | Scores) -> None:
        """Quantizes a view; scores and weights of attention have codes of their kernel's own."""
        if isinstance(view, Scores):
            self.views[node.outputs[0]] = view
            return
        scale, zero = qparams(node)
        if view.factor <= 0:
            raise refused(node, "quantizes negated values in another order")
        scale = np.float32(scale / view.factor)
        if node.op_type == "DequantizeLinear":
            if view.qparams != (scale, zero) or view.real:
                raise refused(node, "dequantizes a float value, or with other qparams")
            self.views[node.outputs[0]] = replace(view, real=True)
            return
        self.views[node.outputs[0]] = replace(view, qparams=(scale, zero), real=False)

    def _is_scaled(self, node: ir.Node) -> bool:
        """Whether a node multiplies a view by a single constant."""
        others = [value for value in node.inputs if value is not None and value not in self.views]
        constants = [self.constants.real(value) for value in others]
        return len(others) == 1 and constants[0] is not None and constants[0].size == 1

    def _scale_view(self, node: ir.Node, views: list[View | Scores | None]) -> None:
        position = 0 if views[0] is not None else 1
        view, other = views[position], input_at(node, 1 - position)
        constant = None if other is None else self.constants.real(other)
        divides = node.op_type == "Div"
        if view is None or constant is None or constant.size != 1 or (divides and position == 1) or not constant.all():
            raise refused(node, "multiplies values in another order by no single constant")
        factor = 1 / float(constant.item()) if divides else float(constant.item())
        self.views[node.outputs[0]] = replace(view, factor=view.factor * factor)


def _have_one_source(views: Sequence[View | Scores | None]) -> bool:
    """Whether all are views of one value."""
    plain = [(view.source, view.qparams, view.real) for view in views if isinstance(view, View)]
    return len(plain) == len(views) and len(set(plain)) == 1


def _part(index: NDArray[np.int64], channels: int) -> int:
    """The most channels of `channels` that follow each other wherever the elements of the last axis do."""
    last = index.shape[-1]
    for size in sorted((n for n in range(1, last + 1) if last % n == channels % n == 0), reverse=True):
        parts = index.reshape(-1, size)
        if not (parts[:, 0] % size).any() and (parts == parts[:, :1] + np.arange(size)).all():
            return size
    return 1


def _blocks(node: ir.Node, x: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Blocks of pixels [size, size] from channels, or the reverse."""
    samples, channels, height, width = x.shape
    if node.op_type == "SpaceToDepth":
        x = x.reshape(samples, channels, height // size, size, width // size, size).transpose(0, 3, 5, 1, 2, 4)
        return x.reshape(samples, channels * size * size, height // size, width // size)
    if node.attributes.get_string("mode", "DCR") == "DCR":
        x = x.reshape(samples, size, size, -1, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(samples, -1, size, size, height, width).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(samples, -1, height * size, width * size)


def _rearranged(node: ir.Node, x: NDArray[np.int64], constants: Constants) -> list[NDArray[np.int64]]:
    """The outputs of a node of `ORDERS` for one of the graph's samples."""
    attributes = node.attributes
    axis = attributes.get_int("axis", 1 if node.op_type == "Flatten" else 0)
    match node.op_type:
        case "Identity":
            return [x]
        case "Transpose":
            order = attributes.get_ints("perm", list(range(x.ndim))[::-1])
            return [x.transpose(order)]
        case "Flatten":
            return [x.reshape(int(np.prod(x.shape[:axis])), -1)]
        case "Reshape":
            sizes = constants.sizes(node)
            return [x.reshape([x.shape[index] if size == 0 else size for index, size in enumerate(sizes)])]
        case "DepthToSpace" | "SpaceToDepth":
            return [_blocks(node, x, attributes.get_int("blocksize", 1))]
        case "Squeeze" | "Unsqueeze":
            axes = query.integers(node, "axes", 1)
            if axes is None:
                raise refused(node, "has no constant axes")
            return [np.squeeze(x, tuple(axes)) if node.op_type == "Squeeze" else np.expand_dims(x, tuple(axes))]
        case "Expand":
            return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(constants.expanded(node, x.ndim))))]
        case "Tile":
            return [np.tile(x, constants.expanded(node, x.ndim))]
        case "Gather":
            return [np.take(x, constants.indices(node, x.shape[axis] if axis == 0 else 0), axis)]
        case "Split":
            return np.split(x, np.cumsum(split_sizes(node, x.shape[axis]))[:-1].tolist(), axis)
    cuts = [slice(None)] * x.ndim
    for dimension, cut in constants.slices(node):
        cuts[dimension] = cut
    return [x[tuple(cuts)]]
