"""Calibration of translation models on the texts that ship, and the quality of int8 on other texts.

The quality is the share of next tokens on which int8 and float32 agree, after beginnings of the float model's greedy
translations. Where it is below `AGREEMENT`, the kinds of layers or the layers that lose most stay in float32
(`leave_float`), such as the second feed-forward layers of T5, whose inputs have outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch, cut
from pipelines.core.derived import temporary_derived
from pipelines.core.progress import progress
from pipelines.data import sample_texts
from pipelines.graph import io, reference_session
from pipelines.models.folder import ModelFolder
from pipelines.quantization.calibration.float_layers import with_float_layers
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.quantizer import Quantizer
from pipelines.quantization.recipe import QuantRecipe
from zoo.translation.data.parallel_text import decoder_samples
from zoo.translation.data.tokens import START, UNKNOWN, Tokens, pad
from zoo.translation.data.vocabularies import in_languages

LENGTH = 64  # maximum number of source tokens, and half of that of target tokens
CALIBRATING, JUDGING = 128, 192  # sentences
POSITIONS = 2  # next tokens of a sentence that are compared
BATCH = 16
AGREEMENT = 0.98
GOAL = 30.0  # dB of SQNR up to which layers stay in float32
LANGUAGES = 8  # target languages of a model that has no default
MAX_FLOAT_SHARE = 0.35  # maximum share of the multiplications in float32; a third are those of T5's second layers
JUDGED = 4  # batches on which layers are chosen


def samples(folder: ModelFolder, count: int = 0) -> dict[str, NDArray[np.int64]]:
    """Returns calibration samples of a model: texts that ship, with the float model's translations.

    Args:
        folder: Model folder.
        count: Maximum number of texts; 0: `CALIBRATING`.

    Returns:
        {"source", "target"}, see `decoder_samples`.
    """
    return decoder_samples(*_translated(folder, sample_texts.calibration_texts(), count or CALIBRATING))


def judged(
    folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
) -> tuple[CalibrationTable, dict[str, Any]]:
    """Measures the quality of int8, and keeps layers in float32 where it is low.

    Args:
        folder: Model folder.
        path: Its rewritten graph.
        recipe: Quantization options.
        table: Its calibration table.

    Returns:
        The table, with `keep_float` if that is better, and {"texts", "agreement": share of equal next tokens}; with
        layers in float32 also "float_layers" and "int8_alone", the quality without them.
    """
    reference_session.release()  # of the calibration
    sources, targets = _translated(folder, sample_texts.evaluation_texts(), JUDGING)
    batches = _beginnings(sources, targets)
    quantizer = Quantizer(io.load(path), recipe)
    exact = _next_tokens(quantizer.model, batches)

    def measure(table: CalibrationTable) -> dict[str, Any]:
        int8, _ = quantizer.quantize(table)
        same = np.mean(exact == _next_tokens(int8, batches))
        return {"texts": len(sources), "agreement": round(float(same), 5)}

    result = measure(table)
    if result["agreement"] >= AGREEMENT:
        return table, result
    rows, best = list(cut(samples(folder, JUDGED * BATCH), BATCH)), (table, result)
    for better in with_float_layers(quantizer, table, rows, GOAL, kinds=(True, False), share=MAX_FLOAT_SHARE):
        improved = measure(better) if better.keep_float else result
        if improved["agreement"] > best[1]["agreement"]:
            best = better, improved | {"float_layers": sorted(better.keep_float), "int8_alone": result}
        if best[1]["agreement"] >= AGREEMENT:
            break
    return best


def _translated(folder: ModelFolder, texts: Sequence[str], count: int) -> tuple[list[Tokens], list[list[int]]]:
    """Returns the tokens of texts with the least unknown tokens, evenly drawn, and their greedy float translations.

    A model that needs a language and has no default translates the texts into several languages in turn.
    """
    with temporary_derived(folder.path):
        pipeline: Any = folder.entry.pipeline()(folder, "fp32", "onnxruntime")
        pipeline.beam = 1
        vocabularies = in_languages(pipeline.vocabulary, LANGUAGES)
        drawn = _drawn(vocabularies[0].encode(list(texts)), min(LENGTH, pipeline.max_length), count)
        sources: list[Tokens] = []
        targets: list[list[int]] = []
        for first, pipeline.vocabulary in enumerate(vocabularies):
            part = pipeline.vocabulary.encode([texts[i] for i in drawn[first :: len(vocabularies)]])
            targets += [hypotheses[0].tokens[: 2 * LENGTH] for hypotheses in pipeline.translate(part)]
            sources += part
        return sources, targets


def _drawn(tokens: Sequence[Tokens], longest: int, count: int) -> list[int]:
    """Returns the positions of `count` texts of at most `longest` tokens with the least unknown ones, evenly drawn."""
    short = [i for i, sentence in enumerate(tokens) if len(sentence) <= longest]
    short = short or [min(range(len(tokens)), key=lambda i: len(tokens[i]))]
    unknown = [float(np.mean(tokens[i] == UNKNOWN)) for i in short]
    count = min(count, len(short))
    most = sorted(unknown)[count - 1]
    whole = [i for i, share in zip(short, unknown, strict=True) if share <= most]
    return [whole[i * len(whole) // count] for i in range(count)]


def _beginnings(sources: Sequence[Tokens], targets: Sequence[Sequence[int]]) -> list[Batch]:
    """Returns batches of sources with beginnings of their targets of random lengths, the shortest sources first."""
    random, rows = np.random.default_rng(0), []
    for i in sorted(range(len(sources)), key=lambda i: len(sources[i])):
        for end in random.integers(len(targets[i]) + 1, size=POSITIONS):
            rows.append((sources[i], [START, *targets[i][:end]]))
    parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    return [
        {"source": pad([source for source, _ in part]), "target": pad([target for _, target in part])} for part in parts
    ]


def _next_tokens(model: ir.Model, batches: Sequence[Batch]) -> NDArray[np.int64]:
    """Returns the most probable next token of every sample."""
    session = reference_session.lean_session(model, "its evaluation needs", quick=True)
    tokens = []
    with progress("comparing int8 and float32", len(batches)) as advance:
        for batch in batches:
            tokens.append(reference_session.run(session, batch)[0].argmax(axis=1))
            advance(1)
    return np.concatenate(tokens)
