"""Choose the engine for this machine by timing, and remember the choice."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipelines import files, hub, machine
from pipelines.engine import Batch, Runnable, Session, available, load
from pipelines.errors import RequestError, ZooError

logger = logging.getLogger(__name__)

REPEATS = 9
BUDGET_MS = 300.0  # a slow model is repeated less often


@dataclass(frozen=True)
class Plan:
    """The engine to use for one model file, thread count and batch size on this machine, and what was measured (median ms a batch)."""

    engine: str
    threads: int
    batch_size: int
    milliseconds: dict[str, float]
    machine: str


def plan(path: str | Path, batch: Batch, threads: int = 1, *, fresh: bool = False) -> Plan:
    """`choose` among the stock engines for one model file."""
    return choose(files.sha256(path), stock(path, threads), batch, threads, fresh=fresh)


def stock(path: str | Path, threads: int) -> dict[str, Callable[[], Session]]:
    """Every available stock engine, and how to open it on one model file."""
    return {name: functools.partial(load, path, name, threads) for name in available()}


def choose(digest: str, candidates: Mapping[str, Callable[[], Runnable]], batch: Batch, threads: int = 1, *, fresh: bool = False) -> Plan:
    """Time the candidates' sessions on `batch`, in turn, and keep the result under ZOO_HOME.

    digest: what names the model they all run. A kept plan is used again only for the same digest, candidates, threads, batch size, CPU and
    library versions; `fresh` times anew. A candidate that cannot be opened or does not run is left out. Raises ZooError where none runs.
    """
    size = size_class(batch)
    key = hashlib.sha256(f"{digest} {sorted(candidates)} {threads} {size} {machine.fingerprint()}".encode()).hexdigest()[:16]
    kept = hub.home() / "plans" / f"{key}.json"
    if kept.is_file() and not fresh:
        try:
            return Plan(**files.read_json(kept))
        except (TypeError, ZooError):
            kept.unlink(missing_ok=True)  # written by another version
    if len(candidates) == 1:
        return Plan(next(iter(candidates)), threads, size, {}, machine.fingerprint())
    sessions: dict[str, Runnable] = {}
    problems = []
    for name, opener in candidates.items():
        try:
            sessions[name] = opener()
            sessions[name].run(batch)
        except ZooError as error:
            sessions.pop(name, None)
            problems.append(str(error))
            logger.warning("the engine %s is left out: %s", name, error)
    if not sessions:
        raise ZooError(f"no engine runs the model: {'; '.join(problems)}")
    medians = measure(list(sessions.values()), batch)
    milliseconds = dict(zip(sessions, medians, strict=True))
    best = min(milliseconds, key=milliseconds.__getitem__)
    chosen = Plan(best, threads, size, {name: round(ms, 4) for name, ms in milliseconds.items()}, machine.fingerprint())
    try:
        files.write_json(kept, asdict(chosen))
    except RequestError as error:
        logger.warning("the choice of an engine is not remembered: %s", error)
    return chosen


def size_class(batch: Batch) -> int:
    """The number of samples rounded up to a power of two: sizes of one class share a plan."""
    return 1 << max(len(next(iter(batch.values()))) - 1, 0).bit_length()


def measure(sessions: Sequence[Runnable], batch: Batch) -> list[float]:
    """Median milliseconds of one run of `batch`, per session, taken in turn."""
    times: list[list[float]] = [[] for _ in sessions]
    start = time.perf_counter()
    for repeat in range(REPEATS + 1):
        for session, taken in zip(sessions, times, strict=True):
            before = time.perf_counter()
            session.run(batch)
            if repeat:  # the first round warms up
                taken.append((time.perf_counter() - before) * 1e3)
        if repeat >= 3 and (time.perf_counter() - start) * 1e3 > BUDGET_MS * len(sessions):
            break
    return [float(np.median(taken)) for taken in times]
