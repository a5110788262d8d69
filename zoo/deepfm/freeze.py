"""A trained DeepFM to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.clicks import freeze as clicks
from zoo.deepfm.model import DeepFM
from zoo.deepfm.train import Settings


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.clicks.freeze.freeze`."""
    return clicks.freeze(folder, DeepFM, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.clicks.train.started`."""
    return clicks.started(folder, DeepFM, Settings)
