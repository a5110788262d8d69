"""Mapping of operators along an axis: softmax, sums, layers of few weights; and of sampling by a grid."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.images.mapping.orders.arithmetic import Arithmetic
from pipelines.kernels.images.mapping.orders.views import View
from pipelines.kernels.images.mapping.qdq import data_input, input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Pending
from pipelines.kernels.images.steps import Gathering, GroupLinear, Operand, PixelSums, Sampling, Softmax, Step

MAX_RUN_WEIGHTS = 1024  # weights of a layer of floats, which is computed run by run
TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}  # names from opset 20 on and before


class Runs(Arithmetic):
    """Mapping of operators along an axis of a value in any order of axes."""

    def _viewed(self, node: ir.Node, reason: RequestError | None = None) -> None:
        """Maps a node along an axis of a view; see `Views` for other nodes that read a view."""
        view = self._views_of(node)[0]
        if node.op_type == "Softmax" and isinstance(view, View):
            self._softmax(node)
        elif node.op_type in ("Conv", "MatMul") and isinstance(view, View) and self._few_weights(node) is not None:
            self._group_linear(node)
        elif node.op_type == "ReduceSum" and isinstance(view, View):
            self._reducesum(node)
        elif node.op_type == "GridSample":
            self._gridsample(node)
        elif node.op_type == "Pad" and isinstance(view, View) and _fill(node):
            self._pad_view(node)
        else:
            super()._viewed(node, reason)

    def _pad_view(self, node: ir.Node) -> None:
        """Maps a Pad of real values by a number, such as a column of ones that sums weights (EfficientViT)."""
        view, pads = self._plain(node, self._any_view(node, data_input(node))), query.integers(node, "pads", 1)
        rank = view.index.ndim
        constant = node.attributes.get_string("mode", "constant") == "constant" and input_at(node, 3) is None
        if not constant or pads is None or len(pads) != 2 * rank or min(pads) < 0 or pads[0] or pads[rank]:
            raise refused(node, "pads samples, cuts, or pads chosen axes")
        index = np.pad(view.index, np.reshape(pads, (2, rank)).T, constant_values=-1)
        shape = (*self._grid(index.size // index.shape[-1]), index.shape[-1])
        places, added = index.reshape(shape), np.where(index < 0, _fill(node), np.float32(0)).reshape(-1, shape[2])
        x = self._operand_of(node, self._whole(view, True, False, False))
        made = self._float_pending(shape, lambda to: Gathering(x, to, places, added, 1), shared=True, last=True)
        self._settle(node.outputs[0], View(made, np.arange(index.size).reshape(index.shape)))

    def _gridsample(self, node: ir.Node) -> None:
        """Maps pixels at the places of a grid; the first axis may have several groups a sample."""
        kind = node.attributes.get_string("mode", "linear")
        outside = node.attributes.get_string("padding_mode", "zeros")
        x, grid = (self._plain(node, self._any_view(node, value)) for value in node.inputs)
        if x.index.ndim != 4 or grid.index.ndim != 4 or len(x.index) != len(grid.index):
            raise refused(node, "does not sample [n, C, H, W]")
        groups, channels = x.index.shape[:2]
        tensors = []
        for view in (replace(x, index=np.moveaxis(x.index, 1, -1)), grid):
            rows = view.index.reshape(1, -1, *view.index.shape[2:])
            gathered = self._gathered(node, replace(view, index=rows), rows.shape[1:3])
            tensors.append(self._whole(gathered, True, False, False))
        shape = (groups * grid.index.shape[1], grid.index.shape[2], channels)
        align = node.attributes.get_int("align_corners", 0) != 0

        def add(to: Operand) -> Step:
            first, second = (self._float_tensor(node, mapped) for mapped in tensors)
            return Sampling(first, second, to.tensor, groups, TAPS[kind], outside, align)

        made = self._float_pending(shape, add, shared=True, last=True)
        index = np.arange(math.prod(shape)).reshape(groups, -1, *shape[1:])
        self._settle(node.outputs[0], View(made, np.moveaxis(index, -1, 1)))

    def _softmax(self, node: ir.Node) -> None:
        """Maps a softmax over an axis of a value."""
        value = data_input(node)
        view = self._view_of(node, value)
        if not isinstance(view, View):
            raise refused(node, "is not over the keys")
        axis = node.attributes.get_int("axis", -1) % view.index.ndim
        if self.model.opset_imports.get("", 0) < 13 and axis != view.index.ndim - 1:
            raise refused(node, "is over several axes")
        x, mapped, runs, moved = self._runs(node, view, axis)
        height, width, channels = self._shape(mapped)
        size, starts = moved.shape[-1], np.unique(runs % channels)
        count = size * len(starts)
        places = runs // channels * count + runs % channels - starts[0]
        index = places.reshape(*moved.shape[:-1], 1) + np.arange(size)
        made = self._float_pending(
            (height, width, count), lambda to: Softmax(x, to, int(starts[0]), size), shared=True, last=True
        )
        self._settle(node.outputs[0], View(made, np.moveaxis(index, -1, axis)))

    def _few_weights(self, node: ir.Node) -> NDArray[np.float32] | None:
        """float32 [outputs, inputs] of a layer over an axis with up to `MAX_RUN_WEIGHTS` floats, else None."""
        weight = query.constant(input_at(node, 1))
        if weight is None or weight.dtype != np.float32 or not 1 <= weight.size <= MAX_RUN_WEIGHTS:
            return None
        if node.op_type == "MatMul":
            return np.ascontiguousarray(weight.reshape(len(weight), -1).T) if weight.ndim <= 2 else None
        attributes = node.attributes
        ones = [*attributes.get_ints("strides", [1, 1]), *attributes.get_ints("dilations", [1, 1])]
        plain = weight.ndim == 4 and weight.shape[2:] == (1, 1) and attributes.get_int("group", 1) == 1
        pads = attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and any(attributes.get_ints("pads", [0]))
        return weight[:, :, 0, 0] if plain and not pads and set(ones) == {1} else None

    def _group_linear(self, node: ir.Node) -> None:
        """Maps a layer of few float weights over an axis of a value: a Conv of single pixels, or a MatMul."""
        weight = self._few_weights(node)
        view = self._view_of(node, data_input(node))
        if weight is None or not isinstance(view, View):
            raise refused(node, "has weights that are neither int8 nor few")
        bias = self._per_channel(node, 2, len(weight), -1)
        axis = 1 if node.op_type == "Conv" else view.index.ndim - 1
        index, made = self._linear_view(node, view, axis, np.ascontiguousarray(weight), bias)
        constant = query.constant(input_at(node, 1))
        index = index[..., 0] if constant is not None and constant.ndim == 1 else index
        self._settle(node.outputs[0], View(made, index))

    def _reducesum(self, node: ir.Node) -> None:
        """Maps sums, or means, over an axis of a value."""
        view, axes = self._view_of(node, data_input(node)), query.integers(node, "axes", 1)
        rank = view.index.ndim if isinstance(view, View) else 0
        if not isinstance(view, View) or axes is None or len(axes) != 1 or axes[0] % rank == 0:
            raise refused(node, "is not over one axis")
        axis = axes[0] % rank
        summed = self._pixel_sums(node, view, axis)
        if summed is None:
            ones = np.ones((1, view.index.shape[axis]), np.float32)
            summed = self._linear_view(node, view, axis, ones, np.zeros(1, np.float32))
        index, made = summed
        keeps = node.attributes.get_int("keepdims", 1) != 0
        factor = 1 / view.index.shape[axis] if node.op_type == "ReduceMean" else 1.0
        self._settle(node.outputs[0], self._plain(node, View(made, index if keeps else index.squeeze(axis), factor)))

    def _pixel_sums(self, node: ir.Node, view: View, axis: int) -> tuple[NDArray[np.int64], Pending] | None:
        """`_linear_view` of sums over whole pixels; None where an axis is another."""
        view = self._plain(node, view)
        mapped, moved = self._whole(view, True, False, False), np.moveaxis(view.index, axis, -1)
        channels = self._shape(mapped)[2]
        pixels, columns = np.divmod(moved.reshape(-1, moved.shape[-1]), channels)
        _, first, number = np.unique(pixels[:, 0], return_index=True, return_inverse=True)
        places = np.ascontiguousarray(pixels[first])
        index = number * channels + columns[:, 0]
        same = (columns == columns[:, :1]).all() and (pixels == places[number]).all()
        if not same or len(index) != len(first) * channels or np.bincount(index).max() != 1:
            return None
        shape = (*self._grid(len(first)), channels)

        def add(to: Operand) -> Step:
            return PixelSums(self._float_tensor(node, mapped), to.tensor, places)

        made = self._float_pending(shape, add, shared=True, last=True)
        return np.moveaxis(index.reshape(*moved.shape[:-1], 1), -1, axis), made

    def _linear_view(
        self, node: ir.Node, view: View, axis: int, weight: NDArray[np.float32], bias: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], Pending]:
        """(elements of the results, the value) of a linear layer over an axis of a view."""
        if view.index.shape[axis] != weight.shape[1]:
            raise refused(node, f"reads {view.index.shape[axis]} inputs with {weight.shape[1]} weights")
        x, mapped, runs, moved = self._runs(node, view, axis, whole=True)
        height, width, channels = self._shape(mapped)
        outputs, inputs = weight.shape
        places = runs // inputs * outputs
        index = places.reshape(*moved.shape[:-1], 1) + np.arange(outputs)
        shape = (height, width, channels // inputs * outputs)
        made = self._float_pending(shape, lambda to: GroupLinear(x, to, weight, bias), shared=True, last=True)
        return np.moveaxis(index, -1, axis), made

    def _runs(
        self, node: ir.Node, view: View, axis: int, whole: bool = False
    ) -> tuple[Operand, Bytes | Pending, NDArray[np.int64], NDArray[np.int64]]:
        """The elements along an axis of a view as runs of channels that follow each other, gathered where they do not.

        whole: Whether the runs are all channels of the value.

        Returns:
            The operand, its value, the first element of each run, and the view's elements with the axis last.
        """
        if view.factor != 1:
            raise refused(node, "reads a scaled value in another order")
        mapped, moved = self._whole(view, True, False, False), np.moveaxis(view.index, axis, -1)
        size, channels = moved.shape[-1], self._shape(mapped)[2]
        runs = moved.reshape(-1, size)
        starts = np.unique(runs[:, 0] % channels)
        follows = (runs == runs[:, :1] + np.arange(size)).all() and starts[-1] + size <= channels
        follows &= np.array_equal(starts, starts[0] + size * np.arange(len(starts)))
        pixels = math.prod(self._shape(mapped)[:2])
        follows &= len(runs) == len(np.unique(runs[:, 0])) == pixels * len(starts)
        if not follows or (whole and len(starts) * size != channels):
            grid = (math.prod(moved.shape[:-2]), moved.shape[-2])
            mapped = self._whole(
                self._gathered(node, replace(view, index=moved.reshape(1, *grid, size)), grid), True, False, False
            )
            runs = np.arange(moved.size).reshape(-1, size)
        return self._operand_of(node, mapped), mapped, runs[:, 0], moved


def _fill(node: ir.Node) -> np.float32:
    """The number by which a Pad fills real values; 0 where it fills codes, as its zero point does."""
    fill = query.constant(input_at(node, 2))
    return np.float32(0 if fill is None or fill.dtype != np.float32 else fill.item())
