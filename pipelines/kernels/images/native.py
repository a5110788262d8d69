"""Image kernels in native code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.images.operators import Resize
from pipelines.kernels.images.program import (
    Addition,
    AveragePool,
    Concatenation,
    Convolution,
    Dequantize,
    GlobalAverage,
    ImageProgram,
    Lookup,
    MaxPool,
    Pixels,
    Product,
    Resampling,
    Selection,
    Sum,
)


def resize(image: Any, resizing: Resize, out: Any, isa: str = "") -> None:
    """Computes `Resize`.

    Args:
        image: uint8 [H, W, 3], C-contiguous.
        resizing: Size, crop and interpolation.
        out: uint8 [3, h, w], C-contiguous, of the size of the crop; it is written.
        isa: Instruction set; "": the best of the CPU.

    Raises:
        ValueError: An array has another shape, or the box is empty or outside the image.
        TypeError: An array has another dtype.
        RequestError: The kernels are missing.
    """
    required().resize(contiguous(image), resizing.size, resizing.crop, resizing.bicubic, resizing.box, out, isa)


def product_limit(isa: str = "") -> float:
    """Measures exact u8 x s8 products that one core computes in registers, in 1e9 per second.

    This is the upper bound of any layer.

    Args:
        isa: Instruction set; "": the best of the CPU.

    Raises:
        RequestError: The kernels are missing.
    """
    return float(required().product_limit(isa)) / 1e9


@dataclass(frozen=True)
class PackedProgram:
    """An `ImageProgram` packed for the kernels of one instruction set, in a form that a file can hold.

    Attributes:
        isa: Instruction set.
        input: Name of the graph input.
        outputs: Names of the graph outputs.
        dtype: Dtype of the input.
        shape: Shape of an input sample.
        result_shape: See `ImageProgram`.
        ending: See `ImageProgram`.
        parts: See `ImageProgram`.
        rest: Serialized float remainder, uint8.
        batch: See `ImageProgram`.
        calls: Methods of the native `ImageNetwork` with arguments, in order; arrays are packed weights, uint8, and
            tables.
    """

    isa: str
    input: str
    outputs: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    ending: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    rest: NDArray[np.uint8]
    batch: int
    calls: tuple[tuple[str, tuple[Any, ...]], ...]

    def open(self) -> Any:
        """Creates the native object, which uses the packed weights in place.

        Returns:
            A function from samples [n, ...] and a number of threads to float32 [n, results].

        Raises:
            ValueError: The program is damaged.
            RequestError: The kernels are missing.
        """
        network = required().ImageNetwork(self.isa)
        for method, arguments in self.calls:
            getattr(network, method)(*arguments)
        return network


def pack(program: ImageProgram, isa: str = "") -> PackedProgram:
    """Packs a program for an instruction set.

    Args:
        program: The program.
        isa: Instruction set; "": the best of the CPU.

    Returns:
        The packed program.

    Raises:
        RequestError: The kernels are missing.
    """
    module = required()
    isa = isa or module.isas()[0]
    thin = program.steps[0].out if isinstance(program.steps[0], Pixels) else -1
    pitches = [
        4 if tensor == thin and shape[2] <= 4 else -(-shape[2] // 16) * 16
        for tensor, shape in enumerate(program.tensors)
    ]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("tensor", (*shape, pitch)) for shape, pitch in zip(program.tensors, pitches, strict=True)
    ]
    for step in program.steps:
        match step:
            case Pixels():
                channels = program.shape[2 if step.last else 0]
                floats = program.dtype == "float32"
                scale = (step.last, floats, step.scale, step.zero)
                calls.append(("pixels", (step.out, channels, list(step.fills), *scale)))
            case Convolution():
                layer: list[Array] = [np.ascontiguousarray(each) for each in (step.weight, step.bias, step.scale)]
                pitch = pitches[step.x]
                packed = module.pack_convolution(*layer, step.groups, pitch, step.dilations[1] > 1, isa)
                geometry = (tuple(step.weight.shape), step.groups, pitch, step.strides, step.pads, step.dilations)
                bytes_of = (step.zero, step.low, step.high)
                sums = (_sum(step.sum) if step.sum else None, step.other, step.other_first)
                calls.append(("convolution", (step.x, step.out, packed, *geometry, step.fill, bytes_of, *sums)))
            case Addition():
                calls.append(("addition", (step.a, step.b, step.out, _sum(step.sum))))
            case Product():
                scales = (step.x_scale, step.gate_scale, step.scale)
                numbers = (step.x_zero, step.gate_zero, *scales, step.zero, step.low, step.high)
                calls.append(("product", (step.x, step.gate, step.out, numbers)))
            case MaxPool():
                calls.append(("max_pool", (step.x, step.out, step.kernel, step.strides, step.pads)))
            case AveragePool():
                values = (step.x_scale, step.x_zero, step.scale, float(step.zero), step.padded)
                calls.append(("average_pool", (step.x, step.out, step.kernel, step.strides, step.pads, *values)))
            case GlobalAverage():
                calls.append(("global_average", (step.x, step.out, step.x_zero, step.scale, step.zero)))
            case Lookup():
                calls.append(("lookup", (step.x, step.out, np.ascontiguousarray(step.table))))
            case Concatenation():
                calls.append(("concatenation", (list(step.xs), step.out)))
            case Selection():
                calls.append(("selection", (step.x, step.out, list(step.channels))))
            case Resampling():
                calls.append(("resampling", (step.x, step.out, list(step.rows), list(step.columns))))
            case Dequantize():
                calls.append(("dequantize", (step.x, step.scale, step.zero, step.last)))
    calls.append(("finish", (program.results,)))
    return PackedProgram(
        isa,
        program.input,
        program.outputs,
        program.dtype,
        program.shape,
        program.result_shape,
        program.ending,
        program.parts,
        np.frombuffer(program.rest, np.uint8),
        program.batch,
        tuple(calls),
    )


def _sum(of: Sum) -> tuple[float, float, float, int, int]:
    return of.a_ratio, of.b_ratio, of.fixed, of.low, of.high
