"""What the native image classifier computes: steps on tensors of bytes, each a validated dataclass. `reference.run` is
the same in numpy.

A tensor is uint8 [height, width, channels], one a sample; real = scale * (byte - zero point), and who makes a program
knows the scales. The arithmetic is onnxruntime's of the same QDQ graph, so that both compute the same integers:

    requantized(acc) = clip(rint(float32(acc) scale) + zero, low, high)     half to even; acc in exact int32

The last step writes float32, the logits; where the graph goes on in float (a detector's boxes), so do the last few, one
value each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

ENDINGS = ("", "Softmax", "Sigmoid")
LARGEST = 2**16  # of a height, width or number of channels
ELEMENTS = 2**28  # of a tensor
Shape = tuple[int, int, int]  # height, width, channels


class Step(Protocol):
    """One step of a program."""

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """Raise RequestError where the step does not fit the program, of which the tensors `written` hold values."""


@dataclass(frozen=True)
class Pixels:
    """The graph's input [C, H, W], or [H, W, C] where `last`, as the tensor `out` [H, W, C + len(fills)].

    uint8: the bytes. float32: clip(rint(x / scale) + zero, 0, 255), NaN as 0. fills: the bytes of the channels behind.
    """

    out: int
    fills: tuple[int, ...] = ()
    last: bool = False
    scale: float = 0.0
    zero: int = 0

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        channels, height, width = program.shape[-1:] + program.shape[:2] if self.last else program.shape
        _fits(self, program.write(self, self.out, written) == (height, width, channels + len(self.fills)))
        _bytes(self, *self.fills, self.zero)
        _fits(self, (program.dtype == "float32") == (self.scale > 0) and np.isfinite(self.scale))


@dataclass(frozen=True)
class Sum:
    """The quantized sum of two tensors, as onnxruntime's QLinearAdd computes it:

    clip(rint(fma(a, a_ratio, fma(b, b_ratio, fixed))), low, high)      fma: rounded to float32 once

    a_ratio = s_a / s_y, b_ratio = s_b / s_y, fixed = z_y - fma(a_ratio, z_a, b_ratio z_b), in float32.
    """

    a_ratio: float
    b_ratio: float
    fixed: float
    low: int = 0
    high: int = 255

    def check(self, step: object) -> None:
        """Raise RequestError for values that are not finite, or out of bounds."""
        values = np.array([self.a_ratio, self.b_ratio, self.fixed])
        _fits(step, bool(np.isfinite(values).all() and np.abs(values).max() < 2**20))
        _bytes(step, self.low, self.high)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution or, over a window as large as its tensor, a fully connected layer:

        acc[y, x, o] = bias_o + sum_{i, j, k} padded[y sy + i dy, x sx + j dx, g(o) + k] weight[o, i, j, k]

    and `requantized(acc)` in the tensor `out`, or where that is -1, float32(acc) scale as the program's result, flat.
    pads: rows and columns of the byte `fill` at top, left, bottom and right. weight: int8 [O, kh, kw, C / groups],
    bias: int32 [O] (the input's zero point is in it), scale: float32 [O]: s_x s_w / s_y, or s_x s_w.

    sum: where it is given, the result is the sum of the requantized bytes and the tensor `other`, which is a where
    `other_first`. Integers cannot overflow: 255 sum |weight| + |bias| < 2^31 is checked here.
    """

    x: int
    out: int
    weight: Array
    bias: Array
    scale: Array
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1
    fill: int = 0
    zero: int = 0
    low: int = 0
    high: int = 255
    sum: Sum | None = None
    other: int = -1
    other_first: bool = False

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        require("Convolution", "weight", self.weight, np.int8, (*self.weight.shape[:4], *[1] * (4 - self.weight.ndim)))
        outputs, *kernel, inputs = self.weight.shape
        require("Convolution", "bias", self.bias, np.int32, (outputs,))
        require("Convolution", "scale", self.scale, np.float32, (outputs,))
        _fits(self, self.groups >= 1 and self.weight.size > 0 and outputs % self.groups == 0)
        _fits(self, inputs * self.groups == shape[2] and min(*self.strides, *self.dilations) >= 1)
        _fits(self, min(self.pads) >= 0 and max(*self.pads, *kernel, *self.strides, *self.dilations) <= LARGEST)
        found = (*windows(shape, kernel, self.strides, self.pads, self.dilations), outputs)
        _fits(self, min(found) >= 1)
        _bytes(self, self.fill, self.zero, self.low, self.high)
        if self.out < 0:
            _fits(
                self,
                self.sum is None and program.steps[-1] is self and program.results == found[0] * found[1] * outputs,
            )
        else:
            if self.sum is not None:
                self.sum.check(self)
                _fits(self, program.read(self, self.other, written) == found)
            _fits(self, program.write(self, self.out, written) == found)
        reach = 255 * np.abs(self.weight.astype(np.int64)).sum(axis=(1, 2, 3)) + np.abs(self.bias.astype(np.int64))
        results = np.abs(self.scale.astype(np.float64)) * reach
        if reach.max() >= 2**31 or not (results.max() < 2**30 or (self.out < 0 and np.isfinite(results).all())):
            raise RequestError("a convolution can overflow 32 bits")


