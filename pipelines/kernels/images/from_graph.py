"""A quantized classifier's ONNX graph as an `ImageProgram`, by structure: QDQ around Conv, Gemm, MatMul, Add, pools and
Concat, with Relu, Clip or any other function of one value between, and Flatten, Reshape and Transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.kernels.arrays import Array
from pipelines.kernels.images.fuse import fuse_sums, renumbered
from pipelines.kernels.images.program import (
    Addition,
    AveragePool,
    Concatenation,
    Convolution,
    Dequantize,
    GlobalAverage,
    ImageProgram,
    Lookup,
    MaxPool,
    Pixels,
    Shape,
    Step,
    Sum,
    windows,
)
from pipelines.kernels.images.qdq import (
    evaluated,
    given,
    input_at,
    int8_weight,
    int32_bias,
    qparams,
    quantized,
    refused,
)

FUNCTIONS = (
    "HardSwish",
    "HardSigmoid",
    "Sigmoid",
    "LeakyRelu",
    "Elu",
    "Tanh",
    "Softplus",
    "Gelu",
    "Relu",
    "Clip",
)


@dataclass(frozen=True)
class _Bytes:
    """A quantized value: a tensor and its qparams; `last`: its axes are [N, H, W, C]; `flat`: [N, H W C], in that order
    or [C, H, W]. real: what DequantizeLinear made of it.
    """

    tensor: int
    scale: np.float32 | None = None
    zero: int = 0
    last: bool = False
    flat: bool = False
    real: bool = False


@dataclass(frozen=True)
class _Pending:
    """A real value not yet quantized: `emit(scale, zero, low, high)` adds the step that makes bytes of it, and returns
    their tensor; low and high: what Relu and Clip left of the real line. result: adds the step that ends the program.
    """

    emit: Callable[[np.float32, int, int, int], int]
    low: float = -np.inf
    high: float = np.inf
    last: bool = False
    flat: bool = False
    result: Callable[[], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Input:
    """The graph's input, real or bytes, and the bytes that a Pad puts behind its channels. stored: it lies as
    [N, H, W, C]; last: its axes are these, until a Transpose."""

    stored: bool = False
    last: bool = False
    fills: tuple[int, ...] = ()


def image_program(model: ir.Model) -> ImageProgram:
    """The program of a quantized image classifier. Raises RequestError, naming the operator, for any other graph."""
    return _Mapping(model).program()


class _Mapping:
    """One walk over a graph, in order."""

    def __init__(self, model: ir.Model) -> None:
        self.main, self.model = model.graph, model
        self.values: dict[ir.Value, _Bytes | _Pending | _Input] = {}
        self.tensors: list[Shape] = []
        self.steps: list[Step] = []
        self.first: tuple[_Input, np.float32 | None, int, int] | None = None  # and the qparams, tensor of the input

    def program(self) -> ImageProgram:
        """See `image_program`."""
        if len(self.main.inputs) != 1 or len(self.main.outputs) != 1:
            raise RequestError("the graph has several inputs or outputs; the image kernels take one of each")
        (self.given,), (found,) = self.main.inputs, self.main.outputs
        shape = query.dimensions(self.given)
        if shape is None or len(shape) != 4 or None in shape[1:]:
            raise RequestError(f"the input {self.given.name} has the shape {shape}; wanted [n, C, H, W] of fixed sizes")
        self.shape: Shape = (int(shape[1] or 0), int(shape[2] or 0), int(shape[3] or 0))
        if self.given.dtype not in (ir.DataType.UINT8, ir.DataType.FLOAT):
            raise RequestError(f"the input {self.given.name} is {self.given.dtype}; wanted uint8 or float32")
        self.floats = self.given.dtype == ir.DataType.FLOAT
        last = self.shape[2] <= 4 < self.shape[0]  # as few channels as images have
        self.values[self.given] = _Input(last, last)
        softmax = None
        for node in self.main:
            if any(value in self.values for value in node.inputs if value is not None):
                if node.op_type == "Softmax" and node.outputs[0] is found:
                    softmax = node
                    break
                self._map(node)
        result_shape = self._end(softmax.inputs[0] if softmax is not None else found, softmax)
        fuse_sums(self.steps)
        tensors, steps = renumbered(self.tensors, self.steps)
        return ImageProgram(
            str(self.given.name),
            str(found.name),
            "float32" if self.floats else "uint8",
            self.shape,
            tensors,
            steps,
            result_shape,
            softmax is not None,
        )

    def _map(self, node: ir.Node) -> None:
        if node.domain not in ("", "ai.onnx"):
            raise refused(node, f"of {node.domain} has no form in the image kernels")
        handler = getattr(self, f"_{node.op_type.lower()}", None)
        try:
            if handler is not None:
                handler(node)
            elif node.op_type in FUNCTIONS:
                self._function(node)
            else:
                raise refused(node, "has no form in the image kernels")
        except RequestError as error:
            if query.label(node) in str(error):
                raise
            raise refused(node, str(error)) from error

    def _end(self, value: ir.Value | None, softmax: ir.Node | None) -> tuple[int, ...]:
        """The last step; the shape of a sample's results."""
        found = None if value is None else self.values.get(value)
        if isinstance(found, _Pending) and found.result is not None and (found.low, found.high) == (-np.inf, np.inf):
            shape = found.result()
            shape = (int(np.prod(shape)),) if found.flat else shape
        elif isinstance(found, _Bytes) and found.real and found.scale is not None:
            height, width, channels = self.tensors[found.tensor]
            self.steps.append(Dequantize(found.tensor, float(found.scale), found.zero, found.last))
            shape = (height, width, channels) if found.last else (channels, height, width)
            shape = (height * width * channels,) if found.flat else shape
        else:
            raise RequestError(f"the output {self.main.outputs[0].name} is no layer's result, nor a dequantized tensor")
        axis = -1 if softmax is None else softmax.attributes.get_int("axis", -1)
        if softmax is not None and not (len(shape) == 1 and axis in (1, -1)):
            raise refused(softmax, "is not over the classes")
        return shape

    # ------------------------------------------------------------------------------------------------------- quantized

    def _new(self, shape: Sequence[int]) -> int:
        self.tensors.append((int(shape[0]), int(shape[1]), int(shape[2])))
        return len(self.tensors) - 1

    def _pixels(self, given: _Input, scale: np.float32 | None, zero: int) -> int:
        """The tensor of the input; quantized where it is float."""
        if self.first is not None:
            if self.first[:3] != (given, scale, zero):
                raise RequestError("reads the input in another way than an operator before it")
            return self.first[3]
        height, width = self.shape[:2] if given.stored else self.shape[1:]
        channels = self.shape[2] if given.stored else self.shape[0]
        tensor = self._new((height, width, channels + len(given.fills)))
        self.steps.insert(0, Pixels(tensor, given.fills, given.stored, float(scale or 0), zero))
        self.first = (given, scale, zero, tensor)
        return tensor

    def _read(self, node: ir.Node, position: int = 0) -> _Bytes:
        """An input that is a dequantized tensor."""
        value = node.inputs[position]
        found = None if value is None else self.values.get(value)
        if not isinstance(found, _Bytes) or not found.real or found.scale is None:
            raise refused(node, f"reads {'nothing' if value is None else value.name}, which is not quantized")
        return found

    def _quantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        found = self.values[given(node)]
        if isinstance(found, _Input):
            if not self.floats:
                raise refused(node, "quantizes bytes")
            if found.fills:
                raise refused(node, "quantizes a padded input")
            self.values[node.outputs[0]] = _Bytes(self._pixels(found, scale, zero), scale, zero, found.last)
            return
        if isinstance(found, _Pending):
            low, high = (int(quantized(bound, scale, zero)) for bound in (found.low, found.high))
            tensor = found.emit(scale, zero, low, high)
            self.values[node.outputs[0]] = _Bytes(tensor, scale, zero, found.last, found.flat)
            return
        if not found.real or found.scale is None:
            raise refused(node, "quantizes what is quantized")
        tensor = found.tensor
        if (found.scale, found.zero) != (scale, zero):
            real = (np.arange(256, dtype=np.float32) - np.float32(found.zero)) * found.scale
            tensor = self._lookup(tensor, quantized(real, scale, zero))
        self.values[node.outputs[0]] = replace(found, tensor=tensor, scale=scale, zero=zero, real=False)

    def _dequantizelinear(self, node: ir.Node) -> None:
        scale, zero = qparams(node)
        found = self.values[given(node)]
        if isinstance(found, _Input):
            tensor = self._pixels(found, None, 0)
            found = _Bytes(tensor, scale, zero, found.last)
        if isinstance(found, _Pending) or found.real:
            raise refused(node, "dequantizes what is not quantized")
        self.values[node.outputs[0]] = replace(found, scale=scale, zero=zero, real=True)

    def _lookup(self, tensor: int, table: NDArray[np.uint8]) -> int:
        out = self._new(self.tensors[tensor])
        self.steps.append(Lookup(tensor, out, table))
        return out

    # ---------------------------------------------------------------------------------------------------------- layers

    def _layer(
        self, node: ir.Node, x: _Bytes, weight: Array, w_scale: Array, bias: ir.Value | None, **geometry: Any
    ) -> None:
        """A convolution: weight int8 [O, kh, kw, I]."""
        assert x.scale is not None
        scales = x.scale * np.broadcast_to(w_scale.astype(np.float32).ravel(), len(weight))
        biases = int32_bias(node, bias, scales, len(weight))
        biases -= x.zero * weight.astype(np.int64).sum(axis=(1, 2, 3))
        if np.abs(biases).max() >= 2**31:
            raise refused(node, "can overflow 32 bits")
        strides, pads = geometry.get("strides", (1, 1)), geometry.get("pads", (0, 0, 0, 0))
        kernel = weight.shape[1:3]
        counts = windows(self.tensors[x.tensor], kernel, strides, pads, geometry.get("dilations", (1, 1)))
        if min(counts) < 1:
            raise refused(node, "has a window larger than its input")
        flat = node.op_type != "Conv"

        def step(out: int, scale: Array, zero: int = 0, low: int = 0, high: int = 255) -> None:
            bounds: dict[str, Any] = {"fill": x.zero, "zero": zero, "low": low, "high": high}
            layer = Convolution(x.tensor, out, weight, biases.astype(np.int32), scale, **geometry, **bounds)
            self.steps.append(layer)

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new((*counts, len(weight)))
            step(out, scales / scale, zero, low, high)
            return out

        def result() -> tuple[int, ...]:
            if not flat and counts != (1, 1):
                raise refused(node, "gives the output, and is larger than a pixel")
            step(-1, scales)
            return (len(weight),) if flat else (len(weight), 1, 1)

        self.values[node.outputs[0]] = _Pending(emit, flat=flat, result=result)

    def _conv(self, node: ir.Node) -> None:
        x = self._read(node)
        weight, scale = int8_weight(node)
        if (
            x.last
            or x.flat
            or weight.ndim != 4
            or node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        ):
            raise refused(node, "is not over [n, C, H, W], or pads by itself")
        ints = node.attributes.get_ints
        top, left, bottom, right = ints("pads", [0, 0, 0, 0])
        if min(top, left, bottom, right) < 0:
            raise refused(node, "has negative pads")
        self._layer(
            node,
            x,
            np.ascontiguousarray(weight.transpose(0, 2, 3, 1)),
            scale,
            input_at(node, 2),
            strides=tuple(ints("strides", [1, 1])),
            pads=(top, left, bottom, right),
            dilations=tuple(ints("dilations", [1, 1])),
            groups=node.attributes.get_int("group", 1),
        )

    def _gemm(self, node: ir.Node) -> None:
        attributes = node.attributes
        if (
            any(attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
            or attributes.get_int("transA", 0) != 0
        ):
            raise refused(node, "has an alpha or beta, or a transposed input")
        weight, scale = int8_weight(node)
        self._connected(node, weight if attributes.get_int("transB", 0) == 1 else weight.T, scale, input_at(node, 2))

    def _matmul(self, node: ir.Node) -> None:
        weight, scale = int8_weight(node)
        self._connected(node, weight.T, scale, None)

    def _connected(self, node: ir.Node, weight: Array, scale: Array, bias: ir.Value | None) -> None:
        """weight: int8 [O, K]."""
        x = self._read(node)
        height, width, channels = self.tensors[x.tensor]
        if not x.flat or weight.ndim != 2 or weight.shape[1] != height * width * channels:
            raise refused(node, "does not read all of a flattened tensor")
        cut = weight.reshape(len(weight), height, width, channels) if x.last else None
        if cut is None:
            cut = weight.reshape(len(weight), channels, height, width).transpose(0, 2, 3, 1)
        self._layer(node, x, np.ascontiguousarray(cut), scale, bias)

    def _add(self, node: ir.Node) -> None:
        a, b = self._read(node, 0), self._read(node, 1)
        if self.tensors[a.tensor] != self.tensors[b.tensor] or (a.last, a.flat) != (b.last, b.flat):
            raise refused(node, "adds tensors of different shapes")
        assert a.scale is not None
        assert b.scale is not None
        a_scale, b_scale = a.scale, b.scale

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            ratios = a_scale / scale, b_scale / scale
            # one rounding, of a product in a fused multiply-add: onnxruntime is compiled so
            shift = np.longdouble(ratios[0]) * a.zero + np.longdouble(ratios[1] * np.float32(b.zero))
            fixed = np.float32(zero) - np.float32(shift)
            out = self._new(self.tensors[a.tensor])
            total = Sum(float(ratios[0]), float(ratios[1]), float(fixed), low, high)
            self.steps.append(Addition(a.tensor, b.tensor, out, total))
            return out

        self.values[node.outputs[0]] = _Pending(emit, last=a.last, flat=a.flat)

    # ----------------------------------------------------------------------------------------------------------- pools

    def _window(self, node: ir.Node, x: _Bytes) -> tuple[Any, Any, Any, tuple[int, int]]:
        """Kernel, strides and pads of a pool, and how many windows there are."""
        ints, dilations = node.attributes.get_ints, node.attributes.get_ints("dilations", [1, 1])
        if node.attributes.get_int("ceil_mode", 0) != 0 or set(dilations) != {1} or len(ints("kernel_shape", [])) != 2:
            raise refused(node, "has a ceil mode, dilations or no two axes")
        if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or x.last or x.flat:
            raise refused(node, "is not over [n, C, H, W], or pads by itself")
        kernel, strides, pads = (
            tuple(ints(key, default)) for key, default in (("kernel_shape", []), ("strides", [1, 1]), ("pads", [0] * 4))
        )
        return kernel, strides, pads, windows(self.tensors[x.tensor], kernel, strides, pads)

    def _maxpool(self, node: ir.Node) -> None:
        x = self.values[given(node)]
        if not isinstance(x, _Bytes):
            raise refused(node, "reads what is not quantized")
        kernel, strides, pads, counts = self._window(node, x)
        out = self._new((*counts, self.tensors[x.tensor][2]))
        self.steps.append(MaxPool(x.tensor, out, kernel, strides, pads))
        self.values[node.outputs[0]] = replace(x, tensor=out)

    def _averagepool(self, node: ir.Node) -> None:
        x = self._read(node)
        kernel, strides, pads, counts = self._window(node, x)
        padded = node.attributes.get_int("count_include_pad", 0) == 1

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            out = self._new((*counts, self.tensors[x.tensor][2]))
            of = (float(x.scale or 0), x.zero, float(scale), zero)
            self.steps.append(AveragePool(x.tensor, out, kernel, strides, pads, *of, padded))
            return self._clipped(out, low, high)

        self.values[node.outputs[0]] = _Pending(emit)

    def _globalaveragepool(self, node: ir.Node) -> None:
        x = self._read(node)
        if x.last or x.flat:
            raise refused(node, "is not over [n, C, H, W]")
        self._global_average(node, x, flat=False)

    def _reducemean(self, node: ir.Node) -> None:
        x = self._read(node)
        axes = query.integers(node, "axes", 1)
        wanted = [1, 2] if x.last else [2, 3]
        if x.flat or axes is None or sorted(axis % 4 for axis in axes) != wanted:
            raise refused(node, "is not over height and width")
        self._global_average(node, x, flat=node.attributes.get_int("keepdims", 1) == 0)

    def _global_average(self, node: ir.Node, x: _Bytes, flat: bool) -> None:
        height, width, channels = self.tensors[x.tensor]

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            assert x.scale is not None
            factor = x.scale / (scale * np.float32(height * width))
            out = self._new((1, 1, channels))
            self.steps.append(GlobalAverage(x.tensor, out, x.zero, float(factor), zero))
            return self._clipped(out, low, high)

        self.values[node.outputs[0]] = _Pending(emit, last=x.last, flat=flat)

    def _clipped(self, tensor: int, low: int, high: int) -> int:
        if (low, high) == (0, 255):
            return tensor
        return self._lookup(tensor, np.clip(np.arange(256), low, high).astype(np.uint8))

    # --------------------------------------------------------------------------------------- functions of single values

    def _relu(self, node: ir.Node) -> None:
        self._bounded(node, 0.0, np.inf)

    def _clip(self, node: ir.Node) -> None:
        low, high = (query.scalar(input_at(node, position)) for position in (1, 2))
        if any(input_at(node, at) is not None and bound is None for at, bound in ((1, low), (2, high))):
            raise refused(node, "has bounds that are no constants")
        self._bounded(node, -np.inf if low is None else low, np.inf if high is None else high)

    def _bounded(self, node: ir.Node, low: float, high: float) -> None:
        found = self.values[given(node)]
        if not isinstance(found, _Pending):
            self._function(node)
            return
        clipped = (min(max(bound, low), high) for bound in (found.low, found.high))
        least, most = clipped
        self.values[node.outputs[0]] = replace(found, low=least, high=most)

    def _function(self, node: ir.Node) -> None:
        """A function of single values between two quantizations: a table, of what onnxruntime computes."""
        found = self.values[given(node)]
        if not isinstance(found, _Bytes) or not found.real or found.scale is None:
            raise refused(node, "reads what is not quantized")
        real = (np.arange(256, dtype=np.float32) - np.float32(found.zero)) * found.scale
        values = evaluated(self.model, node, real)

        def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
            table = np.clip(quantized(values, scale, zero), low, high).astype(np.uint8)
            return self._lookup(found.tensor, table)

        self.values[node.outputs[0]] = _Pending(emit, last=found.last, flat=found.flat)

    # --------------------------------------------------------------------------------------------------------- layouts

    def _concat(self, node: ir.Node) -> None:
        parts = [self.values.get(value) if value is not None else None for value in node.inputs]
        bytes_of = [each for each in parts if isinstance(each, _Bytes)]
        axis = node.attributes.get_int("axis", 1)
        if len(bytes_of) != len(parts) or len({(each.last, each.flat, each.real) for each in bytes_of}) != 1:
            raise refused(node, "joins what is not quantized")
        first = bytes_of[0]
        ranked = 2 if first.flat else 4
        pixels = all(self.tensors[each.tensor][:2] == (1, 1) for each in bytes_of)
        if axis % ranked != (3 if first.last and not first.flat else 1) or (first.flat and not pixels):
            raise refused(node, "does not join channels")
        if first.real:

            def emit(scale: np.float32, zero: int, low: int, high: int) -> int:
                tensors = []
                for each in bytes_of:
                    tensor = each.tensor
                    if (each.scale, each.zero) != (scale, zero) or (low, high) != (0, 255):
                        assert each.scale is not None
                        real = (np.arange(256, dtype=np.float32) - np.float32(each.zero)) * each.scale
                        table = np.clip(quantized(real, scale, zero), low, high).astype(np.uint8)
                        tensor = self._lookup(tensor, table)
                    tensors.append(tensor)
                return self._joined(tensors)

            self.values[node.outputs[0]] = _Pending(emit, last=first.last, flat=first.flat)
            return
        self.values[node.outputs[0]] = replace(first, tensor=self._joined([each.tensor for each in bytes_of]))

    def _joined(self, tensors: Sequence[int]) -> int:
        shapes = [self.tensors[each] for each in tensors]
        out = self._new((*shapes[0][:2], sum(shape[2] for shape in shapes)))
        self.steps.append(Concatenation(tuple(tensors), out))
        return out

    def _pad(self, node: ir.Node) -> None:
        found, pads = self.values[given(node)], query.integers(node, "pads", 1)
        fill = query.scalar(input_at(node, 2)) if input_at(node, 2) is not None else 0.0
        if not isinstance(found, _Input) or found.fills or self.floats or fill is None:
            raise refused(node, "pads more than the channels of the input")
        channel = 3 if found.last else 1
        if (
            node.attributes.get_string("mode", "constant") != "constant"
            or input_at(node, 3) is not None
            or pads is None
        ):
            raise refused(node, "does not pad with a constant")
        if len(pads) != 8 or any(each for at, each in enumerate(pads) if at != 4 + channel) or pads[4 + channel] < 1:
            raise refused(node, "pads more than the channels of the input")
        self.values[node.outputs[0]] = replace(found, fills=(int(fill),) * pads[4 + channel])

    def _identity(self, node: ir.Node) -> None:
        self.values[node.outputs[0]] = self.values[given(node)]

    _dropout = _identity

    def _flatten(self, node: ir.Node) -> None:
        if node.attributes.get_int("axis", 1) != 1:
            raise refused(node, "keeps another axis than that of the samples")
        self._flattened(node)

    def _squeeze(self, node: ir.Node) -> None:
        self._flattened(node, alone=True)

    def _reshape(self, node: ir.Node) -> None:
        sizes = query.shape_elements(input_at(node, 1))
        if sizes is None:
            raise refused(node, "has no constant shape")
        self._flattened(node, sizes)

    def _flattened(self, node: ir.Node, sizes: Sequence[int | str | None] | None = None, alone: bool = False) -> None:
        """All axes but the first as one, or a pixel's four axes again."""
        found = self.values[given(node)]
        if isinstance(found, _Input):
            raise refused(node, "reshapes the input")
        pixel = isinstance(found, _Pending) or self.tensors[found.tensor][:2] == (1, 1)
        if isinstance(found, _Pending) or (alone and not pixel):
            raise refused(node, "reshapes what is not quantized, or larger than a pixel")
        count = int(np.prod(self.tensors[found.tensor]))
        flat = sizes is None or (len(sizes) == 2 and sizes[1] in (-1, count))
        unflat = (
            sizes is not None and len(sizes) == 4 and pixel and (list(sizes[2:]) == [1, 1] and sizes[1] in (-1, count))
        )
        if not flat and not unflat:
            raise refused(node, f"reshapes to {sizes}")
        self.values[node.outputs[0]] = replace(found, flat=flat, last=found.last and not unflat)

    def _transpose(self, node: ir.Node) -> None:
        found, order = self.values[given(node)], tuple(node.attributes.get_ints("perm", []))
        if isinstance(found, _Pending) or (isinstance(found, _Bytes) and found.flat):
            raise refused(node, "transposes what is not quantized, or flat")
        to_last, to_first = order == (0, 2, 3, 1), order == (0, 3, 1, 2)
        if isinstance(found, _Input):
            if not to_first or found.stored != found.last or found.fills:
                raise refused(node, "transposes the input otherwise than [n, H, W, C] to [n, C, H, W]")
            self.values[node.outputs[0]] = _Input(stored=True)
            return
        pixel = self.tensors[found.tensor][:2] == (1, 1)
        if not ((to_last and not found.last) or (to_first and found.last) or (pixel and order and order[0] == 0)):
            raise refused(node, f"transposes to {order}")
        self.values[node.outputs[0]] = replace(found, last=to_last)
