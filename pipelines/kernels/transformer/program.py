"""What the native Transformer computes, as data: the operations of its encoder and of its decoder over numbered
registers.

A register holds float32 activations: a row for each token of the sources, or for each beam. A linear layer takes them
quantized to uint8, static, by the scale and the zero point of the graph's QuantizeLinear, or else dynamic, each row by
its own range:

    u_k = clip(rint(x_k / s) + zero, 0, 255)                           `StaticQParams`; where there are none,
    s   = max_k |x_k| / 127,  u_k = rint(x_k (127 / max)) + 128   0 <= u_k <= 255; where nothing is negative,
    s   = max_k x_k / 255,    u_k = rint(x_k (255 / max))              and s = 1 for a row of zeros (all |x_k| < 1e-30)
    y_j = float32(sum_k (u_k - zero) weight[k, j]) (s scale_j) + bias_j,   then ReLU and residual, where asked for

The KV caches of a decoder are float16 (`reference.to_float16`), which halves what a decoding step reads of them.
Everything else is float32, every operation rounded alone, sums in the order of `reference.sum_lanes`, so that all
instruction sets and `reference`, the same in numpy, return the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

LANES = 16  # the size of an attention head is a multiple of it
MAX_WIDTH = 65536  # columns of a layer, at most
MEMORY = -1  # stands for the encoder's result among the registers


@dataclass(frozen=True)
class StaticQParams:
    """Scale, a float32, and zero point, 0 to 255, of statically quantized uint8 activations. Raises RequestError."""

    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        if not 0 < self.scale < np.inf or not 0 <= self.zero_point <= 255:
            raise RequestError(
                f"a linear layer takes inputs of scale {self.scale} and zero point {self.zero_point}; wanted more "
                "than 0, 0 "
                "to 255"
            )


@dataclass(frozen=True, eq=False)
class RowLinear:
    """A fully connected layer on quantized rows (see the module): weight int8 [K, N], scale and bias float32 [N].

    qparams: of its input; None: dynamic quantization. All layers that take the same rows have the same. Integers cannot
    overflow: 255 sum_k |weight[k, j]| < 2^31 is checked here. Raises RequestError for anything else. Weights may be
    float32, with a scale of 1, in operations that do not become a program of the kernels.
    """

    weight: Array
    scale: Array
    bias: Array
    qparams: StaticQParams | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size or self.inputs > MAX_WIDTH:
            raise RequestError(
                f"a linear layer has weights of shape {list(self.weight.shape)}; wanted [1 to {MAX_WIDTH}, outputs]"
            )
        if self.weight.dtype != np.float32:
            require("a linear layer", "weight", self.weight, np.int8, self.weight.shape)
        for name in ("scale", "bias"):
            require("a linear layer", name, getattr(self, name), np.float32, (self.outputs,))
            if not np.isfinite(getattr(self, name)).all():
                raise RequestError(f"a linear layer has a {name} that is not finite")
        if (
            self.weight.dtype == np.int8
            and 255 * np.abs(self.weight, dtype=np.int16).sum(axis=0, dtype=np.int64).max() >= 2**31 - 1
        ):
            raise RequestError("a linear layer can overflow 32 bits")

    @property
    def inputs(self) -> int:
        """K, the columns of its input."""
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        """N, the columns of its result."""
        return int(self.weight.shape[1])


@dataclass(frozen=True, eq=False)
class Embedding:
    """Token and position embedding: out = table[token] scale[token] + positions[position].

    table: int8 [V, W]. scale: float32 [V]. positions: float32 [P, W].
    """

    table: Array
    scale: Array
    positions: Array
    out: int


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Layer normalization: out = (x - mean) / sqrt(variance + epsilon) scale + bias, over the W columns of `input`.

    scale, bias: float32 [W].
    """

    input: int
    scale: Array
    bias: Array
    epsilon: float
    out: int


