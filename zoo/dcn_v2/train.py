"""Train DCN-V2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo.recommenders.models.dcn_v2 import DCNv2
from zoo.recommenders.training import train as clicks
from zoo.recommenders.training.trainer import TrainConfig
from zoo.training.runs import FROM_0


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The recipe; layers: cross layers. rank: of their matrices, 0 for full ones (`layers` x width x width weights)."""

    embedding_size: int = 32
    l2_layers: float = 20.0
    layers: int = 2
    rank: int = 32
    ranges: ClassVar = {"rank": FROM_0}


TRAIN = Settings()
FINETUNE = clicks.for_finetuning(TRAIN)


def train(data: Any, output: str | Path, *, config: Settings = TRAIN, **options: Any) -> dict[str, Any]:
    """Train on any click log; see `zoo.recommenders.training.train.train`."""
    return clicks.train(DCNv2, data, output, config=config, **options)
