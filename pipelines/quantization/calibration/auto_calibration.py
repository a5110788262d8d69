"""Automatic calibration: evaluates every step on held-out samples and reverts the steps that lower the output SQNR.

`ptq.make_table` follows its recipe; here every choice is measured by the SQNR of the int8 outputs (`OutputSqnr`) on
samples that no correction saw. The steps are:

1. Smoothing of outlier channels (`smooth_channels`) and the observer: the best of all candidates with exact weights,
   because GPTQ makes up for their rounding in the next step (smoothing of BERT: 7 dB without GPTQ, 20 dB with it).
   Where the least squared error per tensor ("auto") keeps outliers that nothing downstream needs, another observer wins
   by 10 dB (hard-swish networks). Min-max wins where clipping hurts, the means of the extremes of samples where few
   samples reach far (2 dB of MobileNet-V2), with their standard deviation added where some do (7 dB of YOLOv8n with
   random weights, 2 dB of RT-DETR), and with three where other samples reach farther. Ranges that end where a
   function is flat win 4 dB (YOLO).
   Convolutional networks are smoothed with the best ranges alone.
2. The corrections (GPTQ, bias correction): both, one of the two, or neither, which is also tried with min-max ranges;
   with the effort "fast" the bias correction from mean inputs (`mean_bias`), or none.
3. Splitting of hidden channels with outlier weights (`split_channels`), with ranges and corrections of its own.
4. If the SQNR is still below `GOAL`, or that of the worst samples below `TAIL`: the layers that cost most stay float32,
   as long as most multiplications are int8.

`candidates` evaluates and selects the tables. Nothing is timed, so the same inputs give the same table.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from pipelines.core.batches import Batch, cut, length
from pipelines.graph import io
from pipelines.quantization.algorithms.smooth_channels import is_mostly_linear
from pipelines.quantization.algorithms.split_channels import Splits
from pipelines.quantization.calibration.calibrate import MEMORY, Observation, observe
from pipelines.quantization.calibration.candidates import HARDEST, Evaluation, Folds, Group, select_table
from pipelines.quantization.calibration.compared_outputs import ROOM, Errors, OutputSqnr, can_be_cut
from pipelines.quantization.calibration.effort import Effort, effort_of, elements, fitting_head, split_held_out
from pipelines.quantization.calibration.float_layers import leave_float
from pipelines.quantization.calibration.function_ranges import clip_to_functions
from pipelines.quantization.calibration.layerwise import drawn
from pipelines.quantization.calibration.observers import Histogram
from pipelines.quantization.calibration.range_search import quantized_tensors, search_ranges
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import (
    Factors,
    correct_table,
    equalized,
    search_equalization,
    smoothing_factors,
    splits_and_smoothing,
)
from pipelines.quantization.recipe import QuantRecipe

logger = logging.getLogger(__name__)

GOAL = 24.0  # dB of SQNR below which layers stay in float32
LOW = 20.0  # the same for many layers together, which cost speed: labels begin to change there
TAIL = 16.0  # dB of SQNR of the worst samples, as GOAL
PART = 4  # held-out samples of a batch; the gain of a layer in float32 is measured on the first batch
SPLIT_GAIN = 0.2  # minimum gain in dB of split channels, which cost 1 to 2% of the time, and of one more product
OBSERVERS = ("auto", "minmax", "percentile", "kl")  # candidates of "auto"
DEVIATIONS = (0.0, 1.0, 3.0)  # widths of further candidates, see `Histogram.mean_extremes`


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
        effort: "fast", "default" or "best", see `pipelines.quantization.calibration.effort`. With "fast"
            networks of linear layers alone are smoothed, no layer stays float32, and biases alone are corrected
            (`mean_bias`).

    Returns:
        The calibration table.

    Raises:
        RequestError: The effort is unknown; see `make_table`.
    """
    steps = _Steps(model, recipe, samples, total, max_memory, observation, seconds, effort_of(effort))
    splitting, smoothing = steps.outlier_channels()
    groups = steps.range_candidates(smoothing)
    if len(groups) == len(groups[0]) == 1 and not steps.corrects:
        return groups[0][0]
    ranges = steps.best_ranges(groups, smoothing)
    if not steps.corrects:
        return steps.evaluation.with_mean_bias(ranges, steps.counted) if recipe.correct else ranges
    best, errors = steps.corrected(ranges, groups)
    if splitting:
        best, errors = steps.split(best, errors, splitting, smooths=bool(ranges.smoothing))
    return steps.with_float_layers(best, errors)


