"""YOLOv8n and YOLO11n (Ultralytics) in torch with random weights, in the form in which they are exported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scripts.peers.scan.vision_networks import PSA, SPPF, convolution

BINS, CLASSES = 16, 80
WIDTHS = 64, 128, 256  # channels of the three levels


def layer(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
    """Returns a convolution with batch normalization and SiLU."""
    return convolution(inputs, outputs, size, stride, groups, act="SiLU")


class Bottleneck(nn.Module):
    """Two convolutions, with a residual connection or without."""

    def __init__(self, channels: int, hidden: int, residual: bool = True) -> None:
        super().__init__()
        self.body, self.residual = nn.Sequential(layer(channels, hidden, 3), layer(hidden, channels, 3)), residual

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        return x + self.body(x) if self.residual else self.body(x)


class C3k(nn.Module):
    """Two bottlenecks beside a convolution, each on half of the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.beside, self.last = layer(channels, half), layer(channels, half), layer(channels, channels)
        self.blocks = nn.Sequential(Bottleneck(half, half), Bottleneck(half, half))

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        return self.last(torch.cat((self.blocks(self.first(x)), self.beside(x)), 1))


class C2f(nn.Module):
    """Blocks in sequence, whose results are all concatenated; C3k2 of YOLO11 is one with other blocks."""

    def __init__(self, inputs: int, outputs: int, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.blocks = layer(inputs, 2 * width), nn.ModuleList(blocks)
        self.last = layer((2 + len(blocks)) * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(torch.cat(parts, 1))


def c2f(inputs: int, outputs: int, count: int = 1, residual: bool = False) -> nn.Module:
    """Returns a C2f of YOLOv8."""
    half = outputs // 2
    return C2f(inputs, outputs, [Bottleneck(half, half, residual) for _ in range(count)], half)


def c3k2(inputs: int, outputs: int, deep: bool = False, share: float = 0.5) -> nn.Module:
    """Returns a C3k2 of YOLO11."""
    width = int(outputs * share)
    return C2f(inputs, outputs, [C3k(width) if deep else Bottleneck(width, width // 2)], width)


class Yolo(nn.Module):
    """A detector of three levels, with box sides as expectations over bins (DFL) and decoded boxes.

    Args:
        stages: The backbone's parts, which end with the levels of stride 8, 16 and 32.
        necks: Parts behind the concatenations: of stride 16, 8, 16 and 32.
        scores: Creates the head of the classes for a number of channels.
    """

    def __init__(
        self, stages: list[nn.Module], necks: list[nn.Module], scores: Callable[[int], list[nn.Module]]
    ) -> None:
        super().__init__()
        self.stages, self.necks = nn.ModuleList(stages), nn.ModuleList(necks)
        self.down = nn.ModuleList(layer(width, width, 3, 2) for width in WIDTHS[:2])
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.boxes = nn.ModuleList(
            nn.Sequential(layer(width, 64, 3), layer(64, 64, 3), nn.Conv2d(64, 4 * BINS, 1)) for width in WIDTHS
        )
        self.scores = nn.ModuleList(nn.Sequential(*scores(width), nn.Conv2d(CLASSES, CLASSES, 1)) for width in WIDTHS)
        self.expectation = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.expectation.weight.data[:] = torch.arange(BINS, dtype=torch.float32).view(1, BINS, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns boxes (centre, size) and scores [n, 4 + classes, anchors] of images [n, 3, height, width]."""
        fine = self.stages[0](images)
        middle = self.stages[1](fine)
        coarse = self.stages[2](middle)
        between = self.necks[0](torch.cat((self.up(coarse), middle), 1))
        levels = [self.necks[1](torch.cat((self.up(between), fine), 1))]
        levels.append(self.necks[2](torch.cat((self.down[0](levels[0]), between), 1)))
        levels.append(self.necks[3](torch.cat((self.down[1](levels[1]), coarse), 1)))
        heads = zip(self.boxes, self.scores, levels, strict=True)
        joined = torch.cat([torch.cat((box(x), score(x)), 1).flatten(2) for box, score, x in heads], 2)
        sides, scores = joined.split((4 * BINS, CLASSES), 1)
        n, _, count = sides.shape
        sides = self.expectation(sides.view(n, 4, BINS, count).transpose(2, 1).softmax(1)).view(n, 4, count)
        near, far = sides.chunk(2, 1)
        anchors, strides = self._anchors(images.shape[2], [level.shape[2:] for level in levels])
        first, last = anchors - near, anchors + far
        return torch.cat((torch.cat(((first + last) / 2, last - first), 1) * strides, scores.sigmoid()), 1)

    def _anchors(self, side: int, sizes: list[torch.Size]) -> tuple[Tensor, Tensor]:
        """Centres [1, 2, anchors] in units of the stride, and strides [1, anchors]."""
        grids, strides = [], []
        for height, width in sizes:
            rows, columns = (torch.arange(count, dtype=torch.float32) + 0.5 for count in (height, width))
            grids.append(torch.stack(torch.meshgrid(columns, rows, indexing="xy")).flatten(1))
            strides.append(torch.full((1, height * width), float(side // height)))
        return torch.cat(grids, 1)[None], torch.cat(strides, 1)


def yolo_v8n() -> nn.Module:
    """Returns YOLOv8n."""
    stages = [
        nn.Sequential(
            layer(3, 16, 3, 2), layer(16, 32, 3, 2), c2f(32, 32, 1, True), layer(32, 64, 3, 2), c2f(64, 64, 2, True)
        ),
        nn.Sequential(layer(64, 128, 3, 2), c2f(128, 128, 2, True)),
        nn.Sequential(layer(128, 256, 3, 2), c2f(256, 256, 1, True), SPPF(256)),
    ]
    necks = [c2f(384, 128), c2f(192, 64), c2f(192, 128), c2f(384, 256)]
    return Yolo(stages, necks, lambda width: [layer(width, CLASSES, 3), layer(CLASSES, CLASSES, 3)])


def yolo_11n() -> nn.Module:
    """Returns YOLO11n, with attention over the coarsest level and depthwise convolutions in its heads."""
    stages = [
        nn.Sequential(
            *(layer(3, 16, 3, 2), layer(16, 32, 3, 2), c3k2(32, 64, share=0.25)),
            *(layer(64, 64, 3, 2), c3k2(64, 128, share=0.25)),
        ),
        nn.Sequential(layer(128, 128, 3, 2), c3k2(128, 128, deep=True)),
        nn.Sequential(layer(128, 256, 3, 2), c3k2(256, 256, deep=True), SPPF(256), PSA(256)),
    ]
    necks = [c3k2(384, 128), c3k2(256, 64), c3k2(192, 128), c3k2(384, 256, deep=True)]

    def scores(width: int) -> list[nn.Module]:
        depthwise = layer(width, width, 3, groups=width), layer(CLASSES, CLASSES, 3, groups=CLASSES)
        return [depthwise[0], layer(width, CLASSES), depthwise[1], layer(CLASSES, CLASSES)]

    return Yolo(stages, necks, scores)
