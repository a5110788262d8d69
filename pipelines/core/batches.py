"""Batches: arrays [samples, ...] by graph input."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

MAX_SAMPLES = 2**31 - 1  # samples in a batch
Batch = Mapping[str, NDArray[Any]]


def whole_number(name: str, value: Any, maximum: int = MAX_SAMPLES) -> int:
    """Converts a value to an int.

    Args:
        name: Name of the value, for the error message.
        value: Value to convert.
        maximum: Largest number allowed.

    Returns:
        The number.

    Raises:
        RequestError: The value is not a whole number from 1 to `maximum`.
    """
    expected = ""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        expected = "a whole number"
    else:
        if 1 <= number <= maximum:
            return number
    expected = expected or ("1 or more" if number < 1 else f"at most {maximum:,}")
    raise RequestError(f"{name} must be {expected}, not {value!r}")


def length(batch: Batch) -> int:
    """Returns the number of samples of a batch; 1 if no array has an axis.

    Args:
        batch: Arrays [samples, ...].
    """
    return next((len(array) for array in batch.values() if array.ndim), 1)


def share_axis(batch: Batch) -> bool:
    """Returns whether all arrays have a first axis of the same length, which may be the sample axis.

    Args:
        batch: Arrays.
    """
    return all(array.ndim for array in batch.values()) and len({len(array) for array in batch.values()}) < 2


def cut(batch: Batch, size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Cuts a batch into smaller ones.

    Args:
        batch: Arrays [samples, ...].
        size: Samples of a part; the last part may have fewer.

    Yields:
        Views of the parts, in order.
    """
    for start in range(0, length(batch), size):
        yield {name: array[start : start + size] for name, array in batch.items()}


def joined(parts: Sequence[Batch]) -> dict[str, NDArray[Any]]:
    """Concatenates batches in order.

    Args:
        parts: Batches, at least one.

    Returns:
        Arrays [samples of all parts, ...].
    """
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def resized(batch: Batch, size: int) -> dict[str, NDArray[Any]]:
    """Returns a batch of another size, with the samples repeated.

    Args:
        batch: Batch.
        size: Batch size; 0 leaves the batch as it is.
    """
    if not size:
        return dict(batch)
    return {
        name: np.ascontiguousarray(array[np.arange(size) % len(array)])
        if len(array)
        else np.zeros((size, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }
