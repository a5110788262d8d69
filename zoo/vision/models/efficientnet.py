"""Networks of inverted residual blocks: EfficientNet-Lite (Tan and Le 2019) and MobileNetV3 (Howard et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.training.lazy_module import LazyModule
from zoo.vision.family import PublishedImageFamily
from zoo.vision.models.configs import config_of
from zoo.vision.models.mobilenet import channels

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Blocks:
    """Like blocks that follow each other.

    Attributes:
        expansion: Ratio of the hidden channels to the input channels; 0 for a depthwise separable block.
        outputs: Output channels.
        count: Number of blocks.
        kernel: Side of the depthwise kernel.
        stride: Stride of the first block.
        squeeze: Whether there is squeeze-and-excitation.
        relu: Whether the activation is ReLU, whatever the network's is.
    """

    expansion: float
    outputs: int
    count: int = 1
    kernel: int = 3
    stride: int = 1
    squeeze: bool = False
    relu: bool = False


@dataclass(frozen=True)
class EfficientNetConfig:
    """Architecture.

    Attributes:
        stem: Channels of the stem.
        stages: Groups of blocks; those of one stage share a number in the names of the weights.
        activation: Name of the activation in `torch.nn`.
        same: Whether strided convolutions pad as TensorFlow does, at the end first.
        epsilon: Epsilon of BatchNorm.
        last: Channels of a last 1x1 convolution within the blocks, 0 for none.
        pooled_head: Whether the 1x1 convolution of the head follows the mean of all pixels.
    """

    stem: int
    stages: tuple[tuple[Blocks, ...], ...]
    activation: str
    same: bool = False
    epsilon: float = 1e-5
    last: int = 0
    pooled_head: bool = False


HEAD = 1280  # channels
CONFIGS = {
    "efficientnet-lite0": EfficientNetConfig(
        32,
        (
            (Blocks(0, 16),),
            (Blocks(6, 24, 2, 3, 2),),
            (Blocks(6, 40, 2, 5, 2),),
            (Blocks(6, 80, 3, 3, 2),),
            (Blocks(6, 112, 3, 5),),
            (Blocks(6, 192, 4, 5, 2),),
            (Blocks(6, 320),),
        ),
        "ReLU6",
        same=True,
        epsilon=1e-3,
    ),
    "mobilenet-v3-large": EfficientNetConfig(
        16,
        (
            (Blocks(0, 16, relu=True),),
            (Blocks(4, 24, 1, 3, 2, relu=True), Blocks(3, 24, relu=True)),
            (Blocks(3, 40, 3, 5, 2, squeeze=True, relu=True),),
            (Blocks(6, 80, 1, 3, 2), Blocks(2.5, 80), Blocks(2.3, 80, 2)),
            (Blocks(6, 112, 2, squeeze=True),),
            (Blocks(6, 160, 3, 5, 2, squeeze=True),),
        ),
        "Hardswish",
        last=960,
        pooled_head=True,
    ),
}


def build(arch: str, classes: int, width: float = 1.0) -> EfficientNet:
    """Builds an untrained network, from normalized float32 [n, 3, h, w] to logits float32 [n, classes].

    State-dict names and outputs are those of timm's tf_efficientnet_lite0 (for sides that are multiples of 32) and
    mobilenetv3_large_100.

    Args:
        arch: "efficientnet-lite0" or "mobilenet-v3-large".
        classes: Number of classes.
        width: Must be 1.

    Raises:
        RequestError: See `config_of`.
    """
    return EfficientNet(config_of(arch, width, CONFIGS, "network of inverted residuals"), classes)


def _padded(config: EfficientNetConfig, kernel: int, stride: int) -> tuple[nn.Module, int]:
    """The padding module before a convolution, and the padding of the convolution."""
    from torch import nn

    if not config.same or stride == 1:
        return nn.Identity(), kernel // 2
    before = (kernel - stride) // 2  # of an even side
    return nn.ZeroPad2d((before, kernel - stride - before) * 2), 0


class SqueezeExcitation(LazyModule):
    """Squeeze-and-excitation: scales channels by a function of their means (Hu et al. 2018).

    Args:
        width: Channels.
    """

    def __init__(self, width: int) -> None:
        from torch import nn

        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv_reduce = nn.Conv2d(width, channels(width / 4), 1)
        self.act1 = nn.ReLU()
        self.conv_expand = nn.Conv2d(channels(width / 4), width, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, channels, h, w] to the same shape."""
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(self.pool(x)))))  # type: ignore[no-any-return]


