"""The float networks that peers get, also in operators of torch and TensorFlow, and the usual way to prepare photos."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.data.preprocess import Preprocess
from pipelines.graph import io as graph
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED as PASSES

Array = NDArray[Any]
NORMALIZED = "image.normalized"  # the value of fp32.onnx where the network begins


def crop(image: Image.Image, spec: Preprocess) -> Image.Image:
    """Short side to `spec.resize`, then the middle of `spec.size` squared, sizes rounded as torchvision rounds them."""
    width, height = image.size
    short = min(width, height)
    size = spec.resize * width // short, spec.resize * height // short
    left, top = (round((side - spec.size) / 2) for side in size)
    resized = image.resize(size, Image.Resampling[spec.interpolation.upper()])
    return resized.crop((left, top, left + spec.size, top + spec.size))


def normalize(pixels: Any, spec: Preprocess) -> Array:
    """float32 [..., 3] of pixels R, G, B, in the network's order of channels; in as few steps as its own preprocessing
    takes.
    """
    mean, deviation = (255 * np.array(each, np.float32) for each in (spec.mean, spec.std))
    x = np.asarray(pixels, np.float32) - mean
    if not np.allclose(deviation, 1):
        x /= deviation
    return x[..., ::-1] if spec.channels == "BGR" else x


def obvious(data: bytes, spec: Preprocess, *, last: bool = False) -> Array:
    """The bytes of a JPEG to the network's input, float32 [1, 3, size, size], channels `last` if so wished."""
    x = normalize(crop(Image.open(io.BytesIO(data)).convert("RGB"), spec), spec)
    return np.ascontiguousarray(x if last else x.transpose(2, 0, 1))[None]


@dataclass(frozen=True)
class Work:
    """What a process gets: the model, its float network, photos of calibration (uint8 [n, size, size, 3], .npy) and the
    preprocessing.
    """

    model: str
    fp32: Path
    pixels: Path
    spec: Preprocess

    @property
    def folded(self) -> Path:
        """The float network, batch norms and pads folded."""
        return self.fp32.with_name("folded.onnx")

    def batches(self, size: int = 1) -> list[dict[str, Array]]:
        """The calibration samples, normalized."""
        x = normalize(np.load(self.pixels), self.spec).transpose(0, 3, 1, 2)
        return [{NORMALIZED: np.ascontiguousarray(x[at : at + size])} for at in range(0, len(x), size)]


def network(fp32: Path, work: Work) -> None:
    """Write both float networks: those operators of an image classifier's fp32.onnx that follow its normalization."""
    import onnx

    onnx.utils.extract_model(fp32, work.fp32, [NORMALIZED], ["logits"])
    folded = graph.load(work.fp32)
    rewrite(folded, [each() for each in PASSES])
    graph.save(folded, work.folded)


class Graph(NamedTuple):
    """An ONNX graph of one input and one output: (operator, names of inputs, of the output, attributes) of its nodes,
    in order.
    """

    nodes: list[tuple[str, list[str], str, dict[str, Any]]]
    given: str
    found: str
    constants: dict[str, Array]

    @staticmethod
    def read(path: Path) -> Graph:
        """The graph in a file."""
        import onnx

        graph = onnx.load(path).graph
        options = [{each.name: onnx.helper.get_attribute_value(each) for each in node.attribute} for node in graph.node]
        nodes = [
            (node.op_type, list(node.input), node.output[0], each)
            for node, each in zip(graph.node, options, strict=True)
        ]
        constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        return Graph(nodes, graph.input[0].name, graph.output[0].name, constants)

    def evaluate(self, x: Any, constants: Mapping[str, Any], operators: Mapping[str, Callable[..., Any]]) -> Any:
        """What it makes of x, by operators called with a node's inputs and attributes."""
        values = {**constants, self.given: x}
        for operator, inputs, output, options in self.nodes:
            values[output] = operators[operator](*[values[name] for name in inputs], **options)
        return values[self.found]


