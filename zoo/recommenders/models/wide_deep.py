"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems") of the columns of any log."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings, Scalars, counts, joined, mlp


class WideDeep(nn.Module):
    """logit = a weight of each category + a network of embeddings and numbers."""

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: Any) -> None:
        super().__init__()
        _, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.wide = Scalars(features.fields)
        self.deep = mlp(self.embeddings.width + self.numbers, config.hidden, 1, config.dropout)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Logits, float32 [n, 1]."""
        flat = self.embeddings(ids, scales)
        return self.deep(joined(flat, numbers, self.numbers)) + self.wide(ids, scales)
