"""Automatic calibration: evaluates every step on held-out samples and reverts the steps that lower the output SQNR.

`ptq.make_table` follows its recipe; here every choice is measured by the SQNR of the int8 outputs (`OutputSqnr`) on
samples that no correction saw. The steps are:

1. Smoothing of outlier channels (`smooth_channels`) and the observer: the best of all candidates with exact weights,
   because GPTQ makes up for their rounding in the next step (smoothing of BERT: 7 dB without GPTQ, 20 dB with it).
   Where the least squared error per tensor ("auto") keeps outliers that nothing downstream needs, another observer wins
   by 10 dB (hard-swish networks). Min-max wins where clipping hurts. Ranges that end where a function is flat win 4 dB
   (YOLO).
2. The corrections (GPTQ, bias correction): both, one of the two, or neither, which is also tried with min-max ranges.
3. If the SQNR is still below `GOAL`: the layers that cost most stay float32, as long as most multiplications are int8.

Nothing here is timed, so the same inputs give the same table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core import machine
from pipelines.core.batches import Batch, cut, length
from pipelines.core.progress import progress
from pipelines.graph import io, query, reference_session, sample_axis
from pipelines.quantization.calibration.calibrate import MEMORY, Observation, observe
from pipelines.quantization.calibration.compared_outputs import ComparedOutputs
from pipelines.quantization.calibration.effort import Effort, drawn, effort_of
from pipelines.quantization.calibration.float_layers import multiplications, restore_weights, with_float_layer
from pipelines.quantization.calibration.function_ranges import clip_to_functions
from pipelines.quantization.calibration.layerwise import chunk_size, sample_chunks
from pipelines.quantization.calibration.range_search import quantized_tensors, search_ranges
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import (
    HELD_OUT,
    Factors,
    correct_table,
    equalized,
    search_equalization,
    smoothing_factors,
)
from pipelines.quantization.qdq.scales import Array
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

logger = logging.getLogger(__name__)

GOAL = 24.0  # dB of SQNR below which layers stay in float32
FLOAT_SHARE = 0.25  # maximum share of the multiplications in float32
HELD_BACK = 3  # one of three samples is held out, up to HELD_OUT
CLOSE = 2.0  # dB; candidates farther behind the best on a part of the samples are evaluated on no more
MOST = 2**23  # maximum input elements of held-out samples
ROOM = 8_000_000  # maximum bytes of the largest tensor
HEAVY = 2**22  # bytes of weights above which memory is freed between evaluated models
CHANCE = 1.0  # minimum gain of an alternative in dB; less may be noise
PERFECT = 120.0  # dB of SQNR of outputs without error
SENSITIVE = 0.05  # minimum gain of a layer in float32, in dB
GAIN = 10.0  # minimum gain in dB for all multiplications; that of a layer is its share
OBSERVERS = ("auto", "minmax", "percentile", "kl")  # candidates of "auto"


class OutputSqnr:
    """SQNR of int8 models in dB: the mean of the SQNR of all samples together and of the mean SQNR of single samples.

    A sample near a decision boundary may have more error than all others. The first figure alone would let it choose
    the ranges; the second alone would ignore it. The tensors are those of `ComparedOutputs`.

    Args:
        model: Float model.
        samples: Batches, kept in memory.
        optimized: Run the models with onnxruntime's optimizations, which is quicker.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Batch], optimized: bool = False) -> None:
        self._samples, self._compared, self._optimized = samples, ComparedOutputs.of(model), optimized
        exact = self._opened(model)
        self._heavy = query.weight_bytes(model) > HEAVY
        free = sample_axis.is_shared(model.graph) and all(
            (query.dimensions(each) or [0])[0] is None for each in model.graph.inputs if not each.is_initializer()
        )
        self._at_once = chunk_size(model, samples[0], ROOM) if free else 0
        self._exact = [self._run(exact, batch) for batch in samples]

    def _opened(self, model: ir.Model) -> ort.InferenceSession:
        options = reference_session.options(self._optimized, lean=True, prepack=self._optimized)
        return reference_session.session(self._compared.cut(model), "its evaluation needs", options)

    def _run(self, session: ort.InferenceSession, batch: Batch) -> list[Array]:
        """Returns the outputs for a batch, in parts that fit `ROOM`."""
        if not 0 < self._at_once < length(batch):
            return reference_session.run(session, batch)
        parts = list(cut(batch, self._at_once))
        found = [reference_session.run(session, part) for part in parts]
        if any(x.shape[:1] != (length(part),) for part, each in zip(parts, found, strict=True) for x in each):
            return reference_session.run(session, batch)  # an output without sample axis
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    def __call__(self, int8: ir.Model, batches: int | None = None) -> float:
        """Computes the SQNR of an int8 model.

        Args:
            int8: Int8 model with the inputs of the float model.
            batches: Use only the first `batches` batches; None: all.

        Returns:
            SQNR in dB.
        """
        if self._heavy:
            machine.trim()  # graphs are reference cycles that hold the weights
        opened = self._opened(int8)
        results = [
            (exact, self._run(opened, batch))
            for exact, batch in zip(self._exact[:batches], self._samples[:batches], strict=True)
        ]
        single = [each for batch, pair in zip(self._samples, results, strict=False) for each in _single(batch, *pair)]
        own = np.mean([_decibel(self._compared.error([each])) for each in single])
        return float(own + _decibel(self._compared.error(results))) / 2


