"""Maps layers whose weights are float, and functions of floats that are made of other steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.orders.attention import Attentions
from pipelines.kernels.images.mapping.qdq import data_input, input_at, refused
from pipelines.kernels.images.mapping.walk import Bytes, Pending, layout_of
from pipelines.kernels.images.operators import same_pads, windows
from pipelines.kernels.images.steps import (
    ChannelScale,
    FloatActivation,
    FloatConvolution,
    FloatDepthwise,
    FloatProduct,
    FloatSum,
    Operand,
    Shape,
    Step,
)

COMPOSED = ("HardSigmoid", "HardSwish", "LeakyRelu", "Tanh")


class FloatLayers(Attentions):
    """Mapping of layers with float weights, and of float functions composed of other steps."""

    def _function(self, node: ir.Node) -> None:
        """As its base; functions of `COMPOSED` of a float value are several steps."""
        mapped = self.values.get(data_input(node))
        is_float = isinstance(mapped, Pending) and mapped.curve is None and mapped.joined is None
        slope = node.attributes.get_float("alpha", 0.01) if node.op_type == "LeakyRelu" else 0.0
        if not isinstance(mapped, Pending) or not is_float or mapped.real is None or slope > 1:
            super()._function(node)
        elif node.op_type in COMPOSED:
            trace = self._trace(node)
            self._composed(node, mapped, slope)
            self._keep_trace(node, trace)
        else:
            super()._function(node)

    def _composed(self, node: ir.Node, mapped: Pending, slope: float) -> None:
        """Maps a function of `COMPOSED`; slope: of LeakyRelu, up to 1."""
        shape, alpha = self._shape(mapped), node.attributes.get_float("alpha", 0.2)
        layout: dict[str, Any] = dict(zip(("last", "flat", "tokens"), layout_of(mapped), strict=True))

        def line(value: Pending, gain: float, bias: float, low: float = -np.inf, high: float = np.inf) -> Pending:
            """A gain times the value + a bias, within bounds."""
            rows = [np.full((1, shape[2]), part, np.float32) for part in (gain, bias)]
            add = lambda to: ChannelScale(self._operand_of(node, value), to, *rows)  # noqa: E731
            return replace(self._float_pending(shape, add, shared=True, **layout), low=low, high=high)

        def combined(make: type[FloatSum], a: Pending, b: Pending) -> None:
            add = lambda to: make(self._operand_of(node, a), self._operand_of(node, b), to)  # noqa: E731
            self._float_value(node, shape, add, mapped)

        if node.op_type == "HardSigmoid":
            self.values[node.outputs[0]] = line(mapped, alpha, node.attributes.get_float("beta", 0.5), 0.0, 1.0)
        elif node.op_type == "Tanh":  # 2 sigmoid(2 x) - 1
            half = lambda to: FloatActivation(self._operand_of(node, line(mapped, 2.0, 0.0)), to, "sigmoid")  # noqa: E731
            self.values[node.outputs[0]] = line(self._float_pending(shape, half, shared=True, **layout), 2.0, -1.0)
        elif node.op_type == "HardSwish":
            combined(FloatProduct, mapped, line(mapped, 1 / 6, 0.5, 0.0, 1.0))
        else:  # max((1 - slope) x, 0) + slope x
            combined(FloatSum, line(mapped, 1 - slope, 0.0, 0.0), line(mapped, slope, 0.0))

    def _float_weight(self, node: ir.Node) -> NDArray[np.float32] | None:
        """The weights of a layer that is computed in float, those of 8 bits dequantized; None for an int8 layer."""
        value = input_at(node, 1)
        constant, mapped = query.constant(value), self.values.get(data_input(node))
        if constant is None and value is not None and isinstance(mapped, Pending):
            constant = self.constants.dequantized(value)
        return constant if constant is not None and constant.dtype == np.float32 else None

    def _float_conv(self, node: ir.Node, weight: NDArray[np.float32]) -> None:
        """Maps a convolution; weight: [O, I, kh, kw]."""
        _, mapped = self._operand(node)
        shape, groups = self._shape(mapped), node.attributes.get_int("group", 1)
        if True in layout_of(mapped) or weight.ndim != 4 or weight.shape[1] * groups != shape[2]:
            raise refused(node, "is not over [n, C, H, W]")
        bias = self._per_channel(node, 2, len(weight), -1)
        strides, pads, dilations = self._geometry(node, shape, weight.shape[2:])
        geometry: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations}
        counts = windows(shape, weight.shape[2:], strides, pads, dilations)
        if min(counts) < 1:
            raise refused(node, "has a window larger than its input")
        if groups == len(weight) > 1 == weight.shape[1]:
            taps = np.ascontiguousarray(weight[:, 0].transpose(1, 2, 0))

            def add(to: Operand) -> Step:
                return FloatDepthwise(self._float_tensor(node, mapped), to.tensor, taps, bias, **geometry)

            self._float_value(node, (*counts, len(weight)), add, mapped, quantizes=False)
            return
        self._float_layer(node, mapped, weight.transpose(0, 2, 3, 1), bias, counts, groups=groups, **geometry)

    def _float_layer(
        self,
        node: ir.Node,
        mapped: Bytes | Pending,
        weight: Array,
        bias: NDArray[np.float32],
        counts: tuple[int, int] = (1, 1),
        layout: dict[str, bool] | None = None,
        **geometry: Any,
    ) -> None:
        """Maps a layer; weight: [O, kh, kw, I]."""
        taps = np.ascontiguousarray(weight)

        def add(to: Operand) -> Step:
            return FloatConvolution(self._float_tensor(node, mapped), to, taps, bias, **geometry)

        self._float_value(node, (*counts, len(taps)), add, mapped, **(layout or {}))

    def _float_connected(self, node: ir.Node, weight: NDArray[np.float32], factor: float = 1.0) -> None:
        """Maps a fully connected layer, or that of each pixel; weight: [O, K], factor: of the bias."""
        _, mapped = self._operand(node)
        windowed = self._over_window(node, mapped, weight)
        bias = self._per_channel(node, 2, len(weight), -1) * np.float32(factor)
        counts = (1, 1) if mapped.flat else self._shape(mapped)[:2]
        self._float_layer(node, mapped, windowed, bias, counts, {"last": mapped.last and not mapped.flat})

    def _over_window(self, node: ir.Node, mapped: Bytes | Pending, weight: Array) -> Array:
        """The weights [O, K] of a layer as those of a convolution: of each pixel, or of the whole flattened tensor."""
        height, width, channels = self._shape(mapped)
        pixels = mapped.last and not mapped.flat  # a Gemm's are rows in another order
        if pixels and weight.shape[1:] == (channels,):
            return np.ascontiguousarray(weight)[:, None, None]
        if not mapped.flat or weight.ndim != 2 or weight.shape[1] != height * width * channels:
            raise refused(node, "does not read a whole flattened tensor")
        if mapped.last:
            return np.ascontiguousarray(weight).reshape(len(weight), height, width, channels)
        cut = weight.reshape(len(weight), channels, height, width)
        return np.ascontiguousarray(cut.transpose(0, 2, 3, 1))

    def _geometry(
        self, node: ir.Node, shape: Shape, kernel: Sequence[int]
    ) -> tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]]:
        """Strides, pads and dilations of windows over [n, C, H, W]."""
        ints, automatic = node.attributes.get_ints, node.attributes.get_string("auto_pad", "NOTSET")
        (down, across), (rows, columns) = ints("strides", [1, 1]), ints("dilations", [1, 1])
        pads = ints("pads", [0, 0, 0, 0]) if automatic == "NOTSET" else (0, 0, 0, 0)
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            pads = same_pads(shape, kernel, (down, across), (rows, columns), automatic == "SAME_LOWER")
        top, left, bottom, right = pads
        if min(top, left, bottom, right) < 0:
            raise refused(node, "has negative pads")
        return (down, across), (top, left, bottom, right), (rows, columns)
