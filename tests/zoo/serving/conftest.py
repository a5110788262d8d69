"""A server of shipped models as a process of its own, and a client."""

import subprocess
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

    def begin(*arguments: str | Path, files: int = 0) -> Server:
        started.append(Server(home, *arguments, files=files))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a TLS certificate for this machine and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return cert, key
