"""Text encoder handler: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Handler, ParsedJob, json_options, require_count, text_lines
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job
from zoo.texts.text_pipeline import TextPipeline

EXAMPLE_TEXTS = 5
MAX_TEXTS = 4096  # of one request
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
        if self.pipeline.TEXTS_PER_ROW == 1:  # CSV has no vectors
            self.response_types = (responses.JSON, responses.JSON_LINES, responses.ARROW)

    def example_text(self) -> str:
        """Returns example texts or pairs, one per line."""
        examples = self.pipeline.example(EXAMPLE_TEXTS)
        return "\n".join("\t".join(example) if isinstance(example, tuple) else example for example in examples)

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Tokenizes the texts of a body; a text is never opened as a file.

        Args:
            job: The job.

        Returns:
            Padded token ids and masks of the valid texts; and the error of each text ("" for none) and whether each
            valid text is truncated.

        Raises:
            RequestError: The body or an option is invalid; a text is empty, without {"on_error": "skip"}; or all are.
        """
        samples, options = self._samples(job)
        on_error = options.pop("on_error", "raise")
        if on_error not in ("raise", "skip"):
            raise RequestError(f"found on_error {on_error!r:.40}; expected raise or skip")
        text_options = self.pipeline.text_options(options.get("prompt"), options.get("max_length"))
        require_count(len(samples), MAX_TEXTS, "texts")
        limits.TEXT.require(sum(len(text) for texts in samples for text in texts), job.received_bytes)
        errors: list[str] = []
        for i, texts in enumerate(samples, 1):
            is_valid = len(texts) == self.pipeline.TEXTS_PER_ROW and all(text.strip() for text in texts)
            if not is_valid and (on_error == "raise" or (i == len(samples) and all(errors))):
                raise RequestError(f"text {i} is empty or no pair; expected {self._expected}")
            errors.append("" if is_valid else "is empty or no pair" if self.pipeline.TEXTS_PER_ROW > 1 else "is empty")
        tokens = self.pipeline.tokenize(
            [texts for texts, error in zip(samples, errors, strict=True) if not error], **text_options
        )
        return tokens.padded(self.pipeline.config.inputs), (errors, tokens.truncated)

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: row, and embedding or scores; cut, and error if a text is invalid.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; rows are counted from 1.
        """
        errors, truncated = parsed.context
        results = self.pipeline.results(errors, outputs[self.pipeline.OUTPUT], truncated)
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
