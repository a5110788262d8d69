"""Arithmetic of rows: sums, activations, quantization, linear layers, normalization and logits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.operations import LANES, Embedding, RowLinear, StaticQParams

Floats = NDArray[np.float32]
PANEL = 64  # logits that share one maximum in the online softmax
ROUND_TO_INT = np.float32(12582912)  # 1.5 * 2^23: added to |x| < 2^22, it leaves rint(x) in the lowest bits
SMALLEST_ABS_MAX = np.float32(1e-30)
LOG2_E = np.float32(1.44269504)
GELU = (
    1.7281269e-10,
    -1.551985e-8,
    6.1151377e-7,
    -1.4108793e-5,
    2.1648454e-4,
    -2.3977514e-3,
    2.0246882e-2,
    -0.13371626,
    0.79840469,
)


def sum_lanes(x: Floats) -> Floats:
    """Sums over the last axis in the kernels' order: 16 lanes, each of every 16th element, then `reduce_lanes`.

    Args:
        x: float32 [..., n].

    Returns:
        float32 [...].
    """
    whole = -(-x.shape[-1] // LANES) * LANES
    padded = np.zeros((*x.shape[:-1], whole), np.float32)
    padded[..., : x.shape[-1]] = x
    total = np.zeros((*x.shape[:-1], LANES), np.float32)
    for first in range(0, whole, LANES):
        total = total + padded[..., first : first + LANES]
    return reduce_lanes(total)


def reduce_lanes(total: Floats) -> Floats:
    """Sums 16 lanes, float32 [..., 16] -> [...]: the upper half is added to the lower half until one is left.

    Args:
        total: float32 [..., 16].

    Returns:
        float32 [...].
    """
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def exponential(x: Floats) -> Floats:
    """exp(x) by Cephes' polynomial (expf), to a relative error of 1e-7.

    Args:
        x: float32, at most 0; the result is 0 below -87.

    Returns:
        float32 of the same shape.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = x * np.float32(1.44269504088896341) + ROUND_TO_INT
        n = shifted - ROUND_TO_INT
        r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
        p = r * np.float32(1.9875691500e-4) + np.float32(1.3981999507e-3)
        for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + np.float32(coefficient)
        y = (p * (r * r) + r) + np.float32(1)
        scaled = (y.view(np.int32) + (shifted.view(np.int32) << np.int32(23))).view(np.float32)
    return np.where(x >= np.float32(-87), scaled, np.float32(0))


def quantize_rows(
    x: Floats, nonnegative: bool = False, qparams: StaticQParams | None = None
) -> tuple[NDArray[np.uint8], Floats]:
    """Quantizes rows to uint8.

    Args:
        x: float32 [n, K], all finite.
        nonnegative: Whether nothing is negative; the dynamic zero point is 0 then.
        qparams: Static quantization parameters; None: dynamic ones, each row by its own range.

    Returns:
        uint8 [n, K], and the scale of each row, float32 [n].
    """
    if qparams:
        with np.errstate(over="ignore"):
            scaled = np.rint(x / np.float32(qparams.scale))
        return np.clip(scaled + qparams.zero_point, 0, 255).astype(np.uint8), np.full(len(x), qparams.scale, np.float32)
    levels, zero_point = (np.float32(255), 0) if nonnegative else (np.float32(127), 128)
    largest = np.abs(x).max(axis=1)
    nonzero = largest >= SMALLEST_ABS_MAX
    divisor = np.where(nonzero, largest, np.float32(1))
    scale = np.where(nonzero, largest / levels, np.float32(1))
    inverse = np.where(nonzero, levels / divisor, np.float32(0))
    return (np.rint(x * inverse[:, None]).astype(np.int32) + zero_point).astype(np.uint8), scale


