"""Graph rewrites of BERT-shaped networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fold_scale import FoldScale
from pipelines.rewrites.merge_siblings import MergeSiblings
from pipelines.rewrites.share_weights import ShareWeights
from pipelines.rewrites.shared import SHARED

OWN = (MergeSiblings, FoldBatchNorm)  # siblings are split; weights of RMS norms stay in the norms, as kernels fuse them


def passes(preprocessing: Mapping[str, Any] | None = None) -> list[Rewrite]:
    """Returns the rewrites from fp32.onnx to rewritten.onnx, in order; Q, K and V are merged into one layer.

    Args:
        preprocessing: Features of the card; merged weights of layers that repeat are stored once.
    """
    common: list[Rewrite] = [
        *(rewrite() for rewrite in SHARED if rewrite not in OWN),
        FoldScale(),
        MergeSiblings(split=True),
    ]
    repeats = ((preprocessing or {}).get("form") or {}).get("distinct_layers")
    return [*common, ShareWeights()] if repeats else common
