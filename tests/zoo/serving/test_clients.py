"""Stock clients of OpenAI's, text-embeddings-inference's and Cohere's APIs, unmodified; those not installed are skipped.

`RECORDED` has what they send: it was recorded by running them with the versions named.
"""

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers.serving import JSON, Server
from helpers.text_models import built

import zoo

TEXTS = ["the cat", "a", "the cat sat, and sat."]
KEY = "a-key-of-some-length"
OPENAI, HUB, LLAMA, COHERE, LANGCHAIN = (
    "openai 2.54.0",
    "huggingface_hub 2.4.0",
    "llama-index-embeddings-text-embeddings-inference 0.6.0",
    "cohere 5.21.1",
    "langchain-cohere 0.4.6",
)
RECORDED: list[tuple[str, str, dict[str, Any], Callable[[Any], int]]] = [  # client, path, body, number of results
    (OPENAI, "/v1/embeddings", {"input": TEXTS, "model": "m", "encoding_format": "base64"}, lambda r: len(r["data"])),
    (
        OPENAI,
        "/v1/embeddings",
        {"input": TEXTS, "model": "texts-0", "dimensions": 8, "encoding_format": "base64"},
        lambda r: len(r["data"]),
    ),
    (HUB, "/embed", {"inputs": TEXTS, "normalize": True, "truncate": True}, len),
    (HUB, "/v1/models/texts-0", {"inputs": TEXTS}, len),
    (
        HUB,
        "/similarity",
        {"inputs": {"source_sentence": "the cat", "sentences": TEXTS}, "parameters": {}},
        len,
    ),
    (HUB, "/v1/models/texts-3", {"inputs": "the cat", "parameters": {}}, len),
    (LLAMA, "/embed", {"inputs": TEXTS, "truncate": True}, len),
    (
        COHERE,
        "/v2/rerank",
        {"model": "rerank-v3.5", "query": "the cat", "documents": TEXTS, "top_n": 3},
        lambda r: len(r["results"]),
    ),
    (
        COHERE,
        "/v1/rerank",
        {"query": "the cat", "documents": [{"text": text} for text in TEXTS], "return_documents": True},
        lambda r: len(r["results"]),
    ),
    (
        COHERE,
        "/v2/embed",
        {"texts": TEXTS, "model": "m", "input_type": "search_query", "embedding_types": ["float", "int8", "ubinary"]},
        lambda r: len(r["embeddings"]["int8"]),
    ),
    (
        COHERE,
        "/v1/embed",
        {"texts": TEXTS, "model": "m", "input_type": "search_document"},
        lambda r: len(r["embeddings"]),
    ),
    (
        LANGCHAIN,
        "/v2/rerank",
        {"model": "m", "query": "the cat", "documents": TEXTS, "top_n": 3, "max_tokens_per_doc": None},
        lambda r: len(r["results"]),
    ),
    (
        LANGCHAIN,
        "/v1/embed",
        {
            "texts": TEXTS,
            "model": "m",
            "input_type": "search_document",
            "embedding_types": ["float"],
            "truncate": None,
        },
        lambda r: len(r["embeddings"]["float"]),
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [built(tmp_path_factory.mktemp("texts"), labels) for labels in (0, 1, 3)]


@pytest.fixture(scope="module")
def served(start: Callable[..., Server], folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    return start(*folders, "--workers", "1", "--api-key-file", keys)


@pytest.fixture(scope="module")
def vectors(folders: list[Path]) -> np.ndarray:
    return zoo.pipeline(folders[0], engine="native").encode(TEXTS)


@pytest.fixture(scope="module")
def order(folders: list[Path]) -> list[int]:
    """The best document first."""
    return [row["corpus_id"] for row in zoo.pipeline(folders[1], engine="native").rank("the cat", TEXTS)]


@pytest.mark.parametrize(("client", "path", "body", "count"), RECORDED, ids=[f"{c}{p}" for c, p, *_ in RECORDED])
def test_recorded_requests(
    served: Server, client: str, path: str, body: dict[str, Any], count: Callable[[Any], int]
) -> None:
    answer = served.json(path, json.dumps(body).encode(), JSON, authorization=f"Bearer {KEY}")
    assert count(answer) == 3, client
    if "dimensions" in body:
        assert len(base64.b64decode(answer["data"][0]["embedding"])) == 4 * 8


def test_openai(served: Server, vectors: np.ndarray) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(input=TEXTS, model="text-embedding-3-small", **options)
        assert np.allclose([row.embedding for row in answer.data], vectors, atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0 and answer.model == "texts-0"
    assert len(client.embeddings.create(input="a", model="m", dimensions=8).data[0].embedding) == 8
    extra = client.embeddings.create(
        input="a", model="m", encoding_format="float", extra_body={"output_dtype": "int8", "input_type": "query"}
    )
    assert max(map(abs, extra.data[0].embedding)) == 127
    assert [model.id for model in client.models.list()] == ["texts-0", "texts-1", "texts-3"]
    assert client.models.retrieve("texts-1").owned_by == "int8-zoo"
    with pytest.raises(openai.BadRequestError, match="input 1 is empty"):
        client.embeddings.create(input="", model="m")
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="another key").embeddings.create(input="a", model="m")
    assert error.value.code == "invalid_api_key"

    async def many() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as asynchronous:
            requests = [asynchronous.embeddings.create(input=text, model="m") for text in TEXTS * 9]
            return await asyncio.gather(*requests)

    answer = [response.data[0].embedding for response in asyncio.run(many())]
    assert np.allclose(answer, np.tile(vectors, (9, 1)), atol=1e-6)


def test_hugging_face(served: Server, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)  # this server is no hub

    def client(path: str) -> Any:
        return hub.InferenceClient(served.url + path, token=KEY)

    for path in ("/embed", "/v1/models/texts-0"):
        embeddings = client(path).feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="left")
        assert np.allclose(embeddings, vectors, atol=1e-6)
    similarities = client("/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert np.allclose(similarities, vectors @ vectors[0], atol=1e-6)
    assert client("/v1/models/texts-3").text_classification("the cat").label.startswith("LABEL_")
    with pytest.raises(hub.errors.HfHubHTTPError, match="422"):
        client("/embed").feature_extraction("a", prompt_name="none of it")


def test_langchain(served: Server, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    options = {"base_url": f"{served.url}/v1", "api_key": KEY, "model": "texts-0"}
    embeddings = module.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    assert np.allclose(embeddings.embed_documents(TEXTS), vectors, atol=1e-6)
    assert np.allclose(embeddings.embed_query(TEXTS[1]), vectors[1], atol=1e-6)

    class Encoding:
        """An encoding of tiktoken, which it would download."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(character) % 64 for character in text]

        encode_ordinary = encode

    base = pytest.importorskip("langchain_openai.embeddings.base")
    for name in ("get_encoding", "encoding_for_model"):
        monkeypatch.setattr(base.tiktoken, name, lambda *_: Encoding())
    with pytest.raises(Exception, match="check_embedding_ctx_length=False"):  # tokens of another vocabulary
        module.OpenAIEmbeddings(**options).embed_documents(TEXTS)


def test_langchain_on_hugging_face(served: Server, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("langchain_huggingface", reason="langchain-huggingface is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    embeddings = module.HuggingFaceEndpointEmbeddings(model="texts-0", huggingfacehub_api_token=KEY)
    hub = pytest.importorskip("huggingface_hub")
    embeddings.client = hub.InferenceClient(f"{served.url}/embed", token=KEY)  # from 1.2 on `model` takes no URL
    assert np.allclose(embeddings.embed_documents(TEXTS), vectors, atol=1e-6)
    assert np.allclose(embeddings.embed_query(TEXTS[1]), vectors[1], atol=1e-6)


def test_llama_index(served: Server, vectors: np.ndarray) -> None:
    tei = pytest.importorskip("llama_index.embeddings.text_embeddings_inference", reason="llama-index is not installed")
    embeddings = tei.TextEmbeddingsInference(model_name="m", base_url=served.url, auth_token=KEY)
    assert np.allclose(embeddings.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)
    assert np.allclose(embeddings.get_query_embedding(TEXTS[1]), vectors[1], atol=1e-6)
    like = pytest.importorskip("llama_index.embeddings.openai_like", reason="llama-index is not installed")
    embeddings = like.OpenAILikeEmbedding(model_name="texts-0", api_base=f"{served.url}/v1", api_key=KEY)
    assert np.allclose(embeddings.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)


def test_cohere(served: Server, vectors: np.ndarray, order: list[int]) -> None:
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    second, first = cohere.ClientV2(api_key=KEY, base_url=served.url), cohere.Client(api_key=KEY, base_url=served.url)
    ranked = second.rerank(model="rerank-v3.5", query="the cat", documents=TEXTS, top_n=2)
    assert [row.index for row in ranked.results] == order[:2]
    ranked = first.rerank(query="the cat", documents=TEXTS, return_documents=True)
    assert [row.document.text for row in ranked.results] == [TEXTS[i] for i in order]
    embedded = second.embed(model="m", texts=TEXTS, input_type="search_query", embedding_types=["float", "ubinary"])
    assert np.allclose(embedded.embeddings.float_, vectors, atol=1e-6)
    assert embedded.embeddings.ubinary == np.packbits(vectors > 0, axis=1).tolist()
    assert np.allclose(first.embed(texts=TEXTS, model="m", input_type="search_query").embeddings, vectors, atol=1e-6)
    with pytest.raises(cohere.BadRequestError, match="found no query"):
        second.rerank(model="m", query="", documents=TEXTS)
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="another", base_url=served.url).rerank(model="m", query="a", documents=TEXTS)


def test_langchain_on_cohere(served: Server, order: list[int]) -> None:
    module = pytest.importorskip("langchain_cohere", reason="langchain-cohere is not installed")
    documents = pytest.importorskip("langchain_core.documents")
    reranker = module.CohereRerank(cohere_api_key=KEY, base_url=served.url, model="texts-1", top_n=2)
    reranked = reranker.compress_documents([documents.Document(text) for text in TEXTS], "the cat")
    assert [document.page_content for document in reranked] == [TEXTS[i] for i in order[:2]]
