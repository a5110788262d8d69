"""Whether the samples of a graph depend on each other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import query, reference_session

LARGEST = 0.01  # share of the power of results that rounding may change


def independent(model: ir.Model) -> bool:
    """Returns whether a batch of two random samples has the results of the single samples in ONNX Runtime.

    Args:
        model: QDQ model of any number of samples; other sizes of its inputs are fixed.
    """
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.inputs:
        shape = query.dimensions(value) or []
        samples = rng.normal(0, 1, (2, *(size or 1 for size in shape[1:])))
        is_bytes = value.dtype == ir.DataType.UINT8
        feeds[str(value.name)] = (
            rng.integers(0, 256, samples.shape, np.uint8) if is_bytes else samples.astype(np.float32)
        )
    try:
        opened = reference_session.session(model.clone(), "mapping it needs")
        both, *alone = (
            reference_session.run(opened, {name: samples[part] for name, samples in feeds.items()})
            for part in (slice(0, 2), slice(0, 1), slice(1, 2))
        )
    except RequestError:
        return False
    for together, *apart in zip(both, *alone, strict=True):
        expected = np.concatenate(apart) if together.ndim else together
        if together.shape != expected.shape:
            return False
        error = np.square(together.astype(np.float64) - expected).sum()
        if not error <= LARGEST * np.square(expected - expected.mean(dtype=np.float64)).sum():
            return False
    return True
