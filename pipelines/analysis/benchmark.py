"""Latency and throughput of engines and precisions, in turn within one run (A B A B), which cancels drift.

`benchmark` times sessions in this process, `instances` many processes at once. Both measure memory in worker processes;
see `_serve`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.power import Meter
from pipelines.core import machine
from pipelines.core.batches import Batch, length, share_axis
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress
from pipelines.engines.catalog import load
from pipelines.engines.session import Runnable

logger = logging.getLogger(__name__)
ROUND_SECONDS = 0.1  # seconds per turn of a configuration
WINDOW_SECONDS = 1.0  # seconds per turn of all instances of a configuration
WARM_SECONDS = 0.05  # seconds of warm-up before a window
BATCHES = 8  # different batches, so that caches do not hold the same rows
GRACE_SECONDS = 15.0  # seconds for a worker to exit


@dataclass(frozen=True)
class Configuration:
    """One model file in one engine, to be timed.

    Attributes:
        engine: Name of the engine.
        precision: Name of the precision.
        path: Model file.
        opener: "module:name" of a function (path, engine, threads, precision) that opens something else, such as a
            whole pipeline; "": the catalog.
    """

    engine: str
    precision: str
    path: Path
    opener: str = ""

    def open(self, threads: int) -> Runnable:
        """Returns the session, or the result of the opener.

        Args:
            threads: Intra-op threads.
        """
        if not self.opener:
            return load(self.path, self.engine, threads, self.precision)
        module, _, name = self.opener.partition(":")
        opened: Runnable = getattr(importlib.import_module(module), name)(
            self.path, self.engine, threads, self.precision
        )
        return opened


@dataclass(frozen=True)
class Stages:
    """The steps around the model, for the split of a latency.

    Attributes:
        preprocess: Returns the input of the model.
        postprocess: Takes the outputs of the model.
    """

    preprocess: Callable[[], Batch]
    postprocess: Callable[[dict[str, Any]], Any]


def benchmark(
    configurations: Sequence[Configuration],
    batch: Batch,
    threads: int = 1,
    rounds: int = 15,
    stages: Stages | None = None,
) -> list[dict[str, Any]]:
    """Times one batch in every configuration, in turn.

    Args:
        configurations: What to time.
        batch: Array [samples, ...] for every graph input.
        threads: Intra-op threads.
        rounds: Number of rounds.
        stages: Steps around the model, to be timed too.

    Returns:
        Per configuration {"engine", "precision", "batch_size", "threads", "instances": 1, "samples_per_second" (median
        of the rounds), "spread" (5th and 95th percentile), "latency_ms": {"p50", "p95", "p99"} of single calls,
        "split_ms": {"preprocess", "model", "postprocess"} (medians), "memory_mb" (see `memory_mb`)}, and
        "samples_per_joule" of all packages if RAPL is readable.
    """
    size = length(batch)
    sessions = [setup.open(threads) for setup in configurations]
    calls = [_calls(session, batch) for session in sessions]
    turns: list[list[float]] = [[] for _ in sessions]  # seconds a call, one value a round
    singles: list[list[float]] = [[] for _ in sessions]
    meter, joules = Meter(), [0.0 for _ in sessions]
    with progress(f"benchmark, batch {size}", rounds) as advance:
        for _ in range(rounds):
            for index, (session, count, turn, single) in enumerate(zip(sessions, calls, turns, singles, strict=True)):
                session.run(batch)  # caches warm again after the others' turns
                used = 0.0 if meter.fault else meter.joules()
                taken = [_seconds(session, batch) for _ in range(count)]
                joules[index] += 0.0 if meter.fault else meter.joules() - used
                turn.append(sum(taken) / count)
                single += taken
            advance(1)
    results = []
    for config, session, turn, single, used in zip(configurations, sessions, turns, singles, joules, strict=True):
        rate = size / np.array(turn)
        power = {"samples_per_joule": round(size * len(single) / used, 1)} if used else {}
        figures = speed(rate, np.array(single) * 1e3)
        results.append(
            {
                "engine": config.engine,
                "precision": config.precision,
                "batch_size": size,
                "threads": threads,
                "instances": 1,
                **figures,
                "split_ms": _split(session, stages, rounds) if stages else {"model": figures["latency_ms"]["p50"]},
                "memory_mb": memory_mb(config, batch, threads),
                **power,
            }
        )
    return results


def _seconds(session: Runnable, batch: Batch) -> float:
    before = time.perf_counter()
    session.run(batch)
    return time.perf_counter() - before


def _calls(session: Runnable, batch: Batch) -> int:
    """Returns the number of calls per turn."""
    session.run(batch)
    return int(np.clip(ROUND_SECONDS / max(_seconds(session, batch), 1e-7), 1, 2000))


def _split(session: Runnable, stages: Stages, rounds: int) -> dict[str, float]:
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
    """Measures the peak resident memory of a new process that loads a model and runs a batch of zeros.

    The batch itself is used with an opener, because zeros may be nothing to compute for a pipeline, and if its arrays
    share no sample axis.

    Args:
        configuration: Model file and engine.
        batch: Batch that gives the shapes.
        threads: Intra-op threads.

    Returns:
        Memory in MB (10^6 bytes).
    """
    itself = configuration.opener or not share_axis(batch)
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in batch.items()}
    everywhere = sorted(os.sched_getaffinity(0))
    what = f"measuring the memory of {configuration.path}"
    with (
        _saved(batch if itself else zeros) as saved,
        _workers(what, configuration, saved, length(batch), threads, [everywhere]) as (worker,),
    ):
        return round(float(worker.opened["peak_mb"]), 1)


def pinned(count: int, threads: int = 1) -> list[list[int]]:
    """Assigns the processors of this process to instances; no two instances share one.

    Args:
        count: Number of instances.
        threads: Processors of an instance.

    Returns:
        Processor numbers of each instance.

    Raises:
        RequestError: There are too few processors.
    """
    available = machine.processors()
    cores = available.order
    if count * threads > len(cores):
        most = f"--instances {len(cores) // threads}" if threads <= len(cores) else "--threads 1"
        raise RequestError(
            f"found {len(cores)} core(s), expected {count * threads} for {count} x {threads} thread(s); at most: {most}"
        )
    if count * threads > (physical := len(available.cores)):
        logger.warning(
            "found %d core(s) for %d processors: some share a core (SMT siblings) and are slower",
            physical,
            count * threads,
        )
    return [cores[index * threads : (index + 1) * threads] for index in range(count)]


def instances(
    configurations: Sequence[Configuration], rows: Batch, size: int, cores: Sequence[Sequence[int]], rounds: int = 15
) -> list[dict[str, Any]]:
    """Measures the throughput of several processes at once, configurations in turn.

    Only memory-mapped files are shared, such as the table of native.onnx; onnxruntime and OpenVINO copy weights into
    each process.

    Args:
        configurations: What to time.
        rows: At least `size` samples; every instance runs them in batches of `size`, from a different start.
        size: Batch size.
        cores: Result of `pinned`.
        rounds: Number of windows of `WINDOW_SECONDS`.

    Returns:
        Rows as of `benchmark`: samples_per_second is the sum over the instances (median of the rounds, and "spread"),
        latency_ms is of all calls of all instances, split_ms is {"model": p50}, "memory_mb" is the memory of all
        instances after one batch with shared pages counted once (sum of PSS), "rss_mb" lists the resident memory of
        each in MB.

    Raises:
        ZooError: An instance fails.
    """
    threads = len(cores[0])
    rates: list[list[float]] = [[] for _ in configurations]
    calls: list[list[int]] = [[] for _ in configurations]  # nanoseconds
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(_saved(rows))
        groups = [
            stack.enter_context(_workers(_what(setup), setup, saved, size, threads, cores)) for setup in configurations
        ]
        advance = stack.enter_context(progress(f"benchmark, {len(cores)} instances, batch {size}", rounds))
        for _ in range(rounds):
            for group, rate, single in zip(groups, rates, calls, strict=True):
                for worker in group:
                    worker.tell({"warm": WARM_SECONDS, "seconds": WINDOW_SECONDS})
                answers = [worker.hear()["nanoseconds"] for worker in group]
                rate.append(sum(size * 1e9 * len(taken) / sum(taken) for taken in answers))
                single += itertools.chain.from_iterable(answers)
            advance(1)
    results = []
    for config, rate, single in zip(configurations, rates, calls, strict=True):
        proportional, resident = _memory(config, {name: array[:size] for name, array in rows.items()}, cores)
        figures = speed(np.array(rate), np.array(single) / 1e6)
        results.append(
            {
                "engine": config.engine,
                "precision": config.precision,
                "batch_size": size,
                "threads": threads,
                "instances": len(cores),
                **figures,
                "split_ms": {"model": figures["latency_ms"]["p50"]},
                "memory_mb": round(sum(proportional), 1),
                "rss_mb": resident,
            }
        )
    return results


def speed(rates: NDArray[np.float64], milliseconds: NDArray[np.float64]) -> dict[str, Any]:
    """Summarizes measured throughput and latency.

    Args:
        rates: Samples per second, float64 [rounds].
        milliseconds: Durations of the calls, float64 [calls].

    Returns:
        {"samples_per_second" (median of the rounds), "spread" (their 5th and 95th percentile), "latency_ms": {"p50",
        "p95", "p99"}}.
    """
    return {
        "samples_per_second": round(float(np.median(rates)), 1),
        "spread": [round(float(np.percentile(rates, q)), 1) for q in (5, 95)],
        "latency_ms": {f"p{q}": round(float(np.percentile(milliseconds, q)), 5) for q in (50, 95, 99)},
    }


def _what(configuration: Configuration) -> str:
    return f"an instance of {configuration.path} in {configuration.engine}"


def _memory(
    configuration: Configuration, batch: Batch, cores: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Returns PSS and RSS of each instance in MB, while no other configuration is loaded."""
    size, threads = length(batch), len(cores[0])
    with _saved(batch) as saved, _workers(_what(configuration), configuration, saved, size, threads, cores) as workers:
        texts = [Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text().splitlines()[1:] for worker in workers]
    kilobytes = [{line.split()[0]: int(line.split()[1]) for line in lines} for lines in texts]
    proportional, resident = ([round(sizes[key] * 1024 / 1e6, 1) for sizes in kilobytes] for key in ("Pss:", "Rss:"))
    return proportional, resident


