"""Inserts Q/DQ pairs and quantized constants into one graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.calibrate import CalibrationTable
from pipelines.quantization.observers import steps
from pipelines.quantization.quantize_early import moves
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.scales import (
    Array,
    Step,
    activation_parameters,
    given,
    saturates,
    step_of,
    stored,
    weight_parameters,
)

BIAS = 2**30  # largest bias in its own steps: leaves int32 room for the sum of products


class Pairs:
    """One pair per tensor, shared by its readers."""

    def __init__(self, main: ir.Graph, recipe: QuantRecipe, table: CalibrationTable) -> None:
        self.main, self.recipe = main, recipe
        self.ranges = dict(table.tensors)  # of tensors made here, too
        self.clip = table.clip  # weights
        self.done: dict[str, ir.Value] = {}
        self.strided: dict[tuple[str, tuple[int, ...]], ir.Value] = {}
        self.run_time: dict[str, ir.Node] = {}  # what quantizes an input at run time
        self.helpers: set[str] = (
            set()
        )  # nodes that are part of another one, of a product quantized at run time or a reduction
        self.taken = query.used_names(main)

    def step(self, x: ir.Value) -> Step:
        """Scale and zero point of `x`. What moves values that others read too keeps theirs, so that one quantize step
        does for all.
        """
        source = x
        while (producer := source.producer()) is not None and moves(producer):
            moved = producer.inputs[0]
            if moved is None or moved.name not in self.ranges or query.sole_user(moved) is producer:
                break
            source = moved
        return given(source) or activation_parameters(self.ranges[str(source.name)], self.recipe.symmetric)

    def activation(self, node: ir.Node, index: int = 0) -> np.float32:
        """Feed input `index` of `node` through a Q/DQ pair, unless it is bytes behind a DequantizeLinear already;
        returns its scale.
        """
        x = node.inputs[index]
        assert x is not None and x.name is not None
        if (found := given(x)) is not None:
            return found[0]
        step = self.step(x)
        if x.name not in self.done:
            q, dq = self._pair(x, *step)
            self.main.insert_before(node, [q, dq])
            self.done[x.name] = dq.outputs[0]
        node.replace_input_with(index, self.done[x.name])
        return step[0]

    def second(self, node: ir.Node) -> None:
        """Feed input 1 of a MatMul of two activations through a Q/DQ pair: signed bytes, which engines multiply twice
        as fast, where it has
        no other reader on the way from its producer."""
        x = node.inputs[1]
        assert x is not None and x.name is not None
        source = x
        while query.sole_user(source) is not None and (producer := source.producer()) is not None and moves(producer):
            source = producer.inputs[0] or x
        if given(x) is not None or query.sole_user(source) is None:
            self.activation(node, 1)
            return
        observed = self.ranges[x.name]
        reach = max(-observed.low, observed.high)
        q, dq = self._pair(x, np.float32(reach / 127 if reach > 1e-12 else 1.0), np.int8(0))
        self.main.insert_before(node, [q, dq])
        node.replace_input_with(1, dq.outputs[0])

    def _pair(self, x: ir.Value, scale: np.float32, zero: np.uint8 | np.int8) -> tuple[ir.Node, ir.Node]:
        s = edit.initializer(self.main, f"{x.name}.scale", np.asarray(scale), self.taken)
        z = edit.initializer(self.main, f"{x.name}.zero_point", np.asarray(zero), self.taken)
        dtype = ir.DataType.UINT8 if isinstance(zero, np.uint8) else ir.DataType.INT8
        q = edit.node("QuantizeLinear", [x, s, z], f"{x.name}.quantized", dtype=dtype, taken=self.taken)
        q.outputs[0].shape = x.shape
        return q, self._back(x, q)

    def _back(self, x: ir.Value, q: ir.Node) -> ir.Node:
        dq = edit.node(
            "DequantizeLinear",
            [q.outputs[0], *q.inputs[1:]],
            f"{x.name}.dequantized",
            dtype=ir.DataType.FLOAT,
            taken=self.taken,
        )
        dq.outputs[0].shape = x.shape
        return dq

    def transposed(self, node: ir.Node) -> None:
        """Let a Transpose of bytes whose result is dequantized stand between a pair of its own: both engines make bytes
        of that, but
        OpenVINO transposes floats where it finds bytes, and then computes the product behind it in float."""
        x, y = node.inputs[0], node.outputs[0]
        dq = next((each for each in y.consumers() if each.op_type == "DequantizeLinear"), None)
        if x is None or dq is None or y.dtype != ir.DataType.UINT8:
            return
        step = dq.inputs[1:]
        before = edit.node(
            "DequantizeLinear", [x, *step], f"{x.name}.dequantized", dtype=ir.DataType.FLOAT, taken=self.taken
        )
        after = edit.node(
            "QuantizeLinear", [y, *step], f"{y.name}.quantized", dtype=ir.DataType.UINT8, taken=self.taken
        )
        before.outputs[0].shape, after.outputs[0].shape, y.type = x.shape, y.shape, ir.TensorType(ir.DataType.FLOAT)
        y.replace_all_uses_with(after.outputs[0], replace_graph_outputs=True)
        after.replace_input_with(0, y)
        node.replace_input_with(0, before.outputs[0])
        self.main.insert_before(node, before)
        self.main.insert_after(node, after)

    def reduced(self, node: ir.Node) -> None:
        """Let a reduction of an int8 product keep the axes, for a Squeeze to drop: OpenVINO (2026.4) would use the
        steps of the product's
        channels along another axis."""
        x, y = node.inputs[0], node.outputs[0]
        axes = (
            query.constant(node.inputs[1])
            if len(node.inputs) > 1
            else np.array(node.attributes.get_ints("axes", []), np.int64)
        )
        product = x.producer() if x is not None else None
        if product is None or product.op_type != "MatMul" or _op_type(product.inputs[1]) != "DequantizeLinear":
            return
        if axes is None or not axes.size or node.attributes.get_int("keepdims", 1) != 0:
            return
        dropped = edit.initializer(self.main, f"{y.name}.axes", axes.astype(np.int64), self.taken)
        squeeze = edit.node("Squeeze", [y, dropped], f"{y.name}.squeezed", dtype=ir.DataType.FLOAT, taken=self.taken)
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
        squeeze.outputs[0].shape, y.shape = y.shape, None
        y.replace_all_uses_with(squeeze.outputs[0], replace_graph_outputs=True)
        squeeze.replace_input_with(0, y)
        y.name, squeeze.outputs[0].name = squeeze.outputs[0].name, y.name
        self.main.insert_after(node, squeeze)
        self.helpers.add(str(squeeze.name))

    def result(self, node: ir.Node, always: bool) -> None:
        """Feed all readers of an int8 operator's result through one Q/DQ pair, where engines would compute in float
        without.

        always: engines have no form with a float result (onnxruntime's Conv, Add, pools); the others (Gemm, MatMul)
        lack one that a Relu or Clip reads. The pair stands after the Relu or Clip where saturation does the same
        (engines then drop it), else before it, with the range after it.
        """
        x = node.outputs[0]
        after = query.sole_user(x)
        if after is None or after.op_type not in ("Relu", "Clip"):
            if not always:
                return
            after = None
        y = x if after is None else after.outputs[0]
        if y.name not in self.ranges:
            return
        found = [each for each in y.consumers() if each.op_type == "QuantizeLinear" and step_of(each) is not None]
        step = (step_of(found[0]) if found else None) or self.step(y)
        if after is not None and (self.recipe.keeps_float(str(after.name)) or not saturates(after, *step)):
            step, y, found = activation_parameters(self.ranges[str(y.name)], self.recipe.symmetric), x, []
        if found and len(y.uses()) == 1 and not y.is_graph_output():
            return
        if found:
            q = found[0]
            dq = next(
                (each for each in q.outputs[0].consumers() if each.op_type == "DequantizeLinear"), None
            ) or self._back(y, q)
        else:
            y = _before_token(y)
            q, dq = self._pair(y, *step)
        y.replace_all_uses_with(dq.outputs[0], replace_graph_outputs=True)
        q.replace_input_with(0, y)
        if dq.outputs[0].is_graph_output():
            y.name, dq.outputs[0].name = dq.outputs[0].name, y.name
        producer = y.producer()
        assert producer is not None
        self.main.insert_after(producer, [q, dq])

    def weight(self, node: ir.Node, axis: int | None, x_scale: np.float32) -> None:
        """Replace weight (input 1) and bias (input 2, if any) of `node` by int8 / int32 constants behind
        DequantizeLinear.
        """
        weight = node.inputs[1]
        w = query.constant(weight)
        assert weight is not None and w is not None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        b = query.constant(bias)
        b = None if b is None else b.ravel()  # a Gemm's may be [1, N]
        # a bias that int32 cannot hold in steps of s_x s_w widens its channel's step
        least = 0.0 if b is None else np.abs(b.astype(np.float64)) / (float(x_scale) * BIAS)
        scale, quantized = weight_parameters(w, axis, self.bits, least, self.clip)
        node.replace_input_with(1, self._dequantized(node, str(weight.name), quantized, scale, axis))
        if b is not None and bias is not None:
            step = (np.float32(x_scale) * scale).astype(np.float32)
            node.replace_input_with(
                2,
                self._dequantized(node, str(bias.name), np.rint(b / step.astype(np.float64)).astype(np.int32), step, 0),
            )

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 7 if self.recipe.reduced_range else 8

    def constant(self, node: ir.Node, index: int) -> None:
        """Replace the constant input `index` of an elementwise operator by bytes behind DequantizeLinear, one step for
        all of it.
        """
        x = node.inputs[index]
        array = query.constant(x)
        assert x is not None and array is not None
        scale, zero = steps(array.min(), array.max())
        z = np.uint8(zero)
        node.replace_input_with(
            index, self._dequantized(node, str(x.name), stored(array, scale, z), np.asarray(scale), None, z)
        )

    def _dequantized(
        self, before: ir.Node, name: str, quantized: Array, scale: Array, axis: int | None, zero: np.uint8 | None = None
    ) -> ir.Value:
        stem = f"{before.outputs[0].name}/{name}"  # a weight may be shared by operators with other scales
        zeros = np.zeros(scale.shape, quantized.dtype) if zero is None else np.asarray(zero)
        q = edit.initializer(self.main, f"{stem}.quantized", quantized, self.taken)
        s = edit.initializer(self.main, f"{stem}.scale", scale, self.taken)
        z = edit.initializer(self.main, f"{stem}.zero_point", zeros, self.taken)
        along = {} if axis is None else {"axis": axis}
        dq = edit.node(
            "DequantizeLinear", [q, s, z], f"{stem}.dequantized", dtype=ir.DataType.FLOAT, taken=self.taken, **along
        )
        dq.outputs[0].shape = q.shape
        self.main.insert_before(before, dq)
        return dq.outputs[0]


def _before_token(y: ir.Value) -> ir.Value:
    """Where a Reshape of `y` is joined to a token that Expand repeats for a batch of any size, as in vision
    transformers: its result.

    OpenVINO (2026.4) gives all channels of a convolution the bias of the first where the pair stands right behind it
    there; onnxruntime moves the pair back, unless the shape of `y` itself is read.
    """
    reshape = _reader(y)
    if reshape is None or reshape.op_type != "Reshape":
        return y
    after: ir.Node | None = reshape
    while after is not None and after.op_type in ("Reshape", "Transpose"):
        after = _reader(after.outputs[0])
    joined = after is not None and after.op_type == "Concat" and any(_op_type(x) == "Expand" for x in after.inputs)
    return reshape.outputs[0] if joined else y


def _reader(x: ir.Value) -> ir.Node | None:
    """The one node of its graph that reads the values of `x`, whatever else reads its shape."""
    readers = [each for each in x.consumers() if each.op_type != "Shape"]
    return readers[0] if len(readers) == 1 and not x.is_graph_output() and readers[0].graph is x.graph else None


def _op_type(x: ir.Value | None) -> str:
    producer = x.producer() if x is not None else None
    return "" if producer is None else producer.op_type
