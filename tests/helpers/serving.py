"""A server of models as a process of its own, a client of it, and requests."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zoo

WAIT = 240.0  # seconds at most, also on a busy core: the first time the files of models are made
CLIENTS = 64
TSV, JSON = "text/tab-separated-values", "application/json"
RUN, MT, SHOP, CIFAR = (
    f"/v1/models/{name}:run" for name in ("wide-deep-criteo", "multi30k-en-de", "shop-clicks", "mobilenet-v1-cifar10")
)
INFER = "/v2/models/wide-deep-criteo/infer"
SENTENCES = [
    "A man in a red jacket is riding a bicycle down the street.",
    "Two children are playing with a dog.",
    "A woman sits at a table and reads a newspaper.",
    "People wait for the train.",
    "An old man is selling fruit at the market.",
]
LONG = "\n".join(f"{SENTENCES[i % 5]} {i}" for i in range(1500)).encode()

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """`zoo serve` with these arguments, and a limit of open files."""

    def __init__(self, home: Path, *arguments: str | Path, files: int = 0) -> None:
        command = [sys.executable, "-m", "zoo.cli.app", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "ZOO_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None,
        )
        self.said: list[str] = []
        self.url = ""
        self._opened = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._opened.wait(WAIT) or not self.url:
            self.process.kill()
            raise AssertionError(f"the server does not answer: {self.said}")

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            if match := re.search(r" at (https?://\S+)$", line):
                self.url = match[1]
                self._opened.set()
        self._opened.set()

    def ask(self, path: str, body: bytes | None = None, kind: str = "", **headers: str) -> Answer:
        """Status, headers and body of the answer; names of headers have _ for -."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if kind:
            fields["content-type"] = kind
        request = urllib.request.Request(self.url + path, body, fields)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def json(self, path: str, body: bytes | None = None, kind: str = "", **headers: str) -> Any:
        """The answer, which must be a good one."""
        status, _, reply = self.ask(path, body, kind, **headers)
        assert status == 200, reply
        return json.loads(reply)

    def workers(self) -> list[int]:
        """The processes that compute; not the one that tries OpenVINO out, which may outlast the loading."""
        children = [child for keeper in _children(self.process.pid) for child in _children(keeper)]
        return sorted(child for child in children if _command(child) == _command(self.process.pid))

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)


def own_folder(folder: Path, lines: list[bytes]) -> Path:
    """A model folder named mine, built from the shipped Wide & Deep."""
    source = zoo.load("wide-deep-criteo").path
    folder.mkdir()
    card = json.loads((source / "card.json").read_text())
    names = ("fp16.onnx", "calibration.json")
    card |= {"name": "mine", "files": {name: card["files"][name] for name in names}}
    for name in names:
        shutil.copy(source / name, folder)
    (folder / "card.json").write_text(json.dumps(card))
    (folder / "sample.tsv.gz").write_bytes(gzip.compress(b"\n".join(lines[:100])))
    zoo.build(folder)
    return folder


def _children(pid: int) -> list[int]:
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in text.split()]


def _command(pid: int) -> bytes:
    """The command line of a process; empty for one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def wait_until(true: Callable[[], Any], seconds: float = WAIT) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[list[int]]:
    """The workers, which do nothing meanwhile."""
    workers = server.workers()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield workers
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def figure(server: Server, name: str) -> float:
    """A figure of /metrics, by the beginning of its line."""
    for line in server.ask("/metrics")[2].decode().splitlines():
        if line.startswith(name):
            return float(line.split()[-1])
    return 0.0


def talk(server: Server, data: bytes, seconds: float = 10.0) -> bytes:
    """What comes back for some bytes until the connection is closed, or nothing more comes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.settimeout(seconds)
        client.sendall(data)
        parts = []
        with contextlib.suppress(TimeoutError):
            while part := client.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)


class Question(NamedTuple):
    """A request and what the model alone makes of it."""

    path: str
    kind: str
    body: bytes
    expected: list[dict[str, Any]]


def at_once(server: Server, questions: list[Question], key: str = "results") -> None:
    """Each gets its own answer, where 64 clients ask before any worker goes on. key: of the rows in an answer."""

    def ask(each: Question) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = server.json(each.path, each.body, each.kind)[key]
        return answers

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        with stopped(server):
            asked = [clients.submit(ask, question) for question in questions * 3]
            wait_until(lambda: figure(server, "zoo_queue_requests") + figure(server, "zoo_working_requests") == CLIENTS)
        for question, future in zip(questions * 3, asked, strict=True):
            for answer, expected in zip(future.result(), question.expected, strict=True):
                assert {key: answer[key] for key in expected} == expected
