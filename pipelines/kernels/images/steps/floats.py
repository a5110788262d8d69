"""Float32 steps between int8 layers.

A step reads float tensors, or bytes that it dequantizes, and writes floats, or bytes that it quantizes:

    real = float32(byte - zero) scale        byte = clip(rint(real / scale) + zero, 0, 255), NaN as real = 0
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps.base import Packing, Run, Shape, Step, bytes_fit, fits, quantized_pixels
from pipelines.kernels.transformer.operations.base import ACTIVATIONS
from pipelines.kernels.transformer.reference.rows import activate, layer_norm, rms_norm

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram

PackedOperand = tuple[int, float, int]


@dataclass(frozen=True)
class Operand:
    """A tensor that a float step reads or writes.

    Attributes:
        tensor: Number of the tensor.
        scale: Scale of bytes, 0 for a tensor of float32.
        zero: Zero point of bytes.
    """

    tensor: int
    scale: float = 0.0
    zero: int = 0

    @property
    def floats(self) -> bool:
        """Whether the tensor is float32."""
        return self.scale == 0

    def packed(self) -> PackedOperand:
        """Returns the arguments of the native steps, in a form that a file can hold."""
        return self.tensor, self.scale, self.zero

    def read(self, step: Step, program: ImageProgram, written: set[int]) -> Shape:
        """See `ImageProgram.read`."""
        self._check(step)
        return program.read(step, self.tensor, written, self.floats)

    def write(self, step: Step, program: ImageProgram, written: set[int]) -> Shape:
        """See `ImageProgram.write`."""
        self._check(step)
        return program.write(step, self.tensor, written, self.floats)

    def real(self, run: Run) -> NDArray[np.float32]:
        """Returns the values of the tensor.

        Args:
            run: Tensors written so far.
        """
        values = run.tensors[self.tensor]
        if self.floats:
            return values
        return (values.astype(np.int32) - self.zero).astype(np.float32) * np.float32(self.scale)

    def store(self, run: Run, real: Array) -> None:
        """Writes the tensor; its bytes are clip(rint(real (1 / scale)) + zero, 0, 255), NaN as 0.

        Args:
            run: Tensors, to which this one is added.
            real: float32 of the tensor's shape.
        """
        if self.floats:
            run.tensors[self.tensor] = real
            return
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = real * (np.float32(1) / np.float32(self.scale))
        run.tensors[self.tensor] = quantized_pixels(scaled, 1, self.zero)

    def _check(self, step: Step) -> None:
        fits(step, bool(np.isfinite(np.float32(self.scale)) and self.scale >= 0))
        bytes_fit(step, self.zero)


@dataclass(frozen=True, eq=False)
class FloatStep(Step):
    """A step from one tensor to one of the same shape, on single pixels.

    Attributes:
        x: The tensor that is read.
        to: The tensor that is written.
    """

    x: Operand
    to: Operand

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = self.x.read(self, program, written)
        fits(self, self.to.write(self, program, written) == shape)
        self.check_channels(shape[2])

    def check_channels(self, channels: int) -> None:
        """Checks parameters that have a value per channel.

        Args:
            channels: Number of channels.

        Raises:
            RequestError: They do not fit.
        """

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        self.to.store(run, self.function(self.x.real(run)))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed()

    @abstractmethod
    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Computes the step of real values.

        Args:
            x: float32 [height, width, channels].

        Returns:
            float32 of the same shape.
        """


@dataclass(frozen=True, eq=False)
class FloatCopy(FloatStep):
    """The values of x, dequantized or quantized."""

    method: ClassVar[str] = "float_copy"

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        return x

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_copy(x=x, out=out)


@dataclass(frozen=True, eq=False)
class FloatLookup(Step):
    """A function of bytes: float32 [256], the result of each byte.

    Attributes:
        x: Number of the tensor of bytes that is read.
        out: Number of the float tensor that is written.
        table: float32 [256].
    """

    x: int
    out: int
    table: Array
    method: ClassVar[str] = "float_lookup"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        require("FloatLookup", "table", self.table, np.float32, (256,))
        shape = program.read(self, self.x, written)
        fits(self, program.write(self, self.out, written, floats=True) == shape)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        run.tensors[self.out] = self.table[run.tensors[self.x]]

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, self.table

    @staticmethod
    def add_to(network: ImageNetwork, x: int, out: int, table: Array) -> None:
        """See `Step`."""
        network.float_lookup(x=x, out=out, table=table)


