"""A Transformer's programs as native objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.kernels.arrays import Array
from pipelines.kernels.extension import required
from pipelines.kernels.transformer.draft import DraftProgram
from pipelines.kernels.transformer.operations import (
    Activation,
    Attention,
    CrossAttention,
    Embedding,
    GatedActivation,
    LayerNorm,
    Linear,
    Neighbours,
    PartNorms,
    QuantizedAttention,
    Recurrence,
    RMSNorm,
    RowLinear,
    Scale,
    SelfAttention,
    Sum,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram
from pipelines.kernels.transformer.text.program import Dense, L2Norm, RowNorm, TextProgram, Truncation


def compile_program(
    program: DecoderProgram | EncoderProgram, isa: str = "", decoder: tuple[DecoderProgram, Any] | None = None
) -> Any:
    """Builds the native encoder or decoder of a program; its weights are packed once for all threads.

    Tied embeddings take no memory of their own: where the embedding table shares memory with the weights of the
    vocabulary projection, the packed weights serve as the table.

    Args:
        program: The program.
        isa: Instruction set, one of `extension.isas()`; "" for the fastest.
        decoder: For an encoder, the decoder's program and native object whose vocabulary weights may be its table.

    Returns:
        A native `Decoder` or `Encoder`.

    Raises:
        RequestError: The native extension is not built.
        ValueError: An operation does not fit those before it.
    """
    module = required()
    native = module.Decoder(program.memory_width, isa) if isinstance(program, DecoderProgram) else module.Encoder(isa)
    for operation in program.operations:
        match operation:
            case Embedding():
                tied = program if isinstance(program, DecoderProgram) else decoder and decoder[0]
                shared = tied and np.may_share_memory(operation.table, tied.vocabulary.layer.weight)
                other = decoder[1] if shared and decoder and tied is not program else None
                native.embedding(
                    None if shared else _contiguous(operation.table)[0],
                    other,
                    *_contiguous(operation.scale, operation.positions),
                    operation.longest or 0,
                    operation.out,
                )
            case LayerNorm():
                native.layer_norm(
                    operation.input, *_contiguous(operation.scale, operation.bias), operation.epsilon, operation.out
                )
            case PartNorms():
                native.part_norms(
                    operation.input, *_contiguous(operation.scale, operation.bias), operation.epsilon, operation.out
                )
            case RMSNorm():
                native.rms_norm(operation.input, *_contiguous(operation.scale), operation.epsilon, operation.out)
            case Linear():
                residual = -1 if operation.residual is None else operation.residual
                native.linear(
                    operation.input, *_layer_arguments(operation.layer), operation.relu, residual, operation.out
                )
            case Activation():
                native.activation(operation.input, operation.kind, operation.out)
            case GatedActivation():
                native.gated_activation(operation.input, operation.kind, operation.out)
            case Sum():
                native.sum(operation.input, operation.residual, operation.out)
            case Scale():
                native.scale(operation.input, *_contiguous(operation.factors), operation.out)
            case Recurrence():
                residual = -1 if operation.residual is None else operation.residual
                native.recurrence(operation.input, residual, operation.out)
            case Attention():
                native.attention(operation.input, operation.heads, operation.out)
            case Neighbours():
                native.neighbours(operation.input, operation.count, operation.out)
            case QuantizedAttention():
                _add_attention(native, operation)
            case SelfAttention():
                bias = None if operation.bias is None else _contiguous(operation.bias)[0]
                native.self_attention(operation.input, operation.heads, bias, operation.out)
            case CrossAttention():
                native.cross_attention(
                    operation.input, *_layer_arguments(operation.layer), operation.heads, operation.out
                )
            case Vocabulary():
                native.vocabulary(operation.input, *_layer_arguments(operation.layer))
    if isinstance(program, EncoderProgram):
        native.finish(program.operations[-1].out)  # type: ignore[union-attr]
    return native


def compile_speculation(decoder: Any, copies: bool, draft: DraftProgram | None) -> Any:
    """Builds the native proposals of speculative decoding.

    Args:
        decoder: The native decoder that verifies them.
        copies: Whether source tokens may be proposed.
        draft: The draft, or None.

    Returns:
        A native `Speculation`.

    Raises:
        ValueError: The draft belongs to another decoder.
    """
    native = required().Speculation(decoder, copies)
    if draft is not None:
        small, words, arrays = (
            compile_program(draft.decoder, str(decoder.isa)),
            draft.words,
            _layer_arguments(draft.state),
        )
        if words is None:
            native.set_draft(small, *arrays)
        else:
            small.share_words(words.common.tolist())
            native.set_draft(small, *arrays, *_contiguous(words.offsets, words.targets), words.common.tolist())
    return native


def compile_texts(program: TextProgram, isa: str = "") -> Any:
    """Builds the native text encoder of a program.

    Args:
        program: The program.
        isa: Instruction set, one of `extension.isas()`; "" for the fastest.

    Returns:
        A native `TextEncoder`.

    Raises:
        RequestError: The native extension is not built.
        ValueError: An operation does not fit those before it.
    """
    encoder = compile_program(program.encoder, isa)
    native = required().TextEncoder(encoder, program.types, list(program.poolings))
    for step in program.steps:
        match step:
            case Dense():
                native.dense(*_contiguous(step.weight, step.bias), step.activation)
            case RowNorm():
                native.layer_norm(*_contiguous(step.scale, step.bias), step.epsilon)
            case Truncation():
                native.truncate(step.components)
            case L2Norm():
                native.normalize()
    if (layer := program.vocabulary) is not None:
        native.vocabulary(*_contiguous(layer.weight, layer.scale, layer.bias))
    return native


def _add_attention(native: Any, operation: QuantizedAttention) -> None:
    """Adds attention in integers to a native encoder."""
    bias = None if operation.bias is None else _contiguous(operation.bias)[0]
    norm, rotary = operation.norm, operation.rotary
    tables = operation.positions
    before, after = (-1 if side is None else side for side in (operation.before, operation.after))
    native.quantized_attention(
        operation.input,
        operation.heads,
        operation.key_heads or operation.heads,
        before,
        after,
        bias,
        None if norm is None else (*_contiguous(norm.query, norm.key), norm.epsilon),
        None if rotary is None else tuple(_contiguous(rotary.cos, rotary.sin)),
        None if tables is None else _contiguous(tables.rows)[0],
        *(
            None if table is None or scale is None else tuple(_contiguous(table, scale))
            for table, scale in (
                (None, None) if tables is None else (tables.to_position, tables.to_position_scale),
                (None, None) if tables is None else (tables.to_content, tables.to_content_scale),
            )
        ),
        operation.out,
    )


def _contiguous(*arrays: Array) -> list[Array]:
    return [np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED")) for array in arrays]


def _layer_arguments(layer: RowLinear) -> tuple[Any, ...]:
    qparams = None if layer.qparams is None else (layer.qparams.scale, layer.qparams.zero_point)
    return *_contiguous(layer.weight, layer.scale, layer.bias), qparams
