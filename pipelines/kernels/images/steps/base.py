"""What a step of an image program is, and what steps share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram

LARGEST = 2**16  # of a height, width or number of channels
Shape = tuple[int, int, int]  # height, width, channels


@dataclass(eq=False)
class Run:
    """A program while it computes one sample in numpy.

    Attributes:
        x: The sample, of the program's shape and dtype.
        shapes: Shapes of the program's tensors.
        tensors: uint8 or float32 [height, width, channels] of the tensors written so far.
        results: Places and float32 values [k] of the steps that end the program.
        offset: Place behind the results of the last of them.
    """

    x: Array
    shapes: Sequence[Shape]
    tensors: dict[int, Array] = field(default_factory=dict)
    results: list[tuple[Array, Array]] = field(default_factory=list)
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Packing:
    """A program while it is packed for one instruction set.

    Attributes:
        program: The program.
        isa: Instruction set.
        pitches: Bytes of a pixel of each tensor.
    """

    program: ImageProgram
    isa: str
    pitches: Sequence[int]


class Step(ABC):
    """One operator of an image program: a frozen dataclass whose attributes are its parameters and tensors.

    Attributes:
        method: Name of its method of `Network` in images/network/network.h and of `ImageNetwork` in Python; files of
            packed programs name the step by it.
    """

    method: ClassVar[str]

    @abstractmethod
    def check(self, program: ImageProgram, written: set[int]) -> None:
        """Checks that the step fits its program.

        Args:
            program: The program.
            written: Numbers of the tensors that hold values; those that the step writes are added.

        Raises:
            RequestError: The step does not fit.
        """

    @abstractmethod
    def reads(self) -> tuple[int, ...]:
        """Returns the numbers of the tensors that the step reads."""

    @abstractmethod
    def compute(self, run: Run) -> None:
        """Computes the step in numpy: the definition of the bits of its kernels.

        Args:
            run: Tensors, to which the step's are added.
        """

    @abstractmethod
    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """Returns the arguments of `add_to`, in a form that a file can hold.

        Args:
            packing: The program, its instruction set and the bytes of its tensors' pixels.

        Returns:
            Numbers, nested tuples of numbers, and arrays, in the order of the parameters of `add_to`.

        Raises:
            RequestError: The kernels are missing.
        """

    @staticmethod
    @abstractmethod
    def add_to(network: ImageNetwork, *arguments: Any, **options: Any) -> None:
        """Adds the step to a native network.

        Args:
            network: The network.
            arguments: Arguments of `packed`, which subclasses name.
            options: None.

        Raises:
            ValueError: The arguments do not fit the tensors of the network.
            TypeError: An array has another dtype or shape.
        """


def fits(step: object, condition: bool) -> None:
    """Checks a condition of a step.

    Args:
        step: The step, for the error message.
        condition: The condition.

    Raises:
        RequestError: The condition is False.
    """
    if not condition:
        raise RequestError(f"the sizes or values of {type(step).__name__} do not fit its tensors or the program")


def bytes_fit(step: object, *values: int) -> None:
    """Checks that values are bytes.

    Args:
        step: The step, for the error message.
        values: Zero points, bounds or fills.

    Raises:
        RequestError: A value is outside 0 to 255.
    """
    if not all(0 <= value <= 255 for value in values):
        raise RequestError(f"{type(step).__name__} has zero points, bounds or fills outside 0 to 255")


def clipped(values: Array, low: int = 0, high: int = 255) -> NDArray[np.uint8]:
    """Clips rounded values to bytes.

    Args:
        values: Whole numbers of any float or integer dtype and any shape.
        low: Lower bound.
        high: Upper bound.

    Returns:
        uint8 of the shape of `values`.
    """
    return np.minimum(np.maximum(values, low), high).astype(np.uint8)


def quantized_pixels(real: Array, scale: float, zero: int) -> NDArray[np.uint8]:
    """Quantizes pixels: clip(rint(real / scale) + zero, 0, 255), NaN as 0.

    Args:
        real: float32 of any shape.
        scale: Scale.
        zero: Zero point.

    Returns:
        uint8 of the same shape.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.nan_to_num(np.rint(real / np.float32(scale)), nan=0) + zero
    return np.asarray(np.clip(scaled, 0, 255), np.uint8)
