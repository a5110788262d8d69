"""Programs of the native Transformer: checked sequences of operations of an encoder and of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import require
from pipelines.kernels.transformer.operations import (
    MAX_WIDTH,
    MEMORY,
    Activation,
    Attention,
    CrossAttention,
    Embedding,
    GatedActivation,
    LayerNorm,
    Linear,
    Neighbours,
    Operation,
    PartNorms,
    QuantizedAttention,
    Recurrence,
    RMSNorm,
    Scale,
    SelfAttention,
    StaticQParams,
    Sum,
    Vocabulary,
)

ROW_OPERATIONS = (LayerNorm, PartNorms, RMSNorm, Linear, Activation, GatedActivation, Scale, Sum)
ENCODER_OPERATIONS = (*ROW_OPERATIONS, Attention, QuantizedAttention, Neighbours)
DECODER_OPERATIONS = (*ROW_OPERATIONS, SelfAttention, Recurrence, CrossAttention)


class _Program:
    """Operations that begin with an embedding."""

    operations: Sequence[Operation]

    @property
    def embedding(self) -> Embedding:
        """The first operation."""
        assert isinstance(self.operations[0], Embedding)
        return self.operations[0]

    @property
    def positions(self) -> int:
        """The most tokens of a sentence."""
        return self.embedding.longest or len(self.embedding.positions)


@dataclass(frozen=True, eq=False)
class DecoderProgram(_Program):
    """Operations of a decoder: an `Embedding` first, a `Vocabulary` last.

    Attributes:
        operations: The operations, in order.
        memory_width: Columns of the encoder's result.

    Raises:
        RequestError: An operation does not fit those before it, or has no native kernel; the message names it.
    """

    operations: Sequence[Operation]
    memory_width: int

    def __post_init__(self) -> None:
        if not 1 <= self.memory_width <= MAX_WIDTH:
            raise RequestError(f"a decoder has a memory of width {self.memory_width}; expected 1 to {MAX_WIDTH}")
        if not self.operations or not isinstance(self.operations[-1], Vocabulary):
            raise RequestError("a decoder begins with an embedding and ends with a vocabulary")
        _check_operations("a decoder", self.operations, DECODER_OPERATIONS, self.memory_width)
        if self.vocabulary_size > len(self.embedding.table):
            raise RequestError(
                f"a decoder has {self.vocabulary_size} words, and embeddings of {len(self.embedding.table)}"
            )

    @property
    def vocabulary(self) -> Vocabulary:
        """The last operation."""
        assert isinstance(self.operations[-1], Vocabulary)
        return self.operations[-1]

    @property
    def vocabulary_size(self) -> int:
        """Number of target tokens."""
        return self.vocabulary.layer.outputs


@dataclass(frozen=True, eq=False)
class EncoderProgram(_Program):
    """Operations of an encoder: an `Embedding` first; the last result is the encoder's result.

    Attributes:
        operations: The operations, in order.
        width: Columns of the result.

    Raises:
        RequestError: An operation does not fit those before it, or has no native kernel; the message names it.
    """

    operations: Sequence[Operation]
    width: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", _check_operations("an encoder", self.operations, ENCODER_OPERATIONS, 0))


def _check_operations(
    what: str, operations: Sequence[Operation], kinds: tuple[type[Any], ...], memory_width: int
) -> int:
    """Returns the columns of the last result. memory_width: 0 of an encoder.

    Raises:
        RequestError: An operation does not fit those before it.
    """
    widths = {MEMORY: memory_width} if memory_width else {}
    quantized: dict[int, StaticQParams | None] = {}  # how each register that a layer reads, or MEMORY, is quantized
    if not operations or not isinstance(operations[0], Embedding):
        raise RequestError(f"{what} begins with an embedding")
    for number, operation in enumerate(operations):
        where = f"step {number} ({type(operation).__name__})"
        if (
            number
            and not isinstance(operation, kinds)
            and not (isinstance(operation, Vocabulary) and number == len(operations) - 1 and memory_width)
        ):
            raise RequestError(f"{where} stands where it cannot in {what}, which begins with an embedding")
        for member in fields(operation):
            value = getattr(operation, member.name)
            if member.name in ("input", "residual") and value is not None and (value not in widths or value == MEMORY):
                raise RequestError(f"{where} reads register {value}, which holds nothing yet")
        width = operation.check(where, widths)
        if isinstance(operation, Linear | CrossAttention | Vocabulary) and (
            operation.layer.quantizes or not isinstance(operation, Linear)
        ):
            require(where, "weight", operation.layer.weight, np.int8, operation.layer.weight.shape)
            register = MEMORY if isinstance(operation, CrossAttention) else operation.input
            if quantized.setdefault(register, operation.layer.qparams) != operation.layer.qparams:
                raise RequestError(
                    f"{where} takes rows quantized by {operation.layer.qparams}, another by {quantized[register]}"
                )
        if not isinstance(operation, Vocabulary):
            if not 0 <= operation.out < 256 or (
                not isinstance(operation, Embedding) and operation.out == operation.input
            ):
                raise RequestError(
                    f"{where} writes register {operation.out}; expected 0 to 255, and not the one that it reads"
                )
            widths[operation.out] = width
            quantized.pop(operation.out, None)
    return width
