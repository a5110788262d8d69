"""Pipeline of multi-vector encoders: vectors of tokens, and documents in the order of their scores."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.engines.native.texts import LENGTHS
from pipelines.kernels.transformer.token_vectors import SUFFIX, TokenVectors
from pipelines.models.folder import ModelFolder
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads.late_interaction.roles import DOCUMENT, QUERY, Roles
from zoo.texts.heads.task_pipeline import MULTI_VECTOR, TaskPipeline
from zoo.texts.text_inputs import EXAMPLES
from zoo.texts.text_pipeline import SORT_WINDOW, Floats, Write

VECTORS = "token_embeddings"
TOP = 10  # documents of a query
FOUND = {"document": np.int64, "score": np.float32}  # columns of a search


class MultiVectorPipeline(TaskPipeline):
    """Computes vectors of the tokens of queries and documents; see `zoo.pipeline`.

    Attributes:
        role: "query" or "document".
        query: Vectors of the query that documents are scored for; None: their own vectors are the results.
        searched: Index of documents that `run` searches for queries; None for none.
        top: Number of documents of a query that it finds.
        roles: Tokenizes both.
    """

    OUTPUT: ClassVar[str] = VECTORS
    PER_TOKEN: ClassVar[bool] = True
    EMBEDS: ClassVar[bool] = True
    API_KIND: ClassVar[str] = MULTI_VECTOR
    COLUMNS: ClassVar[Mapping[str, Any]] = {VECTORS: np.float32}
    role: str = DOCUMENT
    query: Floats | None = None
    searched: TokenVectors | None = None
    top: int = TOP

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
        vectors = self.kept(outputs, tokens)
        if self.query is None:
            return [{VECTORS: vector} for vector in vectors]
        return [{"score": float(score)} for score in self.similarity(self.query, vectors)[0]]

    def kept(self, outputs: Floats, tokens: Tokens) -> list[Floats]:
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

    def _long_examples(self) -> list[Callable[[], Batch]]:
        """See `TextPipeline._long_examples`: queries, too, with tokens that are not attended to."""
        return [*super()._long_examples(), self._queries] if self.roles.expands else super()._long_examples()

    def _queries(self) -> Batch:
        tokens = self.roles.tokens(["", " ".join(EXAMPLES)], QUERY)
        return {**tokens.padded(self.config.inputs), LENGTHS: tokens.lengths}

    def _encode(self, inputs: str | Sequence[str], role: str, options: Mapping[str, Any]) -> Any:
        configured = self.with_options(role=role, **options)
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        if other := {type(text).__name__ for text in texts if not isinstance(text, str)}:
            raise RequestError(f"found {min(other)} among the texts; expected str")
        vectors: list[Floats] = []
        window = SORT_WINDOW * self.batch_size
        for start in range(0, len(texts), window):
            tokens = configured.tokenize([(text,) for text in texts[start : start + window]])
            vectors += configured.kept(configured.compute(tokens), tokens)
        return vectors[0] if isinstance(inputs, str) else vectors

    def similarity(self, queries: Any, documents: Any) -> Floats:
        """Computes MaxSim: of each vector of a query the largest product with a vector of the document, summed.

        Args:
            queries: Vectors of queries, float32 [tokens, components] each, or of one query.
            documents: Vectors of documents, likewise, or an index of them.

        Returns:
            float32 [queries, documents]; of an index, and with int8, by vectors of 8 bits.
        """
        several, others = (
            [texts] if isinstance(texts, np.ndarray) and texts.ndim == 2 else texts for texts in (queries, documents)
        )
        if self.precision == "int8" and not isinstance(others, TokenVectors) and len(others):
            others = TokenVectors.of(others)
        if isinstance(others, TokenVectors):
            scores = [others.scores(query, threads=self.threads) for query in several]
        else:
            scores = [np.array([max_sim(query, document) for document in others], np.float32) for query in several]
        return np.array(scores, np.float32).reshape(len(several), len(others))

    def index(self, documents: Iterable[str], *, max_length: int | None = None) -> TokenVectors:
        """Computes an index of documents: their vectors in 8 bits, which `save` writes and `TokenVectors.load` reads.

        Args:
            documents: The documents; those of a window at a time are in memory.
            max_length: See `__call__`.

        Returns:
            The index.

        Raises:
            RequestError: There are no documents.
        """
        texts, parts = iter(documents), []
        while window := list(itertools.islice(texts, SORT_WINDOW * self.batch_size)):
            parts.append(TokenVectors.of(self.encode_document(window, max_length=max_length)))
        if not parts:
            raise RequestError("found no documents; give at least one")
        return TokenVectors.joined(parts)

    def rank(
        self,
        query: str,
        documents: Sequence[str] | TokenVectors,
        top_k: int | None = None,
        return_documents: bool = False,
    ) -> list[dict[str, Any]]:
        """Orders documents by their scores for a query.

        Args:
            query: The query.
            documents: The documents, or an index of them.
            top_k: Number of results; None for all documents.
            return_documents: Whether results have "text"; an index has no texts.

        Returns:
            {"corpus_id", "score"} of the documents, the best first.
        """
        texts = [] if isinstance(documents, TokenVectors) or not return_documents else documents
        encoded = documents if isinstance(documents, TokenVectors) else self.encode_document(documents)
        (scores,) = self.similarity(self.encode_query(query), encoded)
        return [
            {"corpus_id": i, "score": float(scores[i]), **({"text": texts[i]} if texts else {})}
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
        index: str | Path | None = None,
        top_k: int = TOP,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Scores documents for a query, writes an index of documents, or searches one for queries.

        Writes the columns row (from 1) and score, for a query; row, document (its row from 1) and score, the best
        first, for an index; all in input order.

        Args:
            inputs: Text files with one document or, for an index, query per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file, "-" for CSV on stdout; .npz for an index of the documents.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it, or zeros.
            column: Column of the texts in tables.
            query: Query that the documents are scored for.
            index: Index that is searched.
            top_k: Number of documents of a query in the index.
            max_length: Maximum number of tokens of a text; None for that of the role.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: There is neither a query nor an index, or the input is unusable.
        """
        writes = str(output).endswith(SUFFIX)
        choices = {"--query": query is not None, "--index": index is not None, f"-o NAME{SUFFIX}": writes}
        if sum(choices.values()) != 1:
            used = " and ".join(name for name, is_used in choices.items() if is_used) or "none"
            raise RequestError(f"found {used}, expected one of {', '.join(choices)} (writes an index)")
        if type(top_k) is not int or top_k < 1:
            raise RequestError(f"found top_k {top_k!r:.40}; expected a whole number from 1")
        if index is None:
            configured = self.with_options(query=query, max_length=max_length)
        else:
            options = {"searched": TokenVectors.load(index), "top": top_k, "COLUMNS": FOUND}
            configured = self.configured(role=QUERY, max_length=max_length, **options)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """See `TaskPipeline.lines`: of a search a line a document."""
        if self.searched is None:
            return super().lines(result)
        scores = self.searched.scores(result[VECTORS], threads=self.threads)
        best = np.argsort(-scores, kind="stable")[: self.top]
        return [{"document": int(i) + 1, "score": float(scores[i])} for i in best]

    @contextlib.contextmanager
    def _writer(self, output: str | Path) -> Iterator[Write]:
        if not str(output).endswith(SUFFIX):
            with super()._writer(output) as write:
                yield write
            return
        parts: list[TokenVectors] = []
        invalid = np.zeros((1, self.config.output_size), np.float32)

        def write_index(results: list[Any], rows: NDArray[np.int64]) -> None:
            parts.append(TokenVectors.of([invalid if result is None else result[VECTORS] for result in results]))

        yield write_index
        TokenVectors.joined(parts).save(output)


def max_sim(query: Floats, document: Floats) -> np.float32:
    """Computes MaxSim in float32.

    Args:
        query: float32 [tokens, components].
        document: float32 [tokens, components], at least one token.

    Returns:
        The score.
    """
    return np.float32((query @ document.T).max(axis=1).sum())
