"""Operations of encoders since 2020: RMS norms, gates, rotary positions, grouped heads, windows. All have the reference's bits."""

import dataclasses
import resource

import numpy as np
import pytest
from helpers.arrays import floats
from helpers.text_programs import check_reference

from pipelines.core.errors import RequestError
from pipelines.engines.native.texts import NativeTexts
from pipelines.kernels import extension
from pipelines.kernels.transformer import native as programs
from pipelines.kernels.transformer import program_file, reference
from pipelines.kernels.transformer.operations import (
    Disentangled,
    Embedding,
    GatedActivation,
    HeadNorm,
    Linear,
    Neighbours,
    QuantizedAttention,
    RMSNorm,
    Rotary,
    RowLinear,
    Sum,
)
from pipelines.kernels.transformer.program import EncoderProgram
from pipelines.kernels.transformer.text import reference as text_reference
from pipelines.kernels.transformer.text.program import Dense, L2Norm, RowNorm, TextProgram, Truncation

pytestmark = pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
LONGEST = 300


def linear(rng, inputs, outputs):
    weight = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, outputs).astype(np.float32) * np.float32(1 / (73 * inputs**0.5))
    return RowLinear(weight, scale, floats(rng, outputs, scale=0.1))


def rotary(size, turned, theta=100.0):
    angles = np.outer(np.arange(LONGEST), theta ** (-np.arange(turned) / turned))
    return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def disentangled(rng, heads, size, to_position=True, to_content=True, reach=20):
    """Positions of one row a distance up to `reach`, from which on they share it."""
    rows = np.clip(np.arange(1 - LONGEST, LONGEST), -reach, reach)[::-1] + reach

    def table(there):
        codes = rng.integers(-127, 128, (heads, 2 * reach + 1, size)).astype(np.int8)
        return (
            (codes, rng.uniform(0.5, 2, (heads, size)).astype(np.float32) / np.float32(300)) if there else (None, None)
        )

    return Disentangled(np.ascontiguousarray(rows, np.int32), *table(to_position), *table(to_content))


def program(
    rng, size=32, heads=4, width=48, hidden=80, types=1, activation="gelu", norm=False, turned=0, joined=1, **attention
):
    """A pre-norm layer with sandwich norms, of random weights, without a table of positions."""
    table = rng.integers(-127, 128, (64, width)).astype(np.int8)
    key_heads = attention.get("key_heads") or heads

    def rms(register, out, columns=width):
        return RMSNorm(register, floats(rng, columns, scale=0.2) + np.float32(1), 1e-6, out)

    if norm:
        attention["norm"] = HeadNorm(floats(rng, size) + np.float32(1), floats(rng, size) + np.float32(1), 1e-6)
    if turned:
        attention["rotary"] = rotary(size, turned)
    if attention.get("positions"):
        attention["positions"] = disentangled(rng, heads, size, **attention["positions"])
    steps = [
        Embedding(table, np.full(64, 1 / 73, np.float32), floats(rng, types, width), 0, LONGEST),
        rms(0, 1),
        Neighbours(1, joined, 3),
        Linear(3, linear(rng, joined * width, (heads + 2 * key_heads) * size), 2),
        QuantizedAttention(2, heads, 3, **attention),
        Linear(3, linear(rng, heads * size, width), 1),
        rms(1, 2),
        Sum(2, 0, 1),
        rms(1, 0),
        Linear(0, linear(rng, width, 2 * hidden), 2),
        GatedActivation(2, activation, 3),
        Linear(3, linear(rng, hidden, width), 0, residual=1),
        rms(0, 1),
    ]
    return TextProgram(EncoderProgram(steps), types, "mean", True)


CASES = {
    "modernbert": {"turned": 16, "before": 20, "after": 20},
    "qwen3": {"heads": 4, "key_heads": 2, "norm": True, "turned": 16, "after": 0, "activation": "swish"},
    "gemma": {
        "heads": 3,
        "key_heads": 1,
        "norm": True,
        "turned": 16,
        "before": 9,
        "after": 9,
        "activation": "gelu_tanh",
    },
    "part of a head turned": {"size": 48, "turned": 5, "types": 2},
    "causal window": {"before": 33, "after": 0},
    "later keys alone": {"before": 0, "after": 17},
    "deberta": {"positions": {"to_position": True, "to_content": True}},
    "content to position alone": {"positions": {"to_content": False}, "size": 16, "before": 40},
    "position to content alone": {"positions": {"to_position": False, "reach": 3}, "size": 48},
    "neighbouring rows": {"joined": 5},
    "own key alone": {"before": 0, "after": 0, "size": 16},
}
LENGTHS = [1, 2, 3, 15, 16, 17, 40, 67, 130, LONGEST]


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_returns_the_bits_of_the_reference(rng, case):
    made = program(rng, **CASES[case])
    ids = rng.integers(0, 64, sum(LENGTHS)).astype(np.int32)
    types = rng.integers(0, made.types, len(ids)).astype(np.int32)
    outputs = [programs.compile_texts(made, isa).compute(ids, types, np.array(LENGTHS), 1) for isa in extension.isas()]
    for length, end, *rows in zip(LENGTHS, np.cumsum(LENGTHS), *outputs, strict=True):
        expected = text_reference.compute(made, ids[end - length : end], types[end - length : end])
        assert {row.tobytes() for row in rows} == {expected.tobytes()}


