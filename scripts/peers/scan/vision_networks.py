"""Image networks in the operators of the published ones, in torch, with few blocks and random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def convolution(
    inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: str = "ReLU"
) -> nn.Module:
    """Returns convolution, batch normalization and activation; `act` names a class of torch.nn, or is empty."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), *([getattr(nn, act)()] if act else []))


class Excitation(nn.Module):
    """Squeeze-and-excitation (Hu et al. 2018)."""

    def __init__(self, channels: int, act: str, gate: str) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.act, self.gate = getattr(nn, act)(), getattr(nn, gate)()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scaled channels."""
        pooled = functional.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.excite(self.act(self.squeeze(pooled))))


class Inverted(nn.Module):
    """Inverted residual block (MobileNetV2 and V3, EfficientNet)."""

    def __init__(self, channels: int, size: int, act: str, gate: str) -> None:
        super().__init__()
        wide = 4 * channels
        excitation = [Excitation(wide, "ReLU" if act == "Hardswish" else act, gate)] if gate else []
        self.body = nn.Sequential(
            convolution(channels, wide, 1, act=act),
            convolution(wide, wide, size, groups=wide, act=act),
            *excitation,
            convolution(wide, channels, 1, act=""),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual sum."""
        return x + self.body(x)


class Classifier(nn.Module):
    """A stem, blocks, the mean of all pixels and a linear layer."""

    def __init__(self, *blocks: nn.Module, width: int, act: str = "ReLU", out: int = 0) -> None:
        super().__init__()
        self.stem = convolution(3, width, stride=2, act=act)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(out or width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        return self.head(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


def mobilenet_v3() -> nn.Module:
    """MobileNetV3 (Howard et al. 2019)."""
    blocks = [Inverted(16, 3, "Hardswish", ""), Inverted(16, 5, "Hardswish", "Hardsigmoid")]
    last = [convolution(16, 96, 1, act="Hardswish")]
    return Classifier(*blocks, *last, width=16, act="Hardswish", out=96)


def efficientnet() -> nn.Module:
    """EfficientNet (Tan and Le 2019)."""
    return Classifier(Inverted(16, 3, "SiLU", "Sigmoid"), Inverted(16, 5, "SiLU", "Sigmoid"), width=16, act="SiLU")


def mnasnet() -> nn.Module:
    """MNASNet (Tan et al. 2019), whose separable stem has no activation."""
    separable = nn.Sequential(convolution(16, 16, groups=16), convolution(16, 16, 1, act=""))
    return Classifier(separable, Inverted(16, 3, "ReLU", ""), Inverted(16, 5, "ReLU", ""), width=16)


class Shuffled(nn.Module):
    """Unit of ShuffleNetV2 (Ma et al. 2018)."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        half, inputs = channels // 2, channels // 2 if stride == 1 else channels
        self.stride = stride
        self.left = nn.Sequential(
            convolution(inputs, inputs, stride=2, groups=inputs, act=""), convolution(inputs, half, 1)
        )
        self.right = nn.Sequential(
            convolution(inputs, half, 1),
            convolution(half, half, stride=stride, groups=half, act=""),
            convolution(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns shuffled channels."""
        if self.stride == 1:
            kept, passed = x.chunk(2, dim=1)
            x = torch.cat((kept, self.right(passed)), dim=1)
        else:
            x = torch.cat((self.left(x), self.right(x)), dim=1)
        n, channels, height, width = x.size()
        x = x.view(n, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(n, channels, height, width)


def shufflenet_v2() -> nn.Module:
    """ShuffleNetV2."""
    return Classifier(Shuffled(32, 2), Shuffled(32), Shuffled(32), width=32)


class Dense(nn.Module):
    """A dense block and a transition (DenseNet, Huang et al. 2017)."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(layers):
            width = channels + index * growth
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    convolution(width, 4 * growth, 1),
                    nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                )
            )
        width = channels + layers * growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, channels, 1, bias=False), nn.AvgPool2d(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the transition of all features."""
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.transition(torch.cat(features, 1))


def densenet() -> nn.Module:
    """DenseNet."""
    return Classifier(Dense(32, 16, 3), Dense(32, 16, 3), nn.BatchNorm2d(32), nn.ReLU(), width=32)


class Ghost(nn.Module):
    """Ghost module (Han et al. 2020): half of the channels by a cheap depthwise convolution of the others."""

    def __init__(self, inputs: int, outputs: int, act: str) -> None:
        super().__init__()
        half = outputs // 2
        self.primary = convolution(inputs, half, 1, act=act)
        self.cheap = convolution(half, half, groups=half, act=act)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """Returns both halves."""
        first = self.primary(x)
        return torch.cat([first, self.cheap(first)], dim=1)[:, : self.outputs, :, :]


class GhostBottleneck(nn.Module):
    """Two ghost modules around squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.body = nn.Sequential(
            Ghost(channels, wide, "ReLU"), Excitation(wide, "ReLU", "Hardsigmoid"), Ghost(wide, channels, "")
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual sum."""
        return x + self.body(x)


def ghostnet() -> nn.Module:
    """GhostNet."""
    return Classifier(GhostBottleneck(16), GhostBottleneck(16), width=16)


class UNet(nn.Module):
    """Segmentation by transposed convolutions (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [
                nn.Sequential(convolution(3, 16), convolution(16, 16)),
                nn.Sequential(convolution(16, 32), convolution(32, 32)),
                nn.Sequential(convolution(32, 64), convolution(64, 64)),
            ]
        )
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.merge = nn.ModuleList([convolution(64, 32), convolution(32, 16)])
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits of every pixel."""
        first = self.down[0](x)
        second = self.down[1](functional.max_pool2d(first, 2))
        x = self.down[2](functional.max_pool2d(second, 2))
        x = self.merge[0](torch.cat([second, self.up[0](x)], 1))
        x = self.merge[1](torch.cat([first, self.up[1](x)], 1))
        return self.head(x)


class SuperResolution(nn.Module):
    """Residual blocks and a sub-pixel convolution (EDSR, Lim et al. 2017)."""

    def __init__(self, scale: int = 2) -> None:
        super().__init__()
        self.scale = scale
        self.head, self.tail = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3 * scale**2, 3, padding=1)
        self.body = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in "ab"]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the larger image."""
        y = self.head(x)
        for block in self.body:
            y = y + block(y)
        return functional.pixel_shuffle(self.tail(y), self.scale)


class Bottleneck(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(channels, channels, act="SiLU"), convolution(channels, channels, act="SiLU")
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual sum."""
        return x + self.body(x)


class C2f(nn.Module):
    """Ultralytics' C2f: half of the channels pass through bottlenecks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = (
            convolution(inputs, outputs, 1, act="SiLU"),
            convolution(3 * half, outputs, 1, act="SiLU"),
        )
        self.block = Bottleneck(half)

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        parts = list(self.first(x).chunk(2, 1))
        parts.append(self.block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Ultralytics' fast pyramid of max pools."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = convolution(channels, channels // 2, 1, act="SiLU")
        self.last = convolution(channels * 2, channels, 1, act="SiLU")

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class PSA(nn.Module):
    """Ultralytics' C2PSA: attention with a positional depthwise convolution over half of the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.half, self.heads, self.size = half, 2, half // 2
        self.first, self.last = (
            convolution(channels, channels, 1, act="SiLU"),
            convolution(channels, channels, 1, act="SiLU"),
        )
        self.qkv, self.out = convolution(half, half * 2, 1, act=""), convolution(half, half, 1, act="")
        self.place = convolution(half, half, groups=half, act="")
        self.ffn = nn.Sequential(convolution(half, 2 * half, 1, act="SiLU"), convolution(2 * half, half, 1, act=""))

    def attention(self, x: Tensor) -> Tensor:
        """Returns attended pixels."""
        n, channels, height, width = x.shape
        keys = self.size // 2
        both = self.qkv(x).view(n, self.heads, keys * 2 + self.size, height * width)
        q, k, v = both.split([keys, keys, self.size], dim=2)
        weights = ((q.transpose(-2, -1) @ k) * keys**-0.5).softmax(dim=-1)
        y = (v @ weights.transpose(-2, -1)).view(n, channels, height, width)
        return self.out(y + self.place(v.reshape(n, channels, height, width)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns features."""
        a, b = self.first(x).split((self.half, self.half), dim=1)
        b = b + self.attention(b)
        b = b + self.ffn(b)
        return self.last(torch.cat((a, b), 1))


class Yolo(nn.Module):
    """A detector with two levels, a distribution of distances (DFL) and decoded boxes, as Ultralytics exports it."""

    def __init__(self, attention: bool = False, classes: int = 8) -> None:
        super().__init__()
        self.bins, self.classes = 16, classes
        self.a = nn.Sequential(
            convolution(3, 16, stride=2, act="SiLU"), convolution(16, 32, stride=2, act="SiLU"), C2f(32, 32)
        )
        self.b = nn.Sequential(convolution(32, 64, stride=2, act="SiLU"), C2f(64, 64))
        self.c = nn.Sequential(
            convolution(64, 64, stride=2, act="SiLU"), SPPF(64), *([PSA(64)] if attention else [C2f(64, 64)])
        )
        self.up, self.down = C2f(128, 64), C2f(128, 64)
        self.stride = convolution(64, 64, stride=2, act="SiLU")
        self.boxes, self.scores = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.boxes.append(nn.Sequential(convolution(64, 64, act="SiLU"), nn.Conv2d(64, 4 * self.bins, 1)))
            self.scores.append(nn.Sequential(convolution(64, 64, act="SiLU"), nn.Conv2d(64, classes, 1)))
        self.dfl = nn.Conv2d(self.bins, 1, 1, bias=False).requires_grad_(False)
        self.dfl.weight.data[:] = torch.arange(self.bins, dtype=torch.float32).view(1, self.bins, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns boxes and scores [n, 4 + classes, anchors]."""
        size = x.shape[2]
        x = self.a(x)
        middle = self.b(x)
        low = self.c(middle)
        fine = self.up(torch.cat([functional.interpolate(low, scale_factor=2.0), middle], 1))
        coarse = self.down(torch.cat([self.stride(fine), low], 1))
        levels, anchors, strides = [], [], []
        for index, level in enumerate((fine, coarse)):
            y = torch.cat((self.boxes[index](level), self.scores[index](level)), 1)
            levels.append(y.view(y.shape[0], 4 * self.bins + self.classes, -1))
            height, width = level.shape[2:]
            rows, columns = (torch.arange(side, dtype=torch.float32) + 0.5 for side in (height, width))
            grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), 0).reshape(2, -1)
            anchors.append(grid)
            strides.append(torch.full((1, height * width), float(size // height)))
        both = torch.cat(levels, 2)
        box, cls = both.split((4 * self.bins, self.classes), 1)
        n, _, count = box.shape
        box = self.dfl(box.view(n, 4, self.bins, count).transpose(2, 1).softmax(1)).view(n, 4, count)
        left, right = box.chunk(2, 1)
        grid, stride = torch.cat(anchors, 1)[None], torch.cat(strides, 1)
        first, last = grid - left, grid + right
        return torch.cat((torch.cat(((first + last) / 2, last - first), 1) * stride, cls.sigmoid()), 1)


def yolo_v8() -> nn.Module:
    """YOLOv8."""
    return Yolo()


def yolo_11() -> nn.Module:
    """YOLO11, with attention."""
    return Yolo(attention=True)


class EndToEnd(nn.Module):
    """A detector that chooses its boxes by their scores (Wang et al. 2024, YOLOv10), as Ultralytics exports it."""

    def __init__(self, network: Yolo, most: int = 20) -> None:
        super().__init__()
        self.network, self.most = network, most

    def forward(self, x: Tensor) -> Tensor:
        """Returns boxes, scores and classes [n, most, 6]."""
        outputs = self.network(x).transpose(1, 2)
        classes, number = self.network.classes, torch.arange(outputs.shape[0])[..., None]
        boxes, scores = outputs.split([4, classes], dim=-1)
        index = scores.amax(dim=-1).topk(self.most)[1].unsqueeze(-1)
        boxes = boxes.gather(dim=1, index=index.repeat(1, 1, 4))
        scores = scores.gather(dim=1, index=index.repeat(1, 1, classes))
        best, index = scores.flatten(1).topk(self.most)
        return torch.cat([boxes[number, index // classes], best[..., None], (index % classes)[..., None].float()], -1)


def yolo_v10() -> nn.Module:
    """YOLOv10, with its selection of boxes by TopK."""
    return EndToEnd(Yolo(attention=True))
