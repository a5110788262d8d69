"""Logs and caches that several tests of recommenders use."""

from __future__ import annotations

import pytest
from helpers.criteo_logs import write_synthetic

from pipelines.core import machine


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
