"""The int8 linear layer of click programs, as a validated dataclass, and limits of tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

DOMAIN = "int8.zoo"
COLUMNS = 64  # table rows are padded to whole cache lines
ZERO = 128  # the zero point of a table: value = uint8 - 128
FIELDS = 32767 // 127  # number of int8 rows whose sum fits int16


def exact_product(x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.int64]:
    """Multiplies integers whose sums are below 2^53: float64 is exact there, and its product much faster.

    Args:
        x: Integers [n, K].
        weight: Integers [K, N].

    Returns:
        int64 [n, N].
    """
    product: NDArray[np.int64] = (x.astype(np.float64) @ weight.astype(np.float64)).astype(np.int64)
    return product


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """Fully connected int8 layer, from uint8 [n, K] to uint8 or float32 [n, N].

        acc_j = bias_j + sum_k x_k weight[k, j]                 the zero point of the input is in the bias
        y_j   = clip(rint(float32(acc_j) scale_j) + zero_point, low, 255)   uint8; low = zero_point for a ReLU, else 0
        y_j   = float32(acc_j) scale_j                          float32, if `zero_point` is None

    Attributes:
        weight: int8 [K, N].
        bias: int32 [N].
        scale: s_x s_w / s_y, or s_x s_w for float32 results; float32 [N].
        zero_point: Zero point of the result; None for float32 results.
        low: Lower bound of the result.

    Raises:
        RequestError: Shapes, dtypes or values do not fit, or 255 sum_k |weight[k, j]| + |bias_j| can exceed 31 bits.
    """

    weight: Array
    bias: Array
    scale: Array
    zero_point: int | None = None
    low: int = 0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.size:
            raise RequestError(
                f"a linear layer has weights of shape {list(self.weight.shape)}; expected [inputs, outputs]"
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
                f"a linear layer has zero point {self.zero_point} and lower bound {self.low}; expected 0 to 255"
            )
        reach = 255 * np.abs(self.weight.astype(np.int64)).sum(axis=0) + np.abs(self.bias.astype(np.int64))
        results = np.abs(self.scale.astype(np.float64)) * reach
        if reach.max() >= 2**31 or not (
            results.max() < 2**30 or (self.zero_point is None and np.isfinite(results).all())
        ):
            raise RequestError("a linear layer can overflow 32 bits")

    def compute(self, x: NDArray[np.uint8]) -> NDArray[Any]:
        """Computes the layer in numpy.

        Args:
            x: uint8 [n, K].

        Returns:
            uint8 [n, N], or float32 [n, N] where `zero_point` is None.
        """
        accumulated = exact_product(x, self.weight) + self.bias
        scaled = accumulated.astype(np.float32) * self.scale
        if self.zero_point is None:
            return scaled
        return np.clip(np.rint(scaled) + np.float32(self.zero_point), self.low, 255).astype(np.uint8)
