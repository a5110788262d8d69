"""Configuration of BERT-shaped networks: sizes, pooling, and the head of a cross-encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import RequestError

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # inputs of the graph, as in transformers
EMBEDDING, SCORES = "embedding", "scores"  # output of a sentence encoder, and of a cross-encoder
POOLINGS = ("mean", "cls", "max")
MAX_LAYERS, MAX_SIZE = 1000, 1 << 24  # upper bounds of a network
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swish")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a post-LN Transformer encoder: BERT, RoBERTa, XLM-R, DistilBERT, MPNet, ELECTRA, ERNIE.

    Attributes:
        kind: Architecture, a key of `zoo.texts.models.weights.ARCHITECTURES`.
        layers: Number of layers.
        width: Hidden size.
        heads: Number of attention heads.
        hidden: Units between the two linear layers of a feed-forward block.
        vocabulary: Rows of the token embedding.
        positions: Rows of the position embedding.
        first_position: Row of a text's first token in the position embedding.
        types: Rows of the token type embedding; 0: none.
        activation: Activation of feed-forward blocks, one of `ACTIVATIONS`.
        epsilon: Epsilon of layer normalization.
        buckets: Buckets of MPNet's relative position bias; 0: none.
        pooling: Pooling of the last layer to an embedding, one of `POOLINGS`.
        normalize: Whether embeddings are L2-normalized.
        labels: Outputs of a cross-encoder's classification head; 0: the network has no head.
        embedding: Columns of the embeddings, before a linear layer to `width` (ELECTRA); 0: `width`.

    Raises:
        RequestError: A size is out of range, or activation or pooling is unknown.
    """

    kind: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int
    first_position: int = 0
    types: int = 0
    activation: str = "gelu"
    epsilon: float = 1e-12
    buckets: int = 0
    pooling: str = "mean"
    normalize: bool = False
    labels: int = 0
    embedding: int = 0

    def __post_init__(self) -> None:
        sizes = {
            key: getattr(self, key)
            for key in ("layers", "width", "heads", "hidden", "vocabulary", "positions", "types")
        }
        for key, size in sizes.items():
            least, most = int(key != "types"), MAX_LAYERS if key == "layers" else MAX_SIZE
            if type(size) is not int or not least <= size <= most:
                raise RequestError(f"a network has {key} {size!r}; expected a whole number from {least} to {most:,}")
        for key in ("first_position", "buckets", "labels", "embedding"):
            if type(getattr(self, key)) is not int or not 0 <= getattr(self, key) <= MAX_SIZE:
                raise RequestError(f"a network has {key} {getattr(self, key)!r}; expected a whole number")
        if not isinstance(self.epsilon, int | float) or not 0 <= self.epsilon < 1:
            raise RequestError(f"a network has the epsilon {self.epsilon!r}; expected a number from 0 to 1")
        if self.width % self.heads:
            raise RequestError(f"a network of width {self.width} cannot have {self.heads} heads")
        if self.activation not in ACTIVATIONS or self.pooling not in POOLINGS:
            raise RequestError(
                f"a network has the activation {self.activation} and the pooling {self.pooling}; known are "
                f"{', '.join(ACTIVATIONS)} and {', '.join(POOLINGS)}"
            )
        if not 0 <= self.first_position < self.positions:
            raise RequestError(f"a network has {self.positions} positions, the first token the {self.first_position}th")

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a text, special tokens included."""
        return self.positions - self.first_position

    @property
    def output_size(self) -> int:
        """Components of the output: labels of a cross-encoder, or the width of embeddings."""
        return self.labels or self.width

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs, int64 [batch, tokens] each; only cross-encoders take token types."""
        return (IDS, MASK, TYPES) if self.labels and self.types > 1 else (IDS, MASK)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; `from_json` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelConfig:
        """Reads the result of `to_json`.

        Args:
            value: JSON object of a card.

        Returns:
            The configuration.

        Raises:
            RequestError: A field is missing, unknown or out of range.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise RequestError(f"the card does not describe the network ({error}); import the model again") from error
