"""OpenAI's, text-embeddings-inference's and Cohere's requests to tiny random models, by their wire formats."""

import base64
import json
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
from zoo.serving.workers.channel import Job
from zoo.serving.workers.model_loader import ServedModel

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [built(tmp_path_factory.mktemp("texts"), labels) for labels in (0, 1, 3)]


@pytest.fixture(scope="module")
def served(start: Callable[..., Server], folders: list[Path]) -> Server:
    return start(*folders, "--workers", "1")


@pytest.fixture(scope="module")
def vectors(folders: list[Path]) -> np.ndarray:
    """The model's own embeddings of TEXTS."""
    return np.stack([row["embedding"] for row in zoo.pipeline(folders[0], engine="native")(TEXTS)])


@pytest.fixture(scope="module")
def logits(folders: list[Path]) -> np.ndarray:
    """The model's own logits of PAIRS."""
    pipeline = zoo.pipeline(folders[1], engine="native")
    return pipeline.compute_texts([tuple(pair) for pair in PAIRS])[:, 0]


def post(server: Server, path: str, **body: Any) -> Any:
    return server.json(path, json.dumps(body).encode(), JSON)


def refused(server: Server, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, answer = server.ask(path, data, JSON, **headers)
    return status, json.loads(answer)


# ---------------------------------------------------------------------------------------------------------------- OpenAI


def test_openai_embeddings_are_the_models_own(served: Server, vectors: np.ndarray) -> None:
    answer = post(served, EMBEDDINGS, input=TEXTS, model="text-embedding-3-small", user="me", encoding_format="float")
    assert answer["object"] == "list" and answer["model"] == "texts-0"
    assert [row["index"] for row in answer["data"]] == list(range(len(TEXTS)))
    assert {row["object"] for row in answer["data"]} == {"embedding"}
    assert np.array_equal(np.array([row["embedding"] for row in answer["data"]], np.float32), vectors)
    single = post(served, EMBEDDINGS, input=TEXTS[0], model="texts-0")
    assert single["data"] == answer["data"][:1] and single["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_openai_base64_dimensions_and_dtypes(served: Server, vectors: np.ndarray) -> None:
    def read(dtype: Any, **options: Any) -> np.ndarray:
        answer = post(served, EMBEDDINGS, input=TEXTS, model="m", encoding_format="base64", **options)
        return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), dtype) for row in answer["data"]])

    assert np.array_equal(read("<f4"), vectors)
    short = read("<f4", dimensions=8)
    cut = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    assert short.shape == (len(TEXTS), 8) and np.abs(short - cut).max() < 1e-6
    assert np.array_equal(read(np.uint8, output_dtype="ubinary"), np.packbits(vectors > 0, axis=1))
    assert np.array_equal(
        read(np.int8, output_dtype="binary"), (np.packbits(vectors > 0, axis=1).astype(int) - 128).astype(np.int8)
    )
    int8 = read(np.int8, output_dtype="int8")
    scaled = np.rint(127 * vectors / np.abs(vectors).max(axis=1, keepdims=True)).astype(np.int8)
    assert np.array_equal(int8, scaled)
    assert np.array_equal(read(np.uint8, output_dtype="uint8"), (int8.astype(int) + 128).astype(np.uint8))
    listed = post(served, EMBEDDINGS, input=TEXTS, model="m", output_dtype="int8")
    assert [row["embedding"] for row in listed["data"]] == int8.tolist()


