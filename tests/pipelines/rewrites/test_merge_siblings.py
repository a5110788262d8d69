"""MergeSiblings, from ONNX text."""

import pytest
from helpers.arrays import normals
from helpers.rewriting import fires, model, ops, rewritten

from pipelines.rewrites.merge_siblings import MergeSiblings
from pipelines.rewrites.simplify_concat import SimplifyConcat

PICTURE = {"x": normals(0)(2, 2, 5, 5)}
SIB = "(float[n,4] x) => (float[n,k] y) {{ {} }}"
LAYERS = {f"w{i}": normals(i)(4, i + 1) for i in range(9)} | {f"b{i}": normals(9 + i)(i + 1) for i in range(9)}


def heads(count, layer="h{i} = Gemm(x, w{i}, b{i}) r{i} = Relu(h{i}) s{i} = Neg(r{i})"):
    return (
        " ".join(layer.format(i=i) for i in range(count))
        + f" y = Concat<axis=-1>({', '.join(f's{i}' for i in range(count))})"
    )


def test_siblings_become_one_layer_and_a_split_where_asked_for(normal):
    net = model(SIB.format(heads(3)), **LAYERS)
    assert rewritten(net, MergeSiblings(split=True), x=normal(3, 4)).fired("MergeSiblings") == 1
    assert ops(net) == ["Gemm", "Relu", "Split", "Neg", "Neg", "Neg", "Concat"]
    net = model("(float[n,2,5,5] x) => (float[n,3,3,3] y, float[n,2,3,3] z) { y = Conv(x, W, p) z = Conv(x, V, q) }",
                  W=normal(3, 2, 3, 3), V=normal(2, 2, 3, 3), p=normal(3), q=normal(2))  # fmt: skip
    fires(net, MergeSiblings(split=True), "Conv Split", **PICTURE)


@pytest.mark.parametrize(
    "layer", ["a{i} = MatMul(x, w{i}) s{i} = Add(a{i}, b{i})", "s{i} = MatMul(x, w{i})", "s{i} = Gemm(x, w{i}, b{i})"]
)
def test_siblings_that_are_joined_become_one_layer(normal, layer):
    net = model(SIB.format(heads(3, layer)), **LAYERS)
    left = ["MatMul", "Add"] if "Add" in layer else [layer.split("(")[0].split()[-1]]
    passes = [MergeSiblings(), SimplifyConcat()]
    rewritten(net, *passes, x=normal(3, 4))
    assert ops(net) == left and net.graph.outputs[0].name == "y"


def test_joined_convs_become_one(normal):
    text = """(float[n,2,5,5] x) => (float[n,7,5,5] y) {
        a = Conv<pads=[1,1,1,1]>(x, W, p) b = Relu(a) c = Conv<pads=[1,1,1,1]>(x, V, q) d = Relu(c)
        y = Concat<axis=1>(x, b, d) }"""
    net = model(text, W=normal(3, 2, 3, 3), V=normal(2, 2, 3, 3), p=normal(3), q=normal(2))
    fires(net, MergeSiblings(), "Conv Relu Concat", **PICTURE)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (heads(7), True),  # a Split would remain
        (
            heads(2, "s{i} = Gemm(x, w{i}, b{i})").replace("axis=-1>(s0, s1)", "axis=-1>(s0, x, s1)"),
            True,
        ),  # not side by side
        (
            "a = Gemm(x, w3, b3) b = Gemm(x, w3, b3) c = Relu(b) y = Concat<axis=0>(c, c)",
            False,
        ),  # repeated: the clean-up makes it one
        ("a = Gemm(x, w3) b = Gemm<alpha=2.0>(x, w3) y = Concat<axis=1>(a, b)", False),
        ("a = Gemm(x, w3, b3) c = Relu(a) b = Gemm(x, w2, b2) y = Concat<axis=1>(c, b)", False),  # another activation
        ("z = Neg(x) a = Gemm(x, w3) b = Gemm(z, w3) y = Concat<axis=1>(a, b)", False),  # another input
        ("a = Gemm(x, w3) b = Gemm(x, v3) y = Concat<axis=0>(a, b)", True),  # joined along the batch
    ],
)
def test_siblings_that_stay(normal, body, refused):
    one = MergeSiblings()
    net = model(SIB.format(body), v3=normal(4, 4), **LAYERS)
    assert rewritten(net, one, x=normal(3, 4)).fired("MergeSiblings") == 0
    assert bool(one.refused) == refused
