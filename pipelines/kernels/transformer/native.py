"""A Transformer's programs as native objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.kernels.arrays import Array
from pipelines.kernels.extension import required
from pipelines.kernels.transformer.program import (
    Attention,
    CrossAttention,
    Embed,
    EncoderProgram,
    Linear,
    Norm,
    Program,
    RowLinear,
    SelfAttention,
    Vocabulary,
)


def compiled(program: Program | EncoderProgram, isa: str = "", decoder: tuple[Program, Any] | None = None) -> Any:
    """A program as a native object, its weights packed once for all threads; `engines.native_translation` says what
    these do.

    Where the table of embeddings is memory of the vocabulary's weights, in this program or, of an encoder, in `decoder`
    (with its native object), the packed weights are the table.
    """
    module = required()
    made = module.Decoder(program.memory_width, isa) if isinstance(program, Program) else module.Encoder(isa)
    for step in program.steps:
        match step:
            case Embed():
                known = program if isinstance(program, Program) else decoder and decoder[0]
                shared = known and np.may_share_memory(step.table, known.vocabulary.layer.weight)
                other = decoder[1] if shared and decoder and known is not program else None
                made.embed(
                    None if shared else _plain(step.table)[0], other, *_plain(step.scale, step.positions), step.out
                )
            case Norm():
                made.norm(step.input, *_plain(step.scale, step.bias), step.epsilon, step.out)
            case Linear():
                residual = -1 if step.residual is None else step.residual
                made.linear(step.input, *_arrays(step.layer), step.relu, residual, step.out)
            case Attention():
                made.attention(step.input, step.heads, step.out)
            case SelfAttention():
                made.self_attention(step.input, step.heads, step.out)
            case CrossAttention():
                made.cross_attention(step.input, *_arrays(step.layer), step.heads, step.out)
            case Vocabulary():
                made.vocabulary(step.input, *_arrays(step.layer))
    if isinstance(program, EncoderProgram):
        made.finish(program.steps[-1].out)  # type: ignore[union-attr]
    return made


def _plain(*arrays: Array) -> list[Array]:
    return [np.require(each, requirements=("C_CONTIGUOUS", "ALIGNED")) for each in arrays]


def _arrays(layer: RowLinear) -> tuple[Any, ...]:
    return *_plain(layer.weight, layer.scale, layer.shift), layer.levels and (layer.levels.scale, layer.levels.zero)
