"""Rewrites the graph of an imported ranker in the form of `zoo.recommenders.export.fx_export`.

Every value of the imported graph is tracked as a layout: for each entry, the entry of a new value that it equals.
Reshapes, slices, transposes and concatenations become index arithmetic and leave no operator. The other operators are
written on their operands, joined from as few parts as possible. A value that depends on a single id becomes a table of
that id's column, regardless of the original operators (casts, masks, rows times masks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.graph.infer import infer_shapes
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.importers.batch_axis import Run
from zoo.recommenders.importers.index_ops import gathered, is_matmul, sliced, transposed
from zoo.recommenders.importers.inputs import SUBGRAPHS, InputSource, known_ids
from zoo.recommenders.importers.sequences.graph_sequences import Sequences
from zoo.recommenders.importers.values import OF_CODES, TINY, Array, Base, Layout, Writer

RUNS = (3, 5)  # batch sizes of the runs that shapes are read from
UNARY = ("Relu", "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Neg", "Abs", "Erf", "Softplus", "LeakyRelu", "Elu", "Selu")
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "PRelu")
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout")


class Rewriter(Writer):
    """Rewrites the graph of a ranker on the inputs of `Features`.

    Args:
        model: Graph to rewrite; it is not changed.
        features: Encoding of the rows.
        sources: {input name: source of its entries}.
        runs: Values of the graph for batches of `RUNS` rows, {name: array} each.

    Raises:
        RequestError: An id exceeds the table that it looks up.
    """

    def __init__(
        self, model: ir.Model, features: Features, sources: Mapping[str, InputSource], runs: Sequence[Run]
    ) -> None:
        super().__init__(features, dict(model.opset_imports))
        self.old, self.sources, self.runs = model, sources, runs
        self._constants: dict[ir.Value, Array] = {}
        self._softmaxes: set[Base] = set()
        self.layouts: dict[ir.Value, Layout | Array | None] = {}  # None: sizes, which differ from batch to batch

    def rewrite(self, outputs: Sequence[ir.Value], names: Sequence[str] = ("probability",)) -> ir.Model:
        """Rewrites the graph up to its results; their columns are the new outputs, float32 [batch, 1] each.

        Args:
            outputs: Results of the graph.
            names: Names of the new outputs, one for every column of the results.

        Returns:
            The new graph.

        Raises:
            RequestError: A value has no layout.
        """
        codes = {field.start: known_ids(field) for field in self.features.fields}
        self._kept += list(codes.values())
        width = self.features.shape[1]
        numbers = self.base((width,), lambda: self.inputs["numbers"]) if "numbers" in self.inputs else None
        for value in self.old.graph.inputs:
            source = self.sources[str(value.name)]
            entries = np.empty(source.columns.shape, np.int64)
            for place in np.ndindex(entries.shape):
                column = int(source.columns[place])
                if source.ids[place]:
                    table = codes[self.field(column).start]
                    entries[place] = self.lookup(column, self._cast_table(table, source.dtype), True).first
                else:
                    assert numbers is not None
                    entries[place] = numbers.first + column
            self.layouts[value] = Layout(entries)
        sequences = Sequences(self.old)
        for node in self.old.graph:
            if (layout := sequences.layout(self, node.outputs[0], self.layouts, self.shape)) is not None:
                self.layouts[node.outputs[0]] = layout
            elif node not in sequences.inner:
                self._follow(node)
        layouts = [self.layouts.get(output) for output in outputs]
        columns = [entry for x in layouts if isinstance(x, Layout) and not x.batch for entry in x.entries.ravel()]
        shown = ", ".join(str(output.name) for output in outputs)
        if not all(isinstance(x, Layout) for x in layouts) or len(columns) != len(names):
            raise RequestError(f"its results {shown} are not {len(names)} numbers per row")
        for name, entry in zip(names, columns, strict=True):
            value = self.written(np.array([entry]))
            if value.producer() is None or value in self.main.outputs:
                value = self.node("Identity", [value], name)
            value.name, value.shape = name, ir.Shape(["batch", 1])
            self.main.outputs.append(value)
        written = ir.Model(self.main, ir_version=9)
        infer_shapes(written)
        return written

    def _follow(self, node: ir.Node) -> None:
        """Determines the layouts of the results of an operator."""
        operands = [self._known(source) for source in node.inputs]
        if not any(isinstance(known_value, Layout) for known_value in operands) or node.op_type in ("Shape", "Size"):
            for value in node.outputs:
                self.layouts[value] = self._constant(value)
            return
        if node.op_type == "Split":
            self._split(node, operands[0])
            return
        entries = self._laid_out(node, operands)
        if entries is None:
            self._copy(node, operands)
        elif not isinstance(entries, Layout):
            shape = self.shape(node.outputs[0])
            if entries.shape != shape:
                raise RequestError(f"{query.label(node)} ({node.op_type}) mixes the rows of a batch")
            same = self._same(entries)
            self.layouts[node.outputs[0]] = Layout(np.asarray(entries)) if same is None else same[None]
        else:
            self.layouts[node.outputs[0]] = entries

    def _known(self, value: ir.Value | None) -> Layout | Array | None:
        if value is None:
            return None
        if value not in self._constants and (array := query.constant(value)) is not None:
            self._constants[value] = self._one(array)  # of one identity, however often it is read
        return self._constants[value] if value in self._constants else self.layouts.get(value)

    def _constant(self, value: ir.Value) -> Array | None:
        """Array of a value that does not depend on the rows, if it is the same for all batch sizes."""
        a, b = (run[str(value.name)] for run in self.runs)
        if a.shape == b.shape:
            return a if np.array_equal(a, b) else None
        if (a.shape[0], b.shape[0]) != RUNS or a.shape[1:] != b.shape[1:]:
            return None
        return a[:1] if (a == a[:1]).all() and (b == a[:1]).all() else None

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Returns the sizes of an imported value without the batch axis; raises RequestError if it is not the first."""
        a, b = (run[str(value.name)].shape for run in self.runs)
        if not a or (a[0], b[0]) != RUNS or a[1:] != b[1:]:
            shapes = f"{list(a)} of {RUNS[0]}, {list(b)} of {RUNS[1]}"
            raise RequestError(f"{value.name} is not of one shape a row: {shapes}")
        return tuple(a[1:])

    def _laid_out(self, node: ir.Node, operands: Sequence[Layout | Array | None]) -> Array | Layout | None:
        """Returns the entries of the result; None if the operator must be copied."""
        op, first = node.op_type, operands[0]
        if node.domain not in ("", "ai.onnx"):
            return None
        if op == "Transpose" and isinstance(first, Layout):
            return transposed(first, node.attributes["perm"].as_ints() if "perm" in node.attributes else None)
        if op == "GatherND" and isinstance(first, Layout) and isinstance(operands[1], np.ndarray):
            return gathered(first, operands[1], node.attributes.get_int("batch_dims", 0))
        if any(isinstance(known_value, Layout) and known_value.batch for known_value in operands):
            raise RequestError(f"{query.label(node)} ({op}) computes with the batch turned to another axis")
        layouts = [known_value.entries if isinstance(known_value, Layout) else known_value for known_value in operands]
        x = first.entries if isinstance(first, Layout) else None
        if op in VIEWS and x is not None:
            return x.reshape(self.shape(node.outputs[0]))
        if op in ("Expand", "Tile") and x is not None:
            return self._repeated(node, x)
        if op == "Cast" and x is not None:
            return self._cast(node, x)
        if op == "Concat" and all(isinstance(known_value, Layout) for known_value in operands):
            axis = node.attributes.get_int("axis", 0) % (x.ndim + 1) if x is not None else 0
            return np.concatenate([layout for layout in layouts if layout is not None], axis - 1) if axis else None
        if op == "Slice" and x is not None:
            return sliced(x, layouts[1:])
        if op == "Gather":
            return self._gather(node, operands)
        if op in ("Gemm", "MatMul") or is_matmul(node):
            return self._matrix(node, operands)
        if op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2") and x is not None:
            return self._reduced(node, x)
        if op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or"):
            return self._of_codes(op, self.shape(node.outputs[0]), operands)
        if op == "Clip" and x is not None:
            return self._clipped(node, x, layouts)
        if op == "Softmax" and x is not None:
            axis = node.attributes.get_int("axis", -1) % (x.ndim + 1)
            return self._softmax(x) if axis and x.shape[axis - 1] == x.size else None
        if op in UNARY or (op == "BatchNormalization" and x is not None and x.ndim == 1):
            return self._elementwise(node, operands[:1], layouts[1:])
        if op in BINARY and len(operands) == 2 and all(known_value is not None for known_value in operands):
            return self._arithmetic(node, operands)
        return None

    def _input(self, operand: Layout | Array) -> ir.Value:
        """The value of an operand in the new graph."""
        return self.written(operand.entries) if isinstance(operand, Layout) else self.weight(operand, "constant")

    def _copy(self, node: ir.Node, operands: Sequence[Layout | Array | None]) -> None:
        """Copies the operator, on values of their original shapes."""
        if any(operand is None and value is not None for operand, value in zip(operands, node.inputs, strict=True)):
            raise RequestError(f"{query.label(node)} ({node.op_type}) computes with the size of the batch")
        outputs = [output for output in node.outputs if output.name]
        if any(attribute.type in SUBGRAPHS for attribute in node.attributes.values()):
            raise RequestError(f"{query.label(node)} ({node.op_type}) holds a graph of its own")
        made: list[ir.Node] = []

        def write() -> ir.Node:
            if not made:
                inputs = [None if operand is None else self._input(operand) for operand in operands]
                attributes = list(node.attributes.values())
                new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
                new.name = edit.unique(node.op_type, self.taken)
                for old, value in zip(node.outputs, new.outputs, strict=True):
                    value.name = edit.unique(f"{new.name}.result", self.taken) if old.name else ""
                    value.type = old.type
                self.main.append(new)
                made.append(new)
            return made[0]

        for index, value in enumerate(node.outputs):
            if (value in outputs and value.uses()) or value.is_graph_output():
                if self.runs[0][str(value.name)].dtype != np.float32:
                    raise RequestError(f"{query.label(node)} ({node.op_type}) computes other than floats from the rows")
                base = self.base(self.shape(value), lambda number=index: write().outputs[number])  # type: ignore[misc]
                self.layouts[value] = Layout(base.entries())

    def _split(self, node: ir.Node, x: Any) -> None:
        axis = node.attributes.get_int("axis", 0) % (x.entries.ndim + 1)
        if not axis or x.batch:
            raise RequestError(f"{query.label(node)} splits the batch")
        widths = [self.shape(output)[axis - 1] for output in node.outputs]
        for value, part in zip(node.outputs, np.split(x.entries, np.cumsum(widths)[:-1], axis - 1), strict=True):
            self.layouts[value] = Layout(part)

    def _repeated(self, node: ir.Node, x: Array) -> Array:
        shape = self.shape(node.outputs[0])
        if node.op_type == "Expand":
            return np.broadcast_to(x, shape)
        return np.tile(x, [new // old for new, old in zip(shape, x.shape, strict=True)])

    def _cast(self, node: ir.Node, x: Array) -> Array | None:
        dtype = ir.DataType(node.attributes["to"].as_int()).numpy()

        def cast(base: Base) -> Base:
            if base.table is not None and base.code:
                return self.lookup(base.column, self._cast_table(base.table, dtype), True)
            if dtype != np.float32:
                raise RequestError(f"{query.label(node)} makes {dtype} of numbers")
            return base

        return self._by_base(x, cast)

    def _gather(self, node: ir.Node, operands: Sequence[Layout | Array | None]) -> Array | None:
        data, indices = operands[0], operands[1]
        axis = node.attributes.get_int("axis", 0)
        if isinstance(data, Layout) and isinstance(indices, np.ndarray):
            axis %= data.entries.ndim + 1
            return np.take(data.entries, indices, axis - 1) if axis else None
        if not isinstance(data, np.ndarray) or not isinstance(indices, Layout) or axis % max(data.ndim, 1):
            return None
        if data.ndim > 2 or any(base.table is None or not base.code for base in self.bases_of(indices.entries)):
            return None
        width = data.shape[1:] or (1,)
        out = np.empty((*indices.entries.shape, *width), np.int64)
        for place in np.ndindex(indices.entries.shape):
            base = self.of(indices.entries[place])
            assert base.table is not None
            rows = base.table[:, 0]
            if rows.min() < -len(data) or rows.max() >= len(data):
                column = self.field(base.column).column
                raise RequestError(
                    f"the column {column.name} has ids up to {int(rows.max())}, but its table {len(data)} rows; "
                    f'expected ids up to {len(data) - 1}: give it "encoding": {{"type": "id", "rows": {len(data)}}}'
                )
            same = len(rows) == len(data) and np.array_equal(rows, np.arange(len(rows)))
            if same and data.ndim == 2:
                table = data
            else:
                table = self._derived(
                    "rows", [data, base.table], lambda d, t: d.reshape(len(d), -1)[t[:, 0].astype(int)]
                )
            out[place] = self.lookup(base.column, table, False).entries()
        return out.reshape((*indices.entries.shape, *data.shape[1:]))

    def _matrix(self, node: ir.Node, operands: Sequence[Layout | Array | None]) -> Array | None:
        a, b = operands[0], operands[1]
        gemm = node.op_type == "Gemm"
        turned = gemm and query.is_transposed(node)
        shape = self.shape(node.outputs[0])
        if isinstance(b, Layout) and isinstance(a, np.ndarray) and b.entries.ndim == 2 and (a == 1).all() and not gemm:
            return self._sum(b.entries, (0,), node)[None] if a.shape == (1, 1, len(b.entries)) else None
        if isinstance(a, Layout) and isinstance(b, Layout) and not gemm:
            return self._product(node, a.entries, b.entries)
        if (
            isinstance(b, Layout)
            and isinstance(a, np.ndarray)
            and a.ndim == 2
            and not gemm
            and b.entries.shape[1:] == (1,)
        ):
            x, w, turned = b.entries, a, True  # W x of columns
        elif (
            isinstance(a, Layout)
            and isinstance(b, np.ndarray)
            and b.ndim == 2
            and not (gemm and node.attributes.get_int("transA", 0) != 0)
        ):
            x, w = a.entries, b
        else:
            return None
        if x.size != w.shape[1 if turned else 0]:
            return None
        bias = operands[2] if len(operands) > 2 else None
        scales: dict[str, Any] = {}
        if gemm:
            scales = {key: node.attributes.get_float(key, 1.0) for key in ("alpha", "beta")}
        if isinstance(bias, Layout):
            return None

        def make() -> ir.Value:
            inputs = [self.written(x.ravel()), self.weight(w, "layer.weight")]
            if bias is not None:
                inputs.append(self.weight(bias, "layer.bias"))
            if not turned and bias is None and not gemm:
                return self.node("MatMul", inputs, "layer")
            more = {key: value for key, value in scales.items() if value != 1.0}
            return self.node("Gemm", inputs, "layer", transB=int(turned), **more)

        return self.base((w.shape[0 if turned else 1],), make).entries().reshape(shape)

    def _product(self, node: ir.Node, a: Array, b: Array) -> Array | None:
        """Appends a MatMul of two computed matrices."""
        if a.shape[1:] == (1,) and b.shape == (1, 1):  # a vector times a number
            x, y = a.ravel(), b.ravel()
            product = self.base(x.shape, lambda: self.node("Mul", [self.written(x), self.written(y)], "mul"))
            return product.entries().reshape(a.shape)
        if a.ndim == 2 and b.shape == (a.shape[1], 1) and self._is_softmax(b):
            return self._weighted(a, b.ravel())[:, None]
        if a.ndim == 2 and b.ndim == 2:  # a mask times the rows of a list
            products = self._of_rows("Mul", a[:, :, None], b[None])
            return None if products is None else self._sum(products, (1,), node)
        return None

    def _softmax(self, x: Array) -> Array:
        """Appends a softmax over the only axis longer than 1."""
        made = self.base((x.size,), lambda: self.node("Softmax", [self.written(x.ravel())], "softmax", axis=1))
        self._softmaxes.add(made)
        return made.entries().reshape(x.shape)

    def _is_softmax(self, x: Array) -> bool:
        return self.of(x.ravel()[0]) in self._softmaxes

    def _weighted(self, vectors: Array, weights: Array) -> Array:
        """Sums vectors [width, vectors], each multiplied by a number."""

        def make() -> ir.Value:
            terms = [
                self.node("Mul", [self.written(vector), self.written(weight.reshape(1))], "expert")
                for vector, weight in zip(vectors.T, weights, strict=True)
            ]
            total = terms[0]
            for term in terms[1:]:
                total = self.node("Add", [total, term], "experts")
            return total

        return self.base((len(vectors),), make).entries()

    def _arithmetic(self, node: ir.Node, operands: Sequence[Layout | Array | None]) -> Array | None:
        """Applies a binary operator elementwise."""
        op, shape = node.op_type, self.shape(node.outputs[0])
        a, b = operands
        for x, constant in ((a, b), (b, a)):
            if not isinstance(x, Layout) or not isinstance(constant, np.ndarray):
                continue
            neutral = op in ("Add", "Mul", "Sub", "Div") and (constant == (op in ("Mul", "Div"))).all()
            if neutral and (op in ("Add", "Mul") or x is a):
                return np.broadcast_to(x.entries, shape)
            if op in ("Mul", "Div") and constant.size == 1 and (op == "Mul" or x is a):
                factor = float(constant.item()) if op == "Mul" else 1 / float(constant.item())
                if (pooled := self._scaled(x.entries, factor)) is not None:
                    return np.broadcast_to(pooled, shape)
            if constant.size == 1 and (count := self._items(x.entries)) is not None:
                value = float(constant.item())
                if (op == "Add" and 0 <= value <= TINY) or (op == "Max" and 0 < value <= 1):
                    return self._elementwise(node, operands, [], count)
        if op in OF_CODES and (coded := self._of_codes(op, self.shape(node.outputs[0]), operands)) is not None:
            return coded
        if isinstance(a, Layout) and isinstance(b, Layout):
            if op in OF_CODES and (rows := self._of_rows(op, a.entries, b.entries)) is not None:
                return rows
            if op == "Div" and (mean := self._mean(a.entries, b.entries)) is not None:
                return np.broadcast_to(mean, shape)
        return self._elementwise(node, operands, [])

    def _elementwise(
        self, node: ir.Node, layouts: Sequence[Any], more: Sequence[Any], count: Field | None = None
    ) -> Array:
        """Applies an operator elementwise on the axes longer than 1; `more` are its constant inputs."""
        op, shape = node.op_type, self.shape(node.outputs[0])
        operands = []
        for known_value in layouts:
            array = known_value.entries if isinstance(known_value, Layout) else known_value
            if array.ndim > len(shape):
                array = array[0]  # of the batch
            array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
            for axis in range(array.ndim):  # repeated values are read once
                if array.shape[axis] > 1 and (array == array.take([0], axis)).all():
                    array = array.take([0], axis)
            operands.append(array)
        full = np.broadcast_shapes(*(operand.shape for operand in operands))
        short = tuple(axis for axis, size in enumerate(full) if size == 1)
        operands = [operand.squeeze(short) for operand in operands]
        sizes = tuple(size for size in full if size > 1)
        if len(operands) == 1 or not sizes:
            operands = [operand.reshape(-1) for operand in operands]
            sizes = (int(np.prod(full)),)
        square = op == "Pow" and isinstance(layouts[1], np.ndarray) and layouts[1].size == 1 and layouts[1].item() == 2

        def make() -> ir.Value:
            values = [
                self.written(array) if isinstance(layout, Layout) else self.weight(array, "constant")
                for layout, array in zip(layouts, operands, strict=True)
            ]
            if square:
                return self.node("Mul", [values[0], values[0]], "square")
            constants = [None if constant is None else self.weight(constant, f"{op}.constant") for constant in more]
            return self.node(
                op, [*values, *constants], op.lower(), **{key: attr.value for key, attr in node.attributes.items()}
            )

        entries = self.base(sizes, make, count=count).entries().reshape(full)
        return np.broadcast_to(entries, shape)

    def _clipped(self, node: ir.Node, x: Array, operands: Sequence[Any]) -> Array | None:
        bounds = [
            None if known_value is None or not isinstance(known_value, np.ndarray) else float(known_value)
            for known_value in operands[1:]
        ]
        low, high = (*bounds, None, None)[:2]
        base = self.of(x.ravel()[0])
        if high is None and low is not None and base.squares is not None and x.size == 1:
            return self._root(base.squares, np.float32(low) ** 2).entries().reshape(x.shape)
        if high is None and low is not None and 0 < low <= 1 and (count := self._items(x)) is not None:
            layout = Layout(x)
            return self._elementwise(node, [layout], operands[1:], count=count)
        return self._elementwise(node, [Layout(x)], operands[1:])

    def _reduced(self, node: ir.Node, x: Array) -> Array | None:
        axes = query.integers(node, "axes", 1)
        own = tuple(sorted(axis % (x.ndim + 1) - 1 for axis in axes or ()))
        if -1 in own or not own:
            return None
        shape = self.shape(node.outputs[0])
        if node.op_type == "ReduceSum":
            return self._sum(x, own, node).reshape(shape)
        if node.op_type == "ReduceL2" and x.size == max(x.shape) == np.prod([x.shape[axis] for axis in own]):
            return self._root(x.ravel(), None).entries().reshape(shape)
        if node.op_type == "ReduceMax" and len(own) == 1:
            pooled = self._pooled(np.moveaxis(x, own[0], -1), "ReduceMax")
            return None if pooled is None else pooled.reshape(shape)
        return None

    def _sum(self, x: Array, axes: tuple[int, ...], node: ir.Node) -> Array:
        """Sums over axes, which are removed."""
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        shape = tuple(x.shape[axis] for axis in kept)
        moved = np.transpose(x, [*kept, *axes]).reshape(*shape, -1)
        if moved.shape[-1] == 1:
            return moved[..., 0]
        if len(axes) == 1 and (pooled := self._pooled(moved, "ReduceSum")) is not None:
            return pooled
        flat = moved.reshape(-1, moved.shape[-1])
        bases = self.bases_of(flat)
        if len(flat) == 1 and all(base.size == 1 for base in bases):  # scalars, each a lookup of its own
            total = self.base((1,), lambda: self.node("Sum", [self.written(x.reshape(1)) for x in flat[0]], "sum"))
            return total.entries().reshape(shape)
        single = [self.of(row[0]) for row in flat]
        if all(
            base.table is not None and np.array_equal(row, base.entries().ravel())
            for row, base in zip(flat, single, strict=True)
        ):
            return np.array([self._row_sum(base).first for base in single]).reshape(shape)

        def make() -> ir.Value:
            if len(flat) == 1:
                axis = self.weight(np.array([1]), "axis")
                return self.node("ReduceSum", [self.written(flat[0]), axis], "sum", keepdims=1)
            first = axes[0] < min(axis for axis in kept if x.shape[axis] > 1)  # over the vectors of a stack, or in each
            stack = np.ascontiguousarray(flat.T) if first else flat
            axis = self.weight(np.array([1 if first else 2]), "axis")
            return self.node("ReduceSum", [self.written(stack), axis], "sum", keepdims=0)

        return self.base((len(flat),), make).entries().reshape(shape)
