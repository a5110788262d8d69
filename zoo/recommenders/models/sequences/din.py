"""DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class DINConfig(TrainConfig):
    """Training settings of DIN.

    Attributes:
        attention: Widths of the hidden layers of the activation unit.
        activation: "dice" or "prelu".
        weights: "sigmoid", or "softmax" over the items.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (200, 80)
    attention: tuple[int, ...] = (36, 16)
    activation: str = "dice"
    weights: str = "sigmoid"
    dropout: float = 0.2
    l2_embeddings: tuple[float, ...] = (100.0, 1000.0)


class DIN(LazyModule):
    """Deep Interest Network: the history weighted by its relation to the candidate, beside all other columns."""

    sequences = True

    def __init__(self, features: Features, config: DINConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, counts
        from zoo.recommenders.models.sequences.layers import (
            FieldLookup,
            SequenceLookup,
            SequenceMask,
            TargetAttention,
            activation_of,
            sequences_of,
        )

        super().__init__()
        _, self.numbers = counts(features)
        pairs, size = sequences_of(features), config.embedding_size
        self.embeddings = Embeddings(features.fields, size, sequences=True)
        self.queries = nn.ModuleList(FieldLookup(self.embeddings, target) for _, target in pairs)
        self.keys = nn.ModuleList(SequenceLookup(self.embeddings, field) for field, _ in pairs)
        self.masks = nn.ModuleList(SequenceMask(field) for field, _ in pairs)
        self.interests = nn.ModuleList(
            TargetAttention(size, config.attention, config.activation, config.weights) for _ in pairs
        )
        inputs = self.embeddings.width + len(pairs) * size + self.numbers
        layers: list[nn.Module] = []
        for before, width in zip([inputs, *config.hidden], config.hidden, strict=False):
            layers += [nn.Linear(before, width), activation_of(config.activation, width), nn.Dropout(config.dropout)]
        self.deep = nn.Sequential(*layers, nn.Linear([inputs, *config.hidden][-1], 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Computes logits.

        Args:
            ids: Table rows, int32 [n, columns].
            numbers: float32 [n, numbers].
            scales: Reciprocals of list lengths, float32 [n, lists].

        Returns:
            Logits, float32 [n, 1].
        """
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        for query, key, mask, interest in zip(self.queries, self.keys, self.masks, self.interests, strict=True):
            flat = concat_numbers(flat, interest(query(ids), key(ids), mask(ids)), 1)
        return self.deep(concat_numbers(flat, numbers, self.numbers))


DIN_FAMILY = TrainableRankingFamily(
    name="din",
    title="DIN (Zhou et al. 2018): click-through rate with attention of the candidate to the user's history",
    build=DIN,
    config=DINConfig(),
)
