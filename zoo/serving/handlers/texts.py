"""Text encoder handler: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Handler, ParsedJob, json_options, require_count, text_lines
from zoo.serving.handlers.text_apis import cohere, openai, tei
from zoo.serving.handlers.text_apis.api import TextApi, flat
from zoo.serving.protocol import limits, responses, text_apis
from zoo.serving.protocol.text_apis import MAX_TEXTS
from zoo.serving.workers.channel import Job, JobResult
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.text_pipeline import TextPipeline

EXAMPLE_TEXTS = 5
OPTIONS = ("prompt", "max_length", "on_error")  # keys of a JSON body beside "texts", as of `TextPipeline.__call__`


class TextHandler(Handler):
    """Computes the embedding of every text, or scores of every text pair.

    A text body has one text per line, or one pair separated by a TAB; a JSON body is {"texts": [...]} with `OPTIONS`,
    or the list.
    """

    content_types: ClassVar[tuple[str, ...]] = (responses.TEXT, responses.JSON)
    pipeline: TextPipeline

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.apis: dict[str, TextApi] = {  # type: ignore[assignment]
            verb: api_type(self.name, self.pipeline) for verb, api_type in self.api_types.items()
        }
        if self.pipeline.TEXTS_PER_ROW == 1:  # CSV has no vectors
            self.response_types = (responses.JSON, responses.JSON_LINES, responses.ARROW)

    @property
    def api_types(self) -> Mapping[str, type[TextApi]]:
        """Types of the APIs that the model answers, by verb."""
        tokens = {text_apis.TOKENIZE: tei.Tokenize, text_apis.DECODE: tei.Decode}
        if self.pipeline.TEXTS_PER_ROW == 1:
            return {
                text_apis.EMBEDDINGS: openai.Embeddings,
                text_apis.EMBED: tei.Embed,
                text_apis.SIMILARITY: tei.Similarity,
                text_apis.COHERE_EMBED: cohere.Embed,
                text_apis.COHERE_EMBED_V1: cohere.EmbedV1,
                **tokens,
            }
        if self.pipeline.config.labels > 1:
            return {text_apis.PREDICT: tei.Predict, **tokens}
        return {
            text_apis.RERANK: tei.Rerank,
            text_apis.COHERE_RERANK: cohere.Rerank,
            text_apis.PREDICT: tei.Predict,
            **tokens,
        }

    def connect(self, handlers: Mapping[str, Handler]) -> None:
        """See `Handler.connect`.

        Args:
            handlers: Handlers of the worker by public name.
        """
        for api in self.apis.values():
            api.others = {*handlers} - {self.name}

    def compute(self, batches: Sequence[Batch]) -> Batch:
        """Computes the inputs of several jobs without padding: tokens of `flat`, or padded ids and masks.

        Args:
            batches: Inputs of every job, with the same names.

        Returns:
            Outputs of the model for the samples of all jobs.
        """
        if "lengths" not in batches[0]:
            return super().compute(batches)
        tokens = Tokens.concatenated([Tokens(**batch) for batch in batches])
        outputs = self.pipeline.compute(tokens)
        return {self.pipeline.OUTPUT: tokens.spread(outputs) if self.pipeline.per_token else outputs}

    def run_joined(self, jobs: Sequence[Job]) -> list[JobResult] | None:
        """Tokenizes the inputs of requests for embeddings together.

        Args:
            jobs: The jobs, more than one.

        Returns:
            The results; None if the jobs must be parsed one by one.
        """
        api = self.apis.get(text_apis.EMBEDDINGS)
        if not isinstance(api, openai.Embeddings) or any(job.verb != text_apis.EMBEDDINGS for job in jobs):
            return None
        begin = time.perf_counter()
        try:
            requests, tokens = api.join(jobs, self.max_batch_samples)
            if not requests:
                return None
            parsed = time.perf_counter()
            outputs = self.compute([flat(tokens)])
            computed = time.perf_counter()
            contents = api.encode_joined(requests, outputs)
        except Exception:  # one by one, so that only the faulty job fails
            return None
        stage_seconds = (parsed - begin, computed - parsed, time.perf_counter() - computed)
        return [
            JobResult(
                job.job_id, 200, responses.JSON, content, stage_seconds, len(request.samples), len(tokens.lengths)
            )
            for job, request, content in zip(jobs, requests, contents, strict=True)
        ]

    def extra_description(self) -> dict[str, Any]:
        """Returns the model's part of `/info` of text-embeddings-inference."""
        labels = dict(enumerate(tei.label_names(self.pipeline)))
        kind: dict[str, Any] = {"embedding": {"pooling": self.pipeline.config.pooling}}
        if labels:
            names = {str(i): name for i, name in labels.items()}
            ids = {name: i for i, name in labels.items()}
            kind = {"reranker" if len(labels) == 1 else "classifier": {"id2label": names, "label2id": ids}}
        return {"info": {"model_type": kind, "max_input_length": self.pipeline.max_length}}

    def warm_up(self) -> None:
        """See `Handler.warm_up`; the native engine computes texts of several requests together."""
        super().warm_up()
        if self.pipeline.engine == "native":
            self.max_batch_samples = MAX_TEXTS

    def example_text(self) -> str:
        """Returns example texts or pairs, one per line."""
        examples = self.pipeline.example(EXAMPLE_TEXTS)
        return "\n".join("\t".join(example) if isinstance(example, tuple) else example for example in examples)

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Tokenizes the texts of a body; a text is never opened as a file.

        Args:
            job: The job.

        Returns:
            Tokens of the valid texts; and the error of each text ("" for none) and whether each
            valid text is truncated.

        Raises:
            RequestError: The body or an option is invalid; a text is empty, without {"on_error": "skip"}; or all are.
        """
        samples, options = self._samples(job)
        on_error = options.pop("on_error", "raise")
        text_files.require_on_error(on_error)
        text_options = self.pipeline.text_options(options.get("prompt"), options.get("max_length"))
        require_count(len(samples), MAX_TEXTS, "texts")
        prompt = text_options["prompt"] or self.pipeline.prompt
        characters = sum(len(text) for texts in samples for text in texts) + len(prompt) * len(samples)
        limits.TEXT.require(characters, job.received_bytes)
        errors: list[str] = []
        for i, texts in enumerate(samples, 1):
            is_valid = len(texts) == self.pipeline.TEXTS_PER_ROW and all(text.strip() for text in texts)
            if not is_valid and (on_error == "raise" or (i == len(samples) and all(errors))):
                raise RequestError(f"text {i} is empty or no pair; expected {self._expected}")
            errors.append("" if is_valid else "is empty or no pair" if self.pipeline.TEXTS_PER_ROW > 1 else "is empty")
        tokens = self.pipeline.tokenize(
            [texts for texts, error in zip(samples, errors, strict=True) if not error], **text_options
        )
        return flat(tokens), (errors, tokens)

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: row, and embedding or scores; cut, and error if a text is invalid.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; rows are counted from 1.
        """
        errors, tokens = parsed.context
        results = self.pipeline.results(errors, outputs[self.pipeline.OUTPUT], tokens)
        names = dict.fromkeys(name for result in results for name in result)
        columns = {name: tuple(result.get(name) for result in results) for name in names if name != "cut"}
        return {"row": np.arange(1, len(results) + 1), **columns, "cut": tuple(result["cut"] for result in results)}

    @property
    def _expected(self) -> str:
        return '{"texts": [text, ...]}' if self.pipeline.TEXTS_PER_ROW == 1 else '{"texts": [[text, text], ...]}'

    def _samples(self, job: Job) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
        """The texts of every sample, one or two of a pair, and the options of the body."""
        if job.content_type != responses.JSON:
            lines = text_lines(job, MAX_TEXTS, "texts")
            return [tuple(line.split("\t")) if self.pipeline.TEXTS_PER_ROW > 1 else (line,) for line in lines], {}
        content, options = json_options(job, "texts", OPTIONS)
        if not isinstance(content, list):
            raise RequestError(f"the body must be {self._expected}")
        require_count(len(content), MAX_TEXTS, "texts")
        samples = [tuple(item) if isinstance(item, list) else (item,) for item in content]
        if not all(isinstance(text, str) for sample in samples for text in sample):
            raise RequestError(f"the body must be {self._expected}")
        return samples, options
