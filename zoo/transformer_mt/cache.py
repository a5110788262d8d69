"""KV cache: from the naive decoder, which computes all target tokens so far anew, to a decoding step that computes the
newest one alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.fuse_quantized_linear import FuseQuantizedLinear
from pipelines.rewrites.reshape_chains import ReshapeChains
from zoo.transformer_mt.data import POSITIONS, START
from zoo.transformer_mt.decode import Integers, Step

SOURCE, TARGET, LOGITS = "source", "target", "logits"
TOKENS, PARENTS, POSITION = "tokens", "parents", "position"
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
CACHES = "int8-zoo.caches"  # the key of what `step_of` keeps
MOST_POSITIONS = 1 << 14  # that are looked at
BARRED = -1e4  # what a causal mask adds, at most, to the scores of later tokens


@dataclass(frozen=True)
class Cache:
    """A KV cache, an input and an output of the step: float32, float16 or int8 [rows, ..., tokens, ...]; or the state
    of a recurrence, without tokens.

    shape: None for the rows, 0 for the tokens.
    """

    before: str
    after: str
    shape: tuple[int | None, ...]
    dtype: ir.DataType


@dataclass(frozen=True)
class Incremental:
    """A translation model for decoding token by token: encoder and decoding step.

    encoder: source int64 [n, s] -> the values `given`, one row a sentence. step: tokens int64 [rows], the newest of
    every row; parents int64 [rows], the row of the step before that each goes on from; position int64 [], how many
    tokens came before; the caches; `given` -> logits float32 [rows, vocabulary] and the caches grown by a token. rows
    is a multiple of n: the rows of a sentence stand together. positions: tokens of a target, at most.
    """

    encoder: ir.Model
    step: ir.Model
    given: list[str]
    caches: list[Cache]
    positions: int


def incremental(model: ir.Model) -> Incremental:
    """Derive encoder and step from the graph that `zoo.transformer_mt.freeze.export` writes, rewritten or quantized, or
    one like it.

    Found by following every operator from the input `target` on, never by a name: what depends on the source alone is
    computed once a sentence; of what has a row for each target token the newest is computed; the keys and values of
    self-attention are cached, and so are the states of a Scan over the tokens, whose body is one step of it. Those of
    cross-attention serve all rows of a sentence, which stand where the naive graph has tokens. Both are rounded to
    float16 where `model` is quantized, as in native code (`pipelines.kernels.transformer.program`). Raises RequestError
    that names the operator without such a form, and why.
    """
    return _Derivation(model).result()


def step_of(model: Incremental) -> ir.Model:
    """The step, with what `caches_of` reads again."""
    kept = [[each.before, each.after, each.shape, each.dtype.name] for each in model.caches]
    model.step.metadata_props[CACHES] = json.dumps(kept)
    return model.step


def caches_of(step: ir.Model) -> list[Cache]:
    """The caches of a graph that `step_of` gave."""
    kept = json.loads(step.metadata_props[CACHES])
    return [Cache(before, after, tuple(shape), ir.DataType[dtype]) for before, after, shape, dtype in kept]


def cached_step(decoder: Any, given: Mapping[str, NDArray[Any]], caches: Sequence[Cache]) -> Step:
    """The `Step` of a decoder with KV caches, for `beam_search`.

    decoder: a session of `Incremental.step`. given: the encoder's outputs, a row a sentence.
    """
    sentences = np.arange(len(next(iter(given.values()))))
    state = {}
    for cache in caches:
        shape = [len(sentences) if size is None else size for size in cache.shape]
        state[cache.before] = np.zeros(shape, cache.dtype.numpy())
    of_live, length = dict(given), 0

    def step(tokens: Integers, parents: Integers) -> NDArray[np.float32]:
        nonlocal sentences, of_live, length
        before, sentences = sentences, sentences[parents]
        if not np.array_equal(live := np.unique(sentences), np.unique(before)):
            of_live = {name: array[live] for name, array in given.items()}
        batch = {TOKENS: tokens, PARENTS: parents, POSITION: np.array(length), **of_live, **state}
        outputs = decoder.run(batch)
        state.update({cache.before: outputs[cache.after] for cache in caches})
        length += 1
        logits: NDArray[np.float32] = outputs[LOGITS]
        return logits

    return step


class _Refused(Exception):
    """Why an operator has no form for one token."""


@dataclass
class _Rows:
    """A value with one row for each target token, along `axis` of the naive value (None: of the last token alone).

    flat: the newest token's, without that axis, [rows, ...]. folded: the rows of a sentence along that axis,
    [sentences, ...].
    """

    naive: ir.Value
    axis: int | None
    flat: ir.Value | None = None
    folded: ir.Value | None = None
    unfold: Callable[[], ir.Value] | None = None  # computes `flat` from that of the operator's input
    fold: Callable[[], ir.Value] | None = None  # computes `folded` likewise

    @property
    def rank(self) -> int:
        """Of the naive value."""
        return _rank(self.naive)


@dataclass
class _Scores:
    """Self-attention scores of the newest token against all tokens so far, [rows, ..., 1, tokens]."""

    value: ir.Value


@dataclass
class _Sizes:
    """A value that depends on the number of target tokens alone: a shape, a mask, positions."""

    naive: ir.Value


@dataclass
class _Unknown:
    """A value without a form for one token, and why."""

    why: str


_Kind = _Rows | _Scores | _Sizes | _Unknown


@dataclass
class _Derivation:
    """Walks the naive graph in order, gives every value that depends on the target its kind, and emits the step.

    of_source: values that depend on the source alone. given: those of them that the step reads. caches: by the naive
    value of all tokens: the cache, its output, and all tokens in the naive layout.
    """

    naive: ir.Model
    kinds: dict[ir.Value, _Kind] = field(default_factory=dict)
    of_source: set[ir.Value] = field(default_factory=set)
    constants: dict[ir.Value, ir.Value] = field(default_factory=dict)
    given: dict[ir.Value, ir.Value] = field(default_factory=dict)
    cross_attention: set[str] = field(default_factory=set)  # of `given` the keys and values of the source
    caches: dict[ir.Value, tuple[Cache, ir.Value, ir.Value]] = field(default_factory=dict)
    shapes: dict[tuple[int | None, ...], ir.Value] = field(default_factory=dict)
    probes: dict[tuple[ir.Value, int], NDArray[Any]] = field(default_factory=dict)
    positions: int = MOST_POSITIONS

    def __post_init__(self) -> None:
        inputs = {each.name: each for each in self.naive.graph.inputs}
        if {SOURCE, TARGET} - inputs.keys() or [each.name for each in self.naive.graph.outputs] != [LOGITS]:
            raise RequestError(
                f"found inputs {', '.join(map(str, inputs))} and outputs "
                f"{', '.join(str(each.name) for each in self.naive.graph.outputs)}; "
                f"decoding needs {SOURCE} and {TARGET}, and {LOGITS}"
            )
        self.source, self.target = inputs[SOURCE], inputs[TARGET]
        self.main = ir.Graph([], [], nodes=[], name="step", opset_imports=dict(self.naive.graph.opset_imports))
        self.taken: set[str] = {SOURCE, TARGET, LOGITS}
        self.tokens, self.parents = (self._input(name, ["rows"]) for name in (TOKENS, PARENTS))
        self.position = self._input(POSITION, [])
        self.of_source.add(self.source)
        self.float16_caches = any(node.op_type == "QuantizeLinear" for node in self.naive.graph)
        self.kinds[self.target] = _Rows(self.target, 1, self.tokens)

    def _input(self, name: str, shape: Sequence[int | str | None], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        value = ir.Value(name=edit.unique(name, self.taken), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.main.inputs.append(value)
        return value

    def result(self) -> Incremental:
        """Visit every node of the naive graph in order, then assemble encoder and step."""
        for node in self.naive.graph:
            self._visit(node)
        logits = self.kinds.get(self.naive.graph.outputs[0], _Unknown("its logits do not depend on the target"))
        if isinstance(logits, _Unknown):
            raise RequestError(f"the decoder has no form with caches: {logits.why}")
        if not isinstance(logits, _Rows) or logits.axis is not None:
            raise RequestError("the decoder has no form with caches: its logits are not those of the last token alone")
        out = self._flat(logits)
        out.name = LOGITS
        grown = [after for _, after, _ in self.caches.values()]
        self.main.outputs.extend([out, *grown])
        step = ir.Model(self.main, ir_version=self.naive.ir_version)
        rewrite(step, [ReshapeChains(), FuseLinear(), FuseQuantizedLinear()])
        given = [str(each.name) for each in self.given]
        encoder = edit.extract(self.naive, [SOURCE], given)
        if self.float16_caches:
            _round_to_float16(encoder, self.cross_attention)
        return Incremental(encoder, step, given, [each for each, _, _ in self.caches.values()], self.positions)

    # -------------------------------------------------------------------------------------------------------- emission

    def _emit(self, node: ir.Node, inputs: Sequence[ir.Value | None], **changed: Any) -> list[ir.Value]:
        """A copy of `node` in the step, with other inputs, and attributes `changed`."""
        attributes = {
            **node.attributes,
            **{key: ir.convenience.convert_attribute(key, value) for key, value in changed.items()},
        }
        made = ir.Node(node.domain, node.op_type, inputs, list(attributes.values()), num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, made.outputs, strict=True):
            new.name = edit.unique(f"step/{old.name}", self.taken)
            new.type = old.type
        made.name = made.outputs[0].name
        self.main.append(made)
        return list(made.outputs)

    def _new(
        self, op: str, inputs: list[ir.Value | None], name: str, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        node = edit.node(op, inputs, f"step/{name}", dtype=dtype, taken=self.taken, **attributes)
        self.main.append(node)
        return node.outputs[0]

    def _array(self, name: str, array: Any) -> ir.Value:
        return edit.initializer(self.main, f"step/{name}", np.asarray(array), self.taken)

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant of the naive graph, or what is computed from constants alone."""
        if value not in self.constants:
            producer = value.producer()
            if producer is not None:
                made = self._emit(
                    producer, [None if each is None else self._constant(each) for each in producer.inputs]
                )
                self.constants |= dict(zip(producer.outputs, made, strict=True))
            else:
                tensor = value.const_value
                assert tensor is not None
                name = edit.unique(f"step/{value.name}", self.taken)
                self.constants[value] = ir.Value(
                    name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=value.shape
                )
                self.main.register_initializer(self.constants[value])
        return self.constants[value]

    def _given(self, value: ir.Value) -> ir.Value:
        """A value of the source, computed once a sentence."""
        if value not in self.given:
            shape = ["sentences", *(query.dimensions(value) or [])[1:]]
            self.given[value] = self._input(str(value.name), shape, value.dtype or ir.DataType.FLOAT)
        return self.given[value]

    def _flat(self, rows: _Rows) -> ir.Value:
        """[rows, ...], the axis of tokens gone."""
        if rows.flat is None and rows.unfold is not None:
            rows.flat = rows.unfold()
        if rows.flat is None:
            value, axis, dims = rows.folded, rows.axis, query.dimensions(rows.naive) or []
            assert value is not None and axis is not None
            rest = [each for i, each in enumerate(dims) if i not in (0, axis)]
            if None in rest:
                raise _Refused(f"{rows.naive.name} has the shape {rows.naive.shape}; more than the tokens is dynamic")
            if axis != 1:
                order = [0, axis, *(i for i in range(1, rows.rank) if i != axis)]
                value = self._new("Transpose", [value], f"{rows.naive.name}.rows_first", rows.naive.dtype, perm=order)
            rows.flat = self._new(
                "Reshape",
                [value, self._array("flat", np.array([-1, *rest], np.int64))],
                f"{rows.naive.name}.flat",
                rows.naive.dtype,
            )
        return rows.flat

    def _folded(self, rows: _Rows) -> ir.Value:
        """[sentences, ...], with the rows of a sentence where the naive value has tokens."""
        if rows.folded is None and rows.fold is not None:
            rows.folded = rows.fold()
        if rows.folded is None:
            if rows.axis != 1:
                raise _Refused(
                    f"{rows.naive.name} has its tokens on axis {rows.axis}, where the rows of a sentence do not stand "
                    "together"
                )
            rows.folded = self._gathered(self._flat(rows), rows.naive)
        return rows.folded

    def _gathered(self, flat: ir.Value, naive: ir.Value) -> ir.Value:
        """Rows [rows, ...] of any shape as [sentences, rows of one, ...] of the naive value's."""
        dims = query.dimensions(naive) or []
        rest = tuple(dims[2:])
        if None in rest:
            raise _Refused(f"{naive.name} has the shape {naive.shape}; more than the tokens is dynamic")
        if rest not in self.shapes:
            given = next(iter(self.given.values()), None)
            if given is None:
                raise _Refused("nothing of the source is known before it")
            count = self._new("Shape", [given], "sentences", ir.DataType.INT64, start=0, end=1)
            sizes = self._array("folded", np.array([-1, *rest], np.int64))
            self.shapes[rest] = self._new("Concat", [count, sizes], "folded.shape", ir.DataType.INT64, axis=0)
        return self._new("Reshape", [flat, self.shapes[rest]], f"{naive.name}.folded", naive.dtype)

    def _probe(self, value: ir.Value, tokens: int) -> NDArray[Any]:
        """What the naive graph computes for `value`, for one sentence of so many target tokens."""
        if (value, tokens) not in self.probes:
            try:
                found = edit.extract(self.naive, [TARGET], [str(value.name)])
            except RequestError as error:
                raise _Refused(f"{value.name} depends on more than the target") from error
            opened = reference_session.session(found, "decoding needs")
            (self.probes[value, tokens],) = reference_session.run(opened, {TARGET: np.full((1, tokens), START)})
        return self.probes[value, tokens]

    # ------------------------------------------------------------------------------------------------------- operators

    def _visit(self, node: ir.Node) -> None:
        """Give the outputs of `node` their kinds."""
        kinds = [self.kinds.get(each) if each is not None else None for each in node.inputs]
        if all(each is None for each in kinds):
            if self.of_source.intersection(each for each in node.inputs if each is not None):
                self.of_source.update(node.outputs)
            return
        sizes = [each is None or isinstance(each, _Sizes) for each in kinds]
        try:
            if node.op_type == "Shape" or all(sizes):
                found: Sequence[_Kind] = [_Sizes(each) for each in node.outputs]
            elif node.op_type == "GatherND":
                found = [self._last(node)]
            elif unknown := next((each for each in kinds if isinstance(each, _Unknown)), None):
                found = [unknown] * len(node.outputs)
            elif (handler := _HANDLERS.get(node.op_type)) is None or not query.is_op(node, node.op_type):
                raise _Refused("the operator is not known")
            else:
                found = handler(self, node, kinds)
        except _Refused as why:
            found = [_Unknown(f"{node.op_type} {query.label(node)}: {why}")] * len(node.outputs)
        self.kinds |= dict(zip(node.outputs, found, strict=True))

    def _operand(self, value: ir.Value | None) -> ir.Value | None:
        """What does not depend on the target, in the step."""
        if value is None:
            return None
        return self._given(value) if value in self.of_source else self._constant(value)

    def _elementwise(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """`ELEMENTWISE` operators; the causal mask vanishes, since the newest token attends to all."""
        y = node.outputs[0]
        constants = [
            query.constant(each)
            for each, kind in zip(node.inputs, kinds, strict=True)
            if kind is None and each is not None
        ]
        if node.op_type in UNARY and any(each is None or each.size > 1 for each in constants):
            raise _Refused("its parameters are not constant, or not one for all")
        if scores := next((each for each in kinds if isinstance(each, _Scores)), None):
            if node.op_type == "Add" and len([each for each in kinds if isinstance(each, _Sizes)]) == 1:
                self._require_causal(next(each.naive for each in kinds if isinstance(each, _Sizes)))
                return [scores]
            if any(each is None or each.size > 1 for each in constants) or sum(each is not None for each in kinds) > 1:
                raise _Refused("it mixes scores of self-attention with something else")
            operands = [
                scores.value if kind is scores else self._operand(each)
                for each, kind in zip(node.inputs, kinds, strict=True)
            ]
            return [_Scores(self._emit(node, operands)[0])]
        rank, rows = _rank(y), [each for each in kinds if isinstance(each, _Rows)]
        axes = {None if each.axis is None else each.axis + rank - each.rank for each in rows}
        if len(axes) > 1 or not rows:
            raise _Refused("its inputs have their tokens on different axes")
        axis = axes.pop()
        if any(each in self.of_source for each in node.inputs):
            if axis is None or any(isinstance(each, _Sizes) for each in kinds):
                raise _Refused("it mixes source and target in another way than attention does")
            for each in node.inputs:
                if each in self.of_source and (_rank(each) != rank or (query.dimensions(each) or [])[axis] != 1):
                    raise _Refused(f"{each.name} differs from token to token")
            return [_Rows(y, axis, folded=self._on_sentences(node, kinds))]
        if node.op_type in UNARY or (
            len(rows) == 1 and rows[0].flat is None and all(each is None or each.size == 1 for each in constants)
        ):
            return [self._lazy(node, kinds, axis)]
        operands = []
        for each, kind in zip(node.inputs, kinds, strict=True):
            if isinstance(kind, _Rows):
                operands.append(self._flat(kind))
            elif isinstance(kind, _Sizes):
                operands.append(self._of_position(kind.naive, rank, axis))
            else:
                operands.append(self._without(each, rank, axis))
        return [_Rows(y, axis, self._emit(node, operands)[0])]

    def _on_sentences(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> ir.Value:
        """`node` on folded values, [sentences, ...]."""
        operands = [
            self._folded(kind) if isinstance(kind, _Rows) else self._operand(each)
            for each, kind in zip(node.inputs, kinds, strict=True)
        ]
        return self._emit(node, operands)[0]

    def _lazy(self, node: ir.Node, kinds: Sequence[_Kind | None], axis: int | None) -> _Rows:
        """`node`, which treats all numbers alike, in the form that will be asked for."""

        def flat() -> ir.Value:
            return self._emit(
                node,
                [
                    self._flat(each) if isinstance(each, _Rows) else self._operand(x)
                    for x, each in zip(node.inputs, kinds, strict=True)
                ],
            )[0]

        found = _Rows(node.outputs[0], axis, unfold=flat, fold=lambda: self._on_sentences(node, kinds))
        if next(each for each in kinds if isinstance(each, _Rows)).flat is None:
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
                raise _Refused(f"what {mask.name} adds does not let a token see all before it, and none after it")

    def _of_position(self, value: ir.Value, rank: int, axis: int | None) -> ir.Value:
        """The part for the newest token of a value that has one for each position."""
        where = None if axis is None else axis - rank + _rank(value)
        short, table = self._probe(value, 3), self._probe(value, tokens := POSITIONS)
        if where is None or where < 0 or short.shape[where] != 3:
            raise _Refused(f"{value.name} is not one value for each position")
        while table.shape[where] == tokens < MOST_POSITIONS:
            table = self._probe(value, tokens := 2 * tokens)
        self.positions = min(self.positions, table.shape[where])
        if not np.array_equal(short, table.take(range(3), where)):
            raise _Refused(f"{value.name} changes for a token when others follow")
        return self._new(
            "Gather",
            [self._array(f"{value.name}.all", table), self.position],
            f"{value.name}.newest",
            value.dtype,
            axis=where,
        )

    def _without(self, value: ir.Value | None, rank: int, axis: int | None) -> ir.Value | None:
        """A constant beside [rows, ...] that stood beside a value with tokens on `axis`."""
        own = -1 if axis is None or value is None else axis - rank + _rank(value)
        if own < 0 or value is None:
            return self._operand(value)
        array = query.constant(value)
        if array is None or array.shape[own] != 1:
            raise _Refused(f"{value.name} differs from token to token")
        return self._array(f"{value.name}.flat", array.squeeze(own))

    def _matmul(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """A linear layer; Q K^T or P V of cross-attention (folded) or of self-attention (on the cache)."""
        (a, b), (x, y) = kinds, node.inputs
        assert x is not None and y is not None
        result, rank = node.outputs[0], _rank(node.outputs[0])
        if isinstance(a, _Rows) and b is None and y not in self.of_source:
            if a.axis is not None and a.axis >= a.rank - 1:
                raise _Refused("it sums over the tokens")
            return [_Rows(result, a.axis, self._emit(node, [self._flat(a), self._constant(y)])[0])]
        if isinstance(a, _Rows) and b is None and a.axis == a.rank - 2 and _rank(y) == a.rank:
            given = self._given(y)
            self.cross_attention.add(str(given.name))
            return [_Rows(result, a.axis, folded=self._emit(node, [self._folded(a), given])[0])]
        if (
            isinstance(a, _Rows)
            and isinstance(b, _Rows)
            and (a.axis, b.axis) == (rank - 2, rank - 1)
            and a.rank == b.rank == rank
        ):
            row = self._new(
                "Unsqueeze", [self._flat(a), self._array("one_query", [rank - 2])], f"{x.name}.query", x.dtype
            )
            return [_Scores(self._emit(node, [row, self._cached(b)])[0])]
        if isinstance(a, _Scores) and isinstance(b, _Rows) and b.axis == b.rank - 2 and b.rank == rank:
            found = self._emit(node, [a.value, self._cached(b)])[0]
            return [
                _Rows(
                    result,
                    rank - 2,
                    self._new("Squeeze", [found, self._array("one_query", [rank - 2])], f"{result.name}.flat"),
                )
            ]
        raise _Refused("it is no linear layer, and no product of attention")

    def _cached(self, rows: _Rows) -> ir.Value:
        """Keys or values of all tokens so far, from a cache; int8 tensors are cached as int8."""
        naive, axis = rows.naive, rows.axis
        producer = naive.producer()
        dequantized = producer is not None and producer.op_type == "DequantizeLinear"
        if dequantized:
            assert producer is not None and producer.inputs[0] is not None
            quantized = self.kinds[producer.inputs[0]]
            assert isinstance(quantized, _Rows)
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
                raise _Refused(f"{cached.name} has the shape {cached.shape}; more than the tokens is dynamic")
            dtype, along = cached.dtype or ir.DataType.FLOAT, order.index(axis)
            as_float16 = self.float16_caches and dtype == ir.DataType.FLOAT
            newest = self._flat(rows)
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

    def _scan(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """A recurrence over the tokens from zeros on: its body once, on states that are kept."""
        scanned, body = node.attributes.get_int("num_scan_inputs", 0), node.attributes["body"].as_graph()
        count = len(kinds) - scanned
        rows = [each for each in kinds[count:] if isinstance(each, _Rows)]
        axes = {each.axis for each in rows} | {
            each for name in ("input", "output") for each in node.attributes.get_ints(f"scan_{name}_axes", [0])
        }
        backward = [
            name for name in ("input", "output") if any(node.attributes.get_ints(f"scan_{name}_directions", []))
        ]
        if len(rows) != scanned or axes != {1} or backward:
            raise _Refused("it scans something else than the tokens, from the first to the last")
        known: dict[ir.Value | None, ir.Value | None] = {None: None}
        befores = []
        for inner, start, naive in zip(list(body.inputs)[:count], node.inputs, node.outputs, strict=False):
            if start is None or not isinstance(self.kinds.get(start), _Sizes) or self._probe(start, 3).any():
                raise _Refused("its states do not begin as zeros")
            rest = self._probe(start, 3).shape[1:]
            before = self._input(f"{naive.name}.before", ["before", *rest], start.dtype or ir.DataType.FLOAT)
            known[inner] = self._new("Gather", [before, self.parents], f"{naive.name}.moved", before.dtype, axis=0)
            befores.append((before, (None, *rest)))
        for inner, each in zip(list(body.inputs)[count:], rows, strict=True):
            known[inner] = self._flat(each)
        for inside in body:
            made = self._emit(inside, [known[x] if x in known else self._operand(x) for x in inside.inputs])
            known |= dict(zip(inside.outputs, made, strict=True))
        for naive, outer, (before, shape) in zip(node.outputs, body.outputs, befores, strict=False):
            after = known[outer]
            assert after is not None
            dtype = before.dtype or ir.DataType.FLOAT
            self.caches[naive] = Cache(str(before.name), str(after.name), shape, dtype), after, after
        states: list[_Kind] = [_Unknown("the state after all tokens is not known")] * count
        return states + [
            _Rows(naive, 1, known[outer])
            for naive, outer in zip(list(node.outputs)[count:], list(body.outputs)[count:], strict=True)
        ]

    def _gemm(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """A linear layer on the last token's row."""
        a = kinds[0]
        if not isinstance(a, _Rows) or a.axis is not None or any(kinds[1:]):
            raise _Refused("it is no linear layer of a row a token")
        return [
            _Rows(node.outputs[0], None, self._emit(node, [self._flat(a), *map(self._operand, node.inputs[1:])])[0])
        ]

    def _reshape(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """Reshape behind the axis of tokens: heads split or merged."""
        x, target = kinds[0], query.constant(node.inputs[1])
        if not isinstance(x, _Rows) or target is None or x.axis is None or target[: x.axis + 1].any():
            raise _Refused("it reshapes what is not a row of its own for each token")
        axis, result = x.axis, node.outputs[0]

        def folded() -> ir.Value:
            if axis == 1 and x.folded is None and x.fold is None:
                return self._gathered(self._flat(x), result)
            return self._on_sentences(node, kinds)

        if x.flat is None:
            return [_Rows(result, axis, folded=folded())]
        shape = self._array("shape", np.delete(target, axis))
        return [_Rows(result, axis, self._emit(node, [self._flat(x), shape])[0], fold=folded)]

    def _transpose(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """Transpose that leaves the first axis: the axis of tokens moves."""
        x, perm = kinds[0], list(node.attributes.get_ints("perm", []))
        if not isinstance(x, _Rows) or x.axis is None or not perm or perm[0]:
            raise _Refused("it transposes what is not a row of its own for each token")
        axis = x.axis
        if x.flat is None:
            return [_Rows(node.outputs[0], perm.index(axis), folded=self._on_sentences(node, kinds))]
        order = [each - (each > axis) for each in perm if each != axis]
        flat = self._flat(x) if order == sorted(order) else self._emit(node, [self._flat(x)], perm=order)[0]
        return [_Rows(node.outputs[0], perm.index(axis), flat, fold=lambda: self._on_sentences(node, kinds))]

    def _along_last(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """Softmax, LayerNormalization, Split: over axes behind that of the tokens."""
        x = kinds[0]
        assert node.inputs[0] is not None
        rank = _rank(node.inputs[0])
        axis = node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1) % rank
        if (
            any(kinds[1:])
            or (isinstance(x, _Rows) and x.axis is not None and axis <= x.axis)
            or (isinstance(x, _Scores) and axis != rank - 1)
        ):
            raise _Refused("it works across tokens")
        others = [self._operand(each) for each in node.inputs[1:]]
        if isinstance(x, _Scores):
            return [_Scores(self._emit(node, [x.value, *others], axis=-1)[0])]
        assert isinstance(x, _Rows)
        if x.flat is None and node.op_type == "Softmax":
            return [_Rows(node.outputs[0], x.axis, folded=self._emit(node, [self._folded(x), *others])[0])]
        made = self._emit(node, [self._flat(x), *others], axis=axis - rank)
        return [_Rows(naive, x.axis, flat) for naive, flat in zip(node.outputs, made, strict=True)]

    def _lookup(self, node: ir.Node, kinds: Sequence[_Kind | None]) -> list[_Kind]:
        """Gather of embeddings."""
        table, rows = node.inputs[0], kinds[1]
        if (
            not isinstance(rows, _Rows)
            or kinds[0] is not None
            or table in self.of_source
            or node.attributes.get_int("axis", 0) != 0
        ):
            raise _Refused("it looks nothing up in a table")
        return [_Rows(node.outputs[0], rows.axis, self._emit(node, [self._operand(table), self._flat(rows)])[0])]

    def _last(self, node: ir.Node) -> _Kind:
        """GatherND: the row of the last token, where `node` picks that."""
        rows, index = self.kinds.get(node.inputs[0]), node.inputs[1]  # type: ignore[arg-type]
        if isinstance(rows, _Unknown):
            return rows
        assert index is not None
        if not isinstance(rows, _Rows) or rows.axis != 1 or node.attributes.get_int("batch_dims", 0) != 1:
            raise _Refused("it does not pick one row a sentence")
        if any(self._probe(index, tokens).tolist() != [[tokens - 1]] for tokens in (2, 5)):
            raise _Refused("it does not pick the last token")
        return _Rows(node.outputs[0], None, self._flat(rows))


def _round_to_float16(encoder: ir.Model, names: set[str]) -> None:
    """Round those of the encoder's float32 outputs to float16."""
    taken = query.used_names(encoder.graph)
    for index, value in enumerate(encoder.graph.outputs):
        if value.name in names and value.dtype == ir.DataType.FLOAT:
            name, value.name = str(value.name), edit.unique(f"{value.name}.whole", taken)
            half = edit.node(
                "Cast", [value], f"{name}.half", dtype=ir.DataType.FLOAT16, taken=taken, to=ir.DataType.FLOAT16
            )
            rounded = edit.node(
                "Cast", [half.outputs[0]], f"{name}.rounded", dtype=ir.DataType.FLOAT, taken=taken, to=ir.DataType.FLOAT
            )
            encoder.graph.extend([half, rounded])
            rounded.outputs[0].name, rounded.outputs[0].shape = name, value.shape
            encoder.graph.outputs[index] = rounded.outputs[0]


def _rank(value: ir.Value) -> int:
    """The rank of a value. Refuses an unknown one."""
    found = query.rank(value)
    if found is None:
        raise _Refused(f"the rank of {value.name} is not known")
    return found


_HANDLERS: dict[str, Callable[[_Derivation, ir.Node, Sequence[_Kind | None]], list[_Kind]]] = {
    **dict.fromkeys(ELEMENTWISE, _Derivation._elementwise),
    **dict.fromkeys(("Softmax", "LayerNormalization", "Split"), _Derivation._along_last),
    "MatMul": _Derivation._matmul,
    "Gemm": _Derivation._gemm,
    "Scan": _Derivation._scan,
    "Reshape": _Derivation._reshape,
    "Transpose": _Derivation._transpose,
    "Gather": _Derivation._lookup,
}
