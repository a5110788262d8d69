"""Reference implementation of the native Transformer in numpy, bit for bit the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.operations import (
    LANES,
    Activation,
    Attention,
    CrossAttention,
    Embedding,
    LayerNorm,
    Linear,
    Operation,
    QuantizedAttention,
    Recurrence,
    RowLinear,
    Scale,
    SelfAttention,
    StaticQParams,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram

Floats = NDArray[np.float32]
PANEL = 64  # logits that share one maximum in the online softmax
ROUND_TO_INT = np.float32(12582912)  # 1.5 * 2^23: added to |x| < 2^22, it leaves rint(x) in the lowest bits
SMALLEST_ABS_MAX = np.float32(1e-30)
LOG2_E = np.float32(1.44269504)
GELU = (
    1.7281269e-10,
    -1.551985e-8,
    6.1151377e-7,
    -1.4108793e-5,
    2.1648454e-4,
    -2.3977514e-3,
    2.0246882e-2,
    -0.13371626,
    0.79840469,
)


def sum_lanes(x: Floats) -> Floats:
    """Sums over the last axis in the kernels' order: 16 lanes, each of every 16th element, then `reduce_lanes`.

    Args:
        x: float32 [..., n].

    Returns:
        float32 [...].
    """
    whole = -(-x.shape[-1] // LANES) * LANES
    padded = np.zeros((*x.shape[:-1], whole), np.float32)
    padded[..., : x.shape[-1]] = x
    total = np.zeros((*x.shape[:-1], LANES), np.float32)
    for first in range(0, whole, LANES):
        total = total + padded[..., first : first + LANES]
    return reduce_lanes(total)


def reduce_lanes(total: Floats) -> Floats:
    """Sums 16 lanes, float32 [..., 16] -> [...]: the upper half is added to the lower half until one is left."""
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def exponential(x: Floats) -> Floats:
    """exp(x) by Cephes' polynomial (expf), to a relative error of 1e-7.

    Args:
        x: float32, at most 0; the result is 0 below -87.

    Returns:
        float32 of the same shape.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = x * np.float32(1.44269504088896341) + ROUND_TO_INT
        n = shifted - ROUND_TO_INT
        r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
        p = r * np.float32(1.9875691500e-4) + np.float32(1.3981999507e-3)
        for each in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + np.float32(each)
        y = (p * (r * r) + r) + np.float32(1)
        scaled = (y.view(np.int32) + (shifted.view(np.int32) << np.int32(23))).view(np.float32)
    return np.where(x >= np.float32(-87), scaled, np.float32(0))


def quantize_rows(
    x: Floats, nonnegative: bool = False, qparams: StaticQParams | None = None
) -> tuple[NDArray[np.uint8], Floats]:
    """Quantizes rows to uint8.

    Args:
        x: float32 [n, K], all finite.
        nonnegative: Whether nothing is negative; the dynamic zero point is 0 then.
        qparams: Static quantization parameters; None: dynamic ones, each row by its own range.

    Returns:
        uint8 [n, K], and the scale of each row, float32 [n].
    """
    if qparams:
        with np.errstate(over="ignore"):
            scaled = np.rint(x / np.float32(qparams.scale))
        return np.clip(scaled + qparams.zero_point, 0, 255).astype(np.uint8), np.full(len(x), qparams.scale, np.float32)
    levels, zero_point = (np.float32(255), 0) if nonnegative else (np.float32(127), 128)
    largest = np.abs(x).max(axis=1)
    nonzero = largest >= SMALLEST_ABS_MAX
    divisor = np.where(nonzero, largest, np.float32(1))
    scale = np.where(nonzero, largest / levels, np.float32(1))
    inverse = np.where(nonzero, levels / divisor, np.float32(0))
    return (np.rint(x * inverse[:, None]).astype(np.int32) + zero_point).astype(np.uint8), scale


