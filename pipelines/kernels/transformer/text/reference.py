"""Reference implementation of the native text encoder in numpy, bit for bit the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.reference import Floats, encode, exponential, sum_lanes
from pipelines.kernels.transformer.text.program import SHORTEST, Dense, TextProgram


def tanh(x: Floats) -> Floats:
    """(1 - e) / (1 + e) with the sign of x, from e = exp(-2 |x|).

    Args:
        x: float32 of any shape.

    Returns:
        float32 of the same shape.
    """
    e = exponential(np.abs(x) * np.float32(-2))
    found = (np.float32(1) - e) / (np.float32(1) + e)
    return np.copysign(found, x)


def dense(layer: Dense, x: Floats) -> Floats:
    """Computes a `Dense` layer.

    Args:
        layer: The layer.
        x: float32 [inputs].

    Returns:
        float32 [outputs].
    """
    y = sum_lanes(x * layer.weight) + layer.bias
    if layer.activation == "tanh":
        return tanh(y)
    return np.maximum(y, np.float32(0)) if layer.activation else y


def compute(program: TextProgram, tokens: NDArray[np.int64], types: NDArray[np.int64]) -> Floats:
    """Computes the result of one text.

    Args:
        program: The program.
        tokens: int64 [n].
        types: Token types, int64 [n].

    Returns:
        float32 [width].
    """
    rows = encode(program.encoder, tokens, program.position_rows(types))
    x = rows[0]
    for row in rows[1:] if program.pooling != "cls" else ():
        x = x + row if program.pooling == "mean" else np.maximum(row, x)
    if program.pooling == "mean":
        x = x / np.float32(len(rows))
    for layer in program.head:
        x = dense(layer, x)
    if program.normalize:
        x = x / np.maximum(np.sqrt(sum_lanes(x * x)), np.float32(SHORTEST))
    found: Floats = x
    return found
