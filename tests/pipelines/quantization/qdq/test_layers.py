"""Layers by recipe: quantized at run time, symmetric, of reduced range."""

import numpy as np
import pytest
from helpers.quantizing import attention, check, decibels, image, quantized
from helpers.rewriting import model, ops, run

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.quantization.recipe import QuantRecipe


def test_dynamic_products(normal, tmp_path):
    recipe = QuantRecipe(dynamic=("[qkv]0|z",), keep_float=("s", "o"))
    net, x = attention(normal), normal(16, 16, 64)
    report, ran = check(net, 30, tmp_path, recipe, x=x)
    decisions = [(op.precision, op.reason) for op in report.operators if op.type == "MatMulInteger"]
    assert decisions == [("int8", "its input is quantized at run time")] * 4
    assert not [
        op for op in report.operators if op.type in ("Cast", "Mul", "DynamicQuantizeLinear")
    ]  # parts of the products
    result, _ = quantized(net, recipe, x=x)
    assert ops(result).count("DynamicQuantizeLinear") == 2  # one for q, k and v
    kinds = [kind for kind, _ in ran["onnxruntime"]]
    assert (
        kinds.count("DynamicQuantizeMatMul") + kinds.count("MatMulIntegerToFloat") == 4 and "MatMulInteger" not in kinds
    )


@pytest.mark.parametrize("turned", [0, 1])
def test_a_dynamic_gemm(normal, tmp_path, turned):
    text = f"(float[n,8] x) => (float[n,5] y) {{ h = Gemm<transB={turned}>(x, w, b) y = Neg(h) }}"
    w = normal(8, 5)
    net = model(text, w=w.T.copy() if turned else w, b=normal(5))
    report, _ = check(net, 35, tmp_path, QuantRecipe(dynamic=("h",)), x=normal(16, 8))
    assert report.operators[0].type == "MatMulInteger"


def test_what_cannot_be_dynamic(normal):
    x = normal(16, 3, 8, 8)
    net = image("z = Conv(r, m) y = Neg(z)")
    with pytest.raises(RequestError, match=r"dynamic 'nothing' matches no operator; quantizable ones are: h, z"):
        quantized(net, QuantRecipe(dynamic=("nothing",)), x=x)
    _, report = quantized(net, QuantRecipe(dynamic=("z",)), x=x)
    assert report.operators[2].precision == "int8"  # as a Conv, its range is the table's
    with pytest.raises(RequestError, match="dynamic is 'z'; give a tuple of patterns"):
        QuantRecipe(dynamic="z")


@pytest.mark.parametrize(
    "operator, reason",
    [
        ("Gemm<alpha=0.5>(x, w)", "alpha or beta is not 1"),
        ("Gemm<transA=1>(x, w)", "its input is transposed (transA)"),
        ("Add(x, w)", "its input x is float"),
        ("Sigmoid(x)", "its input x is float"),
    ],
)
def test_other_operators_that_a_dynamic_pattern_matches_compute_what_they_did(normal, operator, reason):
    net, x = model(f"(float[8,8] x) => (float[8,8] y) {{ h = {operator} y = Neg(h) }}", w=normal(8, 8)), normal(8, 8)
    result, report = quantized(net, QuantRecipe(dynamic=("h",)), x=x)
    assert (report.operators[0].precision, report.operators[0].reason) == ("float", reason)
    np.testing.assert_array_equal(run(result, x=x)["y"], run(net, x=x)["y"])


def test_symmetric_activations(normal, tmp_path):
    net, x = image("a = Conv(h, m) s = Add(a, r) z = Conv(s, m) y = Neg(z)"), normal(16, 3, 8, 8)
    check(net, 24, tmp_path, QuantRecipe(symmetric=True), x=x)
    result, _ = quantized(net, QuantRecipe(symmetric=True), x=x)
    zeros = {
        name: int(query.constant(value))
        for name, value in result.graph.initializers.items()
        if name[1:] == ".zero_point"
    }
    assert zeros["x"[0] + ".zero_point"] == 128 and zeros["r.zero_point"] == 0 and set(zeros.values()) == {0, 128}
    scale = query.constant(result.graph.initializers["x.scale"])
    np.testing.assert_allclose(scale, np.abs(x).max() / 127, rtol=1e-6)


