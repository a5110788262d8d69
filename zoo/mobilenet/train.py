"""Train a MobileNet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zoo.vision.models.mobilenet import build
from zoo.vision.training import initialization
from zoo.vision.training import train as images
from zoo.vision.training.config import FINETUNE, Settings

# Small nets underfit in few epochs: no epoch at half size, where the last maps of small images have one pixel, and
# small batches.
V1 = Settings(arch="mobilenet-v1", epochs=30, progressive=(0.75,), progressive_epochs=0.33, batch_size=128)
V2 = replace(V1, arch="mobilenet-v2")
FINETUNE_V1 = replace(FINETUNE, arch="mobilenet-v1")
FINETUNE_V2 = replace(FINETUNE, arch="mobilenet-v2")


def train(data: Any, output: str | Path, *, config: Settings = V1, **options: Any) -> dict[str, Any]:
    """Train a MobileNet by the recipe of the image classifiers; see `zoo.vision.training.train.fit`."""

    def network(settings: Settings, classes: int) -> nn.Module:
        return build(settings.arch, classes, settings.width)

    return images.fit(network, data, output, config=config, **options)


def network(folder: Path) -> tuple[dict[str, Any], nn.Module]:
    """The trained network of a model folder; see `zoo.vision.training.initialization.network`."""
    return initialization.network(folder, build)
