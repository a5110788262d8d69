"""Encoders and decoders, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.operations import (
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
    Sum,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram
from pipelines.kernels.transformer.reference.attention import attention, quantized_attention, self_attention
from pipelines.kernels.transformer.reference.rows import (
    Floats,
    activate,
    embedding,
    layer_norm,
    linear,
    neighbours,
    part_norms,
    recurrence,
    rms_norm,
    to_float16,
)


class Registers:
    """Registers of a program during its run."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Floats, bool]] = {}  # (rows, whether they are known to be nonnegative)

    def result(self, operation: Operation) -> tuple[Floats, bool]:
        """Computes an operation that reads its input and residual alone.

        Args:
            operation: An operation on one row at a time.

        Returns:
            The result, float32 [n, columns], and whether it is known to be nonnegative.
        """
        x, nonnegative = self.values[operation.input]  # type: ignore[union-attr]
        if isinstance(operation, Scale):
            return x * operation.factors, False
        if isinstance(operation, Activation):
            return activate(operation.kind, x), False
        if isinstance(operation, GatedActivation):
            gate, up = np.split(x, 2, axis=1)
            return activate(operation.kind, gate) * up, False
        if isinstance(operation, Sum):
            return x + self.values[operation.residual][0], False
        if isinstance(operation, PartNorms):
            return part_norms(x, operation.scale, operation.bias, operation.epsilon), False
        if isinstance(operation, RMSNorm):
            return rms_norm(x, operation.scale, operation.epsilon), False
        if isinstance(operation, LayerNorm):
            return layer_norm(x, operation.scale, operation.bias, operation.epsilon), False
        assert isinstance(operation, Linear)
        residual = None if operation.residual is None else self.values[operation.residual][0]
        return linear(operation.layer, x, nonnegative, operation.relu, residual), operation.relu and residual is None


def encode(
    program: EncoderProgram,
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64] | None = None,
    attended: int | None = None,
) -> Floats:
    """Computes an encoder of one sentence.

    Args:
        program: The program.
        tokens: int64 [n].
        positions: Rows of the table of positions, int64 [n]; None for 0, 1, ..., or the only one.
        attended: How many of the first tokens all tokens attend to; None: all.

    Returns:
        float32 [n, W].
    """
    registers = Registers()
    result: tuple[Floats, bool]
    for operation in program.operations:
        match operation:
            case Embedding():
                places = np.arange(len(tokens)) * (operation.longest is None) if positions is None else positions
                result = embedding(operation, tokens, places), False
            case Attention():
                query, keys, values = np.split(registers.values[operation.input][0], 3, axis=1)
                result = attention(query, keys[:attended], values[:attended], operation.heads), False
            case QuantizedAttention():
                result = quantized_attention(registers.values[operation.input][0], operation, attended), False
            case Neighbours():
                result = neighbours(registers.values[operation.input][0], operation.count, attended), False
            case _:
                result = registers.result(operation)
        registers.values[operation.out] = result  # type: ignore[union-attr]
    return result[0]


class Decoding:
    """A decoder with KV caches, a step function for `zoo.translation.search.beam_search.beam_search`.

    Called with tokens int64 [rows] and parents int64 [rows], the row of the call before that each row continues, it
    returns logits float32 [rows, vocabulary].
    """

    def __init__(self, program: DecoderProgram, memories: Sequence[Floats]) -> None:
        """Starts with one row a sentence.

        Args:
            program: The program.
            memories: The encoder's result of each sentence, float32 [source, memory_width].
        """
        self.program = program
        projections = [operation.layer for operation in program.operations if isinstance(operation, CrossAttention)]
        # of every sentence: the keys and values of each cross-attention
        self.cross_kv = [
            [np.split(to_float16(linear(layer, memory)), 2, axis=1) for layer in projections] for memory in memories
        ]
        self.sentences = np.arange(len(memories))
        self.position = 0
        # of every self-attention key | value of all rows, [rows, position, 2 W]
        self.caches: dict[int, Floats] = {}
        # of every recurrence the cells of all rows
        self.cells: dict[int, Floats] = {}

    def __call__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> Floats:
        """One decoding step: the logits of the tokens that follow."""
        self.sentences = self.sentences[parents]
        registers = Registers()
        layer = 0  # of cross-attention
        for number, operation in enumerate(self.program.operations[:-1]):
            result: tuple[Any, bool]
            match operation:
                case Embedding():
                    position = self.position if operation.longest is None else 0
                    result = embedding(operation, tokens, np.full(len(tokens), position)), False
                case SelfAttention():
                    query, key, value = np.split(registers.values[operation.input][0], 3, axis=1)
                    cache = to_float16(np.concatenate([key, value], axis=1))[:, None]
                    if number in self.caches:
                        cache = np.concatenate([self.caches[number][parents], cache], axis=1)
                    self.caches[number] = cache
                    keys, values = np.split(cache, 2, axis=2)
                    result = self_attention(query, keys, values, operation.heads, operation.bias), False
                case Recurrence():
                    gates = registers.values[operation.input][0]
                    before = self.cells.get(number, np.zeros((len(parents), gates.shape[1] // 2), np.float32))
                    self.cells[number] = recurrence(gates, before[parents] if number in self.cells else before)
                    y = np.maximum(self.cells[number], np.float32(0))
                    added = operation.residual
                    result = (y, True) if added is None else (y + registers.values[added][0], False)
                case CrossAttention():
                    queries = registers.values[operation.input][0]
                    attended = np.empty_like(queries)
                    for sentence in set(self.sentences.tolist()):
                        of_sentence = self.sentences == sentence
                        keys, values = self.cross_kv[sentence][layer]
                        attended[of_sentence] = attention(queries[of_sentence], keys, values, operation.heads)
                    result = attended, False
                    layer += 1
                case _:
                    result = registers.result(operation)
            registers.values[operation.out] = result  # type: ignore[union-attr]
        self.position += 1
        last = self.program.operations[-1]
        assert isinstance(last, Vocabulary)
        return linear(last.layer, *registers.values[last.input])
