"""Quantize before moving data, not after: what only copies values works on bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from pipelines import graph
from pipelines.rewrite import Rewrite

MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Slice")


class QuantizeEarly(Rewrite):
    """Q(Move(x)) = Move(Q(x)) where Move only copies values, Q(Concat(a, b)) = Concat(Q(a), Q(b)), Q(Gather(T, i)) = Gather(Q(T), i).

    All with one scale and zero point, so exact. For a constant table T, Q(T) is computed here (if `tables`): it is stored as bytes, a
    quarter of its size, and no quantize step is left at run time. Does not fire where the moved value has another reader.
    `keep` says by name which operators stay float.
    """

    def __init__(self, tables: bool = True, keep: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__()
        self.tables, self.keep = tables, keep
        self._taken: set[str] = set()

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        self._taken = graph.names(model.graph)
        return sum(self._lift(model.graph, each) for each in list(model.graph) if each.op_type == "QuantizeLinear")

    def _lift(self, main: ir.Graph, quantize: ir.Node) -> int:
        x, scale, zero = quantize.inputs
        move = x.producer() if x is not None else None
        step = graph.constant(scale)
        if x is None or move is None or step is None or step.size != 1:
            return 0
        if move.op_type not in (*MOVES, "Concat", "Gather"):
            return 0
        if self.keep(str(move.name)):
            self.refuse(move, "kept float by the recipe")
            return 0
        if graph.sole_user(x) is not quantize:
            self.refuse(move, "its result is also read as float")
            return 0
        if move.op_type == "Gather":
            return self._table(main, move, quantize)
        data = move.inputs if move.op_type == "Concat" else move.inputs[:1]
        inputs = list(move.inputs)
        for index, value in enumerate(data):
            if value is None:
                return 0
            name = f"{quantize.name}.{index}"
            q = graph.node("QuantizeLinear", [value, scale, zero], name, dtype=ir.DataType.UINT8, taken=self._taken)
            q.outputs[0].shape = value.shape
            main.insert_before(move, q)
            inputs[index] = q.outputs[0]
        self._replace(main, move, inputs, quantize)
        return 1

    def _table(self, main: ir.Graph, gather: ir.Node, quantize: ir.Node) -> int:
        table = graph.constant(gather.inputs[0])
        if table is None:
            return 0
        if not self.tables:
            self.refuse(gather, "the recipe keeps tables float")
            return 0
        scale, zero = graph.constant(quantize.inputs[1]), graph.constant(quantize.inputs[2])
        assert scale is not None and zero is not None and gather.inputs[0] is not None
        stored = np.clip(np.rint(table / scale) + zero.astype(np.int32), 0, 255).astype(np.uint8)  # QuantizeLinear rounds half to even
        stored_table = graph.initializer(main, f"{quantize.name}.table", stored, self._taken)
        self._replace(main, gather, [stored_table, *gather.inputs[1:]], quantize)
        return 1

    def _replace(self, main: ir.Graph, move: ir.Node, inputs: list[ir.Value | None], quantize: ir.Node) -> None:
        moved = ir.Node(move.domain, move.op_type, inputs, move.attributes.values(), name=move.name, num_outputs=1)
        out = moved.outputs[0]
        out.name, out.type, out.shape = quantize.outputs[0].name, ir.TensorType(ir.DataType.UINT8), quantize.outputs[0].shape
        ir.convenience.replace_nodes_and_values(main, move, [move, quantize], [moved], quantize.outputs, [out])
