"""Labels and entities over the network, on tiny random models."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers import multi_vector_models, text_models
from helpers.serving import Server
from helpers.text_models import TEXTS

import zoo

TASKS = {
    "labels": "AutoModelForSequenceClassification",
    "topics": "AutoModelForSequenceClassification",
    "entities": "AutoModelForTokenClassification",
    "weights": "AutoModelForMaskedLM",
    "answers": "AutoModelForQuestionAnswering",
}
FORMATS = {"weights": "sparse-encoder"}
NAMES = {0: "O", 1: "B-PER", 2: "I-PER"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("tasks")
    (path / "texts.txt").write_text("\n".join(TEXTS * 30))
    (path / "pairs.txt").write_text("\n".join(f"{text}\t{TEXTS[2]}" for text in TEXTS * 30))
    for name, task in TASKS.items():
        more = {"problem_type": "multi_label_classification"} if name == "topics" else {}
        labels: dict[str, Any] = {} if name == "answers" else {"id2label": NAMES}
        text_models.write_task(path / f"theirs-{name}", task, **labels, **more)
        zoo.import_model(path / f"theirs-{name}", path / name, format=FORMATS.get(name))
        zoo.calibrate(path / name, str(path / ("pairs.txt" if name == "answers" else "texts.txt")), samples=16)
        zoo.build(path / name)
    multi_vector_models.pylate(path / "theirs-vectors")
    zoo.import_model(path / "theirs-vectors", path / "vectors")
    zoo.calibrate(path / "vectors", str(path / "texts.txt"), samples=16)
    zoo.build(path / "vectors")
    return {name: path / name for name in (*TASKS, "vectors")}


@pytest.fixture(scope="module")
def served(start: Callable[..., Server], folders: dict[str, Path]) -> Server:
    return start(*folders.values(), "--workers", "1")


def ask(server: Server, name: str, value: Any) -> Any:
    return server.json(f"/v1/models/{name}:run", json.dumps(value).encode(), "application/json")["results"]


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [{**line, "score": 0} for line in found] == [{**line, "score": 0} for line in expected]
    scores = [line["score"] for line in expected]
    assert [line["score"] for line in found] == pytest.approx(scores, abs=1e-6)


def test_labels_are_the_models_own(served: Server, folders: dict[str, Path]) -> None:
    ours = zoo.pipeline(folders["labels"])
    expected = [{"row": i, **label} for i, label in enumerate(ours(TEXTS), 1)]
    close(ask(served, "labels", TEXTS), expected)
    close(served.json("/v1/models/labels:run", "\n".join(TEXTS).encode(), "text/plain")["results"], expected)
    ranked = [{"row": i, **label} for i, labels in enumerate(ours(TEXTS, top_k=2), 1) for label in labels]
    close(ask(served, "labels", {"texts": TEXTS, "top_k": 2}), ranked)
    pairs = [(TEXTS[0], TEXTS[1])]
    close(ask(served, "labels", pairs), [{"row": 1, **ours(pairs)[0]}])
    body = json.dumps(TEXTS).encode()
    status, _, text = served.ask("/v1/models/labels:run", body, "application/json", accept="text/csv")
    assert status == 200
    assert [row["label"] for row in csv.DictReader(text.decode().splitlines())] == [
        label["label"] for label in expected
    ]


@pytest.mark.parametrize("name", ["labels", "topics"])
def test_predict_has_the_scores_of_the_model(served: Server, folders: dict[str, Path], name: str) -> None:
    ours = zoo.pipeline(folders[name])(TEXTS, top_k=None)
    body = json.dumps({"inputs": [[text] for text in TEXTS]}).encode()
    for labels, expected in zip(served.json(f"/v1/models/{name}/predict", body, "application/json"), ours, strict=True):
        close([{"label": row["label"], "score": row["score"]} for row in labels], expected)
    one = served.json(f"/v1/models/{name}", json.dumps({"inputs": TEXTS[0]}).encode(), "application/json")
    close([{"label": row["label"], "score": row["score"]} for row in one], ours[0])
    assert set(served.json(f"/v1/models/{name}/info")["model_type"]) == {"classifier"}


def test_entities_are_the_models_own(served: Server, folders: dict[str, Path]) -> None:
    ours = zoo.pipeline(folders["entities"])
    expected = [
        {"row": i, **entity}
        for i, entities in enumerate(ours(TEXTS, aggregation_strategy="first"), 1)
        for entity in entities
    ]
    close(ask(served, "entities", {"texts": TEXTS, "aggregation_strategy": "first"}), expected)
    long = " ".join(TEXTS * 6)
    options = {"aggregation_strategy": "simple", "stride": 4}
    windows = [{"row": 2, **entity} for entity in ours(long, **options)[0]]
    lines = ask(served, "entities", {"texts": [TEXTS[0], long], **options})
    close([line for line in lines if line["row"] == 2], windows)


def test_answers_are_the_models_own(served: Server, folders: dict[str, Path]) -> None:
    pair = (TEXTS[1], TEXTS[2])
    expected = [{"row": 1, **zoo.pipeline(folders["answers"])([pair])[0]}]
    close(ask(served, "answers", [pair]), expected)
    close(served.json("/v1/models/answers:run", "\t".join(pair).encode(), "text/plain")["results"], expected)


def test_weights_of_tokens_are_the_models_own(served: Server, folders: dict[str, Path]) -> None:
    ours = zoo.pipeline(folders["weights"])(TEXTS)
    expected = [dict(zip(row["indices"].tolist(), row["values"].tolist(), strict=True)) for row in ours]
    assert all(expected)
    body = json.dumps({"inputs": TEXTS}).encode()
    for path in ("/embed_sparse", "/v1/models/weights"):
        weights = served.json(path, body, "application/json")
        assert [{token["index"]: token["value"] for token in row} for row in weights] == [
            pytest.approx(row, abs=1e-6) for row in expected
        ]
    (one,) = served.json("/embed_sparse", json.dumps({"inputs": TEXTS[0]}).encode(), "application/json")
    assert [token["index"] for token in one] == sorted(expected[0])
    assert served.json("/v1/models/weights/info")["model_type"] == {"embedding": {"pooling": "splade"}}
    status, _, text = served.ask("/embed_sparse", b'{"inputs": ["a"], "truncate": 3}', "application/json")
    assert status == 422 and json.loads(text)["error_type"] == "Validation"


def test_invalid_texts_and_options_are_said(served: Server) -> None:
    labels = ask(served, "labels", {"texts": ["the cat", " "], "on_error": "skip"})
    assert "label" in labels[0] and labels[1]["error"] == "is empty"
    for name, body, message in (
        ("labels", [" "], "text 1 is empty"),
        ("labels", {"texts": ["a"], "stride": 2}, "stride"),
        ("labels", {"texts": ["a"], "top_k": "x"}, "found top_k 'x'"),
        ("entities", {"texts": ["a"], "aggregation_strategy": "best"}, "expected none, simple, first"),
        ("entities", {"texts": [3]}, "text 1 is 3"),
        ("entities", {"texts": ["a"], "ignore_labels": 3}, "found ignore_labels 3; expected a list"),
        ("answers", {"texts": [["a", "b"]], "max_answer_len": "x"}, "found max_answer_len 'x'"),
        ("labels", {"texts": ["a"], "self": 1}, "the body has the key 'self'; expected texts, "),
    ):
        status, _, text = served.ask(f"/v1/models/{name}:run", json.dumps(body).encode(), "application/json")
        assert status == 400 and message in json.loads(text)["error"], body


def test_vectors_of_tokens_and_rankings_by_them(served: Server, folders: dict[str, Path]) -> None:
    ours = zoo.pipeline(folders["vectors"])

    def post(path: str, value: Any) -> Any:
        return served.json(path, json.dumps(value).encode(), "application/json")

    for role, encode in (("document", ours.encode_document), ("query", ours.encode_query)):
        answer = post("/embed_all", {"inputs": TEXTS, "prompt_name": role})
        assert [len(rows) for rows in answer] == [len(rows) for rows in encode(TEXTS)]
        assert np.allclose(answer[2], encode(TEXTS)[2], atol=1e-6)
    ranked = ours.rank("the cat", TEXTS)
    answer = post("/v1/models/vectors/rerank", {"query": "the cat", "texts": TEXTS, "return_text": True})
    assert [row["index"] for row in answer] == [row["corpus_id"] for row in ranked]
    assert [row["score"] for row in answer] == pytest.approx([row["score"] for row in ranked], abs=1e-5)
    assert answer[0]["text"] == TEXTS[answer[0]["index"]]
    answer = post("/v1/rerank", {"model": "vectors", "query": "the cat", "documents": TEXTS, "top_n": 2})["results"]
    assert [row["index"] for row in answer] == [row["corpus_id"] for row in ranked[:2]]
    scored = ask(served, "vectors", {"texts": TEXTS, "query": "the cat"})
    assert [row["score"] for row in scored] == pytest.approx(
        [row["score"] for row in ours(TEXTS, query="the cat")], abs=1e-5
    )
    status, _, body = served.ask("/embed_all", json.dumps({"inputs": [[2, 5, 3]]}).encode(), "application/json")
    assert status == 422 and b"expected texts" in body
