"""Linear layers, embedding tables and attention heads of a Transformer's frozen graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.kernels.transformer.operations import RowLinear, StaticQParams
from pipelines.quantization.qdq.scales import weight_qparams

Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LinearLayer:
    """Linear layer x W + b of a value, W = weight * scale.

    Attributes:
        x: Its input.
        weight: int8 or float32 [K, N].
        scale: float32 [N]; of float weights 1 unless a factor was folded into the layer.
        bias: float32 [N].
        qparams: Static quantization parameters of its input; None where it has none.
    """

    x: ir.Value
    weight: Array
    scale: Floats
    bias: Floats
    qparams: StaticQParams | None

    def columns(self, first: int, last: int) -> LinearLayer:
        """Returns a layer of some columns.

        Args:
            first: First column.
            last: One past the last column.

        Returns:
            The layer that computes columns [first, last).
        """
        return replace(
            self, weight=self.weight[:, first:last], scale=self.scale[first:last], bias=self.bias[first:last]
        )

    def dequantized(self) -> LinearLayer:
        """Returns the layer with float weights."""
        return replace(self, weight=self.weight * self.scale, scale=np.ones_like(self.scale))

    def quantized(self) -> LinearLayer:
        """Returns the layer with int8 weights, symmetric per output channel."""
        if self.weight.dtype != np.float32:
            return self
        scale, integers = weight_qparams(self.dequantized().weight, 1)
        return replace(self, weight=integers, scale=scale)

    def row_linear(self) -> RowLinear:
        """Returns the layer as an operand of operations."""
        layer = self
        if self.weight.dtype == np.float32 and (self.scale != 1).any():
            layer = self.dequantized()
        return RowLinear(np.ascontiguousarray(layer.weight), layer.scale, layer.bias, layer.qparams)


def concatenate(*parts: LinearLayer) -> LinearLayer:
    """Joins the columns of linear layers of one input, such as merged QKV; float where one of them is.

    Args:
        *parts: The layers.

    Returns:
        One layer.
    """
    if len({part.weight.dtype for part in parts}) > 1:
        parts = tuple(part.dequantized() for part in parts)
    weight, scale, bias = (
        np.concatenate([getattr(part, name) for part in parts], -1) for name in ("weight", "scale", "bias")
    )
    qparams = parts[0].qparams if len({part.qparams for part in parts}) == 1 else None
    return LinearLayer(parts[0].x, weight, scale, bias, qparams)


@dataclass(frozen=True)
class EmbeddingTable:
    """Token embeddings, weight * scale.

    Attributes:
        weight: int8 or float32 [vocabulary, width].
        scale: float32 [vocabulary].
    """

    weight: Array
    scale: Floats


@dataclass(frozen=True)
class Heads:
    """Attention heads.

    Attributes:
        count: Number of heads.
        size: Columns of a head.
        lanes: Heads are padded to a multiple of so many columns.
    """

    count: int
    size: int
    lanes: int

    @property
    def padded_size(self) -> int:
        """Columns of a head after padding."""
        return -(-self.size // self.lanes) * self.lanes

    def pad(self, array: Array) -> Array:
        """Pads heads with zeros.

        Args:
            array: [..., count * size].

        Returns:
            [..., count * padded_size].
        """
        if self.padded_size == self.size:
            return array
        parts = array.reshape(*array.shape[:-1], self.count, self.size)
        wide = [(0, 0)] * (parts.ndim - 1) + [(0, self.padded_size - self.size)]
        return np.pad(parts, wide).reshape(*array.shape[:-1], self.count * self.padded_size)

    def pad_outputs(self, layer: LinearLayer, factor: float = 1.0) -> LinearLayer:
        """Pads the heads of a layer's result.

        Args:
            layer: The layer.
            factor: Multiplier of the result.

        Returns:
            The layer with padded, scaled outputs.
        """
        scale, bias = layer.scale * np.float32(factor), layer.bias * np.float32(factor)
        return replace(layer, weight=self.pad(layer.weight), scale=self.pad(scale), bias=self.pad(bias))
