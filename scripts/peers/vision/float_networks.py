"""The float networks that peers get, also in operators of TensorFlow, and the usual way to prepare photos."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import zoo
from pipelines.core.errors import RequestError
from pipelines.data.images import listed
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io as graph
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED as PASSES
from scripts.peers import harness, processes

Array = NDArray[Any]
NORMALIZED = "image.normalized"  # the value of fp32.onnx where the network begins
CALIBRATE_EVERY = 5  # photos


def photo_folder() -> Path:
    """Returns the photos of the development data.

    Raises:
        RequestError: They are missing.
    """
    return harness.development_data("data/imagenet/nips17/labels.csv").parent


def first_photos(folder: str, count: int) -> list[Path]:
    """Returns the first photos of a folder.

    Raises:
        RequestError: It has fewer.
    """
    photos = [Path(name) for name in listed(folder)][:count]
    if len(photos) < count:
        raise RequestError(f"found {len(photos)} photos in {folder}, expected {count}")
    return photos


def resize(image: Image.Image, spec: Preprocess) -> Image.Image:
    """Brings the short side to `spec.resize`, sizes rounded as torchvision rounds them."""
    width, height = image.size
    short = min(width, height)
    size = spec.resize * width // short, spec.resize * height // short
    return image.resize(size, Image.Resampling[spec.interpolation.upper()])


def crop(image: Image.Image, spec: Preprocess) -> Image.Image:
    """Resizes an image and cuts out its centre, `spec.size` squared."""
    resized = resize(image, spec)
    left, top = (round((side - spec.size) / 2) for side in resized.size)
    return resized.crop((left, top, left + spec.size, top + spec.size))


def normalize(pixels: Any, spec: Preprocess) -> Array:
    """Normalizes pixels R, G, B to float32 [..., 3] in the network's order of channels.

    It takes as few steps as this project's own preprocessing.
    """
    mean, deviation = (255 * np.array(numbers, np.float32) for numbers in (spec.mean, spec.std))
    x = np.asarray(pixels, np.float32) - mean
    if not np.allclose(deviation, 1):
        x /= deviation
    return x[..., ::-1] if spec.channels == "BGR" else x


def obvious(data: bytes, spec: Preprocess, *, last: bool = False) -> Array:
    """Returns the bytes of a JPEG as the network's input, float32 [1, 3, size, size], or with channels `last`."""
    x = normalize(crop(Image.open(io.BytesIO(data)).convert("RGB"), spec), spec)
    return np.ascontiguousarray(x if last else x.transpose(2, 0, 1))[None]


@dataclass(frozen=True)
class Work:
    """Input of the process of one peer.

    Attributes:
        model: Name of the model.
        fp32: Its float network: the operators of fp32.onnx behind the normalization.
        pixels: Photos of calibration, .npy of uint8 [n, size, size, 3].
        spec: Its preprocessing.
    """

    model: str
    fp32: Path
    pixels: Path
    spec: Preprocess

    @property
    def folded(self) -> Path:
        """The float network, batch norms and pads folded."""
        return self.fp32.with_name("folded.onnx")

    def batch(self, pixels: Array) -> dict[str, Array]:
        """Returns pixels uint8 [n, size, size, 3] as the network's input."""
        return {NORMALIZED: np.ascontiguousarray(normalize(pixels, self.spec).transpose(0, 3, 1, 2))}

    def batches(self, size: int = 1) -> list[dict[str, Array]]:
        """Returns the calibration samples in batches of `size`."""
        pixels = np.load(self.pixels)
        return [self.batch(pixels[start : start + size]) for start in range(0, len(pixels), size)]


def prepare(name: str, folder: Path, photos: Sequence[Path]) -> Work:
    """Writes a model's float networks and its photos of calibration.

    Args:
        name: Name of an image classifier.
        folder: Folder of the files; made where it is missing.
        photos: Photos of calibration.

    Returns:
        The input of the peers' processes.

    Raises:
        ZooError: The network cannot be built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = Preprocess.from_json(zoo.load(name).preprocessing)
    work = Work(name, folder / "fp32.onnx", folder / "calibration.npy", spec)
    processes.on_one_core(_build, work, cores={processes.last_core()}, log=folder / "network.log")
    np.save(work.pixels, np.stack([np.asarray(crop(Image.open(path).convert("RGB"), spec)) for path in photos]))
    return work


def _build(work: Work) -> None:
    network(zoo.load(work.model).ensure("fp32.onnx"), work)


def network(fp32: Path, work: Work) -> None:
    """Writes both float networks of an image classifier's fp32.onnx."""
    import onnx

    onnx.utils.extract_model(fp32, work.fp32, [NORMALIZED], ["logits"])
    folded = graph.load(work.fp32)
    rewrite(folded, [pass_type() for pass_type in PASSES])
    graph.save(folded, work.folded)


def tensorflow_network(path: Path) -> Callable[[Any], Any]:
    """Returns a folded network as a function of TensorFlow, float32 [1, size, size, 3] -> logits."""
    import onnx
    import tensorflow as tf

    def pad(x: Any, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> tuple[Any, str]:
        if not any(pads):
            return x, "VALID"
        needed = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(x.shape[1:3], strides, kernel, strict=True)]
        if list(pads) == [*(total // 2 for total in needed), *(total - total // 2 for total in needed)]:
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
            y = tf.nn.depthwise_conv2d(x, kernel.transpose(2, 3, 0, 1), [1, *strides, 1], padding)
        else:
            y = tf.nn.conv2d(x, kernel.transpose(2, 3, 1, 0), strides, padding)
        return tf.nn.bias_add(y, bias)

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
    model = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.initializer}

    def evaluate(x: Any) -> Any:
        values = {**constants, model.input[0].name: x}
        for node in model.node:
            options = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            values[node.output[0]] = operators[node.op_type](*[values[name] for name in node.input], **options)
        return values[model.output[0].name]

    return evaluate
