"""The graph of a decoding step as it is written: values of the naive graph in the forms that one token has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from zoo.transformer_mt.data import START

SOURCE, TARGET, LOGITS = "source", "target", "logits"
TOKENS, PARENTS, POSITION = "tokens", "parents", "position"
MOST_POSITIONS = 1 << 14  # that are looked at


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


class Refused(Exception):
    """Why an operator has no form for one token."""


@dataclass
class Rows:
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
        return rank_of(self.naive)


@dataclass
class Scores:
    """Self-attention scores of the newest token against all tokens so far, [rows, ..., 1, tokens]."""

    value: ir.Value


@dataclass
class Sizes:
    """A value that depends on the number of target tokens alone: a shape, a mask, positions."""

    naive: ir.Value


@dataclass
class Unknown:
    """A value without a form for one token, and why."""

    why: str


Kind = Rows | Scores | Sizes | Unknown


@dataclass
class StepGraph:
    """Emits the step, and knows what every value that depends on the target is.

    of_source: values that depend on the source alone. given: those of them that the step reads. caches: by the naive
    value of all tokens: the cache, its output, and all tokens in the naive layout.
    """

    naive: ir.Model
    kinds: dict[ir.Value, Kind] = field(default_factory=dict)
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
        self.kinds[self.target] = Rows(self.target, 1, self.tokens)

    def _input(self, name: str, shape: Sequence[int | str | None], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        value = ir.Value(name=edit.unique(name, self.taken), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.main.inputs.append(value)
        return value

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

    def flat(self, rows: Rows) -> ir.Value:
        """[rows, ...], the axis of tokens gone."""
        if rows.flat is None and rows.unfold is not None:
            rows.flat = rows.unfold()
        if rows.flat is None:
            value, axis, dims = rows.folded, rows.axis, query.dimensions(rows.naive) or []
            assert value is not None and axis is not None
            rest = [each for i, each in enumerate(dims) if i not in (0, axis)]
            if None in rest:
                raise Refused(f"{rows.naive.name} has the shape {rows.naive.shape}; more than the tokens is dynamic")
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

    def _folded(self, rows: Rows) -> ir.Value:
        """[sentences, ...], with the rows of a sentence where the naive value has tokens."""
        if rows.folded is None and rows.fold is not None:
            rows.folded = rows.fold()
        if rows.folded is None:
            if rows.axis != 1:
                raise Refused(
                    f"{rows.naive.name} has its tokens on axis {rows.axis}, where the rows of a sentence do not stand "
                    "together"
                )
            rows.folded = self._gathered(self.flat(rows), rows.naive)
        return rows.folded

    def _gathered(self, flat: ir.Value, naive: ir.Value) -> ir.Value:
        """Rows [rows, ...] of any shape as [sentences, rows of one, ...] of the naive value's."""
        dims = query.dimensions(naive) or []
        rest = tuple(dims[2:])
        if None in rest:
            raise Refused(f"{naive.name} has the shape {naive.shape}; more than the tokens is dynamic")
        if rest not in self.shapes:
            given = next(iter(self.given.values()), None)
            if given is None:
                raise Refused("nothing of the source is known before it")
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
                raise Refused(f"{value.name} depends on more than the target") from error
            opened = reference_session.session(found, "decoding needs")
            (self.probes[value, tokens],) = reference_session.run(opened, {TARGET: np.full((1, tokens), START)})
        return self.probes[value, tokens]


def rank_of(value: ir.Value) -> int:
    """The rank of a value. Refuses an unknown one."""
    found = query.rank(value)
    if found is None:
        raise Refused(f"the rank of {value.name} is not known")
    return found
