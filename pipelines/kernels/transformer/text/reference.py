"""Reference implementation of the native text encoder in numpy, bit for bit the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.reference import (
    Floats,
    activate,
    encode,
    exponential,
    layer_norm,
    linear,
    sigmoid,
    sum_lanes,
)
from pipelines.kernels.transformer.text.program import SHORTEST, Dense, HeadStep, RowNorm, TextProgram, Truncation


def tanh(x: Floats) -> Floats:
    """(1 - e) / (1 + e) with the sign of x, from e = exp(-2 |x|).

    Args:
        x: float32 of any shape.

    Returns:
        float32 of the same shape.
    """
    e = exponential(np.abs(x) * np.float32(-2))
    magnitude = (np.float32(1) - e) / (np.float32(1) + e)
    return np.copysign(magnitude, x)


def dense(layer: Dense, x: Floats) -> Floats:
    """Computes a `Dense` layer.

    Args:
        layer: The layer.
        x: float32 [inputs].

    Returns:
        float32 [outputs].
    """
    y = sum_lanes(x * layer.weight) + layer.bias
    match layer.activation:
        case "":
            return y
        case "tanh":
            return tanh(y)
        case "relu":
            return np.maximum(y, np.float32(0))
        case "sigmoid":
            return sigmoid(y)
        case kind:
            return activate(kind, y)


def step(operation: HeadStep, x: Floats) -> Floats:
    """Computes a step of a head.

    Args:
        operation: The step.
        x: float32 [inputs].

    Returns:
        float32 [outputs].
    """
    match operation:
        case Dense():
            return dense(operation, x)
        case RowNorm():
            return np.asarray(layer_norm(x[None], operation.scale, operation.bias, operation.epsilon)[0])
        case Truncation():
            return x[: operation.components]
    return np.asarray(x / np.maximum(np.sqrt(sum_lanes(x * x)), np.float32(SHORTEST)), np.float32)


def pool(kind: str, rows: Floats) -> Floats:
    """Computes one pooling; sums have the order of the rows.

    Args:
        kind: One of `POOLINGS`.
        rows: float32 [n, width].

    Returns:
        float32 [width].
    """
    n = len(rows)
    if kind in ("cls", "last"):
        return np.asarray(rows[0 if kind == "cls" else -1])
    if kind == "max":
        return np.asarray(rows.max(axis=0))
    x: Floats = rows[0].copy()
    for i, row in enumerate(rows[1:], 2):
        x += row * np.float32(i) if kind == "weighted_mean" else row
    divisor = {"mean": n, "weighted_mean": n * (n + 1) // 2}.get(kind)
    scale = np.sqrt(np.float32(n)) if divisor is None else np.float32(divisor)
    pooled: Floats = np.asarray(x / scale, np.float32)
    return pooled


def compute(
    program: TextProgram, tokens: NDArray[np.int64], types: NDArray[np.int64], attended: int | None = None
) -> Floats:
    """Computes the result of one text.

    Args:
        program: The program.
        tokens: int64 [n].
        types: Token types, int64 [n].
        attended: How many of the first tokens all tokens attend to; None: all.

    Returns:
        float32 [width], or, where each token has a result, [n, width].
    """
    rows = encode(program.encoder, tokens, program.position_rows(types), attended)
    if program.vocabulary is not None:
        largest = np.maximum(linear(program.vocabulary, rows).max(axis=0), np.float32(0))
        sparse: Floats = np.log1p(largest.astype(np.float64)).astype(np.float32)
        return sparse
    if program.poolings:
        rows = np.concatenate([pool(kind, rows) for kind in program.poolings])[None]
    results = []
    for row in rows:
        x = row
        for operation in program.steps:
            x = step(operation, x)
        results.append(x)
    return results[0] if program.poolings else np.stack(results)
