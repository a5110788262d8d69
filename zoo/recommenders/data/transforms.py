"""Encodings of numbers; those of "steps" are elementwise transforms in float32, as TensorFlow computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

MAX_DEVIATIONS = 8.0  # standard deviations to which a "standard" number is clipped
STEPS: dict[str, Callable[..., Any]] = {
    # of one number, or of a number and a constant; "from" has the constant in front
    "add": np.add,
    "subtract": np.subtract,
    "subtract from": lambda x, c: c - x,
    "multiply": np.multiply,
    "divide": np.divide,
    "divide from": lambda x, c: c / x,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "negative": np.negative,
    "absolute": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sign": np.sign,
    "floor": np.floor,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "relu": lambda x: np.maximum(x, np.float32(0)),
}
WITH_CONSTANT = ("add", "subtract", "subtract from", "multiply", "divide", "divide from", "maximum", "minimum", "power")


def apply(step: Sequence[Any], x: Array) -> Floats:
    """Applies one step to float32 values.

    Args:
        step: A name of `STEPS`, then its constant, if it has one: a number, or an array that broadcasts against `x`.
        x: float32 values of any shape.

    Returns:
        float32 values of the same shape.
    """
    name, *constant = step
    with np.errstate(all="ignore"):
        transformed: Floats = STEPS[name](x, *map(np.float32, constant)).astype(np.float32)
    return transformed


def stepped(encoding: Mapping[str, Any], x: Array) -> Floats:
    """Applies all steps of an encoding.

    Args:
        encoding: Has "steps" and "fill".
        x: Raw numbers of any float dtype, [n]; NaN for missing, which counts as "fill".

    Returns:
        float32 [n], not scaled yet.
    """
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinity
        values = np.array(x, np.float32)
    values[np.isnan(values)] = encoding["fill"]
    for step in encoding["steps"]:
        values = apply(step, values)
    return values


def scaled(encoding: Mapping[str, Any], x: Array) -> Floats:
    """Encodes raw numbers: `stepped`, then (x - minimum) / (maximum - minimum), or / 1 if both are equal.

    Args:
        encoding: Encoding of the schema: {"steps", "minimum", "maximum", "fill"}.
        x: Raw numbers, float [n].

    Returns:
        Encoded numbers, float32 [n].
    """
    low, high = encoding["minimum"], encoding["maximum"]
    span = high - low if high > low else 1.0
    return np.asarray((stepped(encoding, x) - np.float32(low)) / np.float32(span))


def log1p(numbers: NDArray[np.floating[Any]]) -> Floats:
    """Computes the logarithm of 1 + max(x, 0) in float32.

    Args:
        numbers: Any float dtype and shape; NaN remains NaN.

    Returns:
        New C-contiguous float32 array of the same shape.
    """
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf
        values = np.array(numbers, np.float32, order="C")
    np.maximum(values, 0, out=values)
    return np.log1p(values, out=values)


def log1p_min_max(numbers: NDArray[np.floating[Any]], low: Any, high: Any) -> Floats:
    """Min-max scaling of logarithms in float32: (clip(log1p(max(x, 0)), low, high) - low) / (high - low).

    Args:
        numbers: Any float dtype and shape; NaN stays NaN.
        low: Smallest logarithm, float32, scalar or broadcastable to `numbers`.
        high: Largest logarithm, the same; where it equals `low`, the divisor is 1.

    Returns:
        float32 in the shape of `numbers`, 0 to 1.
    """
    values = log1p(numbers)
    np.clip(values, low, high, out=values)
    values -= low
    values /= np.where(high > low, high - low, np.float32(1))
    return values


def log1p_scaled(x: NDArray[np.float64], low: Any, most: Any) -> Any:
    """Computes log(1 + x - low) / most, clipped to 0 to 1.

    Args:
        x: float64 [n]; NaN stays NaN.
        low: Smallest x, scalar or [n].
        most: Largest logarithm, scalar or [n].

    Returns:
        float64 [n].
    """
    return np.clip(np.log1p(np.maximum(x - low, 0)) / most, 0, 1)


def encoded(encoding: Mapping[str, Any], x: NDArray[np.float64]) -> Any:
    """Encodes the values of a number as `schema.ENCODINGS` defines.

    Args:
        encoding: Encoding of the schema.
        x: Values, float64 [n]; NaN where missing.

    Returns:
        Encoded values, float [n]; NaN where missing.
    """
    match encoding["type"]:
        case "value":
            return x
        case "steps":
            return scaled(encoding, x)
        case "log1p-min-max":
            return log1p_min_max(x, np.float32(encoding["low"]), np.float32(encoding["high"]))
        case "standard" | "per-element":
            return np.clip((x - encoding["mean"]) / encoding["deviation"], -MAX_DEVIATIONS, MAX_DEVIATIONS)
        case "min-max":
            return np.clip((x - encoding["minimum"]) / (encoding["maximum"] - encoding["minimum"]), 0, 1)
        case "log1p":
            return log1p_scaled(x, encoding["minimum"], np.log1p(encoding["maximum"] - encoding["minimum"]))
        case _:
            points = np.asarray(encoding["quantiles"], np.float64)
            quantile = np.interp(x, points, np.linspace(0, 1, len(points)))
            return np.where(np.isnan(x), np.nan, quantile)


def fill_of(encoding: Mapping[str, Any]) -> float:
    """Returns the encoding of a missing number.

    Args:
        encoding: Encoding of the schema.
    """
    if encoding["type"] == "steps":
        return float(scaled(encoding, np.array([np.nan]))[0])
    return float(encoding.get("fill", 0))
