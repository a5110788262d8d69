"""WholeMaxPool, from ONNX text."""

import pytest
from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.rewrites.whole_max_pool import WholeMaxPool

FORMS = {
    "y = GlobalMaxPool(x)": ["MaxPool"],
    "y = ReduceMax(x, axes)": ["MaxPool"],
    "y = ReduceMax<keepdims=0>(x, axes)": ["MaxPool", "Squeeze"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_value_of_each_channel(form, normal):
    axes = "c" if "keepdims" in form else "c,h,w"
    text = f"(float[n,3,4,5] x) => (float[n,{axes}] y) {{ {form} }}"
    net = model(text, opset=18, **({"axes": integers(-1, 2)} if "axes" in form else {}))
    report = rewritten(net, WholeMaxPool(), exact=True, x=normal(2, 3, 4, 5))
    assert report.fired("WholeMaxPool") == 1 and ops(net) == FORMS[form]


def test_other_axes_and_unknown_sizes_are_left_alone(normal):
    net = model("(float[n,3,4,5] x) => (float[n,1,4,5] y) { y = ReduceMax<axes=[1]>(x) }")
    assert rewritten(net, WholeMaxPool(), exact=True, x=normal(2, 3, 4, 5)).fired("WholeMaxPool") == 0
    net = model("(float[n,3,t] x) => (float[n,3,1] y) { y = GlobalMaxPool(x) }")
    assert len(reasons(rewritten(net, WholeMaxPool(), exact=True, x=normal(2, 3, 4)), "WholeMaxPool")) == 1
