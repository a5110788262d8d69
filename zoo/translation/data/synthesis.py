"""Synthetic sentences from an n-gram model of a text, for a teacher to translate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.tokens import END, START, Tokens

CONTEXT = 3  # maximum number of tokens of a context
SAMPLES_AT_ONCE = 8192  # sentences that are sampled together


class NGramCounts:
    """Continuations of every context of a text, as an n-gram model counts them."""

    def __init__(self, stream: NDArray[np.int64], length: int, base: int) -> None:
        """Counts continuations.

        Args:
            stream: Tokens, int64; each sentence follows `length` or more times `START`.
            length: Number of tokens of a context.
            base: Greater than every token.
        """
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
        """Draws continuations.

        Args:
            past: Contexts, int64 [n, CONTEXT].
            random: Random generator.

        Returns:
            A token after each context, int64 [n], and whether it is accepted (Witten and Bell's c / (c + t)), bool [n].
        """
        key = np.zeros(len(past), np.int64)
        for column in range(CONTEXT - self.length, CONTEXT):
            key = key * self.base + past[:, column]
        index = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        count = self.counts[index]
        token = self.tokens[self.first[index] + (random.random(len(past)) * count).astype(np.int64)]
        return token, (self.keys[index] == key) & (random.random(len(past)) < count / (count + self.distinct[index]))


def sample_sentences(sentences: Sequence[Tokens], count: int, *, seed: int = 0, longest: int = 128) -> list[Tokens]:
    """Samples sentences from an interpolated n-gram model with contexts of up to `CONTEXT` tokens.

    Interpolation: Witten and Bell 1991, "The Zero-Frequency Problem", method C. A seed gives the same sentences.

    Args:
        sentences: Sentences of the model, int32.
        count: Maximum number of sentences.
        seed: Seed of the random generator.
        longest: Maximum number of tokens.

    Returns:
        Distinct sentences that are not among `sentences`, int32, `END` last.
    """
    random, base = np.random.default_rng(seed), 1 + max(int(sentence.max()) for sentence in sentences)
    start = np.full(CONTEXT, START, np.int64)
    stream = np.concatenate([part for sentence in sentences for part in (start, sentence)])
    levels = [NGramCounts(stream, length, base) for length in range(CONTEXT, -1, -1)]
    seen, sampled = {sentence.tobytes() for sentence in sentences}, []
    for _ in range(0, 4 * count, SAMPLES_AT_ONCE):  # a small text gives fewer distinct sentences
        written = np.full((SAMPLES_AT_ONCE, CONTEXT + longest), START, np.int32)
        open_rows = np.arange(SAMPLES_AT_ONCE)
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
        for row in written[np.setdiff1d(np.arange(SAMPLES_AT_ONCE), open_rows), CONTEXT:]:
            sentence = row[: int(np.argmax(row == END)) + 1].copy()
            if len(sentence) > 1 and sentence.tobytes() not in seen:
                seen.add(sentence.tobytes())
                sampled.append(sentence)
        if len(sampled) >= count:
            break
    return sampled[:count]
