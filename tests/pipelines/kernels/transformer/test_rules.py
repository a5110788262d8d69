"""The native search by other toolkits' rules, and over shortlists, against the numpy one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch
from helpers.tiers import one_in
from helpers.translation_networks import WORDS, network

from pipelines.core.errors import RequestError
from pipelines.engines.native.translation import NativeTranslator
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file, reference
from pipelines.kernels.transformer.mapping.from_graph import programs
from zoo.translation.data.tokens import END, START
from zoo.translation.export.freeze import export
from zoo.translation.search.beam_search import beam_search
from zoo.translation.search.config import Demands, SearchConfig
from zoo.translation.search.controls.variants import sampling_weights, search_variant
from zoo.translation.search.controls.words import BEGINS

pytestmark = pytest.mark.skipif(not extension.isas(), reason="no kernels for this CPU")
RULES = {
    "own": SearchConfig(),
    "no penalty": SearchConfig(length_penalty=0.0),
    "transformers": SearchConfig(kind="transformers"),
    "early": SearchConfig(kind="transformers", early_stopping=True, length_penalty=0.6),
    "never early": SearchConfig(kind="transformers", early_stopping="never", length_penalty=2.0),
    "short ones first": SearchConfig(kind="transformers", length_penalty=-1.0),
    "prefix": SearchConfig(kind="transformers", prefix=(7,), banned=(5, 9, 12), least=6),
    "no repeats": SearchConfig(kind="transformers", forced_end=True, no_repeat_ngram=2),
    "no repeats of the start": SearchConfig(kind="transformers", no_repeat_ngram=2, counted=(12, 30, 12)),
    "marian": SearchConfig(kind="marian", length_penalty=0.7, word_penalty=0.1),
    "marian, no penalty": SearchConfig(kind="marian", length_penalty=0.0, banned=(4,)),
    "no token twice": SearchConfig(no_repeat_ngram=1, banned=(4,)),
    "renormalized": SearchConfig(kind="transformers", banned=(5, 9, 12), renormalize=True),
    "renormalized repeats": SearchConfig(kind="transformers", forced_end=True, no_repeat_ngram=2, renormalize=True),
    "repetitions": SearchConfig(kind="transformers", repetition_penalty=1.3, counted=(END,), banned=(4, 7)),
    "preferred repetitions": SearchConfig(kind="transformers", repetition_penalty=0.8, renormalize=True),
    "bad words": SearchConfig(bad_words=((9,), (12, 30), (12, 12, 31), (5, END)), first_banned=(6, 7, 8, END)),
    "not of the source": SearchConfig(kind="transformers", encoder_no_repeat_ngram=1, least=3),
    "no pairs of the source": SearchConfig(encoder_no_repeat_ngram=2, no_repeat_ngram=3, repetition_penalty=1.2),
    "renormalized marian": SearchConfig(kind="marian", banned=tuple(range(4, 40)), least=6, renormalize=True),
}


class Case:
    """A decoder whose translations end here and there, sentences, and the encoder's results of these."""

    def __init__(self, form: str, bias: float, file: Path) -> None:
        net = network(form, sharp=2.0)
        with torch.no_grad():
            net.output_bias.zero_()
            net.output_bias[END] = bias
        encoder, self.decoder = programs(export(net))
        self.file = file
        program_file.save(file, (encoder, self.decoder))
        rng = np.random.default_rng(0)
        self.sources = [np.array([*rng.integers(4, WORDS, 3 + i % 5), END], np.int32) for i in range(10)]
        self.limits = np.array([2 * len(source) + 6 for source in self.sources])
        self.memories = [reference.encode(encoder, source) for source in self.sources]

    def wanted(self, rules, beam, words=None, demands=None):
        """Translations by the numpy search; sentences whose prefixes have the same length are one batch."""
        demands = demands or [Demands()] * len(self.sources)
        lengths = np.array([len(demand.prefix) for demand in demands])
        wanted = [None] * len(self.sources)
        for length in np.unique(lengths):
            batch = np.flatnonzero(lengths == length).tolist()
            options = {"beam": beam, "best": beam, "length_penalty": rules.length_penalty, "rules": rules}
            options |= {"sources": [self.sources[i].tolist() for i in batch], "demands": [demands[i] for i in batch]}
            decoding = reference.Decoding(self.decoder, [self.memories[i] for i in batch])
            options["allowed"] = words and [words[i] for i in batch]
            results = beam_search(decoding, self.limits[batch], start=START, end=END, **options)
            for i, hypotheses in zip(batch, results, strict=True):
                wanted[i] = hypotheses
        return wanted

    def check(self, found, rules, beam, words=None, demands=None):
        for pairs, wanted in zip(found, self.wanted(rules, beam, words, demands), strict=True):
            assert [tokens for tokens, _ in pairs] == [one.tokens for one in wanted]
            np.testing.assert_allclose([score for _, score in pairs], [one.score for one in wanted], atol=1e-5)
        assert len({len(tokens) for scored in found for tokens, _ in scored}) > 1


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case("gelu", 0.3, tmp_path_factory.mktemp("case") / "programs.zoo")


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_the_native_search_follows_the_rules(case, name, beam):
    rules = RULES[name]
    options = {
        "beam": beam,
        "best": beam,
        "length_penalty": rules.length_penalty,
        "rules": rules.native_options,
        "slots": 3,
    }
    translator = NativeTranslator(case.file)
    results = translator.translate(case.sources, case.limits, start=START, end=END, **options)
    case.check(results, rules, beam)
    speculation = translator.speculation(copies=True, costs=(1.0, 0.0, 0.0))  # proposes wherever it can
    options["speculation"] = speculation
    assert translator.translate(case.sources, case.limits, start=START, end=END, **options) == results
    assert (speculation.counts[0] > 0) == (beam == 1)
    for tokens in (tokens for pairs in results for tokens, _ in pairs):
        assert not set(tokens) & set(rules.banned) and tuple(tokens[: len(rules.prefix)]) == rules.prefix


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", ["own", "never early", "repetitions", "marian", "bad words"])
def test_translations_begin_with_the_prefix_of_their_sentence(case, name, beam):
    rules = replace(RULES[name], prefix=(11,))
    draw = np.random.default_rng(3)
    demands = [Demands(tuple(draw.integers(4, WORDS, i % 4).tolist())) for i in range(len(case.sources))]
    options = {"start": START, "end": END, "beam": beam, "best": beam, "demands": demands, "slots": 3}
    options |= {"length_penalty": rules.length_penalty, "rules": rules.native_options}
    translator = NativeTranslator(case.file)
    results = translator.translate(case.sources, case.limits, **options)
    case.check(results, rules, beam, demands=demands)
    for pairs, asked in zip(results, demands, strict=True):
        assert all(tuple(tokens[: 1 + len(asked.prefix)]) == (11, *asked.prefix) for tokens, _ in pairs)
    speculation = translator.speculation(copies=True, costs=(1.0, 0.0, 0.0))
    assert translator.translate(case.sources, case.limits, speculation=speculation, **options) == results
    with contextlib.closing(
        translator.stream(**{name: option for name, option in options.items() if name != "demands"})
    ) as stream:
        numbers = stream.submit(case.sources, case.limits, demands=demands)
        streamed = {}
        while len(streamed) < len(numbers):
            streamed |= {number: scored for number, scored, _ in stream.finished(5.0)}
    assert [streamed[number] for number in numbers] == results
    with pytest.raises(RequestError, match="no token after"):
        translator.translate(case.sources[1:2], [2], **options | {"demands": demands[1:2]})


