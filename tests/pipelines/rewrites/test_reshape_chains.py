"""ReshapeChains, from ONNX text."""

import pytest
from helpers.rewriting import fires, integers, model, reasons, rewritten

from pipelines.rewrites.reshape_chains import ReshapeChains

RES = "(float[n,4,6] x) => (float[p,q] y) {{ {} }}"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Reshape(x, flat) b = Reshape(a, pairs) y = Relu(b)", "Reshape Relu"),
        ("a = Unsqueeze(x, one) b = Squeeze(a, one) c = Relu(b) y = Flatten(c)", "Relu Flatten"),
        ("a = Flatten(x) b = Unsqueeze(a, one) c = Squeeze(b, one) y = Relu(c)", "Reshape Relu"),
        ("s = Shape(x) n = Gather(s, first) t = Concat<axis=0>(n, m) a = Reshape(x, t) y = Relu(a)", "Reshape Relu"),
        ("a = Relu(x) b = Reshape(a, same) y = Flatten(b)", "Relu Flatten"),
        ("a = Relu(x) b = Reshape(a, copy) y = Flatten(b)", "Relu Flatten"),
        ("y = Flatten(x)", "Flatten"),
    ],
)
def test_reshapes_become_one(normal, body, left):
    shapes = {
        "flat": integers(-1),
        "pairs": integers(-1, 2),
        "one": integers(1),
        "first": integers(0),
        "m": integers(24),
        "same": integers(-1, 4, 6),
    }
    fires(
        model(RES.format(body), copy=integers(0, 0, -1), **shapes), ReshapeChains(), left, exact=True, x=normal(3, 4, 6)
    )


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Flatten(x) b = Relu(a) c = Unsqueeze(a, one) d = Squeeze(c, one) y = Add(b, d)", None),
        (
            "s = Shape(x) n = Gather(s, first) v = Gather(t, n) w = Concat<axis=0>(v, rest) y = Reshape(x, w)",
            "two dimensions",
        ),
    ],
)
def test_reshapes_that_stay(normal, body, left):
    net = model(RES.format(body), one=integers(1), first=integers(0), t=integers(*range(9)), rest=integers(-1))
    report = rewritten(net, ReshapeChains(), exact=True, x=normal(3, 4, 6))
    assert left is None or left in " ".join(reasons(report, "ReshapeChains").values())
