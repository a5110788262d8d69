"""A trained DeepFM to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.deepfm.train import Settings
from zoo.recommenders.export import freeze as clicks
from zoo.recommenders.models.deepfm import DeepFM


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.recommenders.export.freeze.freeze`."""
    return clicks.freeze(folder, DeepFM, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.recommenders.training.train.started`."""
    return clicks.started(folder, DeepFM, Settings)
