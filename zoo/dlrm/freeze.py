"""A trained DLRM to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.dlrm.train import Settings
from zoo.recommenders.export import freeze as clicks
from zoo.recommenders.models.dlrm import DLRM


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.recommenders.export.freeze.freeze`."""
    return clicks.freeze(folder, DLRM, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.recommenders.training.train.started`."""
    return clicks.started(folder, DLRM, Settings)
