"""Scales and zero points (qparams) of activations and weights, and those that a graph contains."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.graph import query

Array = NDArray[Any]
QParams = tuple[np.float32, np.uint8 | np.int8]  # per-tensor scale and zero point
CLIP_RATIOS = np.linspace(1, 0.6, 21)  # of max|W|, when weights may be clipped
SHORT, SAMPLE = 16, 32  # weights of a channel; channels that are looked at before all are
BLOCK = 16 << 20  # bytes of a weight that are quantized at once
ROUNDING = 1e-5  # how far, relatively, float32 may have moved a multiple of a step
EMPTY = 1e-12  # a range of activations that is narrower counts as one of zeros
# Any smaller scale counts as none and becomes 1, see `stored_scales`. Its product with the least of an activation,
# EMPTY / 255, which is a bias's, is still a normal float32.
LEAST_SCALE = 2.0**-76


class Interval(Protocol):
    """A range of values, low .. high."""

    @property
    def low(self) -> float:
        """Least value."""

    @property
    def high(self) -> float:
        """Greatest value."""


def stored_scales(scales: ArrayLike) -> NDArray[np.float32]:
    """Converts scales to float32, as a graph stores them; scales below `LEAST_SCALE` or not finite become 1.

    A division by 0 or a float32 subnormal would give meaningless integers that differ between engines.

    Args:
        scales: Scales of any shape.

    Returns:
        float32 scales of the same shape.
    """
    scales = np.asarray(scales, np.float64)
    return np.where(np.isfinite(scales) & (scales >= LEAST_SCALE), scales, 1.0).astype(np.float32)


def uint8_qparams(
    low: ArrayLike, high: ArrayLike, symmetric: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Computes qparams of uint8 tensors; zero is always represented exactly.

    s = (high - low) / 255 with the range widened to hold zero, z = round(-low / s); 1 and 0 for an empty range.

    Args:
        low: Lower ends of the ranges, any shape.
        high: Upper ends of the ranges, the shape of `low`.
        symmetric: Use s = max(-low, high) / 127 and z = 128 where low < 0.

    Returns:
        Scales and zero points (whole numbers), float32, the shape of `low`.
    """
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    empty, signed = high - low < EMPTY, symmetric & (low < 0)
    scale = stored_scales(np.where(empty, 1.0, np.where(signed, np.maximum(-low, high) / 127, (high - low) / 255)))
    zero = np.where(signed, np.float32(128), np.clip(np.rint(-low.astype(np.float32) / scale), 0, 255))
    return scale, np.where(empty, np.float32(0), zero)


def quantization_errors(
    edges: NDArray[np.float64],
    counts: NDArray[np.int64],
    total: int,
    low: ArrayLike,
    high: ArrayLike,
    symmetric: bool = False,
) -> NDArray[np.float64]:
    """Computes mean squared quantization errors (uint8 and back) of candidate ranges.

    Values are taken as uniform within a bin. With k(x) = clip(round(x / s), -z, 255 - z), the squared error has the
    antiderivative F(x) = k s^3 / 12 + (x - k s)^3 / 3.

    Args:
        edges: Bin edges of a histogram, float64 [n + 1].
        counts: Bin counts without exact zeros, int64 [n].
        total: Number of values, exact zeros included; zeros have no error.
        low: Lower ends of the ranges, any shape.
        high: Upper ends of the ranges, the shape of `low`.
        symmetric: Whether ranges with negatives get zero point 128.

    Returns:
        Mean squared errors in squared units of the tensor, float64, the shape of `low`.
    """
    scales, zeros = uint8_qparams(low, high, symmetric)
    width = np.diff(edges)
    point = width == 0
    weight, points = counts / np.where(point, 1.0, width), point.any()
    mean_squares = np.empty(scales.shape)
    for i, s in np.ndenumerate(scales.astype(np.float64)):  # one by one, for the cache's sake
        level = np.minimum(np.maximum(np.rint(edges / s), -zeros[i]), 255 - zeros[i])
        residual = edges - level * s
        integral = np.diff(level * (s**3 / 12) + residual * residual * residual / 3)
        mean_squares[i] = (np.where(point, residual[1:] ** 2, integral) if points else integral) @ weight
    return mean_squares / max(total, 1)


