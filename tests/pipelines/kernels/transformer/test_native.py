"""The native Transformer, in every instruction set that this CPU runs: kernels with the bits of
`reference`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.arrays import floats
from helpers.transformer_programs import dense, every_isa, same
from hypothesis import given
from hypothesis import strategies as st

from pipelines.kernels import extension
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.operations import StaticQParams

native = extension.native()
pytestmark = pytest.mark.skipif(native is None, reason=extension.missing())


@every_isa
@pytest.mark.parametrize("nonnegative", [False, True])
@given(st.integers(0, 20), st.integers(1, 300), st.integers(0, 2**32))
def test_rows_are_quantized_alike(isa, nonnegative, n, width, seed):
    rng = np.random.default_rng(seed)
    x = floats(rng, n, width) * (10.0 ** rng.integers(-38, 30, (n, 1))).astype(np.float32)
    x[rng.random(n) < 0.2] = 0
    x = np.abs(x) if nonnegative else x
    rows, scale = native.quantize_rows(x, nonnegative, isa)
    wanted, scales = reference.quantize_rows(x, nonnegative)
    same(rows, wanted)
    same(scale, scales[:, None])


@every_isa
@given(
    st.integers(0, 20),
    st.integers(1, 300),
    st.sampled_from([1e-42, 0.0173, 3.0, 1e30]),
    st.integers(0, 255),
    st.integers(0, 2**32),
)
def test_rows_are_quantized_alike_by_static_qparams(isa, n, width, scale, zero, seed):
    rng = np.random.default_rng(seed)
    scale = float(np.float32(scale))
    x = floats(rng, n, width) * np.float32(100 * scale)
    x[rng.random(x.shape) < 0.2] = rng.integers(-300, 300) * np.float32(scale / 2)  # ties
    x[rng.random(x.shape) < 0.1] = rng.choice([-1, 1]) * np.float32(1e38)
    rows, scales = native.quantize_rows(x, False, isa, (scale, zero))
    wanted = reference.quantize_rows(x, qparams=StaticQParams(scale, zero))
    same(rows, wanted[0])
    same(scales[:, 0], wanted[1])


@pytest.mark.parametrize("zero", [0, 113, 255])
def test_static_quantization_is_that_of_onnx(zero):
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> it (float[n, 500] x) => (uint8[n, 500] y)
        <float scale = {{0.0173}}, uint8 zero = {{{zero}}}> {{ y = QuantizeLinear(x, scale, zero) }}"""
    )
    rng = np.random.default_rng(zero)
    x = np.concatenate(
        [floats(rng, 50, 500), rng.integers(-400, 400, (50, 500)).astype(np.float32) * np.float32(0.0173) / 2]
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    same(
        reference.quantize_rows(x, qparams=StaticQParams(float(np.float32(0.0173)), zero))[0],
        session.run(None, {"x": x})[0],
    )


@every_isa
def test_a_quantized_row_is_close_to_what_it_was(isa):
    x = floats(np.random.default_rng(1), 50, 100)
    rows, scale = native.quantize_rows(x, False, isa)
    np.testing.assert_allclose((rows.astype(np.float32) - 128) * scale, x, atol=np.abs(x).max() / 250)


@every_isa
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("qparams", [None, (0.02, 7)])
def test_a_row_that_is_no_number_has_no_finite_scale(isa, odd, qparams):
    x = floats(np.random.default_rng(1), 3, 40)
    x[1, 17] = odd
    _, scale = native.quantize_rows(x, False, isa, qparams)
    assert np.isfinite(scale[:, 0]).tolist() == [True, False, True]


@every_isa
@given(st.integers(0, 20), st.integers(1, 300), st.integers(0, 2**32))
def test_layers_are_normalized_alike(isa, n, width, seed):
    rng = np.random.default_rng(seed)
    x, scale, bias = floats(rng, n, width) + 3, floats(rng, width), floats(rng, width)
    output, rows, scales = native.layer_norm(x, scale, bias, 1e-5, isa)
    wanted = reference.layer_norm(x, scale, bias, 1e-5)
    same(output, wanted)
    exact = (x - x.mean(1, keepdims=True, dtype=np.float64)) / np.sqrt(x.var(1, keepdims=True, dtype=np.float64) + 1e-5)
    np.testing.assert_allclose(output, exact * scale + bias, atol=1e-4)
    same(rows, reference.quantize_rows(wanted)[0])
    same(scales[:, 0], reference.quantize_rows(wanted)[1])
    _, rows, _ = native.layer_norm(x, scale, bias, 1e-5, isa, (0.5, 99))
    same(rows, reference.quantize_rows(wanted, qparams=StaticQParams(0.5, 99))[0])


@every_isa
def test_every_float16_comes_back_and_other_numbers_go_to_the_nearest(isa):
    exact = np.arange(65536, dtype=np.uint16).view(np.float16)
    exact = exact[np.isfinite(exact)].astype(np.float32)
    above = np.sort(np.abs(exact))
    ties = (above[:-1] + above[1:]) / 2
    x = np.concatenate([exact, ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    x = np.concatenate([x, np.float32([65519.9, 65520, 1e38, -1e38, np.inf, -np.inf, 1e-45, 0])]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)]).reshape(1, -1)
    keys_values = np.concatenate([np.zeros_like(x), x], axis=1)  # alone, a key gives all of its values
    same(native.self_attention(np.ones_like(x), keys_values, 1, isa), reference.to_float16(x) + np.float32(0))


@every_isa
@given(
    st.integers(0, 9),
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from([16, 32, 48, 64, 80]),
    st.integers(0, 2**32),
)
def test_attention_is_alike(isa, n, count, heads, size, seed):
    rng = np.random.default_rng(seed)
    query, keys_values = floats(rng, n, heads * size), floats(rng, count, 2 * heads * size)
    keys, values = np.split(keys_values, 2, axis=1)
    same(native.attention(query, keys_values, heads, False, isa), reference.attention(query, keys, values, heads))
    keys, values = np.split(reference.to_float16(keys_values), 2, axis=1)
    apart, together = (
        native.self_attention(query, keys_values, heads, isa),
        native.attention(query, keys_values, heads, True, isa),
    )
    same(together, reference.attention(query, keys, values, heads))
    for output, other, one in zip(apart, together, query, strict=True):
        same(output, reference.self_attention(one, keys, values, heads))
        scores = np.einsum("hd,thd->ht", one.reshape(heads, -1), keys.reshape(count, heads, -1), dtype=np.float64)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        exact = np.einsum("ht,thd->hd", weights, values.reshape(count, heads, -1)).ravel()
        np.testing.assert_allclose(output, exact, atol=1e-4)
        np.testing.assert_allclose(other, exact, atol=1e-4)


@every_isa
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 4), st.integers(0, 2**32))
def test_a_bias_by_position_is_added_alike(isa, count, reach, heads, seed):
    rng = np.random.default_rng(seed)
    query, keys_values = floats(rng, 2, heads * 16), floats(rng, count, 2 * heads * 16)
    bias = floats(rng, heads, reach, scale=3.0)
    keys, values = np.split(reference.to_float16(keys_values), 2, axis=1)
    for output, one in zip(native.self_attention(query, keys_values, heads, isa, bias), query, strict=True):
        same(output, reference.self_attention(one, keys, values, heads, bias))
    newest = bias[:, max(reach - count, 0) :]  # all others have the first column of the bias
    whole = np.concatenate([np.repeat(bias[:, :1], count - newest.shape[1], axis=1), newest], axis=1)
    same(
        native.self_attention(query, keys_values, heads, isa, whole),
        native.self_attention(query, keys_values, heads, isa, bias),
    )