@contextlib.contextmanager
def _saved(batch: Batch) -> Iterator[dict[str, str]]:
    """Context with arrays saved as files: {name: path}."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: str(Path(folder) / f"{index}.npy") for index, name in enumerate(batch)}
        for name, array in batch.items():
            np.save(paths[name], array)
        yield paths


class _Worker:
    """A process that answers each line of JSON with one line, see `_serve`; it ends when its stdin closes."""

    def __init__(self, what: str) -> None:
        # -P: a random.py in the user's folder is not the library's
        command = [sys.executable, "-P", "-m", "pipelines.analysis.benchmark"]
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._what = what
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads would fill)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment
        )
        self.opened: dict[str, Any] = {}

    def tell(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says what became of it
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        """Returns the next answer; raises ZooError if the worker failed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            code = self.process.wait()
            self._said.seek(0)
            raise ZooError(
                f"{self._what} failed: {(self._said.read().strip().splitlines() or [f'it ended with code {code}'])[-1]}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ZooError(f"{self._what} failed: {answer['error']}")
        return answer

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, seconds: float) -> None:
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._said.close()


@contextlib.contextmanager
def _workers(
    what: str,
    configuration: Configuration,
    inputs: dict[str, str],
    size: int,
    threads: int,
    cores: Sequence[Sequence[int]],
) -> Iterator[list[_Worker]]:
    """Context with one worker per member of `cores`, each with an open and warm model."""
    workers: list[_Worker] = []
    try:
        for index, own in enumerate(cores):
            workers.append(_Worker(what))
            request: dict[str, Any] = {
                "path": str(configuration.path),
                "engine": configuration.engine,
                "precision": configuration.precision,
                "opener": configuration.opener,
            }
            request |= {"threads": threads, "cores": list(own)}
            workers[-1].tell({**request, "inputs": inputs, "batch_size": size, "begin": index / len(cores)})
            if index == 0:  # timings and compiled graphs of the first process are cached for the others
                workers[0].opened = workers[0].hear()
        for worker in workers[1:]:
            worker.opened = worker.hear()
        yield workers
    finally:
        for worker in workers:
            worker.hang_up()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in workers:
            worker.end(deadline - time.monotonic())


