"""Post-training quantization: computes the calibration table of a model, in steps that can be called one by one.

1. `search_equalization`: cross-layer equalization (Nagel et al. 2019), SmoothQuant (Xiao et al. 2022), weight clipping.
2. `equalized_table`: calibration, and the search of activation ranges by the error of the outputs (`range_search`).
3. `correct_table`: layer-wise GPTQ (Frantar et al. 2023) and bias correction (Nagel et al. 2019) (`correction`).

`make_table` runs the steps that a recipe asks for; before the last it keeps the layers in float32 that `within_bound`
finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import io, large_weights, reference_session
from pipelines.quantization.algorithms.channel_groups import outputs_first
from pipelines.quantization.algorithms.correction import correct_layers
from pipelines.quantization.algorithms.equalize_channels import (
    Channels,
    EqualizeChannels,
    channel_statistics,
    scale_channels,
)
from pipelines.quantization.algorithms.error_bound import within_bound
from pipelines.quantization.algorithms.smooth_channels import find_smoothing, smooth_channels, smoothable
from pipelines.quantization.algorithms.split_channels import Splits, find_splits, split_channels
from pipelines.quantization.calibration.calibrate import MEMORY, calibrate
from pipelines.quantization.calibration.layerwise import CHUNK, ROOM, drawn, sample_chunks
from pipelines.quantization.calibration.range_search import output_sqnr, quantized_tensors, search_ranges
from pipelines.quantization.calibration.table import CalibrationTable, rounded_to_float32
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite

FITTED = 64  # rows of shipped samples that smoothing and corrections are fitted on; 32 lower the cosines of MiniLM
HELD_OUT = 32  # samples to evaluate candidates on
GAIN = 0.2  # minimum gain of a candidate in dB of SQNR; less may be noise
SOUND = 45.0  # minimum SQNR of the equalized float model, in dB

Factors = dict[str, tuple[float, ...]]  # {first layer's result: factor of each of its output channels}


def make_table(
    model: ir.Model,
    recipe: QuantRecipe,
    samples: Iterable[Batch],
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    seconds: float | None = None,
    fitted: int | None = None,
) -> CalibrationTable:
    """Computes the calibration table of a model by a recipe: ranges, search results and corrections.

    Args:
        model: Float model after the rewrites.
        recipe: Quantization options.
        samples: Batches, array [samples, ...] for every graph input; iterated several times, so not an iterator.
        total: Number of samples, for the progress bars.
        max_memory: See `Observation`.
        seconds: Time budget of the corrections, see `correct_layers`; None: no limit.
        fitted: Maximum number of samples that smoothing and corrections are fitted on, evenly drawn; None: all.

    Returns:
        The calibration table.

    Raises:
        RequestError: See `calibrate` and `correct_layers`.
    """
    clip, factors = search_equalization(model, recipe, samples)[0] if recipe.search else (False, {})
    fitting = drawn(model, samples, total, fitted)
    splitting: Splits = {}
    smoothing: Factors = {}
    if recipe.smooth:
        splitting, smoothing = splits_and_smoothing(equalized(model, factors), recipe, fitting)
        if splitting:  # which takes the outliers that the smoothing would scale down
            smoothing = smoothing_factors(equalized(model, factors, splitting=splitting), recipe, fitting)
    table = equalized_table(
        model, recipe, samples, factors, total, max_memory=max_memory, smoothing=smoothing, splitting=splitting
    )
    table = replace(table, clip=clip)
    table = within_bound(model, recipe, table, samples) if recipe.bound else table
    return correct_table(model, recipe, table, fitting, seconds=seconds) if recipe.correct else table


def make_table_of_file(
    path: Path,
    recipe: QuantRecipe,
    samples: Iterable[Batch],
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    seconds: float | None = None,
    fitted: int | None = None,
) -> CalibrationTable:
    """Computes the calibration table of a file: `make_table` on the rows of lookup tables that the samples read.

    Args:
        path: Float model after the rewrites; it is not in memory meanwhile.
        recipe: See `make_table`.
        samples: See `make_table`.
        total: See `make_table`.
        max_memory: See `make_table`.
        seconds: See `make_table`.
        fitted: See `make_table`.

    Returns:
        The calibration table.
    """
    model = io.load(path)
    digest = io.digest(model)
    model, samples = large_weights.used_rows(model, samples)
    machine.trim()
    table = make_table(model, recipe, samples, total, max_memory=max_memory, seconds=seconds, fitted=fitted)
    return replace(table, graph=digest)


def equalized_table(
    model: ir.Model,
    recipe: QuantRecipe,
    samples: Iterable[Batch],
    factors: Factors,
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    smoothing: Factors | None = None,
    splitting: Splits | None = None,
) -> CalibrationTable:
    """Calibrates `model` with scaled channels, and searches the ranges if `recipe.search`.

    Args:
        model: Float model, not equalized.
        recipe: Quantization options.
        samples: Batches, iterated several times.
        factors: Equalization factors, see `EqualizeChannels`.
        total: Number of samples, for the progress bar.
        max_memory: See `Observation`.
        smoothing: Smoothing factors, see `smooth_channels`.
        splitting: Channels to repeat, see `split_channels`.

    Returns:
        The calibration table of `model`, with `factors`, `smoothing` and `splitting`.
    """
    scaled = equalized(model, factors, smoothing, splitting)
    binned, symmetric = quantized_tensors(scaled, recipe), recipe.symmetric
    table = calibrate(
        scaled, samples, recipe.observer, total, max_memory=max_memory, symmetric=symmetric, binned=binned
    )
    if recipe.search:
        table = search_ranges(scaled, recipe, table, held_out(model, samples)[0])
    return replace(
        table, graph=io.digest(model), equalization=factors, smoothing=smoothing or {}, splitting=splitting or {}
    )


def smoothing_factors(model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch]) -> Factors:
    """Finds smoothing factors of the inputs of the linear layers that the recipe quantizes.

    Args:
        model: Float model, equalized if the table is.
        recipe: Quantization options.
        samples: Batches that channel statistics are computed on.

    Returns:
        Factor of each channel, by value name, see `find_smoothing`.
    """
    widths = _widths(smoothable(model.graph), recipe)
    return find_smoothing(model, _statistics(model, samples, widths)) if widths else {}


def splits_and_smoothing(model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch]) -> tuple[Splits, Factors]:
    """Computes the splits (`find_splits`) and the `smoothing_factors` of one model in one pass over the samples.

    Args:
        model: Float model, equalized if the table is.
        recipe: Quantization options.
        samples: Batches that channel statistics are computed on.

    Returns:
        Channels to repeat, and the smoothing factors of the model without these copies.
    """
    widths = _widths(smoothable(model.graph), recipe)
    statistics = _statistics(model, samples, widths) if widths else {}
    return find_splits(model, statistics), find_smoothing(model, statistics)


def _statistics(model: ir.Model, samples: Iterable[Batch], widths: Mapping[str, int]) -> dict[str, Channels]:
    """Returns the statistics of linear layers' inputs, of a few samples at a time."""
    return channel_statistics(model, sample_chunks(model, samples), linear=widths)


