"""Maps operators on one row at a time to operations over registers.

linear layer     MatMul or Gemm [+ bias], or columns that a Split takes of one
layer norm       LayerNormalization over the last axis
RMS norm         x / Sqrt(ReduceMean(x x) + epsilon) * scale over the last axis
gated unit       activation(linear layer) * linear layer, both of one value
smoothing        Mul by a constant row before linear layers, folded into the normalization or gated unit before it
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.transformer.mapping.distances import GraphDistances
from pipelines.kernels.transformer.mapping.layers import Array, Heads, LinearLayer, concatenate
from pipelines.kernels.transformer.operations import (
    LANES,
    Activation,
    GatedActivation,
    LayerNorm,
    Linear,
    Operation,
    RMSNorm,
    Scale,
)


class RowMapper(GraphDistances):
    """Maps values of a graph to operations on demand: each value once, after the values that it reads.

    Attributes:
        operations: The operations so far; each writes a register of its own, numbered by its place.
        registers: The register of each mapped value.
        heads: Padded heads of registers.
    """

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str, for_kernels: bool = True) -> None:
        """See `GraphValues`."""
        super().__init__(model, names, memory, for_kernels)
        self.operations: list[Operation] = []  # each writes a register of its own
        self.registers: dict[ir.Value, int] = {}
        self.heads: dict[int, Heads] = {}  # of registers whose heads are padded

    def _pad_inputs(self, layer: LinearLayer) -> LinearLayer:
        """Returns the layer with rows of zeros for the columns that pad its input's heads."""
        heads = self.heads.get(self._register(layer.x))
        return layer if heads is None else replace(layer, weight=heads.pad(layer.weight.T).T)

    def _quantized(self, layer: LinearLayer) -> LinearLayer:
        """Returns the layer as an operation takes it that has no float kernel."""
        return layer.quantized() if self.for_kernels else layer

    def _register(self, value: ir.Value) -> int:
        """Returns the register of `value`; the operations that compute it are appended once."""
        value = self.skip_qdq(value)
        if value not in self.registers:
            self.registers[value] = self._map_value(value)
        return self.registers[value]

    def _append(self, operation: type[Any], *arguments: Any, **options: Any) -> int:
        """Appends an operation and returns its register."""
        out = len(self.operations)
        self.operations.append(operation(*arguments, out=out, **options))
        return out

    def _map_value(self, value: ir.Value) -> int:
        """Appends the operation that computes `value` and returns its register."""
        raise NotImplementedError

    def _layer_norm(self, value: ir.Value, node: ir.Node) -> int:
        """Appends a LayerNormalization over the last axis."""
        parameters = self._layer_norm_parameters(value, node)
        return self._append(LayerNorm, self._unpadded_register(value, node.inputs[0]), *parameters)

    def _layer_norm_parameters(self, value: ir.Value, node: ir.Node) -> tuple[Array, Array, float]:
        """Returns scale, bias and epsilon of a LayerNormalization over the last axis; refuses another one."""
        scale = self.constant(node.inputs[1])
        bias = self.constant(node.inputs[2]) if len(node.inputs) > 2 else None
        rank = query.rank(node.inputs[0])
        if scale is None or scale.ndim != 1 or (len(node.inputs) > 2 and bias is None):
            self.refuse(value, "its scale and bias are no constant vectors")
        if node.attributes.get_int("axis", -1) not in (-1, (rank or 0) - 1):
            self.refuse(value, "it normalizes over more than the last axis")
        scale = scale.astype(np.float32)
        bias = np.zeros_like(scale) if bias is None else bias.astype(np.float32)
        return scale, bias, float(np.float32(node.attributes.get_float("epsilon", 1e-5)))

    def _unpadded_register(self, reader: ir.Value, value: ir.Value | None) -> int:
        """Returns the register of `value`; refuses `reader` where its heads are padded."""
        assert value is not None
        register = self._register(value)
        if register in self.heads:
            size = self.heads[register].size
            self.refuse(reader, f"it reads heads of attention of {size} columns, expected a multiple of {LANES}")
        return register

    def _linear(self, layer: LinearLayer, relu: bool = False, residual: int | None = None) -> int:
        """Appends a linear layer with its ReLU and residual."""
        # rounded to int32 as in the graph of one decoding step: the same uint8 values follow
        if layer.qparams is not None and layer.weight.dtype == np.int8 and self.memory and self.for_kernels:
            scale = np.float32(layer.qparams.scale) * layer.scale  # 0 in columns that pad heads
            integers = np.rint(np.divide(layer.bias, scale, out=np.zeros_like(scale, np.float64), where=scale > 0))
            layer = replace(layer, bias=integers.astype(np.float32) * scale)
        weights = self._pad_inputs(layer).row_linear()
        return self._append(Linear, self._register(layer.x), weights, relu=relu, residual=residual)

    def _activation(self, value: ir.Value) -> int:
        """Appends an activation of one value, identified by its results."""
        sources = self.activation_sources(value)
        if len(sources) != 1:
            self.refuse(value, f"no step of the {self.what} computes this")
        (x,) = sources
        return self._append(Activation, self._unpadded_register(value, x), self.activation_kind(value, x))

    def rms_norm_parts(self, value: ir.Value) -> tuple[ir.Value, Array, float] | None:
        """Matches x / sqrt(mean(x^2) + epsilon) * scale over the last axis.

        Args:
            value: The value that it computes.

        Returns:
            x, the scale, float32 [columns], and epsilon; None where something else computes `value`.
        """
        node = query.producer(value, "Mul")
        if node is None:
            return None
        for normalized, factors in (node.inputs, node.inputs[::-1]):
            scale, divide = self.constant(factors), self.skip_qdq(normalized).producer()
            if scale is None or scale.size < 2 or scale.size != scale.shape[-1] or not query.is_op(divide, "Div"):
                continue
            assert divide is not None
            root = self.skip_qdq(divide.inputs[1]).producer()
            shifted = (
                self.skip_qdq(root.inputs[0]).producer() if root is not None and query.is_op(root, "Sqrt") else None
            )
            if shifted is None or not query.is_op(shifted, "Add"):
                continue
            epsilon, mean = self.scalar(shifted.inputs[1]), self.skip_qdq(shifted.inputs[0]).producer()
            if epsilon is None or mean is None or not query.is_op(mean, "ReduceMean"):
                continue
            x, square = self.skip_qdq(divide.inputs[0]), self.skip_qdq(mean.inputs[0]).producer()
            axes, last = query.integers(mean, "axes", 1), (query.rank(x) or 0) - 1
            if square is None or axes not in ([-1], [last]):
                continue
            bases = [self.skip_qdq(base) for base in square.inputs]
            if (query.is_op(square, "Mul") and bases == [x, x]) or (
                query.is_op(square, "Pow") and bases[0] is x and self.scalar(bases[1]) == 2
            ):
                return x, scale.ravel().astype(np.float32), float(np.float32(epsilon))
        return None

    def _gated(self, value: ir.Value, node: ir.Node) -> int | None:
        """Appends a `GatedActivation` where `value` is one; else returns None."""
        factors = [self.skip_qdq(factor) for factor in node.inputs]
        for activated, up in (factors, factors[::-1]):
            up_layer = self._linear_layer(up)
            sources = self.activation_sources(activated) if up_layer is not None else set()
            if up_layer is None or len(sources) != 1:
                continue
            (gate,) = sources
            gate_layer = self._linear_layer(gate)
            if gate_layer is None or gate is up or gate is activated or gate_layer.x is not up_layer.x:
                continue
            kind = self.activation_kind(activated, gate)
            width = Heads(1, len(up_layer.scale), LANES if self.for_kernels else 1)
            merged = self._linear(concatenate(*(width.pad_outputs(layer) for layer in (gate_layer, up_layer))))
            out = self._append(GatedActivation, merged, kind)
            if width.padded_size != width.size:
                self.heads[out] = width
            return out
        return None

    def _scaled(self, x: ir.Value, factors: Array) -> int:
        """Appends the product of columns and factors; folds it into a normalization or gated unit that computes `x`."""
        before = self._register(x)
        operation = self.operations[before]
        if isinstance(operation, LayerNorm):
            scale, bias = (array * factors for array in (operation.scale, operation.bias))
            return self._append(LayerNorm, operation.input, scale, bias, operation.epsilon)
        if isinstance(operation, RMSNorm):
            return self._append(RMSNorm, operation.input, operation.scale * factors, operation.epsilon)
        heads = self.heads.get(before)
        if isinstance(operation, GatedActivation) and len(list(x.uses())) == 1:
            linear = self.operations[operation.input]
            assert isinstance(linear, Linear)
            up = factors if heads is None else heads.pad(factors)
            both = np.concatenate([np.ones_like(up), up])
            layer = replace(linear.layer, scale=linear.layer.scale * both, bias=linear.layer.bias * both)
            self.operations[operation.input] = replace(linear, layer=layer)
            return before
        out = self._append(Scale, before, factors if heads is None else heads.pad(factors))
        if heads is not None:
            self.heads[out] = heads
        return out
