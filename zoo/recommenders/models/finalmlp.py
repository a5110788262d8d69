"""FinalMLP (Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.core.errors import RequestError
from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.train_config import ProductsConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class FinalMLPConfig(ProductsConfig):
    """Training settings of FinalMLP; `hidden` has the widths of the first stream.

    Attributes:
        hidden2: Widths of the hidden layers of the second stream.
        gates: Widths of the hidden layers of the networks that compute the gates.
        heads: Heads of the bilinear fusion; the last widths of both streams are divisible by it.
    """

    embedding_size: int = 32
    dropout: float = 0.3
    hidden2: tuple[int, ...] = (128, 64)
    gates: tuple[int, ...] = (64,)
    heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden[-1] % self.heads or self.hidden2[-1] % self.heads:
            raise RequestError(
                f"found streams of widths {self.hidden[-1]} and {self.hidden2[-1]}, expected multiples of heads "
                f"{self.heads}; change hidden, hidden2 or heads"
            )


class FeatureGates(LazyModule):
    """Gates of embeddings by a context: e * 2 sigmoid(MLP(context)), the context being some of the embeddings."""

    def __init__(self, width: int, context: Sequence[int], hidden: Sequence[int]) -> None:
        from torch import nn

        from zoo.recommenders.models.layers import SelectColumns, mlp

        super().__init__()
        self.context = SelectColumns(context)
        self.network = mlp(len(context), hidden, width)
        self.sigmoid = nn.Sigmoid()

    def forward(self, flat: torch.Tensor) -> Any:
        """Multiplies embeddings by their gates.

        Args:
            flat: Embeddings, float32 [n, width].

        Returns:
            float32 [n, width].
        """
        return flat * (self.sigmoid(self.network(self.context(flat))) * 2.0)


class FinalMLP(LazyModule):
    """Two networks on gated embeddings, joined by a bilinear form, plus a first-order weight per category.

    y = w_1 o_1 + w_2 o_2 + sum_h o_1h W_h o_2h for the results o_1, o_2 of the streams, split into heads. The gates of
    the first stream read the user's and the context's columns, those of the second stream the items' columns; without
    columns of items in the schema, the gates are the same in all samples. With `products` the dot
    products of all pairs of embeddings are added.
    """

    widths: ClassVar = {
        "embeddings": ("embedding_size",),
        "*_gates.network": ("gates",),
        "first": ("hidden",),
        "second": ("hidden2",),
    }

    def __init__(self, features: Features, config: FinalMLPConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.field_layers import BilinearHeads, ConstantGates
        from zoo.recommenders.models.layers import Embeddings, FactorizationMachine, FirstOrder, RowDot, counts, mlp

        super().__init__()
        fields, self.numbers = counts(features)
        size = config.embedding_size
        self.embeddings = Embeddings(features.fields, size)
        self.wide = FirstOrder(features.fields)
        self.order2 = FactorizationMachine(fields, size) if config.products else None
        width = self.embeddings.width

        def gates(item: bool) -> Any:
            own = [index for index, field in enumerate(features.fields) if (field.column.tower == "item") == item]
            if not 0 < len(own) < len(features.fields):
                return ConstantGates(width)
            columns = [index * size + column for index in own for column in range(size)]
            return FeatureGates(width, columns, config.gates)

        self.first_gates, self.second_gates = gates(item=False), gates(item=True)
        inputs = width + self.numbers
        self.first = mlp(inputs, config.hidden, None, config.dropout)
        self.second = mlp(inputs, config.hidden2, None, config.dropout)
        sizes = config.hidden[-1], config.hidden2[-1]
        self.first_output, self.second_output = nn.Linear(sizes[0], 1), nn.Linear(sizes[1], 1, bias=False)
        self.fusion = BilinearHeads(*sizes, config.heads) if config.heads > 1 else nn.Linear(*sizes, bias=False)
        self.dot = RowDot()

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        o1 = self.first(concat_numbers(self.first_gates(flat), numbers, self.numbers))
        o2 = self.second(concat_numbers(self.second_gates(flat), numbers, self.numbers))
        fused = self.dot(self.fusion(o1), o2)
        logits = self.first_output(o1) + self.second_output(o2) + fused + self.wide(ids, scales)
        return logits if self.order2 is None else logits + self.order2(flat)


FINALMLP = TrainableRankingFamily(
    name="finalmlp",
    title="FinalMLP (Mao et al. 2023): click-through rate from the columns of any log",
    build=FinalMLP,
    config=FinalMLPConfig(),
)