@pytest.mark.parametrize("case", CASES)
def test_tokens_that_are_computed_and_not_attended_to(rng, case):
    made, lengths = program(rng, **CASES[case]), np.array([3, 17, 60, 35])
    attended = np.array([1, 4, 20, 35])
    encoders = [programs.compile_texts(made, isa) for isa in extension.isas()]
    ids = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    types = np.zeros_like(ids)
    outputs = [encoder.compute(ids, types, lengths, 1, attended) for encoder in encoders]
    for count, end, length, *rows in zip(attended, np.cumsum(lengths), lengths, *outputs, strict=True):
        part = ids[end - length : end], types[end - length : end]
        assert {row.tobytes() for row in rows} == {text_reference.compute(made, *part, int(count)).tobytes()}
    for wrong in ([0, 4, 20, 35], [1, 4, 20, 36], [1, 4, 20]):
        with pytest.raises(ValueError, match="attended"):
            encoders[0].compute(ids, types, lengths, 1, np.array(wrong))


@pytest.mark.parametrize("isa", extension.isas())
def test_a_bias_by_distance_within_a_window(rng, isa):
    bias = rng.standard_normal((4, 2 * LONGEST - 1)).astype(np.float32)
    made = program(rng, bias=bias, before=25, after=40)
    ids = rng.integers(0, 64, 203).astype(np.int32)
    output = programs.compile_texts(made, isa).compute(ids, np.zeros_like(ids), np.array([len(ids)]), 1)[0]
    assert output.tobytes() == text_reference.compute(made, ids, np.zeros_like(ids)).tobytes()


HEADS = {
    "last": ("last", ()),
    "two poolings": ("weighted_mean+cls", (("dense", 33, "gelu"), ("norm",), ("dense", 7, "sigmoid"))),
    "truncated": ("mean_sqrt_len", (("dense", 40, "gelu_tanh"), ("l2",), ("truncate", 17))),
    "a result for each token": ("none", (("dense", 48, "swish"), ("norm",), ("dense", 5, ""))),
    "all rows": ("none", ()),
}


def head(rng, width, steps):
    made = []
    for kind, *args in steps:
        if kind == "dense":
            made.append(Dense(floats(rng, args[0], width, scale=width**-0.5), floats(rng, args[0]), args[1]))
        elif kind == "norm":
            made.append(RowNorm(floats(rng, width), floats(rng, width), 1e-5))
        else:
            made.append(L2Norm() if kind == "l2" else Truncation(args[0]))
        width = made[-1].outputs(width)
    return made


@pytest.mark.parametrize("case", HEADS)
def test_results_of_texts_and_of_tokens(rng, tmp_path, case):
    pooling, steps = HEADS[case]
    base = program(rng, turned=8)
    made = TextProgram(base.encoder, 1, pooling, case == "last", head(rng, 48 * max(len(pooling.split("+")), 1), steps))
    program_file.save(tmp_path / f"model{program_file.SUFFIX}", (made,))
    check_reference(rng, tmp_path / f"model{program_file.SUFFIX}", made, [1, 2, 17, 40])


def test_results_of_tokens_do_not_depend_on_batch_order_or_threads(rng, tmp_path):
    made = TextProgram(program(rng, turned=8).encoder, 1, "none", True)
    path = tmp_path / f"model{program_file.SUFFIX}"
    program_file.save(path, (made,))
    lengths = rng.integers(1, 60, 20)
    ids = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    together = NativeTexts(path, 3).compute(ids, np.zeros_like(ids), lengths)
    ends = np.cumsum(lengths)
    for length, end in zip(lengths, ends, strict=True):
        alone = NativeTexts(path).compute(ids[end - length : end], np.zeros(length, np.int32), np.array([length]))
        assert np.array_equal(together[end - length : end], alone)