def activation_qparams(observed: Interval, symmetric: bool = False) -> tuple[np.float32, np.uint8]:
    """Computes the qparams of a uint8 activation; zero is always represented exactly.

    Args:
        observed: Calibrated range.
        symmetric: Use z = 128 and s = max|x| / 127 for a tensor with negatives, so that engines may take it as int8.

    Returns:
        (scale, zero point).
    """
    scale, zero = uint8_qparams(observed.low, observed.high, symmetric)
    return np.float32(scale), np.uint8(zero)


def int8_scale(observed: Interval) -> np.float32:
    """Computes the scale of a symmetric int8 activation: max|x| / 127, or 1 for an empty range.

    Args:
        observed: Calibrated range.
    """
    largest = max(-observed.low, observed.high)
    return np.float32(stored_scales(largest / 127 if largest > EMPTY else 1.0))


def weight_qparams(
    weight: Array, axis: int | None, bits: int = 8, min_scale: Array | float = 0.0, clip: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Quantizes a float weight symmetrically: s = max|W| / 127, so that no weight saturates.

    Channels that were int8 before keep their integers: s is their step, see `steps`. A channel of zeros gets the scale
    `min_scale`, or 1 (`stored_scales`).

    Args:
        weight: Weight, float32 of any shape.
        axis: Channel axis of the scales, None for one scale.
        bits: Bits of a weight, 8 or 7.
        min_scale: Lower bound of the scales, one or one per channel.
        clip: Use the ratio of `CLIP_RATIOS` of least squared error for each channel.

    Returns:
        Scales, and int8 weights of the shape of `weight`.

    Raises:
        RequestError: The weight holds NaN or infinity, or nothing.
    """
    if not weight.size:
        raise RequestError(f"found a weight of shape {list(weight.shape)}, expected some values; remove its layer")
    if not np.isfinite((weight.min(), weight.max())).all():
        raise RequestError(
            f"a weight of shape {list(weight.shape)} holds NaN or infinity, expected finite weights; train or export "
            "the model again"
        )
    top = 2 ** (bits - 1) - 1
    spacing = None if axis is None else steps(weight, axis, top)
    if axis == 0 and not clip and weight.nbytes > BLOCK:
        count = max(1, BLOCK * len(weight) // weight.nbytes)
        lower = np.broadcast_to(min_scale, len(weight))
        scales, integers = np.empty(len(weight), np.float32), machine.large_zeros(weight.shape, np.int8)
        for begin in range(0, len(weight), count):
            part = slice(begin, begin + count)
            step = None if spacing is None else spacing[part]
            scales[part], integers[part] = _weight_qparams(weight[part], 0, top, lower[part], clip, step)
        return scales, integers
    return _weight_qparams(weight, axis, top, min_scale, clip, spacing)


class QuantizedWeights:
    """Results of `weight_qparams`, for graphs that share tensors of weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, Array, NDArray[np.float32], NDArray[np.int8]]] = {}

    def of(
        self, weight: ir.Value, axis: int | None, bits: int, min_scale: Array | float, clip: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        """Returns `weight_qparams` of a constant, computed once for all lower bounds below the scales.

        Args:
            weight: Constant float weight.
            axis: See `weight_qparams`.
            bits: See `weight_qparams`.
            min_scale: See `weight_qparams`.
            clip: See `weight_qparams`.

        Returns:
            Scales, and int8 weights, which are not to be changed.
        """
        array, tensor = query.constant(weight), weight.const_value
        assert array is not None
        key = id(tensor), axis, bits
        if clip or tensor is None:
            return weight_qparams(array, axis, bits, min_scale, clip)
        if key not in self._known:  # with the tensor, so that no other one gets its identity
            scale, integers = weight_qparams(array, axis, bits)
            self._known[key] = tensor, np.where(integers.any(axis=_others(array, axis)), scale, 0.0), scale, integers
        _, most, scale, integers = self._known[key]
        return (scale, integers) if np.all(min_scale <= most) else weight_qparams(array, axis, bits, min_scale)


def _others(weight: Array, axis: int | None) -> tuple[int, ...] | None:
    """Returns all axes but `axis`; None for all."""
    return None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)


