"""HoistLinear, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import integers, model, ops, rewritten

from pipelines.rewrites.hoist_linear import HoistLinear

STEP = "p{0} = {layer}(s{0}, {weights}) q{0} = Tanh({previous}) y{0} = Add(p{0}, q{0}) "
SLICES = {
    "Gather": "s0 = Gather(x, i0) s1 = Gather(x, i1) s2 = Gather(x, i2) ",
    "Split": "t0, t1, t2 = Split(x, ones) s0 = Squeeze(t0, i) s1 = Squeeze(t1, i) s2 = Squeeze(t2, i) ",
    "Slice": "s0 = Slice(x, l0, l1, i) s1 = Slice(x, l1, l2, i) s2 = Slice(x, l2, l3, i) ",
}


def net(normal, slices, layer, steps=3):
    """A recurrent network of three steps [3, n, 4], its cells [n, 5] or [1, n, 5]."""
    weights = "W, b" if layer.startswith("Gemm") else "W"
    text = SLICES[slices] + "".join(
        STEP.format(step, layer=layer, weights=weights, previous=f"y{step - 1}" if step else "h")
        for step in range(steps)
    )
    text = (
        f"(float[3,n,4] x, float[n,5] h) => (float[{'1,n' if slices == 'Slice' else 'n'},5] y{steps - 1}) {{ {text} }}"
    )
    scalars = {f"i{step}": np.array(step) for step in range(3)} if slices == "Gather" else {"i": integers(0)}
    bounds = {f"l{step}": integers(step) for step in range(4)} if slices == "Slice" else {}
    bounds |= {"ones": integers(1, 1, 1)} if slices == "Split" else {}
    weight = normal(5, 4) if "transB" in layer else normal(4, 5)
    return model(text, W=weight, **({"b": normal(5)} if "b" in weights else {}), **scalars, **bounds)


@pytest.mark.parametrize(
    ("slices", "layer"), [("Gather", "Gemm<transB=1>"), ("Split", "Gemm"), ("Split", "MatMul"), ("Slice", "MatMul")]
)
def test_the_layers_of_unrolled_cells_are_one(normal, slices, layer):
    graph = net(normal, slices, layer)
    assert rewritten(graph, HoistLinear(), x=normal(3, 2, 4), h=normal(2, 5)).fired("HoistLinear") == 1
    assert ops(graph).count("MatMul") == 1 and "Gemm" not in ops(graph)


def test_few_slices_and_activations_stay(normal):
    graph = net(normal, "Gather", "Gemm", steps=2)
    assert rewritten(graph, HoistLinear(), x=normal(3, 2, 4), h=normal(2, 5)).fired("HoistLinear") == 0
    graph = model(
        "(float[2,n,4] x) => (float[n,5] y) { s = Gather(x, i) t = Gather(x, j) p = MatMul(s, W) q = MatMul(t, W) "
        "u = Relu(p) v = Relu(q) y = Add(u, v) }",
        i=np.array(0), j=np.array(1), W=normal(4, 5),
    )  # fmt: skip
    assert rewritten(graph, HoistLinear(), x=normal(2, 3, 4)).fired("HoistLinear") == 0
