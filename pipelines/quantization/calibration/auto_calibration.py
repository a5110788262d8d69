"""Automatic calibration: evaluates every step on held-out samples and reverts the steps that lower the output SQNR.

`ptq.make_table` follows its recipe; here every choice is measured by the SQNR of the int8 outputs (`OutputSqnr`) on
samples that no correction saw. The steps are:

1. Smoothing of outlier channels (`smooth_channels`) and the observer: the best of all candidates with exact weights,
   because GPTQ makes up for their rounding in the next step (smoothing of BERT: 7 dB without GPTQ, 20 dB with it).
   Where the least squared error per tensor ("auto") keeps outliers that nothing downstream needs, another observer wins
   by 10 dB (hard-swish networks). Min-max wins where clipping hurts, the means of the extremes of samples where few
   samples reach far (2 dB of MobileNet-V2). Ranges that end where a function is flat win 4 dB (YOLO).
   Convolutional networks are smoothed with the best ranges alone.
2. The corrections (GPTQ, bias correction): both, one of the two, or neither, which is also tried with min-max ranges;
   with the effort "fast" the bias correction from mean inputs (`mean_bias`), or none.
   Of candidates that are close in SQNR, the one whose worst samples have less error wins (`Errors.worst`). None is
   kept whose SQNR of all samples together is below that of plain min-max ranges.
3. Splitting of hidden channels with outlier weights (`split_channels`), with ranges and corrections of its own.
4. If the SQNR is still below `GOAL`, or that of the worst samples below `TAIL`: the layers that cost most stay float32,
   as long as most multiplications are int8.

Nothing here is timed, so the same inputs give the same table.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core.batches import Batch, cut, length
from pipelines.core.progress import progress
from pipelines.graph import io, query
from pipelines.quantization.algorithms.mean_bias import mean_shifts
from pipelines.quantization.algorithms.smooth_channels import is_mostly_linear
from pipelines.quantization.algorithms.split_channels import Splits
from pipelines.quantization.calibration.calibrate import MEMORY, Observation, observe
from pipelines.quantization.calibration.compared_outputs import ROOM, Errors, OutputSqnr, can_be_cut
from pipelines.quantization.calibration.effort import (
    Effort,
    effort_of,
    elements,
    fitting_head,
    split_held_out,
    stride_of,
)
from pipelines.quantization.calibration.float_layers import leave_float, restore_weights
from pipelines.quantization.calibration.function_ranges import clip_to_functions
from pipelines.quantization.calibration.layerwise import drawn, sample_chunks
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
from pipelines.quantization.quantizer import Quantizer, correct
from pipelines.quantization.recipe import QuantRecipe

logger = logging.getLogger(__name__)

GOAL = 24.0  # dB of SQNR below which layers stay in float32
LOW = 20.0  # the same for many layers together, which cost speed: labels begin to change there
TAIL = 16.0  # dB of SQNR of the worst samples, likewise
HARDEST = 16  # of the worst samples, by which those layers are chosen
BEHIND = 0.3  # dB; candidates farther behind plain min-max ranges in the SQNR of all samples together are not kept
CLOSE = 2.0  # dB; candidates farther behind the best on a part of the samples are evaluated on no more
WORST = 2.0  # weight of the SQNR of the worst samples beside that of all
FAR = 4.0  # dB of SQNR plus weighted SQNR of the worst samples; as CLOSE, for the choice by the worst samples
PART = 4  # held-out samples of a batch; the gain of a layer in float32 is measured on the first batch
WORST_GAIN = 1.25  # minimum gain in dB of a candidate chosen by the weighted sum; less may be noise
KEPT = 2**29  # bytes of weights of candidates above which their sessions are not kept
SPLIT_GAIN = 0.2  # minimum gain in dB of split channels, which cost 1 to 2% of the time, and of one more product
CHANCE = 1.0  # minimum gain of an alternative in dB; less may be noise
Group = list[CalibrationTable]  # the first, and variants of it
Lowest = Callable[[list[CalibrationTable]], list[float]]
Opened = Callable[[CalibrationTable], ort.InferenceSession]
OBSERVERS = ("auto", "minmax", "percentile", "kl")  # candidates of "auto"


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
    work = effort_of(effort)
    if observation is None:
        samples = drawn(model, samples, total, work.observed_of(model))
    clip, factors = search_equalization(model, recipe, samples)[0] if recipe.search else (False, {})
    if observation is None or factors:
        scaled = equalized(model, factors)
        binned = quantized_tensors(scaled, recipe)
        observation = observe(scaled, samples, total, max_memory=max_memory, binned=binned, quick=not work.thorough)
        observation.require_samples()
        observation.release()
    observation.require_samples()
    held_out, fitting = split_held_out(model, samples, observation.samples)

    corrects = recipe.correct and work.corrected != 0
    remaining = observation.samples - sum(map(length, held_out))
    counted = drawn(model, fitting, remaining, work.counted)

    def tables_of(observation: Observation, **scaling: Any) -> list[Group]:
        groups = _tables(model, recipe, observation)
        return [[replace(table, clip=clip, equalization=factors, **scaling) for table in group] for group in groups]

    def tables_with(splitting: Splits, smoothing: Factors) -> list[Group]:
        scaled = equalized(model, factors, smoothing, splitting)
        binned = quantized_tensors(scaled, recipe)
        # scaling adds values and leaves all others; copies of channels change how often values occur, not the ends
        same = {
            str(value.name) for node in scaled.graph for value in (*node.inputs, *node.outputs) if value is not None
        }
        unchanged = {
            name: histogram if name in binned else histogram.without_bins()
            for name, histogram in observation.histograms.items()
            if name in same and (histogram.binned or name not in binned) and not (splitting and work.thorough)
        }
        quick = not work.thorough
        observed = observe(
            scaled, samples, total, max_memory=max_memory, binned=binned, histograms=unchanged, quick=quick
        )
        observed.release()
        return tables_of(observed, splitting=splitting, smoothing=smoothing)

    splitting: Splits = {}
    smoothing: Factors = {}
    if corrects:
        splitting, smoothing = splits_and_smoothing(equalized(model, factors), recipe, counted)
    elif recipe.correct and is_mostly_linear(model.graph):
        smoothing = smoothing_factors(equalized(model, factors), recipe, counted)
    groups = tables_of(observation)
    last = bool(smoothing) and not work.thorough and not is_mostly_linear(model.graph)
    groups += tables_with({}, smoothing) if smoothing and not last else []
    if recipe.search:
        first, scaled = groups[0][0], equalized(model, factors)
        unscaled = replace(first, graph=io.digest(scaled), equalization={})
        searched = search_ranges(scaled, recipe, unscaled, fitting_head(fitting))
        groups.append([replace(searched, graph=first.graph, equalization=factors)])
    tables = list(itertools.chain(*groups))
    best = tables[0]
    if len(tables) == 1 and not corrects:
        return best
    evaluation = _Evaluation(model, recipe, samples, observation, work)
    if len(tables) > 1:
        best = evaluation.best_ranges(groups)
    if last:  # of convolutional networks with the best ranges alone
        smoothed = list(itertools.chain(*tables_with({}, smoothing)))
        position = next(index for index, table in enumerate(tables) if table is best)
        best = evaluation.best_ranges([[best], smoothed[position : position + 1]], SPLIT_GAIN)
    if not corrects:
        return evaluation.with_mean_bias(best, counted) if recipe.correct else best
    fine = not work.thorough and can_be_cut(model)
    parts = [part for batch in held_out for part in cut(batch, PART)] if fine else held_out
    metric = OutputSqnr(model, parts, not work.thorough)
    corrected_samples = work.corrected and work.at_least(work.corrected, elements(observation))
    fewer = drawn(model, fitting, remaining, corrected_samples)

    def corrected(table: CalibrationTable) -> CalibrationTable:
        int8 = evaluation.int8_models.of(replace(table, bias={}, rounding={}))
        return correct_table(
            model, recipe, table, fewer, seconds=seconds, room=ROOM, positions=work.positions, int8=int8
        )

    smooth = bool(best.smoothing)
    best, errors = _retreat(corrected(best), tables, metric, evaluation)
    if splitting:
        smoothing = smoothing_factors(equalized(model, factors, {}, splitting), recipe, counted) if smooth else {}
        groups = tables_with(splitting, smoothing)
        split = evaluation.best_ranges(groups)
        split, of_split = _retreat(corrected(split), list(itertools.chain(*groups)), metric, evaluation)
        logger.info("splitting hidden channels: %.1f dB of SQNR, without: %.1f dB", of_split.sqnr, errors.sqnr)
        best, errors = _best([best, split], [errors, of_split], evaluation.lowest(), SPLIT_GAIN)
    if errors.sqnr < GOAL:
        low = errors.sqnr < LOW
        return leave_float(
            evaluation.quantizer, best, metric, observation, errors.sqnr, GOAL, work.thorough, jointly=low
        )
    hardest = evaluation.hardest(best)
    if hardest is None or (sqnr := hardest(evaluation.int8_models.of(best))) >= TAIL:
        return best
    return leave_float(evaluation.quantizer, best, hardest, observation, sqnr, TAIL, work.thorough, HARDEST // 2)


class _Int8Models:
    """Int8 models of tables; tables that differ in corrections alone share the work of quantization.

    Args:
        quantizer: Quantizer of the float model.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._last: tuple[CalibrationTable, ir.Model] | None = None

    def of(self, table: CalibrationTable) -> ir.Model:
        """Returns the result of `quantize` with a table."""
        plain = replace(table, bias={}, rounding={}, recipe={})
        if self._last is None or self._last[0] != plain:
            self._last = plain, self._quantizer.quantize(plain)[0]
        int8 = self._last[1].clone()
        correct(int8.graph, self._quantizer.recipe, table, {})
        return int8


