"""Small networks of the kinds that people bring as ONNX files, with random weights, as their exporters write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

MAX_SAMPLES = 128  # samples of a network
Arrays = dict[str, NDArray[Any]]


class Network(NamedTuple):
    """A network to write.

    Attributes:
        write: Writes the ONNX file.
        samples: Draws a number of samples, an array of every input.
        axis: Axis of the samples in every array.
    """

    write: Callable[[Path, Arrays, int], None]
    samples: Callable[[np.random.Generator, int], Arrays]
    axis: int = 0


def exported(make: Callable[[], nn.Module], free: Mapping[str, Mapping[int, str]] | None = None) -> Any:
    """Returns a function that writes a torch network with a dynamic batch, and further dynamic axes of `free`."""

    def write(path: Path, example: Arrays, axis: int) -> None:
        torch.manual_seed(0)
        module = make().eval()
        inputs = tuple(map(torch.from_numpy, example.values()))
        names = [f"y{i}" for i in range(len(_tuple(module(*inputs))))]
        axes = {name: {axis: "batch", **(free or {}).get(name, {})} for name in [*example, *names]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                inputs,
                str(path),
                input_names=list(example),
                output_names=names,
                dynamic_axes=axes,
                opset_version=17,
                dynamo=False,
            )

    return write


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def images(channels: int = 3, size: int = 32) -> Callable[[np.random.Generator, int], Arrays]:
    """Returns a function that draws smooth images with noise."""

    def draw(rng: np.random.Generator, count: int) -> Arrays:
        coarse = rng.normal(size=(count, channels, size // 4, size // 4)).repeat(4, 2).repeat(4, 3)
        return {"x": (coarse + 0.3 * rng.normal(size=coarse.shape)).astype(np.float32)}

    return draw


def numbers(*shape: int) -> Callable[[np.random.Generator, int], Arrays]:
    """Returns a function that draws normal numbers [count, *shape]."""
    return lambda rng, count: {"x": rng.normal(size=(count, *shape)).astype(np.float32)}


def series(rng: np.random.Generator, count: int) -> Arrays:
    """Draws series [12, count, 16], time first."""
    return {"x": rng.normal(size=(12, count, 16)).astype(np.float32)}


def tokens(rng: np.random.Generator, count: int) -> Arrays:
    """Draws token ids of several lengths, and their mask."""
    lengths = rng.integers(3, 17, count)
    mask = np.arange(16) < lengths[:, None]
    return {"ids": np.where(mask, rng.integers(1, 200, (count, 16)), 0), "mask": mask.astype(np.int64)}


def rows(rng: np.random.Generator, count: int) -> Arrays:
    """Draws three ids and four numbers a row."""
    return {"ids": rng.integers(0, 100, (count, 3)), "x": rng.normal(size=(count, 4)).astype(np.float32)}


# -------------------------------------------------------------------------------------------------------------- images


def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> Any:
    """Returns convolution, batch normalization and activation."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs)
    nn.init.normal_(norm.bias, std=0.3)
    return nn.Sequential(layer, norm, act())


