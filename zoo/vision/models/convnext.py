"""ConvNeXt (Liu et al. 2022) in torch; torch.fx can trace the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.training.lazy_module import LazyModule
from zoo.vision.family import PublishedImageFamily
from zoo.vision.models.configs import config_of
from zoo.vision.models.vision_transformer import EPSILON, FeedForward

if TYPE_CHECKING:
    import torch
    from torch import nn

GAMMA = 1e-6  # initial scale of a block's branch


@dataclass(frozen=True)
class ConvNextConfig:
    """Architecture of a ConvNeXt.

    Attributes:
        depths: Blocks of the four stages.
        widths: Channels of the four stages.
    """

    depths: tuple[int, int, int, int]
    widths: tuple[int, int, int, int]


CONFIGS = {"convnext-tiny": ConvNextConfig((3, 3, 9, 3), (96, 192, 384, 768))}


def build(arch: str, classes: int, width: float = 1.0) -> ConvNext:
    """Builds an untrained network, from normalized float32 [n, 3, h, w] to logits float32 [n, classes].

    State-dict names and outputs are those of timm's convnext_tiny.

    Args:
        arch: "convnext-tiny".
        classes: Number of classes.
        width: Must be 1.

    Raises:
        RequestError: See `config_of`.
    """
    return ConvNext(config_of(arch, width, CONFIGS, "ConvNeXt"), classes)


def _norm(channels: int) -> nn.Module:
    """LayerNorm over the channels of each pixel, with the names of `torch.nn.LayerNorm`."""
    from torch import nn

    class PixelNorm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Maps [n, channels, h, w] to the same shape."""
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return PixelNorm(channels, EPSILON)


class Block(LazyModule):
    """ConvNeXt block: a depthwise 7x7 convolution, LayerNorm and a feed-forward network, scaled, on the shortcut.

    Args:
        channels: Channels.
    """

    def __init__(self, channels: int) -> None:
        import torch
        from torch import nn

        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, EPSILON)
        self.mlp = FeedForward(channels)
        self.gamma = nn.Parameter(torch.full((channels,), GAMMA))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, channels, h, w] to the same shape."""
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        return (y * self.gamma).permute(0, 3, 1, 2) + x  # type: ignore[no-any-return]


class Stage(LazyModule):
    """Blocks after a downsampling by 2, which the first stage lacks.

    Args:
        inputs: Input channels.
        channels: Channels of the blocks.
        depth: Number of blocks.
    """

    def __init__(self, inputs: int, channels: int, depth: int) -> None:
        from torch import nn

        super().__init__()
        downsample = nn.Sequential(_norm(inputs), nn.Conv2d(inputs, channels, 2, 2))
        self.downsample: nn.Module = nn.Identity() if inputs == channels else downsample
        self.blocks: nn.Module = nn.Sequential(*(Block(channels) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, inputs, h, w] to [n, channels, h, w], or half of these sides."""
        return self.blocks(self.downsample(x))  # type: ignore[no-any-return]


class Head(LazyModule):
    """Mean of all pixels, a norm, and a linear layer.

    Args:
        channels: Channels.
        classes: Number of classes.
    """

    def __init__(self, channels: int, classes: int) -> None:
        from torch import nn

        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.norm = nn.LayerNorm(channels, EPSILON)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, channels, h, w] to logits [n, classes]."""
        return self.fc(self.norm(self.pool(x).flatten(1)))  # type: ignore[no-any-return]


class ConvNext(LazyModule):
    """Patches of 4 x 4 pixels, four stages, and a head.

    Args:
        config: Architecture.
        classes: Number of classes.
    """

    def __init__(self, config: ConvNextConfig, classes: int) -> None:
        from torch import nn

        super().__init__()
        first, last = config.widths[0], config.widths[-1]
        self.stem: nn.Module = nn.Sequential(nn.Conv2d(3, first, 4, 4), _norm(first))
        sizes = zip((first, *config.widths), config.widths, config.depths, strict=False)
        self.stages: nn.Module = nn.Sequential(*(Stage(inputs, width, depth) for inputs, width, depth in sizes))
        self.head = Head(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, h, w], to logits, float32 [n, classes]."""
        return self.head(self.stages(self.stem(x)))  # type: ignore[no-any-return]


CONVNEXT = PublishedImageFamily(name="convnext", title="ConvNeXt: image classification", build=build)
