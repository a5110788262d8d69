"""Queries that passes share: constants, readers, table lookups, operator counts."""

import json

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import model

from pipelines.graph import query


def test_sole_user_stays_in_its_graph():
    text = """(float[n] x, bool c) => (float[n] y) {
        h = Abs(x) y = If(c) <then_branch = t () => (float[n] a) { a = Relu(h) }, else_branch = e () => (float[n] b) { b = Neg(x) }> }"""
    assert query.sole_user(model(text).graph[0].outputs[0]) is None


def test_constant_reads_initializers_and_constant_nodes_only():
    net = model(
        "(float[n] x) => (float[n] y) { k = Constant<value_float=2.0>() a = Mul(x, k) y = Add(a, w) }", w=np.float32(3)
    )
    values = {value.name: value for node in net.graph for value in node.inputs}
    assert query.constant(values["k"]) == 2 and query.constant(values["w"]) == 3
    assert query.constant(values["x"]) is None and query.constant(None) is None


def test_dequantized_constants_and_integers_of_either_form():
    net = model(
        "(float[n,2] x) => (float[2] y) { w = DequantizeLinear(codes, s, z) a = MatMul(x, w)"
        " b = ReduceSum<keepdims=0>(a, axes) c = Concat<axis=0>(b, b) y = Slice(c, k, k, zero, k) }",
        codes=np.int8([[1, 2], [3, 4]]), s=np.float32(0.5), z=np.int8(0), axes=np.array([0]), zero=np.array([0]),
        k=np.array([1]),
    )  # fmt: skip
    values = {value.name: value for node in net.graph for value in (*node.inputs, *node.outputs)}
    integers, scale, zero = query.dequantized(values["w"])
    assert integers.tolist() == [[1, 2], [3, 4]] and scale == 0.5 and zero == 0
    assert query.dequantized(values["a"]) is query.dequantized(values["codes"]) is query.dequantized(None) is None
    _, multiply, reduced, concat, _ = net.graph
    assert query.integers(reduced, "axes", 1) == [0] and query.integers(concat, "axes", 1) is None
    assert query.integers(multiply, "axes", 1) is None
    assert query.rank(values["x"]) == 2 and query.rank(None) is None


def test_sole_user():
    net = model(
        "(float[n] x) => (float[n] y, float[n] b) { a = Relu(x) b = Abs(a) c = Neg(b) d = Mul(c, c) y = Add(d, x) }"
    )
    users = {node.outputs[0].name: query.sole_user(node.outputs[0]) for node in net.graph}
    found_users = {name: user and user.op_type for name, user in users.items()}
    # b also leaves the graph, c is read twice, by one node
    assert found_users == {"a": "Abs", "b": None, "c": None, "d": "Add", "y": None}


LOOKUP = "(int64[n] i) => (float[n,4] y) {{ {} y = Relu(e) }}"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("e = Gather(T, i)", True),
        ("g = Gather(T, i) e = Reshape(g, shape)", True),
        ("j = Unsqueeze(i, one) g = Gather(T, j) e = Squeeze(g, one)", True),
        ("j = Unsqueeze(i, one) g = Gather(T, j) e = Flatten<axis=1>(g)", True),
        ("g = Gather(T, i) e = Identity(g)", True),
        ("g = Gather(T, i) e = Reshape(g, other)", False),  # regroups the columns
        ("g = Gather<axis=1>(W, i) e = Transpose(g)", False),
        ("e = Gather<axis=1>(W, i)", False),
        ("g = Gather(T, i) e = Relu(g)", False),
        ("e = Gather(D, i)", False),  # float64
        ("e = Gather(C, i)", False),  # 3-D
        ("t = Relu(T) e = Gather(t, i)", False),  # a table that is computed
        ("g = Gather(T, i) h = Abs(g) e = Reshape(g, shape)", False),  # read elsewhere
    ],
)
def test_table_lookup(body, found):
    weights = {
        "T": np.ones((5, 4), np.float32),
        "W": np.ones((4, 5), np.float32),
        "D": np.ones((5, 4)),
        "C": np.ones((5, 4, 4), np.float32),
        "shape": np.array([-1, 4]),
        "other": np.array([-1, 2]),
        "one": np.array([1]),
    }
    built = model(LOOKUP.format(body), **weights)
    ir.passes.common.ShapeInferencePass()(built)
    value = next(node for node in built.graph if node.op_type == "Relu" and node.outputs[0].name == "y").inputs[0]
    lookup = query.table_lookup(value)
    assert (lookup is not None) == found
    if lookup is not None:
        assert lookup.gather.op_type == "Gather" and lookup.table.name == "T"


def test_a_lookup_that_leaves_the_graph_is_none():
    net = model(
        "(int64[n] i) => (float[n,4] y, float[n,4] e) { e = Gather(T, i) y = Relu(e) }", T=np.ones((5, 4), np.float32)
    )
    assert query.table_lookup(net.graph[0].outputs[0]) is None
    assert query.table_lookup(None) is None and query.table_lookup(net.graph.inputs[0]) is None


def test_operators_counts_most_first():
    net = model("(float[n] x) => (float[n] y) { a = Abs(x) b = Relu(a) y = Relu(b) }")
    assert json.dumps(query.op_counts(net)) == '{"Relu": 2, "Abs": 1}'
