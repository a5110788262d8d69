"""GDCN in its parallel form, GDCN-P.

Wang et al. 2023, "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction".
"""

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
class GDCNConfig(TrainConfig):
    """Training settings of GDCN.

    Attributes:
        layers: Number of gated cross layers.
    """

    layers: int = 3


class GatedCross(LazyModule):
    """Gated cross layer: c_{l+1} = c_0 * (W_c c_l + b) * sigmoid(W_g c_l) + c_l."""

    def __init__(self, width: int) -> None:
        from torch import nn

        super().__init__()
        self.cross = nn.Linear(width, width)
        self.gate = nn.Linear(width, width, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> Any:
        """Computes the layer.

        Args:
            x0: Input of the first cross layer, float32 [n, width].
            x: Input of this layer, float32 [n, width].

        Returns:
            float32 [n, width].
        """
        return x0 * (self.cross(x) * self.sigmoid(self.gate(x))) + x


class GDCN(LazyModule):
    """Gated cross layers and a deep network on the same input, plus a first-order weight per category."""

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: GDCNConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FirstOrder, counts, mlp

        super().__init__()
        _, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        width = self.embeddings.width + self.numbers
        self.wide = FirstOrder(features.fields)
        self.cross = nn.ModuleList(GatedCross(width) for _ in range(config.layers))
        self.cross_output = nn.Linear(width, 1)  # with the last layer of `deep`, one linear layer in two parts
        self.deep = mlp(width, config.hidden, 1, config.dropout)

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

        x0 = concat_numbers(self.embeddings(ids, scales), numbers, self.numbers)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.cross_output(x) + self.deep(x0) + self.wide(ids, scales)


GDCN_FAMILY = TrainableRankingFamily(
    name="gdcn",
    title="GDCN (Wang et al. 2023): click-through rate from the columns of any log",
    # the inputs of these layers hold numbers next to products of embeddings, ten times as large
    recipe=replace(RECIPE, keep_float=(r"cross\.[1-9]\.(cross|gate)|cross_output",)),
    build=GDCN,
    config=GDCNConfig(),
)
