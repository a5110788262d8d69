"""Dense part of a Wide & Deep graph as expressions of hashed categories and numbers, and their ONNX graph.

A `Row` is the input of the first layer: table rows and numbers side by side. A `Sum` is linear in its operands, so that
biases, batch normalization and the normalization of numbers are merged into its weights. An `Apply` is every other
operator, such as an activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit
from zoo.recommenders.data.transforms import apply

Array = npt.NDArray[Any]
OPSET = 18
MAX_TABLE_ENTRIES = 2**28  # entries of one table


@dataclass(frozen=True)
class Column:
    """A number: entry `position` of the feature, after `steps`."""

    feature: str
    position: int
    steps: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Lookup:
    """A row of a table selected by an id.

    Attributes:
        field: Category of the id.
        table: float32 [buckets + 1, d]; the last row is for missing values.
        one_hot: Whether the table is the identity.
    """

    field: str
    table: Array
    one_hot: bool = False


Part: TypeAlias = Column | Lookup


@dataclass(frozen=True, eq=False)
class Row:
    """Concatenated parts, [n, sum of their widths]."""

    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """Columns of the row."""
        return sum(map(width_of, self.parts))


@dataclass(frozen=True, eq=False)
class Apply:
    """An ONNX operator on expressions and constants, [n, width]."""

    op: str
    inputs: tuple[Any, ...]
    width: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Sum:
    """A linear combination: sum x W over `products` + `lookups` + `numbers` w + `others` w + bias.

    Weights of `products` are matrices; weights of `numbers` and `others` are vectors [width]. All are float64 until the
    graph is written.
    """

    bias: Array
    products: tuple[tuple[Row | Apply, Array], ...] = ()
    lookups: tuple[Lookup, ...] = ()
    numbers: tuple[tuple[Column, Array], ...] = ()
    others: tuple[tuple[Row | Apply, Array], ...] = ()

    @property
    def width(self) -> int:
        """Columns of the sum."""
        return len(self.bias)


Dense: TypeAlias = Row | Apply | Sum


def width_of(part: Part) -> int:
    """Returns the columns of a part of a row.

    Args:
        part: Number or lookup.

    Returns:
        Number of columns.
    """
    return 1 if isinstance(part, Column) else part.table.shape[1]


def as_sum(x: Dense) -> Sum:
    """Converts an expression to a sum.

    Args:
        x: Expression.

    Returns:
        Equal sum.
    """
    zero = np.zeros(x.width)
    if isinstance(x, Sum):
        return x
    if isinstance(x, Row) and all(isinstance(part, Column) for part in x.parts):
        units = np.eye(x.width)
        return Sum(
            zero,
            numbers=tuple((part, unit) for part, unit in zip(x.parts, units, strict=True) if isinstance(part, Column)),
        )
    if isinstance(x, Row) and len(x.parts) == 1 and isinstance(x.parts[0], Lookup):
        return Sum(zero, lookups=(x.parts[0],))
    return Sum(zero, others=((x, np.ones(x.width)),))


def add(a: Dense, b: Dense) -> Sum:
    """Adds two values of the same width.

    Args:
        a: First value.
        b: Second value.

    Returns:
        a + b.
    """
    x, y = as_sum(a), as_sum(b)
    return Sum(
        x.bias + y.bias, x.products + y.products, x.lookups + y.lookups, x.numbers + y.numbers, x.others + y.others
    )


def affine(x: Dense, factor: Array | float, shift: Array | float) -> Sum:
    """Scales and shifts a value by column.

    Args:
        x: Value.
        factor: Number or float64 [width].
        shift: Number or float64 [width].

    Returns:
        x * factor + shift.
    """
    s = as_sum(x)
    k = np.broadcast_to(np.asarray(factor, np.float64), (s.width,))
    lookups = (
        s.lookups if (k == 1).all() else tuple(Lookup(lookup.field, _float32(lookup.table * k)) for lookup in s.lookups)
    )
    return Sum(
        s.bias * k + shift,
        tuple((part, weight * k) for part, weight in s.products),
        lookups,
        tuple((column, weight * k) for column, weight in s.numbers),
        tuple((part, weight * k) for part, weight in s.others),
    )


def multiply(x: Dense, weight: Array) -> Sum:
    """Multiplies a value by a matrix. One-hot parts become rows of the matrix.

    Args:
        x: Value.
        weight: Matrix [x.width, m].

    Returns:
        x W.
    """
    weight = weight.astype(np.float64)
    zero = np.zeros(weight.shape[1])
    if isinstance(x, Row):
        total, left, rows = Sum(zero), [], []
        start = 0
        for part in x.parts:
            part_weight = weight[start : start + width_of(part)]
            start += len(part_weight)
            if isinstance(part, Lookup) and part.one_hot:
                total = add(total, linear(as_sum(Row((part,))), part_weight))
            else:
                left.append(part)
                rows.append(part_weight)
        if any(isinstance(part, Lookup) for part in left):
            return add(total, Sum(zero, products=((Row(tuple(left)), np.concatenate(rows)),)))
        return add(total, linear(as_sum(Row(tuple(left))), np.concatenate(rows))) if left else total
    s = as_sum(x)
    if not (s.products or s.lookups or s.numbers):
        return linear(s, weight)
    return linear(Sum(np.zeros(s.width), others=((Apply("Identity", (s,), s.width, {}), np.ones(s.width)),)), weight)


def linear(s: Sum, matrix: Array) -> Sum:
    """Multiplies a sum by a matrix and merges the matrix into its weights and tables.

    Args:
        s: Sum.
        matrix: Matrix [s.width, m].

    Returns:
        s M.

    Raises:
        RequestError: A table would exceed `MAX_TABLE_ENTRIES` entries.
    """
    if any(lookup.table.shape[0] * matrix.shape[1] > MAX_TABLE_ENTRIES for lookup in s.lookups):
        raise RequestError(f"its table would have over {MAX_TABLE_ENTRIES:,} entries")
    m = matrix.astype(np.float64)
    products = tuple((part, weight @ m) for part, weight in s.products) + tuple(
        (part, k[:, None] * m) for part, k in s.others
    )
    lookups = tuple(Lookup(lookup.field, _float32(lookup.table @ m)) for lookup in s.lookups)
    return Sum(s.bias @ m, products, lookups, tuple((column, weight @ m) for column, weight in s.numbers))


def elementwise(step: str, x: Row, constant: Array | None = None) -> Row:
    """Applies a step of `zoo.recommenders.data.transforms.STEPS` to every part: numbers record it, tables are computed.

    Args:
        step: Name of the step.
        x: Row.
        constant: Constants of the step, [x.width]; None for steps without one.

    Returns:
        Transformed row.
    """
    parts: list[Part] = []
    start = 0
    for part in x.parts:
        values = None if constant is None else constant[start : start + width_of(part)].astype(np.float32)
        start += width_of(part)
        if isinstance(part, Column):
            parts.append(replace(part, steps=(*part.steps, (step,) if values is None else (step, float(values[0])))))
        else:
            parts.append(Lookup(part.field, apply((step,) if values is None else (step, values), part.table)))
    return Row(tuple(parts))


def _float32(array: Array) -> Array:
    return array.astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- to ONNX


class Emitter:
    """Writes expressions as ONNX nodes.

    The inputs are `ids`, int32 [batch, fields], and `numbers`, float32 [batch, columns], if any. The ranges of the
    numbers, which arrive scaled to [0, 1], are merged into the weights.
    """

    def __init__(self, fields: Sequence[str], columns: Mapping[Column, tuple[float, float]]) -> None:
        self.fields = {name: i for i, name in enumerate(fields)}
        self.columns = {column: i for i, column in enumerate(columns)}
        self.lo = np.array([low for low, _ in columns.values()], np.float32)
        self.span = np.array([high - low if high > low else 1.0 for low, high in columns.values()], np.float32)
        self.ids = _input("ids", ir.DataType.INT32, len(fields))
        self.numbers = _input("numbers", ir.DataType.FLOAT, len(columns))
        self.main = ir.Graph(
            [self.ids, *([self.numbers] if columns else [])], [], nodes=[], opset_imports={"": OPSET}, name="wide_deep"
        )
        self.taken: set[str] = {"ids", "numbers", "probability"}
        self.done: dict[int, ir.Value] = {}  # by the id of an expression, all of which the caller holds
        self.layers = 0

    def model(self, logit: Dense) -> ir.Model:
        """Writes the model of a logit.

        Args:
            logit: Expression of one column.

        Returns:
            Model whose output `probability`, float32 [batch, 1], is the sigmoid of the logit.
        """
        value = self._dense(logit)
        output = edit.node("Sigmoid", [value], "probability", dtype=ir.DataType.FLOAT)
        output.outputs[0].shape = ir.Shape(["batch", 1])
        self.main.append(output)
        self.main.outputs.append(output.outputs[0])
        return ir.Model(self.main, ir_version=10)

    def _dense(self, x: Dense) -> ir.Value:
        if (emitted := self.done.get(id(x))) is None:
            emitted = self.done[id(x)] = (
                self._sum(x) if isinstance(x, Sum) else self._row(x) if isinstance(x, Row) else self._apply(x)
            )
        return emitted

    def _apply(self, x: Apply) -> ir.Value:
        inputs = [
            self._constant(source, "constant") if isinstance(source, np.ndarray) else self._dense(source)
            for source in x.inputs
        ]
        return inputs[0] if x.op == "Identity" else self._node(x.op, inputs, x.width, **x.attributes)

    def _sum(self, s: Sum) -> ir.Value:
        bias, addends = s.bias, []
        for x, weight in s.products:
            value, matrix, shift = self._operand(x, weight)
            bias = bias + shift
            self.layers += 1
            addends.append(
                self._node("MatMul", [value, self._constant(matrix, f"dense_{self.layers}/kernel")], s.width)
            )
        if s.numbers:
            matrix, shift = self._by_column(s.numbers, s.width)
            bias = bias + shift
            addends.append(self._node("MatMul", [self.numbers, self._constant(matrix, "wide/numbers")], s.width))
        if addends and bias.any():
            addends[0] = self._node("Add", [addends[0], self._constant(bias, f"dense_{self.layers}/bias")], s.width)
            bias = np.zeros(0)
        addends += [self._lookup(part, "wide") for part in sorted(s.lookups, key=lambda part: self.fields[part.field])]
        for x, factor in s.others:
            value = self._dense(x)
            addends.append(
                value if (factor == 1).all() else self._node("Mul", [value, self._constant(factor, "factor")], s.width)
            )
        total = addends[0] if len(addends) == 1 else self._node("Sum", addends, s.width)
        return self._node("Add", [total, self._constant(bias, "bias")], s.width) if bias.any() else total

    def _operand(self, x: Row | Apply, weight: Array) -> tuple[ir.Value, Array, Array]:
        """Returns the input of a layer, its weights for that input, and a bias.

        The input has the table rows in the order of the ids, then `numbers`.
        """
        if isinstance(x, Apply):
            return self._dense(x), weight, np.zeros(weight.shape[1])
        ends = np.cumsum([width_of(part) for part in x.parts])
        rows = np.split(weight, ends[:-1])
        lookups = [(part, block) for part, block in zip(x.parts, rows, strict=True) if isinstance(part, Lookup)]
        lookups.sort(key=lambda pair: self.fields[pair[0].field])
        numbers = [(part, block[0]) for part, block in zip(x.parts, rows, strict=True) if isinstance(part, Column)]
        values, matrices = [self._lookup(part, "deep") for part, _ in lookups], [block for _, block in lookups]
        shift = np.zeros(weight.shape[1])
        if numbers:
            matrix, shift = self._by_column(numbers, weight.shape[1])
            values.append(self.numbers)
            matrices.append(matrix)
        matrix = np.concatenate(matrices)
        return values[0] if len(values) == 1 else self._node("Concat", values, len(matrix), axis=1), matrix, shift

    def _by_column(self, numbers: Sequence[tuple[Column, Array]], width: int) -> tuple[Array, Array]:
        """Returns weights [columns, width] of the input `numbers`, and a bias [width].

        w t = (w span) u + w lo, with u = (t - lo) / span.
        """
        matrix = np.zeros((len(self.columns), width))
        for column, weight in numbers:
            matrix[self.columns[column]] += weight
        return matrix * self.span[:, None].astype(np.float64), self.lo.astype(np.float64) @ matrix

    def _row(self, x: Row) -> ir.Value:
        """Writes a row that no layer reads."""
        values = []
        for part in x.parts:
            if isinstance(part, Lookup):
                values.append(self._lookup(part, "deep"))
                continue
            i = self.columns[part]
            value = self._node("Gather", [self.numbers, self._constant(np.array([i], np.int64), "column")], 1, axis=1)
            for op, constant in (("Mul", self.span[i]), ("Add", self.lo[i])):
                value = self._node(op, [value, self._constant(np.array([constant]), "constant")], 1)
            values.append(value)
        return values[0] if len(values) == 1 else self._node("Concat", values, x.width, axis=1)

    def _lookup(self, part: Lookup, where: str) -> ir.Value:
        column = self._constant(np.array(self.fields[part.field], np.int64), f"{where}/{part.field}/column")
        ids = self._add(
            edit.node(
                "Gather",
                [self.ids, column],
                f"{where}/{part.field}/ids",
                dtype=ir.DataType.INT32,
                taken=self.taken,
                axis=1,
            )
        )
        ids.shape = ir.Shape(["batch"])
        name = "weights" if where == "wide" else "embeddings"
        table = self._constant(part.table, f"{where}/{part.field}/{name}")
        return self._node("Gather", [table, ids], part.table.shape[1], name=f"{where}/{part.field}/rows", axis=0)

    def _constant(self, array: Array, name: str) -> ir.Value:
        array = np.array(array, array.dtype if array.dtype.kind == "i" else np.float32, order="C")
        return edit.initializer(self.main, name, array, self.taken)

    def _node(self, op: str, inputs: Sequence[ir.Value], width: int, name: str = "", **attributes: Any) -> ir.Value:
        made = edit.node(op, list(inputs), name or op, dtype=ir.DataType.FLOAT, taken=self.taken, **attributes)
        made.outputs[0].shape = ir.Shape(["batch", width])
        return self._add(made)

    def _add(self, node: ir.Node) -> ir.Value:
        self.main.append(node)
        return node.outputs[0]


def _input(name: str, dtype: ir.DataType, width: int) -> ir.Value:
    """A graph input [batch, width]."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(["batch", width]))


def columns_of(x: Dense) -> list[Column]:
    """Returns the distinct numbers that an expression reads.

    Args:
        x: Expression.

    Returns:
        Numbers in order of their first use.
    """
    columns: dict[Column, None] = {}
    for leaf in _leaves(x):
        if isinstance(leaf, Column):
            columns[leaf] = None
    return list(columns)


def fields_of(x: Dense) -> set[str]:
    """Returns the categories that an expression reads.

    Args:
        x: Expression.

    Returns:
        Names of the categories.
    """
    return {leaf.field for leaf in _leaves(x) if isinstance(leaf, Lookup)}


def _leaves(x: Dense) -> list[Part]:
    """The parts that an expression reads, in the order met."""
    leaves: list[Part] = []
    seen: set[int] = set()
    waiting: list[Any] = [x]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, np.ndarray):
            continue
        seen.add(id(part))
        if isinstance(part, Row):
            leaves += part.parts
        elif isinstance(part, Sum):
            leaves += [*part.lookups, *(column for column, _ in part.numbers)]
            waiting += [value for value, _ in (*part.products, *part.others)]
        else:
            waiting += part.inputs
    return leaves
