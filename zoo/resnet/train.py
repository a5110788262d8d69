"""Train a ResNet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zoo.vision.models.resnet import build
from zoo.vision.training import initialization
from zoo.vision.training import train as images
from zoo.vision.training.config import FINETUNE, Settings

RESNET26D = Settings(arch="resnet26d")
RESNET50 = Settings(arch="resnet50")
FINETUNE_RESNET26D = replace(FINETUNE, arch="resnet26d")
FINETUNE_RESNET50 = replace(FINETUNE, arch="resnet50")


def train(data: Any, output: str | Path, *, config: Settings = RESNET26D, **options: Any) -> dict[str, Any]:
    """Train a ResNet by the recipe of the image classifiers; see `zoo.vision.training.train.fit`."""
    return images.fit(lambda settings, classes: build(settings.arch, classes), data, output, config=config, **options)


def network(folder: Path) -> tuple[dict[str, Any], nn.Module]:
    """The trained network of a model folder; see `zoo.vision.training.initialization.network`."""
    return initialization.network(folder, build)
