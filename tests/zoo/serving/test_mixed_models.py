"""Models of several kinds on two workers: who asks at the same time changes no answer, and no memory but the model's own
is there twice.
"""

import concurrent.futures
import http.client
import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.serving import (
    CIFAR,
    LONG,
    MT,
    RUN,
    SENTENCES,
    TSV,
    Question,
    Server,
    at_once,
    figure,
    stopped,
    wait_until,
)
from PIL import Image

import zoo


@pytest.fixture(scope="module")
def mixed(start: Callable[..., Server]) -> Server:
    server = start("wide-deep-criteo", "multi30k-en-de", "mobilenet-v1-cifar10", "--engine", "native", "--workers", "2")
    # the process that checks native kernels in an empty cache is a child of the keeper, too, until it is idle
    wait_until(lambda: len(server.workers()) == 2)
    return server


@pytest.fixture(scope="module")
def questions(home: Path, lines: list[bytes]) -> dict[str, list[Question]]:
    """Of each model some whose answers differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(home))
        clicks, translation, images = (
            zoo.pipeline(name, "int8", "native")
            for name in ("wide-deep-criteo", "multi30k-en-de", "mobilenet-v1-cifar10")
        )
    rng, photos = np.random.default_rng(0), []
    for _ in range(16):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).resize((80, 90)).save(file, "PNG")
        photos.append(file.getvalue())
    shown = [images(photo)[0] for photo in photos]
    rows = [b"\n".join(lines[i : i + 1 + i % 3]) for i in range(16)]
    sentences = [f"{sentence[:-1]} {word}." for sentence in SENTENCES for word in ("today", "in the rain", "at night")]
    groups = {
        "rows": [Question(RUN, TSV, row, _rounded(clicks(row.split(b"\n")))) for row in rows],
        "images": [
            Question(CIFAR, "image/png", photo, [{key: result[key] for key in ("label", "probability")}])
            for photo, result in zip(photos, shown, strict=True)
        ],
        "sentences": [
            Question(MT, "text/plain", sentence.encode(), [{"translation": translation([sentence])[0]["translation"]}])
            for sentence in sentences
        ],
    }
    for group in groups.values():
        assert len({json.dumps(question.expected) for question in group}) > len(group) / 2
    return groups


def _rounded(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Probabilities as JSON has them: the shortest numbers that mean a float32."""
    return [{"probability": float(str(np.float32(result["probability"])))} for result in results]


@pytest.mark.parametrize("kind", ["rows", "images", "sentences"])
def test_clients_of_one_model_each_get_its_own_answer(
    mixed: Server, questions: dict[str, list[Question]], kind: str
) -> None:
    at_once(mixed, (questions[kind] * 3)[:40])


def test_clients_of_all_models_each_get_its_own_answer(mixed: Server, questions: dict[str, list[Question]]) -> None:
    at_once(mixed, [question for group in zip(*questions.values(), strict=False) for question in group])


def test_workers_share_what_their_keeper_opened(mixed: Server) -> None:
    for pid in mixed.workers():
        sizes = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M))
        own = sum(int(sizes[name]) for name in ("Private_Clean", "Private_Dirty"))
        assert own < 0.4 * int(sizes["Rss"]), sizes


def test_workers_are_pinned_side_by_side(mixed: Server) -> None:
    have = sorted(os.sched_getaffinity(mixed.process.pid))
    cores = [os.sched_getaffinity(pid) for pid in mixed.workers()]
    assert sorted(map(list, cores)) == sorted([have[i % len(have)]] for i in range(2))


def test_threads_hurry_unless_many_requests_are_on_their_way(mixed: Server, lines: list[bytes]) -> None:
    def policies() -> set[int]:
        threads = [
            thread for pid in (mixed.process.pid, *mixed.workers()) for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
        return {os.sched_getscheduler(int(thread.name)) for thread in threads}

    wait_until(lambda: policies() == {os.SCHED_OTHER})
    with concurrent.futures.ThreadPoolExecutor(16) as clients:
        with stopped(mixed):
            asked = [clients.submit(mixed.ask, RUN, line, TSV) for line in lines[:16]]
            wait_until(lambda: policies() == {os.SCHED_BATCH})
        assert {future.result()[0] for future in asked} == {200}
    wait_until(lambda: policies() == {os.SCHED_OTHER})


def killed(server: Server) -> None:
    """The worker that has something to do is killed, and another is ready."""
    (pid,) = server.workers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.workers() not in ([], [pid]) and figure(server, "zoo_workers") == 1)


@pytest.fixture(scope="module")
def translating(start: Callable[..., Server]) -> Server:
    return start("multi30k-en-de", "--workers", "1")


def test_a_request_whose_workers_died_twice_is_told(translating: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as client:
        asked = client.submit(translating.ask, MT, LONG, "text/plain")
        for _ in range(2):
            wait_until(lambda: figure(translating, "zoo_working_requests") == 1)
            killed(translating)
        status, headers, text = asked.result()
    assert (status, headers["retry-after"], json.loads(text)["error"]) == (503, "1", "the worker died; try again")
    assert translating.ask(MT, SENTENCES[0].encode(), "text/plain")[0] == 200


def test_a_stream_whose_worker_dies_says_so_in_its_last_line(translating: Server) -> None:
    client = http.client.HTTPConnection(*translating.url.removeprefix("http://").split(":"))
    client.request("POST", MT, LONG, {"content-type": "text/plain", "accept": "application/x-ndjson"})
    response = client.getresponse()
    first = response.readline()
    killed(translating)
    *done, last = map(json.loads, [first, *response.read().splitlines()])
    client.close()
    assert response.status == 200 and last == {"error": "the worker died; try again"}
    assert 1 <= len(done) < 1500 and all("translation" in line for line in done)
