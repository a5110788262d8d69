"""MaxSim of one query and many documents, here in int8, beside numpy and torch in float32.

Vectors are normalized and drawn: tokens are one of many kinds with noise, by the frequencies of words, so that
documents share kinds with a query. One process, one thread, in turn, CPU time. The peers multiply the vectors of all
documents with the query at once, and take the largest product of each document: numpy by segments of the concatenated
vectors, torch of padded documents, as the scoring of PyLate and sentence-transformers. `top` is the share of float32's
best ten documents that int8 has, the mean of several queries; `largest_change` that of a score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import requires
from pipelines.kernels.transformer.token_vectors import TokenVectors
from scripts.peers import harness

KINDS, NOISE, WORDS = 5000, 0.5, 1.1  # of tokens, in a vector's length; exponent of the frequencies
TOP, QUERIES = 10, 20
OURS = "int8-zoo"
Floats = NDArray[np.float32]


class Drawn:
    """Queries and documents.

    Args:
        documents: Number of documents.
        tokens: Mean number of tokens of a document; between half and one and a half times as many.
        query: Tokens of a query.
        components: Components of a vector.
    """

    def __init__(self, documents: int, tokens: int, query: int, components: int) -> None:
        self._draw = np.random.default_rng(0)
        self._kinds = self._draw.standard_normal((KINDS, components)).astype(np.float32) / np.float32(components**0.5)
        self._shares = 1 / np.arange(1, KINDS + 1) ** WORDS
        self._shares /= self._shares.sum()
        lengths = self._draw.integers(tokens // 2, tokens + tokens // 2 + 1, documents)
        self.documents = [self._vectors(int(length)) for length in lengths]
        self.queries = [self._vectors(query) for _ in range(QUERIES)]

    def _vectors(self, count: int) -> Floats:
        vectors = self._kinds[self._draw.choice(KINDS, count, p=self._shares)]
        noise = self._draw.standard_normal(vectors.shape) * (NOISE / vectors.shape[1] ** 0.5)
        vectors = (vectors + noise).astype(np.float32)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--documents", 1000, "documents")
    parser.count("--tokens", 150, "mean tokens of a document")
    parser.count("--query", 32, "tokens of a query")
    parser.count("--components", 128, "components of a vector")
    parser.count("--rounds", 9, "turns of each")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"ms": {name: median}, "ratio": {peer: times ours}, "top", "largest_change", "bytes", "environment"}."""
    with requires("the comparison", "torch"):
        import torch

    torch.set_num_threads(1)
    drawn = Drawn(args.documents, args.tokens, args.query, args.components)
    packed, ours = np.concatenate(drawn.documents), TokenVectors.of(drawn.documents)
    first = np.cumsum([0, *map(len, drawn.documents)])[:-1]
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(array) for array in drawn.documents], batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(array) for array in drawn.documents])[:, None]

    def by_numpy(query: Floats) -> Floats:
        return np.asarray(np.maximum.reduceat(packed @ query.T, first, axis=0).sum(axis=1))

    def by_torch(query: Floats) -> Floats:
        with torch.inference_mode():
            products = (padded @ torch.from_numpy(query).T).masked_fill_(~mask[:, :, None], -torch.inf)
            return np.asarray(products.max(dim=1).values.sum(dim=1).numpy())

    query = drawn.queries[0]
    ways: dict[str, Callable[[Floats], Floats]] = {OURS: ours.scores, "numpy": by_numpy, "torch": by_torch}
    times = harness.in_turn({name: (lambda way=way: way(query)) for name, way in ways.items()}, args.rounds)
    exact, approx = (np.stack([way(query) for query in drawn.queries]) for way in (by_numpy, ours.scores))
    best = [np.argsort(-scores, axis=1, kind="stable")[:, :TOP] for scores in (exact, approx)]
    return {
        "ms": {name: harness.median(values) for name, values in times.items()},
        "ratio": {name: harness.ratio(times[name], times[OURS]) for name in ways if name != OURS},
        "top": float(np.mean([len(np.intersect1d(*rows)) / TOP for rows in zip(*best, strict=True)])),
        "largest_change": float(np.abs(exact - approx).max()),
        "mean_score": float(exact.mean()),
        "bytes": {OURS: ours.codes.nbytes + ours.scale.nbytes, "float32": packed.nbytes},
        "environment": harness.environment("numpy", "torch", rounds=args.rounds, documents=args.documents),
    }
