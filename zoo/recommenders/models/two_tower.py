"""Two towers (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.core.errors import RequestError
from pipelines.models.family import RunOption
from zoo.recommenders.family import KEEP, TrainableRankingFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule
from zoo.training.settings import FROM_0

if TYPE_CHECKING:
    import torch

    from pipelines.models.pipeline import Pipeline
    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class TwoTowerConfig(TrainConfig):
    """Training settings of two towers.

    Attributes:
        tower_size: Size of the vectors.
        softmax: Weight of the batch softmax relative to the loss of the click.
        temperature: Divisor of the scores in the batch softmax.
    """

    embedding_size: int = 32
    tower_size: int = 64
    softmax: float = 0.01
    temperature: float = 0.1
    ranges: ClassVar = {"softmax": FROM_0}


class Tower(LazyModule):
    """Network of one side (user or item) with an L2-normalized output."""

    def __init__(self, features: Features, side: str, config: TwoTowerConfig) -> None:
        from zoo.recommenders.models.layers import Embeddings, L2Normalize, SelectColumns, mlp

        super().__init__()
        fields = [field for field in features.fields if field.column.tower == side]
        if not fields:
            raise RequestError(
                f'the schema has no category of the tower {side}; give its columns "tower": "{side}" (zoo schema LOG '
                "-o schema.json, then --schema schema.json)"
            )
        own = [index for index, number in enumerate(features.numbers) if number.tower == side]
        own += [len(features.numbers) + index for index, which in enumerate(features.indicators) if which in own]
        self.embeddings = Embeddings(fields, config.embedding_size)
        self.numbers = SelectColumns(own) if own else None
        self.network = mlp(self.embeddings.width + len(own), config.hidden, config.tower_size, config.dropout)
        self.unit = L2Normalize()

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Computes embeddings of one side.

        Args:
            ids: Table rows, int32 [n, columns].
            numbers: float32 [n, numbers].
            scales: Reciprocals of list lengths, float32 [n, lists].

        Returns:
            L2-normalized embeddings, float32 [n, tower_size].
        """
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        x = flat if self.numbers is None else concat_numbers(flat, self.numbers(numbers), 1)
        return self.unit(self.network(x))


class TwoTower(LazyModule):
    """Two-tower model: logit = a <user, item> + b, trained on clicks and a sampled softmax over the items of a batch.

    The batch softmax of the paper for a click on item j is -log softmax_j(<user, item_k> / t - log q_k) over the items
    of the batch. Subtracting log q_k, the probability that a batch contains item k, corrects the sampling bias towards
    frequent items. The running mean of the steps between occurrences of an item estimates 1 / q_k (algorithm 2).
    """

    outputs = ("user", "item")
    widths: ClassVar = {"*.embeddings": ("embedding_size",), "*.network": ("hidden", "tower_size")}
    last: torch.Tensor
    gap: torch.Tensor
    steps: torch.Tensor

    def __init__(self, features: Features, config: TwoTowerConfig) -> None:
        import torch
        from torch import nn

        from zoo.recommenders.models.layers import RowDot

        super().__init__()
        self.user, self.item = Tower(features, "user", config), Tower(features, "item", config)
        self.dot = RowDot()
        self.logit = nn.Linear(1, 1)
        nn.init.constant_(self.logit.weight, 2.0)
        nn.init.zeros_(self.logit.bias)
        self.output_size, self.softmax, self.temperature = config.tower_size, config.softmax, config.temperature
        self.key = features.key
        self.register_buffer("last", torch.zeros(self.key.rows))
        self.register_buffer("gap", torch.full((self.key.rows,), 100.0))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Computes logits and embeddings.

        Args:
            ids: Table rows, int32 [n, columns].
            numbers: float32 [n, numbers].
            scales: Reciprocals of list lengths, float32 [n, lists].

        Returns:
            Logits, float32 [n, 1], and L2-normalized embeddings of users and of items, float32 [n, tower_size] each.
        """
        user, item = self.user(ids, numbers, scales), self.item(ids, numbers, scales)
        return self.logit(self.dot(user, item)), user, item

    def losses(self, outputs: Any, ids: torch.Tensor, label: torch.Tensor) -> Any:
        """Computes losses: cross-entropy of the click, plus `softmax` times the batch softmax for clicked rows.

        Args:
            outputs: Results of `forward`.
            ids: Table rows, int32 [n, columns].
            label: Clicks, float32 [n].

        Returns:
            Losses, float32 [n].
        """
        import torch
        from torch.nn import functional

        logits, user, item = outputs
        loss = functional.binary_cross_entropy_with_logits(logits[:, 0], label, reduction="none")
        if not self.softmax:
            return loss
        keys = ids[:, self.key.start].long()
        correction = -torch.log(self._probability(keys))
        scores = user @ item.T / self.temperature + correction
        same = (keys[:, None] == keys) & ~torch.eye(len(keys), dtype=torch.bool)
        scores = scores.masked_fill(same, -math.inf)  # another row of the same item is no wrong answer
        chosen = functional.cross_entropy(scores, torch.arange(len(keys)), reduction="none")
        return loss + self.softmax * label * chosen

    def _probability(self, keys: torch.Tensor) -> torch.Tensor:
        """The estimated probability of each item in a batch, [n]; counts this batch."""
        import torch

        with torch.no_grad():
            self.steps += 1
            items = torch.unique(keys)
            self.gap[items] = 0.99 * self.gap[items] + 0.01 * (self.steps - self.last[items])
            self.last[items] = self.steps
            return (1 / self.gap[keys]).clamp(max=1.0)


@dataclass(frozen=True, kw_only=True)
class TwoTowerFamily(TrainableRankingFamily):
    """Family of two-tower models, which retrieve items besides ranking."""

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.recommenders.retrieval.inference import TwoTowerPipeline

        return TwoTowerPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family` and `zoo.recommenders.retrieval.metrics.evaluate`."""
        from zoo.recommenders.retrieval.metrics import evaluate

        return evaluate(pipelines, data, on_error)


TWO_TOWER = TwoTowerFamily(
    name="two-tower",
    title="Two towers (Yi et al. 2019): users and items as vectors, from the columns of any log",
    build=TwoTower,
    config=TwoTowerConfig(),
    run_options=(
        KEEP,
        RunOption(
            "items",
            str,
            None,
            "File of items with their columns: write the best items for the user of every row.",
            "{rows:,} rows, the best of {items:,} items each, {rows_per_second:,.0f} rows/s, {precision} in {engine}",
        ),
        RunOption("top", int, 10, "Number of items per user."),
        RunOption(
            "faiss", str, None, "FAISS index to search, such as HNSW32, for millions of items. [default: exact search]"
        ),
    ),
)
