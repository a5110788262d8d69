"""The self-check of int8 sums on this CPU."""

import pytest
from helpers.rewriting import EXACT

from pipelines.analysis import selfcheck
from pipelines.engines.stock import STOCK


@pytest.mark.parametrize("engine", list(STOCK))
def test_reduced_range_is_right_on_every_cpu(engine):
    assert 0 < selfcheck.largest_error(engine, reduced_range=True) < 0.02


@pytest.mark.parametrize("engine", EXACT)
def test_full_range_is_right_where_sums_are_exact(engine):
    assert 0 < selfcheck.largest_error(engine) < 0.01


def test_the_layer_would_saturate_sums_of_16_bits(monkeypatch):
    """What a CPU without VNNI computes: pairs of products, added with saturation."""
    import numpy as np

    from pipelines.graph import io, query

    seen = {}

    class Saturating:
        def __init__(self, path, engine):
            self.weights = {k: query.constant(v) for k, v in io.load(path).graph.initializers.items()}

        def run(self, feeds):
            weights = {name.split("/")[-1]: array for name, array in self.weights.items()}
            scale, zero = weights["x.scale"], int(weights["x.zero_point"])
            x = np.clip(np.rint(feeds["x"] / scale) + zero, 0, 255).astype(np.int64)
            w = weights["w.quantized"].astype(np.int64)
            products = x[:, :, None] * w[None]
            pairs = products.reshape(len(x), -1, 2, w.shape[1]).sum(axis=2)
            seen["clipped"] = (np.abs(pairs) > 2**15 - 1).mean()
            return {"y": np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=1) * (scale * weights["w.scale"])}

    monkeypatch.setattr(selfcheck, "load", Saturating)
    assert selfcheck.largest_error("any") > 0.1 and seen["clipped"] > 0.5
    assert selfcheck.largest_error("any", reduced_range=True) < 0.02 and seen["clipped"] == 0
