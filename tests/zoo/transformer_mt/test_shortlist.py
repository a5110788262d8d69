"""Shortlists learned from translated sentences."""

import numpy as np
import pytest

from zoo.transformer_mt.data import END
from zoo.transformer_mt.shortlist import MISSED, MULTIPLE, Shortlist, learned

WORDS = 400


def text(count: int, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sentences whose token s is translated by s + 150, in reverse, and by 5 now and then; of each the end last."""
    sources, targets = [], []
    for _ in range(count):
        source = rng.integers(10, 150, rng.integers(3, 9))
        target = [*(source[::-1] + 150), *([5] if rng.random() < 0.5 else [])]
        sources.append(np.array([*source, END], np.int32))
        targets.append(np.array([*target, END], np.int32))
    return sources, targets


def test_words_that_come_together_are_found_and_frequent_ones_are_everywhere():
    sources, targets = text(3000, np.random.default_rng(0))
    found = learned(sources, targets, (WORDS, WORDS), best=1, shared=False)
    for token in range(10, 150):
        assert found.targets[found.offsets[token] : found.offsets[token + 1]].tolist() == [token + 150]
    assert found.first == MULTIPLE and {5, END} <= {*found.everywhere.tolist()}
    assert {*found.allowed([20, 30, END]).tolist()} >= {170, 180, 5, END}
    again = Shortlist.from_bytes(found.to_bytes())
    assert all(np.array_equal(vars(again)[name], each) for name, each in vars(found).items())


def test_so_many_are_frequent_that_few_words_of_unseen_sentences_are_missing():
    """A third of all words are translated by any of 100, with which no source token goes."""
    rng = np.random.default_rng(1)
    sources, targets = text(3000, rng)
    for each in targets:
        each[:-1] = np.where(rng.random(len(each) - 1) < 1 / 3, rng.integers(300, 400, len(each) - 1), each[:-1])
    found = learned(sources[:2900], targets[:2900], (WORDS, WORDS), best=2, shared=False)
    lists = [{*found.allowed(each.tolist()).tolist()} for each in sources[2900:]]
    missing = [token not in each for each, target in zip(lists, targets[2900:], strict=True) for token in target]
    assert np.mean(missing) < 4 / MISSED
    assert 80 <= found.first <= WORDS  # those hundred have to be everywhere


def test_a_token_brings_along_itself_where_vocabularies_are_one():
    sources, targets = text(200, np.random.default_rng(2))
    found = learned(sources, targets, (WORDS, WORDS), best=1)
    assert 399 in found.allowed([399])


def test_too_little_text_is_refused():
    sources, targets = text(9, np.random.default_rng(3))
    with pytest.raises(ValueError, match="9 pairs"):
        learned(sources, targets, (WORDS, WORDS))
