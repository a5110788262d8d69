"""MobileNet V1 (Howard et al. 2017) and V2 (Sandler et al. 2018) in torch; torch.fx can trace the modules."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.core.errors import RequestError
from zoo.training.lazy_module import LazyModule
from zoo.vision.family import ImageFamily
from zoo.vision.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zoo.vision.export.freeze import State

V1 = ((64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 6, 2), (1024, 2, 2))  # channels, blocks, stride of the first block
V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # expansion, then as V1
ARCHITECTURES = ("mobilenet-v1", "mobilenet-v1-slim", "mobilenet-v2")
SLIM_LAYER = re.compile(
    r"(?:MobilenetV1/)+(Conv2d_\w+|Logits/Conv2d_1c_1x1)/(weights|depthwise_weights|convolution_bias|depthwise_bias)"
)


def build(arch: str, classes: int, width: float = 1.0) -> nn.Module:
    """Builds an untrained network, from normalized float32 [n, 3, h, w] to logits float32 [n, classes].

    Args:
        arch: "mobilenet-v1" (parameter names and outputs of timm's mobilenetv1_100), "mobilenet-v2" (those of
            torchvision's mobilenet_v2), or "mobilenet-v1-slim" (TF-Slim's V1 as published: batch norms folded into
            biased convolutions, and the padding "SAME" of TensorFlow for sizes that are multiples of 32).
        classes: Number of classes.
        width: Width multiplier; channels are rounded to multiples of 8.

    Returns:
        The network.

    Raises:
        RequestError: `arch` is unknown, or `width` is not positive.
    """
    if arch not in ARCHITECTURES:
        raise RequestError(f"no MobileNet {arch!r}; choose one of {', '.join(ARCHITECTURES)}")
    if not (math.isfinite(width) and width > 0):
        raise RequestError(f"width is {width!r}; expected a positive number")
    return (
        MobileNetV2(classes, width)
        if arch == "mobilenet-v2"
        else MobileNetV1(classes, width, slim=arch == "mobilenet-v1-slim")
    )


def channels(count: float) -> int:
    """Rounds a number of channels to a multiple of 8, as TF-Slim, torchvision and timm do.

    Args:
        count: Number of channels, multiplied by the width.

    Returns:
        A multiple of 8, at least 8 and at least 90% of `count`.
    """
    rounded = max(8, int(count + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * count else rounded


class DepthwiseSeparable(LazyModule):
    """Depthwise 3x3 convolution, then pointwise 1x1 convolution, each with BatchNorm and ReLU6.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the depthwise convolution.
        slim: The form of "mobilenet-v1-slim", see `build`.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, slim: bool) -> None:
        from torch import nn

        super().__init__()
        self.pad, padding = _padding(stride, slim)
        self.conv_dw = nn.Conv2d(inputs, inputs, 3, stride, padding, groups=inputs, bias=slim)
        self.bn1 = nn.Identity() if slim else nn.BatchNorm2d(inputs)
        self.act1 = nn.ReLU6(inplace=True)
        self.conv_pw = nn.Conv2d(inputs, outputs, 1, bias=slim)
        self.bn2 = nn.Identity() if slim else nn.BatchNorm2d(outputs)
        self.act2 = nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        x = self.act1(self.bn1(self.conv_dw(self.pad(x))))
        return self.act2(self.bn2(self.conv_pw(x)))  # type: ignore[no-any-return]


def _padding(stride: int, slim: bool) -> tuple[nn.Module, int]:
    """Returns the padding module before a 3x3 convolution, and the padding of the convolution.

    TensorFlow's "SAME" pads even sizes at the end only.
    """
    from torch import nn

    return (nn.ZeroPad2d((0, 1, 0, 1)), 0) if slim and stride == 2 else (nn.Identity(), 1)


class MobileNetV1(LazyModule):
    """Stem, 13 depthwise separable blocks, global average pool, linear head."""

    def __init__(self, classes: int, width: float = 1.0, slim: bool = False) -> None:
        from torch import nn

        super().__init__()
        inputs = channels(32 * width)
        self.pad, padding = _padding(2, slim)
        self.conv_stem = nn.Conv2d(3, inputs, 3, 2, padding, bias=slim)
        self.bn1 = nn.Identity() if slim else nn.BatchNorm2d(inputs)
        self.act1 = nn.ReLU6(inplace=True)
        stages = []
        for count, blocks, first in V1:
            outputs = channels(count * width)
            stage = []
            for index in range(blocks):
                stage.append(DepthwiseSeparable(inputs, outputs, stride=first if index == 0 else 1, slim=slim))
                inputs = outputs
            stages.append(nn.Sequential(*stage))
        self.blocks = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)
        _initialize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, h, w], to logits, float32 [n, classes]."""
        import torch

        x = self.blocks(self.act1(self.bn1(self.conv_stem(self.pad(x)))))
        return self.classifier(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class InvertedResidual(LazyModule):
    """Inverted residual block: 1x1 expansion, depthwise 3x3, linear 1x1 projection.

    The input is added to the output if their shapes are equal.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the depthwise convolution.
        expansion: Ratio of the inner channels to the input channels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        from torch import nn

        super().__init__()
        inner = inputs * expansion
        widen = [_normalized(inputs, inner, 1)] if expansion > 1 else []
        last = nn.BatchNorm2d(outputs)
        self.conv = nn.Sequential(
            *widen, _normalized(inner, inner, 3, stride, groups=inner), nn.Conv2d(inner, outputs, 1, bias=False), last
        )
        self.residual = stride == 1 and inputs == outputs
        if self.residual:
            nn.init.zeros_(last.weight)  # the block starts as the identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        y: torch.Tensor = self.conv(x)
        return x + y if self.residual else y


