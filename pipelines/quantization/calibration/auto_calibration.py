"""Automatic calibration: evaluates every step on held-out samples and reverts the steps that lower the output SQNR.

`ptq.make_table` follows its recipe; here every choice is measured by the SQNR of the int8 outputs (`OutputSqnr`) on
samples that no correction saw. The steps are:

1. Smoothing of outlier channels (`smooth_channels`) and the observer: the best of all candidates with exact weights,
   because GPTQ makes up for their rounding in the next step (smoothing of BERT: 7 dB without GPTQ, 20 dB with it).
   Where the least squared error per tensor ("auto") keeps outliers that nothing downstream needs, another observer wins
   by 10 dB (hard-swish networks). Min-max wins where clipping hurts. Ranges that end where a function is flat win 4 dB
   (YOLO).
2. The corrections (GPTQ, bias correction): both, one of the two, or neither, which is also tried with min-max ranges.
   Of candidates that are close in SQNR, the one whose worst samples have less error wins (`LowestSqnr`).
3. Splitting of hidden channels with outlier weights (`split_channels`), with ranges and corrections of its own.
4. If the SQNR is still below `GOAL`: the layers that cost most stay float32, as long as most multiplications are int8.

Nothing here is timed, so the same inputs give the same table.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core.batches import Batch, length
from pipelines.core.progress import progress
from pipelines.graph import io, query
from pipelines.quantization.algorithms.split_channels import Splits
from pipelines.quantization.calibration.calibrate import MEMORY, Observation, observe
from pipelines.quantization.calibration.compared_outputs import ROOM, OutputSqnr
from pipelines.quantization.calibration.effort import Effort, drawn, effort_of
from pipelines.quantization.calibration.float_layers import leave_float, restore_weights
from pipelines.quantization.calibration.function_ranges import clip_to_functions
from pipelines.quantization.calibration.layerwise import sample_chunks
from pipelines.quantization.calibration.lowest_sqnr import LowestSqnr
from pipelines.quantization.calibration.range_search import quantized_tensors, search_ranges
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import (
    HELD_OUT,
    Factors,
    correct_table,
    equalized,
    search_equalization,
    smoothing_factors,
    splits_and_smoothing,
)
from pipelines.quantization.quantizer import correct, quantize
from pipelines.quantization.recipe import QuantRecipe

logger = logging.getLogger(__name__)

GOAL = 24.0  # dB of SQNR below which layers stay in float32
HELD_BACK = 3  # one of three samples is held out, up to HELD_OUT
CLOSE = 2.0  # dB; candidates farther behind the best on a part of the samples are evaluated on no more
WORST = 2.0  # weight of the SQNR of the worst samples beside that of all
WORST_GAIN = 1.25  # minimum gain in dB of a candidate that is chosen by the weighted sum; less may be noise
KEPT = 2**28  # bytes of weights of candidates above which their sessions are not kept
MOST = 2**23  # maximum input elements of held-out samples
SPLIT_GAIN = 0.2  # minimum gain of split channels in dB, which cost 1 to 2% of the time
CHANCE = 1.0  # minimum gain of an alternative in dB; less may be noise
Lowest = Callable[[list[CalibrationTable]], list[float]]
OBSERVERS = ("auto", "minmax", "percentile", "kl")  # candidates of "auto"


@dataclass(frozen=True)
class _Fitting:
    """Fitting samples in chunks for repeated iteration: all but one of every `stride` chunks."""

    model: ir.Model
    samples: Iterable[Batch]
    stride: int

    def __iter__(self) -> Iterator[Batch]:
        return (
            chunk
            for at, chunk in enumerate(sample_chunks(self.model, self.samples))
            if at % self.stride != self.stride // 2
        )


def auto_calibrate(
    model: ir.Model,
    recipe: QuantRecipe,
    samples: Iterable[Batch],
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    observation: Observation | None = None,
    seconds: float | None = None,
    effort: str = "best",
) -> CalibrationTable:
    """Computes the calibration table of highest output SQNR on held-out samples.

    An observer other than "auto" is used as it is. Without `recipe.correct`, neither smoothing nor corrections are
    tried, and no layer stays float32.

    Args:
        model: Float model after the rewrites.
        recipe: Quantization options.
        samples: Batches, array [samples, ...] for every graph input; iterated several times, so not an iterator.
        total: Number of samples, for the progress bars.
        max_memory: See `Observation`.
        observation: Observation of `model` on all samples, if there is one already.
        seconds: Time budget of the corrections, see `correct_layers`; None: no limit.
        effort: "fast", "default" or "best", see `pipelines.quantization.calibration.effort`. With "fast" there is
            neither smoothing nor correction, and no layer stays float32.

    Returns:
        The calibration table.

    Raises:
        RequestError: The effort is unknown; see `make_table`.
    """
    work = effort_of(effort)
    if observation is None:
        samples = drawn(model, samples, total, work.observed)
    clip, factors = search_equalization(model, recipe, samples)[0] if recipe.search else (False, {})
    if observation is None or factors:
        scaled = equalized(model, factors)
        binned = quantized_tensors(scaled, recipe)
        observation = observe(scaled, samples, total, max_memory=max_memory, binned=binned)
        observation.require_samples()
        observation.release()
    observation.require_samples()
    held_out, fitting = split_held_out(model, samples, observation.samples)

    corrects = recipe.correct and work.corrected != 0

    def tables_of(observation: Observation, **scaling: Any) -> list[CalibrationTable]:
        tables = _tables(model, recipe, observation)
        return [replace(table, clip=clip, equalization=factors, **scaling) for table in tables]

    def tables_with(splitting: Splits, smoothing: Factors) -> list[CalibrationTable]:
        scaled = equalized(model, factors, smoothing, splitting)
        binned = quantized_tensors(scaled, recipe)
        observed = observe(scaled, samples, total, max_memory=max_memory, binned=binned)
        observed.release()
        return tables_of(observed, splitting=splitting, smoothing=smoothing)

    splitting, smoothing = splits_and_smoothing(equalized(model, factors), recipe, fitting) if corrects else ({}, {})
    tables = tables_of(observation)
    tables += tables_with({}, smoothing) if smoothing else []
    if recipe.search:
        first, scaled = tables[0], equalized(model, factors)
        unscaled = replace(first, graph=io.digest(scaled), equalization={})
        searched = search_ranges(scaled, recipe, unscaled, fitting_head(fitting))
        tables.append(replace(searched, graph=first.graph, equalization=factors))
    best = tables[0]
    lowest = _Worst(model, recipe, samples, observation.samples, work) if work.lowest else None
    if len(tables) > 1:
        best = _best_ranges(model, recipe, tables, samples, observation.samples, work, lowest)
    if not corrects:
        return best
    metric = OutputSqnr(model, held_out, not work.thorough)
    int8_models = _Int8Models(model, recipe)

    def evaluate(table: CalibrationTable) -> float:
        return metric(int8_models.of(table))

    fewer = drawn(model, fitting, observation.samples - sum(map(length, held_out)), work.corrected)

    def corrected(table: CalibrationTable) -> CalibrationTable:
        int8 = int8_models.of(replace(table, bias={}, rounding={}))
        return correct_table(
            model, recipe, table, fewer, seconds=seconds, room=ROOM, positions=work.positions, int8=int8
        )

    smooth = bool(best.smoothing)
    best, sqnr = _retreat(corrected(best), tables, evaluate, lowest)
    if splitting:
        smoothing = smoothing_factors(equalized(model, factors, {}, splitting), recipe, fitting) if smooth else {}
        tables = tables_with(splitting, smoothing)
        split = _best_ranges(model, recipe, tables, samples, observation.samples, work, lowest)
        split, split_sqnr = _retreat(corrected(split), tables, evaluate, lowest)
        logger.info("splitting hidden channels: %.1f dB of SQNR, without: %.1f dB", split_sqnr, sqnr)
        best, sqnr = _best([best, split], [sqnr, split_sqnr], lowest, SPLIT_GAIN)
    if sqnr < GOAL:
        best = leave_float(model, recipe, best, metric, observation, sqnr, GOAL, work.thorough)
    return best


class _Int8Models:
    """Int8 models of tables; tables that differ in corrections alone share the work of quantization.

    Args:
        model: Float model.
        recipe: Quantization options.
    """

    def __init__(self, model: ir.Model, recipe: QuantRecipe) -> None:
        self._model, self._recipe = model, recipe
        self._last: tuple[CalibrationTable, ir.Model] | None = None

    def of(self, table: CalibrationTable) -> ir.Model:
        """Returns the result of `quantize` with a table."""
        plain = replace(table, bias={}, rounding={}, recipe={})
        if self._last is None or self._last[0] != plain:
            self._last = plain, quantize(self._model, self._recipe, plain)[0]
        int8 = self._last[1].clone()
        correct(int8.graph, self._recipe, table, {})
        return int8


def split_held_out(model: ir.Model, samples: Iterable[Batch], count: int) -> tuple[list[Batch], Iterable[Batch]]:
    """Splits samples into held-out and fitting samples, in chunks; with a single chunk both are the same.

    Held-out samples are drawn evenly, because neighbouring samples may be alike.

    Args:
        model: Float model.
        samples: Batches, iterated several times.
        count: Number of samples.

    Returns:
        Held-out samples, in memory, and the remaining samples.
    """
    stride = _stride(model, samples, count, min(count // HELD_BACK, HELD_OUT))
    held_out = _drawn(model, samples, stride)
    return held_out, _Fitting(model, samples, stride) if stride > 1 else held_out


def _stride(model: ir.Model, samples: Iterable[Batch], count: int, most: int) -> int:
    """Returns the stride of held-out chunks for `most` of `count` samples, limited to `MOST` elements."""
    first = next(iter(sample_chunks(model, samples)))
    size, elements = length(first), max(sum(array.size for array in first.values()), 1)
    chunks = -(-count // size)
    return max(chunks // max(min(most // size, MOST // elements), 1), 1)


def _drawn(model: ir.Model, samples: Iterable[Batch], stride: int) -> list[Batch]:
    """Returns one of every `stride` chunks of the samples."""
    return [chunk for at, chunk in enumerate(sample_chunks(model, samples)) if at % stride == stride // 2]


def fitting_head(fitting: Iterable[Batch]) -> list[Batch]:
    """Returns the first chunks of `fitting`, at most `HELD_OUT` samples.

    Args:
        fitting: Batches of fitting samples.

    Returns:
        The chunks, in memory.
    """
    head: list[Batch] = []
    for chunk in fitting:
        if head and sum(map(length, head)) + length(chunk) > HELD_OUT:
            break
        head.append(chunk)
    return head


def _tables(model: ir.Model, recipe: QuantRecipe, observation: Observation) -> list[CalibrationTable]:
    """Returns the tables of all observers that the recipe allows, its own first; then `clip_to_functions` of them."""
    observers = OBSERVERS if recipe.observer == "auto" else (recipe.observer,)
    tables = [observation.table(each, symmetric=recipe.symmetric) for each in observers]
    if recipe.observer == "auto" and not recipe.symmetric:
        tables += [each for table in tables if (each := clip_to_functions(model, table)).tensors != table.tensors]
    graph = io.digest(model)
    return [replace(each, observer=recipe.observer, graph=graph) for each in tables]


def _best(
    tables: list[CalibrationTable], sqnr: list[float], lowest: Lowest | None, chance: float = CHANCE
) -> tuple[CalibrationTable, float]:
    """Selects a table by its SQNR, and by that of its worst samples; the first unless another gains `chance`.

    Args:
        tables: Candidates.
        sqnr: SQNR of every candidate in dB.
        lowest: Returns the SQNR of the worst samples of candidates, see `LowestSqnr`; None: not used.
        chance: Minimum gain in dB.

    Returns:
        The table and its SQNR.
    """
    best = int(np.argmax(sqnr))
    best = best if sqnr[best] > sqnr[0] + chance else 0
    close = [at for at in range(len(tables)) if at == best or sqnr[at] > sqnr[best] - CLOSE]
    if lowest is not None and len(close) > 1:
        worst = dict(zip(close, lowest([tables[at] for at in close]), strict=True))
        value = {at: sqnr[at] + WORST * worst[at] for at in close}
        logger.info("SQNR of candidates, and of their worst samples: %s", {at: (sqnr[at], worst[at]) for at in close})
        other = max(close, key=value.__getitem__)
        best = other if value[other] > value[best] + WORST_GAIN else best
    return tables[best], sqnr[best]


def _evaluated(tables: list[CalibrationTable], evaluate: Callable[[CalibrationTable], float]) -> list[float]:
    """Returns the SQNR of every table."""
    sqnr = []
    with progress("evaluating", len(tables)) as advance:
        for table in tables:
            sqnr.append(evaluate(table))
            advance(1)
    return sqnr


class _Worst:
    """SQNR of the worst samples of int8 models by calibration tables, see `LowestSqnr`."""

    def __init__(self, model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch], count: int, work: Effort):
        self._model, self._int8_models = model, _Int8Models(model, recipe)
        self._metric = LowestSqnr(model, drawn(model, samples, count, work.lowest), not work.thorough)

    def __call__(self, tables: list[CalibrationTable], exact_weights: bool = False) -> list[float]:
        """Returns the SQNR of every table in dB; with float weights if asked."""
        models = [self._int8_models.of(table) for table in tables]
        for int8, table in zip(models, tables, strict=True):
            if exact_weights:
                restore_weights(int8, equalized(self._model, table.equalization, table.smoothing, table.splitting))
        return self._metric(models)


def _best_ranges(
    model: ir.Model,
    recipe: QuantRecipe,
    tables: list[CalibrationTable],
    samples: Iterable[Batch],
    count: int,
    work: Effort,
    lowest: _Worst | None,
) -> CalibrationTable:
    """Selects the table of the best ranges on `work.judged` samples; no range was fitted to the outputs.

    Many samples are needed: a range that clips one sample in a hundred looks good on the others. If the work is not
    thorough, candidates that are behind by more than `CLOSE` on a quarter of the samples are left out there.
    """
    judged = _drawn(model, samples, _stride(model, samples, count, work.judged))
    metric = OutputSqnr(model, judged, not work.thorough)

    exact_weights = recipe.correct and work.corrected != 0

    def opened(table: CalibrationTable) -> ort.InferenceSession:
        int8, _ = quantize(model, recipe, table)
        if exact_weights:
            restore_weights(int8, equalized(model, table.equalization, table.smoothing, table.splitting))
        return metric.open(int8)

    sessions: dict[int, ort.InferenceSession] = {}  # by the position of the table; of small models
    part, small = -(-len(judged) // 4), len(tables) * query.weight_bytes(model) < KEPT
    candidates = list(enumerate(tables))
    if not work.thorough and part < len(judged):
        first = []
        for at, table in candidates:
            session = opened(table)
            first.append(metric.of(session, slice(part)))
            if small:
                sessions[at] = session
        candidates = [each for each in candidates if each[0] == 0 or first[each[0]] > max(first) - CLOSE]
    if len(candidates) == 1:
        return tables[0]
    positions = {id(table): at for at, table in candidates}

    def evaluate(table: CalibrationTable) -> float:
        session = sessions.pop(positions[id(table)], None)
        return metric.of(session or opened(table), slice(None))

    chosen = [table for _, table in candidates]
    worst = None if lowest is None else functools.partial(lowest, exact_weights=exact_weights)
    return _best(chosen, _evaluated(chosen, evaluate), worst)[0]


def _retreat(
    corrected: CalibrationTable,
    tables: list[CalibrationTable],
    evaluate: Callable[[CalibrationTable], float],
    lowest: Lowest | None,
) -> tuple[CalibrationTable, float]:
    """Drops corrections that lower the SQNR on held-out samples, or falls back to min-max; returns table and SQNR.

    tables: those without corrections.
    """
    tried = [corrected]
    if corrected.bias and corrected.rounding:
        tried += [replace(corrected, bias={}), replace(corrected, rounding={})]
    if corrected.bias or corrected.rounding:
        tried.append(replace(corrected, bias={}, rounding={}))
    plain = [each for each in tables if not each.smoothing and _is_minmax(each)]
    tried += [replace(each, recipe=corrected.recipe) for each in plain]
    best, sqnr = _best(tried, _evaluated(tried, evaluate), lowest)
    if best is not corrected:
        kept = [name for name, each in (("GPTQ", best.rounding), ("bias correction", best.bias)) if each]
        logger.info("on the held-out samples, the best choice is %s", f"only {kept[0]}" if kept else "no correction")
    return best, sqnr


def _is_minmax(table: CalibrationTable) -> bool:
    """Whether every range is the observed one."""
    return all((each.low, each.high) == (each.minimum, each.maximum) for each in table.tensors.values())
