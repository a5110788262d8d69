"""Quantized layers, and the checks that all operations share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.arrays import Array, require

LANES = 16  # the size of an attention head is a multiple of it
COLUMNS = 64  # rows are padded to a multiple of it
MAX_WIDTH = 65536  # columns of a layer, at most
MEMORY = -1  # the encoder's result among the registers
ACTIVATIONS = ("swish", "gelu", "gelu_tanh")  # of the native kernels
GRAPH_ACTIVATIONS = (*ACTIVATIONS, "tanh")  # of graphs that are mapped for other ends


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
    """A fully connected layer, see the module: on quantized rows, or in float32.

    Attributes:
        weight: int8 [K, N], or float32.
        scale: float32 [N], per output channel.
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
    def quantizes(self) -> bool:
        """Whether the layer takes quantized rows."""
        return self.weight.dtype != np.float32

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

    def check(self, operation: str, widths: Mapping[int, int]) -> int:
        """Checks the arrays of the operation.

        Args:
            operation: Name of the operation, for messages.
            widths: Columns of the registers that hold a value, and of `MEMORY` in a decoder.

        Returns:
            Columns of the result.

        Raises:
            RequestError: An array does not fit, or the operation has no native kernel.
        """
        raise RequestError(f"{operation} has no native kernel")


def require_finite(operation: str, name: str, row: Array, width: int) -> None:
    """Requires finite numbers.

    Args:
        operation: Name of the operation, for messages.
        name: Name of the array.
        row: The array.
        width: Its number of elements.

    Raises:
        RequestError: It is no float32 [width], or not finite.
    """
    require(operation, name, row, np.float32, (width,))
    if not np.isfinite(row).all():
        raise RequestError(f"{operation} has a {name} that is not finite")


def require_epsilon(operation: str, epsilon: float) -> None:
    """Requires an epsilon that is finite and not negative.

    Args:
        operation: Name of the operation, for messages.
        epsilon: The number.

    Raises:
        RequestError: It is negative or not finite.
    """
    if not 0 <= epsilon < np.inf:
        raise RequestError(f"{operation} has epsilon {epsilon}; expected 0 or more")


def layer_width(operation: str, layer: RowLinear, columns: int) -> int:
    """Returns the columns of a layer's result.

    Args:
        operation: Name of the operation, for messages.
        layer: The layer.
        columns: Columns of its input.

    Raises:
        RequestError: It takes other columns.
    """
    if layer.inputs != columns:
        raise RequestError(f"{operation} takes {layer.inputs} columns and is given {columns}")
    return layer.outputs


def require_residual(operation: str, residual: int | None, widths: Mapping[int, int], width: int) -> None:
    """Requires a residual, if there is one, of the columns of a result.

    Args:
        operation: Name of the operation, for messages.
        residual: Register of the residual, or None.
        widths: Columns of the registers.
        width: Columns of the result.

    Raises:
        RequestError: It has other columns.
    """
    if residual is not None and widths[residual] != width:
        raise RequestError(f"{operation} gives {width} columns, the residual has {widths[residual]}")