def _normalized(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    from torch import nn

    convolution = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class MobileNetV2(LazyModule):
    """Stem, 17 inverted residual blocks, 1x1 to 1280 channels, global average pool, dropout, linear head."""

    def __init__(self, classes: int, width: float = 1.0, dropout: float = 0.2) -> None:
        from torch import nn

        super().__init__()
        inputs = channels(32 * width)
        features: list[nn.Module] = [_normalized(3, inputs, 3, 2)]
        for expansion, count, blocks, first in V2:
            outputs = channels(count * width)
            for index in range(blocks):
                features.append(InvertedResidual(inputs, outputs, first if index == 0 else 1, expansion))
                inputs = outputs
        last = channels(1280 * max(1.0, width))
        self.features = nn.Sequential(*features, _normalized(inputs, last, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))
        _initialize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, h, w], to logits, float32 [n, classes]."""
        import torch

        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))  # type: ignore[no-any-return]


def _initialize(model: nn.Module) -> None:
    """Initializes convolutions as He et al. 2015, with the fan-out of one group, and the head near zero."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            outputs = module.out_channels // module.groups * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / outputs))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


def read_tflite(file: Path) -> State:
    """Reads the weights of TF-Slim's MobileNet V1 from a float .tflite file, with the names of "mobilenet-v1-slim".

    Kernels in the file are [outputs, height, width, inputs], depthwise kernels [1, height, width, channels]; the head
    is a 1x1 convolution.

    Args:
        file: Path of the .tflite file.

    Returns:
        State dict.

    Raises:
        RequestError: A weight is not float32.
    """
    import torch

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tf2onnx imports tensorflow, which logs; so does oneDNN
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    from tf2onnx.tflite.Model import Model  # schema of the format

    model = Model.GetRootAsModel(file.read_bytes(), 0)
    main = model.Subgraphs(0)
    state = {}
    for tensor in (main.Tensors(index) for index in range(main.TensorsLength())):
        if (match := SLIM_LAYER.fullmatch(tensor.Name().decode())) is None:
            continue
        if tensor.Type() != 0:
            raise RequestError(f"{file} holds {match[0]} in another type than float32; expected the float model")
        array = model.Buffers(tensor.Buffer()).DataAsNumpy().view(np.float32).reshape(tensor.ShapeAsNumpy())
        path = _torch_path(match[1])
        if array.ndim == 4:
            array = array.transpose((3, 0, 1, 2) if match[2] == "depthwise_weights" else (0, 3, 1, 2))
            array = array.reshape(array.shape[:2]) if path == "classifier" else array
        state[f"{path}.{'bias' if match[2].endswith('bias') else 'weight'}"] = torch.from_numpy(array.copy())
    return state


def _torch_path(layer: str) -> str:
    """Returns the path in `MobileNetV1` of a layer of TF-Slim, e.g. "Conv2d_3_depthwise"."""
    blocks = [f"blocks.{stage}.{index}" for stage, (_, count, _) in enumerate(V1) for index in range(count)]
    if match := re.fullmatch(r"Conv2d_(\d+)_(depth|point)wise", layer):
        return f"{blocks[int(match[1]) - 1]}.conv_{'dw' if match[2] == 'depth' else 'pw'}"
    return {"Conv2d_0": "conv_stem", "Logits/Conv2d_1c_1x1": "classifier"}.get(layer, layer)


# Small networks underfit in few epochs: small batches, and no epoch at half size, where the last feature maps of small
# images have one pixel.
CONFIG = TrainConfig(epochs=30, progressive=(0.75,), progressive_epochs=0.33, batch_size=128)
MOBILENET_V1 = ImageFamily(
    name="mobilenet-v1",
    title="MobileNet V1: image classification on small machines",
    build=build,
    config=replace(CONFIG, arch="mobilenet-v1"),
    formats={"tflite": read_tflite},
)
MOBILENET_V2 = ImageFamily(
    name="mobilenet-v2",
    title="MobileNet V2: image classification on small machines, with inverted residuals",
    build=build,
    config=replace(CONFIG, arch="mobilenet-v2"),
    formats={"tflite": read_tflite},
)
