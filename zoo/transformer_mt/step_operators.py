"""Operators of a naive decoder as a decoding step computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from zoo.transformer_mt.data import POSITIONS
from zoo.transformer_mt.step_graph import (
    MOST_POSITIONS,
    Cache,
    Kind,
    Refused,
    Rows,
    Scores,
    Sizes,
    StepGraph,
    Unknown,
    rank_of,
)

UNARY = (
    "Cast",
    "Relu",
    "Clip",
    "Gelu",
    "Erf",
    "Tanh",
    "Sigmoid",
    "Sqrt",
    "Neg",
    "Identity",
    "QuantizeLinear",
    "DequantizeLinear",
)
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", *UNARY)
BARRED = -1e4  # what a causal mask adds, at most, to the scores of later tokens


class Derivation(StepGraph):
    """Walks the naive graph in order, gives every value that depends on the target its kind, and emits the step."""

    def visit(self, node: ir.Node) -> None:
        """Give the outputs of `node` their kinds."""
        kinds = [self.kinds.get(each) if each is not None else None for each in node.inputs]
        if all(each is None for each in kinds):
            if self.of_source.intersection(each for each in node.inputs if each is not None):
                self.of_source.update(node.outputs)
            return
        sizes = [each is None or isinstance(each, Sizes) for each in kinds]
        try:
            if node.op_type == "Shape" or all(sizes):
                found: Sequence[Kind] = [Sizes(each) for each in node.outputs]
            elif node.op_type == "GatherND":
                found = [self._last(node)]
            elif unknown := next((each for each in kinds if isinstance(each, Unknown)), None):
                found = [unknown] * len(node.outputs)
            elif (handler := _HANDLERS.get(node.op_type)) is None or not query.is_op(node, node.op_type):
                raise Refused("the operator is not known")
            else:
                found = handler(self, node, kinds)
        except Refused as why:
            found = [Unknown(f"{node.op_type} {query.label(node)}: {why}")] * len(node.outputs)
        self.kinds |= dict(zip(node.outputs, found, strict=True))

    def _operand(self, value: ir.Value | None) -> ir.Value | None:
        """What does not depend on the target, in the step."""
        if value is None:
            return None
        return self._given(value) if value in self.of_source else self._constant(value)

    def _elementwise(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """`ELEMENTWISE` operators; the causal mask vanishes, since the newest token attends to all."""
        y = node.outputs[0]
        constants = [
            query.constant(each)
            for each, kind in zip(node.inputs, kinds, strict=True)
            if kind is None and each is not None
        ]
        if node.op_type in UNARY and any(each is None or each.size > 1 for each in constants):
            raise Refused("its parameters are not constant, or not one for all")
        if scores := next((each for each in kinds if isinstance(each, Scores)), None):
            if node.op_type == "Add" and len([each for each in kinds if isinstance(each, Sizes)]) == 1:
                self._require_causal(next(each.naive for each in kinds if isinstance(each, Sizes)))
                return [scores]
            if any(each is None or each.size > 1 for each in constants) or sum(each is not None for each in kinds) > 1:
                raise Refused("it mixes scores of self-attention with something else")
            operands = [
                scores.value if kind is scores else self._operand(each)
                for each, kind in zip(node.inputs, kinds, strict=True)
            ]
            return [Scores(self._emit(node, operands)[0])]
        rank, rows = rank_of(y), [each for each in kinds if isinstance(each, Rows)]
        axes = {None if each.axis is None else each.axis + rank - each.rank for each in rows}
        if len(axes) > 1 or not rows:
            raise Refused("its inputs have their tokens on different axes")
        axis = axes.pop()
        if any(each in self.of_source for each in node.inputs):
            if axis is None or any(isinstance(each, Sizes) for each in kinds):
                raise Refused("it mixes source and target in another way than attention does")
            for each in node.inputs:
                if each in self.of_source and (rank_of(each) != rank or (query.dimensions(each) or [])[axis] != 1):
                    raise Refused(f"{each.name} differs from token to token")
            return [Rows(y, axis, folded=self._on_sentences(node, kinds))]
        if node.op_type in UNARY or (
            len(rows) == 1 and rows[0].flat is None and all(each is None or each.size == 1 for each in constants)
        ):
            return [self._lazy(node, kinds, axis)]
        operands = []
        for each, kind in zip(node.inputs, kinds, strict=True):
            if isinstance(kind, Rows):
                operands.append(self.flat(kind))
            elif isinstance(kind, Sizes):
                operands.append(self._of_position(kind.naive, rank, axis))
            else:
                operands.append(self._without(each, rank, axis))
        return [Rows(y, axis, self._emit(node, operands)[0])]

    def _on_sentences(self, node: ir.Node, kinds: Sequence[Kind | None]) -> ir.Value:
        """`node` on folded values, [sentences, ...]."""
        operands = [
            self._folded(kind) if isinstance(kind, Rows) else self._operand(each)
            for each, kind in zip(node.inputs, kinds, strict=True)
        ]
        return self._emit(node, operands)[0]

    def _lazy(self, node: ir.Node, kinds: Sequence[Kind | None], axis: int | None) -> Rows:
        """`node`, which treats all numbers alike, in the form that will be asked for."""

        def flat() -> ir.Value:
            return self._emit(
                node,
                [
                    self.flat(each) if isinstance(each, Rows) else self._operand(x)
                    for x, each in zip(node.inputs, kinds, strict=True)
                ],
            )[0]

        found = Rows(node.outputs[0], axis, unfold=flat, fold=lambda: self._on_sentences(node, kinds))
        if next(each for each in kinds if isinstance(each, Rows)).flat is None:
            found.folded = self._on_sentences(node, kinds)
        else:
            found.flat = flat()
        return found

    def _require_causal(self, mask: ir.Value) -> None:
        """Refuse a mask that is not causal: 0 for a token and all before it, `BARRED` or less for all after it."""
        for tokens in (2, 5):
            found = self._probe(mask, tokens)
            square = found.reshape(tokens, tokens) if found.size == tokens**2 else np.zeros((tokens, tokens))
            if np.tril(square).any() or (square[np.triu_indices(tokens, 1)] > BARRED).any():
                raise Refused(f"what {mask.name} adds does not let a token see all before it, and none after it")

    def _of_position(self, value: ir.Value, rank: int, axis: int | None) -> ir.Value:
        """The part for the newest token of a value that has one for each position."""
        where = None if axis is None else axis - rank + rank_of(value)
        short, table = self._probe(value, 3), self._probe(value, tokens := POSITIONS)
        if where is None or where < 0 or short.shape[where] != 3:
            raise Refused(f"{value.name} is not one value for each position")
        while table.shape[where] == tokens < MOST_POSITIONS:
            table = self._probe(value, tokens := 2 * tokens)
        self.positions = min(self.positions, table.shape[where])
        if not np.array_equal(short, table.take(range(3), where)):
            raise Refused(f"{value.name} changes for a token when others follow")
        return self._new(
            "Gather",
            [self._array(f"{value.name}.all", table), self.position],
            f"{value.name}.newest",
            value.dtype,
            axis=where,
        )

    def _without(self, value: ir.Value | None, rank: int, axis: int | None) -> ir.Value | None:
        """A constant beside [rows, ...] that stood beside a value with tokens on `axis`."""
        own = -1 if axis is None or value is None else axis - rank + rank_of(value)
        if own < 0 or value is None:
            return self._operand(value)
        array = query.constant(value)
        if array is None or array.shape[own] != 1:
            raise Refused(f"{value.name} differs from token to token")
        return self._array(f"{value.name}.flat", array.squeeze(own))

    def _matmul(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """A linear layer; Q K^T or P V of cross-attention (folded) or of self-attention (on the cache)."""
        (a, b), (x, y) = kinds, node.inputs
        assert x is not None and y is not None
        result, rank = node.outputs[0], rank_of(node.outputs[0])
        if isinstance(a, Rows) and b is None and y not in self.of_source:
            if a.axis is not None and a.axis >= a.rank - 1:
                raise Refused("it sums over the tokens")
            return [Rows(result, a.axis, self._emit(node, [self.flat(a), self._constant(y)])[0])]
        if isinstance(a, Rows) and b is None and a.axis == a.rank - 2 and rank_of(y) == a.rank:
            given = self._given(y)
            self.cross_attention.add(str(given.name))
            return [Rows(result, a.axis, folded=self._emit(node, [self._folded(a), given])[0])]
        if (
            isinstance(a, Rows)
            and isinstance(b, Rows)
            and (a.axis, b.axis) == (rank - 2, rank - 1)
            and a.rank == b.rank == rank
        ):
            row = self._new(
                "Unsqueeze", [self.flat(a), self._array("one_query", [rank - 2])], f"{x.name}.query", x.dtype
            )
            return [Scores(self._emit(node, [row, self._cached(b)])[0])]
        if isinstance(a, Scores) and isinstance(b, Rows) and b.axis == b.rank - 2 and b.rank == rank:
            found = self._emit(node, [a.value, self._cached(b)])[0]
            return [
                Rows(
                    result,
                    rank - 2,
                    self._new("Squeeze", [found, self._array("one_query", [rank - 2])], f"{result.name}.flat"),
                )
            ]
        raise Refused("it is no linear layer, and no product of attention")

    def _cached(self, rows: Rows) -> ir.Value:
        """Keys or values of all tokens so far, from a cache; int8 tensors are cached as int8."""
        naive, axis = rows.naive, rows.axis
        producer = naive.producer()
        dequantized = producer is not None and producer.op_type == "DequantizeLinear"
        if dequantized:
            assert producer is not None and producer.inputs[0] is not None
            quantized = self.kinds[producer.inputs[0]]
            assert isinstance(quantized, Rows)
            rows = quantized
        cached = rows.naive
        if cached not in self.caches:
            dims = query.dimensions(cached)
            assert axis is not None and dims is not None
            rank, last = len(dims), axis == len(dims) - 1
            order = (
                [*range(rank - 2), rank - 1, rank - 2] if last else list(range(rank))
            )  # a token's numbers lie together
            shape = tuple(None if i == 0 else 0 if i == axis else dims[i] for i in order)
            if None in shape[1:]:
                raise Refused(f"{cached.name} has the shape {cached.shape}; more than the tokens is dynamic")
            dtype, along = cached.dtype or ir.DataType.FLOAT, order.index(axis)
            as_float16 = self.float16_caches and dtype == ir.DataType.FLOAT
            newest = self.flat(rows)
            if as_float16:
                dtype = ir.DataType.FLOAT16
                newest = self._new("Cast", [newest], f"{cached.name}.half", dtype, to=dtype)
            before = self._input(
                f"{cached.name}.before",
                ["before", *("length" if i == along else each for i, each in enumerate(shape) if i)],
                dtype,
            )
            moved = self._new("Gather", [before, self.parents], f"{cached.name}.moved", dtype, axis=0)
            newest = self._new("Unsqueeze", [newest, self._array("token", [along])], f"{cached.name}.newest", dtype)
            after = self._new("Concat", [moved, newest], f"{cached.name}.after", dtype, axis=along)
            result = self._new("Transpose", [after], f"{cached.name}.all", dtype, perm=order) if last else after
            if as_float16:
                result = self._new("Cast", [result], f"{cached.name}.whole", ir.DataType.FLOAT, to=ir.DataType.FLOAT)
            self.caches[cached] = Cache(str(before.name), str(after.name), shape, dtype), after, result
        result = self.caches[cached][2]
        return (
            self._emit(producer, [result, *map(self._operand, producer.inputs[1:])])[0]
            if dequantized and producer is not None
            else result
        )

    def _scan(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """A recurrence over the tokens from zeros on: its body once, on states that are kept."""
        scanned, body = node.attributes.get_int("num_scan_inputs", 0), node.attributes["body"].as_graph()
        count = len(kinds) - scanned
        rows = [each for each in kinds[count:] if isinstance(each, Rows)]
        axes = {each.axis for each in rows} | {
            each for name in ("input", "output") for each in node.attributes.get_ints(f"scan_{name}_axes", [0])
        }
        backward = [
            name for name in ("input", "output") if any(node.attributes.get_ints(f"scan_{name}_directions", []))
        ]
        if len(rows) != scanned or axes != {1} or backward:
            raise Refused("it scans something else than the tokens, from the first to the last")
        known: dict[ir.Value | None, ir.Value | None] = {None: None}
        befores = []
        for inner, start, naive in zip(list(body.inputs)[:count], node.inputs, node.outputs, strict=False):
            if start is None or not isinstance(self.kinds.get(start), Sizes) or self._probe(start, 3).any():
                raise Refused("its states do not begin as zeros")
            rest = self._probe(start, 3).shape[1:]
            before = self._input(f"{naive.name}.before", ["before", *rest], start.dtype or ir.DataType.FLOAT)
            known[inner] = self._new("Gather", [before, self.parents], f"{naive.name}.moved", before.dtype, axis=0)
            befores.append((before, (None, *rest)))
        for inner, each in zip(list(body.inputs)[count:], rows, strict=True):
            known[inner] = self.flat(each)
        for inside in body:
            made = self._emit(inside, [known[x] if x in known else self._operand(x) for x in inside.inputs])
            known |= dict(zip(inside.outputs, made, strict=True))
        for naive, outer, (before, shape) in zip(node.outputs, body.outputs, befores, strict=False):
            after = known[outer]
            assert after is not None
            dtype = before.dtype or ir.DataType.FLOAT
            self.caches[naive] = Cache(str(before.name), str(after.name), shape, dtype), after, after
        states: list[Kind] = [Unknown("the state after all tokens is not known")] * count
        return states + [
            Rows(naive, 1, known[outer])
            for naive, outer in zip(list(node.outputs)[count:], list(body.outputs)[count:], strict=True)
        ]

    def _gemm(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """A linear layer on the last token's row."""
        a = kinds[0]
        if not isinstance(a, Rows) or a.axis is not None or any(kinds[1:]):
            raise Refused("it is no linear layer of a row a token")
        return [Rows(node.outputs[0], None, self._emit(node, [self.flat(a), *map(self._operand, node.inputs[1:])])[0])]

    def _reshape(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """Reshape behind the axis of tokens: heads split or merged."""
        x, target = kinds[0], query.constant(node.inputs[1])
        if not isinstance(x, Rows) or target is None or x.axis is None or target[: x.axis + 1].any():
            raise Refused("it reshapes what is not a row of its own for each token")
        axis, result = x.axis, node.outputs[0]

        def folded() -> ir.Value:
            if axis == 1 and x.folded is None and x.fold is None:
                return self._gathered(self.flat(x), result)
            return self._on_sentences(node, kinds)

        if x.flat is None:
            return [Rows(result, axis, folded=folded())]
        shape = self._array("shape", np.delete(target, axis))
        return [Rows(result, axis, self._emit(node, [self.flat(x), shape])[0], fold=folded)]

    def _transpose(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """Transpose that leaves the first axis: the axis of tokens moves."""
        x, perm = kinds[0], list(node.attributes.get_ints("perm", []))
        if not isinstance(x, Rows) or x.axis is None or not perm or perm[0]:
            raise Refused("it transposes what is not a row of its own for each token")
        axis = x.axis
        if x.flat is None:
            return [Rows(node.outputs[0], perm.index(axis), folded=self._on_sentences(node, kinds))]
        order = [each - (each > axis) for each in perm if each != axis]
        flat = self.flat(x) if order == sorted(order) else self._emit(node, [self.flat(x)], perm=order)[0]
        return [Rows(node.outputs[0], perm.index(axis), flat, fold=lambda: self._on_sentences(node, kinds))]

    def _along_last(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """Softmax, LayerNormalization, Split: over axes behind that of the tokens."""
        x = kinds[0]
        assert node.inputs[0] is not None
        rank = rank_of(node.inputs[0])
        axis = node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1) % rank
        if (
            any(kinds[1:])
            or (isinstance(x, Rows) and x.axis is not None and axis <= x.axis)
            or (isinstance(x, Scores) and axis != rank - 1)
        ):
            raise Refused("it works across tokens")
        others = [self._operand(each) for each in node.inputs[1:]]
        if isinstance(x, Scores):
            return [Scores(self._emit(node, [x.value, *others], axis=-1)[0])]
        assert isinstance(x, Rows)
        if x.flat is None and node.op_type == "Softmax":
            return [Rows(node.outputs[0], x.axis, folded=self._emit(node, [self._folded(x), *others])[0])]
        made = self._emit(node, [self.flat(x), *others], axis=axis - rank)
        return [Rows(naive, x.axis, flat) for naive, flat in zip(node.outputs, made, strict=True)]

    def _lookup(self, node: ir.Node, kinds: Sequence[Kind | None]) -> list[Kind]:
        """Gather of embeddings."""
        table, rows = node.inputs[0], kinds[1]
        if (
            not isinstance(rows, Rows)
            or kinds[0] is not None
            or table in self.of_source
            or node.attributes.get_int("axis", 0) != 0
        ):
            raise Refused("it looks nothing up in a table")
        return [Rows(node.outputs[0], rows.axis, self._emit(node, [self._operand(table), self.flat(rows)])[0])]

    def _last(self, node: ir.Node) -> Kind:
        """GatherND: the row of the last token, where `node` picks that."""
        rows, index = self.kinds.get(node.inputs[0]), node.inputs[1]  # type: ignore[arg-type]
        if isinstance(rows, Unknown):
            return rows
        assert index is not None
        if not isinstance(rows, Rows) or rows.axis != 1 or node.attributes.get_int("batch_dims", 0) != 1:
            raise Refused("it does not pick one row a sentence")
        if any(self._probe(index, tokens).tolist() != [[tokens - 1]] for tokens in (2, 5)):
            raise Refused("it does not pick the last token")
        return Rows(node.outputs[0], None, self.flat(rows))


_HANDLERS: dict[str, Callable[[Derivation, ir.Node, Sequence[Kind | None]], list[Kind]]] = {
    **dict.fromkeys(ELEMENTWISE, Derivation._elementwise),
    **dict.fromkeys(("Softmax", "LayerNormalization", "Split"), Derivation._along_last),
    "MatMul": Derivation._matmul,
    "Gemm": Derivation._gemm,
    "Scan": Derivation._scan,
    "Reshape": Derivation._reshape,
    "Transpose": Derivation._transpose,
    "Gather": Derivation._lookup,
}
