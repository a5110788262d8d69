"""SumToAdd, from ONNX text."""

from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.sum_to_add import SumToAdd


def test_a_sum_becomes_adds_in_its_order(normal):
    net = model(
        "(float[n,3] a, float[1,3] b, float[3] c) => (float[n,3] y) { s = Sum(a, b, c) t = Sum(s) y = Sum(t, a) }"
    )
    feeds = {"a": normal(2, 3), "b": normal(1, 3), "c": normal(3)}
    assert rewritten(net, SumToAdd(), exact=True, **feeds).fired("SumToAdd") == 3
    assert ops(net) == ["Add"] * 3
