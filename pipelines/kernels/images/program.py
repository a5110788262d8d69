"""Programs of the image kernels: steps on byte tensors, see `pipelines.kernels.images.steps`.

`reference.run` is the same in numpy. A tensor is uint8 [height, width, channels] per sample; real = scale * (byte -
zero point), and the creator of a program knows the scales. The arithmetic is onnxruntime's of the same QDQ graph, so
both compute the same integers:

    requantized(acc) = clip(rint(float32(acc) scale) + zero, low, high)     half to even; acc in exact int32

The last step writes float32 logits; if the graph has a float remainder (a detector's boxes), the last few steps write
one value each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import contiguous
from pipelines.kernels.images.steps import LARGEST, Convolution, Dequantize, GlobalAverage, Pixels, Shape, Step
from pipelines.kernels.images.steps.base import fits

ENDINGS = ("", "Softmax", "LogSoftmax", "Sigmoid")
ELEMENTS = 2**28  # of a tensor
SELECTION = "selection"
ValuePart = tuple[str, tuple[int, ...], str]  # name, shape of a sample, dtype


@dataclass(frozen=True, eq=False)
class ImageProgram:
    """An image network: from the graph's input to float32 results.

    Attributes:
        input: Name of the graph input.
        outputs: Names of the graph outputs.
        dtype: Dtype of the input, uint8 or float32.
        shape: Shape of an input sample; (elements,) of all `inputs`.
        tensors: (height, width, channels) of each tensor; each is written once, before it is read.
        floats: Numbers of the tensors that are float32; the others are bytes.
        inputs: For a part of a graph: (name, shape of a sample) of its float32 inputs. Their elements follow each other
            in a sample.
        steps: The steps, in order.
        result_shape: Shape of a sample's results in the graph.
        ending: Function of the results that ends the graph, one of `ENDINGS`.
        parts: For a graph of several outputs, of integers or with a float remainder: (name, shape of a sample, dtype)
            of the values in the results. The dtype `SELECTION` is int64 of `Suppression`, the number of rows first.
        remainder: Serialized ONNX model of the float remainder, from `parts` to the other outputs; empty without one.
        batch: Number of samples that such a graph fixes, else 0.

    Raises:
        RequestError: The steps do not fit.
    """

    input: str
    outputs: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    tensors: tuple[Shape, ...]
    steps: tuple[Step, ...]
    result_shape: tuple[int, ...]
    ending: str = ""
    parts: tuple[ValuePart, ...] = ()
    remainder: bytes = b""
    batch: int = 0
    floats: frozenset[int] = frozenset()
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        written: set[int] = set()
        elements = sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.inputs)
        fits(self, self.shape == (elements,) if self.inputs else len(self.shape) == 3 and max(self.shape) <= LARGEST)
        fits(self, self.dtype in ("uint8", "float32") and len(self.steps) >= 2)
        fits(self, min(self.shape) >= 1 and int(np.prod(self.shape, dtype=object)) <= ELEMENTS)
        for shape in self.tensors:
            fits(self, min(shape) >= 1 and max(shape) <= LARGEST and int(np.prod(shape, dtype=object)) <= ELEMENTS)
        fits(self, isinstance(self.steps[0], Pixels) and min(self.result_shape) >= 1)
        last = self.steps[-1]
        whole = isinstance(last, Convolution | GlobalAverage) and last.out < 0
        fits(self, (isinstance(last, Dequantize) or whole) and self.ending in ENDINGS)
        for step in self.steps:
            step.check(self, written)
        fits(self, len(written) == len(self.tensors))
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in self.parts]
        fits(self, sum(sizes) == (self.results if sizes else 0) and (bool(sizes) or not self.remainder))

    @property
    def results(self) -> int:
        """The number of float32 results of a sample."""
        return int(np.prod(self.result_shape, dtype=np.int64))

    def read(self, step: object, tensor: int, written: set[int], floats: bool = False) -> Shape:
        """Returns the shape of a tensor that a step reads.

        Args:
            step: The step, for the error message.
            tensor: Number of the tensor.
            written: Numbers of the tensors that hold values.
            floats: Whether the tensor must be float32.

        Raises:
            RequestError: No earlier step writes the tensor, or it has another dtype.
        """
        fits(step, (tensor in self.floats) == floats)
        if tensor not in written:
            raise RequestError(f"{type(step).__name__} reads tensor {tensor}, which no step before it writes")
        return self.tensors[tensor]

    def write(self, step: object, tensor: int, written: set[int], floats: bool = False) -> Shape:
        """Returns the shape of a tensor that a step writes.

        Args:
            step: The step, for the error message.
            tensor: Number of the tensor.
            written: Numbers of the tensors that hold values; the tensor is added.
            floats: Whether the tensor must be float32.

        Raises:
            RequestError: The tensor does not exist, is written already, or has another dtype.
        """
        fits(step, (tensor in self.floats) == floats)
        if tensor in written or not 0 <= tensor < len(self.tensors):
            raise RequestError(
                f"{type(step).__name__} writes tensor {tensor}, which does not exist or holds values already"
            )
        written.add(tensor)
        return self.tensors[tensor]


def split_values(results: NDArray[np.float32], parts: Sequence[ValuePart]) -> dict[str, NDArray[Any]]:
    """Returns the values of results, by name.

    Args:
        results: Results of native steps [n, ...].
        parts: The values, in order.
    """
    ends = np.cumsum([math.prod(shape) for _, shape, _ in parts]).tolist()
    pieces = np.split(results, ends[:-1], axis=1)
    return {
        name: _converted(contiguous(piece).reshape(len(results), *shape), kind)
        for (name, shape, kind), piece in zip(parts, pieces, strict=True)
    }


def _converted(array: NDArray[np.float32], kind: str) -> NDArray[Any]:
    """A value as the graph has it; of a selection the rows of all samples, with the number of the sample first."""
    if kind != SELECTION:
        return array.astype(kind, copy=False)
    rows = [sample[1 : 1 + int(sample[0, 0])].astype(np.int64) for sample in array]
    for number, own in enumerate(rows):
        own[:, 0] = number
    return np.concatenate([np.zeros((0, 3), np.int64), *rows])
