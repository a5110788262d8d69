"""Maps attention of text encoders: normalized and rotated heads, grouped keys, windows and biases by distance.

rotary       Add, Mul, Neg, Concat, Slice of columns and of tables by position, identified by their results
grouped keys Reshape(Expand(Unsqueeze(heads)))
masks        any function of key - query, computed for all distances at once: a window, and a bias within it
positions    GatherElements(MatMul(queries or keys, table), row by distance), as DeBERTa's
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.transformer.mapping.distances import MAX_TOKENS
from pipelines.kernels.transformer.mapping.from_graph import GraphMapper
from pipelines.kernels.transformer.mapping.layers import Array, Heads, LinearLayer, concatenate
from pipelines.kernels.transformer.mapping.values import PROBE
from pipelines.kernels.transformer.operations import (
    COLUMNS,
    Disentangled,
    HeadNorm,
    PartNorms,
    QuantizedAttention,
    Rotary,
)

ROTATION = ("Add", "Sub", "Mul", "Neg", "Concat", "Slice", "Split")  # operators of rotary positions
ALIKE = 1e-4  # how far rotated columns may be from `Rotary`
_Source = tuple[ir.Value, list[int]]  # a value, and the axes of its Transpose


@dataclass(frozen=True)
class _Operand:
    """Queries, keys or values of attention.

    Attributes:
        layer: The linear layer that computes them.
        heads: Its heads.
        scale: Multiplier of all heads.
        norm: Scale [size] and epsilon of the RMS normalization of a head, or None.
        rotary: Rotary positions, or None.
        row_norm: Scale, bias, [columns of the layer], and epsilon of the layer normalization of all heads, or None.
    """

    layer: LinearLayer
    heads: Heads
    scale: float
    norm: tuple[Array, float] | None
    rotary: Rotary | None
    row_norm: tuple[Array, Array, float] | None


@dataclass(frozen=True)
class _PositionPart:
    """Scores of content and relative position.

    Attributes:
        by_query: Whether the content is that of queries; else of keys.
        content: Queries or keys, in heads.
        table: Keys or queries of positions, float32 [heads, size, rows].
        index: Row of each token whose content it is and each other token, by the distance of the other token.
    """

    by_query: bool
    content: ir.Value
    table: Array
    index: ir.Value


class AttentionMapper(GraphMapper):
    """Maps attention to `QuantizedAttention`."""

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str) -> None:
        super().__init__(model, names, memory)
        self._by_tokens: dict[ir.Value, bool] = {}
        self._position_rows: dict[ir.Value, Array] = {}
        self._rotaries: dict[tuple[ir.Value, ...], Rotary] = {}

    def _attention(self, value: ir.Value, node: ir.Node) -> int:
        """See `GraphMapper._attention`."""
        scores, scale, masks, weighted = self._attention_parts(value, node)
        queries, keys = self._operand(value, scores.inputs[0]), self._operand(value, scores.inputs[1], transposed=True)
        values = self._operand(value, weighted)
        heads, key_heads = queries.heads, keys.heads
        if key_heads != values.heads or heads.size != key_heads.size or heads.count % key_heads.count:
            self.refuse(value, "queries, keys and values have other heads than each other")
        if values.scale != 1 or any((values.norm, values.rotary, values.row_norm)):
            self.refuse(value, "its values are scaled, normalized or rotated")
        if not keys.layer.x is values.layer.x is queries.layer.x:
            self.refuse(value, "its queries, keys and values read different values")
        if (queries.norm is None) != (keys.norm is None) or queries.rotary is not keys.rotary:
            self.refuse(value, "its queries and keys are normalized or rotated differently")
        parts = [part for mask in masks if (part := self._position_part(mask)) is not None]
        masks = [mask for mask in masks if self._position_part(mask) is None]
        factor = scale * queries.scale * keys.scale
        norm = None
        if queries.norm is not None and keys.norm is not None:
            norm, factor = self._head_norm(value, heads, queries.norm, keys.norm, factor), 1.0
        folded = factor if queries.row_norm is None else 1.0
        layers = (heads.pad_outputs(queries.layer, folded), *(key_heads.pad_outputs(x.layer) for x in (keys, values)))
        merged = self._linear(concatenate(*layers))
        if queries.row_norm is not None or keys.row_norm is not None:
            merged = self._part_norms(value, merged, queries, keys, factor)
        longest = self._longest() if queries.rotary is None else len(queries.rotary.cos)
        before, after, bias = self._by_distance(value, masks, heads.count, longest)
        positions = None
        if parts:
            contents = self._source(scores.inputs[0]), self._source(scores.inputs[1], swapped=True)
            positions = self._disentangled(value, parts, contents, heads, factor, longest)
        out = self._append(
            QuantizedAttention,
            merged,
            heads.count,
            bias=bias,
            key_heads=None if key_heads.count == heads.count else key_heads.count,
            before=before,
            after=after,
            norm=norm,
            rotary=queries.rotary,
            positions=positions,
        )
        if heads.padded_size != heads.size:
            self.heads[out] = heads
        return out

    def _position_part(self, value: ir.Value | None) -> _PositionPart | None:
        """Matches scores of content and relative position: GatherElements(MatMul(content, table), index)."""
        node = self.skip_qdq(value).producer()
        by_query = not query.is_op(node, "Transpose")
        if node is not None and not by_query:
            if list(node.attributes.get_ints("perm", [])) != [0, 1, 3, 2]:
                return None
            node = self.skip_qdq(node.inputs[0]).producer()
        if node is None or not query.is_op(node, "GatherElements") or node.attributes.get_int("axis", 0) not in (-1, 3):
            return None
        products = self.skip_qdq(node.inputs[0]).producer()
        table = self.constant(products.inputs[1]) if products is not None and query.is_op(products, "MatMul") else None
        if products is None or table is None or table.ndim != 3:
            return None
        index = self.skip_qdq(node.inputs[1])
        expand = index.producer()
        if expand is not None and query.is_op(expand, "Expand"):
            index = self.skip_qdq(expand.inputs[0])
        return _PositionPart(by_query, self.skip_qdq(products.inputs[0]), table.astype(np.float32), index)

    def _source(self, value: ir.Value | None, swapped: bool = False) -> _Source:
        """Returns the value before all Transposes, and the axes of both together.

        Args:
            value: Queries or keys, in heads.
            swapped: Whether the last two axes are swapped once more.
        """
        axes, value = [0, 1, 3, 2] if swapped else [0, 1, 2, 3], self.skip_qdq(value)
        while (node := query.producer(value, "Transpose")) is not None:
            perm = node.attributes.get_ints("perm", [])
            if len(perm) != len(axes):
                break
            axes, value = [perm[axis] for axis in axes], self.skip_qdq(node.inputs[0])
        return value, axes

    def _disentangled(
        self,
        value: ir.Value,
        parts: list[_PositionPart],
        contents: tuple[_Source, _Source],
        heads: Heads,
        factor: float,
        longest: int,
    ) -> Disentangled:
        """Returns the tables of relative positions as codes; `factor` was folded into the layer of the queries."""
        tables: dict[bool, tuple[Array, Array]] = {}
        rows: Array | None = None
        for part in parts:
            own_rows = self._rows_by_distance(value, part.index, longest)
            if not part.by_query:  # by the distance of the key from the query
                own_rows = np.ascontiguousarray(own_rows[::-1])
            if self._source(part.content) != contents[not part.by_query] or part.by_query in tables:
                self.refuse(value, "its scores of positions read other values than its queries and keys")
            if part.table.shape != parts[0].table.shape:
                self.refuse(value, "its scores of positions have tables of different shapes")
            rows = own_rows if rows is None else rows
            order = np.arange(part.table.shape[2])  # row of this table in the place of each row
            order[rows] = own_rows
            if not np.array_equal(order[rows], own_rows):
                self.refuse(value, "its scores of positions share other rows for queries than for keys")
            columns = part.table.transpose(0, 2, 1)[:, order]  # [heads, rows, size]
            columns = columns / np.float32(factor if part.by_query else 1)
            columns = np.pad(columns, [(0, 0), (0, 0), (0, heads.padded_size - heads.size)])
            largest = np.abs(columns).max(axis=1)
            scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
            tables[part.by_query] = np.rint(columns / scale[:, None]).astype(np.int8), scale
        assert rows is not None
        # distances whose rows have the same codes share the first of them: beyond some distance, all do
        codes = np.concatenate([table for table, _ in tables.values()]).swapaxes(0, 1)
        _, first, same = np.unique(codes.reshape(len(codes), -1), axis=0, return_index=True, return_inverse=True)
        rows = first[same.ravel()].astype(np.int32)[rows]
        return Disentangled(rows, *tables.get(True, (None, None)), *tables.get(False, (None, None)))

    def _rows_by_distance(self, value: ir.Value, index: ir.Value, longest: int) -> Array:
        """Returns the row of relative positions by distance, int32 [2 P - 1]."""
        if index not in self._position_rows:
            row = self._distance_row(value, index, longest)
            if row is None or len(row) != 1:
                self.refuse(value, "its scores of positions are of more than the distance of tokens")
            self._position_rows[index] = row[0].astype(np.int32)
        return self._position_rows[index]

    def _head_norm(
        self,
        value: ir.Value,
        heads: Heads,
        query_norm: tuple[Array, float],
        key_norm: tuple[Array, float],
        factor: float,
    ) -> HeadNorm:
        """Returns the normalization of padded heads; the scale of the products is folded into that of the queries."""
        (query_scale, epsilon), (key_scale, key_epsilon) = query_norm, key_norm
        if epsilon != key_epsilon or not query_scale.size == key_scale.size == heads.size:
            self.refuse(value, "its queries and keys are normalized differently")
        share = np.float32(heads.size / heads.padded_size)  # the mean of squares is of the padded columns
        epsilon = float(np.float32(epsilon * share))

        def padded(row: Array) -> Array:
            return np.pad(row * np.sqrt(share), [(0, heads.padded_size - heads.size)]).astype(np.float32)

        return HeadNorm(padded(query_scale * np.float32(factor)), padded(key_scale), epsilon)

    def _part_norms(self, value: ir.Value, merged: int, queries: _Operand, keys: _Operand, factor: float) -> int:
        """Appends the norms of all heads of queries and of keys; `factor` is folded into that of the queries."""
        heads, norms = queries.heads, (queries.row_norm, keys.row_norm)
        if norms[0] is None or norms[1] is None or norms[0][2] != norms[1][2] or keys.heads != heads:
            self.refuse(value, "its queries and keys are normalized differently")
        columns = heads.count * heads.size
        if heads.padded_size != heads.size or columns % COLUMNS:
            self.refuse(
                value, f"norms of {heads.count} heads of {heads.size} columns; expected a multiple of {COLUMNS} in all"
            )
        factors = np.array([[factor], [1]], np.float32)
        scale, bias = (np.stack([norm[i] for norm in norms if norm]) * factors for i in range(2))
        return self._append(PartNorms, merged, scale, bias, norms[0][2])

    # -------------------------------------------------------------------------------------------------------- operands

    def _operand(self, reader: ir.Value, value: ir.Value | None, transposed: bool = False) -> _Operand:
        """Matches linear layer -> Reshape into heads, with RMSNorm, Transpose, rotary positions and repeated heads.

        Args:
            reader: The value that is mapped.
            value: Queries, keys or values, in heads.
            transposed: Whether the last two axes are swapped, as those of keys are.

        Returns:
            The operand.
        """
        value, scale, by_heads = self.skip_qdq(value), 1.0, False
        norm: tuple[Array, float] | None = None
        rotary: Rotary | None = None
        source: ir.Value | None
        while (node := value.producer()) is not None:
            if query.is_op(node, "Mul", "Div") and (factor := self.scalar(node.inputs[1])):
                scale, source = (scale * factor if node.op_type == "Mul" else scale / factor), node.inputs[0]
            elif query.is_op(node, "Transpose"):
                perm = list(node.attributes.get_ints("perm", []))
                expected = [[0, 1, 3, 2], [0, 2, 3, 1]] if transposed else [[0, 2, 1, 3]]
                if perm not in expected or (by_heads and perm != [0, 1, 3, 2]):
                    self.refuse(reader, f"expected a Transpose of the heads before it, found {perm}")
                by_heads, transposed, source = by_heads or perm != [0, 1, 3, 2], False, node.inputs[0]
            elif norm is None and (parts := self.rms_norm_parts(value)) is not None:
                source, norm = parts[0], parts[1:]
            elif not by_heads and query.is_op(node, "Reshape") and (repeated := self._repeated(node)) is not None:
                source = repeated
            elif rotary is None and not transposed and (rotated := self._rotated(value)) is not None:
                source, rotary = rotated
            else:
                break
            value = self.skip_qdq(source)
        if transposed or not by_heads:
            self.refuse(reader, "expected a Transpose of the heads before it")
        rows = value.producer()
        source = self.skip_qdq(rows.inputs[0]) if query.is_op(rows, "Reshape") and rows is not None else value
        if (node := query.producer(source, "LayerNormalization")) is None:
            return _Operand(*self.heads_of(value), scale, norm, rotary, None)
        row_norm = self._layer_norm_parameters(source, node)
        return _Operand(*self.heads_of(value, node.inputs[0]), scale, norm, rotary, row_norm)

    def _repeated(self, reshape: ir.Node) -> ir.Value | None:
        """Returns the heads that Unsqueeze, Expand and a Reshape repeat in place; None for another Reshape."""
        expand = query.producer(self.skip_qdq(reshape.inputs[0]), "Expand")
        if expand is None:
            return None
        unsqueeze = query.producer(self.skip_qdq(expand.inputs[0]), "Unsqueeze")
        if unsqueeze is None:
            return None
        return unsqueeze.inputs[0] if query.integers(unsqueeze, "axes", 1) == [2] else None

    def _of_tokens(self, value: ir.Value) -> bool:
        """Returns whether a value is computed from constants and the shape of the tokens alone."""
        if value not in self._by_tokens:
            node = value.producer()
            if self.constant(value) is not None or node is None:
                by_tokens = node is not None or value.name in self.names or self.constant(value) is not None
            elif query.is_op(node, "Gather") and self._gathered_table(value) is not None:
                by_tokens = False
            else:
                by_tokens = not query.is_op(node, "MatMul", "Gemm") and all(
                    self._of_tokens(x) for x in node.inputs if x is not None
                )
            self._by_tokens[value] = by_tokens
        return self._by_tokens[value]

    def _rotated(self, value: ir.Value) -> tuple[ir.Value, Rotary] | None:
        """Identifies rotary positions by their results.

        Args:
            value: Queries or keys, [batch, heads, tokens, size].

        Returns:
            The value before them, and their tables; None where something else computes `value`.
        """
        sources, tables, waiting = set[ir.Value](), dict[ir.Value, None](), [value]
        while waiting:
            part = self.skip_qdq(waiting.pop())
            node = part.producer()
            if self._of_tokens(part):
                tables[part] = None
            elif node is not None and query.is_op(node, *ROTATION) and self.rms_norm_parts(part) is None:
                waiting += [x for x in node.inputs if x is not None and self.constant(x) is None]
            else:
                sources.add(part)
        size = (query.dimensions(value) or [None])[-1]
        if len(sources) != 1 or not tables or size is None:
            return None
        (x,) = sources
        key = tuple(sorted(tables, key=lambda table: str(table.name)))
        model = self._float_part([*self.names, str(x.name)], value)
        for graph_input in model.graph.inputs:
            graph_input.shape = None

        def rotated(rows: Array, length: int) -> Array:
            feed = {name: self._probe(name, length, 0) for name in self.names}
            feed[str(x.name)] = np.broadcast_to(rows, (1, 1, length, size)).astype(np.float32)
            result: Array = self._run(model, {str(one.name): feed[str(one.name)] for one in model.graph.inputs})[0, 0]
            return result

        columns = np.arange(size)
        turned = int(np.argmax(np.abs(rotated((columns == 0) * 1.0, PROBE))[1:, 1:].max(axis=0))) + 1
        rotary = self._rotaries.get(key)
        if rotary is None:
            length = min(self._rows_of(key), default=MAX_TOKENS)
            table = rotated((columns < turned) * 1.0, length)[:, : 2 * turned]
            rotary = Rotary(*(np.ascontiguousarray(half, np.float32) for half in np.split(table, 2, axis=1)))
        random = np.random.default_rng(0).standard_normal((PROBE, size)).astype(np.float32)
        low, high, tail = np.split(random, [turned, 2 * turned], axis=1)
        cos, sin = rotary.cos[:PROBE], rotary.sin[:PROBE]
        if cos.shape[1] != turned or not np.allclose(
            rotated(random, PROBE),
            np.concatenate([low * cos - high * sin, high * cos + low * sin, tail], axis=1),
            rtol=0,
            atol=ALIKE * max(1.0, float(np.abs(cos).max())),
        ):
            self.refuse(value, "it is no rotation of two halves of the columns by their positions")
        self._rotaries[key] = rotary
        return x, rotary
