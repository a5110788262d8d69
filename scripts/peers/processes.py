"""Engines in processes of their own, and the time and memory of processes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipelines.core.errors import ZooError
from pipelines.core.progress import progress
from scripts.peers.harness import median, reason

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "USE_TF": "0",  # of transformers 4
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiles in the process itself, no pool is left behind
}
LOOK_SECONDS = 0.05  # between looks at the memory of processes
Item = TypeVar("Item")


def last_core() -> int:
    """Returns the core that single-threaded engines are pinned to."""
    return max(os.sched_getaffinity(0))


_READ = """
import os, sys
import numpy as np
os.sched_setaffinity(0, {int(sys.argv[2])})
read = np.ones(int(sys.argv[1]) * 10**6 // 8)
while os.getppid() == int(sys.argv[3]):
    read.sum()
"""


@contextlib.contextmanager
def neighbour(megabytes: int) -> Iterator[None]:
    """Context in which a process on another core reads memory all the time, and so uses the cache that cores share.

    Args:
        megabytes: Memory that it reads, in 10^6 bytes; 0: no process.
    """
    if not megabytes:
        yield
        return
    arguments = [str(megabytes), str(min(os.sched_getaffinity(0))), str(os.getpid())]
    process = subprocess.Popen([sys.executable, "-c", _READ, *arguments], env={**os.environ, **ONE_THREAD})
    try:
        yield
    finally:
        process.kill()
        process.wait()


# -------------------------------------------------------------------------------------------------------------- memory


def memory_mb(field: str, pid: int | str = "self") -> float:
    """Returns the memory of a process in MB (10^6 bytes).

    Args:
        field: "VmHWM" (peak resident memory), "VmRSS" (resident) or "Pss" (shared pages by shares).
        pid: Process number.

    Returns:
        0 where the process has ended.
    """
    file = "smaps_rollup" if field == "Pss" else "status"
    with contextlib.suppress(OSError):
        for line in (Path("/proc") / str(pid) / file).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return round(int(line.split()[1]) * 1024 / 1e6, 1)
    return 0.0


def reset_peak() -> None:
    """Resets the peak memory of this process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


CGROUPS = Path("/sys/fs/cgroup")
GROUP = "zoo-peers-"


def _memory_groups() -> tuple[Path, str, str]:
    """Returns the folder of memory cgroups, and the names of the files with a limit and with the peak."""
    if (CGROUPS / "memory").is_dir():
        return CGROUPS / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    return CGROUPS, "memory.max", "memory.peak"


def limit_memory(megabytes: int, name: str) -> Path:
    """Limits the memory of this process, with the page cache that it fills.

    Args:
        megabytes: Limit, in 10^6 bytes.
        name: Name of its cgroup, for `remove_limits`.

    Returns:
        The cgroup, for `peak_mb`.

    Raises:
        ZooError: The system refuses.
    """
    folder, limit, _ = _memory_groups()
    group = folder / f"{GROUP}{name}"
    try:
        group.mkdir(exist_ok=True)
        (group / limit).write_text(str(megabytes * 10**6))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise ZooError(
            f"cannot limit memory in {group} ({error.strerror}); run as root, or within "
            f"systemd-run --scope -p MemoryMax={megabytes}M with no limit here"
        ) from error
    return group


def peak_mb(group: Path) -> float:
    """Returns the largest memory of a cgroup in MB (10^6 bytes).

    Args:
        group: Result of `limit_memory`.
    """
    return round(int((group / _memory_groups()[2]).read_text()) / 1e6, 1)


def remove_limits(prefix: str) -> None:
    """Removes the cgroups of ended processes.

    Args:
        prefix: Beginning of their names.
    """
    for group in _memory_groups()[0].glob(f"{GROUP}{prefix}*"):
        with contextlib.suppress(OSError):
            group.rmdir()


def session_members(session: int) -> list[int]:
    """Returns the live processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[2]) == session and state != "Z":
                pids.append(int(path.parent.name))
    return pids


def cpu_seconds(session: int) -> float:
    """Returns the CPU time of the live processes of a session, in seconds."""
    nanoseconds = 0
    for pid in session_members(session):
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds += int(file.read_text().split()[0])
    return nanoseconds / 1e9


# ----------------------------------------------------------------------------------------------- one call, one process


def redirect_output(log: Path) -> None:
    """Redirects the output of this process and its libraries to a file."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _start(cores: set[int] | None, log: Path | None, seconds: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    if log:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(log.parent / "inductor")
        redirect_output(log)
    signal.alarm(seconds)


def in_process(
    function: Callable[..., Any],
    *args: Any,
    cores: set[int] | None = None,
    log: Path | None = None,
    seconds: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Calls a function in a process of its own, as libraries disturb each other's threads.

    Args:
        function: A function of a module, so that it can be pickled.
        args: Its arguments.
        cores: The process is pinned to these.
        log: File for the output of the process.
        seconds: Time limit, 0 for none.
        environment: Environment variables beside those of this process.

    Returns:
        The function's result.

    Raises:
        Exception: What the function raises; ZooError where the process dies or exceeds its time.
    """
    start = (cores, log, seconds, environment or {})
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, start) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        limit = f", or took more than {seconds} s" if seconds else ""
        raise ZooError(f"its process ended{limit}{f'; see {log}' if log else ''}") from error


def on_all_cores(function: Callable[[Item, int], Any], items: Iterable[Item]) -> list[Any]:
    """Returns function(item, core) of all items; as many threads as cores call it, and a core has one call at once."""
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in (available := os.sched_getaffinity(0)):
        cores.put(core)

    def call(item: Item) -> Any:
        core = cores.get()
        try:
            return function(item, core)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(len(available)) as pool:
        return list(pool.map(call, items))


on_one_core = partial(in_process, environment=ONE_THREAD)  # with cores={last_core()}


# ------------------------------------------------------------------------------------------- engines that take requests


_engine: Any = None  # of this process


def _make_engine(make: Callable[[], Any], core: int, log: Path, packages: str, environment: Mapping[str, str]) -> None:
    global _engine
    _start({core}, log, 0, environment)
    if packages:
        sys.path.insert(0, packages)
    _engine = make()


def _ask_engine(method: str, arguments: Sequence[Any]) -> tuple[Any, str | None]:
    """(value, None) or (None, error message): errors of libraries cannot always be pickled."""
    try:
        return getattr(_engine, method)(*arguments), None
    except Exception as error:  # every library raises its own kinds
        return None, reason(error)


class Worker:
    """An engine in a process of its own, pinned to one core, with one thread.

    Args:
        make: Makes the engine.
        core: Its core.
        log: File for its output.
        packages: Folder of packages that are imported before those of this process; "": none.
        **environment: Environment variables.
    """

    def __init__(self, make: Callable[[], Any], core: int, log: Path, packages: str = "", **environment: str) -> None:
        self.log, arguments = log, (make, core, log, packages, ONE_THREAD | environment)
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _make_engine, arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Returns the value of `engine.method(*arguments)`.

        Raises:
            ZooError: The engine's error, or the end of its process.
        """
        try:
            value, fault = self.pool.submit(_ask_engine, method, arguments).result()
        except BrokenProcessPool as error:
            raise ZooError(f"its process ended; see {self.log}") from error
        if fault is not None:
            raise ZooError(fault)
        return value

    def close(self) -> None:
        """Ends the process."""
        self.pool.shutdown()


class Workers:
    """Engines by name, each in a process of its own; an engine that fails is left out with its reason.

    Args:
        logs: Folder of their outputs.
        packages: Folders of packages of engines that need others than this process, see `Worker`.
    """

    def __init__(self, logs: Path, packages: Mapping[str, str] | None = None) -> None:
        self.logs, self.packages = logs, packages or {}
        self.live: dict[str, Worker] = {}
        self.left_out: dict[str, str] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.live.values():
            worker.close()

    def open(self, name: str, make: Callable[[], Any], *arguments: Any, **environment: str) -> Any:
        """Starts an engine and calls its `open(*arguments)`; None where that failed."""
        self.live[name] = self.start(name, make, f"{name}.log", **environment)
        return self.ask(name, "open", *arguments)

    def start(
        self, name: str, make: Callable[[], Any], log: str, core: int | None = None, **environment: str
    ) -> Worker:
        """Starts the process of an engine, without adding it to `live`.

        Args:
            name: Its name.
            make: Makes it.
            log: Name of the file for its output.
            core: Its core; None: the last.
            **environment: Environment variables.
        """
        core = last_core() if core is None else core
        return Worker(make, core, self.logs / log, self.packages.get(name, ""), **environment)

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
        """Asks all engines that are left, in turn."""
        values = {name: self.ask(name, method, *arguments) for name in list(self.live)}
        return {name: value for name, value in values.items() if name in self.live}


# ------------------------------------------------------------------------------------------------------ whole processes


class Run(NamedTuple):
    """Commands that ran to their end.

    Attributes:
        output: Standard output of the first.
        seconds: Seconds from the start of the first to the end of the last.
        processor_seconds: Processor time of all.
        peak_mb: Peak resident memory of the largest process, in MB (10^6 bytes).
    """

    output: str
    seconds: float
    processor_seconds: float
    peak_mb: float


def run(
    *commands: Sequence[Any], environment: Mapping[str, str] | None = None, watch: Callable[[], None] = lambda: None
) -> Run:
    """Runs commands at once.

    Memory is looked at 20 times a second: the usage of ended children starts from the memory of the process that forked
    them.

    Args:
        commands: The commands.
        environment: Environment variables beside those of this process.
        watch: Called each time that the memory is looked at.

    Raises:
        ZooError: A command failed; with the last line of its errors.
    """
    used, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        start = time.perf_counter()
        running = [
            subprocess.Popen([*map(str, command)], stdout=out, stderr=errors, env={**os.environ, **(environment or {})})
            for command, (out, errors) in zip(commands, files, strict=True)
        ]
        while any(process.poll() is None for process in running):
            peak = max(peak, *(memory_mb("VmHWM", process.pid) for process in running))
            watch()
            time.sleep(LOOK_SECONDS)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        for file in itertools.chain(*files):
            file.seek(0)
        for process, (_, errors) in zip(running, files, strict=True):
            if process.returncode:
                last = (errors.read().splitlines() or [f"it ended with {process.returncode}"])[-1]
                raise ZooError(f"{' '.join(map(str, process.args))} failed: {last}")  # type: ignore[arg-type]
        processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        return Run(files[0][0].read(), seconds, processor, peak)


def whole_processes(
    ways: Mapping[str, Sequence[Any]], rows: Mapping[str, int], output: Path, rounds: int
) -> list[dict[str, Any]]:
    """Times commands that score a file of rows, in turn on one core, each a process from its start to its end.

    Args:
        ways: Commands by name; each leaves row and probability in `output`.
        rows: How many rows each scores.
        output: The file of results, CSV with a header.
        rounds: Runs of each command.

    Returns:
        [{"way", "rows", "seconds" (median), "spread" (minimum and maximum), "cpu_seconds" (median; a busy machine
        changes it less), "rows_per_second", "peak_memory_mb", "max_probability" (largest difference to the first
        command's, on the rows that all score)}].

    Raises:
        ZooError: A run fails.
    """
    figures: dict[str, list[Run]] = {way: [] for way in ways}
    scores: dict[str, Any] = {}
    with progress("runs", rounds * len(ways)) as advance:
        for _ in range(rounds):
            for way, command in ways.items():
                figures[way].append(run(["taskset", "-c", last_core(), *command]))
                if way not in scores:
                    scores[way] = np.loadtxt(output, delimiter=",", skiprows=1, usecols=1, max_rows=min(rows.values()))
                advance(1)
    first, results = next(iter(scores.values())), []
    for way, runs in figures.items():
        _, seconds, processor, memory = zip(*runs, strict=True)
        whole = median(seconds, 2)
        results.append(
            {
                "way": way,
                "rows": rows[way],
                "seconds": whole["median"],
                "spread": whole["spread"],
                "cpu_seconds": round(float(np.median(processor)), 2),
                "rows_per_second": round(rows[way] / float(np.median(seconds))),
                "peak_memory_mb": round(max(memory), 1),
                "max_probability": float(f"{np.abs(scores[way] - first).max():.2e}"),
            }
        )
    return results
