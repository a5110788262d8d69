"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import RECIPE, TrainableRankingFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class DLRMConfig(TrainConfig):
    """Settings.

    Attributes:
        bottom: Outputs of the hidden layers of the bottom network.
    """

    embedding_size: int = 32
    dropout: float = 0.3
    bottom: tuple[int, ...] = (64,)


class DLRM(LazyModule):
    """Deep learning recommendation model, with a first-order weight per category.

    A bottom network maps the numbers to one vector. The dot products of all pairs of vectors and the bottom vector
    enter the top network. Without numbers there is no bottom network.
    """

    widths: ClassVar = {
        "embeddings": ("embedding_size",),
        "bottom": ("bottom", "embedding_size"),
        "top": ("hidden",),
    }

    def __init__(self, features: Features, config: DLRMConfig) -> None:
        from zoo.recommenders.models.layers import DotInteraction, Embeddings, FirstOrder, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        size = config.embedding_size
        self.embeddings = Embeddings(features.fields, size)
        self.wide = FirstOrder(features.fields)
        self.bottom = mlp(self.numbers, [*config.bottom, size], None) if self.numbers else None
        vectors = fields + bool(self.numbers)
        self.dots = DotInteraction(vectors, size)
        self.top = mlp(vectors * (vectors - 1) // 2 + size * bool(self.numbers), config.hidden, 1, config.dropout)

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
        if self.bottom is None:
            return self.top(self.dots(flat)) + self.wide(ids, scales)
        z = self.bottom(numbers)
        return self.top(concat_numbers(z, self.dots(concat_numbers(z, flat, 1)), 1)) + self.wide(ids, scales)


DLRM_FAMILY = TrainableRankingFamily(
    name="dlrm",
    title="DLRM (Naumov et al. 2019): click-through rate from the columns of any log",
    recipe=replace(RECIPE, keep_float=("dots.*",)),
    build=DLRM,
    config=DLRMConfig(),
)