def _widths(activations: Mapping[ir.Value, Sequence[ir.Node]], recipe: QuantRecipe) -> dict[str, int]:
    """Returns {name: channels} of the activations that a quantized linear layer reads."""
    return {
        str(x.name): outputs_first(readers[0]).shape[1]
        for x, readers in activations.items()
        if not all(recipe.keeps_float(str(node.name)) for node in readers)
    }


def correct_table(
    model: ir.Model,
    recipe: QuantRecipe,
    table: CalibrationTable,
    samples: Iterable[Batch],
    *,
    seconds: float | None = None,
    room: int = ROOM,
    positions: int | None = None,
    int8: ir.Model | None = None,
) -> CalibrationTable:
    """Adds GPTQ rounding and bias corrections to a table.

    Args:
        model: Float model.
        recipe: Quantization options.
        table: Calibration table of `model`.
        samples: Batches, array [samples, ...] for every graph input.
        seconds: Time budget, see `correct_layers`; None: no limit.
        room: Memory limit of one tensor in bytes, see `chunk_size`.
        positions: Maximum number of positions per channel, see `correct_layers`.
        int8: Result of `quantize` with `table`, without corrections; it is changed. None: it is computed.

    Returns:
        `table` with `bias`, `rounding` and `recipe`.
    """
    if int8 is None:
        int8, _ = quantize(model, recipe, replace(table, bias={}, rounding={}))
    scaled = equalized(model, table.equalization, table.smoothing, table.splitting)
    _, report = correct_layers(scaled, int8, samples, seconds=seconds, room=room, positions=positions)
    reference_session.release()
    bias = {layer.name: layer.shift for layer in report.layers if layer.shift}
    rounding = {layer.name: layer.rounding for layer in report.layers if layer.rounding}
    return replace(table, bias=bias, rounding=rounding, recipe=recipe.to_json())


