"""Tokens of sentences: special tokens, padding, and batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAD, UNKNOWN, START, END = 0, 1, 2, 3  # tokens of every vocabulary
SOURCE, TARGET, MEMORY, LOGITS = "source", "target", "memory", "logits"  # values of the graph of a model
POSITIONS = 512  # default maximum number of tokens of a sentence

Tokens = NDArray[np.int32]


def batch_by_tokens(lengths: Sequence[int], tokens: int, rows: int = 1 << 30) -> list[tuple[int, int]]:
    """Cuts sentences into batches, in their order.

    Args:
        lengths: Number of tokens of each sentence.
        tokens: Maximum number of tokens of a batch, with padding.
        rows: Maximum number of sentences of a batch.

    Returns:
        (first, last + 1) of each batch.
    """
    batches, first, longest = [], 0, 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > first and (longest * (i + 1 - first) > tokens or i - first == rows):
            batches.append((first, i))
            first, longest = i, length
    return [*batches, (first, len(lengths))] if len(lengths) else []


def pad(sentences: Sequence[Sequence[int] | Tokens]) -> NDArray[np.int64]:
    """Pads sentences with `PAD` to the longest.

    Args:
        sentences: Tokens of each sentence.

    Returns:
        int64 [n, longest].
    """
    padded = np.full((len(sentences), max(map(len, sentences))), PAD, np.int64)
    for row, sentence in zip(padded, sentences, strict=True):
        row[: len(sentence)] = sentence
    return padded
