"""What the scripts beside this one share: their requests, reports, and engines in processes of their own."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import errors, files
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiles in the process itself, no pool is left behind
}


# ------------------------------------------------------------------------------------------------------------- request


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and has the options of a report: --json, -o."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", action="store_true", help="print the report instead of the table")
        self.add_argument("-o", "--output", metavar="FILE", help="write the report, too")

    def error(self, message: str) -> Any:
        """See argparse."""
        raise RequestError(message)


@contextlib.contextmanager
def one_line(script: str) -> Iterator[None]:
    """What is wrong with the request, or fails, ends the process with one line."""
    try:
        yield
    except ZooError as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def require_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise RequestError that names those `given` that are not `known`."""
    known = list(known)
    if unknown := [each for each in given if each not in known]:
        raise RequestError(f"unknown {what} {', '.join(unknown)}; choose among {', '.join(known)}")


def listed(what: str, text: str, known: Iterable[str] | None = None) -> list[str]:
    """The names in `text`, with commas between them, each once. Raises RequestError for none, and see
    `require_known`.
    """
    found = list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not found:
        raise RequestError(f"found an empty list, wanted at least one {what}")
    if known is not None:
        require_known(what, found, known)
    return found


def numbers(what: str, text: str) -> list[int]:
    """The whole numbers in `text`, with commas between them. Raises RequestError for anything else, none, and those
    below 1.
    """
    found = [int(each) if each.isdecimal() else 0 for each in listed(what, text)]
    if min(found) < 1:
        raise RequestError(f"found the {what} {text!r}, wanted whole numbers of 1 or more")
    return found


# -------------------------------------------------------------------------------------------------------------- report


