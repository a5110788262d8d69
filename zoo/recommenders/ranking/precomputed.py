"""The part of a model that depends only on the items of a catalogue, computed before any request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.engines.session import PrecomputedItems, Session

PART = 8  # of the machine's memory, at most, for the items of a catalogue
SAMPLE, ROUNDS = 512, 5  # items that are ranked to time both ways, and how often


@dataclass(frozen=True, eq=False)
class Precomputed:
    """Items that a session has precomputed.

    Attributes:
        session: The session.
        items: The items, in the order of the catalogue.
    """

    session: Session
    items: PrecomputedItems


def limit() -> int:
    """Bytes that the items of a catalogue may take."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // PART


def is_quicker(items: PrecomputedItems, count: int, user: Batch, rank: Callable[[NDArray[np.int64]], Any]) -> bool:
    """Times the ranking of precomputed items beside the ranking of their rows.

    Args:
        items: The precomputed items.
        count: Number of items.
        user: Shared inputs, one row.
        rank: Ranks the rows at these positions, int64 [n].

    Returns:
        Whether the precomputed items take less time.
    """
    positions = np.random.default_rng(0).integers(0, count, SAMPLE)
    ways: tuple[Callable[[], Any], ...] = (lambda: items.run(positions, user), lambda: rank(positions))
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for way, taken in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way()
            taken.append(time.perf_counter() - start)
    return min(seconds[0]) < min(seconds[1])
