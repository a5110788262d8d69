"""Servers in sessions of their own, and the load of wrk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import ZooError
from scripts.peers.processes import ONE_THREAD, session_members
from scripts.peers.serving import load
from scripts.peers.serving.load import Request

CLICKS = "wide-deep-criteo"
SERVERS = Path(__file__).parent / "servers"
JSON, TSV, TEXT, CSV = "application/json", "text/tab-separated-values", "text/plain", "text/csv"
READY, GRACE = 90.0, 10.0  # seconds for a server to answer, and to end
CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Server:
    """A server to start.

    Attributes:
        name: For the report.
        environment: Folder of its Python environment; "" for this one, whose command is `zoo serve`.
        arguments: Of `zoo serve`, or a file of `servers/` and its arguments.
        package: Its package in that environment.
        pinned: Whether it runs on one core.
    """

    name: str
    environment: str
    arguments: tuple[str, ...]
    package: str
    pinned: bool = True

    def command(self, environments: Path, port: int) -> list[str]:
        """Returns the command of the server's process."""
        if self.environment:
            file, *others = self.arguments
            words = [str(environments / self.environment / "bin/python"), str(SERVERS / file), str(port), *others]
        else:
            words = [sys.executable, "-m", "zoo", "serve", *self.arguments, "--port", str(port)]
            words += [] if {"--workers", "--on"} & set(words) else ["--workers", "1"]
        return ["taskset", "-c", str(CORES[0]), *words] if self.pinned else words


@dataclass
class Running:
    """A running server.

    Attributes:
        port: Port of the server.
        ready: Seconds from the start to the first response.
        process: First process of the server.
        stop: Effect of SIGTERM, afterwards: {"exit", "seconds", "left"}.
    """

    port: int
    ready: float
    process: subprocess.Popen[bytes]
    stop: dict[str, Any] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def running(server: Server, environments: Path, request: Request, grace: float = GRACE) -> Iterator[Running]:
    """Runs a server in a session of its own while the block runs.

    Args:
        server: The server.
        environments: Folder of the environments.
        request: The server is ready once it answers this request by 200.
        grace: Seconds for the server to end.

    Raises:
        ZooError: It does not answer.
    """
    port = free_port()
    model = {"ZOO_INT8": str(zoo.load(CLICKS).ensure("int8.onnx")), "PYTHONPATH": str(SERVERS)}
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            server.command(environments, port),
            stdout=output,
            stderr=output,
            env={**os.environ, **ONE_THREAD, **model},
            start_new_session=True,
        )
        try:
            while load.status(port, request) != 200:
                if time.perf_counter() - start > READY or process.poll() is not None:
                    output.seek(0)
                    last = (output.read().decode(errors="replace").split("\n") or [""])[-2:]
                    raise ZooError(f"{server.name} does not answer: {' '.join(last)[:200]}")
                time.sleep(0.005)
            live = Running(port, round(time.perf_counter() - start, 2), process)
            yield live
            live.stop = _stop(process, grace)
        finally:
            for pid in session_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _stop(process: subprocess.Popen[bytes], grace: float) -> dict[str, Any]:
    """Sends SIGTERM; returns exit code (None: it did not end), seconds, and the number of processes left."""
    start = time.perf_counter()
    process.terminate()
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(grace)
    seconds = round(time.perf_counter() - start, 2)
    time.sleep(0.3)
    left = [pid for pid in session_members(process.pid) if pid != process.pid or code is None]
    return {"exit": code, "seconds": seconds, "left": len(left)}


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wrk(port: int, request: Request, connections: int, seconds: float) -> dict[str, Any]:
    """Loads a server by wrk.

    Args:
        port: Port of the server.
        request: The request.
        connections: Number of connections; each sends the next request as soon as the last is answered.
        seconds: Duration.

    Returns:
        {"rate": responses with status 200 per second, "p50", "p99": milliseconds, "failed"}.

    Raises:
        ZooError: The server does not answer under load.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, script = Path(scratch) / "body", Path(scratch) / "post.lua"
        file.write_bytes(request.body)
        script.write_text(
            f'local f = io.open("{file}", "rb"); wrk.body = f:read("*a"); f:close(); wrk.method = "POST"\n'
            f'wrk.headers["Content-Type"] = "{request.kind}"; wrk.headers["Accept"] = "{request.accept}"\n'
            "done = function(s, l, r) io.write(string.format('%d %d %d %d %d\\n', s.requests, s.duration,"
            " l:percentile(50), l:percentile(99), s.errors.status + s.errors.read + s.errors.timeout)) end\n"
        )
        command = ["taskset", "-c", str(CORES[-1]), "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s"]
        url = f"http://127.0.0.1:{port}{request.path}"
        output = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True).stdout
    numbers = re.search(r"^(\d+) (\d+) (\d+) (\d+) (\d+)$", output, re.M)
    if numbers is None:
        raise ZooError(f"under load it does not answer: wrk printed {output[-200:]!r}")
    answered, microseconds, p50, p99, failed = map(int, numbers.groups())
    return {
        "rate": max(answered - failed, 0) / microseconds * 1e6,
        "p50": p50 / 1e3,
        "p99": p99 / 1e3,
        "failed": failed,
    }