@dataclass(frozen=True, eq=False)
class ChannelScale(FloatStep):
    """x gain + bias, float32 [pixels, channels] with values per pixel, or [1, channels] for all pixels."""

    gain: Array
    bias: Array
    method: ClassVar[str] = "channel_scale"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        super().check(program, written)
        height, width, channels = program.tensors[self.x.tensor]
        pixels = 1 if len(self.gain) == 1 else height * width
        require("ChannelScale", "gain", self.gain, np.float32, (pixels, channels))
        require("ChannelScale", "bias", self.bias, np.float32, (pixels, channels))

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        return (x.reshape(-1, x.shape[2]) * self.gain + self.bias).reshape(x.shape)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.gain, self.bias

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, gain: Array, bias: Array) -> None:
        """See `Step`."""
        network.channel_scale(x=x, out=out, gain=gain, bias=bias)


@dataclass(frozen=True, eq=False)
class Normalization(FloatStep):
    """Normalization over the channels of each pixel: `layer_norm` of transformer/reference, without bias `rms_norm`.

    Attributes:
        gain: float32 [channels].
        bias: float32 [channels]; None: the root of the mean of squares alone, of no mean, divides.
        epsilon: Added to the variance, or the mean of squares.
    """

    gain: Array
    bias: Array | None
    epsilon: float
    method: ClassVar[str] = "layer_norm"

    def check_channels(self, channels: int) -> None:
        """See `FloatStep`."""
        require("Normalization", "gain", self.gain, np.float32, (channels,))
        if self.bias is not None:
            require("Normalization", "bias", self.bias, np.float32, (channels,))
        fits(self, 0 <= self.epsilon < np.inf)

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.bias is None:
                return rms_norm(x, self.gain, self.epsilon)
            return layer_norm(x.reshape(-1, x.shape[2]), self.gain, self.bias, self.epsilon).reshape(x.shape)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.gain, self.bias, self.epsilon

    @staticmethod
    def add_to(
        network: ImageNetwork, x: PackedOperand, out: PackedOperand, gain: Array, bias: Array | None, epsilon: float
    ) -> None:
        """See `Step`."""
        network.layer_norm(x=x, out=out, gain=gain, bias=bias, epsilon=epsilon)


@dataclass(frozen=True, eq=False)
class FloatActivation(FloatStep):
    """An activation function of a text encoder's kernels: `activate` of transformer/reference.

    Attributes:
        kind: One of `ACTIVATIONS`, or sigmoid.
    """

    kind: str
    method: ClassVar[str] = "activation"

    def check_channels(self, channels: int) -> None:
        """See `FloatStep`."""
        fits(self, self.kind in (*ACTIVATIONS, "sigmoid"))

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        return activate(self.kind, x)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.kind

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, kind: str) -> None:
        """See `Step`."""
        network.activation(x=x, out=out, kind=kind)