def gather(
    key: str, names: Iterable[Any], measure: Callable[[Any], Any], output: str | None, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """{key: [measure(name), ...], "environment"}, written to `output`, if any, after each: what is there if a later one
    fails.
    """
    found: list[Any] = []
    report = {key: found, "environment": environment}
    for name in names:
        found.append(measure(name))
        if output:
            files.write_json(output, report)
    return report


def show(report: Mapping[str, Any], table: Callable[[Mapping[str, Any]], str], as_json: bool) -> None:
    """Print the report, or its table."""
    print(json.dumps(report, indent=2) if as_json else table(report))


def median(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """{"median", "spread": [least, greatest]}."""
    return {
        "median": round(float(np.median(values)), digits),
        "spread": [round(float(each), digits) for each in (min(values), max(values))],
    }


def versions(*packages: str) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@contextlib.contextmanager
def folder(given: str | None) -> Iterator[Path]:
    """The folder `given`, made where it is missing, or one that is deleted afterwards."""
    with contextlib.nullcontext(given) if given else tempfile.TemporaryDirectory() as found:
        Path(found).mkdir(parents=True, exist_ok=True)
        yield Path(found)


def why(error: Exception) -> str:
    """An error of any library in one line."""
    return f"{type(error).__name__}: {errors.one_line(error)}"[:300]


# ----------------------------------------------------------------------------------------------------- whole processes


def whole_processes(
    ways: Mapping[str, Sequence[Any]], rows: Mapping[str, int], output: Path, rounds: int
) -> list[dict[str, Any]]:
    """Commands that score a file, in turn on one core, each a process from its start to its end that leaves row and
    probability in `output`. rows: how many each scores.

    Returns [{"way", "rows", "seconds" (median), "spread" (least and most), "cpu_seconds" (median; a busy machine
    changes it less), "rows_per_second", "peak_memory_mb", "max_probability" (largest difference to the first one's, on
    the rows that both score)}]. Raises ZooError where a run fails.
    """
    core = max(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    memory: dict[str, float] = {}
    scores: dict[str, Any] = {}
    with progress("runs", rounds * len(ways)) as advance:
        for _ in range(rounds):
            for way, command in ways.items():
                taken, worked, peak = timed(["taskset", "-c", str(core), *map(str, command)])
                seconds[way].append(taken)
                cpu[way].append(worked)
                memory[way] = max(peak, memory.get(way, 0))
                if way not in scores:
                    scores[way] = np.loadtxt(output, delimiter=",", skiprows=1, usecols=1, max_rows=min(rows.values()))
                advance(1)
    first = next(iter(scores.values()))
    return [
        {
            "way": way,
            "rows": rows[way],
            "seconds": round(float(np.median(each)), 2),
            "spread": [round(min(each), 2), round(max(each), 2)],
            "cpu_seconds": round(float(np.median(cpu[way])), 2),
            "rows_per_second": round(rows[way] / float(np.median(each))),
            "peak_memory_mb": round(memory[way], 1),
            "max_probability": float(f"{np.abs(scores[way] - first).max():.2e}"),
        }
        for way, each in seconds.items()
    ]


def timed(command: list[str]) -> tuple[float, float, float]:
    """Seconds, seconds of processor time, and peak resident memory (MB, 10^6 bytes) of a process.

    Raises ZooError with its last line where it fails.
    """
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise ZooError(f"{' '.join(command)} failed: {(said.read().decode().splitlines() or ['no message'])[-1]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def whole_table(report: Mapping[str, Any]) -> str:
    """The results of `whole_processes` as text."""
    line = "{:32} {:>10} {:>8} {:>15} {:>8} {:>12} {:>7} {:>9}".format
    lines = [line("way", "rows", "seconds", "least..most", "of CPU", "rows/s", "MB", "max diff")]
    for each in report["results"]:
        spread, rate = "{}..{}".format(*each["spread"]), f"{each['rows_per_second']:,}"
        memory, error = f"{each['peak_memory_mb']:.0f}", f"{each['max_probability']:.1e}"
        lines.append(
            line(each["way"], f"{each['rows']:,}", each["seconds"], spread, each["cpu_seconds"], rate, memory, error)
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------- processes


def talk_into(log: Path) -> None:
    """What this process and its libraries say goes into a file from here on."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def serve(
    connection: Connection, make: Callable[[], Any], core: int, log: Path, environment: Mapping[str, str]
) -> None:
    """A process's whole life, on one core, its libraries' talk in a file: make an engine, answer (method, arguments)
    until None comes.

    Every answer is (value, None) or (None, message of an error).
    """
    os.sched_setaffinity(0, {core})
    os.environ.update(environment)
    talk_into(log)
    engine = make()
    with contextlib.suppress(EOFError):
        while (request := connection.recv()) is not None:
            method, arguments = request
            try:
                connection.send((getattr(engine, method)(*arguments), None))
            except Exception as error:  # every library raises its own kinds
                connection.send((None, why(error)))


class Worker:
    """The other end of `serve`."""

    def __init__(self, make: Callable[[], Any], core: int, log: Path, **environment: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.connection, theirs = spawned.Pipe()
        self.process = spawned.Process(
            target=serve, args=(theirs, make, core, log, ONE_THREAD | environment), daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """The value of the engine's `method(*arguments)` there. Raises ZooError with what went wrong."""
        try:
            self.connection.send((method, arguments))
            value, fault = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(5)
            raise ZooError(f"its process ended with exit code {self.process.exitcode}") from error
        if fault is not None:
            raise ZooError(fault)
        return value

    def close(self) -> None:
        """Let the process end."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


@dataclass(frozen=True)
class Work:
    """What engines of one model are given: its name or folder, and where files of it are made."""

    model: str
    scratch: Path

    @property
    def fp32(self) -> Path:
        """The float graph as it was frozen."""
        return zoo.load(self.model).ensure("fp32.onnx")

    @property
    def stock(self) -> Path:
        """What onnxruntime's own quantizer made of it."""
        return self.scratch / "stock.onnx"


class Workers:
    """Engines by name; one that fails is left out, with a reason, and told of on stderr."""

    def __init__(self) -> None:
        self.live: dict[str, Worker] = {}
        self.left_out: dict[str, str] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.live.values():
            worker.close()

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """See `Worker.ask`; None where it failed."""
        try:
            return self.live[name].ask(method, *arguments)
        except ZooError as error:
            self.left_out[name] = str(error)
            self.live.pop(name).close()
            print(f"{name} is left out: {error}", file=sys.stderr)
            return None

    def ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Of all that are left, in turn."""
        found = {name: self.ask(name, method, *arguments) for name in list(self.live)}
        return {name: each for name, each in found.items() if name in self.live}


def forget_peak() -> None:
    """Peak memory of this process counts from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """Peak resident memory of this process since `forget_peak`, in MB (10^6 bytes)."""
    return _kilobytes("status", "VmHWM")


def shared_memory() -> float:
    """Memory of this process now, what several share counted by shares (PSS), in MB (10^6 bytes)."""
    return _kilobytes("smaps_rollup", "Pss")


def _kilobytes(file: str, key: str) -> float:
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return next(round(int(line.split()[1]) * 1024 / 1e6, 1) for line in lines if line.startswith(f"{key}:"))
