"""Image kernels in numpy: the definition of the native kernels' results, bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array
from pipelines.kernels.images.operators import Resize
from pipelines.kernels.images.program import ImageProgram
from pipelines.kernels.images.steps import Run

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
    inputs: int, begin: float, end: float, outputs: int, places: NDArray[np.int64], bicubic: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first input [n] and the weights [n, taps] of the outputs at `places`; weights past the inputs are 0."""
    scale = float(np.float32(end) - np.float32(begin)) / outputs
    wide = max(scale, 1.0)
    support = (2.0 if bicubic else 1.0) * wide
    centre = float(np.float32(begin)) + (places + 0.5) * scale
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
    sample = Run(x, program.tensors)
    for step in program.steps:
        step.compute(sample)
    places, values = (np.concatenate(parts) for parts in zip(*sample.results, strict=True))
    output = np.empty(program.results, np.float32)
    output[places] = values
    return output
