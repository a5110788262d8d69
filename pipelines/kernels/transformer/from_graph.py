"""A Transformer's frozen graph as programs for the native encoder and decoder.

Matched by structure, from the result back to the tokens: pre- or post-LN, any number of layers, heads and widths, float
weights or int8 ones behind DequantizeLinear.

    embedding        Gather(table, tokens) [* scale] + rows of a constant table of positions
    linear layer     MatMul or Gemm [+ bias], or columns that a Split takes of one
    residual         linear layer [-> Relu], or a recurrence, + value
    feed-forward     linear layer -> Relu, swish or GELU -> linear layer + residual
    recurrence       Scan of cell keep + (1 - keep) value over the tokens -> Relu, with keep = Sigmoid(forget) and both
                     linear layers of one value
    layer norm       LayerNormalization over the last axis
    attention        Softmax(scale * (Q K^T) [+ mask]) V -> Transpose -> Reshape, with Q, K and V each a linear layer ->
                     Reshape -> Transpose into heads: self-attention where all three read one value (one layer of merged
                     QKV then computes them), cross-attention where K and V read the encoder's result
    last token       GatherND of the last row

The input of a linear layer is quantized statically, by the Q/DQ pair before it, or dynamically where there is none;
other Q/DQ pairs on activations are skipped. Under static quantization a decoder's biases are whole multiples of
input scale * weight scale, as int32 biases are in the graph of one decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.program import (
    ACTIVATIONS,
    LANES,
    MEMORY,
    Activation,
    Attention,
    CrossAttention,
    DecoderProgram,
    Embedding,
    EncoderProgram,
    LayerNorm,
    Linear,
    Operation,
    Recurrence,
    RowLinear,
    SelfAttention,
    StaticQParams,
    Vocabulary,
)
from pipelines.quantization.scales import weight_qparams

Array = NDArray[Any]
Floats = NDArray[np.float32]
ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Sigmoid", "Erf", "Tanh", "Pow")  # of which activations are made
ALIKE = 0.02  # how far an activation may be from what it is taken for, on -8 to 8: quantization's rounding
MASKED = -1e4  # a mask adds at most this where attention is hidden
PROBE = 5  # length of the sentence on which masks are evaluated


def decoder_program(
    model: ir.Model, source: str = "source", target: str = "target", memory: str = "memory", logits: str = "logits"
) -> DecoderProgram:
    """The decoder of a graph: from tokens `source` and `target` (all so far) to the `logits` of the next.

    All are values by name, and `memory` is the encoder's result; a graph that was cut there does as well. Float weights
    become int8, symmetric per output channel (scale max|W| / 127). Raises RequestError, naming the operator and the
    reason, for what is no such decoder.
    """
    return _GraphMapper(model, (source, target), memory).decoder(logits)


def encoder_program(model: ir.Model, source: str = "source", memory: str = "memory") -> EncoderProgram:
    """The encoder of a graph, from tokens `source` to `memory`, as `decoder_program`.

    Its padding mask is left out: the native encoder pads nothing.
    """
    return _GraphMapper(model, (source,), "").encoder(memory)


def programs(model: ir.Model) -> tuple[EncoderProgram, DecoderProgram]:
    """The programs of encoder and decoder. Tied embeddings share memory with the weights of the vocabulary
    projection.
    """
    encoder, decoder = encoder_program(model), decoder_program(model)
    table = decoder.vocabulary.layer.weight.T
    if not np.array_equal(table, decoder.embedding.table):
        table = decoder.embedding.table
    decoder = replace(decoder, operations=[replace(decoder.embedding, table=table), *decoder.operations[1:]])
    if np.array_equal(table, encoder.embedding.table):
        encoder = replace(encoder, operations=[replace(encoder.embedding, table=table), *encoder.operations[1:]])
    return encoder, decoder


@dataclass(frozen=True)
class _LinearLayer:
    """x W + b for the value x, quantized by `qparams`: weight int8 [K, N], scale and bias float32 [N]."""

    x: ir.Value
    weight: Array
    scale: Floats
    bias: Floats
    qparams: StaticQParams | None

    def columns(self, first: int, last: int) -> _LinearLayer:
        """The layer that computes columns [first, last)."""
        return replace(
            self, weight=self.weight[:, first:last], scale=self.scale[first:last], bias=self.bias[first:last]
        )

    def row_linear(self) -> RowLinear:
        """The layer as an operand of operations."""
        return RowLinear(np.ascontiguousarray(self.weight), self.scale, self.bias, self.qparams)


@dataclass(frozen=True)
class _EmbeddingTable:
    """Token embeddings: weight int8 [vocabulary, width], scale float32 [vocabulary]."""

    weight: Array
    scale: Floats


@dataclass(frozen=True)
class _Heads:
    """Attention heads: `count` of `size` columns each, padded to `padded_size`, a multiple of `LANES`."""

    count: int
    size: int

    @property
    def padded_size(self) -> int:
        """Columns of a head as the kernels take it."""
        return -(-self.size // LANES) * LANES

    def pad(self, array: Array) -> Array:
        """[..., count * size] -> [..., count * padded_size], heads padded with zeros."""
        if self.padded_size == self.size:
            return array
        parts = array.reshape(*array.shape[:-1], self.count, self.size)
        wide = [(0, 0)] * (parts.ndim - 1) + [(0, self.padded_size - self.size)]
        return np.pad(parts, wide).reshape(*array.shape[:-1], self.count * self.padded_size)

    def pad_outputs(self, layer: _LinearLayer, factor: float = 1.0) -> _LinearLayer:
        """The layer whose result is multiplied by `factor`, its heads padded."""
        scale, bias = layer.scale * np.float32(factor), layer.bias * np.float32(factor)
        return replace(layer, weight=self.pad(layer.weight), scale=self.pad(scale), bias=self.pad(bias))


class _GraphMapper:
    """Maps values of a graph to operations, on demand: each is mapped once, after those that it reads.

    names: the inputs of tokens; the last one is embedded. memory: name of the encoder's result, "" for an encoder.
    """

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str) -> None:
        self.model, self.names, self.memory = model, names, memory
        self.what = "decoder" if memory else "encoder"
        self.operations: list[Operation] = []  # each writes a register of its own
        self.registers: dict[ir.Value, int] = {}
        self.heads: dict[int, _Heads] = {}  # of registers whose heads are padded
        self.memory_width = 0

    def decoder(self, logits: str) -> DecoderProgram:
        """The program that computes the value `logits`."""
        last = self.value(logits)
        projection = self.linear_layer(last)
        if projection is None:
            self.refuse(last, "wanted a matrix product with constant weights, the vocabulary")
        self.operations.append(Vocabulary(self.register(projection.x), self.pad_inputs(projection).row_linear()))
        if not isinstance(self.operations[0], Embedding):
            self.refuse(last, "found no embedding of the target tokens before it")
        if not self.memory_width:
            self.refuse(last, f"nothing before it looks at the encoder's result, the value {self.memory}")
        return DecoderProgram(_allocate_registers(_unify_qparams(self.operations)), self.memory_width)

    def encoder(self, memory: str) -> EncoderProgram:
        """The program that computes the value `memory`."""
        last = self.value(memory)
        self.unpadded_register(last, last)
        if not isinstance(self.operations[0], Embedding):
            self.refuse(last, "found no embedding of the source tokens before it")
        return EncoderProgram(_allocate_registers(_unify_qparams(self.operations)))

    def value(self, name: str) -> ir.Value:
        """The value of this name, an output of the graph or of a node."""
        for value in (*self.model.graph.outputs, *(output for node in self.model.graph for output in node.outputs)):
            if value.name == name:
                return value
        raise RequestError(f"the graph {self.model.graph.name} has no value {name}")

    def refuse(self, value: ir.Value, why: str) -> NoReturn:
        """Raise RequestError, naming the operator that computes `value` and the reason."""
        node = value.producer()
        what = f"the input {value.name}" if node is None else f"{node.op_type} {query.label(node)}"
        raise RequestError(f"the native decoder cannot map {what}: {why}; use another engine")

    # ---------------------------------------------------------------------------------------------------------- values

    def skip_qdq(self, value: ir.Value | None) -> ir.Value:
        """The value before Q/DQ pairs, Cast and Identity."""
        assert value is not None
        while (node := value.producer()) is not None and value.name != self.memory:
            through = query.is_op(node, "QuantizeLinear", "DequantizeLinear", "Identity", "Cast")
            if not through or node.inputs[0] is None or self.constant(node.inputs[0]) is not None:
                break
            value = node.inputs[0]
        return value

    def constant(self, value: ir.Value | None) -> Array | None:
        """A constant, maybe behind DequantizeLinear, Transpose, Identity or a Cast to float32."""
        node = value.producer() if value is not None else None
        if (array := query.constant(value)) is not None or node is None:
            return array
        if (quantized := query.dequantized(value)) is not None:
            integers, scale, zero_point = quantized
            axis = node.attributes.get_int("axis", 1)
            shape = [-1 if i == axis % integers.ndim else 1 for i in range(integers.ndim)] if scale.size > 1 else []
            offset = (
                0 if zero_point is None else zero_point.astype(np.int32).reshape(shape if zero_point.size > 1 else [])
            )
            return np.asarray((integers.astype(np.int32) - offset) * scale.reshape(shape), np.float32)
        if query.is_op(node, "Identity", "Transpose", "Cast") and (array := self.constant(node.inputs[0])) is not None:
            if node.op_type == "Cast":
                return array.astype(np.float32) if node.attributes.get_int("to", 0) == ir.DataType.FLOAT else None
            return (
                array.transpose(node.attributes.get_ints("perm", range(array.ndim)[::-1]))
                if node.op_type == "Transpose"
                else array
            )
        return None

    def scalar(self, value: ir.Value | None) -> float | None:
        """A constant of one element as a number, else None."""
        array = self.constant(value)
        return float(array.item()) if array is not None and array.size == 1 else None

    def int8_weight(self, value: ir.Value | None, transposed: bool) -> tuple[Array, Floats] | None:
        """(int8 [K, N], scale [N]) of a constant matrix: as the graph has it quantized, or quantized here from
        float.
        """
        integers, scale, zero_point = query.dequantized(value) or (None, None, None)
        symmetric = zero_point is None or not zero_point.any()
        if (
            integers is not None
            and scale is not None
            and integers.dtype == np.int8
            and integers.ndim == 2
            and symmetric
        ):
            node = value.producer() if value is not None else None
            assert node is not None
            if scale.size == 1 or node.attributes.get_int("axis", 1) % 2 != transposed:
                integers = integers.T if transposed else integers
                return integers, np.broadcast_to(scale.astype(np.float32).ravel(), integers.shape[1])
        array = self.constant(value)
        if array is None or array.ndim != 2 or array.dtype.kind != "f":
            return None
        scale, integers = weight_qparams((array.T if transposed else array).astype(np.float32), 1)
        return integers, scale

    def linear_layer(self, value: ir.Value) -> _LinearLayer | None:
        """The linear layer that computes `value`, with its bias, or columns of it; None for anything else."""
        node = value.producer()
        if node is None:
            return None
        if query.is_op(node, "Split"):
            return self.split_columns(value, node)
        if query.is_op(node, "Add"):
            for at, other in ((0, 1), (1, 0)):
                added, layer = self.constant(node.inputs[at]), self.linear_layer(self.skip_qdq(node.inputs[other]))
                if added is not None and layer is not None and added.size in (1, len(layer.scale)):
                    return replace(layer, bias=layer.bias + added.astype(np.float32).ravel())
            return None
        gemm = query.is_op(node, "Gemm")
        if not gemm and not query.is_op(node, "MatMul"):
            return None
        weights = self.int8_weight(node.inputs[1], gemm and node.attributes.get_int("transB", 0) != 0)
        if weights is None:
            return None
        bias = np.zeros(weights[0].shape[1], np.float32)
        if gemm:
            if (
                any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
                or node.attributes.get_int("transA", 0) != 0
            ):
                self.refuse(value, "a Gemm with alpha, beta or transA")
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                added = self.constant(node.inputs[2])
                if added is None or added.size not in (1, len(bias)):
                    self.refuse(value, "its bias is no constant vector")
                bias = bias + added.astype(np.float32).ravel()
        return _LinearLayer(self.skip_qdq(node.inputs[0]), *weights, bias, self.input_qparams(node.inputs[0]))

    def input_qparams(self, value: ir.Value | None) -> StaticQParams | None:
        """The qparams of the Q/DQ pair before a linear layer, per-tensor uint8; None where there is no such pair."""
        pair: list[list[Any]] = []
        while value is not None and (node := value.producer()) is not None:
            if query.is_op(node, "DequantizeLinear" if not pair else "QuantizeLinear"):
                pair.append([query.constant(qparam) for qparam in (*node.inputs[1:], None)[:2]])
                if len(pair) == 2:
                    break
            elif not query.is_op(node, "Identity", *(("Transpose", "Reshape", "GatherND") if pair else ("Cast",))):
                return None
            value = node.inputs[0]
        if len(pair) < 2:
            return None
        for one, other in zip(*pair, strict=True):
            if one is None or one.size != 1 or not np.array_equal(one, other):
                return None
        scale, zero_point = pair[0]
        if zero_point.dtype != np.uint8:
            return None
        return StaticQParams(float(np.float32(scale.item())), int(zero_point.item()))

    def split_columns(self, value: ir.Value, node: ir.Node) -> _LinearLayer | None:
        """The columns of a merged linear layer, such as QKV, that a Split gives."""
        whole = self.linear_layer(self.skip_qdq(node.inputs[0]))
        if whole is None:
            return None
        count, at = len(node.outputs), list(node.outputs).index(value)
        sizes = query.integers(node, "split", 1) or [len(whole.scale) // count] * count
        axis = node.attributes.get_int("axis", 0)
        if sum(sizes) != len(whole.scale) or axis not in (-1, (query.rank(node.inputs[0]) or 0) - 1):
            self.refuse(value, "it splits a linear layer otherwise than by columns")
        return whole.columns(sum(sizes[:at]), sum(sizes[: at + 1]))

    def pad_inputs(self, layer: _LinearLayer) -> _LinearLayer:
        """The layer with rows of zeros for the columns that pad its input's heads."""
        heads = self.heads.get(self.register(layer.x))
        return layer if heads is None else replace(layer, weight=heads.pad(layer.weight.T).T)

    # ------------------------------------------------------------------------------------------------------ operations

    def register(self, value: ir.Value) -> int:
        """The register that holds `value`; the operations that compute it are appended once."""
        value = self.skip_qdq(value)
        if value not in self.registers:
            self.registers[value] = self.map_value(value)
        return self.registers[value]

    def append(self, operation: type[Any], *arguments: Any, **options: Any) -> int:
        """Append an operation; returns its register."""
        out = len(self.operations)
        self.operations.append(operation(*arguments, out=out, **options))
        return out

    def map_value(self, value: ir.Value) -> int:
        """Append the operation that computes `value`; returns its register."""
        node = value.producer()
        if node is None or value.name == self.memory:
            self.refuse(value, "it is read otherwise than by the keys and values of attention")
        if query.is_op(node, "LayerNormalization"):
            return self.layer_norm(value, node)
        if (parts := self.recurrence_parts(value)) is not None:
            return self.recurrence(value, *parts)
        if query.is_op(node, "Relu"):
            layer = self.linear_layer(self.skip_qdq(node.inputs[0]))
            if layer is None:
                self.refuse(value, "a ReLU after something else than a linear layer")
            return self.linear(layer, relu=True)
        if (layer := self.linear_layer(value)) is not None:
            return self.linear(layer)
        if query.is_op(node, "Add"):
            return self.add(value, node)
        if self.memory and query.is_op(node, "GatherND", "Gather"):
            return self.last_token(value, node)
        if query.is_op(node, "Reshape"):
            return self.attention(value, node)
        if query.is_op(node, "Mul"):
            return self.activation(value)
        self.refuse(value, f"no step of the {self.what} computes this")

    def layer_norm(self, value: ir.Value, node: ir.Node) -> int:
        """A LayerNormalization over the last axis."""
        scale = self.constant(node.inputs[1])
        bias = self.constant(node.inputs[2]) if len(node.inputs) > 2 else None
        rank = query.rank(node.inputs[0])
        if scale is None or scale.ndim != 1 or (len(node.inputs) > 2 and bias is None):
            self.refuse(value, "its scale and bias are no constant vectors")
        if node.attributes.get_int("axis", -1) not in (-1, (rank or 0) - 1):
            self.refuse(value, "it normalizes over more than the last axis")
        register = self.unpadded_register(value, node.inputs[0])
        scale = scale.astype(np.float32)
        bias = np.zeros_like(scale) if bias is None else bias.astype(np.float32)
        epsilon = float(np.float32(node.attributes.get_float("epsilon", 1e-5)))
        return self.append(LayerNorm, register, scale, bias, epsilon)

    def unpadded_register(self, reader: ir.Value, value: ir.Value | None) -> int:
        """The register of `value`, which `reader` reads: its heads must not be padded."""
        assert value is not None
        register = self.register(value)
        if register in self.heads:
            size = self.heads[register].size
            self.refuse(reader, f"it reads heads of attention of {size} columns, wanted a multiple of {LANES}")
        return register

    def linear(self, layer: _LinearLayer, relu: bool = False, residual: int | None = None) -> int:
        """A linear layer, its ReLU and its residual."""
        # rounded to int32 as in the graph of one decoding step, see `FuseQuantizedLinear`: the same uint8 values follow
        if layer.qparams is not None and self.memory:
            scale = np.float32(layer.qparams.scale) * layer.scale  # 0 in columns that pad heads
            integers = np.rint(np.divide(layer.bias, scale, out=np.zeros_like(scale, np.float64), where=scale > 0))
            layer = replace(layer, bias=integers.astype(np.float32) * scale)
        weights = self.pad_inputs(layer).row_linear()
        return self.append(Linear, self.register(layer.x), weights, relu=relu, residual=residual)

    def add(self, value: ir.Value, node: ir.Node) -> int:
        """An Add: token plus position embedding, or a linear layer (with ReLU) plus a residual."""
        inputs = [self.skip_qdq(summand) for summand in node.inputs]
        for one, other in (inputs, inputs[::-1]):
            if (table := self.embedding_table(one)) is not None:
                return self.embedding(value, table, other)
        for one, other in (inputs, inputs[::-1]):
            if (parts := self.recurrence_parts(one)) is not None:
                return self.recurrence(value, *parts, residual=self.unpadded_register(value, other))
            before = one.producer()
            relu = before is not None and query.is_op(before, "Relu")
            layer = self.linear_layer(self.skip_qdq(before.inputs[0]) if relu and before is not None else one)
            if layer is not None:
                return self.linear(layer, relu, self.unpadded_register(value, other))
        self.refuse(value, "a sum of which no part is a linear layer or an embedding")

    def activation(self, value: ir.Value) -> int:
        """Swish or GELU of one value, however it is written."""
        source: set[ir.Value] = set()
        waiting = [value]
        while waiting:
            each = self.skip_qdq(waiting.pop())
            node = each.producer()
            if self.constant(each) is not None:
                continue
            if node is not None and query.is_op(node, *ELEMENTWISE) and self.linear_layer(each) is None:
                waiting += [x for x in node.inputs if x is not None]
            else:
                source.add(each)
        if len(source) != 1 or (width := (query.dimensions(x := source.pop()) or [None])[-1]) is None:
            self.refuse(value, f"no step of the {self.what} computes this")
        points = np.linspace(-8, 8, width, dtype=np.float32)
        part = edit.extract(self.model, [str(x.name)], [str(value.name)])
        for node in list(part.graph):  # what it computes between is rounded in the graph, and float here
            before = node.inputs[0].producer() if query.is_op(node, "DequantizeLinear") and node.inputs[0] else None
            if before is not None and query.is_op(before, "QuantizeLinear") and before.inputs[0] is not None:
                node.outputs[0].replace_all_uses_with(before.inputs[0])
        feed = {str(x.name): points.reshape([1] * ((query.rank(x) or 1) - 1) + [width])}
        (found,) = reference_session.run(reference_session.session(part, "mapping it needs"), feed)
        errors = {kind: np.abs(found.ravel() - reference.activate(kind, points)).max() for kind in ACTIVATIONS}
        kind = min(errors, key=errors.__getitem__)
        if not errors[kind] < ALIKE:
            self.refuse(value, f"it is neither {' nor '.join(ACTIVATIONS)}")
        return self.append(Activation, self.unpadded_register(value, x), kind)

    def recurrence_parts(self, value: ir.Value) -> tuple[_LinearLayer, _LinearLayer] | None:
        """The layers of the forget gate and of the value of a `Recurrence` that computes `value`; None where none
        does.
        """
        relu = value.producer()
        if relu is None or not query.is_op(relu, "Relu"):
            return None
        cells = self.skip_qdq(relu.inputs[0])
        scan = cells.producer()
        if scan is None or not query.is_op(scan, "Scan"):
            return None
        wanted = "wanted a Scan of cell keep + (1 - keep) value over the tokens, from zeros on"
        body, outputs = scan.attributes["body"].as_graph(), list(scan.outputs)
        one = [scan.attributes.get_ints(f"scan_{each}", [0]) for each in ("input_axes", "output_axes")]
        backward = [scan.attributes.get_ints(f"scan_{each}_directions", []) for each in ("input", "output")]
        if len(scan.inputs) != 3 or cells is not outputs[-1] or len(outputs) != 2 or {1} != {*one[0], *one[1]}:
            self.refuse(value, wanted)
        if any(map(any, backward)) or self.evaluate(value, scan.inputs[0]).any():
            self.refuse(value, wanted)
        cell, *scanned = body.inputs
        after = [self.skip_qdq(each) for each in body.outputs]
        found = {
            (kept, added)
            for kept, added in ((0, 1), (1, 0))
            if after[0] is after[1] and _is_sum_of_product(after[0], cell, scanned[kept], scanned[added])
        }
        if len(found) != 1:
            self.refuse(value, wanted)
        (kept, added) = found.pop()
        keep, product = (self.skip_qdq(scan.inputs[1 + at]) for at in (kept, added))
        sigmoid, mul = keep.producer(), product.producer()
        if sigmoid is None or mul is None or not query.is_op(sigmoid, "Sigmoid") or not query.is_op(mul, "Mul"):
            self.refuse(value, wanted)
        forget = self.linear_layer(self.skip_qdq(sigmoid.inputs[0]))
        for taken, given in (mul.inputs, mul.inputs[::-1]):
            sub = self.skip_qdq(taken).producer()
            layer = self.linear_layer(self.skip_qdq(given))
            if sub is None or not query.is_op(sub, "Sub") or layer is None or forget is None:
                continue
            if self.scalar(sub.inputs[0]) == 1 and self.skip_qdq(sub.inputs[1]) is keep and layer.x is forget.x:
                return forget, layer
        self.refuse(value, wanted)

    def recurrence(
        self, value: ir.Value, forget: _LinearLayer, layer: _LinearLayer, residual: int | None = None
    ) -> int:
        """A `Recurrence`, its gates merged."""
        if not self.memory:
            self.refuse(value, "a recurrence in an encoder")
        return self.append(Recurrence, self.linear(_concatenate(forget, layer)), residual=residual)

    def last_token(self, value: ir.Value, node: ir.Node) -> int:
        """The last row of all: the one that a decoding step computes."""
        rows = self.skip_qdq(node.inputs[0])
        indices = self.evaluate(value, node.inputs[1])
        if (
            node.op_type != "GatherND"
            or node.attributes.get_int("batch_dims", 0) != 1
            or not np.array_equal(indices.ravel(), [PROBE - 1])
        ):
            self.refuse(value, "it picks other rows than that of the last token")
        return self.register(rows)

    def embedding_table(self, value: ir.Value) -> _EmbeddingTable | None:
        """The embedding table where `value` is a Gather of its rows by tokens, maybe times a scalar; else None."""
        multiplier = 1.0
        while (node := value.producer()) is not None and query.is_op(node, "Mul", "Div"):
            factor, multiplied = self.scalar(node.inputs[1]), node.inputs[0]
            if factor is None and node.op_type == "Mul":
                factor, multiplied = self.scalar(node.inputs[0]), node.inputs[1]
            if factor is None or multiplied is None:
                return self.per_row_scaled(node, multiplier)
            multiplier = multiplier * factor if node.op_type == "Mul" else multiplier / factor
            value = self.skip_qdq(multiplied)
        if (table := self.gathered_table(value)) is None:
            return None
        if table.dtype.kind != "f":  # quantized, with one scale behind the Gather
            dequantize = next((use.node for use in value.uses() if use.node.op_type == "DequantizeLinear"), None)
            scale = zero_point = None
            if dequantize is not None:
                scale, zero_point = (query.constant(qparam) for qparam in (*dequantize.inputs[1:], None)[:2])
            if scale is None or scale.size != 1:
                self.refuse(value, "its table has no single scale")
            offset = 0 if zero_point is None else int(zero_point.item())
            table = (table.astype(np.int32) - offset) * scale.astype(np.float32)
        scale, integers = weight_qparams(table.astype(np.float32), 0)
        return _EmbeddingTable(integers, scale * np.float32(multiplier))

    def per_row_scaled(self, node: ir.Node, multiplier: float) -> _EmbeddingTable | None:
        """The embedding table where a Mul multiplies gathered int8 rows by gathered scales, one a row; else None."""
        tables = [self.gathered_table(self.skip_qdq(factor)) for factor in node.inputs]
        for integers, scale in (tables, tables[::-1]):
            if integers is None or scale is None or integers.dtype != np.int8 or scale.shape != (len(integers), 1):
                continue
            return _EmbeddingTable(integers, scale.ravel().astype(np.float32) * np.float32(multiplier))
        return None

    def gathered_table(self, value: ir.Value) -> Array | None:
        """The constant matrix of which a Gather takes rows by tokens; None where `value` is no such Gather."""
        node = value.producer()
        if node is None or not query.is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
            return None
        indices = self.skip_qdq(node.inputs[1])
        if indices.producer() is not None or indices.name != self.names[-1]:
            return None
        table = self.constant(node.inputs[0])
        if table is None or table.ndim != 2:
            self.refuse(value, "its table is no constant matrix")
        return table

    def embedding(self, value: ir.Value, table: _EmbeddingTable, positions: ir.Value) -> int:
        """Token embedding plus `positions`, the rows of a constant table."""
        width = table.weight.shape[1]
        node = positions.producer()
        longest = 0
        for array in [] if node is None else map(self.constant, node.inputs):
            if array is not None and array.ndim in (2, 3) and array.shape[-1] == width:
                longest = max(longest, len(array))
        if not longest:
            self.refuse(value, "what is added to the embeddings is no slice of a constant table of positions")
        rows = self.evaluate(value, positions, longest)
        if rows.size != longest * width or not np.array_equal(rows, self.evaluate(value, positions, longest, 1)):
            self.refuse(value, "what is added to the embeddings is more than a position's row")
        rows = np.ascontiguousarray(rows.reshape(longest, -1), np.float32)
        return self.append(Embedding, table.weight, table.scale, rows)

    def evaluate(self, value: ir.Value, wanted: ir.Value | None, length: int = PROBE, token: int = 0) -> Array:
        """`wanted`, computed for one sentence of `length` times the same token, in source and target alike.

        Refuses, naming `value`, what depends on more than the tokens.
        """
        assert wanted is not None
        if (array := self.constant(wanted)) is not None:
            return array
        inputs = {value.name for value in self.model.graph.inputs}
        try:
            part = edit.extract(self.model, [name for name in self.names if name in inputs], [str(wanted.name)])
        except RequestError:
            self.refuse(value, f"{wanted.name} depends on more than the tokens")
        feed = {
            str(x.name): self.probe(str(x.name), length, token).astype(ir.DataType(x.dtype or 7).numpy())
            for x in part.graph.inputs
        }
        return reference_session.run(reference_session.session(part, "mapping it needs"), feed)[0]

    def probe(self, name: str, length: int, token: int) -> Array:
        """What the input `name` is fed to find out what a value is."""
        return np.full((1, length), token + 1, np.int64)

    # ------------------------------------------------------------------------------------------------------- attention

    def attention(self, value: ir.Value, node: ir.Node) -> int:
        """Multi-head attention, from the Reshape that joins its heads back to queries, keys and values."""
        product = self.before_transpose(value, self.skip_qdq(node.inputs[0]), [0, 2, 1, 3]).producer()
        softmax = None
        if product is not None and query.is_op(product, "MatMul"):
            softmax = self.skip_qdq(product.inputs[0]).producer()
        if (
            product is None
            or softmax is None
            or not query.is_op(softmax, "Softmax")
            or softmax.attributes.get_int("axis", -1) not in (-1, 3)
        ):
            self.refuse(
                value,
                f"no step of the {self.what} reshapes, but attention that joins heads: Softmax, MatMul, Transpose, "
                "Reshape",
            )
        scores, score_scale, masks = self.scores(softmax)
        queries, heads, query_scale = self.projection(scores.inputs[0], [0, 2, 1, 3])
        keys, key_heads, key_scale = self.projection(scores.inputs[1], [0, 2, 3, 1])
        values, value_heads, value_scale = self.projection(product.inputs[1], [0, 2, 1, 3])
        if not heads == key_heads == value_heads or value_scale != 1:
            self.refuse(value, "queries, keys and values have other heads than each other")
        queries = heads.pad_outputs(queries, score_scale * query_scale * key_scale)
        keys, values = heads.pad_outputs(keys), heads.pad_outputs(values)
        is_self = keys.x is values.x and keys.x is queries.x
        self.check_mask(value, masks, causal=is_self and bool(self.memory))
        if is_self:
            merged = self.linear(_concatenate(queries, keys, values))
            out = self.append(SelfAttention if self.memory else Attention, merged, heads.count)
        elif keys.x is values.x and self.memory and keys.x.name == self.memory:
            layer = _concatenate(keys, values).row_linear()
            if self.memory_width not in (0, layer.inputs):
                self.refuse(value, f"it takes a memory of width {layer.inputs}, others {self.memory_width}")
            self.memory_width = layer.inputs
            out = self.append(CrossAttention, self.linear(queries), layer, heads.count)
        else:
            self.refuse(
                value, f"its keys and values come neither from its queries' input nor from {self.memory or 'elsewhere'}"
            )
        if heads.padded_size != heads.size:
            self.heads[out] = heads
        return out

    def scores(self, softmax: ir.Node) -> tuple[ir.Node, float, list[ir.Value | None]]:
        """(the MatMul of queries and keys, its scale, its additive masks) before a Softmax."""
        scale, masks, value = 1.0, [], self.skip_qdq(softmax.inputs[0])
        while (node := value.producer()) is not None and query.is_op(node, "Div", "Mul", "Add"):
            factor = self.scalar(node.inputs[1])
            if node.op_type == "Add":
                producers = [self.skip_qdq(x).producer() for x in node.inputs]
                at = next((i for i, x in enumerate(producers) if x is not None and self.computes_scores(x)), None)
                if at is None:
                    self.refuse(value, "a sum in attention of which no part is the products")
                masks.append(node.inputs[1 - at])
                value = self.skip_qdq(node.inputs[at])
                continue
            if not factor:
                self.refuse(value, "products of attention scaled by more than one number")
            scale = scale / factor if node.op_type == "Div" else scale * factor
            value = self.skip_qdq(node.inputs[0])
        if node is None or not query.is_op(node, "MatMul"):
            self.refuse(value, "wanted the products of queries and keys before a Softmax")
        return node, scale, masks

    def computes_scores(self, node: ir.Node) -> bool:
        """Whether this computes attention scores: products of queries and keys, maybe scaled or masked."""
        if query.is_op(node, "Div", "Mul", "Add"):
            producers = [self.skip_qdq(x).producer() for x in node.inputs]
            return any(producer is not None and self.computes_scores(producer) for producer in producers)
        return query.is_op(node, "MatMul") and all(self.constant(x) is None for x in node.inputs)

    def before_transpose(self, reader: ir.Value, value: ir.Value, perm: list[int]) -> ir.Value:
        """The input of the Transpose `perm` that computes `value`; refuses `reader` for anything else."""
        node = value.producer()
        if node is None or not query.is_op(node, "Transpose") or list(node.attributes.get_ints("perm", [])) != perm:
            self.refuse(reader, f"wanted a Transpose {perm} of the heads before it")
        return self.skip_qdq(node.inputs[0])

    def projection(self, heads: ir.Value | None, perm: list[int]) -> tuple[_LinearLayer, _Heads, float]:
        """The linear layer of queries, keys or values, its heads, and the scalar that they are multiplied by.

        Matches linear layer -> Reshape into heads -> Transpose `perm`, where [0, 2, 3, 1] may be two Transposes.
        """
        value, scale = self.skip_qdq(heads), 1.0
        while (node := value.producer()) is not None and query.is_op(node, "Mul", "Div"):
            if not (factor := self.scalar(node.inputs[1])):
                self.refuse(value, "heads of attention scaled by more than one number")
            scale, value = (scale * factor if node.op_type == "Mul" else scale / factor), self.skip_qdq(node.inputs[0])
        if (
            node is not None
            and query.is_op(node, "Transpose")
            and list(node.attributes.get_ints("perm", [])) == [0, 1, 3, 2]
        ):
            value, perm = self.skip_qdq(node.inputs[0]), [0, 2, 1, 3]
        reshaped = self.before_transpose(value, value, perm)
        reshape, shape, layer = reshaped.producer(), None, None
        if reshape is not None and query.is_op(reshape, "Reshape"):
            shape = query.shape_elements(reshape.inputs[1])
        if reshape is not None and shape is not None and len(shape) == 4:
            layer = self.linear_layer(self.skip_qdq(reshape.inputs[0]))
        if shape is None or layer is None:
            self.refuse(reshaped, "wanted a Reshape of a linear layer into heads")
        width = len(layer.scale)
        count, size = shape[2], shape[3]
        if isinstance(size, int) and size > 0 and (not isinstance(count, int) or count < 1):
            count = width // size
        if (
            not isinstance(count, int)
            or count < 1
            or width % count
            or (isinstance(size, int) and size not in (-1, width // count))
        ):
            self.refuse(reshaped, f"it shapes {width} columns into heads {shape[2:]}")
        return layer, _Heads(count, width // count), scale

    def check_mask(self, value: ir.Value, masks: list[ir.Value | None], causal: bool) -> None:
        """Refuse attention whose masks hide other tokens than the later ones, if it is causal, or any, if not."""
        total: Array = np.zeros((PROBE, PROBE), np.float32)
        for mask in masks:
            total = total + self.evaluate(value, mask).reshape(-1, PROBE)
        visible = np.tril(np.ones((PROBE, PROBE), bool)) if causal else np.ones((PROBE, PROBE), bool)
        if (total[visible] != 0).any() or (total[~visible] > MASKED).any():
            self.refuse(
                value, "its mask lets it look at later tokens" if causal else "its mask hides tokens of the source"
            )


def _is_sum_of_product(value: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value) -> bool:
    """Whether value = a b + c."""
    total = value.producer()
    if total is None or not query.is_op(total, "Add") or c not in total.inputs:
        return False
    (other,) = [each for each in total.inputs if each is not c] or [None]
    product = None if other is None else other.producer()
    return product is not None and query.is_op(product, "Mul") and {*product.inputs} == {a, b}


def _concatenate(*parts: _LinearLayer) -> _LinearLayer:
    """Linear layers of the same input as one, such as merged QKV."""
    weight, scale, bias = (
        np.concatenate([getattr(part, name) for part in parts], -1) for name in ("weight", "scale", "bias")
    )
    qparams = parts[0].qparams if len({part.qparams for part in parts}) == 1 else None
    return _LinearLayer(parts[0].x, weight, scale, bias, qparams)


def _unify_qparams(operations: list[Operation]) -> list[Operation]:
    """Dynamic quantization where layers take one register by different qparams; each register is written once."""
    readers: dict[int, set[StaticQParams | None]] = {}

    def qparams_beside(operation: Linear | CrossAttention | Vocabulary) -> set[StaticQParams | None]:
        return readers.setdefault(MEMORY if isinstance(operation, CrossAttention) else operation.input, set())

    for operation in operations:
        if isinstance(operation, Linear | CrossAttention | Vocabulary):
            qparams_beside(operation).add(operation.layer.qparams)
    unified: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Linear | CrossAttention | Vocabulary) and len(qparams_beside(operation)) > 1:
            operation = replace(operation, layer=replace(operation.layer, qparams=None))
        unified.append(operation)
    return unified


def _allocate_registers(operations: list[Operation]) -> list[Operation]:
    """The same operations with as few registers as will do: one is written again after its last reader."""
    last_reader = {register: i for i, operation in enumerate(operations) for register in _reads(operation).values()}
    allocated: dict[int, int] = {}
    free: list[int] = []
    result: list[Operation] = []
    for i, operation in enumerate(operations):
        reads = _reads(operation)
        changes = {name: allocated[register] for name, register in reads.items()}
        done = [register for register in set(reads.values()) if last_reader[register] == i]
        residual = reads.get("residual")
        if residual in done and residual != reads.get("input"):  # each element is read before it is written
            done.remove(residual)
            free.append(allocated[residual])
        if not isinstance(operation, Vocabulary):
            out = free.pop() if free else len(set(allocated.values()))
            allocated[operation.out] = changes["out"] = out
        free.extend(allocated[register] for register in done)
        result.append(replace(operation, **changes))  # type: ignore[arg-type]
    return result


def _reads(operation: Operation) -> dict[str, int]:
    """The registers that an operation reads, by field."""
    registers = ((name, getattr(operation, name, None)) for name in ("input", "residual"))
    return {name: register for name, register in registers if register is not None}
