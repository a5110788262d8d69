"""Graph rewrites of image classifiers: the shared ones, and folding of the input normalization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
from pipelines.rewrites.shared import SHARED


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """Returns the passes from fp32.onnx to rewritten.onnx, in order.

    Args:
        preprocessing: Not used.
    """
    return [FoldInputNormalization(), *(rewrite() for rewrite in SHARED)]