@every_isa
@given(
    st.sampled_from([0, 1, 2, 3, 5, 6, 7, 13, 64, 65, 239, 241, 700]),
    st.integers(1, 150),
    st.integers(1, 150),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_linear_layers_are_alike(isa, n, inputs, outputs, nonnegative, relu, more, seed):
    rng = np.random.default_rng(seed)
    layer, x, residual = dense(rng, inputs, outputs), floats(rng, n, inputs), floats(rng, n, outputs) if more else None
    x = np.maximum(x, 0) if nonnegative else x
    output = native.RowLinear(layer.weight, layer.scale, layer.bias, nonnegative, isa)(x, relu, residual)
    same(output, reference.linear(layer, x, nonnegative, relu, residual))
    exact = x @ (layer.weight * layer.scale) + layer.bias
    exact = np.maximum(exact, 0) if relu else exact
    np.testing.assert_allclose(output, exact + (residual if more else 0), atol=0.1)


@every_isa
@pytest.mark.parametrize("inputs", [512, 2048, 4099])
def test_wide_layers_are_alike(isa, inputs):
    rng = np.random.default_rng(inputs)
    layer, x = dense(rng, inputs, 200), floats(rng, 11, inputs)
    whole = native.RowLinear(layer.weight, layer.scale, layer.bias, False, isa)
    expected = reference.linear(layer, x)
    for rows in (1, 2, 3, 7, 11):
        same(whole(x[:rows], False, None), expected[:rows])
    for zero in (0, 40, 255):
        fixed = replace(layer, qparams=StaticQParams(0.015625, zero))
        made = native.RowLinear(layer.weight, layer.scale, layer.bias, False, isa, (0.015625, zero))
        same(made(x, False, None), reference.linear(fixed, x))
        same(made(0 * x[:1], False, None), reference.linear(fixed, 0 * x[:1]))
        for array, wanted in zip(made.top_k(x, 3)[:2], reference.top_k(reference.linear(fixed, x), 3), strict=False):
            same(array, wanted)


@every_isa
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 400), st.data(), st.integers(0, 2**32))
def test_top_k_is_alike(isa, n, inputs, words, data, seed):
    rng = np.random.default_rng(seed)
    count = data.draw(st.integers(1, min(words, 32)))
    layer, x = dense(rng, inputs, words, scale=5), floats(rng, n, inputs)
    if words > 2:  # equals
        layer.weight[:, words // 2] = layer.weight[:, 0]
        layer.scale[words // 2], layer.bias[words // 2] = layer.scale[0], layer.bias[0]
    values, tokens, log_sum_exp = native.RowLinear(layer.weight, layer.scale, layer.bias, False, isa).top_k(x, count)
    logits = reference.linear(layer, x)
    for array, wanted in zip((values, tokens, log_sum_exp[:, 0]), reference.top_k(logits, count), strict=True):
        same(array, wanted)
    exact = np.log(np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64).sum(1)) + logits.max(1)
    np.testing.assert_allclose(log_sum_exp[:, 0], exact, atol=1e-5)
