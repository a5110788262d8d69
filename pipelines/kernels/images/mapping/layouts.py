"""Mapping of operators that rearrange channels and pixels: Concat, Split, Slice, Reshape, Transpose, Pad and Resize."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.images.mapping.qdq import computed, data_input, input_at, refused, split_sizes
from pipelines.kernels.images.mapping.walk import Bytes, Input, Joined, Pending, Walk, layout_of
from pipelines.kernels.images.steps import Concatenation, Resampling, Selection, Shape, Stacking

Taps = tuple[NDArray[np.int64], NDArray[np.float32]]  # places and weights, [outputs, taps]


class Layouts(Walk):
    """Mapping of operators on channels and pixels."""

    @abstractmethod
    def _interpolated(self, node: ir.Node, mapped: Bytes | Pending, shape: Shape, rows: Taps, columns: Taps) -> None:
        """Maps weighted sums of pixels."""

    @abstractmethod
    def _float_tensor(self, node: ir.Node, mapped: Bytes | Pending, grid: Sequence[int] | None = None) -> int:
        """The tensor of floats of a real value, for a node that reads it; its tokens in rows of another grid."""

    @abstractmethod
    def _float_channels(self, node: ir.Node, mapped: Pending, channels: range) -> int:
        """The tensor of floats of some channels of a real value."""

    @abstractmethod
    def _padded(self, node: ir.Node, mapped: Bytes | Pending, pads: Sequence[int] | None) -> None:
        """Maps a Pad of height and width."""

    def _concat(self, node: ir.Node) -> None:
        parts = [self.values.get(value) if value is not None else None for value in node.inputs]
        joined = [part for part in parts if isinstance(part, Bytes | Pending)]
        axis = node.attributes.get_int("axis", 1)
        kinds = {(*layout_of(part), isinstance(part, Pending) or part.real) for part in joined}
        if len(joined) != len(parts) or len(kinds) != 1:
            raise refused(node, "concatenates a float value")
        first, shapes = joined[0], [self._shape(part) for part in joined]
        ranked = 2 if first.flat else 3 if first.tokens else 4
        pixels = all(shape[:2] == (1, 1) for shape in shapes)
        stacks = first.tokens and axis % ranked == (1 if first.last else 2)
        channels = axis % ranked == (ranked - 1 if first.last and not first.flat else 1)
        if not stacks and (not channels or (first.flat and not pixels)):
            raise refused(node, "does not concatenate channels, or all channels of tokens")
        grids = {shape[:2] for shape in shapes}
        alike = {shape[2] if stacks else shape[0] * shape[1] for shape in shapes}
        if len(alike) != 1 or not (stacks or first.tokens or len(grids) == 1):
            raise refused(node, "concatenates values of different shapes")
        if isinstance(first, Pending) or first.real:
            self.values[node.outputs[0]] = self._joined(node, joined, stacks)
            return
        if not stacks and len(grids) > 1:
            raise refused(node, "concatenates tokens in rows of different lengths")
        out = self._new(self._joined_shape(shapes, stacks))
        make = Stacking if stacks else Concatenation
        self.steps.append(make(tuple(part.tensor for part in joined if isinstance(part, Bytes)), out))
        self.values[node.outputs[0]] = replace(first, tensor=out)

    @staticmethod
    def _joined_shape(shapes: Sequence[Shape], stacks: bool) -> Shape:
        """The shape of stacked pixels or concatenated channels."""
        if stacks:
            return sum(shape[0] * shape[1] for shape in shapes), 1, shapes[0][2]
        return (*shapes[0][:2], sum(shape[2] for shape in shapes))

    def _joined(self, node: ir.Node, parts: Sequence[Bytes | Pending], stacks: bool) -> Pending:
        """The concatenation of real values, with the layout of the first one."""
        make = Stacking if stacks else Concatenation
        shapes = [self._shape(part) for part in parts]
        shape = self._joined_shape(shapes, stacks)
        mixed = not stacks and len({shape[:2] for shape in shapes}) > 1

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            if mixed:
                raise refused(node, "concatenates tokens in rows of different lengths")
            out, tensors = self._new(shape), [self._requantized(part, scale, zero, low, high) for part in parts]
            self.steps.append(make(tuple(tensors), out))
            return out

        @functools.cache
        def real() -> int:
            grid = None if stacks else shape[:2]
            tensors = [self._float_tensor(node, part, grid) for part in parts]
            out = self._new_floats(shape)
            self.steps.append(make(tuple(tensors), out))
            return out

        layout: dict[str, Any] = dict(zip(("last", "flat", "tokens"), layout_of(parts[0]), strict=True))
        return Pending(emit, shape, **layout, real=real, joined=Joined(tuple(parts), stacks))

    def _pad(self, node: ir.Node) -> None:
        mapped, pads = self.values[data_input(node)], query.integers(node, "pads", 1)
        if pads is not None and not any(pads):
            self._identity(node)
            return
        if not isinstance(mapped, Input):
            self._padded(node, mapped, pads)
            return
        fill = query.scalar(input_at(node, 2)) if input_at(node, 2) is not None else 0.0
        if mapped.fills or self.reals or fill is None:
            raise refused(node, "pads more than the channels of the input")
        channel = 3 if mapped.last else 1
        if (
            node.attributes.get_string("mode", "constant") != "constant"
            or input_at(node, 3) is not None
            or pads is None
        ):
            raise refused(node, "does not pad with a constant")
        if len(pads) != 8 or any(pad for i, pad in enumerate(pads) if i != 4 + channel) or pads[4 + channel] < 1:
            raise refused(node, "pads more than the channels of the input")
        self.values[node.outputs[0]] = replace(mapped, fills=(int(fill),) * pads[4 + channel])

    def _identity(self, node: ir.Node) -> None:
        self.values[node.outputs[0]] = self.values[data_input(node)]

    def _flatten(self, node: ir.Node) -> None:
        if node.attributes.get_int("axis", 1) != 1:
            raise refused(node, "keeps other axes than the batch axis")
        self._flattened(node)

    def _squeeze(self, node: ir.Node) -> None:
        self._flattened(node, alone=True)

    def _reshape(self, node: ir.Node) -> None:
        image = self.values[data_input(node)]
        if isinstance(image, Input) and image.stored == image.last and self.constants.sizes(node)[1:] == [*self.shape]:
            self._identity(node)  # as the quantizer writes it for networks with an LSTM
            return
        sizes = query.shape_elements(input_at(node, 1))
        if sizes is None:
            raise refused(node, "has no constant shape")
        self._flattened(node, sizes)

    def _flattened(self, node: ir.Node, sizes: Sequence[int | str | None] | None = None, alone: bool = False) -> None:
        """All axes but the first as one, or a pixel's four axes again."""
        mapped = self.values[data_input(node)]
        if isinstance(mapped, Input) or mapped.tokens:
            raise refused(node, "reshapes the input, or tokens")
        pixel = isinstance(mapped, Pending) or self.tensors[mapped.tensor][:2] == (1, 1)
        if (
            isinstance(mapped, Pending)
            and mapped.result is not None
            and (sizes is None or (len(sizes) == 2 and self._is_row(sizes, int(np.prod(mapped.shape)))))
        ):
            self.values[node.outputs[0]] = replace(mapped, flat=True)
            return
        if isinstance(mapped, Pending) or (alone and not pixel):
            raise refused(node, "reshapes a float value, or a tensor of several pixels")
        if sizes is not None and len(sizes) == 5:
            self._shuffled(node, mapped, sizes)
            return
        count = int(np.prod(self.tensors[mapped.tensor]))
        flat = sizes is None or (len(sizes) == 2 and self._is_row(sizes, count))
        unflat = (
            sizes is not None and len(sizes) == 4 and pixel and list(sizes[2:]) == [1, 1] and self._is_row(sizes, count)
        )
        if not flat and not unflat:
            raise refused(node, f"reshapes to {sizes}")
        self.values[node.outputs[0]] = replace(mapped, flat=flat, last=mapped.last and not unflat)

    def _is_row(self, sizes: Sequence[int | str | None], count: int) -> bool:
        """Whether a Reshape to [sizes[0], sizes[1], ...] leaves the `count` values of a sample on one axis."""
        samples = (query.dimensions(self.main.inputs[0]) or [None])[0]
        keeps = not isinstance(sizes[0], int) or sizes[0] in (0, samples)
        return sizes[1] == count or (sizes[1] == -1 and keeps)

    def _shuffled(self, node: ir.Node, mapped: Bytes, sizes: Sequence[int | str | None]) -> None:
        """Maps a channel shuffle (ShuffleNet, Zhang et al. 2018): [n, g, c, H, W] transposed to [n, c, g, H, W]."""
        height, width, channels = self.tensors[mapped.tensor]
        transpose = _only_reader(node)
        back = None if transpose is None else _only_reader(transpose)
        groups, per_group = sizes[1:3]
        if not isinstance(groups, int) or groups < 1 or channels % groups or per_group not in (-1, channels // groups):
            raise refused(node, f"reshapes to {sizes}")
        if mapped.last or mapped.flat or tuple(sizes[3:]) not in ((height, width), (height, -1), (-1, width)):
            raise refused(node, f"reshapes to {sizes}")
        whole = None if back is None else query.shape_elements(input_at(back, 1))
        if (
            transpose is None
            or transpose.op_type != "Transpose"
            or transpose.attributes.get_ints("perm", []) not in ([0, 2, 1, 3, 4], (0, 2, 1, 3, 4))
            or back is None
            or back.op_type != "Reshape"
            or whole is None
            or len(whole) != 4
            or not all(
                size in (-1, 0, expected) for size, expected in zip(whole[1:], (channels, height, width), strict=True)
            )
        ):
            raise refused(node, f"reshapes to {sizes}, which is no channel shuffle")
        order = np.arange(channels).reshape(groups, -1).T.ravel()
        self.values[back.outputs[0]] = replace(mapped, tensor=self._selected(mapped.tensor, order))

    def _selected(self, tensor: int, channels: Any) -> int:
        out = self._new((*self.tensors[tensor][:2], len(channels)))
        self.steps.append(Selection(tensor, out, tuple(map(int, channels))))
        return out

    def _part(self, node: ir.Node, axis: int) -> Bytes | Pending:
        """The value to cut along this axis, which must be that of its channels."""
        mapped = self.values[data_input(node)]
        joined = isinstance(mapped, Pending) and mapped.joined is not None and mapped.unbounded
        pixel = isinstance(mapped, Input) or self._shape(mapped)[:2] == (1, 1)
        if isinstance(mapped, Input) or (mapped.tokens and not joined) or (mapped.flat and not pixel):
            raise refused(node, "slices the input, tokens or a flattened value")
        ranked = 2 if mapped.flat else 3 if mapped.tokens else 4
        if axis % ranked != (ranked - 1 if mapped.last and not mapped.flat else 1):
            raise refused(node, "slices another axis than the channels")
        return mapped

    def _cut(self, node: ir.Node, mapped: Bytes | Pending, channels: range) -> Bytes | Pending:
        """Channels of a value, whose layout it has."""
        if channels == range(self._shape(mapped)[2]):
            return mapped
        if isinstance(mapped, Bytes):
            return replace(mapped, tensor=self._selected(mapped.tensor, channels))
        if mapped.joined is not None and mapped.unbounded and channels.step == 1:
            parts, before = [], 0
            for part in mapped.joined.parts:
                count = self._shape(part)[2]
                own = range(max(channels.start - before, 0), min(channels.stop - before, count))
                if mapped.joined.stacks:
                    own = channels
                if own:
                    parts.append(self._cut(node, part, own))
                before += count
            layout: dict[str, Any] = {"last": mapped.last, "flat": mapped.flat, "tokens": mapped.tokens}
            parts = [replace(part, **layout) for part in parts]
            return parts[0] if len(parts) == 1 else self._joined(node, parts, mapped.joined.stacks)
        if mapped.tokens:
            raise refused(node, "slices tokens")

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            return self._selected(self._emitted(mapped, scale, zero, low, high), channels)

        @functools.cache
        def real() -> int:
            return self._float_channels(node, mapped, channels)

        shape, is_float = (*mapped.shape[:2], len(channels)), mapped.real is not None
        return Pending(emit, shape, mapped.low, mapped.high, mapped.last, mapped.flat, real=real if is_float else None)

    def _slice(self, node: ir.Node) -> None:
        cuts = self.constants.slices(node)
        if len(cuts) != 1:
            raise refused(node, "slices several axes")
        ((axis, cut),) = cuts
        mapped = self._part(node, axis)
        channels = range(self._shape(mapped)[2])[cut]
        if not channels:
            raise refused(node, "has an empty result")
        self.values[node.outputs[0]] = self._cut(node, mapped, channels)

    def _split(self, node: ir.Node) -> None:
        mapped = self._part(node, node.attributes.get_int("axis", 0))
        sizes = split_sizes(node, self._shape(mapped)[2])
        ends = np.cumsum(sizes)
        for output, size, end in zip(node.outputs, sizes, ends, strict=True):
            self.values[output] = self._cut(node, mapped, range(int(end) - size, int(end)))

    def _resize(self, node: ir.Node) -> None:
        """Maps resizing to nearest neighbours or to weighted sums, which onnxruntime computes for single pixels."""
        mapped = self.values[data_input(node)]
        if isinstance(mapped, Input) or mapped.flat or mapped.tokens:
            raise refused(node, "resizes the input or a flattened value")
        attributes = node.attributes
        if attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            raise refused(node, "crops what it resizes")
        if attributes.get_ints("axes", []) or attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise refused(node, "resizes some axes alone")
        height, width, channels = self._shape(mapped)
        whole = (1, height, width, channels) if mapped.last else (1, channels, height, width)
        sizes, scales = self.constants.sizes_of(input_at(node, 3)), self.constants.real_of(input_at(node, 2))
        target = sizes or scales
        if target is None or len(target) != 4:
            raise refused(node, "has no constant size")
        axes = (1, 2) if mapped.last else (2, 3)
        if any(target[axis] != (whole[axis] if sizes else 1) for axis in (1, 2, 3) if axis not in axes) or (
            scales and target[0] != 1
        ):
            raise refused(node, "resizes other axes than height and width")
        matrices = [self._resized_ones(node, whole[axis], target[axis], sizes is not None) for axis in axes]
        shape = (len(matrices[0]), len(matrices[1]), channels)
        if all(np.array_equal(matrix, np.eye(*matrix.shape)) for matrix in matrices):
            self._identity(node)
        elif attributes.get_string("mode", "nearest") == "nearest" and isinstance(mapped, Bytes):
            out = self._new(shape)
            rows, columns = (tuple(map(int, matrix.argmax(1))) for matrix in matrices)
            self.steps.append(Resampling(mapped.tensor, out, rows, columns))
            self.values[node.outputs[0]] = replace(mapped, tensor=out)
        else:
            self._interpolated(node, mapped, shape, *(_taps(matrix) for matrix in matrices))

    def _resized_ones(self, node: ir.Node, size: int, to: float, sizes: bool) -> NDArray[np.float32]:
        """The weights [outputs, size] of pixels along an axis; to: its new size or, without `sizes`, its scale."""
        ones = np.eye(size, dtype=np.float32).reshape(1, size, size, 1)
        constants = {3: np.array([1, size, to, 1], np.int64)} if sizes else {2: np.array([1, 1, to, 1], np.float32)}
        return computed(self.model, node, ones, constants)[0, :, :, 0].T

    def _transpose(self, node: ir.Node) -> None:
        mapped, order = self.values[data_input(node)], tuple(node.attributes.get_ints("perm", []))
        if not isinstance(mapped, Input) and (mapped.flat or mapped.tokens):
            raise refused(node, "transposes a flattened value or tokens")
        to_last, to_first = order == (0, 2, 3, 1), order == (0, 3, 1, 2)
        if isinstance(mapped, Input):
            if not to_first or mapped.stored != mapped.last or mapped.fills:
                raise refused(node, "transposes the input, but not from [n, H, W, C] to [n, C, H, W]")
            self.values[node.outputs[0]] = Input(stored=True)
            return
        pixel = self._shape(mapped)[:2] == (1, 1)
        if not ((to_last and not mapped.last) or (to_first and mapped.last) or (pixel and order and order[0] == 0)):
            raise refused(node, f"transposes to {order}")
        if isinstance(mapped, Pending):
            mapped = replace(mapped, result=None)  # which has the order of the layer
        self.values[node.outputs[0]] = replace(mapped, last=to_last)


def _taps(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places and weights [outputs, most] of the elements of each row that are not 0."""
    count = max(int((matrix != 0).sum(1).max()), 1)
    places = np.argsort(matrix == 0, axis=1, kind="stable")[:, :count]
    return np.ascontiguousarray(places), np.ascontiguousarray(np.take_along_axis(matrix, places, 1))


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The only reader of a node's output, None if there are several."""
    uses = [use.node for use in node.outputs[0].uses()]
    return uses[0] if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
