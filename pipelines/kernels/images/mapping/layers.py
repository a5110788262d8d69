"""Mapping of layers, sums and pools of quantized image networks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.mapping.float_layers import FloatLayers
from pipelines.kernels.images.mapping.qdq import data_input, input_at, int8_weight, int32_bias, qparams, refused
from pipelines.kernels.images.mapping.walk import Bytes, Input, Layer, Pending, is_over_pixels, layout_of
from pipelines.kernels.images.operators import ceil_mode_pads, windows
from pipelines.kernels.images.steps import (
    Addition,
    AveragePool,
    ChannelScale,
    Convolution,
    FloatDepthwise,
    FloatMean,
    FloatSum,
    GlobalAverage,
    MaxPool,
    Operand,
    Step,
)
from pipelines.kernels.images.steps.elementwise import quantized_sum


class Layers(FloatLayers):
    """Mapping of layers with weights of 8 bits, sums and pools."""

    def _layer(
        self,
        node: ir.Node,
        x: Bytes,
        weight: Array,
        w_scale: Array,
        bias: ir.Value | None,
        beta: float = 1.0,
        **geometry: Any,
    ) -> None:
        """A convolution: weight int8 [O, kh, kw, I]; beta: factor of the bias."""
        assert x.scale is not None
        scales = x.scale * np.broadcast_to(w_scale.astype(np.float32).ravel(), len(weight))
        biases = int32_bias(node, bias if beta else None, scales / np.float32(beta or 1), len(weight))
        biases -= x.zero * weight.sum(axis=(1, 2, 3), dtype=np.int64)
        if np.abs(biases).max() >= 2**31:
            raise refused(node, "can overflow 32 bits")
        self.values[node.outputs[0]] = self._layer_value(node, Layer(x, weight, scales, biases, geometry))

    def _layer_value(self, node: ir.Node, layer: Layer) -> Pending:
        """The value of a layer."""
        x, weight, scales, biases, geometry = layer.x, layer.weight, layer.scales, layer.biases, layer.geometry
        strides, pads = geometry.get("strides", (1, 1)), geometry.get("pads", (0, 0, 0, 0))
        kernel = weight.shape[1:3]
        counts = windows(self.tensors[x.tensor], kernel, strides, pads, geometry.get("dilations", (1, 1)))
        if min(counts) < 1:
            raise refused(node, "has a window larger than its input")
        linear = node.op_type != "Conv"
        flat, last = linear and x.flat, linear and x.last and not x.flat

        shape = (*counts, len(weight))
        depthwise = weight.shape[3] == 1 < geometry.get("groups", 1)

        def step(out: int, scale: Array, zero: int = 0, low: int = 0, high: int = 255, *, floats: bool = False) -> None:
            bounds: dict[str, Any] = {"fill": x.zero, "zero": zero, "low": low, "high": high, "floats": floats}
            convolution = Convolution(x.tensor, out, weight, biases.astype(np.int32), scale, **geometry, **bounds)
            self.steps.append(convolution.saturated())

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new(shape)
            step(out, scales / scale, zero, low, high)
            return out

        def result() -> None:
            if not flat and counts != (1, 1):
                raise refused(node, "computes the output and has several pixels")
            step(-1, scales)

        @functools.cache
        def real() -> int:
            out = self._new_floats(shape)
            if depthwise:
                self.steps.append(self._depthwise_floats(node, layer, out))
            else:
                step(out, scales, floats=True)
            return out

        multiplied = depthwise and len(weight) != geometry["groups"]
        return Pending(
            emit,
            shape,
            last=last,
            flat=flat,
            tokens=linear and x.tokens,
            layer=layer,
            result=result,
            real=None if multiplied else real,
        )

    def _depthwise_floats(self, node: ir.Node, layer: Layer, out: int) -> FloatDepthwise:
        """The step of a depthwise layer whose results are floats, as onnxruntime computes them."""
        x, assumed = layer.x, ("strides", "pads", "dilations")
        scales = layer.scales / np.float32(x.scale or 1)
        taps = np.ascontiguousarray(layer.weight[..., 0].transpose(1, 2, 0) * scales, np.float32)
        biases = layer.biases + x.zero * layer.weight.sum(axis=(1, 2, 3), dtype=np.int64)
        geometry = {name: layer.geometry[name] for name in assumed if name in layer.geometry}
        bias = np.asarray(biases * layer.scales.astype(np.float64), np.float32)
        return FloatDepthwise(self._float_tensor(node, x), out, taps, bias, **geometry)

    def _conv(self, node: ir.Node) -> None:
        is_input = isinstance(self.values.get(data_input(node)), Input)
        if not is_input and self._few_weights(node) is not None:
            self._group_linear(node)
            return
        floats = self._float_weight(node)
        if floats is not None:
            self._float_conv(node, floats)
            return
        x = self._read(node)
        weight, scale = int8_weight(node, 0)
        if True in layout_of(x) or weight.ndim != 4:
            raise refused(node, "is not over [n, C, H, W]")
        strides, pads, dilations = self._geometry(node, self.tensors[x.tensor], weight.shape[2:])
        self._layer(
            node,
            x,
            np.ascontiguousarray(weight.transpose(0, 2, 3, 1)),
            scale,
            input_at(node, 2),
            strides=strides,
            pads=pads,
            dilations=dilations,
            groups=node.attributes.get_int("group", 1),
        )

    def _gemm(self, node: ir.Node) -> None:
        attributes = node.attributes
        alpha, beta = (attributes.get_float(key, 1.0) for key in ("alpha", "beta"))
        if attributes.get_int("transA", 0) != 0 or alpha == 0:
            raise refused(node, "has a transposed input, or an alpha of 0")
        turned = query.is_transposed(node)
        floats = self._float_weight(node)
        if floats is not None:
            self._float_connected(node, (floats if turned else floats.T) * np.float32(alpha), beta)
            return
        weight, scale = int8_weight(node, 0 if turned else 1)
        self._connected(node, weight if turned else weight.T, scale * np.float32(alpha), input_at(node, 2), beta)

    def _matmul(self, node: ir.Node) -> None:
        is_input = isinstance(self.values.get(data_input(node)), Input)
        if not is_input and self._few_weights(node) is not None:
            self._group_linear(node)
            return
        floats = self._float_weight(node)
        if floats is not None:
            self._float_connected(node, floats.T)
            return
        weight, scale = int8_weight(node, 1)
        self._connected(node, weight.T, scale, None)

    def _connected(self, node: ir.Node, weight: Array, scale: Array, bias: ir.Value | None, beta: float = 1.0) -> None:
        """weight: int8 [O, K]; beta: factor of the bias."""
        x = self._read(node)
        self._layer(node, x, self._over_window(node, x, weight), scale, bias, beta)

    def _add(self, node: ir.Node) -> None:
        if self._by_constant(node):
            return
        values = [None if value is None else self.values.get(value) for value in node.inputs]
        if any(isinstance(mapped, Pending) for mapped in values):
            self._float_add(node)
            return
        a, b = self._read(node, 0), self._read(node, 1)
        if self.tensors[a.tensor] != self.tensors[b.tensor] or layout_of(a) != layout_of(b):
            raise refused(node, "adds tensors of different shapes")
        assert a.scale is not None
        assert b.scale is not None
        scales = a.scale, b.scale
        readers = [use.node for use in node.outputs[0].uses() if use.node.op_type == "QuantizeLinear"]
        if not all(quantized_sum(scales, (a.zero, b.zero), *qparams(reader)).in_bounds for reader in readers):
            raise refused(node, "adds values of so different scales that onnxruntime's sums are not exact")

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new(self.tensors[a.tensor])
            total = quantized_sum(scales, (a.zero, b.zero), scale, zero, low, high)
            self.steps.append(Addition(a.tensor, b.tensor, out, total))
            return out

        @functools.cache
        def real() -> int:
            (first, _), (second, _) = self._operand(node, 0), self._operand(node, 1)
            out = self._new_floats(self.tensors[a.tensor])
            self.steps.append(FloatSum(first, second, Operand(out)))
            return out

        self.values[node.outputs[0]] = Pending(
            emit, self.tensors[a.tensor], last=a.last, flat=a.flat, tokens=a.tokens, real=real
        )

    # ----------------------------------------------------------------------------------------------------------- pools

    def _window(self, node: ir.Node, x: Bytes | Pending) -> tuple[Any, Any, Any, tuple[int, int]]:
        """Kernel, strides and pads of a pool, and the number of windows along height and width."""
        kernel, shape = tuple(node.attributes.get_ints("kernel_shape", [])), self._shape(x)
        if len(kernel) != 2 or True in layout_of(x):
            raise refused(node, "is not over [n, C, H, W]")
        strides, padding, dilations = self._geometry(node, shape, kernel)
        pads: tuple[int, ...] = padding
        if set(dilations) != {1}:
            raise refused(node, "has dilations")
        if node.attributes.get_int("ceil_mode", 0) != 0:
            whole = ceil_mode_pads(shape, kernel, strides, pads)
            if whole != pads and node.attributes.get_int("count_include_pad", 0) != 0:
                raise refused(node, "counts pads in ceil mode")
            if not any(pads):  # a window larger than the tensor ends with it
                kernel = (min(kernel[0], shape[0]), min(kernel[1], shape[1]))
                whole = ceil_mode_pads(shape, kernel, strides, pads)
            pads = whole
        return kernel, strides, pads, windows(shape, kernel, strides, pads)

    def _maxpool(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if not isinstance(x, Bytes):
            size = self._sizes(x)[2:] if isinstance(x, Pending) else ()
            if (
                len(size) != 1
                or tuple(node.attributes.get_ints("kernel_shape", [])) != size
                or any(node.attributes.get_ints("pads", [0]))
            ):
                raise refused(node, "reads a float value")
            self._settle(node.outputs[0], self._extremes(node, 2, 1, True)[0])  # `WholeMaxPool` of a ReduceMax
            return
        kernel, strides, pads, counts = self._window(node, x)
        out = self._new((*counts, self.tensors[x.tensor][2]))
        self.steps.append(MaxPool(x.tensor, out, kernel, strides, pads))
        self.values[node.outputs[0]] = replace(x, tensor=out)

    def _averagepool(self, node: ir.Node) -> None:
        padded = node.attributes.get_int("count_include_pad", 0) == 1
        mapped = self.values[data_input(node)]
        if isinstance(mapped, Pending):
            self._float_average(node, mapped, *self._window(node, mapped), padded)
            return
        x = self._read(node)
        kernel, strides, pads, counts = self._window(node, x)

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new((*counts, self.tensors[x.tensor][2]))
            of = (float(x.scale or 0), x.zero, float(scale), zero)
            self.steps.append(AveragePool(x.tensor, out, kernel, strides, pads, *of, padded))
            return self._clipped(out, low, high)

        self._float_average(node, x, kernel, strides, pads, counts, padded)
        self._emits(node, emit)

    def _float_average(
        self,
        node: ir.Node,
        mapped: Bytes | Pending,
        kernel: tuple[int, int],
        strides: tuple[int, int],
        pads: tuple[int, int, int, int],
        counts: tuple[int, int],
        padded: bool,
    ) -> None:
        """Maps the means of windows of float values: sums, divided by the number of values inside unless `padded`."""
        channels = self._shape(mapped)[2]
        inside = np.pad(np.ones(self._shape(mapped)[:2], np.float32), ((pads[0], pads[2]), (pads[1], pads[3])))
        places = np.lib.stride_tricks.sliding_window_view(inside, kernel)[:: strides[0], :: strides[1]]
        sizes = places.sum((2, 3), dtype=np.float32)[: counts[0], : counts[1]].reshape(-1, 1)
        even = padded or bool((sizes == math.prod(kernel)).all())
        taps = np.full((*kernel, channels), 1 / math.prod(kernel) if even else 1, np.float32)
        none, shape = np.zeros(channels, np.float32), (*counts, channels)
        gain = np.ascontiguousarray(np.broadcast_to(1 / sizes, (len(sizes), channels)))

        def add(to: Operand) -> Step:
            source = self._float_tensor(node, mapped)
            if even:
                return FloatDepthwise(source, to.tensor, taps, none, strides, pads)
            sums = self._new_floats(shape)
            self.steps.append(FloatDepthwise(source, sums, taps, none, strides, pads))
            return ChannelScale(Operand(sums), to, gain, np.zeros_like(gain))

        self._float_value(node, shape, add, mapped, quantizes=not even)

    def _globalaveragepool(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if isinstance(x, Input) or x.last or x.flat:
            raise refused(node, "is not over [n, C, H, W] or [n, C, T]")
        self._global_average(node, x, flat=False)

    def _reducemean(self, node: ir.Node) -> None:
        x = self.values[data_input(node)]
        if isinstance(x, Input):
            raise refused(node, "reads the input")
        if not is_over_pixels(node, x):
            if not self._written_out(node):
                self._reducesum(node)
            return
        self._global_average(node, x, flat=node.attributes.get_int("keepdims", 1) == 0)

    def _global_average(self, node: ir.Node, x: Bytes | Pending, flat: bool) -> None:
        if isinstance(x, Pending):
            self._float_mean(node, flat)
            return
        x = self._read(node)
        height, width, channels = self.tensors[x.tensor]
        tokens = x.tokens and not flat

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            assert x.scale is not None
            factor = x.scale / (scale * np.float32(height * width))
            out = self._new((1, 1, channels))
            self.steps.append(GlobalAverage(x.tensor, out, x.zero, float(factor), zero))
            return self._clipped(out, low, high)

        def result() -> None:
            assert x.scale is not None
            factor = x.scale / np.float32(height * width)
            self.steps.append(GlobalAverage(x.tensor, -1, x.zero, float(factor), 0))

        @functools.cache
        def real() -> int:
            assert x.scale is not None
            out = self._new_floats((1, 1, channels))
            self.steps.append(FloatMean(Operand(x.tensor, float(x.scale), x.zero), Operand(out)))
            return out

        self.values[node.outputs[0]] = Pending(
            emit, (1, 1, channels), last=x.last, flat=flat, tokens=tokens, result=result, real=real
        )
