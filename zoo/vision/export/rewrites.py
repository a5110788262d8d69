"""Graph rewrites of the image classifiers: the shared ones, and uint8 pixels into the first convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
from pipelines.rewrites.shared import SHARED


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """The passes from fp32.onnx to rewritten.onnx, in order."""
    return [FoldInputNormalization(), *(each() for each in SHARED)]