def _single(batch: Batch, exact: list[Array], tested: list[Array]) -> list[tuple[list[Array], list[Array]]]:
    """Returns the outputs per sample; of all samples together if an output has no sample axis."""
    count = length(batch)
    if any(x.shape[:1] != (count,) for x in (*exact, *tested)):
        return [(exact, tested)]
    return [([x[at] for x in exact], [y[at] for y in tested]) for at in range(count)]


def _decibel(error: float) -> float:
    """Returns the SQNR of a relative squared error; `PERFECT` for 0."""
    return min(-10 * float(np.log10(error)), PERFECT) if error > 0 else PERFECT


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

    smoothing = smoothing_factors(equalized(model, factors), recipe, fitting) if corrects else {}
    tables = _tables(model, recipe, observation, clip, factors, {})
    if smoothing:
        scaled = equalized(model, factors, smoothing)
        binned = quantized_tensors(scaled, recipe)
        smoothed = observe(scaled, samples, total, max_memory=max_memory, binned=binned)
        smoothed.release()
        tables += _tables(model, recipe, smoothed, clip, factors, smoothing)
    if recipe.search:
        first, scaled = tables[0], equalized(model, factors)
        unscaled = replace(first, graph=io.digest(scaled), equalization={})
        searched = search_ranges(scaled, recipe, unscaled, fitting_head(fitting))
        tables.append(replace(searched, graph=first.graph, equalization=factors))
    best = tables[0]
    if len(tables) > 1:
        best = _best_ranges(model, recipe, tables, samples, observation.samples, work)
    if not corrects:
        return best
    metric = OutputSqnr(model, held_out, not work.thorough)

    def evaluate(table: CalibrationTable) -> float:
        return metric(quantize(model, recipe, table)[0])

    fitting = drawn(model, fitting, observation.samples - sum(map(length, held_out)), work.corrected)
    best, sqnr = _retreat(correct_table(model, recipe, best, fitting, seconds=seconds, room=ROOM), tables, evaluate)
    if sqnr < GOAL:
        best = leave_float(model, recipe, best, metric, observation, sqnr, work.thorough)
    return best


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


def _tables(
    model: ir.Model, recipe: QuantRecipe, observation: Observation, clip: bool, factors: Factors, smoothing: Factors
) -> list[CalibrationTable]:
    """Returns the tables of all observers that the recipe allows, its own first; then `clip_to_functions` of them."""
    observers = OBSERVERS if recipe.observer == "auto" else (recipe.observer,)
    tables = [observation.table(each, symmetric=recipe.symmetric) for each in observers]
    if recipe.observer == "auto" and not recipe.symmetric:
        tables += [each for table in tables if (each := clip_to_functions(model, table)).tensors != table.tensors]
    graph = io.digest(model)
    return [
        replace(each, observer=recipe.observer, graph=graph, clip=clip, equalization=factors, smoothing=smoothing)
        for each in tables
    ]


def _best(
    tables: list[CalibrationTable], evaluate: Callable[[CalibrationTable], float]
) -> tuple[CalibrationTable, float]:
    """Returns the table of highest SQNR, and its SQNR; it must exceed the first table by `CHANCE`."""
    found = []
    with progress("evaluating", len(tables)) as advance:
        for table in tables:
            found.append(evaluate(table))
            advance(1)
    best = int(np.argmax(found))
    best = best if found[best] > found[0] + CHANCE else 0
    return tables[best], found[best]


