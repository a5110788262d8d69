"""Residual networks of bottleneck blocks (He et al. 2016), in torch: plain `nn.Module`s that torch.fx can trace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.errors import RequestError
from zoo.training.lazy_module import LazyModule
from zoo.vision.family import ImageFamily
from zoo.vision.training.config import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zoo.vision.export.freeze import State

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # a block's output has so many times the channels of its 3x3

# Keras numbers stages from 2, blocks from 1, and the layers of the shortcut 0.
KERAS_BLOCK = re.compile(r"conv(\d)_block(\d+)_(\d)_(conv|bn)")
KERAS_VARIABLES = ("weight", "bias", "running_mean", "running_var")  # of a convolution, or of a batch norm


@dataclass(frozen=True)
class Form:
    """What distinguishes the networks of this family.

    blocks: of each of the four stages. deep_stem: three 3x3 instead of one 7x7. average_down: the shortcut shrinks by
    an average pool before its 1x1 (both He et al. 2019, "Bag of Tricks"). early_stride: a stage shrinks in its first
    1x1, not in the 3x3. bias: of all convolutions. epsilon: of all batch norms.
    """

    blocks: tuple[int, int, int, int]
    deep_stem: bool = False
    average_down: bool = False
    early_stride: bool = False
    bias: bool = False
    epsilon: float = 1e-5


FORMS = {
    "resnet50": Form((3, 4, 6, 3)),  # v1.5: torchvision's, with its names
    "resnet50-v1": Form((3, 4, 6, 3), early_stride=True, bias=True, epsilon=1.001e-5),  # Keras' ResNet50
    "resnet26d": Form((2, 2, 2, 2), deep_stem=True, average_down=True),  # timm's, with its names
}


def build(arch: str, classes: int, width: float = 1.0) -> ResNet:
    """The untrained network: float32 [N,3,H,W], normalized as its data wants, to logits [N,classes].

    State-dict names and outputs are those of torchvision's resnet50 and timm's resnet50 and resnet26d.

    Args:
        arch: "resnet50" (v1.5), "resnet50-v1" or "resnet26d".
        classes: Number of classes.
        width: 1; these networks come in one width.

    Raises:
        RequestError: `arch` is unknown, or `width` is not 1.
    """
    if arch not in FORMS:
        raise RequestError(f"no ResNet {arch!r}; known: {', '.join(FORMS)}")
    if width != 1:
        raise RequestError(f"found the width {width:g} for {arch}, expected 1; leave it out")
    return ResNet(FORMS[arch], classes)


class Bottleneck(LazyModule):
    """relu(f(x) + shortcut(x)), f = 1x1 to `width`, 3x3, 1x1 to EXPANSION * `width`, each normalized."""

    def __init__(self, form: Form, inputs: int, width: int, stride: int) -> None:
        from torch import nn

        super().__init__()
        first, second = (stride, 1) if form.early_stride else (1, stride)
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=form.bias)
        self.bn1 = nn.BatchNorm2d(width, form.epsilon)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, second, padding=1, bias=form.bias)
        self.bn2 = nn.BatchNorm2d(width, form.epsilon)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=form.bias)
        self.bn3 = nn.BatchNorm2d(outputs, form.epsilon)
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = (
            _downsample(form, inputs, outputs, stride) if stride > 1 or inputs != outputs else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, h, w] -> [n, outputs, h / stride, w / stride]."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.act3(y + self.downsample(x))  # type: ignore[no-any-return]


def _downsample(form: Form, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    from torch import nn

    norm = nn.BatchNorm2d(outputs, form.epsilon)
    if not form.average_down:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=form.bias), norm)
    pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
    return nn.Sequential(pool, nn.Conv2d(inputs, outputs, 1, bias=form.bias), norm)


def _stage(form: Form, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    from torch import nn

    first = Bottleneck(form, inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(form, EXPANSION * width, width, 1) for _ in range(blocks - 1)))


class ResNet(LazyModule):
    """Stem, four stages of bottleneck blocks, global average pool, linear head."""

    def __init__(self, form: Form, classes: int) -> None:
        from torch import nn

        super().__init__()
        self.conv1: nn.Module
        if form.deep_stem:
            self.conv1 = nn.Sequential(
                *(
                    nn.Conv2d(3, 32, 3, 2, padding=1, bias=form.bias),
                    nn.BatchNorm2d(32, form.epsilon),
                    nn.ReLU(inplace=True),
                ),
                *(
                    nn.Conv2d(32, 32, 3, padding=1, bias=form.bias),
                    nn.BatchNorm2d(32, form.epsilon),
                    nn.ReLU(inplace=True),
                ),
                nn.Conv2d(32, 64, 3, padding=1, bias=form.bias),
            )
        else:
            self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=form.bias)
        self.bn1 = nn.BatchNorm2d(64, form.epsilon)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        outputs = [EXPANSION * width for width in WIDTHS]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(form, inputs, width, count, stride)
            for inputs, width, count, stride in zip((64, *outputs), WIDTHS, form.blocks, (1, 2, 2, 2), strict=False)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs[-1], classes)
        self._initialize()

    def _initialize(self) -> None:
        """He et al. 2015; every block starts as its shortcut (Goyal et al. 2017), the head near zero."""
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
        """Images float32 [n, 3, height, width], normalized -> logits float32 [n, classes]."""
        import torch

        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def read_keras(file: Path) -> State:
    """The weights of keras.applications.ResNet50 in a .weights.h5 file as Keras 3 writes it, under the names of
    "resnet50-v1".

    Keras keeps kernels as [height, width, inputs, outputs], torch as [outputs, inputs, height, width].
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
    """The path in `ResNet` of a layer of Keras; its own name if it has no weights."""
    if match := KERAS_BLOCK.fullmatch(layer):
        stage, block, number, kind = match.groups()
        inner = f"downsample.{('conv', 'bn').index(kind)}" if number == "0" else f"{kind}{number}"
        return f"layer{int(stage) - 1}.{int(block) - 1}.{inner}"
    return {"conv1_conv": "conv1", "conv1_bn": "bn1", "predictions": "fc"}.get(layer, layer)


RESNET50 = ImageFamily(
    name="resnet50",
    title="ResNet-50: image classification",
    build=build,
    config=Settings(arch="resnet50"),
    formats={"keras": read_keras},
)
RESNET26D = ImageFamily(
    name="resnet26d",
    title="ResNet-26d: image classification, half the work of ResNet-50",
    build=build,
    config=Settings(arch="resnet26d"),
    formats={"keras": read_keras},
)
