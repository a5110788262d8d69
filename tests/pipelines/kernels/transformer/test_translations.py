"""Whole translations of the native Transformer, in every instruction set that this CPU runs: the tokens of `reference`;
what does not fit; threads and signals.
"""

from __future__ import annotations

import _thread
import functools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.arrays import floats
from helpers.tiers import one_in
from helpers.transformer_programs import dense, every_isa, same
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.transformer import native as programs
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.operations import (
    Attention,
    CrossAttention,
    Embedding,
    LayerNorm,
    Linear,
    RowLinear,
    SelfAttention,
    StaticQParams,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram
from zoo.translation.search.beam_search import beam_search

native = extension.native()
pytestmark = pytest.mark.skipif(native is None, reason=extension.missing())


START, END = 2, 3


def program(
    rng, layers=2, heads=2, size=16, hidden=48, words=60, positions=40, pre=True, sharp=4.0, memory=24, fixed=False
):
    """A decoder of random weights, pre- or post-LN; `sharp` logits have no near ties."""
    width = heads * size
    count = iter(range(1000))
    qparams = StaticQParams(0.03, 120) if fixed else None

    def linear(at, inputs, outputs, **more):
        steps.append(Linear(at, dense(rng, inputs, outputs, qparams=qparams), next(count), **more))
        return steps[-1].out

    def norm(at):
        steps.append(LayerNorm(at, floats(rng, width, scale=0.2) + 1, floats(rng, width, scale=0.1), 1e-5, next(count)))
        return steps[-1].out

    table = rng.integers(-127, 128, (words, width)).astype(np.int8)
    steps = [Embedding(table, np.full(words, 0.02, np.float32), floats(rng, positions, width, scale=0.3), next(count))]
    x = steps[-1].out
    for _ in range(layers):
        for kind in ("self", "cross", "feed"):
            y = norm(x) if pre else x
            if kind == "self":
                steps.append(SelfAttention(linear(y, width, 3 * width), heads, next(count)))
                x = linear(steps[-1].out, width, width, residual=x)
            elif kind == "cross":
                steps.append(
                    CrossAttention(
                        linear(y, width, width), dense(rng, memory, 2 * width, qparams=qparams), heads, next(count)
                    )
                )
                x = linear(steps[-1].out, width, width, residual=x)
            else:
                x = linear(linear(y, width, hidden, relu=True), hidden, width, residual=x)
            x = x if pre else norm(x)
    steps.append(Vocabulary(norm(x) if pre else x, dense(rng, width, words, scale=sharp, qparams=qparams)))
    return DecoderProgram(steps, memory)


def encoder(rng, layers=2, heads=2, size=16, hidden=48, words=60, positions=600, memory=None):
    """An encoder of random weights, pre-LN, whose result has 32 columns, or `memory`."""
    width, count = heads * size, iter(range(1000))
    steps = [
        Embedding(
            rng.integers(-127, 128, (words, width)).astype(np.int8),
            np.full(words, 0.02, np.float32),
            floats(rng, positions, width),
            0,
        )
    ]

    def linear(inputs, outputs, **more):
        steps.append(Linear(steps[-1].out, dense(rng, inputs, outputs), 1 + next(count) % 9, **more))

    def norm():
        steps.append(
            LayerNorm(
                steps[-1].out,
                floats(rng, width, scale=0.2) + 1,
                floats(rng, width, scale=0.1),
                1e-5,
                1 + next(count) % 9,
            )
        )

    for _ in range(layers):
        x = steps[-1].out
        norm()
        linear(width, 3 * width)
        steps.append(Attention(steps[-1].out, heads, 1 + next(count) % 9))
        linear(width, width, residual=x)
        x = steps[-1].out
        norm()
        linear(width, hidden, relu=True)
        linear(hidden, width, residual=x)
    norm()
    if memory:
        linear(width, memory)
    return EncoderProgram(steps)


def packed(memories):
    return np.concatenate(memories), np.array([len(memory) for memory in memories])


def search(native_decoder, memories, limits, beam=4, best=1, penalty=1.0, slots=8, threads=1, start=START, end=END):
    memory, lengths = packed(memories) if memories else (np.zeros((0, 24), np.float32), np.zeros(0, np.int64))
    return native_decoder.translate(
        None, memory, lengths, np.asarray(limits, np.int64), start, end, beam, best, penalty, slots, threads
    )


@functools.cache  # of all instruction sets
def reference_translations(pre, beam, best, penalty, fixed):
    """A program, memories, limits, and the hypotheses of the numpy search."""
    rng = np.random.default_rng(beam)
    made = program(rng, pre=pre, fixed=fixed)
    memories = [floats(rng, length, 24) for length in rng.integers(1, 20, 25)]
    limits = rng.integers(1, 20, 25)
    options = {"start": START, "end": END, "beam": beam, "best": best, "length_penalty": penalty}
    return made, memories, limits, beam_search(reference.Decoding(made, memories), limits, **options)


@every_isa
@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize(
    ("beam", "best", "penalty"), one_in(2, [(1, 1, 1.0), (4, 1, 1.0), (4, 4, 0.6), (3, 2, 0.0), (16, 3, 1.0)])
)
@pytest.mark.parametrize("fixed", [False, True])
def test_translations_are_those_of_the_reference(isa, pre, beam, best, penalty, fixed):
    made, memories, limits, wanted = reference_translations(pre, beam, best, penalty, fixed)
    results = search(programs.compile_program(made, isa), memories, limits, beam, best, penalty)
    for rows, one in zip(results, wanted, strict=True):
        assert [tokens for tokens, *_ in rows] == [hypothesis.tokens for hypothesis in one]
        np.testing.assert_allclose([row[1] for row in rows], [hypothesis.score for hypothesis in one], atol=1e-5)


@every_isa
def test_results_depend_neither_on_batch_nor_order_nor_threads(isa):
    rng = np.random.default_rng(7)
    made = programs.compile_program(program(rng), isa)
    memories = [floats(rng, length, 24) for length in rng.integers(1, 30, 40)]
    limits = rng.integers(1, 40, 40)
    whole = search(made, memories, limits)
    order = rng.permutation(40)
    assert whole == [search(made, [memory], [limit])[0] for memory, limit in zip(memories, limits, strict=True)]
    assert [whole[i] for i in order] == search(made, [memories[i] for i in order], limits[order], slots=3)
    for threads, slots in ((2, 8), (3, 1), (64, 2)):
        assert search(made, memories, limits, threads=threads, slots=slots) == whole


@every_isa
@pytest.mark.parametrize("fixed", [False, True])
def test_float_layers_of_a_decoder_have_the_bits_of_the_reference(isa, fixed):
    rng = np.random.default_rng(6)
    made = program(rng, layers=1, fixed=fixed)
    for number, operation in enumerate(made.operations):
        if isinstance(operation, Linear) and number % 2:  # the output of an attention, and a layer of the feed-forward
            layer = operation.layer
            floating = RowLinear(layer.weight * layer.scale, np.ones_like(layer.scale), layer.bias)
            made.operations[number] = replace(operation, layer=floating)
    made = DecoderProgram(made.operations, made.memory_width)
    assert {step.layer.quantizes for step in made.operations if isinstance(step, Linear)} == {True, False}
    memory = floats(rng, 7, 24)
    decoding = reference.Decoding(made, [memory])
    ((tokens, score, *_),) = search(programs.compile_program(made, isa), [memory], [12], beam=1)[0]
    total, token = 0.0, START
    for following in [*tokens, END][:12]:
        logits = decoding(np.array([token]), np.array([0]))
        token = int(following)
        assert int(logits[0].argmax()) == token
        _, _, log_sum_exp = reference.top_k(logits, 1)
        total += float(logits[0, token]) - float(log_sum_exp[0])
    assert score == pytest.approx(total / len([*tokens, END][:12]), abs=1e-5)


def test_all_versions_translate_alike():
    rng = np.random.default_rng(8)
    made = program(rng, heads=3, size=32, hidden=130, words=333)
    memories = [floats(rng, length, 24) for length in rng.integers(1, 40, 30)]
    results = [search(programs.compile_program(made, isa), memories, [40] * 30) for isa in extension.isas()]
    assert all(result == results[0] for result in results)
    assert len({tuple(rows[0][0]) for rows in results[0]}) > 20


@every_isa
@given(st.lists(st.sampled_from([1, 2, 3, 5, 16, 17, 40, 250, 512]), max_size=4), st.integers(0, 2**32))
@settings(max_examples=15)
def test_sentences_are_encoded_alike_one_by_one_or_together(isa, lengths, seed):
    rng = np.random.default_rng(seed)
    made = encoder(rng, layers=int(rng.integers(0, 3)), size=int(rng.choice([16, 48])))
    sources = [rng.integers(0, 60, length).astype(np.int32) for length in lengths]
    compiled = programs.compile_program(made, isa)
    together = compiled.encode(np.concatenate([*sources, np.zeros(0, np.int32)]), np.array(lengths, np.int64))
    apart = [compiled.encode(source, np.array([len(source)])) for source in sources]
    assert together.shape[0] == sum(lengths)
    assert together.tobytes() == b"".join(encoded.tobytes() for encoded in apart)
    for memory, source in zip(apart, sources, strict=True):
        if len(source) <= 40:
            same(memory, reference.encode(made, source))


@every_isa
@pytest.mark.parametrize("threads", [1, 2])
def test_sources_are_translated_as_their_encoder_and_decoder_do_it(isa, threads):
    rng = np.random.default_rng(9)
    first, second = programs.compile_program(encoder(rng, memory=24), isa), programs.compile_program(program(rng), isa)
    sources = [rng.integers(0, 60, length).astype(np.int32) for length in rng.integers(1, 40, 50)]
    limits, lengths = rng.integers(1, 20, 50), np.array([len(source) for source in sources])
    tokens = np.concatenate(sources)
    wanted = search(second, [first.encode(source, np.array([len(source)])) for source in sources], limits)
    for slots in (1, 8, 64):
        assert second.translate(first, tokens, lengths, limits, START, END, 4, 1, 1.0, slots, threads) == wanted
    for wrong in (
        {"rows": tokens.astype(np.int64)},
        {"rows": np.where(np.arange(len(tokens)) == 3, 60, tokens).astype(np.int32)},
        {"rows": -tokens - 1},
        {"rows": tokens[:-1]},
        {"lengths": np.array([601])},
        {"lengths": np.array([0])},
        {"encoder": programs.compile_program(encoder(rng), isa)},
    ):
        options = {"encoder": first, "rows": tokens, "lengths": lengths, "limits": limits} | wrong
        with pytest.raises((TypeError, ValueError)):
            second.translate(
                **options, start=START, end=END, beam=4, n_best=1, length_penalty=1.0, slots=8, threads=threads
            )


@given(st.data())
@settings(max_examples=30)
def test_all_shapes_translate(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    beam = data.draw(st.integers(1, 16))
    made = program(
        rng,
        layers=data.draw(st.integers(0, 2)),
        words=data.draw(st.integers(2 * beam, 200)),
        pre=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 100, 512]), max_size=9))
    memories, limits = [floats(rng, length, 24) for length in lengths], [data.draw(st.integers(1, 40)) for _ in lengths]
    start, end = data.draw(st.sampled_from([(2, 3), (0, -1), (0, 0)]))
    best = data.draw(st.integers(1, beam))
    results = search(
        programs.compile_program(made, data.draw(st.sampled_from(extension.isas()))),
        memories,
        limits,
        beam,
        best,
        data.draw(st.sampled_from([0.0, 0.6, 1.0])),
        data.draw(st.integers(1, 10)),
        data.draw(st.integers(1, 3)),
        start=start if start < made.vocabulary_size else 0,
        end=end if end < made.vocabulary_size else -1,
    )
    assert len(results) == len(lengths)
    for rows, limit in zip(results, limits, strict=True):
        assert 1 <= len(rows) <= best
        assert all(len(tokens) <= limit and score <= 0 for tokens, score in rows)
        assert all(0 <= token < made.vocabulary_size for tokens, _ in rows for token in tokens)
        assert [score for _, score in rows] == sorted((score for _, score in rows), reverse=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam": 0},
        {"beam": 31},
        {"beam": 129},
        {"best": 5},
        {"best": 0},
        {"limits": [41]},
        {"limits": [0]},
        {"limits": [3, 3]},
        {"start": 60},
        {"start": -1},
        {"end": 60},
        {"end": -2},
        {"slots": 0},
        {"threads": 0},
        {"penalty": np.nan},
        {"memories": [np.zeros((0, 24), np.float32)]},
        {"memories": [np.zeros((3, 25), np.float32)]},
        {"memories": [np.zeros((3, 24))]},
        {"memories": [np.asfortranarray(np.zeros((3, 24), np.float32))[::-1]]},
    ],
)
def test_what_does_not_fit_is_refused(wrong):
    made = programs.compile_program(program(np.random.default_rng(0)))
    with pytest.raises((TypeError, ValueError)):
        search(made, **({"memories": [np.zeros((3, 24), np.float32)], "limits": [3]} | wrong))