def _weight_qparams(
    weight: Array, axis: int | None, top: int, least: Array | float, clip: bool, spacing: Array | None
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Computes `weight_qparams` with the steps of the channels, in several times the memory of the weight."""
    others = _others(weight, axis)
    largest = np.abs(weight).max(axis=others)
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1

    def rounded(ratio: Array | float) -> tuple[NDArray[np.float32], Array]:
        """(scales, integer weights) where each channel's range ends at `ratio` of its largest magnitude."""
        scale = stored_scales(np.maximum(ratio * largest.astype(np.float64) / top, least))
        return scale, np.clip(np.rint(weight / scale.reshape(shape)), -top, top)

    scale, whole = rounded(1.0)
    if spacing is not None:
        scale = np.where(spacing >= least, np.where(spacing > 0, spacing, scale), scale).astype(np.float32)
        whole = np.clip(np.rint(weight / scale.reshape(shape)), -top, top)
    elif clip:
        squared_errors = []
        for ratio in CLIP_RATIOS:
            scale, whole = rounded(ratio)
            squared_errors.append(np.square(whole * scale.reshape(shape) - weight, dtype=np.float64).sum(axis=others))
        scale, whole = rounded(CLIP_RATIOS[np.argmin(squared_errors, axis=0)])
    return scale, whole.astype(np.int8)


def steps(weight: Array, axis: int, top: int) -> NDArray[np.float32] | None:
    """Finds the step of each channel whose weights are integer multiples of one step.

    Weights that were int8 before are such multiples, with a scale per tensor or per channel.

    Args:
        weight: Weight, float32 of any shape.
        axis: Channel axis.
        top: Largest multiple.

    Returns:
        Step of each channel, 0 for a channel without one. None if sampled channels have no step, or channels are
        shorter than `SHORT` (any few numbers are multiples of some step).
    """
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    if rows.shape[1] < SHORT:
        return None
    sample = rows[:: max(1, len(rows) // SAMPLE)]
    if not sample.any() or not all(_step(row, top) for row in sample if row.any()):
        return None
    return np.array([_step(row, top) for row in rows], np.float32)


def _step(row: NDArray[np.float32], top: int) -> float:
    """The greatest step of one channel's magnitudes, but max / top where that is one, too; 0 where there is none."""
    values = np.unique(np.abs(row).astype(np.float32))
    values = values[values > 0].astype(np.float64)
    if not values.size or len(values) > top:
        return 0.0
    counts = np.array([top, *range(1, top)])
    multiples = values * (counts[:, None] / values[-1])
    whole = np.maximum(np.rint(multiples), 1)
    fits = (np.abs(multiples - whole) < ROUNDING * whole).all(axis=1)
    return float(values[-1] / counts[fits.argmax()]) if fits.any() else 0.0


def quantized_constant(array: Array, scale: Array | np.float32, zero: Array | np.integer[Any]) -> Array:
    """Applies QuantizeLinear to a constant; ties round to even.

    Args:
        array: Float array.
        scale: Scale.
        zero: Zero point; its dtype is the result's.

    Returns:
        Integers of the shape of `array`.
    """
    limits = np.iinfo(zero.dtype)
    return np.clip(np.rint(array / scale) + zero.astype(np.int32), limits.min, limits.max).astype(zero.dtype)


def qparams_of(node: ir.Node) -> QParams | None:
    """Returns the constant per-tensor 8-bit qparams of a QuantizeLinear or DequantizeLinear.

    Args:
        node: QuantizeLinear or DequantizeLinear.

    Returns:
        (scale, zero point), or None for qparams of another form.
    """
    scale, zero = (query.constant(value) for value in (*node.inputs[1:], None, None)[:2])
    if scale is None or zero is None or scale.size != 1 or zero.dtype not in (np.uint8, np.int8):
        return None
    return np.float32(scale.item()), zero.dtype.type(zero.item())


def dequantized_qparams(x: ir.Value | None) -> QParams | None:
    """Returns the qparams of the DequantizeLinear that computes a value.

    Args:
        x: Value.

    Returns:
        (scale, zero point), or None if `x` is no dequantized int8 tensor.
    """
    producer = query.producer(x)
    return qparams_of(producer) if producer is not None and producer.op_type == "DequantizeLinear" else None


def saturates(node: ir.Node, scale: np.float32, zero: np.integer[Any]) -> bool:
    """Returns whether uint8 saturation with these qparams is equivalent to a Relu or Clip.

    Args:
        node: Relu or Clip.
        scale: Scale of its output.
        zero: Zero point of its output.
    """
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
