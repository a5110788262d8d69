"""Clients that leave and deadlines that pass, where sentences and rows share one worker."""

import concurrent.futures
import http.client
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable

import pytest
from helpers.serving import LONG, MT, RUN, SENTENCES, TSV, Server, figure, stopped, talk, wait_until

MAX_BATCH = 2  # sentences' requests that go together


@pytest.fixture(scope="module")
def shared(start: Callable[..., Server]) -> Server:
    return start("multi30k-en-de", "wide-deep-criteo", "--workers", "1", "--max-batch", str(MAX_BATCH))


def post(server: Server, body: bytes, *headers: str) -> socket.socket:
    """A connection that a request for translations was written to."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = [f"POST {MT} HTTP/1.1", "host: x", "content-type: text/plain", f"content-length: {len(body)}", *headers]
    client.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return client


def both_answer(server: Server, lines: list[bytes]) -> None:
    """Rows and sentences are answered within 10 seconds."""
    assert server.ask(RUN, lines[0], TSV, timeout_ms="10000")[0] == 200
    assert server.ask(MT, SENTENCES[1].encode(), "text/plain", timeout_ms="10000")[0] == 200
    assert figure(server, "zoo_working_requests") == 0


def test_deadlines_that_pass_leave_the_worker_to_others(shared: Server, lines: list[bytes]) -> None:
    for _ in range(MAX_BATCH + 1):
        status, _, text = shared.ask(MT, LONG, "text/plain", timeout_ms="100")
        assert status == 504, text
    both_answer(shared, lines)


def test_clients_that_leave_leave_the_worker_to_others(shared: Server, lines: list[bytes]) -> None:
    for _ in range(MAX_BATCH + 1):
        with post(shared, LONG):
            wait_until(lambda: figure(shared, "zoo_working_requests"))
        wait_until(lambda: not figure(shared, "zoo_working_requests"), 5)
    both_answer(shared, lines)


def test_a_stream_whose_deadline_passes_says_so_in_its_last_line(shared: Server) -> None:
    answer = shared.ask(MT, LONG, "text/plain", accept="application/x-ndjson", timeout_ms="700")
    assert answer[0] == 200
    *done, last = map(json.loads, answer[2].splitlines())
    assert last == {"error": "the deadline passed"} and len(done) < 1500 and all("translation" in line for line in done)


def test_short_deadlines_are_kept(shared: Server, lines: list[bytes]) -> None:
    host, port = shared.url.removeprefix("http://").split(":")
    client = http.client.HTTPConnection(host, int(port))
    client.request("GET", "/v2/health/live")
    client.getresponse().read()
    times = []
    with stopped(shared):
        for _ in range(5):
            begin = time.perf_counter()
            client.request("POST", RUN, lines[0], {"content-type": TSV, "timeout-ms": "5"})
            response = client.getresponse()
            assert (response.status, json.loads(response.read())["error"]) == (504, "the deadline passed")
            times.append(time.perf_counter() - begin)
    client.close()
    assert 0.003 < statistics.median(times) < 0.1


def test_a_deadline_counts_from_the_head_of_the_request(shared: Server) -> None:
    body = SENTENCES[1].encode()
    with post(shared, b"", "timeout-ms: 100") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 400")  # what the next one would get: its body is empty
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client, stopped(shared):
        head = f"POST {MT} HTTP/1.1\r\nhost: x\r\ntimeout-ms: 1000\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode())
        time.sleep(1.05)
        begin = time.perf_counter()
        client.sendall(body)
        assert client.recv(100).startswith(b"HTTP/1.1 504") and time.perf_counter() - begin < 0.9


@pytest.mark.parametrize("given", ["0" * 300 + "1", "1" * 400, "-5", "0", "86400001", "1e3"])
def test_deadlines_that_are_none_are_said(shared: Server, given: str) -> None:
    head = f"POST {MT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntimeout-ms: {given}\r\ncontent-length: 1\r\n\r\nx"
    answer = talk(shared, head.encode(), 5)
    assert answer.startswith(b"HTTP/1.1 400") and b"timeout-ms" in answer


def test_rows_are_answered_beside_sentences_without_end(shared: Server, lines: list[bytes]) -> None:
    ended = False

    def translate() -> None:
        while not ended:
            shared.json(MT, "\n".join(SENTENCES * 2).encode(), "text/plain")

    with concurrent.futures.ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(translate) for _ in range(6)]
        wait_until(lambda: figure(shared, "zoo_queue_requests") >= 2)
        times = []
        for i in range(20):
            begin = time.perf_counter()
            assert shared.ask(RUN, lines[i], TSV)[0] == 200
            times.append(time.perf_counter() - begin)
        ended = True
        for future in asked:
            future.result()
    assert statistics.median(times) < 0.1


def test_an_access_log_that_nobody_reads_stops_no_request(start: Callable[..., Server]) -> None:
    server = start("multi30k-en-de", "--workers", "1", "--access-log")
    read = server.process.stdout.readline
    body = server.ask(MT, LONG[:5000], "text/plain", accept="application/x-ndjson")[2]
    streamed = json.loads(read())
    assert (streamed["status"], streamed["bytes"]) == (200, len(body))
    server.process.stdout.close()
    for _ in range(20):
        assert server.ask("/v2/health/live")[0] == 200
    wait_until(lambda: any("access log" in message for message in server.said))
    assert sum("access log" in message for message in server.said) == 1
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(20) == 0