def torch_network(path: Path) -> Any:
    """A folded network as a torch module, float32 [n, 3, size, size] -> logits."""
    import torch
    from torch.nn import functional as F

    def pad(x: Any, pads: Sequence[int]) -> tuple[Any, list[int]]:
        top, left, bottom, right = pads
        return (x, [top, left]) if (top, left) == (bottom, right) else (F.pad(x, (left, right, top, bottom)), [0, 0])

    def convolve(x: Any, kernel: Any, bias: Any, *, strides: list[int], pads: list[int], group: int, **_: Any) -> Any:
        x, padding = pad(x, pads)
        return F.conv2d(x, kernel, bias, strides, padding, groups=group)

    operators: dict[str, Callable[..., Any]] = {
        "Conv": convolve,
        "Clip": lambda x, low, high: F.hardtanh(x, low, high),
        "Relu": F.relu,
        "Add": lambda x, y: x + y,
        "MaxPool": lambda x, *, kernel_shape, strides, pads, **_: F.max_pool2d(x, kernel_shape, strides, pads[:2]),
        "GlobalAveragePool": lambda x: F.adaptive_avg_pool2d(x, 1),
        "Flatten": lambda x, **_: torch.flatten(x, 1),
        "Gemm": lambda x, kernel, bias, **_: F.linear(x, kernel, bias),
    }

    graph = Graph.read(path)
    scalars = {name: float(value) for name, value in graph.constants.items() if not value.ndim}
    own = {name: name.replace(".", "_") for name in graph.constants if name not in scalars}

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, attribute in own.items():
                self.register_buffer(attribute, torch.from_numpy(graph.constants[name].copy()))

        def forward(self, x: Any) -> Any:
            return graph.evaluate(
                x, scalars | {name: getattr(self, attribute) for name, attribute in own.items()}, operators
            )

    return Network().eval()


def tensorflow_network(path: Path) -> Callable[[Any], Any]:
    """A folded network as a function of TensorFlow's, float32 [1, size, size, 3] -> logits."""
    import tensorflow as tf

    def pad(x: Any, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> tuple[Any, str]:
        if not any(pads):
            return x, "VALID"
        needed = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(x.shape[1:3], strides, kernel, strict=True)]
        if list(pads) == [*(each // 2 for each in needed), *(each - each // 2 for each in needed)]:
            return x, "SAME"
        return tf.pad(x, [[0, 0], [pads[0], pads[2]], [pads[1], pads[3]], [0, 0]]), "VALID"

    def convolve(
        x: Any,
        kernel: Array,
        bias: Array,
        *,
        kernel_shape: list[int],
        strides: list[int],
        pads: list[int],
        group: int,
        **_: Any,
    ) -> Any:
        x, padding = pad(x, kernel_shape, strides, pads)
        if group > 1:
            found = tf.nn.depthwise_conv2d(x, kernel.transpose(2, 3, 0, 1), [1, *strides, 1], padding)
        else:
            found = tf.nn.conv2d(x, kernel.transpose(2, 3, 1, 0), strides, padding)
        return tf.nn.bias_add(found, bias)

    def pool(x: Any, *, kernel_shape: list[int], strides: list[int], pads: list[int], **_: Any) -> Any:
        x, padding = pad(x, kernel_shape, strides, pads)  # zeros are the least there is after a ReLU
        return tf.nn.max_pool2d(x, kernel_shape, strides, padding)

    operators: dict[str, Callable[..., Any]] = {
        "Conv": convolve,
        "Clip": lambda x, low, high: tf.nn.relu6(x) if (low, high) == (0, 6) else tf.clip_by_value(x, low, high),
        "Relu": tf.nn.relu,
        "Add": lambda x, y: x + y,
        "MaxPool": pool,
        "GlobalAveragePool": lambda x: tf.reduce_mean(x, [1, 2], keepdims=True),
        "Flatten": lambda x, **_: tf.reshape(x, [1, -1]),
        "Gemm": lambda x, kernel, bias, **_: tf.nn.bias_add(tf.matmul(x, kernel.T), bias),
    }
    graph = Graph.read(path)
    return lambda x: graph.evaluate(x, graph.constants, operators)