def linear(
    layer: RowLinear, x: Floats, nonnegative: bool = False, relu: bool = False, residual: Floats | None = None
) -> Floats:
    """Computes a `RowLinear`.

    Args:
        layer: The layer.
        x: float32 [n, K].
        nonnegative: See `quantize_rows`.
        relu: Whether a ReLU follows.
        residual: float32 [n, N] that is added after the ReLU, or None.

    Returns:
        float32 [n, N].
    """
    if layer.quantizes:
        rows, scale = quantize_rows(x, nonnegative, layer.qparams)
        zero_point = layer.qparams.zero_point if layer.qparams else 0 if nonnegative else 128
        sums = (rows.astype(np.float64) - zero_point) @ layer.weight.astype(np.float64)  # exact: below 2^53
        y = sums.astype(np.float32) * (scale[:, None] * layer.scale) + layer.bias
    else:
        total = np.zeros((len(x), layer.outputs), np.float32)
        for column, row in zip(x.T, layer.weight, strict=True):
            total = total + column[:, None] * row
        y = total * layer.scale + layer.bias
    if relu:
        y = np.maximum(y, np.float32(0))
    return y if residual is None else y + residual


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) of float32 numbers, computed from e = exp(-|x|).

    Args:
        x: float32 of any shape.

    Returns:
        float32 of the same shape.
    """
    e = exponential(-np.abs(x))
    return np.asarray(np.where(x < 0, e, np.float32(1)) / (np.float32(1) + e))


def activate(kind: str, x: Floats) -> Floats:
    """Computes an `Activation`.

    Args:
        kind: One of `GRAPH_ACTIVATIONS`, or sigmoid. GELU is an odd polynomial up to 4.2, fitted to x times its
            error: to 6e-5.
        x: float32 of any shape.

    Returns:
        float32 of the same shape.
    """
    if kind == "sigmoid":
        return sigmoid(x)
    if kind == "swish":
        return x * sigmoid(x)
    if kind == "tanh":
        return np.tanh(x)
    if kind == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        with np.errstate(over="ignore"):
            return x * sigmoid(x * ((x * x) * np.float32(0.07135481) + np.float32(1.5957691)))
    t = np.clip(x, np.float32(-4.2), np.float32(4.2))
    z = t * t
    p = np.full_like(z, GELU[0])
    for coefficient in GELU[1:]:
        p = p * z + np.float32(coefficient)
    return np.asarray((x * np.float32(0.5)) * (p * t + np.float32(1)))


def recurrence(gates: Floats, cells: Floats) -> Floats:
    """Computes the cells of a `Recurrence` after one token.

    Args:
        gates: [forget | value], float32 [n, 2 W].
        cells: Cells before, float32 [n, W].

    Returns:
        Cells after, float32 [n, W].
    """
    forget, value = np.split(gates, 2, axis=1)
    keep = sigmoid(forget)
    updated: Floats = cells * keep + (np.float32(1) - keep) * value
    return updated


def layer_norm(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    """Computes a `LayerNorm`.

    Args:
        x: float32 [n, W].
        scale: float32 [W].
        bias: float32 [W].
        epsilon: Added to the variance.

    Returns:
        float32 [n, W].
    """
    count = np.float32(x.shape[1])
    deviation = x - (sum_lanes(x) / count)[:, None]
    inverse_std = np.float32(1) / np.sqrt(sum_lanes(deviation * deviation) / count + np.float32(epsilon))
    normalized: Floats = (deviation * inverse_std[:, None]) * scale + bias
    return normalized


def part_norms(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    """Computes `PartNorms`.

    Args:
        x: float32 [n, columns].
        scale: float32 [N, W].
        bias: float32 [N, W].
        epsilon: Added to the variances.

    Returns:
        float32 [n, columns].
    """
    parts = np.split(x, np.arange(1, len(scale) + 1) * scale.shape[1], axis=1)
    norms = [layer_norm(part, *row, epsilon) for part, row in zip(parts, zip(scale, bias, strict=True), strict=False)]
    return np.concatenate([*norms, parts[-1]], axis=1)


def neighbours(x: Floats, count: int, attended: int | None = None) -> Floats:
    """Computes `Neighbours`.

    Args:
        x: float32 [n, W].
        count: Number of rows side by side.
        attended: How many of the first tokens are attended to; None: all.

    Returns:
        float32 [n, count W].
    """
    rows = np.zeros((len(x) + count - 1, x.shape[1]), np.float32)
    rows[count // 2 : count // 2 + len(x)][:attended] = x[:attended]
    return np.concatenate([rows[i : i + len(x)] for i in range(count)], axis=1)


def rms_norm(x: Floats, scale: Floats, epsilon: float) -> Floats:
    """Computes an `RMSNorm`.

    Args:
        x: float32 [..., W].
        scale: float32 [W].
        epsilon: Added to the mean of squares.

    Returns:
        float32 [..., W].
    """
    inverse = np.float32(1) / np.sqrt(sum_lanes(x * x) / np.float32(x.shape[-1]) + np.float32(epsilon))
    normalized: Floats = (x * inverse[..., None]) * scale
    return normalized


def to_float16(x: Floats) -> Floats:
    """Rounds to float16 as a KV cache stores keys and values.

    Args:
        x: float32 of any shape; clipped to +-65504.

    Returns:
        The rounded numbers, float32.
    """
    largest = np.float32(65504)
    return np.clip(x, -largest, largest).astype(np.float16).astype(np.float32)


def top_k(logits: Floats, k: int) -> tuple[Floats, NDArray[np.int32], NDArray[np.float64]]:
    """Finds the likeliest tokens and the normalization of softmax.

    Args:
        logits: float32 [n, vocabulary].
        k: Tokens of each row; of equal logits the first token comes first.

    Returns:
        Logits float32 [n, k], tokens int32 [n, k], and log-sum-exp of all logits float64 [n].
    """
    n, vocabulary = logits.shape
    tokens = np.lexsort((np.broadcast_to(np.arange(vocabulary), logits.shape), -logits), axis=1)[:, :k]
    padded = np.full((n, -(-vocabulary // PANEL) * PANEL), -np.inf, np.float32)
    padded[:, :vocabulary] = logits
    largest, sums = np.full(n, -np.inf, np.float32), np.zeros((n, LANES), np.float32)
    for panel in padded.reshape(n, -1, PANEL).swapaxes(0, 1):
        maximum = np.maximum(panel.max(axis=1), largest)
        with np.errstate(invalid="ignore"):
            sums = np.where((maximum > largest)[:, None], sums * exponential((largest - maximum)[:, None]), sums)
        largest = maximum
        for part in panel.reshape(n, -1, LANES).swapaxes(0, 1):
            sums = sums + exponential(part - maximum[:, None])
    totals = reduce_lanes(sums).tolist()
    log_sum_exp = np.array([math.log(total) + float(base) for total, base in zip(totals, largest, strict=True)])
    return np.take_along_axis(logits, tokens, 1), tokens.astype(np.int32), log_sum_exp


def embedding(operation: Embedding, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """Computes an `Embedding`.

    Args:
        operation: The operation.
        tokens: int64 [n].
        positions: Rows of the table of positions, int64 [n].

    Returns:
        float32 [n, W].
    """
    rows: Floats = (
        operation.table[tokens].astype(np.float32) * operation.scale[tokens, None] + operation.positions[positions]
    )
    return rows
