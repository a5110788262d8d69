"""Train two towers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo.recommenders.models.two_tower import TwoTower
from zoo.recommenders.training import train as clicks
from zoo.recommenders.training.trainer import TrainConfig
from zoo.training.runs import FROM_0


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The recipe; tower_size: of the vectors. softmax: the weight of the batch softmax against the click. temperature:
    what its scores are divided by.
    """

    embedding_size: int = 32
    tower_size: int = 64
    softmax: float = 0.01
    temperature: float = 0.1
    ranges: ClassVar = {"softmax": FROM_0}


TRAIN = Settings()
FINETUNE = clicks.for_finetuning(TRAIN)


def train(data: Any, output: str | Path, *, config: Settings = TRAIN, **options: Any) -> dict[str, Any]:
    """Train on any click log; see `zoo.recommenders.training.train.train`."""
    return clicks.train(TwoTower, data, output, config=config, **options)
