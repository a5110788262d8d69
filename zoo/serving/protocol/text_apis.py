"""Paths and error bodies of the text APIs: OpenAI, text-embeddings-inference (TEI), Cohere and Jina.

Sources: https://platform.openai.com/docs/api-reference/embeddings, router/src/http of
https://github.com/huggingface/text-embeddings-inference, https://docs.cohere.com/reference/rerank and
https://jina.ai/reranker.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from pipelines.core.errors import RequestError

OPENAI, TEI, COHERE = "openai", "tei", "cohere"
EMBEDDINGS = f"{OPENAI}.embeddings"
COHERE_EMBED, COHERE_EMBED_V1, COHERE_RERANK = f"{COHERE}.embed", f"{COHERE}.embed_v1", f"{COHERE}.rerank"
EMBED, EMBED_ALL, EMBED_SPARSE, SIMILARITY, RERANK, PREDICT, TOKENIZE, DECODE = (
    f"{TEI}.{name}"
    for name in ("embed", "embed_all", "embed_sparse", "similarity", "rerank", "predict", "tokenize", "decode")
)
TEI_VERBS = (EMBED, EMBED_ALL, EMBED_SPARSE, SIMILARITY, RERANK, PREDICT, TOKENIZE, DECODE)
PATHS = {  # of requests for a model that the body names, or that is the only one for the verb
    "/v1/embeddings": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/v1/rerank": COHERE_RERANK,
    "/v2/rerank": COHERE_RERANK,
    "/v1/embed": COHERE_EMBED_V1,
    "/v2/embed": COHERE_EMBED,
    **{f"/{verb.partition('.')[2]}": verb for verb in TEI_VERBS},
}
_TRUNCATION = ("truncate", "truncation_direction")
FIELDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {  # summary, required and optional fields by verb
    EMBEDDINGS: (
        "Embeddings (OpenAI)",
        ("input",),
        (
            "model",
            "encoding_format",
            "dimensions",
            "user",
            "output_dtype",
            "input_type",
            "prompt",
            "truncate",
            "chunk",
            "stride",
            "chunk_pooling",
        ),
    ),
    COHERE_EMBED: (
        "Embeddings by type (Cohere)",
        ("texts",),
        ("model", "input_type", "embedding_types", "output_dimension", "truncate"),
    ),
    COHERE_EMBED_V1: ("Embeddings (Cohere)", ("texts",), ("model", "input_type", "embedding_types", "truncate")),
    COHERE_RERANK: (
        "Relevance of documents (Cohere, Jina)",
        ("query", "documents"),
        ("model", "top_n", "return_documents"),
    ),
    EMBED: ("Embeddings", ("inputs",), ("normalize", "dimensions", "prompt_name", *_TRUNCATION)),
    EMBED_ALL: ("Embeddings of all tokens", ("inputs",), ("prompt_name", *_TRUNCATION)),
    EMBED_SPARSE: ("Sparse embeddings", ("inputs",), ("prompt_name", *_TRUNCATION)),
    SIMILARITY: ("Cosine similarities of a sentence and others", ("inputs",), ("parameters",)),
    RERANK: ("Scores of texts for a query", ("query", "texts"), ("raw_scores", "return_text", *_TRUNCATION)),
    PREDICT: ("Labels of texts or pairs", ("inputs",), ("raw_scores", *_TRUNCATION)),
    TOKENIZE: ("Tokens of texts", ("inputs",), ("add_special_tokens", "prompt_name")),
    DECODE: ("Texts of tokens", ("ids",), ("skip_special_tokens",)),
}
INFO, HEALTH = "/info", "/health"
MAX_TEXTS = 4096  # of one request
_TEI_ERRORS = {400: "Empty", 413: "Validation", 422: "Validation", 429: "Overloaded", 503: "Unhealthy"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class Unprocessable(RequestError):
    """A field of a TEI request is invalid."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class EmptyBatch(RequestError):
    """A TEI request has no inputs."""

    status = HTTPStatus.BAD_REQUEST


class WrongTask(RequestError):
    """The model does not support the task of a TEI request."""

    status = HTTPStatus.FAILED_DEPENDENCY


def api_of(verb: str) -> str:
    """Returns the API of a verb.

    Args:
        verb: A verb of this module, such as "tei.embed".
    """
    return verb.partition(".")[0]


def missing_status(verb: str) -> int:
    """Returns the HTTP status of requests for which no model is served.

    Args:
        verb: A verb of this module.
    """
    return int(HTTPStatus.FAILED_DEPENDENCY if api_of(verb) == TEI else HTTPStatus.NOT_FOUND)


def error_body(api: str, status: int, message: str) -> bytes:
    """Encodes an error in the form of an API.

    Args:
        api: "openai", "tei" or "cohere".
        status: HTTP status.
        message: Error message.

    Returns:
        The body, JSON.
    """
    body: dict[str, Any]
    if api == OPENAI:
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        body = {"error": {"message": message, "type": kind, "param": None, "code": _OPENAI_CODES.get(status)}}
    elif api == TEI:
        body = {"error": message, "error_type": _TEI_ERRORS.get(status, "Backend" if status >= 424 else "Validation")}
    else:
        body = {"message": message, "detail": message}  # of Cohere, and of Jina
    return orjson.dumps(body)
