"""Requests of text-embeddings-inference (TEI): /embed, /embed_sparse, /similarity, /rerank, /predict and tokens.

Source: types.rs and server.rs in router/src/http of https://github.com/huggingface/text-embeddings-inference. Unknown
fields are ignored, as there.
"""

from __future__ import annotations

import abc
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from zoo.serving.handlers.base import parse_json
from zoo.serving.handlers.text_apis.api import EmbeddingApi, RankingApi, Sample, TextApi, flat, require_limits
from zoo.serving.handlers.text_apis.openai import inputs
from zoo.serving.protocol import limits
from zoo.serving.protocol.fields import Fields
from zoo.serving.protocol.text_apis import EmptyBatch, Unprocessable, WrongTask
from zoo.serving.workers.channel import Job
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads.sparse_encoder import SparsePipeline
from zoo.texts.text_pipeline import TextPipeline

DIRECTIONS = ("right", "left")
MAX_CHARACTERS = 250  # of a text that is tokenized without truncation, for each token of the model's limit


class TeiApi(TextApi):
    """A request type of TEI, whose invalid fields get the status 422."""

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Parses the body of a request; see `zoo.serving.handlers.base.Api`.

        Args:
            job: The job.

        Returns:
            Model inputs, and the context of `encode`.

        Raises:
            Unprocessable: A field is invalid.
            EmptyBatch: There are no inputs.
        """
        try:
            return self.parse_fields(Fields(parse_json(job)), job)
        except RequestError as error:
            if hasattr(error, "status"):
                raise
            raise Unprocessable(one_line(error)) from error

    @abc.abstractmethod
    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, Any]:
        """Parses the fields of a request.

        Args:
            fields: The fields.
            job: The job, for its limits.

        Returns:
            Model inputs, and the context of `encode`.

        Raises:
            RequestError: A field is invalid.
        """

    def samples(self, fields: Fields) -> list[Sample]:
        """Returns the field "inputs": texts, and token ids of texts.

        Args:
            fields: The fields.

        Raises:
            EmptyBatch: There are none, or one is empty.
            RequestError: It is something else.
        """
        if (value := fields.value("inputs")) == []:
            raise EmptyBatch("`inputs` cannot be empty")
        samples = inputs(value, "inputs")
        if not all(samples):
            raise EmptyBatch("`inputs` cannot be empty")
        return samples

    def truncated_tokens(self, samples: list[Sample], fields: Fields, job: Job) -> Tokens:
        """Tokenizes samples as the fields "truncate", "truncation_direction" and "prompt_name" say.

        Args:
            samples: The samples.
            fields: The fields.
            job: The job, for its limits.

        Returns:
            The tokens.

        Raises:
            RequestError: A field is invalid, or a text is too long.
        """
        return self.tokens(
            samples,
            job,
            prompt=self.named_prompt(fields),
            truncate=fields.flag("truncate", True),
            direction=fields.choice("truncation_direction", DIRECTIONS, "right"),
        )

    def named_prompt(self, fields: Fields) -> str | None:
        """Returns the prefix of the field "prompt_name"; None without it.

        Args:
            fields: The fields.

        Raises:
            RequestError: The model has no prompt of this name.
        """
        if (name := fields.text("prompt_name", None)) is None:
            return None
        if name not in self.pipeline.prompts.texts:
            names = ", ".join(self.pipeline.prompts.texts) or "none"
            raise RequestError(f"found no prompt {name[:60]!r}; the model has {names}")
        return self.pipeline.prompts.texts[name]


class Embed(EmbeddingApi, TeiApi):
    """`/embed`: a list of embeddings."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, tuple[int | None, bool]]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        samples = self.samples(fields)
        options = fields.whole("dimensions", self.width), fields.flag("normalize", True)
        return flat(self.truncated_tokens(samples, fields, job)), options

    def encode(self, context: tuple[int | None, bool], outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: Number of components, None for all; and whether to normalize.
            outputs: Outputs of the model.
        """
        return orjson.dumps(self.vectors(outputs, *context), option=orjson.OPT_SERIALIZE_NUMPY)


class EmbedSparse(TeiApi):
    """`/embed_sparse`: the tokens of the vocabulary with a weight above 0, of every text."""

    pipeline: SparsePipeline

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, Tokens]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        tokens = self.truncated_tokens(self.samples(fields), fields, job)
        return flat(tokens), tokens

    def encode(self, context: Tokens, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: Tokens of the texts.
            outputs: Outputs of the model.
        """
        vectors = [
            [{"index": index, "value": value} for index, value in zip(vector["indices"], vector["values"], strict=True)]
            for vector in self.pipeline.filled([""] * len(context.lengths), outputs[self.pipeline.OUTPUT], context)
        ]
        return orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY)


class Similarity(EmbeddingApi, TeiApi):
    """`/similarity`: cosine similarities of a sentence and others."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, None]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        inputs = Fields(fields.value("inputs"))
        source = inputs.text("source_sentence", None)
        sentences = inputs.texts("sentences")
        if source is None:
            raise RequestError("found no source_sentence, expected this field")
        if not sentences:
            raise EmptyBatch("`inputs.sentences` cannot be empty")
        parameters = Fields(fields.object("parameters"))
        return flat(self.truncated_tokens([source, *sentences], parameters, job)), None

    def encode(self, context: None, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: None.
            outputs: Outputs of the model.
        """
        vectors = self.vectors(outputs, None)
        return orjson.dumps(vectors[1:] @ vectors[0], option=orjson.OPT_SERIALIZE_NUMPY)


class RerankRequest(NamedTuple):
    """Context of the response of `/rerank`.

    Attributes:
        texts: The texts; empty if they are not returned.
        raw: Whether scores are logits.
    """

    texts: list[str]
    raw: bool


