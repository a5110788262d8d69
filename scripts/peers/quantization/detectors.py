"""Writes a detector and a segmentation as files of other people are, for `own-models`: .onnx, .calib.npz, .test.npz.

yolov8n-shaped: the layers of YOLOv8n (Jocher et al. 2023: C2f, SPPF, a neck of two resolutions up and down, a head
whose boxes are expectations over 16 bins, Li et al. 2020) on 320 x 320 pixels; segmentation-shaped: five convolutions,
the classes resized to the image. Weights are random: speed is measured, and how near int8 is to float.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipelines.data.preprocess import Preprocess
from scripts.peers import harness
from scripts.peers.vision.float_networks import first_photos, obvious

CLASSES, BINS, SIZE = 80, 16, 320
CALIBRATED, TESTED = 64, 32  # photos
SPEC = Preprocess.from_json({"size": SIZE, "resize": SIZE, "mean": [0, 0, 0], "std": [1, 1, 1], "channels": "RGB"})


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """Returns a convolution with batch norm and SiLU."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class C2f(nn.Module):
    """Passes half of the channels through `count` bottlenecks and concatenates all results."""

    def __init__(self, inputs: int, outputs: int, count: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        half, self.shortcut = outputs // 2, shortcut
        self.first, self.last = conv(inputs, outputs), conv(outputs + count * half, outputs)
        self.inner = nn.ModuleList(nn.Sequential(conv(half, half, 3), conv(half, half, 3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, outputs, h, w] of [n, inputs, h, w]."""
        parts = list(self.first(x).chunk(2, 1))
        for layer in self.inner:
            parts.append(parts[-1] + layer(parts[-1]) if self.shortcut else layer(parts[-1]))
        result: torch.Tensor = self.last(torch.cat(parts, 1))
        return result


class SPPF(nn.Module):
    """Concatenates an input and three max pools in a row."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.pool, self.last = (
            conv(channels, channels // 2),
            nn.MaxPool2d(5, 1, 2),
            conv(2 * channels, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, channels, h, w] of the same."""
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        result: torch.Tensor = self.last(torch.cat(parts, 1))
        return result


class Detector(nn.Module):
    """YOLOv8n's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, 16, 3, 2), conv(16, 32, 3, 2), C2f(32, 32), conv(32, 64, 3, 2), C2f(64, 64, 2)
        )
        self.middle = nn.Sequential(conv(64, 128, 3, 2), C2f(128, 128, 2))
        self.deep = nn.Sequential(conv(128, 256, 3, 2), C2f(256, 256), SPPF(256))
        self.larger = nn.Upsample(scale_factor=2, mode="nearest")
        self.up, self.top = C2f(384, 128, shortcut=False), C2f(192, 64, shortcut=False)
        self.down = nn.ModuleList([conv(64, 64, 3, 2), conv(128, 128, 3, 2)])
        self.out = nn.ModuleList([C2f(192, 128, shortcut=False), C2f(384, 256, shortcut=False)])
        self.boxes = nn.ModuleList(self._head(width, 64, 4 * BINS) for width in (64, 128, 256))
        self.scores = nn.ModuleList(self._head(width, CLASSES, CLASSES) for width in (64, 128, 256))
        sides = [SIZE // stride for stride in (8, 16, 32)]
        centres = [torch.stack(torch.meshgrid(*[torch.arange(side) + 0.5] * 2, indexing="xy")) for side in sides]
        self.register_buffer("anchors", torch.cat([centre.flatten(1) for centre in centres], 1))
        strides = torch.tensor([8.0, 16.0, 32.0]).repeat_interleave(torch.tensor([side**2 for side in sides]))
        self.register_buffer("strides", strides)
        self.register_buffer("bins", torch.arange(float(BINS)).view(1, BINS, 1, 1))

    @staticmethod
    def _head(inputs: int, width: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(conv(inputs, width, 3), conv(width, width, 3), nn.Conv2d(width, outputs, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns centres, sizes and scores [n, 4 + CLASSES, places] of float32 [n, 3, SIZE, SIZE]."""
        high = self.stem(x)
        middle = self.middle(high)
        deep = self.deep(middle)
        up = self.up(torch.cat([self.larger(deep), middle], 1))
        top = self.top(torch.cat([self.larger(up), high], 1))
        lower = self.out[0](torch.cat([self.down[0](top), up], 1))
        lowest = self.out[1](torch.cat([self.down[1](lower), deep], 1))
        maps = zip(self.boxes, self.scores, (top, lower, lowest), strict=True)
        flat = torch.cat([torch.cat([box(level), score(level)], 1).flatten(2) for box, score, level in maps], 2)
        boxes, scores = flat.split((4 * BINS, CLASSES), 1)
        shares = boxes.view(len(x), 4, BINS, -1).transpose(1, 2).softmax(1)
        sides = (shares * self.bins).sum(1)
        first, last = self.anchors - sides[:, :2], self.anchors + sides[:, 2:]
        return torch.cat([torch.cat([(first + last) / 2, last - first], 1) * self.strides, scores.sigmoid()], 1)


class Segmentation(nn.Module):
    """Classes of every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2), conv(64, 64, 3))
        self.classes = nn.Conv2d(64, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, 5, SIZE, SIZE] of float32 [n, 3, SIZE, SIZE]."""
        return nn.functional.interpolate(self.classes(self.layers(x)), scale_factor=8, mode="bilinear")


def drawn(network: nn.Module) -> nn.Module:
    """Draws statistics and scales of the batch norms, so that none is at 0 and 1."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.8, 1.6)
    return network.eval()


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", required=True, metavar="DIR", help=f"{CALIBRATED + TESTED} or more photos")


def measure(args: Any) -> None:
    """Writes the models and their samples."""
    photos = first_photos(args.photos, CALIBRATED + TESTED)
    x = np.concatenate([obvious(photo.read_bytes(), SPEC) for photo in photos]) / np.float32(255)
    networks: dict[str, Any] = {"yolov8n-shaped": Detector, "segmentation-shaped": Segmentation}
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, network in networks.items():
        torch.manual_seed(0)
        path, example = args.folder / f"{name}.onnx", torch.zeros(1, 3, SIZE, SIZE)
        names = {"input_names": ["images"], "output_names": ["found"]}
        torch.onnx.export(drawn(network()), (example,), path, dynamo=False, **names)
        np.savez(path.with_suffix(".calib.npz"), images=x[:CALIBRATED])
        np.savez(path.with_suffix(".test.npz"), images=x[CALIBRATED:])
        print(path)
