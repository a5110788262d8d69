"""Fusion of steps, and removal of steps and tensors without readers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any, TypeGuard

import numpy as np

from pipelines.kernels.arrays import Array
from pipelines.kernels.images.steps import (
    Addition,
    Attention,
    ChannelScale,
    Concatenation,
    Convolution,
    FloatActivation,
    FloatClip,
    FloatConvolution,
    FloatSum,
    Gathering,
    Lookup,
    Normalization,
    Operand,
    Sampling,
    Shape,
    Step,
)
from pipelines.kernels.transformer.operations.base import LANES

# fields of steps that hold numbers of tensors
NUMBERED = ("x", "a", "b", "gate", "grid", "keys", "indices", "boxes", "scores", "out", "to", "other", "residual")


def fused(
    tensors: Sequence[Shape], steps: list[Step], floats: Collection[int]
) -> tuple[tuple[Shape, ...], tuple[Step, ...], frozenset[int]]:
    """Finishes a program: drops steps that no other step reads, fuses steps, and numbers the tensors again.

    Args:
        tensors: Shapes of all tensors.
        steps: Steps of the program, changed in place.
        floats: Numbers of the tensors that are float32.

    Returns:
        Shapes, steps and `floats`; tensors have the numbers of the order in which they are written.
    """
    tensors = list(tensors)
    _drop_unread(steps)
    _fuse_sums(steps)
    _fuse_tables(steps)
    _scale_before_gathering(tensors, steps)
    _fuse_gatherings(steps)
    _fuse_samplings(tensors, steps)
    _fuse_scales(steps)
    _fuse_floats(steps)
    return _renumbered(tensors, steps, floats)


def _uses(steps: Sequence[Step]) -> tuple[Counter[int], dict[int, Step]]:
    """How often each tensor is read, and the step that writes it."""
    readers = Counter(tensor for step in steps for tensor in step.reads())
    return readers, {getattr(step, "out", -1): step for step in steps}


def _drop_unread(steps: list[Step]) -> None:
    """Removes steps without readers, in place."""
    for position in range(len(steps) - 1, 0, -1):
        out = getattr(steps[position], "out", -1)
        if out >= 0 and not any(out in step.reads() for step in steps[position:]):
            del steps[position]


def _fuse_sums(steps: list[Step]) -> None:
    """Fuses an Addition into the convolution before it, in place.

    The Addition must be the only reader of the convolution's result, and the other summand must exist before.
    """
    readers = Counter(tensor for step in steps for tensor in step.reads())
    writers = {getattr(step, "out", -1): index for index, step in enumerate(steps)}
    for addition in [step for step in steps if isinstance(step, Addition)]:
        first = writers[addition.a] > writers[addition.b]  # the later one of the two sums
        own, other = (addition.a, addition.b) if first else (addition.b, addition.a)
        layer = steps[writers[own]]
        if own == other or readers[own] != 1 or not isinstance(layer, Convolution) or layer.sum is not None:
            continue
        if layer.groups > 1 and layer.weight.shape[3] == 1:  # depthwise
            continue
        steps[writers[own]] = replace(layer, out=addition.out, sum=addition.sum, other=other, other_first=not first)
        position = steps.index(addition)
        del steps[position]
        writers = {getattr(step, "out", -1): index for index, step in enumerate(steps)}


def _fuse_tables(steps: list[Step]) -> None:
    """Fuses a Lookup into the convolution before it, if that has no other reader, in place."""
    readers, writers = _uses(steps)
    for lookup in [step for step in steps if isinstance(step, Lookup) and step.table.ndim == 1]:
        layer = writers[lookup.x]
        if not isinstance(layer, Convolution) or readers[lookup.x] != 1:
            continue
        table = lookup.table if layer.table is None else lookup.table[layer.table]
        joined = replace(layer, out=lookup.out, table=table)
        steps[steps.index(layer)] = writers[lookup.out] = joined
        steps.remove(lookup)


def _is_permutation(step: Step) -> TypeGuard[Gathering]:
    """Whether a step moves whole pixels without a change of their values."""
    if not isinstance(step, Gathering) or step.part or step.added is not None:
        return False
    return (step.x.scale, step.x.zero) == (step.to.scale, step.to.zero)


def _scale_before_gathering(tensors: list[Shape], steps: list[Step]) -> None:
    """Moves scales of channels of gathered pixels before the Gathering, which then moves what they write, in place."""
    readers, writers = _uses(steps)
    for scale in [step for step in steps if isinstance(step, ChannelScale) and len(step.gain) == 1]:
        gathering = writers[scale.x.tensor]
        if not _is_permutation(gathering) or readers[gathering.out] != 1 or not scale.x.floats or scale.to.floats:
            continue
        if scale.bias.any() and int(gathering.places.min()) < 0:
            continue
        between = replace(scale.to, tensor=len(tensors))
        tensors.append(tensors[gathering.x.tensor])
        steps[steps.index(gathering)] = writers[between.tensor] = replace(scale, x=gathering.x, to=between)
        steps[steps.index(scale)] = writers[scale.out] = replace(gathering, x=between, to=scale.to)
        readers[between.tensor] = 1


def _fuse_gatherings(steps: list[Step]) -> None:
    """Fuses a Gathering of whole pixels with one before it that has no other reader, in place."""
    readers, writers = _uses(steps)
    for second in [step for step in steps if isinstance(step, Gathering) and not step.part]:
        first = writers[second.x.tensor]
        if not _is_permutation(first) or readers[first.out] != 1:
            continue
        places = np.where(second.places < 0, -1, first.places.ravel()[second.places])
        steps[steps.index(second)] = writers[second.out] = replace(second, x=first.x, places=places)
        steps.remove(first)


def _fuse_samplings(tensors: list[Shape], steps: list[Step]) -> None:
    """Samples groups of channels where they are, instead of gathering the image of each group before, in place."""
    readers, writers = _uses(steps)
    for sampling in [step for step in steps if isinstance(step, Sampling) and step.plane is None]:
        gathering, (height, width, channels) = writers[sampling.x], tensors[sampling.x]
        if not isinstance(gathering, Gathering) or gathering.added is not None or readers[sampling.x] != 1:
            continue
        groups, places = sampling.groups, gathering.places.reshape(sampling.groups, -1)
        plane = (int(places[0, 0]) // groups, height // groups, width)
        pixels = plane[0] + np.arange(places.shape[1])
        whole = channels % LANES == 0 and tensors[gathering.x.tensor][2] == groups * channels
        if not whole or not gathering.x.floats or not gathering.to.floats:
            continue
        if places.size == height * width and np.array_equal(places, pixels * groups + np.arange(groups)[:, None]):
            steps[steps.index(sampling)] = replace(sampling, x=gathering.x.tensor, plane=plane)
            steps.remove(gathering)


def _fuse_scales(steps: list[Step]) -> None:
    """Fuses scales of channels, such as SmoothQuant's, into the norm, attention or activation before them, in place."""
    readers, writers = _uses(steps)
    for scale in [step for step in steps if isinstance(step, ChannelScale) and len(step.gain) == 1]:
        source = writers[scale.x.tensor]
        if readers[scale.x.tensor] != 1 or not scale.x.floats:
            continue
        if isinstance(source, Attention) and not scale.bias.any():
            values = source.keys if source.keys >= 0 else source.x
            layer = writers[values]
            if not isinstance(layer, Convolution) or layer.residual >= 0 or readers[values] != 1:
                continue
            steps[steps.index(layer)] = writers[values] = _with_scaled_values(layer, source, scale.gain[0])
            merged: Step = replace(source, to=scale.to)
        elif isinstance(source, Normalization) and not (source.bias is None and scale.bias.any()):  # RMS norm: no bias
            bias = None if source.bias is None else source.bias * scale.gain[0] + scale.bias[0]
            merged = replace(source, to=scale.to, gain=source.gain * scale.gain[0], bias=bias)
        elif isinstance(source, FloatActivation) and not scale.bias.any() and not scale.to.floats:
            layer = writers[source.x.tensor]
            if not isinstance(layer, Convolution) or not layer.floats or layer.residual >= 0 or readers[layer.out] != 1:
                continue
            activated = layer.activated(source.kind, scale.to.scale, scale.to.zero, scale.out, scale.gain[0])
            if activated is None:
                continue
            steps.remove(layer)
            merged = activated
        else:
            continue
        steps[steps.index(source)] = writers[scale.out] = merged
        steps.remove(scale)


