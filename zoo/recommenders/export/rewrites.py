"""Graph rewrites of Wide & Deep: merges the lookups of all fields into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.graph.large_weights import StackedTensor
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.equalize_concat import EqualizeConcat
from pipelines.rewrites.fold_index_wrap import FoldIndexWrap
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.simplify_concat import SimplifyConcat
from zoo.recommenders.export.split_numbers import SplitNumbers


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """Returns the passes from fp32.onnx to rewritten.onnx.

    Args:
        preprocessing: Not used.

    Returns:
        Passes in order.
    """
    return [FoldIndexWrap(), FuseLinear(), SplitNumbers(), FuseParallelEmbedding(), FuseParallelSum()]


def passes_without_header(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """Returns the passes for rows without a header, whose numbers are scaled to [0, 1].

    Args:
        preprocessing: Not used.

    Returns:
        Passes in order.
    """
    # FuseLinear comes before FuseParallelSum, which would take the last layer's bias for one summand among many.
    return [
        FoldIndexWrap(),
        FuseLinear(),
        SimplifyConcat(),
        EqualizeConcat({"numbers": (0.0, 1.0)}),
        FuseParallelEmbedding(),
        FuseParallelSum(),
    ]


INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)  # what Gather takes


@dataclass(frozen=True)
class FieldLookup:
    """Lookup by one column of a 2-D input: row ids[:, column] of a table.

    Attributes:
        value: Result of the lookup.
        lookup: The operator.
        ids: Integer input [batch, columns].
        column: Column of `ids`.
    """

    value: ir.Value
    lookup: query.Lookup
    ids: ir.Value
    column: int

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self._shape[0]

    @property
    def width(self) -> int:
        """Columns of the table."""
        return self._shape[1]

    @property
    def _shape(self) -> tuple[int, int]:
        tensor = ir.convenience.get_const_tensor(self.lookup.table)
        assert tensor is not None
        rows, width = tensor.shape.numpy()
        return rows, width


class FuseParallelEmbedding(Rewrite):
    """Fuses lookups of a concatenation: Concat(T_1[ids_1], .., T_k[ids_k]) = Reshape(T[ids + offsets]).

    T is the stacked tables, and offset_i the number of rows of T_1 .. T_{i-1}. k slices, k gathers and the
    concatenation become one gather on one table (ParallelEmbedding of Intel's INT8 Wide & Deep, 2018). Neighbouring
    parts are fused if they read columns of one integer input and have one width; other parts of the concatenation
    remain. Indices must be in [0, rows): an index outside the range of its field, for which Gather fails, would read
    the table of the next field (`zoo.recommenders.inference` checks them).
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every Concat with such parts.

        Args:
            model: Model to rewrite in place.

        Returns:
            Number of gathers created.
        """
        return sum(self._fuse(model.graph, node) for node in list(model.graph) if node.op_type == "Concat")

    def _fuse(self, main: ir.Graph, concat: ir.Node) -> int:
        axis = concat.attributes.get_int("axis", 0)
        if query.rank(concat.outputs[0]) != 2 or axis not in (1, -1):
            return 0
        parts: list[ir.Value | None] = []
        fired = 0
        for run in _runs([(value, field_lookup(value)) for value in concat.inputs]):
            fields = [field for _, field in run if field is not None]
            if len(fields) < 2:
                parts.extend(value for value, _ in run)
                if fields:
                    self.refuse(
                        concat, f"{run[0][0].name if run[0][0] else '?'} has no neighbour of the same input and width"
                    )
                continue
            gathered = _gather(main, concat, fields, f"{concat.outputs[0].name}.embeddings{fired or ''}")
            shape = edit.initializer(
                main, f"{gathered.name}.shape", np.array([-1, sum(field.width for field in fields)], np.int64)
            )
            flat = edit.node("Reshape", [gathered, shape], f"{gathered.name}.flat", dtype=ir.DataType.FLOAT)
            main.insert_before(concat, flat)
            parts.append(flat.outputs[0])
            fired += 1
        if fired:
            joined = edit.node("Concat", list(parts), f"{concat.outputs[0].name}", dtype=ir.DataType.FLOAT, axis=1)
            joined.outputs[0].shape = concat.outputs[0].shape
            ir.convenience.replace_nodes_and_values(main, concat, [concat], [joined], concat.outputs, joined.outputs)
        return fired


class FuseParallelSum(Rewrite):
    """Fuses lookups of a sum: T_1[ids_1] + .. + T_k[ids_k] + rest = ReduceSum(T[ids + offsets]) + rest.

    The k scalars of the wide part become one gather. Fires on a tree of Add and Sum nodes with at least two lookups of
    one width in columns of one integer input. The order of the additions changes, so results agree up to float32
    rounding.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every sum with such parts.

        Args:
            model: Model to rewrite in place.

        Returns:
            Number of sums.
        """
        return sum(
            self._fuse(model.graph, node)
            for node in list(model.graph)
            if node.op_type in ("Add", "Sum") and not _inside_sum(node)
        )

    def _fuse(self, main: ir.Graph, root: ir.Node) -> int:
        leaves, inner = _leaves(root)
        lookups = [(leaf, field_lookup(leaf) if query.rank(leaf) == 2 else None) for leaf in leaves]
        fields = [field for _, field in lookups if field is not None]
        kinds = {(id(field.ids), field.width) for field in fields}
        if len(fields) < 2:
            return 0
        if len(kinds) > 1:
            self.refuse(root, "its lookups differ in input or width")
            return 0
        result = root.outputs[0]
        gathered = _gather(main, root, fields, f"{result.name}.wide")
        axes = edit.initializer(main, f"{gathered.name}.axes", np.array([1], np.int64))
        total = edit.node("ReduceSum", [gathered, axes], f"{gathered.name}.sum", dtype=ir.DataType.FLOAT, keepdims=0)
        nodes = [total]
        for number, leaf in enumerate([leaf for leaf, field in lookups if field is None]):
            nodes.append(
                edit.node("Add", [leaf, nodes[-1].outputs[0]], f"{gathered.name}.plus{number}", dtype=ir.DataType.FLOAT)
            )
        nodes[-1].outputs[0].shape = result.shape
        ir.convenience.replace_nodes_and_values(main, root, [root, *inner], nodes, [result], [nodes[-1].outputs[0]])
        return 1


def field_lookup(value: ir.Value | None) -> FieldLookup | None:
    """Recognizes a lookup by one column of a 2-D integer input.

    Args:
        value: Result of the lookup; its column is taken by Slice, Gather or Split, and squeezed.

    Returns:
        The lookup; None for other values.
    """
    lookup = query.table_lookup(value)
    if value is None or lookup is None:
        return None
    indices = lookup.indices
    while (producer := indices.producer()) is not None and producer.op_type in (
        "Squeeze",
        "Reshape",
        "Cast",
        "Unsqueeze",
        "Flatten",
    ):
        if producer.inputs[0] is None:
            return None
        indices = producer.inputs[0]
    ids = producer.inputs[0] if producer is not None else None
    if producer is None or ids is None or query.rank(ids) != 2 or (column := _column(producer, indices)) is None:
        return None
    while (cast := ids.producer()) is not None and cast.op_type == "Cast" and (source := cast.inputs[0]) is not None:
        if source.dtype not in INTEGERS:  # ids begin here
            break
        ids = source
    return FieldLookup(value, lookup, ids, column) if ids.dtype in INTEGERS else None


def _column(node: ir.Node, output: ir.Value) -> int | None:
    """Returns the column of its 2-D input that `node` takes for `output`; None for other operators."""
    constants = [query.constant(source) for source in node.inputs[1:]]
    lists = [constant.ravel().tolist() for constant in constants if constant is not None]
    if node.op_type == "Slice" and len(lists) == len(constants) >= 3:
        starts, ends, axes, *tail = lists
        steps = tail[0] if tail else [1] * len(axes)
        spans = dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))
        start, end, step = spans.get(1) or spans.get(-1) or (-1, -1, 1)
        whole = all(s == 0 and e >= 2**31 - 1 and p == 1 for axis, (s, e, p) in spans.items() if axis not in (1, -1))
        source = node.inputs[0]
        width = source.shape[1] if source is not None and source.shape is not None and len(source.shape) == 2 else None
        last = end >= 2**31 - 1 and start + 1 == width
        return start if whole and step == 1 and start >= 0 and (end == start + 1 or last) else None
    if (
        node.op_type == "Gather"
        and node.attributes.get_int("axis", 0) in (1, -1)
        and constants[0] is not None
        and constants[0].size == 1
    ):
        column = int(constants[0].item())
        return column if column >= 0 else None
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in (1, -1):
        widths: list[int] = lists[0] if lists else [1] * len(node.outputs)
        index = next(i for i, result in enumerate(node.outputs) if result is output)
        source = node.inputs[0]
        total = source.shape[1] if source is not None and source.shape is not None else None
        return sum(widths[:index]) if widths[index] == 1 and total == sum(widths) else None
    return None


def _runs(
    parts: Sequence[tuple[ir.Value | None, FieldLookup | None]],
) -> list[list[tuple[ir.Value | None, FieldLookup | None]]]:
    """Splits parts at every change of (ids, width); a part without a field lookup is a run of its own."""
    runs: list[list[tuple[ir.Value | None, FieldLookup | None]]] = []
    for value, field in parts:
        last = runs[-1][-1][1] if runs else None
        if field is not None and last is not None and field.ids is last.ids and field.width == last.width:
            runs[-1].append((value, field))
        else:
            runs.append([(value, field)])
    return runs


def _gather(main: ir.Graph, before: ir.Node, fields: Sequence[FieldLookup], name: str) -> ir.Value:
    """Inserts T[ids[:, columns] + offsets], float32 [batch, k, width]."""
    ids = fields[0].ids
    columns = [field.column for field in fields]
    dtype = ids.dtype or ir.DataType.INT64
    offsets = np.cumsum([0, *(field.rows for field in fields)])[:-1].astype(dtype.numpy())
    nodes = []
    if ids.shape is None or ids.shape[1] != len(columns) or columns != list(range(len(columns))):
        order = edit.initializer(main, f"{name}.columns", np.array(columns, np.int64))
        nodes.append(edit.node("Gather", [ids, order], f"{name}.ids", dtype=dtype, axis=1))
        ids = nodes[-1].outputs[0]
    nodes.append(
        edit.node("Add", [ids, edit.initializer(main, f"{name}.offsets", offsets)], f"{name}.rows", dtype=dtype)
    )
    tables = [np.asarray(query.constant(field.lookup.table)) for field in fields]
    stacked = edit.initializer(main, f"{name}.table", StackedTensor(tables, f"{name}.table"))
    nodes.append(edit.node("Gather", [stacked, nodes[-1].outputs[0]], name, dtype=ir.DataType.FLOAT, axis=0))
    main.insert_before(before, nodes)
    return nodes[-1].outputs[0]


def _inside_sum(node: ir.Node) -> bool:
    user = query.sole_user(node.outputs[0])
    return user is not None and user.op_type in ("Add", "Sum")


def _leaves(root: ir.Node) -> tuple[list[ir.Value], list[ir.Node]]:
    """Returns the summands of a tree of Add and Sum nodes, left to right, and its inner nodes."""
    leaves: list[ir.Value] = []
    inner: list[ir.Node] = []
    for value in root.inputs:
        if value is None:
            continue
        producer = value.producer()
        if producer is not None and producer.op_type in ("Add", "Sum") and query.sole_user(value) is not None:
            below, nodes = _leaves(producer)
            leaves += below
            inner += [producer, *nodes]
        else:
            leaves.append(value)
    return leaves, inner
