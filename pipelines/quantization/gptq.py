"""Weights rounded so that a layer's results keep their values, rather than each weight its own.

Where all weights of an output channel are rounded to nearest, the correlations of what they multiply decide what that
does to the result. Rounded one after the other, each weight can make up for those before it: min |(w - q s)^T X|^2 over
integers q, greedily (Frantar et al. 2023, "GPTQ"; the same as Babai's nearest plane on the Cholesky factor of X X^T,
which is how it is computed here).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
POSITIONS = 2**15  # of a layer's input that its correlations are taken from, in all
DAMPING = 0.01  # of the mean square of an input, added to each: few samples must not decide
BLOCK = 64
WIDEST = 4608  # inputs of an output channel; the Gram matrix of more takes too much memory


def compensated(weights: Array, scale: Array, gram: Array, most: int = 127) -> NDArray[np.int8]:
    """Integers q with small (w - q s)^T gram (w - q s), for each row w of `weights`.

    weights: float [channels, inputs]; scale: float [channels], of a step; gram: float64 [inputs, inputs], positive
    definite. Returns int8 [channels, inputs] in -most..most.
    """
    order = np.argsort(
        -np.diag(gram), kind="stable"
    )  # the inputs that matter most first, while others can make up for them
    reverse = order[::-1]
    factor = np.linalg.cholesky(gram[np.ix_(reverse, reverse)])[::-1, ::-1]  # upper: gram = factor factor^T
    w, step = weights[:, order].astype(np.float64), scale.astype(np.float64)
    error, result = np.zeros_like(w), np.empty(w.shape, np.int8)
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        carried = error[:, :start] @ factor[:start, start:end]
        for at in range(start, end):
            left = (carried[:, at - start] + error[:, start:at] @ factor[start:at, at]) / factor[at, at]
            whole = np.clip(np.rint((w[:, at] + left) / step), -most, most)
            error[:, at] = w[:, at] - whole * step
            result[:, order[at]] = whole
    return result


def rounded_together(
    layer: ir.Node, weights: Array, scale: Array, most: int, inputs: Iterable[Array], chunks: int
) -> NDArray[np.int8] | None:
    """The int8 weights of a Conv, Gemm or MatMul, of the shape of `weights`; None where the layer has no form that this
    knows.

    weights: float; scale: of their steps, one in all or one per output channel; most: largest magnitude; inputs: the
    layer's input in `chunks` chunks.
    """
    rows = _rows(layer, weights)
    if rows is None or rows.shape[-1] > WIDEST:
        return None
    groups, channels, width = rows.shape
    gram = np.zeros((groups, width, width))
    for x in inputs:
        columns = _columns(layer, weights, x, POSITIONS // chunks + 1)
        gram += columns.swapaxes(1, 2) @ columns
    step = np.broadcast_to(scale.astype(np.float64).ravel(), groups * channels).reshape(groups, channels)
    result = np.empty(rows.shape, np.int8)
    for each in range(groups):
        gram[each][np.diag_indices(width)] += (
            DAMPING * np.trace(gram[each]) / width or 1.0
        )  # 1: its input is zero throughout
        result[each] = compensated(rows[each], step[each], gram[each], most)
    return _like(layer, weights, result)


def _rows(layer: ir.Node, weights: Array) -> Array | None:
    """[groups, output channels of a group, inputs of one]."""
    if layer.op_type == "Conv":
        groups = layer.attributes.get_int("group", 1)
        return (
            weights.reshape(groups, len(weights) // groups, -1)
            if layer.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
            else None
        )
    if weights.ndim != 2:
        return None
    return (weights if layer.attributes.get_int("transB", 0) else weights.T)[None]


def _like(layer: ir.Node, weights: Array, rows: NDArray[np.int8]) -> NDArray[np.int8]:
    if layer.op_type == "Conv":
        return rows.reshape(weights.shape)
    return np.ascontiguousarray(rows[0] if layer.attributes.get_int("transB", 0) else rows[0].T)


def _columns(layer: ir.Node, weights: Array, x: Array, most: int) -> Array:
    """What the output channels are products with, at evenly drawn positions: [groups, positions, inputs]."""
    if layer.op_type != "Conv":
        rows = x.reshape(1, -1, x.shape[-1])
        return rows[:, :: rows.shape[1] // most | 1]
    spatial, kernel = x.ndim - 2, weights.shape[2:]
    strides, dilations = (layer.attributes.get_ints(name, [1] * spatial) for name in ("strides", "dilations"))
    pads = layer.attributes.get_ints("pads", [0] * 2 * spatial)
    x = np.pad(x, ((0, 0), (0, 0), *zip(pads[:spatial], pads[spatial:], strict=True)))
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, tuple(range(2, x.ndim)))
    windows = windows[
        (slice(None), slice(None), *(slice(None, None, s) for s in strides), *(slice(None, None, d) for d in dilations))
    ]
    windows = np.moveaxis(windows, 1, 1 + spatial)  # samples, positions, channels, kernel
    places = windows.shape[: 1 + spatial]
    drawn = np.unravel_index(np.arange(0, np.prod(places), int(np.prod(places)) // most | 1), places)
    groups = layer.attributes.get_int("group", 1)
    return windows[drawn].reshape(len(drawn[0]), groups, -1).swapaxes(0, 1)
