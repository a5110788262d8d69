"""Batches: {graph input: array, first axis = samples}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = Mapping[str, NDArray[Any]]


def length(batch: Batch) -> int:
    """Number of samples; 1 where no array has an axis."""
    return next((len(array) for array in batch.values() if array.ndim), 1)


def cut(batch: Batch, size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """The samples in order, `size` at a time and the last ones fewer, as views."""
    for start in range(0, length(batch), size):
        yield {name: array[start : start + size] for name, array in batch.items()}


def joined(parts: Sequence[Batch]) -> dict[str, NDArray[Any]]:
    """One batch of several (at least one), in order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
