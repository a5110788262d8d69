"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import RECIPE, TrainableRankingFamily
from zoo.recommenders.models.dcn_v2 import Cross
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule
from zoo.training.settings import FROM_0

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class DLRMConfig(TrainConfig):
    """Training settings of DLRM.

    Attributes:
        bottom: Outputs of the hidden layers of the bottom network.
        layers: Number of DCN-V2's cross layers in place of the dot products, as in MLPerf's DLRM-v2; 0: dot products.
        rank: Rank of the matrices of the cross layers; 0 for full matrices.
    """

    embedding_size: int = 32
    dropout: float = 0.3
    bottom: tuple[int, ...] = (64,)
    layers: int = 0
    rank: int = 512
    ranges: ClassVar = {"layers": FROM_0, "rank": FROM_0}


class DLRM(LazyModule):
    """Deep learning recommendation model, with a first-order weight per category.

    A bottom network maps the numbers to one vector. The dot products of all pairs of vectors and the bottom vector
    enter the top network; with cross layers, their result on all vectors does. Without numbers there is no bottom
    network.
    """

    widths: ClassVar = {
        "embeddings": ("embedding_size",),
        "bottom": ("bottom", "embedding_size"),
        "cross.*.v": ("rank",),
        "top": ("hidden",),
    }

    def __init__(self, features: Features, config: DLRMConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import DotInteraction, Embeddings, FirstOrder, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        size = config.embedding_size
        self.embeddings = Embeddings(features.fields, size)
        self.wide = FirstOrder(features.fields)
        self.bottom = mlp(self.numbers, [*config.bottom, size], None) if self.numbers else None
        vectors = fields + bool(self.numbers)
        self.dots = None if config.layers else DotInteraction(vectors, size)
        self.cross = nn.ModuleList(Cross(vectors * size, config.rank) for _ in range(config.layers))
        width = vectors * size if config.layers else vectors * (vectors - 1) // 2 + size * bool(self.numbers)
        self.top = mlp(width, config.hidden, 1, config.dropout)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        z = None if self.bottom is None else self.bottom(numbers)
        flat = self.embeddings(ids, scales)
        vectors = flat if z is None else concat_numbers(z, flat, 1)
        if self.dots is None:
            x = vectors
            for layer in self.cross:
                x = layer(vectors, x)
        else:
            x = self.dots(vectors) if z is None else concat_numbers(z, self.dots(vectors), 1)
        return self.top(x) + self.wide(ids, scales)


DLRM_FAMILY = TrainableRankingFamily(
    name="dlrm",
    title="DLRM (Naumov et al. 2019): click-through rate from the columns of any log",
    recipe=replace(RECIPE, keep_float=(r"dots.*|cross\.0\.mul",)),
    build=DLRM,
    config=DLRMConfig(),
)
