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
        found = [node for node in model.graph if node.op_type == self.old]
        for node in found:
            node.op_type = self.new
            self.refuse(node, f"was {self.old}")
        return len(found)


def test_clean_up_lifts_constants_and_drops_what_is_repeated_or_unused():
    found = model(MESSY, unused=np.zeros(4, np.float32))
    report = rewritten(found, x=np.arange(6, dtype=np.float32).reshape(2, 3), exact=True)
    assert ops(found) == ["MatMul", "Add"]
    assert list(found.graph.initializers) == ["w"]
    assert report.fired("CleanUp") == 5
    assert found.graph.outputs[0].name == "y" and query.rank(found.graph[0].outputs[0]) == 2


def test_clean_up_twice_finds_nothing():
    found = model(MESSY)
    CleanUp()(found)
    assert not CleanUp()(found).modified


def test_clean_up_expands_float16_weights():
    text = """(float[n,2] x) => (float[n,2] y) {
        k = Constant<value = float16[2] {1, 2}>() c = Cast<to=1>(k) w = Cast<to=1>(half) h = MatMul(x, w) y = Add(h, c) }"""
    found = model(text, half=np.eye(2, dtype=np.float16))
    rewritten(found, x=np.ones((3, 2), np.float32), exact=True)
    assert ops(found) == ["MatMul", "Add"] and {
        query.constant(each).dtype.name for each in found.graph.initializers.values()
    } == {"float32"}


def test_passes_run_in_order_until_none_fires():
    found = model("(float[n] x) => (float[n] y) { a = Relu(x) b = Abs(a) y = Neg(b) }")
    passes = [Rename("Abs", "Exp"), Rename("Neg", "Abs"), Rename("Relu", "Neg")]
    report = rewrite(found, passes)
    # Abs -> Exp and Neg -> Abs at once; the new Abs and Neg in later rounds
    assert ops(found) == ["Exp", "Exp", "Exp"]
    assert [report.fired(each.name) for each in passes] == [6, 6, 6]  # three passes of one name: 3 + 2 + 1
    assert run(found, x=np.zeros(1, np.float32))["y"] == pytest.approx(np.exp(np.e))


def test_the_report_as_json():
    found = model("(float[n] x) => (float[n] y) { a = Relu(x) y = Relu(a) }")
    found.graph[0].name = "first"
    report = rewrite(found, [Rename("Abs", "Neg")])
    assert report.to_json() == {
        "passes": [{"name": "Rename", "fired": 0, "refused": {}}, {"name": "CleanUp", "fired": 0, "refused": {}}],
        "nodes": {"before": 2, "after": 2},
        "operators": {"before": {"Relu": 2}, "after": {"Relu": 2}},
    }


def test_reasons_are_those_of_the_last_round():
    found = model("(float[n] x) => (float[n] y) { y = Relu(x) }")
    found.graph[0].name = "only"
    once = Rename("Relu", "Abs")
    once.call(found)
    assert once.refused == {"only": "was Relu"}
    once.call(found)
    assert once.refused == {} and once.fired == 1


def test_passes_that_undo_each_other_are_named():
    found = model("(float[n] x) => (float[n] y) { y = Relu(x) }")
    with pytest.raises(ZooError, match=f"do not settle after {LIMIT} rounds: Rename, Rename$"):
        rewrite(found, [Rename("Relu", "Abs"), Rename("Abs", "Relu")])
