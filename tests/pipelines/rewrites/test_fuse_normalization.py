"""FuseNormalization, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.fuse_normalization import FuseNormalization

TORCH = "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) s = Pow(d, two) v = ReduceMean<axes=[-1]>(s) e = Add(v, eps) r = Sqrt(e) n = Div(d, r)"
SQUARE = "m = ReduceMean<axes=[2]>(x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<axes=[2]>(s) e = Add(eps, v) r = Sqrt(e) n = Div(d, r)"
KERAS = """m = ReduceMean<axes=[2]>(x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<axes=[2]>(s) e = Add(v, eps) q = Sqrt(e) i = Reciprocal(q)
    c = Mul(i, g) p = Mul(x, c) t = Mul(m, c) o = Sub(b, t) y = Add(p, o)"""
MOMENTS = """w = Mul(x, x) m = ReduceMean<axes=[-1]>(x) a = ReduceMean<axes=[-1]>(w) k = Mul(m, m) v = Sub(a, k) e = Add(v, eps) r = Sqrt(e)
    d = Sub(x, m) n = Div(d, r)"""
AFFINE = " h = Mul(n, g) y = Add(h, b)"


def constants(normal, *shape):
    return {"two": np.float32(2), "eps": np.float32(1e-5), "g": normal(*shape), "b": normal(*shape)}


@pytest.mark.parametrize(("opset", "sizes"), [(13, "n,t"), (17, "2,5")])
@pytest.mark.parametrize("text", [TORCH + AFFINE, SQUARE + AFFINE, MOMENTS + AFFINE, KERAS, TORCH + " y = Mul(n, g)"])
def test_layer_normalizations_in_all_forms(normal, text, opset, sizes):
    net = model(f"(float[{sizes},16] x) => (float[{sizes},16] y) {{ {text} }}", opset, **constants(normal, 16))
    rewritten(net, FuseNormalization(), x=normal(2, 5, 16))
    assert ops(net) == ["LayerNormalization"]
    assert net.opset_imports[""] == 17


@pytest.mark.parametrize("axes", ["[-1]", "[1]"])
def test_rows_of_a_matrix(normal, axes):
    text = (TORCH + AFFINE).replace("[-1]", axes)
    net = model(f"(float[n,16] x) => (float[n,16] y) {{ {text} }}", 13, **constants(normal, 16))
    rewritten(net, FuseNormalization(), x=normal(5, 16))
    assert ops(net) == ["LayerNormalization"]


def test_channels_of_pixels(normal):
    text = (TORCH + AFFINE).replace("axes=[-1]", "axes=[1]")
    net = model(f"(float[n,6,h,w] x) => (float[n,6,h,w] y) {{ {text} }}", **constants(normal, 6, 1, 1))
    rewritten(net, FuseNormalization(), x=normal(2, 6, 4, 5))
    assert ops(net) == ["Transpose", "LayerNormalization", "Transpose"]


def test_the_value_is_also_a_summand(normal):
    text = f"(float[n,t,16] x) => (float[n,t,16] z) {{ {TORCH}{AFFINE} z = Add(x, y) }}"
    net = model(text, **constants(normal, 16))
    rewritten(net, FuseNormalization(), x=normal(2, 5, 16))
    assert ops(net) == ["LayerNormalization", "Add"]


@pytest.mark.parametrize(
    ("text", "outputs"),
    [
        (TORCH.replace("[-1]", "[1]") + AFFINE, "float[n,t,16] y"),  # over tokens
        (TORCH.replace("Sub(x, m)", "Add(x, m)") + AFFINE, "float[n,t,16] y"),
        (TORCH.replace("Sqrt(e)", "Mul(e, e)") + AFFINE, "float[n,t,16] y"),
        (
            "s = Pow(x, two) v = ReduceMean<axes=[-1]>(s) e = Add(v, eps) r = Sqrt(e) n = Div(x, r)" + AFFINE,
            "float[n,t,16] y",
        ),  # RMS
        (TORCH + AFFINE, "float[n,t,16] y, float[n,t,1] r"),  # the deviation is an output
        ("m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) y = Mul(d, eps)", "float[n,t,16] y"),  # small results
        (TORCH.replace("[-1]>(s)", "[1, 2]>(s)") + AFFINE, "float[n,t,16] y"),  # the variance of all tokens
    ],
)
def test_near_misses(normal, text, outputs):
    net = model(f"(float[n,t,16] x) => ({outputs}) {{ {text} }}", **constants(normal, 16))
    before = ops(net)
    rewritten(net, FuseNormalization(), exact=True, x=normal(2, 5, 16))
    assert ops(net) == before


def test_the_variance_of_all_pixels_is_no_layer_normalization(normal):
    text = TORCH.replace("[-1]>(x)", "[1]>(x)").replace("[-1]>(s)", "[1, 2, 3]>(s)") + AFFINE
    net = model(f"(float[n,6,h,w] x) => (float[n,6,h,w] y) {{ {text} }}", **constants(normal, 6, 1, 1))
    before = ops(net)
    rewritten(net, FuseNormalization(), exact=True, x=normal(2, 6, 4, 5))
    assert ops(net) == before


@pytest.mark.parametrize("shape", ["float[16]", "float[n,1,1,1,1,1,1,1,16]"])
def test_other_ranks(normal, shape):
    net = model(f"({shape} x) => ({shape} y) {{ {TORCH}{AFFINE} }}", **constants(normal, 16))
    rewritten(net, FuseNormalization(), x=normal(*[1] * shape.count(","), 16))
