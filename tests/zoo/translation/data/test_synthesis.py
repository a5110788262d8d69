"""Sentences drawn from n-grams."""

from collections import Counter

import numpy as np

from zoo.translation.data.synthesis import CONTEXT, NGramCounts, sample_sentences
from zoo.translation.data.tokens import END, START


def sentences(*texts: str) -> list[np.ndarray]:
    """A token a letter."""
    return [np.array([*(ord(letter) - ord("a") + 4 for letter in text), END], np.int32) for text in texts]


def test_imitations_are_new_end_and_follow_the_text():
    text = sentences("abcd", "abce", "bbcd", "xbcda", "abc")
    sampled = sample_sentences(text, 40, seed=3)
    assert 5 < len(sampled) <= 40
    assert all(
        sentence.dtype == np.int32 and sentence[-1] == END and (sentence[:-1] != END).all() for sentence in sampled
    )
    keys = [sentence.tobytes() for sentence in sampled]
    assert len(set(keys)) == len(keys) and not {*keys} & {sentence.tobytes() for sentence in text}
    assert {*np.concatenate(sampled).tolist()} <= {*np.concatenate(text).tolist()}
    again, other = sample_sentences(text, 40, seed=3), sample_sentences(text, 40, seed=4)
    assert [sentence.tobytes() for sentence in again] == keys != [sentence.tobytes() for sentence in other]
    assert all(len(sentence) <= 4 for sentence in sample_sentences(text, 40, longest=4))


def test_a_text_that_repeats_itself_gives_few():
    assert sample_sentences(sentences("a", "a"), 5, longest=1) == []


def test_tokens_are_drawn_as_often_as_witten_and_bell_say():
    """Of a context seen c times with t different followers its own are taken with the probability c / (c + t)."""
    text = sentences("ab", "ab", "ab", "ac")
    stream = np.concatenate([part for sentence in text for part in (np.full(CONTEXT, START), sentence)])
    level = NGramCounts(stream, 1, 30)
    past = np.full((40_000, CONTEXT), 4)  # after "a": three times "b", once "c"
    token, taken = level.draw(past, np.random.default_rng(0))
    counts = Counter(token.tolist())
    assert counts.keys() == {5, 6} and abs(counts[5] / len(past) - 3 / 4) < 0.01
    assert abs(taken.mean() - 4 / (4 + 2)) < 0.01
    _, taken = level.draw(np.full((10, CONTEXT), 20), np.random.default_rng(0))
    assert not taken.any()


def test_contexts_are_counted_as_they_stand():
    text = sentences("abab", "ab")
    stream = np.concatenate([part for ids in text for part in (np.full(CONTEXT, START), ids)])
    for length in range(CONTEXT + 1):
        level = NGramCounts(stream, length, 30)
        wanted: dict[tuple[int, ...], Counter[int]] = {}
        for sentence in text:
            row = [START] * CONTEXT + sentence.tolist()
            for i in range(CONTEXT, len(row)):
                wanted.setdefault(tuple(row[i - length : i]), Counter())[row[i]] += 1
        assert len(level.keys) == len(wanted)
        for context, followers in wanted.items():
            key = sum(token * 30 ** (length - 1 - i) for i, token in enumerate(context))
            position = int(np.searchsorted(level.keys, key))
            assert level.keys[position] == key
            there = level.tokens[level.first[position] : level.first[position] + level.counts[position]]
            assert Counter(there.tolist()) == followers and level.distinct[position] == len(followers)
