"""EinsumToMatMul, from ONNX text."""

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


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("bij,bjd->bid", "MatMul"),
        ("bid,bjd->bij", "Transpose MatMul"),
        ("bhid,bhjd->bhij", "Transpose MatMul"),
        ("bid,bjd->bji", "Transpose MatMul Transpose"),
        ("bid,bdhe->bihe", "Reshape Reshape MatMul Reshape"),
        ("bihe,bjhe->bij", "Transpose Reshape Reshape MatMul Reshape"),
        ("bd,bd->b", "Reshape Reshape MatMul Reshape"),
    ],
)
def test_a_product_of_activations_is_a_matmul(normal, equation, expected):
    parts = equation.split("->")[0].split(",")
    inputs = ", ".join(
        f"float[{','.join(['n', *(str(SIZES[label]) for label in part[1:])])}] {name}"
        for name, part in zip("xy", parts, strict=True)
    )
    net = model(f'({inputs}) => (float z) {{ z = Einsum<equation="{equation}">(x, y) }}')
    net.graph.outputs[0].shape = None
    feeds = {name: normal(*(SIZES[label] for label in part)) for name, part in zip("xy", parts, strict=True)}
    fires(net, EinsumToMatMul(), expected, **feeds)


@pytest.mark.parametrize("equation", ["bid,bid->bid", "bid,bjd->bi", "bid,jd->bij", "bii,bid->bid"])
def test_other_products_of_activations_are_left_alone(normal, equation):
    x, y = (",".join("n" if label == "b" else "3" for label in part) for part in equation.split("->")[0].split(","))
    net = model(f'(float[{x}] x, float[{y}] y) => (float z) {{ z = Einsum<equation="{equation}">(x, y) }}')
    net.graph.outputs[0].shape = None
    feeds = {
        name: normal(*(2 if size == "n" else 3 for size in shape.split(","))) for name, shape in (("x", x), ("y", y))
    }
    assert rewritten(net, EinsumToMatMul(), **feeds).fired("EinsumToMatMul") == 0