def cnn() -> nn.Module:
    """A plain network of convolutions."""
    body = [convolution(3, 16), nn.MaxPool2d(2), convolution(16, 32), convolution(32, 32, stride=2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Residual(nn.Module):
    """A network with residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = convolution(3, 16), convolution(16, 16), convolution(16, 16, act=nn.Identity)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.stem(x)
        return self.head(functional.relu(x + self.b(self.a(x))).mean((2, 3)))


class Inverted(nn.Module):
    """Depthwise convolutions with squeeze and excitation, as MobileNet V3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 16, stride=2, act=nn.Hardswish)
        self.wide = convolution(16, 48, 1, act=nn.Hardswish)
        self.depth = convolution(48, 48, 5, groups=48, act=nn.Hardswish)
        self.squeeze, self.excite = nn.Conv2d(48, 12, 1), nn.Conv2d(12, 48, 1)
        self.narrow = convolution(48, 16, 1, act=nn.Identity)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.stem(x)
        y = self.depth(self.wide(x))
        scale = self.excite(functional.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
        x = x + self.narrow(y * functional.hardsigmoid(scale))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Detector(nn.Module):
    """Two levels of features and a head of boxes and scores, as YOLO exports have them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = convolution(3, 16, stride=2, act=nn.SiLU)
        self.b = convolution(16, 32, stride=2, act=nn.SiLU)
        self.c = convolution(48, 16, act=nn.SiLU)
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns boxes and scores [n, 9, places]."""
        a = self.a(x)
        b = self.b(a)
        c = self.c(torch.cat([a, functional.interpolate(b, scale_factor=2.0)], 1))
        return torch.cat([self.boxes(c).sigmoid() * 32, self.scores(c).sigmoid()], 1).flatten(2)


class UNet(nn.Module):
    """Segmentation by transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = convolution(3, 8), convolution(8, 16, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits of every pixel."""
        a = self.a(x)
        return self.head(torch.cat([a, self.up(self.b(a)).relu()], 1))


class ConvNext(nn.Module):
    """Depthwise 7 x 7, layer normalization over channels, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.stem(x)
        y = self.down(functional.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


# -------------------------------------------------------------------------------------------------- tokens and series


class Attention(nn.Module):
    """Self-attention with a feed-forward network, in the operators that exporters write."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns tokens [n, tokens, width]."""
        n, count, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) * (width / self.heads) ** -0.5
        if mask is not None:
            weights = weights + (1.0 - mask[:, None, None, :].float()) * -1e4
        x = x + self.out((weights.softmax(-1) @ v).transpose(1, 2).reshape(n, count, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    """Patches, a class token, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32))
        self.block, self.head = Attention(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.block(x)[:, 0])


class TextEncoder(nn.Module):
    """Token ids of any length to a normalized mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(200, 32), nn.Embedding(64, 32)
        self.block = Attention()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns embeddings."""
        x = self.block(self.words(ids) + self.places(torch.arange(ids.shape[1])), mask)
        kept = mask[:, :, None].float()
        return functional.normalize((x * kept).sum(1) / kept.sum(1))


class Mixer(nn.Module):
    """An MLP over tokens and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 8, 8), nn.LayerNorm(32)
        self.tokens, self.channels, self.head = nn.Linear(16, 16), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.patches(x).flatten(2)
        x = (x + functional.gelu(self.tokens(x))).transpose(1, 2)
        return self.head((x + functional.gelu(self.channels(self.norm(x)))).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer and a linear one; states of the end as a second output."""

    def __init__(self, kind: Any, *, first: bool, both: bool = False, last: bool = True) -> None:
        super().__init__()
        self.layer = kind(16, 24, batch_first=first, bidirectional=both)
        self.head, self.first, self.last = nn.Linear(48 if both else 24, 5), first, last

    def forward(self, x: Tensor) -> Tensor:
        """Returns the head of the last step, or of all steps."""
        y, _ = self.layer(x)
        return self.head((y[:, -1] if self.first else y[-1]) if self.last else y)


class Temporal(nn.Module):
    """Dilated convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(8, 16, 3, padding=1)
        self.b = nn.Conv1d(16, 16, 3, padding=2, dilation=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        x = self.a(x).relu()
        return self.head((x + self.b(x).tanh()).amax(2))


# ---------------------------------------------------------------------------------------------------------------- rows


class Ranker(nn.Module):
    """Embedding tables, numbers and an MLP, with a cross layer or factorization machine."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tables = kind, nn.ModuleList(nn.Embedding(100, 8) for _ in range(3))
        self.cross = nn.Linear(28, 28)
        self.mlp = nn.Sequential(nn.Linear(28, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Returns probabilities [n]."""
        fields = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        joined = torch.cat([fields.flatten(1), x], 1)
        if self.kind == "cross":
            joined = joined * self.cross(joined) + joined
        logit = self.mlp(joined)[:, 0]
        if self.kind == "factors":
            logit = logit + 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)
        return logit.sigmoid()


class Experts(nn.Module):
    """Experts with a gate and two towers, as MMoE has them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 24) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(24, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns two probabilities a row."""
        experts = torch.stack([expert(x).relu() for expert in self.experts], 1)
        pairs = zip(self.gates, self.towers, strict=True)
        outputs = [tower((gate(x).softmax(1)[:, :, None] * experts).sum(1)) for gate, tower in pairs]
        return torch.cat(outputs, 1).sigmoid()


class Set(nn.Module):
    """Rows of one set, which attend to each other: no row is a sample of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a vector a row."""
        return self.head((self.q(x) @ self.k(x).T * 0.25).softmax(1) @ self.v(x))


def mlp() -> nn.Module:
    """A plain MLP."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))


def classifier(path: Path, example: Arrays, axis: int) -> None:
    """Writes an MLP as the exporters of scikit-learn do: label and probabilities, labels are strings."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(size=shape).astype(np.float32) / 3
        for name, shape in (("w1", (16, 32)), ("b1", (32,)), ("w2", (32, 3)), ("b2", (3,)))
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Add", ["a", "b1"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["d"]),
        helper.make_node("Add", ["d", "b2"], ["e"]),
        helper.make_node("Softmax", ["e"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["place"], axis=1, keepdims=0),
        helper.make_node(
            *("LabelEncoder", ["place"], ["label"]),
            domain="ai.onnx.ml",
            keys_int64s=[0, 1, 2],
            values_strings=["a", "b", "c"],
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 16])],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING, [None]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 3]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), path)


