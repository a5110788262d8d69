"""What the tests of folding share."""

import pytest
from helpers.folded_embeddings import CACHES

from pipelines.core import machine


@pytest.fixture
def caches(monkeypatch):
    """The caches of one CPU, whatever this one has."""
    monkeypatch.setattr(machine, "caches", lambda: CACHES)
