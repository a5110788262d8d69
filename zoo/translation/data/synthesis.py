"""Sentences that read like those of a text, for a teacher to translate where there are too few to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.parallel_text import END, START, Tokens

CONTEXT = 3  # tokens that the next is drawn after, at most
DRAWN = 8192  # sentences that are written at once


class Continuations:
    """What follows every context of `length` tokens in a text, as an n-gram model counts it.

    keys int64 [contexts], sorted; of context i the tokens at first[i] to first[i] + counts[i] of `tokens` follow, which
    are distinct[i] different ones.
    """

    def __init__(self, stream: NDArray[np.int64], length: int, base: int) -> None:
        """stream: tokens, each sentence behind `length` or more times `START`. base: greater than every token."""
        context = np.zeros(len(stream) - CONTEXT, np.int64)
        for back in range(length, 0, -1):
            context = context * base + stream[CONTEXT - back : len(stream) - back]
        follower = stream[CONTEXT:]
        kept = follower != START
        order = np.lexsort((follower[kept], context[kept]))
        context, self.tokens = context[kept][order], follower[kept][order]
        self.keys, self.first, self.counts = np.unique(context, return_index=True, return_counts=True)
        new = np.ones(len(context), bool)
        new[1:] = (context[1:] != context[:-1]) | (self.tokens[1:] != self.tokens[:-1])
        self.distinct = np.add.reduceat(new.astype(np.int64), self.first)
        self.length, self.base = length, base

    def draw(self, past: NDArray[np.int64], random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """past int64 [n, CONTEXT] -> (a token after each, where it is to be taken: Witten and Bell's c / (c + t))."""
        key = np.zeros(len(past), np.int64)
        for column in range(CONTEXT - self.length, CONTEXT):
            key = key * self.base + past[:, column]
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        count = self.counts[at]
        token = self.tokens[self.first[at] + (random.random(len(past)) * count).astype(np.int64)]
        return token, (self.keys[at] == key) & (random.random(len(past)) < count / (count + self.distinct[at]))


def imitations(sentences: Sequence[Tokens], count: int, *, seed: int = 0, longest: int = 128) -> list[Tokens]:
    """`count` sentences at most (int32 [tokens], `END` last), none of them among `sentences`, none twice, none of more
    than `longest` tokens.

    They are drawn from an n-gram model of `CONTEXT` tokens before the next, interpolated with its shorter ones as
    Witten and Bell 1991 do ("The Zero-Frequency Problem", method C). The same seed gives the same sentences.
    """
    random, base = np.random.default_rng(seed), 1 + max(int(each.max()) for each in sentences)
    start = np.full(CONTEXT, START, np.int64)
    stream = np.concatenate([part for each in sentences for part in (start, each)])
    levels = [Continuations(stream, length, base) for length in range(CONTEXT, -1, -1)]
    seen, found = {each.tobytes() for each in sentences}, []
    for _ in range(0, 4 * count, DRAWN):  # a text so small that it repeats itself gives fewer
        written = np.full((DRAWN, CONTEXT + longest), START, np.int32)
        open_rows = np.arange(DRAWN)
        for position in range(CONTEXT, CONTEXT + longest):
            past = written[open_rows, position - CONTEXT : position].astype(np.int64)
            token, missing = np.zeros(len(past), np.int64), np.ones(len(past), bool)
            for level in levels:
                drawn, taken = level.draw(past[missing], random)
                rows = np.flatnonzero(missing)
                if level.length == 0:
                    taken[:] = True
                token[rows[taken]] = drawn[taken]
                missing[rows[taken]] = False
            written[open_rows, position] = token
            open_rows = open_rows[token != END]
            if not len(open_rows):
                break
        for row in written[np.setdiff1d(np.arange(DRAWN), open_rows), CONTEXT:]:
            sentence = row[: int(np.argmax(row == END)) + 1].copy()
            if len(sentence) > 1 and sentence.tobytes() not in seen:
                seen.add(sentence.tobytes())
                found.append(sentence)
        if len(found) >= count:
            break
    return found[:count]
