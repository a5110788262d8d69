"""Beam search over any step function, in numpy: the reference of the search in native code and in the ONNX graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    uncounted = len(demands[0].prefix) if demands else 0
    begins = len(rules.prefix) + uncounted
    prefixes = np.array([(*rules.prefix, *demand.prefix) for demand in demands], np.int64).reshape(len(limits), begins)
    finished: list[list[Hypothesis]] = [[] for _ in limits]
    active = np.arange(len(limits))  # the sentences still in the batch
    scores = np.zeros((len(active), 1))  # [active, width]
    history = np.zeros((len(active), 1, 0), np.int64)  # [active, width, tokens so far]
    best_ended = np.zeros(len(active), bool)  # whether the likeliest beam has ended once
    tokens, parents = np.full(len(active), start), np.arange(len(active))
    for length in itertools.count(1):
        if not len(active):
            break
        logits: NDArray[np.floating[Any]] = step(tokens, parents)
        check_beam(beam, best, logits.shape[1])
        if allowed is not None:
            logits = mask_logits(logits, [allowed[sentence] for sentence in active.tolist()])
        if length <= begins:
            tokens = prefixes[active, length - 1]
            parents = np.arange(len(active))
            history = np.concatenate([history, tokens[:, None, None]], 2)
            continue
        last = limits[active] <= length
        constrained = {i: demands[sentence] for i, sentence in enumerate(active.tolist()) if demands[sentence].phrases}
        width = history.shape[1]
        rows = np.repeat(active, width).tolist()
        logits, norm = token_scores(
            logits,
            history.reshape(len(rows), length - 1),
            np.repeat(last, width),
            rules,
            end=end,
            begins=length == begins + 1,
            logs=beam > 1,
            sources=[sources[i] for i in rows] if sources is not None else None,
            demands=[demands[i] for i in rows] if constrained else None,
        )
        values, words = _likeliest(logits, norm, 2 * beam)
        total = (scores[..., None] + values.reshape(*scores.shape, -1)).reshape(len(active), -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : 2 * beam]
        total, origin = np.take_along_axis(total, order, 1), order // (2 * beam)
        words = np.take_along_axis(words.reshape(len(active), -1), order, 1)
        complete = np.zeros(len(active))  # score of the likeliest beam that goes on and has all phrases
        for i, asked in constrained.items():
            rows_of = slice(i * history.shape[1], (i + 1) * history.shape[1])
            chosen = constrained_candidates(
                logits[rows_of] - norm[rows_of], scores[i], history[i], asked.phrases, beam, end, asked.marks
            )
            total[i], origin[i], words[i], complete[i] = MIN_SCORE, 0, int(not end), chosen.running
            count = len(chosen.tokens)
            total[i, :count], origin[i, :count], words[i, :count] = chosen.scores, chosen.origins, chosen.tokens
        grown = np.concatenate(
            [np.take_along_axis(history, origin[..., None], 1), words[..., None]], 2
        )  # [active, 2 * beam, length]

        ended = words == end
        beyond = total <= MIN_SCORE / 2  # empty, of a sentence with phrases
        if rules.kind == "marian":  # a hypothesis leaves no room for another beam
            room = [
                2 * beam if demands[sentence].phrases else beam - len(finished[sentence])
                for sentence in active.tolist()
            ]
            beyond |= np.arange(2 * beam) >= np.array(room)[:, None]
            total[beyond], ended[beyond] = MIN_SCORE, False
        for i, k in np.argwhere(((ended | last[:, None]) & ~beyond)[:, :beam]).tolist():
            hypothesis = grown[i, k, : length - ended[i, k]].tolist()
            counted = length - uncounted
            score = (total[i, k] - rules.word_penalty * counted) / counted**length_penalty
            finished[active[i]].append(Hypothesis(hypothesis, float(score)))
        best_ended |= ended[:, 0]
        kept = np.argsort(ended, axis=1, kind="stable")[:, :beam]  # the first that go on; a beam ends in one way only
        best_running = np.take_along_axis(total, kept[:, :1], 1)[:, 0]  # the scores of the likeliest of them
        best_running[list(constrained)] = complete[list(constrained)]
        state = SearchState(
            finished,
            active,
            best_ended,
            best_running,
            length - uncounted,
            limits - uncounted,
            beam,
            best,
            length_penalty,
            rules,
        )
        done = TERMINATION[rules.kind](state)
        if constrained:  # by the rule of transformers, whatever the toolkit
            own = state._replace(rules=replace(rules, kind="transformers", early_stopping=False))
            done[list(constrained)] = _transformers(own)[list(constrained)]
        left = np.flatnonzero(~(last | done))

        width, kept = scores.shape[1], kept[left]
        scores = np.take_along_axis(total[left], kept, 1)
        history = np.take_along_axis(grown[left], kept[..., None], 1)
        tokens = history[:, :, -1].ravel()
        parents = (left[:, None] * width + np.take_along_axis(origin[left], kept, 1)).ravel()
        active, best_ended = active[left], best_ended[left]
    return [
        sorted(hypotheses, key=lambda one: (-asked.state(one.tokens).count, -one.score))[:best]
        for asked, hypotheses in zip(demands, finished, strict=True)
    ]


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
