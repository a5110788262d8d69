"""A trained DLRM to fp32.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.clicks import freeze as clicks
from zoo.dlrm.model import DLRM
from zoo.dlrm.train import Settings


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.clicks.freeze.freeze`."""
    return clicks.freeze(folder, DLRM, Settings)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.clicks.train.started`."""
    return clicks.started(folder, DLRM, Settings)
