"""Speculative decoding: what is proposed changes no bit of a translation, whatever is proposed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.arrays import floats
from helpers.transformer_programs import dense, every_isa

from pipelines.core.errors import RequestError
from pipelines.engines.native.translation import NativeTranslator
from pipelines.kernels import extension
from pipelines.kernels.transformer import native
from pipelines.kernels.transformer.draft import DraftProgram, DraftWords, build_draft, quantize_arrays
from pipelines.kernels.transformer.operations import (
    CrossAttention,
    Embedding,
    LayerNorm,
    Linear,
    Recurrence,
    SelfAttention,
    StaticQParams,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram

pytestmark = pytest.mark.skipif(not extension.isas(), reason="no kernels for this CPU")
START, END, WORDS, WIDTH, MEMORY = 2, 3, 24, 32, 32
ALWAYS = (1.0, 0.0, 0.0)  # costs by which everything is proposed


def decoder(rng, width=WIDTH, recurrent=False, positions=40, qparams=None):
    """One layer of random weights: self-attention or a recurrence, and cross-attention."""
    table = rng.integers(-127, 128, (WORDS, width)).astype(np.int8)
    norm = LayerNorm(0, np.ones(width, np.float32), np.zeros(width, np.float32), 1e-5, 1)
    own = (
        (Linear(1, dense(rng, width, 2 * width, qparams=qparams), 2), Recurrence(2, 3, 0))
        if recurrent
        else (Linear(1, dense(rng, width, 3 * width, qparams=qparams), 2), SelfAttention(2, 2, 3))
    )
    return DecoderProgram(
        [
            Embedding(table, np.full(WORDS, 0.02, np.float32), floats(rng, positions, width, scale=0.3), 0),
            norm,
            *own,
            Linear(3, dense(rng, width, width, qparams=qparams), 4, residual=0),
            Linear(4, dense(rng, width, width, qparams=qparams), 5),
            CrossAttention(5, dense(rng, MEMORY, 2 * width), 2, 6),
            Linear(6, dense(rng, width, width, qparams=qparams), 7, residual=4),
            Vocabulary(7, dense(rng, width, WORDS, scale=3.0, qparams=qparams)),
        ],
        MEMORY,
    )


def draft(rng, teacher, width=32, words=False):
    small = decoder(rng, width, recurrent=True, positions=9)
    lists = None
    if words:
        offsets = np.arange(WORDS + 1, dtype=np.int64)
        targets = rng.integers(0, WORDS, WORDS).astype(np.int32)
        lists = DraftWords(np.array([END, 5, 6, 9], np.int32), offsets, targets)
    return DraftProgram(small, dense(rng, WIDTH, width, qparams=teacher.vocabulary.layer.qparams), lists)


class Translator(NativeTranslator):
    """A translator of programs instead of a graph."""

    def __init__(self, made, isa=""):
        self.threads, self.longest, self.positions = 1, 60, made.positions
        self._decoder = native.compile_program(made, isa)
        self._encoder = native.compile_program(encoder(), isa)

    def greedy(self, sources, limits, **options):
        return self.translate(sources, limits, start=START, end=END, **{"beam": 1, "slots": 4, **options})


def encoder():
    rng = np.random.default_rng(4)
    table = rng.integers(-127, 128, (WORDS, MEMORY)).astype(np.int8)
    return EncoderProgram(
        [
            Embedding(table, np.full(WORDS, 0.02, np.float32), floats(rng, 60, MEMORY, scale=0.3), 0),
            Linear(0, dense(rng, MEMORY, MEMORY), 1),
        ]
    )


@every_isa
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_packed_steps_are_the_same_bits_as_single_ones(isa, recurrent, fixed):
    rng = np.random.default_rng(3)
    made = decoder(rng, recurrent=recurrent, qparams=StaticQParams(0.03, 120) if fixed else None)
    translator = Translator(made, isa)
    sources = [rng.integers(4, WORDS, length).astype(np.int32) for length in rng.integers(2, 20, 24)]
    limits = rng.integers(1, 40, 24)
    plain = translator.greedy(sources, limits)
    sources += [np.array([*tokens[:20], END], np.int32) for [(tokens, _)] in plain]  # some copy what comes
    limits = np.concatenate([limits, limits])
    plain = translator.greedy(sources, limits)
    for copies, small in (
        (True, None),
        (False, draft(rng, made)),
        (False, draft(rng, made, words=True)),
        (True, draft(rng, made)),
    ):
        speculation = translator.speculation(copies, small, ALWAYS)
        for slots, threads in ((1, 1), (3, 1), (48, 2)):
            translator.threads = threads
            assert translator.greedy(sources, limits, slots=slots, speculation=speculation) == plain
        steps, proposed, accepted = speculation.counts
        assert 0 < accepted < proposed and steps < proposed
    assert len({len(tokens) for [(tokens, _)] in plain}) > 5


def test_tokens_are_proposed_where_they_pay():
    rng = np.random.default_rng(5)
    made = decoder(rng)
    translator = Translator(made)
    sources = [rng.integers(4, WORDS, 9).astype(np.int32)] * 6
    for costs, slots, pays in (
        ((60.0, 10.0, 4.0), 1, True),
        ((60.0, 59.0, 4.0), 1, False),
        ((60.0, 10.0, 4.0), 6, False),
    ):
        speculation = translator.speculation(copies=True, costs=costs)
        translator.greedy(sources, [30] * 6, slots=slots, speculation=speculation)
        assert (speculation.counts[1] > 0) == pays
    assert translator.speculation(draft=draft(rng, made)).costs[2] > 0  # measured


def test_copies_are_what_follows_in_the_source():
    """A decoder that turns in circles, and a source that has one of its circles."""
    rng = np.random.default_rng(3)
    translator = Translator(decoder(rng))
    [[(tokens, _)]] = translator.greedy([np.array([5, 6], np.int32)], [40])
    speculation = translator.speculation(copies=True, costs=(1.0, 0.05, 0.0))
    source = np.array([*tokens[:30], END], np.int32)
    for _ in range(3):
        translator.greedy([source], [40], speculation=speculation)
    steps, proposed, accepted = speculation.counts
    assert proposed >= accepted > 0 and steps > 0


def arrays(rng, width=32, hidden=48, layers=2, free=False):
    """The weights of a draft."""
    shapes = {"embed.weight": (width, WIDTH), "positions": (4, width), "cell.weight": (layers * width, WIDTH)}
    shapes |= {"cell.bias": (layers * width,), "project.weight": (WIDTH, width), "bias": (WORDS,)}
    shapes |= {"free.weight": (WORDS, width)} if free else {}
    norms = ["norm"]
    for i in range(layers):
        norms += [f"layers.{i}.{name}_norm" for name in ("cell", "cross", "feed")]
        for name, inputs, outputs in (
            *((name, width, width) for name in ("forget", "query", "output")),
            *((name, MEMORY, width) for name in ("keys", "values")),
            ("inner", width, hidden),
            ("outer", hidden, width),
        ):
            shapes |= {f"layers.{i}.{name}.weight": (outputs, inputs), f"layers.{i}.{name}.bias": (outputs,)}
        shapes[f"layers.{i}.value.weight"] = (width, width)
    shapes |= {f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")}
    return quantize_arrays({name: floats(rng, *shape, scale=0.2) for name, shape in shapes.items()})


@pytest.mark.parametrize("free", [False, True])
def test_a_draft_is_built_from_its_file(free):
    rng = np.random.default_rng(6)
    made = decoder(rng, qparams=StaticQParams(0.03, 120))
    translator = Translator(made)
    sources = [rng.integers(4, WORDS, 9).astype(np.int32) for _ in range(6)]
    content = arrays(rng, free=free)
    plain = translator.greedy(sources, [30] * 6)
    words = {"words.common": np.arange(3, 9), "words.offsets": np.arange(WORDS + 1), "words.targets": np.arange(WORDS)}
    for tensors in (content, content | words):
        speculation = translator.speculation(draft=build_draft(tensors, made), costs=ALWAYS)
        assert translator.greedy(sources, [30] * 6, speculation=speculation) == plain
        assert speculation.counts[1] >= speculation.counts[0] > 0
    other = decoder(rng, qparams=StaticQParams(0.04, 120))
    with pytest.raises(RequestError, match="its cells are of another decoder"):
        translator.speculation(draft=build_draft(content, other))
    with pytest.raises(RequestError, match="a state of 32"):
        build_draft(content | {name: array[:32] for name, array in content.items() if name.startswith("cell.")}, made)
    for lacking in ("norm.bias", "layers.1.inner.weight", "embed.weight.scale"):
        with pytest.raises(RequestError, match="--preset draft"):
            build_draft({name: array for name, array in content.items() if name != lacking}, made)
    with pytest.raises(RequestError, match="proposals are for another decoder"):
        Translator(made).greedy(sources, [30] * 6, speculation=speculation)
