"""Image kernels in native code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.images.operators import Resize
from pipelines.kernels.images.program import ImageProgram, ValuePart
from pipelines.kernels.images.steps import STEPS, Packing, Pixels

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork


def resize(image: Any, resizing: Resize, out: Any, isa: str = "") -> None:
    """Computes `Resize`.

    Args:
        image: uint8 [H, W, 3], C-contiguous.
        resizing: Size, crop and interpolation.
        out: uint8 [3, h, w], C-contiguous, of the size of the crop; it is written.
        isa: Instruction set; "": the best of the CPU.

    Raises:
        ValueError: An array has another shape, the box is empty or outside the image, or the CPU has no such
            instruction set.
        TypeError: An array has another dtype.
        RequestError: The kernels are missing.
    """
    required().resize(
        image=contiguous(image),
        size=resizing.size,
        crop=resizing.crop,
        bicubic=resizing.bicubic,
        box=resizing.box,
        out=out,
        isa=isa,
    )


def product_limit(isa: str = "") -> float:
    """Measures how many exact u8 x s8 products one core computes in registers.

    This is the upper bound of any layer.

    Args:
        isa: Instruction set; "": the best of the CPU.

    Returns:
        1e9 products per second.

    Raises:
        RequestError: The kernels are missing.
        ValueError: The CPU has no such instruction set.
    """
    return float(required().product_limit(isa=isa)) / 1e9


def _tensor(network: ImageNetwork, height: int, width: int, channels: int, pitch: int) -> None:
    network.tensor(height=height, width=width, channels=channels, pitch=pitch)


def _finish(network: ImageNetwork, results: int) -> None:
    network.finish(results=results)


# functions of the calls of a packed program, by the name in files
ADD: dict[str, Callable[..., None]] = {
    "tensor": _tensor,
    "finish": _finish,
    **{method: step.add_to for method, step in STEPS.items()},
}


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
        remainder: Serialized float remainder, uint8.
        batch: See `ImageProgram`.
        inputs: See `ImageProgram`.
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
    parts: tuple[ValuePart, ...]
    remainder: NDArray[np.uint8]
    batch: int
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    calls: tuple[tuple[str, tuple[Any, ...]], ...]

    def open(self) -> ImageNetwork:
        """Creates the native object, which uses the packed weights in place.

        Returns:
            The network, a function from samples [n, ...] and a number of threads to float32 [n, results].

        Raises:
            ValueError: The program is damaged, or the CPU has no such instruction set.
            RequestError: The kernels are missing.
        """
        network: ImageNetwork = required().ImageNetwork(isa=self.isa)
        for method, arguments in self.calls:
            ADD[method](network, *arguments)
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
        ValueError: The CPU has no such instruction set.
    """
    module = required()
    isa = isa or module.isas()[0]
    thin = program.steps[0].out if isinstance(program.steps[0], Pixels) else -1
    pitches = [
        4
        if tensor == thin and shape[2] <= 4 and tensor not in program.floats
        else -(-shape[2] // 16) * (64 if tensor in program.floats else 16)
        for tensor, shape in enumerate(program.tensors)
    ]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("tensor", (*shape, pitch)) for shape, pitch in zip(program.tensors, pitches, strict=True)
    ]
    packing = Packing(program, isa, pitches)
    calls += [(step.method, step.packed(packing)) for step in program.steps]
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
        np.frombuffer(program.remainder, np.uint8),
        program.batch,
        program.inputs,
        tuple(calls),
    )
