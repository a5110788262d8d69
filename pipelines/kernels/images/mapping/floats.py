"""Maps the float operators between the quantized layers of an image network."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.images.mapping.functions import Functions
from pipelines.kernels.images.mapping.layouts import Taps
from pipelines.kernels.images.mapping.qdq import data_input, evaluated, input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Input, Layer, Pending, channel_axis, is_over_pixels, layout_of
from pipelines.kernels.images.steps import (
    ChannelScale,
    FloatActivation,
    FloatCopy,
    FloatDifference,
    FloatLog,
    FloatMean,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    Gathering,
    GroupNormalization,
    Interpolation,
    Normalization,
    Operand,
    Pixels,
    ResponseGate,
    Shape,
    Step,
)
from pipelines.kernels.images.steps.activation import exact
from pipelines.rewrites.fuse_normalization import normalization, normalized_value

GRID: NDArray[np.float32] = np.linspace(-12, 12, 1025, dtype=np.float32)  # by which functions are recognized
LINEAR = ("Add", "Sub", "Mul", "Div")
ALIKE = 1e-5  # largest difference of two forms of a function


@functools.cache
def _activations() -> dict[str, NDArray[np.float32]]:
    """Results of the native activations for `GRID`, as they are defined."""
    return {
        kind: exact(kind, GRID.astype(np.float64)).astype(np.float32)
        for kind in ("gelu", "gelu_tanh", "swish", "sigmoid")
    }


def _unknown(node: ir.Node) -> Callable[[np.float32, int, int, int], int]:
    """The error of a function that is no activation."""

    def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
        raise refused(node, "is a function of float values without a native form")

    return emit


class FloatValues(Functions):
    """Mapping of operators on float tensors."""

    @abstractmethod
    def _layer_value(self, node: ir.Node, layer: Layer) -> Pending:
        """The value of a layer."""

    def _operand(self, node: ir.Node, position: int = 0) -> tuple[Operand, Bytes | Pending]:
        """(an input of a float step, its value)."""
        value = node.inputs[position]
        mapped = None if value is None else self.values.get(value)
        if isinstance(mapped, Input):
            mapped = self._float_image(node, mapped)
        if not isinstance(mapped, Bytes | Pending):
            raise refused(node, f"reads {'nothing' if value is None else value.name}, which has no native float form")
        return self._operand_of(node, mapped), mapped

    def _float_image(self, node: ir.Node, image: Input) -> Pending:
        """The input as a value of floats."""
        if not self.reals or image.fills:
            raise refused(node, "reads bytes, or a padded input, as floats")
        tensor = self._pixels(image, None, 0)

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new(self.tensors[tensor])
            self.steps.append(FloatCopy(Operand(tensor), Operand(out, float(scale), zero)))
            return self._clipped(out, low, high)

        return Pending(emit, self.tensors[tensor], last=image.last, real=lambda: tensor)

    def _operand_of(self, node: ir.Node, mapped: Bytes | Pending) -> Operand:
        if isinstance(mapped, Bytes) and mapped.real and mapped.scale is not None:
            return Operand(self._wide(mapped.tensor), float(mapped.scale), mapped.zero)
        if not isinstance(mapped, Pending) or mapped.real is None:
            raise refused(node, "reads a value that has no native float form")
        return Operand(self._floats_of(mapped))

    def _wide(self, tensor: int) -> int:
        """The tensor of the same bytes whose pixels are 16 bytes apart; those of an image of few channels are 4."""
        shape, first, key = self.tensors[tensor], self.steps[0], ("wide", tensor)
        if shape[2] > 4 or not isinstance(first, Pixels) or first.out != tensor:
            return tensor
        if key not in self._tensors_of:
            self._tensors_of[key] = out = self._new(shape)
            places = np.arange(shape[0] * shape[1]).reshape(shape[:2])
            self.steps.append(Gathering(Operand(tensor, 1.0), Operand(out, 1.0), places))
        return self._tensors_of[key]

    def _float_tensor(self, node: ir.Node, mapped: Bytes | Pending, grid: Sequence[int] | None = None) -> int:
        """The tensor of floats of a real value, for a node that reads it; its tokens in rows of another grid."""
        x, shape = self._operand_of(node, mapped), self._shape(mapped)
        if grid is not None and shape[:2] != tuple(grid):
            to = self._new_floats((*grid, shape[2]))
            self.steps.append(Gathering(x, Operand(to), np.arange(math.prod(grid)).reshape(grid)))
            return to
        if x.floats:
            return x.tensor
        to = self._new_floats(shape)
        self.steps.append(FloatCopy(x, Operand(to)))
        return to

    def _interpolated(self, node: ir.Node, mapped: Bytes | Pending, shape: Shape, rows: Taps, columns: Taps) -> None:
        """Maps weighted sums of pixels; those of bytes are bytes with the same qparams."""
        if isinstance(mapped, Bytes) and not mapped.real:
            out = self._new(shape)
            x, to = (Operand(y, float(mapped.scale or 1), mapped.zero) for y in (self._wide(mapped.tensor), out))
            self.steps.append(Interpolation(x, to, *rows, *columns))
            self.values[node.outputs[0]] = replace(mapped, tensor=out)
            return
        source = self._operand_of(node, mapped)
        self._float_value(node, shape, lambda to: Interpolation(source, to, *rows, *columns), mapped)

    def _float_product(self, node: ir.Node) -> None:
        """Maps a product or quotient of two float values, one of which may be a pixel for all."""
        (a, first), (b, second) = self._operand(node, 0), self._operand(node, 1)
        make = FloatQuotient if node.op_type == "Div" else FloatProduct
        if self._shape(first)[:2] == (1, 1) and make is FloatProduct:
            a, b, first, second = b, a, second, first
        shape, other = self._shape(first), self._shape(second)
        gate = other == (1, 1, shape[2]) and not (first.flat or second.flat) and first.last == second.last
        if not (gate or (shape == other and layout_of(first) == layout_of(second))):
            raise refused(node, "multiplies tensors of different shapes")
        self._float_value(node, shape, lambda to: make(a, b, to), first)

    def _groupnormalization(self, node: ir.Node) -> None:
        """Maps a GroupNormalization, or the InstanceNormalization of single channels."""
        value = self.values[data_input(node)]
        shape = self._shape(value) if not isinstance(value, Input) else (0, 0, 0)
        if isinstance(value, Input) or value.last or value.flat:
            raise refused(node, "is not over [n, C, H, W]")
        groups = node.attributes.get_int("num_groups", shape[2])
        gain, bias = (self._of_groups(node, position, shape[2], groups) for position in (1, 2))
        self._normalize_groups(node, value, groups, gain, bias)

    def _of_groups(self, node: ir.Node, position: int, channels: int, groups: int) -> NDArray[np.float32]:
        """float32 [channels] of a constant with a value per channel or per group."""
        value = input_at(node, position)
        constant = None if value is None else self.constants.real(value)
        if constant is not None and constant.size == groups != channels and channels % groups == 0:
            return np.repeat(np.asarray(constant, np.float32).ravel(), channels // groups)
        return self._per_channel(node, position, channels, -1)

    def _normalize_groups(
        self, node: ir.Node, mapped: Bytes | Pending, groups: int, gain: NDArray[np.float32], bias: NDArray[np.float32]
    ) -> None:
        x, shape = self._operand_of(node, mapped), self._shape(mapped)
        epsilon = float(np.float32(node.attributes.get_float("epsilon", 1e-5)))
        make = functools.partial(GroupNormalization, gain=gain, bias=bias, groups=groups, epsilon=epsilon)
        self._float_value(node, shape, lambda to: make(x, to), mapped)

    def _float_value(
        self,
        node: ir.Node,
        shape: Shape,
        add: Callable[[Operand], Step],
        mapped: Bytes | Pending,
        *,
        quantizes: bool = True,
        **layout: Any,
    ) -> None:
        """The result of a float step, with the layout of `mapped`, see `_float_pending`."""
        shared = not quantizes or len(node.outputs[0].uses()) > 1
        layout = {"last": mapped.last, "flat": mapped.flat, "tokens": mapped.tokens} | layout
        self.values[node.outputs[0]] = self._float_pending(shape, add, shared, **layout)

    def _float_pending(self, shape: Shape, add: Callable[[Operand], Step], shared: bool, **layout: Any) -> Pending:
        """A value that a step computes; `add` makes the step that writes an operand.

        shared: Whether others read it as floats, or the step cannot write bytes.
        """

        @functools.cache
        def real() -> int:
            out = self._new_floats(shape)
            self.steps.append(add(Operand(out)))
            return out

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            x = Operand(real()) if shared else None
            to = Operand(self._new(shape), float(scale), zero)
            self.steps.append(add(to) if x is None else FloatCopy(x, to))
            return self._clipped(to.tensor, low, high)

        return Pending(emit, shape, real=real, **layout)

    def _elements(self, mapped: Bytes | Pending, layout: tuple[bool, bool, bool] | None = None) -> NDArray[np.int64]:
        """The elements of a sample [height, width, channels] in the order of a layout, else of that of the value."""
        shape = self._shape(mapped)
        index = np.arange(math.prod(shape)).reshape(shape)
        last = (layout or layout_of(mapped))[0]
        return (index if last else index.transpose(2, 0, 1)).reshape(self._sizes(mapped, layout))

    def _sizes(self, mapped: Bytes | Pending, layout: tuple[bool, bool, bool] | None = None) -> tuple[int, ...]:
        """The shape of a sample in the graph, in a layout, else in that of the value."""
        height, width, channels = self._shape(mapped)
        last, flat, tokens = layout or layout_of(mapped)
        if flat:
            return 1, height * width * channels
        pixels = (height * width,) if tokens else (height, width)
        return (1, *pixels, channels) if last else (1, channels, *pixels)

    def _layernormalization(self, node: ir.Node) -> None:
        x, mapped = self._operand(node)
        shape, channels = self._shape(mapped), self._shape(mapped)[2]
        rank = 2 if mapped.flat else 3 if mapped.tokens else 4
        over = node.attributes.get_int("axis", -1) % rank == rank - 1
        if not over or not (mapped.last or (mapped.flat and shape[:2] == (1, 1))) or len(node.outputs) > 1:
            raise refused(node, "is not over the channels of each pixel")
        gain, bias = (self._per_channel(node, position, channels, -1) for position in (1, 2))
        epsilon = float(np.float32(node.attributes.get_float("epsilon", 1e-5)))
        root = node.op_type == "RMSNormalization"
        make = functools.partial(Normalization, gain=gain, bias=None if root else bias, epsilon=epsilon)
        self._float_value(node, shape, lambda to: make(x, to), mapped)

    def _written_out(self, mean: ir.Node) -> bool:
        """Maps the normalization of each pixel that a mean and operators behind it are; False if they are none."""
        value = normalized_value(mean)
        mapped = None if value is None else self.values.get(value)
        if not isinstance(mapped, Bytes | Pending) or mapped.flat or (mapped.tokens and not mapped.last):
            return False
        shape, pixels = self._shape(mapped), [None] if mapped.tokens else [None, None]
        sizes = [None, *pixels, shape[2]] if mapped.last else [None, shape[2], *pixels]
        norm = normalization(self.model, mean, sizes)
        if norm is None or (norm.axis == 1) == mapped.last or (norm.bias.any() and not norm.centered):
            return False
        x, last = self._operand_of(mean, mapped), norm.nodes[-1]
        make = functools.partial(
            Normalization, gain=norm.gain, bias=norm.bias if norm.centered else None, epsilon=norm.epsilon
        )
        self._float_value(last, shape, lambda to: make(x, to), mapped)
        self.absorbed.update(norm.nodes)
        return True

    def _response_gate(self, node: ir.Node) -> None:
        """Maps the roots of sums of squares of all pixels, divided by their mean over the channels (ConvNeXtV2)."""
        x, mapped = self._operand(node)
        roots, channels = node.outputs[0], self._shape(mapped)[2]
        means = [mean for mean in roots.consumers() if query.is_op(mean, "ReduceMean")]
        plus = query.sole_user(means[0].outputs[0]) if len(means) == 1 else None
        ratio = query.sole_user(plus.outputs[0]) if plus is not None and query.is_op(plus, "Add") else None
        scalars = map(query.scalar, plus.inputs if plus is not None else ())
        epsilons = [scalar for scalar in scalars if scalar is not None]
        matches = ratio is not None and query.is_op(ratio, "Div") and ratio.inputs[0] is roots and len(epsilons) == 1
        if not matches or not is_over_pixels(node, mapped) or not node.attributes.get_int("keepdims", 1):
            raise refused(node, "is not over all pixels, or no part of a global response normalization")
        axes, rank = query.integers(means[0], "axes", 1) or [], 3 if mapped.tokens else 4
        if [axis % rank for axis in axes] != [channel_axis(mapped) % rank] or len(roots.consumers()) != 2:
            raise refused(node, "is no part of a global response normalization")
        assert plus is not None and ratio is not None
        self._float_value(ratio, (1, 1, channels), lambda to: ResponseGate(x, to, epsilons[0]), mapped, quantizes=False)
        self.absorbed.update((means[0], plus, ratio))

    def _float_add(self, node: ir.Node) -> None:
        """Maps a sum or difference of two float values."""
        (a, first), (b, second) = self._operand(node, 0), self._operand(node, 1)
        shape, other = self._shape(first), self._shape(second)
        if layout_of(first) != layout_of(second) or math.prod(shape) != math.prod(other) or shape[2] != other[2]:
            raise refused(node, "adds tensors of different shapes")
        if shape != other and not first.tokens:
            raise refused(node, "adds tensors of different shapes")
        if shape != other:  # as many tokens in rows of another length
            b = Operand(self._float_tensor(node, second, shape[:2]))
        make = FloatDifference if node.op_type == "Sub" else FloatSum
        self._float_value(node, shape, lambda to: make(a, b, to), first)

    def _float_mean(self, node: ir.Node, flat: bool) -> None:
        x, mapped = self._operand(node)
        shape = (1, 1, self._shape(mapped)[2])
        self._float_value(
            node,
            shape,
            lambda to: FloatMean(x, to),
            mapped,
            quantizes=False,
            flat=flat,
            tokens=mapped.tokens and not flat,
        )

    def _function(self, node: ir.Node) -> None:
        """Maps a function of a float value; one of a single byte is a table."""
        positions = [i for i, value in enumerate(node.inputs) if value is not None and value in self.values]
        values = [self.values[node.inputs[position]] for position in positions]  # type: ignore[index]
        alone = len(positions) == 1
        linear = alone and (node.op_type == "Neg" or (len(node.inputs) == 2 and node.op_type in LINEAR))
        if alone and self._of_parts(node, positions[0]):
            return
        if linear and self._has_pixels(node, 1 - positions[0]):
            self._affine(node, positions[0])
            return
        if len(values) == 2 and node.op_type == "Sub" and all(isinstance(mapped, Bytes) for mapped in values):
            self._float_add(node)
            return
        if not any(
            isinstance(mapped, Pending) and mapped.curve is None and (mapped.real or mapped.trace) for mapped in values
        ):
            super()._function(node)
            return
        trace = self._trace(node)
        if trace is not None and self._activated(node, *trace):
            return
        reals = all(isinstance(mapped, Bytes) or (isinstance(mapped, Pending) and mapped.real) for mapped in values)
        if len(values) == 2 and node.op_type in ("Add", "Sub", "Mul", "Div") and reals:
            (self._float_product if node.op_type in ("Mul", "Div") else self._float_add)(node)
            self._keep_trace(node, trace)
        elif node.op_type == "Log" and reals:
            x, mapped = self._operand(node)
            self._float_value(node, self._shape(mapped), lambda to: FloatLog(x, to), mapped)
            self._keep_trace(node, trace)
        elif linear and isinstance(values[0], Pending) and values[0].real is not None:
            self._affine(node, positions[0])
            self._keep_trace(node, trace)
        elif trace is not None:
            unfit: dict[str, Any] = {"result": None, "layer": None, "real": None, "joined": None}
            self.values[node.outputs[0]] = replace(trace[0], emit=_unknown(node), trace=trace, **unfit)
        else:
            raise refused(node, "is a function of float values without a native form")

    def _of_parts(self, node: ir.Node, position: int) -> bool:
        """Maps a function of the concatenation of bytes to that of each part; False for another value."""
        value = node.inputs[position]
        assert value is not None
        mapped = self.values[value]
        if not isinstance(mapped, Pending) or mapped.joined is None or not mapped.unbounded:
            return False
        constants = [self.constants.real(other) for other in node.inputs if other is not None and other is not value]
        if any(constant is None or constant.size != 1 for constant in constants):
            return False
        made, layout = list[Bytes | Pending](), dict(zip(("last", "flat", "tokens"), layout_of(mapped), strict=True))
        for part in mapped.joined.parts:
            nested = isinstance(part, Pending) and part.joined is not None
            if isinstance(part, Pending) and part.curve is None and not nested:
                return False
            try:
                self.values[value] = replace(part, **layout)  # type: ignore[arg-type]
                self._function(node)
            finally:
                self.values[value] = mapped
            result = self.values.pop(node.outputs[0])
            assert isinstance(result, Bytes | Pending)
            made.append(result)
        self.values[node.outputs[0]] = self._joined(node, made, mapped.joined.stacks)
        return True

    def _trace(self, node: ir.Node) -> tuple[Pending, NDArray[np.float32]] | None:
        """(the float value that a node is a function of, the function's results for `GRID`)."""
        values = [None if value is None else self.values.get(value) for value in node.inputs]
        varying = [mapped for mapped in values if mapped is not None]
        pending = [mapped for mapped in varying if isinstance(mapped, Pending) and mapped.curve is None]
        traces = [mapped.trace or (mapped, GRID) for mapped in pending if mapped.unbounded]
        if len(traces) != len(varying) or len({id(source) for source, _ in traces}) != 1:
            return None
        results = iter([result for _, result in traces])
        pairs = zip(values, node.inputs, strict=True)
        arguments = [value if mapped is None else next(results) for mapped, value in pairs]
        constants = [self.constants.real(argument) for argument in arguments if isinstance(argument, ir.Value)]
        if any(constant is None or constant.size != 1 for constant in constants):
            return None
        return traces[0][0], evaluated(self.model, node, arguments, 1, -1).reshape(GRID.shape)

    def _activated(self, node: ir.Node, source: Pending, results: NDArray[np.float32]) -> bool:
        """Maps a node to the activation that has these results; False if there is none."""
        kinds = [kind for kind, expected in _activations().items() if np.abs(results - expected).max() < ALIKE]
        if not kinds:
            return False
        x = self._operand_of(node, source)
        self._float_value(node, self._shape(source), lambda to: FloatActivation(x, to, kinds[0]), source)
        if kinds[0] == "sigmoid":  # of which swish is a product
            self._keep_trace(node, (source, results))
        return True

    def _keep_trace(self, node: ir.Node, trace: tuple[Pending, NDArray[np.float32]] | None) -> None:
        """Keeps of which value the result of a node is a function, for functions of several operators."""
        made = self.values[node.outputs[0]]
        assert isinstance(made, Pending)
        self.values[node.outputs[0]] = replace(made, trace=trace)

    def _affine(self, node: ir.Node, position: int) -> None:
        """Maps the negative of a float value, or a sum or product with a constant per channel, or pixel and channel."""
        value = self.values[node.inputs[position]]  # type: ignore[index]
        assert isinstance(value, Bytes | Pending)
        shape = self._shape(value)
        minus = np.full((1, shape[2]), -1, np.float32)
        constant = minus if node.op_type == "Neg" else self._per_element(node, 1 - position, value)
        gain, bias = self._gain_and_bias(node, position, constant)
        if isinstance(value, Pending) and len(gain) == 1:
            single = len(node.inputs[position].uses()) == 1  # type: ignore[union-attr]
            layer = value.layer if value.unbounded and single else None
            folded = None if layer is None else layer.scaled(gain[0], bias[0])
            if folded is not None:
                mapped = self._layer_value(node, folded)
                layout: dict[str, Any] = {"last": value.last, "flat": value.flat, "tokens": value.tokens}
                self.values[node.outputs[0]] = replace(mapped, **layout, result=mapped.result if value.result else None)
                return
        x, _ = self._operand(node, position)
        self._float_value(node, shape, lambda to: ChannelScale(x, to, gain, bias), value)

    @staticmethod
    def _gain_and_bias(
        node: ir.Node, position: int, constant: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factor of, and summand to, an input of a sum or product with a constant."""
        ones, zeros = np.ones_like(constant), np.zeros_like(constant)
        if node.op_type in ("Mul", "Neg") or (node.op_type == "Div" and position == 0):
            gain, bias = (1 / constant if node.op_type == "Div" else constant), zeros
        elif node.op_type == "Div":
            raise refused(node, "divides by a float value")
        else:
            minus = node.op_type == "Sub"
            gain, bias = -ones if minus and position == 1 else ones, -constant if minus and position == 0 else constant
        return np.ascontiguousarray(gain, np.float32), np.ascontiguousarray(bias, np.float32)

    def _per_element(self, node: ir.Node, position: int, mapped: Bytes | Pending) -> NDArray[np.float32]:
        """float32 [pixels, channels] of a constant, [1, channels] where it is the same for all pixels."""
        value, shape, axis = input_at(node, position), self._shape(mapped), channel_axis(mapped)
        constant = None if value is None else self.constants.real(value, 1)
        if constant is None or constant.dtype != np.float32:
            raise refused(node, "has an argument that is not constant")
        if constant.size == 1 or (constant.ndim >= -axis and constant.shape[axis] == constant.size == shape[2]):
            return np.broadcast_to(constant.ravel(), (1, shape[2]))
        elements = self._elements(mapped)
        try:
            values = np.broadcast_to(constant, elements.shape)
        except ValueError as error:
            raise refused(node, "has a constant of another shape than its input") from error
        flat = np.empty(elements.size, np.float32)
        flat[elements.ravel()] = values.ravel()
        rows = flat.reshape(-1, shape[2])
        return rows[:1] if (rows == rows[:1]).all() else rows

    def _by_constant(self, node: ir.Node) -> bool:
        """As its base; a sum or product with a constant that differs between pixels is one of floats."""
        constant = next((i for i, value in enumerate(node.inputs) if query.dequantized(value) is not None), None)
        if constant is None or not self._has_pixels(node, constant):
            return super()._by_constant(node)
        self._affine(node, 1 - constant)
        return True

    def _has_pixels(self, node: ir.Node, position: int) -> bool:
        """Whether a constant has several values along another axis than that of the other input's channels."""
        value, other = input_at(node, position), node.inputs[1 - position]
        mapped = None if other is None else self.values.get(other)
        constant = None if value is None else self.constants.real(value)
        if constant is None or not isinstance(mapped, Bytes | Pending):
            return False
        sizes = dict(enumerate(constant.shape, -constant.ndim))
        return any(size > 1 for axis, size in sizes.items() if axis != channel_axis(mapped))

    def _per_channel(self, node: ir.Node, position: int, channels: int, axis: int) -> NDArray[np.float32]:
        """float32 [channels] of a constant with one value, or one per channel; zeros for an absent input."""
        value = input_at(node, position)
        if value is None:
            return np.zeros(channels, np.float32)
        constant = self.constants.real(value)
        fits = constant is not None and constant.ndim >= -axis and constant.shape[axis] == constant.size == channels
        if constant is None or not (constant.size == 1 or fits):
            raise refused(node, "has an argument that is neither constant nor one value per channel")
        return np.ascontiguousarray(np.broadcast_to(np.asarray(constant, np.float32).ravel(), channels))
