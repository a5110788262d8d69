"""Embeddings and reranking in the form of Cohere, and of Jina, whose rerankers share it.

Sources: https://docs.cohere.com/reference/embed, https://docs.cohere.com/reference/rerank, https://api.jina.ai/redoc.
Unknown fields are ignored: the servers with this API have fields of their own.
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar, NamedTuple

import orjson

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import parse_json, require_count
from zoo.serving.handlers.text_apis.api import EmbeddingApi, RankingApi, Sample, flat
from zoo.serving.handlers.text_apis.openai import base64_texts
from zoo.serving.protocol.fields import Fields
from zoo.serving.protocol.text_apis import MAX_TEXTS
from zoo.serving.workers.channel import Job
from zoo.texts.data import vector_files

TRUNCATIONS = ("none", "start", "end")


class EmbedRequest(NamedTuple):
    """Context of the response of `/v2/embed`.

    Attributes:
        texts: The texts.
        types: Names of the requested types; empty for the list of embeddings of `/v1/embed`.
        dimensions: Number of components; None for all.
        token_count: Number of tokens of all texts.
    """

    texts: list[str]
    types: list[str]
    dimensions: int | None
    token_count: int


class Embed(EmbeddingApi):
    """`/v2/embed`: embeddings by type."""

    DEFAULT_TYPES: ClassVar[list[str]] = ["float"]
    VERSION: ClassVar[str] = "2"

    def parse(self, job: Job) -> tuple[Batch, EmbedRequest]:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            job: The job.
        """
        fields = Fields(parse_json(job))
        self.require_model(fields.text("model", None))
        texts = fields.texts("texts")
        require_count(len(texts), MAX_TEXTS, "texts")
        precisions = (*self.PRECISIONS, "base64")
        types = fields.texts("embedding_types") if fields.has("embedding_types") else self.DEFAULT_TYPES
        if unknown := next((name for name in types if name not in precisions), None):
            raise RequestError(f"found the embedding type {unknown[:40]!r}, expected {', '.join(precisions)}")
        truncation = fields.choice("truncate", TRUNCATIONS, "end")
        tokens = self.tokens(
            texts,
            job,
            prompt=self.typed_prompt(fields.text("input_type", None)),
            truncate=truncation != "none",
            direction="left" if truncation == "start" else "right",
        )
        dimensions = fields.whole("output_dimension", self.width)
        return flat(tokens), EmbedRequest(texts, list(dict.fromkeys(types)), dimensions, len(tokens.ids))

    def encode(self, context: EmbedRequest, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The request.
            outputs: Outputs of the model.
        """
        vectors = self.vectors(outputs, context.dimensions)
        embeddings: Any = {
            name: base64_texts(vectors) if name == "base64" else vector_files.quantize(vectors, name)
            for name in context.types
        }
        response = {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_by_type" if context.types else "embeddings_floats",
            "embeddings": embeddings if context.types else vectors,
            "texts": context.texts,
            "meta": _meta(self.VERSION, input_tokens=context.token_count),
        }
        return orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)


class EmbedV1(Embed):
    """`/v1/embed`: a list of embeddings, unless types are requested."""

    DEFAULT_TYPES: ClassVar[list[str]] = []
    VERSION: ClassVar[str] = "1"


class RerankRequest(NamedTuple):
    """Context of the response of `/v1/rerank`.

    Attributes:
        documents: Texts of the documents; empty if they are not returned.
        top: Number of results.
        token_count: Number of tokens of all pairs.
    """

    documents: list[str]
    top: int
    token_count: int


class Rerank(RankingApi):
    """`/v1/rerank` and `/v2/rerank`: relevance scores of documents, the best first."""

    def parse(self, job: Job) -> tuple[Batch, RerankRequest]:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            job: The job.
        """
        fields = Fields(parse_json(job))
        self.require_model(fields.text("model", None))
        query = fields.text("query", None)
        if not query:
            raise RequestError("found no query, expected a text")
        documents = _documents(fields.value("documents"))
        require_count(len(documents), MAX_TEXTS, "documents")
        top = fields.whole("top_n", 2**31) or len(documents)
        pairs: list[Sample] = [(query, document) for document in documents]
        tokens = self.tokens(pairs, job)
        kept = documents if fields.flag("return_documents", False) else []
        return flat(tokens), RerankRequest(kept, top, len(tokens.ids))

    def encode(self, context: RerankRequest, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The request.
            outputs: Outputs of the model.
        """
        scores = self.scores(outputs, raw=False)
        results = [
            {
                "index": i,
                "relevance_score": scores[i, 0],
                **({"document": {"text": context.documents[i]}} if context.documents else {}),
            }
            for i in self.order(scores)[: context.top]
        ]
        response = {
            "id": str(uuid.uuid4()),
            "model": self.name,
            "results": results,
            "meta": _meta("2", search_units=1),
            "usage": {"prompt_tokens": context.token_count, "total_tokens": context.token_count},
        }
        return orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)


def _documents(value: Any) -> list[str]:
    """Texts of documents, which are texts or objects with a text."""
    items = value if isinstance(value, list) else []
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    strings = [text for text in texts if isinstance(text, str)]
    if not texts or len(strings) < len(texts):
        raise RequestError('found no texts in documents, expected a list of texts or of {"text": text}')
    return strings


def _meta(version: str, **units: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "billed_units": units}
