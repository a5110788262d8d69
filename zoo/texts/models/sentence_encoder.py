"""Texts to vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zoo.texts.data import vector_files
from zoo.texts.inference import TextPipeline
from zoo.texts.models.config import EMBEDDING


class SentencePipeline(TextPipeline):
    """Texts to vectors; see `zoo.pipeline`."""

    RESULT: ClassVar[str] = EMBEDDING
    COUNT: ClassVar[int] = 1
    output_dtype: str = "float32"

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """[{"embedding": float32 [width]}, ...], one a text."""
        return [{"embedding": each} for each in out[EMBEDDING]]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        output_dtype: str = "float32",
        prompt: str | None = None,
    ) -> dict[str, Any]:
        """A vector for every text, in constant memory and input order, to .npy, .parquet or .jsonl, or as JSON lines to
        stdout ("-"); see `zoo.texts.data.vector_files.writing`.

        inputs: text files, a text a line, tables with the column `column`, "-" for stdin, or a list of texts.
        output_dtype: see `zoo.texts.data.vector_files.converted`. prompt: put before each text; the name of one that
        the model's
        card knows, or itself; None for the model's own. What is no text (not UTF-8, an empty line) is named on stderr
        and becomes a row of zeros; on_error="raise" stops at the first. Texts over the limit are cut and counted.
        Raises RequestError where there are none. Returns {"texts", "skipped", "cut", "seconds", "texts_per_second",
        "tokens_per_second", "engine", "precision"}.
        """
        self.output_dtype = vector_files.require(output_dtype)
        known = self.folder.preprocessing.get("prompts", {})
        return self._run(inputs, output, on_error, self.columns_of(column), known.get(prompt, prompt))

    @contextlib.contextmanager
    def _writing(self, output: str | Path) -> Iterator[Any]:
        with vector_files.writing(output, self.width, self.output_dtype) as write:

            def converted(results: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
                write(vector_files.converted(results, self.output_dtype), rows)

            yield converted
