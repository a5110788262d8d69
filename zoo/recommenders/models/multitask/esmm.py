"""ESMM.

Ma et al. 2018, "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.models.multitask.layers import concatenated
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class ESMMConfig(TrainConfig):
    """Training settings of ESMM; `hidden` are the widths of the layers of every tower."""

    embedding_size: int = 32
    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (10.0, 30.0)


class ESMM(LazyModule):
    """Entire space model of a click and what follows it: pCTCVR = pCTR pCVR, from shared embeddings.

    The first label is the click, every other one a conversion, which is 0 where there is no click. All rows train
    pCTR and pCTCVR. A conversion has the probability pCTCVR; with `where`, which makes it a label of the clicked rows
    alone, pCVR. Every label's logit is that of a multilayer perceptron and the sum of the dot products of all pairs of
    embeddings, as in DeepFM.

    Attributes:
        parents: Label whose probability multiplies that of each label, -1 where there is none.
    """

    labels: ClassVar = (2, 1000)
    widths: ClassVar = {"embeddings": ("embedding_size",), "towers.*": ("hidden",)}

    def __init__(self, features: Features, config: ESMMConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.order2 = FactorizationMachine(fields, config.embedding_size)
        width = self.embeddings.width + self.numbers
        columns = features.schema.of("label")
        self.towers = nn.ModuleList(mlp(width, config.hidden, 1, config.dropout) for _ in columns)
        self.parents = (-1, *(-1 if column.where else 0 for column in columns[1:]))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Computes the logits of pCTR and of the pCVRs.

        Args:
            ids: Table rows, int32 [n, columns].
            numbers: float32 [n, numbers].
            scales: Reciprocals of list lengths, float32 [n, lists].

        Returns:
            Logits, float32 [n, labels].
        """
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        x, pairs = concat_numbers(flat, numbers, self.numbers), self.order2(flat)
        return concatenated([tower(x) + pairs for tower in self.towers])

    def losses(self, results: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Computes the cross-entropies of pCTR and of every pCTCVR, added.

        Args:
            results: Result of `forward`.
            ids: Not used.
            labels: Click and conversions, float32 [n, labels], NaN where missing.

        Returns:
            Losses, float32 [n].
        """
        import torch

        from zoo.recommenders.models.multitask.outputs import label_losses

        click, conversions = labels[:, :1], labels[:, 1:]
        conversions = torch.where(click == 0, 0.0, conversions)
        return label_losses(results, torch.cat([click, conversions], 1), (-1,) + (0,) * conversions.shape[1])


ESMM_FAMILY = TrainableRankingFamily(
    name="esmm",
    title="ESMM (Ma et al. 2018): a click and what follows it, over all rows, from the columns of any log",
    build=ESMM,
    config=ESMMConfig(),
)