def search_equalization(
    model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch]
) -> tuple[tuple[bool, Factors], dict[str, float]]:
    """Searches channel equalization and weight clipping by the SQNR of the int8 outputs.

    The candidates are those of `equalization_candidates`, and "clipped": the best of them with clipped weights. They
    are fitted on other samples than they are evaluated on, because a candidate may win only on the samples it was
    fitted to (2 dB of ResNet-50's logits). A candidate must win by `GAIN`. The returned factors come from all samples.

    Args:
        model: Float model.
        recipe: Quantization options.
        samples: Batches, iterated several times.

    Returns:
        (whether to clip weights, equalization factors), and the SQNR in dB of every candidate.
    """
    evaluation, fitting = held_out(model, samples)
    candidates = equalization_candidates(model, samples)
    sqnr = {name: candidate_sqnr(model, recipe, factors, evaluation, fitting) for name, factors in candidates.items()}
    best = max(sqnr, key=sqnr.__getitem__)
    best = best if sqnr[best] >= sqnr["none"] + GAIN else "none"
    sqnr["clipped"] = candidate_sqnr(model, recipe, candidates[best], evaluation, fitting, clip=True)
    clip = sqnr["clipped"] >= sqnr[best] + GAIN
    if best == "none" or fitting is evaluation:
        return (clip, candidates[best]), sqnr
    factors = _equalization(model, channel_statistics(model, sample_chunks(model, samples)), best == "depthwise")
    return (clip, {name: factor for name, factor in factors.items() if name in candidates[best]}), sqnr


def equalization_candidates(model: ir.Model, samples: Iterable[Batch]) -> dict[str, Factors]:
    """Computes candidate equalizations from all samples but the held-out ones.

    A channel group is left alone if a Clip cuts held-out samples in the equalized float model.

    Args:
        model: Float model.
        samples: Batches, iterated several times.

    Returns:
        "none" (no factors), "depthwise" (before depthwise convolutions) and "all" (before all convolutions and linear
        layers); candidates without factors are left out.
    """
    evaluation, fitting = held_out(model, samples)
    others = itertools.islice(sample_chunks(model, samples), 0 if fitting is evaluation else len(evaluation), None)
    statistics = channel_statistics(model, others)
    candidates: dict[str, Factors] = {"none": {}}
    for name, depthwise_only in (("depthwise", True), ("all", False)):
        if factors := _sound(model, _equalization(model, statistics, depthwise_only), evaluation):
            candidates[name] = factors
    return candidates


def candidate_sqnr(
    model: ir.Model,
    recipe: QuantRecipe,
    factors: Factors,
    evaluation: list[Batch],
    fitting: list[Batch],
    clip: bool = False,
) -> float:
    """Computes the SQNR of a candidate equalization.

    Args:
        model: Float model.
        recipe: Quantization options.
        factors: Equalization factors of the candidate.
        evaluation: Held-out batches that the SQNR is computed on.
        fitting: Batches for calibration and bias correction.
        clip: Whether weights are clipped.

    Returns:
        SQNR in dB of the int8 outputs against those of `model`.
    """
    candidate = equalized(model, factors)
    table = replace(calibrate(candidate, fitting, recipe.observer, symmetric=recipe.symmetric), clip=clip)
    int8, _ = correct_layers(candidate, quantize(candidate, recipe, table)[0], fitting, weights=False)
    return round(output_sqnr(model, int8, evaluation), 2)


def held_out(model: ir.Model, samples: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Returns the first `HELD_OUT` samples and the next as many, in chunks.

    Args:
        model: Float model.
        samples: Batches.

    Returns:
        Held-out chunks and fitting chunks; twice the same list if there are no further samples.
    """
    count = -(-HELD_OUT // CHUNK)
    chunks = list(itertools.islice(sample_chunks(model, samples), 2 * count))
    evaluation = chunks[:count]
    return evaluation, chunks[count:] or evaluation


def equalized(
    model: ir.Model, factors: Factors, smoothing: Factors | None = None, splitting: Splits | None = None
) -> ir.Model:
    """Copies a model with scaled channels; in float it computes the same.

    Args:
        model: Float model.
        factors: Equalization factors, see `scale_channels`.
        smoothing: Smoothing factors, see `smooth_channels`.
        splitting: Channels to repeat, see `split_channels`.

    Returns:
        The scaled copy.

    Raises:
        RequestError: The factors do not fit the graph.
    """
    copy = model.clone()
    scale_channels(copy, factors)
    split_channels(copy, splitting or {})
    smooth_channels(copy, smoothing or {})
    return copy


def _equalization(model: ir.Model, statistics: dict[str, Channels], depthwise_only: bool) -> Factors:
    """Returns the factors of `EqualizeChannels`, as stored in a table."""
    finder = EqualizeChannels(statistics, depthwise_only=depthwise_only)
    rewrite(model.clone(), [finder])
    return {name: rounded_to_float32(factor) for name, factor in finder.factors.items()}


def _sound(model: ir.Model, factors: Factors, samples: list[Batch]) -> Factors:
    """Returns the factors that do not change the float outputs on `samples`: all, or those of single groups."""

    def is_sound(subset: Factors) -> bool:
        return output_sqnr(model, equalized(model, subset), samples, quick=True) > SOUND

    if not factors or is_sound(factors):
        return factors
    sound: Factors = {}
    with progress("evaluating equalized channels", len(factors)) as advance:
        for name, factor in factors.items():
            if is_sound({name: factor}):
                sound[name] = factor
            advance(1)
    return sound
