"""The native Transformer in numpy (see `decoder`): slow, plain, and the definition of what it returns, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.transformer.program import (
    LANES,
    Attention,
    CrossAttention,
    Embed,
    EncoderProgram,
    Levels,
    Linear,
    Norm,
    Program,
    RowLinear,
    SelfAttention,
    Step,
    Vocabulary,
)

Floats = NDArray[np.float32]
PANEL = 64  # columns of the vocabulary that are looked at together
WHOLE = np.float32(12582912)  # 1.5 * 2^23: added to |x| < 2^22, it leaves rint(x) in the lowest bits
SMALLEST = np.float32(1e-30)


def lanes(x: Floats) -> Floats:
    """Sums over the last axis in the kernels' order: 16 of them, of every 16th element each, then halves onto
    halves.
    """
    whole = -(-x.shape[-1] // LANES) * LANES
    padded = np.zeros((*x.shape[:-1], whole), np.float32)
    padded[..., : x.shape[-1]] = x
    total = np.zeros((*x.shape[:-1], LANES), np.float32)
    for first in range(0, whole, LANES):
        total = total + padded[..., first : first + LANES]
    return fold(total)


def fold(total: Floats) -> Floats:
    """The sum of 16 lanes, [..., 16] -> [...]."""
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def exponential(x: Floats) -> Floats:
    """exp(x) for x <= 0, to 1e-7 of it; 0 below -87. Cephes' polynomial (expf)."""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = x * np.float32(1.44269504088896341) + WHOLE
        n = shifted - WHOLE
        r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
        p = r * np.float32(1.9875691500e-4) + np.float32(1.3981999507e-3)
        for each in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + np.float32(each)
        y = (p * (r * r) + r) + np.float32(1)
        scaled = (y.view(np.int32) + (shifted.view(np.int32) << np.int32(23))).view(np.float32)
    return np.where(x >= np.float32(-87), scaled, np.float32(0))


def quantize(x: Floats, positive: bool = False, levels: Levels | None = None) -> tuple[NDArray[np.uint8], Floats]:
    """(bytes [n, K], scale [n]) of rows [n, K], all finite, by these levels, or each by its own range; positive:
    nothing is negative.
    """
    if levels:
        with np.errstate(over="ignore"):
            steps = np.rint(x / np.float32(levels.scale))
        return np.clip(steps + levels.zero, 0, 255).astype(np.uint8), np.full(len(x), levels.scale, np.float32)
    steps, zero = (np.float32(255), 0) if positive else (np.float32(127), 128)
    most = np.abs(x).max(axis=1)
    some = most >= SMALLEST
    divisor = np.where(some, most, np.float32(1))
    scale = np.where(some, most / steps, np.float32(1))
    times = np.where(some, steps / divisor, np.float32(0))
    return (np.rint(x * times[:, None]).astype(np.int32) + zero).astype(np.uint8), scale


def linear(
    layer: RowLinear, x: Floats, positive: bool = False, relu: bool = False, residual: Floats | None = None
) -> Floats:
    """`RowLinear` for x float32 [n, K] -> float32 [n, N]."""
    rows, scale = quantize(x, positive, layer.levels)
    zero = layer.levels.zero if layer.levels else 0 if positive else 128
    sums = (rows.astype(np.float64) - zero) @ layer.weight.astype(np.float64)  # exact: below 2^53
    y = sums.astype(np.float32) * (scale[:, None] * layer.scale) + layer.shift
    if relu:
        y = np.maximum(y, np.float32(0))
    return y if residual is None else y + residual


