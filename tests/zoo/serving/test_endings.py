"""The end of a server: no process of it is left, however it ends."""

import concurrent.futures
import contextlib
import http.client
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.serving import RUN, TSV, Server, _children, figure, stopped, wait_until

from zoo.serving.http.server import _stop_accepting


def processes(server: Server) -> list[int]:
    """The fork server and the workers."""
    return [*_children(server.process.pid), *server.workers()]


def alive(pids: list[int]) -> list[int]:
    living = []
    for pid in pids:
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            living.append(pid)
    return living


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_are_busy_end_with_the_server(
    start: Callable[..., Server], lines: list[bytes], ended: int
) -> None:
    server = start("wide-deep-criteo", "--workers", "2", "--grace", "1s")
    pids = processes(server)
    assert len(pids) == 3 and alive(pids) == pids
    for pid in server.workers():
        os.kill(pid, signal.SIGSTOP)  # as one that computes without end
    threading.Thread(target=lambda: _tried(server, lines[0]), daemon=True).start()
    wait_until(lambda: figure(server, "zoo_working_requests") == 1)
    begin = time.monotonic()
    code = server.end(ended)
    assert code == (0 if ended == signal.SIGTERM else -signal.SIGKILL) and time.monotonic() - begin < 8
    wait_until(lambda: not alive(pids), 5)


def _tried(server: Server, line: bytes) -> None:
    with contextlib.suppress(OSError):
        server.ask(RUN, line, TSV)


@pytest.mark.slow
def test_a_worker_that_computes_what_nobody_waits_for_is_replaced(
    start: Callable[..., Server], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("wide-deep-criteo", "--workers", "1")
    with stopped(server) as workers:
        assert server.ask(RUN, lines[0], TSV, timeout_ms="100")[0] == 504
        wait_until(lambda: not alive(workers), 20)
    wait_until(lambda: server.ask("/v2/health/ready")[0] == 200)
    assert server.ask(RUN, lines[0], TSV)[0] == 200 and server.workers() != workers
    assert any("still computes a request that was dropped 10 seconds ago" in message for message in server.said)
    assert server.end() == 0


def test_a_server_without_a_file_left_to_open_ends_all_the_same() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        _stop_accepting(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("kept", [True, False])
def test_under_load_every_request_on_a_connection_that_was_accepted_is_answered(
    start: Callable[..., Server], lines: list[bytes], kept: bool
) -> None:
    server = start("wide-deep-criteo", "--workers", "1")
    headers = {"content-type": TSV} | ({} if kept else {"connection": "close"})
    results: Counter[str] = Counter()

    def ask() -> None:
        """Asks until no connection is accepted, over one connection as long as the server keeps it."""
        while True:
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
            try:
                connection.connect()
            except OSError:
                results["refused"] += 1
                return
            last = False
            while not last:
                try:
                    connection.request("POST", RUN, b"\n".join(lines[:20]), headers)
                    answer = connection.getresponse()
                    answer.read()
                except (OSError, http.client.HTTPException):
                    results["unanswered"] += 1
                    return
                results[str(answer.status)] += 1
                last = not kept or answer.will_close
            connection.close()

    with concurrent.futures.ThreadPoolExecutor(24) as clients:
        running = [clients.submit(ask) for _ in range(24)]
        wait_until(lambda: results["200"] > 200)
        assert server.end() == 0
        for future in running:
            future.result()
    assert set(results) == {"200", "refused"}
