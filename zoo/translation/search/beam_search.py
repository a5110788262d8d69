"""Beam search over any step function, in numpy: the reference of the search in native code and in the ONNX graph."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.plain import from_plain, to_plain
from zoo.translation.data.parallel_text import PAD, POSITIONS

NEVER = -1e30  # the score of what is no hypothesis
GROWTH = (2, 10)  # tokens of a translation for each of its source, and besides, at most
Integers = NDArray[np.int64]
# (tokens, parents) -> logits float32 [rows, vocabulary] of the token that follows. tokens: int64 [rows], the newest of
# every row. parents: int64 [rows], the row of the call before that each one goes on from: rows may swap places, double
# or be gone. In the first call there is one row a sentence.
Step = Callable[[Integers, Integers], NDArray[np.float32]]


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        tokens: Target tokens without the end token.
        score: Sum of log probabilities / length ** penalty; the end token counts in both.
    """

    tokens: list[int]
    score: float


@dataclass(frozen=True)
class Rules:
    """Search options of the toolkit that a model comes from.

    Attributes:
        kind: Termination rule, a key of `KINDS`.
        beam: Default beam size.
        length_penalty: A score is the sum of log probabilities / length ** length_penalty.
        early_stopping: For "transformers": end with `beam` hypotheses (True), or when the likeliest beam cannot reach
            the worst hypothesis at its own length (False) or at the greatest length ("never").
        prefix: Tokens that every translation begins with, of log probability 0; they count in its length.
        banned: Tokens that are never chosen; they keep their share of the probability.
        least: Minimum length of a translation, prefix and end included.
        most: Maximum length of a translation, prefix and end included; 0: see `limit`.
        forced_end: Whether the end token follows at the length limit, with log probability 0.
        no_repeat_ngram: No n-gram of this size occurs twice; 0: no restriction.
        growth: Maximum number of tokens for each source token, the end included; 0: see `most`.
        word_penalty: For "marian": subtracted from a score for each token, before the division.
    """

    kind: str = "ctranslate2"
    beam: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    prefix: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    least: int = 0
    most: int = 0
    forced_end: bool = False
    no_repeat_ngram: int = 0
    growth: float = 0.0
    word_penalty: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults, as plain values."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Rules:
        """Reads what `to_json` returned.

        Args:
            values: Plain values.

        Returns:
            The rules.

        Raises:
            RequestError: A key or the kind is unknown.
        """
        try:
            rules = Rules(**from_plain(values))
        except TypeError:
            rules = Rules(kind="")
        if rules.kind not in KINDS:
            raise RequestError(f"found the rules of a search {values}, expected what zoo import writes")
        return rules

    @property
    def own(self) -> bool:
        """Whether the searches in one graph and in native code follow these rules without options."""
        return replace(self, beam=OWN.beam, length_penalty=OWN.length_penalty, most=OWN.most) == OWN

    @property
    def native(self) -> dict[str, Any]:
        """Options of these rules for `NativeTranslator.translate`."""
        elsewhere = ("beam", "length_penalty", "most", "growth")
        return {name: value for name, value in self.to_json().items() if name not in elsewhere}

    @property
    def constrained(self) -> bool:
        """Whether tokens are forced or excluded."""
        return bool(self.prefix or self.banned or self.least or self.forced_end or self.no_repeat_ngram)

    def limit(self, source: int, positions: int) -> int:
        """Returns the maximum length of a translation, its end included.

        Args:
            source: Number of source tokens.
            positions: Number of the model's target positions.
        """
        most = min(self.most or positions, positions)
        if self.growth:
            return max(min(math.ceil(self.growth * source), most), 1)
        return most if self.most else limit(source, positions)


OWN = Rules()


def limit(source: int, most: int) -> int:
    """Returns the default maximum length of a translation, its end included: 2 * source + 10, at most `most`.

    Args:
        source: Number of source tokens.
        most: Upper bound.
    """
    factor, more = GROWTH
    return min(factor * source + more, most)


def require(beam: int, best: int, words: int | None = None) -> None:
    """Checks the options of a search.

    Args:
        beam: Beam size.
        best: Number of translations of each sentence.
        words: Size of the vocabulary, if known.

    Raises:
        RequestError: `beam` or `best` is not possible.
    """
    if not (isinstance(beam, numbers.Integral) and isinstance(best, numbers.Integral) and 1 <= best <= beam):
        raise RequestError(
            f"found beam {beam!r} and n-best {best!r}; expected a beam of 1 or more, and no more translations than it"
        )
    if words is not None and 2 * beam > words:
        raise RequestError(f"found beam {beam}, expected at most half of the {words} words in the vocabulary")


