"""PLE.

Tang et al. 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized
Recommendations".
"""

from __future__ import annotations

from collections.abc import Sequence
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
class PLEConfig(TrainConfig):
    """Training settings of PLE; `hidden` are the widths of an expert's layers.

    Attributes:
        levels: Number of extraction layers.
        experts: Number of experts of each label, in every level.
        shared: Number of experts that all labels share, in every level.
        tower: Widths of the hidden layers of a label's tower.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (10.0, 30.0)
    l2_layers: float = 10.0
    levels: int = 2
    experts: int = 1
    shared: int = 1
    tower: tuple[int, ...] = (32,)


class Extraction(LazyModule):
    """Extraction layer: every label mixes its own experts with the shared ones, by a gate on its own input.

    Except in the last level, the shared part mixes all experts.
    """

    def __init__(self, inputs: int, labels: int, config: PLEConfig, last: bool) -> None:
        from torch import nn

        super().__init__()
        own = [config.experts] * labels
        mixed = [config.experts + config.shared] * labels + ([] if last else [sum(own) + config.shared])
        self.experts = nn.ModuleList(
            experts(count, inputs, config.hidden, config.dropout) for count in (*own, config.shared)
        )
        self.gates = nn.ModuleList(nn.Linear(inputs, count, bias=False) for count in mixed)
        self.mixtures = nn.ModuleList(GatedSum() for _ in mixed)

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Computes the layer.

        Args:
            inputs: Input of every label and of the shared part, float32 [n, inputs] each.

        Returns:
            Result of every label and, except in the last level, of the shared part, float32 [n, width] each.
        """
        groups: Any = zip(self.experts, inputs, strict=True)
        outputs = [[expert(x) for expert in group] for group, x in groups]
        *own, shared = outputs
        mixed = [[*group, *shared] for group in own]
        mixed.append([expert for group in outputs for expert in group])
        parts = zip(self.gates, self.mixtures, mixed, inputs, strict=False)
        return [mixture(gate(x), *group) for gate, mixture, group, x in parts]


class PLE(LazyModule):
    """Progressive layered extraction: levels of experts, some of one label and some shared, then a tower a label.

    Every label's logit has the sum of the dot products of all pairs of embeddings added, as in DeepFM.
    """

    labels: ClassVar = (1, 1000)
    widths: ClassVar = {"embeddings": ("embedding_size",), "levels.*.experts.*.*": ("hidden",), "towers.*": ("tower",)}

    def __init__(self, features: Features, config: PLEConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        self.count = max(len(features.schema.labels), 1)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.order2 = FactorizationMachine(fields, config.embedding_size)
        widths = [self.embeddings.width + self.numbers] + [config.hidden[-1]] * (config.levels - 1)
        self.levels = nn.ModuleList(
            Extraction(width, self.count, config, level == config.levels) for level, width in enumerate(widths, 1)
        )
        self.towers = nn.ModuleList(mlp(config.hidden[-1], config.tower, 1, config.dropout) for _ in range(self.count))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        x, pairs = concat_numbers(flat, numbers, self.numbers), self.order2(flat)
        inputs = [x] * (self.count + 1)
        for level in self.levels:
            inputs = level(inputs)
        return concatenated([tower(x) + pairs for tower, x in zip(self.towers, inputs, strict=True)])


PLE_FAMILY = TrainableRankingFamily(
    name="ple",
    title="PLE (Tang et al. 2020): several labels by shared and own experts, from the columns of any log",
    build=PLE,
    config=PLEConfig(),
)
