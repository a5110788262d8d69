"""Maps a region of a quantized graph: from float32 values, or the graph's image, to real values."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.kernels.images.mapping.from_graph import ImageMapping
from pipelines.kernels.images.mapping.fuse import fused
from pipelines.kernels.images.mapping.orders.choices import is_choice
from pipelines.kernels.images.mapping.qdq import refused
from pipelines.kernels.images.mapping.walk import Input, Pending
from pipelines.kernels.images.program import ImageProgram, ValuePart
from pipelines.kernels.images.steps import Dequantize, Pixels

SEARCHED = 50  # operators behind a value by which its layout is found
Shapes = Mapping[str, tuple[int, ...]]  # of a sample, by name of the value


class FailedError(RequestError):
    """Operators of a region have no native form.

    Args:
        nodes: Names of the operators' first outputs, and why.
    """

    def __init__(self, nodes: Mapping[str, RequestError]) -> None:
        super().__init__(str(next(iter(nodes.values()))))
        self.nodes = dict(nodes)


class Region(ImageMapping):
    """Mapping of a region: from float32 values, or the graph's image, to real values.

    Args:
        model: The region, or a graph.
        shapes: Shapes of values.
        image: Name of the input that is the graph's image, if one is.
        stored: Names of the inputs and outputs whose memory layout is that of tensors, [H, W, C].

    Attributes:
        orders: Of every input and output that is stored: its axes in the order in memory.
    """

    def __init__(self, model: ir.Model, shapes: Shapes, image: str = "", stored: Collection[str] = ()) -> None:
        super().__init__(model)
        self._shapes, self._offset, self._stored = shapes, 0, stored
        self._entered: list[tuple[str, tuple[int, ...]]] = []
        self.orders: dict[str, tuple[int, ...]] = {}
        self._varying = set(self.main.inputs)
        self.constants.moves = False
        for value in sorted(self.main.inputs, key=lambda value: value.name != image):
            if value.name == image:
                self._enter_image(value)
            else:
                self._enter(value)

    def _enter_image(self, value: ir.Value) -> None:
        shape = self._shapes[str(value.name)]
        if len(shape) != 3 or value.dtype not in (ir.DataType.UINT8, ir.DataType.FLOAT):
            raise RequestError(f"the input {value.name} is no image")
        self.shape, self.reals = (shape[0], shape[1], shape[2]), value.dtype == ir.DataType.FLOAT
        last = shape[2] <= 4 < shape[0]
        self.values[value] = Input(last, last)
        self._entered.append((str(value.name), shape))
        self._offset += math.prod(shape)

    def _enter(self, value: ir.Value) -> None:
        """Makes a value an input of the region, if its shape is known."""
        sample = self._shapes.get(str(value.name))
        if sample is None or len(sample) not in (1, 2, 3) or value.dtype not in (None, ir.DataType.FLOAT):
            return
        last, offset, shape = _channels_last(value, len(sample)), self._offset, (1, 1, sample[0])
        if len(sample) == 2:
            shape = (sample[0], 1, sample[1]) if last else (1, sample[1], sample[0])
        elif len(sample) == 3:
            shape = sample if last else (sample[1], sample[2], sample[0])
        self._entered.append((str(value.name), sample))
        self._offset += math.prod(sample)
        self._note_order(value, sample, last)

        @functools.cache
        def pixels(scale: float, zero: int) -> int:
            out = self._new(shape) if scale else self._new_floats(shape)
            self.steps.append(Pixels(out, (), last or value.name in self._stored, scale, zero, offset))
            return out

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            return self._clipped(pixels(float(scale), zero), low, high)

        self.values[value] = Pending(
            emit, shape, last=last, flat=len(sample) == 1, tokens=len(sample) == 2, real=lambda: pixels(0.0, 0)
        )

    def _note_order(self, value: ir.Value, sample: tuple[int, ...], last: bool) -> None:
        axes = [*range(len(sample))] if last else [*range(1, len(sample)), 0]
        if value.name in self._stored:
            self.orders[str(value.name)] = tuple(axis for axis in axes if sample[axis] > 1)

    def failures(self) -> dict[str, RequestError]:
        """Maps all operators that can be; returns the others, whose results become inputs.

        Returns:
            Error by name of the operator's first output.
        """
        failed: dict[str, RequestError] = {}
        for node in self.main:
            read = [value for value in node.inputs if value is not None and value in self._varying]
            if not read:
                continue
            self._varying.update(node.outputs)
            if node in self.absorbed or self.constants.take(node, self._dimensions(node.inputs[0])):
                continue
            if not any(map(is_data, node.outputs)):
                continue
            try:
                mapped = [value in self.values or value in self.views or self.constants.holds(value) for value in read]
                if not all(is_mapped for is_mapped, value in zip(mapped, read, strict=True) if is_data(value)):
                    raise refused(node, "reads a value of unknown shape or type")
                self._map(node)
            except RequestError as error:
                failed[str(node.outputs[0].name)] = error
                for value in node.outputs:
                    self._enter(value)
        return failed

    def program(self) -> ImageProgram:
        """Maps the whole region.

        Returns:
            The program.

        Raises:
            FailedError: Operators have no native form.
        """
        failed = self.failures()
        results: list[tuple[str, list[Dequantize]]] = []
        offset = 0
        for value in self.main.outputs if not failed else ():
            producer = value.producer()
            try:
                if value in self.views and producer is not None:
                    self._gather_output(producer, value)
                results.append((str(value.name), self._real_results(value, offset, value.name in self._stored)))
                offset += math.prod(self._shape(self.values[value]))  # type: ignore[arg-type]
            except RequestError as error:
                failed[str(producer.outputs[0].name if producer else value.name)] = error
        if failed:
            raise FailedError(failed)
        parts = tuple(self._value_part(value, value.name in self._stored) for value in self.main.outputs)
        for value in self.main.outputs:
            mapped = self.values[value]
            assert not isinstance(mapped, Input)
            self._note_order(value, self._sizes(mapped)[1:], mapped.last)
        self.steps += [step for _, steps in results for step in steps]
        tensors, steps, floats = fused(self.tensors, self.steps, self.floats)
        (name, shape), count = self._entered[0], sum(math.prod(sample) for _, sample in self._entered)
        alone = len(self._entered) == 1 and isinstance(self.values[self.main.inputs[0]], Input)
        if not alone and any(value.dtype == ir.DataType.UINT8 for value in self.main.inputs):
            raise RequestError(f"the region reads the bytes of the image and {len(self._entered) - 1} further values")
        dtype = "uint8" if alone and not self.reals else "float32"
        return ImageProgram(
            name,
            tuple(name for name, _ in results),
            dtype,
            shape if alone else (count,),
            tensors,
            steps,
            (sum(math.prod(sample) for _, sample, _ in parts),),
            parts=parts,
            floats=floats,
            inputs=() if alone else tuple(self._entered),
        )

    def _value_part(self, value: ir.Value, stored: bool = False) -> ValuePart:
        """See `ImageMapping`; the shape has the axes of size 1 that the value has in the graph."""
        name, shape, dtype = super()._value_part(value, stored)
        own = self._shapes.get(name, shape)
        return name, shape if stored or _wide(own) != _wide(shape) else own, dtype


def _wide(shape: tuple[int, ...]) -> list[int]:
    """The sizes of the axes with more than one value."""
    return [size for size in shape if size > 1]


def is_data(value: ir.Value) -> bool:
    """Returns whether a value holds data, or indices of a choice among them, not sizes or conditions.

    Args:
        value: Value of a graph with inferred types.
    """
    return value.dtype in (None, ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT8) or is_choice(value)


def _channels_last(value: ir.Value, rank: int) -> bool:
    """Whether the readers of a value take its last axis as that of the channels; [C, H, W] or tokens by default."""
    values, seen = [value], 0
    while values and seen < SEARCHED:
        for use in values.pop(0).uses():
            node, seen = use.node, seen + 1
            if node.op_type in ("MatMul", "Gemm", "LayerNormalization"):
                return True
            if node.op_type in ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize"):
                return False
            if node.op_type not in ("Reshape", "Transpose", "Concat", "Split", "Slice", "Gather"):
                values += node.outputs
    return rank == 2
