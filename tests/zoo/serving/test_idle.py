"""Connections that send nothing, or not all, leave the server to others."""

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from helpers.serving import RUN, TSV, Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PARTS = [b"", b"G", PREFACE, b"GET /v2 HTTP/1.1\r\nhost: x\r\n"]


@contextlib.contextmanager
def idle(server: Server, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that sent these bytes."""
    host, port = server.url.rpartition("/")[2].split(":")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex((host, int(port)))
        time.sleep(0.5)
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(data)
        yield clients


@pytest.fixture(scope="module")
def few(start: Callable[..., Server]) -> Server:
    """A server that may open 64 files."""
    return start("wide-deep-criteo", "--workers", "1", files=64)


@pytest.mark.parametrize("data", PARTS)
@pytest.mark.slow
def test_more_idle_connections_than_files_leave_the_server_to_others(few: Server, data: bytes) -> None:
    with idle(few, 80, data) as clients:
        begin = time.monotonic()
        assert few.json("/v2/health/live") == {"live": True}
        assert time.monotonic() - begin < 30
        clients[0].settimeout(30)
        with contextlib.suppress(ConnectionResetError):  # it is closed
            while clients[0].recv(1 << 16):
                pass


def test_thousands_of_idle_connections_delay_nobody(server: Server, lines: list[bytes]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 10_000:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for data in (b"", b"G"):
        with idle(server, 4200, data):
            begin = time.monotonic()
            assert server.ask(RUN, lines[0], TSV)[0] == 200
            assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_a_connection_is_closed_when_it_is_idle_after_a_response(few: Server) -> None:
    with idle(few, 1, b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n") as (client,):
        client.settimeout(15)
        begin, parts = time.monotonic(), []
        while part := client.recv(1 << 16):
            parts.append(part)
        assert b"".join(parts).endswith(b'{"live":true}') and 1 < time.monotonic() - begin < 10


@pytest.mark.parametrize(("files", "options"), [(24, []), (900, ["--certfile", "c.pem", "--keyfile", "k.pem"])])
def test_a_limit_of_files_that_is_too_low_is_said(files: int, options: list[str]) -> None:
    code = (
        "import resource, sys\n"
        "from zoo.serving.http import server\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
        f"server._max_connections(1, {bool(options)})"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"RequestError: found a limit of {files} open files, expected at least" in process.stderr


@pytest.mark.slow
def test_tls_handshakes_that_never_end_leave_the_server_to_others(
    start: Callable[..., Server], certificate: tuple[str, str]
) -> None:
    import ssl
    import urllib.request

    cert, key = certificate
    secure = start("wide-deep-criteo", "--workers", "1", "--certfile", cert, "--keyfile", key, files=1200)
    with idle(secure, 400, b"G"):  # more than it keeps open
        context = ssl.create_default_context(cafile=cert)
        with urllib.request.urlopen(f"{secure.url}/v2/health/live", context=context, timeout=30) as response:
            assert response.status == 200