class InvertedResidual(LazyModule):
    """1x1 convolution to more channels, depthwise convolution, 1x1 convolution to fewer; or without the first one.

    Args:
        config: Architecture.
        blocks: Form of the block.
        inputs: Input channels.
        stride: Stride of the depthwise convolution.
    """

    def __init__(self, config: EfficientNetConfig, blocks: Blocks, inputs: int, stride: int) -> None:
        from torch import nn

        super().__init__()
        hidden = channels(inputs * blocks.expansion) if blocks.expansion else inputs
        activation = nn.ReLU if blocks.relu else getattr(nn, config.activation)
        norm = [nn.BatchNorm2d(count, config.epsilon) for count in (hidden, hidden, blocks.outputs)]
        self.pad, padding = _padded(config, blocks.kernel, stride)
        depthwise = nn.Conv2d(hidden, hidden, blocks.kernel, stride, padding, groups=hidden, bias=False)
        squeeze = SqueezeExcitation(hidden) if blocks.squeeze else nn.Identity()
        last = nn.Conv2d(hidden, blocks.outputs, 1, bias=False)
        self.expands, self.adds = bool(blocks.expansion), stride == 1 and inputs == blocks.outputs
        if self.expands:
            self.conv_pw = nn.Conv2d(inputs, hidden, 1, bias=False)
            self.bn1, self.act1 = norm[0], activation()
            self.conv_dw, self.bn2, self.act2 = depthwise, norm[1], activation()
            self.se = squeeze
            self.conv_pwl, self.bn3 = last, norm[2]
        else:
            self.conv_dw, self.bn1, self.act1 = depthwise, norm[1], activation()
            self.se = squeeze
            self.conv_pw, self.bn2 = last, norm[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        if self.expands:
            y = self.act1(self.bn1(self.conv_pw(x)))
            y = self.se(self.act2(self.bn2(self.conv_dw(self.pad(y)))))
            y = self.bn3(self.conv_pwl(y))
        else:
            y = self.bn2(self.conv_pw(self.se(self.act1(self.bn1(self.conv_dw(self.pad(x)))))))
        return y + x if self.adds else y  # type: ignore[no-any-return]


class LastConvolution(LazyModule):
    """1x1 convolution with BatchNorm and the network's activation.

    Args:
        config: Architecture.
        inputs: Input channels.
    """

    def __init__(self, config: EfficientNetConfig, inputs: int) -> None:
        from torch import nn

        super().__init__()
        self.conv = nn.Conv2d(inputs, config.last, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(config.last, config.epsilon)
        self.act1 = getattr(nn, config.activation)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, outputs, h, w]."""
        return self.act1(self.bn1(self.conv(x)))  # type: ignore[no-any-return]


class EfficientNet(LazyModule):
    """Stem, stages of inverted residual blocks, head.

    Args:
        config: Architecture.
        classes: Number of classes.
    """

    def __init__(self, config: EfficientNetConfig, classes: int) -> None:
        from torch import nn

        super().__init__()
        self.pad, padding = _padded(config, 3, 2)
        self.conv_stem = nn.Conv2d(3, config.stem, 3, 2, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(config.stem, config.epsilon)
        self.act1 = getattr(nn, config.activation)()
        inputs, stages = config.stem, []
        for stage in config.stages:
            blocks: list[nn.Module] = []
            for form in stage:
                for i in range(form.count):
                    blocks.append(InvertedResidual(config, form, inputs, 1 if i else form.stride))
                    inputs = form.outputs
            stages.append(nn.Sequential(*blocks))
        if config.last:
            stages.append(nn.Sequential(LastConvolution(config, inputs)))
            inputs = config.last
        self.blocks: nn.Module = nn.Sequential(*stages)
        self.conv_head = nn.Conv2d(inputs, HEAD, 1, bias=config.pooled_head)
        self.bn2: nn.Module = nn.Identity() if config.pooled_head else nn.BatchNorm2d(HEAD, config.epsilon)
        self.act2 = getattr(nn, config.activation)()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(HEAD, classes)
        self.pooled_head = config.pooled_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, h, w], to logits, float32 [n, classes]."""
        x = self.blocks(self.act1(self.bn1(self.conv_stem(self.pad(x)))))
        if self.pooled_head:
            x = self.act2(self.conv_head(self.global_pool(x)))
        else:
            x = self.global_pool(self.act2(self.bn2(self.conv_head(x))))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


EFFICIENTNET_LITE = PublishedImageFamily(
    name="efficientnet-lite", title="EfficientNet-Lite: image classification", build=build
)
MOBILENET_V3 = PublishedImageFamily(name="mobilenet-v3", title="MobileNetV3: image classification", build=build)
