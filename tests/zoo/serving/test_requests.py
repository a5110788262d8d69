"""What requests may leave out, say twice or ask for."""

import concurrent.futures
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import INFER, JSON, RUN, TSV, Server, talk

from pipelines.core.errors import RequestError
from zoo.serving.config import ServerConfig, read_api_keys
from zoo.serving.handlers.base import parse_json, text_lines
from zoo.serving.http.server import _address
from zoo.serving.protocol import open_inference
from zoo.serving.workers.channel import Job

LIVE = "GET /v2/health/live HTTP/%s\r\n%sconnection: close\r\n\r\n"
ONE = {"name": "a", "shape": [1], "datatype": "FP32", "data": [1.5]}


@pytest.mark.parametrize(
    ("version", "headers", "status", "says"),
    [
        ("1.1", "", 400, "found no Host header, expected one"),
        ("1.1", "host: a\r\nhost: a\r\n", 400, "found 2 Host headers, expected one"),
        ("1.0", "host: a\r\nhost: b\r\n", 400, "found 2 Host headers"),
        ("1.1", "host: a b\r\n", 400, "found the Host 'a b'"),
        ("1.1", "host: a/b@c\r\n", 400, "found the Host"),
        ("1.0", "", 200, "live"),
        ("1.1", "host: [::1]:8000\r\n", 200, "live"),
        ("1.1", "host:\r\n", 200, "live"),
    ],
)
def test_there_is_one_host(server: Server, version: str, headers: str, status: int, says: str) -> None:
    response = talk(server, (LIVE % (version, headers)).encode())
    assert response.startswith(f"HTTP/{version} {status}".encode()) and says.encode() in response


@pytest.mark.parametrize("body", ["content-length: 100\r\n\r\nabc", "transfer-encoding: chunked\r\n\r\n64\r\nabc"])
def test_a_body_that_ends_early_is_said_to_a_client_that_still_reads(server: Server, body: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {RUN} HTTP/1.1\r\nhost: x\r\n{body}".encode())
        client.shutdown(socket.SHUT_WR)
        client.settimeout(10)
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    assert b"the body ended early" in b"".join(parts)


@pytest.mark.parametrize("trailer", ["", "x: 1\r\n"])
def test_chunked_bodies_are_read_and_bounded(server: Server, lines: list[bytes], trailer: str) -> None:
    """Of proxies and of clients that stream: they got 411."""
    head = f"POST {RUN} HTTP/1.1\r\nhost: x\r\ncontent-type: {TSV}\r\nconnection: close\r\n"
    head += "transfer-encoding: chunked\r\n" + "trailer: x\r\n" * bool(trailer) + "\r\n"

    def ask(*chunks: bytes) -> bytes:
        body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        return talk(server, head.encode() + body + f"0\r\n{trailer}\r\n".encode())

    whole = b"".join(lines[:3])
    assert ask(whole[:7], whole[7:]).endswith(server.ask(RUN, whole, TSV)[2])
    assert ask(b"a" * 999_999, b"bc").startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"id": 5}, "must be text"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "'classification', expected binary_data"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]}, "'yes', expected true or false"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "'shared_memory_region'"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "requested twice"),
        ({"parameters": {"binary_data_output": 1}}, "expected true or false"),
        ({"parameters": {"sequence_id": 7}}, "keep no state"),
        ({"inputs": [{**ONE, "parameters": {"shared_memory_region": "r"}}]}, "'shared_memory_region'"),
        ({"inputs": [{**ONE, "parameters": {"binary_data_size": 0}}]}, "expected one of them"),
    ],
)
def test_parameters_that_are_not_served_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        open_inference.parse_request(json.dumps({"inputs": [ONE], **more}).encode())


def test_null_is_as_good_as_nothing() -> None:
    nothing = dict.fromkeys(("id", "outputs", "parameters"))
    request = open_inference.parse_request(json.dumps({"inputs": [{**ONE, "parameters": None}], **nothing}).encode())
    assert (request.request_id, request.outputs, request.binary) == ("", {}, False)
    kept = open_inference.parse_request(
        json.dumps({"inputs": [{**ONE, "parameters": {"content_type": "np"}}], "id": "7"}).encode()
    )
    assert kept.request_id == "7"


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "text/json"])
def test_json_without_its_content_type_is_no_text(kind: str) -> None:
    """Of curl -d without a header: the source of the JSON was embedded, labelled or translated."""
    for body, refused in ((b' {"texts": ["a"]}', True), (b'["a"]', True), (b"{0} files [1]", False), (b"[SEP]", False)):
        with (
            pytest.raises(RequestError, match="found JSON .*application/json") if refused else contextlib.nullcontext()
        ):
            assert text_lines(Job(1, "run", kind, "", {}, -1, body), 9, "lines") == [body.decode()]
    assert text_lines(Job(1, "run", "text/plain", "", {}, -1, b"[1]"), 9, "lines") == ["[1]"]
    assert parse_json(Job(1, "run", JSON, "", {}, -1, b"\xef\xbb\xbf[1]")) == [1]  # of Windows


