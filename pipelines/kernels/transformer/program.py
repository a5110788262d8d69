"""What the native Transformer computes, as data: the steps of its encoder and of its decoder over numbered registers.

A register holds a row of float32 for each token of the sources, or for each beam. A linear layer takes it quantized, by
the scale and the zero point that the graph has for it, as its QuantizeLinear, or else each row by its own range:

    u_k = clip(rint(x_k / s) + zero, 0, 255)                           `Levels`; where there are none,
    s   = max_k |x_k| / 127,  u_k = rint(x_k (127 / max)) + 128   0 <= u_k <= 255; where nothing is negative,
    s   = max_k x_k / 255,    u_k = rint(x_k (255 / max))              and s = 1 for a row of zeros (all |x_k| < 1e-30)
    y_j = float32(sum_k (u_k - zero) weight[k, j]) (s scale_j) + shift_j,   then ReLU and residual, where asked for

A decoder keeps keys and values as float16 (`rowwise.halved`), half of what a step reads of them. Everything else is
float32, every operation rounded alone, sums in the order of `rowwise.lanes`, so that all instruction sets and
`rowwise`, the same in numpy, return the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

LANES = 16  # a head of attention has a multiple of so many columns
MOST = 65536  # columns of a layer, at most
BEAM = 128  # beams of a sentence, at most
MEMORY = -1  # the encoder's result, among registers


@dataclass(frozen=True)
class Levels:
    """The scale, a float32, and the zero point, 0 to 255, of a quantized value. Raises RequestError for others."""

    scale: float
    zero: int

    def __post_init__(self) -> None:
        if not 0 < self.scale < np.inf or not 0 <= self.zero <= 255:
            raise RequestError(
                f"a linear layer takes inputs of scale {self.scale} and zero point {self.zero}; wanted more than 0, 0 "
                "to 255"
            )


@dataclass(frozen=True, eq=False)
class RowLinear:
    """A fully connected layer on quantized rows (see the module): weight int8 [K, N], scale and shift float32 [N].

    levels: of the rows that it takes; None: each row by its own range. All layers that take the same rows have the
    same. Integers cannot overflow: 255 sum_k |weight[k, j]| < 2^31 is checked here. Raises RequestError for anything
    else.
    """

    weight: Array
    scale: Array
    shift: Array
    levels: Levels | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size or self.inputs > MOST:
            raise RequestError(
                f"a linear layer has weights of shape {list(self.weight.shape)}; wanted [1 to {MOST}, outputs]"
            )
        require("a linear layer", "weight", self.weight, np.int8, self.weight.shape)
        for name in ("scale", "shift"):
            require("a linear layer", name, getattr(self, name), np.float32, (self.outputs,))
            if not np.isfinite(getattr(self, name)).all():
                raise RequestError(f"a linear layer has a {name} that is not finite")
        if 255 * np.abs(self.weight, dtype=np.int16).sum(axis=0, dtype=np.int64).max() >= 2**31 - 1:
            raise RequestError("a linear layer can overflow 32 bits")

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.weight.shape[1])


@dataclass(frozen=True, eq=False)
class Embed:
    """out = table[token] scale[token] + positions[position]: table int8 [V, W], scale float32 [V], positions float32
    [P, W].
    """

    table: Array
    scale: Array
    positions: Array
    out: int


@dataclass(frozen=True, eq=False)
class Norm:
    """out = (x - mean) / sqrt(variance + epsilon) scale + bias, over the W columns of `input`: scale and bias float32
    [W].
    """

    input: int
    scale: Array
    bias: Array
    epsilon: float
    out: int


@dataclass(frozen=True, eq=False)
class Linear:
    """out = layer(input), its ReLU if asked for, then plus `residual`, a register as wide, if one is named."""

    input: int
    layer: RowLinear
    out: int
    relu: bool = False
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """Of an encoder: input [query | key | value], 3 W columns -> W, over all tokens of a sentence.

    For each of the heads, columns h W / heads to (h + 1) W / heads: softmax_t(q . k_t) weights the v_t. The scale of
    the products is in the layer that makes the queries.
    """

    input: int
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """Of a decoder: the same over the tokens so far. Keys and values of this position are kept for the ones that
    follow.
    """

    input: int
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """The same for queries of W columns over the source: layer(memory row) = [key | value], 2 W columns, computed once
    a sentence.
    """

    input: int
    layer: RowLinear
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The last step: logits = layer(input), of which only the likeliest and the sum of all exponentials are kept."""

    input: int
    layer: RowLinear


Step = Embed | Norm | Linear | Attention | SelfAttention | CrossAttention | Vocabulary
OF_ENCODER = (Norm, Linear, Attention)
OF_DECODER = (Norm, Linear, SelfAttention, CrossAttention)


class _Embedded:
    """What begins with an embedding."""

    steps: Sequence[Step]

    @property
    def embedding(self) -> Embed:
        """The first step."""
        assert isinstance(self.steps[0], Embed)
        return self.steps[0]

    @property
    def positions(self) -> int:
        """So many tokens a sentence may have."""
        return len(self.embedding.positions)


