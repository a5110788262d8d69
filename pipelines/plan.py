"""Choose the engine for this machine by timing, and remember the choice."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipelines import files, hub, machine
from pipelines.engine import Batch, Session, available, load
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
    """Time every available engine on `batch`, in turn, and keep the result under ZOO_HOME.

    A kept plan is used again only for the same model bytes, threads, batch size, CPU and library versions; `fresh` times anew.
    Raises ZooError where no engine runs the model.
    """
    size = 1 << (len(next(iter(batch.values()))) - 1).bit_length()  # sizes between powers of two share a plan
    key = hashlib.sha256(f"{files.sha256(path)} {threads} {size} {machine.fingerprint()}".encode()).hexdigest()[:16]
    kept = hub.home() / "plans" / f"{key}.json"
    if kept.is_file() and not fresh:
        try:
            return Plan(**files.read_json(kept))
        except (TypeError, ZooError):
            kept.unlink(missing_ok=True)  # written by another version
    names = available()
    if len(names) == 1:
        return Plan(names[0], threads, size, {}, machine.fingerprint())
    sessions: dict[str, Session] = {}
    problems = []
    for name in names:
        try:
            sessions[name] = load(path, name, threads)
            sessions[name].run(batch)
        except ZooError as error:
            sessions.pop(name, None)
            problems.append(str(error))
    if not sessions:
        raise ZooError(f"no engine runs {path}: {'; '.join(problems)}")
    medians = measure(list(sessions.values()), batch)
    milliseconds = dict(zip(sessions, medians, strict=True))
    best = min(milliseconds, key=milliseconds.__getitem__)
    chosen = Plan(best, threads, size, {name: round(ms, 4) for name, ms in milliseconds.items()}, machine.fingerprint())
    try:
        files.write_json(kept, asdict(chosen))
    except RequestError as error:
        logger.warning("the choice of an engine is not remembered: %s", error)
    return chosen


def measure(sessions: Sequence[Session], batch: Batch) -> list[float]:
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
