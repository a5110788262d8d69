"""WidenHalf, from ONNX text."""

import numpy as np
import onnx
import onnx_ir as ir
from helpers.rewriting import model, ops, run

from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
from pipelines.rewrites.widen_half import WidenHalf


def half(normal, *shape):
    return normal(*shape).astype(np.float16)


def test_a_float16_graph_computes_in_float32(normal):
    text = """(float16[n,4] x, float16[n,4] z) => (float16[n,3] y, float16[n,4] t) {
        a = Add(x, z) h = MatMul(a, w) r = Relu(h) c = Cast<to=1>(r) d = Cast<to=10>(c) y = Add(d, b) t = Neg(a) }"""
    weights = {"w": half(normal, 4, 3), "b": half(normal, 3)}
    net = model(text, **weights)
    feeds = {"x": half(normal, 5, 4), "z": half(normal, 5, 4)}
    before = run(net, **feeds)
    report = rewrite(net, [WidenHalf(), RemoveDeadBranches()])
    onnx.checker.check_model(ir.to_proto(net), full_check=True)
    assert report.fired("WidenHalf") == 1 and ops(net).count("Cast") == 4
    assert {value.dtype for value in net.graph.initializers.values()} == {ir.DataType.FLOAT}
    after = run(net, **feeds)
    for name, value in before.items():
        assert after[name].dtype == np.float16
        np.testing.assert_allclose(value.astype(np.float32), after[name].astype(np.float32), rtol=0.01, atol=0.01)
    assert rewrite(net, [again := WidenHalf()]).fired("WidenHalf") == 0 and not again.refused


def test_a_float16_graph_with_subgraphs_stays():
    text = """(bool c, float16[n] x) => (float16[n] y) { h = Neg(x)
        y = If (c) <then_branch = f () => (float16[n] a) { a = Relu(h) }, else_branch = g () => (float16[n] d) { d = Neg(h) }> }"""
    net, one = model(text), WidenHalf()
    rewrite(net, [one])
    assert ops(net) == ["Neg", "If"] and "subgraphs" in one.refused.popitem()[1]


def test_widening_of_an_output_that_is_read_too(normal):
    net = model("(float16[n] x) => (float16[n] y, float16[n] z) { y = Mul(x, k) z = Add(y, x) }", k=half(normal, 1))
    before = run(net, x=half(normal, 6) * 0 + 1)
    rewrite(net, [WidenHalf()])
    onnx.checker.check_model(ir.to_proto(net), full_check=True)
    np.testing.assert_allclose(run(net, x=half(normal, 6) * 0 + 1)["z"], before["z"], rtol=0.01)


def test_a_cast_to_float16_that_is_an_output_and_read_is_widened(normal):
    text = "(float[n,4] x) => (float16[n,4] h, float16[n,3] y) { h = Cast<to=10>(x) y = Gemm(h, w) }"
    net = model(text, w=half(normal, 4, 3))
    x = normal(5, 4)
    before = run(net, x=x)
    rewrite(net, [WidenHalf()])
    onnx.checker.check_model(ir.to_proto(net), full_check=True)
    after = run(net, x=x)
    for name, value in before.items():
        assert after[name].dtype == np.float16
        np.testing.assert_allclose(value.astype(np.float32), after[name].astype(np.float32), rtol=0.01, atol=0.01)


def test_an_operator_may_have_the_name_of_an_output(normal):
    net = model("(float16[n] x) => (float16[n] y) { h = Mul(x, k) y = Add(h, x) }", k=half(normal, 1))
    for node, name in zip(net.graph, ("y", "x"), strict=True):
        node.name = name
    rewrite(net, [WidenHalf()])
    assert len({node.name for node in net.graph}) == len(net.graph)
    assert run(net, x=half(normal, 6))["y"].dtype == np.float16
