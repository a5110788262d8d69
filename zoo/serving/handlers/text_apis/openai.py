"""Embeddings of the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import parse_json
from zoo.serving.handlers.text_apis.api import EmbeddingApi, Sample, flat
from zoo.serving.protocol import limits
from zoo.serving.protocol.fields import Fields
from zoo.serving.protocol.text_apis import EMBEDDINGS, FIELDS, MAX_TEXTS
from zoo.serving.workers.channel import Job
from zoo.texts.data import vector_files
from zoo.texts.data.chunks import POOLINGS, Chunking, Chunks, divide
from zoo.texts.models.config import EMBEDDING

_, REQUIRED, OPTIONAL = FIELDS[EMBEDDINGS]
EXPECTED = "a text, a list of texts, the tokens of a text, or a list of them"


class EmbeddingRequest(NamedTuple):
    """Context of the response of `/v1/embeddings`.

    Attributes:
        base64: Whether embeddings are base64 of their bytes, little endian.
        dimensions: Number of components; None for all.
        precision: One of `vector_files.PRECISIONS`.
        token_count: Number of tokens of all inputs.
        truncated: Indices of truncated inputs.
        chunks: Chunks of the inputs; None if they are not divided.
        pooling: Pooling of the chunks of an input, "none" or "mean".
    """

    base64: bool
    dimensions: int | None
    precision: str
    token_count: int
    truncated: list[int]
    chunks: Chunks | None
    pooling: str


class Embeddings(EmbeddingApi):
    """`/v1/embeddings`: see https://platform.openai.com/docs/api-reference/embeddings/create."""

    def parse(self, job: Job) -> tuple[Batch, EmbeddingRequest]:
        """Tokenizes the inputs of a request.

        Args:
            job: The job.

        Returns:
            The tokens, and what `encode` needs.

        Raises:
            RequestError: A field is unknown or invalid.
        """
        fields = Fields(parse_json(job), (*REQUIRED, *OPTIONAL))
        self.require_model(fields.text("model", None))
        fields.text("user", None)
        samples = inputs(fields.value("input"), "input")
        for i, sample in enumerate(samples, 1):
            if not sample:
                raise RequestError(f"input {i} is empty; expected {EXPECTED}")
        prompt, role = fields.text("prompt", None), fields.text("input_type", None)
        prefix = self.typed_prompt(role) if prompt is None else self.pipeline.prompts.resolve(prompt)
        dimensions = fields.whole("dimensions", self.width)
        precision = fields.choice("output_dtype", self.PRECISIONS, "float")
        is_base64 = fields.choice("encoding_format", ("float", "base64"), "float") == "base64"
        truncate, pooling = fields.flag("truncate", True), fields.choice("chunk_pooling", POOLINGS, "none")
        chunks = self._chunks(fields, samples, job, prefix)
        tokens = self.tokens(samples if chunks is None else chunks.texts, job, prompt=prefix, truncate=truncate)
        truncated = [i for i, cut in enumerate(tokens.truncated.tolist()) if cut] if chunks is None else []
        count = len(tokens.ids)
        return flat(tokens), EmbeddingRequest(is_base64, dimensions, precision, count, truncated, chunks, pooling)

    def _chunks(self, fields: Fields, samples: Sequence[Sample], job: Job, prompt: str | None) -> Chunks | None:
        """Divides the inputs, if the field "chunk" asks for it."""
        size = fields.whole("chunk", self.pipeline.max_length)
        stride = fields.whole("stride", self.pipeline.max_length, minimum=0)
        if size is None:
            if stride is not None or fields.has("chunk_pooling"):
                raise RequestError("found stride or chunk_pooling without chunk; add the number of tokens of a chunk")
            return None
        texts = [sample for sample in samples if isinstance(sample, str)]
        if len(texts) < len(samples):
            raise RequestError("found tokens as input and chunk, expected texts")
        limits.UNTRUNCATED.require(sum(map(len, texts)), job.received_bytes)
        prefix = self.pipeline.prompts.prefix(prompt)
        return divide(self.pipeline.tokenizer, texts, Chunking(size, stride or 0), prefix, MAX_TEXTS)

    def encode(self, context: EmbeddingRequest, outputs: Batch) -> bytes:
        """Encodes the embeddings.

        Args:
            context: The request.
            outputs: Outputs of the model.

        Returns:
            The response; "truncated" lists the indices of truncated inputs, if any. With one embedding a chunk, "index"
            is that of its input, "start" and "end" are characters of it; with the mean of the chunks, "chunks" is
            their number.
        """
        chunks, about = context.chunks, [{"index": i} for i in range(len(outputs[EMBEDDING]))]
        if chunks is not None and context.pooling == "mean":
            outputs = {**outputs, EMBEDDING: chunks.mean(outputs[EMBEDDING], normalize=True)}
            about = [{"index": i, "chunks": count} for i, count in enumerate(chunks.counts.tolist())]
        elif chunks is not None:
            about = [
                {"index": row, "start": start, "end": end}
                for row, (start, end) in zip(chunks.rows.tolist(), chunks.spans.tolist(), strict=True)
            ]
        rows = vector_files.quantize(self.vectors(outputs, context.dimensions), context.precision)
        values: list[Any] = [base64_text(row) for row in rows] if context.base64 else list(rows)
        response: dict[str, Any] = {
            "object": "list",
            "data": [
                {"object": "embedding", **place, "embedding": value} for place, value in zip(about, values, strict=True)
            ],
            "model": self.name,
            "usage": {"prompt_tokens": context.token_count, "total_tokens": context.token_count},
        }
        if chunks is not None:
            response["usage"]["chunks"] = len(chunks.texts)
        if context.truncated:
            response["truncated"] = context.truncated
        return orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)


def inputs(value: Any, name: str) -> list[Sample]:
    """Reads the inputs of a request.

    Args:
        value: A text, a list of texts, the token ids of a text, or a list of texts and lists of token ids.
        name: Name of the field, for messages.

    Returns:
        The samples: texts, and lists of token ids.

    Raises:
        RequestError: It is something else, or empty.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) or _is_ids(item) for item in value):
            return value
    kind = "an empty list" if value == [] else "another value"
    raise RequestError(f"found {kind} as {name}, expected {EXPECTED}")


def base64_text(row: NDArray[Any]) -> str:
    """Encodes an array as base64 of its bytes, little endian.

    Args:
        row: The array.
    """
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)