@dataclass(frozen=True)
class Addition:
    """`Sum` of the tensors a and b."""

    a: int
    b: int
    out: int
    sum: Sum

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        self.sum.check(self)
        shape = program.read(self, self.a, written)
        _fits(self, program.read(self, self.b, written) == shape == program.write(self, self.out, written))


@dataclass(frozen=True)
class Product:
    """Every pixel of x times the one of `gate`, as onnxruntime computes it: with a = x - x_zero, b = gate - gate_zero

    clip(rint(float32(a b) ((x_scale gate_scale) / scale) + zero), 0, 255)                     without bounds
    clip(rint((float32(a) x_scale) (float32(b) gate_scale) / scale) + zero, low, high)         with a Relu or Clip
    """

    x: int
    gate: int
    out: int
    x_zero: int
    gate_zero: int
    x_scale: float
    gate_scale: float
    scale: float
    zero: int
    low: int = 0
    high: int = 255

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        _fits(self, program.read(self, self.gate, written) == (1, 1, shape[2]))
        _fits(self, program.write(self, self.out, written) == shape)
        scales = np.array([self.x_scale, self.gate_scale, self.scale], np.float32)
        _fits(self, bool(np.isfinite(scales).all() and (scales > 0).all()))
        _fits(self, bool(np.isfinite(scales[0] * scales[1] / scales[2])))
        for each in (self.x_zero, self.gate_zero, self.zero, self.low, self.high):
            _bytes(self, each)


@dataclass(frozen=True)
class MaxPool:
    """The largest byte of each window; what lies outside does not count."""

    x: int
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        _pool(self, self.kernel, self.strides, self.pads, program.read(self, self.x, written), program, written)


@dataclass(frozen=True)
class AveragePool:
    """The mean of each window, of what lies inside alone unless `padded`, as onnxruntime's QLinearAveragePool:

    clip(rint(sum(x_scale (x - x_zero)) / count / scale + zero), 0, 255)    in float32, summed in order
    """

    x: int
    out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    x_scale: float
    x_zero: int
    scale: float
    zero: int
    padded: bool = False

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        _pool(self, self.kernel, self.strides, self.pads, program.read(self, self.x, written), program, written)
        _fits(self, bool(np.isfinite([self.x_scale, self.scale]).all()) and min(self.x_scale, self.scale) > 2**-60)
        _fits(self, self.x_scale / self.scale < 2**20)
        _bytes(self, self.x_zero, self.zero)


@dataclass(frozen=True)
class GlobalAverage:
    """The mean of each channel, [1, 1, channels]: clip(rint(float32(sum x - H W x_zero) scale) + zero, 0, 255).

    scale = s_x / (s_y H W), in float32. Where `out` is -1, float32(sum x - H W x_zero) scale as the program's result,
    scale = s_x / (H W).
    """

    x: int
    out: int
    x_zero: int
    scale: float
    zero: int

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written)
        if self.out < 0:
            _fits(self, program.steps[-1] is self and program.results == channels)
        else:
            _fits(self, program.write(self, self.out, written) == (1, 1, channels))
        _fits(self, height * width < 2**23 and 0 < self.scale * height * width < 2**20)
        _bytes(self, self.x_zero, self.zero)


@dataclass(frozen=True, eq=False)
class Lookup:
    """table[x], any function of a byte: uint8 [256], or [channels, 256], one of each channel."""

    x: int
    out: int
    table: Array

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        require("Lookup", "table", self.table, np.uint8, (256,) if self.table.ndim == 1 else (shape[2], 256))
        _fits(self, shape == program.write(self, self.out, written))


@dataclass(frozen=True)
class Concatenation:
    """The channels of `xs`, one after the other."""

    xs: tuple[int, ...]
    out: int

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shapes = [program.read(self, x, written) for x in self.xs]
        _fits(self, bool(shapes) and len({shape[:2] for shape in shapes}) == 1)
        whole = (*shapes[0][:2], sum(shape[2] for shape in shapes))
        _fits(self, program.write(self, self.out, written) == whole)


@dataclass(frozen=True)
class Selection:
    """The channels of x at these places, in this order: a part, or all of them otherwise."""

    x: int
    out: int
    channels: tuple[int, ...]

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written)
        _fits(self, bool(self.channels) and min(self.channels) >= 0 and max(self.channels) < shape[2])
        _fits(self, program.write(self, self.out, written) == (*shape[:2], len(self.channels)))


@dataclass(frozen=True)
class Resampling:
    """The pixels of x at these rows and columns: a resize to nearest neighbours."""

    x: int
    out: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = program.read(self, self.x, written)
        for places, size in ((self.rows, height), (self.columns, width)):
            _fits(self, bool(places) and min(places) >= 0 and max(places) < size)
        _fits(self, program.write(self, self.out, written) == (len(self.rows), len(self.columns), channels))


