"""Mapping of functions of single values in quantized image networks: bounds, products and tables."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.layouts import Layouts
from pipelines.kernels.images.mapping.qdq import (
    data_input,
    evaluated,
    input_at,
    is_integer,
    per_channel,
    quantized,
    refused,
)
from pipelines.kernels.images.mapping.walk import Bytes, Pending, channel_axis, layout_of
from pipelines.kernels.images.steps import FloatLookup, Lookup, Product
from pipelines.kernels.images.steps.elementwise import product, quantized_sum

FUNCTIONS = {
    *("HardSwish", "HardSigmoid", "Sigmoid", "LeakyRelu", "PRelu", "ThresholdedRelu", "Elu", "Celu", "Selu", "Tanh"),
    *("Softplus", "Softsign", "Gelu", "Mish", "Swish", "Erf", "Exp", "Log", "Sqrt", "Pow", "Abs", "Neg"),
    *("Reciprocal", "Add", "Sub", "Mul", "Div", "Min", "Max", "Relu", "Clip"),
}


class Functions(Layouts):
    """Mapping of operators on single values."""

    @abstractmethod
    def _float_product(self, node: ir.Node) -> None:
        """Maps a product of two float values."""

    @abstractmethod
    def _affine(self, node: ir.Node, position: int) -> None:
        """Maps a sum or product of a float value with a constant."""

    def _relu(self, node: ir.Node) -> None:
        self._bounded(node, 0.0, np.inf)

    def _clip(self, node: ir.Node) -> None:
        low, high = (query.scalar(input_at(node, position)) for position in (1, 2))
        if any(input_at(node, position) is not None and bound is None for position, bound in ((1, low), (2, high))):
            raise refused(node, "has bounds that are not constant")
        self._bounded(node, -np.inf if low is None else low, np.inf if high is None else high)

    def _bounded(self, node: ir.Node, low: float, high: float) -> None:
        mapped = self.values.get(data_input(node))
        if not isinstance(mapped, Pending):
            self._function(node)
            return
        clipped = (min(max(bound, low), high) for bound in (mapped.low, mapped.high))
        least, most = clipped
        self.values[node.outputs[0]] = replace(mapped, low=least, high=most)

    def _mul(self, node: ir.Node) -> None:
        """Maps a product: a table where both factors are functions of one tensor, such as x sigmoid(x).

        Otherwise a `Product` of two tensors of one shape (attention maps) or of a tensor with one pixel
        (squeeze-and-excitation).
        """
        if self._by_constant(node):
            return
        if any(isinstance(self.values.get(value), Pending) for value in node.inputs if value is not None):
            self._float_product(node)
            return
        a, b = self._read(node, 0), self._read(node, 1)
        if self.tensors[a.tensor][:2] == (1, 1):
            a, b = b, a
        (base, of_a), (other, of_b) = (self._function_of(factor.tensor) for factor in (a, b))
        same = base == other and layout_of(a) == layout_of(b)
        alike = self.tensors[a.tensor] == self.tensors[b.tensor] and layout_of(a) == layout_of(b)
        gated = not (a.flat or b.flat) and self.tensors[b.tensor] == (1, 1, self.tensors[a.tensor][2])
        if not (same or alike or gated):
            raise refused(node, "multiplies tensors of different shapes, neither of which is a pixel")
        assert a.scale is not None
        assert b.scale is not None
        a_scale, b_scale = a.scale, b.scale

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            if same:
                first, second = of_a.astype(np.int32) - a.zero, of_b.astype(np.int32) - b.zero
                return self._lookup(base, product(first, second, [a_scale, b_scale, scale], zero, low, high))
            out = self._new(self.tensors[a.tensor])
            of = (a.zero, b.zero, float(a_scale), float(b_scale), float(scale), zero, low, high)
            self.steps.append(Product(a.tensor, b.tensor, out, *of))
            return out

        self._float_product(node)
        self._emits(node, emit)

    def _emits(self, node: ir.Node, emit: Callable[[np.float32, int, int, int], int]) -> None:
        """Sets the step that quantizes a value that was mapped as floats."""
        mapped = self.values[node.outputs[0]]
        assert isinstance(mapped, Pending)
        self.values[node.outputs[0]] = replace(mapped, emit=emit)

    def _function_of(self, tensor: int) -> tuple[int, Array]:
        """(the tensor that determines this one byte by byte, the function as a table)."""
        table: Array = np.arange(256, dtype=np.uint8)
        tables = {step.out: step for step in self.steps if isinstance(step, Lookup)}
        while tensor in tables:
            table, tensor = table[tables[tensor].table], tables[tensor].x
        return tensor, table

    def _is_function(self, node: ir.Node) -> bool:
        """Whether a sum or product is a function of one value: it has a constant, or a function not yet quantized.

        One of inputs of 8 bits is not: onnxruntime computes it with integers.
        """
        if node.op_type not in ("Add", "Mul") or is_integer(node):
            return False
        inputs = [None if value is None else self.values.get(value) for value in node.inputs]
        return any(arg is None or (isinstance(arg, Pending) and bool(arg.curve or arg.trace)) for arg in inputs)

    def _curve(self, node: ir.Node, value: ir.Value) -> tuple[int, Array, Bytes | Pending]:
        """(the tensor that determines a value byte by byte, the float32 of each byte, the value)."""
        mapped = self.values[value]
        if isinstance(mapped, Pending) and mapped.curve is not None:
            base, values = mapped.curve
            return base, np.clip(values, np.float32(mapped.low), np.float32(mapped.high)), mapped
        if not isinstance(mapped, Bytes) or not mapped.real or mapped.scale is None:
            raise refused(node, "reads a float value")
        base, table = self._function_of(mapped.tensor)
        return base, (table.astype(np.float32) - np.float32(mapped.zero)) * mapped.scale, mapped

    def _function(self, node: ir.Node) -> None:
        """Maps a function of single values between two quantizations to a table, which onnxruntime computes."""
        curves = [self._curve(node, value) for value in node.inputs if value is not None and value in self.values]
        (base, _, mapped), shapes = curves[0], {(curve[0], *layout_of(curve[2])) for curve in curves}
        if len(shapes) != 1:
            raise refused(node, "is a function of several tensors")
        varying = iter([curve[1] for curve in curves])
        arguments = [next(varying) if value is not None and value in self.values else value for value in node.inputs]
        axis = channel_axis(mapped)
        values = evaluated(self.model, node, arguments, self.tensors[base][2], axis)

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            return self._lookup(base, np.clip(quantized(values, scale, zero), low, high).astype(np.uint8))

        layout: dict[str, Any] = {"last": mapped.last, "flat": mapped.flat, "tokens": mapped.tokens}
        shape = self.tensors[base]
        if values.ndim != 1:
            self.values[node.outputs[0]] = Pending(emit, shape, **layout)
            if node.op_type in ("Add", "Mul", "Sub") and isinstance(mapped, Bytes):
                self._affine(node, 0 if node.inputs[0] in self.values else 1)
                self._emits(node, emit)
            return

        @functools.cache
        def real() -> int:
            out = self._new_floats(shape)
            self.steps.append(FloatLookup(base, out, np.asarray(values, np.float32)))
            return out

        self.values[node.outputs[0]] = Pending(emit, shape, **layout, curve=(base, values), real=real)

    def _by_constant(self, node: ir.Node) -> bool:
        """Maps a sum or product with a constant of 8 bits to a table; False without one."""
        position = next((i for i, value in enumerate(node.inputs) if query.dequantized(value) is not None), None)
        if position is None:
            return False
        a = self._read(node, 1 - position)
        height, width, channels = self.tensors[a.tensor]
        b, b_scale, b_zero = per_channel(node, position, channels, channel_axis(a))
        base, table = self._function_of(a.tensor)
        assert a.scale is not None
        a_scale, a_zero = a.scale, a.zero
        # onnxruntime adds a value that it repeats along the last axis to the tensor, in whichever order they are
        repeated = b.size == 1 or not (a.last or a.flat or height == width == 1)
        swapped = position == 0 and not repeated

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            if node.op_type == "Mul":
                factors = table.astype(np.int32) - a_zero, b.astype(np.int32) - b_zero
                return self._lookup(base, product(*factors, [a_scale, b_scale, scale], zero, low, high))
            if swapped:
                total = quantized_sum((b_scale, a_scale), (b_zero, a_zero), scale, zero, low, high)
                return self._lookup(base, total.of(b, table))
            total = quantized_sum((a_scale, b_scale), (a_zero, b_zero), scale, zero, low, high)
            return self._lookup(base, total.of(table, b))

        self._affine(node, 1 - position)
        self._emits(node, emit)
        return True