def vpmaddubsw(x, w):
    """u8 [n, k] times s8 [k, m] as AVX2 sums it: pairs of products saturate to 16 bits, then they are added in 32."""
    products = x[:, :, None].astype(np.int64) * w[None].astype(np.int64)
    pairs = np.clip(products[:, 0::2] + products[:, 1::2], -(2**15), 2**15 - 1)
    return pairs.sum(axis=1)


@pytest.mark.parametrize("reduced", [False, True])
def test_reduced_range_avoids_the_saturation_of_16_bit_pairs(normal, reduced):
    w = np.abs(normal(32, 6, scale=0.1)) + 1
    x = np.abs(normal(64, 32, scale=0.1)) + 1
    net = model("(float[n,32] x) => (float[n,6] y) { y = MatMul(x, w) }", w=w)
    result, _ = quantized(net, QuantRecipe(reduced_range=reduced), x=x)
    q, scale = (query.constant(result.graph.initializers[f"y/w.{part}"]) for part in ("quantized", "scale"))
    step = query.constant(result.graph.initializers["x.scale"])
    x_q = np.clip(np.rint(x / step), 0, 255).astype(np.uint8)
    exact, found_sums = x_q.astype(np.int64) @ q.astype(np.int64), vpmaddubsw(x_q, q)
    if reduced:
        np.testing.assert_array_equal(found_sums, exact)
        assert 255 * 2 * 63 <= 2**15 - 1 and np.abs(q).max() == 63  # so it holds for any input
        assert decibels(found_sums * step * scale, x @ w) > 30
    else:
        assert (found_sums < exact).mean() > 0.3 and decibels(found_sums * step * scale, x @ w) < 20


def test_a_product_whose_weights_are_int8_already_stays(normal, tmp_path):
    text = "(float[n,8] x) => (float[n,5] y) { w = DequantizeLinear(q, s) h = MatMul(x, w) y = Neg(h) }"
    net = model(text, q=np.arange(-20, 20, dtype=np.int8).reshape(8, 5), s=np.full(5, 0.1, np.float32))
    result, report = quantized(net, x=normal(16, 8))
    assert ops(result) == ["DequantizeLinear", "MatMul", "Neg"]
    assert next(op.reason for op in report.operators if op.type == "MatMul") == "its weights are int8 already"


ATTENTION = """(float[{batch},{t},64] x) => (float[{batch},{t},64] y) {{ q = MatMul(x, w) k = MatMul(x, v)
    l = Transpose<perm=[0,2,1]>(k) s = MatMul(q, l) p = Softmax(s) o = MatMul(p, q) y = MatMul(o, w) }}"""


@pytest.mark.parametrize(("positions", "columns"), [(32, "t"), (32, 32), (512, "t"), (512, 512)])
def test_small_products_of_activations_stay_float_if_the_recipe_says_so(normal, positions, columns):
    weights = {"w": normal(64, 64) / 8, "v": normal(64, 64) / 8}
    net = model(ATTENTION.format(batch="n", t=columns), **weights)
    x = normal(2, positions, 64)
    for recipe, expected in ((QuantRecipe(), "int8"), (QuantRecipe(only_faster=True), None)):
        expected = expected or ("float" if positions < 100 else "int8")
        _, report = quantized(net, recipe, x=x)
        by_name = {op.name: op for op in report.operators}
        assert {by_name[name].precision for name in ("s", "o")} == {expected}
        assert {by_name[name].precision for name in ("q", "k", "y")} == {"int8"}
        if expected == "float":
            assert by_name["s"].reason == "so small a product of activations is no faster in int8"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("v = DequantizeLinear(bytes, step) y = MatMul(x, v)", "its weights are int8 already"),
        ("t = Transpose(x) y = MatMul(w, t)", "its first factor is constant"),
        ("t = Transpose(x) y = Gemm(w, t)", "its weights are not constant"),
    ],
)
def test_the_form_of_a_layer_is_the_reason_before_its_size_and_ranges(normal, body, reason):
    constants = {"w": normal(8, 8), "bytes": np.ones((8, 8), np.int8), "step": np.float32(0.1)}
    used = {name: array for name, array in constants.items() if f"{name}," in body}
    used |= {"step": constants["step"]} if "step" in body else {}
    net = model(f"(float[4,8] x) => (float y) {{ {body} }}", **used)
    net.graph.outputs[0].shape = None
    _, report = quantized(net, QuantRecipe(only_faster=True), x=normal(4, 8))
    assert [op.reason for op in report.operators if op.type in ("MatMul", "Gemm")] == [reason]
