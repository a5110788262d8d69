"""Inference of text encoders: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.tables import writing
from zoo.texts.data import text_files, vector_files
from zoo.texts.data.chunks import Chunking, DividedRows
from zoo.texts.models.config import EMBEDDING, SCORES, SIGMOID
from zoo.texts.sentence_encoder import PairRanker, SentenceEncoder
from zoo.texts.text_pipeline import Floats, Write


class SentencePipeline(SentenceEncoder):
    """Computes embeddings of texts; see `zoo.pipeline`.

    Attributes:
        output_dtype: Dtype of the vectors that `run` writes.
        chunks: Division of the texts that `run` reads; None if they are not divided.
    """

    OUTPUT: ClassVar[str] = EMBEDDING
    EMBEDS: ClassVar[bool] = True
    TEXTS_PER_ROW: ClassVar[int] = 1
    output_dtype: str = "float32"
    chunks: DividedRows | None = None

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts outputs of `predict` to one result per text.

        Args:
            out: {"embedding": float32 [n, width]}.

        Returns:
            {"embedding": float32 [width]} of each text.
        """
        return [{"embedding": embedding} for embedding in out[EMBEDDING]]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        output_dtype: str = "float32",
        prompt: str | None = None,
        max_length: int | None = None,
        chunk: int | None = None,
        stride: int = 0,
        chunk_pooling: str = "none",
    ) -> dict[str, Any]:
        """Embeds texts in constant memory and input order.

        A row that is no text (invalid UTF-8, an empty line) is reported on stderr and becomes a row of zeros. Texts
        over the token limit are truncated and counted, or divided into chunks.

        Args:
            inputs: Text files with one text per line, tables, "-" for stdin, or a list of 1-tuples, a text each.
            output: .npy, .parquet or .jsonl file; "-" for JSON lines on stdout (see
                `zoo.texts.data.vector_files.vector_writer`).
            on_error: "raise" to stop at the first invalid row, "skip" to write it as zeros.
            column: Column of the texts in tables.
            output_dtype: Dtype of the vectors (see `zoo.texts.data.vector_files.convert`).
            prompt: Name of a prompt of the model, or a prefix with a blank or a colon; None for the default prompt.
            max_length: Maximum number of tokens of a text; None for that of the model.
            chunk: Number of tokens of the chunks that texts are divided into (see `Chunking`); None to truncate them.
            stride: Number of tokens that a chunk shares with the one before.
            chunk_pooling: "none" for a row of output a chunk, in .parquet and .jsonl; "mean" for the mean of the chunks
                of a text.

        Returns:
            {"texts", "skipped", "cut", "seconds", "texts_per_second", "tokens_per_second", "engine", "precision"}, and
            "chunks".

        Raises:
            RequestError: There are no valid texts, the model has no such prompt, or the chunks are out of range.
        """
        configured = copy.copy(self)  # the options apply to this call only
        configured.output_dtype = vector_files.require_dtype(output_dtype)
        columns, arguments = self.parse_columns(column), (prompt, max_length)
        if chunk is None:
            if stride or chunk_pooling != "none":
                raise RequestError("found --stride or --chunk-pooling without --chunk; add --chunk TOKENS")
            return configured._run(inputs, output, on_error, columns, *arguments)
        chunking = Chunking(chunk, stride, chunk_pooling)
        configured.chunks = chunks = DividedRows(self.tokenizer, chunking, self.prompts.resolve(prompt))
        if chunk_pooling == "none" and str(output).lower().endswith(".npy"):
            raise RequestError(f"{output} has no row numbers; expected .parquet or .jsonl, or --chunk-pooling mean")
        report = configured._run(inputs, output, on_error, columns, *arguments)
        texts, seconds = chunks.texts - report["skipped"], report["seconds"]
        rate = round(texts / seconds, 1) if seconds else report["texts_per_second"]
        return {**report, "texts": texts, "chunks": report["texts"], "texts_per_second": rate}

    def rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """See `TextPipeline.rows`; a row for every chunk of a text if `run` divides them."""
        rows = super().rows(data, columns, names=names)
        return rows if self.chunks is None else self.chunks.divided(rows)

    @contextlib.contextmanager
    def _writer(self, output: str | Path) -> Iterator[Write]:
        with vector_files.vector_writer(output, self.config.output_size, self.output_dtype) as write:

            def write_converted(results: Floats, rows: NDArray[np.int64]) -> None:
                write(vector_files.convert(results, self.output_dtype), rows)

            if self.chunks is None:
                yield write_converted
            else:
                with self.chunks.writing(write_converted, self.first_row, self.config.unit_length) as write_chunks:
                    yield write_chunks


class RankingPipeline(PairRanker):
    """Scores pairs of texts; see `zoo.pipeline`.

    Attributes:
        raw: Whether scores are logits.
    """

    OUTPUT: ClassVar[str] = SCORES
    TEXTS_PER_ROW: ClassVar[int] = 2
    INVALID: ClassVar[float] = float("nan")
    raw: bool = False

    @property
    def score_names(self) -> list[str]:
        """Names of the scores: "score" if there is one, else the labels of the model."""
        if self.config.labels == 1:
            return ["score"]
        names = self.folder.preprocessing.get("names", [])
        return names if len(set(names)) == self.config.labels else [f"score_{i}" for i in range(self.config.labels)]

    def activate(self, logits: Floats) -> Floats:
        """Applies the activation of the model's card, unless `raw` is set.

        Args:
            logits: float32 [n, labels].

        Returns:
            Scores, float32 [n, labels].
        """
        if self.raw or self.folder.preprocessing.get("activation") != SIGMOID:
            return logits
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts outputs of `predict` to one result per pair.

        Args:
            out: {"scores": logits, float32 [n, labels]}.

        Returns:
            {name: score} of each pair, see `score_names`.
        """
        return [dict(zip(self.score_names, row, strict=True)) for row in self.activate(out[SCORES]).tolist()]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        raw: bool = False,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Scores pairs of texts in constant memory and input order.

        Writes the columns row (from 1) and score, or one score per label. A row that is no pair has no scores (NaN).

        Args:
            inputs: Text files with TAB between the two texts, tables, "-" for stdin, or a list of pairs.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write it without scores.
            column: Columns of the texts in tables, e.g. "query,text".
            raw: Write logits instead of activated scores.
            max_length: Maximum number of tokens of a pair; None for that of the model.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        columns = self.parse_columns(column)
        configured = copy.copy(self)  # `raw` applies to this call only
        configured.raw = raw
        return configured._run(inputs, output, on_error, columns, None, max_length)

    @contextlib.contextmanager
    def _writer(self, output: str | Path) -> Iterator[Write]:
        dtypes = {"row": np.int64, **dict.fromkeys(self.score_names, np.float32)}
        with writing(output, dtypes) as write_table:

            def write(logits: Floats, rows: NDArray[np.int64]) -> None:
                scores = self.activate(logits)
                columns = {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(self.score_names)}
                write_table({"row": rows, **columns})

            yield write
