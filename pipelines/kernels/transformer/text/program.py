"""Programs of the native text encoder: an encoder, pooling, a float32 head and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.transformer.program import EncoderProgram

POOLINGS = ("mean", "cls", "max")
ACTIVATIONS = ("", "tanh", "relu")
SHORTEST = 1e-12  # length of a vector, at least, that is divided by


@dataclass(frozen=True, eq=False)
class Dense:
    """Fully connected layer of a head, in float32: y = activation(W x + b) of the pooled row.

    Attributes:
        weight: float32 [outputs, inputs].
        bias: float32 [outputs].
        activation: "", "tanh" or "relu".

    Raises:
        RequestError: A shape, type or the activation is not supported.
    """

    weight: Array
    bias: Array
    activation: str = ""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size:
            raise RequestError(f"a head has weights of shape {list(self.weight.shape)}; expected [outputs, inputs]")
        require("a head", "weight", self.weight, np.float32, self.weight.shape)
        require("a head", "bias", self.bias, np.float32, self.weight.shape[:1])
        if self.activation not in ACTIVATIONS:
            raise RequestError(f"a head computes {self.activation!r}; expected one of {', '.join(ACTIVATIONS[1:])}")


@dataclass(frozen=True, eq=False)
class TextProgram:
    """Operations of a text encoder.

    Attributes:
        encoder: The encoder. Its table of positions holds one table for each token type, one after the other.
        types: Number of token types.
        pooling: "mean" or "max" of the rows of a text, or "cls", the first row.
        normalize: Whether the result is L2-normalized.
        head: Layers of the pooled row, in order.

    Raises:
        RequestError: The parts do not fit each other.
    """

    encoder: EncoderProgram
    types: int
    pooling: str
    normalize: bool
    head: Sequence[Dense] = ()

    def __post_init__(self) -> None:
        rows = len(self.encoder.embedding.positions)
        if self.pooling not in POOLINGS or self.types < 1 or rows % self.types:
            raise RequestError(
                f"texts are pooled by {self.pooling!r}, with {rows} positions of {self.types} types; "
                f"expected {', '.join(POOLINGS)}, and as many positions for each type"
            )
        width = self.encoder.width
        for layer in self.head:
            if layer.weight.shape[1] != width:
                raise RequestError(f"a head takes {layer.weight.shape[1]} numbers and is given {width}")
            width = layer.weight.shape[0]

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a text."""
        embedding = self.encoder.embedding
        return embedding.longest or len(embedding.positions) // self.types

    @property
    def width(self) -> int:
        """Columns of the result of a text."""
        return int(self.head[-1].weight.shape[0]) if self.head else self.encoder.width

    def position_rows(self, types: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of the table of positions that are added to the tokens of a text.

        Args:
            types: Token types, int64 [n].
        """
        return types if self.encoder.embedding.longest else np.arange(len(types)) + types * self.longest
