"""Selects calibration tables by the SQNR of their int8 outputs, and by that of the worst samples.

Of candidates that are close in SQNR, the one whose worst samples have less error wins (`Errors.worst`). None is
selected whose SQNR of all samples together is below that of plain min-max ranges.

Ranges of few samples are cross-validated: those that all samples share reach their ends exactly, and look better on
these samples than on others (MobileNetV3 on 32 photos: min-max 26.2 dB, three deviations beyond the mean extremes 25.3;
on other photos 14.7 and 16.6). The ranges that the even samples have are evaluated on the odd ones, and vice versa.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core.batches import Batch, cut, length
from pipelines.core.progress import progress
from pipelines.graph import query
from pipelines.quantization.algorithms.mean_bias import mean_shifts
from pipelines.quantization.calibration.calibrate import Observation
from pipelines.quantization.calibration.compared_outputs import Errors, OutputSqnr, can_be_cut
from pipelines.quantization.calibration.effort import Effort, elements, stride_of
from pipelines.quantization.calibration.float_layers import restore_weights
from pipelines.quantization.calibration.layerwise import sample_chunks
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import equalized
from pipelines.quantization.quantizer import Quantizer, correct
from pipelines.quantization.recipe import QuantRecipe

logger = logging.getLogger(__name__)

HARDEST = 16  # of the worst samples, by which layers in float32 are chosen
BEHIND = 0.3  # dB; candidates farther behind plain min-max ranges in the SQNR of all samples together are not kept
CLOSE = 2.0  # dB; candidates farther behind the best on a part of the samples are evaluated on no more
CROSSED = 6.0  # the same of cross-validated ones: a part may have none of the samples that reach far
WORST = 2.0  # weight of the SQNR of the worst samples beside that of all
FAR = 4.0  # dB of SQNR plus weighted SQNR of the worst samples; as CLOSE, for the choice by the worst samples
WORST_GAIN = 1.25  # minimum gain in dB of a candidate chosen by the weighted sum; less may be noise
KEPT = 2**29  # bytes of weights of candidates above which their sessions are not kept
CHANCE = 1.0  # minimum gain of an alternative in dB; less may be noise
Group = list[CalibrationTable]  # the first, and variants of it
Lowest = Callable[[list[CalibrationTable]], list[float]]
Folds = Callable[[int], list[Group]]  # fold (0: the even samples, 1: the odd ones) -> its tables, in the same groups
Opened = Callable[[CalibrationTable], ort.InferenceSession]


class Int8Models:
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


def select_table(
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
    """A calibration table, a session of its int8 model, and its errors on the first `batches` batches.

    crossed: tables of the two folds, each with the batch that its evaluation ends before: the batches of the other fold
    come first or last. Empty: the table itself is evaluated.
    """

    table: CalibrationTable
    session: ort.InferenceSession | None = None
    batches: int = 0
    errors: Errors = field(default_factory=Errors)
    crossed: Sequence[tuple[int, Callable[[], CalibrationTable]]] = ()

    def run(self, metric: OutputSqnr, batches: int, opened: Opened, keep: bool) -> None:
        """Adds the errors up to a number of batches; `opened` opens a session, which is kept if `keep`."""
        for end, table in self.crossed or [(batches, lambda: self.table)]:
            stop = min(batches, end)
            if self.batches < stop:
                session = self.session or opened(table())
                self.errors.add(metric.errors(session, slice(self.batches, stop)))
                self.batches = stop
                self.session = session if keep and not (self.crossed and stop == end) else None


def _close(candidates: list[_Candidate], most: float) -> list[_Candidate]:
    """Removes candidates more than `most` dB below the best, except the first one and those near min-max ranges."""
    least = max(candidate.errors.sqnr for candidate in candidates) - most
    close = [candidate for candidate in candidates if candidate is candidates[0] or candidate.errors.sqnr > least]
    together = min(candidate.errors.overall for candidate in close) - most
    plain = [trial for trial in candidates if _is_plain(trial.table) and trial.errors.overall > together]
    return [candidate for candidate in candidates if candidate in close or candidate in plain]


def _others_of_best(groups: list[list[_Candidate]], most: float) -> Iterator[_Candidate]:
    """Yields further candidates of the groups with a first one at most `most` dB of SQNR below the best."""
    least = max(group[0].errors.sqnr for group in groups) - most
    yield from (trial for group in groups if group[0].errors.sqnr >= least for trial in group[1:])


class Evaluation:
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
        evaluated_batches: tuple[list[Batch], list[Batch]] = [], []  # of the two folds, if there are any
        others: list[Batch] = []
        self._has_folds, start, cuts = bool(observation.has_folds and work.lowest), 0, can_be_cut(model)
        for index, chunk in enumerate(sample_chunks(model, samples)):
            if index % evaluated == evaluated // 2:
                parts = _folds(chunk) if cuts and self._has_folds else [chunk]
                self._has_folds &= cuts or length(chunk) == 1
                for fold, batch in enumerate(parts):
                    evaluated_batches[(start + fold) % 2 if self._has_folds else 0].append(batch)
            elif work.lowest and index % more == more // 2:
                others.append(chunk)
            start += length(chunk)
        even, odd = evaluated_batches
        self._has_folds &= bool(odd and even)
        self._ends = len(odd), len(odd) + len(even)  # of the batches on which ranges of even and odd samples are judged
        self._evaluated, self._batches = len(odd) + len(even), [*odd, *even, *others]
        self._metric = OutputSqnr(model, self._batches, not work.thorough)
        self._has_crossed = False  # whether ranges were cross-validated
        self._ranged: list[_Candidate] = []  # the last candidates of ranges, if their weights were int8
        self.quantizer = Quantizer(model, recipe)
        self.int8_models = Int8Models(self.quantizer)
        self._exact_weights = recipe.correct and work.corrected != 0

    def best_ranges(self, groups: list[Group], chance: float = CHANCE, folds: Folds | None = None) -> CalibrationTable:
        """Selects the table of the best ranges; no range was fitted to the outputs.

        Unless the effort is thorough, candidates behind by more than `CLOSE` on a quarter of the samples are dropped,
        and of all groups but the best only the first table is kept.

        Args:
            groups: Candidates, variants of the same ranges together.
            chance: Minimum gain in dB over the first table, see `select_table`.
            folds: For the cross-validation of few samples; None: all candidates are evaluated on their own samples.

        Returns:
            The table.
        """
        waiting = [[_Candidate(table) for table in group] for group in groups if group]
        if crosses := folds is not None and self._has_folds:
            self._cross(waiting, functools.cache(folds))
            self._has_crossed = True
        candidates, part = list(itertools.chain(*waiting)), -(-self._evaluated // 4)
        if not self._work.thorough and part < self._evaluated:
            candidates = self._close_on_part(waiting, part, *((CROSSED, CROSSED) if crosses else (CLOSE, 0.0)))
        keep = len(candidates) * query.weight_bytes(self.model) < KEPT
        if len(candidates) == 1:
            return candidates[0].table
        with progress("evaluating", len(candidates)) as advance:
            for trial in candidates:
                trial.run(self._metric, self._evaluated, self._open_ranges, keep)
                advance(1)

        def lowest(close: list[CalibrationTable]) -> list[float]:
            chosen = [candidate for table in close for candidate in candidates if candidate.table is table]
            if crosses:
                return [candidate.errors.worst for candidate in chosen]
            return self._worst(chosen, self._open_ranges, keep)

        tried, errors = [candidate.table for candidate in candidates], [candidate.errors for candidate in candidates]
        self._ranged = [] if self._exact_weights or crosses else candidates
        return select_table(tried, errors, lowest if self._work.lowest else None, chance)[0]

    def _cross(self, groups: list[list[_Candidate]], folds: Folds) -> None:
        """Lets ranges of the even samples be evaluated on the odd ones, and vice versa."""

        def table(fold: int, group: int, position: int) -> CalibrationTable:
            variants = folds(fold)[group]
            return variants[min(position, len(variants) - 1)]

        for number, group in enumerate(groups):
            for position, trial in enumerate(group):
                trial.crossed = [
                    (end, functools.partial(table, fold, number, position)) for fold, end in enumerate(self._ends)
                ]

    def _close_on_part(self, groups: list[list[_Candidate]], part: int, most: float, others: float) -> list[_Candidate]:
        """Evaluates the first candidates of all groups on the first `part` batches, and all of the best groups.

        Best groups are those at most `others` dB below the best. Returns those that are close by `most`, see `_close`.
        """
        size = query.weight_bytes(self.model)
        held: list[_Candidate] = []  # of those evaluated so far, with their sessions, the best first
        for trial in itertools.chain((group[0] for group in groups), _others_of_best(groups, others)):
            trial.run(self._metric, part, self._open_ranges, True)
            held = sorted([*held, trial], key=lambda its: -its.errors.sqnr)
            while len(held) > 1 and (held[-1].errors.sqnr <= held[0].errors.sqnr - most or len(held) * size > KEPT):
                held.pop().session = None
        return _close([candidate for candidate in itertools.chain(*groups) if candidate.batches], most)

    def _open_ranges(self, table: CalibrationTable) -> ort.InferenceSession:
        """Opens a session of the int8 model of a table without corrections, with exact weights if GPTQ follows."""
        int8, _ = self.quantizer.quantize(table)
        if self._exact_weights:
            restore_weights(int8, equalized(self.model, table.equalization, table.smoothing, table.splitting))
        return self._metric.open(int8)

    def best_corrections(
        self, corrected: CalibrationTable, tables: list[CalibrationTable], metric: OutputSqnr
    ) -> tuple[CalibrationTable, Errors]:
        """Selects among both corrections of a table, one of them, neither, and plain min-max ranges without any.

        Args:
            corrected: Table with GPTQ rounding and bias correction.
            tables: Tables without corrections; the plain min-max ranges among them are candidates, too, unless ranges
                were cross-validated: `metric` favours those that reach the ends of its samples.
            metric: SQNR of int8 models on held-out samples.

        Returns:
            The table of highest SQNR, see `select_table`, and its errors on the held-out samples.
        """
        tried = [corrected]
        if corrected.bias and corrected.rounding:
            tried += [replace(corrected, bias={}), replace(corrected, rounding={})]
        if corrected.bias or corrected.rounding:
            tried.append(replace(corrected, bias={}, rounding={}))
        plain = [] if self._has_crossed else [table for table in tables if _is_plain(table)]
        tried += [replace(table, recipe=corrected.recipe) for table in plain]
        candidates = [_Candidate(table) for table in tried]
        small = len(tried) * query.weight_bytes(self.model) < KEPT
        with progress("evaluating", len(candidates)) as advance:
            for trial in candidates:
                trial.run(metric, metric.batches, lambda table: metric.open(self.int8_models.of(table)), small)
                advance(1)
        sessions = {id(candidate.table): candidate.session for candidate in candidates if candidate.session is not None}
        best, errors = select_table(tried, [candidate.errors for candidate in candidates], self.lowest(sessions))
        if best is not corrected:
            kept = [
                name for name, correction in (("GPTQ", best.rounding), ("bias correction", best.bias)) if correction
            ]
            logger.info(
                "on the held-out samples, the best choice is %s", f"only {kept[0]}" if kept else "no correction"
            )
        return best, errors

    def with_mean_bias(self, table: CalibrationTable, samples: Iterable[Batch]) -> CalibrationTable:
        """Adds the bias correction of `mean_shifts` to a table, unless that lowers the SQNR on the evaluated samples.

        Args:
            table: Table without corrections.
            samples: Batches of the mean inputs.

        Returns:
            The table with or without `bias`.
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
        """Returns the function `lowest` of `select_table` for tables with corrections; None if the work has none.

        Args:
            sessions: Sessions of int8 models, by the identity of the table.
        """

        def lowest(tables: list[CalibrationTable]) -> list[float]:
            return self._worst([_Candidate(table, sessions.get(id(table))) for table in tables], self._open, True)

        return lowest if self._work.lowest else None

    def hardest(self, table: CalibrationTable, limit: float) -> OutputSqnr | None:
        """Returns the metric of the `HARDEST` samples of lowest SQNR, one a batch.

        Args:
            table: Table whose int8 model is evaluated.
            limit: SQNR of the worst samples in dB.

        Returns:
            The metric; None if the worst samples reach the limit, or the batch size of the graph is fixed.
        """
        candidate = _Candidate(table)
        if not can_be_cut(self.model):
            return None
        candidate.run(self._metric, self._metric.batches, self._open, False)
        samples = [sample for batch in self._batches for sample in cut(batch, 1)]
        single = candidate.errors.single
        if len(single) != len(samples) or candidate.errors.worst >= limit:
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


def _folds(batch: Batch) -> list[Batch]:
    """Returns the even and the odd samples of a batch, those there are."""
    parts = [{name: array[odd::2] for name, array in batch.items()} for odd in range(2)]
    return [part for part in parts if length(part)]


def _is_plain(table: CalibrationTable) -> bool:
    """Whether every range is the observed one, without smoothing and corrections."""
    if table.smoothing or table.splitting or table.bias or table.rounding:
        return False
    return all((tensor.low, tensor.high) == (tensor.minimum, tensor.maximum) for tensor in table.tensors.values())
