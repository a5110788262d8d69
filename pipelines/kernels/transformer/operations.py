"""Operations of a Transformer's encoder and decoder over numbered registers.

A register holds float32 activations: a row for each token of the sources, or for each beam. A linear layer quantizes
its input to uint8: statically, by the scale and the zero point of the graph's QuantizeLinear, or else dynamically, each
row by its own range:

    u_k = clip(rint(x_k / s) + zero, 0, 255)                           `StaticQParams`; where there are none,
    s   = max_k |x_k| / 127,  u_k = rint(x_k (127 / max)) + 128   0 <= u_k <= 255; where nothing is negative,
    s   = max_k x_k / 255,    u_k = rint(x_k (255 / max))              and s = 1 for a row of zeros (all |x_k| < 1e-30)
    y_j = float32(sum_k (u_k - zero) weight[k, j]) (s scale_j) + bias_j,   then ReLU and residual, where asked for

The KV caches of a decoder are float16 (`reference.to_float16`), which halves the bytes that a decoding step reads.
Everything else is float32. Every operation is rounded by itself, and sums have the order of `reference.sum_lanes`, so
that all instruction sets and the numpy `reference` return the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

LANES = 16  # the size of an attention head is a multiple of it
MAX_WIDTH = 65536  # columns of a layer, at most
MEMORY = -1  # the encoder's result among the registers
ACTIVATIONS = ("swish", "gelu")  # of the native kernels
GRAPH_ACTIVATIONS = (*ACTIVATIONS, "gelu_tanh", "tanh")  # of graphs that are mapped for other ends


@dataclass(frozen=True)
class StaticQParams:
    """Static quantization parameters of uint8 activations.

    Attributes:
        scale: A float32, greater than 0.
        zero_point: 0 to 255.

    Raises:
        RequestError: A value is out of range.
    """

    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        if not 0 < self.scale < np.inf or not 0 <= self.zero_point <= 255:
            raise RequestError(
                f"a linear layer takes inputs of scale {self.scale} and zero point {self.zero_point}; expected more "
                "than 0, 0 "
                "to 255"
            )


@dataclass(frozen=True, eq=False)
class RowLinear:
    """A fully connected layer on quantized rows, see the module.

    Attributes:
        weight: int8 [K, N], or float32 in operations that do not become a program of the kernels.
        scale: float32 [N], per output channel; 1 for float weights.
        bias: float32 [N].
        qparams: Static quantization parameters of its input, the same for all layers of one register. None: dynamic
            quantization.

    Raises:
        RequestError: A shape or type does not fit, a number is not finite, or sums may overflow:
            255 sum_k |weight[k, j]| >= 2^31 - 1.
    """

    weight: Array
    scale: Array
    bias: Array
    qparams: StaticQParams | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size or self.inputs > MAX_WIDTH:
            raise RequestError(
                f"a linear layer has weights of shape {list(self.weight.shape)}; expected [1 to {MAX_WIDTH}, outputs]"
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
        """K, the number of input columns."""
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        """N, the number of output columns."""
        return int(self.weight.shape[1])


class Checked:
    """An operation that a program checks."""

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """Checks the arrays of the operation.

        Args:
            where: Name of the operation, for messages.
            widths: Columns of the registers that hold a value, and of `MEMORY` in a decoder.

        Returns:
            Columns of the result.

        Raises:
            RequestError: An array does not fit, or the operation has no native kernel.
        """
        raise RequestError(f"{where} has no native kernel")


def _require_finite(where: str, name: str, row: Array, width: int) -> None:
    require(where, name, row, np.float32, (width,))
    if not np.isfinite(row).all():
        raise RequestError(f"{where} has a {name} that is not finite")


def _layer_width(where: str, layer: RowLinear, given: int) -> int:
    if layer.inputs != given:
        raise RequestError(f"{where} takes {layer.inputs} columns and is given {given}")
    return layer.outputs


def _require_residual(where: str, residual: int | None, widths: Mapping[int, int], width: int) -> None:
    if residual is not None and widths[residual] != width:
        raise RequestError(f"{where} gives {width} columns, the residual has {widths[residual]}")


def _attention_width(where: str, heads: int, width: int, merged: int) -> int:
    """Columns of the result. merged: 3 where the input is [query | key | value]."""
    result, rest = divmod(width, merged)
    if rest or heads < 1 or result < heads or result % (LANES * heads):
        raise RequestError(f"{where} has {heads} heads on {width} columns; a head has a multiple of {LANES}")
    return result


@dataclass(frozen=True, eq=False)
class Embedding(Checked):
    """Token and position embedding: out = table[token] scale[token] + positions[position].

    Attributes:
        table: int8 [V, W], or float32 in operations that do not become a program of the kernels.
        scale: float32 [V].
        positions: float32 [P, W].
        out: Register of the result, W columns.
    """

    table: Array
    scale: Array
    positions: Array
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if (
            self.table.ndim != 2
            or not self.table.size
            or self.table.shape[1] > MAX_WIDTH
            or self.positions.ndim != 2
            or not len(self.positions)
        ):
            raise RequestError(
                f"{where} has a table {list(self.table.shape)} and positions {list(self.positions.shape)}; expected "
                "two axes"
            )
        count, width = self.table.shape
        require(where, "table", self.table, np.int8, (count, width))
        _require_finite(where, "scale", self.scale, count)
        require(where, "positions", self.positions, np.float32, (len(self.positions), width))
        if not np.isfinite(self.positions).all():
            raise RequestError(f"{where} has positions that are not finite")
        return int(width)


@dataclass(frozen=True, eq=False)
class LayerNorm(Checked):
    """Layer normalization (Ba et al. 2016): out = (x - mean) / sqrt(variance + epsilon) scale + bias over W columns.

    Attributes:
        input: Register of x.
        scale: float32 [W].
        bias: float32 [W].
        epsilon: Added to the variance.
        out: Register of the result.
    """

    input: int
    scale: Array
    bias: Array
    epsilon: float
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = widths[self.input]
        _require_finite(where, "scale", self.scale, width)
        _require_finite(where, "bias", self.bias, width)
        if not 0 <= self.epsilon < np.inf:
            raise RequestError(f"{where} has epsilon {self.epsilon}; expected 0 or more")
        return width


@dataclass(frozen=True, eq=False)
class Linear(Checked):
    """Fully connected layer: out = layer(input), then ReLU, then plus a residual.

    Attributes:
        input: Register of K columns.
        layer: Weights and bias.
        out: Register of the result, N columns.
        relu: Whether a ReLU follows.
        residual: Register of N columns that is added after the ReLU; None for none.
    """

    input: int
    layer: RowLinear
    out: int
    relu: bool = False
    residual: int | None = None

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = _layer_width(where, self.layer, widths[self.input])
        _require_residual(where, self.residual, widths, width)
        return width


@dataclass(frozen=True, eq=False)
class Attention(Checked):
    """Multi-head self-attention of an encoder over all tokens of a sentence (Vaswani et al. 2017, section 3.2).

    In each head h, columns h W / heads to (h + 1) W / heads: sum_t softmax_t(q . k_t) v_t. The scale 1 / sqrt(size) is
    folded into the layer of the queries.

    Attributes:
        input: Register of [query | key | value], 3 W columns.
        heads: Number of heads.
        out: Register of the result, W columns.
    """

    input: int
    heads: int
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        return _attention_width(where, self.heads, widths[self.input], 3)


@dataclass(frozen=True, eq=False)
class QuantizedAttention(Checked):
    """`Attention` in integers, each head of a sentence by its own ranges.

        k~[t, j] = rint(k[t, j] / a_j), a_j = max_t |k[t, j]| / 127         v~, c_j of the values likewise
        q~[i, j] = rint(q[i, j] a_j / b_i), b_i = max_j |q[i, j] a_j| / 127
        score    = b_i sum_j q~[i, j] k~[t, j] + bias[head, P - 1 + t - i]
        w~[i, t] = rint(255 exp(score - max_t score)), to .03 before it is rounded
        out      = c_j sum_t w~[i, t] v~[t, j] / sum_t w~[i, t]

    Attributes:
        input: Register of [query | key | value], 3 W columns.
        heads: Number of heads.
        out: Register of the result, W columns.
        bias: float32 [heads, 2 P - 1] by the distance of two of at most P tokens (MPNet), or None.
    """

    input: int
    heads: int
    out: int
    bias: Array | None = None

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.bias is not None:
            require(where, "bias", self.bias, np.float32, (self.heads, self.bias.shape[-1]))
            if self.bias.shape[1] % 2 == 0 or not np.isfinite(self.bias).all():
                raise RequestError(f"{where} has a bias that is not finite, or has no middle")
        return _attention_width(where, self.heads, widths[self.input], 3)


@dataclass(frozen=True, eq=False)
class SelfAttention(Checked):
    """Causal multi-head self-attention of a decoder: `Attention` over the KV cache, to which the newest token is added.

    Attributes:
        input: Register of [query | key | value], 3 W columns.
        heads: Number of heads.
        out: Register of the result, W columns.
    """

    input: int
    heads: int
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        return _attention_width(where, self.heads, widths[self.input], 3)


@dataclass(frozen=True, eq=False)
class Activation(Checked):
    """Activation function: swish, x sigmoid(x), or gelu, x (1 + erf(x / sqrt 2)) / 2.

    Without native kernels: tanh, and gelu_tanh, x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Attributes:
        input: Register of x.
        kind: One of `GRAPH_ACTIVATIONS`.
        out: Register of the result.
    """

    input: int
    kind: str
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.kind not in GRAPH_ACTIVATIONS:
            raise RequestError(f"{where} computes {self.kind!r}; expected {' or '.join(GRAPH_ACTIVATIONS)}")
        return widths[self.input]


@dataclass(frozen=True, eq=False)
class Scale(Checked):
    """Multiplication by a constant row, such as smoothing before a linear layer.

    Attributes:
        input: Register of W columns.
        factors: float32 [W].
        out: Register of the result.
    """

    input: int
    factors: Array
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        _require_finite(where, "factors", self.factors, widths[self.input])
        return widths[self.input]


@dataclass(frozen=True, eq=False)
class Recurrence(Checked):
    """Simpler simple recurrent unit of a decoder (SSRU, Kim et al. 2019, section 3.1).

    keep = sigmoid(forget); cell = cell keep + (1 - keep) value, from zeros on; out = relu(cell), plus the residual.

    Attributes:
        input: Register of [forget | value], 2 W columns.
        out: Register of the result, W columns.
        residual: Register of W columns that is added; None for none.
    """

    input: int
    out: int
    residual: int | None = None

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width, rest = divmod(widths[self.input], 2)
        if rest or width % LANES:
            raise RequestError(
                f"{where} has gates of {widths[self.input]} columns; expected twice a multiple of {LANES}"
            )
        _require_residual(where, self.residual, widths, width)
        return width


@dataclass(frozen=True, eq=False)
class RunningMean(Checked):
    """Mean of a register over all tokens so far (average attention, Zhang et al. 2018). No native kernel exists.

    Attributes:
        input: Register of W columns.
        out: Register of the result.
    """

    input: int
    out: int


@dataclass(frozen=True, eq=False)
class Gate(Checked):
    """Gated value: out = sigmoid(gate) input, plus a residual. No native kernel exists.

    Attributes:
        input: Register of W columns.
        gate: Register of W columns.
        out: Register of the result.
        residual: Register of W columns that is added; None for none.
    """

    input: int
    gate: int
    out: int
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class Sum(Checked):
    """Sum of two registers where no other operation adds the residual. No native kernel exists.

    Attributes:
        input: Register of W columns.
        residual: Register of W columns.
        out: Register of the result.
    """

    input: int
    residual: int
    out: int


@dataclass(frozen=True, eq=False)
class CrossAttention(Checked):
    """Multi-head cross-attention of a decoder over the source.

    Attributes:
        input: Register of queries, W columns.
        layer: Encoder result -> [key | value], 2 W columns, computed once a sentence.
        heads: Number of heads.
        out: Register of the result, W columns.
    """

    input: int
    layer: RowLinear
    heads: int
    out: int

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = _attention_width(where, self.heads, widths[self.input], 1)
        if (self.layer.inputs, self.layer.outputs) != (widths[MEMORY], 2 * width):
            raise RequestError(
                f"{where} makes keys and values of {self.layer.inputs} -> {self.layer.outputs} columns; expected "
                f"{widths[MEMORY]} -> {2 * width}"
            )
        return width


@dataclass(frozen=True, eq=False)
class Vocabulary(Checked):
    """Vocabulary projection, the last operation of a decoder; only top-k and log-sum-exp of the logits are stored.

    Attributes:
        input: Register of K columns.
        layer: Weights [K, vocabulary] and bias.
    """

    input: int
    layer: RowLinear

    def check(self, where: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        return _layer_width(where, self.layer, widths[self.input])


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
