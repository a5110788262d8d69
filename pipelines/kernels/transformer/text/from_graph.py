"""Maps the frozen graph of a text encoder to a `TextProgram`: BERT-shaped networks, post- or pre-LN.

The graph is matched by structure as in `mapping.from_graph`, from the value `hidden`, the rows of the last layer, back
to the tokens. In addition:

    embedding    Gather(table, tokens) + (rows of a constant table of positions [+ Gather(table, types)])
    smoothing    Mul by a constant row before linear layers, folded into the LayerNormalization before it
    pooling      one row of `hidden`, identified by its results: mean, maximum or first row, L2-normalized or not
    head         linear layers of the first row, with Tanh or Relu between

All linear layers quantize their inputs dynamically, whatever the graph does: 96.3% of MiniLM's ten nearest texts equal
those of fp32, with the graph's static qparams 95.2%. Weights, smoothing and GPTQ's rounding are the graph's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.kernels.transformer.mapping.from_graph import MASKED, GraphMapper
from pipelines.kernels.transformer.mapping.values import Array, EmbeddingTable
from pipelines.kernels.transformer.operations import Attention, Embedding, LayerNorm, QuantizedAttention, Scale
from pipelines.kernels.transformer.text.program import POOLINGS, SHORTEST, Dense, TextProgram

IDS, MASK, TYPES, HIDDEN = "input_ids", "attention_mask", "token_type_ids", "hidden"
ALIKE = 0.05  # how far a pooled row may be from what it is taken for: quantization's rounding


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
    encoder = mapper.encoder(HIDDEN)
    result = model.graph.outputs[0]
    head = _head(mapper, result)
    pooling, normalize = ("cls", False) if head is not None else _pooling(mapper, result)
    return TextProgram(encoder, mapper.types, pooling, normalize, head or ())


class _TextMapper(GraphMapper):
    """Maps the values of a text encoder."""

    def __init__(self, model: ir.Model) -> None:
        given = {value.name for value in model.graph.inputs}
        if not {IDS, MASK} <= given:
            raise RequestError(f"the graph takes {', '.join(map(str, given))}; expected {IDS} and {MASK}")
        super().__init__(model, tuple(name for name in (MASK, TYPES, IDS) if name in given), "")
        self.types, self.type = 1, 0  # how many, and the one that is probed
        self.mask: ir.Value | None = None  # of the attention that is being mapped

    def _probe(self, name: str, length: int, token: int) -> Array:
        """See `GraphValues._probe`: nothing is masked, and all tokens have one type."""
        value = {MASK: 1, TYPES: self.type}.get(name, token + 1)
        return np.full((1, length), value, np.int64)

    def _input_qparams(self, value: ir.Value | None) -> None:
        """See `GraphValues._input_qparams`: None, as each row is quantized with its own range."""

    def _map_value(self, value: ir.Value) -> int:
        """See `GraphMapper._map_value`."""
        node = value.producer()
        if node is not None and query.is_op(node, "Mul"):
            for one, other in (node.inputs, node.inputs[::-1]):
                factors = self.constant(other)
                if factors is not None and factors.ndim == 1 and factors.size > 1:
                    return self._scaled(self.skip_qdq(one), factors.astype(np.float32))
        return super()._map_value(value)

    def _scaled(self, x: ir.Value, factors: Array) -> int:
        """Appends the product of columns and factors; folds it into a LayerNormalization that computes `x`."""
        before = self._register(x)
        operation = self.operations[before]
        if isinstance(operation, LayerNorm):
            scale, bias = (each * factors for each in (operation.scale, operation.bias))
            return self._append(LayerNorm, operation.input, scale, bias, operation.epsilon)
        heads = self.heads.get(before)
        out = self._append(Scale, before, factors if heads is None else heads.pad(factors))
        if heads is not None:
            self.heads[out] = heads
        return out

    def _attention(self, value: ir.Value, node: ir.Node) -> int:
        """See `GraphMapper._attention`: optionally with a bias by the distance of tokens."""
        self.mask = None
        out = super()._attention(value, node)
        found = self.operations[out]
        assert isinstance(found, Attention)
        bias = None if self.mask is None else self._by_distance(value, self.mask)
        self.operations[out] = QuantizedAttention(found.input, found.heads, out, bias)
        return out

    def _check_mask(self, value: ir.Value, masks: list[ir.Value | None], causal: bool) -> None:
        """See `GraphMapper._check_mask`: masks that hide tokens are refused, a bias of the scores becomes `mask`."""
        for mask in masks:
            few = self._evaluate(value, mask)
            if not few.any():
                continue
            if few.ndim != 4 or few.shape[-1] != few.shape[-2] or self.mask is not None or few.min() < MASKED:
                self.refuse(value, "its mask hides tokens, or is of more than their distance")
            self.mask = mask

    def _by_distance(self, value: ir.Value, mask: ir.Value) -> Array:
        """Returns the bias [heads, 2 P - 1] of a mask that depends only on the distance of two tokens."""
        embedded = self.operations[0]
        assert isinstance(embedded, Embedding)
        length = len(embedded.positions) // self.types
        square = self._evaluate(value, mask, length)[0]
        bias = np.concatenate([square[:, :0:-1, 0], square[:, 0, :]], axis=1)
        distances = np.arange(length) - np.arange(length)[:, None] + length - 1
        if not np.array_equal(bias[:, distances], square):
            self.refuse(value, "its mask is of more than the distance of tokens")
        return np.ascontiguousarray(bias, np.float32)

    def _embedding(self, value: ir.Value, table: EmbeddingTable, positions: ir.Value) -> int:
        """See `GraphMapper._embedding`: positions are rows of constant tables, by position and by type."""
        width = table.weight.shape[1]
        node = positions.producer()
        parts = [positions] if node is None or not query.is_op(node, "Add") else [self.skip_qdq(x) for x in node.inputs]
        longest = 0
        for part in parts:
            source = part.producer()
            array = self.constant(source.inputs[0]) if source is not None else None
            if source is None or array is None or array.ndim != 2 or array.shape[1] != width:
                self.refuse(value, "what is added to the embeddings are no rows of constant tables")
            if query.is_op(source, "Gather"):
                if source.inputs[1] is None or self.skip_qdq(source.inputs[1]).name != TYPES:
                    self.refuse(value, "its rows are gathered otherwise than by tokens and types")
                self.types = len(array)
            else:
                longest = len(array)
        if not longest:
            self.refuse(value, "no table of positions is added to the embeddings")
        tables = []
        for kind in range(self.types):
            self.type = kind
            rows = self._evaluate(value, positions, longest)
            if rows.size != longest * width or not np.array_equal(rows, self._evaluate(value, positions, longest, 1)):
                self.refuse(value, "what is added to the embeddings is more than the rows of its position and type")
            tables.append(rows.reshape(longest, width))
        self.type = 0
        rows = np.ascontiguousarray(np.concatenate(tables), np.float32)
        return self._append(Embedding, table.weight, table.scale, rows)


def _head(mapper: _TextMapper, value: ir.Value) -> list[Dense] | None:
    """Returns the layers that compute `value` from the first row of each text; None for another value."""
    layers: list[Dense] = []
    activation = ""
    value = mapper.skip_qdq(value)
    while (node := value.producer()) is not None:
        if query.is_op(node, "Gather") and node.attributes.get_int("axis", 0) == 1:
            first = mapper.scalar(node.inputs[1]) == 0 and mapper.skip_qdq(node.inputs[0]).name == HIDDEN
            return layers[::-1] if first and not activation else None
        bias = None
        if query.is_op(node, "Tanh", "Relu"):
            activation, value = node.op_type.lower(), mapper.skip_qdq(node.inputs[0])
            continue
        if query.is_op(node, "Add"):
            bias = mapper.constant(node.inputs[1])
            product = mapper.skip_qdq(node.inputs[0])
            node = product.producer()
            if bias is None or node is None:
                return None
        weight = mapper.constant(node.inputs[1]) if query.is_op(node, "MatMul", "Gemm") else None
        if weight is None or weight.ndim != 2:
            return None
        if node.attributes.get_int("transB", 0) == 0:
            weight = weight.T
        if query.is_op(node, "Gemm") and len(node.inputs) > 2:
            bias = mapper.constant(node.inputs[2])
        offset = np.zeros(len(weight), np.float32) if bias is None else np.asarray(bias, np.float32).ravel()
        activation_after, activation, value = activation, "", mapper.skip_qdq(node.inputs[0])
        before = value.producer()
        if before is not None and query.is_op(before, "Mul"):  # smoothing, of a constant row
            factors = mapper.constant(before.inputs[1])
            if factors is None or factors.shape != weight.shape[1:]:
                return None
            weight, value = weight * factors, mapper.skip_qdq(before.inputs[0])
        layers.append(Dense(np.ascontiguousarray(weight, np.float32), offset, activation_after))
    return None


def _pooling(mapper: _TextMapper, result: ir.Value) -> tuple[str, bool]:
    """Identifies pooling, and L2 normalization, by the result for random rows."""
    hidden = mapper.value(HIDDEN)
    width = (query.dimensions(hidden) or [None])[-1]
    if width is None:
        mapper.refuse(hidden, "its width is not known")
    rows = np.random.default_rng(0).standard_normal((1, 7, width)).astype(np.float32)
    inputs = [HIDDEN, *([MASK] if _reads(mapper, result) else [])]
    part = edit.extract(mapper.model, inputs, [str(result.name)])
    feed: dict[str, Any] = {HIDDEN: rows, MASK: np.ones((1, 7), np.int64)}
    session = reference_session.session(part, "mapping it needs")
    (found,) = reference_session.run(session, {str(x.name): feed[str(x.name)] for x in part.graph.inputs})
    if found.shape != (1, width):
        mapper.refuse(result, f"it has the shape {list(found.shape)}, expected [1, {width}]: a row of those before it")
    errors = {}
    for pooling, row in zip(POOLINGS, (rows.mean(axis=1), rows[:, 0], rows.max(axis=1)), strict=True):
        errors[pooling, False] = float(np.abs(found - row).max() / np.abs(row).max())
        unit = row / max(float(np.linalg.norm(row)), SHORTEST)
        errors[pooling, True] = float(np.abs(found - unit).max() / np.abs(unit).max())
    best = min(errors, key=errors.__getitem__)
    if not errors[best] < ALIKE:
        mapper.refuse(result, f"it is neither of {', '.join(POOLINGS)} of the rows before it")
    return best


def _reads(mapper: _TextMapper, result: ir.Value) -> bool:
    """Returns whether `result` depends on the mask."""
    waiting, seen = [result], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value in seen or value.name == HIDDEN:
            continue
        seen.add(value)
        if value.name == MASK:
            return True
        if (node := value.producer()) is not None:
            waiting += [each for each in node.inputs if each is not None]
    return False
