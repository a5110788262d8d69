"""Latency and throughput: all engines and precisions in turn inside one run (A B A B), so that ratios hold when the machine drifts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.engine import Batch, Session, load
from pipelines.errors import ZooError
from pipelines.progress import progress

ROUND_SECONDS = 0.1  # one turn of one configuration


@dataclass(frozen=True)
class Configuration:
    """What is timed: one model file in one engine."""

    engine: str
    precision: str
    path: Path


@dataclass(frozen=True)
class Stages:
    """The steps around the model, for the split of a latency: each takes what the one before returns."""

    preprocess: Callable[[], Batch]
    postprocess: Callable[[dict[str, Any]], Any]


def benchmark(
    configurations: Sequence[Configuration], batch: Batch, threads: int = 1, rounds: int = 15, stages: Stages | None = None
) -> list[dict[str, Any]]:
    """Time one batch in every configuration, in turn, `rounds` times.

    Returns per configuration {"engine", "precision", "batch_size", "threads", "instances": 1, "samples_per_second" (median of the rounds),
    "spread" (5th and 95th percentile of the same), "latency_ms": {"p50", "p95", "p99"} of single calls, "split_ms": {"preprocess", "model",
    "postprocess"} (medians; raw rows to results), "memory_mb": peak resident memory of a process of its own that loads and runs it}.
    """
    size = len(next(iter(batch.values())))
    sessions = [load(each.path, each.engine, threads) for each in configurations]
    calls = [_calls(session, batch) for session in sessions]
    turns: list[list[float]] = [[] for _ in sessions]  # seconds a call, one value a round
    singles: list[list[float]] = [[] for _ in sessions]
    with progress(f"benchmark, batch {size}", rounds) as advance:
        for _ in range(rounds):
            for session, count, turn, single in zip(sessions, calls, turns, singles, strict=True):
                session.run(batch)  # caches warm again after the others' turns
                taken = [_seconds(session, batch) for _ in range(count)]
                turn.append(sum(taken) / count)
                single += taken
            advance(1)
    results = []
    for each, session, turn, single in zip(configurations, sessions, turns, singles, strict=True):
        rate = size / np.array(turn)
        p50, p95, p99 = np.percentile(np.array(single) * 1e3, [50, 95, 99])
        results.append(
            {
                "engine": each.engine,
                "precision": each.precision,
                "batch_size": size,
                "threads": threads,
                "instances": 1,
                "samples_per_second": round(float(np.median(rate)), 1),
                "spread": [round(float(np.percentile(rate, q)), 1) for q in (5, 95)],
                "latency_ms": {"p50": round(float(p50), 5), "p95": round(float(p95), 5), "p99": round(float(p99), 5)},
                "split_ms": _split(session, stages, rounds) if stages is not None else {"model": round(float(p50), 5)},
                "memory_mb": memory_mb(each, batch, threads),
            }
        )
    return results


def _seconds(session: Session, batch: Batch) -> float:
    before = time.perf_counter()
    session.run(batch)
    return time.perf_counter() - before


def _calls(session: Session, batch: Batch) -> int:
    """How many calls fill one turn."""
    session.run(batch)
    return int(np.clip(ROUND_SECONDS / max(_seconds(session, batch), 1e-7), 1, 2000))


def _split(session: Session, stages: Stages, rounds: int) -> dict[str, float]:
    times = np.empty((rounds, 3))
    for index in range(rounds):
        start = time.perf_counter()
        batch = stages.preprocess()
        prepared = time.perf_counter()
        out = session.run(batch)
        computed = time.perf_counter()
        stages.postprocess(out)
        times[index] = prepared - start, computed - prepared, time.perf_counter() - computed
    medians = np.median(times * 1e3, axis=0)
    return {name: round(float(ms), 5) for name, ms in zip(("preprocess", "model", "postprocess"), medians, strict=True)}


def memory_mb(configuration: Configuration, batch: Batch, threads: int) -> float:
    """Peak resident memory, in MB (10^6 bytes), of a fresh process that loads the model and runs a batch of zeros of the same shapes."""
    request = {
        "path": str(configuration.path),
        "engine": configuration.engine,
        "threads": threads,
        "inputs": {name: [str(array.dtype), list(array.shape)] for name, array in batch.items()},
    }
    command = [sys.executable, "-P", "-m", "pipelines.benchmark"]  # -P: a random.py in the user's folder is not the library's
    paths = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ZooError(f"measuring the memory of {configuration.path} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return round(float(done.stdout), 1)


def _measure_memory() -> None:
    request = json.load(sys.stdin)
    session = load(request["path"], request["engine"], request["threads"])
    batch = {name: np.zeros(shape, dtype) for name, (dtype, shape) in request["inputs"].items()}
    for _ in range(2):
        session.run(batch)
    # not getrusage: its maximum starts from that of the process that forked this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024 / 1e6)


if __name__ == "__main__":
    _measure_memory()