@dataclass(frozen=True, eq=False)
class Program(_Embedded):
    """The steps of a decoder, an `Embed` first, a `Vocabulary` last; memory_width: columns of the encoder's result.

    Raises RequestError, naming the step, where one does not fit those before it.
    """

    steps: Sequence[Step]
    memory_width: int

    def __post_init__(self) -> None:
        if not 1 <= self.memory_width <= MOST:
            raise RequestError(f"a decoder has a memory of width {self.memory_width}; wanted 1 to {MOST}")
        if not self.steps or not isinstance(self.steps[-1], Vocabulary):
            raise RequestError("a decoder begins with an embedding and ends with a vocabulary")
        _follow("a decoder", self.steps, OF_DECODER, self.memory_width)
        if self.words > len(self.embedding.table):
            raise RequestError(f"a decoder has {self.words} words, and embeddings of {len(self.embedding.table)}")

    @property
    def vocabulary(self) -> Vocabulary:
        """The last step."""
        assert isinstance(self.steps[-1], Vocabulary)
        return self.steps[-1]

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
        return self.vocabulary.layer.outputs


@dataclass(frozen=True, eq=False)
class EncoderProgram(_Embedded):
    """The steps of an encoder, an `Embed` first; what the last one makes is its result.

    Raises RequestError, naming the step, where one does not fit those before it.
    """

    steps: Sequence[Step]

    def __post_init__(self) -> None:
        _follow("an encoder", self.steps, OF_ENCODER, 0)


def _follow(what: str, steps: Sequence[Step], kinds: tuple[type[Any], ...], memory: int) -> None:
    """Raises RequestError where a step does not follow from those before. memory: see `Program`."""
    widths: dict[int, int] = {}
    taken: dict[
        int, Levels | None
    ] = {}  # the levels of each register, and of the memory, at MEMORY, as far as they are read
    if not steps or not isinstance(steps[0], Embed):
        raise RequestError(f"{what} begins with an embedding")
    for number, step in enumerate(steps):
        where = f"step {number} ({type(step).__name__})"
        if (
            number
            and not isinstance(step, kinds)
            and not (isinstance(step, Vocabulary) and number == len(steps) - 1 and memory)
        ):
            raise RequestError(f"{where} stands where it cannot in {what}, which begins with an embedding")
        for each in fields(step):
            value = getattr(step, each.name)
            if each.name in ("input", "residual") and value is not None and value not in widths:
                raise RequestError(f"{where} reads register {value}, which holds nothing yet")
        width = _width(where, step, widths, memory)
        if isinstance(step, Linear | CrossAttention | Vocabulary):
            at = MEMORY if isinstance(step, CrossAttention) else step.input
            if taken.setdefault(at, step.layer.levels) != step.layer.levels:
                raise RequestError(f"{where} takes rows quantized by {step.layer.levels}, another by {taken[at]}")
        if not isinstance(step, Vocabulary):
            if not 0 <= step.out < 256 or (not isinstance(step, Embed) and step.out == step.input):
                raise RequestError(
                    f"{where} writes register {step.out}; wanted 0 to 255, and not the one that it reads"
                )
            widths[step.out] = width
            taken.pop(step.out, None)


def _width(where: str, step: Step, widths: dict[int, int], memory: int) -> int:
    """The columns of a step's result. Raises RequestError where it does not fit."""
    if isinstance(step, Embed):
        if (
            step.table.ndim != 2
            or not step.table.size
            or step.table.shape[1] > MOST
            or step.positions.ndim != 2
            or not len(step.positions)
        ):
            raise RequestError(
                f"{where} has a table {list(step.table.shape)} and positions {list(step.positions.shape)}; wanted two "
                "axes"
            )
        count, width = step.table.shape
        require(where, "table", step.table, np.int8, (count, width))
        require(where, "scale", step.scale, np.float32, (count,))
        require(where, "positions", step.positions, np.float32, (len(step.positions), width))
        if not np.isfinite(step.scale).all() or not np.isfinite(step.positions).all():
            raise RequestError(f"{where} has scales or positions that are not finite")
        return int(width)
    width = widths[step.input]
    if isinstance(step, Norm):
        for name in ("scale", "bias"):
            require(where, name, getattr(step, name), np.float32, (width,))
            if not np.isfinite(getattr(step, name)).all():
                raise RequestError(f"{where} has a {name} that is not finite")
        if not 0 <= step.epsilon < np.inf:
            raise RequestError(f"{where} has epsilon {step.epsilon}; wanted 0 or more")
        return width
    if isinstance(step, Linear | Vocabulary):
        if step.layer.inputs != width:
            raise RequestError(f"{where} takes {step.layer.inputs} columns and is given {width}")
        if isinstance(step, Linear) and step.residual is not None and widths[step.residual] != step.layer.outputs:
            raise RequestError(f"{where} gives {step.layer.outputs} columns, the residual has {widths[step.residual]}")
        return step.layer.outputs
    own = isinstance(step, Attention | SelfAttention)
    result, rest = divmod(width, 3) if own else (width, 0)
    if rest or step.heads < 1 or result < step.heads or result % (LANES * step.heads):
        raise RequestError(f"{where} has {step.heads} heads on {width} columns; a head has a multiple of {LANES}")
    if isinstance(step, CrossAttention) and (step.layer.inputs, step.layer.outputs) != (memory, 2 * width):
        raise RequestError(
            f"{where} makes keys and values of {step.layer.inputs} -> {step.layer.outputs} columns; wanted {memory} "
            f"-> {2 * width}"
        )
    return result
