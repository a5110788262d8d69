"""Residual networks of bottleneck blocks (He et al. 2016), in torch: plain `nn.Module`s that torch.fx can trace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipelines.core.errors import RequestError

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # a block's output has so many times the channels of its 3x3


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


def build(arch: str, classes: int) -> ResNet:
    """The untrained network: float32 [N,3,H,W], normalized as its data wants, to logits [N,classes].

    arch: "resnet50" (v1.5), "resnet50-v1" or "resnet26d". State-dict names and outputs are those of torchvision's
    resnet50 and timm's resnet50 and resnet26d. Raises RequestError for an unknown `arch`.
    """
    if arch not in FORMS:
        raise RequestError(f"no ResNet {arch!r}; known: {', '.join(FORMS)}")
    return ResNet(FORMS[arch], classes)


class Bottleneck(nn.Module):
    """relu(f(x) + shortcut(x)), f = 1x1 to `width`, 3x3, 1x1 to EXPANSION * `width`, each normalized."""

    def __init__(self, form: Form, inputs: int, width: int, stride: int) -> None:
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
    norm = nn.BatchNorm2d(outputs, form.epsilon)
    if not form.average_down:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=form.bias), norm)
    pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
    return nn.Sequential(pool, nn.Conv2d(inputs, outputs, 1, bias=form.bias), norm)


def _stage(form: Form, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(form, inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(form, EXPANSION * width, width, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """Stem, four stages of bottleneck blocks, global average pool, linear head."""

    def __init__(self, form: Form, classes: int) -> None:
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
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]
