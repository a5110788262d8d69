"""Int8 propagation: moves QuantizeLinear before data movement, so that int8 tensors are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.quantization.qdq import tied_tables
from pipelines.quantization.qdq.scales import quantized_constant
from pipelines.rewrites.driver import Rewrite

MOVES = (
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Slice",
    "Split",
    "DepthToSpace",
    "SpaceToDepth",
    "Expand",
    "MaxPool",
    "Gather",
    "Resize",
    "Pad",
)


def moves(node: ir.Node) -> bool:
    """Returns whether an operator only moves values of input 0, so that qparams do not change.

    Pad adds zeros, and Resize computes means; both keep qparams.

    Args:
        node: Operator.
    """
    if node.op_type == "MaxPool":
        return len(node.outputs) == 1
    if node.op_type == "Gather":
        return node.inputs[0] is not None and node.inputs[0].producer() is not None
    if node.op_type == "Resize":
        mode = node.attributes.get_string("mode", "nearest")
        return (
            mode in ("nearest", "linear")
            and node.attributes.get_string("coordinate_transformation_mode") != "tf_crop_and_resize"
        )
    if node.op_type == "Pad":
        value = query.constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.float32(0)
        return value is not None and not value.any()
    return node.op_type in MOVES


PROPAGATED = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")  # onnxruntime inserts QDQ behind them


def dequantize_before_subgraph(move: ir.Node, taken: set[str]) -> bool:
    """Move(DQ(q)) = DQ(Move(q)), where a subgraph reads the result, also behind further moves.

    Args:
        move: Operator.
        taken: Names in use; new ones are added.

    Returns:
        Whether it was such an operator.
    """
    dequantize, y = query.producer(move.inputs[0], "DequantizeLinear"), move.outputs[0]
    scale = query.constant(dequantize.inputs[1]) if dequantize is not None else None
    if dequantize is None or scale is None or scale.size != 1 or not _is_read_in_subgraph(move):
        return False
    assert dequantize.inputs[0] is not None and isinstance(move.graph, ir.Graph)
    inputs = [y, *dequantize.inputs[1:]]
    after = edit.node("DequantizeLinear", inputs, f"{y.name}.dequantized", dtype=ir.DataType.FLOAT, taken=taken)
    after.outputs[0].shape, y.type = y.shape, dequantize.inputs[0].type
    y.replace_all_uses_with(after.outputs[0], replace_graph_outputs=True)
    if after.outputs[0].is_graph_output():
        y.name, after.outputs[0].name = after.outputs[0].name, y.name
    after.replace_input_with(0, y)
    move.replace_input_with(0, dequantize.inputs[0])
    move.graph.insert_after(move, after)
    return True


def _is_read_in_subgraph(move: ir.Node) -> bool:
    """Whether an operator of `PROPAGATED` is read in a subgraph, directly or through such operators."""
    readers = move.outputs[0].consumers() if move.op_type in PROPAGATED else ()
    return any(reader.graph is not move.graph or _is_read_in_subgraph(reader) for reader in readers)


class QuantizeEarly(Rewrite):
    """Q(Move(x)) = Move(Q(x)), Q(Concat(a, b)) = Concat(Q(a), Q(b)), Q(Gather(T, i)) = Gather(Q(T), i), Q(DQ(q)) = q.

    All with the same qparams, so the rewrite is exact (but a linear Resize rounds in uint8). A Split is moved where all
    of its parts are quantized alike. For a constant table T, Q(T) is computed here (if `tables`): it is stored in
    uint8, a quarter of its size, and no QuantizeLinear runs. The rewrite does not fire if the moved tensor has another
    reader, if it was dequantized by other qparams, or on a Transpose to int8.

    Args:
        tables: Whether constant tables become uint8.
        keep: Whether the operator of this name stays float32.
        tie: Whether a table that a layer multiplies by too is left to `tied_tables`.
    """

    def __init__(
        self, tables: bool = True, keep: Callable[[str], bool] = lambda name: False, tie: bool = False
    ) -> None:
        super().__init__()
        self.tables, self.keep, self.tie = tables, keep, tie
        self._taken: set[str] = set()

    def rewrite(self, model: ir.Model) -> int:
        """Moves every QuantizeLinear of the main graph before the data movement that it reads, once.

        Args:
            model: QDQ model; it is changed.

        Returns:
            Number of changes.
        """
        self._taken = query.used_names(model.graph)
        count = sum(self._lift(model.graph, node) for node in list(model.graph) if node.op_type == "QuantizeLinear")
        if count:
            model.graph.sort()  # a QuantizeLinear that is used again may stand further down
        return count

    def _lift(self, graph: ir.Graph, quantize: ir.Node) -> int:
        """Move `quantize` before the operator that it reads: 1, or 0 where it stays."""
        qparams = _qparams(quantize)
        x = quantize.inputs[0]
        move = query.producer(x)
        if x is None or move is None or qparams is None or qparams[0].size != 1:
            return 0
        if move.op_type == "DequantizeLinear":
            return self._cancel(graph, quantize, move)
        if move.op_type not in (*MOVES, "Concat"):
            return 0
        if self.keep(str(move.name)):
            self.refuse(move, "kept float by the recipe")
            return 0
        if move.op_type == "Split":
            return self._lift_split(graph, quantize, move)
        if query.sole_user(x) is not quantize:
            self.refuse(move, "its result is also read as float")
            return 0
        if move.op_type == "Gather" and query.constant(move.inputs[0]) is not None:
            return self._quantize_table(graph, move, quantize)
        if move.op_type != "Concat" and not moves(move):
            return 0
        if move.op_type == "Transpose" and qparams[1].dtype == np.int8:
            self.refuse(move, "engines have no int8 Transpose, only uint8")
            return 0
        data = [value for value in (move.inputs if move.op_type == "Concat" else move.inputs[:1]) if value is not None]
        for source in (value.producer() for value in data):
            if source is not None and source.op_type == "DequantizeLinear" and not _equal(_qparams(source), qparams):
                self.refuse(move, "its parts have other qparams")
                return 0
        inputs = [self._quantized(graph, value, quantize, move) for value in data] + list(move.inputs[len(data) :])
        if move.op_type == "Pad":
            inputs[2:3] = [quantize.inputs[2]]  # zero is the zero point
        self._replace(graph, move, inputs, quantize)
        return 1

    def _lift_split(self, graph: ir.Graph, quantize: ir.Node, split: ir.Node) -> int:
        """Q(Split(x)) = Split(Q(x)): 1, or 0 where a part stays float or has other qparams."""
        parts = {part: query.sole_user(part) for part in split.outputs if part.uses() or part.is_graph_output()}
        lifted = {part: user for part, user in parts.items() if user is not None and user.op_type == "QuantizeLinear"}
        if len(lifted) < len(parts):
            self.refuse(split, "a part is also read as float")
            return 0
        if not all(_equal(_qparams(user), _qparams(quantize)) for user in lifted.values()):
            self.refuse(split, "its parts have other qparams")
            return 0
        assert split.inputs[0] is not None
        inputs = [self._quantized(graph, split.inputs[0], quantize, split), *split.inputs[1:]]
        count = len(split.outputs)
        moved = ir.Node("", "Split", inputs, split.attributes.values(), name=split.name, num_outputs=count)
        old, new = [], []
        for part, out in zip(split.outputs, moved.outputs, strict=True):
            out.name = edit.unique(f"{part.name}.unread", self._taken)
            if part in lifted:
                (result,) = lifted[part].outputs
                out.name, out.type, out.shape = result.name, result.type, result.shape
                old.append(result)
                new.append(out)
        ir.convenience.replace_nodes_and_values(graph, split, [split, *lifted.values()], [moved], old, new)
        return 1

    def _cancel(self, graph: ir.Graph, quantize: ir.Node, dequantize: ir.Node) -> int:
        """Q(DQ(q)) = q where both have the same qparams."""
        q = dequantize.inputs[0]
        if q is None or not _equal(_qparams(quantize), _qparams(dequantize)) or quantize.outputs[0].is_graph_output():
            return 0
        quantize.outputs[0].replace_all_uses_with(q)
        graph.remove(quantize, safe=True)
        return 1

    def _quantized(self, graph: ir.Graph, value: ir.Value, quantize: ir.Node, move: ir.Node) -> ir.Value:
        """`value` by the qparams of `quantize`, of a QuantizeLinear that is there already or of one before `move`."""
        for user in value.consumers():
            if user.op_type == "QuantizeLinear" and user.graph is graph and _equal(_qparams(user), _qparams(quantize)):
                return user.outputs[0]
        dtype = quantize.outputs[0].dtype
        q = edit.node(
            "QuantizeLinear", [value, *quantize.inputs[1:]], f"{value.name}.quantized", dtype=dtype, taken=self._taken
        )
        q.outputs[0].shape = value.shape
        graph.insert_before(move, q)
        return q.outputs[0]

    def _quantize_table(self, graph: ir.Graph, gather: ir.Node, quantize: ir.Node) -> int:
        """Q(Gather(T, i)) = Gather(Q(T), i) of a constant table."""
        table, qparams = query.constant(gather.inputs[0]), _qparams(quantize)
        assert table is not None and qparams is not None
        if not self.tables:
            self.refuse(gather, "the recipe keeps tables float")
            return 0
        if self.tie and tied_tables.int8_layers(graph, table):
            self.refuse(gather, "its table is stored once, as a layer multiplies by it too")
            return 0
        quantized = edit.initializer(graph, f"{quantize.name}.table", quantized_constant(table, *qparams), self._taken)
        self._replace(graph, gather, [quantized, *gather.inputs[1:]], quantize)
        return 1

    def _replace(self, graph: ir.Graph, move: ir.Node, inputs: list[ir.Value | None], quantize: ir.Node) -> None:
        """Put `move` of quantized inputs in place of `move` and `quantize`."""
        moved = ir.Node(move.domain, move.op_type, inputs, move.attributes.values(), name=move.name, num_outputs=1)
        out, old = moved.outputs[0], quantize.outputs[0]
        out.name, out.type, out.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(graph, move, [move, quantize], [moved], quantize.outputs, [out])


def _qparams(node: ir.Node) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The constant (scale, zero point), of any shape, of a QuantizeLinear or DequantizeLinear."""
    scale, zero = (query.constant(value) for value in (*node.inputs[1:], None, None)[:2])
    return None if scale is None or zero is None else (scale, zero)


def _equal(a: tuple[NDArray[Any], NDArray[Any]] | None, b: tuple[NDArray[Any], NDArray[Any]] | None) -> bool:
    if a is None or b is None or a[1].dtype != b[1].dtype:
        return False
    return all(np.array_equal(x.ravel(), y.ravel()) for x, y in zip(a, b, strict=True))
