"""Image kernels in numpy: the definition of the native kernels' results, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array
from pipelines.kernels.images.operators import Resize, windows
from pipelines.kernels.images.program import (
    Addition,
    AveragePool,
    Concatenation,
    Convolution,
    Dequantize,
    GlobalAverage,
    ImageProgram,
    Lookup,
    MaxPool,
    Pixels,
    Product,
    Resampling,
    Selection,
    Sum,
)

BITS = 22  # after the point of a resizing weight: Pillow's PRECISION_BITS


def resize(image: NDArray[np.uint8], resizing: Resize) -> NDArray[np.uint8]:
    """Computes `Resize`.

    Args:
        image: uint8 [H, W, 3].
        resizing: Size, crop and interpolation.

    Returns:
        uint8 [3, h, w].
    """
    rows, columns = image.shape[:2]
    box = resizing.box or (0, 0, columns, rows)
    (width, height), (left, top, right, bottom) = resizing.size, resizing.crop
    across = _weights(columns, box[0], box[2], width, np.arange(left, right), resizing.bicubic)
    down = _weights(rows, box[1], box[3], height, np.arange(top, bottom), resizing.bicubic)
    return _weighted(_weighted(image.transpose(2, 0, 1), *across).swapaxes(1, 2), *down).swapaxes(1, 2)


def _weights(
    inputs: int, begin: float, end: float, outputs: int, wanted: NDArray[np.int64], bicubic: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each wanted output its first input [n] and its weights [n, taps], those of 0 also beyond the inputs."""
    scale = float(np.float32(end) - np.float32(begin)) / outputs
    wide = max(scale, 1.0)
    support = (2.0 if bicubic else 1.0) * wide
    centre = float(np.float32(begin)) + (wanted + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), inputs)
    tap = np.arange((last - first).max())
    x = np.abs((tap + first[:, None] - centre[:, None] + 0.5) * (1.0 / wide))
    near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1 if bicubic else 1.0 - x
    far = (((x - 5) * x + 8) * x - 4) * -0.5 if bicubic else np.zeros_like(x)
    weight = np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0)) * (tap < (last - first)[:, None])
    weight /= np.add.accumulate(weight, axis=1)[:, -1:]  # one after the other: a pairwise sum has other bits
    return first, np.trunc(weight * 2.0**BITS + np.where(weight < 0, -0.5, 0.5)).astype(np.int64)


