"""GraphBuilder: operators, constants and names."""

import numpy as np
import onnx_ir as ir

from pipelines.graph import reference_session
from pipelines.graph.builder import GraphBuilder


def test_a_graph_is_built_operator_by_operator():
    add = GraphBuilder(ir.Graph([], [], nodes=[], name="g", opset_imports={"": 18}), "g/")
    x = add.input("x", ir.DataType.FLOAT, ["n", 3])
    first, second = add.split(add("Add", add("Mul", x, 2.0), 2.0), [1, 2])
    values, places = add.top(second, add.constant([1]))
    add.graph.outputs.extend([first, values, places])
    assert len(add.graph.initializers) == 3  # 2.0 is one constant
    session = reference_session.session(ir.Model(add.graph, ir_version=9), "the test needs")
    outputs = reference_session.run(session, {"x": np.array([[1, 2, 3]], np.float32)})
    assert [output.tolist() for output in outputs] == [[[4.0]], [[8.0]], [[1]]]


def test_names_are_unique_in_graphs_that_share_them():
    outer = GraphBuilder(ir.Graph([], [], nodes=[], name="outer"))
    inner = GraphBuilder(ir.Graph([], [], nodes=[], name="inner"), taken=outer.taken)
    names = [builder.constant(1).name for builder in (outer, inner)] + [
        builder.input("x", ir.DataType.INT64, []).name for builder in (outer, inner)
    ]
    assert len({*names}) == 4
