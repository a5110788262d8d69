"""Layers and networks of the native click kernels, random ones, and inputs for them."""

import itertools

import numpy as np

from pipelines.kernels.recommenders import native as kernels
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.operators import EmbeddingLayer, LinearLayer

RNG = np.random.default_rng(0)


def embedding(fields=3, rows=7, width=40, numbers=4, shift=None, wide=True, **changes):
    """A layer whose hidden values are spread over 0 to 255."""
    total, padded = fields * rows, -(-width // 64) * 64
    shift = shift if shift is not None else 14 if fields <= 30 else 10
    table = np.full((total, padded), 128, np.uint8)
    table[:, :width] = RNG.integers(1, 256, (total, width))
    spread = 2.0**shift * 73 * fields**0.5 + 2048 * 300 * numbers**0.5
    made = {
        "table": table,
        "columns": np.arange(fields, dtype=np.int32),
        "offsets": (np.arange(fields) * rows).astype(np.int32),
        "rows": np.full(fields, rows, np.int32),
        "weight": RNG.integers(-2000, 2001, (numbers, width)).astype(np.int16),
        "scale": (RNG.uniform(0.5, 1.5, width) * 100 / spread).astype(np.float32),
        "bias": RNG.normal(100, 50, width).astype(np.float32),
        "number_scale": np.full(numbers, 1024, np.float32),
        "shift": shift,
        "wide": RNG.standard_normal(total).astype(np.float32) if wide else None,
    }
    return EmbeddingLayer(**(made | changes))


def feeds(layer, count, dtype=np.int32):
    ids = RNG.integers(0, layer.rows, (count, layer.columns.size), dtype)
    return ids, RNG.uniform(-2.2, 2.2, (count, layer.number_scale.size)).astype(np.float32)


def dense(inputs, outputs, zero=3, low=0):
    weight = RNG.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    bias = RNG.integers(-10000, 10000, outputs).astype(np.int32)
    scale = (RNG.uniform(0.5, 1.5, outputs) * 100 / (127 * 110 * inputs**0.5)).astype(np.float32)
    return LinearLayer(weight, bias, scale, zero, low)


def same(found, expected):
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert (each.dtype, each.shape) == (wanted.dtype, wanted.shape)
        assert each.tobytes() == wanted.tobytes()


def network(isa, sizes=(65, 33, 9, 1), fields=5, numbers=3, wide=True, sigmoid=False):
    """(native network, the same by the reference)."""
    first = embedding(fields, 8, sizes[0], numbers, wide=wide)
    layers = [dense(a, b, low=3) for a, b in itertools.pairwise(sizes[:-1])] + [dense(sizes[-2], 1, None)]
    native = kernels.click_network(
        kernels.parallel_embedding(first, isa), [kernels.linear(each, isa) for each in layers], sigmoid
    )

    def expected(ids, x):
        value, total = reference.parallel_embedding(first, ids, x)
        for layer in layers:
            value = reference.linear(layer, value)
        return value + total if wide else value

    return first, native, expected


LAYER, DENSE = embedding(3, 7, 40, 4), dense(40, 9)
GOOD = feeds(LAYER, 5)