def _best_ranges(
    model: ir.Model,
    recipe: QuantRecipe,
    tables: list[CalibrationTable],
    samples: Iterable[Batch],
    count: int,
    work: Effort,
) -> CalibrationTable:
    """Selects the table of the best ranges on `work.judged` samples; no range was fitted to the outputs.

    Many samples are needed: a range that clips one sample in a hundred looks good on the others. If the work is not
    thorough, candidates that are behind by more than `CLOSE` on a quarter of the samples are left out there.
    """
    judged = _drawn(model, samples, _stride(model, samples, count, work.judged))
    metric = OutputSqnr(model, judged, not work.thorough)

    def evaluate(table: CalibrationTable, batches: int | None = None) -> float:
        int8, _ = quantize(model, recipe, table)
        if recipe.correct and work.corrected != 0:
            restore_weights(int8, equalized(model, table.equalization, table.smoothing, table.splitting))
        return metric(int8, batches)

    part = -(-len(judged) // 4)
    if not work.thorough and part < len(judged):
        first = [evaluate(table, part) for table in tables]
        tables = [
            table
            for at, (table, sqnr) in enumerate(zip(tables, first, strict=True))
            if at == 0 or sqnr > max(first) - CLOSE
        ]
    return _best(tables, evaluate)[0] if len(tables) > 1 else tables[0]


def _retreat(
    corrected: CalibrationTable, tables: list[CalibrationTable], evaluate: Callable[[CalibrationTable], float]
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
    best, sqnr = _best([*tried, *(replace(each, recipe=corrected.recipe) for each in plain)], evaluate)
    if best is not corrected:
        kept = [name for name, each in (("GPTQ", best.rounding), ("bias correction", best.bias)) if each]
        logger.info("on the held-out samples, the best choice is %s", f"only {kept[0]}" if kept else "no correction")
    return best, sqnr


def _is_minmax(table: CalibrationTable) -> bool:
    """Whether every range is the observed one."""
    return all((each.low, each.high) == (each.minimum, each.maximum) for each in table.tensors.values())


def leave_float(
    model: ir.Model,
    recipe: QuantRecipe,
    table: CalibrationTable,
    metric: OutputSqnr,
    observation: Observation,
    sqnr: float,
    thorough: bool = True,
) -> CalibrationTable:
    """Keeps the layers of largest error per multiplication in float32 until `GOAL` is reached.

    At most `FLOAT_SHARE` of the multiplications become float32, each layer for a gain of at least `SENSITIVE`, and of
    `GAIN` times its share of the multiplications.

    Args:
        model: Float model.
        recipe: Quantization options.
        table: Calibration table of `model`.
        metric: SQNR of int8 models on held-out samples.
        observation: Observation of `model`, which counts multiplications.
        sqnr: SQNR of `table` by `metric`, in dB.
        thorough: Quantize anew to measure each layer, instead of `with_float_layer`.

    Returns:
        `table` with `keep_float`.
    """
    int8, report = quantize(model, recipe, table)
    scaled = equalized(model, table.equalization, table.smoothing, table.splitting)
    counted = multiplications(model, observation)
    names = [each.name for each in report.operators if each.precision == "int8" and each.name in counted]
    total = sum(counted[each] for each in names)

    def sqnr_with(kept: dict[str, str], batches: int | None = None) -> float:
        return metric(quantize(model, recipe, replace(table, keep_float=kept))[0], batches)

    base, gains = sqnr_with({}, 1), {}
    with progress("measuring layers in int8", len(names)) as advance:
        for name in names:
            single = sqnr_with({name: "float"}, 1) if thorough else metric(with_float_layer(int8, scaled, name), 1)
            gains[name] = single - base
            advance(1)
    kept: dict[str, str] = {}
    room = FLOAT_SHARE * total
    for name in sorted(names, key=lambda each: -gains[each] / counted[each]):
        least = max(SENSITIVE, GAIN * counted[name] / total)
        if gains[name] < least or counted[name] > room or sqnr >= GOAL:
            continue
        more = kept | {name: f"int8 costs {gains[name]:.1f} dB of SQNR here"}
        if (found := sqnr_with(more)) > sqnr + least:
            kept, sqnr, room = more, found, room - counted[name]
    return replace(table, keep_float=kept)
