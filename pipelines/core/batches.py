"""Batches: {graph input: array, first axis = samples}."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

MOST = 2**31 - 1  # samples in a batch
Batch = Mapping[str, NDArray[Any]]


def whole_number(what: str, value: Any, most: int = MOST) -> int:
    """`value` as an int. Raises RequestError, naming `what`, for anything but a whole number from 1 to `most`."""
    wanted = ""
    try:
        number = operator.index(value)
    except TypeError:
        wanted = "a whole number"
    else:
        if 1 <= number <= most:
            return number
    wanted = wanted or ("1 or more" if number < 1 else f"at most {most:,}")
    raise RequestError(f"{what} must be {wanted}, not {value!r}")


def length(batch: Batch) -> int:
    """Number of samples; 1 where no array has an axis."""
    return next((len(array) for array in batch.values() if array.ndim), 1)


def share_axis(batch: Batch) -> bool:
    """Whether the first axis of all arrays may be that of samples: each has one, all as long."""
    return all(array.ndim for array in batch.values()) and len({len(array) for array in batch.values()}) < 2


def cut(batch: Batch, size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """The samples in order, `size` at a time and the last ones fewer, as views."""
    for start in range(0, length(batch), size):
        yield {name: array[start : start + size] for name, array in batch.items()}


def joined(parts: Sequence[Batch]) -> dict[str, NDArray[Any]]:
    """One batch of several (at least one), in order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