def _tables(model: ir.Model, recipe: QuantRecipe, observation: Observation) -> list[Group]:
    """Returns the tables of all observers that the recipe allows, its own first, each with `clip_to_functions` of it.

    "auto" allows the means of the extremes of samples, too.
    """
    observers = OBSERVERS if recipe.observer == "auto" else (recipe.observer,)
    tables = [observation.table(observer, symmetric=recipe.symmetric) for observer in observers]
    if recipe.observer == "auto":
        tables.append(observation.table_of_mean_extremes(symmetric=recipe.symmetric))
    graph, groups = io.digest(model), [[table] for table in tables]
    if recipe.observer == "auto" and not recipe.symmetric:
        clipped = [clip_to_functions(model, table) for table in tables]
        groups = [[a, b] if a.tensors != b.tensors else [a] for a, b in zip(tables, clipped, strict=True)]
    return [[replace(table, observer=recipe.observer, graph=graph) for table in group] for group in groups]


def _best(
    tables: list[CalibrationTable],
    errors: list[Errors],
    lowest: Lowest | None,
    chance: float = CHANCE,
) -> tuple[CalibrationTable, Errors]:
    """Selects a table by its SQNR, and by that of its worst samples; the first unless another gains `chance`.

    Tables whose SQNR of all samples together is more than `BEHIND` below that of plain min-max ranges, if these are
    among them, are not selected.

    Args:
        tables: Candidates.
        errors: Errors of every candidate on the same samples.
        lowest: Returns the SQNR of the worst samples of candidates, see `Errors.worst`; None: not used.
        chance: Minimum gain in dB.

    Returns:
        The table and its errors.
    """
    plain = max((its.overall for table, its in zip(tables, errors, strict=True) if _is_plain(table)), default=-np.inf)
    sqnr = [its.sqnr if its.overall >= plain - BEHIND else -np.inf for its in errors]
    best = int(np.argmax(sqnr))
    best = best if sqnr[best] > sqnr[0] + chance else 0
    close = [i for i in range(len(tables)) if i == best or sqnr[i] > sqnr[best] - CLOSE]
    if lowest is not None and len(close) > 1:
        worst = dict(zip(close, lowest([tables[i] for i in close]), strict=True))
        value = {i: sqnr[i] + WORST * worst[i] for i in close}
        logger.info("SQNR of candidates, and of their worst samples: %s", {i: (sqnr[i], worst[i]) for i in close})
        other = max(close, key=value.__getitem__)
        best = other if value[other] > value[best] + WORST_GAIN else best
    return tables[best], errors[best]


@dataclass(eq=False)
class _Candidate:
    """A calibration table, a session of its int8 model, and its errors on the first `batches` batches."""

    table: CalibrationTable
    session: ort.InferenceSession | None = None
    batches: int = 0
    errors: Errors = field(default_factory=Errors)

    def run(self, metric: OutputSqnr, batches: int, opened: Opened, keep: bool) -> None:
        """Adds the errors up to a number of batches; `opened` opens a session, which is kept if `keep`."""
        if self.batches < batches:
            session = self.session or opened(self.table)
            self.session = session if keep else None
            self.errors.add(metric.errors(session, slice(self.batches, batches)))
            self.batches = batches


def _close(candidates: list[_Candidate]) -> list[_Candidate]:
    """Removes candidates more than `CLOSE` below the best SQNR, except the first one and those near min-max ranges."""
    least = max(candidate.errors.sqnr for candidate in candidates) - CLOSE
    close = [candidate for candidate in candidates if candidate is candidates[0] or candidate.errors.sqnr > least]
    together = min(candidate.errors.overall for candidate in close) - CLOSE
    plain = [trial for trial in candidates if _is_plain(trial.table) and trial.errors.overall > together]
    return [candidate for candidate in candidates if candidate in close or candidate in plain]


def _rest_of_best(groups: list[list[_Candidate]]) -> Iterator[_Candidate]:
    """Yields the group with the highest SQNR of a first candidate by then, without that candidate."""
    yield from max(groups, key=lambda group: group[0].errors.sqnr)[1:]


