"""Encoder and decoding step with KV caches, derived from the frozen graph of a translation model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit
from pipelines.graph.builder import MASKED, GraphBuilder
from pipelines.kernels.transformer.mapping.from_graph import GraphMapper
from pipelines.kernels.transformer.operations import CrossAttention, Embedding, RowLinear
from zoo.translation.data.tokens import LOGITS, MEMORY, PAD, SOURCE, TARGET
from zoo.translation.search.beam_search import Integers, Step
from zoo.translation.search.step_graph import MASK, PARENTS, POSITION, TOKENS, Cache, StepWriter, linear

CACHES = "int8-zoo.caches"  # the key under which `step_with_caches` stores the caches


@dataclass(frozen=True)
class IncrementalModel:
    """A translation model for decoding token by token: encoder and decoding step.

    Attributes:
        encoder: source int64 [n, s], padded -> `encoder_outputs`, one row a sentence.
        step: See `StepWriter`.
        encoder_outputs: Names of the encoder's outputs, inputs of the step.
        caches: The caches of the step.
        positions: Most tokens of a target.
    """

    encoder: ir.Model
    step: ir.Model
    encoder_outputs: list[str]
    caches: list[Cache]
    positions: int


def incremental_model(model: ir.Model) -> IncrementalModel:
    """Derives encoder and step from a frozen graph.

    The graph is read by `GraphMapper`, as for the native kernels, and `StepWriter` writes each operation. Linear layers
    keep the precision that they have in `model`, Q/DQ pairs between other operators are dropped. Keys and values are
    rounded to float16 where `model` is quantized, as in native code (`pipelines.kernels.transformer.program`).

    Args:
        model: What `zoo.translation.export.freeze.export` wrote, as it is, rewritten or quantized.

    Returns:
        The encoder and the step.

    Raises:
        RequestError: The graph has other inputs or outputs, or an operator that no decoding step can be derived from;
            the message names it and the reason.
    """
    inputs, outputs = ([str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs))
    if {SOURCE, TARGET} - {*inputs} or outputs != [LOGITS]:
        raise RequestError(
            f"found inputs {', '.join(inputs)} and outputs {', '.join(outputs)}; "
            f"decoding needs {SOURCE} and {TARGET}, and {LOGITS}"
        )
    mapper = GraphMapper(model, (SOURCE, TARGET), MEMORY, for_kernels=False)
    operations = mapper.decoder_operations(LOGITS)
    is_quantized = any(node.op_type == "QuantizeLinear" for node in model.graph)
    cache_dtype = ir.DataType.FLOAT16 if is_quantized else ir.DataType.FLOAT
    opsets = dict(model.graph.opset_imports)
    step = StepWriter(operations, cache_dtype, opsets)
    attention = [operation for operation in operations if isinstance(operation, CrossAttention)]
    encoder = edit.extract(model, [SOURCE], [MEMORY])
    _append_memory(encoder.graph, attention, step.memory, cache_dtype)
    encoder_outputs = [str(value.name) for value in encoder.graph.outputs]
    assert isinstance(operations[0], Embedding)
    positions = operations[0].longest or len(operations[0].positions)
    return IncrementalModel(
        encoder, ir.Model(step.graph, ir_version=model.ir_version), encoder_outputs, step.caches, positions
    )


def step_with_caches(model: IncrementalModel) -> ir.Model:
    """Returns the step with its caches in the metadata, for `read_caches`.

    Args:
        model: Encoder and step.
    """
    kept = [[cache.before, cache.after, cache.shape, cache.dtype.name] for cache in model.caches]
    model.step.metadata_props[CACHES] = json.dumps(kept)
    return model.step


def read_caches(step: ir.Model) -> list[Cache]:
    """Reads the caches of a graph that `step_with_caches` returned.

    Args:
        step: The graph.

    Returns:
        The caches, in the order of the step's outputs.
    """
    kept = json.loads(step.metadata_props[CACHES])
    return [Cache(before, after, tuple(shape), ir.DataType[dtype]) for before, after, shape, dtype in kept]


def cached_step(decoder: Any, encoder_outputs: Mapping[str, NDArray[Any]], caches: Sequence[Cache]) -> Step:
    """Makes a step function of a decoder with KV caches.

    Args:
        decoder: A session of `IncrementalModel.step`.
        encoder_outputs: Outputs of the encoder, a row a sentence.
        caches: The caches of the step.

    Returns:
        The step function for `beam_search`.
    """
    sentences = np.arange(len(next(iter(encoder_outputs.values()))))
    state = {}
    for cache in caches:
        shape = [len(sentences) if size is None else size for size in cache.shape]
        state[cache.before] = np.zeros(shape, cache.dtype.numpy())
    of_live, length = dict(encoder_outputs), 0

    def step(tokens: Integers, parents: Integers) -> NDArray[np.float32]:
        nonlocal sentences, of_live, length
        before, sentences = sentences, sentences[parents]
        if not np.array_equal(live := np.unique(sentences), np.unique(before)):
            of_live = {name: array[live] for name, array in encoder_outputs.items()}
        batch = {TOKENS: tokens, PARENTS: parents, POSITION: np.array(length), **of_live, **state}
        outputs = decoder.run(batch)
        state.update({cache.before: outputs[cache.after] for cache in caches})
        length += 1
        logits: NDArray[np.float32] = outputs[LOGITS]
        return logits

    return step


def _append_memory(
    encoder: ir.Graph, attention: Sequence[CrossAttention], names: Sequence[tuple[str, str]], dtype: ir.DataType
) -> None:
    """Makes the source mask, and keys and values of each cross-attention, outputs of the encoder.

    One layer computes all keys and values that share quantization parameters.
    """
    source, (memory,) = encoder.inputs[0], encoder.outputs
    encoder.outputs.clear()
    add = GraphBuilder(encoder, "memory/", {MASK, *(name for pair in names for name in pair)})
    is_padding = add("Cast", add("Equal", source, PAD, dtype=ir.DataType.BOOL))
    mask = add("Unsqueeze", add("Mul", is_padding, MASKED), [1, 2])
    mask.shape = ir.Shape(["batch", 1, 1, "source_length"])
    outputs = {MASK: mask}
    for layer, group in _merged(attention):
        parts = iter(
            add.split(
                linear(add, memory, layer, "keys_values", matrix=False),
                [operation.layer.outputs // 2 for operation in group for _ in range(2)],
            )
        )
        for operation in group:
            for name, perm in zip(names[attention.index(operation)], ([0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
                heads = add("Reshape", next(parts), [0, 0, operation.heads, -1])
                value = add("Transpose", heads, perm=perm)
                if dtype != ir.DataType.FLOAT:
                    value = add("Cast", add("Cast", value, dtype=dtype))
                outputs[name] = value
    for name, value in outputs.items():
        value.name = name
        encoder.outputs.append(value)


def _merged(attention: Sequence[CrossAttention]) -> list[tuple[RowLinear, list[CrossAttention]]]:
    """Returns the merged layers of keys and values, with the operations that each serves."""
    groups: dict[Any, list[CrossAttention]] = {}
    for operation in attention:
        groups.setdefault((operation.layer.weight.dtype, operation.layer.qparams), []).append(operation)
    return [(_joined([operation.layer for operation in group]), group) for group in groups.values()]


def _joined(layers: Sequence[RowLinear]) -> RowLinear:
    """Concatenates layers of one input."""
    weight, scale, bias = (
        np.concatenate([getattr(layer, name) for layer in layers], -1) for name in ("weight", "scale", "bias")
    )
    return RowLinear(weight, scale, bias, layers[0].qparams)
