"""Scales and zero points: of activations, of weights, and those that a graph already holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.quantization.calibrate import TensorRange
from pipelines.quantization.observers import steps

Array = NDArray[Any]
Step = tuple[np.float32, np.uint8 | np.int8]  # scale and zero point
CLIPPED = np.linspace(1, 0.6, 21)  # of max|W|, when weights may be clipped
NOTHING = 1e-20  # weights below it count as zero, for their steps would leave float32


def activation_parameters(observed: TensorRange, symmetric: bool = False) -> tuple[np.float32, np.uint8]:
    """(scale, zero point) of a uint8 tensor with this range; zero is always represented exactly.

    symmetric: a tensor with negatives gets zero point 128 and s = max|x| / 127, so that engines may take it as signed
    bytes.
    """
    scale, zero = steps(observed.low, observed.high, symmetric)
    return np.float32(scale), np.uint8(zero)


def weight_parameters(
    weight: Array, axis: int | None, bits: int = 8, least: Array | float = 0.0, clip: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """(scales, int8 weights) of a float weight, one scale per index of `axis` (one in all for None).

    s = max|W| / 127, so that nothing saturates; clip: of the fractions `CLIPPED` of it that of least squared error.
    least: scales are at least this (float, or one per channel). A channel of zeros gets it, or 1 where it is 0.
    """
    top = 2 ** (bits - 1) - 1
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    reach = np.abs(weight).max(axis=others)
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1

    def rounded(fraction: Array | float) -> tuple[NDArray[np.float32], Array]:
        scale = np.maximum(np.where(reach > NOTHING, fraction * reach / top, 0.0), least)
        scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
        return scale, np.clip(np.rint(weight / scale.reshape(shape)), -top, top)

    if clip:
        tried = []
        for fraction in CLIPPED:
            scale, found = rounded(fraction)
            tried.append(np.square(found * scale.reshape(shape) - weight, dtype=np.float64).sum(axis=others))
        scale, found = rounded(CLIPPED[np.argmin(tried, axis=0)])
    else:
        scale, found = rounded(1.0)
    return scale, found.astype(np.int8)


def stored(array: Array, scale: Array | np.float32, zero: Array | np.integer[Any]) -> Array:
    """QuantizeLinear of a constant: bytes of the zero point's dtype; halves round to even."""
    limits = np.iinfo(zero.dtype)
    return np.clip(np.rint(array / scale) + zero.astype(np.int32), limits.min, limits.max).astype(zero.dtype)


def step_of(node: ir.Node) -> Step | None:
    """(scale, zero point) of a QuantizeLinear or DequantizeLinear of an activation that is like those made here: one
    for all, 8 bits.
    """
    scale, zero = (query.constant(each) for each in (*node.inputs[1:], None, None)[:2])
    if scale is None or zero is None or scale.size != 1 or zero.dtype not in (np.uint8, np.int8):
        return None
    return np.float32(scale.item()), zero.dtype.type(zero.item())


def given(x: ir.Value | None) -> Step | None:
    """The step of an activation that is bytes already: the DequantizeLinear that computes `x` is like those made
    here.
    """
    producer = x.producer() if x is not None else None
    return step_of(producer) if producer is not None and producer.op_type == "DequantizeLinear" else None


def saturates(node: ir.Node, scale: np.float32, zero: np.integer[Any]) -> bool:
    """Whether quantizing to uint8 with these parameters leaves the Relu or Clip `node` nothing to do."""
    low, high = (float(scale * np.float32(q - int(zero))) for q in (0, 255))  # in float32, as engines compare
    if node.op_type == "Relu":
        return low == 0
    bounds = []
    for value, unbounded in zip((*node.inputs[1:], None, None), (-np.inf, np.inf), strict=False):
        bound = query.constant(value)
        if value is not None and bound is None:
            return False
        bounds.append(unbounded if bound is None else bound.item())
    return bool(bounds[0] <= low and high <= bounds[1])