def _with_scaled_values(layer: Convolution, attention: Attention, gain: Array) -> Convolution:
    """The layer of an attention's values, which are the last columns of each head, times `gain` [heads size]."""
    factors = np.ones((attention.heads, len(layer.scale) // attention.heads), np.float32)
    first = factors.shape[1] - attention.room
    factors[:, first : first + attention.size] = gain.reshape(attention.heads, attention.size)
    return replace(layer, scale=layer.scale * factors.ravel())


def _fuse_floats(steps: list[Step]) -> None:
    """Fuses activations, sums and bounds of floats into the layers before them, in place.

    The operator must be the only reader of the layer's result, and the other summand must exist before.
    """
    readers, writers = _uses(steps)
    for step in [step for step in steps if type(step) in (FloatActivation, FloatClip, FloatSum)]:
        assert isinstance(step, FloatActivation | FloatClip | FloatSum)
        operands = [step.a, step.b] if isinstance(step, FloatSum) else [step.x]
        places = [steps.index(writers[operand.tensor]) for operand in operands]
        own = operands[places.index(max(places))]
        layer = writers[own.tensor]
        joined = _joined(step, layer, operands[1 - operands.index(own)] if len(operands) > 1 else own)
        if joined is None or readers[own.tensor] != 1:
            continue
        steps[steps.index(layer)] = writers[step.out] = joined
        steps.remove(step)


def _joined(
    step: FloatActivation | FloatClip | FloatSum, layer: Step, other: Operand
) -> Convolution | FloatConvolution | None:
    """A layer that also computes the step behind it, `other` being the second summand of a sum; None without one."""
    if isinstance(layer, FloatConvolution) and layer.to.floats and (layer.low, layer.high) == (-math.inf, math.inf):
        if isinstance(step, FloatClip):
            return replace(layer, to=step.to, low=step.low, high=step.high)
        if isinstance(step, FloatSum) and other.floats and layer.residual < 0:
            return replace(layer, to=step.to, residual=other.tensor)
    if not isinstance(layer, Convolution) or not layer.floats or layer.residual >= 0:
        return None
    if isinstance(step, FloatActivation):
        to = step.to
        return None if to.floats else layer.activated(step.kind, to.scale, to.zero, to.tensor)
    if isinstance(step, FloatSum) and step.to.floats and other.floats:
        return replace(layer, out=step.out, residual=other.tensor)
    return None


def _renumbered(
    tensors: Sequence[Shape], steps: Sequence[Step], floats: Collection[int]
) -> tuple[tuple[Shape, ...], tuple[Step, ...], frozenset[int]]:
    """Numbers tensors in the order in which they are written, without those that no step writes."""
    order: dict[int, int] = {-1: -1}
    for step in steps:
        order.setdefault(getattr(step, "out", -1), len(order) - 1)
    numbered = []
    for step in steps:
        moved: dict[str, Any] = {}
        for name in (field.name for field in fields(step) if field.name in NUMBERED):  # type: ignore[arg-type]
            value = getattr(step, name)
            moved[name] = replace(value, tensor=order[value.tensor]) if isinstance(value, Operand) else order[value]
        if isinstance(step, Concatenation):
            moved["xs"] = tuple(order[x] for x in step.xs)
        numbered.append(replace(step, **moved))  # type: ignore[type-var]
    shapes = tuple(tensors[old] for old, new in order.items() if new >= 0)
    return shapes, tuple(numbered), frozenset(order[old] for old in floats if old in order)
