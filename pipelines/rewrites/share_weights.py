"""Stores equal weights once, as of layers that repeat (ALBERT)."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import query
from pipelines.rewrites.driver import Rewrite


class ShareWeights(Rewrite):
    """Replaces a constant of two dimensions or more by an earlier one of the same values: A = B, f(B) = f(A). Exact."""

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every repeated weight."""
        first: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        fired = 0
        for value in list(model.graph.initializers.values()):
            array = query.constant(value)
            if array is None or array.ndim < 2 or not value.consumers():
                continue
            kept = first.setdefault((str(array.dtype), array.shape, array.tobytes()), value)
            if kept is not value:
                value.replace_all_uses_with(kept)
                fired += 1
        return fired
