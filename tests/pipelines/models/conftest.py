"""What the tests of files from servers share, and a folder of the model of three lines."""

import threading

import numpy as np
import pytest
from helpers.model_server import Server
from helpers.three_lines import entry, samples

from pipelines.core.files import write_json
from pipelines.models import transfer
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import Card
from pipelines.models.record import SAMPLES


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


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "seed.txt").write_text("1")
    np.savez(path / SAMPLES, x=samples())
    card = Card("mine", "fake", "of a test", (), {"preprocessing": {"mean": 0}})
    write_json(path / "card.json", card.to_json())
    return ModelFolder(path, card, entry())
