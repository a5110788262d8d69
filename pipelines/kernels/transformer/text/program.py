"""What the native text encoder computes of every text: an encoder, pooling, a head in float32, normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.transformer.program import EncoderProgram, Vocabulary

POOLINGS = ("mean", "cls", "max")
ACTIVATIONS = ("", "tanh", "relu")
SHORTEST = 1e-12  # length of a vector, at least, that is divided by


@dataclass(frozen=True, eq=False)
class Dense:
    """y = activation(W x + b) of the one row of a text, in float32: a few numbers cost nothing, and decide.

    weight: float32 [outputs, inputs]. bias: float32 [outputs]. Raises RequestError for anything else.
    """

    weight: Array
    bias: Array
    activation: str = ""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size:
            raise RequestError(f"a head has weights of shape {list(self.weight.shape)}; wanted [outputs, inputs]")
        require("a head", "weight", self.weight, np.float32, self.weight.shape)
        require("a head", "bias", self.bias, np.float32, self.weight.shape[:1])
        if self.activation not in ACTIVATIONS:
            raise RequestError(f"a head computes {self.activation!r}; wanted one of {', '.join(ACTIVATIONS[1:])}")


@dataclass(frozen=True, eq=False)
class TextProgram:
    """encoder: its table of positions is one for each of `types`, one after the other: that of the token's own type is
    read. pooling: the mean or the maximum of the rows of a text, or its first one ("cls"). head: layers of that, in
    order; normalize: the result gets length 1.

    Raises RequestError where the parts do not fit each other.
    """

    encoder: EncoderProgram
    types: int
    pooling: str
    normalize: bool
    head: Sequence[Dense] = ()

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS or self.types < 1 or self.encoder.positions % self.types:
            raise RequestError(
                f"texts are pooled by {self.pooling!r}, with {self.encoder.positions} positions of {self.types} types; "
                f"wanted {', '.join(POOLINGS)}, and as many positions for each type"
            )
        width = self.encoder_width
        for layer in self.head:
            if layer.weight.shape[1] != width:
                raise RequestError(f"a head takes {layer.weight.shape[1]} numbers and is given {width}")
            width = layer.weight.shape[0]

    @property
    def longest(self) -> int:
        """The most tokens of a text."""
        return self.encoder.positions // self.types

    @property
    def encoder_width(self) -> int:
        """Columns of the encoder's result: those of its residual stream."""
        last = self.encoder.operations[-1]
        assert not isinstance(last, Vocabulary)
        return int(self.encoder.embedding.table.shape[1])

    @property
    def width(self) -> int:
        """Numbers of a text's result."""
        return int(self.head[-1].weight.shape[0]) if self.head else self.encoder_width
