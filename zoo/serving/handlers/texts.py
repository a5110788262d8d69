"""Text encoder handler: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Parsed, Service, json_of, lines_of
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job
from zoo.texts.text_pipeline import TextPipeline

EXAMPLES = 5  # texts that are shown to users
MOST = 4096  # texts of one request


class Texts(Service):
    """A vector for every text, or scores for every pair (a TAB between the two): a line each, or lists in JSON."""

    kinds: ClassVar[tuple[str, ...]] = (responses.TEXT, responses.JSON)
    pipeline: TextPipeline

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.pipeline.TEXTS_PER_ROW == 1:  # a vector is no field of CSV
            self.written = (responses.JSON, responses.LINES, responses.ARROW)

    def text(self) -> str:
        """A text, or pair, a line."""
        found = self.pipeline.example(EXAMPLES)
        return "\n".join("\t".join(each) if isinstance(each, tuple) else each for each in found)

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """The tokens of the texts: never of a file that one of them names."""
        found = self._texts(job)
        if not 1 <= len(found) <= MOST:
            raise RequestError(f"the body has {len(found)} texts; wanted 1 to {MOST}")
        for i, texts in enumerate(found, 1):
            if len(texts) != self.pipeline.TEXTS_PER_ROW or not all(each.strip() for each in texts):
                raise RequestError(f"text {i} is empty or no pair; wanted {self._wanted}")
        return self.pipeline.tokenize(found).padded(self.pipeline.config.inputs), None

    def table(self, parsed: Parsed, out: Batch) -> responses.Columns:
        """Columns row, from 1 on, and embedding, or those of the scores, as `zoo run` writes them."""
        found = self.pipeline.postprocess(dict(out))
        names = dict.fromkeys(name for each in found for name in each)
        return {"row": np.arange(1, len(found) + 1), **{name: tuple(each[name] for each in found) for name in names}}

    @property
    def _wanted(self) -> str:
        return '{"texts": [text, ...]}' if self.pipeline.TEXTS_PER_ROW == 1 else '{"texts": [[text, text], ...]}'

    def _texts(self, job: Job) -> list[tuple[str, ...]]:
        if job.kind != responses.JSON:
            return [
                tuple(each.split("\t")) if self.pipeline.TEXTS_PER_ROW > 1 else (each,) for each in lines_of(job.body)
            ]
        found = json_of(job.body, "texts")
        if not isinstance(found, list):
            raise RequestError(f"the body must be {self._wanted}")
        texts = [tuple(each) if isinstance(each, list) else (each,) for each in found]
        if not all(isinstance(part, str) for each in texts for part in each):
            raise RequestError(f"the body must be {self._wanted}")
        return texts