def _weighted(values: NDArray[np.uint8], first: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Resamples [..., inputs] to [..., n]."""
    total = np.full((*values.shape[:-1], len(first)), 1 << (BITS - 1))
    for tap, weight in enumerate(weights.T):
        total += values[..., np.minimum(first + tap, values.shape[-1] - 1)] * weight
    return np.asarray(np.clip(total >> BITS, 0, 255), np.uint8)


def run(program: ImageProgram, x: Array) -> Array:
    """Computes the results of a program for one sample, without its ending.

    Args:
        program: The program.
        x: Sample, of the program's shape and dtype.

    Returns:
        float32 [results].
    """
    tensors: dict[int, Array] = {}
    results: list[Array] = []
    for step in program.steps:
        match step:
            case Pixels():
                pixels = x if step.last else x.transpose(1, 2, 0)
                if program.dtype == "float32":
                    with np.errstate(invalid="ignore", over="ignore"):
                        scaled = np.nan_to_num(np.rint(pixels / np.float32(step.scale)), nan=0) + step.zero
                    pixels = np.clip(scaled, 0, 255).astype(np.uint8)
                fills = np.broadcast_to(np.array(step.fills, np.uint8), (*pixels.shape[:2], len(step.fills)))
                tensors[step.out] = np.concatenate([pixels, fills], axis=2)
            case Convolution():
                sums = _convolved(step, tensors[step.x])
                if step.out < 0:
                    return (sums.astype(np.float32) * step.scale).ravel()
                found = _bytes(np.rint(sums.astype(np.float32) * step.scale) + step.zero, step.low, step.high)
                if step.sum is not None:
                    pair = (tensors[step.other], found) if step.other_first else (found, tensors[step.other])
                    found = _sum(step.sum, *pair)
                tensors[step.out] = found
            case Addition():
                tensors[step.out] = _sum(step.sum, tensors[step.a], tensors[step.b])
            case Product():
                a = tensors[step.x].astype(np.int32) - step.x_zero
                b = tensors[step.gate].astype(np.int32) - step.gate_zero
                scales = [np.float32(each) for each in (step.x_scale, step.gate_scale, step.scale)]
                tensors[step.out] = product(a, b, scales, step.zero, step.low, step.high)
            case MaxPool():
                tensors[step.out] = np.max(
                    [np.where(inside, taps, 0) for taps, inside in _taps(step, tensors[step.x])], 0
                )
            case AveragePool():
                total: Array = np.zeros(1, np.float32)
                count: Array = np.zeros(1, np.float32)
                for taps, inside in _taps(step, tensors[step.x]):
                    real = (taps.astype(np.float32) - np.float32(step.x_zero)) * np.float32(step.x_scale)
                    total = np.where(inside, total + real, total)
                    count = count + (inside | step.padded).astype(np.float32)
                tensors[step.out] = _bytes(np.rint(total / count / np.float32(step.scale) + np.float32(step.zero)))
            case GlobalAverage():
                height, width, _ = tensors[step.x].shape
                sums = tensors[step.x].sum(axis=(0, 1), dtype=np.int64) - height * width * step.x_zero
                mean: Array = sums.astype(np.float32) * np.float32(step.scale)
                if step.out < 0:
                    return mean
                tensors[step.out] = _bytes(np.rint(mean) + step.zero)[None, None]
            case Lookup():
                found = tensors[step.x]
                own = step.table.ndim == 2
                tensors[step.out] = step.table[np.arange(found.shape[2]), found] if own else step.table[found]
            case Concatenation():
                tensors[step.out] = np.concatenate([tensors[each] for each in step.xs], axis=2)
            case Selection():
                tensors[step.out] = tensors[step.x][..., step.channels]
            case Resampling():
                tensors[step.out] = tensors[step.x][list(step.rows)][:, list(step.columns)]
            case Dequantize():
                real = (tensors[step.x].astype(np.float32) - np.float32(step.zero)) * np.float32(step.scale)
                results.append((real if step.last else real.transpose(2, 0, 1)).ravel())
    return np.concatenate(results)


def _convolved(step: Convolution, x: Array) -> NDArray[np.int64]:
    """The sums of a convolution."""
    outputs, *kernel, inputs = step.weight.shape
    rows, columns = windows(x.shape, kernel, step.strides, step.pads, step.dilations)
    sides = [(step.pads[0], step.pads[2]), (step.pads[1], step.pads[3])]
    padded = np.full(
        (*[n + sum(side) for n, side in zip(x.shape, sides, strict=False)], x.shape[2]), step.fill, np.int64
    )
    padded[sides[0][0] : sides[0][0] + x.shape[0], sides[1][0] : sides[1][0] + x.shape[1]] = x
    total = np.broadcast_to(step.bias.astype(np.int64), (rows, columns, outputs)).copy()
    each = outputs // step.groups
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * step.dilations[0], j * step.dilations[1]
            taps = padded[top :: step.strides[0], left :: step.strides[1]][:rows, :columns]
            for group in range(step.groups):
                wanted = slice(group * each, (group + 1) * each)
                part = taps[..., group * inputs : (group + 1) * inputs]
                total[..., wanted] += part @ step.weight[wanted, i, j].astype(np.int64).T
    return total


def _taps(step: MaxPool | AveragePool, x: Array) -> Iterator[tuple[Array, NDArray[np.bool_]]]:
    """For each place in a window, in order: the bytes there of all windows, and which of them lie inside."""
    top, left, bottom, right = step.pads
    rows, columns = windows(x.shape, step.kernel, step.strides, step.pads)
    padded = np.pad(x, ((top, bottom), (left, right), (0, 0)))
    inside = np.pad(np.ones((*x.shape[:2], 1), bool), ((top, bottom), (left, right), (0, 0)))
    for i in range(step.kernel[0]):
        for j in range(step.kernel[1]):
            cut = slice(i, None, step.strides[0]), slice(j, None, step.strides[1])
            yield padded[cut][:rows, :columns], inside[cut][:rows, :columns]


def product(a: Array, b: Array, scales: Sequence[np.float32], zero: int, low: int, high: int) -> NDArray[np.uint8]:
    """Computes `Product` of factors without their zero points.

    Args:
        a: Integers of x.
        b: Integers of the gate.
        scales: (x scale, gate scale, result scale).
        zero: Zero point of the result.
        low: Lower bound.
        high: Upper bound.

    Returns:
        uint8 of the shape of `a`.
    """
    a_scale, b_scale, scale = scales
    if (low, high) == (0, 255):
        ratio = (a_scale * b_scale) / scale
        return _bytes(np.rint((a * b).astype(np.float32) * ratio + np.float32(zero)))
    real = (a.astype(np.float32) * a_scale) * (b.astype(np.float32) * b_scale)
    return _bytes(np.rint(real / scale) + np.float32(zero), low, high)


def _sum(of: Sum, a: Array, b: Array) -> NDArray[np.uint8]:
    """`Sum`; the products are exact in long doubles, which are rounded to float32 once."""
    exact = np.longdouble
    inner = (b.astype(exact) * exact(np.float32(of.b_ratio)) + exact(np.float32(of.fixed))).astype(np.float32)
    outer = (a.astype(exact) * exact(np.float32(of.a_ratio)) + inner.astype(exact)).astype(np.float32)
    return _bytes(np.rint(outer), of.low, of.high)


def _bytes(values: Array, low: int = 0, high: int = 255) -> NDArray[np.uint8]:
    return np.minimum(np.maximum(values, low), high).astype(np.uint8)
