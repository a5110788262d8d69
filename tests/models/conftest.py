"""What the tests of files from servers share."""

import threading

import pytest
from model_server import Server

from pipelines.models import transfer


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def own_network(monkeypatch, tmp_path):
    for name in ("ZOO_OFFLINE", "ZOO_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(transfer, "BACKOFF", 0.001)
    monkeypatch.setattr(transfer, "ATTEMPTS", 4)
    monkeypatch.setattr(transfer, "READ_TIMEOUT", 5.0)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.bin"


@pytest.fixture
def shipped(tmp_path):
    return tmp_path / "shipped"
