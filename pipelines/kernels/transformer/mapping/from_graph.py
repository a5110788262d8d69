"""Maps the frozen graph of a Transformer to operations over registers.

The graph is matched by structure, from the result back to the tokens: pre- or post-LN, any number of layers, heads and
widths, float weights or int8 weights behind DequantizeLinear. The operations become programs of the native kernels
here, and the ONNX graph of one decoding step in `zoo.translation.search.step_graph`.

    embedding        Gather(table, tokens) [* scale] [-> LayerNormalization] [+ rows of a constant table of positions]
    linear layer     MatMul or Gemm [+ bias], or columns that a Split takes of one
    residual         linear layer [-> Relu], or a recurrence, + value
    feed-forward     linear layer -> Relu, swish, GELU or a gated unit -> linear layer + residual
    recurrence       Scan of cell keep + (1 - keep) value over the tokens -> Relu, with keep = Sigmoid(forget) and both
                     linear layers of one value
    normalization    LayerNormalization, or an RMS norm, over the last axis
    running mean     Scan of cell (t - 1) / t + value / t over the tokens
    gate             Sigmoid(linear layer) times another value, + value
    attention        Softmax(scale * (Q K^T) [+ mask]) V -> Transpose -> Reshape, with Q, K and V each a linear layer ->
                     Reshape -> Transpose into heads: self-attention where all three read one value (one layer of merged
                     QKV then computes them; the mask may be a bias by the distance of tokens), cross-attention where K
                     and V read the encoder's result
    last token       GatherND of the last row

The input of a linear layer is quantized statically, by the Q/DQ pair before it, or dynamically where there is none;
other Q/DQ pairs on activations are skipped. Running means and gates have no native kernel: graphs with them are mapped
for other engines only. Under static quantization a decoder's biases are whole multiples of input scale * weight scale,
as the int32 biases in the graph of one decoding step are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.transformer.mapping.distances import MASKED, MAX_TOKENS
from pipelines.kernels.transformer.mapping.layers import Array, EmbeddingTable, LinearLayer, concatenate
from pipelines.kernels.transformer.mapping.registers import allocate_registers, unify_qparams
from pipelines.kernels.transformer.mapping.rows import RowMapper
from pipelines.kernels.transformer.mapping.values import PROBE
from pipelines.kernels.transformer.operations import (
    Attention,
    CrossAttention,
    Embedding,
    Gate,
    Operation,
    QuantizedAttention,
    Recurrence,
    RMSNorm,
    RunningMean,
    SelfAttention,
    Sum,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram
from pipelines.kernels.transformer.reference.rows import layer_norm
from pipelines.quantization.qdq.scales import weight_qparams


def decoder_program(model: ir.Model) -> DecoderProgram:
    """Maps the decoder of a graph for the native kernels.

    Float weights become int8, symmetric per output channel (scale max|W| / 127).

    Args:
        model: The whole graph, or its part from the encoder's result on. Its inputs are `source` and `target`, the
            encoder's result is `memory`, and `logits` are those of the next token.

    Returns:
        The program.

    Raises:
        RequestError: An operator cannot be mapped; the message names it and the reason.
    """
    return GraphMapper(model, ("source", "target"), "memory").decoder("logits")


def encoder_program(model: ir.Model) -> EncoderProgram:
    """Maps the encoder of a graph for the native kernels, without its padding mask: the native encoder pads nothing.

    Args:
        model: The graph; its input is `source`, its result `memory`.

    Returns:
        The program.

    Raises:
        RequestError: An operator cannot be mapped; the message names it and the reason.
    """
    return GraphMapper(model, ("source",), "").encoder("memory")


def programs(model: ir.Model) -> tuple[EncoderProgram, DecoderProgram]:
    """Maps encoder and decoder; tied embeddings share memory with the weights of the vocabulary projection.

    Args:
        model: The graph.

    Returns:
        The programs of encoder and decoder.

    Raises:
        RequestError: An operator cannot be mapped; the message names it and the reason.
    """
    encoder, decoder = encoder_program(model), decoder_program(model)
    table = decoder.vocabulary.layer.weight.T
    if not np.array_equal(table, decoder.embedding.table):
        table = decoder.embedding.table
    decoder = replace(decoder, operations=[replace(decoder.embedding, table=table), *decoder.operations[1:]])
    if np.array_equal(table, encoder.embedding.table):
        encoder = replace(encoder, operations=[replace(encoder.embedding, table=table), *encoder.operations[1:]])
    return encoder, decoder


class GraphMapper(RowMapper):
    """Maps the encoder or the decoder of a graph.

    Attributes:
        memory_width: Columns of the encoder's result; 0 until cross-attention was mapped.
        reach: Maximum number of tokens by the biases of attention so far.
    """

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str, for_kernels: bool = True) -> None:
        """Wraps a graph.

        Args:
            model: The frozen graph.
            names: Inputs of tokens; the last one is embedded.
            memory: Name of the encoder's result; "" for an encoder.
            for_kernels: See `GraphValues`.
        """
        super().__init__(model, names, memory, for_kernels)
        self.memory_width, self.reach = 0, MAX_TOKENS
        self._parts: dict[int, Array] = {}  # of biases, which `_masks` keeps

    def decoder(self, logits: str) -> DecoderProgram:
        """Maps a decoder.

        Args:
            logits: Name of the logits.

        Returns:
            The program of the decoder.

        Raises:
            RequestError: An operator cannot be mapped; the message names it and the reason.
        """
        operations = self.decoder_operations(logits)
        return DecoderProgram(allocate_registers(unify_qparams(operations)), self.memory_width)

    def decoder_operations(self, logits: str) -> list[Operation]:
        """Maps a decoder.

        Args:
            logits: Name of the logits.

        Returns:
            The operations; each writes a register of its own.

        Raises:
            RequestError: An operator cannot be mapped; the message names it and the reason.
        """
        last = self.value(logits)
        projection = self._linear_layer(last)
        if projection is None:
            self.refuse(last, "expected a matrix product with constant weights, the vocabulary")
        self.operations.append(
            Vocabulary(self._register(projection.x), self._quantized(self._pad_inputs(projection)).row_linear())
        )
        if not isinstance(self.operations[0], Embedding):
            self.refuse(last, "found no embedding of the target tokens before it")
        if not self.memory_width:
            self.refuse(last, f"nothing before it looks at the encoder's result, the value {self.memory}")
        self._limit_tokens()
        return self.operations

    def encoder(self, memory: str) -> EncoderProgram:
        """Maps an encoder.

        Args:
            memory: Name of the encoder's result.

        Returns:
            The program of the encoder.

        Raises:
            RequestError: An operator cannot be mapped; the message names it and the reason.
        """
        last = self.value(memory)
        self._unpadded_register(last, last)
        if not isinstance(self.operations[0], Embedding):
            self.refuse(last, "found no embedding of the source tokens before it")
        self._limit_tokens()
        return EncoderProgram(allocate_registers(unify_qparams(self.operations)))

    def _limit_tokens(self) -> None:
        """Sets the maximum number of tokens where no table of positions limits it."""
        embedding = self.operations[0]
        if isinstance(embedding, Embedding) and embedding.longest is not None:
            self.operations[0] = replace(embedding, longest=self._longest())

    def _longest(self) -> int:
        """Returns the maximum number of tokens by the tables that were mapped so far."""
        first = self.operations[0]
        return len(first.positions) if isinstance(first, Embedding) and first.longest is None else self.reach

    def _map_value(self, value: ir.Value) -> int:
        """Appends the operation that computes `value` and returns its register."""
        node = value.producer()
        if node is None or value.name == self.memory:
            self.refuse(value, "it is read otherwise than by the keys and values of attention")
        if query.is_op(node, "LayerNormalization"):
            return self._layer_norm(value, node)
        if (mapped := self._row_operation(value, node)) is not None:
            return mapped
        if (parts := self._recurrence_parts(value)) is not None:
            return self._recurrence(value, *parts)
        if query.is_op(node, "Relu"):
            layer = self._linear_layer(self.skip_qdq(node.inputs[0]))
            if layer is None:
                self.refuse(value, "a ReLU after something else than a linear layer")
            return self._linear(layer, relu=True)
        if (layer := self._linear_layer(value)) is not None:
            return self._linear(layer)
        if query.is_op(node, "Add"):
            return self._add(value, node)
        if self.memory and query.is_op(node, "GatherND", "Gather"):
            return self._last_token(value, node)
        if query.is_op(node, "Reshape"):
            return self._attention(value, node)
        if not self.for_kernels and query.is_op(node, "Scan"):
            return self._append(RunningMean, self._register(self._mean_source(value, node)))
        if not self.for_kernels and (gate := self._gate_parts(value)) is not None:
            return self._append(Gate, self._register(gate[0]), self._linear(gate[1]))
        if query.is_op(node, "Mul", "Tanh"):
            return self._activation(value)
        self.refuse(value, f"no step of the {self.what} computes this")

    def _row_operation(self, value: ir.Value, node: ir.Node) -> int | None:
        """Appends an RMS norm, an embedding without positions, smoothing or a gated unit; None for anything else."""
        if (norm := self.rms_norm_parts(value)) is not None:
            x, scale, epsilon = norm
            return self._append(RMSNorm, self._unpadded_register(value, x), scale, epsilon)
        if (table := self._embedding_table(value)) is not None:
            table, nothing = self._kept_table(table), np.zeros((1, table.weight.shape[1]), np.float32)
            return self._append(Embedding, table.weight, table.scale, nothing, longest=MAX_TOKENS)
        if not query.is_op(node, "Mul"):
            return None
        for one, other in (node.inputs, node.inputs[::-1]):
            factors = self.constant(other)
            if factors is not None and factors.ndim == 1 and factors.size > 1:
                return self._scaled(self.skip_qdq(one), factors.astype(np.float32))
        if (gated := self._gated(value, node)) is not None:
            return gated
        for one, other in (node.inputs, node.inputs[::-1]):
            if self._is_one(value, self.skip_qdq(other)):
                return self._register(self.skip_qdq(one))
        return None

    def _is_one(self, value: ir.Value, factor: ir.Value) -> bool:
        """Returns whether a factor of `value` is 1 for all tokens but those that attend to nothing."""
        is_constant = self.constant(factor) is not None
        return (
            not is_constant
            and self._depends_on_tokens_alone(factor)
            and bool((self._evaluate(value, factor) == 1).all())
        )

    def _add(self, value: ir.Value, node: ir.Node) -> int:
        """Appends an Add: token plus position embedding, or a linear layer (with ReLU) plus a residual."""
        inputs = [self.skip_qdq(summand) for summand in node.inputs]
        if (embedded := self._embedding_sum(value, inputs)) is not None:
            return embedded
        for one, other in (inputs, inputs[::-1]):
            if (parts := self._recurrence_parts(one)) is not None:
                return self._recurrence(value, *parts, residual=self._unpadded_register(value, other))
            before = one.producer()
            relu = before is not None and query.is_op(before, "Relu")
            layer = self._linear_layer(self.skip_qdq(before.inputs[0]) if relu and before is not None else one)
            if layer is not None:
                return self._linear(layer, relu, self._unpadded_register(value, other))
        for one, other in () if self.for_kernels else (inputs, inputs[::-1]):
            if (gate := self._gate_parts(one)) is not None:
                gated, residual = self._register(gate[0]), self._register(other)
                return self._append(Gate, gated, self._linear(gate[1]), residual=residual)
        return self._append(Sum, self._register(inputs[0]), self._register(inputs[1]))

    def _recurrence(self, value: ir.Value, forget: LinearLayer, layer: LinearLayer, residual: int | None = None) -> int:
        """Appends a `Recurrence` with merged gates."""
        if not self.memory:
            self.refuse(value, "a recurrence in an encoder")
        return self._append(Recurrence, self._linear(concatenate(forget, layer)), residual=residual)

    def _last_token(self, value: ir.Value, node: ir.Node) -> int:
        """Returns the register of all rows where an operator picks the last token's, which a decoding step computes."""
        rows = self.skip_qdq(node.inputs[0])
        indices = self._evaluate(value, node.inputs[1])
        if (
            node.op_type != "GatherND"
            or node.attributes.get_int("batch_dims", 0) != 1
            or not np.array_equal(indices.ravel(), [PROBE - 1])
        ):
            self.refuse(value, "it picks other rows than that of the last token")
        return self._register(rows)

    def _embedding_table(self, value: ir.Value) -> EmbeddingTable | None:
        """Returns the table where `value` is a Gather of its rows by tokens, optionally times a scalar; else None."""
        multiplier = 1.0
        while (node := query.producer(value, "Mul", "Div")) is not None:
            factor, multiplied = self.scalar(node.inputs[1]), node.inputs[0]
            if factor is None and node.op_type == "Mul":
                factor, multiplied = self.scalar(node.inputs[0]), node.inputs[1]
            if factor is None or multiplied is None:
                return self._per_row_scaled(node, multiplier)
            multiplier = multiplier * factor if node.op_type == "Mul" else multiplier / factor
            value = self.skip_qdq(multiplied)
        if (table := self._gathered_table(value)) is None:
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
        return EmbeddingTable(table.astype(np.float32, copy=False), np.full(len(table), multiplier, np.float32))

    def _normalized_table(self, value: ir.Value) -> EmbeddingTable | None:
        """Returns the table where `value` is a LayerNormalization of token embeddings, which are normalized here."""
        node = query.producer(value, "LayerNormalization")
        if node is None:
            return None
        if (table := self._embedding_table(self.skip_qdq(node.inputs[0]))) is None:
            return None
        rows = layer_norm(table.weight * table.scale[:, None], *self._layer_norm_parameters(value, node))
        return EmbeddingTable(rows, np.ones(len(rows), np.float32))

    def _kept_table(self, table: EmbeddingTable) -> EmbeddingTable:
        """Returns the table as an operation takes it: for the native kernels int8 with a scale for each row."""
        if not self.for_kernels or table.weight.dtype == np.int8:
            return table
        scale, integers = weight_qparams(table.weight, 0)
        return EmbeddingTable(integers, scale * table.scale)

    def _per_row_scaled(self, node: ir.Node, multiplier: float) -> EmbeddingTable | None:
        """Returns the table where a Mul multiplies gathered int8 rows by gathered scales, one a row; else None."""
        tables = [self._gathered_table(self.skip_qdq(factor)) for factor in node.inputs]
        for integers, scale in (tables, tables[::-1]):
            if integers is None or scale is None or integers.dtype != np.int8 or scale.shape != (len(integers), 1):
                continue
            return EmbeddingTable(integers, scale.ravel().astype(np.float32) * np.float32(multiplier))
        return None

    def _gathered_table(self, value: ir.Value) -> Array | None:
        """Returns the constant matrix whose rows a Gather takes by tokens; None where `value` is no such Gather."""
        node = query.producer(value, "Gather")
        if node is None or node.attributes.get_int("axis", 0) != 0:
            return None
        indices = self.skip_qdq(node.inputs[1])
        if indices.producer() is not None or indices.name != self.names[-1]:
            return None
        table = self.constant(node.inputs[0])
        if table is None or table.ndim != 2:
            self.refuse(value, "its table is no constant matrix")
        return table

    def _embedding_sum(self, value: ir.Value, summands: list[ir.Value]) -> int | None:
        """Appends a token embedding plus the rows of a constant table of positions; None for another sum."""
        for one, other in (summands, summands[::-1]):
            if (table := self._embedding_table(one)) is not None and self._linear_layer(other) is None:
                return self._embedding(value, table, other)
            if self._depends_on_tokens_alone(other) and (table := self._normalized_table(one)) is not None:
                return self._embedding(value, table, other)
        return None

    def _embedding(self, value: ir.Value, table: EmbeddingTable, positions: ir.Value) -> int:
        """Appends a token embedding plus `positions`, the rows of a constant table."""
        width = table.weight.shape[1]
        node = positions.producer()
        longest = 0
        for array in [] if node is None else map(self.constant, node.inputs):
            if array is not None and array.ndim in (2, 3) and array.shape[-1] == width:
                longest = max(longest, len(array))
        if not longest:
            self.refuse(value, "what is added to the embeddings is no slice of a constant table of positions")
        rows = self._evaluate(value, positions, longest)
        if rows.size != longest * width or not np.array_equal(rows, self._evaluate(value, positions, longest, 1)):
            self.refuse(value, "what is added to the embeddings is more than a position's row")
        rows, table = np.ascontiguousarray(rows.reshape(longest, -1), np.float32), self._kept_table(table)
        return self._append(Embedding, table.weight, table.scale, rows)

    def _attention(self, value: ir.Value, node: ir.Node) -> int:
        """Appends multi-head attention, matched from the Reshape that joins its heads back to Q, K and V."""
        scores, score_scale, masks, weighted = self._attention_parts(value, node)
        queries, heads, query_scale = self.projection(scores.inputs[0], [0, 2, 1, 3])
        keys, key_heads, key_scale = self.projection(scores.inputs[1], [0, 2, 3, 1])
        values, value_heads, value_scale = self.projection(weighted, [0, 2, 1, 3])
        if not heads == key_heads == value_heads or value_scale != 1:
            self.refuse(value, "queries, keys and values have other heads than each other")
        queries = heads.pad_outputs(queries, score_scale * query_scale * key_scale)
        keys, values = heads.pad_outputs(keys), heads.pad_outputs(values)
        is_self = keys.x is values.x and keys.x is queries.x
        biases: list[ir.Value | None] = [
            mask for mask in masks if is_self and mask is not None and any(self._distances(value, mask))
        ]
        others = [mask for mask in masks if mask not in biases]
        self._check_mask(value, others, causal=is_self and bool(self.memory) and not biases)
        if is_self:
            merged = self._linear(concatenate(queries, keys, values))
            if biases:
                out = self._biased_attention(value, merged, biases, heads.count)
            else:
                out = self._append(SelfAttention if self.memory else Attention, merged, heads.count)
        elif keys.x is values.x and self.memory and keys.x.name == self.memory:
            layer = self._quantized(concatenate(keys, values)).row_linear()
            if self.memory_width not in (0, layer.inputs):
                self.refuse(value, f"it takes a memory of width {layer.inputs}, others {self.memory_width}")
            self.memory_width = layer.inputs
            out = self._append(CrossAttention, self._linear(queries), layer, heads.count)
        else:
            self.refuse(
                value, f"its keys and values come neither from its queries' input nor from {self.memory or 'elsewhere'}"
            )
        if heads.padded_size != heads.size:
            self.heads[out] = heads
        return out

    def _biased_attention(self, value: ir.Value, merged: int, biases: list[ir.Value | None], heads: int) -> int:
        """Appends self-attention with a bias by the distance of two tokens."""
        before, after, bias = self._by_distance(value, biases, heads, self._longest())
        if before is not None or after != (0 if self.memory else None):
            self.refuse(value, f"its mask shows other tokens than {'the earlier ones' if self.memory else 'all'}")
        if bias is None:
            return self._append(SelfAttention if self.memory else Attention, merged, heads)
        most = bias.shape[1] // 2 + 1
        self.reach = min(self.reach, most)
        if not self.memory:
            return self._append(QuantizedAttention, merged, heads, bias=bias)
        changes = np.flatnonzero((bias[:, 1:most] != bias[:, :1]).any(axis=0))
        first = int(changes[0]) if changes.size else most - 1  # all tokens further before have the same bias
        return self._append(SelfAttention, merged, heads, bias=self._part(bias, first, most))

    def _part(self, bias: Array, first: int, last: int) -> Array:
        """Returns columns of a bias, as one array for all layers that share it."""
        key = id(bias)
        if key not in self._parts:
            self._parts[key] = np.ascontiguousarray(bias[:, first:last])
        return self._parts[key]

    def _attention_parts(
        self, value: ir.Value, node: ir.Node
    ) -> tuple[ir.Node, float, list[ir.Value | None], ir.Value | None]:
        """Matches Softmax(scores) V before the Reshape that joins heads.

        Args:
            value: The joined heads.
            node: The Reshape.

        Returns:
            The product of queries and keys, its scale, the additive masks, and the values in heads.
        """
        product = self._before_transpose(value, self.skip_qdq(node.inputs[0]), [0, 2, 1, 3]).producer()
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
        return *self._scores(softmax), product.inputs[1]

    def _check_mask(self, value: ir.Value, masks: list[ir.Value | None], causal: bool) -> None:
        """Refuses masks that hide other tokens than the later ones (causal), or any token (not causal)."""
        total: Array = np.zeros((PROBE, PROBE), np.float32)
        for mask in masks:
            total = total + self._evaluate(value, mask).reshape(-1, PROBE)
        visible = np.tril(np.ones((PROBE, PROBE), bool)) if causal else np.ones((PROBE, PROBE), bool)
        if (total[visible] != 0).any() or (total[~visible] > MASKED).any():
            self.refuse(
                value, "its mask lets it look at later tokens" if causal else "its mask hides tokens of the source"
            )
