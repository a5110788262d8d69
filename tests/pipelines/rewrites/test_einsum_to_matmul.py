"""EinsumToMatMul, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import fires, model, reasons, rewritten

from pipelines.rewrites.einsum_to_matmul import EinsumToMatMul

SIZES = {"b": 2, "i": 3, "j": 5, "d": 8, "h": 2, "e": 4, "o": 6}


def einsum(normal, equation, first="x"):
    """A graph and its input, sizes by label; the constant is named w."""
    labels = dict(
        zip(
            ("x", "w") if first == "x" else ("w", "x"), equation.replace(" ", "").split("->")[0].split(","), strict=True
        )
    )
    shapes = {name: [SIZES[label] for label in part.replace("...", "bi")] for name, part in labels.items()}
    sizes = ",".join(["n", *map(str, shapes["x"][1:])])
    second = "w" if first == "x" else "x"
    text = f'(float[{sizes}] x) => (float y) {{ y = Einsum<equation="{equation}">({first}, {second}) }}'
    net = model(text, w=normal(*shapes["w"]))
    net.graph.outputs[0].shape = None
    return net, {"x": normal(*shapes["x"])}


@pytest.mark.parametrize(
    ("equation", "first", "expected"),
    [
        ("bid,do->bio", "x", "MatMul"),
        ("bid, od -> bio", "x", "MatMul"),
        ("...d,do->...o", "x", "MatMul"),
        ("od,bid->bio", "w", "MatMul"),
        ("bid,dhe->bihe", "x", "MatMul Reshape"),
        ("bihe,heo->bio", "x", "Reshape MatMul"),
        ("bihe,oeh->bio", "x", "Reshape MatMul"),
        ("bid,dhe->bhie", "x", "MatMul Reshape Transpose"),
        ("bid,do->boi", "x", "MatMul Transpose"),
    ],
)
def test_a_product_with_a_matrix_is_a_matmul(normal, equation, first, expected):
    net, feeds = einsum(normal, equation, first)
    fires(net, EinsumToMatMul(), expected, **feeds)


@pytest.mark.parametrize(
    "equation",
    ["bid,id->bid", "bid,bdo->bio", "bdi,do->bio", "bid,d->bi", "bid,o->bido", "...d,dhe->...he", "bid,do->bo"],
)
def test_other_products_are_left_alone(normal, equation):
    net, feeds = einsum(normal, equation)
    report = rewritten(net, EinsumToMatMul(), **feeds)
    assert report.fired("EinsumToMatMul") == 0 and "y" in reasons(report, "EinsumToMatMul")


def test_a_product_of_activations_is_left_alone():
    net = model('(float[n,3,8] x) => (float[n,3,3] y) { y = Einsum<equation="bid,bjd->bij">(x, x) }')
    report = rewritten(net, EinsumToMatMul(), x=np.ones((2, 3, 8), np.float32))
    assert report.fired("EinsumToMatMul") == 0
