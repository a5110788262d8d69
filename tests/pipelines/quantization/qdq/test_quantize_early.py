"""QuantizeEarly, from ONNX text."""

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import integers, model, ops, reasons, rewritten, run
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.graph import query
from pipelines.quantization.qdq.quantize_early import QuantizeEarly, dequantize_before_subgraph

STEP = {"s": np.float32(0.02), "z": np.uint8(100)}


@pytest.mark.parametrize(
    ("move", "shape"),
    [
        ("Reshape(x, to)", "m"),
        ("Flatten<axis=1>(x)", "a,b"),
        ("Unsqueeze(x, zero)", "a,b,c,d"),
        ("Squeeze(x, one)", "a,b"),
        ("Transpose<perm=[2,0,1]>(x)", "a,b,c"),
        ("Slice(x, zero, one, two)", "a,b,c"),
    ],
)
def test_quantize_early_moves_bytes(normal, move, shape):
    text = f"(float[n,1,6] x) => (uint8[{shape}] q) {{ m = {move} q = QuantizeLinear(m, s, z) }}"
    net = model(text, **STEP, to=integers(-1), zero=integers(0), one=integers(1), two=integers(2))
    report = rewritten(net, QuantizeEarly(), exact=True, x=normal(4, 1, 6))
    assert report.fired("QuantizeEarly") == 1 and ops(net) == ["QuantizeLinear", move.split("(")[0].split("<")[0]]


def test_quantize_early_passes_a_whole_chain_and_splits_at_a_concatenation(normal):
    text = """(float[n,2] a, float[n,3] b) => (uint8[k,1] q) {
        c = Concat<axis=1>(a, b) d = Transpose<perm=[1,0]>(c) e = Reshape(d, to) q = QuantizeLinear(e, s, z) }"""
    net = model(text, **STEP, to=integers(-1, 1))
    rewritten(net, QuantizeEarly(), exact=True, a=normal(4, 2), b=normal(4, 3))
    assert ops(net) == ["QuantizeLinear", "QuantizeLinear", "Concat", "Transpose", "Reshape"]


SPLIT = """(float[n,6] x) => (uint8[n,2] q, uint8[n,3] r) {
    a, b, c = Split<axis=1>(x, sizes) q = QuantizeLinear(a, s, z) r = QuantizeLinear(c, s, z) }"""


def test_quantize_early_splits_bytes(normal):
    net = model(SPLIT, **STEP, sizes=integers(2, 1, 3))
    rewritten(net, QuantizeEarly(), exact=True, x=normal(4, 6))
    assert ops(net) == ["QuantizeLinear", "Split"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SPLIT.replace("r)", "r, float[n,1] b)"), "a part is also read as float"),
        (SPLIT.replace("r)", "r, float[n,2] d)").replace("q =", "d = Relu(a) q ="), "a part is also read as float"),
        (SPLIT.replace("(c, s, z)", "(c, t, z)"), "its parts have other qparams"),
    ],
)
def test_a_split_whose_parts_differ_stays_float(normal, text, reason):
    net = model(text, **STEP, t=np.float32(0.03), sizes=integers(2, 1, 3))
    report = rewritten(net, QuantizeEarly(), exact=True, x=normal(4, 6))
    assert "Split" in ops(net)[:2] and set(reasons(report, "QuantizeEarly").values()) == {reason}


@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_early_stores_a_table_as_bytes(normal, axis):
    text = f"(int64[n] i) => (uint8[a,b] q) {{ e = Gather<axis={axis}>(T, i) q = QuantizeLinear(e, s, z) }}"
    table = np.append(normal(6, 5), [[-9.0, 9.0, 0.01, 0.03, -0.05]], axis=0).astype(
        np.float32
    )  # saturates; halves round to even
    net = model(text, **STEP, T=table)
    rewritten(net, QuantizeEarly(), exact=True, i=integers(4, 0, -1, 3))
    assert ops(net) == ["Gather"] and net.graph[0].inputs[0].dtype == ir.DataType.UINT8
    assert "T" not in net.graph.initializers


