"""KV cache: from the naive decoder, which computes all target tokens so far anew, to a decoding step that computes the
newest one alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.fuse_quantized_linear import FuseQuantizedLinear
from pipelines.rewrites.reshape_chains import ReshapeChains
from zoo.transformer_mt.decode import Integers, Step
from zoo.transformer_mt.step_graph import LOGITS, PARENTS, POSITION, SOURCE, TOKENS, Cache, Rows, Unknown
from zoo.transformer_mt.step_operators import Derivation

CACHES = "int8-zoo.caches"  # the key of what `step_of` keeps


@dataclass(frozen=True)
class Incremental:
    """A translation model for decoding token by token: encoder and decoding step.

    encoder: source int64 [n, s] -> the values `given`, one row a sentence. step: tokens int64 [rows], the newest of
    every row; parents int64 [rows], the row of the step before that each goes on from; position int64 [], how many
    tokens came before; the caches; `given` -> logits float32 [rows, vocabulary] and the caches grown by a token. rows
    is a multiple of n: the rows of a sentence stand together. positions: tokens of a target, at most.
    """

    encoder: ir.Model
    step: ir.Model
    given: list[str]
    caches: list[Cache]
    positions: int


def incremental(model: ir.Model) -> Incremental:
    """Derive encoder and step from the graph that `zoo.transformer_mt.freeze.export` writes, rewritten or quantized, or
    one like it.

    Found by following every operator from the input `target` on, never by a name: what depends on the source alone is
    computed once a sentence; of what has a row for each target token the newest is computed; the keys and values of
    self-attention are cached, and so are the states of a Scan over the tokens, whose body is one step of it. Those of
    cross-attention serve all rows of a sentence, which stand where the naive graph has tokens. Both are rounded to
    float16 where `model` is quantized, as in native code (`pipelines.kernels.transformer.program`). Raises RequestError
    that names the operator without such a form, and why.
    """
    found = Derivation(model)
    for node in model.graph:
        found.visit(node)
    logits = found.kinds.get(found.naive.graph.outputs[0], Unknown("its logits do not depend on the target"))
    if isinstance(logits, Unknown):
        raise RequestError(f"the decoder has no form with caches: {logits.why}")
    if not isinstance(logits, Rows) or logits.axis is not None:
        raise RequestError("the decoder has no form with caches: its logits are not those of the last token alone")
    out = found.flat(logits)
    out.name = LOGITS
    grown = [after for _, after, _ in found.caches.values()]
    found.main.outputs.extend([out, *grown])
    step = ir.Model(found.main, ir_version=found.naive.ir_version)
    rewrite(step, [ReshapeChains(), FuseLinear(), FuseQuantizedLinear()])
    given = [str(each.name) for each in found.given]
    encoder = edit.extract(found.naive, [SOURCE], given)
    if found.float16_caches:
        _round_to_float16(encoder, found.cross_attention)
    return Incremental(encoder, step, given, [each for each, _, _ in found.caches.values()], found.positions)


def step_of(model: Incremental) -> ir.Model:
    """The step, with what `caches_of` reads again."""
    kept = [[each.before, each.after, each.shape, each.dtype.name] for each in model.caches]
    model.step.metadata_props[CACHES] = json.dumps(kept)
    return model.step


def caches_of(step: ir.Model) -> list[Cache]:
    """The caches of a graph that `step_of` gave."""
    kept = json.loads(step.metadata_props[CACHES])
    return [Cache(before, after, tuple(shape), ir.DataType[dtype]) for before, after, shape, dtype in kept]


def cached_step(decoder: Any, given: Mapping[str, NDArray[Any]], caches: Sequence[Cache]) -> Step:
    """The `Step` of a decoder with KV caches, for `beam_search`.

    decoder: a session of `Incremental.step`. given: the encoder's outputs, a row a sentence.
    """
    sentences = np.arange(len(next(iter(given.values()))))
    state = {}
    for cache in caches:
        shape = [len(sentences) if size is None else size for size in cache.shape]
        state[cache.before] = np.zeros(shape, cache.dtype.numpy())
    of_live, length = dict(given), 0

    def step(tokens: Integers, parents: Integers) -> NDArray[np.float32]:
        nonlocal sentences, of_live, length
        before, sentences = sentences, sentences[parents]
        if not np.array_equal(live := np.unique(sentences), np.unique(before)):
            of_live = {name: array[live] for name, array in given.items()}
        batch = {TOKENS: tokens, PARENTS: parents, POSITION: np.array(length), **of_live, **state}
        outputs = decoder.run(batch)
        state.update({cache.before: outputs[cache.after] for cache in caches})
        length += 1
        logits: NDArray[np.float32] = outputs[LOGITS]
        return logits

    return step


def _round_to_float16(encoder: ir.Model, names: set[str]) -> None:
    """Round those of the encoder's float32 outputs to float16."""
    taken = query.used_names(encoder.graph)
    for index, value in enumerate(encoder.graph.outputs):
        if value.name in names and value.dtype == ir.DataType.FLOAT:
            name, value.name = str(value.name), edit.unique(f"{value.name}.whole", taken)
            half = edit.node(
                "Cast", [value], f"{name}.half", dtype=ir.DataType.FLOAT16, taken=taken, to=ir.DataType.FLOAT16
            )
            rounded = edit.node(
                "Cast", [half.outputs[0]], f"{name}.rounded", dtype=ir.DataType.FLOAT, taken=taken, to=ir.DataType.FLOAT
            )
            encoder.graph.extend([half, rounded])
            rounded.outputs[0].name, rounded.outputs[0].shape = name, value.shape
            encoder.graph.outputs[index] = rounded.outputs[0]