def test_openai_tokens_are_those_of_the_model(served: Server, vectors: np.ndarray) -> None:
    tokens = post(served, "/v1/models/texts-0/tokenize", inputs=TEXTS)
    ids = [[token["id"] for token in row] for row in tokens]
    answer = post(served, EMBEDDINGS, input=ids, model="m")
    assert np.array_equal(np.array([row["embedding"] for row in answer["data"]], np.float32), vectors)
    assert answer["usage"]["total_tokens"] == sum(map(len, ids))
    assert post(served, EMBEDDINGS, input=ids[1], model="m")["data"][0]["embedding"] == answer["data"][1]["embedding"]
    mixed = post(served, "/embed", inputs=[TEXTS[0], ids[1], TEXTS[2]])
    assert np.array_equal(np.array(mixed, np.float32), vectors[:3])
    # what LangChain's OpenAIEmbeddings sends: tokens of cl100k_base, in lists
    for other in ([[1820, 8415]], [1820, 8415], [ids[1][1:-1]], [[ids[0][0], 64, ids[0][-1]]], [[]]):
        status, error = refused(served, EMBEDDINGS, {"input": other, "model": "m"})
        assert status == 400, other
        assert "check_embedding_ctx_length=False" in error["error"]["message"] or other == [[]]


@pytest.mark.parametrize(
    "change",
    [
        {"input": ""},
        {"input": []},
        {"input": ["a", ""]},
        {"input": {"a": 1}},
        {"input": [1.5]},
        {"input": None},
        {"dimensions": 0},
        {"dimensions": 33},
        {"encoding_format": "hex"},
        {"output_dtype": "int4"},
        {"dimension": 8},
        {"model": "texts-1"},
        {"truncate": "yes"},
        {"input_type": "audio"},
        {"input": "a " * 200, "truncate": False},
    ],
)
def test_openai_errors(served: Server, change: dict[str, Any]) -> None:
    status, answer = refused(served, EMBEDDINGS, {"input": "a", "model": "m", **change})
    assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error" and "expected" in answer["error"]["message"]


def test_truncated_inputs_are_named(served: Server) -> None:
    answer = post(served, EMBEDDINGS, input=["a", "a " * 200], model="m")
    assert answer["truncated"] == [1] and answer["usage"]["total_tokens"] == 3 + 80


def test_openai_models(served: Server) -> None:
    answer = served.json("/v1/models")
    assert answer["object"] == "list" and [model["id"] for model in answer["data"]] == ["texts-0", "texts-1", "texts-3"]
    assert [model["name"] for model in answer["models"]] == ["texts-0", "texts-1", "texts-3"]
    one = served.json("/v1/models/texts-0")
    assert one["id"] == one["name"] == "texts-0" and one["object"] == "model" and one["owned_by"] == "int8-zoo"


# ------------------------------------------------------------------------------------------- text-embeddings-inference


def test_tei_embed(served: Server, vectors: np.ndarray) -> None:
    embeddings = np.array(post(served, "/embed", inputs=TEXTS, truncate=True, unknown=1), np.float32)
    assert np.array_equal(embeddings, vectors)
    assert np.array_equal(np.array(post(served, "/v1/models/texts-0", inputs=TEXTS[0]), np.float32), vectors[:1])
    short = np.array(post(served, "/embed", inputs=TEXTS, dimensions=4, normalize=False), np.float32)
    assert np.array_equal(short, vectors[:, :4])
    long = "a b " * 100
    ends = [post(served, "/embed", inputs=long + "z", truncation_direction=end) for end in ("left", "Right")]
    assert ends[0] != ends[1] and ends[1] == post(served, "/embed", inputs=long)
    similarity = post(served, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})
    assert similarity == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)


