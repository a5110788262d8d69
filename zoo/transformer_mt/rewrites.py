"""Graph rewrites of the Transformer: so far the shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.rewrite import Rewrite
from pipelines.rewrites import SHARED


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """The passes from fp32.onnx to rewritten.onnx, in order."""
    return [each() for each in SHARED]
