"""Maps a quantized image network's ONNX graph to an `ImageProgram`, by structure.

Supported are QDQ around Conv, Gemm, MatMul, Add, Mul, pools and Concat, with Relu, Clip or any other elementwise
function between, and layout operators: Flatten, Reshape and Transpose, also as a channel shuffle, Split, Slice and
Resize. The float remainder is a `Rest`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.functions import FUNCTIONS
from pipelines.kernels.images.mapping.fuse import drop_unread, fuse_floats, fuse_sums, renumbered
from pipelines.kernels.images.mapping.qdq import (
    data_input,
    input_at,
    int8_weight,
    int32_bias,
    refused,
)
from pipelines.kernels.images.mapping.rest import Rest
from pipelines.kernels.images.mapping.views import ORDERS, View, Views
from pipelines.kernels.images.mapping.walk import Bytes, Input, Layer, Pending, layout_of
from pipelines.kernels.images.operators import ceil_mode_pads, windows
from pipelines.kernels.images.program import ENDINGS, ImageProgram
from pipelines.kernels.images.steps import (
    Addition,
    AveragePool,
    Convolution,
    Dequantize,
    FloatMean,
    FloatSum,
    GlobalAverage,
    MaxPool,
    Operand,
    Shape,
)
from pipelines.kernels.images.steps.elementwise import quantized_sum
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.reshape_chains import ReshapeChains

NOMINAL = 224  # pixels of a free height or width where none is given
LEAST = 100  # times as many weights as a rest in float holds are int8


def image_program(model: ir.Model) -> ImageProgram:
    """Maps a quantized image network.

    Args:
        model: QDQ model, an image network [n, C, H, W] or [n, H, W, C] of fixed sizes, see `fix_sizes`.

    Returns:
        The program.

    Raises:
        RequestError: The graph cannot be mapped; the message names the operator.
    """
    return _Mapping(model).program()


def fix_sizes(model: ir.Model, sizes: Sequence[int] = ()) -> bool:
    """Fixes the free height and width of an image network, in place, and computes what depends on them alone.

    Args:
        model: QDQ model.
        sizes: Sizes of the input beside its first axis; `NOMINAL` where they are free if there are none.

    Returns:
        Whether sizes were free.
    """
    shape = query.dimensions(model.graph.inputs[0]) if len(model.graph.inputs) == 1 else None
    if shape is None or len(shape) != 4 or shape[1:].count(None) not in (1, 2):
        return False
    fixed = sizes or [size or NOMINAL for size in shape[1:]]
    model.graph.inputs[0].shape = ir.Shape([shape[0], *fixed])
    for value in (value for node in model.graph for value in node.outputs):
        value.shape = None
    rewrite(model, [FoldConstants(), ReshapeChains()])
    return True


class _Mapping(Views):
    """The walk that makes a program."""

    def program(self) -> ImageProgram:
        """See `image_program`."""
        if len(self.main.inputs) != 1 or self.main.inputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32):
            shapes = [f"{value.name} {query.symbolic_shape(value) or 'of unknown shape'}" for value in self.main.inputs]
            count = "inputs" if len(shapes) > 1 else "input"
            raise RequestError(
                f"found the {count} {', '.join(shapes) or 'none'}; the native engine runs ONNX files of image "
                "networks, with one input [n, C, H, W]. Text encoders run natively once imported with: zoo import"
            )
        (self.input,), found = self.main.inputs, self.main.outputs[0]
        shape = query.dimensions(self.input)
        if shape is None or len(shape) != 4 or None in shape[1:]:
            raise RequestError(f"the input {self.input.name} has shape {shape}; expected [n, C, H, W] of fixed sizes")
        self.shape: Shape = (int(shape[1] or 0), int(shape[2] or 0), int(shape[3] or 0))
        if self.input.dtype not in (ir.DataType.UINT8, ir.DataType.FLOAT):
            raise RequestError(f"the input {self.input.name} is {self.input.dtype}; expected uint8 or float32")
        self.reals = self.input.dtype == ir.DataType.FLOAT
        last = self.shape[2] <= 4 < self.shape[0]  # as few channels as images have
        self.values[self.input] = Input(last, last)
        ending, rest = None, Rest(self.model)
        for node in self.main:
            if rest.reads(node):
                rest.take(node)
            elif rest.is_shape(node):
                continue
            elif self._is_view(node) or any(value in self.values for value in node.inputs if value is not None):
                if node.op_type in ENDINGS and node.outputs[0] is found and len(self.main.outputs) == 1:
                    ending = node
                    break
                try:
                    self._map(node)
                except RequestError as error:
                    rest.take(node, error)
                if any(value in self.views for value in node.outputs):
                    rest.defer(node)
        parts = self._parts(rest) if rest or len(self.main.outputs) > 1 else ()
        if parts:
            result_shape: tuple[int, ...] = (sum(int(np.prod(shape)) for _, shape in parts),)
        else:
            result_shape = self._end(ending.inputs[0] if ending is not None else found, ending)
        drop_unread(self.steps)
        fuse_sums(self.steps)
        fuse_floats(self.steps)
        tensors, steps, floats = renumbered(self.tensors, self.steps, self.floats)
        return ImageProgram(
            str(self.input.name),
            tuple(str(each.name) for each in self.main.outputs),
            "float32" if self.reals else "uint8",
            self.shape,
            tensors,
            steps,
            result_shape,
            "" if ending is None else ending.op_type,
            parts,
            rest.model(parts) if parts else b"",
            int(shape[0] or 0) if parts else 0,
            floats,
        )

    def _map(self, node: ir.Node) -> None:
        if node.domain not in ("", "ai.onnx"):
            raise refused(node, f"of {node.domain} has no native form")
        if self._is_view(node):
            self._viewed(node)
            return
        try:
            self._by_rule(node)
        except RequestError as error:
            value = node.inputs[0] if node.inputs else None
            known = value is not None and isinstance(self.values.get(value), Bytes | Pending)
            try:
                if node.op_type == "Concat":
                    self._token_concat(node)
                elif node.op_type in ORDERS and known:
                    self._viewed(node, error)
                else:
                    raise
            except RequestError:
                raise error from None

    def _by_rule(self, node: ir.Node) -> None:
        rule = RULES.get(node.op_type)
        try:
            if rule is not None and not self._is_function(node):
                rule(self, node)
            elif node.op_type in FUNCTIONS:
                self._function(node)
            else:
                raise refused(node, "has no native form")
        except RequestError as error:
            if query.label(node) in str(error):
                raise
            raise refused(node, str(error)) from error

    def _end(self, value: ir.Value | None, ending: ir.Node | None) -> tuple[int, ...]:
        """Adds the last step; returns the shape of the results of a sample."""
        found = None if value is None else self.values.get(value)
        if isinstance(found, Pending) and found.result is not None and found.unbounded:
            found.result()
            shape = self._elements(found).shape[1:]
        elif value is not None and self._is_dequantized(value):
            shape = self._result(value)
        else:
            view = None if value is None else self.views.get(value)
            if isinstance(view, View) and view.reason is not None:
                raise view.reason
            raise RequestError(
                f"the output {self.main.outputs[0].name} is neither the result of a layer nor a dequantized tensor"
            )
        softmax = ending is not None and ending.op_type == "Softmax"
        if ending is not None and softmax and (len(shape) != 1 or ending.attributes.get_int("axis", -1) not in (1, -1)):
            raise refused(ending, "is not over the classes")
        return shape

    def _parts(self, rest: Rest) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns the values that the float remainder reads, and adds the steps that end the program with them.

        Raises RequestError if the remainder would hold layers itself.
        """
        while odd := [each for each in rest.inputs(self.values) if not self._is_dequantized(each)]:
            producer = odd[0].producer()
            if producer is None:
                raise rest.reason or RequestError(f"the output {odd[0].name} is not a dequantized tensor")
            rest.take(producer)
        weights = sum(step.weight.size for step in self.steps if isinstance(step, Convolution))
        if rest and rest.weights() * LEAST > weights:
            raise rest.reason or RequestError("the outputs are results of float layers")
        return tuple((str(value.name), self._result(value)) for value in rest.inputs(self.values))

    def _is_dequantized(self, value: ir.Value) -> bool:
        found = self.values.get(value)
        return isinstance(found, Bytes) and found.real and found.scale is not None

    def _result(self, value: ir.Value) -> tuple[int, ...]:
        """Adds the step that dequantizes a value to results; returns the shape of the results of a sample."""
        found = self.values[value]
        assert isinstance(found, Bytes) and found.scale is not None
        self.steps.append(Dequantize(found.tensor, float(found.scale), found.zero, found.last))
        return self._elements(found).shape[1:]

    # ---------------------------------------------------------------------------------------------------------- layers

    def _layer(
        self, node: ir.Node, x: Bytes, weight: Array, w_scale: Array, bias: ir.Value | None, **geometry: Any
    ) -> None:
        """A convolution: weight int8 [O, kh, kw, I]."""
        assert x.scale is not None
        scales = x.scale * np.broadcast_to(w_scale.astype(np.float32).ravel(), len(weight))
        biases = int32_bias(node, bias, scales, len(weight))
        biases -= x.zero * weight.astype(np.int64).sum(axis=(1, 2, 3))
        if np.abs(biases).max() >= 2**31:
            raise refused(node, "can overflow 32 bits")
        self.values[node.outputs[0]] = self._layer_value(node, Layer(x, weight, scales, biases, geometry))

    def _layer_value(self, node: ir.Node, layer: Layer) -> Pending:
        """The value of a layer."""
        x, weight, scales, biases, geometry = layer.x, layer.weight, layer.scales, layer.biases, layer.geometry
        strides, pads = geometry.get("strides", (1, 1)), geometry.get("pads", (0, 0, 0, 0))
        kernel = weight.shape[1:3]
        counts = windows(self.tensors[x.tensor], kernel, strides, pads, geometry.get("dilations", (1, 1)))
        if min(counts) < 1:
            raise refused(node, "has a window larger than its input")
        linear = node.op_type != "Conv"
        flat, last = linear and x.flat, linear and x.last and not x.flat

        shape = (*counts, len(weight))
        depthwise = weight.shape[3] == 1 < geometry.get("groups", 1)

        def step(out: int, scale: Array, zero: int = 0, low: int = 0, high: int = 255, *, floats: bool = False) -> None:
            bounds: dict[str, Any] = {"fill": x.zero, "zero": zero, "low": low, "high": high, "floats": floats}
            self.steps.append(Convolution(x.tensor, out, weight, biases.astype(np.int32), scale, **geometry, **bounds))

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new(shape)
            step(out, scales / scale, zero, low, high)
            return out

        def result() -> None:
            if not flat and counts != (1, 1):
                raise refused(node, "computes the output and has several pixels")
            step(-1, scales)

        @functools.cache
        def real() -> int:
            out = self._new_floats(shape)
            step(out, scales, floats=True)
            return out

        return Pending(
            emit,
            shape,
            last=last,
            flat=flat,
            tokens=linear and x.tokens,
            layer=layer,
            result=result,
            real=None if depthwise else real,
        )

    def _conv(self, node: ir.Node) -> None:
        constant = query.constant(input_at(node, 1))
        depthwise = constant is not None and constant.ndim == 4 and constant.shape[1] == 1 < len(constant)
        if constant is not None and depthwise and node.attributes.get_int("group", 1) == len(constant):
            self._float_depthwise(node, constant)
            return
        x = self._read(node)
        weight, scale = int8_weight(node, 0)
        if True in layout_of(x) or weight.ndim != 4:
            raise refused(node, "is not over [n, C, H, W]")
        strides, pads, dilations = self._geometry(node)
        self._layer(
            node,
            x,
            np.ascontiguousarray(weight.transpose(0, 2, 3, 1)),
            scale,
            input_at(node, 2),
            strides=strides,
            pads=pads,
            dilations=dilations,
            groups=node.attributes.get_int("group", 1),
        )

    def _gemm(self, node: ir.Node) -> None:
        attributes = node.attributes
        if (
            any(attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
            or attributes.get_int("transA", 0) != 0
        ):
            raise refused(node, "has an alpha or beta, or a transposed input")
        turned = attributes.get_int("transB", 0) == 1
        weight, scale = int8_weight(node, 0 if turned else 1)
        self._connected(node, weight if turned else weight.T, scale, input_at(node, 2))

    def _matmul(self, node: ir.Node) -> None:
        weight, scale = int8_weight(node, 1)
        self._connected(node, weight.T, scale, None)

    def _connected(self, node: ir.Node, weight: Array, scale: Array, bias: ir.Value | None) -> None:
        """weight: int8 [O, K]."""
        x = self._read(node)
        height, width, channels = self.tensors[x.tensor]
        if x.last and not x.flat and node.op_type == "MatMul" and weight.shape[1:] == (channels,):  # of each pixel
            self._layer(node, x, np.ascontiguousarray(weight)[:, None, None], scale, bias)
            return
        if not x.flat or weight.ndim != 2 or weight.shape[1] != height * width * channels:
            raise refused(node, "does not read a whole flattened tensor")
        cut = weight.reshape(len(weight), height, width, channels) if x.last else None
        if cut is None:
            cut = weight.reshape(len(weight), channels, height, width).transpose(0, 2, 3, 1)
        self._layer(node, x, np.ascontiguousarray(cut), scale, bias)

    def _add(self, node: ir.Node) -> None:
        if self._by_constant(node):
            return
        values = [None if value is None else self.values.get(value) for value in node.inputs]
        if any(isinstance(each, Pending) for each in values):
            self._float_add(node)
            return
        a, b = self._read(node, 0), self._read(node, 1)
        if self.tensors[a.tensor] != self.tensors[b.tensor] or layout_of(a) != layout_of(b):
            raise refused(node, "adds tensors of different shapes")
        assert a.scale is not None
        assert b.scale is not None
        scales = a.scale, b.scale

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new(self.tensors[a.tensor])
            total = quantized_sum(scales, (a.zero, b.zero), scale, zero, low, high)
            self.steps.append(Addition(a.tensor, b.tensor, out, total))
            return out

        @functools.cache
        def real() -> int:
            (first, _), (second, _) = self._operand(node, 0), self._operand(node, 1)
            out = self._new_floats(self.tensors[a.tensor])
            self.steps.append(FloatSum(first, second, Operand(out)))
            return out

        self.values[node.outputs[0]] = Pending(
            emit, self.tensors[a.tensor], last=a.last, flat=a.flat, tokens=a.tokens, real=real
        )

    # ----------------------------------------------------------------------------------------------------------- pools

    def _window(self, node: ir.Node, x: Bytes) -> tuple[Any, Any, Any, tuple[int, int]]:
        """Kernel, strides and pads of a pool, and the number of windows along height and width."""
        ints, dilations = node.attributes.get_ints, node.attributes.get_ints("dilations", [1, 1])
        if set(dilations) != {1} or len(ints("kernel_shape", [])) != 2:
            raise refused(node, "has dilations, or other than two axes")
        if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or True in layout_of(x):
            raise refused(node, "is not over [n, C, H, W], or sets auto_pad")
        kernel, strides, pads = (
            tuple(ints(key, default)) for key, default in (("kernel_shape", []), ("strides", [1, 1]), ("pads", [0] * 4))
        )
        shape = self.tensors[x.tensor]
        if node.attributes.get_int("ceil_mode", 0) != 0:
            if node.attributes.get_int("count_include_pad", 0) != 0:
                raise refused(node, "counts pads in ceil mode")
            pads = ceil_mode_pads(shape, kernel, strides, pads)
        return kernel, strides, pads, windows(shape, kernel, strides, pads)

    def _maxpool(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if not isinstance(x, Bytes):
            raise refused(node, "reads a float value")
        kernel, strides, pads, counts = self._window(node, x)
        out = self._new((*counts, self.tensors[x.tensor][2]))
        self.steps.append(MaxPool(x.tensor, out, kernel, strides, pads))
        self.values[node.outputs[0]] = replace(x, tensor=out)

    def _averagepool(self, node: ir.Node) -> None:
        x = self._read(node)
        kernel, strides, pads, counts = self._window(node, x)
        padded = node.attributes.get_int("count_include_pad", 0) == 1

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new((*counts, self.tensors[x.tensor][2]))
            of = (float(x.scale or 0), x.zero, float(scale), zero)
            self.steps.append(AveragePool(x.tensor, out, kernel, strides, pads, *of, padded))
            return self._clipped(out, low, high)

        self.values[node.outputs[0]] = Pending(emit, (*counts, self.tensors[x.tensor][2]))

    def _globalaveragepool(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if isinstance(x, Input) or True in layout_of(x):
            raise refused(node, "is not over [n, C, H, W]")
        self._global_average(node, x, flat=False)

    def _reducemean(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if isinstance(x, Input):
            raise refused(node, "reads the input")
        axes = query.integers(node, "axes", 1)
        rank = 3 if x.tokens else 4
        spatial = [axis for axis in range(1, rank) if axis != (rank - 1 if x.last else 1)]
        if x.flat or axes is None or sorted(axis % rank for axis in axes) != spatial:
            raise refused(node, "is not over height and width")
        self._global_average(node, x, flat=node.attributes.get_int("keepdims", 1) == 0)

    def _global_average(self, node: ir.Node, x: Bytes | Pending, flat: bool) -> None:
        if isinstance(x, Pending):
            self._float_mean(node, flat)
            return
        x = self._read(node)
        height, width, channels = self.tensors[x.tensor]
        tokens = x.tokens and not flat

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            assert x.scale is not None
            factor = x.scale / (scale * np.float32(height * width))
            out = self._new((1, 1, channels))
            self.steps.append(GlobalAverage(x.tensor, out, x.zero, float(factor), zero))
            return self._clipped(out, low, high)

        def result() -> None:
            assert x.scale is not None
            factor = x.scale / np.float32(height * width)
            self.steps.append(GlobalAverage(x.tensor, -1, x.zero, float(factor), 0))

        @functools.cache
        def real() -> int:
            assert x.scale is not None
            out = self._new_floats((1, 1, channels))
            self.steps.append(FloatMean(Operand(x.tensor, float(x.scale), x.zero), Operand(out)))
            return out

        self.values[node.outputs[0]] = Pending(
            emit, (1, 1, channels), last=x.last, flat=flat, tokens=tokens, result=result, real=real
        )


# by ONNX operator; an operator without a rule is a function of single values, or stays float
RULES: dict[str, Callable[[_Mapping, ir.Node], None]] = {
    "Add": _Mapping._add,
    "AveragePool": _Mapping._averagepool,
    "Clip": _Mapping._clip,
    "Concat": _Mapping._concat,
    "Conv": _Mapping._conv,
    "DequantizeLinear": _Mapping._dequantizelinear,
    "Dropout": _Mapping._identity,
    "Flatten": _Mapping._flatten,
    "Gemm": _Mapping._gemm,
    "GlobalAveragePool": _Mapping._globalaveragepool,
    "Identity": _Mapping._identity,
    "LayerNormalization": _Mapping._layernormalization,
    "MatMul": _Mapping._matmul,
    "MaxPool": _Mapping._maxpool,
    "Mul": _Mapping._mul,
    "Pad": _Mapping._pad,
    "QuantizeLinear": _Mapping._quantizelinear,
    "ReduceMean": _Mapping._reducemean,
    "Relu": _Mapping._relu,
    "Reshape": _Mapping._reshape,
    "Resize": _Mapping._resize,
    "Slice": _Mapping._slice,
    "Split": _Mapping._split,
    "Squeeze": _Mapping._squeeze,
    "Transpose": _Mapping._transpose,
}
