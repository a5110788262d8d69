"""Embeddings of the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import parse_json
from zoo.serving.handlers.text_apis.api import EmbeddingApi, Sample, flat, require_limits
from zoo.serving.protocol import limits
from zoo.serving.protocol.fields import Fields
from zoo.serving.protocol.text_apis import EMBEDDINGS, FIELDS, MAX_TEXTS
from zoo.serving.workers.channel import Job
from zoo.texts.data import vector_files
from zoo.texts.data.chunks import POOLINGS, Chunking, Chunks, divide
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.models.config import EMBEDDING

_, REQUIRED, OPTIONAL = FIELDS[EMBEDDINGS]
NO_TOKENS = Tokens.of([], [])
EXPECTED = "a text, a list of texts, the tokens of a text, or a list of them"


class EmbeddingRequest(NamedTuple):
    """A request of `/v1/embeddings`.

    Attributes:
        samples: The inputs, or their chunks.
        prompt: Prefix of every text; None for the default one.
        truncate: Whether longer texts are truncated; else they are an error.
        base64: Whether embeddings are base64 of their bytes, little endian.
        dimensions: Number of components; None for all.
        precision: One of `vector_files.PRECISIONS`.
        chunks: Chunks of the inputs; None if they are not divided.
        pooling: Pooling of the chunks of an input, "none" or "mean".
        token_count: Number of tokens of all inputs, once they are tokenized.
        truncated: Indices of truncated inputs.
    """

    samples: Sequence[Sample]
    prompt: str | None
    truncate: bool
    base64: bool
    dimensions: int | None
    precision: str
    chunks: Chunks | None
    pooling: str
    token_count: int = 0
    truncated: Sequence[int] = ()


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
        request = self._read(job)
        tokens = self.tokens(request.samples, job, prompt=request.prompt, truncate=request.truncate)
        truncated = np.flatnonzero(tokens.truncated).tolist() if request.chunks is None else ()
        return flat(tokens), request._replace(token_count=len(tokens.ids), truncated=truncated)

    def _read(self, job: Job) -> EmbeddingRequest:
        """Reads the fields of a request."""
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
        texts = samples if chunks is None else chunks.texts
        return EmbeddingRequest(texts, prefix, truncate, is_base64, dimensions, precision, chunks, pooling)

    def _chunks(self, fields: Fields, samples: Sequence[Sample], job: Job, prompt: str | None) -> Chunks | None:
        """Divides the inputs if the field "chunk" is set."""
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

    def join(self, jobs: Sequence[Job], max_texts: int) -> tuple[list[EmbeddingRequest], Tokens]:
        """Tokenizes the inputs of several requests together, which takes less time than one by one.

        Args:
            jobs: The jobs, more than one.
            max_texts: Maximum number of inputs.

        Returns:
            The requests, and the tokens of their inputs; no requests if they must be tokenized one by one: with more
            inputs, with tokens or chunks as inputs, or where inputs that are too long are errors.

        Raises:
            RequestError: A request is invalid.
        """
        requests = [self._read(job) for job in jobs]
        ends = np.cumsum([len(request.samples) for request in requests])
        if ends[-1] > max_texts or any(request.chunks is not None or not request.truncate for request in requests):
            return [], NO_TOKENS
        texts: list[str] = []
        for request, job in zip(requests, jobs, strict=True):
            prefix = self.pipeline.prompts.prefix(request.prompt)
            require_limits(request.samples, job, prefix)
            texts += [prefix + sample for sample in request.samples if isinstance(sample, str)]
        if len(texts) < ends[-1]:
            return [], NO_TOKENS
        tokens = self.pipeline.tokenizer(texts)
        counts = np.add.reduceat(tokens.lengths, [0, *ends[:-1]])
        cuts = np.split(tokens.truncated, ends[:-1])
        return [
            request._replace(token_count=count, truncated=np.flatnonzero(cut).tolist() if cut.any() else ())
            for request, count, cut in zip(requests, counts.tolist(), cuts, strict=True)
        ], tokens

    def encode(self, context: EmbeddingRequest, outputs: Batch) -> bytes:
        """Encodes the embeddings.

        Args:
            context: The request.
            outputs: Outputs of the model.

        Returns:
            The response; "truncated" lists the indices of truncated inputs, if any. With one embedding per chunk,
            "index" names the input, "start" and "end" its characters; with the mean of the chunks, "chunks" is the
            number of chunks.
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
        return self._body(context, about, self._values(context, outputs))

    def encode_joined(self, requests: Sequence[EmbeddingRequest], outputs: Batch) -> list[bytes]:
        """Encodes the embeddings of several requests.

        Args:
            requests: The requests, see `join`.
            outputs: Outputs of the model for the inputs of all requests.

        Returns:
            The responses, see `encode`.
        """
        alike = len({(request.base64, request.dimensions, request.precision) for request in requests}) == 1
        values = self._values(requests[0], outputs) if alike else []
        contents, end = [], 0
        for request in requests:
            start, end = end, end + len(request.samples)
            own = values[start:end] or self._values(request, {EMBEDDING: outputs[EMBEDDING][start:end]})
            contents.append(self._body(request, [{"index": i} for i in range(end - start)], own))
        return contents

    def _values(self, request: EmbeddingRequest, outputs: Batch) -> list[Any]:
        """Returns the embeddings in the encoding and size of the request."""
        rows = vector_files.quantize(self.vectors(outputs, request.dimensions), request.precision)
        return base64_texts(rows) if request.base64 else list(rows)

    def _body(self, request: EmbeddingRequest, about: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> bytes:
        """Returns the response with embeddings and what is said about them."""
        data = [
            {"object": "embedding", **place, "embedding": value} for place, value in zip(about, values, strict=True)
        ]
        usage = {"prompt_tokens": request.token_count, "total_tokens": request.token_count}
        response: dict[str, Any] = {"object": "list", "data": data, "model": self.name, "usage": usage}
        if request.chunks is not None:
            usage["chunks"] = len(request.chunks.texts)
        if request.truncated:
            response["truncated"] = request.truncated
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


def base64_texts(rows: NDArray[Any]) -> list[str]:
    """Encodes every row of an array as base64 of its bytes, little endian.

    Args:
        rows: The array, [n, w].
    """
    size, data = rows.dtype.itemsize * rows.shape[1], rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()
    return [base64.b64encode(data[i * size : (i + 1) * size]).decode() for i in range(len(rows))]


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)