def test_tei_rerank_and_predict(served: Server, folders: list[Path], logits: np.ndarray) -> None:
    body = {"query": "the cat", "texts": [pair[0] for pair in PAIRS]}
    pipeline = zoo.pipeline(folders[1], engine="native")
    scores = pipeline.compute_texts([(body["query"], text) for text in body["texts"]])[:, 0]
    raw = post(served, "/rerank", **body, raw_scores=True)
    assert [row["index"] for row in raw] == np.argsort(-scores, kind="stable").tolist()
    assert {row["index"]: np.float32(row["score"]) for row in raw} == dict(enumerate(scores))
    ranking = post(served, "/rerank", **body, return_text=True)
    for row in ranking:
        assert row["text"] == body["texts"][row["index"]]
        assert row["score"] == pytest.approx(1 / (1 + np.exp(-scores[row["index"]])), abs=1e-6)
    one = post(served, "/v1/models/texts-1/predict", inputs=PAIRS[0], raw_scores=True)
    assert one == [{"score": pytest.approx(logits[0], abs=1e-6), "label": "LABEL_0"}]
    many = post(served, "/v1/models/texts-1/predict", inputs=[PAIRS[1], ["alone"]], raw_scores=True)
    assert many[0][0]["score"] == pytest.approx(logits[1], abs=1e-6) and len(many) == 2
    labels = post(served, "/v1/models/texts-3/predict", inputs=PAIRS[0])
    assert sum(row["score"] for row in labels) == pytest.approx(1, abs=1e-6) and len(labels) == 3
    assert [row["score"] for row in labels] == sorted((row["score"] for row in labels), reverse=True)


def test_tei_tokenize_decode_and_info(served: Server) -> None:
    tokens = post(served, "/v1/models/texts-0/tokenize", inputs="é the, cat")[0]
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens[2] == {"id": tokens[2]["id"], "text": "the", "special": False, "start": 3, "stop": 6}  # in bytes
    bare = post(served, "/v1/models/texts-0/tokenize", inputs=["the cat"], add_special_tokens=False)
    ids = [token["id"] for token in bare[0]]
    assert post(served, "/v1/models/texts-0/decode", ids=ids) == ["the cat"]
    assert post(served, "/v1/models/texts-0/decode", ids=[[2, *ids, 3]], skip_special_tokens=False) == [
        "[CLS] the cat [SEP]"
    ]
    info = served.json("/v1/models/texts-0/info")
    assert info["model_id"] == "texts-0" and info["max_input_length"] == 80 and info["auto_truncate"]
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert served.json("/v1/models/texts-1/info")["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}
    assert served.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "Validation"),
        ("/embed", {"inputs": "a " * 200, "truncate": False}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 4097}, 413, "Validation"),
        ("/embed", [1], 422, "Validation"),
        ("/embed", b"{", 422, "Validation"),
        ("/embed_sparse", {"inputs": "a"}, 424, "Backend"),
        ("/embed_all", {"inputs": "a"}, 424, "Backend"),
        ("/v1/models/texts-0/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend"),
        ("/v1/models/texts-3/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
        ("/rerank", {"texts": ["a"]}, 422, "Validation"),
        ("/predict", {"inputs": "a"}, 422, "Validation"),  # of two models
        ("/v1/models/texts-3/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation"),
        ("/v1/models/texts-3/predict", {"inputs": []}, 400, "Empty"),
        ("/tokenize", {"inputs": "a"}, 422, "Validation"),
        ("/v1/models/texts-0/tokenize", {"inputs": "a" * 20_001}, 422, "Validation"),
        ("/v1/models/texts-0/decode", {"ids": [64]}, 422, "Validation"),
        ("/v1/models/texts-0/decode", {"ids": [-1]}, 422, "Validation"),
        ("/", {"inputs": "a"}, 422, "Validation"),
    ],
)
def test_tei_errors(served: Server, path: str, body: Any, status: int, kind: str) -> None:
    code, error = refused(served, path, body)
    assert code == status, error
    assert set(error) == {"error", "error_type"} and error["error_type"] == kind


def test_a_long_query_is_not_tokenized_for_every_document(served: Server) -> None:
    body = {"query": "a" * 3000, "documents": ["b"] * 4000}
    status, error = refused(served, "/v1/rerank", body)
    assert status == 413 and "bytes of text" in error["message"]
    texts, prompt = ["a"] * 4000, "b " * 1000
    assert refused(served, EMBEDDINGS, {"input": texts, "model": "m", "prompt": prompt})[0] == 413
    assert refused(served, "/v1/models/texts-0:run", {"texts": texts, "prompt": prompt})[0] == 413


