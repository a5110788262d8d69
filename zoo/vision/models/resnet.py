"""Residual networks of bottleneck blocks (He et al. 2016) in torch; torch.fx can trace the modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.training.lazy_module import LazyModule
from zoo.vision.family import ImageFamily
from zoo.vision.models.configs import config_of
from zoo.vision.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zoo.vision.export.freeze import State

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # ratio of the output channels of a block to those of its 3x3 convolution

# Keras numbers stages from 2 and blocks from 1; layers of the shortcut are 0.
KERAS_BLOCK = re.compile(r"conv(\d)_block(\d+)_(\d)_(conv|bn)")
KERAS_VARIABLES = ("weight", "bias", "running_mean", "running_var")  # of a convolution, or of a batch norm


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture of a residual network. `deep_stem` and `average_down` are from "Bag of Tricks" (He et al. 2019).

    Attributes:
        blocks: Blocks of the four stages.
        deep_stem: Whether the stem is three 3x3 convolutions instead of one 7x7.
        average_down: Whether the shortcut has an average pool before its 1x1 convolution instead of a stride.
        early_stride: Whether the first 1x1 convolution of a stage has the stride, not the 3x3.
        bias: Whether convolutions have a bias.
        epsilon: Epsilon of BatchNorm.
    """

    blocks: tuple[int, int, int, int]
    deep_stem: bool = False
    average_down: bool = False
    early_stride: bool = False
    bias: bool = False
    epsilon: float = 1e-5


CONFIGS = {
    "resnet50": ResNetConfig((3, 4, 6, 3)),  # v1.5: torchvision's, with its names
    "resnet50-v1": ResNetConfig((3, 4, 6, 3), early_stride=True, bias=True, epsilon=1.001e-5),  # Keras' ResNet50
    "resnet26d": ResNetConfig((2, 2, 2, 2), deep_stem=True, average_down=True),  # timm's, with its names
}


def build(arch: str, classes: int, width: float = 1.0) -> ResNet:
    """Builds an untrained network, from normalized float32 [n, 3, h, w] to logits float32 [n, classes].

    State-dict names and outputs are those of torchvision's resnet50 and timm's resnet50 and resnet26d.

    Args:
        arch: "resnet50" (v1.5), "resnet50-v1" or "resnet26d".
        classes: Number of classes.
        width: Must be 1.

    Raises:
        RequestError: See `config_of`.
    """
    return ResNet(config_of(arch, width, CONFIGS, "ResNet"), classes)


class Bottleneck(LazyModule):
    """Bottleneck block: relu(f(x) + shortcut(x)), f = 1x1, 3x3 and 1x1 convolution, each with BatchNorm.

    Args:
        config: Architecture.
        inputs: Input channels.
        width: Channels of the 3x3 convolution; the block has EXPANSION * `width` output channels.
        stride: Stride of the block.
    """

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int) -> None:
        from torch import nn

        super().__init__()
        first, second = (stride, 1) if config.early_stride else (1, stride)
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=config.bias)
        self.bn1 = nn.BatchNorm2d(width, config.epsilon)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, second, padding=1, bias=config.bias)
        self.bn2 = nn.BatchNorm2d(width, config.epsilon)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=config.bias)
        self.bn3 = nn.BatchNorm2d(outputs, config.epsilon)
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = (
            _downsample(config, inputs, outputs, stride) if stride > 1 or inputs != outputs else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.act3(y + self.downsample(x))  # type: ignore[no-any-return]


def _downsample(config: ResNetConfig, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    from torch import nn

    norm = nn.BatchNorm2d(outputs, config.epsilon)
    if not config.average_down:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=config.bias), norm)
    pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
    return nn.Sequential(pool, nn.Conv2d(inputs, outputs, 1, bias=config.bias), norm)


def _stage(config: ResNetConfig, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    from torch import nn

    first = Bottleneck(config, inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(config, EXPANSION * width, width, 1) for _ in range(blocks - 1)))


class ResNet(LazyModule):
    """Stem, four stages of bottleneck blocks, global average pool, linear head."""

    def __init__(self, config: ResNetConfig, classes: int) -> None:
        from torch import nn

        super().__init__()
        self.conv1: nn.Module
        if config.deep_stem:
            self.conv1 = nn.Sequential(
                *(
                    nn.Conv2d(3, 32, 3, 2, padding=1, bias=config.bias),
                    nn.BatchNorm2d(32, config.epsilon),
                    nn.ReLU(inplace=True),
                ),
                *(
                    nn.Conv2d(32, 32, 3, padding=1, bias=config.bias),
                    nn.BatchNorm2d(32, config.epsilon),
                    nn.ReLU(inplace=True),
                ),
                nn.Conv2d(32, 64, 3, padding=1, bias=config.bias),
            )
        else:
            self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=config.bias)
        self.bn1 = nn.BatchNorm2d(64, config.epsilon)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        outputs = [EXPANSION * width for width in WIDTHS]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(config, inputs, width, count, stride)
            for inputs, width, count, stride in zip((64, *outputs), WIDTHS, config.blocks, (1, 2, 2, 2), strict=False)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs[-1], classes)
        self._initialize()

    def _initialize(self) -> None:
        """Initializes convolutions as He et al. 2015, blocks as their shortcut (Goyal et al. 2017), the head near 0."""
        from torch import nn

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, h, w], to logits, float32 [n, classes]."""
        import torch

        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def read_keras(file: Path) -> State:
    """Reads the weights of keras.applications.ResNet50 from a .weights.h5 file of Keras 3, as "resnet50-v1".

    Kernels in the file are [height, width, inputs, outputs].

    Args:
        file: Path of the .weights.h5 file.

    Returns:
        State dict.
    """
    import h5py
    import torch

    state = {}
    with h5py.File(file) as archive:
        for layer in archive["layers"].values():
            variables = layer["vars"]
            name = _torch_path(str(variables.attrs["name"]))
            for index, key in enumerate(KERAS_VARIABLES[: len(variables)]):
                array = variables[str(index)][()]
                state[f"{name}.{key}"] = torch.from_numpy(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)
    return state


def _torch_path(layer: str) -> str:
    """Returns the path in `ResNet` of a layer of Keras; the layer's own name if it has no weights."""
    if match := KERAS_BLOCK.fullmatch(layer):
        stage, block, number, kind = match.groups()
        inner = f"downsample.{('conv', 'bn').index(kind)}" if number == "0" else f"{kind}{number}"
        return f"layer{int(stage) - 1}.{int(block) - 1}.{inner}"
    return {"conv1_conv": "conv1", "conv1_bn": "bn1", "predictions": "fc"}.get(layer, layer)


RESNET50 = ImageFamily(
    name="resnet50",
    title="ResNet-50: image classification",
    build=build,
    config=TrainConfig(arch="resnet50"),
    formats={"keras": read_keras},
)
RESNET26D = ImageFamily(
    name="resnet26d",
    title="ResNet-26d: image classification, half the work of ResNet-50",
    build=build,
    config=TrainConfig(arch="resnet26d"),
    formats={"keras": read_keras},
)