@pytest.mark.parametrize("beam", one_in(2, [2, 4, 7]))
@pytest.mark.parametrize("name", ["own", "repetitions", "marian", "renormalized repeats", "never early"])
def test_translations_contain_the_phrases_of_their_sentence(case, name, beam):
    rules, draw = RULES[name], np.random.default_rng(beam)
    free = np.setdiff1d(np.arange(4, WORDS), rules.banned)
    demands = []
    for i in range(len(case.sources)):  # of 0 to 3 phrases; the last one begins with a phrase
        sizes = draw.integers(1, 4, i % 4)
        words = draw.choice(free, sum(sizes), replace=False).tolist()
        phrases = tuple(tuple(words[sum(sizes[:k]) : sum(sizes[: k + 1])]) for k in range(len(sizes)))
        demands.append(Demands(phrases[0] if i == 9 else (), phrases, ("",) * len(phrases)))
    if beam < 7:  # where no phrase is part of a longer word: words begin with the first token of a phrase and the end
        marks = draw.integers(0, 4, WORDS, np.uint8)
        marks[[END, *(phrase[0] for demand in demands for phrase in demand.phrases)]] |= BEGINS
        demands = [demand._replace(marks=marks.tobytes()) for demand in demands]
    options = {"start": START, "end": END, "beam": beam, "best": beam, "demands": demands, "slots": 3}
    options |= {"length_penalty": rules.length_penalty, "rules": rules.native_options}
    limits = case.limits + 4
    results = NativeTranslator(case.file).translate(case.sources, limits, **options)
    case.limits, before = limits, case.limits
    case.check(results, rules, beam, demands=demands)
    case.limits = before
    for pairs, asked in zip(results, demands, strict=True):
        assert not asked.unmet(pairs[0][0])
    alone = NativeTranslator(case.file).translate(case.sources[7:8], limits[7:8], **options | {"demands": demands[7:8]})
    assert alone[0] == results[7]