# ------------------------------------------------------------------------------------------------------ Cohere and Jina


def test_cohere_rerank(served: Server) -> None:
    texts = [pair[0] for pair in PAIRS]
    plain = {row["index"]: row["score"] for row in post(served, "/rerank", query="the cat", texts=texts)}
    answer = post(served, "/v2/rerank", model="rerank-v3.5", query="the cat", documents=texts, top_n=2)
    assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == list(plain.items())[:2]
    assert (
        answer["meta"]["billed_units"] == {"search_units": 1} and answer["id"] and answer["usage"]["total_tokens"] > 0
    )
    documents = [{"text": text} for text in texts]
    jina = post(served, "/v1/rerank", query="the cat", documents=documents, return_documents=True, max_chunks_per_doc=3)
    assert [row["document"]["text"] for row in jina["results"]] == [texts[i] for i in plain]
    for body in (
        {"documents": texts},
        {"query": "a", "documents": []},
        {"query": "a", "documents": [1]},
        {"query": "a", "documents": texts, "top_n": 0},
    ):
        status, error = refused(served, "/v1/rerank", body)
        assert status == 400 and "expected" in error["message"]


def test_cohere_embed(served: Server, vectors: np.ndarray) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "m", "texts": TEXTS, "input_type": "search_query"}
    answer = post(served, "/v2/embed", **body, embedding_types=kinds)
    assert list(answer["embeddings"]) == kinds and answer["response_type"] == "embeddings_by_type"
    assert np.array_equal(np.array(answer["embeddings"]["float"], np.float32), vectors)
    assert answer["embeddings"]["ubinary"] == np.packbits(vectors > 0, axis=1).tolist()
    assert base64.b64decode(answer["embeddings"]["base64"][0]) == vectors[0].tobytes()
    assert list(post(served, "/v2/embed", **body)["embeddings"]) == ["float"]
    first = post(served, "/v1/embed", **body)
    assert np.array_equal(np.array(first["embeddings"], np.float32), vectors)
    assert first["response_type"] == "embeddings_floats"
    assert refused(served, "/v2/embed", {**body, "embedding_types": ["int4"]})[0] == 400


# ------------------------------------------------------------------------------------------------- models and requests


def test_one_model_is_meant_by_paths_without_a_name(start: Callable[..., Server], folders: list[Path]) -> None:
    server = start(folders[1], "--workers", "1")
    assert post(server, "/", query="a", texts=["b", "c"]) == post(server, "/rerank", query="a", texts=["b", "c"])
    assert server.json("/info")["model_type"]["reranker"]
    status, error = refused(server, EMBEDDINGS, {"input": "a", "model": "m"})
    assert status == 404 and error["error"]["code"] == "model_not_found"
    assert refused(server, "/embed", {"inputs": "a"})[0] == 424
    assert server.ask("/")[0] == 200  # the page
    server.end()


def test_several_models_are_named_in_the_body(start: Callable[..., Server], folders: list[Path]) -> None:
    server = start(folders[0], f"{folders[0]}@fp32", "--workers", "1")
    both = [post(server, EMBEDDINGS, input="the cat", model=name) for name in ("texts-0", "texts-0@fp32")]
    assert [answer["model"] for answer in both] == ["texts-0", "texts-0@fp32"] and both[0]["data"] != both[1]["data"]
    status, error = refused(server, EMBEDDINGS, {"input": "a", "model": "m"})
    assert status == 404 and error["error"]["code"] == "model_not_found" and "texts-0@fp32" in error["error"]["message"]
    assert refused(server, EMBEDDINGS, {"input": "a"})[0] == 400
    assert refused(server, EMBEDDINGS, b"[")[0] == 400
    assert refused(server, EMBEDDINGS, b'{"input": "a", "model": "texts-0"')[0] == 400
    assert refused(server, EMBEDDINGS, b'{"model": "texts-0", "input": "a", "model": "m"}')[0] == 400
    quoted = post(server, EMBEDDINGS, input='a "model": "m"', model="texts-0@fp32")  # a text that looks like the field
    assert quoted["model"] == "texts-0@fp32" and quoted["usage"]["total_tokens"] > 5
    assert post(server, "/embed", inputs="the cat", model="texts-0") == post(
        server, "/v1/models/texts-0/embed", inputs="the cat"
    )
    assert refused(server, "/embed", {"inputs": "a"})[0] == 422
    server.end()