def test_long_texts_take_memory_that_grows_with_their_length(rng):
    made = program(rng, before=16, after=16)
    steps = [dataclasses.replace(made.encoder.operations[0], longest=20_000), *made.encoder.operations[1:]]
    encoder = programs.compile_texts(dataclasses.replace(made, encoder=EncoderProgram(steps)))
    ids = rng.integers(0, 64, 20_000).astype(np.int32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    encoder.compute(ids, np.zeros_like(ids), np.array([len(ids)]), 1)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert added < 150_000  # KiB; one square of float32 scores takes 1.6 million


def test_rows_that_pass_together_do_not_change_the_result(rng):
    made = program(rng, turned=16)
    encoder = programs.compile_texts(made)
    ids = rng.integers(0, 64, 3 * LONGEST).astype(np.int32)
    none, lengths = np.zeros_like(ids), np.array([LONGEST, 100, 200, LONGEST])
    outputs = encoder.compute(ids, none, lengths, 1)
    for row, end, length in zip(outputs, np.cumsum(lengths), lengths, strict=True):
        part = ids[end - length : end]
        assert np.array_equal(row, encoder.compute(part, none[:length], np.array([length]), 1)[0])
        assert row.tobytes() == text_reference.compute(made, part, none[:length]).tobytes()


def test_a_window_equals_attention_to_the_keys_in_it(rng):
    x = floats(rng, 50, 8 * 32)
    seen = reference.quantized_attention(x, QuantizedAttention(0, 4, 1, key_heads=2, before=50, after=50))
    assert np.array_equal(seen, reference.quantized_attention(x, QuantizedAttention(0, 4, 1, key_heads=2)))
    own = reference.quantized_attention(x, QuantizedAttention(0, 4, 1, key_heads=2, before=0, after=0))
    values = np.repeat(x[:, 6 * 32 :].reshape(50, 2, 32), 2, axis=1).reshape(50, -1)
    assert np.abs(own - values).max() < 0.02 * np.abs(values).max()


def test_scores_of_relative_positions_are_near_those_in_floats(rng):
    x, part = floats(rng, 40, 6 * 32), disentangled(rng, 2, 32)
    query, key, value = (array.reshape(40, 2, 32) for array in np.split(x, 3, axis=1))
    rows = part.rows[np.arange(40) - np.arange(40)[:, None] + len(part.rows) // 2]
    a, b = part.to_position * part.to_position_scale[:, None], part.to_content * part.to_content_scale[:, None]
    scores = np.einsum("ihd,thd->hit", query, key) + np.einsum("ihd,hitd->hit", query, a[:, rows])
    weights = np.exp(scores + np.einsum("thd,hitd->hit", key, b[:, rows]))
    expected = np.einsum("hit,thd->ihd", weights / weights.sum(axis=2, keepdims=True), value).reshape(40, -1)
    output = reference.quantized_attention(x, QuantizedAttention(0, 2, 1, positions=part))
    plain = reference.quantized_attention(x, QuantizedAttention(0, 2, 1))
    assert np.linalg.norm(output - expected) < 0.06 * np.linalg.norm(expected) < 0.5 * np.linalg.norm(plain - expected)


def test_rotary_positions_leave_products_of_equal_distance_alike(rng):
    query, key = floats(rng, 32), floats(rng, 32)
    row = np.concatenate([query, key, key])
    turned = QuantizedAttention(0, 1, 1, rotary=rotary(32, 16))
    positions = reference.positioned(np.tile(row[None, :64], (40, 1)).reshape(40, 2, 32), turned, None)
    products = positions[:, 0] @ positions[:, 1].T
    assert np.allclose(np.diagonal(products, 3), products[0, 3], atol=1e-3)
    assert not np.allclose(products[0, 3], products[0, 9], atol=1e-2)


@pytest.mark.parametrize("kind", ["gelu_tanh", "swish"])
def test_activations_are_near_their_definition(kind):
    x = np.concatenate([np.linspace(-9, 9, 4001), [-1e30, -100, 100, 1e30]]).astype(np.float32)
    wide = x.astype(np.float64)
    if kind == "swish":
        exact = wide * np.exp(-np.logaddexp(0, -wide))
    else:
        exact = wide * np.exp(-np.logaddexp(0, -2 * (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    assert (np.abs(reference.activate(kind, x) - exact) < 1e-6 + 1e-6 * np.abs(wide)).all()


def test_stored_programs_have_the_same_results(rng, tmp_path):
    made = program(rng, **CASES["gemma"])
    program_file.save(tmp_path / "model.zoo", (made,))
    (loaded,) = program_file.load(tmp_path / "model.zoo")
    ids = rng.integers(0, 64, 60).astype(np.int32)
    none = np.zeros_like(ids)
    assert np.array_equal(text_reference.compute(made, ids, none), text_reference.compute(loaded, ids, none))
    assert loaded.longest == LONGEST


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 3, "key_heads": 2}, "3 heads of queries for 2 of keys"),
        ({"before": -1}, "attends to -1 keys before"),
        ({"turned": 17}, "turns heads of 32 columns"),
        ({"size": 8}, "a head has a multiple of 16"),
        ({"activation": "tanh"}, "computes 'tanh'"),
        ({"hidden": 40}, "twice a multiple of 16"),
    ],
)
def test_what_has_no_kernel_is_refused(rng, change, why):
    with pytest.raises(RequestError, match=why):
        program(rng, **change)


def test_texts_longer_than_the_rotary_table_are_refused(rng):
    made = program(rng, turned=16)
    steps = [dataclasses.replace(made.encoder.operations[0], longest=LONGEST + 1), *made.encoder.operations[1:]]
    with pytest.raises(ValueError, match=f"of {LONGEST} tokens, positions of {LONGEST + 1}"):
        programs.compile_texts(dataclasses.replace(made, encoder=EncoderProgram(steps)))
