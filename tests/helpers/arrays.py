"""Random arrays."""

import functools

import numpy as np


def floats(rng, *shape, scale=1.0):
    """float32 of the normal distribution; `rng`: a generator, or its seed."""
    return (np.random.default_rng(rng).standard_normal(shape) * scale).astype(np.float32)


def normals(rng):
    """`floats` with one generator; `rng`: the generator, or its seed."""
    return functools.partial(floats, np.random.default_rng(rng))
