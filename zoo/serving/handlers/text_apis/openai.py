"""Embeddings of the OpenAI API."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import parse_json
from zoo.serving.handlers.text_apis.api import EmbeddingApi, Sample, flat
from zoo.serving.protocol.fields import Fields
from zoo.serving.workers.channel import Job
from zoo.texts.data import vector_files

KNOWN = ("input", "model", "encoding_format", "dimensions", "user")  # of OpenAI
OWN = ("output_dtype", "input_type", "prompt", "truncate")  # of other servers with this API, and of this one
EXPECTED = "a text, a list of texts, the tokens of a text, or a list of them"


class EmbeddingRequest(NamedTuple):
    """What the response of `/v1/embeddings` needs.

    Attributes:
        base64: Whether embeddings are base64 of their bytes, little endian.
        dimensions: Number of components; None for all.
        precision: One of `vector_files.PRECISIONS`.
        token_count: Number of tokens of all inputs.
        truncated: Indices of truncated inputs.
    """

    base64: bool
    dimensions: int | None
    precision: str
    token_count: int
    truncated: list[int]


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
        fields = Fields(parse_json(job), (*KNOWN, *OWN))
        self.require_model(fields.text("model", None))
        fields.text("user", None)
        samples = inputs(fields.value("input"), "input")
        for i, sample in enumerate(samples, 1):
            if not sample:
                raise RequestError(f"input {i} is empty; expected {EXPECTED}")
        prompt, role = fields.text("prompt", None), fields.text("input_type", None)
        prefix = self.role_prompt(role) if prompt is None else self.pipeline.prompts.resolve(prompt)
        dimensions = fields.whole("dimensions", self.width)
        precision = fields.choice("output_dtype", self.PRECISIONS, "float")
        is_base64 = fields.choice("encoding_format", ("float", "base64"), "float") == "base64"
        tokens = self.tokens(samples, job, prompt=prefix, truncate=fields.flag("truncate", True))
        truncated = np.flatnonzero(tokens.truncated).tolist()
        return flat(tokens), EmbeddingRequest(is_base64, dimensions, precision, len(tokens.ids), truncated)

    def encode(self, context: EmbeddingRequest, outputs: Batch) -> bytes:
        """Encodes the embeddings.

        Args:
            context: The request.
            outputs: Outputs of the model.

        Returns:
            The response; "truncated" lists the indices of truncated inputs, if any.
        """
        rows = vector_files.quantize(self.vectors(outputs, context.dimensions), context.precision)
        values: list[Any] = [base64_text(row) for row in rows] if context.base64 else list(rows)
        response: dict[str, Any] = {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)],
            "model": self.name,
            "usage": {"prompt_tokens": context.token_count, "total_tokens": context.token_count},
        }
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
    found = "an empty list" if value == [] else "another value"
    raise RequestError(f"found {found} as {name}, expected {EXPECTED}")


def base64_text(row: NDArray[Any]) -> str:
    """Encodes an array as base64 of its bytes, little endian.

    Args:
        row: The array.
    """
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)
