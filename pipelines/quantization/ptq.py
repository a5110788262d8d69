"""All that a calibration table can carry, found on samples: equalization, clipped weights, refined ranges,
corrections.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import io
from pipelines.quantization.calibrate import MEMORY, CalibrationTable, calibrate, rounded_to_float32
from pipelines.quantization.correction import correct
from pipelines.quantization.equalize_channels import Channels, EqualizeChannels, channel_statistics, scale_channels
from pipelines.quantization.layerwise import CHUNK, chunks
from pipelines.quantization.quantize import quantize
from pipelines.quantization.range_search import output_sqnr, refined
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite

GATE, GAIN = 32, 0.2  # samples that a search judges by; dB that a form must win
CUT = 45.0  # dB of a float model's outputs with channels equalized, at least


def calibrated(
    model: ir.Model,
    recipe: QuantRecipe,
    samples: Iterable[Batch],
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
) -> CalibrationTable:
    """All that `quantize` needs to make `model` int8 by `recipe`: ranges and, as that says, what a search and
    corrections of layers find.

    samples: batches {graph input: array, first axis = samples}, gone through several times (no iterator). total: their
    number, for the progress bars. Raises RequestError as `calibrate` and `correct` do.
    """
    clip, factors = search(model, recipe, samples)[0] if recipe.search else (False, {})
    equalized = model.clone()
    scale_channels(equalized, factors)
    options: dict[str, Any] = {"max_memory": max_memory, "symmetric": recipe.symmetric}
    table = calibrate(equalized, samples, recipe.observer, total, **options)
    if recipe.search:
        table = refined(equalized, recipe, table, _few(model, samples))
    table = replace(table, graph=io.digest(model), clip=clip, equalization=factors)
    return corrected(model, recipe, table, samples) if recipe.correct else table


def corrected(
    model: ir.Model, recipe: QuantRecipe, table: CalibrationTable, samples: Iterable[Batch]
) -> CalibrationTable:
    """`table` with the corrections of layers that `recipe` needs; see `calibrated` for the arguments."""
    equalized = model.clone()
    scale_channels(equalized, table.equalization)
    layers = correct(equalized, quantize(model, recipe, replace(table, bias={}, rounding={}))[0], samples)[1].layers
    bias, rounding = (
        {each.name: each.shift for each in layers if each.shift},
        {each.name: each.rounding for each in layers if each.rounding},
    )
    return replace(table, bias=bias, rounding=rounding, recipe=recipe.to_json())


def search(
    model: ir.Model, recipe: QuantRecipe, samples: Iterable[Batch]
) -> tuple[tuple[bool, dict[str, tuple[float, ...]]], dict[str, float]]:
    """How `model` quantizes best: channels as they are, equalized before depthwise convolutions or before all
    convolutions and linear
    layers; weights clipped or not.

    Returns (`clip` and `equalization` of a `CalibrationTable`) and {"none", "depthwise", "all", "clipped": SQNR in dB
    of the int8 outputs against those of `model`, biases corrected}; forms of equalization that the pass has no use for
    are left out. Judged by the first `GATE` samples, made of the others: what is made for some samples may lose on
    others (2 dB of ResNet-50's logits). A form wins only by `GAIN`, since 5% of noise more or less is chance. A site
    where a Clip cuts samples that reach further than those that its factors come from is not equalized. The factors
    returned come from all samples.
    """
    few = _few(model, samples)
    seen = list(itertools.islice(chunks(model, samples), len(few), 2 * len(few))) or few
    ranges = channel_statistics(model, itertools.islice(chunks(model, samples), 0 if seen is few else len(few), None))
    forms: dict[str, dict[str, tuple[float, ...]]] = {"none": {}}
    for form, depthwise in (("depthwise", True), ("all", False)):
        if factors := _uncut(model, _factors(model, ranges, depthwise), few):
            forms[form] = factors
    found: dict[str, float] = {}

    def measure(form: str, factors: dict[str, tuple[float, ...]], clip: bool = False) -> None:
        candidate = model.clone()
        scale_channels(candidate, factors)
        table = replace(calibrate(candidate, seen, recipe.observer, symmetric=recipe.symmetric), clip=clip)
        int8, _ = correct(candidate, quantize(candidate, recipe, table)[0], seen, weights=False)
        found[form] = round(output_sqnr(model, int8, few), 2)

    for form, factors in forms.items():
        measure(form, factors)
    best = max(found, key=found.__getitem__)
    best = best if found[best] >= found["none"] + GAIN else "none"
    measure("clipped", forms[best], clip=True)
    clip = found["clipped"] >= found[best] + GAIN
    if best == "none" or seen is few:
        return (clip, forms[best]), found
    factors = _factors(model, channel_statistics(model, chunks(model, samples)), best == "depthwise")
    return (clip, {name: each for name, each in factors.items() if name in forms[best]}), found


def _factors(model: ir.Model, ranges: dict[str, Channels], depthwise: bool) -> dict[str, tuple[float, ...]]:
    finder = EqualizeChannels(ranges, depthwise_only=depthwise)
    rewrite(model.clone(), [finder])
    return {name: rounded_to_float32(each) for name, each in finder.factors.items()}


def _uncut(
    model: ir.Model, factors: dict[str, tuple[float, ...]], samples: list[Batch]
) -> dict[str, tuple[float, ...]]:
    """The `factors` by which channels can be scaled without a loss in float on `samples`."""

    def sound(some: dict[str, tuple[float, ...]]) -> bool:
        scaled = model.clone()
        scale_channels(scaled, some)
        return output_sqnr(model, scaled, samples, quick=True) > CUT

    if not factors or sound(factors):
        return factors
    kept = {}
    with progress("judging equalized channels", len(factors)) as advance:
        for name, each in factors.items():
            if sound({name: each}):
                kept[name] = each
            advance(1)
    return kept


def _few(model: ir.Model, samples: Iterable[Batch]) -> list[Batch]:
    """The first `GATE` samples."""
    return list(itertools.islice(chunks(model, samples), -(-GATE // CHUNK)))
