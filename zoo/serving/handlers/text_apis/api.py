"""Base class of the text APIs: the tokens of a request, as the inputs of the model."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.protocol import limits
from zoo.serving.protocol.text_apis import MAX_TEXTS
from zoo.serving.workers.channel import Job
from zoo.texts.data import vector_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads.sequence_classification import NONE, SIGMOID, SOFTMAX, activated
from zoo.texts.models.config import EMBEDDING, SCORES
from zoo.texts.text_pipeline import TextPipeline

ROLES = {  # by the values of "input_type" of Cohere, NVIDIA and Voyage
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}
OTHER_TYPES = ("classification", "clustering")  # of Cohere, which take the default prompt
Sample = str | tuple[str, ...] | list[int]  # a text, a pair of texts, or the token ids of a text


def flat(tokens: Tokens) -> dict[str, NDArray[Any]]:
    """Returns tokens as a batch whose first array has one element per text (see `TextHandler.compute`).

    Args:
        tokens: The tokens.
    """
    batch: dict[str, NDArray[Any]] = {
        "lengths": tokens.lengths,
        "ids": tokens.ids,
        "types": tokens.types,
        "truncated": tokens.truncated,
    }
    return batch if tokens.attended is None else {**batch, "attended": tokens.attended}


def require_whole(tokens: Tokens, kind: str, max_tokens: int) -> None:
    """Checks that no text was truncated.

    Args:
        tokens: Tokens of the texts.
        kind: What the texts are, for the message.
        max_tokens: Maximum number of tokens of a text.

    Raises:
        RequestError: A text was truncated.
    """
    if tokens.truncated.any():
        place = int(np.argmax(tokens.truncated)) + 1
        raise RequestError(f"{kind} {place} is too long; expected at most {max_tokens:,} tokens, or truncate true")


def require_limits(samples: Sequence[Sample], job: Job, prompt: str = "") -> None:
    """Checks the number of samples, and their characters.

    Args:
        samples: The samples.
        job: The job.
        prompt: Prefix of every text.

    Raises:
        ContentTooLarge: There are more than `MAX_TEXTS` samples, or the texts are too long.
    """
    if len(samples) > MAX_TEXTS:
        raise limits.ContentTooLarge(f"found {len(samples):,} inputs, expected at most {MAX_TEXTS:,}")
    characters = sum(
        len(prompt) + (len(sample) if isinstance(sample, str) else sum(map(len, sample)))
        for sample in samples
        if not isinstance(sample, list)
    )
    limits.TEXT.require(characters, job.received_bytes)


class TextApi(abc.ABC):
    """A request type of a text API, for one model.

    Args:
        name: Public name of the model.
        pipeline: Pipeline of the model.

    Attributes:
        others: Public names of the other models of the server.
    """

    def __init__(self, name: str, pipeline: TextPipeline) -> None:
        self.name, self.pipeline = name, pipeline
        self.others: set[str] = set()

    @abc.abstractmethod
    def parse(self, job: Job) -> tuple[Batch, Any]:
        """See `zoo.serving.handlers.base.Api`."""

    @abc.abstractmethod
    def encode(self, context: Any, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`."""

    def require_model(self, model: str | None) -> None:
        """Checks the model that a request names: this one, or a name of another server's model.

        Args:
            model: The name; None if the request names none.

        Raises:
            RequestError: It is another model of this server, which does not answer such requests.
        """
        if model in self.others:
            raise RequestError(f"found the model {model!r}, expected {self.name!r}: {model} does not compute this")

    def tokens(
        self,
        samples: Sequence[Sample],
        job: Job,
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        truncate: bool = True,
        direction: str | None = None,
    ) -> Tokens:
        """Tokenizes the samples of a request.

        Args:
            samples: The samples.
            job: The job, for its limits.
            prompt: Prefix of every text; None for the default prompt of the model.
            max_length: Maximum number of tokens of a text; None for that of the model.
            truncate: Whether longer texts are truncated; else they are an error.
            direction: End at which texts are truncated, "left" or "right"; None for that of the model.

        Returns:
            The tokens.

        Raises:
            ContentTooLarge: There are more than `MAX_TEXTS` samples, or the texts are too long.
            RequestError: A text is too long and may not be truncated, or token ids are not of this model.
        """
        prefix = self.pipeline.prompts.prefix(prompt)
        require_limits(samples, job, prefix)
        most = self.pipeline.tokenizer.require_length(max_length, self.pipeline.TEXTS_PER_ROW > 1)
        texts: list[Any] = [
            self.pipeline.tokenizer.prompted((sample,) if isinstance(sample, str) else sample, prefix)
            for sample in samples
            if not isinstance(sample, list)
        ]
        tokens = self.pipeline.tokenizer(texts, most, direction)
        if len(texts) < len(samples):
            tokens = self._with_ids(samples, tokens)
        if not truncate:
            require_whole(tokens, "input", most)
        return tokens

    def _with_ids(self, samples: Sequence[Sample], tokens: Tokens) -> Tokens:
        """Tokens of all samples, given those of the texts among them."""
        parts, row, ends = [], 0, np.cumsum(tokens.lengths)
        for i, sample in enumerate(samples, 1):
            if isinstance(sample, list):
                ids = np.array(self._require_ids(sample, i), np.int32)
                parts.append(Tokens(ids, np.zeros_like(ids), np.array([len(ids)]), np.zeros(1, np.bool_)))
            else:
                piece = slice(ends[row] - tokens.lengths[row], ends[row])
                own = slice(row, row + 1)
                parts.append(Tokens(tokens.ids[piece], tokens.types[piece], tokens.lengths[own], tokens.truncated[own]))
                row += 1
        return Tokens.concatenated(parts)

    def _require_ids(self, ids: list[int], place: int) -> list[int]:
        """Checks token ids of a client: ids of other vocabularies would give embeddings without a meaning."""
        before, after = self.pipeline.tokenizer.frame
        size, most = self.pipeline.config.vocabulary, self.pipeline.max_length
        if not 0 < len(ids) <= most:
            raise RequestError(f"input {place} has {len(ids):,} tokens; expected 1 to {most:,}")
        framed = tuple(ids[: len(before)]) == before and tuple(ids[len(ids) - len(after) :]) == after
        if not framed or len(ids) < len(before) + len(after) or not all(0 <= i < size for i in ids):
            raise RequestError(
                f"input {place} has tokens that are not of {self.name}; expected a text, or all tokens of /tokenize, "
                "special ones too (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
            )
        return ids


