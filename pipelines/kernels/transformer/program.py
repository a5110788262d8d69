"""Programs of the native Transformer: checked sequences of operations of an encoder and of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import require
from pipelines.kernels.transformer.operations import (
    ACTIVATIONS,
    LANES,
    MAX_WIDTH,
    Activation,
    Attention,
    CrossAttention,
    Embedding,
    Gate,
    LayerNorm,
    Linear,
    Operation,
    QuantizedAttention,
    Recurrence,
    RunningMean,
    Scale,
    SelfAttention,
    StaticQParams,
    Sum,
    Vocabulary,
)

MEMORY = -1  # stands for the encoder's result among the registers
ENCODER_OPERATIONS = (LayerNorm, Linear, Activation, Scale, Attention, QuantizedAttention)
DECODER_OPERATIONS = (LayerNorm, Linear, Activation, Scale, SelfAttention, Recurrence, CrossAttention)


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
        return len(self.embedding.positions)


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

    Raises:
        RequestError: An operation does not fit those before it, or has no native kernel; the message names it.
    """

    operations: Sequence[Operation]

    def __post_init__(self) -> None:
        _check_operations("an encoder", self.operations, ENCODER_OPERATIONS, 0)


def _check_operations(
    what: str, operations: Sequence[Operation], kinds: tuple[type[Any], ...], memory_width: int
) -> None:
    """Raise RequestError where an operation does not fit those before it. memory_width: 0 of an encoder."""
    widths: dict[int, int] = {}
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
        for field in fields(operation):
            value = getattr(operation, field.name)
            if field.name in ("input", "residual") and value is not None and value not in widths:
                raise RequestError(f"{where} reads register {value}, which holds nothing yet")
        width = _result_width(where, operation, widths, memory_width)
        if isinstance(operation, Linear | CrossAttention | Vocabulary):
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


def _result_width(where: str, operation: Operation, widths: dict[int, int], memory_width: int) -> int:
    """The columns of an operation's result. Raises RequestError where its arrays do not fit."""
    if isinstance(operation, Embedding):
        if (
            operation.table.ndim != 2
            or not operation.table.size
            or operation.table.shape[1] > MAX_WIDTH
            or operation.positions.ndim != 2
            or not len(operation.positions)
        ):
            raise RequestError(
                f"{where} has a table {list(operation.table.shape)} and positions {list(operation.positions.shape)}; "
                "expected two "
                "axes"
            )
        count, width = operation.table.shape
        require(where, "table", operation.table, np.int8, (count, width))
        require(where, "scale", operation.scale, np.float32, (count,))
        require(where, "positions", operation.positions, np.float32, (len(operation.positions), width))
        if not np.isfinite(operation.scale).all() or not np.isfinite(operation.positions).all():
            raise RequestError(f"{where} has scales or positions that are not finite")
        return int(width)
    width = widths[operation.input]
    if isinstance(operation, RunningMean | Gate | Sum):
        raise RequestError(f"{where} has no native kernel")
    if isinstance(operation, LayerNorm):
        for name in ("scale", "bias"):
            require(where, name, getattr(operation, name), np.float32, (width,))
            if not np.isfinite(getattr(operation, name)).all():
                raise RequestError(f"{where} has a {name} that is not finite")
        if not 0 <= operation.epsilon < np.inf:
            raise RequestError(f"{where} has epsilon {operation.epsilon}; expected 0 or more")
        return width
    if isinstance(operation, Scale):
        require(where, "factors", operation.factors, np.float32, (width,))
        if not np.isfinite(operation.factors).all():
            raise RequestError(f"{where} has factors that are not finite")
        return width
    if isinstance(operation, Activation):
        if operation.kind not in ACTIVATIONS:
            raise RequestError(f"{where} computes {operation.kind!r}; expected {' or '.join(ACTIVATIONS)}")
        return width
    if isinstance(operation, Recurrence):
        if width % (2 * LANES):
            raise RequestError(f"{where} has gates of {width} columns; expected twice a multiple of {LANES}")
        if operation.residual is not None and widths[operation.residual] != width // 2:
            raise RequestError(f"{where} gives {width // 2} columns, the residual has {widths[operation.residual]}")
        return width // 2
    if isinstance(operation, Linear | Vocabulary):
        if operation.layer.inputs != width:
            raise RequestError(f"{where} takes {operation.layer.inputs} columns and is given {width}")
        if (
            isinstance(operation, Linear)
            and operation.residual is not None
            and widths[operation.residual] != operation.layer.outputs
        ):
            raise RequestError(
                f"{where} gives {operation.layer.outputs} columns, the residual has {widths[operation.residual]}"
            )
        return operation.layer.outputs
    if isinstance(operation, QuantizedAttention) and operation.bias is not None:
        require(where, "bias", operation.bias, np.float32, (operation.heads, operation.bias.shape[-1]))
        if operation.bias.shape[1] % 2 == 0 or not np.isfinite(operation.bias).all():
            raise RequestError(f"{where} has a bias that is not finite, or has no middle")
    merged = isinstance(operation, Attention | QuantizedAttention | SelfAttention)  # query | key | value
    result, rest = divmod(width, 3) if merged else (width, 0)
    if rest or operation.heads < 1 or result < operation.heads or result % (LANES * operation.heads):
        raise RequestError(f"{where} has {operation.heads} heads on {width} columns; a head has a multiple of {LANES}")
    if isinstance(operation, CrossAttention) and (operation.layer.inputs, operation.layer.outputs) != (
        memory_width,
        2 * width,
    ):
        raise RequestError(
            f"{where} makes keys and values of {operation.layer.inputs} -> {operation.layer.outputs} columns; expected "
            f"{memory_width} "
            f"-> {2 * width}"
        )
    return result