def test_keys_and_limits_have_the_apis_errors(
    start: Callable[..., Server], folders: list[Path], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    server = start(*folders[:2], "--workers", "1", "--api-key-file", keys, "--max-body", "10000")
    body = {"input": "a", "model": "m"}
    status, error = refused(server, EMBEDDINGS, body)
    assert status == 401 and error["error"]["code"] == "invalid_api_key"
    assert refused(server, "/", {"inputs": "a"})[0] == 401  # GET / is the page, without a key
    assert refused(server, "/rerank", {"query": "a", "texts": ["b"]})[0] == 401
    assert server.ask("/health")[0] == 200 and server.ask("/v1/models")[0] == 401 and server.ask("/info")[0] == 401
    key = {"authorization": "Bearer a-key-of-some-length"}
    assert server.ask(EMBEDDINGS, json.dumps(body).encode(), JSON, **key)[0] == 200
    status, error = refused(server, EMBEDDINGS, {"input": "a" * 20_000}, **key)
    assert status == 413 and error["error"]["type"] == "invalid_request_error"
    status, error = refused(server, "/embed", {"inputs": "a" * 20_000}, **key)
    assert status == 413 and error["error_type"] == "Validation"
    assert refused(server, "/v1/rerank", {"query": "a" * 20_000}, **key)[0] == 413
    server.end()


def test_clients_at_once_each_get_the_answer_to_their_own_text(served: Server, folders: list[Path]) -> None:
    encoder = zoo.pipeline(folders[0], engine="native")
    questions = []
    for text in [f"{text} {word}" for text in TEXTS for word in ("a", "zoo", "the cat sat " * 9, "b c d", "e f")]:
        vector = orjson.loads(orjson.dumps(encoder([text])[0]["embedding"], option=orjson.OPT_SERIALIZE_NUMPY))
        body = json.dumps({"input": text, "model": "m"}).encode()
        questions.append(Question(EMBEDDINGS, JSON, body, [{"index": 0, "embedding": vector}]))
    at_once(served, questions, "data")
    metrics = served.ask("/metrics")[2].decode()
    assert 'verb="infer"' in metrics and 'verb="rank"' not in metrics  # only verbs of the model
    sizes = {
        kind: sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith(f"zoo_batch_size_{kind}{{") and 'verb="openai.embeddings"' in line
        )
        for kind in ("sum", "count")
    }
    assert sizes["sum"] > 4 * sizes["count"]  # most requests are computed together