class EmbeddingApi(TextApi):
    """A request type with embeddings as results."""

    PRECISIONS: ClassVar[tuple[str, ...]] = vector_files.PRECISIONS

    @functools.cached_property
    def width(self) -> int:
        """Number of components of an embedding."""
        return self.pipeline.config.output_size

    def vectors(self, outputs: Batch, dimensions: int | None, normalize: bool = True) -> NDArray[np.float32]:
        """Returns the embeddings of a response.

        Args:
            outputs: Outputs of the model.
            dimensions: Number of components to keep; None for all.
            normalize: Whether to normalize them to length 1; those of some models are in any case.

        Returns:
            float32 [samples, dimensions].
        """
        vectors = outputs[EMBEDDING]
        if dimensions is None and (self.pipeline.config.unit_length or not normalize):
            return vectors
        kept = np.ascontiguousarray(vectors[:, :dimensions])
        return vector_files.normalize(kept) if normalize else kept

    def typed_prompt(self, input_type: str | None) -> str | None:
        """Returns the prefix of an input type.

        Args:
            input_type: Name of a prompt of the model, or one of `ROLES` or `OTHER_TYPES`; None for the default prompt.

        Returns:
            The prefix; None for the default prompt.

        Raises:
            RequestError: The type is unknown.
        """
        prompts = self.pipeline.prompts
        if input_type in prompts.texts:
            return prompts.texts[input_type]
        if input_type is None or input_type in OTHER_TYPES:
            return None
        if input_type not in ROLES:
            names = ", ".join((*prompts.texts, *ROLES))
            raise RequestError(f"found input_type {input_type[:40]!r}, expected one of {names}")
        return prompts.role(ROLES[input_type])


class RankingApi(TextApi):
    """A request type with scores of pairs or texts as results."""

    @property
    def ranks(self) -> bool:
        """Whether the model has one score, by which documents are ordered."""
        return self.pipeline.config.labels == 1

    def scores(self, outputs: Batch, raw: bool) -> NDArray[np.float32]:
        """Converts logits to scores: by the function of a text classifier; otherwise as TEI does, to probabilities.

        Args:
            outputs: Outputs of the model.
            raw: Whether to return logits.

        Returns:
            float32 [samples, labels].
        """
        usual = SIGMOID if self.pipeline.config.labels == 1 else SOFTMAX
        function = NONE if raw else self.pipeline.folder.preprocessing.get("function_to_apply", usual)
        return activated(outputs[SCORES], function)

    def order(self, scores: NDArray[np.float32]) -> list[int]:
        """Returns the rows by descending score.

        Args:
            scores: float32 [rows, 1].
        """
        order: list[int] = np.argsort(-scores[:, 0], kind="stable").tolist()
        return order