def linear(
    layer: RowLinear, x: Floats, nonnegative: bool = False, relu: bool = False, residual: Floats | None = None
) -> Floats:
    """Computes a `RowLinear`.

    Args:
        layer: The layer.
        x: float32 [n, K].
        nonnegative: See `quantize_rows`.
        relu: Whether a ReLU follows.
        residual: float32 [n, N] that is added after the ReLU, or None.

    Returns:
        float32 [n, N].
    """
    rows, scale = quantize_rows(x, nonnegative, layer.qparams)
    zero_point = layer.qparams.zero_point if layer.qparams else 0 if nonnegative else 128
    sums = (rows.astype(np.float64) - zero_point) @ layer.weight.astype(np.float64)  # exact: below 2^53
    y = sums.astype(np.float32) * (scale[:, None] * layer.scale) + layer.bias
    if relu:
        y = np.maximum(y, np.float32(0))
    return y if residual is None else y + residual


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) of float32 numbers, computed from e = exp(-|x|)."""
    e = exponential(-np.abs(x))
    return np.asarray(np.where(x < 0, e, np.float32(1)) / (np.float32(1) + e))


def activate(kind: str, x: Floats) -> Floats:
    """Computes an `Activation`.

    Args:
        kind: One of `GRAPH_ACTIVATIONS`. GELU is an odd polynomial up to 4.2, fitted to x times its error: to 6e-5.
        x: float32 of any shape.

    Returns:
        float32 of the same shape.
    """
    if kind == "swish":
        return x * sigmoid(x)
    if kind == "tanh":
        return np.tanh(x)
    if kind == "gelu_tanh":
        inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
        return np.float32(0.5) * x * (1 + np.tanh(inner))  # type: ignore[no-any-return]
    t = np.clip(x, np.float32(-4.2), np.float32(4.2))
    z = t * t
    p = np.full_like(z, GELU[0])
    for each in GELU[1:]:
        p = p * z + np.float32(each)
    return np.asarray((x * np.float32(0.5)) * (p * t + np.float32(1)))


def recurrence(gates: Floats, cells: Floats) -> Floats:
    """Computes the cells of a `Recurrence` after one token.

    Args:
        gates: [forget | value], float32 [n, 2 W].
        cells: Cells before, float32 [n, W].

    Returns:
        Cells after, float32 [n, W].
    """
    forget, value = np.split(gates, 2, axis=1)
    keep = sigmoid(forget)
    found: Floats = cells * keep + (np.float32(1) - keep) * value
    return found


def layer_norm(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    """Computes a `LayerNorm`.

    Args:
        x: float32 [n, W].
        scale: float32 [W].
        bias: float32 [W].
        epsilon: Added to the variance.

    Returns:
        float32 [n, W].
    """
    count = np.float32(x.shape[1])
    deviation = x - (sum_lanes(x) / count)[:, None]
    inverse_std = np.float32(1) / np.sqrt(sum_lanes(deviation * deviation) / count + np.float32(epsilon))
    normalized: Floats = (deviation * inverse_std[:, None]) * scale + bias
    return normalized


def to_float16(x: Floats) -> Floats:
    """Rounds to float16 as a KV cache stores keys and values.

    Args:
        x: float32 of any shape; clipped to +-65504.

    Returns:
        The rounded numbers, float32.
    """
    largest = np.float32(65504)
    return np.clip(x, -largest, largest).astype(np.float16).astype(np.float32)


def self_attention(query: Floats, keys: Floats, values: Floats, heads: int) -> Floats:
    """Computes self-attention of one decoder token; q . k has the order of `sum_lanes`.

    Args:
        query: float32 [W].
        keys: float32 [t, W].
        values: float32 [t, W].
        heads: Number of heads.

    Returns:
        float32 [W].
    """
    scores = sum_lanes(query.reshape(heads, -1) * keys.reshape(len(keys), heads, -1)).T
    return _softmax_weighted(scores, values)


def attention(queries: Floats, keys: Floats, values: Floats, heads: int, causal: bool = False) -> Floats:
    """Computes attention of several queries over the same keys; q . k is summed column by column.

    Args:
        queries: float32 [n, W].
        keys: float32 [t, W].
        values: float32 [t, W].
        heads: Number of heads.
        causal: Whether query i attends to the keys from i on, as in a sequence with the newest item first.

    Returns:
        float32 [n, W].
    """
    out = np.zeros_like(queries)
    split = keys.reshape(len(keys), heads, -1).transpose(2, 1, 0)  # [size, heads, t]
    for at, (query, row) in enumerate(zip(queries, out, strict=True)):
        scores = np.zeros((heads, len(keys)), np.float32)
        for factor, column in zip(query.reshape(heads, -1).T, split, strict=True):
            scores = scores + factor[:, None] * column
        scores[:, : at * causal] = -np.inf
        row[:] = _softmax_weighted(scores, values)
    return out


def quantized_attention(x: Floats, heads: int, bias: Floats | None = None) -> Floats:
    """Computes `QuantizedAttention` of one sentence.

    Args:
        x: [query | key | value], float32 `[n, 3 W]`.
        heads: Number of heads.
        bias: float32 [heads, 2 P - 1], or None.

    Returns:
        float32 [n, W].
    """
    n = len(x)
    queries, keys, values = (part.reshape(n, heads, -1) for part in np.split(x, 3, axis=1))
    key_scale, key_inverse = _code_scales(keys, 0)
    value_scale, value_inverse = _code_scales(values, 0)
    key_codes, value_codes = np.rint(keys * key_inverse), np.rint(values * value_inverse)
    scaled = queries * key_scale
    scale, inverse = _code_scales(scaled, 2)
    factor = (scale * LOG2_E).transpose(1, 0, 2)  # [heads, n, 1]
    sums = np.einsum("ihd,thd->hit", np.rint(scaled * inverse), key_codes, dtype=np.float64)  # exact: below 2^53
    scores = sums.astype(np.float32) * factor
    if bias is not None:
        distances = np.arange(n) - np.arange(n)[:, None] + bias.shape[1] // 2
        scores = scores + bias[:, distances] * LOG2_E
    codes = _weight_codes(scores - scores.max(axis=2, keepdims=True))
    totals = np.einsum("hit,thd->ihd", codes, value_codes, dtype=np.float64).astype(np.float32)
    share = np.float32(1) / codes.sum(axis=2, dtype=np.float64).astype(np.float32)
    found: Floats = ((totals * share.T[:, :, None]) * value_scale).reshape(n, -1)
    return found


def _code_scales(x: Floats, axis: int) -> tuple[Floats, Floats]:
    """Scales of codes -127 to 127, by the range along `axis`, and their inverses."""
    largest = np.abs(x).max(axis=axis, keepdims=True)
    nonzero, levels = largest >= SMALLEST_ABS_MAX, np.float32(127)
    divisor = np.where(nonzero, largest, np.float32(1))
    return np.where(nonzero, largest / levels, np.float32(1)), np.where(nonzero, levels / divisor, np.float32(0))


def _weight_codes(x: Floats) -> Floats:
    """rint(255 2^x) for x <= 0, to .03 before it is rounded, 0 from -16 down."""
    x = np.maximum(x, np.float32(-16))
    n = np.rint(x)
    f = x - n
    p = np.full_like(f, 14.027278)
    for each in (61.763796, 176.78715, 255):
        p = p * f + np.float32(each)
    codes: Floats = np.rint(np.ldexp(p, n.astype(np.int32)))
    return codes


def _softmax_weighted(scores: Floats, values: Floats) -> Floats:
    """Values [t, W] weighted by the softmax of their scores [heads, t]: [W]."""
    weights = exponential(scores - scores.max(axis=1, keepdims=True))
    total = np.zeros((len(scores), values.shape[1] // len(scores)), np.float32)
    for weight, value in zip(weights.T, values, strict=True):
        total = total + weight[:, None] * value.reshape(len(scores), -1)
    normalized: Floats = (total * (np.float32(1) / sum_lanes(weights))[:, None]).ravel()
    return normalized


def top_k(logits: Floats, k: int) -> tuple[Floats, NDArray[np.int32], NDArray[np.float64]]:
    """Finds the likeliest tokens and the normalization of softmax.

    Args:
        logits: float32 [n, vocabulary].
        k: Tokens of each row; of equal logits the first token comes first.

    Returns:
        Logits float32 [n, k], tokens int32 [n, k], and log-sum-exp of all logits float64 [n].
    """
    n, vocabulary = logits.shape
    tokens = np.lexsort((np.broadcast_to(np.arange(vocabulary), logits.shape), -logits), axis=1)[:, :k]
    padded = np.full((n, -(-vocabulary // PANEL) * PANEL), -np.inf, np.float32)
    padded[:, :vocabulary] = logits
    largest, sums = np.full(n, -np.inf, np.float32), np.zeros((n, LANES), np.float32)
    for panel in padded.reshape(n, -1, PANEL).swapaxes(0, 1):
        maximum = np.maximum(panel.max(axis=1), largest)
        with np.errstate(invalid="ignore"):
            sums = np.where((maximum > largest)[:, None], sums * exponential((largest - maximum)[:, None]), sums)
        largest = maximum
        for part in panel.reshape(n, -1, LANES).swapaxes(0, 1):
            sums = sums + exponential(part - maximum[:, None])
    totals = reduce_lanes(sums).tolist()
    log_sum_exp = np.array([math.log(total) + float(base) for total, base in zip(totals, largest, strict=True)])
    return np.take_along_axis(logits, tokens, 1), tokens.astype(np.int32), log_sum_exp


def embedding(operation: Embedding, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """Computes an `Embedding`.

    Args:
        operation: The operation.
        tokens: int64 [n].
        positions: int64 [n].

    Returns:
        float32 [n, W].
    """
    rows: Floats = (
        operation.table[tokens].astype(np.float32) * operation.scale[tokens, None] + operation.positions[positions]
    )
    return rows


class Registers:
    """Registers of a program during its run."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Floats, bool]] = {}  # (rows, whether they are known to be nonnegative)

    def result(self, operation: Operation) -> tuple[Floats, bool]:
        """Computes an operation that reads its input and residual alone.

        Args:
            operation: A `Scale`, `Activation`, `LayerNorm` or `Linear`.

        Returns:
            The result, float32 [n, columns], and whether it is known to be nonnegative.
        """
        x, nonnegative = self.values[operation.input]  # type: ignore[union-attr]
        if isinstance(operation, Scale):
            return x * operation.factors, False
        if isinstance(operation, Activation):
            return activate(operation.kind, x), False
        if isinstance(operation, LayerNorm):
            return layer_norm(x, operation.scale, operation.bias, operation.epsilon), False
        assert isinstance(operation, Linear)
        residual = None if operation.residual is None else self.values[operation.residual][0]
        return linear(operation.layer, x, nonnegative, operation.relu, residual), operation.relu and residual is None


