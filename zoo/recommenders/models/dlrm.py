"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Dots, Embeddings, Scalars, counts, joined, mlp


class DLRM(nn.Module):
    """A bottom network makes one vector of the numbers; the dot products of all pairs of vectors and that vector go
    through a top network, beside a weight of each category. A log without numbers has no bottom network.
    """

    widths: ClassVar = {
        "embeddings": ("embedding_size",),
        "bottom": ("bottom", "embedding_size"),
        "top": ("hidden",),
    }

    def __init__(self, features: Features, config: Any) -> None:
        super().__init__()
        fields, self.numbers = counts(features)
        size = config.embedding_size
        self.embeddings = Embeddings(features.fields, size)
        self.wide = Scalars(features.fields)
        self.bottom = mlp(self.numbers, [*config.bottom, size], None) if self.numbers else None
        vectors = fields + bool(self.numbers)
        self.dots = Dots(vectors, size)
        self.top = mlp(vectors * (vectors - 1) // 2 + size * bool(self.numbers), config.hidden, 1, config.dropout)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Logits, float32 [n, 1]."""
        flat = self.embeddings(ids, scales)
        if self.bottom is None:
            return self.top(self.dots(flat)) + self.wide(ids, scales)
        z = self.bottom(numbers)
        return self.top(joined(z, self.dots(joined(z, flat, 1)), 1)) + self.wide(ids, scales)
