"""Calibration of text encoders on the texts that ship, and the quality of int8 on other texts.

The quality is that of the native kernels, or of onnxruntime where they do not compute the graph: cosines of int8 to
float32 for embeddings, the largest change and the agreement for scores. Where embeddings are below `SHARE` or
`MINIMUM`, or scores below `AGREEMENT`, the layers that lose most stay in float32 (`leave_float`); these are chosen on
the texts of the calibration. Where quality is still low, the quality in onnxruntime is listed if it is better: its
attention is float32, while the native kernels round large scores, such as the undivided scores of T5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data import sample_texts
from pipelines.engines.native.texts import unvalidated
from pipelines.engines.native.validation import Run
from pipelines.graph import io, large_weights, reference_session
from pipelines.models.folder import ModelFolder
from pipelines.quantization.calibration.float_layers import with_float_layers
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.quantizer import Quantizer
from pipelines.quantization.recipe import QuantRecipe
from zoo.texts import metrics
from zoo.texts.data import tokenizer
from zoo.texts.data.prompts import Prompts
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.heads.late_interaction.roles import DOCUMENT, QUERY, Roles
from zoo.texts.models.config import IDS, MASK, TYPES, ModelConfig

LENGTH = 128  # tokens of a calibration row
ROWS = 256  # maximum number of calibration rows
QUERY_PART = 8  # interval of the texts that are queries of a multi-vector encoder
BATCH_TOKENS = 2048  # of a padded batch that judges
SHARE, MINIMUM = 0.01, 0.97  # largest share of texts of cosines below `metrics.LOW_COSINE`, and the lowest cosine
AGREEMENT = 0.98
GOAL = 30.0  # dB of SQNR up to which layers stay in float32
OUTPUT = "output"
JUDGED = 4  # batches of calibration rows on which layers are chosen
logger = logging.getLogger(__name__)


class DefaultTexts:
    """Texts that ship, as a model of a folder reads them.

    Args:
        folder: Model folder.
    """

    def __init__(self, folder: ModelFolder) -> None:
        features = folder.preprocessing
        self.config = ModelConfig.from_json(features["form"])
        pipeline = folder.entry.pipeline()
        self.pairs = pipeline.TEXTS_PER_ROW == 2  # type: ignore[attr-defined]
        self.labels = 0 if pipeline.EMBEDS else self.config.labels  # type: ignore[attr-defined]
        self.several = self.labels > 1 and features.get("function_to_apply") == "sigmoid"
        self._prompt, self._length = Prompts(features).default, int(features["max_length"])
        path, lower = folder.verify(tokenizer.FILE), bool(features.get("lower"))
        options: dict[str, Any] = {"pairs": self.pairs, "left_out": features.get("left_out", "")}
        self._tokenizer = Tokenizer(path, self.config.vocabulary, self._length, lower, **options)
        self._roles = Roles(features, self._tokenizer) if "roles" in features else None

    def calibration(self) -> dict[str, NDArray[Any]]:
        """Returns calibration rows without padding, see `TextPipeline.calibration`."""
        texts = sample_texts.calibration_texts()
        tokens = self._tokens(texts)
        if self._roles:  # a part of the texts as queries, too
            tokens = Tokens.concatenated([self._roles.tokens(texts[::QUERY_PART], QUERY), tokens])
        return tokens.packed(self.config.inputs, min(LENGTH, self._length), ROWS)

    def evaluation(self) -> list[Batch]:
        """Returns padded batches of the texts that judge, the shortest texts first."""
        tokens = self._tokens(sample_texts.evaluation_texts())
        return [part.padded(self.config.inputs) for part, *_ in tokens.batches(BATCH_TOKENS, BATCH_TOKENS)]

    def _tokens(self, texts: Sequence[str]) -> Tokens:
        if self.pairs:
            return self._tokenizer([(self._prompt + a, b) for a, b in sample_texts.pairs(texts)])
        if self._roles:
            return self._roles.tokens(texts, DOCUMENT)
        return self._tokenizer([self._prompt + text for text in texts])


def judged(
    folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
) -> tuple[CalibrationTable, dict[str, Any]]:
    """Measures the quality of int8, and keeps layers in float32 where it is low.

    Args:
        folder: Model folder.
        path: Its rewritten graph; it is not in memory meanwhile.
        recipe: Quantization options.
        table: Its calibration table.

    Returns:
        The table, with `keep_float` if that is better, and the quality of it, see `quality`.
    """
    reference_session.release()  # of the calibration
    texts = DefaultTexts(folder)
    labels, several, pairs, judging = texts.labels, texts.several, texts.pairs, texts.evaluation()
    del texts  # a tokenizer takes 1 KB a token
    small, used = large_weights.used_rows(io.load(path), judging)
    machine.trim()
    batches = list(used)
    exact = _outputs(_stock(small), batches, pairs)
    reference_session.release()
    count = sum(len(batch[MASK]) for batch in batches)

    def measure(table: CalibrationTable, engine: Callable[[ir.Model], Run]) -> dict[str, Any]:
        quantizer = Quantizer(small, recipe)
        int8, _ = quantizer.quantize(replace(table, graph=io.digest(small)))
        return {"texts": count, **quality(exact, _outputs(engine(int8), batches, pairs), labels, several)}

    result = measure(table, _native)
    if _is_low(result):
        better = replace(_with_float_layers(folder, path, recipe, table), graph=table.graph)
        improved = measure(better, _native)
        if better.keep_float and _order(improved) > _order(result):
            table, result = better, improved | {"float_layers": sorted(better.keep_float), "int8_alone": result}
    if _is_low(result) and _order(stock := measure(table, _stock)) > _order(result):
        result |= {"onnxruntime": stock}
    return table, result


def _with_float_layers(
    folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
) -> CalibrationTable:
    """Returns the table with layers in float32, chosen on the calibration rows."""
    whole = DefaultTexts(folder).calibration()
    rows = [{name: array[i : i + JUDGED] for name, array in whole.items()} for i in range(0, len(whole[IDS]), JUDGED)]
    small, used = large_weights.used_rows(io.load(path), rows[:: max(len(rows) // JUDGED, 1)][:JUDGED])
    own = replace(table, graph=io.digest(small))
    return next(with_float_layers(Quantizer(small, recipe), own, list(used), GOAL))


def _stock(model: ir.Model) -> Run:
    """Opens a model in onnxruntime."""
    session = reference_session.lean_session(model, "its evaluation needs", quick=True)
    return lambda batch: {OUTPUT: reference_session.run(session, batch)[0]}


def _native(model: ir.Model) -> Run:
    """Opens an int8 model in the native kernels, which compute no padding, or else in onnxruntime."""
    try:
        return unvalidated(model, machine.cores(), OUTPUT, IDS, MASK, TYPES)
    except RequestError:
        return _stock(model)


def _outputs(run: Run, batches: Sequence[Batch], pairs: bool) -> NDArray[Any]:
    """Computes the output for all texts: float32 [texts, width], or [tokens, width] without the padding.

    Scores of the tokens of pairs, which mark answers, become the tokens of the highest scores: int64 [texts, width].
    """
    rows = []
    with progress("comparing int8 and float32", len(batches)) as advance:
        for batch in batches:
            output = run(batch)[OUTPUT]
            mask = batch[MASK] != 0
            if output.ndim == 3:
                output = np.where(mask[:, :, None], output, -np.inf).argmax(axis=1) if pairs else output[mask]
            rows.append(output)
            advance(1)
    return np.concatenate(rows)


def quality(exact: NDArray[Any], int8: NDArray[Any], labels: int, several: bool = False) -> dict[str, Any]:
    """Compares outputs of int8 and float32.

    Args:
        exact: Outputs of float32, [n, width], or integers.
        int8: Outputs of int8, [n, width], or integers.
        labels: Number of scores; 0 for embeddings.
        several: Whether a text has all labels of a probability above 0.5.

    Returns:
        For embeddings the cosines' {"mean", "minimum", "below_0.99": share}; for scores
        {"largest_change", "agreement"}: the largest change of a score before its activation; the share of texts or
        tokens with the same highest score (`several`: the same labels) or, with one score, the share of successive
        texts in the same order, and "pearson", their correlation. Of integers, only the share of equal rows.
    """
    if exact.dtype == np.int64:
        return {"agreement": round(float((exact == int8).all(axis=1).mean()), 5)}
    if not labels:
        norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(int8, axis=1)
        cosines = np.einsum("ij,ij->i", exact, int8, dtype=np.float64) / np.maximum(norms, 1e-30)
        return {
            "mean": round(float(cosines.mean()), 5),
            "minimum": round(float(cosines.min()), 5),
            f"below_{metrics.LOW_COSINE}": round(float((cosines < metrics.LOW_COSINE).mean()), 5),
        }
    correlation = {}
    if several:
        same = ((exact > 0) == (int8 > 0)).all(axis=1)
    elif labels > 1:
        same = exact.argmax(axis=1) == int8.argmax(axis=1)
    else:
        same = np.signbit(np.diff(exact[:, 0])) == np.signbit(np.diff(int8[:, 0]))
        correlation = {"pearson": round(metrics.pearson(exact[:, 0], int8[:, 0]), 5)}
    return {
        "largest_change": round(float(np.abs(exact - int8).max()), 5),
        "agreement": round(float(same.mean()), 5),
        **correlation,
    }


def _is_low(result: dict[str, Any]) -> bool:
    if "agreement" in result:
        return bool(result["agreement"] < AGREEMENT)
    return bool(result[f"below_{metrics.LOW_COSINE}"] > SHARE or result["minimum"] < MINIMUM)


def _order(result: dict[str, Any]) -> tuple[float, ...]:
    """Key of a quality; the greater, the better."""
    if "agreement" in result:
        return (result["agreement"], -result.get("largest_change", 0.0))
    return (-result[f"below_{metrics.LOW_COSINE}"], min(result["minimum"], MINIMUM), result["mean"])