def _serve() -> None:
    """Runs a worker: answers each line of JSON on stdin with one line on stdout; ends with stdin.

    First {"path", "engine", "precision", "opener", "threads", "cores": [processor], "inputs": {name: .npy file},
    "batch_size", "begin": the part of the rows to begin after, 0 to 1} opens and warms up, answered by {"peak_mb"};
    then each {"warm", "seconds"} runs batches for so long, answered by {"nanoseconds": of each call after the warm
    ones}. An error is answered by {"error": one line}, and ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the one that asks ends the others
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # prints of libraries are no part of the answer
        try:
            request = json.loads(sys.stdin.readline())
            os.sched_setaffinity(0, request["cores"])  # before any engine starts its threads
            asked = Configuration(request["engine"], request["precision"], Path(request["path"]), request["opener"])
            session = asked.open(request["threads"])
            batches = itertools.cycle(_batches(request))
            for _ in range(2):
                session.run(next(batches))
            # not getrusage: its maximum starts from that of the process that forked this one
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            print(json.dumps({"peak_mb": int(status["VmHWM"].split()[0]) * 1024 / 1e6}), file=answers, flush=True)
            for line in sys.stdin:
                request = json.loads(line)
                _window(session, batches, request["warm"])
                print(
                    json.dumps({"nanoseconds": _window(session, batches, request["seconds"])}), file=answers, flush=True
                )
        except Exception as error:
            print(json.dumps({"error": one_line(error)}), file=answers, flush=True)


def _batches(request: dict[str, Any]) -> list[Batch]:
    rows = {name: np.load(path) for name, path in request["inputs"].items()}
    count, size = length(rows), request["batch_size"]
    if not share_axis(rows):
        return [rows]
    rows = {name: np.roll(array, -int(request["begin"] * count), axis=0) for name, array in rows.items()}
    return [
        {name: array[start : start + size] for name, array in rows.items()}
        for start in range(0, count - size + 1, size)
    ]


def _window(session: Runnable, batches: Iterator[Batch], seconds: float) -> list[int]:
    """Returns the nanoseconds of consecutive calls until the time is over."""
    taken = []
    now = time.perf_counter_ns()
    end = now + int(seconds * 1e9)
    while now < end:
        session.run(next(batches))
        before, now = now, time.perf_counter_ns()
        taken.append(now - before)
    return taken


if __name__ == "__main__":
    _serve()
