"""Building, comparing and timing text encoders that run in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scripts.peers import harness, processes
from scripts.peers.texts.encoders import EXACT, Encoder
from zoo.texts.metrics import lowest

SLOW_RATIO, MIN_ROUNDS = 4, 3  # an encoder that takes SLOW_RATIO times as long as the fastest has MIN_ROUNDS rounds
Key = TypeVar("Key")


def build_encoders(
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


def open_encoders(
    makers: Mapping[str, Callable[[], Encoder]], texts: Sequence[str], work: Path, workers: processes.Workers
) -> dict[str, dict[str, Any]]:
    """Builds and opens encoders, and compares their results with those of `EXACT`.

    Args:
        makers: Constructor by name, with `EXACT`; built in this order.
        texts: Texts whose results are compared.
        work: Folder of the built files.
        workers: Processes in which the encoders are opened.

    Returns:
        {encoder: {"cosine", "least_cosine", "cosine_below_99"}} of those that run.
    """
    vectors: dict[str, Any] = {}
    build_encoders(makers, work, workers)
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
    """Times encoders in turn, after a warm-up round; slow ones (`SLOW_RATIO`) have `MIN_ROUNDS` rounds.

    Args:
        keys: The encoders.
        rounds: Number of rounds.
        take: Returns the time of one turn of an encoder.
        warm: Whether the encoders have just done the same work, so that no round warms up.

    Returns:
        Times by encoder.
    """
    times: dict[Key, list[float]] = {key: [] for key in keys}
    for number in range(warm, rounds + 1):
        fastest = min((seconds[0] for seconds in times.values() if seconds), default=0.0)
        for key, series in times.items():
            if len(series) >= MIN_ROUNDS and min(series) > SLOW_RATIO * fastest:
                continue
            taken = take(key)
            if number:
                series.append(taken)
    return times
