"""Beam search, over steps that are tables."""

import hashlib
import json

import numpy as np
import pytest

from pipelines.core.errors import RequestError, ZooError
from zoo.translation.search.beam_search import beam_search
from zoo.translation.search.config import SearchConfig, limit

START, END, WORDS = 2, 3, 12


def logits_of(sentence: int, prefix: tuple[int, ...], ends: float = 0.0) -> np.ndarray:
    """Random, but always the same for the same words; `ends` makes sentences shorter."""
    seed = hashlib.sha256(repr((sentence, prefix)).encode()).digest()[:8]
    logits = np.random.default_rng(int.from_bytes(seed)).normal(0, 2, WORDS).astype(np.float32)
    logits[END] += ends
    return logits


class Table:
    """A step that looks the logits up, and notes how many rows it was asked for."""

    def __init__(self, sentences, ends: float = 0.0):
        self.prefixes = [(sentence,) for sentence in sentences]
        self.ends, self.rows = ends, []

    def __call__(self, tokens, parents):
        self.prefixes = [(*self.prefixes[parent], int(token)) for token, parent in zip(tokens, parents, strict=True)]
        self.rows.append(len(tokens))
        return np.stack([logits_of(sentence, prefix, self.ends) for sentence, *prefix in self.prefixes])


def reference(sentence: int, most: int, beam: int, penalty: float, best: int, ends: float):
    """The same search for one sentence, with lists, as it is told in words."""
    beams, done, topped = [((START,), 0.0)], [], False
    for length in range(1, most + 1):
        candidates = []
        for prefix, score in beams:
            logits = logits_of(sentence, list(prefix), ends).astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum())
            candidates += [((*prefix, word), score + logs[word]) for word in range(WORDS)]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * beam]
        for prefix, score in candidates[:beam]:
            if prefix[-1] == END or length == most:
                words = [*prefix[1:-1]] if prefix[-1] == END else [*prefix[1:]]
                done.append((words, score / length**penalty))
        topped |= candidates[0][0][-1] == END
        if (len(done) >= beam) if penalty else (topped and len(done) >= best):
            break
        beams = [candidate for candidate in candidates if candidate[0][-1] != END][:beam]
    return sorted(done, key=lambda candidate: -candidate[1])[:best]


@pytest.mark.parametrize("beam", [1, 2, 4, 6])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("ends", [-2.0, 2.0])
def test_a_batch_finds_what_the_search_of_each_sentence_finds(beam, penalty, ends):
    sentences, limits, best = range(7), np.array([9, 3, 12, 1, 7, 2, 10]), max(1, beam // 2)
    results = beam_search(
        Table(sentences, ends), limits, start=START, end=END, beam=beam, length_penalty=penalty, best=best
    )
    for sentence, most, hypotheses in zip(sentences, limits, results, strict=True):
        wanted = reference(sentence, most, beam, penalty, best, ends)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for tokens, _ in wanted]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
            [score for _, score in wanted], abs=1e-4
        )


def test_a_beam_of_one_is_greedy_search():
    results = beam_search(Table(range(5)), np.full(5, 20), start=START, end=END, beam=1)
    for sentence, (hypothesis,) in enumerate(results):
        prefix = [START]
        while prefix[-1] != END and len(prefix) <= 20:
            prefix.append(int(logits_of(sentence, prefix).argmax()))
        assert hypothesis.tokens == [token for token in prefix[1:] if token != END]


def test_finished_sentences_leave_the_batch():
    step = Table(range(4))
    beam_search(step, np.array([1, 2, 4, 6]), start=START, end=END, beam=2)
    assert step.rows[0] == 4  # one row a sentence, until its beams differ
    assert step.rows[1] <= 3 * 2
    assert step.rows == [step.rows[0], *sorted(step.rows[1:], reverse=True)]
    assert len(step.rows) <= 6


def test_no_sentence_is_longer_than_its_limit_and_scores_fall():
    results = beam_search(Table(range(6), ends=-50.0), np.arange(1, 7), start=START, end=END, beam=4, best=3)
    for most, hypotheses in enumerate(results, 1):
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [most] * 3
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == 3


def test_a_sentence_that_ends_at_once_has_no_words_and_a_score():
    (ranked,) = beam_search(Table([0], ends=50.0), np.array([5]), start=START, end=END, beam=1)
    assert ranked[0].tokens == []
    assert ranked[0].score == pytest.approx(0, abs=1e-6)
    assert beam_search(Table([]), np.zeros(0, np.int64), start=START, end=END) == []


@pytest.mark.parametrize(
    ("beam", "best", "said"), [(0, 1, "beam 0"), (2, 3, "n-best 3"), (7, 1, "half of the 12 words")]
)
def test_an_impossible_beam_is_refused(beam, best, said):
    with pytest.raises(RequestError, match=said):
        beam_search(Table([0]), np.array([5]), start=START, end=END, beam=beam, best=best)


def test_logits_that_are_no_numbers_are_told():
    with pytest.raises(ZooError, match="NaN"):
        beam_search(
            lambda tokens, parents: np.full((len(tokens), WORDS), np.nan, np.float32),
            np.array([5]),
            start=START,
            end=END,
        )


def test_the_limit_grows_with_the_source():
    assert [limit(source, 512) for source in (1, 20, 400)] == [12, 50, 512]


def test_rules_are_kept_as_plain_values():
    rules = SearchConfig(
        "transformers", beam=6, early_stopping="never", prefix=(7,), banned=(5, 6), least=2, forced_end=True
    )
    assert SearchConfig.from_json(json.loads(json.dumps(rules.to_json()))) == rules
    assert SearchConfig().to_json() == {}
    assert SearchConfig().is_default
    assert SearchConfig(beam=2, length_penalty=0.5, most=9).is_default
    assert not rules.is_default
    for wrong in ({"kind": "other"}, {"magic": 1}):
        with pytest.raises(RequestError, match="expected those of zoo import"):
            SearchConfig.from_json(wrong)