def binary(numbers: list[float]) -> tuple[bytes, int]:
    """A request whose tensors are binary, and the length of its head."""
    inputs = [
        {"name": "ids", "shape": [1, 26], "datatype": "INT32", "parameters": {"binary_data_size": 104}},
        {"name": "numbers", "shape": [1, 13], "datatype": "FP32", "parameters": {"binary_data_size": 52}},
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return head + bytes(104) + struct.pack("<13f", *numbers), len(head)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_gets_no_score(server: Server, value: float) -> None:
    for numbers, status in (([0.0] * 13, 200), ([0.0] * 4 + [value] + [0.0] * 8, 400)):
        body, length = binary(numbers)
        answer = server.ask(INFER, body, "application/octet-stream", inference_header_content_length=str(length))
        assert answer[0] == status, answer[2]
    assert json.loads(answer[2])["error"] == f"the input 'numbers' holds {value} at [0, 4], expected finite numbers"


def test_a_number_that_its_type_cannot_hold_is_none(server: Server) -> None:
    inputs = [
        {"name": "ids", "shape": [1, 26], "datatype": "INT32", "data": [0] * 26},
        {"name": "numbers", "shape": [1, 13], "datatype": "FP32", "data": [1e39] * 13},
    ]
    status, _, text = server.ask(INFER, json.dumps({"inputs": inputs}).encode(), JSON)
    assert status == 400 and b"expected finite numbers" in text


def test_options_of_tensor_requests_are_not_ignored(server: Server) -> None:
    status, _, text = server.ask(f"{INFER}?batch=3", binary([0.0] * 13)[0], JSON)
    assert status == 400 and b"there is no option" in text


def test_a_host_is_served_at_its_first_free_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of instructlab and vLLM: localhost was ::1, and IPv6 was off. Here names of hosts ended in a traceback."""
    places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (name, 0)) for name in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    assert _address("localhost", 0)[0] == "127.0.0.1"
    with pytest.raises(RequestError, match="cannot listen at host port 0: Cannot assign requested address; choose"):
        places.pop()
        _address("host", 0)


@pytest.mark.parametrize("key", ["schl\u00fcssel-der-tests", "a-key-with-\u200b-a-gap", "tabs\tin-the-key-here"])
def test_keys_that_no_header_carries_are_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "keys").write_text(f"# keys\na-good-key-of-the-tests\n{key}\n", encoding="utf-8")
    with pytest.raises(RequestError, match="line 3 of .* expected ASCII"):
        read_api_keys(tmp_path / "keys")


def test_keys_of_a_windows_file_are_kept(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"a-good-key-of-the-tests\r\nanother-key-of-the-tests\r\n")
    plain = read_api_keys(tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "keys").read_bytes())
    assert read_api_keys(tmp_path / "keys") == plain and len(plain) == 2


def test_an_access_log_without_stdout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(RequestError, match="stdout is closed"):
        ServerConfig(access_log=True)
    ServerConfig()


def test_an_access_log_on_a_closed_stdout_ends_with_a_line(home: Path) -> None:
    command = [sys.executable, "-m", "zoo.cli.app", "serve", "wide-deep-criteo", "--access-log", "--port", "0"]
    process = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env={**os.environ, "ZOO_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 2 and process.stderr.count("\n") == 1 and "stdout is closed" in process.stderr


def test_a_body_that_would_fill_the_memory_is_refused_and_others_go_on(
    start: Callable[..., Server], lines: list[bytes]
) -> None:
    import time
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    newlines = packer.compress(b"\n" * (16 << 20)) + packer.flush()
    many = json.dumps([{f"c{i}": 1 for i in range(40_000)}]).encode()
    server = start("wide-deep-criteo", "shop-clicks", "--workers", "1")
    bodies = [
        (RUN, newlines, TSV, {"content_encoding": "gzip"}, 413, b"values, expected at most"),
        (RUN, many, JSON, {}, 400, b"expected all 39 by name"),
        (RUN.replace("wide-deep-criteo", "shop-clicks"), many, JSON, {}, 400, b"lacks the columns"),
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        begin = time.monotonic()
        for path, body, kind, headers, status, says in bodies:
            answer = server.ask(path, body, kind, **headers)
            assert answer[0] == status and says in answer[2], answer
            assert clients.submit(server.ask, RUN, lines[0], TSV).result()[0] == 200
        assert time.monotonic() - begin < 10
