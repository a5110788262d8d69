"""Rules for the scores of the next tokens, in numpy: the reference of search/score_rules.cpp of the native kernels.

They are the logits processors of transformers, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.translation.search.config import Demands, SearchConfig


def apply_rules(
    scores: NDArray[np.floating[Any]],
    history: NDArray[np.int64],
    rules: SearchConfig,
    *,
    end: int,
    begins: bool,
    sources: Sequence[Sequence[int]] | None = None,
    demands: Sequence[Demands] | None = None,
) -> NDArray[np.floating[Any]]:
    """Applies the rules to scores of the next token.

    Args:
        scores: Log probabilities or logits, [rows, vocabulary].
        history: Tokens of every row so far, int64 [rows, length].
        rules: The rules.
        end: End token.
        begins: Whether the next token is the first one after the prefix.
        sources: Source tokens of every row, for `encoder_no_repeat_ngram`.
        demands: Of every row, which must not end without its phrases.

    Returns:
        The scores; -inf for tokens that must not follow.
    """
    scores, length = scores.copy(), history.shape[1] + 1
    penalty = rules.repetition_penalty
    for i, (row, tokens) in enumerate(zip(scores, history.tolist(), strict=True)):
        if penalty != 1:
            seen = np.array(sorted({*rules.counted, *tokens}), np.int64)
            row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
        banned = [last for *before, last in rules.bad_words if tokens[len(tokens) - len(before) :] == before]
        if rules.no_repeat_ngram:
            banned += following([*rules.counted, *tokens], [*rules.counted, *tokens], rules.no_repeat_ngram)
        if rules.encoder_no_repeat_ngram and sources is not None:
            banned += following(sources[i], tokens, rules.encoder_no_repeat_ngram)
        if demands is not None and not demands[i].state(tokens).complete:
            banned.append(end)
        if banned:
            row[banned] = -np.inf
    scores[:, list(rules.banned)] = -np.inf
    if begins:
        scores[:, list(rules.first_banned)] = -np.inf
    if length < rules.least:
        scores[:, end] = -np.inf
    return scores


def following(text: Sequence[int], tokens: Sequence[int], size: int) -> list[int]:
    """Finds the tokens that would complete an n-gram of a text.

    Args:
        text: The text.
        tokens: Tokens before the next one.
        size: Size of the n-grams.

    Returns:
        The tokens of `text` after the last size - 1 tokens.
    """
    if len(tokens) < size - 1:
        return []
    before = list(tokens[len(tokens) - size + 1 :])
    return [text[i + size - 1] for i in range(len(text) - size + 1) if list(text[i : i + size - 1]) == before]
