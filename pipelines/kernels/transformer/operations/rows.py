"""Operations on one row at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.transformer.operations.base import (
    ACTIVATIONS,
    COLUMNS,
    GRAPH_ACTIVATIONS,
    LANES,
    MAX_WIDTH,
    Checked,
    RowLinear,
    layer_width,
    require_epsilon,
    require_finite,
    require_residual,
)


@dataclass(frozen=True, eq=False)
class Embedding(Checked):
    """Token and position embedding: out = table[token] scale[token] + positions[position].

    Attributes:
        table: int8 [V, W], or float32 in operations that do not become a program of the kernels.
        scale: float32 [V].
        positions: float32 [P, W]. With `longest` a row is added at all positions alike.
        out: Register of the result, W columns.
        longest: Maximum number of tokens where no table of positions limits it; else None.
    """

    table: Array
    scale: Array
    positions: Array
    out: int
    longest: int | None = None

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if (
            self.table.ndim != 2
            or not self.table.size
            or self.table.shape[1] > MAX_WIDTH
            or self.positions.ndim != 2
            or not len(self.positions)
        ):
            raise RequestError(
                f"{operation} has a table {list(self.table.shape)} and positions {list(self.positions.shape)}; "
                "expected two axes"
            )
        count, width = self.table.shape
        require(operation, "table", self.table, np.int8, (count, width))
        require_finite(operation, "scale", self.scale, count)
        require(operation, "positions", self.positions, np.float32, (len(self.positions), width))
        if not np.isfinite(self.positions).all():
            raise RequestError(f"{operation} has positions that are not finite")
        if self.longest is not None and not 1 <= self.longest < 2**31:
            raise RequestError(f"{operation} takes {self.longest} tokens; expected 1 or more")
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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = widths[self.input]
        require_finite(operation, "scale", self.scale, width)
        require_finite(operation, "bias", self.bias, width)
        require_epsilon(operation, self.epsilon)
        return width


@dataclass(frozen=True, eq=False)
class PartNorms(Checked):
    """Layer normalization of the first parts of a row, W columns each: [norm(a) | norm(b) | ... | what follows].

    Attributes:
        input: Register of N W columns or more.
        scale: float32 [N, W].
        bias: float32 [N, W].
        epsilon: Added to the variances.
        out: Register of the result.
    """

    input: int
    scale: Array
    bias: Array
    epsilon: float
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.scale.ndim != 2 or not self.scale.size or self.scale.shape[1] % COLUMNS:
            raise RequestError(
                f"{operation} has scales {list(self.scale.shape)}; expected parts of a multiple of {COLUMNS} columns"
            )
        if self.scale.size > widths[self.input]:
            raise RequestError(f"{operation} normalizes {self.scale.size} of {widths[self.input]} columns")
        require(operation, "bias", self.bias, np.float32, self.scale.shape)
        require_finite(operation, "scale", self.scale.ravel(), self.scale.size)
        require_finite(operation, "bias", self.bias.ravel(), self.bias.size)
        require_epsilon(operation, self.epsilon)
        return widths[self.input]


@dataclass(frozen=True, eq=False)
class RMSNorm(Checked):
    """RMS normalization (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + epsilon) scale over W columns.

    Attributes:
        input: Register of x.
        scale: float32 [W].
        epsilon: Added to the mean of squares.
        out: Register of the result.
    """

    input: int
    scale: Array
    epsilon: float
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        require_finite(operation, "scale", self.scale, widths[self.input])
        require_epsilon(operation, self.epsilon)
        return widths[self.input]


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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if not self.layer.quantizes and not np.isfinite(self.layer.weight).all():
            raise RequestError(f"{operation} has weights that are not finite")
        width = layer_width(operation, self.layer, widths[self.input])
        require_residual(operation, self.residual, widths, width)
        return width


@dataclass(frozen=True, eq=False)
class Activation(Checked):
    """Activation function: swish, x sigmoid(x), gelu, x (1 + erf(x / sqrt 2)) / 2, or gelu_tanh, see below.

    gelu_tanh is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. Without native kernel: tanh.

    Attributes:
        input: Register of x.
        kind: One of `GRAPH_ACTIVATIONS`.
        out: Register of the result.
    """

    input: int
    kind: str
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.kind not in GRAPH_ACTIVATIONS:
            raise RequestError(f"{operation} computes {self.kind!r}; expected {' or '.join(GRAPH_ACTIVATIONS)}")
        return widths[self.input]


@dataclass(frozen=True, eq=False)
class GatedActivation(Checked):
    """Gated linear unit (Shazeer 2020, "GLU Variants Improve Transformer"): out = activation(gate) up.

    Attributes:
        input: Register of [gate | up], 2 W columns.
        kind: Activation, one of `ACTIVATIONS`.
        out: Register of the result, W columns.
    """

    input: int
    kind: str
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.kind not in ACTIVATIONS:
            raise RequestError(f"{operation} computes {self.kind!r}; expected {' or '.join(ACTIVATIONS)}")
        width, remainder = divmod(widths[self.input], 2)
        if remainder or width % LANES:
            raise RequestError(
                f"{operation} has gates of {widths[self.input]} columns; expected twice a multiple of {LANES}"
            )
        return width


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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        require_finite(operation, "factors", self.factors, widths[self.input])
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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width, remainder = divmod(widths[self.input], 2)
        if remainder or width % LANES:
            raise RequestError(
                f"{operation} has gates of {widths[self.input]} columns; expected twice a multiple of {LANES}"
            )
        require_residual(operation, self.residual, widths, width)
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
    """Sum of two registers where no other operation adds the residual.

    Attributes:
        input: Register of W columns.
        residual: Register of W columns.
        out: Register of the result.
    """

    input: int
    residual: int
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        require_residual(operation, self.residual, widths, widths[self.input])
        return widths[self.input]


@dataclass(frozen=True, eq=False)
class Vocabulary(Checked):
    """Vocabulary projection, the last operation of a decoder; only top-k and log-sum-exp of the logits are stored.

    Attributes:
        input: Register of K columns.
        layer: Weights [K, vocabulary] and bias.
    """

    input: int
    layer: RowLinear

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        return layer_width(operation, self.layer, widths[self.input])
