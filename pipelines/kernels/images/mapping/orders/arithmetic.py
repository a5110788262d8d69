"""Sums and products of values in other orders: broadcast, with constants, and joined."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.orders.views import Scores, View, Views
from pipelines.kernels.images.mapping.qdq import input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Pending, layout_of
from pipelines.kernels.images.steps import (
    ChannelScale,
    FloatDifference,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    Normalization,
)

SUMS: dict[str, type[FloatSum]] = {"Add": FloatSum, "Sub": FloatDifference, "Mul": FloatProduct, "Div": FloatQuotient}
TINY = 1e-5  # length up to which the bound of a divisor does not matter


class Arithmetic(Views):
    """Mapping of sums and products of single elements in any order of axes."""

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps sums and products that no layout of values has; see `Views` for other nodes that read a view."""
        if node.op_type == "ReduceL2" and self._unit_length(node):
            return
        if not self._stacked(node) and not self._by_elements(node):
            super()._viewed(node, reason)

    def _whole_view(self, node: ir.Node, value: ir.Value | None) -> View | Scores | None:
        """The elements of a value in their order; None for a constant."""
        is_mapped = value in self.views or (value is not None and isinstance(self.values.get(value), Bytes | Pending))
        return self._view_of(node, value) if is_mapped and value is not None else None

    def _any_view(self, node: ir.Node, value: ir.Value | None) -> View:
        """The elements of a real value."""
        view = self._whole_view(node, value)
        if not isinstance(view, View) or not view.real:
            raise refused(node, "reads a value that has no native float form")
        return view

    def _plain(self, node: ir.Node, view: View) -> View:
        """A view without a factor."""
        if view.factor == 1:
            return view
        mapped = self._whole(view, True, False, False)
        gain = np.full((1, self._shape(mapped)[2]), view.factor, np.float32)
        return View(self._scaled(node, mapped, gain, np.zeros_like(gain)), view.index)

    def _scaled(
        self, node: ir.Node, mapped: Bytes | Pending, gain: NDArray[np.float32], bias: NDArray[np.float32]
    ) -> Pending:
        """The elements of a value times a gain, plus a bias."""
        x = self._operand_of(node, mapped)
        return self._float_pending(
            self._shape(mapped), lambda to: ChannelScale(x, to, gain, bias), shared=True, last=True
        )

    def _owned(self, node: ir.Node, view: View) -> View:
        """A view without a factor of each element of its source once."""
        view = self._plain(node, view)
        if view.index.size == math.prod(self._shape(view.source)) and np.bincount(view.index.ravel()).max() == 1:
            return view
        shape = (1, 1, *view.index.shape)
        grid = (math.prod(shape[:-2]), shape[-2])
        gathered = self._gathered(node, replace(view, index=view.index.reshape(1, *grid, -1)), grid)
        return replace(gathered, index=gathered.index.reshape(view.index.shape))

    def _is_scattered(self, view: View | Scores | None) -> bool:
        """Whether a view has all elements of its source, and no two of its last axis follow each other there."""
        if not isinstance(view, View) or view.index.shape[-1] < 2:
            return False
        if view.index.size != math.prod(self._shape(view.source)):
            return False
        return not (np.diff(view.index, axis=-1) == 1).any()

    def _by_elements(self, node: ir.Node, always: bool = False) -> bool:
        """Maps a sum or product of values that are broadcast, or that have more axes than values; False for others.

        always: Map two values of the same shape and different layouts, too.
        """
        positions = [
            position for position, value in enumerate(node.inputs) if value in self.views or value in self.values
        ]
        if node.op_type not in SUMS or len(node.inputs) != 2 or not positions:
            return False
        views = [self._whole_view(node, node.inputs[position]) for position in positions]
        shapes = {view.index.shape for view in views if isinstance(view, View) and view.real}
        if any(isinstance(view, Scores) or not view.real for view in views if view is not None) or None in views:
            return False
        plain = all(len(shape) <= 4 for shape in shapes)
        if len(positions) == 1:
            scaled = node.op_type in ("Mul", "Div") and self._is_scaled(node)
            plain = plain and not (node.inputs[positions[0]] in self.views and self._is_scattered(views[0]))
            return not (plain or scaled) and self._with_constant(node, positions[0])
        mapped = [self.values.get(value) for value in node.inputs if value is not None]
        layouts = {layout_of(value) if isinstance(value, Bytes | Pending) else None for value in mapped}
        if len(shapes) == 1 and plain and not (always and len(layouts) > 1):
            return False
        self._of_two(node)
        return True

    def _with_constant(self, node: ir.Node, position: int) -> bool:
        """Maps a sum or product with a constant."""
        other = input_at(node, 1 - position)
        constant = None if other is None else self.constants.real(other)
        view = self._owned(node, self._any_view(node, node.inputs[position]))
        if constant is None or np.broadcast_shapes(constant.shape, view.index.shape) != view.index.shape:
            return False
        gain, bias = self._gain_and_bias(node, position, self._in_order(view, constant))
        mapped = self._whole(view, True, False, False)
        self._settle(node.outputs[0], View(self._scaled(node, mapped, gain, bias), view.index))
        return True

    def _in_order(self, view: View, constant: Array) -> NDArray[np.float32]:
        """float32 [pixels, channels] of a constant for each element of a view, [1, channels] if pixels are alike."""
        rows = np.empty(view.index.size, np.float32)
        rows[view.index.ravel()] = np.broadcast_to(constant, view.index.shape).ravel()
        values = rows.reshape(-1, self._shape(view.source)[2])
        return values[:1] if (values == values[:1]).all() else values

    def _join_views(self, node: ir.Node, views: list[View]) -> None:
        """Joins elements of one value, each with the factor of its view, such as halves that are rotated."""
        first, axis = views[0], node.attributes.get_int("axis", 0)
        joined = replace(first, index=np.concatenate([view.index for view in views], axis))
        if len({view.factor for view in views}) > 1:
            factors = np.concatenate([np.full(view.index.shape, view.factor, np.float32) for view in views], axis)
            joined = self._multiplied(node, replace(joined, factor=1.0), factors)
        self._settle(node.outputs[0], joined)

    def _multiplied(self, node: ir.Node, view: View, constant: Array) -> View:
        """A view times its factor and a constant."""
        view = self._owned(node, view)
        gain = self._in_order(view, constant)
        mapped = self._whole(view, True, False, False)
        return View(self._scaled(node, mapped, gain, np.zeros_like(gain)), view.index)

    def _of_two(self, node: ir.Node) -> None:
        """Maps a sum, difference or product of two values."""
        views = [self._any_view(node, value) for value in node.inputs]
        try:
            shape = np.broadcast_shapes(*(view.index.shape for view in views))
        except ValueError as error:
            raise refused(node, "has values of shapes that do not fit") from error
        large = 0 if views[0].index.shape == shape else 1
        first = views[large]
        if first.index.shape != shape:
            first = replace(first, index=np.broadcast_to(first.index, shape))
        first, second = self._owned(node, first), self._plain(node, views[1 - large])
        mapped, grid = self._whole(first, True, False, False), self._shape(first.source)
        order = np.empty(math.prod(grid), np.int64)
        order[first.index.ravel()] = np.broadcast_to(second.index, shape).ravel()
        places = order.reshape(grid)
        one_channel = node.op_type == "Mul" or (node.op_type == "Div" and not large)
        if one_channel and (places == places[..., :1]).all():
            places = places[..., :1]
        other = self._gathered(node, replace(second, index=places[None]), grid[:2])
        a, b = self._operand_of(node, mapped), self._operand_of(node, self._whole(other, True, False, False))
        if large and node.op_type in ("Sub", "Div"):
            a, b = b, a
        make = SUMS[node.op_type]
        made = self._float_pending(grid, lambda to: make(a, b, to), shared=True, last=True)
        self._settle(node.outputs[0], View(made, first.index))

    def _reducel2(self, node: ir.Node) -> None:
        if not self._unit_length(node):
            self._response_gate(node)

    def _unit_length(self, node: ir.Node) -> bool:
        """Maps values that are divided by their length, the root of the sum of squares over the last axis.

        A `Normalization` by the root of the mean of squares, whose gain makes up for the number of values. False for
        another node.
        """
        view, length, between = self._whole_view(node, node.inputs[0]), node.outputs[0], list[ir.Node]()
        reader, least = query.sole_user(length), 0.0
        if reader is not None and (query.is_op(reader, "Max", "Add") or _is_floor(reader)):
            bounds = [query.scalar(value) for value in reader.inputs if value is not None and value is not length]
            least = next((bound for bound in bounds if bound is not None), TINY)
            between, length = [reader], reader.outputs[0]
            reader = query.sole_user(length)
        if reader is not None and query.is_op(reader, "Expand"):
            between, length = [*between, reader], reader.outputs[0]
            reader = query.sole_user(length)
        divides = reader is not None and query.is_op(reader, "Div") and reader.inputs[0] is node.inputs[0]
        if reader is None or not divides or reader.inputs[1] is not length or not 0 <= least < TINY:
            return False
        rank = view.index.ndim if isinstance(view, View) and view.real else 0
        last = rank > 1 and [axis % rank for axis in query.integers(node, "axes", 1) or []] == [rank - 1]
        if not last or not isinstance(view, View) or not node.attributes.get_int("keepdims", 1):
            return False
        size, rows = view.index.shape[-1], self._plain(node, view)
        if self._places(rows) is None:
            shape = (1, 1, *rows.index.shape)
            grid = (math.prod(shape[:-2]), shape[-2])
            gathered = self._gathered(node, replace(rows, index=rows.index.reshape(1, *grid, size)), grid)
            rows = replace(gathered, index=gathered.index.reshape(view.index.shape))
        x = self._operand_of(node, self._whole(rows, True, False, False))
        gain, epsilon = np.full(size, size**-0.5, np.float32), max(least, 1e-14) ** 2 / size
        made = self._float_pending(
            self._shape(rows.source), lambda to: Normalization(x, to, gain, None, epsilon), shared=True, last=True
        )
        self._settle(reader.outputs[0], View(made, rows.index))
        self.absorbed.update((*between, reader))
        return True

    def _stacked(self, node: ir.Node) -> bool:
        """Maps a Concat of values of as many channels in other orders, below each other; False for another node."""
        views = [self._whole_view(node, value) for value in node.inputs] if node.op_type == "Concat" else []
        sources = {id(view.source) for view in views if isinstance(view, View)}
        if len(sources) < 2 or not all(isinstance(view, View) and view.real for view in views):
            return False
        owned = [self._owned(node, self._any_view(node, value)) for value in node.inputs]
        if len({self._shape(view.source)[2] for view in owned}) > 1:
            return False
        parts = [self._whole(view, True, False, True) for view in owned]
        offsets = np.cumsum([0, *(view.index.size for view in owned)])
        index = [view.index + offset for view, offset in zip(owned, offsets, strict=False)]
        made = self._joined(node, parts, True)
        whole = np.concatenate(index, node.attributes.get_int("axis", 0))
        self._settle(node.outputs[0], View(made, whole))
        return True


def _is_floor(node: ir.Node) -> bool:
    """Whether a node is a Clip without an upper bound."""
    return query.is_op(node, "Clip") and input_at(node, 2) is None
