"""Train Wide & Deep on any click log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.recommenders.models.wide_deep import WideDeep
from zoo.recommenders.training import train as clicks
from zoo.recommenders.training.trainer import TrainConfig


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The recipe; tables of 32 columns, as in the paper."""

    embedding_size: int = 32
    dropout: float = 0.3


TRAIN = Settings()
FINETUNE = clicks.for_finetuning(TRAIN)


def train(data: Any, output: str | Path, *, config: Settings = TRAIN, **options: Any) -> dict[str, Any]:
    """Train on any click log; see `zoo.recommenders.training.train.train`."""
    return clicks.train(WideDeep, data, output, config=config, **options)
