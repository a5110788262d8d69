"""The native decoder, in every instruction set that this CPU runs: kernels with the bits of `rowwise`, translations with its tokens."""

from __future__ import annotations

import _thread
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import kernels
from pipelines.errors import RequestError
from pipelines.kernels import rowwise
from pipelines.kernels.decoder import CrossAttention, Embed, Linear, Norm, Program, RowLinear, SelfAttention, Vocabulary
from zoo.transformer_mt.decode import beam_search

native = kernels.native()
pytestmark = pytest.mark.skipif(native is None, reason=kernels.missing())
START, END = 2, 3


every_isa = pytest.mark.parametrize("isa", kernels.isas() or ["none"])


def floats(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def dense(rng, inputs, outputs, scale=1.0):
    weight = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    return RowLinear(
        weight, (rng.uniform(0.5, 1.5, outputs) * scale / (73 * inputs**0.5)).astype(np.float32), floats(rng, outputs, scale=0.1)
    )


def same(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


# --- kernels: the same bits as the reference


@every_isa
@pytest.mark.parametrize("positive", [False, True])
@given(st.integers(0, 20), st.integers(1, 300), st.integers(0, 2**32))
def test_rows_are_quantized_alike(isa, positive, n, width, seed):
    rng = np.random.default_rng(seed)
    x = floats(rng, n, width) * (10.0 ** rng.integers(-38, 30, (n, 1))).astype(np.float32)
    x[rng.random(n) < 0.2] = 0
    x = np.abs(x) if positive else x
    rows, scale = native.quantize_rows(x, positive, isa)
    wanted, scales = rowwise.quantize(x, positive)
    same(rows, wanted)
    same(scale, scales[:, None])


@every_isa
def test_a_quantized_row_is_close_to_what_it_was(isa):
    x = floats(np.random.default_rng(1), 50, 100)
    rows, scale = native.quantize_rows(x, False, isa)
    np.testing.assert_allclose((rows.astype(np.float32) - 128) * scale, x, atol=np.abs(x).max() / 250)


@every_isa
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_has_no_finite_scale(isa, odd):
    x = floats(np.random.default_rng(1), 3, 40)
    x[1, 17] = odd
    _, scale = native.quantize_rows(x, False, isa)
    assert np.isfinite(scale[:, 0]).tolist() == [True, False, True]


@every_isa
@given(st.integers(0, 20), st.integers(1, 300), st.integers(0, 2**32))
def test_layers_are_normalized_alike(isa, n, width, seed):
    rng = np.random.default_rng(seed)
    x, scale, bias = floats(rng, n, width) + 3, floats(rng, width), floats(rng, width)
    found, rows, scales = native.layer_norm(x, scale, bias, 1e-5, isa)
    wanted = rowwise.norm(x, scale, bias, 1e-5)
    same(found, wanted)
    exact = (x - x.mean(1, keepdims=True, dtype=np.float64)) / np.sqrt(x.var(1, keepdims=True, dtype=np.float64) + 1e-5)
    np.testing.assert_allclose(found, exact * scale + bias, atol=1e-4)
    same(rows, rowwise.quantize(wanted)[0])
    same(scales[:, 0], rowwise.quantize(wanted)[1])


@every_isa
@given(st.integers(0, 5), st.integers(1, 70), st.integers(1, 4), st.sampled_from([16, 32, 64, 80]), st.integers(0, 2**32))
def test_attention_is_alike(isa, n, count, heads, size, seed):
    rng = np.random.default_rng(seed)
    query, kept = floats(rng, n, heads * size), floats(rng, count, 2 * heads * size)
    found = native.attention(query, kept, heads, isa)
    keys, values = np.split(kept, 2, axis=1)
    for each, one in zip(found, query, strict=True):
        same(each, rowwise.attention(one, keys, values, heads))
        scores = np.einsum("hd,thd->ht", one.reshape(heads, -1), keys.reshape(count, heads, -1), dtype=np.float64)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        exact = np.einsum("ht,thd->hd", weights, values.reshape(count, heads, -1)).ravel()
        np.testing.assert_allclose(each, exact, atol=1e-4)


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
@settings(max_examples=60)
def test_linear_layers_are_alike(isa, n, inputs, outputs, positive, relu, more, seed):
    rng = np.random.default_rng(seed)
    layer, x, residual = dense(rng, inputs, outputs), floats(rng, n, inputs), floats(rng, n, outputs) if more else None
    x = np.maximum(x, 0) if positive else x
    found = native.RowLinear(layer.weight, layer.scale, layer.shift, positive, isa)(x, relu, residual)
    same(found, rowwise.linear(layer, x, positive, relu, residual))
    exact = x @ (layer.weight * layer.scale) + layer.shift
    exact = np.maximum(exact, 0) if relu else exact
    np.testing.assert_allclose(found, exact + (residual if more else 0), atol=0.1)


@every_isa
@pytest.mark.parametrize("inputs", [512, 2048, 4099])
def test_wide_layers_are_alike(isa, inputs):
    rng = np.random.default_rng(inputs)
    layer, x = dense(rng, inputs, 200), floats(rng, 11, inputs)
    same(native.RowLinear(layer.weight, layer.scale, layer.shift, False, isa)(x, False, None), rowwise.linear(layer, x))


@every_isa
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 400), st.data(), st.integers(0, 2**32))
def test_the_likeliest_are_alike(isa, n, inputs, words, data, seed):
    rng = np.random.default_rng(seed)
    count = data.draw(st.integers(1, min(words, 32)))
    layer, x = dense(rng, inputs, words, scale=5), floats(rng, n, inputs)
    if words > 2:  # equals
        layer.weight[:, words // 2] = layer.weight[:, 0]
        layer.scale[words // 2], layer.shift[words // 2] = layer.scale[0], layer.shift[0]
    values, tokens, norms = native.RowLinear(layer.weight, layer.scale, layer.shift, False, isa).likeliest(x, count)
    logits = rowwise.linear(layer, x)
    for found, wanted in zip((values, tokens, norms[:, 0]), rowwise.likeliest(logits, count), strict=True):
        same(found, wanted)
    exact = np.log(np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64).sum(1)) + logits.max(1)
    np.testing.assert_allclose(norms[:, 0], exact, atol=1e-5)


# --- whole translations


def program(rng, layers=2, heads=2, size=16, hidden=48, words=60, positions=40, pre=True, sharp=4.0, memory=24):
    """A decoder of random weights, pre- or post-LN; `sharp` logits have no near ties."""
    width = heads * size
    count = iter(range(1000))

    def linear(at, inputs, outputs, **more):
        steps.append(Linear(at, dense(rng, inputs, outputs), next(count), **more))
        return steps[-1].out

    def norm(at):
        steps.append(Norm(at, floats(rng, width, scale=0.2) + 1, floats(rng, width, scale=0.1), 1e-5, next(count)))
        return steps[-1].out

    table = rng.integers(-127, 128, (words, width)).astype(np.int8)
    steps = [Embed(table, np.full(words, 0.02, np.float32), floats(rng, positions, width, scale=0.3), next(count))]
    x = steps[-1].out
    for _ in range(layers):
        for kind in ("self", "cross", "feed"):
            y = norm(x) if pre else x
            if kind == "self":
                steps.append(SelfAttention(linear(y, width, 3 * width), heads, next(count)))
                x = linear(steps[-1].out, width, width, residual=x)
            elif kind == "cross":
                steps.append(CrossAttention(linear(y, width, width), dense(rng, memory, 2 * width), heads, next(count)))
                x = linear(steps[-1].out, width, width, residual=x)
            else:
                x = linear(linear(y, width, hidden, relu=True), hidden, width, residual=x)
            x = x if pre else norm(x)
    steps.append(Vocabulary(norm(x) if pre else x, dense(rng, width, words, scale=sharp)))
    return Program(steps, memory)


def packed(memories):
    return np.concatenate(memories), np.array([len(each) for each in memories])


def search(native_decoder, memories, limits, beam=4, best=1, penalty=1.0, slots=8, threads=1, start=START, end=END):
    memory, lengths = packed(memories) if memories else (np.zeros((0, 24), np.float32), np.zeros(0, np.int64))
    return native_decoder.translate(memory, lengths, np.asarray(limits, np.int64), start, end, beam, best, penalty, slots, threads)


@every_isa
@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize(("beam", "best", "penalty"), [(1, 1, 1.0), (4, 1, 1.0), (4, 4, 0.6), (3, 2, 0.0), (16, 3, 1.0)])
def test_translations_are_those_of_the_reference(isa, pre, beam, best, penalty):
    rng = np.random.default_rng(beam)
    made = program(rng, pre=pre)
    memories = [floats(rng, length, 24) for length in rng.integers(1, 20, 25)]
    limits = rng.integers(1, 20, 25)
    found = search(kernels.decoder(made, isa), memories, limits, beam, best, penalty)
    agreed = 0
    for memory, limit, each in zip(memories, limits, found, strict=True):
        [wanted] = beam_search(
            rowwise.Decoding(made, [memory]), np.array([limit]), start=START, end=END, beam=beam, best=best, length_penalty=penalty
        )
        agreed += [one.tokens for one in wanted] == [one[0] for one in each]
        if [one.tokens for one in wanted] == [one[0] for one in each]:
            np.testing.assert_allclose([one[1] for one in each], [one.score for one in wanted], atol=1e-5)
    assert agreed == len(memories)