class _Evaluation:
    """Evaluates int8 models on all samples, or on fewer until candidates are close.

    Many samples are needed: a range that clips one sample in a hundred looks good on the others.

    Args:
        model: Float model.
        recipe: Quantization options.
        samples: Batches, iterated several times.
        observation: Observation of `model` on all samples.
        work: Amount of work.
    """

    def __init__(
        self, model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch], observation: Observation, work: Effort
    ) -> None:
        count, self.model, self._recipe, self._work = observation.samples, model, recipe, work
        evaluated = stride_of(model, samples, count, work.at_least(work.evaluated, elements(observation)))
        more = stride_of(model, samples, count, work.lowest_of(model, observation))
        batches: dict[bool, list[Batch]] = {True: [], False: []}
        for index, chunk in enumerate(sample_chunks(model, samples)):
            if (first := index % evaluated == evaluated // 2) or (work.lowest and index % more == more // 2):
                batches[first].append(chunk)
        self._evaluated, self._batches = len(batches[True]), [*batches[True], *batches[False]]
        self._metric = OutputSqnr(model, self._batches, not work.thorough)
        self._ranged: list[_Candidate] = []  # the last candidates of ranges, if their weights were int8
        self.quantizer = Quantizer(model, recipe)
        self.int8_models = _Int8Models(self.quantizer)

    def best_ranges(self, groups: list[Group], chance: float = CHANCE) -> CalibrationTable:
        """Selects the table of the best ranges; no range was fitted to the outputs.

        Unless the work is thorough, candidates behind by more than `CLOSE` on a quarter of the samples are left out
        there, and so are all but the first tables of all groups but the best. chance: see `_best`.
        """
        exact_weights = self._recipe.correct and self._work.corrected != 0
        size = query.weight_bytes(self.model)
        waiting = [[_Candidate(table) for table in group] for group in groups if group]
        candidates = list(itertools.chain(*waiting))
        part = -(-self._evaluated // 4)

        def opened(table: CalibrationTable) -> ort.InferenceSession:
            int8, _ = self.quantizer.quantize(table)
            if exact_weights:
                restore_weights(int8, equalized(self.model, table.equalization, table.smoothing, table.splitting))
            return self._metric.open(int8)

        if not self._work.thorough and part < self._evaluated:
            held: list[_Candidate] = []  # of those evaluated so far, with their sessions, the best first
            for trial in itertools.chain((group[0] for group in waiting), _rest_of_best(waiting)):
                trial.run(self._metric, part, opened, True)
                held = sorted([*held, trial], key=lambda its: -its.errors.sqnr)
                while len(held) > 1 and (
                    held[-1].errors.sqnr <= held[0].errors.sqnr - CLOSE or len(held) * size > KEPT
                ):
                    held.pop().session = None
            candidates = _close([candidate for candidate in candidates if candidate.batches])
        keep = len(candidates) * size < KEPT
        if len(candidates) == 1:
            return candidates[0].table
        with progress("evaluating", len(candidates)) as advance:
            for trial in candidates:
                trial.run(self._metric, self._evaluated, opened, keep)
                advance(1)

        def lowest(close: list[CalibrationTable]) -> list[float]:
            chosen = [candidate for table in close for candidate in candidates if candidate.table is table]
            return self._worst(chosen, opened, keep)

        tried, errors = [candidate.table for candidate in candidates], [candidate.errors for candidate in candidates]
        self._ranged = [] if exact_weights else candidates
        return _best(tried, errors, lowest if self._work.lowest else None, chance)[0]

    def with_mean_bias(self, table: CalibrationTable, samples: Iterable[Batch]) -> CalibrationTable:
        """Adds the bias correction of `mean_shifts` to a table, unless that lowers the SQNR on the evaluated samples.

        samples: those of the mean inputs.
        """
        scaled = equalized(self.model, table.equalization, table.smoothing, table.splitting)
        bias = mean_shifts(scaled, self.int8_models.of(table), samples)
        if not bias:
            return table
        corrected = replace(table, bias=bias, recipe=self._recipe.to_json())
        candidates = [_Candidate(corrected), *(past for past in self._ranged if past.table is table), _Candidate(table)]
        for trial in candidates[:2]:
            trial.run(self._metric, self._evaluated, self._open, False)
        sqnr = [candidate.errors.sqnr for candidate in candidates[:2]]
        logger.info("bias correction from mean inputs: %.1f dB of SQNR, without: %.1f dB", *sqnr)
        return candidates[int(np.argmax(sqnr))].table

    def _open(self, table: CalibrationTable) -> ort.InferenceSession:
        """Opens a session of the int8 model of a table."""
        return self._metric.open(self.int8_models.of(table))

    def lowest(self, sessions: Mapping[int, ort.InferenceSession] = MappingProxyType({})) -> Lowest | None:
        """Returns the function `lowest` of `_best` for tables with corrections; None if the work has none.

        sessions: of int8 models, by the identity of the table.
        """

        def lowest(tables: list[CalibrationTable]) -> list[float]:
            return self._worst([_Candidate(table, sessions.get(id(table))) for table in tables], self._open, True)

        return lowest if self._work.lowest else None

    def hardest(self, table: CalibrationTable) -> OutputSqnr | None:
        """Returns the SQNR on the samples of lowest SQNR, one a batch; None if these are no worse than `TAIL`.

        Graphs of a fixed batch size give None, too.
        """
        candidate = _Candidate(table)
        if not can_be_cut(self.model):
            return None
        candidate.run(self._metric, self._metric.batches, self._open, False)
        samples = [sample for batch in self._batches for sample in cut(batch, 1)]
        single = candidate.errors.single
        if len(single) != len(samples) or candidate.errors.worst >= TAIL:
            return None
        order = np.argsort(single, kind="stable")[:HARDEST]
        return OutputSqnr(self.model, [samples[i] for i in (*order[::2], *order[1::2])], not self._work.thorough)

    def _worst(self, candidates: list[_Candidate], opened: Opened, keep: bool) -> list[float]:
        """Returns the SQNR of the worst samples of candidates in dB.

        If the work is not thorough, those that are behind by `FAR` on the evaluated samples get -inf.
        """
        for trial in candidates:
            trial.run(self._metric, self._evaluated, opened, keep)
        value = [candidate.errors.sqnr + WORST * candidate.errors.worst for candidate in candidates]
        least = -np.inf if self._work.thorough else max(value) - FAR
        close = [candidate for candidate, its in zip(candidates, value, strict=True) if its > least]
        if len(close) > 1:
            with progress("evaluating the worst samples", len(close)) as advance:
                for trial in close:
                    trial.run(self._metric, self._metric.batches, opened, keep)
                    advance(1)
        return [candidate.errors.worst if candidate in close else -np.inf for candidate in candidates]


def _retreat(
    corrected: CalibrationTable, tables: list[CalibrationTable], metric: OutputSqnr, evaluation: _Evaluation
) -> tuple[CalibrationTable, Errors]:
    """Drops corrections that lower the SQNR on held-out samples, or falls back to min-max; returns table and errors.

    tables: those without corrections.
    """
    tried = [corrected]
    if corrected.bias and corrected.rounding:
        tried += [replace(corrected, bias={}), replace(corrected, rounding={})]
    if corrected.bias or corrected.rounding:
        tried.append(replace(corrected, bias={}, rounding={}))
    plain = [table for table in tables if _is_plain(table)]
    tried += [replace(table, recipe=corrected.recipe) for table in plain]
    candidates = [_Candidate(table) for table in tried]
    small = len(tried) * query.weight_bytes(evaluation.model) < KEPT
    with progress("evaluating", len(candidates)) as advance:
        for trial in candidates:
            trial.run(metric, metric.batches, lambda table: metric.open(evaluation.int8_models.of(table)), small)
            advance(1)
    sessions = {id(candidate.table): candidate.session for candidate in candidates if candidate.session is not None}
    best, errors = _best(tried, [candidate.errors for candidate in candidates], evaluation.lowest(sessions))
    if best is not corrected:
        kept = [name for name, correction in (("GPTQ", best.rounding), ("bias correction", best.bias)) if correction]
        logger.info("on the held-out samples, the best choice is %s", f"only {kept[0]}" if kept else "no correction")
    return best, errors


def _is_plain(table: CalibrationTable) -> bool:
    """Whether every range is the observed one, without smoothing and corrections."""
    if table.smoothing or table.splitting or table.bias or table.rounding:
        return False
    return all((tensor.low, tensor.high) == (tensor.minimum, tensor.maximum) for tensor in table.tensors.values())
