"""Beam search over any step function, in numpy: the reference for every faster form."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError
from zoo.transformer_mt.data import PAD, POSITIONS

NEVER = -1e30  # the score of what is no hypothesis
GROWTH = (2, 10)  # tokens of a translation for each of its source, and besides, at most
Integers = NDArray[np.int64]
# (tokens, parents) -> logits float32 [rows, vocabulary] of the token that follows. tokens: int64 [rows], the newest of
# every row. parents: int64 [rows], the row of the call before that each one goes on from: rows may swap places, double
# or be gone. In the first call there is one row a sentence.
Step = Callable[[Integers, Integers], NDArray[np.float32]]


class Hypothesis(NamedTuple):
    """A translation without the end token, and its score: the sum of log probabilities divided by length ** penalty,
    the end counted.
    """

    tokens: list[int]
    score: float


def limit(source: int, most: int) -> int:
    """How many tokens the translation of a sentence of `source` tokens may have, its end included: twice as many and
    10, up to `most`.
    """
    factor, more = GROWTH
    return min(factor * source + more, most)


def require(beam: int, best: int, words: int | None = None) -> None:
    """Raise RequestError for a beam that cannot be, with a vocabulary of so many `words`."""
    if not (isinstance(beam, numbers.Integral) and isinstance(best, numbers.Integral) and 1 <= best <= beam):
        raise RequestError(
            f"found beam {beam!r} and n-best {best!r}; wanted a beam of 1 or more, and no more translations than it"
        )
    if words is not None and 2 * beam > words:
        raise RequestError(f"found beam {beam}, wanted at most half of the {words} words in the vocabulary")


def beam_search(
    step: Step, limits: Integers, *, start: int, end: int, beam: int = 4, length_penalty: float = 1.0, best: int = 1
) -> list[list[Hypothesis]]:
    """Translate sentences at once; returns the `best` hypotheses of each, the highest score first. beam=1 is greedy
    search.

    limits: int64 [sentences], most tokens of each, its `end` included. start, end: the tokens around a sentence. In a
    step the 2 * beam likeliest continuations of a sentence's beams are looked at, which leaves `beam` of them if all
    beams end. Those among the first `beam` that end are its hypotheses; a sentence leaves the batch with `beam`
    hypotheses (without a length penalty, when its likeliest beam has ended and there are `best`), or when its limit is
    reached, where all beams end. These are the rules of CTranslate2 (Wu et al. 2016 is the source of the penalty).
    Raises RequestError for an impossible beam, ZooError for logits that are no numbers.
    """
    require(beam, best)
    found: list[list[Hypothesis]] = [[] for _ in limits]
    live = np.arange(len(limits))  # the sentences still in the batch
    scores = np.zeros((len(live), 1))  # [live, width]
    history = np.zeros((len(live), 1, 0), np.int64)  # [live, width, tokens so far]
    topped = np.zeros(len(live), bool)  # whose likeliest beam has ended once
    tokens, parents = np.full(len(live), start), np.arange(len(live))
    for length in itertools.count(1):
        if not len(live):
            break
        logits = step(tokens, parents)
        require(beam, best, logits.shape[1])
        values, words = _likeliest(logits, 2 * beam)
        total = (scores[..., None] + values.reshape(*scores.shape, -1)).reshape(len(live), -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : 2 * beam]
        total, origin = np.take_along_axis(total, order, 1), order // (2 * beam)
        words = np.take_along_axis(words.reshape(len(live), -1), order, 1)
        grown = np.concatenate(
            [np.take_along_axis(history, origin[..., None], 1), words[..., None]], 2
        )  # [live, 2 * beam, length]

        ended, last = words == end, limits[live] <= length
        for i, k in np.argwhere((ended | last[:, None])[:, :beam]).tolist():
            hypothesis = grown[i, k, : length - ended[i, k]].tolist()
            found[live[i]].append(Hypothesis(hypothesis, float(total[i, k] / length**length_penalty)))
        topped |= ended[:, 0]
        enough = np.array([len(found[each]) for each in live]) >= (beam if length_penalty else best)
        done = last | (enough & (topped | bool(length_penalty)))

        going = np.flatnonzero(~done)
        kept = np.argsort(ended[going], axis=1, kind="stable")[
            :, :beam
        ]  # the first that go on; a beam ends in one way only
        width = scores.shape[1]
        scores = np.take_along_axis(total[going], kept, 1)
        history = np.take_along_axis(grown[going], kept[..., None], 1)
        tokens = history[:, :, -1].ravel()
        parents = (going[:, None] * width + np.take_along_axis(origin[going], kept, 1)).ravel()
        live, topped = live[going], topped[going]
    return [sorted(each, key=lambda one: -one.score)[:best] for each in found]


def _likeliest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.float64], Integers]:
    """Log probabilities and tokens, [rows, count] each, of the likeliest tokens of every row, the likeliest first."""
    tokens = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    values = np.take_along_axis(logits, tokens, 1)
    order = np.lexsort((tokens, -values))
    largest = logits.max(axis=1, keepdims=True)
    norm = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)) + largest
    if not np.isfinite(norm).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights")
    return np.take_along_axis(values, order, 1) - norm, np.take_along_axis(tokens, order, 1)


def hypotheses(tokens: Integers, scores: NDArray[np.float32]) -> list[list[Hypothesis]]:
    """What `zoo.transformer_mt.loop.search` returns, as `beam_search` does. Raises ZooError where the scores are no
    numbers.
    """
    if not (np.isfinite(scores) & (scores > NEVER / POSITIONS**2)).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights")
    return [
        [Hypothesis(row[row != PAD].tolist(), score) for row, score in zip(*each, strict=True)]
        for each in zip(tokens, scores.tolist(), strict=True)
    ]


def naive_step(decoder: Any, source: NDArray[Any], memory: NDArray[np.float32]) -> Step:
    """The step of a decoder without caches: it computes all tokens so far anew, and has a copy of the source for every
    beam.

    decoder: a session with the inputs source [n, s], memory [n, s, width] and target [n, t] and the output logits [n,
    vocabulary].
    """
    prefix = np.zeros((len(source), 0), source.dtype)

    def step(tokens: Integers, parents: Integers) -> NDArray[np.float32]:
        nonlocal source, memory, prefix
        source, memory = source[parents], memory[parents]
        prefix = np.concatenate([prefix[parents], tokens[:, None].astype(source.dtype)], 1)
        found: NDArray[np.float32] = decoder.run({"source": source, "memory": memory, "target": prefix})["logits"]
        return found

    return step