@every_isa
@pytest.mark.parametrize("threads", [1, 3])
def test_results_that_are_no_numbers_are_named(isa, threads):
    rng = np.random.default_rng(0)
    made = programs.compile_program(program(rng), isa)
    memories = [floats(rng, 3, 24) for _ in range(5)]
    memories[3][1, 2] = np.nan
    with pytest.raises(RuntimeError, match="not finite"):
        search(made, memories, [9] * 5, threads=threads)
    steps = list(program(rng).operations)
    index = next(i for i, step in enumerate(steps) if isinstance(step, LayerNorm))
    steps[index] = replace(steps[index], scale=np.full(32, 3e38, np.float32))
    memories[3][1, 2] = 0
    broken = programs.compile_program(DecoderProgram(steps, 24), isa)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        search(broken, memories, [9] * 5, threads=threads)
    assert search(made, memories, [9] * 5) == search(made, memories, [9] * 5, threads=threads)


def test_operations_that_do_not_fit_are_refused_by_both():
    rng = np.random.default_rng(0)
    good = program(rng)
    changes = {
        "holds nothing": lambda steps: steps.__setitem__(3, replace(steps[3], input=77)),
        "multiple of 16": lambda steps: steps.__setitem__(3, replace(steps[3], heads=4)),
        "columns": lambda steps: steps.__setitem__(2, replace(steps[2], layer=dense(rng, 33, 96))),
        "residual": lambda steps: steps.__setitem__(2, replace(steps[2], residual=0)),
        "keys and values": lambda steps: steps.__setitem__(7, replace(steps[7], layer=dense(rng, 24, 32))),
        "begins with an embedding": lambda steps: steps.pop(0),
        "not the one that it reads": lambda steps: steps.__setitem__(1, replace(steps[1], out=0)),
        "words": lambda steps: steps.__setitem__(-1, replace(steps[-1], layer=dense(rng, 32, 61))),
        "epsilon": lambda steps: steps.__setitem__(1, replace(steps[1], epsilon=-1.0)),
        "another by": lambda steps: steps.insert(
            3, replace(steps[2], layer=replace(steps[2].layer, qparams=StaticQParams(0.5, 3)), out=99)
        ),
        "quantized by": lambda steps: steps.__setitem__(
            7, replace(steps[7], layer=replace(steps[7].layer, qparams=StaticQParams(0.5, 3)))
        ),
    }
    for match, change in changes.items():
        steps = list(good.operations)
        change(steps)
        with pytest.raises(RequestError, match=match):
            DecoderProgram(steps, 24)
        unchecked = object.__new__(DecoderProgram)  # the native object checks by itself
        vars(unchecked).update(operations=steps, memory_width=24)
        with pytest.raises((TypeError, ValueError)):
            programs.compile_program(unchecked)


