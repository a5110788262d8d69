"""Reads the float graph of a click model as the expressions of `zoo.recommenders.lowering.expressions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import query
from zoo.recommenders.lowering.algebra import (
    added,
    columns_of,
    crossed_with,
    gated_sum,
    joined,
    layer_of,
    scaled,
    shifted,
    square_of,
    stacked,
    sum_of_layers,
    times,
    total_of,
    unshifted,
    without_constants,
)
from zoo.recommenders.lowering.expressions import (
    Array,
    Concat,
    Dots,
    ElementwiseProduct,
    Expression,
    Factorization,
    Field,
    FloatVector,
    Gated,
    L2Normalized,
    Leaky,
    Linear,
    MeanScale,
    Numbers,
    ProbabilityProduct,
    Product,
    Shifted,
    Softmax,
    SquareSum,
    Tanh,
    Total,
    Vectors,
    WeightedVectors,
    is_value,
)
from zoo.recommenders.lowering.fields.reader import read_fields
from zoo.recommenders.lowering.sequences.reader import sequence_value

END_OF_AXIS = 2**31 - 1  # the end of an axis of any length
VIEWS = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast")


@dataclass
class GraphReader:
    """Reads values of a graph as expressions, each value once.

    Attributes:
        ids: Graph input of the ids; None until it is used.
        numbers: Graph input of the numbers; None until it is used.
        scales: Graph input of the scales; None until it is used.
        nodes: Nodes read so far.

    Raises:
        RequestError: An operator is not supported; the message has its name.
    """

    ids: ir.Value | None = None
    numbers: ir.Value | None = None
    scales: ir.Value | None = None
    nodes: set[ir.Node] = field(default_factory=set)
    _known: dict[ir.Value, Expression] = field(default_factory=dict)

    def read(self, value: ir.Value | None) -> Expression:
        """Returns the expression that computes `value`; raises RequestError for an unsupported operator."""
        if value is None:
            raise RequestError("an operator lacks an input")
        if value not in self._known:
            self._known[value] = self._input(value) if value.producer() is None else self._node(value)
        return self._known[value]

    def value_of(self, x: Expression) -> ir.Value:
        """Returns the value of the graph that an expression was read from."""
        return next(value for value, expression in self._known.items() if expression is x)

    def _input(self, value: ir.Value) -> Expression:
        width = value.shape[1] if value.shape is not None and len(value.shape) == 2 else None
        if not value.is_graph_input() or value.dtype != ir.DataType.FLOAT or not isinstance(width, int):
            raise RequestError(f"{value.name} is no input of a fixed number of float columns")
        if self.numbers not in (None, value):
            raise RequestError(
                f"numbers come from {value.name}, too, not from {self.numbers and self.numbers.name} alone"
            )
        self.numbers = value
        return Numbers(width, list(range(width)), np.ones(width))

    def _node(self, value: ir.Value) -> Expression:
        node = value.producer()
        assert node is not None
        self.nodes.add(node)
        made = getattr(self, f"_{node.op_type.lower()}", None) if not node.domain else None
        made = self._view if node.op_type in VIEWS else made
        sequence = sequence_value(node, value, self.read, self.columns, self.nodes)
        expression: Expression | None = sequence or read_fields(self, node, value)
        if expression is None and made is not None:
            expression = made(node, value)
        if expression is None:
            raise RequestError(f"the operator {node.name or value.name} ({node.op_type}) has no native form here")
        return expression

    # --- lookups

    def _gather(self, node: ir.Node, value: ir.Value) -> Expression | None:
        table, axis = query.constant(node.inputs[0]), node.attributes.get_int("axis", 0)
        if table is None:
            return self._chosen(node, value) if axis in (1, -1) else None
        if table.ndim != 2 or table.dtype != np.float32 or axis != 0:
            return None
        width, chosen = table.shape[1], self.columns(node.inputs[1])
        starts = sorted({start for _, start in chosen})
        ends = dict(zip(starts, [*starts[1:], len(table)], strict=True))
        parts = {start: table[start : ends[start]] for start in starts}
        fields: list[Expression] = [
            Field(width, parts[start], column, 1, "", -1, str(value.name)) for column, start in chosen
        ]
        if query.rank(value) == 2 and len(fields) == 1:
            return fields[0]
        return Vectors(width * len(fields), fields)

    def columns(self, value: ir.Value | None) -> list[tuple[int, int]]:
        """Reads an integer value as (column of the ids, offset) of every entry. May raise RequestError."""
        node = query.producer(value)
        if value is None or node is None:
            if value is None or not value.is_graph_input() or query.rank(value) != 2 or value.shape is None:
                raise RequestError("lookups do not read columns of one graph input")
            if self.ids not in (None, value) or not isinstance(value.shape[1], int):
                raise RequestError("lookups read more than one graph input, or one of no fixed width")
            self.ids = value
            return [(column, 0) for column in range(value.shape[1])]
        self.nodes.add(node)
        if node.op_type in VIEWS:
            return self.columns(node.inputs[0])
        if node.op_type == "Add":
            constants = [query.constant(source) for source in node.inputs]
            index = 0 if constants[0] is not None else 1
            if (offsets := constants[index]) is not None:
                columns = self.columns(node.inputs[1 - index])
                added = np.broadcast_to(offsets.ravel(), len(columns))
                return [(column, start + int(more)) for (column, start), more in zip(columns, added, strict=True)]
        picked = _picked(node, value, lambda: len(self.columns(node.inputs[0])))
        if picked is None:
            raise RequestError(f"the ids pass {node.op_type}, which has no native form here")
        columns = self.columns(node.inputs[0])
        return [columns[column] for column in picked]

    def _pooled(self, x: Expression, pool: str, value: ir.Value) -> Expression | None:
        """Pools a stack of lookups in one table by neighbouring columns; None for other values."""
        stack = stacked(x) or []
        fields = [vector for vector in stack if isinstance(vector, Field)]
        if not fields or len(fields) != len(stack):
            return None
        first = fields[0]
        if any(field.table is not first.table or field.pool for field in fields):
            return None
        if [field.column for field in fields] != list(range(first.column, first.column + len(fields))):
            return None
        return replace(first, count=len(fields), pool=pool, value=str(value.name))

    # --- views

    def _view(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x, rank = self.read(node.inputs[0]), query.rank(value)
        if isinstance(x, Softmax) and x.times == 1:
            return x
        stack, count = stacked(x), _static(value, 1)
        if rank == 3 and isinstance(x, Linear | FloatVector):
            if count == 1:
                return Vectors(x.width, [x])
            fits = isinstance(x, Linear) and count and x.width == count * (_static(value, 2) or 0)
            return Vectors(x.width, columns_of(x, count)) if fits else None  # type: ignore[arg-type]
        if rank == 3 and (vectors := stack or (x.parts if isinstance(x, Concat) else [])):
            fits = count == len(vectors) and all(vector.width * len(vectors) == x.width for vector in vectors)
            return Vectors(x.width, vectors) if fits else None
        if stack and rank == 2:
            return joined(stack)
        if stacked(x, "dots") and rank == 2:
            return x
        return x if rank == 2 and _static(value, 1) in (None, x.width) else None

    def _slice(self, node: ir.Node, value: ir.Value) -> Expression | None:
        source = node.inputs[0]
        if source is not None and source.is_graph_input() and source.dtype == ir.DataType.FLOAT:
            width = source.shape[1] if source.shape is not None else None
            picked = _picked(node, value, lambda: int(width) if isinstance(width, int) else 0)
            if picked is None:
                return None
            if len(picked) == 1 and self._is_scales(value):
                if self.scales not in (None, source):
                    return None
                self.scales = source
                return MeanScale(1, picked[0])
            x = self.read(source)
            assert isinstance(x, Numbers)
            return Numbers(len(picked), [x.columns[column] for column in picked], x.factor[picked])
        return None

    _split = _slice

    def _is_scales(self, value: ir.Value) -> bool:
        """Whether a column of scales only multiplies the sum over a list."""
        users = [use.node for use in value.uses()]
        return all(user.op_type == "Mul" and any(_is_sum(other) for other in user.inputs) for user in users)

    def _concat(self, node: ir.Node, value: ir.Value) -> Expression | None:
        axis, rank = node.attributes.get_int("axis", 0), query.rank(value) or 2
        parts = [self.read(source) for source in node.inputs]
        if rank == 3 and axis in (1, -2):
            vectors: list[Expression] = []
            for part in parts:
                vectors += stacked(part) or [part]
            return Vectors(sum(vector.width for vector in vectors), vectors)
        return joined(parts) if axis in (1, -1) and rank == 2 else None

    def _chosen(self, node: ir.Node, value: ir.Value) -> Expression | None:
        source = node.inputs[0]
        if source is not None and source.is_graph_input():
            return self._slice(node, value)
        vectors, picks = stacked(self.read(source), "dots"), query.constant(node.inputs[1])
        if vectors is None or picks is None or query.rank(source) != 2:
            return None
        pairs = [divmod(int(pick), len(vectors)) for pick in picks.ravel()]
        return Dots(len(pairs), vectors, pairs, str(value.name))

    # --- layers

    def _gemm(self, node: ir.Node, value: ir.Value) -> Expression | None:
        weight = query.constant(node.inputs[1])
        if weight is None or weight.ndim != 2 or node.attributes.get_int("transA", 0) != 0:
            return None
        turned = query.inputs_first(node, weight)
        turned = turned.astype(np.float64) * node.attributes.get_float("alpha", 1.0)
        bias = np.zeros(turned.shape[1])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            shift = query.constant(node.inputs[2])
            if shift is None or shift.size not in (1, turned.shape[1]):
                return None
            bias += shift.ravel() * np.float64(node.attributes.get_float("beta", 1.0))
        x = self.read(node.inputs[0])
        if turned.shape == (1, 1) and not is_value(x) and (total := scaled(x, turned[0])) is not None:
            assert isinstance(total, Total)
            return replace(total, bias=total.bias + float(bias[0]))
        return self._layer(x, turned, bias, value)

    def _layer(self, x: Expression, weight: Array, bias: Array, value: ir.Value) -> Expression:
        if x.width != len(weight):
            raise RequestError(f"the layer {value.name} has {len(weight)} inputs for {x.width} columns")
        x, weight, bias = without_constants(x, weight, bias)
        if isinstance(x, Numbers) and x.width == 1 < weight.shape[1] and not bias.any():
            factor = x.factor * weight[0]
            return Numbers(weight.shape[1], x.columns * weight.shape[1], factor, str(value.name))
        return Linear(weight.shape[1], x, weight, bias, False, str(value.name))

    def _matmul(self, node: ir.Node, value: ir.Value) -> Expression | None:
        weight = query.constant(node.inputs[1])
        x = self.read(node.inputs[0])
        if weight is not None and isinstance(x, Softmax):
            times_ = len(weight.T) // x.width if weight.ndim == 2 else 0
            same = x.times == 1 and times_ and np.array_equal(weight, np.repeat(np.eye(x.width), times_, axis=1))
            return Softmax(x.width * times_, x.x, times_) if same else None
        if weight is not None and weight.ndim == 2 and query.rank(value) == 2:
            return self._layer(x, weight.astype(np.float64), np.zeros(weight.shape[1]), value)
        if isinstance(x, Softmax) and weight is None:
            experts = stacked(self.read(node.inputs[1])) or []
            row = query.dimensions(node.inputs[0])
            fits = experts and row is not None and row[1:] == [1, len(experts)]
            return gated_sum(experts, x.x, str(value.name)) if fits else None
        turned = stacked(self.read(node.inputs[1]), "turned") if weight is None else None
        vectors = stacked(x)
        return Vectors(len(vectors) ** 2, vectors, "dots") if vectors and turned == vectors else None

    def _transpose(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = self.read(node.inputs[0])
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
        stack = stacked(x)
        return Vectors(x.width, stack, "turned") if stack and list(perm) == [0, 2, 1] else None

    def _relu(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = layer_of(self.read(node.inputs[0]))
        return replace(x, relu=True, value=str(value.name)) if x is not None and not x.relu else None

    def _leakyrelu(self, node: ir.Node, value: ir.Value) -> Expression | None:
        return self._leaky(node, value, np.array(node.attributes.get_float("alpha", 0.01)))

    def _prelu(self, node: ir.Node, value: ir.Value) -> Expression | None:
        slope = query.constant(node.inputs[1])
        return None if slope is None else self._leaky(node, value, slope.astype(np.float64).ravel())

    def _leaky(self, node: ir.Node, value: ir.Value, slope: Array) -> Expression | None:
        x = layer_of(self.read(node.inputs[0]))
        if x is None or x.relu or slope.size not in (1, x.width):
            return None
        return Leaky(x.width, str(value.name), x, np.broadcast_to(slope, x.width))

    def _tanh(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = layer_of(self.read(node.inputs[0]))
        return Tanh(x.width, str(value.name), x) if x is not None and not x.relu else None

    def _softmax(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = layer_of(self.read(node.inputs[0]))
        last = query.rank(value) == 2 and node.attributes.get_int("axis", -1) in (1, -1)
        return Softmax(x.width, x) if x is not None and not x.relu and last else None

    def _sigmoid(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = total_of(self.read(node.inputs[0]))
        return replace(x, sigmoid=True) if x is not None else None

    # --- sums and products

    def _add(self, node: ir.Node, value: ir.Value) -> Expression | None:
        for index in (0, 1):
            constant = query.constant(node.inputs[index])
            if constant is None:
                continue
            x = self.read(node.inputs[1 - index])
            if isinstance(x, Linear) and not x.relu and constant.size in (1, x.width):
                return replace(x, bias=x.bias + constant.ravel(), value=str(value.name))
            if isinstance(x, SquareSum) and not x.root and not x.least and constant.size == 1:
                return replace(x, epsilon=x.epsilon + float(constant.item()))
            total = total_of(x)
            if total is not None and constant.size == 1:
                return replace(total, bias=total.bias + float(constant.item()))
            if (
                (isinstance(x, ElementwiseProduct | Shifted) or is_value(x))
                and constant.size in (1, x.width)
                and x.width > 1
            ):
                return shifted(x, constant.astype(np.float64).ravel())
            return None
        x, y = (self.read(source) for source in node.inputs)
        for a, b in ((x, y), (y, x)):
            (product, by), (state, more) = unshifted(a), unshifted(b)
            if (
                isinstance(product, ElementwiseProduct)
                and (crossed := crossed_with(product, state, str(value.name))) is not None
            ):
                return shifted(crossed, by + more)
        first, second = layer_of(x), layer_of(y)
        if (
            first is not None
            and second is not None
            and first.width == second.width > 1
            and not (first.relu or second.relu)
        ):
            parts = joined([first.x, second.x])
            weight = np.concatenate([first.weight, second.weight])
            return self._layer(parts, weight, first.bias + second.bias, value)
        return added(x, y, 1.0)

    def _sum(self, node: ir.Node, value: ir.Value) -> Expression | None:
        total: Expression | None = self.read(node.inputs[0])
        for source in node.inputs[1:]:
            total = None if total is None else added(total, self.read(source), 1.0)
        return total

    def _sub(self, node: ir.Node, value: ir.Value) -> Expression | None:
        constant = query.constant(node.inputs[1])
        x = self.read(node.inputs[0])
        if constant is not None and constant.size == 1 and (total := total_of(x)) is not None:
            return replace(total, bias=total.bias - float(constant.item()))
        y = self.read(node.inputs[1])
        vectors, squares = stacked(square_of(x), "sum"), stacked(y, "sum")
        if vectors and squares and [*vectors] == [square_of(square) for square in squares]:
            return Factorization(x.width, vectors, 1.0)
        return added(x, y, -1.0)

    def _mul(self, node: ir.Node, value: ir.Value) -> Expression | None:
        for index in (0, 1):
            constant = query.constant(node.inputs[index])
            if constant is not None:
                return scaled(self.read(node.inputs[1 - index]), constant.astype(np.float64).ravel())
        x, y = (self.read(source) for source in node.inputs)
        for part, mean in ((x, y), (y, x)):
            if isinstance(mean, MeanScale):
                if not isinstance(part, Field) or part.pool != "sum":
                    return None
                return replace(part, pool="mean", mean=mean.column, value=str(value.name))
        for part, weights in ((x, y), (y, x)):
            if isinstance(weights, Softmax) and isinstance(part, Tanh) and part.width == weights.width:
                return Gated(part.width, str(value.name), part, weights.x)
        for index, part, weights in ((1, x, y), (0, y, x)):
            if isinstance(weights, Softmax) and (experts := stacked(part)):
                column = query.dimensions(node.inputs[index])
                fits = column is not None and column[1:] == [len(experts), 1]
                return WeightedVectors(part.width, experts, weights.x) if fits else None
        for index, vector, single in ((1, x, y), (0, y, x)):  # x_0 (w . x), a cross layer with a vector
            if single.width == 1 < vector.width and (layer := sum_of_layers(single, str(node.inputs[index].name))):  # type: ignore[union-attr]
                same = np.ones((1, vector.width))
                return times(vector, Linear(vector.width, layer, same, np.zeros(vector.width), False, layer.value))
        if all(isinstance(side, ProbabilityProduct) or (isinstance(side, Total) and side.sigmoid) for side in (x, y)):
            return ProbabilityProduct(1, x, y)
        return times(x, y) if x.width == y.width else None

    def _pow(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = self.read(node.inputs[0])
        return times(x, x) if query.scalar(node.inputs[1]) == 2 else None

    def _div(self, node: ir.Node, value: ir.Value) -> Expression | None:
        constant = query.constant(node.inputs[1])
        x = self.read(node.inputs[0])
        if constant is not None:
            return scaled(x, 1 / constant.astype(np.float64).ravel())
        norm = self.read(node.inputs[1])
        if isinstance(norm, SquareSum) and norm.root and norm.x is x:
            return L2Normalized(x.width, x, norm.epsilon, norm.least)
        return None

    def _sqrt(self, node: ir.Node, value: ir.Value) -> Expression | None:
        x = self.read(node.inputs[0])
        return replace(x, root=True) if isinstance(x, SquareSum) and not x.root else None

    def _max(self, node: ir.Node, value: ir.Value) -> Expression | None:
        for index in (0, 1) if len(node.inputs) == 2 else ():
            least = query.scalar(node.inputs[index])
            if least is not None:
                x = self.read(node.inputs[1 - index])
                return replace(x, least=least) if isinstance(x, SquareSum) and not x.root and not x.least else None
        return None

    def _reducesum(self, node: ir.Node, value: ir.Value) -> Expression | None:
        source = node.inputs[0]
        x, axes, rank = self.read(source), query.integers(node, "axes", 1), query.rank(source)
        if axes is None or len(axes) != 1 or rank not in (2, 3):
            return None
        axis = axes[0] % rank
        stack = stacked(x)
        if isinstance(x, WeightedVectors):
            return gated_sum(x.vectors, x.gates, str(value.name)) if axis == 1 else None
        if rank == 3 and axis == 1 and stack:
            pooled = self._pooled(x, "sum", value)
            if pooled is not None:
                return pooled
            if x.width == len(stack) and all(map(is_value, stack)):
                return Total(1, [(vector, 1.0) for vector in stack], 0.0)
            return Vectors(x.width // len(stack), stack, "sum")
        if rank != 2 or axis != 1:
            return None
        if isinstance(x, Factorization):
            return replace(x, width=1)
        if (root := square_of(x)) is not None:
            return SquareSum(1, root)
        if isinstance(x, ElementwiseProduct):
            return Product(1, x.x, x.y)
        return Linear(1, x, np.ones((x.width, 1)), np.zeros(1), False, str(value.name)) if is_value(x) else None

    def _reducemax(self, node: ir.Node, value: ir.Value) -> Expression | None:
        axes = query.integers(node, "axes", 1)
        fits = axes is not None and len(axes) == 1 and query.rank(node.inputs[0]) == 3 and axes[0] in (1, -2)
        return self._pooled(self.read(node.inputs[0]), "max", value) if fits else None


def _static(value: ir.Value, axis: int) -> int | None:
    shape = query.dimensions(value)
    return shape[axis] if shape is not None and len(shape) > axis else None


def _picked(node: ir.Node, output: ir.Value, width: Callable[[], int]) -> list[int] | None:
    """Returns the columns of its input of `width()` columns that Slice, Gather or Split takes for `output`."""
    arrays = [query.constant(source) for source in node.inputs[1:]]
    if any(known_value is None for known_value in arrays):
        return None
    constants = [known_value.ravel() for known_value in arrays if known_value is not None]
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) in (1, -1):
        return [int(constant) % width() for constant in constants[0]]
    if node.op_type == "Slice" and len(constants) >= 3:
        steps = constants[3] if len(constants) > 3 else np.ones_like(constants[0])
        cuts = dict(zip(constants[2].tolist(), zip(constants[0], constants[1], steps, strict=True), strict=True))
        first, end, step = cuts.pop(0, (0, END_OF_AXIS, 1))  # all samples
        if (first, step) == (0, 1) and end >= END_OF_AXIS and cuts.keys() in ({1}, {-1}):
            begin, end, step = map(int, cuts.popitem()[1])
            return list(range(width())[begin:end:step])
        return None
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in (1, -1):
        sizes = constants[0].tolist() if constants else [width() // len(node.outputs)] * len(node.outputs)
        index = list(node.outputs).index(output)
        return list(range(sum(sizes[:index]), sum(sizes[: index + 1])))
    return None


def _is_sum(value: ir.Value | None) -> bool:
    return query.producer(value, "ReduceSum") is not None
