"""ONNX graph of one decoding step, written from the operations of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph.builder import GraphBuilder
from pipelines.kernels.transformer.operations import (
    Activation,
    CrossAttention,
    Embedding,
    Gate,
    GatedActivation,
    LayerNorm,
    Linear,
    Operation,
    Recurrence,
    RMSNorm,
    RowLinear,
    RunningMean,
    Scale,
    SelfAttention,
    Sum,
    Vocabulary,
)
from zoo.translation.data.tokens import LOGITS

TOKENS, PARENTS, POSITION, MASK = "tokens", "parents", "position", "memory.mask"
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
Rows = tuple[ir.Value, int]  # float32 [rows, width] and that width


@dataclass(frozen=True)
class Cache:
    """A KV cache, float32 or float16 [rows, heads, tokens, size], or the state of a recurrence, float32 [rows, width].

    Attributes:
        before: Name of the step's input.
        after: Name of the step's output.
        shape: Dimensions; None for the rows, 0 for the tokens.
        dtype: Element type.
    """

    before: str
    after: str
    shape: tuple[int | None, ...]
    dtype: ir.DataType


def linear(
    graph: GraphBuilder, x: ir.Value, layer: RowLinear, name: str, *, matrix: bool, added: bool = False
) -> ir.Value:
    """Appends a fully connected layer in the form that engines run as one operator.

    Static qparams of the input become a Q/DQ pair; int8 weights, and the int32 bias of an int8 layer of a matrix, get a
    DequantizeLinear each. That bias is round(b / (s_x s_w)); it stays float32 where it does not fit.

    Args:
        graph: The graph to append to.
        x: float32 [..., K].
        layer: The layer, of int8 or float32 weights [K, N].
        name: Begins the names of its weights.
        matrix: Whether `x` has rank 2; such a layer becomes a Gemm.
        added: Whether an Add follows. onnxruntime fuses a MatMul and an Add into a float Gemm, which dequantizes int8
            weights at every call, so an int8 layer without bias becomes a Gemm there.

    Returns:
        float32 [..., N].
    """
    is_int8, biased = layer.weight.dtype == np.int8, bool(layer.bias.any())
    weight = graph.weight(f"{name}.weight", layer.weight)
    if layer.qparams is not None:
        scale, zero = np.float32(layer.qparams.scale), np.uint8(layer.qparams.zero_point)
        x = graph("DequantizeLinear", graph("QuantizeLinear", x, scale, zero, dtype=ir.DataType.UINT8), scale, zero)
    if is_int8:
        scales = graph.weight(f"{name}.weight.scale", layer.scale)
        zeros = graph.weight(f"{name}.weight.zero_point", np.zeros(layer.outputs, np.int8))
        weight = graph("DequantizeLinear", weight, scales, zeros, axis=1)
    if matrix and biased and (bias := _gemm_bias(graph, layer, name)) is not None:
        return graph("Gemm", x, weight, bias)
    if matrix and not biased and is_int8 and added:
        return graph("Gemm", x, weight)
    y = graph("MatMul", x, weight)
    return graph("Add", y, graph.weight(f"{name}.bias", layer.bias)) if biased else y


def _gemm_bias(graph: GraphBuilder, layer: RowLinear, name: str) -> ir.Value | None:
    """Returns the bias as Gemm takes it; None if it cannot be represented."""
    if layer.weight.dtype != np.int8:
        return graph.weight(f"{name}.bias", layer.bias)
    if layer.qparams is None:
        return None
    scale = np.float32(layer.qparams.scale) * layer.scale
    integers = np.rint(layer.bias / scale.astype(np.float64))
    if np.abs(integers).max() > np.iinfo(np.int32).max:
        return None
    bias = graph.weight(f"{name}.bias", integers.astype(np.int32))
    return graph("DequantizeLinear", bias, graph.weight(f"{name}.bias.scale", scale), axis=0)


class StepWriter:
    """Writes the operations of a decoder as the graph of one decoding step.

    Inputs of the graph: tokens int64 [rows], the newest of every row; parents int64 [rows], the row of the step before
    that each row continues; position int64 [], the number of tokens before; `memory.mask` float32 [sentences, 1, 1,
    source]; keys float32 [sentences, heads, size, source] and values float32 [sentences, heads, source, size] of each
    cross-attention; the caches. Outputs: logits float32 [rows, vocabulary] and the caches, one token longer. rows is a
    multiple of sentences: the rows of a sentence are adjacent.

    Attributes:
        graph: The graph of the step.
        caches: Its caches, in the order of the outputs after the logits.
        memory: Names of the keys and of the values of each cross-attention, in order.
    """

    def __init__(self, operations: Sequence[Operation], cache_dtype: ir.DataType, opsets: dict[str, int]) -> None:
        """Writes the graph.

        Args:
            operations: Those of `GraphMapper.decoder_operations`; each writes a register of its own.
            cache_dtype: float32 or float16, of cached keys and values.
            opsets: Opset imports of the graph.
        """
        self.graph = ir.Graph([], [], nodes=[], name="step", opset_imports=opsets)
        self.caches: list[Cache] = []
        self.memory: list[tuple[str, str]] = []
        self._add = GraphBuilder(self.graph, "step/", {LOGITS})
        self._tokens, self._parents = (self._add.input(name, INT64, ["rows"]) for name in (TOKENS, PARENTS))
        self._position = self._add.input(POSITION, INT64, [])
        self._mask = self._add.input(MASK, FLOAT, ["sentences", 1, 1, None])
        self._cache_dtype = cache_dtype
        self._grown: list[ir.Value] = []  # the caches after the step
        self._registers: list[ir.Value] = []
        self._widths: list[int] = []
        self._columns: ir.Value | None = None  # of biases: minus the number of tokens since each one
        self._biases: dict[int, ir.Value] = {}  # by the identity of their arrays, which the operations keep
        for number, operation in enumerate(operations):
            rule = self._RULES[type(operation)]
            result, width = rule(self, operation, f"{number}.{type(operation).__name__.lower()}")
            self._registers.append(result)
            self._widths.append(width)
        result.name, result.shape = LOGITS, ir.Shape(["rows", width])
        self.graph.outputs.extend([result, *self._grown])

    # ----------------------------------------------------------------------------------------- one rule an operation

    def _embedding(self, operation: Embedding, name: str) -> Rows:
        table = self._add.weight(f"{name}.table", operation.table)
        if operation.table.dtype == np.int8:
            scales = self._add.weight(f"{name}.scale", operation.scale[:, None])
            integers = self._add("Gather", table, self._tokens, dtype=ir.DataType.INT8)
            rows = self._add("Mul", self._add("Cast", integers), self._add("Gather", scales, self._tokens))
        else:
            rows = self._add("Gather", table, self._tokens)
            if (factor := operation.scale[0]) != 1:
                rows = self._add("Mul", rows, factor)
        if operation.longest is None:
            positions = self._add.weight(f"{name}.positions", operation.positions)
            rows = self._add("Add", rows, self._add("Gather", positions, self._position))
        elif operation.positions.any():
            rows = self._add("Add", rows, self._add.weight(f"{name}.row", operation.positions))
        return rows, operation.table.shape[1]

    def _layer_norm(self, operation: LayerNorm, name: str) -> Rows:
        scale, bias = (self._add.weight(f"{name}.{kind}", getattr(operation, kind)) for kind in ("scale", "bias"))
        x, width = self._read(operation.input)
        return self._add("LayerNormalization", x, scale, bias, axis=-1, epsilon=operation.epsilon), width

    def _rms_norm(self, operation: RMSNorm, name: str) -> Rows:
        x, width = self._read(operation.input)
        mean = self._add("ReduceMean", self._add("Mul", x, x), [-1], keepdims=1)
        unit = self._add("Div", x, self._add("Sqrt", self._add("Add", mean, operation.epsilon)))
        return self._add("Mul", unit, self._add.weight(f"{name}.scale", operation.scale)), width

    def _scale(self, operation: Scale, name: str) -> Rows:
        x, width = self._read(operation.input)
        return self._add("Mul", x, self._add.weight(f"{name}.factors", operation.factors)), width

    def _linear(self, operation: Linear, name: str) -> Rows:
        x, _ = self._read(operation.input)
        is_added = operation.residual is not None and not operation.relu
        y = linear(self._add, x, operation.layer, name, matrix=True, added=is_added)
        y = self._add("Relu", y) if operation.relu else y
        return self._plus(y, operation.residual), operation.layer.outputs

    def _vocabulary(self, operation: Vocabulary, name: str) -> Rows:
        x, _ = self._read(operation.input)
        return linear(self._add, x, operation.layer, name, matrix=True), operation.layer.outputs

    def _activation(self, operation: Activation, name: str) -> Rows:
        x, width = self._read(operation.input)
        return self._activated(operation.kind, x), width

    def _gated_activation(self, operation: GatedActivation, name: str) -> Rows:
        merged, width = self._read(operation.input)
        gate, up = self._add.split(merged, [width // 2] * 2)
        return self._add("Mul", self._activated(operation.kind, gate), up), width // 2

    def _self_attention(self, operation: SelfAttention, name: str) -> Rows:
        merged, width = self._read(operation.input)
        width //= 3
        heads = operation.heads
        parts = self._add.split(merged, [width] * 3)
        queries, *newest = (self._add("Reshape", part, [-1, heads, 1, width // heads]) for part in parts)
        shape = (None, heads, 0, width // heads)
        keys, values = (
            self._cache(f"{name}.{kind}", x, shape) for kind, x in zip(("keys", "values"), newest, strict=True)
        )
        keys = self._as_float(self._add("Transpose", keys, dtype=self._cache_dtype, perm=[0, 1, 3, 2]))
        scores = self._add("MatMul", queries, keys)
        if operation.bias is not None:
            scores = self._add("Add", scores, self._position_bias(operation.bias, name))
        weights = self._add("Softmax", scores, axis=-1)
        rows = self._add("MatMul", weights, self._as_float(values))
        return self._add("Reshape", rows, [-1, width]), width

    def _cross_attention(self, operation: CrossAttention, name: str) -> Rows:
        x, width = self._read(operation.input)
        heads, size = operation.heads, width // operation.heads
        keys = self._add.input(f"{name}.keys", FLOAT, ["sentences", heads, size, None])
        values = self._add.input(f"{name}.values", FLOAT, ["sentences", heads, None, size])
        self.memory.append((str(keys.name), str(values.name)))
        sentences = self._add("Shape", self._mask, dtype=INT64, start=0, end=1)
        shape = self._add("Concat", sentences, [-1, heads, size], dtype=INT64, axis=0)
        queries = self._add("Transpose", self._add("Reshape", x, shape), perm=[0, 2, 1, 3])
        scores = self._add("Add", self._add("MatMul", queries, keys), self._mask)
        rows = self._add("MatMul", self._add("Softmax", scores, axis=-1), values)
        rows = self._add("Transpose", rows, perm=[0, 2, 1, 3])
        return self._add("Reshape", rows, [-1, width]), width

    def _recurrence(self, operation: Recurrence, name: str) -> Rows:
        gates, width = self._read(operation.input)
        forget, value = self._add.split(gates, [width // 2] * 2)
        keep = self._add("Sigmoid", forget)
        added = self._add("Mul", self._add("Sub", 1.0, keep), value)
        cell = self._state(name, width // 2, lambda before: self._add("Add", self._add("Mul", before, keep), added))
        return self._plus(self._add("Relu", cell), operation.residual), width // 2

    def _running_mean(self, operation: RunningMean, name: str) -> Rows:
        x, width = self._read(operation.input)
        total = self._state(name, width, lambda before: self._add("Add", before, x))
        count = self._add("Cast", self._add("Add", self._position, 1, dtype=INT64))
        return self._add("Div", total, count), width

    def _gate(self, operation: Gate, name: str) -> Rows:
        x, width = self._read(operation.input)
        gate, _ = self._read(operation.gate)
        return self._plus(self._add("Mul", self._add("Sigmoid", gate), x), operation.residual), width

    def _sum(self, operation: Sum, name: str) -> Rows:
        x, width = self._read(operation.input)
        return self._plus(x, operation.residual), width

    _RULES: ClassVar[dict[type[Any], Callable[[StepWriter, Any, str], Rows]]] = {
        Embedding: _embedding,
        LayerNorm: _layer_norm,
        RMSNorm: _rms_norm,
        Scale: _scale,
        GatedActivation: _gated_activation,
        Linear: _linear,
        Vocabulary: _vocabulary,
        Activation: _activation,
        SelfAttention: _self_attention,
        CrossAttention: _cross_attention,
        Recurrence: _recurrence,
        RunningMean: _running_mean,
        Gate: _gate,
        Sum: _sum,
    }

    # ------------------------------------------------------------------------------------------------------- helpers

    def _read(self, register: int) -> Rows:
        """Returns a register and its width."""
        return self._registers[register], self._widths[register]

    def _plus(self, y: ir.Value, residual: int | None) -> ir.Value:
        """Adds a register to `y`, if there is one."""
        return y if residual is None else self._add("Add", self._registers[residual], y)

    def _activated(self, kind: str, x: ir.Value) -> ir.Value:
        """Applies an activation, one of `GRAPH_ACTIVATIONS`."""
        if kind == "swish":
            return self._add("Mul", x, self._add("Sigmoid", x))
        if kind == "tanh":
            return self._add("Tanh", x)
        if kind == "gelu_tanh":
            cube = self._add("Mul", self._add("Mul", self._add("Mul", x, x), x), 0.044715)
            share = self._add("Tanh", self._add("Mul", self._add("Add", x, cube), math.sqrt(2 / math.pi)))
            return self._add("Mul", self._add("Mul", x, self._add("Add", share, 1.0)), 0.5)
        share = self._add("Add", self._add("Erf", self._add("Div", x, math.sqrt(2))), 1.0)
        return self._add("Mul", self._add("Mul", x, share), 0.5)

    def _position_bias(self, bias: NDArray[np.float32], name: str) -> ir.Value:
        """Returns the bias [heads, R] of `SelfAttention` for all tokens so far, [heads, 1, tokens]."""
        if id(bias) not in self._biases:
            if self._columns is None:
                count = self._add("Add", self._position, 1, dtype=INT64)
                self._columns = self._add("Sub", self._add.arange(count), self._position, dtype=INT64)
            columns = self._add("Max", self._add("Add", self._columns, bias.shape[1] - 1, dtype=INT64), 0, dtype=INT64)
            rows = self._add("Gather", self._add.weight(f"{name}.bias", bias), columns, axis=1)
            self._biases[id(bias)] = self._add("Unsqueeze", rows, [1])
        return self._biases[id(bias)]

    def _as_float(self, x: ir.Value) -> ir.Value:
        """Casts cached values to float32."""
        return x if self._cache_dtype == FLOAT else self._add("Cast", x)

    def _cache(self, name: str, newest: ir.Value, shape: tuple[int | None, ...]) -> ir.Value:
        """Appends the newest key or value, [rows, heads, 1, size], to its cache.

        Returns those of all tokens, [rows, heads, tokens, size].
        """
        dtype = self._cache_dtype
        newest = newest if dtype == FLOAT else self._add("Cast", newest, dtype=dtype)
        before = self._add.input(f"{name}.before", dtype, ["before", shape[1], "length", shape[3]])
        moved = self._add("Gather", before, self._parents, dtype=dtype)
        return self._keep(before, self._add("Concat", moved, newest, dtype=dtype, axis=2), shape)

    def _state(self, name: str, width: int, update: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """Updates the state of a recurrence, float32 [rows, width].

        update: Computes the state after the newest token from the previous one.
        """
        before = self._add.input(f"{name}.before", FLOAT, ["before", width])
        return self._keep(before, update(self._add("Gather", before, self._parents)), (None, width))

    def _keep(self, before: ir.Value, after: ir.Value, shape: tuple[int | None, ...]) -> ir.Value:
        """Makes `after` an output that becomes the input `before` of the next step."""
        after.shape = ir.Shape(["rows", *(size or None for size in shape[1:])])
        self.caches.append(Cache(str(before.name), str(after.name), shape, after.dtype or FLOAT))
        self._grown.append(after)
        return after
