"""`zoo serve` as users run it."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

import zoo

from .conftest import Server

RUN, TSV = "/v1/models/wide-deep-criteo:run", "text/tab-separated-values"


@pytest.fixture(scope="module")
def probabilities(home: Path, lines: list[bytes]) -> list[float]:
    """Of the first rows, one by one, by the model alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(home))
        model = zoo.pipeline("wide-deep-criteo", engine="native")
        return [float(str(model.predict(model.preprocess([line]))["probability"][0, 0])) for line in lines[:64]]


def test_clients_at_once_each_get_what_the_model_alone_gives(
    server: Server, lines: list[bytes], probabilities: list[float]
) -> None:
    def ask(i: int) -> Any:
        return server.json(RUN, lines[i], TSV)["results"]

    with concurrent.futures.ThreadPoolExecutor(64) as clients:
        found = list(clients.map(ask, [*range(64)] * 8))
    assert found == [[{"row": 0, "probability": each}] for each in probabilities * 8]
    text = server.ask("/metrics")[2].decode()
    alone = float(
        next(
            line.split()[-1]
            for line in text.splitlines()
            if "zoo_batch_size_bucket" in line and '"1.0"' in line and "run" in line
        )
    )
    assert alone < 512  # some went together
