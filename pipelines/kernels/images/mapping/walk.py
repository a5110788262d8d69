"""State of a walk over a quantized image network's graph: its values, and operators that quantize or rearrange them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.qdq import (
    computed,
    data_input,
    input_at,
    qparams,
    quantized,
    refused,
    split_sizes,
)
from pipelines.kernels.images.steps import Concatenation, Lookup, Pixels, Resampling, Selection, Shape, Step


@dataclass(frozen=True)
class Bytes:
    """A quantized value.

    Attributes:
        tensor: Number of the tensor.
        scale: Scale.
        zero: Zero point.
        last: Whether its axes are [N, H, W, C].
        flat: Whether its axes are [N, H W C], in that order or [C, H, W].
        tokens: Whether height and width are one axis, [N, H W, C] or [N, C, H W].
        real: Whether it is the output of a DequantizeLinear.
    """

    tensor: int
    scale: np.float32 | None = None
    zero: int = 0
    last: bool = False
    flat: bool = False
    tokens: bool = False
    real: bool = False


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer whose sums are not rounded yet: float32(sums + biases) scales.

    Attributes:
        x: Input.
        weight: int8 [O, kh, kw, I].
        scales: float32 [O].
        biases: int64 [O], with the zero point of x.
        geometry: Strides, pads, dilations and groups of a convolution.
    """

    x: Bytes
    weight: Array
    scales: Array
    biases: NDArray[np.int64]
    geometry: dict[str, Any]

    def scaled(self, gain: NDArray[np.float32], bias: NDArray[np.float32]) -> Layer | None:
        """Returns the layer of gain times the values plus bias; None where that cannot be computed.

        Args:
            gain: float32 [O].
            bias: float32 [O].
        """
        if not gain.all():
            return None
        biases = self.biases + np.rint(bias / (self.scales * gain).astype(np.float64))
        if not np.abs(biases).max() < 2**31:
            return None
        return replace(self, scales=self.scales * gain, biases=biases.astype(np.int64))

    def chosen(self, outputs: NDArray[np.int64]) -> Layer:
        """Returns the layer of some outputs; -1: a zero.

        Args:
            outputs: int64 [n].
        """
        none = outputs < 0
        weight, scales, biases = self.weight[outputs], self.scales[outputs], self.biases[outputs]
        weight[none], biases[none] = 0, 0
        return replace(self, weight=weight, scales=scales, biases=biases)


@dataclass(frozen=True, eq=False)
class Pending:
    """A real value that is not quantized yet.

    Attributes:
        emit: (scale, zero, low, high) -> tensor: adds the step that quantizes it.
        shape: Shape of a sample.
        low: Lower bound of Relu and Clip.
        high: Upper bound of Relu and Clip.
        last: See `Bytes`.
        flat: See `Bytes`.
        tokens: See `Bytes`.
        layer: The layer that computes it, if one does.
        result: Adds the step that ends the program.
        real: Adds the steps that compute it as a tensor of floats, once; returns the tensor.
        trace: For a function of single values of a float value, that value and the function's results for `GRID`.
        curve: For a function of single bytes, their tensor and the float32 result of each byte.
    """

    emit: Callable[[np.float32, int, int, int], int]
    shape: Shape
    low: float = -np.inf
    high: float = np.inf
    last: bool = False
    flat: bool = False
    tokens: bool = False
    layer: Layer | None = None
    result: Callable[[], None] | None = None
    real: Callable[[], int] | None = None
    trace: tuple[Pending, NDArray[np.float32]] | None = None
    curve: tuple[int, NDArray[np.float32]] | None = None

    @property
    def unbounded(self) -> bool:
        """Whether it has no bounds."""
        return (self.low, self.high) == (-np.inf, np.inf)


@dataclass(frozen=True)
class Input:
    """The graph's input.

    Attributes:
        stored: Whether its memory layout is [N, H, W, C].
        last: Whether its axes are [N, H, W, C], until a Transpose.
        fills: Bytes of the channels that a Pad appends.
    """

    stored: bool = False
    last: bool = False
    fills: tuple[int, ...] = ()


