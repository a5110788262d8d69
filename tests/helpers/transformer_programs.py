"""Arrays and layers of the native Transformer, and equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.arrays import floats
from pipelines.kernels import extension
from pipelines.kernels.transformer.operations import RowLinear

every_isa = pytest.mark.parametrize("isa", extension.isas() or ["none"])


def dense(rng, inputs, outputs, scale=1.0, qparams=None):
    weight = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    return RowLinear(
        weight,
        (rng.uniform(0.5, 1.5, outputs) * scale / (73 * inputs**0.5)).astype(np.float32),
        floats(rng, outputs, scale=0.1),
        qparams,
    )


def same(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
