"""Phrases that a translation contains: constrained beam search, the reference of native search/phrases.cpp.

Post and Vilar 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation". The beams of a step are chosen
from banks: candidates with the same number of tokens of the phrases. The largest bank always has a beam, so that all
phrases come where the length permits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.translation.search.controls.words import BEGINS, ENDS

Phrases = Sequence[tuple[int, ...]]


def contains(tokens: Sequence[int], phrase: Sequence[int], marks: bytes | None = None, end: int | None = None) -> bool:
    """Tells whether a translation contains a phrase.

    Args:
        tokens: The translation.
        phrase: Tokens of the phrase.
        marks: Result of `word_marks`: the phrase is no part of a longer word; None: it may be.
        end: Number of tokens before which it ends; None: all.
    """
    size, expected = len(phrase), tuple(phrase)
    return any(
        tuple(tokens[i : i + size]) == expected
        and _is_apart(tokens[i - 1 : i], phrase[:1], marks)
        and _is_apart(phrase[-1:], tokens[i + size : i + size + 1], marks)
        for i in range((len(tokens) if end is None else end) - size + 1)
    )


def _is_apart(before: Sequence[int], after: Sequence[int], marks: bytes | None) -> bool:
    """Returns whether words end between two tokens, or there are none."""
    return marks is None or not before or not after or bool(marks[before[0]] & ENDS or marks[after[0]] & BEGINS)


class PhraseState:
    """The phrases of a translation that it has so far.

    Args:
        phrases: Token sequences.
        tokens: Tokens of the translation.
        marks: See `contains`.
    """

    def __init__(self, phrases: Phrases, tokens: Sequence[int], marks: bytes | None = None) -> None:
        self.phrases, self._tokens, self._marks = phrases, tuple(tokens), marks
        self.progress = [_progress(phrase, self._tokens, marks) for phrase in phrases]

    @property
    def count(self) -> int:
        """Number of phrases that it contains."""
        return sum(progress == len(phrase) for progress, phrase in zip(self.progress, self.phrases, strict=True))

    @property
    def complete(self) -> bool:
        """Whether it contains all."""
        return self.count == len(self.phrases)

    @property
    def next_tokens(self) -> set[int]:
        """Tokens that continue a phrase, or begin one."""
        open_ones = [(p, k) for p, k in zip(self.phrases, self.progress, strict=True) if k < len(p)]
        return {token for phrase, progress in open_ones for token in (phrase[progress], phrase[0])}

    @property
    def is_open(self) -> bool:
        """Whether it contains all, but a token that continues the last word would remove a phrase."""
        before = len(self._tokens) - 1
        return (
            self._marks is not None
            and self.complete
            and any(
                self._tokens[-len(phrase) :] == tuple(phrase)
                and not self._marks[phrase[-1]] & ENDS
                and not contains(self._tokens, phrase, self._marks, before)
                for phrase in self.phrases
            )
        )

    @property
    def bank(self) -> int:
        """Tokens of the phrases that it contains, and of one that it ends with the beginning of."""
        contained = sum(k for p, k in zip(self.phrases, self.progress, strict=True) if k == len(p))
        return contained + max((k for p, k in zip(self.phrases, self.progress, strict=True) if k < len(p)), default=0)


def _progress(phrase: tuple[int, ...], tokens: tuple[int, ...], marks: bytes | None) -> int:
    """Returns how many tokens of a phrase end a translation; all if it is contained."""
    size = len(phrase)
    if contains(tokens, phrase, marks):
        return size
    for k in range(min(size - 1, len(tokens)), 0, -1):
        if tokens[-k:] == phrase[:k] and _is_apart(tokens[:-k][-1:], phrase[:1], marks):
            return k
    return 0


def allocate(banks: Sequence[int], beam: int) -> list[int]:
    """Chooses the candidates to continue, in turn from the largest, the smallest and intermediate banks.

    Args:
        banks: Bank of each candidate, the likeliest candidate first.
        beam: Number of candidates to choose.

    Returns:
        Their places, in order.
    """
    members: dict[int, list[int]] = {}
    for place, bank in enumerate(banks):
        members.setdefault(bank, []).append(place)
    ordered = [members[bank] for bank in sorted(members, reverse=True)]
    kept = min(len(ordered), beam)
    chosen = [ordered[i * (len(ordered) - 1) // (kept - 1) if kept > 1 else 0] for i in range(kept)]
    ranks = range(max(map(len, chosen), default=0))
    return sorted([bank[rank] for rank in ranks for bank in chosen if rank < len(bank)][:beam])


class Candidates(NamedTuple):
    """Continuations of the beams of one sentence: those that end, then those that continue.

    Attributes:
        scores: float64 [n].
        origins: Beam of each, int64 [n].
        tokens: int64 [n].
        running: Score of the likeliest one that goes on and contains all phrases; -inf: none.
    """

    scores: NDArray[np.float64]
    origins: NDArray[np.int64]
    tokens: NDArray[np.int64]
    running: float


def constrained_candidates(
    values: NDArray[np.float64],
    scores: NDArray[np.float64],
    history: NDArray[np.int64],
    phrases: Phrases,
    beam: int,
    end: int,
    marks: bytes | None = None,
) -> Candidates:
    """Chooses the continuations of the beams of a sentence with phrases.

    Args:
        values: Log probabilities of the next token, -inf for those that must not follow, [beams, vocabulary].
        scores: Scores of the beams, [beams].
        history: Tokens of the beams, int64 [beams, length].
        phrases: Phrases that the translation contains.
        beam: Beam size.
        end: End token.
        marks: See `contains`.

    Returns:
        At most `beam` that end, and at most `beam` that go on.
    """
    candidates = []
    for origin, (row, tokens) in enumerate(zip(values, history.tolist(), strict=True)):
        before = PhraseState(phrases, tokens, marks)
        demanded = before.next_tokens | ({end} if before.is_open else set())
        count = min(2 * beam + len(demanded), len(row))
        likely = np.argpartition(-row, count - 1)[:count].tolist()
        likely = sorted((token for token in likely if token not in demanded), key=lambda token: (-row[token], token))
        for token in (*likely[: 2 * beam], *demanded):
            if row[token] > -np.inf and scores[origin] > -np.inf:
                state = PhraseState(phrases, [*tokens, token], marks)
                candidates.append((scores[origin] + row[token], origin, token, state))
    candidates.sort(key=lambda one: (-one[0], one[1], one[2]))
    ends = [one for one in candidates if one[2] == end]
    whole = [one for one in candidates if one[3].complete]
    ends = [one for one in ends if not one[3].complete or any(one is other for other in whole[:beam])][:beam]
    others = [one for one in candidates if one[2] != end]
    others = [others[place] for place in allocate([one[3].bank for one in others], beam)]
    columns = [*zip(*(one[:3] for one in (*ends, *others)), strict=True)] or [(), (), ()]
    running = next((one[0] for one in others if one[3].complete), -np.inf)
    return Candidates(
        np.array(columns[0], np.float64), np.array(columns[1], np.int64), np.array(columns[2], np.int64), running
    )