class Walk:
    """A walk over a graph, in order.

    Args:
        model: QDQ model.

    Attributes:
        shape: Shape of the input.
        reals: Whether the input is float32.
    """

    shape: Shape
    reals: bool

    def __init__(self, model: ir.Model) -> None:
        self.main, self.model = model.graph, model
        self.values: dict[ir.Value, Bytes | Pending | Input] = {}
        self.tensors: list[Shape] = []
        self.floats: set[int] = set()  # tensors of float32
        self.steps: list[Step] = []
        self.first: tuple[Input, np.float32 | None, int, int] | None = None  # and the qparams, tensor of the input

    # ------------------------------------------------------------------------------------------------------- quantized

    def _new(self, shape: Sequence[int]) -> int:
        self.tensors.append((int(shape[0]), int(shape[1]), int(shape[2])))
        return len(self.tensors) - 1

    def _new_floats(self, shape: Sequence[int]) -> int:
        tensor = self._new(shape)
        self.floats.add(tensor)
        return tensor

    def _pixels(self, given: Input, scale: np.float32 | None, zero: int) -> int:
        """The tensor of the input; quantized where it is float."""
        if self.first is not None:
            if self.first[:3] != (given, scale, zero):
                raise RequestError("reads the input with other qparams or another layout than an earlier operator")
            return self.first[3]
        height, width = self.shape[:2] if given.stored else self.shape[1:]
        channels = self.shape[2] if given.stored else self.shape[0]
        tensor = self._new((height, width, channels + len(given.fills)))
        self.steps.insert(0, Pixels(tensor, given.fills, given.stored, float(scale or 0), zero))
        self.first = (given, scale, zero, tensor)
        return tensor

    def _read(self, node: ir.Node, position: int = 0) -> Bytes:
        """An input that is a dequantized tensor."""
        value = node.inputs[position]
        found = None if value is None else self.values.get(value)
        if not isinstance(found, Bytes) or not found.real or found.scale is None:
            raise refused(node, f"reads {'nothing' if value is None else value.name}, which is not quantized")
        return found

    def _quantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        found = self.values[data_input(node)]
        if isinstance(found, Input):
            if not self.reals:
                raise refused(node, "quantizes bytes")
            if found.fills:
                raise refused(node, "quantizes a padded input")
            self.values[node.outputs[0]] = Bytes(self._pixels(found, scale, zero), scale, zero, found.last)
            return
        if isinstance(found, Pending):
            tensor = self._requantized(found, scale, zero, 0, 255)
            self.values[node.outputs[0]] = Bytes(tensor, scale, zero, found.last, found.flat, found.tokens)
            return
        if not found.real or found.scale is None:
            raise refused(node, "quantizes a quantized value")
        tensor = self._requantized(found, scale, zero, 0, 255)
        self.values[node.outputs[0]] = replace(found, tensor=tensor, scale=scale, zero=zero, real=False)

    def _dequantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        found = self.values[data_input(node)]
        if isinstance(found, Input):
            tensor = self._pixels(found, None, 0)
            found = Bytes(tensor, scale, zero, found.last)
        if isinstance(found, Pending) or found.real:
            raise refused(node, "dequantizes a float value")
        self.values[node.outputs[0]] = replace(found, scale=scale, zero=zero, real=True)

    def _lookup(self, tensor: int, table: NDArray[np.uint8]) -> int:
        out = self._new(self.tensors[tensor])
        self.steps.append(Lookup(tensor, out, table))
        return out

    def _clipped(self, tensor: int, low: int, high: int) -> int:
        if (low, high) == (0, 255):
            return tensor
        return self._lookup(tensor, np.clip(np.arange(256), low, high).astype(np.uint8))

    # --------------------------------------------------------------------------------------------------------- layouts

    def _concat(self, node: ir.Node) -> None:
        parts = [self.values.get(value) if value is not None else None for value in node.inputs]
        joined = [each for each in parts if isinstance(each, Bytes | Pending)]
        axis = node.attributes.get_int("axis", 1)
        kinds = {(*layout_of(each), isinstance(each, Pending) or each.real) for each in joined}
        if len(joined) != len(parts) or len(kinds) != 1:
            raise refused(node, "concatenates a float value")
        first, shapes = joined[0], [self._shape(each) for each in joined]
        ranked = 2 if first.flat else 4
        pixels = all(shape[:2] == (1, 1) for shape in shapes)
        if axis % ranked != (3 if first.last and not first.flat else 1) or (first.flat and not pixels):
            raise refused(node, "does not concatenate channels")
        if first.tokens:
            raise refused(node, "concatenates tokens")
        if isinstance(first, Pending) or first.real:

            def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
                return self._joined([self._requantized(each, scale, zero, low, high) for each in joined])

            shape = (*shapes[0][:2], sum(shape[2] for shape in shapes))
            self.values[node.outputs[0]] = Pending(emit, shape, last=first.last, flat=first.flat)
            return
        self.values[node.outputs[0]] = replace(
            first, tensor=self._joined([each.tensor for each in joined if isinstance(each, Bytes)])
        )

    def _shape(self, found: Bytes | Pending) -> Shape:
        return found.shape if isinstance(found, Pending) else self.tensors[found.tensor]

    def _requantized(self, found: Bytes | Pending, scale: np.float32, zero: int, low: int, high: int) -> int:
        """The tensor of a real value with these qparams and bounds."""
        if isinstance(found, Pending):
            least, most = (int(quantized(bound, scale, zero)) for bound in (found.low, found.high))
            return found.emit(scale, zero, min(max(least, low), high), min(max(most, low), high))
        if (found.scale, found.zero, low, high) == (scale, zero, 0, 255):
            return found.tensor
        assert found.scale is not None
        real = (np.arange(256, dtype=np.float32) - np.float32(found.zero)) * found.scale
        return self._lookup(found.tensor, np.clip(quantized(real, scale, zero), low, high).astype(np.uint8))

    def _joined(self, tensors: Sequence[int]) -> int:
        shapes = [self.tensors[each] for each in tensors]
        out = self._new((*shapes[0][:2], sum(shape[2] for shape in shapes)))
        self.steps.append(Concatenation(tuple(tensors), out))
        return out

    def _pad(self, node: ir.Node) -> None:
        found, pads = self.values[data_input(node)], query.integers(node, "pads", 1)
        if pads is not None and not any(pads):
            self._identity(node)
            return
        fill = query.scalar(input_at(node, 2)) if input_at(node, 2) is not None else 0.0
        if not isinstance(found, Input) or found.fills or self.reals or fill is None:
            raise refused(node, "pads more than the channels of the input")
        channel = 3 if found.last else 1
        if (
            node.attributes.get_string("mode", "constant") != "constant"
            or input_at(node, 3) is not None
            or pads is None
        ):
            raise refused(node, "does not pad with a constant")
        if len(pads) != 8 or any(each for at, each in enumerate(pads) if at != 4 + channel) or pads[4 + channel] < 1:
            raise refused(node, "pads more than the channels of the input")
        self.values[node.outputs[0]] = replace(found, fills=(int(fill),) * pads[4 + channel])

    def _identity(self, node: ir.Node) -> None:
        self.values[node.outputs[0]] = self.values[data_input(node)]

    def _flatten(self, node: ir.Node) -> None:
        if node.attributes.get_int("axis", 1) != 1:
            raise refused(node, "keeps other axes than the batch axis")
        self._flattened(node)

    def _squeeze(self, node: ir.Node) -> None:
        self._flattened(node, alone=True)

    def _reshape(self, node: ir.Node) -> None:
        sizes = query.shape_elements(input_at(node, 1))
        if sizes is None:
            raise refused(node, "has no constant shape")
        self._flattened(node, sizes)

    def _flattened(self, node: ir.Node, sizes: Sequence[int | str | None] | None = None, alone: bool = False) -> None:
        """All axes but the first as one, or a pixel's four axes again."""
        found = self.values[data_input(node)]
        if isinstance(found, Input) or found.tokens:
            raise refused(node, "reshapes the input, or tokens")
        pixel = isinstance(found, Pending) or self.tensors[found.tensor][:2] == (1, 1)
        if (
            isinstance(found, Pending)
            and found.result is not None
            and (sizes is None or (len(sizes) == 2 and self._is_row(sizes, int(np.prod(found.shape)))))
        ):
            self.values[node.outputs[0]] = replace(found, flat=True)
            return
        if isinstance(found, Pending) or (alone and not pixel):
            raise refused(node, "reshapes a float value, or a tensor of several pixels")
        if sizes is not None and len(sizes) == 5:
            self._shuffled(node, found, sizes)
            return
        count = int(np.prod(self.tensors[found.tensor]))
        flat = sizes is None or (len(sizes) == 2 and self._is_row(sizes, count))
        unflat = (
            sizes is not None and len(sizes) == 4 and pixel and list(sizes[2:]) == [1, 1] and self._is_row(sizes, count)
        )
        if not flat and not unflat:
            raise refused(node, f"reshapes to {sizes}")
        self.values[node.outputs[0]] = replace(found, flat=flat, last=found.last and not unflat)

    def _is_row(self, sizes: Sequence[int | str | None], count: int) -> bool:
        """Whether a Reshape to [sizes[0], sizes[1], ...] leaves the `count` values of a sample on one axis."""
        samples = (query.dimensions(self.main.inputs[0]) or [None])[0]
        keeps = not isinstance(sizes[0], int) or sizes[0] in (0, samples)
        return sizes[1] == count or (sizes[1] == -1 and keeps)

    def _shuffled(self, node: ir.Node, found: Bytes, sizes: Sequence[int | str | None]) -> None:
        """Maps a channel shuffle (ShuffleNet, Zhang et al. 2018): [n, g, c, H, W] transposed to [n, c, g, H, W]."""
        height, width, channels = self.tensors[found.tensor]
        transpose = _only_reader(node)
        back = None if transpose is None else _only_reader(transpose)
        groups, each = sizes[1:3]
        if not isinstance(groups, int) or groups < 1 or channels % groups or each not in (-1, channels // groups):
            raise refused(node, f"reshapes to {sizes}")
        if found.last or found.flat or tuple(sizes[3:]) not in ((height, width), (height, -1), (-1, width)):
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
        self.values[back.outputs[0]] = replace(found, tensor=self._selected(found.tensor, order))

    def _selected(self, tensor: int, channels: Any) -> int:
        out = self._new((*self.tensors[tensor][:2], len(channels)))
        self.steps.append(Selection(tensor, out, tuple(map(int, channels))))
        return out

    def _part(self, node: ir.Node, axis: int) -> Bytes | Pending:
        """The value to cut along this axis, which must be that of its channels."""
        found = self.values[data_input(node)]
        if isinstance(found, Input) or found.tokens or (found.flat and self._shape(found)[:2] != (1, 1)):
            raise refused(node, "slices the input, tokens or a flattened value")
        ranked = 2 if found.flat else 4
        if axis % ranked != (3 if found.last and not found.flat else 1):
            raise refused(node, "slices another axis than the channels")
        if isinstance(found, Pending):  # parts with the same qparams are cut from one tensor
            self.values[data_input(node)] = found = replace(found, emit=functools.cache(found.emit))
        return found

    def _cut(self, found: Bytes | Pending, channels: range) -> Bytes | Pending:
        if isinstance(found, Bytes):
            return replace(found, tensor=self._selected(found.tensor, channels))

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            return self._selected(found.emit(scale, zero, low, high), channels)

        return Pending(emit, (*found.shape[:2], len(channels)), found.low, found.high, found.last, found.flat)

    def _slice(self, node: ir.Node) -> None:
        bounds = [query.integers(node, name, at) for at, name in ((1, "starts"), (2, "ends"), (3, "axes"))]
        steps = query.constant(input_at(node, 4))
        starts, ends, axes = bounds
        if starts is None or ends is None or axes is None or len(axes) != 1:
            raise refused(node, "has bounds that are not constant, or slices several axes")
        found = self._part(node, axes[0])
        cut = slice(starts[0], ends[0], 1 if steps is None else int(steps.item()))
        channels = range(self._shape(found)[2])[cut]
        if not channels:
            raise refused(node, "has an empty result")
        self.values[node.outputs[0]] = self._cut(found, channels)

    def _split(self, node: ir.Node) -> None:
        found = self._part(node, node.attributes.get_int("axis", 0))
        sizes = split_sizes(node, self._shape(found)[2])
        ends = np.cumsum(sizes)
        for output, size, end in zip(node.outputs, sizes, ends, strict=True):
            self.values[output] = self._cut(found, range(int(end) - size, int(end)))

    def _resize(self, node: ir.Node) -> None:
        """Maps resizing to nearest neighbours, which onnxruntime computes from ramps of indices."""
        found = self.values[data_input(node)]
        if not isinstance(found, Bytes) or found.flat or found.tokens:
            raise refused(node, "resizes a float or flattened value")
        if node.attributes.get_string("mode", "nearest") != "nearest":
            raise refused(node, "interpolates between pixels")
        height, width, channels = self.tensors[found.tensor]
        shape = (1, height, width, channels) if found.last else (1, channels, height, width)
        axes = (1, 2) if found.last else (2, 3)
        elements = query.shape_elements(input_at(node, 3))
        known = elements is not None and all(isinstance(each, int) for each in elements[1:])
        sizes = {3: np.array([1, *(elements or [])[1:]], np.int64)} if known else None
        places = []
        for axis in axes:
            ramp = np.arange(shape[axis], dtype=np.float32).reshape([-1 if at == axis else 1 for at in range(4)])
            made = computed(self.model, node, np.broadcast_to(ramp, shape), sizes)
            along = np.moveaxis(made, axis, 0).reshape(made.shape[axis], -1)
            pixels = made.shape[axes[0]] * made.shape[axes[1]]
            if made.size != pixels * channels or np.ptp(along, axis=1).any():
                raise refused(node, "resizes other axes than height and width")
            places.append(tuple(along[:, 0].astype(int).tolist()))
        out = self._new((len(places[0]), len(places[1]), channels))
        self.steps.append(Resampling(found.tensor, out, *places))
        self.values[node.outputs[0]] = replace(found, tensor=out)

    def _transpose(self, node: ir.Node) -> None:
        found, order = self.values[data_input(node)], tuple(node.attributes.get_ints("perm", []))
        if not isinstance(found, Input) and (found.flat or found.tokens):
            raise refused(node, "transposes a flattened value or tokens")
        to_last, to_first = order == (0, 2, 3, 1), order == (0, 3, 1, 2)
        if isinstance(found, Input):
            if not to_first or found.stored != found.last or found.fills:
                raise refused(node, "transposes the input, but not from [n, H, W, C] to [n, C, H, W]")
            self.values[node.outputs[0]] = Input(stored=True)
            return
        pixel = self._shape(found)[:2] == (1, 1)
        if not ((to_last and not found.last) or (to_first and found.last) or (pixel and order and order[0] == 0)):
            raise refused(node, f"transposes to {order}")
        if isinstance(found, Pending):
            found = replace(found, result=None)  # which has the order of the layer
        self.values[node.outputs[0]] = replace(found, last=to_last)


def layout_of(found: Bytes | Pending) -> tuple[bool, bool, bool]:
    """Returns the order of a value's axes: `last`, `flat` and `tokens`.

    Args:
        found: The value.
    """
    return found.last, found.flat, found.tokens


def channel_axis(found: Bytes | Pending) -> int:
    """Returns the axis of a value's channels, from the end.

    Args:
        found: The value.
    """
    return -1 if found.last or found.flat else -2 if found.tokens else -3


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The only reader of a node's output, None if there are several."""
    uses = [use.node for use in node.outputs[0].uses()]
    return uses[0] if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
