"""A server of shipped models as a process of its own, and a client."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.serving import Server

pytest.importorskip("granian", reason="serving needs the serve extra")


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
