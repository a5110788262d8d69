"""ShareWeights, from ONNX text."""

from helpers.rewriting import model, rewritten

from pipelines.rewrites.share_weights import ShareWeights


def test_equal_weights_are_stored_once(normal):
    weight, bias = normal(4, 4), normal(4)
    net = model(
        "(float[n,4] x) => (float[n,4] y) { a = MatMul(x, V) b = Add(a, p) c = MatMul(b, W) d = Add(c, q) y = MatMul(d, U) }",
        V=weight, W=weight.copy(), p=bias, q=bias.copy(), U=normal(4, 4),
    )  # fmt: skip
    assert rewritten(net, ShareWeights(), x=normal(3, 4)).fired("ShareWeights") == 1
    assert sorted(net.graph.initializers) == ["U", "V", "p", "q"]