class _Steps:
    """The steps of `auto_calibrate` on one model; the arguments are its own, `work` is its effort."""

    def __init__(
        self,
        model: ir.Model,
        recipe: QuantRecipe,
        samples: Iterable[Batch],
        total: int | None,
        max_memory: str | int,
        observation: Observation | None,
        seconds: float | None,
        work: Effort,
    ) -> None:
        self._model, self._recipe, self._total, self._work = model, recipe, total, work
        self._max_memory, self._seconds = max_memory, seconds
        self._samples = drawn(model, samples, total, work.observed_of(model)) if observation is None else samples
        self._clip, self._factors = (
            search_equalization(model, recipe, self._samples)[0] if recipe.search else (False, {})
        )
        if observation is None or self._factors:
            scaled = self._scaled()
            observation = self._observe(scaled, quantized_tensors(scaled, recipe))
        observation.require_samples()
        self._observation = observation
        self._sources: list[tuple[Observation, dict[str, Any]]] = []  # of the candidates of ranges
        self._held_out, self._fitting = split_held_out(model, self._samples, observation.samples)
        self._remaining = observation.samples - sum(map(length, self._held_out))
        self.counted = drawn(model, self._fitting, self._remaining, work.counted)
        self.corrects = recipe.correct and work.corrected != 0

    @cached_property
    def evaluation(self) -> Evaluation:
        """Evaluation of candidates on samples of all batches."""
        return Evaluation(self._model, self._recipe, self._samples, self._observation, self._work)

    @cached_property
    def _metric(self) -> OutputSqnr:
        """SQNR of int8 models on the held-out samples, which no correction is fitted on."""
        fine = not self._work.thorough and can_be_cut(self._model)
        parts = [part for batch in self._held_out for part in cut(batch, PART)] if fine else self._held_out
        return OutputSqnr(self._model, parts, not self._work.thorough)

    def outlier_channels(self) -> tuple[Splits, Factors]:
        """Returns the channels to split, if corrections follow, and the smoothing factors without these splits."""
        if self.corrects:
            return splits_and_smoothing(self._scaled(), self._recipe, self.counted)
        if self._recipe.correct and is_mostly_linear(self._model.graph):
            return {}, smoothing_factors(self._scaled(), self._recipe, self.counted)
        return {}, {}

    def range_candidates(self, smoothing: Factors) -> list[Group]:
        """Returns tables of all observers, with and without smoothing, and of the searched ranges."""
        self._sources = [(self._observation, {})]
        if smoothing and not self._smooths_best_alone:
            self._sources.append(self._scaled_source({}, smoothing))
        groups = self._tables()
        if self._recipe.search:
            first, scaled = groups[0][0], self._scaled()
            unscaled = replace(first, graph=io.digest(scaled), equalization={})
            searched = search_ranges(scaled, self._recipe, unscaled, fitting_head(self._fitting))
            groups.append([replace(searched, graph=first.graph, equalization=self._factors)])
        return groups

    def best_ranges(self, groups: list[Group], smoothing: Factors) -> CalibrationTable:
        """Returns the table of the best ranges; smoothed where that gains and all candidates are not."""
        tables = list(itertools.chain(*groups))
        best = self.evaluation.best_ranges(groups, folds=self._folds) if len(tables) > 1 else tables[0]
        if not smoothing or not self._smooths_best_alone:
            return best
        self._sources = [self._scaled_source({}, smoothing)]
        smoothed = list(itertools.chain(*self._tables()))
        position = next(index for index, table in enumerate(tables) if table is best)
        return self.evaluation.best_ranges([[best], smoothed[position : position + 1]], SPLIT_GAIN)

    def corrected(self, table: CalibrationTable, groups: list[Group]) -> tuple[CalibrationTable, Errors]:
        """Corrects a table; returns the best corrections, or plain ranges of `groups`, and the held-out errors."""
        work = self._work
        max_samples = work.corrected and work.at_least(work.corrected, elements(self._observation))
        fitting = drawn(self._model, self._fitting, self._remaining, max_samples)
        corrected = correct_table(
            self._model,
            self._recipe,
            table,
            fitting,
            seconds=self._seconds,
            room=ROOM,
            positions=work.positions,
            int8=self.evaluation.int8_models.of(replace(table, bias={}, rounding={})),
        )
        return self.evaluation.best_corrections(corrected, list(itertools.chain(*groups)), self._metric)

    def split(
        self, best: CalibrationTable, errors: Errors, splitting: Splits, smooths: bool
    ) -> tuple[CalibrationTable, Errors]:
        """Splits channels, with ranges and corrections of their own; returns the better table and its errors."""
        smoothing = smoothing_factors(self._scaled({}, splitting), self._recipe, self.counted) if smooths else {}
        self._sources = [self._scaled_source(splitting, smoothing)]
        groups = self._tables()
        split, of_split = self.corrected(self.evaluation.best_ranges(groups, folds=self._folds), groups)
        logger.info("splitting hidden channels: %.1f dB of SQNR, without: %.1f dB", of_split.sqnr, errors.sqnr)
        return select_table([best, split], [errors, of_split], self.evaluation.lowest(), SPLIT_GAIN)

    def with_float_layers(self, table: CalibrationTable, errors: Errors) -> CalibrationTable:
        """Leaves layers in float32 if the SQNR on the held-out samples, or that of the worst samples, is too low."""
        quantizer, thorough = self.evaluation.quantizer, self._work.thorough
        if errors.sqnr < GOAL:
            low = errors.sqnr < LOW
            return leave_float(
                quantizer, table, self._metric, self._observation, errors.sqnr, GOAL, thorough, jointly=low
            )
        hardest = self.evaluation.hardest(table, TAIL)
        if hardest is None or (sqnr := hardest(self.evaluation.int8_models.of(table))) >= TAIL:
            return table
        return leave_float(quantizer, table, hardest, self._observation, sqnr, TAIL, thorough, HARDEST // 2)

    @property
    def _folds(self) -> Folds | None:
        """Tables of the two folds, for convolutional networks; None with searched ranges, which are of all samples."""
        return None if self._recipe.search or is_mostly_linear(self._model.graph) else self._tables

    @property
    def _smooths_best_alone(self) -> bool:
        """Whether only the best ranges are smoothed, as in convolutional networks unless the work is thorough."""
        return not self._work.thorough and not is_mostly_linear(self._model.graph)

    def _scaled(self, smoothing: Factors | None = None, splitting: Splits | None = None) -> ir.Model:
        """Returns the model with scaled and split channels."""
        return equalized(self._model, self._factors, smoothing, splitting)

    def _observe(
        self, scaled: ir.Model, binned: Container[str], histograms: Mapping[str, Histogram] = MappingProxyType({})
    ) -> Observation:
        """Observes all samples; `histograms` of unchanged tensors are taken over."""
        quick = not self._work.thorough
        observation = observe(
            scaled,
            self._samples,
            self._total,
            max_memory=self._max_memory,
            binned=binned,
            histograms=histograms,
            quick=quick,
        )
        observation.require_samples()
        observation.release()
        return observation

    def _tables(self, fold: int | None = None) -> list[Group]:
        """Returns the tables of all observers and sources, of all samples or of a fold, see `Observation.table`."""
        return [
            [replace(table, clip=self._clip, equalization=self._factors, **scaling) for table in group]
            for observation, scaling in self._sources
            for group in _tables(self._model, self._recipe, observation, fold)
        ]

    def _scaled_source(self, splitting: Splits, smoothing: Factors) -> tuple[Observation, dict[str, Any]]:
        """Observes split and smoothed channels; returns their observation and the fields of their tables."""
        scaled = self._scaled(smoothing, splitting)
        binned = quantized_tensors(scaled, self._recipe)
        # scaling adds values and leaves all others; copies of channels change how often values occur, not the ends
        same = {
            str(value.name) for node in scaled.graph for value in (*node.inputs, *node.outputs) if value is not None
        }
        unchanged = {
            name: histogram if name in binned else histogram.without_bins()
            for name, histogram in self._observation.histograms.items()
            if name in same and (histogram.binned or name not in binned) and not (splitting and self._work.thorough)
        }
        return self._observe(scaled, binned, unchanged), {"splitting": splitting, "smoothing": smoothing}


def _tables(model: ir.Model, recipe: QuantRecipe, observation: Observation, fold: int | None) -> list[Group]:
    """Returns the tables of all observers that the recipe allows, its own first, each with `clip_to_functions` of it.

    "auto" allows the means of the extremes of samples, and ranges some standard deviations wider, too.
    """
    observers = OBSERVERS if recipe.observer == "auto" else (recipe.observer,)
    options: dict[str, Any] = {"symmetric": recipe.symmetric, "fold": fold}
    tables = [observation.table(observer, **options) for observer in observers]
    if recipe.observer == "auto":
        tables += [observation.table_of_mean_extremes(width, **options) for width in DEVIATIONS]
    graph, groups = io.digest(model), [[table] for table in tables]
    if recipe.observer == "auto" and not recipe.symmetric:
        clipped = [clip_to_functions(model, table) for table in tables]
        groups = [[a, b] if a.tensors != b.tensors else [a] for a, b in zip(tables, clipped, strict=True)]
    return [[replace(table, observer=recipe.observer, graph=graph) for table in group] for group in groups]
