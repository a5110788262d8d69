"""State of the mapping of a quantized image network: its values, and operators that quantize or rearrange them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.constants import Constants
from pipelines.kernels.images.mapping.qdq import (
    data_input,
    qparams,
    quantized,
    refused,
)
from pipelines.kernels.images.steps import FloatClip, Lookup, Operand, Pixels, Shape, Step


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
        origin: Tensor, scale and zero point of a layer's value that was quantized, and that value.
    """

    tensor: int
    scale: np.float32 | None = None
    zero: int = 0
    last: bool = False
    flat: bool = False
    tokens: bool = False
    real: bool = False
    origin: tuple[int, np.float32, int, Pending] | None = None


@dataclass(frozen=True, eq=False)
class Joined:
    """The real values that a Concat joins.

    Attributes:
        parts: The values.
        stacks: Whether their pixels follow each other; else their channels.
    """

    parts: tuple[Bytes | Pending, ...]
    stacks: bool


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
        joined: For a concatenation, its parts.
        whole: For integers, which are floats here, the least and the largest they can be.
        form: Of integers: "" for elements of a tensor, "selection" for rows of NonMaxSuppression behind their number,
            "pairs" for indices behind those of samples, "joined" for indices among the elements of all samples, "shape"
            for values whose shape alone is read.
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
    joined: Joined | None = None
    whole: tuple[int, int] | None = None
    form: str = ""

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
    """Visits the operators of a graph in order.

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
        self.constants = Constants(model)
        self._tensors_of: dict[tuple[Any, ...], int] = {}
        self.absorbed: set[ir.Node] = set()  # operators that a step before computes, too
        self.pixels: dict[tuple[Input, np.float32 | None, int], int] = {}  # tensor by layout, qparams of the input

    # ------------------------------------------------------------------------------------------------------- quantized

    def _new(self, shape: Sequence[int]) -> int:
        self.tensors.append((int(shape[0]), int(shape[1]), int(shape[2])))
        return len(self.tensors) - 1

    def _new_floats(self, shape: Sequence[int]) -> int:
        tensor = self._new(shape)
        self.floats.add(tensor)
        return tensor

    def _floats_of(self, mapped: Pending) -> int:
        """The tensor of floats of a value, within its bounds."""
        if mapped.real is None:
            raise RequestError("a value has no native float form")
        x, key = mapped.real(), ("clip", mapped.real, mapped.low, mapped.high)
        if mapped.unbounded:
            return x
        if key not in self._tensors_of:
            self._tensors_of[key] = out = self._new_floats(mapped.shape)
            self.steps.append(FloatClip(Operand(x), Operand(out), float(mapped.low), float(mapped.high)))
        return self._tensors_of[key]

    def _pixels(self, image: Input, scale: np.float32 | None, zero: int) -> int:
        """The tensor of the input; quantized where it is float, unless `scale` is None."""
        if (image, scale, zero) in self.pixels:
            return self.pixels[image, scale, zero]
        height, width = self.shape[:2] if image.stored else self.shape[1:]
        channels = self.shape[2] if image.stored else self.shape[0]
        make = self._new_floats if self.reals and scale is None else self._new
        tensor = make((height, width, channels + len(image.fills)))
        first = self.steps[0] if self.pixels else None  # bytes, if there are any: its pixels may take 4 bytes
        later = isinstance(first, Pixels) and (tensor in self.floats or first.out not in self.floats)
        self.steps.insert(int(later), Pixels(tensor, image.fills, image.stored, float(scale or 0), zero))
        self.pixels[image, scale, zero] = tensor
        return tensor

    def _read(self, node: ir.Node, position: int = 0) -> Bytes:
        """An input that is a dequantized tensor."""
        value = node.inputs[position]
        mapped = None if value is None else self.values.get(value)
        if not isinstance(mapped, Bytes) or not mapped.real or mapped.scale is None:
            raise refused(node, f"reads {'nothing' if value is None else value.name}, which is not quantized")
        return mapped

    def _quantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        mapped = self.values[data_input(node)]
        if isinstance(mapped, Input):
            if not self.reals:
                raise refused(node, "quantizes bytes")
            if mapped.fills:
                raise refused(node, "quantizes a padded input")
            self.values[node.outputs[0]] = Bytes(self._pixels(mapped, scale, zero), scale, zero, mapped.last)
            return
        if isinstance(mapped, Pending):
            tensor = self._requantized(mapped, scale, zero, 0, 255)
            origin = (tensor, scale, zero, mapped) if mapped.layer is not None and mapped.unbounded else None
            made = Bytes(tensor, scale, zero, mapped.last, mapped.flat, mapped.tokens, origin=origin)
            self.values[node.outputs[0]] = made
            return
        if not mapped.real or mapped.scale is None:
            raise refused(node, "quantizes a quantized value")
        tensor = self._requantized(mapped, scale, zero, 0, 255)
        self.values[node.outputs[0]] = replace(mapped, tensor=tensor, scale=scale, zero=zero, real=False)

    def _dequantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        mapped = self.values[data_input(node)]
        if isinstance(mapped, Input):
            tensor = self._pixels(mapped, None, 0)
            mapped = Bytes(tensor, scale, zero, mapped.last)
        if isinstance(mapped, Pending) or mapped.real:
            raise refused(node, "dequantizes a float value")
        self.values[node.outputs[0]] = replace(mapped, scale=scale, zero=zero, real=True)

    def _lookup(self, tensor: int, table: NDArray[np.uint8]) -> int:
        out = self._new(self.tensors[tensor])
        self.steps.append(Lookup(tensor, out, table))
        return out

    def _clipped(self, tensor: int, low: int, high: int) -> int:
        if (low, high) == (0, 255):
            return tensor
        return self._lookup(tensor, np.clip(np.arange(256), low, high).astype(np.uint8))

    def _shape(self, mapped: Bytes | Pending) -> Shape:
        return mapped.shape if isinstance(mapped, Pending) else self.tensors[mapped.tensor]

    def _emitted(self, mapped: Pending, scale: np.float32, zero: int, low: int, high: int) -> int:
        """The tensor of a value with these qparams and bounds; all its readers share one tensor."""
        key = mapped.emit, scale, zero, low, high
        if key not in self._tensors_of:
            self._tensors_of[key] = mapped.emit(scale, zero, low, high)
        return self._tensors_of[key]

    def _requantized(self, mapped: Bytes | Pending, scale: np.float32, zero: int, low: int, high: int) -> int:
        """The tensor of a real value with these qparams and bounds."""
        if isinstance(mapped, Pending):
            least, most = (int(quantized(bound, scale, zero)) for bound in (mapped.low, mapped.high))
            return self._emitted(mapped, scale, zero, min(max(least, low), high), min(max(most, low), high))
        if (mapped.scale, mapped.zero, low, high) == (scale, zero, 0, 255):
            return mapped.tensor
        assert mapped.scale is not None
        real = (np.arange(256, dtype=np.float32) - np.float32(mapped.zero)) * mapped.scale
        return self._lookup(mapped.tensor, np.clip(quantized(real, scale, zero), low, high).astype(np.uint8))


def layout_of(mapped: Bytes | Pending) -> tuple[bool, bool, bool]:
    """Returns the order of a value's axes: `last`, `flat` and `tokens`.

    Args:
        mapped: The value.
    """
    return mapped.last, mapped.flat, mapped.tokens


def channel_axis(mapped: Bytes | Pending) -> int:
    """Returns the axis of a value's channels, from the end.

    Args:
        mapped: The value.
    """
    return -1 if mapped.last or mapped.flat else -2 if mapped.tokens else -3


def is_over_pixels(node: ir.Node, mapped: Bytes | Pending) -> bool:
    """Returns whether a reduction is over all pixels of a value, for each channel.

    Args:
        node: The reduction.
        mapped: The value.
    """
    axes, rank = query.integers(node, "axes", 1), 3 if mapped.tokens else 4
    pixels = [axis for axis in range(1, rank) if axis != (rank - 1 if mapped.last else 1)]
    return not mapped.flat and axes is not None and sorted(axis % rank for axis in axes) == pixels