LENGTH: Mapping[str, Mapping[int, str]] = {"ids": {1: "length"}, "mask": {1: "length"}}
TIME: Mapping[str, Mapping[int, str]] = {"x": {0: "time"}, "y0": {0: "time"}}
NETWORKS: dict[str, Network] = {
    "cnn": Network(exported(cnn), images()),
    "residual": Network(exported(Residual), images()),
    "depthwise": Network(exported(Inverted), images()),
    "detector": Network(exported(Detector), images()),
    "unet": Network(exported(UNet), images()),
    "convnext": Network(exported(ConvNext), images()),
    "mixer": Network(exported(Mixer), images()),
    "vit": Network(exported(VisionTransformer), images()),
    "text-encoder": Network(exported(TextEncoder, LENGTH), tokens),
    "tokens": Network(exported(Attention), numbers(12, 32)),
    "lstm": Network(exported(lambda: Recurrent(nn.LSTM, first=True)), numbers(12, 16)),
    "gru": Network(exported(lambda: Recurrent(nn.GRU, first=True, both=True)), numbers(12, 16)),
    "lstm-time-first": Network(exported(lambda: Recurrent(nn.LSTM, first=False), TIME), series, 1),
    "gru-time-first": Network(exported(lambda: Recurrent(nn.GRU, first=False, both=True, last=False), TIME), series, 1),
    "temporal": Network(exported(Temporal), numbers(8, 24)),
    "mlp": Network(exported(mlp), numbers(16)),
    "ranker": Network(exported(lambda: Ranker("")), rows),
    "ranker-cross": Network(exported(lambda: Ranker("cross")), rows),
    "ranker-factors": Network(exported(lambda: Ranker("factors")), rows),
    "experts": Network(exported(Experts), numbers(16)),
    "set": Network(exported(Set), numbers(16)),
    "classifier": Network(classifier, numbers(16)),
}


def write(name: str, folder: Path) -> None:
    """Writes NAME.onnx, NAME.calib.npz and NAME.test.npz (samples along the axis of the network).

    Args:
        name: Network of `NETWORKS`.
        folder: Folder to write into.
    """
    network, rng = NETWORKS[name], np.random.default_rng(1)
    network.write(folder / f"{name}.onnx", network.samples(rng, 3), network.axis)
    np.savez(folder / f"{name}.test.npz", **network.samples(rng, MAX_SAMPLES))  # type: ignore[arg-type]
    calibration = network.samples(rng, 64)
    if network.axis:  # one sample each, as `zoo quantize` takes inputs that are not samples first
        calibration = {key: np.moveaxis(array, network.axis, 0)[:, :, None] for key, array in calibration.items()}
    np.savez(folder / f"{name}.calib.npz", **calibration)  # type: ignore[arg-type]
