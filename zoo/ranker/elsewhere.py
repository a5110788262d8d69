"""What a model that comes as a graph cannot do here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """None."""


TRAIN = Settings()


def train(data: Any, output: str | Path, **options: Any) -> dict[str, Any]:
    """Raises RequestError: there is nothing to train."""
    raise RequestError(
        "a ranker is trained where it comes from; train one of deepfm, dcn-v2, dlrm, two-tower, wide-deep"
    )


def freeze(folder: str | Path) -> dict[str, Any]:
    """Raises RequestError: fp32.onnx came with the model."""
    raise RequestError(
        f"{folder} lacks its fp32.onnx; make it again with: zoo quantize RANKER.onnx --schema schema.json"
    )
