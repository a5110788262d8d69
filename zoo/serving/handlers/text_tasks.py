"""Handler of text tasks: labels, entities and answers, with the options of their pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import ParsedJob, json_options, require_count, text_lines
from zoo.serving.handlers.text_apis import multi_vector, tei
from zoo.serving.handlers.text_apis.api import TextApi, flat
from zoo.serving.handlers.texts import TextHandler
from zoo.serving.protocol import limits, responses, text_apis
from zoo.serving.protocol.text_apis import MAX_TEXTS
from zoo.serving.workers.channel import Job
from zoo.texts.data import text_files
from zoo.texts.heads.task_pipeline import CLASSIFIER, MULTI_VECTOR, SPARSE_ENCODER, TaskPipeline

API_TYPES: Mapping[str, Mapping[str, type[TextApi]]] = {  # by `TaskPipeline.API_KIND`
    CLASSIFIER: {text_apis.PREDICT: tei.Predict},
    SPARSE_ENCODER: {text_apis.EMBED_SPARSE: tei.EmbedSparse},
    MULTI_VECTOR: {
        text_apis.EMBED_ALL: multi_vector.EmbedAll,
        text_apis.RERANK: multi_vector.Rerank,
        text_apis.COHERE_RERANK: multi_vector.CohereRerank,
    },
}

POOLINGS = {SPARSE_ENCODER: "splade", MULTI_VECTOR: "none"}  # in the words of text-embeddings-inference


class TaskHandler(TextHandler):
    """Computes the results of a text task.

    A text body has one text per line, or question TAB context; a JSON body is {"texts": [...]} with the options of the
    pipeline's call, or the list, whose items are inputs of the pipeline.
    """

    pipeline: TaskPipeline

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.response_types = type(self).response_types

    @property
    def api_types(self) -> Mapping[str, type[TextApi]]:
        """See `TextHandler`: /tokenize and /decode; and those of the kind of the pipeline."""
        tokens = {text_apis.TOKENIZE: tei.Tokenize, text_apis.DECODE: tei.Decode}
        return {**tokens, **API_TYPES.get(self.pipeline.API_KIND, {})}

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Tokenizes the texts of a body; a text is never opened as a file.

        Args:
            job: The job.

        Returns:
            Tokens of the valid texts; and the pipeline with the options of the body, the error of each text ("" for
            none), and the tokens with their context.

        Raises:
            RequestError: The body or an option is invalid; a text is invalid, without {"on_error": "skip"}; or all are.
        """
        options: dict[str, Any] = {}
        if job.content_type == responses.JSON:
            parameters = inspect.signature(self.pipeline.with_options).parameters
            content, options = json_options(job, "texts", (*parameters, "on_error"))
        else:
            content = text_lines(job, MAX_TEXTS, "texts")
            if self.pipeline.TEXTS_PER_ROW > 1:
                content = [line.split("\t") for line in content]
        on_error = options.pop("on_error", "raise")
        text_files.require_on_error(on_error)
        if not isinstance(content, list):
            raise RequestError('the body must be {"texts": [text, ...]}')
        require_count(len(content), MAX_TEXTS, "texts")
        pipeline = self.pipeline.with_options(**options)
        items = [tuple(item) if isinstance(item, list) else item for item in content]
        rows = list(pipeline.input_rows(items, names=False))
        limits.TEXT.require(sum(len(text) for row in rows for text in row.texts), job.received_bytes)
        errors = [row.error for row in rows]
        if (wrong := next((row for row in rows if row.error), None)) and (on_error == "raise" or all(errors)):
            raise RequestError(f"{wrong.location} {wrong.error}")
        tokens = pipeline.tokenize([row.texts for row in rows if not row.error], **pipeline.text_options())
        return flat(tokens), (pipeline, errors, tokens)

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: row and those of the task, a line a label or entity.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; rows are counted from 1.
        """
        pipeline, errors, tokens = parsed.context
        results = pipeline.filled(errors, outputs[pipeline.OUTPUT], tokens)
        lines = [
            (number, error, line)
            for number, (result, error) in enumerate(zip(results, errors, strict=True), 1)
            for line in ([{}] if error else pipeline.lines(result))
        ]
        columns = {name: tuple(line.get(name) for _, _, line in lines) for name in pipeline.COLUMNS}
        if any(errors):
            columns["error"] = tuple(error or None for _, error, _ in lines)
        return {"row": np.array([number for number, _, _ in lines], np.int64), **columns}

    def extra_description(self) -> dict[str, Any]:
        """See `TextHandler`."""
        if self.pipeline.API_KIND == CLASSIFIER:
            return super().extra_description()
        pooling = POOLINGS.get(self.pipeline.API_KIND)
        kind = {"embedding": {"pooling": pooling}} if pooling else {}
        return {"info": {"model_type": kind, "max_input_length": self.pipeline.max_length}}
