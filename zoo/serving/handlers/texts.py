"""Text encoder handler: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Handler, ParsedJob, json_value, text_lines
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job
from zoo.texts.text_pipeline import TextPipeline

EXAMPLE_TEXTS = 5
MAX_TEXTS = 4096  # of one request


class TextHandler(Handler):
    """Computes the embedding of every text, or scores of every text pair.

    A text body has one text per line, or one pair separated by a TAB; a JSON body is {"texts": [...]} or the list.
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
            Padded token ids and masks, and None.

        Raises:
            RequestError: The body is invalid, or a text is empty.
        """
        samples = self._samples(job)
        if not 1 <= len(samples) <= MAX_TEXTS:
            raise RequestError(f"the body has {len(samples)} texts; expected 1 to {MAX_TEXTS}")
        for i, texts in enumerate(samples, 1):
            if len(texts) != self.pipeline.TEXTS_PER_ROW or not all(text.strip() for text in texts):
                raise RequestError(f"text {i} is empty or no pair; expected {self._expected}")
        return self.pipeline.tokenize(samples).padded(self.pipeline.config.inputs), None

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: row, and embedding or scores.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; rows are counted from 1.
        """
        results = self.pipeline.postprocess(dict(outputs))
        names = dict.fromkeys(name for result in results for name in result)
        columns = {name: tuple(result[name] for result in results) for name in names}
        return {"row": np.arange(1, len(results) + 1), **columns}

    @property
    def _expected(self) -> str:
        return '{"texts": [text, ...]}' if self.pipeline.TEXTS_PER_ROW == 1 else '{"texts": [[text, text], ...]}'

    def _samples(self, job: Job) -> list[tuple[str, ...]]:
        """The texts of every sample: one, or two of a pair."""
        if job.content_type != responses.JSON:
            lines = text_lines(job.body)
            return [tuple(line.split("\t")) if self.pipeline.TEXTS_PER_ROW > 1 else (line,) for line in lines]
        content = json_value(job.body, "texts")
        if not isinstance(content, list):
            raise RequestError(f"the body must be {self._expected}")
        samples = [tuple(item) if isinstance(item, list) else (item,) for item in content]
        if not all(isinstance(text, str) for sample in samples for text in sample):
            raise RequestError(f"the body must be {self._expected}")
        return samples