def beam_search(
    step: Step,
    limits: Integers,
    *,
    start: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 1.0,
    best: int = 1,
    rules: Rules = OWN,
    allowed: Sequence[Integers] | None = None,
) -> list[list[Hypothesis]]:
    """Translates a batch of sentences; a beam of 1 is greedy search.

    In a step the 2 * beam likeliest continuations of a sentence's beams are candidates, so that `beam` of them are left
    if all beams end. Candidates among the first `beam` that end become hypotheses ("marian": among as many fewer as
    there are hypotheses). A sentence leaves the batch by the termination rule, or at its length limit, where all beams
    end.

    Args:
        step: Computes the logits of the next token.
        limits: Maximum length of each translation, its end included, int64 [sentences].
        start: Token before a translation.
        end: Token after a translation.
        beam: Beam size, instead of that of `rules`.
        length_penalty: Length penalty, instead of that of `rules`.
        best: Number of translations of each sentence.
        rules: Search options.
        allowed: Tokens of each sentence that share all probability (`zoo.translation.search.shortlist`); None: all.

    Returns:
        The `best` hypotheses of each sentence, the highest score first.

    Raises:
        RequestError: The beam is not possible.
        ZooError: Logits are NaN or infinite.
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
        if allowed is not None:
            logits = _among(logits, [allowed[each] for each in live.tolist()])
        if length <= len(rules.prefix):
            tokens = np.full(len(live), rules.prefix[length - 1])
            parents = np.arange(len(live))
            history = np.concatenate([history, tokens[:, None, None]], 2)
            continue
        norm = _norm(logits)
        last = limits[live] <= length
        if rules.constrained:
            logits = _constrained(logits, norm, history, last, end, rules)
        values, words = _likeliest(logits, norm, 2 * beam)
        total = (scores[..., None] + values.reshape(*scores.shape, -1)).reshape(len(live), -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : 2 * beam]
        total, origin = np.take_along_axis(total, order, 1), order // (2 * beam)
        words = np.take_along_axis(words.reshape(len(live), -1), order, 1)
        grown = np.concatenate(
            [np.take_along_axis(history, origin[..., None], 1), words[..., None]], 2
        )  # [live, 2 * beam, length]

        ended = words == end
        beyond = np.zeros(total.shape, bool)
        if rules.kind == "marian":  # a hypothesis leaves no room for another beam
            beyond |= np.arange(2 * beam) >= np.array([[beam - len(found[each])] for each in live])
            total[beyond], ended[beyond] = NEVER, False
        for i, k in np.argwhere(((ended | last[:, None]) & ~beyond)[:, :beam]).tolist():
            hypothesis = grown[i, k, : length - ended[i, k]].tolist()
            score = (total[i, k] - rules.word_penalty * length) / length**length_penalty
            found[live[i]].append(Hypothesis(hypothesis, float(score)))
        topped |= ended[:, 0]
        kept = np.argsort(ended, axis=1, kind="stable")[:, :beam]  # the first that go on; a beam ends in one way only
        going = np.take_along_axis(total, kept[:, :1], 1)[:, 0]  # the scores of the likeliest of them
        state = State(found, live, topped, going, length, limits, beam, best, length_penalty, rules)
        left = np.flatnonzero(~(last | KINDS[rules.kind](state)))

        width, kept = scores.shape[1], kept[left]
        scores = np.take_along_axis(total[left], kept, 1)
        history = np.take_along_axis(grown[left], kept[..., None], 1)
        tokens = history[:, :, -1].ravel()
        parents = (left[:, None] * width + np.take_along_axis(origin[left], kept, 1)).ravel()
        live, topped = live[left], topped[left]
    return [sorted(each, key=lambda one: -one.score)[:best] for each in found]


class State(NamedTuple):
    """State of a search after a step.

    Attributes:
        found: Hypotheses of every sentence.
        live: Sentences in the batch, int64 [live].
        topped: Whether the likeliest beam of a sentence has ended once, bool [live].
        going: Score of the likeliest beam that continues, float64 [live].
        length: Number of tokens so far.
        limits: See `beam_search`.
        beam: See `beam_search`.
        best: See `beam_search`.
        length_penalty: See `beam_search`.
        rules: See `beam_search`.
    """

    found: list[list[Hypothesis]]
    live: Integers
    topped: NDArray[np.bool_]
    going: NDArray[np.float64]
    length: int
    limits: Integers
    beam: int
    best: int
    length_penalty: float
    rules: Rules

    def counts(self) -> Integers:
        """Returns the number of hypotheses of each sentence in the batch, int64 [live]."""
        return np.array([len(self.found[each]) for each in self.live], np.int64)


def _ctranslate2(state: State) -> NDArray[np.bool_]:
    """Which sentences are done: those with `beam` hypotheses; without a length penalty, those whose likeliest beam has
    ended and that have `best`. The rules of CTranslate2 (Wu et al. 2016 is the source of the penalty).
    """
    if state.length_penalty:
        return state.counts() >= state.beam
    return (state.counts() >= state.best) & state.topped


def _transformers(state: State) -> NDArray[np.bool_]:
    """Which sentences are done: see `Rules.early_stopping`. The rules of transformers (`GenerationMixin`), where greedy
    search ends with the first end.
    """
    full = state.counts() >= state.beam
    if state.rules.early_stopping is True or state.beam == 1:
        return full
    length: Any = state.length
    if state.rules.early_stopping == "never" and state.length_penalty > 0:
        length = state.limits[state.live].astype(np.float64)
    reachable = state.going / length**state.length_penalty
    kept = [sorted((one.score for one in state.found[each]), reverse=True)[: state.beam] for each in state.live]
    worst = np.array([min(each, default=NEVER) for each in kept])
    done: NDArray[np.bool_] = full & (reachable <= worst)
    return done


def _marian(state: State) -> NDArray[np.bool_]:
    """Which sentences are done: those with `beam` hypotheses, where no beam is left, for every end makes the search
    narrower by one. The rules of Marian (`BeamSearch::search`).
    """
    return state.counts() >= state.beam


KINDS: dict[str, Callable[[State], NDArray[np.bool_]]] = {
    "ctranslate2": _ctranslate2,
    "transformers": _transformers,
    "marian": _marian,
}


def _among(logits: NDArray[np.float32], allowed: Sequence[Integers]) -> NDArray[np.float32]:
    """Logits [rows, vocabulary] with those that are not `allowed` in the sentence of a row at -inf."""
    found = np.full_like(logits, -np.inf)
    for rows, words, into in zip(np.split(logits, len(allowed)), allowed, np.split(found, len(allowed)), strict=True):
        into[:, words] = rows[:, words]
    return found


def _norm(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log of the sum of exp of every row, [rows, 1]. Raises ZooError where it is no number."""
    largest = logits.max(axis=1, keepdims=True)
    norm: NDArray[np.float64] = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)) + largest
    if not np.isfinite(norm).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights")
    return norm


