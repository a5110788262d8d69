"""Graph rewrites of translation models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fold_scale import FoldScale
from pipelines.rewrites.merge_siblings import MergeSiblings
from pipelines.rewrites.shared import SHARED

OWN = (MergeSiblings, FoldBatchNorm)  # siblings are split; weights of RMS norms stay in the norms, as kernels fuse them


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """Returns the passes from fp32.onnx to rewritten.onnx, in order.

    Q, K and V of self-attention become one layer, and so do the keys and values of the source in all decoder layers: a
    call on one row costs more than its computation.

    Args:
        preprocessing: Features of the card; not used.
    """
    return [*(rewrite() for rewrite in SHARED if rewrite not in OWN), FoldScale(), MergeSiblings(split=True)]
