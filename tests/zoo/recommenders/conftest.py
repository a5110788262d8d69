"""What the tests of folding share."""

import pytest

from pipelines.core import machine

CACHES = {"L1d": 2**15, "L2": 2**20, "L3": 2**25}


@pytest.fixture
def caches(monkeypatch):
    """The caches of one CPU, whatever this one has."""
    monkeypatch.setattr(machine, "caches", lambda: CACHES)
