"""Requests of TEI and Cohere that multi-vector encoders answer: /embed_all, /rerank, /v1/rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.text_apis import cohere, tei
from zoo.serving.handlers.text_apis.api import RankingApi, Sample, TextApi, flat, require_limits, require_whole
from zoo.serving.protocol.fields import Fields
from zoo.serving.workers.channel import Job
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads.late_interaction.pipeline import VECTORS, MultiVectorPipeline
from zoo.texts.heads.late_interaction.roles import DOCUMENT, QUERY
from zoo.texts.models.config import SCORES


class MultiVectorApi(TextApi):
    """A request type for queries and documents."""

    pipeline: MultiVectorPipeline

    def role_tokens(
        self,
        texts: Sequence[str],
        job: Job,
        role: str,
        max_length: int | None = None,
        truncate: bool = True,
        direction: str | None = None,
    ) -> Tokens:
        """Tokenizes texts of one role.

        Args:
            texts: The texts.
            job: The job, for its limits.
            role: "query" or "document".
            max_length: See `TextApi.tokens`.
            truncate: See `TextApi.tokens`.
            direction: See `TextApi.tokens`; texts are truncated at the right.

        Returns:
            The tokens.

        Raises:
            ContentTooLarge: There are too many texts, or they are too long.
            RequestError: A text is too long and may not be truncated, or is to be truncated at the left.
        """
        require_limits(texts, job)
        if direction == "left":
            raise RequestError("found the truncation direction 'left'; expected 'right'")
        tokens = self.pipeline.roles.tokens(texts, role, max_length)
        if not truncate:
            require_whole(tokens, role, max_length or self.pipeline.roles.length(role))
        return tokens


class RoleTokens(NamedTuple):
    """Tokens of a query, then of documents, and the context to encode their scores.

    Attributes:
        tokens: The tokens.
        request: The request.
    """

    tokens: Tokens
    request: Any


class LateRanking(RankingApi, MultiVectorApi):
    """A request type with scores of documents for one query."""

    @property
    def ranks(self) -> bool:
        """See `RankingApi`."""
        return True

    def tokens(self, samples: Sequence[Sample], job: Job, **options: Any) -> Tokens:
        """See `TextApi.tokens`: the query, which all pairs have in common, and the documents.

        Args:
            samples: Pairs of the query and a document.
            job: The job, for its limits.
            **options: Options of `MultiVectorApi.role_tokens`.
        """
        options.pop("prompt", None)
        texts = [str(sample[1]) for sample in samples]
        parts = [
            self.role_tokens(part, job, role, **options)
            for part, role in (([str(samples[0][0])], QUERY), (texts, DOCUMENT))
        ]
        return Tokens.concatenated(parts)

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            job: The job.
        """
        batch, request = super().parse(job)  # type: ignore[safe-super]
        return batch, RoleTokens(Tokens(**batch), request)

    def encode(self, context: Any, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The request and its tokens.
            outputs: Outputs of the model.
        """
        vectors = outputs[VECTORS][context.tokens.mask]
        count = int(context.tokens.lengths[0])
        documents = context.tokens._replace(ids=context.tokens.ids[count:], lengths=context.tokens.lengths[1:])
        query = self.pipeline.with_options(role=QUERY).kept(vectors[:count], context.tokens.first(1))
        scores = self.pipeline.similarity(query, self.pipeline.kept(vectors[count:], documents))
        return super().encode(context.request, {SCORES: scores.T})  # type: ignore[safe-super]

    def scores(self, outputs: Batch, raw: bool) -> NDArray[np.float32]:
        """See `RankingApi`: MaxSim as it is.

        Args:
            outputs: {"scores"}.
            raw: Whether to return logits.
        """
        scores: NDArray[np.float32] = outputs[SCORES]
        return scores


class Rerank(LateRanking, tei.Rerank):
    """`/rerank`: indices and scores of texts, the best first."""


class CohereRerank(LateRanking, cohere.Rerank):
    """`/v1/rerank` and `/v2/rerank`: relevance scores of documents, the best first."""


class EmbedAll(MultiVectorApi, tei.TeiApi):
    """`/embed_all`: the vectors of the tokens of every text; of queries with {"prompt_name": "query"}."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, RoleTokens]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        texts = [sample for sample in self.samples(fields) if isinstance(sample, str)]
        if len(texts) < len(self.samples(fields)):
            raise RequestError("found token ids, expected texts")
        role = fields.choice("prompt_name", (QUERY, DOCUMENT), DOCUMENT)
        truncate = fields.flag("truncate", True)
        tokens = self.role_tokens(
            texts, job, role, None, truncate, fields.choice("truncation_direction", tei.DIRECTIONS, "right")
        )
        return flat(tokens), RoleTokens(tokens, role)

    def encode(self, context: RoleTokens, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The tokens and their role.
            outputs: Outputs of the model.
        """
        pipeline = self.pipeline.with_options(role=context.request)
        vectors = pipeline.kept(outputs[VECTORS][context.tokens.mask], context.tokens)
        return orjson.dumps([list(rows) for rows in vectors], option=orjson.OPT_SERIALIZE_NUMPY)
