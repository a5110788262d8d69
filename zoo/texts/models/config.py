"""What a BERT-shaped network is: its sizes, and what is made of the rows of its last layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import RequestError

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # inputs of the graph, as all exporters call them
EMBEDDING, SCORES = "embedding", "scores"  # its output, of an encoder and of a cross-encoder
POOLINGS = ("mean", "cls", "max")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swish")


@dataclass(frozen=True)
class Form:
    """Post-LN Transformer encoder over tokens: BERT, RoBERTa, XLM-R, DistilBERT, MPNet.

    kind: whose names the weights bear, a key of `zoo.texts.models.weights.KINDS`. hidden: width between the linear
    layers of
    feed-forward. vocabulary, positions, types: rows of the embedding tables; first_position: the row of a text's first
    token; types 0: none. buckets: of MPNet's relative positions, 0: none. pooling, normalize: of the last layer's rows
    to one vector, and whether that gets length 1. labels: scores that a head makes of the first row instead, 0: none.
    Raises RequestError where the numbers make no network.
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

    def __post_init__(self) -> None:
        sizes = {
            key: getattr(self, key)
            for key in ("layers", "width", "heads", "hidden", "vocabulary", "positions", "types")
        }
        if wrong := [key for key, each in sizes.items() if type(each) is not int or each < (key != "types")]:
            raise RequestError(f"a network has {wrong[0]} {sizes[wrong[0]]!r}; expected a whole number above 0")
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
    def longest(self) -> int:
        """The most tokens of a text."""
        return self.positions - self.first_position

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Form:
        """What `to_json` made. Raises RequestError for anything else."""
        try:
            return cls(**value)
        except TypeError as error:
            raise RequestError(
                f"the card does not say what network it is of ({error}); import the model again"
            ) from error
