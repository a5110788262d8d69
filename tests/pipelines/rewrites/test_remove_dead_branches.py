"""RemoveDeadBranches, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import fires, model, ops, reasons, rewritten

from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches

IF = """({inputs}float[n] x) => (float[n] y) {{ h = Abs(x)
    y = If(c) <then_branch = f () => (float[n] a) {{ t = Relu(h) a = Add(t, x) }},
               else_branch = g () => (float[n] d) <float[1] k = {{2}}> {{ t = Mul(h, k) d = Neg(t) }}> }}"""


@pytest.mark.parametrize(("condition", "left"), [(True, "Abs Relu Add"), (False, "Abs Mul Neg")])
def test_the_branch_taken_is_inlined(normal, condition, left):
    net = model(IF.format(inputs=""), c=np.array(condition))
    fires(net, RemoveDeadBranches(), left, exact=True, x=normal(3))
    assert net.graph.outputs[0].name == "y"


def test_an_if_that_decides_at_run_time_stays(normal):
    net = model(IF.format(inputs="bool c, "))
    report = fires(net, RemoveDeadBranches(), "Abs If", exact=True, x=normal(3), c=np.array(True))
    assert "its condition is computed" in reasons(report, "RemoveDeadBranches").popitem()[1]


def test_two_ifs_with_the_same_inner_names(normal):
    branches = "<then_branch = f () => (float[n] a) { t = Relu(h) a = Neg(t) }, else_branch = g () => (float[n] a) { a = Identity(h) }>"
    net = model(f"(float[n] x) => (float[n] y) {{ h = Exp(x) u = If(c) {branches} w = If(d) {branches} y = Add(u, w) }}",
                  c=np.array(True), d=np.array(False))  # fmt: skip
    fires(net, RemoveDeadBranches(), "Exp Relu Neg Add", exact=True, x=normal(3))


def test_dropout_and_casts_to_the_same_type_go(normal):
    net = model(
        "(float[n] x) => (float[n] y, float[n] z) "
        "{ a, mask = Dropout(x, r) b = Cast<to=1>(a) y = Relu(b) z = Dropout(y) }",
        r=np.float32(0.5),
    )
    rewritten(net, RemoveDeadBranches(), exact=True, x=normal(3))
    assert "Dropout" not in ops(net) and "Cast" not in ops(net)


@pytest.mark.parametrize("body", ["y, m = Dropout(x, r, t)", "y, z = Dropout(x)"])
def test_dropout_that_does_something_stays(body):
    outputs = "float[n] y, bool[n] z" if "z" in body else "float[n] y"
    net = model(f"(float[n] x) => ({outputs}) {{ {body} }}", r=np.float32(0.5), t=np.array(True))
    one = RemoveDeadBranches()
    rewrite(net, [one])
    assert ops(net) == ["Dropout"] and one.refused
