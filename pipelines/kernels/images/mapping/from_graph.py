"""Maps a quantized image network's ONNX graph to an `ImageProgram`, by structure.

Supported are QDQ around Conv, Gemm, MatMul, Add, Mul, pools and Concat, with Relu, Clip or any other elementwise
function between, and layout operators: Flatten, Reshape and Transpose, also as a channel shuffle, Split, Slice and
Resize. The float remainder is a `FloatRemainder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError, one_line
from pipelines.graph import query
from pipelines.kernels.images.mapping.functions import FUNCTIONS
from pipelines.kernels.images.mapping.fuse import fused
from pipelines.kernels.images.mapping.independence import independent
from pipelines.kernels.images.mapping.layers import Layers
from pipelines.kernels.images.mapping.orders.views import ORDERS, ROWS, SPATIAL, View
from pipelines.kernels.images.mapping.qdq import data_input, refused
from pipelines.kernels.images.mapping.remainder import FloatRemainder
from pipelines.kernels.images.mapping.walk import Bytes, Input, Pending, layout_of
from pipelines.kernels.images.program import ENDINGS, SELECTION, ImageProgram, ValuePart
from pipelines.kernels.images.steps import Convolution, Dequantize, FloatConvolution, Shape
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.reshape_chains import ReshapeChains

BATCH = "n"  # name of an axis of samples without one
NOMINAL = 224  # pixels of a free height, width or length where none is given
BROADCASTS = ("Add", "Div", "Max", "Min", "Mul", "Pow", "PRelu", "Sub")
MIN_INT8_RATIO = 100  # times as many weights as a rest in float holds are int8


def image_program(model: ir.Model) -> ImageProgram:
    """Maps a quantized image network.

    Args:
        model: QDQ model, an image network [n, C, H, W] or [n, H, W, C] of fixed sizes, see `fix_sizes`.

    Returns:
        The program.

    Raises:
        RequestError: The graph cannot be mapped; the message names the operator.
    """
    mapping = ImageMapping(model)
    try:
        return mapping.program()
    except RequestError:
        if mapping.constants.joined is None:
            raise
    strict = ImageMapping(model)  # a Reshape to a number of samples may be a part of the float remainder
    strict.constants.moves = False
    return strict.program()


def fix_sizes(model: ir.Model, sizes: Sequence[int] = ()) -> bool:
    """Fixes the free height and width, or length, of a network, in place, and computes what depends on them alone.

    An axis of samples without a name gets one, so that the shapes of other values tell it.

    Args:
        model: QDQ model.
        sizes: Sizes of the input beside its first axis; `NOMINAL` where they are free if there are none.

    Returns:
        Whether sizes were free.
    """
    if len(model.graph.inputs) != 1 or (shape := query.symbolic_shape(model.graph.inputs[0])) is None:
        return False
    count, *own = shape
    free = len(own) in (2, 3) and sum(not isinstance(size, int) for size in own) in (1, 2)
    if not free and count is not None:
        return False
    if free:
        own = list(sizes) or [size if isinstance(size, int) else NOMINAL for size in own]
    model.graph.inputs[0].shape = ir.Shape([BATCH if count is None else count, *own])
    for value in (value for node in model.graph for value in node.outputs):
        value.shape = None
    if free:
        rewrite(model, [FoldConstants(), ReshapeChains()])
    return free


class ImageMapping(Layers):
    """Mapping of a graph to a program."""

    def program(self) -> ImageProgram:
        """See `image_program`."""
        if len(self.main.inputs) != 1 or self.main.inputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32):
            shapes = [f"{value.name} {query.symbolic_shape(value) or 'of unknown shape'}" for value in self.main.inputs]
            count = "inputs" if len(shapes) > 1 else "input"
            raise RequestError(
                f"found the {count} {', '.join(shapes) or 'none'}; the native engine runs ONNX files of image "
                "networks, with one input [n, C, H, W]. Text encoders run natively once imported with: zoo import"
            )
        (self.input,), result = self.main.inputs, self.main.outputs[0]
        shape = query.dimensions(self.input)
        if shape is None or len(shape) != 4 or None in shape[1:]:
            raise RequestError(f"the input {self.input.name} has shape {shape}; expected [n, C, H, W] of fixed sizes")
        self.shape: Shape = (int(shape[1] or 0), int(shape[2] or 0), int(shape[3] or 0))
        if self.input.dtype not in (ir.DataType.UINT8, ir.DataType.FLOAT):
            raise RequestError(f"the input {self.input.name} is {self.input.dtype}; expected uint8 or float32")
        self.reals = self.input.dtype == ir.DataType.FLOAT
        last = self.shape[2] <= 4 < self.shape[0]  # as few channels as images have
        self.values[self.input] = Input(last, last)
        ending, remainder = None, FloatRemainder(self.model)
        for node in self.main:
            if remainder.reads(node):
                remainder.take(node)
            elif self.constants.take(node, self._dimensions(node.inputs[0] if node.inputs else None)):
                remainder.defer(node)
            elif not self._chooses(node) and remainder.is_shape(node):
                continue
            elif self._is_view(node) or any(value in self.values for value in node.inputs if value is not None):
                if node.outputs[0] is result and len(self.main.outputs) == 1 and self._is_ending(node):
                    ending = node
                    break
                try:
                    self._map(node)
                except RequestError as error:
                    remainder.take(node, error)
                for output in (value for value in node.outputs if value in self.views and value in self.main.outputs):
                    self._gather_output(node, output)
                if any(value in self.views for value in node.outputs):
                    remainder.defer(node)
        several = len(self.main.outputs) > 1 or self._integers(result) is not None
        parts = self._parts(remainder) if remainder or several else ()
        if parts:
            result_shape: tuple[int, ...] = (sum(int(np.prod(shape)) for _, shape, _ in parts),)
        else:
            result_shape = self._end(ending.inputs[0] if ending is not None else result, ending)
        layers = {type(step) for step in self.steps} & {Convolution, FloatConvolution}
        if layers == {FloatConvolution}:
            raise RequestError("no layer has weights of 8 bits; expected a quantized graph: run zoo quantize")
        self._require_independent()
        tensors, steps, floats = fused(self.tensors, self.steps, self.floats)
        return ImageProgram(
            str(self.input.name),
            tuple(str(value.name) for value in self.main.outputs),
            "float32" if self.reals else "uint8",
            self.shape,
            tensors,
            steps,
            result_shape,
            "" if ending is None else ending.op_type,
            parts,
            remainder.model(parts) if parts else b"",
            int(shape[0] or 0) if parts else 0,
            floats,
        )

    def _require_independent(self) -> None:
        """Refuses a graph whose samples depend on each other, if a Reshape moves their axis."""
        if self.constants.joined is not None and not independent(self.model):
            raise self.constants.joined

    def _map(self, node: ir.Node) -> None:
        """Maps a node; a form that no rule foresaw is refused as others are."""
        if node in self.absorbed:
            return
        try:
            self._map_known(node)
        except RequestError:
            raise
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise refused(node, f"has an unforeseen form ({type(error).__name__}: {one_line(error)})") from error

    def _map_known(self, node: ir.Node) -> None:
        if node.domain not in ("", "ai.onnx"):
            raise refused(node, f"of {node.domain} has no native form")
        if self._chooses(node):
            self._choose(node)
            return
        if node.op_type in BROADCASTS:
            self._check_ranks(node)
        if self._is_view(node):
            self._viewed(node)
            return
        try:
            self._by_rule(node)
        except RequestError as error:
            mapped = [isinstance(self.values.get(value), Bytes | Pending) for value in node.inputs if value is not None]
            is_mapped = mapped[:1] == [True]
            try:
                if is_mapped and (node.op_type in ORDERS or (node.op_type == "MatMul" and all(mapped))):
                    self._viewed(node, error)
                elif node.op_type in ROWS and is_mapped:
                    self._in_rows(node)
                elif node.op_type in SPATIAL and is_mapped:
                    self._in_images(node)
                elif not self._by_elements(node, always=True):
                    raise
            except RequestError:
                raise error from None

    def _in_images(self, node: ir.Node) -> None:
        """Maps an operator on images [n, C, H, W] of a value whose last axis holds channels, such as a row of them."""
        value = data_input(node)
        mapped = self.values[value]
        if not isinstance(mapped, Bytes | Pending) or layout_of(mapped) != (True, False, False):
            raise refused(node, "has no native form")
        view = self._view_of(node, value)
        assert isinstance(view, View)
        self.views[value] = view
        try:
            self._gather_view(node, value, view, False)
            self._by_rule(node)
        finally:
            self.views.pop(value, None)
            self.values[value] = mapped

    def _check_ranks(self, node: ir.Node) -> None:
        """Refuses what moves the axis of samples: values of different ranks, and constants of more axes."""
        shapes = {value: self._dimensions(value) for value in node.inputs if value is not None}
        ranks = {len(shape) for shape in shapes.values() if shape is not None}
        constants = [self.constants.real(value) for value, shape in shapes.items() if shape is None and ranks]
        if len(ranks) > 1 or any(constant.ndim > max(ranks) for constant in constants if constant is not None):
            raise refused(node, "has values of different numbers of axes")

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
        mapped = None if value is None else self.values.get(value)
        one = isinstance(mapped, Pending) and (mapped.flat or self._shape(mapped)[:2] == (1, 1))
        if isinstance(mapped, Pending) and mapped.result is not None and mapped.unbounded and one:
            mapped.result()
            shape = self._sizes(mapped)[1:]
        elif value is not None and self._is_real(value):
            self.steps += self._real_results(value)
            shape = self._sizes(mapped)[1:]  # type: ignore[arg-type]
        else:
            view = None if value is None else self.views.get(value)
            if isinstance(view, View) and view.reason is not None:
                raise view.reason
            raise RequestError(
                f"the output {self.main.outputs[0].name} is neither the result of a float step nor a dequantized tensor"
            )
        return shape

    def _is_ending(self, node: ir.Node) -> bool:
        """Whether a node is a function of classes that is computed of the results."""
        value = None if node.op_type not in ENDINGS else self.values.get(data_input(node))
        if not isinstance(value, Bytes | Pending):
            return False
        classes = len(self._sizes(value)) == 2 and node.attributes.get_int("axis", -1) in (1, -1)
        return classes if node.op_type != "Sigmoid" else self._shape(value)[:2] == (1, 1)

    def _parts(self, remainder: FloatRemainder) -> tuple[ValuePart, ...]:
        """Returns the values that the float remainder reads, and adds the steps that end the program with them.

        Raises RequestError if the remainder would hold layers itself.
        """
        while odd := [value for value in remainder.inputs(self.values) if not self._is_real(value)]:
            producer = odd[0].producer()
            if producer is None:
                raise remainder.reason or RequestError(f"the output {odd[0].name} is not a dequantized tensor")
            remainder.take(producer)
        layers = (step for step in self.steps if isinstance(step, Convolution | FloatConvolution))
        weights = sum(step.weight.size for step in layers)
        if remainder and remainder.weights() * MIN_INT8_RATIO > weights:
            raise remainder.reason or RequestError("the outputs are results of float layers")
        values, results, offset = remainder.inputs(self.values), list[Dequantize](), 0
        for value in values:
            results += self._real_results(value, offset)
            offset += math.prod(self._shape(self.values[value]))  # type: ignore[arg-type]
        self.steps += results
        return tuple(self._value_part(value) for value in values)

    def _value_part(self, value: ir.Value, stored: bool = False) -> ValuePart:
        """The entry of a value in `ImageProgram.parts`; stored: its memory layout is that of the tensor."""
        mapped, integers = self.values[value], self._integers(value)
        assert isinstance(mapped, Bytes | Pending)
        shape = self._shape(mapped) if stored else self._sizes(mapped)[1:]
        if integers is None:
            return str(value.name), shape, "float32"
        kind = np.dtype(value.dtype.numpy() if value.dtype else np.int64).name
        return str(value.name), shape, SELECTION if integers.form else kind

    def _is_real(self, value: ir.Value) -> bool:
        """Whether a value is dequantized, or float."""
        mapped = self.values.get(value)
        if isinstance(mapped, Pending):
            return mapped.real is not None and mapped.form in ("", "selection")
        return isinstance(mapped, Bytes) and mapped.real and mapped.scale is not None

    def _real_results(self, value: ir.Value, offset: int = 0, last: bool = False) -> list[Dequantize]:
        """The steps that write a value to the results, from `offset` on; last: in the order [H, W, C] in any case."""
        mapped = self.values.get(value)
        if not isinstance(mapped, Bytes | Pending) or not self._is_real(value):
            raise RequestError(f"the value {value.name} is neither dequantized nor float")
        last = last or mapped.last
        height, width, channels = self._shape(mapped)
        return self._placed(mapped, last, offset, channels if last else height * width)

    def _placed(self, mapped: Bytes | Pending, last: bool, offset: int, pitch: int) -> list[Dequantize]:
        """The steps that write a value, or the parts of a concatenation, to their places among the results."""
        place: dict[str, Any] = {"last": last, "offset": offset, "pitch": pitch}
        if isinstance(mapped, Bytes):
            return [Dequantize(mapped.tensor, float(mapped.scale or 0), mapped.zero, **place)]
        if mapped.joined is not None and mapped.unbounded:
            steps = []
            for part in mapped.joined.parts:
                steps += self._placed(part, last, offset, pitch)
                height, width, channels = self._shape(part)
                along = height * width if mapped.joined.stacks else channels
                offset += along * (pitch if mapped.joined.stacks == last else 1)
            return steps
        if mapped.curve is not None:
            table = np.clip(mapped.curve[1], np.float32(mapped.low), np.float32(mapped.high))
            return [Dequantize(mapped.curve[0], 1.0, 0, table=np.asarray(table, np.float32), **place)]
        return [Dequantize(self._floats_of(mapped), 1.0, 0, **place)]


# by ONNX operator; an operator without a rule is a function of single values, or stays float
RULES: dict[str, Callable[[ImageMapping, ir.Node], None]] = {
    "Add": ImageMapping._add,
    "Attention": ImageMapping._whole_attention,
    "AveragePool": ImageMapping._averagepool,
    "Clip": ImageMapping._clip,
    "Concat": ImageMapping._any_concat,
    "Conv": ImageMapping._conv,
    "DequantizeLinear": ImageMapping._dequantizelinear,
    "Dropout": ImageMapping._identity,
    "Flatten": ImageMapping._flatten,
    "Gemm": ImageMapping._gemm,
    "GlobalAveragePool": ImageMapping._globalaveragepool,
    "GridSample": ImageMapping._gridsample,
    "GroupNormalization": ImageMapping._groupnormalization,
    "Identity": ImageMapping._identity,
    "InstanceNormalization": ImageMapping._groupnormalization,
    "LayerNormalization": ImageMapping._layernormalization,
    "MatMul": ImageMapping._matmul,
    "MaxPool": ImageMapping._maxpool,
    "Mul": ImageMapping._mul,
    "Pad": ImageMapping._pad,
    "QuantizeLinear": ImageMapping._quantizelinear,
    "RMSNormalization": ImageMapping._layernormalization,
    "ReduceL2": ImageMapping._reducel2,
    "ReduceMean": ImageMapping._reducemean,
    "Relu": ImageMapping._relu,
    "Reshape": ImageMapping._reshape,
    "Resize": ImageMapping._resize,
    "ReduceSum": ImageMapping._reducesum,
    "Slice": ImageMapping._slice,
    "Softmax": ImageMapping._softmax,
    "Split": ImageMapping._split,
    "Squeeze": ImageMapping._squeeze,
    "Transpose": ImageMapping._transpose,
}
