"""BST (Chen et al. 2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba")."""

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
class BSTConfig(TrainConfig):
    """Training settings of BST.

    Attributes:
        heads: Number of attention heads.
        inner: Width of the feed-forward network of the transformer layer.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (256, 128)
    heads: int = 8
    inner: int = 64


class BST(LazyModule):
    """Behavior Sequence Transformer: a transformer layer over the history and the candidate, beside all other columns.

    As in the paper, one layer with position vectors. The candidate attends to itself and to the history; the items of
    the history do not attend to the candidate, so that their part is the same for all candidates of a request, and the
    candidate's own result alone enters the MLP.
    """

    sequences = True

    def __init__(self, features: Features, config: BSTConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, counts
        from zoo.recommenders.models.sequences.blocks import TargetTransformer
        from zoo.recommenders.models.sequences.layers import (
            FieldLookup,
            PReLU,
            SequenceLookup,
            SequenceMask,
            sequences_of,
        )

        super().__init__()
        _, self.numbers = counts(features)
        pairs, size = sequences_of(features), config.embedding_size
        self.embeddings = Embeddings(features.fields, size, sequences=True)
        self.queries = nn.ModuleList(FieldLookup(self.embeddings, target) for _, target in pairs)
        self.keys = nn.ModuleList(SequenceLookup(self.embeddings, field) for field, _ in pairs)
        self.masks = nn.ModuleList(SequenceMask(field) for field, _ in pairs)
        self.transformers = nn.ModuleList(
            TargetTransformer(size, field.width, config.heads, config.inner, config.dropout) for field, _ in pairs
        )
        inputs = self.embeddings.width + len(pairs) * size + self.numbers
        layers: list[nn.Module] = []
        for before, width in zip([inputs, *config.hidden], config.hidden, strict=False):
            layers += [nn.Linear(before, width), PReLU(width), nn.Dropout(config.dropout)]
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
        for query, key, mask, layer in zip(self.queries, self.keys, self.masks, self.transformers, strict=True):
            flat = concat_numbers(flat, layer(query(ids), key(ids), mask(ids)), 1)
        return self.deep(concat_numbers(flat, numbers, self.numbers))


BST_FAMILY = TrainableRankingFamily(
    name="bst",
    title="BST (Chen et al. 2019): click-through rate with a transformer layer over the user's history",
    build=BST,
    config=BSTConfig(),
)
