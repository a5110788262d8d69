"""Operations on all rows of a sequence: attention, and neighbouring rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require
from pipelines.kernels.transformer.operations.base import (
    LANES,
    MAX_WIDTH,
    MEMORY,
    Checked,
    RowLinear,
    require_epsilon,
    require_finite,
)


def _attention_width(operation: str, heads: int, width: int, merged: int) -> int:
    """Columns of the result. merged: 3 where the input is [query | key | value]."""
    result, remainder = divmod(width, merged)
    if remainder or heads < 1 or result < heads or result % (LANES * heads):
        raise RequestError(f"{operation} has {heads} heads on {width} columns; a head has a multiple of {LANES}")
    return result


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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        return _attention_width(operation, self.heads, widths[self.input], 3)


@dataclass(frozen=True, eq=False)
class Neighbours(Checked):
    """Rows side by side, as a convolution over tokens reads them: out[t] = [x[t - c / 2] | ... | x[t + c / 2]].

    Rows before the first token, behind the last one, and of tokens that are not attended to are zeros.

    Attributes:
        input: Register of x, W columns.
        count: c, an odd number of rows.
        out: Register of the result, c W columns.
    """

    input: int
    count: int
    out: int

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = self.count * widths[self.input]
        if self.count < 1 or self.count % 2 == 0 or width > MAX_WIDTH:
            raise RequestError(
                f"{operation} joins {self.count} rows of {widths[self.input]} columns; expected an odd number, and at "
                f"most {MAX_WIDTH} columns"
            )
        return width


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (Su et al. 2021, "RoFormer") of the first 2 R columns of queries and keys, in two halves.

        out[i, j]     = x[i, j] cos[i, j] - x[i, R + j] sin[i, j]
        out[i, R + j] = x[i, R + j] cos[i, j] + x[i, j] sin[i, j]

    Attributes:
        cos: float32 [P, R], of at most P tokens.
        sin: float32 [P, R].
    """

    cos: Array
    sin: Array

    def check(self, operation: str, size: int) -> None:
        """Checks the tables.

        Args:
            operation: Name of the operation, for messages.
            size: Columns of a head.

        Raises:
            RequestError: They do not fit.
        """
        for name in ("cos", "sin"):
            table = getattr(self, name)
            require(operation, name, table, np.float32, self.cos.shape)
            if table.ndim != 2 or not table.size or 2 * table.shape[1] > size or not np.isfinite(table).all():
                raise RequestError(f"{operation} turns heads of {size} columns by tables {list(table.shape)}")


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMS normalization of each head's queries and keys before rotary positions.

    Attributes:
        query: float32 [size], multiplies the columns of queries.
        key: float32 [size], multiplies the columns of keys.
        epsilon: Added to the mean of squares.
    """

    query: Array
    key: Array
    epsilon: float

    def check(self, operation: str, size: int) -> None:
        """Checks the scales.

        Args:
            operation: Name of the operation, for messages.
            size: Columns of a head.

        Raises:
            RequestError: They do not fit.
        """
        require_finite(operation, "scale of queries", self.query, size)
        require_finite(operation, "scale of keys", self.key, size)
        require_epsilon(operation, self.epsilon)


@dataclass(frozen=True, eq=False)
class Disentangled:
    """Scores of content and relative position (He et al. 2021, "DeBERTa", section 3.1), as codes like those of keys.

        q'[i, j] = rint(q[i, j] a_j / d_i), d_i = max_j |q[i, j] a_j| / 127     k'[t, j], e_t of keys with c_j likewise
        score[i, t] += d_i sum_j q'[i, j] to_position[row, j] + e_t sum_j k'[t, j] to_content[row, j]

    with row = rows[P - 1 + t - i].

    Attributes:
        rows: int32 [2 P - 1], row of the tables by the distance of two of at most P tokens.
        to_position: int8 [heads, R, size], keys of positions, or None.
        to_position_scale: a, float32 [heads, size], or None.
        to_content: int8 [heads, R, size], queries of positions, or None.
        to_content_scale: c, float32 [heads, size], or None.
    """

    rows: Array
    to_position: Array | None
    to_position_scale: Array | None
    to_content: Array | None
    to_content_scale: Array | None

    def check(self, operation: str, heads: int, size: int) -> None:
        """Checks the tables.

        Args:
            operation: Name of the operation, for messages.
            heads: Number of heads.
            size: Columns of a head.

        Raises:
            RequestError: They do not fit.
        """
        require(operation, "rows", self.rows, np.int32, (len(self.rows),))
        for name in ("to_position", "to_content"):
            table, scale = getattr(self, name), getattr(self, f"{name}_scale")
            if table is None:
                continue
            count = table.shape[1] if table.ndim == 3 else 0
            require(operation, name, table, np.int8, (heads, count, size))
            require(operation, f"{name}_scale", scale, np.float32, (heads, size))
            if not np.isfinite(scale).all() or not 0 <= self.rows.min() <= self.rows.max() < count:
                raise RequestError(
                    f"{operation} has positions of {count} rows, and scales or rows that do not fit them"
                )
        if len(self.rows) % 2 == 0:
            raise RequestError(f"{operation} has rows of {len(self.rows)} distances; expected an odd number")


@dataclass(frozen=True, eq=False)
class QuantizedAttention(Checked):
    """`Attention` in integers, each head of a sentence by its own ranges.

    Queries q and keys k are normalized by `norm` and turned by `rotary` first, where there are any.

        k~[t, j] = rint(k[t, j] / a_j), a_j = max_t |k[t, j]| / 127         v~, c_j of the values likewise
        q~[i, j] = rint(q[i, j] a_j / b_i), b_i = max_j |q[i, j] a_j| / 127
        score    = b_i sum_j q~[i, j] k~[t, j] + bias[head, P - 1 + t - i]
        w~[i, t] = rint(255 exp(score - max_t score)), to .03 before it is rounded
        out      = c_j sum_t w~[i, t] v~[t, j] / sum_t w~[i, t]

    Attributes:
        input: Register of [query | key | value], (heads + 2 key_heads) size columns.
        heads: Number of heads.
        out: Register of the result, heads size columns.
        bias: float32 [heads, 2 P - 1] by the distance of two of at most P tokens (MPNet, ALiBi), or None.
        key_heads: Number of heads of keys and values, each for heads / key_heads heads of queries (Ainslie et al. 2023,
            "GQA"); None: as many as heads.
        before: Number of keys before its own that a query attends to; None: all.
        after: Number of keys after its own that a query attends to, 0 in causal attention; None: all.
        norm: Normalization of queries and keys, or None.
        rotary: Rotary positions, or None.
        positions: Scores of content and relative position, or None.
    """

    input: int
    heads: int
    out: int
    bias: Array | None = None
    key_heads: int | None = None
    before: int | None = None
    after: int | None = None
    norm: HeadNorm | None = None
    rotary: Rotary | None = None
    positions: Disentangled | None = None

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens by the tables of positions; None: any."""
        lengths = [] if self.bias is None else [self.bias.shape[1] // 2 + 1]
        lengths += [] if self.positions is None else [len(self.positions.rows) // 2 + 1]
        return min([*lengths, *([] if self.rotary is None else [len(self.rotary.cos)])], default=None)

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.bias is not None:
            require(operation, "bias", self.bias, np.float32, (self.heads, self.bias.shape[-1]))
            if self.bias.shape[1] % 2 == 0 or not np.isfinite(self.bias).all():
                raise RequestError(f"{operation} has a bias that is not finite, or has no middle")
        key_heads = self.heads if self.key_heads is None else self.key_heads
        if self.heads < 1 or key_heads < 1 or self.heads % key_heads:
            raise RequestError(f"{operation} has {self.heads} heads of queries for {key_heads} of keys")
        if min(self.before or 0, self.after or 0) < 0:
            raise RequestError(
                f"{operation} attends to {self.before} keys before and {self.after} after; expected 0 or more"
            )
        size, remainder = divmod(widths[self.input], self.heads + 2 * key_heads)
        if remainder:
            raise RequestError(f"{operation} has {self.heads} + 2 x {key_heads} heads on {widths[self.input]} columns")
        for part in (self.norm, self.rotary):
            if part is not None:
                part.check(operation, size)
        if self.positions is not None:
            self.positions.check(operation, key_heads, size)
        return _attention_width(operation, self.heads, self.heads * size, 1)


@dataclass(frozen=True, eq=False)
class SelfAttention(Checked):
    """Causal multi-head self-attention of a decoder: `Attention` over the KV cache, to which the newest token is added.

    Attributes:
        input: Register of [query | key | value], 3 W columns.
        heads: Number of heads.
        out: Register of the result, W columns.
        bias: float32 [heads, R], added to the scores of the newest R tokens, the query's own last; the first column to
            those of all tokens before them, too (T5). None: no bias.
    """

    input: int
    heads: int
    out: int
    bias: Array | None = None

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        if self.bias is not None:
            require(operation, "bias", self.bias, np.float32, (self.heads, self.bias.shape[-1]))
            if not self.bias.size or not np.isfinite(self.bias).all():
                raise RequestError(f"{operation} has a bias that is empty or not finite")
        return _attention_width(operation, self.heads, widths[self.input], 3)


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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """See `Checked`."""
        width = _attention_width(operation, self.heads, widths[self.input], 1)
        if (self.layer.inputs, self.layer.outputs) != (widths[MEMORY], 2 * width):
            raise RequestError(
                f"{operation} makes keys and values of {self.layer.inputs} -> {self.layer.outputs} columns; expected "
                f"{widths[MEMORY]} -> {2 * width}"
            )
        return width
