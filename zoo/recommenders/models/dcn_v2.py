"""DCN-V2 in its parallel form.

Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import RECIPE, TrainableRankingFamily
from zoo.recommenders.train_config import ProductsConfig
from zoo.training.lazy_module import LazyModule
from zoo.training.settings import FROM_0

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class DCNv2Config(ProductsConfig):
    """Training settings of DCN-V2.

    Attributes:
        layers: Number of cross layers.
        rank: Rank of the matrices of the cross layers; 0 for full matrices (`layers` x width x width weights).
    """

    embedding_size: int = 32
    dropout: float = 0.3
    layers: int = 2
    rank: int = 32
    ranges: ClassVar = {"rank": FROM_0}


class Cross(LazyModule):
    """Cross layer: x_{l+1} = x_0 * (W x_l + b) + x_l; with a rank, W = U V^T."""

    def __init__(self, width: int, rank: int) -> None:
        from torch import nn

        super().__init__()
        self.v = nn.Linear(width, rank, bias=False) if rank else None
        self.u = nn.Linear(rank or width, width)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> Any:
        """Computes the layer.

        Args:
            x0: Input of the first cross layer, float32 [n, width].
            x: Input of this layer, float32 [n, width].

        Returns:
            float32 [n, width].
        """
        return x0 * self.u(x if self.v is None else self.v(x)) + x


class DCNv2(LazyModule):
    """Cross layers and a deep network on the same input, plus a first-order weight per category.

    One linear layer joins both parts. The Gaussian prior on embeddings suppresses effects of single categories; the
    first-order weights represent them. With `products` the dot products of all pairs of embeddings are added.
    """

    widths: ClassVar = {"embeddings": ("embedding_size",), "cross.*.v": ("rank",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: Any) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, FirstOrder, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        width = self.embeddings.width + self.numbers
        self.wide = FirstOrder(features.fields)
        self.order2 = FactorizationMachine(fields, config.embedding_size) if config.products else None
        self.cross = nn.ModuleList(self.cross_layer(width, config) for _ in range(config.layers))
        self.cross_output = nn.Linear(width, 1)  # with the last layer of `deep`, one linear layer in two parts
        self.deep = mlp(width, config.hidden, 1, config.dropout)

    def cross_layer(self, width: int, config: Any) -> Any:
        """Creates a cross layer.

        Args:
            width: Width of its input and result.
            config: Training settings.

        Returns:
            Module: inputs of the first and of this layer, float32 [n, width] each -> float32 [n, width].
        """
        return Cross(width, config.rank)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        x0 = concat_numbers(flat, numbers, self.numbers)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        logits = self.cross_output(x) + self.deep(x0) + self.wide(ids, scales)
        return logits if self.order2 is None else logits + self.order2(flat)


DCN_V2 = TrainableRankingFamily(
    name="dcn-v2",
    title="DCN-V2 (Wang et al. 2021): click-through rate from the columns of any log",
    # the inputs of these layers hold numbers next to products of embeddings, ten times as large; the layers are small
    recipe=replace(RECIPE, keep_float=(r"cross\.[1-9]\.v|cross_output",)),
    build=DCNv2,
    config=DCNv2Config(),
)
