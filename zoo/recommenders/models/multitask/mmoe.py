"""MMoE (Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.models.multitask.layers import GatedSum, concatenated, experts
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class MMoEConfig(TrainConfig):
    """Training settings of MMoE; `hidden` are the widths of an expert's layers.

    Attributes:
        experts: Number of experts, which all labels share.
        tower: Widths of the hidden layers of a label's tower.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (10.0, 30.0)
    l2_layers: float = 10.0
    experts: int = 4
    tower: tuple[int, ...] = (32,)


class MMoE(LazyModule):
    """Multi-gate mixture of experts: y_k = h_k(sum_e softmax(W_k x)_e f_e(x)) + y_FM for every label k.

    The experts f_e are multilayer perceptrons on the embeddings and numbers x, shared by all labels; the gate W_k and
    the tower h_k are a label's own. y_FM is the sum of the dot products of all pairs of embeddings, as in DeepFM.
    """

    labels: ClassVar = (1, 1000)
    widths: ClassVar = {"embeddings": ("embedding_size",), "experts.*": ("hidden",), "towers.*": ("tower",)}

    def __init__(self, features: Features, config: MMoEConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        count = max(len(features.schema.labels), 1)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.order2 = FactorizationMachine(fields, config.embedding_size)
        width = self.embeddings.width + self.numbers
        self.experts = experts(config.experts, width, config.hidden, config.dropout)
        self.gates = nn.ModuleList(nn.Linear(width, config.experts, bias=False) for _ in range(count))
        self.mixtures = nn.ModuleList(GatedSum() for _ in range(count))
        self.towers = nn.ModuleList(mlp(config.hidden[-1], config.tower, 1, config.dropout) for _ in range(count))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        x, pairs = concat_numbers(flat, numbers, self.numbers), self.order2(flat)
        outputs = [expert(x) for expert in self.experts]
        mixtures = [mixture(gate(x), *outputs) for gate, mixture in zip(self.gates, self.mixtures, strict=True)]
        return concatenated([tower(x) + pairs for tower, x in zip(self.towers, mixtures, strict=True)])


MMOE = TrainableRankingFamily(
    name="mmoe",
    title="MMoE (Ma et al. 2018): several labels by gates over shared experts, from the columns of any log",
    build=MMoE,
    config=MMoEConfig(),
)
