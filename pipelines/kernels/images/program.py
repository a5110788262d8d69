"""Programs of the image kernels: steps on byte tensors, each a validated dataclass.

`reference.run` is the same in numpy. A tensor is uint8 [height, width, channels] per sample; real = scale * (byte -
zero point), and the creator of a program knows the scales. The arithmetic is onnxruntime's of the same QDQ graph, so
both compute the same integers:

    requantized(acc) = clip(rint(float32(acc) scale) + zero, low, high)     half to even; acc in exact int32

The last step writes float32 logits; if the graph has a float remainder (a detector's boxes), the last few steps write
one value each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.operators import windows

ENDINGS = ("", "Softmax", "Sigmoid")
LARGEST = 2**16  # of a height, width or number of channels
ELEMENTS = 2**28  # of a tensor
Shape = tuple[int, int, int]  # height, width, channels


class Step(Protocol):
    """One step of a program."""

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """Checks that the step fits its program.

        Args:
            program: The program.
            written: Numbers of the tensors that hold values; those that the step writes are added.

        Raises:
            RequestError: The step does not fit.
        """


@dataclass(frozen=True)
class Pixels:
    """The graph's input [C, H, W], or [H, W, C] if `last`, as the tensor `out` [H, W, C + len(fills)].

    uint8: the bytes. float32: clip(rint(x / scale) + zero, 0, 255), NaN as 0.

    Attributes:
        out: Tensor to write.
        fills: Bytes of additional channels.
        last: Whether channels are last.
        scale: Scale of a float32 input.
        zero: Zero point of a float32 input.
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
    """The quantized sum of two tensors, as onnxruntime's QLinearAdd computes it.

        clip(rint(fma(a, a_ratio, fma(b, b_ratio, fixed))), low, high)      fma: rounded to float32 once

    a_ratio = s_a / s_y, b_ratio = s_b / s_y, fixed = z_y - fma(a_ratio, z_a, b_ratio z_b), in float32.
    """

    a_ratio: float
    b_ratio: float
    fixed: float
    low: int = 0
    high: int = 255

    def check(self, step: object) -> None:
        """Checks that the values are finite and in bounds.

        Args:
            step: Step that contains the sum, for the error message.

        Raises:
            RequestError: A value is out of bounds.
        """
        values = np.array([self.a_ratio, self.b_ratio, self.fixed])
        _fits(step, bool(np.isfinite(values).all() and np.abs(values).max() < 2**20))
        _bytes(step, self.low, self.high)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution or, over a window as large as its tensor, a fully connected layer.

        acc[y, x, o] = bias_o + sum_{i, j, k} padded[y sy + i dy, x sx + j dx, g(o) + k] weight[o, i, j, k]

    The tensor `out` gets `requantized(acc)`. If it is -1, the program's result is float32(acc) scale, flat. Integers
    cannot overflow: 255 sum |weight| + |bias| < 2^31 is checked.

    Attributes:
        pads: Rows and columns of the byte `fill` at top, left, bottom and right.
        weight: int8 [O, kh, kw, C / groups].
        bias: int32 [O], with the input's zero point.
        scale: float32 [O]: s_x s_w / s_y, or s_x s_w.
        sum: If set, the result is the sum of the requantized bytes and the tensor `other`, which is a if `other_first`.
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
    """Every pixel of x times the pixel of `gate`, as onnxruntime computes it.

        clip(rint(float32(a b) ((x_scale gate_scale) / scale) + zero), 0, 255)                     without bounds
        clip(rint((float32(a) x_scale) (float32(b) gate_scale) / scale) + zero, low, high)         with a Relu or Clip

    a = x - x_zero, b = gate - gate_zero.
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
    """The largest byte of each window, without padding."""

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
    """The mean of each window, without padding unless `padded`, as onnxruntime's QLinearAveragePool.

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

    scale = s_x / (s_y H W), in float32. If `out` is -1, the program's result is float32(sum x - H W x_zero) scale with
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
    """table[x], any function of a byte: uint8 [256], or [channels, 256] for one table per channel."""

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
    """The concatenated channels of `xs`."""

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
    """Selected channels of x, in the order of `channels`."""

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
    """The pixels of x at `rows` and `columns`: nearest-neighbour resizing."""

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
    """Results: scale (x - zero) of the tensor, flat, in the order [C, H, W] or, if `last`, [H, W, C].

    Several may end a program; their results are concatenated.
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
    """An image network: from the graph's input to float32 results.

    Attributes:
        input: Name of the graph input.
        outputs: Names of the graph outputs.
        dtype: Dtype of the input, uint8 or float32.
        shape: Shape of an input sample.
        tensors: (height, width, channels) of each tensor; each is written once, before it is read.
        steps: The steps, in order.
        result_shape: Shape of a sample's results in the graph.
        ending: Function of the results that ends the graph, one of `ENDINGS`.
        parts: For a graph of several outputs or with a float remainder: (name, shape of a sample) of the values in the
            results.
        rest: Serialized ONNX model of the float remainder, from `parts` to the other outputs; empty without one.
        batch: Number of samples that such a graph fixes, else 0.

    Raises:
        RequestError: The steps do not fit.
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
        """Number of float32 results of a sample."""
        return int(np.prod(self.result_shape, dtype=np.int64))

    def read(self, step: object, tensor: int, written: set[int]) -> Shape:
        """Returns the shape of a tensor that a step reads.

        Args:
            step: The step, for the error message.
            tensor: Number of the tensor.
            written: Numbers of the tensors that hold values.

        Raises:
            RequestError: No earlier step writes the tensor.
        """
        if tensor not in written:
            raise RequestError(f"{type(step).__name__} reads tensor {tensor}, which no step before it writes")
        return self.tensors[tensor]

    def write(self, step: object, tensor: int, written: set[int]) -> Shape:
        """Returns the shape of a tensor that a step writes.

        Args:
            step: The step, for the error message.
            tensor: Number of the tensor.
            written: Numbers of the tensors that hold values; the tensor is added.

        Raises:
            RequestError: The tensor does not exist or is written already.
        """
        if tensor in written or not 0 <= tensor < len(self.tensors):
            raise RequestError(f"{type(step).__name__} writes tensor {tensor}, which is no new one")
        written.add(tensor)
        return self.tensors[tensor]


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
