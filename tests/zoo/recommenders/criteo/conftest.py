"""What several tests of rows and of training share."""

from __future__ import annotations

import pytest
from helpers.criteo_logs import synthesize


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """40,000 rows: ten megabytes, several blocks."""
    path = tmp_path_factory.mktemp("synthetic") / "rows.tsv"
    with path.open("wb") as file:
        synthesize().write(file, 40_000, 5)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    from helpers.wide_deep_training import write_log  # with torch

    return write_log(tmp_path_factory.mktemp("data") / "log.tsv")
