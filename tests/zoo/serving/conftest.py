"""A server of shipped models as a process of its own, and a client."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("granian", reason="serving needs the serve extra")
WAIT = 120.0  # seconds until the models are open: the first time their files are made

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """`zoo serve` with these arguments."""

    def __init__(self, home: Path, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "zoo.cli.app", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "ZOO_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
            if found := re.search(r" at (https?://\S+)$", line):
                self.url = found[1]
                self._opened.set()
        self._opened.set()

    def ask(self, path: str, body: bytes | None = None, kind: str = "", **headers: str) -> Answer:
        """Status, headers and body of the answer; names of headers have _ for -."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if kind:
            given["content-type"] = kind
        request = urllib.request.Request(self.url + path, body, given)
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return found.status, dict(found.headers), found.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def json(self, path: str, body: bytes | None = None, kind: str = "", **headers: str) -> Any:
        """The answer, which must be a good one."""
        status, _, found = self.ask(path, body, kind, **headers)
        assert status == 200, found
        return json.loads(found)

    def workers(self) -> list[int]:
        """The processes that compute."""
        keeper = _children(self.process.pid)
        return sorted(child for parent in keeper for child in _children(parent))

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)


def _children(pid: int) -> list[int]:
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(each) for each in text.split()]


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that all servers share."""
    return tmp_path_factory.mktemp("serving") / "home"


@pytest.fixture(scope="session")
def start(home: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the tests."""
    started: list[Server] = []

    def begin(*arguments: str | Path) -> Server:
        started.append(Server(home, *arguments))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """Wide & Deep with two workers."""
    return start("wide-deep-criteo", "--workers", "2", "--max-body", "1000000")


@pytest.fixture(scope="session")
def lines() -> list[bytes]:
    """Rows as the model ships them."""
    import gzip

    import zoo

    return gzip.decompress((zoo.SHIPPED / "wide-deep-criteo" / "sample.tsv.gz").read_bytes()).splitlines()
