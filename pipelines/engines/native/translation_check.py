"""Validation of native translations: hypotheses of example sentences and their scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.engines.native.translation import NativeTranslator
from pipelines.engines.native.validation import Run

BEAM = 4
TOKENS = 12  # maximum number of tokens of a translation
Integers = NDArray[np.int64]


def unvalidated(path: Path, threads: int, start: int, end: int, padding: int) -> Run:
    """Opens a native translator for `validation.compare`.

    Args:
        path: File that `translation.store` wrote, or ONNX file.
        threads: Number of threads.
        start: Start token.
        end: End token.
        padding: Padding token.

    Returns:
        A function from {"source": int64 [n, s], padded; "words": bool [n, vocabulary], shortlists, if there are any} to
        {"tokens": int64 [n, BEAM + 1, TOKENS], padded; "scores": float64 [n, BEAM + 1], mean log probabilities}: the
        hypotheses of a beam, and that of greedy search.
    """
    native = NativeTranslator(path, threads)

    def run(batch: Batch) -> dict[str, NDArray[Any]]:
        sources = [row[row != padding].astype(np.int32) for row in batch["source"]]
        words = [np.flatnonzero(row).astype(np.int32) for row in batch["words"]] if "words" in batch else None
        if words:
            native.share_words(functools.reduce(np.intersect1d, words))
        most = min(TOKENS, native.positions)
        slots = max(len(sources) // 2, 1)  # the others replace finished sentences
        translations = [
            native.translate(
                sources,
                [most] * len(sources),
                start=start,
                end=end,
                beam=beam,
                best=beam,
                length_penalty=0.0,
                slots=slots,
                rules={"banned": (padding,)},
                words=words,
            )
            for beam in (BEAM, 1)
        ]
        tokens = np.full((len(sources), BEAM + 1, TOKENS), padding)
        scores = np.zeros(tokens.shape[:2])
        for i, hypotheses in enumerate(zip(*translations, strict=True)):
            for k, (hypothesis, score) in enumerate(one for several in hypotheses for one in several):
                whole = [*hypothesis, end][:most]
                tokens[i, k, : len(whole)] = whole
                scores[i, k] = score / len(whole)
        return {"tokens": tokens, "scores": scores}

    return run


def example(sources: Sequence[NDArray[Any]], longest: int, padding: int) -> dict[str, Integers]:
    """Returns sentences to check a translator on: a long one, a short one, and others.

    Args:
        sources: Tokens of sentences, integers.
        longest: Number of tokens of the long one.
        padding: Padding token.

    Returns:
        {"source": int64 [sentences + 2, longest], padded}.
    """
    tokens = np.concatenate(sources)
    rows = [np.resize(tokens, longest), sources[0][-2:], *(row[:longest] for row in sources)]
    padded = np.full((len(rows), longest), padding)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return {"source": padded}
