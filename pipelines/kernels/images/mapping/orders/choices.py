"""Mapping of selections: largest elements, boxes, computed indices. Integers are stored as floats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.images.mapping.orders.runs import Runs
from pipelines.kernels.images.mapping.orders.views import ORDERS, View
from pipelines.kernels.images.mapping.qdq import data_input, input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Pending
from pipelines.kernels.images.steps import (
    LARGEST,
    Choice,
    FloatDifference,
    FloatFloor,
    Operand,
    Step,
    Suppression,
    TopK,
)

SIGNED = (ir.DataType.INT64, ir.DataType.INT32)
INTEGERS = (*SIGNED, ir.DataType.UINT8, ir.DataType.BOOL)
EXACT = 2**24  # integers up to it are floats
EXTREMES = {"ArgMax": True, "ArgMin": False, "ReduceMax": True, "ReduceMin": False}  # whether of the largest
RANKED = {*EXTREMES, "NonMaxSuppression", "TopK"}
CHOICES = {*RANKED, "GatherElements", "GatherND"}
Range = tuple[int, int]


def is_choice(value: ir.Value) -> bool:
    """Returns whether a value holds indices that a choice computes, or integers that are computed of them.

    Args:
        value: Value of a graph with inferred types.
    """
    node = value.producer()
    if value.dtype not in INTEGERS or node is None or query.is_op(node, "Shape", "Size"):
        return False
    if "choice" not in value.meta:
        chosen = query.is_op(node, *RANKED)
        value.meta["choice"] = chosen or any(is_choice(other) for other in node.inputs if other is not None)
    return bool(value.meta["choice"])


class Choices(Runs):
    """Mapping of selections."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model)
        self._strides: dict[ir.Value | None, int] = {}  # of indices among the elements of all samples

    def _integers(self, value: ir.Value | None) -> Pending | None:
        """The source of a value of integers; None for another value."""
        view = None if value is None else self.views.get(value)
        source = view.source if isinstance(view, View) else None if value is None else self.values.get(value)
        return source if isinstance(source, Pending) and source.whole is not None else None

    def _chooses(self, node: ir.Node) -> bool:
        """Whether a node is a choice, or reads integers."""
        return query.is_op(node, *CHOICES) or any(self._integers(value) is not None for value in node.inputs)

    def _choose(self, node: ir.Node) -> None:
        """Maps a choice, or a node that reads integers."""
        sources = [source for value in node.inputs if (source := self._integers(value)) is not None]
        if any(source.form for source in sources) and node.op_type not in ("Gather", "GatherND"):
            raise refused(node, "reads boxes, whose number depends on the data, or indices among all samples")
        match node.op_type:
            case "Max" if all(query.is_op(reader, "Shape") for reader in node.outputs[0].consumers()):
                self._shape_alone(node)
            case "TopK":
                self._top_k(node)
            case "ArgMax" | "ArgMin" | "ReduceMax" | "ReduceMin":
                self._extreme(node)
            case "NonMaxSuppression":
                self._suppression(node)
            case "Gather" | "GatherElements" | "GatherND" if self._integers(input_at(node, 1)) is not None:
                self._chosen(node)
            case "Cast":
                self._cast(node)
            case "Add" | "Sub" | "Mul" | "Div" | "Mod":
                self._of_integers(node)
            case "Concat":
                self._paired(node)
            case "And" | "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual":
                self._decided(node)
            case op_type if op_type in ORDERS:
                self._viewed(node)
            case _:
                raise refused(node, "is no function of integers with a native form")

    def _keep(self, value: ir.Value, whole: Range | None, form: str = "") -> None:
        """Keeps the range of a value that was mapped as floats."""
        if value in self.views:
            view = self.views[value]
            assert isinstance(view, View)
            assert isinstance(view.source, Pending)
            self.views[value] = replace(view, source=replace(view.source, whole=whole, form=form))
        else:
            mapped = self.values[value]
            assert isinstance(mapped, Pending)
            self.values[value] = replace(mapped, whole=whole, form=form)

    def _extremes(self, node: ir.Node, axis: int, count: int, largest: bool) -> tuple[View, View]:
        """The largest elements along an axis of a value, and their indices."""
        view = self._plain(node, self._any_view(node, data_input(node)))
        size, alone = view.index.shape[axis], view.index.ndim == 1
        across = axis % view.index.ndim == 0 and self._samples() != 1
        if across or not 1 <= count <= size <= LARGEST or self._integers(node.inputs[0]) is not None:
            raise refused(node, f"chooses {count} of {size} values, or of samples or integers")
        view, axis = (replace(view, index=view.index[None]), 1) if alone else (view, axis)
        x, mapped, runs, moved = self._runs(node, view, axis, whole=True)
        height, width, channels = self._shape(mapped)

        def add(to: Operand) -> Step:
            return TopK(x, to.tensor, count, largest)

        made = self._float_pending((height, width, 2 * count), add, shared=True, last=True)
        places = (runs // channels * 2 * count).reshape(*moved.shape[:-1], 1) + np.arange(count)
        index = places[0] if alone else np.moveaxis(places, -1, axis)
        return View(made, index), View(replace(made, whole=(0, size - 1)), index + count)

    def _top_k(self, node: ir.Node) -> None:
        count = self.constants.real_of(input_at(node, 1))
        if count is None or len(count) != 1:
            raise refused(node, "has no constant number of elements")
        attributes = node.attributes
        pair = self._extremes(
            node, attributes.get_int("axis", -1), int(count[0]), attributes.get_int("largest", 1) != 0
        )
        for output, view in zip(node.outputs, pair, strict=True):
            self._settle(output, view)

    def _extreme(self, node: ir.Node) -> None:
        """Maps the largest or smallest element along an axis, or its index."""
        attributes, axes = node.attributes, query.integers(node, "axes", 1)
        indices = node.op_type.startswith("Arg")
        if indices:
            axes = [attributes.get_int("axis", 0)]
        if axes is None or len(axes) != 1 or attributes.get_int("select_last_index", 0) != 0:
            raise refused(node, "is not over one axis, or takes the last of equal elements")
        view = self._extremes(node, axes[0], 1, EXTREMES[node.op_type])[indices]
        keeps = attributes.get_int("keepdims", 1) != 0
        self._settle(node.outputs[0], view if keeps else replace(view, index=view.index.squeeze(axes[0])))

    def _as_pixels(self, node: ir.Node, view: View) -> Bytes | Pending:
        """A view [pixels, channels] as a value of as many pixels."""
        count, channels = view.index.shape
        grid = self._shape(view.source)[:2]
        grid = grid if math.prod(grid) == count else self._grid(count)
        if max(*grid, channels) > LARGEST:
            raise refused(node, f"reads {count} pixels of {channels} channels")
        view = replace(view, index=view.index.reshape(1, *grid, channels))
        return self._whole(self._gathered(node, view, grid), True, False, False)

    def _chosen(self, node: ir.Node) -> None:
        """Maps elements along an axis with computed indices, the same for all elements along the other axes."""
        source, indices = (self._plain(node, self._any_view(node, value)) for value in node.inputs)
        shape, kind = source.index.shape, node.op_type
        order = indices.index
        axis = node.attributes.get_int("axis", 0) % len(shape)
        if kind == "GatherND":
            axis, order = self._last_index(node, indices), order[..., 0]
        if kind == "GatherElements":
            first = np.moveaxis(order, axis, -1).reshape(-1, order.shape[axis])
            if len(shape) != order.ndim or (first != first[0]).any() or len(shape) == 1:
                raise refused(node, "has other indices for elements along another axis")
        whole, size = self._integers(node.inputs[1]), shape[axis]
        assert whole is not None
        assert whole.whole is not None
        own = self._samples() == 1 or (axis > 0 and kind != "Gather")
        joined = kind == "Gather" and axis == 0 and self._strides.get(node.inputs[1]) == size
        if not {"": own, "pairs": kind == "GatherND", "joined": joined}.get(whole.form, False):
            raise refused(node, "chooses among elements of all samples")
        if not 0 <= whole.whole[0] <= whole.whole[1] < size:
            raise refused(node, f"chooses elements {whole.whole} of {size}")
        moved = np.moveaxis(source.index, axis, 0)
        outer = moved.shape[1:]
        if kind == "GatherElements":
            count = order.shape[axis]
            outer = tuple(np.delete(order.shape, axis).tolist())
            moved = moved[(slice(None), *(slice(size) for size in outer))]
            chosen = first[0]
        else:
            count, chosen = order.size, order.ravel()
        x = self._as_pixels(node, replace(source, index=moved.reshape(size, -1)))
        places = self._as_pixels(node, replace(indices, index=chosen.reshape(1, -1)))
        tensor, channels = self._float_tensor(node, places), self._shape(x)[2]
        grid = self._grid(count)
        made = self._picked(node, x, tensor, (*grid, channels))
        index = np.arange(count * channels)
        if kind == "GatherElements":
            index = np.moveaxis(index.reshape(count, *outer), 0, axis)
        elif kind == "GatherND":
            index = index.reshape(1, count, *outer[1:]) if axis else index.reshape(count, *outer)
        else:
            index = np.moveaxis(index.reshape(*order.shape, *outer), range(order.ndim), range(axis, axis + order.ndim))
        self._settle(node.outputs[0], View(made, index))

    def _picked(self, node: ir.Node, x: Bytes | Pending, indices: int, shape: tuple[int, int, int]) -> Any:
        """The pixels of a value with these indices, as bytes where they are bytes."""
        if isinstance(x, Bytes):
            out = self._new(shape)
            self.steps.append(Choice(self._wide(x.tensor), indices, out))
            return replace(x, tensor=out, last=True, flat=False, tokens=False)

        def add(to: Operand) -> Step:
            return Choice(self._float_tensor(node, x), indices, to.tensor)

        return replace(self._float_pending(shape, add, shared=True, last=True), whole=x.whole)

    def _last_index(self, node: ir.Node, indices: View) -> int:
        """The axis that the indices of a GatherND are of."""
        source, batches = self._integers(node.inputs[1]), node.attributes.get_int("batch_dims", 0)
        paired = source is not None and source.form == "pairs"
        if indices.index.shape[-1] != 1 or batches + paired > 1 or indices.index.ndim != 2 + (batches or paired):
            raise refused(node, "has indices of several axes")
        return batches + paired

    def _samples(self) -> int | None:
        """The number of samples that the graph fixes."""
        return (query.dimensions(self.main.inputs[0]) or [None])[0]

    def _paired(self, node: ir.Node) -> None:
        """Maps indices behind those of their samples, which GatherND reads."""
        first, *others = node.inputs
        view = None if len(others) != 1 else self._any_view(node, others[0])
        last = view is not None and node.attributes.get_int("axis", 0) % view.index.ndim == view.index.ndim - 1
        if first is None or view is None or not last or view.index.shape[-1] != 1 or self.constants.stride(first) != 1:
            raise refused(node, "joins integers")
        self._settle(node.outputs[0], view)
        source = self._integers(others[0])
        assert source is not None
        self._keep(node.outputs[0], source.whole, "pairs")

    def _shape_alone(self, node: ir.Node) -> None:
        """Maps a function whose shape alone is read."""
        values = [value for value in node.inputs if value is not None]
        shapes = [shape for value in values if (shape := self._dimensions(value) or self.constants.shape_of(value))]
        if len(shapes) != len(values):
            raise refused(node, "reads a value of unknown shape")
        view = next(self._any_view(node, value) for value in values if self._integers(value) is not None)
        self._settle(node.outputs[0], replace(view, index=np.broadcast_to(view.index, np.broadcast_shapes(*shapes))))
        self._keep(node.outputs[0], (0, 0), "shape")

    def _decided(self, node: ir.Node) -> None:
        """Maps a comparison of integers that has the same result for all of them: a constant."""
        sources = [self._integers(value) for value in node.inputs]
        constants = [None if value is None else self.constants.real(value) for value in node.inputs]
        numbers = [number for number in constants if number is not None and number.size == 1]
        if len(numbers) != 1 or sources[0] is None is sources[1]:
            raise refused(node, "compares integers with no constant")
        ends = [
            sorted(source.whole) if source is not None and source.whole is not None else [numbers[0].item()] * 2
            for source in sources
        ]
        (low, high), (least, most) = ends
        match node.op_type:
            case "And":
                results = {False} if not numbers[0].any() else {True, False}
            case "Equal":
                results = {low == high == least == most, low <= most and least <= high}
            case "Less" | "GreaterOrEqual":
                results = {high < least, low < most}
            case _:
                results = {low > most, high > least}
        if len(results) > 1:
            raise refused(node, "compares integers, with different results")
        turned = node.op_type in ("GreaterOrEqual", "LessOrEqual")
        self.constants.keep(node.outputs[0], np.array(results.pop() != turned))

    def _cast(self, node: ir.Node) -> None:
        """Maps integers as floats, as other integers, or as 1 where they are not 0."""
        kind, value = node.attributes.get_int("to", 0), data_input(node)
        source = self._integers(value)
        if kind == ir.DataType.BOOL and source is not None and source.whole is not None and source.whole[0] >= 0:
            view = self._any_view(node, value)
            bounded = replace(source, high=min(source.high, 1.0), whole=(0, min(source.whole[1], 1)))
            self._settle(node.outputs[0], replace(view, source=bounded))
            return
        assert source is not None
        fits = source.whole is not None and 0 <= source.whole[0] <= source.whole[1] <= 255
        if kind not in (ir.DataType.FLOAT, *SIGNED) and not (fits and kind == ir.DataType.UINT8):
            raise refused(node, "converts to neither float32, int64 nor to uint8 that hold the values")
        self._settle(node.outputs[0], self._any_view(node, value))
        self._keep(node.outputs[0], None if kind == ir.DataType.FLOAT else source.whole)

    def _of_integers(self, node: ir.Node) -> None:
        """Maps sums, products and quotients of integers."""
        sources = [self._integers(value) for value in node.inputs]
        strides = [None if value is None else self.constants.stride(value) for value in node.inputs]
        if node.op_type == "Add" and (strides[0] or strides[1]) and self._samples() != 1:
            position = 0 if strides[1] else 1
            source, view = sources[position], self._any_view(node, node.inputs[position])
            assert source is not None
            self._settle(node.outputs[0], view)
            self._keep(node.outputs[0], source.whole, "joined")
            self._strides[node.outputs[0]] = strides[1 - position] or 0
            return
        if all(sources) and node.op_type in ("Add", "Sub"):
            self._of_two(node)
            ranges = [source.whole for source in sources if source is not None and source.whole is not None]
        else:
            ranges = [self._with_number(node, 0 if sources[0] is not None else 1)]
        if node.op_type == "Sub" and len(ranges) == 2:
            ranges[1] = (-ranges[1][1], -ranges[1][0])
        whole = sum(low for low, _ in ranges), sum(high for _, high in ranges)
        if max(map(abs, whole)) > EXACT:
            raise refused(node, f"has results of {whole}, which are no floats")
        self._keep(node.outputs[0], whole)

    def _with_number(self, node: ir.Node, position: int) -> Range:
        """Maps a function of integers and one constant; returns the range of the results."""
        other, source = input_at(node, 1 - position), self._integers(node.inputs[position])
        constant = None if other is None else self.constants.real(other)
        if (
            constant is None
            or constant.size != 1
            or constant.dtype.kind != "i"
            or source is None
            or source.whole is None
        ):
            raise refused(node, "is no function of integers and one constant")
        number, (low, high) = int(constant.item()), source.whole
        view = self._any_view(node, node.inputs[position])
        x, shape = self._operand_of(node, source), source.shape
        divides = node.op_type in ("Div", "Mod")
        if (divides and (position == 1 or number < 1 or low < 0)) or abs(number) > EXACT:
            raise refused(node, "divides by integers, or negative ones")
        if divides:
            made = self._float_pending(shape, lambda to: FloatFloor(x, to, float(number)), shared=True, last=True)
            ends = [low // number, high // number]
            if node.op_type == "Mod":
                multiple = self._scaled(node, made, *self._linear(number, 0, shape[2]))
                below = self._operand_of(node, multiple)
                made = self._float_pending(shape, lambda to: FloatDifference(x, below, to), shared=True, last=True)
                ends = [0, min(number - 1, high)]
        else:
            gain = number if node.op_type == "Mul" else -1 if node.op_type == "Sub" and position == 1 else 1
            bias = 0 if node.op_type == "Mul" else -number if node.op_type == "Sub" and position == 0 else number
            ends = sorted((low * gain + bias, high * gain + bias))
            made = self._scaled(node, source, *self._linear(gain, bias, shape[2]))
        self._settle(node.outputs[0], replace(view, source=made))
        return ends[0], ends[1]

    @staticmethod
    def _linear(gain: int, bias: int, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The same gain and bias for all channels."""
        return np.full((1, channels), gain, np.float32), np.full((1, channels), bias, np.float32)

    def _suppression(self, node: ir.Node) -> None:
        """Maps a NonMaxSuppression."""
        views = [self._plain(node, self._any_view(node, value)) for value in node.inputs[:2]]
        numbers = [self.constants.real_of(input_at(node, position)) for position in (2, 3, 4)]
        missing = any(number is None and input_at(node, position) for position, number in enumerate(numbers, 2))
        boxes, scores = (view.index for view in views)
        fits = boxes.ndim == scores.ndim == 3 and len(boxes) == len(scores) == 1 and boxes.shape[2] == 4
        if not fits or missing or boxes.shape[1] != scores.shape[2]:
            raise refused(node, "has other boxes than [n, boxes, 4], or limits that are not constant")
        count, classes = boxes.shape[1], scores.shape[1]
        most = min(int(numbers[0][0]) if numbers[0] else 0, count)
        if most < 1 or 1 + classes * most > LARGEST:
            raise refused(node, f"chooses up to {most} of {count} boxes of {classes} classes")
        overlap, least = (
            float(number[0]) if number else default for number, default in zip(numbers[1:], (0.0, np.nan), strict=True)
        )
        centered = node.attributes.get_int("center_point_box", 0) != 0
        tensors = [
            self._as_pixels(node, replace(view, index=index))
            for view, index in zip(views, (boxes[0], scores[0].T), strict=True)
        ]

        def add(to: Operand) -> Step:
            first, second = (self._float_tensor(node, mapped) for mapped in tensors)
            return Suppression(first, second, to.tensor, most, overlap, least, centered)

        shape = (1 + classes * most, 1, 3)
        made = self._float_pending(shape, add, shared=True, last=True, tokens=True)
        self.values[node.outputs[0]] = replace(made, whole=(0, max(count, classes) - 1), form="selection")
