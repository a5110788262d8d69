"""Converts float16 and bfloat16 graphs to float32: int8 starts from float32, and CPUs lack one or the other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

HALVES, FLOAT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), ir.DataType.FLOAT
# Operators with an attribute that is a dtype or a tensor
STUBBORN = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "EyeLike",
    "Bernoulli",
    "Constant",
)


class WidenHalf(Rewrite):
    """Widens a float16 or bfloat16 graph to float32; inputs and outputs keep their type, with a Cast at them.

    The weights keep their values (each float16 is a float32); sums and products are no longer rounded, so results
    differ from the float16 graph's by that rounding. Does not fire on graphs with subgraphs, custom domains or
    operators with a float16 attribute.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Widens the whole graph: 1 if it holds float16 values and can be float32, else 0."""
        main = model.graph
        readers = [
            node
            for node in main
            if not query.is_op(node, "Cast") and any(v is not None and v.dtype in HALVES for v in node.inputs)
        ]
        if not readers:
            return 0
        for node in main:
            halves = any(value is not None and value.dtype in HALVES for value in (*node.inputs, *node.outputs))
            if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
                self.refuse(node, "it has subgraphs: the float16 graph stays float16")
            elif halves and (not query.is_op(node, node.op_type) or node.op_type in STUBBORN):
                self.refuse(node, f"{node.op_type} may need float16: the graph stays float16")
        if self.refused:
            return 0
        for value in main.initializers.values():
            if value.dtype in HALVES and not value.is_graph_output():
                array = query.constant(value)
                assert array is not None
                value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
                value.type = ir.TensorType(FLOAT)
        for node in list(main):
            self._widen(node)
        taken = query.used_names(main)
        for value in main.inputs:
            if value.dtype in HALVES and (uses := list(value.uses())):
                cast = edit.node("Cast", [value], f"{value.name}.float32", dtype=FLOAT, taken=taken, to=int(FLOAT))
                cast.outputs[0].shape = value.shape
                for reader, index in uses:
                    reader.replace_input_with(index, cast.outputs[0])
                main.insert_before(main[0], cast)
        return 1

    def _widen(self, node: ir.Node) -> None:
        main = node.graph
        assert isinstance(main, ir.Graph)
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) in HALVES:
            if node.outputs[0].is_graph_output() and not list(node.outputs[0].uses()):
                return
            node.attributes["to"] = ir.AttrInt64("to", int(FLOAT))
        if (
            node.op_type == "ConstantOfShape"
            and "value" in node.attributes
            and node.attributes["value"].as_tensor().dtype in HALVES
        ):
            node.attributes["value"] = ir.AttrTensor(
                "value", ir.tensor(node.attributes["value"].as_tensor().numpy().astype(np.float32))
            )
        for value in node.outputs:
            if value.dtype not in HALVES:
                continue
            half = value.dtype
            value.type = ir.TensorType(FLOAT)
            if value.is_graph_output():
                name = str(value.name)
                value.name = edit.unique(f"{name}.float32", query.used_names(main))
                cast = edit.node("Cast", [value], name, dtype=half, to=int(half))
                cast.name = edit.unique(name, query.used_names(main))  # an operator may have the output's name
                cast.outputs[0].shape = value.shape
                main.insert_after(node, cast)
                main.outputs[list(main.outputs).index(value)] = cast.outputs[0]
