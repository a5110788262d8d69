"""The operators of click models, as validated dataclasses: `EmbeddingLayer` (ParallelEmbedding) and `LinearLayer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

DOMAIN = "int8.zoo"
COLUMNS = 64  # table rows are padded to whole cache lines
ZERO = 128  # the zero point of a table: value = uint8 - 128
NUMBER_LIMIT = 2048  # numbers are quantized to -2048 to 2048
FIELDS = 32767 // 127  # so many int8 rows an int16 holds the sum of


@dataclass(frozen=True, eq=False)
class EmbeddingLayer:
    """The first fully connected layer of a click model, folded into its embedding tables (`ParallelEmbedding`).

    For ids [n, columns] and numbers x [n, M], with F fields and hidden width H, in integers but for the last step:

        r_f   = offsets_f + ids[columns_f]                      0 <= ids[columns_f] < rows_f
        k_m   = clip(rint(x_m number_scale_m), -2048, 2048)
        acc_j = 2^shift sum_f (table[r_f, j] - 128) + sum_m k_m weight[m, j]
        h_j   = clip(rint(float32(acc_j) scale_j + bias_j), 0, 255)     the ReLU is the clip at 0
        wide  = sum_f wide[r_f]                                 float32, added in the order of the fields

    A number beyond its calibrated range counts as the end of it, NaN as 0. Integers cannot overflow: a table entry is
    in [-127, 127], so a sum of F <= 258 = floor(32767 / 127) of them fits int16, and 2^shift 127 F + 2048 max_j sum_m
    |weight[m, j]| < 2^31 is checked here, as is that every result fits int32 before its clip.

    table: uint8 [R, H padded to whole 64], entries 1..255 meaning -127..127, 128 in the padding. columns, offsets,
    rows: int32 [F].
    weight: int16 [M, H]. scale, bias: float32 [H]. number_scale: float32 [M]. wide: float32 [R], or None. Raises
    RequestError for anything else.
    """

    table: Array
    columns: Array
    offsets: Array
    rows: Array
    weight: Array
    scale: Array
    bias: Array
    number_scale: Array
    shift: int
    wide: Array | None = None
    name: ClassVar[str] = "ParallelEmbedding"

    def __post_init__(self) -> None:
        width, fields = self.scale.size, self.columns.size
        padded = -(-width // COLUMNS) * COLUMNS
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            "table": (np.uint8, (len(self.table), padded)),
            "columns": (np.int32, (fields,)),
            "offsets": (np.int32, (fields,)),
            "rows": (np.int32, (fields,)),
            "weight": (np.int16, (self.number_scale.size, width)),
            "scale": (np.float32, (width,)),
            "bias": (np.float32, (width,)),
            "number_scale": (np.float32, (self.number_scale.size,)),
        }
        if self.wide is not None:
            shapes["wide"] = (np.float32, (len(self.table),))
        for name, (dtype, shape) in shapes.items():
            require("ParallelEmbedding", name, getattr(self, name), dtype, shape)
        if not 1 <= fields <= FIELDS:
            raise RequestError(f"ParallelEmbedding has {fields} fields; an int16 sum holds 1 to {FIELDS}")
        if not 0 <= self.shift <= 14:
            raise RequestError(f"ParallelEmbedding shifts by {self.shift}; wanted 0 to 14")
        first, last = self.offsets.astype(np.int64), self.offsets.astype(np.int64) + self.rows
        if self.columns.min() < 0 or self.rows.min() < 1 or first.min() < 0 or last.max() > len(self.table):
            raise RequestError(f"ParallelEmbedding has fields outside its table of {len(self.table)} rows")
        reach = self.reach()
        if reach.max(initial=0) >= 2**31:
            raise RequestError("ParallelEmbedding can overflow 32 bits; use a smaller shift")
        results = np.abs(self.scale.astype(np.float64)) * reach + np.abs(self.bias.astype(np.float64))
        if not np.isfinite(self.number_scale).all() or not results.max(initial=0) < 2**30:
            raise RequestError("ParallelEmbedding has scales or biases that are not finite, or results beyond 32 bits")

    def reach(self) -> NDArray[np.int64]:
        """The largest |acc_j| that any input can give, int64 [H]."""
        numbers = NUMBER_LIMIT * np.abs(self.weight.astype(np.int64)).sum(axis=0)
        return np.asarray((127 << self.shift) * self.columns.size + numbers, np.int64)

    @property
    def width(self) -> int:
        """H, the hidden width."""
        return int(self.scale.size)


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A fully connected layer in int8, from uint8 [n, K] to uint8 or float32 [n, N]:

        acc_j = bias_j + sum_k x_k weight[k, j]                 the input's zero point is in the bias
        y_j   = clip(rint(float32(acc_j) scale_j) + zero_point, low, 255)   uint8; low = zero_point for a ReLU, else 0
        y_j   = float32(acc_j) scale_j                          float32, where `zero_point` is None

    weight: int8 [K, N]. bias: int32 [N]. scale: float32 [N]: s_x s_w / s_y, or s_x s_w. Integers cannot overflow: 255
    sum_k |weight[k, j]| + |bias_j| < 2^31 is checked here. Raises RequestError for anything else.
    """

    weight: Array
    bias: Array
    scale: Array
    zero_point: int | None = None
    low: int = 0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size:
            raise RequestError(
                f"a linear layer has weights of shape {list(self.weight.shape)}; wanted [inputs, outputs]"
            )
        outputs = self.weight.shape[1]
        for name, dtype, shape in (
            ("weight", np.int8, self.weight.shape),
            ("bias", np.int32, (outputs,)),
            ("scale", np.float32, (outputs,)),
        ):
            require("a linear layer", name, getattr(self, name), dtype, shape)
        if not 0 <= self.low <= 255 or not 0 <= (self.zero_point or 0) <= 255:
            raise RequestError(
                f"a linear layer has zero point {self.zero_point} and lower bound {self.low}; wanted 0 to 255"
            )
        reach = 255 * np.abs(self.weight.astype(np.int64)).sum(axis=0) + np.abs(self.bias.astype(np.int64))
        results = np.abs(self.scale.astype(np.float64)) * reach
        if reach.max() >= 2**31 or not (
            results.max() < 2**30 or (self.zero_point is None and np.isfinite(results).all())
        ):
            raise RequestError("a linear layer can overflow 32 bits")
