"""SimplifyConcat, from ONNX text."""

import pytest
from helpers.rewriting import fires, integers, model, reasons, rewritten

from pipelines.rewrites.simplify_concat import SimplifyConcat

CAT = "(float[n,4] x, float[n,2] z) => (float[n,k] y) {{ {} }}"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Concat<axis=1>(x) y = Relu(a)", "Relu"),
        ("a = Concat<axis=1>(x, z) b = Concat<axis=-1>(z, a, x) y = Relu(b)", "Concat Relu"),
        ("a, b = Split<axis=1>(x) c = Concat<axis=-1>(a, b) y = Relu(c)", "Relu"),
        (
            "a = Concat<axis=1>(x, z) b, c = Split<axis=1>(a, widths) d = Relu(c) y = Concat<axis=1>(d, b)",
            "Relu Concat",
        ),
        (
            "a = Concat<axis=1>(x, z) b = Concat<axis=1>(a, x) c = Concat<axis=1>(z, b) d = Concat<axis=1>(c, z) y = "
            "Relu(d)",
            "Concat Relu",
        ),
    ],
)
def test_concats_that_need_not_copy(normal, body, left):
    fires(
        model(CAT.format(body), widths=integers(4, 2)),
        SimplifyConcat(),
        left,
        exact=True,
        x=normal(3, 4),
        z=normal(3, 2),
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a, b = Split<axis=1>(x) y = Concat<axis=1>(b, a)", None),
        ("a, b = Split<axis=1>(x) y = Concat<axis=0>(a, b)", "on another axis"),
        ("a, b = Split<axis=1>(x) y = Concat<axis=1>(a, b, z)", None),
        ("a = Concat<axis=0>(z, z) b = Concat<axis=1>(a, a) y = Relu(b)", "joins another axis"),
        ("a = Concat<axis=1>(x, z) b = Relu(a) y = Concat<axis=1>(a, b)", "another reader"),
        ("a = Concat<axis=1>(x, z) b, c = Split<axis=1>(a) y = Concat<axis=1>(c, b)", "other places than its seams"),
    ],
)
def test_concats_that_are_needed_stay(normal, body, reason):
    net = model(CAT.format(body))
    before = len(net.graph)
    report = rewritten(net, SimplifyConcat(), exact=True, x=normal(3, 4), z=normal(3, 2))
    assert len(net.graph) == before and (
        reason is None or reason in " ".join(reasons(report, "SimplifyConcat").values())
    )
