"""FoldIndexWrap, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.rewrites.fold_index_wrap import FoldIndexWrap

WHERE = "c = Less(i, zero) w = Add(i, length) s = Where(c, w, i)"
PRODUCTS = (
    "c = Less(i, zero) w = Add(length, i) m = Cast<to=7>(c) a = Mul(m, w)"
    " not = Not(c) inverse = Cast<to=7>(not) b = Mul(i, inverse) s = Add({})"
)


def wrapped(normal, body, zero=0, length=5, axis=0, shape=(5, 4), ids=(-5, -1, 0, 4)):
    text = f"(int64[n] i) => (float[a,b] y) {{ {body} y = Gather<axis={axis}>(T, s) }}"
    return model(text, T=normal(*shape), zero=np.int64(zero), length=np.int64(length)), {"i": integers(*ids)}


@pytest.mark.parametrize(
    "body",
    [
        WHERE,
        PRODUCTS.format("a, b"),
        PRODUCTS.format("b, a"),
        WHERE.replace("Less(i, zero)", "Less(f, fzero)").replace(
            "c =", "f = Cast<to=1>(i) fzero = Cast<to=1>(zero) c =", 1
        ),
    ],
    ids=["where", "products", "products, complement first", "comparison in float"],
)
def test_fold_index_wrap_reads_the_index_itself(normal, body):
    if "fzero = Cast" in body:  # a constant of the float type, as exporters write it
        body = body.replace("fzero = Cast<to=1>(zero)", "fzero = Constant<value_float=0.0>()")
    net, feeds = wrapped(normal, body)
    report = rewritten(net, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 1
    assert ops(net) == ["Gather"] and net.graph[0].inputs[1].name == "i"


def test_fold_index_wrap_on_another_axis(normal):
    net, feeds = wrapped(normal, WHERE, axis=1, shape=(3, 5))
    assert rewritten(net, FoldIndexWrap(), exact=True, **feeds).fired("FoldIndexWrap") == 1


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (WHERE.replace("Less", "LessOrEqual"), {"ids": (-5, -1, 1, 2)}),
        (WHERE.replace("Less", "Greater"), {"length": -5, "ids": (-4, 0, 1, 4)}),
        (WHERE, {"zero": 1, "ids": (-5, -1, 1, 4)}),
        (WHERE.replace("Where(c, w, i)", "Where(c, i, w)"), {"ids": (-5, -4, -1)}),
        (WHERE.replace("Add(i, length)", "Sub(i, length)"), {"length": -5}),
        (WHERE.replace("Add(i, length)", "Add(i, i)"), {"ids": (-2, -1, 3)}),
        (WHERE.replace("Add(i, length)", "Add(length, length)"), {"length": 1}),
        (PRODUCTS.format("a, a"), {"ids": (-4, -3, 1)}),
        (PRODUCTS.format("b, b"), {"ids": (-3, -2, 1)}),
        (
            PRODUCTS.format("a, b").replace("Mul(m, w)", "Mul(m, i)").replace("Mul(i, inverse)", "Mul(w, inverse)"),
            {"ids": (-5, -1)},
        ),
        (
            PRODUCTS.format("a, b").replace("Not(c)", "Not(d)").replace("not =", "d = Less(i, length) not =", 1),
            {"ids": (-5, -1)},
        ),
    ],
)
def test_fold_index_wrap_leaves_another_selection_alone(normal, body, changes):
    net, feeds = wrapped(normal, body, **changes)
    report = rewritten(net, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 0 and net.graph[-1].inputs[1].name == "s"


@pytest.mark.parametrize("body", [WHERE, PRODUCTS.format("a, b")])
def test_fold_index_wrap_refuses_another_length(normal, body):
    net, feeds = wrapped(normal, body, length=4, ids=(-4, -1, 0, 3))
    report = rewritten(net, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 0
    assert list(reasons(report, "FoldIndexWrap").values()) == ["indices wrap at 4, the table's length is another"]
