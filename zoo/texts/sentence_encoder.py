"""The methods of sentence-transformers on the pipelines of text encoders: `encode`, `similarity`, `rank`.

Source: https://sbert.net, version 6.2. Names, defaults and results are those of `SentenceTransformer` and
`CrossEncoder`; similarities are numpy arrays instead of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from zoo.texts.data import vector_files
from zoo.texts.data.chunks import Chunking, Chunks, divide
from zoo.texts.text_pipeline import SORT_WINDOW, Floats, TextPipeline

COSINE = "cosine"
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


class SentenceEncoder(TextPipeline):
    """Text pipeline with the methods of `SentenceTransformer`."""

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text."""
        return self.max_length

    def get_sentence_embedding_dimension(self) -> int:
        """Returns the number of components of an embedding."""
        return self.config.output_size

    def encode(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 0,
        show_progress_bar: bool | None = None,
        output_value: str = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Any:
        """Computes embeddings of texts as `SentenceTransformer.encode` does.

        Args:
            inputs: A text, or texts. An empty text has an embedding, too.
            prompt_name: Name of a prompt of the model; None for its default prompt.
            prompt: Prefix of every text, instead of a named prompt.
            batch_size: Number of texts of a padded batch of a stock engine; 0 for that of the pipeline. The native
                engine pads no texts.
            show_progress_bar: Whether to show the progress on stderr.
            output_value: "sentence_embedding".
            precision: "float32"; "int8" or "uint8", by the ranges of the components over all texts; "binary" or
                "ubinary", one bit a component.
            convert_to_numpy: Whether to return an array; else a list of tensors.
            convert_to_tensor: Whether to return a tensor.
            device: None or "cpu".
            normalize_embeddings: Whether to normalize embeddings to length 1, after `truncate_dim`.
            truncate_dim: Number of components to keep; None for all.

        Returns:
            Array [texts, components] of the precision, or one row of it for a single text.

        Raises:
            RequestError: The model has no such prompt, or an option is invalid.
        """
        if output_value != "sentence_embedding":
            raise RequestError(f"found output_value {output_value!r}; expected 'sentence_embedding'")
        if precision not in PRECISIONS:
            raise RequestError(f"found the precision {precision!r}; expected one of {', '.join(PRECISIONS)}")
        if device not in (None, "cpu"):
            raise RequestError(f"found the device {device!r}; expected 'cpu'")
        if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
            raise RequestError(f"found truncate_dim {truncate_dim!r}; expected a whole number of 1 or more")
        prefix = self._prefix(prompt_name, prompt)
        single = isinstance(inputs, str)
        rows: list[tuple[str, ...]] = [(text,) for text in ([inputs] if isinstance(inputs, str) else inputs)]
        if other := {type(row[0]).__name__ for row in rows if not isinstance(row[0], str)}:
            raise RequestError(f"found {min(other)} among the texts; expected str")
        window = max(batch_size, SORT_WINDOW * self.batch_size)
        parts = [np.zeros((0, self.config.output_size), np.float32)]
        shown = progress("computing texts", len(rows)) if show_progress_bar else contextlib.nullcontext(lambda _: None)
        with shown as advance:
            for start in range(0, len(rows), window):
                parts.append(self.compute(self.tokenize(rows[start : start + window], prefix)))
                advance(len(parts[-1]))
        vectors = np.concatenate(parts)[:, :truncate_dim]
        if normalize_embeddings:
            vectors = vector_files.normalize(vectors)
        embeddings = quantized(np.ascontiguousarray(vectors), precision)
        result = embeddings[0] if single else embeddings
        if not convert_to_tensor and convert_to_numpy:
            return result
        import torch

        return torch.from_numpy(result) if convert_to_tensor or single else list(torch.from_numpy(result))

    def encode_chunks(
        self, inputs: Sequence[str], size: int, stride: int = 0, pooling: str = "none", prompt: str | None = None
    ) -> tuple[Floats, Chunks]:
        """Computes embeddings of the chunks of long texts.

        Args:
            inputs: The texts.
            size: Maximum number of tokens of a chunk, special tokens and prompt included.
            stride: Number of tokens that a chunk shares with the one before.
            pooling: "none" for an embedding a chunk; "mean" for the mean of a text's chunks, normalized as the model's
                embeddings are.
            prompt: Prefix of every chunk; None for the default prompt of the model.

        Returns:
            Embeddings, float32 [chunks, width] or [texts, width]; and the chunks.

        Raises:
            RequestError: The size or the stride is out of range.
        """
        prefix = self.prompts.prefix(prompt)
        parts = divide(self.tokenizer, inputs, Chunking(size, stride, pooling), prefix)
        vectors = self.compute_texts([(text,) for text in parts.texts], prefix)
        return (parts.mean(vectors, self.config.unit_length) if pooling == "mean" else vectors), parts

    def encode_query(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes embeddings of queries.

        Args:
            inputs: A query, or queries.
            **options: Options of `encode`; without a prompt that of `Prompts.role` is used.

        Returns:
            See `encode`.
        """
        return self._encode_role(inputs, "query", options)

    def encode_document(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes embeddings of documents.

        Args:
            inputs: A document, or documents.
            **options: Options of `encode`; without a prompt that of `Prompts.role` is used.

        Returns:
            See `encode`.
        """
        return self._encode_role(inputs, "document", options)

    def _encode_role(self, inputs: str | Sequence[str], role: str, options: Mapping[str, Any]) -> Any:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options = {**options, "prompt": self.prompts.role(role)}
        return self.encode(inputs, **options)

    def _prefix(self, prompt_name: str | None, prompt: str | None) -> str | None:
        """The prefix of texts; None for the default."""
        if prompt is not None or prompt_name is None:
            return prompt
        if prompt_name not in self.prompts.texts:
            names = ", ".join(self.prompts.texts) or "none"
            raise RequestError(f"found no prompt {prompt_name!r:.60}; the model has {names}")
        return self.prompts.texts[prompt_name]

    @property
    def similarity_fn_name(self) -> str:
        """Similarity that the model was trained for: "cosine", "dot", "euclidean" or "manhattan"."""
        return str(self.folder.preprocessing.get("similarity", COSINE))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Floats:
        """Computes the similarities of all embeddings with all others, by `similarity_fn_name`; distances are negative.

        Args:
            embeddings1: [n, width] or [width].
            embeddings2: [m, width] or [width].

        Returns:
            float32 [n, m].
        """
        rows, columns, name = _rows(embeddings1), _rows(embeddings2), self.similarity_fn_name
        if name == COSINE:
            rows, columns = vector_files.normalize(rows), vector_files.normalize(columns)
        if name in (COSINE, "dot"):
            return rows @ columns.T
        return np.stack([-_distance(row - columns, name) for row in rows])

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Floats:
        """Computes the similarity of every embedding with the one in the same row, see `similarity`.

        Args:
            embeddings1: [n, width].
            embeddings2: [n, width].

        Returns:
            float32 [n].
        """
        rows, columns, name = _rows(embeddings1), _rows(embeddings2), self.similarity_fn_name
        if name == COSINE:
            rows, columns = vector_files.normalize(rows), vector_files.normalize(columns)
        if name in (COSINE, "dot"):
            similarities: Floats = (rows * columns).sum(axis=1)
            return similarities
        return -_distance(rows - columns, name)


class PairRanker(TextPipeline):
    """Text pipeline with the methods of `CrossEncoder`."""

    def activate(self, logits: Floats) -> Floats:
        """Converts logits to scores.

        Args:
            logits: float32 [n, labels].

        Returns:
            float32 [n, labels].
        """
        raise NotImplementedError

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Orders documents by their scores for a query, as `CrossEncoder.rank` does.

        Args:
            query: The query.
            documents: The documents.
            top_k: Number of results; None for all documents.
            return_documents: Whether results have "text".

        Returns:
            {"corpus_id", "score"} of the documents, the best first.

        Raises:
            RequestError: The model has several scores.
        """
        if self.config.labels != 1:
            raise RequestError(f"{self.folder.card.name} has {self.config.labels} scores; expected a model with one")
        scores = self.activate(self.compute_texts([(query, document) for document in documents]))[:, 0]
        return [
            {"corpus_id": i, "score": float(scores[i]), **({"text": documents[i]} if return_documents else {})}
            for i in np.argsort(-scores, kind="stable").tolist()[:top_k]
        ]


def quantized(vectors: Floats, precision: str) -> NDArray[Any]:
    """Converts embeddings as `quantize_embeddings` of sentence-transformers does.

    Args:
        vectors: float32 [n, width].
        precision: One of `PRECISIONS`.

    Returns:
        [n, width]; uint8 or int8 [n, ceil(width / 8)] for "ubinary" and "binary".

    Raises:
        RequestError: int8 or uint8 of a single text, whose components have no ranges.
    """
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        return vector_files.quantize(vectors, precision)
    if len(vectors) == 1:
        raise RequestError(f"found one text, expected two or more for {precision}: its scale is that of all texts")
    if not len(vectors):
        return vectors.astype(precision)
    low = vectors.min(axis=0)
    steps = (vectors.max(axis=0) - low) / 255
    codes = np.clip(np.floor((vectors - low) / np.where(steps == 0, 1, steps)), 0, 255)
    shifted: NDArray[Any] = (codes - 128 * (precision == "int8")).astype(precision)
    return shifted


def _rows(embeddings: Any) -> Floats:
    """Embeddings as float32 [n, width]."""
    rows = embeddings if isinstance(embeddings, np.ndarray) else np.array([np.asarray(row) for row in embeddings])
    return np.atleast_2d(rows).astype(np.float32)


def _distance(differences: Floats, name: str) -> Floats:
    """Euclidean or Manhattan norms of rows, float32 [n]."""
    norms: Floats = np.linalg.norm(differences, ord=2 if name == "euclidean" else 1, axis=1)
    return norms