def encode(program: EncoderProgram, tokens: NDArray[np.int64], positions: NDArray[np.int64] | None = None) -> Floats:
    """Computes an encoder of one sentence.

    Args:
        program: The program.
        tokens: int64 [n].
        positions: int64 [n]; None for 0, 1, ...

    Returns:
        float32 [n, W].
    """
    registers = Registers()
    result: tuple[Floats, bool]
    for operation in program.operations:
        match operation:
            case Embedding():
                result = (
                    embedding(operation, tokens, np.arange(len(tokens)) if positions is None else positions),
                    False,
                )
            case Attention():
                query, keys, values = np.split(registers.values[operation.input][0], 3, axis=1)
                result = attention(query, keys, values, operation.heads), False
            case QuantizedAttention():
                rows = registers.values[operation.input][0]
                result = quantized_attention(rows, operation.heads, operation.bias), False
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
        projections = [each.layer for each in program.operations if isinstance(each, CrossAttention)]
        # of every sentence: the keys and values of each cross-attention
        self.cross_kv = [
            [np.split(to_float16(linear(each, memory)), 2, axis=1) for each in projections] for memory in memories
        ]
        self.sentences = list(range(len(memories)))
        # of every row: [position][self-attention] key | value
        self.caches: list[list[list[Floats]]] = [[] for _ in memories]
        # of every recurrence the cells of all rows
        self.cells: dict[int, Floats] = {}

    def __call__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> Floats:
        """One decoding step: the logits of the tokens that follow."""
        self.sentences = [self.sentences[parent] for parent in parents]
        self.caches = [[*self.caches[parent], []] for parent in parents]
        registers = Registers()
        layer = 0  # of cross-attention
        for number, operation in enumerate(self.program.operations[:-1]):
            result: tuple[Any, bool]
            match operation:
                case Embedding():
                    position = len(self.caches[0]) - 1 if self.caches else 0
                    result = embedding(operation, tokens, np.full(len(tokens), position)), False
                case SelfAttention():
                    rows = registers.values[operation.input][0]
                    pairs = zip(self.caches, rows, strict=True)
                    result = np.stack([_cached_attention(*pair, operation.heads) for pair in pairs]), False
                case Recurrence():
                    gates = registers.values[operation.input][0]
                    before = self.cells.get(number, np.zeros((len(parents), gates.shape[1] // 2), np.float32))
                    self.cells[number] = recurrence(gates, before[parents] if number in self.cells else before)
                    y = np.maximum(self.cells[number], np.float32(0))
                    added = operation.residual
                    result = (y, True) if added is None else (y + registers.values[added][0], False)
                case CrossAttention():
                    queries = registers.values[operation.input][0]
                    results = []
                    for query, sentence in zip(queries, self.sentences, strict=True):
                        keys, values = self.cross_kv[sentence][layer]
                        results.append(attention(query[None], keys, values, operation.heads))
                    result = np.concatenate(results), False
                    layer += 1
                case _:
                    result = registers.result(operation)
            registers.values[operation.out] = result  # type: ignore[union-attr]
        last = self.program.operations[-1]
        assert isinstance(last, Vocabulary)
        return linear(last.layer, *registers.values[last.input])


def _cached_attention(cache: list[list[Floats]], x: Floats, heads: int) -> Floats:
    """Self-attention of one row [query | key | value], whose key and value join the cache."""
    query, key_value = np.split(x, [len(x) // 3])
    cache[-1].append(to_float16(key_value))
    layer = len(cache[-1]) - 1
    keys, values = np.split(np.stack([position[layer] for position in cache]), 2, axis=1)
    return self_attention(query, keys, values, heads)
