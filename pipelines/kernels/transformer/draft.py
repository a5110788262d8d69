"""Drafts of speculative decoding: small decoders whose proposals a larger one verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array
from pipelines.kernels.transformer.operations import (
    CrossAttention,
    Embedding,
    LayerNorm,
    Linear,
    Operation,
    Recurrence,
    RowLinear,
    StaticQParams,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram

HEAD = 32  # columns of an attention head of a draft
EPSILON = 1e-5  # of layer normalization
SCALE = ".scale"  # suffix of the scales of an int8 array


@dataclass(frozen=True, eq=False)
class DraftWords:
    """The words that a draft may propose, by the source tokens.

    Attributes:
        common: Words of every sentence, int32 in ascending order.
        offsets: int64 [source tokens + 1].
        targets: int32; source token s adds targets[offsets[s]:offsets[s + 1]].
    """

    common: NDArray[np.int32]
    offsets: NDArray[np.int64]
    targets: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class DraftProgram:
    """A draft: a recurrent decoder over the encoder's result.

    Its cells begin with `state` of the newest result of the decoder that verifies (the input of its vocabulary
    projection); position 1 is that of the newest token.

    Attributes:
        decoder: The draft's operations, with recurrences instead of self-attention.
        state: Newest result -> cells of all recurrences, quantized as the verifying decoder's vocabulary projection.
        words: The words to choose from; None: the whole vocabulary.

    Raises:
        RequestError: The parts do not fit.
    """

    decoder: DecoderProgram
    state: RowLinear
    words: DraftWords | None = None

    def __post_init__(self) -> None:
        recurrent = sum(isinstance(operation, Recurrence) for operation in self.decoder.operations)
        cells = recurrent * self.decoder.embedding.table.shape[1]
        if self.state.outputs != cells:
            raise RequestError(f"a draft has cells of {cells} columns, and a state of {self.state.outputs}")


def quantize_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, Array]:
    """Returns the content of a draft's file: matrices as int8 with a scale a row, other arrays as they are.

    Args:
        arrays: The weights of `zoo.translation.models.draft.DraftNetwork`, float32.
    """
    content: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim == 2 and name != "positions":
            content[name], content[name + SCALE] = _quantized(array)
        else:
            content[name] = array.astype(np.float32)
    return content


def build_draft(arrays: Mapping[str, Array], decoder: DecoderProgram) -> DraftProgram:
    """Builds the draft of a decoder.

    Its embeddings are the decoder's, times a matrix of `embed`; its vocabulary projection is the decoder's, times a
    matrix of `project`.

    Args:
        arrays: Result of `quantize_arrays`, and the words of `DraftWords`, if there are any.
        decoder: The decoder that verifies its proposals.

    Returns:
        The draft.

    Raises:
        RequestError: The arrays are of another decoder, or incomplete.
    """
    try:
        return _build(arrays, decoder)
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"the draft does not fit the model ({error}); train one: zoo train transformer-mt --preset draft"
        ) from error


def _build(arrays: Mapping[str, Array], decoder: DecoderProgram) -> DraftProgram:
    def matrix(name: str) -> NDArray[np.float32]:  # [outputs, inputs]
        return arrays[name].astype(np.float32) * arrays[name + SCALE][:, None]

    def layer(*names: str, qparams: StaticQParams | None = None) -> RowLinear:
        """Returns layers side by side."""
        weights = np.concatenate([arrays[f"{name}.weight"] for name in names]).T
        scale = np.concatenate([arrays[f"{name}.weight{SCALE}"] for name in names])
        zeros = np.zeros(len(scale) // len(names), np.float32)
        bias = np.concatenate([arrays.get(f"{name}.bias", zeros) for name in names])
        return RowLinear(np.ascontiguousarray(weights), scale, bias, qparams)

    def norm(name: str, slot: int) -> int:
        operations.append(LayerNorm(slot, arrays[f"{name}.weight"], arrays[f"{name}.bias"], EPSILON, slot + 1))
        return slot + 1

    source, target = decoder.embedding, decoder.vocabulary.layer
    table = (source.table.astype(np.float32) * source.scale[:, None]) @ matrix("embed.weight").T
    positions = np.concatenate([np.zeros_like(arrays["positions"][:1]), arrays["positions"]]).astype(np.float32)
    operations: list[Operation] = [Embedding(*_quantized(table), positions, 0)]
    last, layers = 0, 0
    while f"layers.{layers}.forget.weight" in arrays:
        path, x = f"layers.{layers}", last
        last = norm(f"{path}.cell_norm", x)
        operations.append(Linear(last, layer(f"{path}.forget", f"{path}.value"), last + 1))
        operations.append(Recurrence(last + 1, last + 2, x))
        x, last = last + 2, norm(f"{path}.cross_norm", last + 2)
        operations.append(Linear(last, layer(f"{path}.query"), last + 1))
        memory = layer(f"{path}.keys", f"{path}.values")
        operations.append(CrossAttention(last + 1, memory, memory.outputs // 2 // HEAD, last + 2))
        operations.append(Linear(last + 2, layer(f"{path}.output"), last + 3, residual=x))
        x, last = last + 3, norm(f"{path}.feed_norm", last + 3)
        operations.append(Linear(last, layer(f"{path}.inner"), last + 1, relu=True))
        operations.append(Linear(last + 1, layer(f"{path}.outer"), last + 2, residual=x))
        last, layers = last + 2, layers + 1
    last = norm("norm", last)
    weight = (target.weight.astype(np.float32) * target.scale).T @ matrix("project.weight")
    if "free.weight" in arrays:
        weight += matrix("free.weight")
    values, scale = _quantized(weight)
    operations.append(Vocabulary(last, RowLinear(np.ascontiguousarray(values.T), scale, arrays["bias"], None)))
    words = None
    if "words.common" in arrays:
        common, targets = (arrays[f"words.{name}"].astype(np.int32) for name in ("common", "targets"))
        words = DraftWords(common, arrays["words.offsets"].astype(np.int64), targets)
    state = layer("cell", qparams=target.qparams)
    return DraftProgram(DecoderProgram(operations, decoder.memory_width), state, words)


def _quantized(array: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Returns rows as int8, and their scales."""
    scale = np.maximum(np.abs(array).max(1), 1e-12).astype(np.float32) / np.float32(127)
    return np.rint(array / scale[:, None]).astype(np.int8), scale
