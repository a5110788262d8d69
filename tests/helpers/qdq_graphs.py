"""Quantized graphs of image classifiers, made node by node, or at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """A quantized graph in the making."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.nodes, self.constants = np.random.default_rng(seed), list[Any](), dict[str, Any]()
        self.flat, self.ranks = "", dict[str, int]()

    def add(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """A node; its output."""
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def constant(self, value: Any) -> str:
        """An initializer."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def quantize(self, x: str, scale: float, zero: int, dtype: Any = np.uint8) -> str:
        """Q and DQ."""
        qparams = [self.constant(np.float32(scale)), self.constant(dtype(zero))]
        return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, *qparams]), *qparams])

    def layer(self, kind: str, x: str, shape: tuple[int, ...], x_scale: float, **attributes: Any) -> str:
        """Conv or Gemm with random int8 weights and int32 biases."""
        scale = self.rng.uniform(0.001, 0.004, shape[0]).astype(np.float32)
        w = self.constant(self.rng.integers(-127, 128, shape).astype(np.int8))
        b = self.constant(self.rng.integers(-4000, 4000, shape[0]).astype(np.int32))
        s, t = self.constant(scale), self.constant(np.float32(x_scale) * scale)
        weight = self.add("DequantizeLinear", [w, s], axis=0)
        return self.add(kind, [x, weight, self.add("DequantizeLinear", [b, t], axis=0)], **attributes)

    def save(
        self,
        path: Path,
        shape: list[int],
        out: str,
        dtype: int = TensorProto.FLOAT,
        *more: str,
        batch: Any = "n",
        opset: int = 17,
    ) -> Path:
        """The model's file. more: further outputs."""
        image = helper.make_tensor_value_info("image", dtype, [batch, *shape])
        ranks = {self.flat: 2, **self.ranks}
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"] + ["m"] * (ranks.get(name, 4) - 1))
            for name in (out, *more)
        ]
        made = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", [image], outputs, made)
        path.write_bytes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9).SerializeToString()
        )
        return path


def linear(g: Graph, x: str, shape: tuple[int, int]) -> str:
    """MatMul by int8 weights [inputs, outputs] and a bias, as torch exports a layer of [n, H, W, C]."""
    w = g.constant(g.rng.integers(-127, 128, shape).astype(np.int8))
    scale = g.constant(g.rng.uniform(0.001, 0.003, shape[1]).astype(np.float32))
    made = g.add("MatMul", [x, g.add("DequantizeLinear", [w, scale], axis=1)])
    return g.add("Add", [made, g.constant(g.rng.normal(0, 0.3, shape[1]).astype(np.float32))])


def weights(g: Graph, *shape: int, mean: float = 1.0) -> str:
    """Float weights around a mean."""
    return g.constant(g.rng.normal(mean, 0.2, shape).astype(np.float32))


def gelu(g: Graph, x: str) -> str:
    """GELU, from opset 20 on."""
    return g.add("Gelu", [x])


def results(path: Path, samples: Any) -> Any:
    """What onnxruntime computes."""
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"image": samples})[0]


class Tensor(NamedTuple):
    """A dequantized value: its name, scale and shape."""

    name: str
    scale: float
    channels: int
    height: int
    width: int


FUNCTIONS = ("HardSwish", "Sigmoid", "LeakyRelu", "Tanh", "HardSigmoid", "Elu")


