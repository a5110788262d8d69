"""A trained DCN-V2 to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.dcn_v2.train import Settings
from zoo.recommenders.export import freeze as clicks
from zoo.recommenders.models.dcn_v2 import DCNv2


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.recommenders.export.freeze.freeze`."""
    return clicks.freeze(folder, DCNv2, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.recommenders.training.train.started`."""
    return clicks.started(folder, DCNv2, Settings)
