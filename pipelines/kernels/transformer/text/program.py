"""Programs of the native text encoder: an encoder, pooling, and a float32 head with normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.transformer.operations import RowLinear
from pipelines.kernels.transformer.program import EncoderProgram

POOLINGS = ("mean", "cls", "max", "last", "weighted_mean", "mean_sqrt_len")
TOKENS = "none"  # the pooling of a program with a result for each token
ACTIVATIONS = ("", "tanh", "relu", "gelu", "gelu_tanh", "swish", "sigmoid")
SHORTEST = 1e-12  # length of a vector, at least, that is divided by


@dataclass(frozen=True, eq=False)
class Dense:
    """Fully connected layer of a head, in float32: y = activation(W x + b).

    Attributes:
        weight: float32 [outputs, inputs].
        bias: float32 [outputs].
        activation: One of `ACTIVATIONS`; "" for none.

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

    def outputs(self, inputs: int) -> int:
        """Returns the number of results.

        Args:
            inputs: Number of inputs.

        Raises:
            RequestError: The layer takes another number of inputs.
        """
        if self.weight.shape[1] != inputs:
            raise RequestError(f"a head takes {self.weight.shape[1]} numbers and is given {inputs}")
        return int(self.weight.shape[0])


@dataclass(frozen=True, eq=False)
class RowNorm:
    """Layer normalization of a head, see `operations.LayerNorm`.

    Attributes:
        scale: float32 [W].
        bias: float32 [W].
        epsilon: Added to the variance.
    """

    scale: Array
    bias: Array
    epsilon: float

    def outputs(self, inputs: int) -> int:
        """See `Dense.outputs`."""
        for name in ("scale", "bias"):
            require("a norm of a head", name, getattr(self, name), np.float32, (inputs,))
        return inputs


@dataclass(frozen=True, eq=False)
class L2Norm:
    """L2 normalization: y = x / max(|x|, `SHORTEST`)."""

    def outputs(self, inputs: int) -> int:
        """See `Dense.outputs`."""
        return inputs


@dataclass(frozen=True, eq=False)
class Truncation:
    """Leading components of an embedding (Kusupati et al. 2022, "Matryoshka Representation Learning").

    Attributes:
        components: How many are kept.
    """

    components: int

    def outputs(self, inputs: int) -> int:
        """See `Dense.outputs`."""
        if not 1 <= self.components <= inputs:
            raise RequestError(f"a head keeps {self.components} of {inputs} components")
        return self.components


HeadStep = Dense | RowNorm | L2Norm | Truncation


@dataclass(frozen=True, eq=False)
class TextProgram:
    """Operations of a text encoder.

    Attributes:
        encoder: The encoder. Its table of positions holds one table for each token type, one after the other.
        types: Number of token types.
        pooling: Pooling of the rows of a text, one of `POOLINGS`, or several joined by "+", whose results are
            concatenated; `TOKENS` for a result of each row.
        normalize: Whether the result is L2-normalized at the end.
        head: Steps after the pooling, in order.
        vocabulary: Layer of every row, with `TOKENS` and no head: the result is log(1 + y) of the largest y of a text's
            rows, 0 at least, column by column (Formal et al. 2021, "SPLADE v2"); None: no such layer.

    Raises:
        RequestError: The parts do not fit each other.
    """

    encoder: EncoderProgram
    types: int
    pooling: str
    normalize: bool
    head: Sequence[HeadStep] = ()
    vocabulary: RowLinear | None = None

    def __post_init__(self) -> None:
        rows = len(self.encoder.embedding.positions)
        is_known = self.pooling == TOKENS or set(self.poolings) <= set(POOLINGS)
        if not is_known or self.types < 1 or rows % self.types:
            raise RequestError(
                f"texts are pooled by {self.pooling!r}, with {rows} positions of {self.types} types; "
                f"expected {', '.join(POOLINGS)} or {TOKENS}, and as many positions for each type"
            )
        if self.vocabulary is not None and (self.pooling != TOKENS or self.steps):
            raise RequestError("a vocabulary follows a pooling or a head; expected it behind the encoder")
        assert self.width

    @property
    def poolings(self) -> tuple[str, ...]:
        """Poolings whose results are concatenated; none where each token has a result."""
        return () if self.pooling == TOKENS else tuple(self.pooling.split("+"))

    @property
    def by_token(self) -> bool:
        """Whether each token has a result, instead of each text."""
        return self.pooling == TOKENS and self.vocabulary is None

    @property
    def steps(self) -> tuple[HeadStep, ...]:
        """Steps after the pooling, with the final normalization."""
        return (*self.head, *([L2Norm()] if self.normalize else []))

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a text."""
        embedding = self.encoder.embedding
        return embedding.longest or len(embedding.positions) // self.types

    @property
    def width(self) -> int:
        """Columns of the result of a text, or of a token."""
        if self.vocabulary is not None:
            return self.vocabulary.outputs
        width = self.encoder.width * max(len(self.poolings), 1)
        for step in self.head:
            width = step.outputs(width)
        return width

    def position_rows(self, types: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of the table of positions that are added to the tokens of a text.

        Args:
            types: Token types, int64 [n].
        """
        return types if self.encoder.embedding.longest else np.arange(len(types)) + types * self.longest
