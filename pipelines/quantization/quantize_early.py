"""Quantize before moving data, not after: what only copies values works on bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

MOVES = (
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Identity",
    "Slice",
    "Expand",
    "MaxPool",
    "Gather",
    "Resize",
    "Pad",
)


def moves(node: ir.Node) -> bool:
    """Whether `node` gives some of the values of its input 0, or zeros (Pad), or means of them (Resize): bytes keep
    their step in it.
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


class QuantizeEarly(Rewrite):
    """Q(Move(x)) = Move(Q(x)) where Move only copies values, Q(Concat(a, b)) = Concat(Q(a), Q(b)), Q(Gather(T, i)) =
    Gather(Q(T), i).

    All with one scale and zero point, so exact (but a linear Resize of bytes rounds where it stands). Q(DQ(b)) of one
    step is b. For a constant table T, Q(T) is computed here (if `tables`): it is stored as bytes, a quarter of its
    size, and no quantize step is left at run time. Does not fire where the moved value has another reader, where what
    is moved is bytes of another step, or on a Transpose to signed bytes. `keep` says by name which operators stay
    float.
    """

    def __init__(self, tables: bool = True, keep: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__()
        self.tables, self.keep = tables, keep
        self._taken: set[str] = set()

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        self._taken = query.used_names(model.graph)
        count = sum(self._lift(model.graph, each) for each in list(model.graph) if each.op_type == "QuantizeLinear")
        if count:
            model.graph.sort()  # a quantize step that is used again may stand further down
        return count

    def _lift(self, main: ir.Graph, quantize: ir.Node) -> int:
        step = _step(quantize)
        x = quantize.inputs[0]
        move = x.producer() if x is not None else None
        if x is None or move is None or step is None or step[0].size != 1:
            return 0
        if move.op_type == "DequantizeLinear":
            return self._cancel(main, quantize, move)
        if move.op_type not in (*MOVES, "Concat"):
            return 0
        if self.keep(str(move.name)):
            self.refuse(move, "kept float by the recipe")
            return 0
        if query.sole_user(x) is not quantize:
            self.refuse(move, "its result is also read as float")
            return 0
        if move.op_type == "Gather" and query.constant(move.inputs[0]) is not None:
            return self._table(main, move, quantize)
        if move.op_type != "Concat" and not moves(move):
            return 0
        if move.op_type == "Transpose" and step[1].dtype == np.int8:
            self.refuse(move, "engines do not transpose signed bytes")
            return 0
        data = [value for value in (move.inputs if move.op_type == "Concat" else move.inputs[:1]) if value is not None]
        sources = [value.producer() for value in data]
        if any(
            each is not None and each.op_type == "DequantizeLinear" and not _equal(_step(each), step)
            for each in sources
        ):
            self.refuse(move, "its parts are bytes of other steps")
            return 0
        inputs = [self._bytes(main, value, quantize, move) for value in data] + list(move.inputs[len(data) :])
        if move.op_type == "Pad":
            inputs[2:3] = [quantize.inputs[2]]  # zero is the zero point
        self._replace(main, move, inputs, quantize)
        return 1

    def _cancel(self, main: ir.Graph, quantize: ir.Node, dequantize: ir.Node) -> int:
        given = dequantize.inputs[0]
        if given is None or not _equal(_step(quantize), _step(dequantize)) or quantize.outputs[0].is_graph_output():
            return 0
        quantize.outputs[0].replace_all_uses_with(given)
        main.remove(quantize, safe=True)
        return 1

    def _bytes(self, main: ir.Graph, value: ir.Value, quantize: ir.Node, move: ir.Node) -> ir.Value:
        """`value` quantized as `quantize` does it, by the step that does so already where there is one."""
        for each in value.consumers():
            if each.op_type == "QuantizeLinear" and each.graph is main and _equal(_step(each), _step(quantize)):
                return each.outputs[0]
        dtype = quantize.outputs[0].dtype
        q = edit.node(
            "QuantizeLinear", [value, *quantize.inputs[1:]], f"{value.name}.quantized", dtype=dtype, taken=self._taken
        )
        q.outputs[0].shape = value.shape
        main.insert_before(move, q)
        return q.outputs[0]

    def _table(self, main: ir.Graph, gather: ir.Node, quantize: ir.Node) -> int:
        table, step = query.constant(gather.inputs[0]), _step(quantize)
        assert table is not None and step is not None
        if not self.tables:
            self.refuse(gather, "the recipe keeps tables float")
            return 0
        scale, zero = step
        limits = np.iinfo(zero.dtype)
        stored = np.clip(np.rint(table / scale) + zero.astype(np.int32), limits.min, limits.max).astype(
            zero.dtype
        )  # halves round to even
        stored_table = edit.initializer(main, f"{quantize.name}.table", stored, self._taken)
        self._replace(main, gather, [stored_table, *gather.inputs[1:]], quantize)
        return 1

    def _replace(self, main: ir.Graph, move: ir.Node, inputs: list[ir.Value | None], quantize: ir.Node) -> None:
        moved = ir.Node(move.domain, move.op_type, inputs, move.attributes.values(), name=move.name, num_outputs=1)
        out, old = moved.outputs[0], quantize.outputs[0]
        out.name, out.type, out.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(main, move, [move, quantize], [moved], quantize.outputs, [out])


def _step(node: ir.Node) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The constant (scale, zero point) of a quantize or dequantize step."""
    scale, zero = (query.constant(each) for each in (*node.inputs[1:], None, None)[:2])
    return None if scale is None or zero is None else (scale, zero)


def _equal(a: tuple[NDArray[Any], NDArray[Any]] | None, b: tuple[NDArray[Any], NDArray[Any]] | None) -> bool:
    if a is None or b is None or a[1].dtype != b[1].dtype:
        return False
    return all(np.array_equal(x.ravel(), y.ravel()) for x, y in zip(a, b, strict=True))
