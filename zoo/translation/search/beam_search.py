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

MAX_GRAPH_BANNED = 4  # banned tokens for which the graph of the search has candidates to spare
MIN_SCORE = -1e30  # score of an empty slot
MAX_PENALTY = 100  # of a length, in native code, too
LENGTH_LIMIT = (2, 10)  # (a, b): a translation of n tokens has at most a n + b tokens
Integers = NDArray[np.int64]
# (tokens, parents) -> logits of the next token, float32 [rows, vocabulary]. tokens: newest token of every row, int64
# [rows]. parents: row of the previous call that a row continues, int64 [rows]; rows may be permuted, repeated or
# dropped. The first call has one row per sentence.
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
class SearchConfig:
    """Search options of the toolkit that a model comes from.

    Attributes:
        kind: Termination rule, a key of `TERMINATION`.
        beam: Default beam size.
        length_penalty: A score is the sum of log probabilities / length ** length_penalty.
        early_stopping: For "transformers": end with `beam` hypotheses (True), or when the likeliest beam cannot reach
            the worst hypothesis at its own length (False) or at the greatest length ("never").
        prefix: Tokens that every translation begins with, of log probability 0; they count in its length.
        banned: Tokens that are never chosen; they keep their share of the probability, see `renormalize`.
        least: Minimum length of a translation, prefix and end included.
        most: Maximum length of a translation, prefix and end included; 0: see `limit`.
        forced_end: Whether the end token follows at the length limit, with log probability 0.
        no_repeat_ngram: No n-gram of this size occurs twice; 0: no restriction.
        growth: Maximum number of tokens for each source token, the end included; 0: see `most`.
        word_penalty: For "marian": subtracted from a score for each token, before the division.
        renormalize: Whether banned, too early and repeated tokens get no share of the probability.
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
    renormalize: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults, as plain values."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> SearchConfig:
        """Reads what `to_json` returned.

        Args:
            values: Plain values.

        Returns:
            The rules.

        Raises:
            RequestError: A key or the kind is unknown.
        """
        try:
            rules = SearchConfig(**from_plain(values))
        except TypeError:
            rules = SearchConfig(kind="")
        if rules.kind not in TERMINATION:
            raise RequestError(f"found the rules of a search {values}, expected what zoo import writes")
        return rules

    @property
    def is_default(self) -> bool:
        """Whether beam search in one graph follows this configuration."""
        banned = self.banned if len(self.banned) <= MAX_GRAPH_BANNED else DEFAULT_SEARCH.banned
        default = replace(
            DEFAULT_SEARCH, beam=self.beam, length_penalty=self.length_penalty, most=self.most, banned=banned
        )
        return self == default

    @property
    def native_options(self) -> dict[str, Any]:
        """Options for `NativeTranslator.translate`."""
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


DEFAULT_SEARCH = SearchConfig()


def limit(source: int, most: int) -> int:
    """Returns the default maximum length of a translation, its end included: 2 * source + 10, at most `most`.

    Args:
        source: Number of source tokens.
        most: Upper bound.
    """
    factor, more = LENGTH_LIMIT
    return min(factor * source + more, most)


def check_beam(beam: int, best: int, words: int | None = None) -> None:
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


def check_rules(no_repeat_ngram: int, length_penalty: float) -> None:
    """Checks the further options of a search.

    Args:
        no_repeat_ngram: See `SearchConfig`.
        length_penalty: See `SearchConfig`.

    Raises:
        RequestError: A value is not possible.
    """
    if not isinstance(no_repeat_ngram, numbers.Integral) or not 0 <= no_repeat_ngram <= POSITIONS:
        raise RequestError(f"found no-repeat-ngram {no_repeat_ngram!r}; expected 0 to {POSITIONS} tokens, 0 for none")
    if not isinstance(length_penalty, numbers.Real) or not abs(length_penalty) < MAX_PENALTY:
        raise RequestError(
            f"found length penalty {length_penalty!r}; expected a number between -{MAX_PENALTY} and {MAX_PENALTY}"
        )


def beam_search(
    step: Step,
    limits: Integers,
    *,
    start: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 1.0,
    best: int = 1,
    rules: SearchConfig = DEFAULT_SEARCH,
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
    check_beam(beam, best)
    found: list[list[Hypothesis]] = [[] for _ in limits]
    active = np.arange(len(limits))  # the sentences still in the batch
    scores = np.zeros((len(active), 1))  # [active, width]
    history = np.zeros((len(active), 1, 0), np.int64)  # [active, width, tokens so far]
    best_ended = np.zeros(len(active), bool)  # whether the likeliest beam has ended once
    tokens, parents = np.full(len(active), start), np.arange(len(active))
    for length in itertools.count(1):
        if not len(active):
            break
        logits = step(tokens, parents)
        check_beam(beam, best, logits.shape[1])
        if allowed is not None:
            logits = _mask_logits(logits, [allowed[each] for each in active.tolist()])
        if length <= len(rules.prefix):
            tokens = np.full(len(active), rules.prefix[length - 1])
            parents = np.arange(len(active))
            history = np.concatenate([history, tokens[:, None, None]], 2)
            continue
        norm = _log_sum_exp(logits)
        last = limits[active] <= length
        if rules.constrained:
            logits = _constrained(logits, norm, history, last, end, rules)
            norm = _log_sum_exp(logits) if rules.renormalize else norm
        values, words = _likeliest(logits, norm, 2 * beam)
        total = (scores[..., None] + values.reshape(*scores.shape, -1)).reshape(len(active), -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : 2 * beam]
        total, origin = np.take_along_axis(total, order, 1), order // (2 * beam)
        words = np.take_along_axis(words.reshape(len(active), -1), order, 1)
        grown = np.concatenate(
            [np.take_along_axis(history, origin[..., None], 1), words[..., None]], 2
        )  # [active, 2 * beam, length]

        ended = words == end
        beyond = np.zeros(total.shape, bool)
        if rules.kind == "marian":  # a hypothesis leaves no room for another beam
            beyond |= np.arange(2 * beam) >= np.array([[beam - len(found[each])] for each in active])
            total[beyond], ended[beyond] = MIN_SCORE, False
        for i, k in np.argwhere(((ended | last[:, None]) & ~beyond)[:, :beam]).tolist():
            hypothesis = grown[i, k, : length - ended[i, k]].tolist()
            score = (total[i, k] - rules.word_penalty * length) / length**length_penalty
            found[active[i]].append(Hypothesis(hypothesis, float(score)))
        best_ended |= ended[:, 0]
        kept = np.argsort(ended, axis=1, kind="stable")[:, :beam]  # the first that go on; a beam ends in one way only
        best_running = np.take_along_axis(total, kept[:, :1], 1)[:, 0]  # the scores of the likeliest of them
        state = SearchState(found, active, best_ended, best_running, length, limits, beam, best, length_penalty, rules)
        left = np.flatnonzero(~(last | TERMINATION[rules.kind](state)))

        width, kept = scores.shape[1], kept[left]
        scores = np.take_along_axis(total[left], kept, 1)
        history = np.take_along_axis(grown[left], kept[..., None], 1)
        tokens = history[:, :, -1].ravel()
        parents = (left[:, None] * width + np.take_along_axis(origin[left], kept, 1)).ravel()
        active, best_ended = active[left], best_ended[left]
    return [sorted(each, key=lambda one: -one.score)[:best] for each in found]


class SearchState(NamedTuple):
    """State of a search after a step.

    Attributes:
        found: Hypotheses of every sentence.
        active: Sentences in the batch, int64 [active].
        best_ended: Whether the likeliest beam of a sentence has ended once, bool [active].
        best_running: Score of the likeliest beam that continues, float64 [active].
        length: Number of tokens so far.
        limits: See `beam_search`.
        beam: See `beam_search`.
        best: See `beam_search`.
        length_penalty: See `beam_search`.
        rules: See `beam_search`.
    """

    found: list[list[Hypothesis]]
    active: Integers
    best_ended: NDArray[np.bool_]
    best_running: NDArray[np.float64]
    length: int
    limits: Integers
    beam: int
    best: int
    length_penalty: float
    rules: SearchConfig

    def counts(self) -> Integers:
        """Returns the number of hypotheses of each sentence in the batch, int64 [active]."""
        return np.array([len(self.found[each]) for each in self.active], np.int64)


def _ctranslate2(state: SearchState) -> NDArray[np.bool_]:
    """Returns which sentences are finished by the rule of CTranslate2.

    These have `beam` hypotheses; without a length penalty, `best` hypotheses, if the likeliest beam has ended.
    """
    if state.length_penalty:
        return state.counts() >= state.beam
    return (state.counts() >= state.best) & state.best_ended


def _transformers(state: SearchState) -> NDArray[np.bool_]:
    """Returns which sentences are finished by the rule of transformers, see `SearchConfig.early_stopping`.

    Greedy search finishes with the first end token.
    """
    full = state.counts() >= state.beam
    if state.rules.early_stopping is True or state.beam == 1:
        return full
    length: Any = state.length
    if state.rules.early_stopping == "never" and state.length_penalty > 0:
        length = state.limits[state.active].astype(np.float64)
    reachable = state.best_running / length**state.length_penalty
    kept = [sorted((one.score for one in state.found[each]), reverse=True)[: state.beam] for each in state.active]
    worst = np.array([min(each, default=MIN_SCORE) for each in kept])
    done: NDArray[np.bool_] = full & (reachable <= worst)
    return done


def _marian(state: SearchState) -> NDArray[np.bool_]:
    """Returns which sentences are finished by the rule of Marian: `beam` hypotheses, as each one narrows the beam."""
    return state.counts() >= state.beam


TERMINATION: dict[str, Callable[[SearchState], NDArray[np.bool_]]] = {
    "ctranslate2": _ctranslate2,
    "transformers": _transformers,
    "marian": _marian,
}


def _mask_logits(logits: NDArray[np.float32], allowed: Sequence[Integers]) -> NDArray[np.float32]:
    """Sets the logits [rows, vocabulary] of tokens that are not `allowed` in a row's sentence to -inf."""
    found = np.full_like(logits, -np.inf)
    for rows, words, into in zip(np.split(logits, len(allowed)), allowed, np.split(found, len(allowed)), strict=True):
        into[:, words] = rows[:, words]
    return found


def _log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns log(sum(exp(logits))) of every row, [rows, 1]. Raises ZooError if it is not finite."""
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
    rules: SearchConfig,
) -> NDArray[np.float32]:
    """Sets the logits of forbidden tokens to -inf.

    history: int64 [sentences, width, tokens so far]. last: Whether a sentence reaches its limit, bool [sentences].
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
    """Returns the tokens that would complete an n-gram of this size a second time."""
    before = tokens[len(tokens) - size + 1 :]
    return [tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i : i + size - 1] == before]


def _likeliest(
    logits: NDArray[np.float32], norm: NDArray[np.float64], count: int
) -> tuple[NDArray[np.float64], Integers]:
    """Returns log probabilities and tokens, [rows, count] each, of the likeliest tokens of every row in order."""
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
    if not (np.isfinite(scores) & (scores > MIN_SCORE / POSITIONS**2)).all():
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
