"""Logs and caches that several tests of recommenders use."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.criteo_logs import write_synthetic

from pipelines.core import machine
from pipelines.engines import stock
from pipelines.engines.openvino.session import OpenVinoSession


@pytest.fixture(autouse=True, scope="module")
def without_openvino(request):
    """Trained models run in ONNX Runtime and the native kernels: OpenVINO takes longer to compile small graphs than they train."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.is_relative_to(Path(__file__).parent / "training"):
            patch.delitem(stock.STOCK, "openvino")
        yield


@pytest.fixture
def openvino(monkeypatch):
    """OpenVINO in a test whose file runs without it."""
    monkeypatch.setitem(stock.STOCK, "openvino", OpenVinoSession)


@pytest.fixture
def caches(monkeypatch):
    """The caches of one CPU, whatever this one has."""
    monkeypatch.setattr(machine, "caches", lambda: {"L1d": 2**15, "L2": 2**20, "L3": 2**25})


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("synthetic") / "rows.tsv")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A small log of Criteo's form."""
    from helpers.wide_deep_training import write_log  # with torch

    return write_log(tmp_path_factory.mktemp("data") / "log.tsv")
