"""GDCN in its parallel form, GDCN-P.

Wang et al. 2023, "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import RECIPE, TrainableRankingFamily
from zoo.recommenders.models.dcn_v2 import DCNv2
from zoo.recommenders.train_config import ProductsConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GDCNConfig(ProductsConfig):
    """Training settings of GDCN.

    Attributes:
        layers: Number of gated cross layers.
    """

    dropout: float = 0.3
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


class GDCN(DCNv2):
    """Gated cross layers and a deep network on the same input, plus first-order weights and products, see `DCNv2`."""

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def cross_layer(self, width: int, config: GDCNConfig) -> Any:
        """See `DCNv2`."""
        return GatedCross(width)


GDCN_FAMILY = TrainableRankingFamily(
    name="gdcn",
    title="GDCN (Wang et al. 2023): click-through rate from the columns of any log",
    # the inputs of these layers hold numbers next to products of embeddings, ten times as large
    recipe=replace(RECIPE, keep_float=(r"cross\.[1-9]\.(cross|gate)|cross_output",)),
    build=GDCN,
    config=GDCNConfig(),
)