class Rerank(RankingApi, TeiApi):
    """`/rerank`: indices and scores of texts, the best first."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, RerankRequest]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        query, texts = fields.text("query", None), fields.texts("texts")
        if query is None:
            raise RequestError("found no query, expected this field")
        if not texts:
            raise EmptyBatch("`texts` cannot be empty")
        if not self.ranks:
            raise WrongTask("model is not a re-ranker model")
        request = RerankRequest(texts if fields.flag("return_text", False) else [], fields.flag("raw_scores", False))
        return flat(self.truncated_tokens([(query, text) for text in texts], fields, job)), request

    def encode(self, context: RerankRequest, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The request.
            outputs: Outputs of the model.
        """
        scores = self.scores(outputs, context.raw)
        ranks = [
            {"index": i, **({"text": context.texts[i]} if context.texts else {}), "score": scores[i, 0]}
            for i in self.order(scores)
        ]
        return orjson.dumps(ranks, option=orjson.OPT_SERIALIZE_NUMPY)


class PredictRequest(NamedTuple):
    """Context of the response of `/predict`.

    Attributes:
        single: Whether the request has one input, not a list of inputs.
        raw: Whether scores are logits.
    """

    single: bool
    raw: bool


class Predict(RankingApi, TeiApi):
    """`/predict`: labels with scores of a text, of a pair, or of a list of them."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, PredictRequest]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        value = fields.value("inputs")
        if value == []:
            raise EmptyBatch("`inputs` cannot be empty")
        single = isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], str))
        samples: list[Sample] = []
        for item in [value] if single else value if isinstance(value, list) else [value]:
            texts = [item] if isinstance(item, str) else item
            if not isinstance(texts, list) or len(texts) not in (1, 2) or not all(isinstance(t, str) for t in texts):
                raise RequestError(
                    "found inputs of another form, expected a text, a pair [text, text], or a list of [text] and "
                    "[text, text]"
                )
            samples.append(texts[0] if len(texts) == 1 else tuple(texts))
        request = PredictRequest(single, fields.flag("raw_scores", False))
        return flat(self.truncated_tokens(samples, fields, job)), request

    def encode(self, context: PredictRequest, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The request.
            outputs: Outputs of the model.
        """
        labels = label_names(self.pipeline)
        predictions = [
            [{"score": row[i], "label": labels[i]} for i in np.argsort(-row, kind="stable").tolist()]
            for row in self.scores(outputs, context.raw)
        ]
        return orjson.dumps(predictions[0] if context.single else predictions, option=orjson.OPT_SERIALIZE_NUMPY)


class Tokenize(TeiApi):
    """`/tokenize`: ids, texts and byte offsets of tokens."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, bytes]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        value = fields.value("inputs")
        texts = [value] if isinstance(value, str) else fields.texts("inputs")
        if not texts:
            raise EmptyBatch("`inputs` cannot be empty")
        require_limits(texts, job)
        limits.UNTRUNCATED.require(sum(map(len, texts)), job.received_bytes)
        prompt, special = self.named_prompt(fields), fields.flag("add_special_tokens", True)
        prefix = self.pipeline.prompts.prefix(prompt)
        most = MAX_CHARACTERS * self.pipeline.max_length
        if longer := next((text for text in texts if len(text) > most), None):
            raise RequestError(f"`inputs` must have less than {most} characters. Given: {len(longer)}")
        return {}, b"[" + b",".join(self._tokens(prefix + text, special) for text in texts) + b"]"

    def _tokens(self, text: str, special: bool) -> bytes:
        """The tokens of a text, as JSON."""
        encoding = self.pipeline.tokenizer.encode(text, special)
        data = text.encode()
        places = [0, *accumulate(len(character.encode()) for character in text)] if len(data) > len(text) else None
        tokens = []
        for i, token, (start, stop), is_special in zip(
            encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            if is_special:
                tokens.append({"id": i, "text": token, "special": True, "start": None, "stop": None})
                continue
            begin, end = (start, stop) if places is None else (places[start], places[stop])
            shown = data[begin:end].decode(errors="replace")
            tokens.append({"id": i, "text": shown, "special": False, "start": begin, "stop": end})
        return orjson.dumps(tokens)

    def encode(self, context: bytes, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The response.
            outputs: {}.
        """
        return context


class Decode(TeiApi):
    """`/decode`: token ids to texts."""

    def parse_fields(self, fields: Fields, job: Job) -> tuple[Batch, bytes]:
        """See `TeiApi`.

        Args:
            fields: The fields.
            job: The job.
        """
        value = fields.value("ids")
        if value == []:
            raise EmptyBatch("`ids` cannot be empty")
        rows = value if isinstance(value, list) and isinstance(value[0], list) else [value]
        size = self.pipeline.config.vocabulary
        if not all(isinstance(row, list) and all(type(i) is int and 0 <= i < size for i in row) for row in rows):
            raise RequestError(
                f"found ids of another form, expected a list of token ids, 0 to {size - 1:,}, or a list of such lists"
            )
        require_limits(rows, job)
        texts = self.pipeline.tokenizer.decode(rows, fields.flag("skip_special_tokens", True))
        return {}, orjson.dumps(texts)

    def encode(self, context: bytes, outputs: Batch) -> bytes:
        """See `zoo.serving.handlers.base.Api`.

        Args:
            context: The response.
            outputs: {}.
        """
        return context


def label_names(pipeline: TextPipeline) -> list[str]:
    """Returns the names of a classifier's outputs, as in its config.json.

    Args:
        pipeline: Pipeline of the model.
    """
    names: list[str] = pipeline.folder.preprocessing.get("names", [])
    count = pipeline.config.labels
    return names if len(names) == count else [f"LABEL_{i}" for i in range(count)]
