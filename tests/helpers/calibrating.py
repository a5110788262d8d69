"""A small network to calibrate, and samples for it."""

import numpy as np

from helpers.arrays import normals
from helpers.rewriting import model

MLP = "(float[n,4] x, int64[n] i) => (float[n,3] y) { e = Gather(T, i) a = Add(x, e) h = MatMul(a, w) r = Relu(h) y = Mul(r, two) }"
WEIGHTS = {
    "T": normals(0)(9, 4),
    "w": normals(2)(4, 3),
    "two": np.float32(2),
}


def mlp():
    return model(MLP, **WEIGHTS)


def samples(rng, count=100):
    return {"x": rng.standard_normal((count, 4)).astype(np.float32), "i": rng.integers(0, 9, count)}


def cut(batch, *sizes):
    ends = np.cumsum(sizes)[:-1]
    return [
        dict(zip(batch, parts, strict=True))
        for parts in zip(*(np.split(array, ends) for array in batch.values()), strict=True)
    ]


DOUBLE = "(float[{},4] x) => (float[{},4] y) {{ y = Mul(x, two) }}"
