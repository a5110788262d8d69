"""BST (Chen et al. 2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.models.sequences.target_network import TargetNetwork
from zoo.recommenders.train_config import TrainConfig

if TYPE_CHECKING:
    from zoo.recommenders.data.encoding import Field


@dataclass(frozen=True)
class BSTConfig(TrainConfig):
    """Training settings of BST.

    Attributes:
        heads: Number of attention heads.
        inner: Width of the feed-forward network of the transformer layer.
    """

    embedding_size: int = 32
    hidden: tuple[int, ...] = (256, 128)
    heads: int = 8
    inner: int = 64
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (10.0, 30.0)


class BST(TargetNetwork):
    """Behavior Sequence Transformer: a transformer layer over the history and the candidate, beside all other columns.

    As in the paper, one layer with position vectors. The candidate attends to itself and to the history; the items of
    the history do not attend to the candidate, so that their part is the same for all candidates of a request, and the
    candidate's own result alone enters the MLP. Vectors of time gaps add to those of the positions.
    """

    def attention(self, field: Field, config: BSTConfig, gaps: bool) -> Any:
        """See `TargetNetwork`."""
        from zoo.recommenders.models.sequences.blocks import TargetTransformer

        return TargetTransformer(config.embedding_size, field.width, config.heads, config.inner, config.dropout)

    def activation(self, width: int, config: BSTConfig) -> Any:
        """See `TargetNetwork`."""
        from zoo.recommenders.models.sequences.layers import PReLU

        return PReLU(width)


BST_FAMILY = TrainableRankingFamily(
    name="bst",
    title="BST (Chen et al. 2019): click-through rate with a transformer layer over the user's history",
    build=BST,
    config=BSTConfig(),
)
