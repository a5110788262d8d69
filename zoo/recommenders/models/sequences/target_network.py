"""Rankers that weigh the history by the candidate, beside all other columns: what DIN and BST have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.encoding import Field
    from zoo.recommenders.data.features import Features


class TargetNetwork(LazyModule):
    """Logit = a network on all vectors and the numbers + the dot products of all pairs of vectors, as in DeepFM.

    The vectors are the embeddings of all columns and one vector of every sequence, weighed by its candidate. On
    MovieLens the products, above all that of the candidate and its history, raise the AUC by 0.01.
    """

    sequences = True

    def __init__(self, features: Features, config: Any) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, counts
        from zoo.recommenders.models.sequences.layers import (
            FieldLookup,
            SequenceLookup,
            SequenceMask,
            gaps_of,
            sequences_of,
        )

        super().__init__()
        _, self.numbers = counts(features)
        pairs, size = sequences_of(features), config.embedding_size
        self.embeddings = Embeddings(features.fields, size, sequences=True)
        self.queries = nn.ModuleList(FieldLookup(self.embeddings, target) for _, target in pairs)
        self.keys = nn.ModuleList(SequenceLookup(self.embeddings, field) for field, _ in pairs)
        self.masks = nn.ModuleList(SequenceMask(field) for field, _ in pairs)
        gaps = {str(i): gap for i, (field, _) in enumerate(pairs) if (gap := gaps_of(features, field)) is not None}
        self.gaps = nn.ModuleDict({i: SequenceLookup(self.embeddings, field) for i, field in gaps.items()})
        interests = [self.attention(field, config, str(i) in gaps) for i, (field, _) in enumerate(pairs)]
        self.interests = nn.ModuleList(interests)
        inputs = self.embeddings.width + len(pairs) * size + self.numbers
        layers: list[nn.Module] = []
        for before, width in zip([inputs, *config.hidden], config.hidden, strict=False):
            layers += [nn.Linear(before, width), self.activation(width, config), nn.Dropout(config.dropout)]
        self.deep = nn.Sequential(*layers, nn.Linear([inputs, *config.hidden][-1], 1))
        self.order2 = FactorizationMachine(len(self.embeddings.pooled) + len(pairs), size)

    def attention(self, field: Field, config: Any, gaps: bool) -> Any:
        """Creates the attention of a candidate to a sequence.

        Args:
            field: The sequence.
            config: Training settings.
            gaps: Whether the items have time gaps.

        Returns:
            Module: vector of the candidate, float32 [n, size], vectors of the items, float32 [n, items, size], mask of
            the items, float32 [n, items], and vectors of time gaps as those of the items -> float32 [n, size].
        """
        raise NotImplementedError

    def activation(self, width: int, config: Any) -> Any:
        """Creates the activation of a hidden layer.

        Args:
            width: Width of the layer.
            config: Training settings.

        Returns:
            Module: float32 [n, width] -> float32 [n, width].
        """
        raise NotImplementedError

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        parts = zip(self.queries, self.keys, self.masks, self.interests, strict=True)
        for i, (query, key, mask, interest) in enumerate(parts):
            gaps = [self.gaps[str(i)](ids)] if str(i) in self.gaps else []
            flat = concat_numbers(flat, interest(query(ids), key(ids), mask(ids), *gaps), 1)
        return self.deep(concat_numbers(flat, numbers, self.numbers)) + self.order2(flat)