@dataclass(frozen=True)
class Dequantize:
    """Results: scale (x - zero) of the tensor, flat, in the order [C, H, W] or, `last`, [H, W, C]. Several may end a
    program; they lie one after the other.
    """

    x: int
    scale: float
    zero: int
    last: bool = False

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        program.read(self, self.x, written)
        behind = program.steps[program.steps.index(self) :]
        _fits(self, all(isinstance(each, Dequantize) for each in behind) and bool(np.isfinite(self.scale)))
        if self is program.steps[-1]:
            shapes = [program.tensors[each.x] for each in program.steps if isinstance(each, Dequantize)]
            _fits(self, program.results == sum(int(np.prod(shape)) for shape in shapes))
        _bytes(self, self.zero)


STEPS = {
    each.__name__: each
    for each in (
        Pixels,
        Convolution,
        Addition,
        Product,
        MaxPool,
        AveragePool,
        GlobalAverage,
        Lookup,
        Concatenation,
        Selection,
        Resampling,
        Dequantize,
    )
}


@dataclass(frozen=True, eq=False)
class ImageProgram:
    """A classifier of images: the graph's input, uint8 or float32 `dtype` of `shape` a sample, to `results` float32.

    tensors: (height, width, channels) of each; every one is written once, before it is read. result_shape: of a
    sample's results in the graph. ending: the function of them that ends the graph, of `ENDINGS`.

    A graph of several outputs, or that goes on in float, has parts: the (name, shape of a sample) of each of the values
    that the results hold then, one after the other. rest is what computes those outputs from them that are none of
    them, a serialized ONNX model, empty where there are none. batch: the number of samples that such a graph fixes,
    else 0. Raises RequestError for steps that do not fit.
    """

    input: str
    outputs: tuple[str, ...]
    dtype: str
    shape: Shape
    tensors: tuple[Shape, ...]
    steps: tuple[Step, ...]
    result_shape: tuple[int, ...]
    ending: str = ""
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rest: bytes = b""
    batch: int = 0

    def __post_init__(self) -> None:
        written: set[int] = set()
        _fits(self, self.dtype in ("uint8", "float32") and len(self.shape) == 3 and len(self.steps) >= 2)
        for shape in (self.shape, *self.tensors):
            _fits(self, min(shape) >= 1 and max(shape) <= LARGEST and int(np.prod(shape, dtype=object)) <= ELEMENTS)
        _fits(self, isinstance(self.steps[0], Pixels) and min(self.result_shape) >= 1)
        last = self.steps[-1]
        whole = isinstance(last, Convolution | GlobalAverage) and last.out < 0
        _fits(self, (isinstance(last, Dequantize) or whole) and self.ending in ENDINGS)
        for step in self.steps:
            _fits(self, isinstance(step, Pixels) == (step is self.steps[0]))
            step.check(self, written)
        _fits(self, len(written) == len(self.tensors))
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape in self.parts]
        _fits(self, sum(sizes) == (self.results if sizes else 0) and (bool(sizes) or not self.rest))

    @property
    def results(self) -> int:
        """float32 results of a sample."""
        return int(np.prod(self.result_shape, dtype=np.int64))

    def read(self, step: object, tensor: int, written: set[int]) -> Shape:
        """The shape of a tensor that the step reads."""
        if tensor not in written:
            raise RequestError(f"{type(step).__name__} reads tensor {tensor}, which no step before it writes")
        return self.tensors[tensor]

    def write(self, step: object, tensor: int, written: set[int]) -> Shape:
        """The shape of a tensor that the step writes."""
        if tensor in written or not 0 <= tensor < len(self.tensors):
            raise RequestError(f"{type(step).__name__} writes tensor {tensor}, which is no new one")
        written.add(tensor)
        return self.tensors[tensor]


def windows(
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (1, 1),
) -> tuple[int, int]:
    """How many windows there are along height and width of a padded tensor."""
    counts = [
        (shape[axis] + pads[axis] + pads[axis + 2] - (kernel[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1
        for axis in range(2)
    ]
    return counts[0], counts[1]


def _pool(
    step: MaxPool | AveragePool,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    shape: Shape,
    program: ImageProgram,
    written: set[int],
) -> None:
    """Raise RequestError for a pool whose windows do not fit, or one of which lies outside."""
    _fits(step, min(*kernel, *strides) >= 1 and min(pads) >= 0)
    _fits(step, all(max(pads[axis], pads[axis + 2]) < kernel[axis] for axis in range(2)))
    found = (*windows(shape, kernel, strides, pads), shape[2])
    _fits(step, min(found) >= 1 and program.write(step, step.out, written) == found)


def _fits(step: object, right: bool) -> None:
    if not right:
        raise RequestError(f"the sizes or values of {type(step).__name__} do not fit its tensors or the program")


def _bytes(step: object, *values: int) -> None:
    if not all(0 <= value <= 255 for value in values):
        raise RequestError(f"{type(step).__name__} has zero points, bounds or fills outside 0 to 255")
