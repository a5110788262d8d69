"""Sampling and diverse beam search over any step function, in numpy: the reference of native search/variants.cpp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import ZooError
from zoo.translation.search.beam_search import (
    TERMINATION,
    Hypothesis,
    Integers,
    SearchState,
    Step,
    mask_logits,
    token_scores,
)
from zoo.translation.search.config import Demands, SearchConfig

MASK = (1 << 64) - 1


@dataclass
class _Beam:
    """An unfinished translation. member: its sample or group; row: its row in the last step."""

    score: float
    tokens: list[int]
    member: int
    row: int


@dataclass
class _Sentence:
    """A sentence in the search. members: the unfinished samples or groups."""

    beams: list[_Beam]
    members: list[int]
    hypotheses: dict[int, list[Hypothesis]] = field(default_factory=dict)


def search_variant(
    step: Step,
    limits: Integers,
    *,
    start: int,
    end: int,
    beam: int,
    length_penalty: float,
    best: int,
    rules: SearchConfig,
    allowed: Sequence[Integers] | None = None,
    sources: Sequence[Sequence[int]],
    demands: Sequence[Demands] | None = None,
) -> list[list[Hypothesis]]:
    """Translates sentences by sampling, or by diverse beams (Vijayakumar et al. 2018).

    Every beam of sampling is a sample. Diverse beams are groups of beams, which a step extends one after the other:
    tokens that earlier groups chose in the step cost a penalty.

    Args:
        step: See `beam_search`.
        limits: See `beam_search`.
        start: See `beam_search`.
        end: See `beam_search`.
        beam: Number of samples, or of the beams of all groups.
        length_penalty: See `beam_search`.
        best: See `beam_search`.
        rules: See `beam_search`.
        allowed: See `beam_search`.
        sources: See `beam_search`; the numbers that tokens are drawn by depend on them.
        demands: See `beam_search`.

    Returns:
        The `best` hypotheses of each sentence, the highest score first.

    Raises:
        ZooError: Logits are NaN or infinite, or every token is banned.
    """
    demands = demands or [Demands()] * len(limits)
    members = list(range(beam if rules.sample else rules.groups))
    live = {i: _Sentence([_Beam(0.0, [], -1, i)], members) for i in range(len(limits))}
    whole = dict(live)
    keys = [sample_key(rules.seed, source) for source in sources]
    length = 0
    while live:
        length += 1
        width = max(len(state.beams) for state in live.values())  # a step has as many rows of each sentence
        rows = [(i, state.beams[min(k, len(state.beams) - 1)]) for i, state in live.items() for k in range(width)]
        tokens = np.array([one.tokens[-1] if one.tokens else start for _, one in rows])
        logits: NDArray[np.floating[Any]] = step(tokens, np.array([one.row for _, one in rows]))
        for row, (_, one) in enumerate(rows):
            one.row = row
        if allowed is not None:
            logits = mask_logits(logits, [allowed[i] for i, _ in rows])
        prefix = {i: (*rules.prefix, *demands[i].prefix) for i in live}
        begun = len(next(iter(prefix.values())))
        if length <= begun:
            for i, one in rows:
                one.tokens.append(prefix[i][length - 1])
            continue
        last = np.array([limits[i] <= length for i, _ in rows])
        history = np.array([one.tokens for _, one in rows], np.int64).reshape(len(rows), length - 1)
        values, norm = token_scores(
            logits,
            history,
            last,
            rules,
            end=end,
            begins=length == begun + 1,
            logs=beam > 1 and not rules.sample,
            sources=[sources[i] for i, _ in rows],
        )
        for i, sentence in list(live.items()):
            counted = length - len(demands[i].prefix)
            turn = _Turn(
                values - norm, sentence, bool(limits[i] <= length), end, length, counted, length_penalty, rules
            )
            if rules.sample:
                turn.sample(keys[i])
            else:
                turn.extend_groups(beam // rules.groups, int(limits[i]) - length + counted)
            if not sentence.beams:
                del live[i]
    finished = [[one for group in whole[i].hypotheses.values() for one in group] for i in range(len(limits))]
    return [sorted(hypotheses, key=lambda one: -one.score)[:best] for hypotheses in finished]


@dataclass
class _Turn:
    """One step of one sentence. scores: log probabilities, [rows, vocabulary]."""

    scores: NDArray[np.floating[Any]]
    sentence: _Sentence
    last: bool
    end: int
    length: int
    counted: int
    length_penalty: float
    rules: SearchConfig

    def sample(self, key: int) -> None:
        """Draws the next token of every sample."""
        beams, going = self.sentence.beams, list[_Beam]()
        first = beams[0].member < 0
        for i in range(len(self.sentence.members) if first else len(beams)):
            one = beams[0] if first else beams[i]
            member = i if first else one.member
            row = self.scores[one.row]
            tokens = np.flatnonzero(row > -np.inf)
            if not len(tokens):
                raise ZooError("every token of a sentence is banned")
            tokens = tokens[np.lexsort((tokens, -row[tokens]))]
            weights = sampling_weights(row[tokens].astype(np.float64), self.rules)
            place = int(np.searchsorted(np.cumsum(weights), uniform(key, member, self.length), side="right"))
            token = int(tokens[min(place, len(weights) - 1)])
            self._add(going, one, member, token, one.score + float(row[token]))
        self.sentence.beams = going

    def extend_groups(self, size: int, limit: int) -> None:
        """Extends the groups in turn. size: beams of a group. limit: largest number of counted tokens."""
        sentence, going = self.sentence, list[_Beam]()
        first = sentence.beams[0].member < 0
        chosen: Counter[int] = Counter()
        for group in list(sentence.members):
            hypotheses = sentence.hypotheses.setdefault(group, [])
            penalty = np.zeros(self.scores.shape[1])
            for token, count in chosen.items():
                penalty[token] = self.rules.diversity_penalty * count
            if self.last and self.rules.forced_end:
                penalty[:] = 0
            candidates = []
            for slot, one in enumerate(sentence.beams):
                if first or one.member == group:
                    row = self.scores[one.row] - penalty
                    likely = np.lexsort((np.arange(len(row)), -row))[: 2 * size].tolist()
                    candidates += [(one.score + float(row[t]), slot, t) for t in likely if row[t] > -np.inf]
            candidates = sorted(candidates, key=lambda c: (-c[0], c[1], c[2]))[: 2 * size]
            if not candidates:
                raise ZooError("every token of a sentence is banned")
            for score, slot, token in candidates[:size]:
                if self.last or token == self.end:
                    self._add([], sentence.beams[slot], group, token, score)
            running = [candidate for candidate in candidates if candidate[2] != self.end][:size]
            if self.last or self._is_done(hypotheses, running, size, limit):
                sentence.members = [member for member in sentence.members if member != group]
                continue
            for score, slot, token in running:
                chosen[token] += 1
                self._add(going, sentence.beams[slot], group, token, score)
        sentence.beams = going

    def _add(self, going: list[_Beam], one: _Beam, member: int, token: int, score: float) -> None:
        """Adds an unfinished beam, or a hypothesis."""
        if self.last or token == self.end:
            tokens = one.tokens if token == self.end else [*one.tokens, token]
            total = (score - self.rules.word_penalty * self.counted) / self.counted**self.length_penalty
            self.sentence.hypotheses.setdefault(member, []).append(Hypothesis(list(tokens), total))
        else:
            going.append(_Beam(score, [*one.tokens, token], member, one.row))

    def _is_done(
        self, hypotheses: list[Hypothesis], running: list[tuple[float, int, int]], size: int, limit: int
    ) -> bool:
        """Whether a group has its translations."""
        if self.rules.kind != "transformers" or not running:
            return len(hypotheses) >= size
        state = SearchState(
            hypotheses=[hypotheses],
            active=np.zeros(1, np.int64),
            best_ended=np.zeros(1, bool),
            best_running=np.array([running[0][0]]),
            length=self.counted,
            limits=np.array([limit]),
            beam=size,
            best=size,
            length_penalty=self.length_penalty,
            rules=self.rules,
        )
        return bool(TERMINATION["transformers"](state)[0])


def sampling_weights(scores: NDArray[np.float64], rules: SearchConfig) -> NDArray[np.float64]:
    """Returns the probabilities of tokens after temperature, top-k and top-p.

    Args:
        scores: Log probabilities or logits in order, the largest first.
        rules: The rules.

    Returns:
        Probabilities of the first tokens; the others have none.
    """
    scores = scores[: rules.top_k or None]
    weights = np.exp((scores - scores[0]) / rules.temperature)
    weights /= weights.sum()
    tails = np.cumsum(weights[::-1])[::-1]  # of a token and all after it
    kept = max(int(np.count_nonzero(tails > 1 - rules.top_p)), 1)
    result: NDArray[np.float64] = weights[:kept] / weights[:kept].sum()
    return result


def sample_key(seed: int, source: Sequence[int]) -> int:
    """Returns where the numbers of a sentence's samples begin.

    Args:
        seed: The seed.
        source: Source tokens.
    """
    key = _mixed(seed & MASK)
    for token in source:
        key = _mixed(key ^ token)
    return key


def uniform(key: int, sample: int, position: int) -> float:
    """Returns a number from 0 to 1 for a position of a sample.

    Args:
        key: Result of `sample_key`.
        sample: Number of the sample.
        position: Length of the translation with the token.
    """
    return math.ldexp(_mixed(_mixed(key ^ sample) ^ position) >> 11, -53)


def _mixed(x: int) -> int:
    """Splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
