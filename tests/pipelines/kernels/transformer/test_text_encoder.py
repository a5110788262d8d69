"""The native text encoder: the bits of its reference on every instruction set, whatever stands beside a text."""

import math

import numpy as np
import pytest
from helpers.arrays import floats
from helpers.text_programs import check_independence, check_reference

from pipelines.core.errors import RequestError
from pipelines.engines.native.texts import NativeTexts
from pipelines.kernels import extension
from pipelines.kernels.transformer import native as programs
from pipelines.kernels.transformer import program_file, reference
from pipelines.kernels.transformer.operations import (
    Activation,
    Embedding,
    LayerNorm,
    Linear,
    QuantizedAttention,
    RowLinear,
)
from pipelines.kernels.transformer.program import EncoderProgram
from pipelines.kernels.transformer.text import reference as text_reference
from pipelines.kernels.transformer.text.program import Dense, TextProgram

pytestmark = pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
WIDTH, LONGEST = 32, 80


def linear(rng, inputs, outputs):
    weight = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, outputs).astype(np.float32) * np.float32(1 / (73 * inputs**0.5))
    return RowLinear(weight, scale, floats(rng, outputs, scale=0.1))


def made(rng, heads=2, types=1, activation="gelu", pooling="mean", normalize=True, head=()):
    """A program of two post-LN layers of random weights; `head`: its layers as (outputs, activation)."""
    table = rng.integers(-127, 128, (64, WIDTH)).astype(np.int8)
    steps = [Embedding(table, np.full(64, 1 / 73, np.float32), floats(rng, types * LONGEST, WIDTH), 0)]

    def norm(register, out):
        return LayerNorm(
            register, floats(rng, WIDTH, scale=0.2) + np.float32(1), floats(rng, WIDTH, scale=0.1), 1e-12, out
        )

    for _ in range(2):
        steps += [
            Linear(0, linear(rng, WIDTH, 3 * WIDTH), 1),
            QuantizedAttention(1, heads, 2),
            Linear(2, linear(rng, WIDTH, WIDTH), 1, residual=0),
            norm(1, 0),
            Linear(0, linear(rng, WIDTH, 50), 1, relu=activation == "relu"),
            *([] if activation == "relu" else [Activation(1, activation, 2)]),
            Linear(1 if activation == "relu" else 2, linear(rng, 50, WIDTH), 3, residual=0),
            norm(3, 0),
        ]
    inputs = [WIDTH, *(outputs for outputs, _ in head)]
    layers = tuple(
        Dense(floats(rng, outputs, of, scale=of**-0.5), floats(rng, outputs), activation)
        for of, (outputs, activation) in zip(inputs, head, strict=False)
    )
    return TextProgram(EncoderProgram(steps), types, pooling, normalize, layers)


CASES = {
    "mean": {},
    "cls": {"pooling": "cls", "normalize": False},
    "max": {"pooling": "max", "heads": 1},
    "relu": {"activation": "relu"},
    "swish": {"activation": "swish"},
    "a pair's score": {"types": 2, "pooling": "cls", "normalize": False, "head": ((WIDTH, "tanh"), (1, ""))},
    "labels": {"pooling": "cls", "normalize": False, "head": ((17, "relu"), (3, ""))},
    "a projection": {"head": ((24, ""),)},
}


@pytest.fixture
def stored(tmp_path):
    """The file of a program."""

    def write(program):
        path = tmp_path / f"model{program_file.SUFFIX}"
        program_file.save(path, (program,))
        return path

    return write


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_returns_the_bits_of_the_reference(rng, stored, case):
    program = made(rng, **CASES[case])
    check_reference(rng, stored(program), program, [1, 2, 7, 16, 17, 33, 80])


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_a_text_does_not_depend_on_batch_order_or_threads(rng, stored, threads):
    program = made(rng, types=2)
    check_independence(rng, stored(program), program, threads)


def attention_alone(rng, size, scale=1.0, biased=False, longest=200):
    """A program of one attention of two heads on random rows."""
    width = 2 * size
    rows = rng.standard_normal((longest, width)).astype(np.float32)
    rows[7] = 0
    weight = rng.integers(-127, 128, (width, 3 * width)).astype(np.int8)
    scales = rng.uniform(0.2, 1, 3 * width).astype(np.float32) * np.float32(0.03 * scale / width**0.5)
    bias = rng.standard_normal((2, 2 * longest - 1)).astype(np.float32) if biased else None
    table = np.zeros((64, width), np.int8)
    steps = [
        Embedding(table, np.ones(64, np.float32), rows, 0),
        Linear(0, RowLinear(weight, scales, rng.standard_normal(3 * width).astype(np.float32) * np.float32(scale)), 1),
        QuantizedAttention(1, 2, 0, bias),
    ]
    return TextProgram(EncoderProgram(steps), 1, "mean", False)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("scale", [1e-33, 1.0, 30.0])
@pytest.mark.parametrize("size", [16, 32, 48])
def test_attention_of_any_length_has_the_bits_of_the_reference(rng, isa, size, scale):
    program = attention_alone(rng, size, scale, biased=size == 32)
    native = programs.compile_texts(program, isa)
    for length in (1, 3, 15, 16, 31, 32, 33, 49, 130):
        none = np.zeros(length, np.int32)
        vector = native.compute(none, none, np.array([length]), 1)[0]
        assert vector.tobytes() == text_reference.compute(program, none, none).tobytes()


def test_attention_in_integers_is_close_to_that_in_floats(rng):
    rows = rng.standard_normal((180, 3 * 64)).astype(np.float32)
    output = reference.quantized_attention(rows, QuantizedAttention(0, 2, 1))
    wanted = reference.attention(*np.split(rows, 3, axis=1), 2)
    assert 0 < np.linalg.norm(output - wanted) < 0.03 * np.linalg.norm(wanted)


def test_gelu_is_near_what_it_is_of_all_numbers():
    x = np.concatenate([np.linspace(-9, 9, 4001), [-1e30, -100, 100, 1e30]]).astype(np.float32)
    exact = np.array([number * 0.5 * (1 + math.erf(number / math.sqrt(2))) for number in x.tolist()])
    error = np.abs(reference.activate("gelu", x) - exact)
    assert (error < 7e-5 + 3e-6 * np.abs(x)).all()


def test_attention_whose_sums_could_overflow_is_refused(rng):
    program = attention_alone(rng, 16, longest=65537)
    with pytest.raises((RequestError, ValueError), match="overflow"):
        programs.compile_texts(program)


@pytest.mark.parametrize(
    ("ids", "types", "lengths", "why"),
    [
        ([64], [0], [1], "found 64"),
        ([-1], [0], [1], "found -1"),
        ([1], [2], [1], "found 2"),
        ([1, 2], [0, 0], [1], "not those of the tokens"),
        ([1], [0, 0], [1], "not those of the tokens"),
        ([], [], [0], "a text of 0 tokens"),
        ([1] * 81, [0] * 81, [81], "a text of 81 tokens"),
    ],
)
def test_tokens_that_are_none_are_refused(rng, stored, ids, types, lengths, why):
    native = NativeTexts(stored(made(rng, types=2)))
    with pytest.raises(RequestError, match=why):
        native.compute(np.array(ids, np.int32), np.array(types, np.int32), np.array(lengths, np.int64))


def test_no_texts_are_no_rows(rng, stored):
    none = np.zeros(0, np.int32)
    assert NativeTexts(stored(made(rng))).compute(none, none, none.astype(np.int64)).shape == (0, 32)
