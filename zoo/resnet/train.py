"""Train a ResNet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zoo.images import start
from zoo.images import train as images
from zoo.images.settings import FINETUNE, Settings
from zoo.resnet.model import build

RESNET26D = Settings(arch="resnet26d")
RESNET50 = Settings(arch="resnet50")
FINETUNE_RESNET26D = replace(FINETUNE, arch="resnet26d")
FINETUNE_RESNET50 = replace(FINETUNE, arch="resnet50")


def train(data: Any, output: str | Path, *, config: Settings = RESNET26D, **options: Any) -> dict[str, Any]:
    """Train a ResNet by the recipe of the image classifiers; see `zoo.images.train.fit`."""
    return images.fit(lambda settings, classes: build(settings.arch, classes), data, output, config=config, **options)


def network(folder: Path) -> tuple[dict[str, Any], nn.Module]:
    """The trained network of a model folder; see `zoo.images.start.network`."""
    return start.network(folder, build)