def drawn(seed: int) -> tuple[Graph, list[int], str]:
    """(a graph of two to six random operators, the shape of its input, its output)."""
    g = Graph(seed)
    r, dtype = g.rng, np.uint8 if seed % 2 else np.int8
    shape = [int(r.integers(1, 6)), int(r.integers(5, 12)), int(r.integers(5, 12))]

    def quantized(name: str, scale: float, *size: int) -> Tensor:
        zero = int(r.integers(0, 256)) - (128 if dtype is np.int8 else 0)
        return Tensor(g.quantize(name, scale, zero, dtype), scale, *size)

    def some(least: int, most: int, count: int = 2) -> list[int]:
        return [int(number) for number in r.integers(least, most, count)]

    values = [quantized("image", 0.02, *shape)]
    for _ in range(int(r.integers(2, 7))):
        x = values[int(r.integers(len(values)))]
        name, scale, channels, *size = x
        match str(
            r.choice(
                [
                    "dense",
                    "depthwise",
                    "grouped",
                    "add",
                    "gate",
                    "swish",
                    "average",
                    "max",
                    "concat",
                    "function",
                    "clip",
                ]
            )
        ):
            case "dense" | "depthwise" | "grouped" as kind:
                kernel, strides, pads = some(1, 4), some(1, 3), some(0, 3, 4)
                counts = [(size[i] + pads[i] + pads[i + 2] - kernel[i]) // strides[i] + 1 for i in range(2)]
                if min(counts) < 1:
                    continue
                groups = {
                    "dense": 1,
                    "depthwise": channels,
                    "grouped": next((n for n in (3, 2) if channels % n == 0), 1),
                }[kind]
                outputs = channels if kind == "depthwise" else groups * int(r.integers(1, 20))
                weights = (outputs, channels // groups, *kernel)
                y = g.layer("Conv", name, weights, scale, pads=pads, strides=strides, group=groups)
                measures = (scale * 0.4 * float(np.prod(weights[1:])) ** 0.5, outputs, *counts)
            case "add":
                others = [value for value in values if value[2:] == x[2:] and value is not x]
                if not others:
                    continue
                y = g.add("Add", [name, others[0].name] if r.random() < 0.5 else [others[0].name, name])
                measures = ((scale + others[0].scale) * 0.7, channels, *size)
            case "gate":
                mean = quantized(g.add("GlobalAveragePool", [name]), scale * 0.5, channels, 1, 1)
                gate = quantized(
                    g.layer("Conv", mean.name, (channels, channels, 1, 1), mean.scale), 0.05, channels, 1, 1
                )
                y = g.add("Mul", [name, gate.name] if r.random() < 0.5 else [gate.name, name])
                measures = (scale * 3.0, channels, *size)
            case "swish":
                y = g.add("Mul", [name, quantized(g.add("Sigmoid", [name]), 1 / 255, channels, *size).name])
                measures = (scale * 0.6, channels, *size)
            case "average":
                kernel, strides = some(1, 4), some(1, 3)
                pads = [int(r.integers(0, kernel[i % 2])) for i in range(4)]
                counts = [(size[i] + pads[i] + pads[i + 2] - kernel[i]) // strides[i] + 1 for i in range(2)]
                include = int(r.integers(2))
                y = g.add(
                    "AveragePool", [name], kernel_shape=kernel, pads=pads, strides=strides, count_include_pad=include
                )
                measures = (scale * 0.8, channels, *counts)
            case "max":
                y = g.add("MaxPool", [name], kernel_shape=[2, 3], strides=[1, 2], pads=[1, 0, 0, 1])
                measures = (scale, channels, size[0], (size[1] - 2) // 2 + 1)
            case "concat":
                others = [value for value in values if value[3:] == x[3:]]
                other = others[int(r.integers(len(others)))]
                y = g.add("Concat", [name, other.name], axis=1)
                measures = (max(scale, other.scale), channels + other.channels, *size)
            case "function":
                y = g.add(str(r.choice(FUNCTIONS)), [name])
                measures = (scale * 0.5, channels, *size)
            case _:
                y = g.add("Clip", [name, g.constant(np.float32(-0.5)), g.constant(np.float32(1.5))])
                measures = (scale, channels, *size)
        values.append(quantized(g.add("Relu", [y]) if r.random() < 0.3 else y, *measures))
    last = values[-1]
    if seed % 3 == 0:
        return g, shape, last.name
    g.flat = g.add("Flatten", [last.name])
    if seed % 3 == 1:
        g.flat = g.layer("Gemm", g.flat, (5, int(np.prod(last[2:]))), last.scale, transB=1)
    return g, shape, g.flat
