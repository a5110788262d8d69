"""Pipeline of multi-vector encoders: vectors of tokens, and documents in the order of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.models.folder import ModelFolder
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads.late_interaction.roles import DOCUMENT, QUERY, Roles
from zoo.texts.heads.task_pipeline import MULTI_VECTOR, TaskPipeline
from zoo.texts.text_pipeline import SORT_WINDOW, Floats

VECTORS = "token_embeddings"


class MultiVectorPipeline(TaskPipeline):
    """Computes vectors of the tokens of queries and documents; see `zoo.pipeline`.

    Attributes:
        role: "query" or "document".
        query: Vectors of the query that documents are scored for; None: their own vectors are the results.
        roles: Tokenizes both.
    """

    OUTPUT: ClassVar[str] = VECTORS
    PER_TOKEN: ClassVar[bool] = True
    API_KIND: ClassVar[str] = MULTI_VECTOR
    COLUMNS: ClassVar[Mapping[str, Any]] = {VECTORS: np.float32}
    role: str = DOCUMENT
    query: Floats | None = None

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self.roles = Roles(folder.preprocessing, self.tokenizer)

    def __call__(  # type: ignore[override]
        self,
        raw: Any,
        *,
        query: str | None = None,
        role: str = DOCUMENT,
        max_length: int | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """Computes vectors of the tokens of texts, or their scores for a query.

        Args:
            raw: Texts, or one text. Only a `Path` names a file.
            query: Query to score the texts for; None for their vectors.
            role: "query" or "document".
            max_length: Maximum number of tokens of a text; None for that of the role.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            {"token_embeddings": float32 [tokens, components]} of each text, without skipped tokens; or {"score"}.

        Raises:
            RequestError: There are no valid texts, or an option is out of range.
        """
        configured = self.with_options(query=query, role=role, max_length=max_length)
        return super(MultiVectorPipeline, configured).__call__(raw, on_error=on_error)

    def with_options(self, *, query: str | None = None, role: str = DOCUMENT, max_length: int | None = None) -> Self:
        """See `TaskPipeline`.

        Args:
            query: See `__call__`.
            role: See `__call__`.
            max_length: See `__call__`.
        """
        options: dict[str, Any] = {"role": self.roles.require(role)}
        if query is not None:
            if not isinstance(query, str) or role != DOCUMENT:
                raise RequestError(f"found the query {query!r:.40} for {role} texts; expected a text, for documents")
            options |= {"query": self.encode_query(query), "COLUMNS": {"score": np.float32}}
        return self.configured(max_length=max_length, **options)

    def configured(self, *, max_length: int | None = None, **options: Any) -> Self:
        """See `TaskPipeline.configured`: without a maximum, that of the role."""
        made = super().configured(max_length=max_length, **options)
        made.max_tokens = made.max_tokens if max_length else None
        return made

    def text_options(self, prompt: str | None = None, max_length: int | None = None) -> dict[str, Any]:
        """See `TextPipeline.text_options`."""
        return {"max_length": max_length or self.max_tokens or self.roles.length(self.role)}

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`: the tokens of a role."""
        return self.roles.tokens([row[0] for row in rows], self.role, max_length or self.max_tokens)

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        vectors = self.vectors(outputs, tokens)
        if self.query is None:
            return [{VECTORS: each} for each in vectors]
        return [{"score": float(score)} for score in self.similarity(self.query, vectors)[0]]

    def vectors(self, outputs: Floats, tokens: Tokens) -> list[Floats]:
        """Returns the vectors of every text.

        Args:
            outputs: What `compute` returns.
            tokens: What `tokenize` returns.

        Returns:
            float32 [tokens, components] of each text, without skipped tokens.
        """
        kept = self.roles.kept(tokens.ids, self.role)
        ends = np.cumsum(tokens.lengths)
        return [outputs[end - n : end][kept[end - n : end]] for end, n in zip(ends, tokens.lengths, strict=True)]

    def encode_query(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes vectors of the tokens of queries, as `MultiVectorEncoder.encode_query` of sentence-transformers.

        Args:
            inputs: A query, or queries. An empty text has vectors, too.
            **options: `max_length`, see `__call__`.

        Returns:
            float32 [tokens, components] of each query, or of a single one.
        """
        return self._encode(inputs, QUERY, options)

    def encode_document(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes vectors of the tokens of documents, as `MultiVectorEncoder.encode_document`.

        Args:
            inputs: A document, or documents. An empty text has vectors, too.
            **options: `max_length`, see `__call__`.

        Returns:
            float32 [tokens, components] of each document, or of a single one, without skipped tokens.
        """
        return self._encode(inputs, DOCUMENT, options)

    def _encode(self, inputs: str | Sequence[str], role: str, options: Mapping[str, Any]) -> Any:
        configured = self.with_options(role=role, **options)
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        if other := {type(text).__name__ for text in texts if not isinstance(text, str)}:
            raise RequestError(f"found {min(other)} among the texts; expected str")
        found: list[Floats] = []
        window = SORT_WINDOW * self.batch_size
        for start in range(0, len(texts), window):
            tokens = configured.tokenize([(text,) for text in texts[start : start + window]])
            found += configured.vectors(configured.compute(tokens), tokens)
        return found[0] if isinstance(inputs, str) else found

    def similarity(self, queries: Any, documents: Any) -> Floats:
        """Computes MaxSim: of each vector of a query the largest product with a vector of the document, summed.

        Args:
            queries: Vectors of queries, float32 [tokens, components] each, or of one query.
            documents: Vectors of documents, likewise.

        Returns:
            float32 [queries, documents].
        """
        several, others = (
            [each] if isinstance(each, np.ndarray) and each.ndim == 2 else each for each in (queries, documents)
        )
        scores = [[max_sim(query, document) for document in others] for query in several]
        return np.array(scores, np.float32).reshape(len(several), len(others))

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Orders documents by their scores for a query.

        Args:
            query: The query.
            documents: The documents.
            top_k: Number of results; None for all documents.
            return_documents: Whether results have "text".

        Returns:
            {"corpus_id", "score"} of the documents, the best first.
        """
        (scores,) = self.similarity(self.encode_query(query), self.encode_document(documents))
        return [
            {"corpus_id": i, "score": float(scores[i]), **({"text": documents[i]} if return_documents else {})}
            for i in np.argsort(-scores, kind="stable").tolist()[:top_k]
        ]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        query: str | None = None,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Scores documents for a query in constant memory and input order.

        Writes the columns row (from 1) and score.

        Args:
            inputs: Text files with one document per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Column of the documents in tables.
            query: The query.
            max_length: Maximum number of tokens of a document; None for that of the role.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: There is no query, or the input is unusable.
        """
        if query is None:
            raise RequestError("found no --query, for which the documents are scored; give one")
        configured = self.with_options(query=query, max_length=max_length)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)


def max_sim(query: Floats, document: Floats) -> np.float32:
    """Computes MaxSim in float32.

    Args:
        query: float32 [tokens, components].
        document: float32 [tokens, components], at least one token.

    Returns:
        The score.
    """
    return np.float32((query @ document.T).max(axis=1).sum())