MOVED = "(float[n,3] x) => (uint8[a,b] q) { m = Reshape(x, to) q = QuantizeLinear(m, s, z) }"
LOOKED_UP = "(int64[n] i) => (uint8[n,4] q) { e = Gather(T, i) q = QuantizeLinear(e, s, z) }"
READ = "its result is also read as float"


@pytest.mark.parametrize(
    ("text", "tables", "reason"),
    [
        (MOVED.replace("q)", "q, float[a,b] m)"), True, READ),
        (MOVED.replace("q)", "q, float[a,b] r)").replace("q =", "r = Relu(m) q ="), True, READ),
        (MOVED.replace("(m, s, z)", "(m, ss, zz)"), True, None),  # a scale a column
        (MOVED.replace("Reshape(x, to)", "Relu(x)"), True, None),
        (LOOKED_UP, False, "the recipe keeps tables float"),
        (LOOKED_UP.replace("q)", "q, float[n,4] e)"), True, READ),
        (LOOKED_UP.replace("i)", "i, float[9,4] T)", 1), True, None),  # a table that comes as input
    ],
)
def test_quantize_early_near_misses(normal, text, tables, reason):
    weights = STEP | {"ss": np.full(3, 0.02, np.float32), "zz": np.full(3, 100, np.uint8), "to": integers(-1, 3)}
    feeds = {"x": normal(4, 3)} if "x)" in text else {"i": integers(4, 0, 8)}
    if "float[9,4]" in text:
        feeds["T"] = normal(9, 4)
    else:
        weights["T"] = normal(9, 4)
    net = model(text, **weights)
    kept = ops(net)
    report = rewritten(net, QuantizeEarly(tables), exact=True, **feeds)
    assert ops(net) == kept and report.fired("QuantizeEarly") == 0
    assert list(reasons(report, "QuantizeEarly").values()) == ([] if reason is None else [reason])


def test_quantize_early_with_an_output_read_twice_quantizes_it_where_all_read_bytes(normal):
    text = """(float[n,2] a, float[n,3] b) => (uint8[n,5] q, uint8[n,5] r) {
        c = Concat<axis=1>(a, b) q = QuantizeLinear(c, s, z) r = Transpose<perm=[0,1]>(q) }"""
    net = model(text, **STEP)
    rewritten(net, QuantizeEarly(), exact=True, a=normal(4, 2), b=normal(4, 3))
    assert ops(net) == ["QuantizeLinear", "QuantizeLinear", "Concat", "Transpose"]


BRANCHES = """(float[n,1,6] x, bool c) => (float[a,b] y, float[a,b] t) {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) l = Squeeze(d, one) t = Transpose<perm=[1,0]>(l)
    y = If (c) <then_branch = f () => (float[a,b] p) { p = Neg(t) }, else_branch = g () => (float[a,b] r) { r = Abs(t) }> }"""


def test_integers_are_moved_before_a_subgraph(normal):
    net, x = model(BRANCHES, **STEP, one=integers(1)), normal(4, 1, 6)
    before, taken = run(net, x=x, c=np.array(True)), query.used_names(net.graph)
    assert [dequantize_before_subgraph(node, taken) for node in list(net.graph)] == [False, False, True, True, False]
    RemoveUnusedNodesPass()(net)
    assert ops(net) == ["QuantizeLinear", "Squeeze", "Transpose", "DequantizeLinear", "If"]
    after = run(net, optimized=True, x=x, c=np.array(True))  # aborted the process before
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def test_floats_are_moved_where_no_subgraph_reads(normal):
    net = model(
        BRANCHES.replace("p = Neg(t)", "p = Neg(h)")
        .replace("r = Abs(t)", "r = Abs(h) ")
        .replace("y = If", "h = Relu(t) y = If"),
        **STEP,
        one=integers(1),
    )
    assert not any(dequantize_before_subgraph(node, query.used_names(net.graph)) for node in list(net.graph))
