"""Beam search over any step function, in numpy: the reference of the search in native code and in the ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError
from zoo.translation.data.tokens import PAD, POSITIONS
from zoo.translation.search.config import DEFAULT_SEARCH, Demands, SearchConfig, check_beam
from zoo.translation.search.controls.phrases import constrained_candidates
from zoo.translation.search.controls.score_rules import apply_rules

MIN_SCORE = -1e30  # score of an empty slot
Integers = NDArray[np.int64]
# (tokens, parents) -> logits of the next token, float32 [rows, vocabulary]. tokens: newest token of every row, int64
# [rows]. parents: row of the previous call that a row continues, int64 [rows]; rows may be permuted, repeated or
# dropped. The first call has one row per sentence.
Step = Callable[[Integers, Integers], NDArray[np.float32]]


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        tokens: Target tokens without the end token.
        score: Sum of log probabilities / length ** penalty; the end token counts in both, `Demands.prefix` in neither.
    """

    tokens: list[int]
    score: float


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
    sources: Sequence[Sequence[int]] | None = None,
    demands: Sequence[Demands] | None = None,
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
        sources: Source tokens of each sentence, for rules that read them.
        demands: What each translation is to have; their prefixes have the same length. None: nothing.

    Returns:
        The `best` hypotheses of each sentence, the highest score first.

    Raises:
        RequestError: The beam is not possible.
        ZooError: Logits are NaN or infinite.
    """
    check_beam(beam, best)
    if beam < 2 and any(demand.phrases for demand in demands or ()):
        raise RequestError("found beam 1; forced words need a beam of 2 or more")
    demands = demands or [Demands()] * len(limits)
    search = _Search(limits, start, end, beam, best, length_penalty, rules, allowed, sources, demands)
    while len(search.active):
        search.advance(step)
    return [
        sorted(hypotheses, key=lambda one: (-asked.state(one.tokens).count, -one.score))[:best]
        for asked, hypotheses in zip(demands, search.finished, strict=True)
    ]


class _Candidates(NamedTuple):
    """Continuations of the beams of a batch, the likeliest of each sentence first, [active, 2 * beam] each.

    Attributes:
        scores: Sums of log probabilities, float64; `MIN_SCORE` where there is none.
        origins: Beam that is continued, int64.
        tokens: Next token, int64.
        complete: {index in the batch of a sentence with phrases: score of the likeliest beam that continues and has all
            its phrases}.
    """

    scores: NDArray[np.float64]
    origins: Integers
    tokens: Integers
    complete: dict[int, float]


@dataclass
class _Search:
    """A beam search of a batch of sentences, see `beam_search`."""

    limits: Integers
    start: int
    end: int
    beam: int
    best: int
    length_penalty: float
    rules: SearchConfig
    allowed: Sequence[Integers] | None
    sources: Sequence[Sequence[int]] | None
    demands: Sequence[Demands]

    def __post_init__(self) -> None:
        """Begins with one empty beam of each sentence."""
        count = len(self.limits)
        self.uncounted = len(self.demands[0].prefix) if self.demands else 0
        prefixes = [(*self.rules.prefix, *demand.prefix) for demand in self.demands]
        self.begins = len(self.rules.prefix) + self.uncounted
        self.prefixes = np.array(prefixes, np.int64).reshape(count, self.begins)
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.active = np.arange(count)  # the sentences still in the batch
        self.scores = np.zeros((count, 1))  # [active, width]
        self.history = np.zeros((count, 1, 0), np.int64)  # [active, width, tokens so far]
        self.best_ended = np.zeros(count, bool)  # whether the likeliest beam has ended once
        self.tokens, self.parents = np.full(count, self.start), np.arange(count)
        self.length = 0

    def advance(self, step: Step) -> None:
        """Adds a token to all beams; finished sentences leave the batch."""
        self.length += 1
        logits: NDArray[np.floating[Any]] = step(self.tokens, self.parents)
        check_beam(self.beam, self.best, logits.shape[1])
        if self.allowed is not None:
            logits = mask_logits(logits, [self.allowed[sentence] for sentence in self.active.tolist()])
        if self.length <= self.begins:
            self.tokens = self.prefixes[self.active, self.length - 1]
            self.parents = np.arange(len(self.active))
            self.history = np.concatenate([self.history, self.tokens[:, None, None]], 2)
        else:
            self._keep(self._candidates(logits))

    @property
    def _last(self) -> NDArray[np.bool_]:
        """Whether a sentence in the batch reaches its limit, bool [active]."""
        return self.limits[self.active] <= self.length

    def _candidates(self, logits: NDArray[np.floating[Any]]) -> _Candidates:
        """Returns the likeliest continuations of the beams by the logits of the next tokens."""
        beam, count, width = self.beam, len(self.active), self.history.shape[1]
        demands = [self.demands[sentence] for sentence in self.active.tolist()]
        constrained = [i for i, asked in enumerate(demands) if asked.phrases]
        rows = np.repeat(self.active, width).tolist()
        logits, norm = token_scores(
            logits,
            self.history.reshape(len(rows), self.length - 1),
            np.repeat(self._last, width),
            self.rules,
            end=self.end,
            begins=self.length == self.begins + 1,
            logs=beam > 1,
            sources=[self.sources[i] for i in rows] if self.sources is not None else None,
            demands=[self.demands[i] for i in rows] if constrained else None,
        )
        values, words = _likeliest(logits, norm, 2 * beam)
        total = (self.scores[..., None] + values.reshape(count, width, -1)).reshape(count, -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : 2 * beam]
        total, origins = np.take_along_axis(total, order, 1), order // (2 * beam)
        words = np.take_along_axis(words.reshape(count, -1), order, 1)
        complete = {}
        for i in constrained:
            rows_of, asked = slice(i * width, (i + 1) * width), demands[i]
            chosen = constrained_candidates(
                logits[rows_of] - norm[rows_of],
                self.scores[i],
                self.history[i],
                asked.phrases,
                beam,
                self.end,
                asked.marks,
            )
            total[i], origins[i], words[i], complete[i] = MIN_SCORE, 0, int(not self.end), chosen.running
            number = len(chosen.tokens)
            total[i, :number], origins[i, :number], words[i, :number] = chosen.scores, chosen.origins, chosen.tokens
        return _Candidates(total, origins, words, complete)

    def _keep(self, candidates: _Candidates) -> None:
        """Adds the hypotheses that end, and continues the likeliest beams of unfinished sentences."""
        total, origins, words, complete = candidates
        history = np.take_along_axis(self.history, origins[..., None], 1)
        grown = np.concatenate([history, words[..., None]], 2)  # [active, 2 * beam, length]
        ended = words == self.end
        beyond = total <= MIN_SCORE / 2  # empty, of a sentence with phrases
        if self.rules.kind == "marian":  # a hypothesis leaves no room for another beam
            room = [
                2 * self.beam if self.demands[sentence].phrases else self.beam - len(self.finished[sentence])
                for sentence in self.active.tolist()
            ]
            beyond |= np.arange(2 * self.beam) >= np.array(room)[:, None]
            total[beyond], ended[beyond] = MIN_SCORE, False
        counted = self.length - self.uncounted
        for i, k in np.argwhere(((ended | self._last[:, None]) & ~beyond)[:, : self.beam]).tolist():
            hypothesis = grown[i, k, : self.length - ended[i, k]].tolist()
            score = (total[i, k] - self.rules.word_penalty * counted) / counted**self.length_penalty
            self.finished[self.active[i]].append(Hypothesis(hypothesis, float(score)))
        self.best_ended |= ended[:, 0]
        # candidates that continue; a beam has one that ends at most
        kept = np.argsort(ended, axis=1, kind="stable")[:, : self.beam]
        best_running = np.take_along_axis(total, kept[:, :1], 1)[:, 0]  # the scores of the likeliest of them
        best_running[list(complete)] = list(complete.values())
        left = np.flatnonzero(~(self._last | self._done(best_running, list(complete))))

        width, kept = self.scores.shape[1], kept[left]
        self.scores = np.take_along_axis(total[left], kept, 1)
        self.history = np.take_along_axis(grown[left], kept[..., None], 1)
        self.tokens = self.history[:, :, -1].ravel()
        self.parents = (left[:, None] * width + np.take_along_axis(origins[left], kept, 1)).ravel()
        self.active, self.best_ended = self.active[left], self.best_ended[left]

    def _done(self, best_running: NDArray[np.float64], constrained: list[int]) -> NDArray[np.bool_]:
        """Returns which sentences are finished by the termination rule, bool [active]."""
        state = SearchState(
            self.finished,
            self.active,
            self.best_ended,
            best_running,
            self.length - self.uncounted,
            self.limits - self.uncounted,
            self.beam,
            self.best,
            self.length_penalty,
            self.rules,
        )
        done = TERMINATION[self.rules.kind](state)
        if constrained:  # by the rule of transformers, whatever the toolkit
            own = state._replace(rules=replace(self.rules, kind="transformers", early_stopping=False))
            done[constrained] = _transformers(own)[constrained]
        return done


class SearchState(NamedTuple):
    """State of a search after a step.

    Attributes:
        hypotheses: Hypotheses of every sentence.
        active: Sentences in the batch, int64 [active].
        best_ended: Whether the likeliest beam of a sentence has ended once, bool [active].
        best_running: Score of the likeliest beam that continues, float64 [active].
        length: Number of tokens so far, without `Demands.prefix`.
        limits: Maximum of `length` by sentence.
        beam: See `beam_search`.
        best: See `beam_search`.
        length_penalty: See `beam_search`.
        rules: See `beam_search`.
    """

    hypotheses: list[list[Hypothesis]]
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
        return np.array([len(self.hypotheses[sentence]) for sentence in self.active], np.int64)


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
    hypotheses = (state.hypotheses[sentence] for sentence in state.active)
    kept = [sorted((one.score for one in ended), reverse=True)[: state.beam] for ended in hypotheses]
    worst = np.array([min(scores, default=MIN_SCORE) for scores in kept])
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


def token_scores(
    logits: NDArray[np.floating[Any]],
    history: Integers,
    last: NDArray[np.bool_],
    rules: SearchConfig,
    *,
    end: int,
    begins: bool,
    logs: bool,
    sources: Sequence[Sequence[int]] | None = None,
    demands: Sequence[Demands] | None = None,
) -> tuple[NDArray[np.floating[Any]], NDArray[np.float64]]:
    """Applies the rules to the logits of the next tokens.

    Args:
        logits: [rows, vocabulary].
        history: See `apply_rules`.
        last: Whether a row's sentence reaches its limit, bool [rows].
        rules: The rules.
        end: End token.
        begins: See `apply_rules`.
        logs: Whether the rules see log probabilities, as in beam search; else logits.
        sources: See `apply_rules`.
        demands: See `apply_rules`.

    Returns:
        Values [rows, vocabulary], and what is subtracted from them for log probabilities, [rows, 1].
    """
    norm = _log_sum_exp(logits)
    if not rules.changes_scores and demands is None:
        return logits, norm
    if logs and rules.repetition_penalty != 1:
        logits, norm = logits - norm, np.zeros_like(norm)
    logits = apply_rules(logits, history, rules, end=end, begins=begins, sources=sources, demands=demands)
    norm = _log_sum_exp(logits) if rules.renormalize else norm
    if rules.forced_end and last.any():
        logits[last] = -np.inf
        logits[last, end] = norm[last, 0]
    return logits, norm


def mask_logits(logits: NDArray[np.floating[Any]], allowed: Sequence[Integers]) -> NDArray[np.floating[Any]]:
    """Removes tokens.

    Args:
        logits: [rows, vocabulary]; as many rows of each sentence.
        allowed: Tokens of each sentence that are left.

    Returns:
        The logits, -inf for other tokens.
    """
    masked = np.full_like(logits, -np.inf)
    for rows, words, into in zip(np.split(logits, len(allowed)), allowed, np.split(masked, len(allowed)), strict=True):
        into[:, words] = rows[:, words]
    return masked


def _log_sum_exp(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Returns log(sum(exp(logits))) of every row, [rows, 1]. Raises ZooError if it is not finite."""
    largest = logits.max(axis=1, keepdims=True)
    norm: NDArray[np.float64] = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)) + largest
    if not np.isfinite(norm).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights")
    return norm


def _likeliest(
    logits: NDArray[np.floating[Any]], norm: NDArray[np.float64], count: int
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
        [Hypothesis(row[row != PAD].tolist(), score) for row, score in zip(*pair, strict=True)]
        for pair in zip(tokens, scores.tolist(), strict=True)
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
        logits: NDArray[np.float32] = decoder.run({"source": source, "memory": memory, "target": prefix})["logits"]
        return logits

    return step