@pytest.mark.parametrize("beam", [2, 5])
def test_phrases_are_whole_words(case, beam):
    """Of the likeliest translations a token is asked for that is followed by another one of its word there."""
    options = {"start": START, "end": END, "beam": beam, "best": beam}
    native = NativeTranslator(case.file)
    free = [pairs[0][0] for pairs in native.translate(case.sources, case.limits, **options)]
    demands = []
    for tokens in free:
        marks = np.full(WORDS, BEGINS, np.uint8)  # no word has two tokens, but for those behind the phrase
        marks[tokens[1:2]] = 0
        demands.append(Demands((), (tuple(tokens[:1]),) if len(tokens) > 1 else (), ("",), (), marks.tobytes()))
    assert any(demand.unmet(tokens) for demand, tokens in zip(demands, free, strict=True) if demand.phrases)
    demands = [demand if demand.phrases else Demands() for demand in demands]
    results = []
    for i, asked in enumerate(demands):
        results += native.translate(
            case.sources[i : i + 1], case.limits[i : i + 1], demands=[asked], rules={"kind": "ctranslate2"}, **options
        )
    case.check(results, SearchConfig(), beam, demands=demands)
    assert not any(demand.unmet(one[0][0]) for demand, one in zip(demands, results, strict=True))
    asked = demands[0]._replace(phrases=((20,),), texts=("",), marks=bytes(WORDS - 1))
    with pytest.raises(RequestError, match="word_marks are not of all tokens"):
        native.translate(case.sources[:1], case.limits[:1], demands=[asked], **options)


def test_phrases_that_do_not_fit_come_in_part(case):
    asked = Demands((), ((20, 21, 22), (30, 31, 32)), ("a", "b"))
    options = {"start": START, "end": END, "beam": 4, "demands": [asked]}
    (pairs,) = NativeTranslator(case.file).translate(case.sources[:1], [5], **options)
    assert len(asked.unmet(pairs[0][0])) == 1
    options["demands"] = [Demands((), ((20, 21), (30, 31)), ("a", "b"))]
    (pairs,) = NativeTranslator(case.file).translate(case.sources[:1], [5], **options)
    assert not options["demands"][0].unmet(pairs[0][0])
    for wrong, why in (({"beam": 1}, "beam of 2"), ({"demands": [Demands((), ((WORDS,),), ("a",))]}, "vocabulary")):
        with pytest.raises(RequestError, match=why):
            NativeTranslator(case.file).translate(case.sources[:1], [5], **options | wrong)