def test_layers_that_could_overflow_are_refused():
    weight, one = np.full((65536, 1), 127, np.int8), np.ones(1, np.float32)
    assert RowLinear(weight, one, one).inputs == 65536
    with pytest.raises(RequestError, match="expected"):
        RowLinear(np.zeros((65537, 1), np.int8), one, one)
    with pytest.raises(RequestError, match="not finite"):
        RowLinear(weight, one, one * np.inf)
    with pytest.raises(ValueError, match="not finite"):
        native.RowLinear(weight, one, one * np.nan, False, "")
    for scale, zero in ((0.0, 3), (np.nan, 3), (np.inf, 3), (1.0, -1), (1.0, 256)):
        with pytest.raises(RequestError, match="zero point"):
            StaticQParams(scale, zero)
        with pytest.raises(ValueError, match="zero point"):
            native.RowLinear(weight, one, one, False, "", (scale, zero))


def long_work():
    rng = np.random.default_rng(0)
    made = programs.compile_program(program(rng, layers=4, words=3000, positions=500))
    return made, [floats(rng, 50, 24) for _ in range(300)]


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_it_within_a_step(threads):
    made, memories = long_work()
    timer = threading.Timer(0.3, _thread.interrupt_main)
    begin = time.perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        search(made, memories, [500] * 300, end=-1, threads=threads)
    assert time.perf_counter() - begin < 5


def test_python_runs_on_meanwhile():
    made, memories = long_work()
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.005):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    search(made, memories[:60], [200] * 60, end=-1)
    done.set()
    other.join()
    assert len(ticks) >= 3  # with the interpreter held, it would be 1


def test_threads_of_python_share_one_decoder():
    rng = np.random.default_rng(3)
    made = programs.compile_program(program(rng))
    memories = [floats(rng, 9, 24) for _ in range(20)]
    wanted = {beam: search(made, memories, [30] * 20, beam) for beam in (1, 2, 4)}
    faults = []

    def work(beam):
        faults.extend(beam for _ in range(5) if search(made, memories, [30] * 20, beam) != wanted[beam])

    others = [threading.Thread(target=work, args=(beam,)) for beam in (1, 2, 4, 4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert faults == []
