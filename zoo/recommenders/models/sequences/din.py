"""DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.models.sequences.target_network import TargetNetwork
from zoo.recommenders.train_config import TrainConfig

if TYPE_CHECKING:
    from zoo.recommenders.data.encoding import Field


@dataclass(frozen=True)
class DINConfig(TrainConfig):
    """Training settings of DIN.

    Attributes:
        attention: Widths of the hidden layers of the activation unit.
        activation: "dice" or "prelu".
        weights: "softmax" over the items, or "sigmoid" as in the paper. On MovieLens softmax raises the AUC by 0.02: a
            sum of up to 20 vectors outweighs all other columns.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (200, 80)
    attention: tuple[int, ...] = (36, 16)
    activation: str = "dice"
    weights: str = "softmax"
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (10.0, 30.0)


class DIN(TargetNetwork):
    """Deep Interest Network: the history weighted by its relation to the candidate, beside all other columns."""

    def attention(self, field: Field, config: DINConfig, gaps: bool) -> Any:
        """See `TargetNetwork`."""
        from zoo.recommenders.models.sequences.layers import TargetAttention

        return TargetAttention(config.embedding_size, config.attention, config.activation, config.weights, gaps)

    def activation(self, width: int, config: DINConfig) -> Any:
        """See `TargetNetwork`."""
        from zoo.recommenders.models.sequences.layers import activation_of

        return activation_of(config.activation, width)


DIN_FAMILY = TrainableRankingFamily(
    name="din",
    title="DIN (Zhou et al. 2018): click-through rate with attention of the candidate to the user's history",
    build=DIN,
    config=DINConfig(),
)