VARIANTS = {
    "diverse": (4, SearchConfig(kind="transformers", groups=2, diversity_penalty=0.7)),
    "a beam a group": (3, SearchConfig(groups=3, diversity_penalty=2.0, repetition_penalty=1.2, banned=(5, 6))),
    "diverse marian": (6, SearchConfig(kind="marian", groups=3, diversity_penalty=0.3, forced_end=True, prefix=(7,))),
    "early": (6, SearchConfig(kind="transformers", groups=2, diversity_penalty=1.0, early_stopping=True, least=4)),
    "sample": (1, SearchConfig(sample=True, seed=3)),
    "samples": (5, SearchConfig(kind="transformers", sample=True, temperature=0.7, top_p=0.9, banned=(7,))),
    "top 4": (4, SearchConfig(sample=True, top_k=4, temperature=1.5, repetition_penalty=1.3, prefix=(8,), seed=2**40)),
    "one token": (2, SearchConfig(sample=True, top_p=0.01, forced_end=True, renormalize=True, banned=(9, 10))),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_samples_and_groups_of_beams_are_those_of_the_reference(case, name):
    beam, rules = VARIANTS[name]
    demands = [Demands(prefix=(20, 21, 22)[: i % 4]) for i in range(len(case.sources))]
    options = {"start": START, "end": END, "beam": beam, "best": beam, "rules": rules.native_options}
    translator = NativeTranslator(case.file)
    results = translator.translate(case.sources, case.limits, demands=demands, slots=3, **options)
    for i, pairs in enumerate(results):
        decoding = reference.Decoding(case.decoder, [case.memories[i]])
        sources = [case.sources[i].tolist()]
        more = {"beam": beam, "best": beam, "length_penalty": 1.0, "rules": rules, "sources": sources}
        limits = case.limits[i : i + 1]
        wanted = search_variant(decoding, limits, start=START, end=END, demands=demands[i : i + 1], **more)[0]
        assert [tokens for tokens, _ in pairs] == [one.tokens for one in wanted]
        np.testing.assert_allclose([score for _, score in pairs], [one.score for one in wanted], atol=1e-5)
        alone = translator.translate(case.sources[i : i + 1], limits, demands=demands[i : i + 1], **options)
        assert alone[0] == pairs
    if rules.sample:
        assert translator.translate(case.sources, case.limits, demands=demands, **options) == results
        options["rules"] = {**options["rules"], "seed": rules.seed + 1}
        assert (translator.translate(case.sources, case.limits, demands=demands, **options) != results) == (beam != 2)


def test_samples_have_the_frequencies_of_their_probabilities(case):
    """First tokens of many samples, beside the warpers of transformers."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    rules = SearchConfig(sample=True, temperature=1.7, top_k=20, top_p=0.8)
    options = {"start": START, "end": END, "beam": 250, "best": 250, "rules": rules.native_options}
    drawn = []
    for seed in range(8):
        options["rules"]["seed"] = seed
        (pairs,) = NativeTranslator(case.file).translate(case.sources[:1], [1], **options)
        drawn += [tokens[0] if tokens else END for tokens, _ in pairs]
    logits = reference.Decoding(case.decoder, case.memories[:1])(np.array([START]), np.array([0]))
    scores = torch.tensor(logits)
    for warper in (
        processors.TemperatureLogitsWarper(1.7),
        processors.TopKLogitsWarper(20),
        processors.TopPLogitsWarper(0.8),
    ):
        scores = warper(None, scores)
    chances = scores.softmax(1)[0].numpy()
    ordered = np.sort(logits[0])[::-1].astype(np.float64)
    np.testing.assert_allclose(np.sort(chances[chances > 0])[::-1], sampling_weights(ordered, rules), atol=1e-6)
    counts = np.bincount(drawn, minlength=len(chances))
    assert not counts[chances == 0].any()
    expected = chances * len(drawn)
    likely = expected > 5
    assert (((counts - expected)[likely] / np.sqrt(expected[likely])) ** 2).sum() < 3 * likely.sum()


@pytest.mark.parametrize("isa", extension.isas())
def test_only_the_words_of_a_shortlist_come(case, isa):
    rng = np.random.default_rng(1)
    words = [
        np.unique([END, *rng.choice(np.arange(4, WORDS), 20 + i, replace=False)]).astype(np.int32)
        for i in range(len(case.sources))
    ]
    translator = NativeTranslator(case.file, isa=isa)
    results = translator.translate(case.sources, case.limits, start=START, end=END, words=words, best=4, slots=4)
    case.check(results, SearchConfig(), 4, words)
    alone = [
        translator.translate([source], [limit], start=START, end=END, words=[allowed], best=4)[0]
        for source, limit, allowed in zip(case.sources, case.limits, words, strict=True)
    ]
    assert results == alone


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("beam", [1, 4])
def test_words_that_sentences_share_change_nothing(case, isa, beam):
    """Some sentences have all shared words and more, one no more, one not all of them, one the whole vocabulary."""
    rng = np.random.default_rng(2)
    shared = np.unique([END, *rng.choice(np.arange(4, WORDS), 20, replace=False)]).astype(np.int32)
    words = [
        np.unique([*shared, *rng.choice(np.arange(4, WORDS), i, replace=False)]).astype(np.int32)
        for i in range(len(case.sources))
    ]
    words[3], words[5] = np.setdiff1d(words[3], shared[-1:]), np.arange(WORDS, dtype=np.int32)
    options = {"start": START, "end": END, "beam": beam, "best": beam}
    translator = NativeTranslator(case.file, isa=isa)
    plain = translator.translate(case.sources, case.limits, words=words, slots=4, **options)
    translator.share_words(shared)
    results = translator.translate(case.sources, case.limits, words=words, slots=4, **options)
    case.check(results, SearchConfig(), beam, words)
    assert [[tokens for tokens, _ in rows] for rows in results] == [[tokens for tokens, _ in rows] for rows in plain]
    alone = [
        translator.translate([source], [limit], words=[allowed], **options)[0]
        for source, limit, allowed in zip(case.sources, case.limits, words, strict=True)
    ]
    assert results == alone
    whole = translator.translate(case.sources, case.limits, slots=3, **options)
    assert whole == NativeTranslator(case.file, isa=isa).translate(case.sources, case.limits, **options)


def test_renormalized_words_of_a_shortlist(case):
    rng = np.random.default_rng(1)
    shared = np.unique([END, *rng.choice(np.arange(4, WORDS), 44, replace=False)]).astype(np.int32)
    words = [
        np.unique([*shared, *rng.choice(np.arange(4, WORDS), i, replace=False)]).astype(np.int32)
        for i in range(len(case.sources))
    ]
    words[3] = np.setdiff1d(np.arange(WORDS, dtype=np.int32), shared[-1:])
    rules = SearchConfig(kind="transformers", banned=tuple(shared[3:6].tolist()), least=7, renormalize=True)
    translator = NativeTranslator(case.file)
    for _ in range(2):
        options = {"start": START, "end": END, "best": 4, "rules": rules.native_options}
        case.check(translator.translate(case.sources, case.limits, words=words, **options), rules, 4, words)
        translator.share_words(shared)


@pytest.mark.parametrize("words", [[], [5, 4], [4, 4], [4, WORDS], [-1, 4]])
def test_shared_words_that_do_not_fit_are_refused(case, words):
    with pytest.raises(RequestError, match="share_words"):
        NativeTranslator(case.file).share_words(np.array(words, np.int32))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([END, 5, 4, 6, 7, 8, 9, 10], "not in order"),
        ([END, 5, 6], "expected at least 8"),
        ([4, 5, 6, 7, 8, 9, 10, 11], "may not end"),
        ([END, 5, 6, 7, 8, 9, 10, WORDS], "none of the vocabulary"),
    ],
)
def test_shortlists_that_do_not_fit_are_refused(case, words, why):
    with pytest.raises(RequestError, match=why):
        NativeTranslator(case.file).translate(
            case.sources[:1], case.limits[:1], start=START, end=END, words=[np.array(words, np.int32)]
        )


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"kind": "fairseq"}, "no rules of fairseq"),
        ({"prefix": [WORDS]}, "none of the vocabulary"),
        ({"least": -1}, "impossible"),
        ({"repetition_penalty": 0.0}, "impossible"),
        ({"bad_words": [[]]}, "no tokens"),
        ({"temperature": 0.0}, "impossible"),
        ({"groups": 3}, "impossible"),
        ({"sample": True, "groups": 2}, "no groups"),
        ({"bad_words": [[5, WORDS]]}, "none of the vocabulary"),
    ],
)
def test_rules_that_do_not_fit_are_refused(case, rules, why):
    with pytest.raises(RequestError, match=why):
        NativeTranslator(case.file).translate(case.sources, case.limits, start=START, end=END, rules=rules)
