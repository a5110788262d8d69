"""Building, comparing and timing text encoders that run in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scripts.peers import harness, processes
from scripts.peers.texts.encoders import EXACT, Encoder
from zoo.texts.metrics import lowest

SLOW, FEW = 4, 3  # a way that takes SLOW times as long as the quickest has FEW rounds
Key = TypeVar("Key")


def build_ways(
    makers: Mapping[str, Callable[[], Encoder]], work: Path, workers: processes.Workers, core: int | None = None
) -> None:
    """Builds the missing encoders that are not left out, in this order, on a core (None: the last)."""
    for name, make in makers.items():
        done = work / f"{name}.built"
        if name in workers.left_out or done.exists():
            continue
        with (
            harness.leave_out(name, workers.left_out),
            contextlib.closing(workers.start(name, make, f"{name}-build.log", core)) as builder,
        ):
            builder.ask("build")
            done.touch()


def open_ways(
    makers: Mapping[str, Callable[[], Encoder]], texts: Sequence[str], work: Path, workers: processes.Workers
) -> dict[str, dict[str, Any]]:
    """Builds and opens ways, and compares their results with those of `EXACT`.

    Args:
        makers: What makes each way, `EXACT` among them; built in this order.
        texts: Texts whose results are compared.
        work: Folder of the built files.
        workers: The ways that run are opened there.

    Returns:
        {way: {"cosine", "least_cosine", "cosine_below_99"}} of those that run.
    """
    vectors: dict[str, Any] = {}
    build_ways(makers, work, workers)
    for name, make in makers.items():
        if name in workers.left_out:
            continue
        workers.open(name, make)
        embeddings = workers.ask(name, "vectors", texts) if name in workers.live else None
        if embeddings is not None:
            vectors[name] = embeddings
    ways: dict[str, dict[str, Any]] = {}
    for name, embeddings in vectors.items() if EXACT in vectors else ():
        cosines = (embeddings * vectors[EXACT]).sum(axis=1)
        ways[name] = {"cosine": round(float(cosines.mean()), 5), **lowest(cosines)}
    return ways


def in_turn(
    keys: Iterable[Key], rounds: int, take: Callable[[Key], float], *, warm: bool = False
) -> dict[Key, list[float]]:
    """Times ways in turn, after a round that warms up; ways that are `SLOW` have `FEW` rounds.

    Args:
        keys: The ways.
        rounds: Number of rounds.
        take: Returns the time that one turn of a way takes.
        warm: Whether the ways have just done the same work, so that no round warms up.

    Returns:
        Times by way.
    """
    times: dict[Key, list[float]] = {key: [] for key in keys}
    for number in range(warm, rounds + 1):
        quickest = min((seconds[0] for seconds in times.values() if seconds), default=0.0)
        for key, series in times.items():
            if len(series) >= FEW and min(series) > SLOW * quickest:
                continue
            taken = take(key)
            if number:
                series.append(taken)
    return times
