"""Maps the frozen graph of a text encoder to a `TextProgram`.

The graph is matched by structure as in `mapping.from_graph` and `text.attention`, from the value `hidden`, the rows of
the last layer, back to the tokens. In addition:

    embedding    Gather(table, tokens) [* scale] [+ rows of a constant table of positions] [+ Gather(table, types)]
    convolution  Concat of Slices of Pad, rows of neighbouring tokens side by side, before a linear layer
    output       the rows of `hidden` or a pooling of them, and layers behind it: `text.outputs`

All linear layers quantize their inputs dynamically, whatever the graph does: 96.3% of MiniLM's ten nearest texts equal
those of fp32, with the graph's static qparams 95.2%. Weights, smoothing and GPTQ's rounding are the graph's.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.transformer.mapping.distances import MAX_TOKENS
from pipelines.kernels.transformer.mapping.layers import Array, EmbeddingTable
from pipelines.kernels.transformer.mapping.values import PROBE
from pipelines.kernels.transformer.operations import (
    Embedding,
    Neighbours,
    QuantizedAttention,
    RowLinear,
)
from pipelines.kernels.transformer.program import EncoderProgram
from pipelines.kernels.transformer.text.attention import AttentionMapper
from pipelines.kernels.transformer.text.outputs import MASK, OutputMapper
from pipelines.kernels.transformer.text.program import TOKENS, L2Norm, TextProgram

IDS, TYPES = "input_ids", "token_type_ids"


def text_program(model: ir.Model) -> TextProgram:
    """Maps a graph from `input_ids`, `attention_mask` and optionally `token_type_ids` to one output.

    Args:
        model: The frozen graph, float or quantized, with the value `hidden`.

    Returns:
        The program.

    Raises:
        RequestError: An operator cannot be mapped; the message names it and the reason.
    """
    mapper = _TextMapper(model)
    output = OutputMapper(mapper, model.graph.outputs[0])
    if output.logits is not None:
        encoder, layer = mapper.with_vocabulary(output.logits)
        return TextProgram(encoder, mapper.types, TOKENS, False, (), layer)
    normalize = bool(output.head) and isinstance(output.head[-1], L2Norm)
    head = output.head[:-1] if normalize else output.head
    return TextProgram(mapper.encoder(str(output.rows.name)), mapper.types, output.pooling, normalize, tuple(head))


class _TextMapper(AttentionMapper):
    """Maps the values of a text encoder."""

    def __init__(self, model: ir.Model) -> None:
        names = {value.name for value in model.graph.inputs}
        if not {IDS, MASK} <= names:
            raise RequestError(f"the graph takes {', '.join(map(str, names))}; expected {IDS} and {MASK}")
        super().__init__(model, tuple(name for name in (MASK, TYPES, IDS) if name in names), "")
        self.types, self.type = 1, 0  # how many, and the one that is probed

    def with_vocabulary(self, logits: ir.Value) -> tuple[EncoderProgram, RowLinear]:
        """Maps the encoder before a last layer, and this layer.

        Args:
            logits: Output of the layer.

        Returns:
            The program of the encoder, and the layer.

        Raises:
            RequestError: An operator cannot be mapped; the message names it and the reason.
        """
        layer = self._linear_layer(logits)
        if layer is None:
            self.refuse(logits, "expected a matrix product with constant weights, the vocabulary")
        return self.encoder(str(layer.x.name)), self._quantized(self._pad_inputs(layer)).row_linear()

    def _longest(self) -> int:
        """See `GraphMapper._longest`."""
        first, lengths = self.operations[0], [MAX_TOKENS]
        if isinstance(first, Embedding) and first.longest is None:
            return len(first.positions) // self.types
        for operation in self.operations:
            if isinstance(operation, QuantizedAttention) and operation.longest is not None:
                lengths.append(operation.longest)
        return min(lengths[1:] or lengths)

    def _probe(self, name: str, length: int, token: int) -> Array:
        """See `GraphValues._probe`: nothing is masked, and all tokens have one type."""
        value = {MASK: 1, TYPES: self.type}.get(name, token + 1)
        return np.full((1, length), value, np.int64)

    def _input_qparams(self, value: ir.Value | None) -> None:
        """See `GraphValues._input_qparams`: None, as each row is quantized with its own range."""

    def _row_operation(self, value: ir.Value, node: ir.Node) -> int | None:
        """See `GraphMapper._row_operation`: and rows of neighbouring tokens side by side."""
        if query.is_op(node, "Concat") and (source := self._neighbours(node)) is not None:
            return self._append(Neighbours, self._unpadded_register(value, source), len(node.inputs))
        return super()._row_operation(value, node)

    def _neighbours(self, concat: ir.Node) -> ir.Value | None:
        """Returns x of Concat(x before, ..., x, ..., x behind), each a Slice of x with rows of zeros at both ends."""
        pads, count = set[ir.Node | None](), len(concat.inputs)
        for i, part in enumerate(concat.inputs):
            slices = query.producer(self.skip_qdq(part), "Slice")
            if slices is None or len(slices.inputs) != 4:
                return None
            start, end, axis = (query.integers(slices, key, k) for k, key in enumerate(("starts", "ends", "axes"), 1))
            last = end is not None and end[0] >= MAX_TOKENS if i == count - 1 else end == [i + 1 - count]
            if start != [i] or axis != [1] or not last:
                return None
            pads.add(self.skip_qdq(slices.inputs[0]).producer())
        pad = pads.pop()
        if (
            pads
            or pad is None
            or not query.is_op(pad, "Pad")
            or pad.attributes.get_string("mode", "constant") != "constant"
        ):
            return None
        edge, before = count // 2, query.producer(pad.inputs[0])
        zero = before.inputs[2] if before is not None and query.is_op(before, "QuantizeLinear") else None
        value, zero_point = (np.array(0) if x is None else self.constant(x) for x in ((*pad.inputs, None)[2], zero))
        if value is None or value != zero_point or query.integers(pad, "pads", 1) != [0, edge, 0, 0, edge, 0]:
            return None
        return self.skip_qdq(pad.inputs[0])

    def _embedding_sum(self, value: ir.Value, summands: list[ir.Value]) -> int | None:
        """See `GraphMapper._embedding_sum`: of rows by position, by type, or both; a residual is no such sum."""
        for one, other in (summands, summands[::-1]):
            before = one.producer()
            nested = [self.skip_qdq(x) for x in before.inputs] if query.is_op(before, "Add") and before else []
            orders = (nested, nested[::-1]) if nested else ()
            for first, others in ((one, [other]), *((x, [y, other]) for x, y in orders)):
                table = self._embedding_table(first)
                parts = [row for x in others if table is not None for row in self._summed(x)]
                if table is not None and all(self._rows_of_table(x, table.weight.shape[1]) is not None for x in parts):
                    return self._embedding_of(value, table, parts)
        return None

    def _summed(self, value: ir.Value) -> list[ir.Value]:
        """Returns the two values whose sum `value` is, or itself."""
        node = value.producer()
        return [self.skip_qdq(x) for x in node.inputs] if query.is_op(node, "Add") and node is not None else [value]

    def _rows_of_table(self, value: ir.Value, width: int) -> Array | None:
        """Returns the constant table [rows, width] whose rows `value` is; None for another value."""
        source = value.producer()
        table = self.constant(source.inputs[0]) if source is not None and source.inputs else None
        return table if table is not None and table.ndim == 2 and table.shape[1] == width else None

    def _embedding_of(self, value: ir.Value, table: EmbeddingTable, parts: list[ir.Value]) -> int:
        """Appends the embedding of tokens plus rows of constant tables, by position and by type."""
        table = self._kept_table(table)
        width = table.weight.shape[1]
        longest = 0
        for part in parts:
            source, rows = part.producer(), self._rows_of_table(part, width)
            assert source is not None and rows is not None
            if not query.is_op(source, "Gather"):
                longest = len(rows)
            elif source.inputs[1] is None or self.skip_qdq(source.inputs[1]).name != TYPES:
                self.refuse(value, "its rows are gathered otherwise than by tokens and types")
            else:
                self.types = len(rows)
        tables = []
        for kind in range(self.types):
            self.type = kind
            rows = np.zeros((longest or PROBE, width), np.float32)
            for part in parts:
                results = [self._evaluate(value, part, len(rows), token) for token in (0, 1)]
                if results[0].size not in (rows.size, width) or not np.array_equal(results[0], results[1]):
                    self.refuse(value, "what is added to the embeddings is more than the rows of its position and type")
                rows = rows + results[0].reshape(-1, width)
            tables.append(rows if longest else rows[:1])
        self.type = 0
        rows = np.ascontiguousarray(np.concatenate(tables), np.float32)
        return self._append(Embedding, table.weight, table.scale, rows, longest=None if longest else MAX_TOKENS)
