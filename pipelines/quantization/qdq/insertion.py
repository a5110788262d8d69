"""Insertion of QuantizeLinear / DequantizeLinear (QDQ) pairs and quantized constants into a graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq import engine_quirks
from pipelines.quantization.qdq.quantize_early import moves
from pipelines.quantization.qdq.scales import (
    Array,
    QParams,
    QuantizedWeights,
    activation_qparams,
    dequantized_qparams,
    int8_scale,
    qparams_of,
    quantized_constant,
    saturates,
    uint8_qparams,
)
from pipelines.quantization.recipe import QuantRecipe

MAX_BIAS = 2**30  # largest int32 bias: leaves room for the sum of products


class QdqInserter:
    """Inserts Q/DQ pairs into a graph, one per tensor, shared by its readers.

    Args:
        graph: Float graph; it is changed.
        recipe: Quantization options.
        table: Calibration table of the graph.
        weights: Weights that were quantized before, of graphs that share them.

    Attributes:
        ranges: Calibrated ranges, and those of new tensors.
        dynamic: DynamicQuantizeLinear by tensor.
        helpers: Names of nodes that belong to another operator, which reports leave out.
        taken: Names in use.
    """

    def __init__(
        self, graph: ir.Graph, recipe: QuantRecipe, table: CalibrationTable, weights: QuantizedWeights | None = None
    ) -> None:
        self.graph, self.recipe = graph, recipe
        self._weights = weights or QuantizedWeights()
        self.ranges = table.tensors.copy()
        self.clip_weights = table.clip
        self.subsampled: dict[engine_quirks.Strided, ir.Value] = {}
        self.dynamic: dict[str, ir.Node] = {}
        self.helpers: set[str] = set()
        self.taken = query.used_names(graph)
        self._dequantized: dict[str, ir.Value] = {}  # by tensor
        self._constants: dict[str, list[dict[str, ir.Value]]] = {}  # by float constant: its quantized forms
        self._least: dict[str, Array | float] = {}  # by weight: lower bound of its scales

    @property
    def weight_bits(self) -> int:
        """Bits of a weight: 7 for a recipe of reduced range, otherwise 8."""
        return 7 if self.recipe.reduced_range else 8

    def qparams(self, x: ir.Value) -> QParams:
        """Returns the qparams of a tensor: those of its DequantizeLinear, or those of its calibrated range.

        Data movement of a tensor with other readers takes that tensor's qparams, so that one QuantizeLinear suffices.

        Args:
            x: Tensor.

        Returns:
            (scale, zero point).
        """
        source = x
        while (producer := source.producer()) is not None and moves(producer):
            moved = producer.inputs[0]
            if moved is None or moved.name not in self.ranges or query.sole_user(moved) is producer:
                break
            if producer.op_type == "Split":  # see `shared_ranges`
                break
            source = moved
        return dequantized_qparams(source) or activation_qparams(self.ranges[str(source.name)], self.recipe.symmetric)

    def quantize_input(self, node: ir.Node, index: int = 0) -> np.float32:
        """Inserts a Q/DQ pair before an input, unless it is a dequantized int8 tensor.

        Args:
            node: Operator.
            index: Index of the input.

        Returns:
            Scale of the input.
        """
        x = node.inputs[index]
        assert x is not None and x.name is not None
        if (stored := dequantized_qparams(x)) is not None:
            return stored[0]
        qparams = self.qparams(x)
        if x.name not in self._dequantized:
            q, dq = self._qdq_pair(x, *qparams)
            self.graph.insert_before(node, [q, dq])
            self._dequantized[x.name] = dq.outputs[0]
        node.replace_input_with(index, self._dequantized[x.name])
        return qparams[0]

    def quantize_second_factor(self, node: ir.Node) -> None:
        """Inserts a Q/DQ pair before input 1 of a MatMul of two activations.

        The pair is symmetric int8, which engines multiply twice as fast, if the tensor has no other reader since its
        producer.

        Args:
            node: MatMul.
        """
        x = node.inputs[1]
        assert x is not None and x.name is not None
        source = x
        while query.sole_user(source) is not None and (producer := source.producer()) is not None and moves(producer):
            source = producer.inputs[0] or x
        if dequantized_qparams(x) is not None or query.sole_user(source) is None:
            self.quantize_input(node, 1)
            return
        q, dq = self._qdq_pair(x, int8_scale(self.ranges[x.name]), np.int8(0))
        self.graph.insert_before(node, [q, dq])
        node.replace_input_with(1, dq.outputs[0])

    def quantize_output(self, node: ir.Node) -> None:
        """Inserts a Q/DQ pair behind an int8 operator for all its readers, if engines need it.

        The pair follows a Relu or Clip if saturation is equivalent (engines then drop the Relu or Clip). Otherwise it
        precedes the Relu or Clip, with the qparams of the range after it.

        Args:
            node: Int8 operator.
        """
        if not engine_quirks.needs_output_qdq(node):
            return
        x = node.outputs[0]
        clamp = query.sole_user(x)
        if clamp is not None and clamp.op_type not in ("Relu", "Clip"):
            clamp = None
        y = x if clamp is None else clamp.outputs[0]
        if y.name not in self.ranges:
            return
        quantizers = [user for user in y.consumers() if user.op_type == "QuantizeLinear" and qparams_of(user)]
        qparams = (qparams_of(quantizers[0]) if quantizers else None) or self.qparams(y)
        if clamp is not None and (self.recipe.keeps_float(str(clamp.name)) or not saturates(clamp, *qparams)):
            qparams, y, quantizers = activation_qparams(self.ranges[str(y.name)], self.recipe.symmetric), x, []
        if quantizers and len(y.uses()) == 1 and not y.is_graph_output():
            return
        if quantizers:
            q = quantizers[0]
            readers = q.outputs[0].consumers()
            dq = next((user for user in readers if user.op_type == "DequantizeLinear"), None) or self._dequantize(y, q)
        else:
            q, dq = self._qdq_pair(y, *qparams)
        y.replace_all_uses_with(dq.outputs[0], replace_graph_outputs=True)
        q.replace_input_with(0, y)
        if dq.outputs[0].is_graph_output():
            y.name, dq.outputs[0].name = dq.outputs[0].name, y.name
        producer = y.producer()
        assert producer is not None
        self.graph.insert_after(producer, [q, dq])

    def quantize_weight(self, node: ir.Node, axis: int | None, x_scale: np.float32) -> None:
        """Replaces weight (input 1) and bias (input 2) by int8 and int32 constants behind DequantizeLinear.

        Args:
            node: Layer.
            axis: Axis of the per-channel scales, None for per tensor.
            x_scale: Scale of input 0; the bias has the scale s_x s_w.
        """
        weight = node.inputs[1]
        w = query.constant(weight)
        assert weight is not None and w is not None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        b = query.constant(bias)
        b = None if b is None else b.ravel()  # a Gemm's may be [1, N]
        if weight.name not in self._least:
            self._least[str(weight.name)] = self._least_scale(weight)
        # computed at the first reader for all readers, except those whose input was replaced since
        least = np.maximum(self._least[str(weight.name)], _bias_bound(b, x_scale))
        scale, quantized = self._weights.of(weight, axis, self.weight_bits, least, self.clip_weights)
        node.replace_input_with(1, self._quantized(node, str(weight.name), quantized, scale, axis))
        if b is not None and bias is not None:
            bias_scale = (np.float32(x_scale) * scale).astype(np.float32)
            whole = np.rint(b / bias_scale.astype(np.float64)).astype(np.int32)
            node.replace_input_with(2, self._quantized(node, str(bias.name), whole, bias_scale, 0))

    def _least_scale(self, weight: ir.Value) -> Array | float:
        """Lower bound of the scales of a weight, by the biases of all layers that read it, so that it has one form."""
        least: Array | float = 0.0
        for layer, index in weight.uses():
            bias = query.constant(layer.inputs[2]) if index == 1 and len(layer.inputs) > 2 else None
            x = layer.inputs[0]
            if bias is not None and x is not None and (x.name in self.ranges or dequantized_qparams(x) is not None):
                bound = _bias_bound(bias.ravel(), self.qparams(x)[0])
                least = np.maximum(least, bound) if np.shape(least) in ((), np.shape(bound)) else least
        return least

    def quantize_constant(self, node: ir.Node, index: int) -> None:
        """Replaces a constant input of an elementwise operator by uint8 behind DequantizeLinear, per tensor.

        Args:
            node: Operator.
            index: Index of the constant input.
        """
        x = node.inputs[index]
        array = query.constant(x)
        assert x is not None and array is not None
        scale, zero = uint8_qparams(array.min(), array.max())
        z = np.uint8(zero)
        quantized = quantized_constant(array, scale, z)
        node.replace_input_with(index, self._quantized(node, str(x.name), quantized, np.asarray(scale), None, z))

    def _qdq_pair(self, x: ir.Value, scale: np.float32, zero: np.uint8 | np.int8) -> tuple[ir.Node, ir.Node]:
        """QuantizeLinear of `x` and DequantizeLinear, not inserted yet."""
        s = edit.initializer(self.graph, f"{x.name}.scale", np.asarray(scale), self.taken)
        z = edit.initializer(self.graph, f"{x.name}.zero_point", np.asarray(zero), self.taken)
        dtype = ir.DataType.UINT8 if isinstance(zero, np.uint8) else ir.DataType.INT8
        q = edit.node("QuantizeLinear", [x, s, z], f"{x.name}.quantized", dtype=dtype, taken=self.taken)
        q.outputs[0].shape = x.shape
        return q, self._dequantize(x, q)

    def _dequantize(self, x: ir.Value, q: ir.Node) -> ir.Node:
        """The DequantizeLinear of what `q` makes of `x`, not inserted yet."""
        inputs = [q.outputs[0], *q.inputs[1:]]
        dq = edit.node("DequantizeLinear", inputs, f"{x.name}.dequantized", dtype=ir.DataType.FLOAT, taken=self.taken)
        dq.outputs[0].shape = x.shape
        return dq

    def _quantized(
        self, before: ir.Node, name: str, quantized: Array, scale: Array, axis: int | None, zero: np.uint8 | None = None
    ) -> ir.Value:
        """A quantized constant behind DequantizeLinear, inserted before its reader `before`."""
        zeros = np.zeros(scale.shape, quantized.dtype) if zero is None else np.asarray(zero)
        parts = self.initializers(before, name, {"quantized": quantized, "scale": scale, "zero_point": zeros})
        along = {} if axis is None else {"axis": axis}
        dequantized = f"{before.outputs[0].name}/{name}.dequantized"  # one a reader: engines fuse it with its operator
        dq = edit.node(
            "DequantizeLinear", [*parts.values()], dequantized, dtype=ir.DataType.FLOAT, taken=self.taken, **along
        )
        dq.outputs[0].shape = parts["quantized"].shape
        self.graph.insert_before(before, dq)
        return dq.outputs[0]

    def initializers(self, reader: ir.Node, name: str, parts: Mapping[str, Array]) -> dict[str, ir.Value]:
        """Adds the quantized form of a float constant as initializers, or reuses equal ones of another reader.

        The steps of an unrolled LSTM share their weights this way.

        Args:
            reader: Operator that is about to read them.
            name: Name of the float constant.
            parts: Arrays by part, such as "quantized" and "scale".

        Returns:
            Initializer by part.
        """
        cached = self._constants.setdefault(name, [])
        for values in cached:
            arrays = {key: query.constant(value) for key, value in values.items()}
            if arrays.keys() == parts.keys() and all(_equal(arrays[key], part) for key, part in parts.items()):
                return values
        stem = f"{reader.outputs[0].name}/{name}"
        new = {key: edit.initializer(self.graph, f"{stem}.{key}", part, self.taken) for key, part in parts.items()}
        cached.append(new)
        return new


def _bias_bound(bias: Array | None, x_scale: np.float32) -> Array | float:
    """The least weight scales s_w at which int32 holds a bias, 1-D, at scale s_x s_w."""
    return 0.0 if bias is None else np.abs(bias.astype(np.float64)) / (float(x_scale) * MAX_BIAS)


def _equal(a: Array | None, b: Array) -> bool:
    """Whether arrays agree in dtype, shape and values."""
    return a is not None and a.dtype == b.dtype and np.array_equal(a, b)