def test_requests_tokenized_together_have_the_responses_of_requests_alone(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = ServedModel("ours", str(folders[0]), engine="native").handler()
    changes: list[dict[str, Any]] = [
        {},
        {"input": TEXTS},
        {"input": ["cat " * 500, "dog"]},
        {"encoding_format": "base64"},
        {"dimensions": 2, "output_dtype": "int8"},
    ]

    def jobs(*more: dict[str, Any]) -> list[Job]:
        bodies = [
            json.dumps({"input": TEXTS[i % len(TEXTS)], **change}).encode()
            for i, change in enumerate([*changes, *more])
        ]
        return [Job(i, "openai.embeddings", JSON, "", {}, -1, body) for i, body in enumerate(bodies)]

    def responses(jobs: list[Job]) -> list[tuple[int, bytes, int]]:
        return [(result.status, result.body, result.samples) for result in sorted(handler.run(jobs))]

    def alone(jobs: list[Job]) -> list[tuple[int, bytes, int]]:
        return [response for job in jobs for response in responses([job])]

    assert responses(jobs(changes[3])[3:6:2]) == alone(jobs(changes[3])[3:6:2])  # of one format
    expected = alone(jobs())
    for other in ({"input": [5, 6]}, {"input": ""}, {"chunk": 8}, {"prompt": "a: "}, {"truncate": False}):
        assert responses(jobs(other)) == [*expected, *alone(jobs(other)[-1:])]
    prompted = [*expected, *alone(jobs({"prompt": "a: "})[-1:])]
    monkeypatch.setattr(handler, "_parse", None)  # which parses jobs one by one
    assert responses(jobs({"prompt": "a: "})) == prompted and orjson.loads(expected[2][1])["truncated"] == [0]


STRANGE = [None, True, -1, 1 << 62, 1e308, "", "x" * 300, "\x00", [], [[]], [[[]]], {}, {"a": [1]}, [None], ["a", 1]]


def test_strange_values_are_errors_of_the_client(served: Server) -> None:
    for path, operations in served.json("/openapi.json")["paths"].items():
        if "post" not in operations or path.endswith((":run", "/infer", "index")):
            continue
        fields = operations["post"]["requestBody"]["content"][JSON]["schema"]["properties"]
        usual = {
            "input": "a",
            "inputs": "a",
            "texts": ["a"],
            "query": "a",
            "documents": ["a"],
            "ids": [5],
            "model": "m",
        }
        if path.endswith("/similarity"):
            usual["inputs"] = {"source_sentence": "a", "sentences": ["b"]}
        body = {name: usual[name] for name in fields if name in usual}
        if path not in ("/predict", "/tokenize", "/decode"):  # which several models answer
            assert served.ask(path, json.dumps(body).encode(), JSON)[0] == 200, path
        for name in fields:
            for value in STRANGE:
                status, _, answer = served.ask(path, json.dumps({**body, name: value}).encode(), JSON)
                assert status == 200 or 400 <= status < 500, (path, name, value, answer)


def test_the_api_is_described(served: Server) -> None:
    paths = served.json("/openapi.json")["paths"]
    assert {EMBEDDINGS, "/embed", "/rerank", "/v2/rerank", "/v1/models/texts-0/embed", "/info"} <= {*paths}
    assert "/embed_sparse" not in paths and "/v1/models/texts-1/embed" not in paths
    assert b"OpenAI" in served.ask("/docs")[2]


def test_long_texts_in_chunks(served: Server, folders: list[Path]) -> None:
    pipeline, text = zoo.pipeline(folders[0], engine="native"), "the cat sat, and the zoo ran. " * 9
    vectors, chunks = pipeline.encode_chunks([text, "a"], 20, 4)
    options = {"input": [text, "a"], "model": "m", "chunk": 20, "stride": 4}
    answer = post(served, EMBEDDINGS, **options)
    rows = answer["data"]
    assert len(chunks.texts) > 5 and answer["usage"]["chunks"] == len(rows) == len(chunks.texts)
    assert [row["index"] for row in rows] == chunks.rows.tolist()
    assert [[row["start"], row["end"]] for row in rows] == chunks.spans.tolist()
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), vectors)
    assert np.array_equal(vectors, pipeline.encode(chunks.texts))
    means, _ = pipeline.encode_chunks([text, "a"], 20, 4, "mean")
    rows = post(served, EMBEDDINGS, **options, chunk_pooling="mean")["data"]
    assert [row["chunks"] for row in rows] == chunks.counts.tolist() and "truncated" not in answer
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), means)
    for change, status in (
        ({"chunk": 81}, 400),
        ({"stride": 18}, 400),
        ({"chunk": None}, 400),
        ({"chunk_pooling": "max"}, 400),
        ({"input": [5, 6]}, 400),
        ({"input": "a " * 100_000, "stride": 17}, 400),  # too many chunks
        ({"input": "a " * 2_000_000}, 413),
    ):
        assert refused(served, EMBEDDINGS, {**options, **change})[0] == status, change
