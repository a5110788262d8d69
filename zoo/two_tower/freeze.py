"""A trained two towers to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.recommenders.export import freeze as clicks
from zoo.recommenders.models.two_tower import TwoTower
from zoo.two_tower.train import Settings


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.recommenders.export.freeze.freeze`."""
    return clicks.freeze(folder, TwoTower, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.recommenders.training.train.started`."""
    return clicks.started(folder, TwoTower, Settings)
