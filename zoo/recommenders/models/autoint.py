"""AutoInt (Song et al. 2019, "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.recommenders.family import TrainableRankingFamily
from zoo.recommenders.train_config import ProductsConfig
from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch

    from zoo.recommenders.data.features import Features


@dataclass(frozen=True)
class AutoIntConfig(ProductsConfig):
    """Training settings of AutoInt.

    Attributes:
        layers: Number of interacting layers.
        heads: Heads of an interacting layer.
        attention_size: Size of the vectors of a head.
        deep: Whether a deep network reads the embeddings beside the interacting layers (AutoInt+, section 5.5).
    """

    dropout: float = 0.3
    layers: int = 3
    heads: int = 2
    attention_size: int = 16
    deep: bool = True


class InteractingLayer(LazyModule):
    """Interacting layer: ReLU(multi-head attention between fields + W_res e)."""

    def __init__(self, fields: int, inputs: int, heads: int, size: int) -> None:
        from torch import nn

        from zoo.recommenders.models.field_layers import FieldAttention

        super().__init__()
        self.projections = nn.Linear(inputs, 4 * heads * size, bias=False)
        self.attention = FieldAttention(fields, heads, size)
        self.relu = nn.ReLU()

    def forward(self, rows: torch.Tensor) -> Any:
        """Computes the layer.

        Args:
            rows: Vectors of the fields, float32 [n * fields, inputs].

        Returns:
            float32 [n * fields, heads * size].
        """
        return self.relu(self.attention(self.projections(rows)))


class AutoInt(LazyModule):
    """Interacting layers on the vectors of categories and numbers, with a deep network and first-order weights.

    A linear layer maps an input of kind "vector" to one vector. With `products` the dot products of all pairs of
    embeddings of categories are added.
    """

    widths: ClassVar = {"deep": ("hidden",)}

    def __init__(self, features: Features, config: AutoIntConfig) -> None:
        from torch import nn

        from zoo.recommenders.models.field_layers import JoinFields, NumberVectors, SplitFields
        from zoo.recommenders.models.layers import (
            Embeddings,
            FactorizationMachine,
            FirstOrder,
            SelectColumns,
            counts,
            mlp,
        )

        super().__init__()
        categories, self.numbers = counts(features)
        size, spans = config.embedding_size, [range(places.start, places.stop) for _, places in features.vectors]
        alone = sorted({*range(self.numbers)}.difference(*spans))
        fields = categories + len(alone) + len(spans)
        self.embeddings = Embeddings(features.fields, size)
        self.alone = SelectColumns(alone) if alone and spans else None
        self.vectors = NumberVectors(len(alone), size) if alone else None
        self.spans = nn.ModuleList(SelectColumns(span) for span in spans)
        self.dense = nn.ModuleList(nn.Linear(len(span), size, bias=False) for span in spans)
        self.wide = FirstOrder(features.fields)
        self.order2 = FactorizationMachine(categories, size) if config.products else None
        self.split = SplitFields(size)
        width = config.heads * config.attention_size
        sizes = [size, *[width] * config.layers]
        self.interacting = nn.ModuleList(
            InteractingLayer(fields, inputs, config.heads, config.attention_size) for inputs in sizes[:-1]
        )
        self.join = JoinFields(fields, width)
        self.output = nn.Linear(fields * width, 1)
        deep = self.embeddings.width + self.numbers
        self.deep = mlp(deep, config.hidden, 1, config.dropout) if config.deep else None

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = x = self.embeddings(ids, scales)
        if self.vectors is not None:
            x = concat_numbers(x, self.vectors(numbers if self.alone is None else self.alone(numbers)), 1)
        for span, layer in zip(self.spans, self.dense, strict=True):
            x = concat_numbers(x, layer(span(numbers)), 1)
        rows = self.split(x)
        for layer in self.interacting:
            rows = layer(rows)
        logits = self.output(self.join(rows)) + self.wide(ids, scales)
        if self.order2 is not None:
            logits = logits + self.order2(flat)
        return logits if self.deep is None else logits + self.deep(concat_numbers(flat, numbers, self.numbers))


AUTOINT = TrainableRankingFamily(
    name="autoint",
    title="AutoInt (Song et al. 2019): click-through rate from the columns of any log",
    build=AutoInt,
    config=AutoIntConfig(),
)
