"""The driver of rewrites: order of passes, reports and repeated runs."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten, run

from pipelines.core.errors import ZooError
from pipelines.graph import query
from pipelines.rewrites.driver import LIMIT, CleanUp, Rewrite, rewrite

MESSY = """(float[n,3] x) => (float[n,2] y) {
    w = Constant<value = float[3,2] {1, 2, 3, 4, 5, 6}>()
    i = Identity(x) a = MatMul(i, w) b = MatMul(x, w) dead = Relu(b) s = Add(a, b) y = Identity(s) }"""


class Rename(Rewrite):
    """Turns every `old` into `new`."""

    def __init__(self, old, new):
        super().__init__()
        self.old, self.new = old, new

    def rewrite(self, model):
        nodes = [node for node in model.graph if node.op_type == self.old]
        for node in nodes:
            node.op_type = self.new
            self.refuse(node, f"was {self.old}")
        return len(nodes)


def test_clean_up_lifts_constants_and_drops_what_is_repeated_or_unused():
    net = model(MESSY, unused=np.zeros(4, np.float32))
    report = rewritten(net, x=np.arange(6, dtype=np.float32).reshape(2, 3), exact=True)
    assert ops(net) == ["MatMul", "Add"]
    assert list(net.graph.initializers) == ["w"]
    assert report.fired("CleanUp") == 5
    assert net.graph.outputs[0].name == "y" and query.rank(net.graph[0].outputs[0]) == 2


def test_clean_up_twice_finds_nothing():
    net = model(MESSY)
    CleanUp()(net)
    assert not CleanUp()(net).modified


def test_clean_up_expands_float16_weights():
    text = """(float[n,2] x) => (float[n,2] y) {
        k = Constant<value = float16[2] {1, 2}>() c = Cast<to=1>(k) w = Cast<to=1>(half) h = MatMul(x, w) y = Add(h, c) }"""
    net = model(text, half=np.eye(2, dtype=np.float16))
    rewritten(net, x=np.ones((3, 2), np.float32), exact=True)
    assert ops(net) == ["MatMul", "Add"] and {
        query.constant(value).dtype.name for value in net.graph.initializers.values()
    } == {"float32"}


def test_passes_run_in_order_until_none_fires():
    net = model("(float[n] x) => (float[n] y) { a = Relu(x) b = Abs(a) y = Neg(b) }")
    passes = [Rename("Abs", "Exp"), Rename("Neg", "Abs"), Rename("Relu", "Neg")]
    report = rewrite(net, passes)
    # Abs -> Exp and Neg -> Abs at once; the new Abs and Neg in later rounds
    assert ops(net) == ["Exp", "Exp", "Exp"]
    assert [report.fired(pass_.name) for pass_ in passes] == [6, 6, 6]  # three passes of one name: 3 + 2 + 1
    assert run(net, x=np.zeros(1, np.float32))["y"] == pytest.approx(np.exp(np.e))


def test_the_report_as_json():
    net = model("(float[n] x) => (float[n] y) { a = Relu(x) y = Relu(a) }")
    net.graph[0].name = "first"
    report = rewrite(net, [Rename("Abs", "Neg")])
    assert report.to_json() == {
        "passes": [{"name": "Rename", "fired": 0, "refused": {}}, {"name": "CleanUp", "fired": 0, "refused": {}}],
        "nodes": {"before": 2, "after": 2},
        "operators": {"before": {"Relu": 2}, "after": {"Relu": 2}},
    }


def test_reasons_are_those_of_the_last_round():
    net = model("(float[n] x) => (float[n] y) { y = Relu(x) }")
    net.graph[0].name = "only"
    once = Rename("Relu", "Abs")
    once.call(net)
    assert once.refused == {"only": "was Relu"}
    once.call(net)
    assert once.refused == {} and once.fired == 1


def test_passes_that_undo_each_other_are_named():
    net = model("(float[n] x) => (float[n] y) { y = Relu(x) }")
    with pytest.raises(ZooError, match=f"do not settle after {LIMIT} rounds: Rename, Rename$"):
        rewrite(net, [Rename("Relu", "Abs"), Rename("Abs", "Relu")])
