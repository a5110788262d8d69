"""GPTQ: rounds int8 weights so that a layer's outputs keep their values.

Weights are rounded one after the other, and each weight makes up for the error of those before it: min |(w - q s)^T
X|^2 over integers q, greedily (Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers"). The Hessian of this error is 2 X X^T; the Gram matrix X X^T is used here. The implementation
is Babai's nearest plane algorithm on the Cholesky factor, which is equivalent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query

Array = NDArray[Any]
POSITIONS = 2**15  # input positions for the Gram matrix of a layer of up to 1,024 inputs, see `drawn`
WORK = POSITIONS * 1024**2  # products for the Gram matrix
DAMPING = 0.01  # share of the mean diagonal that is added to the diagonal of the Gram matrix
BLOCK = 64  # weights per block; errors of earlier blocks are propagated by one matrix product
WIDEST = 4608  # maximum inputs of an output channel
SECTION = 2304  # inputs per Gram matrix; four copies take 170 MB


def gptq(weights: Array, scale: Array, gram: Array, max_magnitude: int = 127) -> NDArray[np.int8]:
    """Rounds weights to integers q with small (w - q s)^T gram (w - q s) for each row w.

    Args:
        weights: float [channels, inputs].
        scale: float [channels].
        gram: float64 [inputs, inputs], positive definite.
        max_magnitude: Largest magnitude of an integer.

    Returns:
        int8 [channels, inputs].
    """
    # largest diagonal first, so that later weights can compensate
    order = np.argsort(-np.diag(gram), kind="stable")
    reverse = order[::-1]
    factor = np.linalg.cholesky(gram[np.ix_(reverse, reverse)])[::-1, ::-1]  # upper: gram = factor factor^T
    w, s = weights[:, order].astype(np.float64), scale.astype(np.float64)
    error, result = np.zeros_like(w), np.empty(w.shape, np.int8)
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        carried = error[:, :start] @ factor[:start, start:end]
        for j in range(start, end):
            compensation = (carried[:, j - start] + error[:, start:j] @ factor[start:j, j]) / factor[j, j]
            q = np.clip(np.rint((w[:, j] + compensation) / s), -max_magnitude, max_magnitude)
            error[:, j] = w[:, j] - q * s
            result[:, order[j]] = q
    return result


def gptq_groups(weights: Array, scale: Array, gram: Array, max_magnitude: int = 127) -> NDArray[np.int8]:
    """Rounds the weights of many small groups, such as the channels of a depthwise convolution, at once by `gptq`.

    Args:
        weights: float [groups, channels, inputs].
        scale: float [groups, channels].
        gram: float64 [groups, inputs, inputs], positive definite.
        max_magnitude: Largest magnitude of an integer.

    Returns:
        int8 [groups, channels, inputs].
    """
    order = np.argsort(-np.diagonal(gram, axis1=1, axis2=2), axis=1, kind="stable")
    reverse = order[:, ::-1]
    ordered = np.take_along_axis(np.take_along_axis(gram, reverse[:, :, None], 1), reverse[:, None], 2)
    factor = np.linalg.cholesky(ordered)[:, ::-1, ::-1]  # upper
    w, s = np.take_along_axis(weights, order[:, None], 2).astype(np.float64), scale.astype(np.float64)
    error, result = np.zeros_like(w), np.empty(w.shape, np.int8)
    for j in range(w.shape[2]):
        column = factor[:, : j + 1, j]
        compensation = np.einsum("gci,gi->gc", error[:, :, :j], column[:, :j]) / column[:, j : j + 1]
        q = np.clip(np.rint((w[:, :, j] + compensation) / s), -max_magnitude, max_magnitude)
        error[:, :, j] = w[:, :, j] - q * s
        np.put_along_axis(result, np.broadcast_to(order[:, None, j : j + 1], (*w.shape[:2], 1)), q[:, :, None], 2)
    return result


def drawn(width: int, max_positions: int = POSITIONS) -> int:
    """Returns how many input positions make up the Gram matrix of a layer.

    `max_positions` if they cost at most `WORK`, otherwise as many as `WORK` allows, but at least two per input.

    Args:
        width: Inputs of an output channel.
        max_positions: Maximum number of positions, if two per input are fewer.
    """
    return max(min(max_positions, WORK // width**2), min(2 * width, POSITIONS))


def round_layer(
    layers: Sequence[ir.Node],
    weights: Array,
    scale: Array,
    max_magnitude: int,
    inputs: Iterable[Sequence[Array]],
    chunks: int,
    drawn_positions: int = POSITIONS,
) -> NDArray[np.int8] | None:
    """Rounds the weights of Convs, Gemms or MatMuls that share them, by `gptq`.

    Args:
        layers: Layers that share the weights.
        weights: Float weights [...], in the layout of the layer.
        scale: One scale, or one per output channel, float32.
        max_magnitude: Largest magnitude of an integer.
        inputs: For every chunk, the input of every layer, float32.
        chunks: Number of chunks.
        drawn_positions: Maximum number of input positions, see `drawn`.

    Returns:
        int8 weights of the shape of `weights`, or None if the layers have another form or read the weights differently.
    """
    rows = _rows(layers[0], weights)
    if rows is None or rows.shape[-1] > WIDEST:
        return None
    for other in (_rows(layer, weights) for layer in layers[1:]):
        if other is None or not np.array_equal(rows, other):
            return None
    groups, channels, width = rows.shape
    positions = drawn(width, drawn_positions) // (chunks * len(layers)) + 1
    columns = (
        _im2col(layer, weights, x, positions)
        for arrays in inputs
        for layer, x in zip(layers, arrays, strict=True)
        if x.size  # no rows may have been chosen
    )
    sections = [slice(start, start + SECTION) for start in range(0, width, SECTION)]
    grams = _grams(columns, groups, width, sections)
    scales = np.broadcast_to(scale.astype(np.float64).ravel(), groups * channels).reshape(groups, channels)
    result = np.empty(rows.shape, np.int8)
    for section, gram in zip(sections, grams, strict=True):
        for group in range(groups):
            damping = DAMPING * np.trace(gram[group]) / len(gram[group]) or 1.0  # 1: its input is zero throughout
            gram[group][np.diag_indices(len(gram[group]))] += damping
        if groups > 1 and gram.shape[1] <= BLOCK:
            result[:, :, section] = gptq_groups(rows[:, :, section], scales, gram, max_magnitude)
            continue
        for group in range(groups):
            result[group][:, section] = gptq(rows[group][:, section], scales[group], gram[group], max_magnitude)
    return _from_rows(layers[0], weights, result)


def _grams(columns: Iterable[Array], groups: int, width: int, sections: Sequence[slice]) -> list[Array]:
    """Returns the sum of X^T X, float64 [groups, w, w], over X [groups, positions, width], per section of inputs."""
    widths = [len(range(width)[section]) for section in sections]
    grams = [np.zeros((groups, size, size)) for size in widths]
    held: list[Array] = []

    def add() -> None:
        x = np.concatenate(held, axis=1)
        held.clear()
        for gram, section in zip(grams, sections, strict=True):
            part = x[:, :, section]
            gram += part.swapaxes(1, 2) @ part

    for block in columns:
        held.append(block)
        if sum(x.shape[1] for x in held) >= widths[0]:  # the product of fewer positions costs less than the sum
            add()
    if held:
        add()
    return grams


def _rows(layer: ir.Node, weights: Array) -> Array | None:
    """Returns weights as [groups, output channels of a group, inputs]; None for unsupported layers."""
    if layer.op_type == "Conv":
        groups = layer.attributes.get_int("group", 1)
        if layer.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return None
        return weights.reshape(groups, len(weights) // groups, -1)
    if weights.ndim != 2:
        return None
    return query.inputs_first(layer, weights).T[None]


def _from_rows(layer: ir.Node, weights: Array, rows: NDArray[np.int8]) -> NDArray[np.int8]:
    """Inverts `_rows`."""
    if layer.op_type == "Conv":
        return rows.reshape(weights.shape)
    return np.ascontiguousarray(query.inputs_first(layer, rows[0].T))


def _im2col(layer: ir.Node, weights: Array, x: Array, most: int) -> Array:
    """Returns the input of a layer as [groups, positions, inputs of a channel], about `most` evenly drawn positions."""
    if layer.op_type != "Conv":
        rows = x.reshape(1, -1, x.shape[-1])
        return rows[:, :: rows.shape[1] // most | 1]
    spatial, kernel = x.ndim - 2, weights.shape[2:]
    strides, dilations = (layer.attributes.get_ints(name, [1] * spatial) for name in ("strides", "dilations"))
    pads = layer.attributes.get_ints("pads", [0] * 2 * spatial)
    if any(pads):  # without, it would copy them all
        x = np.pad(x, ((0, 0), (0, 0), *zip(pads[:spatial], pads[spatial:], strict=True)))
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, tuple(range(2, x.ndim)))
    windows = windows[
        (slice(None), slice(None), *(slice(None, None, s) for s in strides), *(slice(None, None, d) for d in dilations))
    ]
    windows = np.moveaxis(windows, 1, 1 + spatial)  # samples, positions, channels, kernel
    grid = windows.shape[: 1 + spatial]
    drawn = np.unravel_index(np.arange(0, np.prod(grid), int(np.prod(grid)) // most | 1), grid)
    groups = layer.attributes.get_int("group", 1)
    return windows[drawn].reshape(len(drawn[0]), groups, -1).swapaxes(0, 1)
