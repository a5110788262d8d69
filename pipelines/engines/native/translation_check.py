"""Native translations held to ONNX Runtime: the scores of their tokens, as the frozen graph computes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.engines.native.held import Expected, Run
from pipelines.engines.native.translation import NativeTranslator

BEAM = 4
TOKENS = 12  # maximum number of tokens of a translation
ROWS = 64  # target prefixes that the reference computes at once
Integers = NDArray[np.int64]


def unheld(path: Path, threads: int, start: int, end: int, padding: int) -> Run:
    """Opens a native translator for `held.check`.

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
        found = [
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
        for i, hypotheses in enumerate(zip(*found, strict=True)):
            for k, (hypothesis, score) in enumerate(one for several in hypotheses for one in several):
                whole = [*hypothesis, end][:most]
                tokens[i, k, : len(whole)] = whole
                scores[i, k] = score / len(whole)
        return {"tokens": tokens, "scores": scores}

    return run


def expected(path: Path, threads: int, start: int, end: int, padding: int, *, optimize: bool = True) -> Expected:
    """Opens the frozen graph in ONNX Runtime, as the reference of `unheld`.

    Args:
        path: ONNX file.
        threads: Number of threads.
        start: Start token.
        end: End token.
        padding: Padding token.
        optimize: Whether ONNX Runtime optimizes the graph.

    Returns:
        A function from a batch and outputs of `unheld` to {"scores": float64 [n, BEAM + 1]}: the mean log probabilities
        of the tokens, and for greedy search those of the likeliest tokens after the same prefixes.

    Raises:
        RequestError: The graph is no translation model.
    """
    from pipelines.engines.onnxruntime import OnnxRuntimeSession
    from pipelines.graph import edit, io

    whole = io.load(path)
    cuts = (["source"], ["memory"]), (["source", "memory", "target"], ["logits"])
    encoder, decoder = (
        OnnxRuntimeSession(path, threads, io.serialized(edit.extract(whole, *cut)), optimize=optimize) for cut in cuts
    )

    def expect(batch: Batch, outputs: Batch) -> dict[str, NDArray[Any]]:
        source, tokens = batch["source"], outputs["tokens"]
        rows: dict[tuple[int, ...], int] = {}  # of a sentence and a prefix
        places = np.full(tokens.shape, -1)
        for i, k in np.ndindex(tokens.shape[:2]):
            hypothesis = tokens[i, k][tokens[i, k] != padding].tolist()
            places[i, k, : len(hypothesis)] = [
                rows.setdefault((i, start, *hypothesis[:t]), len(rows)) for t in range(len(hypothesis))
            ]
        sentences = np.array([row[0] for row in rows])
        prefixes = np.full((len(rows), max(map(len, rows)) - 1), padding)
        for r, row in enumerate(rows):
            prefixes[r, : len(row) - 1] = row[1:]
        memory, lengths = encoder.run({"source": source})["memory"], (source != padding).sum(axis=1)
        scores = np.zeros(tokens.shape[:2])
        for first in range(0, len(rows), ROWS):
            part = slice(first, first + ROWS)
            chosen = sentences[part]
            width = lengths[chosen].max()
            given = {"source": source[chosen, :width], "memory": memory[chosen, :width], "target": prefixes[part]}
            logits = decoder.run(given)["logits"].astype(np.float64)
            if "words" in batch:
                logits[~batch["words"][chosen]] = -np.inf
            logits -= logits.max(axis=1, keepdims=True)
            likely = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            greedy = np.delete(likely, padding, axis=1).max(axis=1)
            for i, k, t in np.argwhere((first <= places) & (places < first + ROWS)):
                r = places[i, k, t] - first
                scores[i, k] += likely[r, tokens[i, k, t]] if k < BEAM else greedy[r]
        return {"scores": scores / (tokens != padding).sum(axis=2)}

    return expect


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