def norm(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    """Layer normalization of rows [n, W]."""
    count = np.float32(x.shape[1])
    off = x - (lanes(x) / count)[:, None]
    rate = np.float32(1) / np.sqrt(lanes(off * off) / count + np.float32(epsilon))
    found: Floats = (off * rate[:, None]) * scale + bias
    return found


def halved(x: Floats) -> Floats:
    """Rounded to float16 and to its largest number where it is too large, as a decoder keeps keys and values."""
    most = np.float32(65504)
    return np.clip(x, -most, most).astype(np.float16).astype(np.float32)


def attention(query: Floats, keys: Floats, values: Floats, heads: int) -> Floats:
    """What one query [W] finds in keys and values [t, W]: [W]. The products are summed as in `lanes`."""
    scores = lanes(query.reshape(heads, -1) * keys.reshape(len(keys), heads, -1)).T
    return _weighted(scores, values)


def attention_to(queries: Floats, keys: Floats, values: Floats, heads: int) -> Floats:
    """What queries [n, W] find in the same keys and values [t, W]: [n, W]. The products are summed from the first
    column to the last.
    """
    found = np.zeros_like(queries)
    split = keys.reshape(len(keys), heads, -1).transpose(2, 1, 0)  # [size, heads, t]
    for query, to in zip(queries, found, strict=True):
        scores = np.zeros((heads, len(keys)), np.float32)
        for factor, column in zip(query.reshape(heads, -1).T, split, strict=True):
            scores = scores + factor[:, None] * column
        to[:] = _weighted(scores, values)
    return found


def _weighted(scores: Floats, values: Floats) -> Floats:
    """Values [t, W] by the softmax of their scores [heads, t]: [W]."""
    weights = exponential(scores - scores.max(axis=1, keepdims=True))
    found = np.zeros((len(scores), values.shape[1] // len(scores)), np.float32)
    for each, value in zip(weights.T, values, strict=True):
        found = found + each[:, None] * value.reshape(len(scores), -1)
    shared: Floats = (found * (np.float32(1) / lanes(weights))[:, None]).ravel()
    return shared


def likeliest(logits: Floats, count: int) -> tuple[Floats, NDArray[np.int32], NDArray[np.float64]]:
    """(values [n, count], tokens [n, count], log of the sum of all exponentials [n]) of logits [n, words]; of equals
    the first token.
    """
    n, words = logits.shape
    tokens = np.lexsort((np.broadcast_to(np.arange(words), logits.shape), -logits), axis=1)[:, :count]
    padded = np.full((n, -(-words // PANEL) * PANEL), -np.inf, np.float32)
    padded[:, :words] = logits
    largest, sums = np.full(n, -np.inf, np.float32), np.zeros((n, LANES), np.float32)
    for panel in padded.reshape(n, -1, PANEL).swapaxes(0, 1):
        most = np.maximum(panel.max(axis=1), largest)
        with np.errstate(invalid="ignore"):
            sums = np.where((most > largest)[:, None], sums * exponential((largest - most)[:, None]), sums)
        largest = most
        for part in panel.reshape(n, -1, LANES).swapaxes(0, 1):
            sums = sums + exponential(part - most[:, None])
    norms = np.array([math.log(each) + float(base) for each, base in zip(fold(sums).tolist(), largest, strict=True)])
    return np.take_along_axis(logits, tokens, 1), tokens.astype(np.int32), norms


def embedded(step: Embed, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """`Embed` of tokens and positions [n]: [n, W]."""
    found: Floats = step.table[tokens].astype(np.float32) * step.scale[tokens, None] + step.positions[positions]
    return found


class Registers:
    """What the registers of a program hold."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Floats, bool]] = {}  # the rows, and whether they are known to be nowhere negative

    def made(self, step: Step) -> tuple[Floats, bool]:
        """What a `Norm` or a `Linear` makes of them."""
        x, positive = self.held[step.input]  # type: ignore[union-attr]
        if isinstance(step, Norm):
            return norm(x, step.scale, step.bias, step.epsilon), False
        assert isinstance(step, Linear)
        residual = None if step.residual is None else self.held[step.residual][0]
        return linear(step.layer, x, positive, step.relu, residual), step.relu and residual is None


def encode(program: EncoderProgram, tokens: NDArray[np.int64]) -> Floats:
    """The encoder's result of one sentence, float32 [tokens, W]."""
    registers = Registers()
    found: tuple[Floats, bool]
    for step in program.steps:
        match step:
            case Embed():
                found = embedded(step, tokens, np.arange(len(tokens))), False
            case Attention():
                query, keys, values = np.split(registers.held[step.input][0], 3, axis=1)
                found = attention_to(query, keys, values, step.heads), False
            case _:
                found = registers.made(step)
        registers.held[step.out] = found  # type: ignore[union-attr]
    return found[0]


class Decoding:
    """Sentences on their way through a program: a step function as `zoo.transformer_mt.decode.beam_search` takes it.

    memories: float32 [source, width] of each sentence. Called with (tokens int64 [rows], parents int64 [rows]: the row
    of the call before that each one goes on from), it returns logits float32 [rows, words].
    """

    def __init__(self, program: Program, memories: Sequence[Floats]) -> None:
        self.program = program
        crosses = [step for step in program.steps if isinstance(step, CrossAttention)]
        self.memories = [
            [np.split(halved(linear(step.layer, each)), 2, axis=1) for step in crosses] for each in memories
        ]
        self.sentences = list(range(len(memories)))
        self.caches: list[list[list[Floats]]] = [
            [] for _ in memories
        ]  # of every row: [position][self-attention] key | value

    def __call__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> Floats:
        """See the class."""
        self.sentences = [self.sentences[each] for each in parents]
        self.caches = [[*self.caches[each], []] for each in parents]
        registers = Registers()
        crossed = 0
        for step in self.program.steps[:-1]:
            found: tuple[Any, bool]
            match step:
                case Embed():
                    position = len(self.caches[0]) - 1 if self.caches else 0
                    found = embedded(step, tokens, np.full(len(tokens), position)), False
                case SelfAttention():
                    rows = registers.held[step.input][0]
                    found = (
                        np.stack(
                            [self._own(row, each, step.heads) for row, each in zip(self.caches, rows, strict=True)]
                        ),
                        False,
                    )
                case CrossAttention():
                    sources = [self.memories[each][crossed] for each in self.sentences]
                    pairs = zip(registers.held[step.input][0], sources, strict=True)
                    found = (
                        np.concatenate(
                            [attention_to(q[None], keys, values, step.heads) for q, (keys, values) in pairs]
                        ),
                        False,
                    )
                    crossed += 1
                case _:
                    found = registers.made(step)
            registers.held[step.out] = found  # type: ignore[union-attr]
        last = self.program.steps[-1]
        assert isinstance(last, Vocabulary)
        return linear(last.layer, *registers.held[last.input])

    def _own(self, cache: list[list[Floats]], x: Floats, heads: int) -> Floats:
        query, rest = np.split(x, [len(x) // 3])
        cache[-1].append(halved(rest))
        at = len(cache[-1]) - 1
        keys, values = np.split(np.stack([each[at] for each in cache]), 2, axis=1)
        return attention(query, keys, values, heads)