@dataclass(frozen=True, eq=False)
class Linear:
    """Fully connected: out = layer(input), its ReLU if asked for, then plus `residual`, a register as wide."""

    input: int
    layer: RowLinear
    out: int
    relu: bool = False
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """Multi-head self-attention of an encoder, over all tokens of a sentence: [query | key | value], 3 W columns -> W.

    In each head h, columns h W / heads to (h + 1) W / heads: sum_t softmax_t(q . k_t) v_t. The scale 1 / sqrt(size) is
    folded into the layer that makes the queries.
    """

    input: int
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class QuantizedAttention:
    """`Attention` in integers: of each head of a sentence, all by ranges of its own,

        k~[t, j] = rint(k[t, j] / a_j), a_j = max_t |k[t, j]| / 127         v~, c_j of the values likewise
        q~[i, j] = rint(q[i, j] a_j / b_i), b_i = max_j |q[i, j] a_j| / 127
        score    = b_i sum_j q~[i, j] k~[t, j] + bias[head, P - 1 + t - i]
        w~[i, t] = rint(255 exp(score - max_t score)), to .03 before it is rounded
        out      = c_j sum_t w~[i, t] v~[t, j] / sum_t w~[i, t]

    bias: float32 [heads, 2 P - 1], of at most P tokens, as MPNet has it, or None.
    """

    input: int
    heads: int
    out: int
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """Causal multi-head self-attention of a decoder: `Attention` over the KV cache, which this position joins."""

    input: int
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class Activation:
    """out = x sigmoid(x), "swish", or x (1 + erf(x / sqrt 2)) / 2, "gelu"."""

    input: int
    kind: str
    out: int


@dataclass(frozen=True, eq=False)
class Scale:
    """out = x factors, of each of the W columns: smoothing before a linear layer. factors: float32 [W]."""

    input: int
    factors: Array
    out: int


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The simpler simple recurrent unit of a decoder (Kim et al. 2019): [forget | value], 2 W columns -> W.

    keep = sigmoid(forget); cell = cell keep + (1 - keep) value, from zeros on; out = relu(cell), plus `residual`.
    """

    input: int
    out: int
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class RunningMean:
    """out = the mean of `input` of all tokens so far (average attention, Zhang et al. 2018). No kernel has it."""

    input: int
    out: int


@dataclass(frozen=True, eq=False)
class Gate:
    """out = sigmoid(gate) input, plus `residual` where there is one. No kernel has it.

    input, gate, residual: registers of the same width.
    """

    input: int
    gate: int
    out: int
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class Sum:
    """out = input + residual, registers of the same width. No kernel has it: there, a layer adds the residual."""

    input: int
    residual: int
    out: int


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Multi-head cross-attention of queries of W columns over the source.

    layer: memory row -> [key | value], 2 W columns, computed once a sentence.
    """

    input: int
    layer: RowLinear
    heads: int
    out: int


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The vocabulary projection, last: logits = layer(input), of which only the top-k and log-sum-exp are kept."""

    input: int
    layer: RowLinear


Operation = (
    Embedding
    | LayerNorm
    | Linear
    | Activation
    | Scale
    | Attention
    | QuantizedAttention
    | SelfAttention
    | Recurrence
    | RunningMean
    | Gate
    | Sum
    | CrossAttention
    | Vocabulary
)
ENCODER_OPERATIONS = (LayerNorm, Linear, Activation, Scale, Attention, QuantizedAttention)
DECODER_OPERATIONS = (LayerNorm, Linear, Activation, Scale, SelfAttention, Recurrence, CrossAttention)
ACTIVATIONS = ("swish", "gelu")


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
    """The operations of a decoder, an `Embedding` first, a `Vocabulary` last.

    memory_width: columns of the encoder's result. Raises RequestError, naming the operation, where one does not fit
    those before it.
    """

    operations: Sequence[Operation]
    memory_width: int

    def __post_init__(self) -> None:
        if not 1 <= self.memory_width <= MAX_WIDTH:
            raise RequestError(f"a decoder has a memory of width {self.memory_width}; wanted 1 to {MAX_WIDTH}")
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
        """Tokens that it may choose among."""
        return self.vocabulary.layer.outputs


@dataclass(frozen=True, eq=False)
class EncoderProgram(_Program):
    """The operations of an encoder, an `Embedding` first; the result of the last is its result.

    Raises RequestError, naming the operation, where one does not fit those before it.
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
                    f"{where} writes register {operation.out}; wanted 0 to 255, and not the one that it reads"
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
                "wanted two "
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
            raise RequestError(f"{where} has epsilon {operation.epsilon}; wanted 0 or more")
        return width
    if isinstance(operation, Scale):
        require(where, "factors", operation.factors, np.float32, (width,))
        if not np.isfinite(operation.factors).all():
            raise RequestError(f"{where} has factors that are not finite")
        return width
    if isinstance(operation, Activation):
        if operation.kind not in ACTIVATIONS:
            raise RequestError(f"{where} computes {operation.kind!r}; wanted {' or '.join(ACTIVATIONS)}")
        return width
    if isinstance(operation, Recurrence):
        if width % (2 * LANES):
            raise RequestError(f"{where} has gates of {width} columns; wanted twice a multiple of {LANES}")
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
            f"{where} makes keys and values of {operation.layer.inputs} -> {operation.layer.outputs} columns; wanted "
            f"{memory_width} "
            f"-> {2 * width}"
        )
    return result
