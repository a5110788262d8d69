"""Item index of a two-tower model: exact int8 search, or an index of FAISS."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires
from pipelines.kernels import extension

BLOCK = 1 << 22  # scores computed at once without native kernels


class ItemIndex:
    """Exhaustive search over L2-normalized int8 embeddings; scores are exact dot products of the codes."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        """Quantizes L2-normalized item embeddings, float32 [items, size]."""
        self.codes = quantized(vectors)

    def top(self, users: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Finds the best items of every user by exact search in int8.

        Args:
            users: L2-normalized user embeddings, float32 [n, size].
            count: Number of items per user.

        Returns:
            Item indices, int64 [n, count], and scores (cosines), float32 [n, count]; best first, equal scores by lower
            index.
        """
        queries = quantized(users)
        native = extension.native()
        if native is not None and hasattr(native, "top_k"):
            best, scores = native.top_k(queries, self.codes, count)
        else:
            best, scores = top_k(queries, self.codes, count)
        return best, scores.astype(np.float32) / np.float32(127 * 127)


class FaissIndex:
    """Approximate search by a FAISS index (Douze et al. 2024), for many millions of L2-normalized embeddings."""

    def __init__(self, vectors: NDArray[np.float32], kind: str) -> None:
        """Builds the index.

        Args:
            vectors: L2-normalized item embeddings, float32 [items, size].
            kind: Argument of `faiss.index_factory`, such as HNSW32.

        Raises:
            RequestError: The kind is unknown, or faiss is not installed.
        """
        with requires(f"an index {kind}", "faiss-cpu"):
            import faiss
        try:
            self._index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
            self._index.train(vectors)
            self._index.add(vectors)
        except RuntimeError as error:
            raise RequestError(f"faiss makes no index {kind!r} of {len(vectors)} items: {one_line(error)}") from error

    def top(self, users: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Finds the best items of every user, see `ItemIndex.top`.

        Args:
            users: L2-normalized user embeddings, float32 [n, size].
            count: Number of items per user.

        Returns:
            As `ItemIndex.top`; missing items have the index -1 and the score -inf.
        """
        scores, best = self._index.search(np.ascontiguousarray(users), count)
        return best, np.where(best < 0, np.float32(-np.inf), scores)


def quantized(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Quantizes vectors to int8.

    Args:
        vectors: Values in [-1, 1], float32 [n, size].

    Returns:
        Codes, int8 [n, size], C-contiguous; 127 represents 1.
    """
    return np.ascontiguousarray(np.rint(np.clip(vectors, -1, 1) * 127).astype(np.int8))


def top_k(
    queries: NDArray[np.int8], items: NDArray[np.int8], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Reference of the native search. Exact in float32 up to a size of 1,040.

    Args:
        queries: int8 [n, size].
        items: int8 [items, size].
        count: Number of items per query.

    Returns:
        Item indices, int64 [n, count], and dot products, int32 [n, count]; largest first, equal products by lower
        index.
    """
    table = items.T.astype(np.float32)
    step = max(1, BLOCK // max(len(items), 1))
    best = np.empty((len(queries), count), np.int64)
    scores = np.empty((len(queries), count), np.int32)
    for begin in range(0, len(queries), step):
        products = (queries[begin : begin + step].astype(np.float32) @ table).astype(np.int64)
        order = products * len(items) - np.arange(len(items))  # the products, and among equals the lower index first
        largest = np.argpartition(-order, count - 1, axis=1)[:, :count]
        ranked = np.take_along_axis(largest, np.argsort(-np.take_along_axis(order, largest, 1), axis=1), 1)
        best[begin : begin + step] = ranked
        scores[begin : begin + step] = np.take_along_axis(products, ranked, 1)
    return best, scores
