"""Encoders of texts over the network, on tiny random models."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers.serving import JSON, Question, Server, at_once
from helpers.text_models import PAIRS, TEXTS, built

import zoo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [built(tmp_path_factory.mktemp("texts"), labels) for labels in (0, 1)]


@pytest.fixture(scope="module")
def served(start: Callable[..., Server], folders: list[Path]) -> Server:
    return start(*folders, "--workers", "1")


def ask(server: Server, name: str, value: Any) -> Any:
    return server.json(f"/v1/models/{name}:run", json.dumps(value).encode(), "application/json")["results"]


def test_vectors_are_the_models_own(served: Server, folders: list[Path]) -> None:
    expected = np.stack([result["embedding"] for result in zoo.pipeline(folders[0], engine="native")(TEXTS)])
    results = ask(served, "texts-0", {"texts": TEXTS})
    assert [result["row"] for result in results] == list(range(1, len(TEXTS) + 1))
    assert np.array_equal(np.array([result["embedding"] for result in results], np.float32), expected)
    plain = served.json("/v1/models/texts-0:run", "\n".join(TEXTS).encode(), "text/plain")["results"]
    assert plain == results


def test_scores_are_the_models_own(served: Server, folders: list[Path]) -> None:
    expected = zoo.pipeline(folders[1], engine="native")([tuple(pair) for pair in PAIRS])
    results = ask(served, "texts-1", PAIRS)
    assert [result["score"] for result in results] == pytest.approx([result["score"] for result in expected], abs=1e-7)
    body = json.dumps(PAIRS).encode()
    status, _, text = served.ask("/v1/models/texts-1:run", body, "application/json", accept="text/csv")
    assert status == 200 and [float(row["score"]) for row in csv.DictReader(text.decode().splitlines())] == [
        result["score"] for result in results
    ]
    assert served.ask("/v1/models/texts-0:run", b"a text", "text/plain", accept="text/csv")[0] == 400


def test_a_text_is_never_a_files_name(served: Server, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("one\ntwo\nthree\n")
    assert len(ask(served, "texts-0", [str(file)])) == 1


@pytest.mark.parametrize(
    ("name", "body"),
    [("texts-0", [""]), ("texts-0", {"texts": 3}), ("texts-0", []), ("texts-1", ["alone"]), ("texts-0", [["a", "b"]])],
)
def test_what_is_wrong_is_said(served: Server, name: str, body: Any) -> None:
    status, _, answer = served.ask(f"/v1/models/{name}:run", json.dumps(body).encode(), "application/json")
    assert status == 400
    assert "texts" in json.loads(answer)["error"] or "text 1" in json.loads(answer)["error"]


@pytest.mark.parametrize("shapes", [([1, 5], [1, 3]), ([1, 3], [1, 5]), ([1, 0], [1, 0]), ([2, 4], [1, 4])])
def test_tensors_of_shapes_that_do_not_fit_are_wrong(served: Server, shapes: tuple[list[int], list[int]]) -> None:
    tensors = [
        {"name": name, "shape": shape, "datatype": "INT64", "data": [1] * math.prod(shape)}
        for name, shape in zip(("input_ids", "attention_mask"), shapes, strict=True)
    ]
    status, _, answer = served.ask("/v2/models/texts-0/infer", json.dumps({"inputs": tensors}).encode(), JSON)
    assert status == 400 and "expected" in json.loads(answer)["error"]


def test_clients_at_once_each_get_the_answer_to_their_own_text(served: Server, folders: list[Path]) -> None:
    encoder, scorer = (zoo.pipeline(folder, engine="native") for folder in folders)
    texts = [f"{text} {word}" for text in TEXTS for word in ("a", "zoo", "the cat sat", "b c d")]
    questions = []
    for text in texts:
        body, pair = json.dumps([text]).encode(), json.dumps([[text, TEXTS[0]]]).encode()
        questions.append(Question("/v1/models/texts-0:run", JSON, body, [_plain(encoder([text])[0])]))
        questions.append(Question("/v1/models/texts-1:run", JSON, pair, [_plain(scorer([(text, TEXTS[0])])[0])]))
    at_once(served, questions)


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """A result of the model alone as JSON has it."""
    decoded: dict[str, Any] = orjson.loads(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY))
    return decoded