def _constrained(
    logits: NDArray[np.float32],
    norm: NDArray[np.float64],
    history: Integers,
    last: NDArray[np.bool_],
    end: int,
    rules: Rules,
) -> NDArray[np.float32]:
    """The logits with those of tokens that may not come at -inf.

    history: int64 [sentences, width, tokens so far]. last: bool [sentences], which reach their limit.
    """
    logits, length = logits.copy(), history.shape[2] + 1
    if 0 < rules.no_repeat_ngram <= history.shape[2]:
        for row, tokens in zip(logits, history.reshape(-1, history.shape[2]).tolist(), strict=True):
            row[_repeated(tokens, rules.no_repeat_ngram)] = -np.inf
    logits[:, list(rules.banned)] = -np.inf
    if length < rules.least:
        logits[:, end] = -np.inf
    if rules.forced_end and last.any():
        rows = np.repeat(last, history.shape[1])
        logits[rows] = -np.inf
        logits[rows, end] = norm[rows, 0]
    return logits


def _repeated(tokens: list[int], size: int) -> list[int]:
    """The tokens after which the last `size` would have come before."""
    before = tokens[len(tokens) - size + 1 :]
    return [tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i : i + size - 1] == before]


def _likeliest(
    logits: NDArray[np.float32], norm: NDArray[np.float64], count: int
) -> tuple[NDArray[np.float64], Integers]:
    """Log probabilities and tokens, [rows, count] each, of the likeliest tokens of every row, the likeliest first."""
    tokens = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    values = np.take_along_axis(logits, tokens, 1)
    order = np.lexsort((tokens, -values))
    return np.take_along_axis(values, order, 1) - norm, np.take_along_axis(tokens, order, 1)


def hypotheses(tokens: Integers, scores: NDArray[np.float32]) -> list[list[Hypothesis]]:
    """Converts the outputs of `zoo.translation.search.loop_graph.search`.

    Args:
        tokens: int64 [sentences, best, length], padded.
        scores: float32 [sentences, best].

    Returns:
        Hypotheses as `beam_search` returns them.

    Raises:
        ZooError: Scores are NaN or infinite.
    """
    if not (np.isfinite(scores) & (scores > NEVER / POSITIONS**2)).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights")
    return [
        [Hypothesis(row[row != PAD].tolist(), score) for row, score in zip(*each, strict=True)]
        for each in zip(tokens, scores.tolist(), strict=True)
    ]


def naive_step(decoder: Any, source: NDArray[Any], memory: NDArray[np.float32]) -> Step:
    """Makes a step function of a decoder without caches, which computes all tokens so far again.

    Args:
        decoder: A session: source [n, s], memory [n, s, width] and target [n, t] -> logits [n, vocabulary].
        source: Source tokens, int64 [n, s].
        memory: The encoder's result, float32 [n, s, width].

    Returns:
        The step function for `beam_search`.
    """
    prefix = np.zeros((len(source), 0), source.dtype)

    def step(tokens: Integers, parents: Integers) -> NDArray[np.float32]:
        nonlocal source, memory, prefix
        source, memory = source[parents], memory[parents]
        prefix = np.concatenate([prefix[parents], tokens[:, None].astype(source.dtype)], 1)
        found: NDArray[np.float32] = decoder.run({"source": source, "memory": memory, "target": prefix})["logits"]
        return found

    return step
