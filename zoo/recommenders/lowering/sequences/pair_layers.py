"""Quantizes the network that target attention runs on pairs of an item and a target to int16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.steps.sequences import DEPTH, HIDDEN, ITEM, LANES, PRODUCT, SEGMENTS, Activation
from zoo.recommenders.lowering.integer_layers import positive

Array = NDArray[Any]
Floats = NDArray[np.float64]

PAIR_SCORES = 2**24  # bytes of the scores of all pairs that are kept instead of the network
REACH = 2.0**30  # bound of sums of products, with everything added to them
SIDE = 9.0  # a curve bends within so many units of the sigmoid's argument, and is a line outside
PAIRS = 4096  # drawn to find the range of hidden codes
HEADROOM = 2.0  # hidden codes reach so many times the range of these pairs


def pair_layers(
    table: Floats, weights: tuple[Floats, ...], activations: tuple[Activation, Activation]
) -> dict[str, Array]:
    """Quantizes the layers of target attention.

    Args:
        table: Vectors of the items, [rows, width].
        weights: Key [width, first], query, its bias, product, hidden [first, second], its bias and score [second].
        activations: Activations of both hidden layers.

    Returns:
        Arrays of `steps.TargetAttention`, by their names there.

    Raises:
        RequestError: A value is not finite, or an activation normalizes over the units.
    """
    key, query, query_bias, product, hidden, bias, score = weights
    if not all(np.isfinite(array).all() for array in (table, *weights, *activations[0][:4], *activations[1][:4])):
        raise RequestError("its tables or weights are not finite")
    if any(activation.epsilon for activation in activations):
        most = int((PAIR_SCORES // 4) ** 0.5)
        raise RequestError(
            f"its attention over {len(table)} items normalizes the units of every pair, which has a native form for up "
            f"to {most} items"
        )
    keys, queries = table @ key, table @ query + query_bias
    step = np.array([positive(value) for value in np.abs(table).max(axis=0)]) / ITEM
    codes = np.rint(table / step).astype(np.int16)
    fine = product * (step**2 * 2**15)[:, None]  # of a code of the product
    sums = np.abs(fine).sum(axis=0) * PRODUCT + np.abs(keys).max(axis=0) + np.abs(queries).max(axis=0)
    unit = _units(np.abs(fine).max(axis=0), sums)
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, len(table), (2, PAIRS))
    x = keys[left] + queries[right] + (table[left] * table[right]) @ product
    most = HEADROOM * np.abs(activated(x, activations[0])).max(axis=0)
    code = np.array([positive(value) for value in most]) / HIDDEN
    one = _curves(activations[0], unit, 1 / code)
    fine_hidden = hidden * code[:, None]
    hidden_unit = _units(np.abs(fine_hidden).max(axis=0), np.abs(fine_hidden).sum(axis=0) * HIDDEN + np.abs(bias))
    two = _curves(activations[1], hidden_unit, score)

    def padded(array: Array, multiple: int) -> Array:
        return np.pad(array, ((0, 0), (0, -array.shape[1] % multiple)))

    return {
        "items": padded(table.astype(np.float32), LANES),
        "codes": padded(codes, DEPTH),
        "keys": padded(np.rint(keys / unit).astype(np.int32), LANES),
        "queries": padded(np.rint(queries / unit).astype(np.int32), LANES),
        "product": np.rint(fine / unit).astype(np.int16),
        "hidden": np.rint(fine_hidden / hidden_unit).astype(np.int16),
        "bias": np.rint(bias / hidden_unit).astype(np.int32),
        **{f"one_{name}": array for name, array in one.items()},
        **{f"two_{name}": array for name, array in two.items()},
    }


def pair_scores(
    table: Floats, weights: tuple[Floats, ...], activations: tuple[Activation, Activation], score_bias: float
) -> Array:
    """Computes the scores of target attention for all pairs.

    Args:
        table: Vectors of the items, [rows, width].
        weights: See `pair_layers`.
        activations: Activations of both hidden layers.
        score_bias: Bias of the score.

    Returns:
        float32 [rows, rows] of target and item.

    Raises:
        RequestError: A score is not finite.
    """
    key, query, query_bias, product, hidden, bias, score = weights
    keys, queries = table @ key, table @ query + query_bias
    scores = np.empty((len(table), len(table)), np.float32)
    for target, vector in enumerate(table):
        x = keys + table @ (vector[:, None] * product) + queries[target]
        x = activated(activated(x, activations[0]) @ hidden + bias, activations[1])
        scores[target] = x @ score + score_bias
    if not np.isfinite(scores).all():
        raise RequestError("its tables or weights are not finite")
    return scores


def activated(x: Floats, activation: Activation) -> Floats:
    """Applies an activation in float64.

    Args:
        x: [..., width].
        activation: The activation.

    Returns:
        Same shape as `x`.
    """
    scale, shift, rise, slope = (array.astype(np.float64) for array in activation[:4])
    if not scale.size:
        return np.asarray(np.where(x < 0, x * slope, x))
    standard = x
    if activation.epsilon:
        standard = x - x.mean(axis=-1, keepdims=True)
        standard = standard / np.sqrt(np.square(standard).mean(axis=-1, keepdims=True) + activation.epsilon)
    return np.asarray(x * (rise / (1 + np.exp(-np.clip(standard * scale + shift, -60, 60))) + slope))


def _units(largest: Floats, sums: Floats) -> Floats:
    """Scales of int32 sums: the largest weight fits int16, and the sums `REACH`."""
    return np.maximum(np.maximum(largest / 32766, sums / REACH), 1e-30)


def _curves(activation: Activation, unit: Floats, factor: Floats) -> dict[str, Array]:
    """Scale, shift and coefficients of an activation of integers times `unit`; results are multiplied by `factor`."""
    scale, shift, rise, slope = (array.astype(np.float64) for array in activation[:4])
    width, middle = len(unit), SEGMENTS / 2
    curve = np.zeros((width, 3, SEGMENTS))
    if not scale.size:  # a knot at 0
        stretch, shift = np.full(width, 1.0), np.zeros(width)
        lines = np.where(np.arange(SEGMENTS) < middle, slope[:, None], 1.0)
    else:
        bends = np.abs(scale) > 1e-12
        stretch = np.where(bends, scale, 1.0) * (middle - 1) / SIDE
        share = 1 / (1 + np.exp(-np.clip(shift, -60, 60)))
        shift = np.where(bends, shift * (middle - 1) / SIDE, 0)
        lines = np.zeros((width, SEGMENTS))
        lines[:, 0], lines[:, -1] = slope, slope + rise
        lines[~bends] = (slope + rise * share)[~bends, None]
    # a line through the origin: x = (t - middle - shift) / stretch
    curve[:, 1] = lines / stretch[:, None]
    curve[:, 0] = -lines * ((middle + shift) / stretch)[:, None]
    if scale.size:
        nodes = np.cos(np.pi * np.array([5, 3, 1]) / 6) / 2 + 0.5  # of Chebyshev
        for segment in range(1, SEGMENTS - 1):
            t = segment + nodes
            x = (t[:, None] - middle - shift) / stretch
            fitted = np.linalg.solve(np.vander(t, 3, increasing=True), activated(x, activation)).T
            curve[:, :, segment] = np.where(bends[:, None], fitted, curve[:, :, segment])
    return {
        "scale": (unit * stretch).astype(np.float32),
        "shift": (shift + middle).astype(np.float32),
        "curve": (curve * factor[:, None, None]).astype(np.float32),
    }
