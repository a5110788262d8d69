"""Train DLRM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.recommenders.models.dlrm import DLRM
from zoo.recommenders.training import train as clicks
from zoo.recommenders.training.trainer import TrainConfig


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The recipe; bottom: outputs of the layers below the dot products."""

    embedding_size: int = 32
    bottom: tuple[int, ...] = (64,)


TRAIN = Settings()
FINETUNE = clicks.for_finetuning(TRAIN)


def train(data: Any, output: str | Path, *, config: Settings = TRAIN, **options: Any) -> dict[str, Any]:
    """Train on any click log; see `zoo.recommenders.training.train.train`."""
    return clicks.train(DLRM, data, output, config=config, **options)