@dataclass(frozen=True, eq=False)
class FloatMean(FloatStep):
    """The mean of each channel as floats [1, 1, channels]: the sum of pixels in order, divided by their number."""

    method: ClassVar[str] = "float_mean"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = self.x.read(self, program, written)
        fits(self, self.to.floats and self.to.write(self, program, written) == (1, 1, shape[2]))

    def function(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `FloatStep`."""
        pixels = x.reshape(-1, x.shape[2])
        total = np.add.accumulate(pixels, axis=0, dtype=np.float32)[-1:]
        return np.asarray(total / np.float32(len(pixels)), np.float32)[None]

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_mean(x=x, out=out)


@dataclass(frozen=True)
class FloatSum(Step):
    """a + b, tensors of the shape of `to`."""

    a: Operand
    b: Operand
    to: Operand
    method: ClassVar[str] = "float_sum"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        a, b = (operand.read(self, program, written) for operand in (self.a, self.b))
        self.check_shapes(a, b, self.to.write(self, program, written))

    def check_shapes(self, a: Shape, b: Shape, to: Shape) -> None:
        """Checks the shapes of the tensors.

        Args:
            a: Shape of the first operand.
            b: Shape of the second operand.
            to: Shape of the result.

        Raises:
            RequestError: They do not fit.
        """
        fits(self, a == b == to)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.a.tensor, self.b.tensor)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        self.to.store(run, self.a.real(run) + self.b.real(run))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.a.packed(), self.b.packed(), self.to.packed()

    @staticmethod
    def add_to(network: ImageNetwork, a: PackedOperand, b: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_sum(a=a, b=b, out=out)


@dataclass(frozen=True)
class FloatDifference(FloatSum):
    """a - b, tensors of the shape of `to`."""

    method: ClassVar[str] = "float_difference"

    def compute(self, run: Run) -> None:
        """See `Step`."""
        self.to.store(run, self.a.real(run) - self.b.real(run))

    @staticmethod
    def add_to(network: ImageNetwork, a: PackedOperand, b: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_difference(a=a, b=b, out=out)


@dataclass(frozen=True)
class FloatProduct(FloatSum):
    """a b, tensors of the shape of `to`; b may be one pixel for all, or one channel."""

    method: ClassVar[str] = "float_product"

    def check_shapes(self, a: Shape, b: Shape, to: Shape) -> None:
        """See `FloatSum`."""
        fits(self, a == to and b in (to, (1, 1, to[2]), (*to[:2], 1)))

    def compute(self, run: Run) -> None:
        """See `Step`."""
        self.to.store(run, self.a.real(run) * self.b.real(run))

    @staticmethod
    def add_to(network: ImageNetwork, a: PackedOperand, b: PackedOperand, out: PackedOperand) -> None:
        """See `Step`."""
        network.float_product(a=a, b=b, out=out)


@dataclass(frozen=True, eq=False)
class FloatDepthwise(Step):
    """A depthwise convolution of floats: bias + the taps' products in order, each operation rounded.

    Attributes:
        x: Number of the float tensor that is read; its padding is 0.
        out: Number of the float tensor that is written.
        weight: float32 [kh, kw, channels].
        bias: float32 [channels].
    """

    x: int
    out: int
    weight: Array
    bias: Array
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    method: ClassVar[str] = "float_depthwise"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        shape = program.read(self, self.x, written, floats=True)
        fits(self, self.weight.ndim == 3 and min(*self.pads, *(stride - 1 for stride in self.strides)) >= 0)
        kernel = self.weight.shape[:2]
        require("FloatDepthwise", "weight", self.weight, np.float32, (*kernel, shape[2]))
        require("FloatDepthwise", "bias", self.bias, np.float32, (shape[2],))
        counts = windows(shape, kernel, self.strides, self.pads, self.dilations)
        fits(self, min(*counts, *self.dilations, *kernel) >= 1)
        fits(self, program.write(self, self.out, written, floats=True) == (*counts, shape[2]))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = run.tensors[self.x]
        top, left, bottom, right = self.pads
        padded = np.pad(x, ((top, bottom), (left, right), (0, 0)))
        kernel = self.weight.shape[:2]
        rows, columns = windows(x.shape, kernel, self.strides, self.pads, self.dilations)
        total = np.broadcast_to(self.bias, (rows, columns, x.shape[2])).copy()
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                taps = padded[i * self.dilations[0] :: self.strides[0], j * self.dilations[1] :: self.strides[1]]
                total += taps[:rows, :columns] * self.weight[i, j]
        run.tensors[self.out] = total

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.out, self.weight, self.bias, self.strides, self.pads, self.dilations

    @staticmethod
    def add_to(
        network: ImageNetwork,
        x: int,
        out: int,
        weight: Array,
        bias: Array,
        strides: tuple[int, int],
        pads: tuple[int, int, int, int],
        dilations: tuple[int, int],
    ) -> None:
        """See `Step`."""
        network.float_depthwise(x=x, out=out, weight=weight, bias=bias, strides=strides, pads=pads, dilations=dilations)
